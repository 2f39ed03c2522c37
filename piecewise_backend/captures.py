"""The captured sizes of one graph, and the memory they share.

In:  a compiled graph, options, and a call to capture for.
Out: `CapturedSize`s, kept until something they read in place has moved.
Knows nothing of dispatch.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from piecewise_backend.batch import BatchDescriptor, CUDAGraphMode, PaddingTable
from piecewise_backend.bound_inputs import BoundInputs
from piecewise_backend.buffers import Arena
from piecewise_backend.capture import capture_size
from piecewise_backend.capture_request import CapturedSize, CaptureRequest
from piecewise_backend.capture_step import capture_step
from piecewise_backend.captured_sizes import CapturedSizes, Key
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.compiler import Call
from piecewise_backend.config import Config
from piecewise_backend.costs import CaptureCost, MemoryUse, mib
from piecewise_backend.errors import CaptureError
from piecewise_backend.graphs import GraphPool, collector_paused, one_capture
from piecewise_backend.pools import (
    TrialPool,
    empty_cache,
    memory_limit_of,
    meter_of,
    pool_maker,
)
from piecewise_backend.sizes import Sizes
from piecewise_backend.static_inputs import StaticInputs

OF_ANOTHER_INSTANCE = (
    "the call is of another instance of the model, or of one whose weights or caches were replaced"
)
"""Why captures that exist do not serve a call of a sealed model."""


class Captures(CapturedSizes):
    """Captures sizes on demand into one pool, over one set of static buffers.

    They belong to the parameters that they read in place: to one instance of a model. When all
    of those are gone the memory is given back.
    """

    def __init__(
        self, graph: CompiledGraph, config: Config, mode: CUDAGraphMode, largest: int
    ) -> None:
        """No graphs yet.

        Args:
            mode: what the option for it became for this graph.
            largest: of all capture sizes, for which buffers are made.
        """
        self.graph = graph
        self.config = config
        self.mode = mode
        super().__init__()
        self.hits: dict[int, int] = {}
        """Calls at each size before its capture."""
        self.seconds = 0.0
        self.bound = BoundInputs()
        self._largest = largest
        self._has_steps = CUDAGraphMode.FULL in (mode.for_decode, mode.for_mixed)
        self._make_pool = pool_maker(graph.device, config)
        self._meter = meter_of(graph.device, config)
        self.memory_limit = memory_limit_of(graph.device, config)
        """Most bytes that the captures may take."""
        # Made with the first capture: this object may be made, and cleared, while the collector
        # runs in the middle of a capture of somebody else's.
        self._pool: GraphPool | None = None
        self._arena = Arena(graph.device)
        self._static_inputs: StaticInputs | None = None
        self._tried: set[Call] = set()

    def empty(self) -> Captures:
        """The same without graphs, for another instance of the model."""
        return type(self)(self.graph, self.config, self.mode, self._largest)

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
        return self._keep(
            (CUDAGraphMode.PIECEWISE, size, 0),
            args,
            lambda: capture_size(self._request(size, args, sizes, table)),
        )

    def capture_step(
        self, descriptor: BatchDescriptor, args: Sequence[Any], sizes: Sizes, table: PaddingTable
    ) -> CapturedSize:
        """Capture a whole step as one graph and keep it.

        Args:
            descriptor: of the batch; its token count is the capture size.
            args: the arguments of a call with symbol values `sizes`. The call runs again.

        Raises:
            CaptureError: it cannot be recorded; it is noted as failed, others stay.
        """
        size = descriptor.num_tokens if self.graph.token_dim.tokens else 0

        def run() -> CapturedSize:
            if (pieces := self.sizes.get(size)) is not None:
                fault = pieces.padding_fault
            else:
                fault = self._padding_fault(self._request(size, args, sizes, table))
            whole = self._request(size, args, sizes, table, self.graph.as_whole_step())
            return capture_step(whole, descriptor, fault)

        return self._keep((CUDAGraphMode.FULL, size, descriptor.num_active_loras), args, run)

    def _keep(
        self, key: Key, args: Sequence[Any], capture: Callable[[], CapturedSize]
    ) -> CapturedSize:
        """Capture, measure what it takes, and keep it, or the error."""
        if self.bound.moved(args):
            self.forget(args)
        with one_capture, collector_paused():
            before = self._memory_use()
            started = time.perf_counter()
            try:
                captured = capture()
            except CaptureError as error:
                self.fail(*key, str(error))
                raise
            except torch.OutOfMemoryError as error:
                text = f"no memory for the buffers of this size: {error}"
                self.fail(*key, text)
                raise CaptureError(text) from error
            seconds = time.perf_counter() - started
            growth = self._memory_use() - before
        self.seconds += seconds
        self.keep(captured, CaptureCost(*key, captured.num_graphs, seconds, growth))
        del captured  # nobody else holds it, should it be given up
        self._require_room(key, growth)
        kept = self.find(*key)
        assert kept is not None
        return kept

    def _require_room(self, key: Key, growth: MemoryUse) -> None:
        """Give the last capture up if it is over the budget."""
        used, limit = self.bytes_in_use, self.memory_limit
        if limit is None or used <= limit:
            return
        self.give_up(key[0], [key[1]])
        error = (
            f"max_graph_memory is {mib(limit)} MiB, and with {mib(growth.num_bytes)} MiB for this "
            f"size graphs would take {mib(used)} MiB; raise it, or name smaller sizes"
        )
        self.fail(*key, error)
        raise CaptureError(error)

    def give_up(self, mode: CUDAGraphMode, sizes: Collection[int]) -> MemoryUse:
        """Drop the graphs of some sizes, and all that nothing needs any more.

        Graphs share their pool, which lasts as long as one of them does.

        Returns:
            The memory that came back.
        """
        with one_capture:
            before = self._memory_use()
            held = self.remove(mode, sizes)
            if not self.costs:
                self._release_pool()
            empty_cache(self.graph.device)
            freed = before - self._memory_use()
        self.memory_use -= freed
        self.reusable_bytes += max(held - freed.driver_bytes, 0)
        return freed

    def _memory_use(self) -> MemoryUse:
        pool_bytes = self._pool.num_arena_bytes if self._pool is not None else 0
        return self._meter(self._arena.num_bytes + pool_bytes)

    def _padding_fault(self, request: CaptureRequest) -> str | None:
        """Padding is tried piece by piece: at the capture of pieces, or on imitated graphs."""
        if request.fewest == request.sizes:
            return None
        trial = dataclasses.replace(request, pool=TrialPool(self.graph.device, request.pool))
        return capture_size(trial).padding_fault

    def has(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> bool:
        """It is captured, or is known not to be possible."""
        size = descriptor.num_tokens if self.graph.token_dim.tokens else 0
        key = (mode, size, descriptor.num_active_loras)
        return self.find(*key) is not None or bool(self.error_of(*key))

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
        """Something that graphs read in place lies elsewhere in this call: drop them.

        A parameter that moved was replaced and will stay. Other small tensors that move a
        second time are copied like arguments from then on. What only split ops read is in
        place for whole steps only, so pieces stay.
        """
        moved = self.bound.moved(args)
        self.bound.note_moves(moved)
        if self.sizes and self.bound.by_pieces.isdisjoint(moved):
            self.clear_steps()
            self._bind(args, self.bound.positions)
            return
        self.drop()
        self.bound.release()

    def fit(self, args: Sequence[Any]) -> bool:
        """Everything that graphs read in place lies where it was at capture."""
        return bool(self.bound.positions) and not self.bound.moved(args)

    def drop(self) -> None:
        """Give up all graphs and their memory."""
        self.clear()
        self.hits.clear()
        self._release_pool()

    def _release_pool(self) -> None:
        self._static_inputs = None
        self._arena = Arena(self.graph.device)
        self._pool = None  # one whose last graph is gone takes no other

    def _bind(self, args: Sequence[Any], positions: Sequence[int]) -> None:
        this = weakref.ref(self)

        def on_death(_: object, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
            captures = None if is_exiting() else this()
            if captures is None or captures.bound.are_alive:
                return
            # Without `by_pieces` pieces read nothing in place.
            (captures.drop if captures.bound.by_pieces else captures.clear_steps)()

        self.bound.bind(args, positions, on_death)

    def _request(
        self,
        size: int,
        args: Sequence[Any],
        sizes: Sizes,
        table: PaddingTable,
        whole: CompiledGraph | None = None,
    ) -> CaptureRequest:
        graph = whole or self.graph
        token_dim = graph.token_dim
        largest = self.graph.as_whole_step().token_dim.padded(sizes, self._largest)
        if self._static_inputs is None:
            self._static_inputs = StaticInputs.of(
                self.graph,
                self._arena,
                largest,
                self.bound.copied(args),
                for_whole_steps=self._has_steps,
            )
            self.bound.by_pieces = frozenset(self._static_inputs.bound)
            self._bind(args, self._static_inputs.of_whole_step().bound)
        fewest = table.smallest_padded(size) if token_dim.tokens else size
        assert self._make_pool is not None
        self._pool = self._pool or self._make_pool(self.graph.device)
        return CaptureRequest(
            graph=graph,
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
