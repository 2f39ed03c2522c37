"""What of one graph was captured, and what could not be: by mode and size.

In:  `CapturedSize`s, and errors.
Out: what serves a batch of one size in one mode, or why nothing does.
Knows nothing of how sizes are captured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.budget import Estimate
from piecewise_backend.capture_request import CapturedSize
from piecewise_backend.costs import NOTHING, CaptureCost, MemoryUse
from piecewise_backend.statistics import Tally

Key = tuple[CUDAGraphMode, int, int]
"""A mode, a capture size, and a number of active adapters."""


class CapturedSizes:
    """Captures of pieces and of whole steps."""

    def __init__(self) -> None:
        self.sizes: dict[int, CapturedSize] = {}
        """Captured piece by piece."""
        self.steps: dict[tuple[int, int], CapturedSize] = {}
        """Captured as whole steps, by size and number of adapters."""
        self.prepared: dict[Any, tuple[Callable[..., Any], tuple[Any, ...], Tally]] = {}
        """By symbol values, and facts if some are stated: a plan, the views that it needs for
        them, and where its replays are counted."""
        self.failed: dict[int, str] = {}
        """Sizes whose capture failed, with the error; tried again after the next warm-up."""
        self.failed_steps: dict[tuple[int, int], str] = {}
        """The same of whole steps."""
        self.costs: dict[Key, CaptureCost] = {}
        """What each capture that is kept took, in the order of the captures."""
        self.memory_use = NOTHING
        """What they and those that were given up took together and did not give back, as far as it
        was measured."""
        self.reusable_bytes = 0
        """Part of it: what the driver keeps of graphs that were given up, for graphs to come."""
        self.estimates: dict[CUDAGraphMode, Estimate] = {}
        """What warm-up expected all sizes of a mode to take, or those that fit the budget."""

    def keep(self, captured: CapturedSize, cost: CaptureCost) -> None:
        """Add a capture."""
        mode, size, num_active_loras = cost.mode, cost.size, cost.num_active_loras
        if mode is CUDAGraphMode.FULL:
            self.steps[size, num_active_loras] = captured
        else:
            self.sizes[size] = captured
        self.costs[mode, size, num_active_loras] = cost
        self.memory_use += cost.memory
        self.reusable_bytes -= self._reused_by(cost)
        self.prepared.clear()  # there may be better graphs for a batch now

    def _reused_by(self, cost: CaptureCost) -> int:
        """Bytes by which a capture took less than expected, as it found some."""
        if (estimate := self.estimates.get(cost.mode)) is None:
            return self.reusable_bytes  # nobody knows: perhaps all
        found = max(estimate.bytes_per_size - cost.memory.driver_bytes, 0)
        return min(found, self.reusable_bytes)

    @property
    def bytes_in_use(self) -> int:
        """What the captures that are kept take."""
        return self.memory_use.num_bytes - self.reusable_bytes

    def memory_by_size(self, mode: CUDAGraphMode) -> dict[int, MemoryUse]:
        """What captures of a mode took, in their order; all numbers of adapters together."""
        found: dict[int, MemoryUse] = {}
        for cost in self.costs.values():
            if cost.mode is mode:
                found[cost.size] = found.get(cost.size, NOTHING) + cost.memory
        return found

    def remove(self, mode: CUDAGraphMode, sizes: Collection[int]) -> int:
        """Give captures up; returns the bytes that the driver held for them."""
        driver_bytes = 0
        for key in [key for key in self.costs if key[0] is mode and key[1] in sizes]:
            driver_bytes += self.costs.pop(key).memory.driver_bytes
            if mode is CUDAGraphMode.FULL:
                self.steps.pop(key[1:], None)
            else:
                self.sizes.pop(key[1], None)
        self.prepared.clear()
        return driver_bytes

    def fail(self, mode: CUDAGraphMode, size: int, num_active_loras: int, error: str) -> None:
        """Remember why there is no capture."""
        if mode is CUDAGraphMode.FULL:
            self.failed_steps[size, num_active_loras] = error
        else:
            self.failed[size] = error

    def find(self, mode: CUDAGraphMode, size: int, num_active_loras: int) -> CapturedSize | None:
        """What was captured in a mode at a size."""
        if mode is CUDAGraphMode.FULL:
            return self.steps.get((size, num_active_loras))
        return self.sizes.get(size)

    def error_of(self, mode: CUDAGraphMode, size: int, num_active_loras: int) -> str | None:
        """Why there is no such capture, if it failed."""
        if mode is CUDAGraphMode.FULL:
            return self.failed_steps.get((size, num_active_loras))
        return self.failed.get(size)

    def disable(
        self, mode: CUDAGraphMode, size: int, num_active_loras: int, fault: str, is_padded: bool
    ) -> None:
        """Serve nothing from a capture any more; or, if padding is the fault, nothing padded."""
        captures: dict[Any, CapturedSize] = self.sizes
        key: Any = size
        if mode is CUDAGraphMode.FULL:
            captures, key = self.steps, (size, num_active_loras)
        if is_padded:
            captures[key] = dataclasses.replace(captures[key], padding_fault=fault)
            return
        del captures[key]
        self.memory_use -= self.costs.pop((mode, size, num_active_loras)).memory
        self.fail(mode, size, num_active_loras, fault)

    def clear_steps(self) -> None:
        """No whole step is captured."""
        self.steps.clear()
        self.prepared.clear()
        self.estimates.pop(CUDAGraphMode.FULL, None)
        for key in [key for key in self.costs if key[0] is CUDAGraphMode.FULL]:
            self.memory_use -= self.costs.pop(key).memory

    def clear(self) -> None:
        """Nothing is captured, and nothing has failed."""
        self.sizes.clear()
        self.steps.clear()
        self.prepared.clear()
        self.failed.clear()
        self.failed_steps.clear()
        self.costs.clear()
        self.memory_use = NOTHING
        self.reusable_bytes = 0
        self.estimates.clear()
