"""The captured sizes of one graph, and the memory they share.

In:  a compiled graph, options, and a call to capture for.
Out: `CapturedSize`s, kept until something they read in place has moved.
Knows nothing of dispatch.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecewise_backend.batch import CUDAGraphMode, PaddingTable
from piecewise_backend.buffers import Arena
from piecewise_backend.capture import CapturedSize, CaptureRequest, capture_size
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.compiler import Call
from piecewise_backend.config import Config
from piecewise_backend.errors import CaptureError
from piecewise_backend.graphs import (
    CudaGraphPool,
    EmulatedGraphPool,
    GraphPool,
    collector_paused,
    one_capture,
)
from piecewise_backend.sizes import Sizes
from piecewise_backend.static_inputs import StaticInputs

# A small tensor that moves again and again is a new argument by another name: copy it.
_MAX_COPIED_BYTES = 16 * 2**20

OF_ANOTHER_INSTANCE = (
    "the call is of another instance of the model, or of one whose weights or caches were replaced"
)
"""Why captures that exist do not serve a call of a sealed model."""


class Captures:
    """Captures sizes on demand into one pool, over one set of static buffers.

    They belong to the parameters that they read in place: to one instance of a model. When all
    of those are gone the memory is given back.
    """

    def __init__(self, graph: CompiledGraph, config: Config) -> None:
        self.graph = graph
        self.config = config
        self.sizes: dict[int, CapturedSize] = {}
        self.prepared: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        """By symbol values: a plan, and the views that it needs for them."""
        self.failed: dict[int, str] = {}
        """Sizes whose capture failed, with the error; tried again after the next warm-up."""
        self.hits: dict[int, int] = {}
        """Calls at each size before its capture."""
        self.seconds = 0.0
        self._make_pool = _pool_maker(graph.device, config)
        # Made with the first capture: this object may be made, and cleared, while the collector
        # runs in the middle of a capture of somebody else's.
        self._pool: GraphPool | None = None
        self._arena = Arena(graph.device)
        self._static_inputs: StaticInputs | None = None
        self._addresses: dict[int, int] = {}
        self._owners: dict[int, weakref.ref[torch.Tensor]] = {}
        self._moves: dict[int, int] = {}
        self._tried: set[Call] = set()

    @property
    def is_possible(self) -> bool:
        """Graphs exist for the device and are wanted."""
        return self._make_pool is not None

    def capture(
        self, size: int, args: Sequence[Any], sizes: Sizes, table: PaddingTable
    ) -> CapturedSize:
        """Capture one size and keep it.

        Args:
            size: the capture size; what `table` pads the call to.
            args: the arguments of a call with symbol values `sizes`.

        Raises:
            CaptureError: a piece cannot be recorded; the size is noted as failed, others stay.
        """
        started = time.perf_counter()
        if self._addresses and self._moved(args):
            self.forget(args)
        try:
            with one_capture, collector_paused():
                captured = capture_size(self._request(size, args, sizes, table))
        except CaptureError as error:
            self.failed[size] = str(error)
            raise
        self.sizes[size] = captured
        self.seconds += time.perf_counter() - started
        return captured

    def buffers(self, padded: Sizes, sizes: Sizes) -> dict[str, torch.Tensor]:
        """What graphs read the copied arguments from: the rows of a batch, by argument."""
        if self._static_inputs is None:
            return {}
        rows = {}
        for position in self._static_inputs.staged:
            item = self.graph.split.inputs[position]
            buffer = self._static_inputs.buffer(position, padded)
            rows[item.source] = self.graph.layouts[item.name].rows(buffer, sizes)
        return rows

    def forget(self, args: Sequence[Any]) -> None:
        """Something that graphs read in place lies elsewhere in this call: drop them all.

        A parameter that moved was replaced and will stay. Other small tensors that move a
        second time are copied like arguments from then on.
        """
        for position in self._moved(args):
            self._moves[position] = self._moves.get(position, 0) + 1
        self._clear()
        self._addresses, self._owners = {}, {}

    @property
    def bound(self) -> tuple[int, ...]:
        """Positions of the inputs that graphs read where they were at capture."""
        return tuple(self._addresses)

    def fit(self, args: Sequence[Any]) -> bool:
        """Everything that graphs read in place lies where it was at capture."""
        return bool(self._addresses) and not self._moved(args)

    def do_not_fit(self, args: Sequence[Any]) -> bool:
        """Something lies elsewhere."""
        return bool(self._moved(args))

    def belong_to(self, args: Sequence[Any]) -> bool:
        """The call is one of the instance that they were captured for, moved or not."""
        owners = {position: owner() for position, owner in self._owners.items()}
        alive = {position: owner for position, owner in owners.items() if owner is not None}
        return bool(alive) and all(args[position] is owner for position, owner in alive.items())

    def belong_to_another(self, args: Sequence[Any]) -> bool:
        """The call is one of another instance of the model, or with another large cache."""
        owners = {position: self._owners[position]() for position in self._moved(args)}
        return any(
            owner is not None and owner is not args[position] and not _is_copied(args[position])
            for position, owner in owners.items()
        )

    @property
    def are_alive(self) -> bool:
        """Some parameter or cache that they read still exists."""
        return any(owner() is not None for owner in self._owners.values())

    def _clear(self) -> None:
        self.sizes.clear()
        self.prepared.clear()
        self.failed.clear()
        self.hits.clear()
        self._static_inputs = None
        self._arena = Arena(self.graph.device)
        self._pool = None  # one whose last graph is gone takes no other

    def _bind(self, args: Sequence[Any], positions: Sequence[int]) -> None:
        this = weakref.ref(self)

        def on_death(_: object) -> None:
            captures = this()
            if captures is not None and not captures.are_alive:
                captures._clear()

        self._addresses = {i: args[i].data_ptr() for i in positions}
        self._owners = {i: weakref.ref(args[i], on_death) for i in positions}

    def _moved(self, args: Sequence[Any]) -> list[int]:
        return [i for i, address in self._addresses.items() if args[i].data_ptr() != address]

    def _copied(self, args: Sequence[Any]) -> frozenset[int]:
        return frozenset(
            position
            for position, moves in self._moves.items()
            if moves > 1 and _is_copied(args[position])
        )

    def _request(
        self, size: int, args: Sequence[Any], sizes: Sizes, table: PaddingTable
    ) -> CaptureRequest:
        token_dim = self.graph.token_dim
        largest = token_dim.padded(sizes, table.largest)
        if self._static_inputs is None:
            self._static_inputs = StaticInputs.of(
                self.graph, self._arena, largest, self._copied(args)
            )
            self._bind(args, self._static_inputs.bound)
        fewest = table.smallest_padded(size) if token_dim.tokens else size
        assert self._make_pool is not None
        self._pool = self._pool or self._make_pool(self.graph.device)
        return CaptureRequest(
            graph=self.graph,
            pool=self._pool,
            arena=self._arena,
            static_inputs=self._static_inputs,
            args=args,
            sizes=token_dim.padded(sizes, size),
            fewest=token_dim.padded(sizes, fewest),
            half=token_dim.padded(sizes, max(size // 2, 1)),
            tried=self._tried,
            largest=largest,
            num_warmups=self.config.cudagraph_num_of_warmups,
            has_static_outputs=self.config.outputs == "static",
        )


def _is_copied(tensor: torch.Tensor) -> bool:
    """May be copied, should it move again and again."""
    return not isinstance(tensor, torch.nn.Parameter) and tensor.nbytes <= _MAX_COPIED_BYTES


def _pool_maker(device: torch.device, config: Config) -> Callable[[torch.device], GraphPool] | None:
    """What makes graphs for a device, if they are wanted and exist."""
    if config.cudagraph_mode is CUDAGraphMode.NONE:
        return None
    if config.graph_impl == "emulated":
        return EmulatedGraphPool
    return CudaGraphPool if device.type == "cuda" else None
