"""What of one graph was captured, and what could not be: by mode and size.

In:  `CapturedSize`s, and errors.
Out: what serves a batch of one size in one mode, or why nothing does.
Knows nothing of how sizes are captured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from piecewise_backend.batch import BatchDescriptor, CUDAGraphMode
from piecewise_backend.budget import Estimate
from piecewise_backend.capture_request import CapturedSize
from piecewise_backend.costs import NOTHING, CaptureCost, MemoryUse
from piecewise_backend.dispatch import STATIC_SIZE, Dispatcher
from piecewise_backend.statistics import Tally

Key = tuple[CUDAGraphMode, int, int]
"""A mode, a capture size, and a number of active adapters."""


class CapturedSizes:
    """Captures of pieces and of whole steps."""

    def __init__(self, dispatcher: Dispatcher, is_varying: bool) -> None:
        """Nothing yet.

        Args:
            dispatcher: with all sizes.
            is_varying: the graph has a token dimension.
        """
        self.dispatcher = dispatcher
        """Less the sizes that are not to have graphs of this instance."""
        self._is_varying = is_varying
        self.captured: dict[Key, CapturedSize] = {}
        """What serves, in the order of the captures."""
        self.costs: dict[Key, CaptureCost] = {}
        """What each of them took."""
        self.errors: dict[Key, str] = {}
        """Why there is no capture: it failed, or is wrong. Tried again by the next warm-up."""
        self.prepared: dict[Any, tuple[Callable[..., Any], tuple[Any, ...], Tally]] = {}
        """By symbol values, and by what kind of batch is stated if one is: a plan, the views that
        it needs for them, and where its replays are counted."""
        self.estimates: dict[CUDAGraphMode, Estimate] = {}
        """What warm-up expected all sizes of a mode to take when it captured the first of them."""
        self.tuned: set[int] = set()
        """Sizes at which pieces were tuned."""
        self._held_bytes: dict[Key, int] = {}
        self._most_held_bytes: dict[CUDAGraphMode, int] = {}

    def has(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> bool:
        """It is captured, or is known not to be possible, or is not to be."""
        size = descriptor.num_tokens if self._is_varying else STATIC_SIZE
        key = (mode, size, descriptor.num_active_loras)
        is_left_out = (mode, size) in self.dispatcher.left_out
        return is_left_out or key in self.captured or key in self.errors

    def try_all_again(self) -> None:
        """Whatever was left out, or could not be captured, may be captured."""
        self.dispatcher = self.dispatcher.with_all_sizes()
        self.errors.clear()
        self.prepared.clear()

    def keep(self, captured: CapturedSize, cost: CaptureCost, held_bytes: int) -> None:
        """Add a capture.

        Args:
            held_bytes: what the driver holds for it, new or used again.
        """
        key = (cost.mode, cost.size, cost.num_active_loras)
        self.captured[key], self.costs[key], self._held_bytes[key] = captured, cost, held_bytes
        self._most_held_bytes[cost.mode] = max(held_bytes, self._most_held_bytes.get(cost.mode, 0))
        self.prepared.clear()  # there may be better graphs for a batch now

    def keys_of(self, mode: CUDAGraphMode, sizes: Collection[int] | None = None) -> list[Key]:
        """Of what was captured in a mode, at some sizes or at all."""
        return [k for k in self.captured if k[0] is mode and (sizes is None or k[1] in sizes)]

    def sizes_of(self, mode: CUDAGraphMode) -> tuple[int, ...]:
        """The sizes that were captured in a mode, descending."""
        return tuple(sorted({size for _, size, _ in self.keys_of(mode)}, reverse=True))

    def memory_by_size(self, mode: CUDAGraphMode) -> dict[int, MemoryUse]:
        """What captures of a mode took, in their order; all numbers of adapters together."""
        found: dict[int, MemoryUse] = {}
        for key in self.keys_of(mode):
            found[key[1]] = found.get(key[1], NOTHING) + self.costs[key].memory
        return found

    def expected_driver_bytes(self, mode: CUDAGraphMode) -> int | None:
        """What a size of a mode takes outside of the pool if nothing is used again, as far as is
        known."""
        if (estimate := self.estimates.get(mode)) is not None:
            return estimate.bytes_per_size
        return self._most_held_bytes.get(mode)

    def remove(self, keys: Collection[Key]) -> int:
        """Forget captures; returns the bytes that the driver held for them."""
        self.prepared.clear()
        for key in keys:
            del self.captured[key], self.costs[key]
        return sum(self._held_bytes.pop(key) for key in keys)

    def allow_no_padding(self, key: Key, fault: str) -> None:
        """Serve only batches of the very size from a capture."""
        self.captured[key] = dataclasses.replace(self.captured[key], padding_fault=fault)
