"""The captured sizes of one graph, and the memory they share.

In:  a compiled graph, options, and a call to capture for.
Out: `CapturedSize`s, kept until something they read in place has moved.
Knows nothing of dispatch.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from piecewise_backend.batch import BatchDescriptor, CUDAGraphMode
from piecewise_backend.bound_inputs import BoundInputs
from piecewise_backend.candidates import is_wanted
from piecewise_backend.capture import capture_size
from piecewise_backend.capture_memory import CaptureMemory
from piecewise_backend.capture_request import CapturedSize, CaptureRequest
from piecewise_backend.capture_step import capture_step
from piecewise_backend.captured_sizes import CapturedSizes, Key
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.config import Config
from piecewise_backend.costs import NOTHING, CaptureCost, MemoryUse, mib
from piecewise_backend.dispatch import STATIC_SIZE, Dispatcher, LeftOut, Target
from piecewise_backend.errors import CaptureError
from piecewise_backend.graph_memory import GraphMemory
from piecewise_backend.graphs import collector_paused, one_capture
from piecewise_backend.pools import TrialPool
from piecewise_backend.sizes import Sizes
from piecewise_backend.static_inputs import StaticInputs
from piecewise_backend.tuning_trial import tune_pieces
from piecewise_backend.version import Call


class Captures(CapturedSizes):
    """Captures sizes on demand into one pool, over one set of static buffers.

    They belong to the parameters that they read in place: to one instance of a model. When all
    of those are gone the memory is given back.
    """

    def __init__(
        self, graph: CompiledGraph, config: Config, dispatcher: Dispatcher, memory: GraphMemory
    ) -> None:
        """No graphs yet; of sizes that the dispatcher has, in the memory of the whole model."""
        self.graph = graph
        self.config = config
        super().__init__(dispatcher, bool(graph.token_dim.tokens))
        self.memory = CaptureMemory(graph.device, config, memory)
        self.hits: dict[int, int] = {}
        """Calls at each size before its capture."""
        self.seconds = 0.0
        self.bound = BoundInputs()
        self._largest = dispatcher.largest  # of all capture sizes, for which buffers are made
        mode = dispatcher.mode
        self._has_steps = CUDAGraphMode.FULL in (mode.for_decode, mode.for_mixed)
        self._tried: set[Call] = set()

    def empty(self) -> Captures:
        """The same without graphs, for another instance of the model."""
        dispatcher = self.dispatcher.with_all_sizes()
        other = type(self)(self.graph, self.config, dispatcher, self.memory.model)
        other.estimates = dict(self.estimates)
        return other

    def capture(self, size: int, args: Sequence[Any], sizes: Sizes) -> CapturedSize:
        """Capture one size and keep it.

        Args:
            size: the capture size, that the call is padded to.
            args: the arguments of a call with symbol values `sizes`.

        Raises:
            CaptureError: a piece cannot be recorded; the size is noted as failed, others stay.
        """
        mode = CUDAGraphMode.PIECEWISE
        request = functools.partial(self._request, mode, size, args, sizes)
        return self._keep((mode, size, 0), args, lambda: capture_size(request()))

    def capture_step(
        self, descriptor: BatchDescriptor, args: Sequence[Any], sizes: Sizes
    ) -> CapturedSize:
        """Capture a whole step as one graph and keep it.

        Args:
            descriptor: of the batch; its token count is the capture size.
            args: the arguments of a call with symbol values `sizes`. The call runs again.

        Raises:
            CaptureError: it cannot be recorded; it is noted as failed, others stay.
        """
        mode, size = CUDAGraphMode.FULL, descriptor.num_tokens if self._is_varying else STATIC_SIZE

        def run() -> CapturedSize:
            pieces = self.captured.get((CUDAGraphMode.PIECEWISE, size, 0))
            if pieces is not None:
                fault = pieces.padding_fault
            else:
                fault = self._padding_fault(self._request(mode, size, args, sizes))
            whole = self._request(mode, size, args, sizes, self.graph.as_whole_step())
            return capture_step(whole, descriptor, fault)

        return self._keep((mode, size, descriptor.num_active_loras), args, run)

    def tune(self, target: Target, args: Sequence[Any], sizes: Sizes) -> None:
        """Before a size is captured, let the versions serve that are fastest there."""
        if target.size in self.tuned or not is_wanted(self.config, target.size):
            return
        is_first = not self.tuned
        self.tuned.add(target.size)
        if self.bound.moved(args):
            self.forget(args)
        request = self._request(target.mode, target.size, args, sizes)
        with one_capture, collector_paused():
            tune_pieces(request, self.config, self.memory.new_pool, is_first=is_first)

    def tune_again(self, sizes: Collection[int]) -> None:
        """Forget captures of sizes whose pieces may have faster versions by now."""
        self.tuned.difference_update(sizes)
        self.give_up([key for key in self.captured if key[1] in sizes])

    def _keep(
        self, key: Key, args: Sequence[Any], capture: Callable[[], CapturedSize]
    ) -> CapturedSize:
        """Capture, measure what it takes, and keep it, or the error."""
        if self.bound.moved(args):
            self.forget(args)
        with one_capture, collector_paused():
            before = self.memory.reading_before_capture()
            started = time.perf_counter()
            try:
                captured = capture()
            except (CaptureError, torch.OutOfMemoryError) as error:
                self.memory.failed(self.memory.reading() - before)
                raise self._note_failure(key, error) from error
            seconds = time.perf_counter() - started
            growth = self.memory.reading() - before
        self.seconds += seconds
        held_bytes = self.memory.grew(growth, self.expected_driver_bytes(key[0]))
        self.keep(captured, CaptureCost(*key, captured.num_graphs, seconds, growth), held_bytes)
        del captured  # nobody else holds it, should it be given up
        self._require_room(key, growth)
        return self.captured[key]

    def _note_failure(self, key: Key, error: Exception) -> CaptureError:
        text = str(error)
        if not isinstance(error, CaptureError):
            text = f"no memory for the buffers of this size: {error}"
        self.errors[key] = text
        return CaptureError(text)

    def _require_room(self, key: Key, growth: MemoryUse) -> None:
        """Give the last capture up if it is over the budget."""
        used, limit = self.memory.model.bytes_in_use, self.memory.limit
        if limit is None or used <= limit:
            return
        self.give_up([key])
        self.errors[key] = (
            f"max_graph_memory is {mib(limit)} MiB, of which {mib(used - growth.num_bytes)} MiB "
            f"are in use, and {key[0].value} graphs of this size take {mib(growth.num_bytes)} MiB; "
            "raise it, or name smaller sizes"
        )
        raise CaptureError(self.errors[key])

    def give_up(self, keys: Collection[Key]) -> MemoryUse:
        """Drop some captures, and all that nothing needs any more.

        Graphs share their pool, which lasts as long as one of them does.

        Returns:
            The memory that came back.
        """
        with one_capture:
            before = self.memory.reading()
            driver_bytes = self.remove(keys)
            if not self.captured:
                self.memory.release()
            return self.memory.shrank(before, driver_bytes)

    def leave_out(self, mode: CUDAGraphMode, sizes: Mapping[int, LeftOut]) -> MemoryUse:
        """Serve nothing from graphs of some sizes any more; returns the memory that came back."""
        self.dispatcher = self.dispatcher.without(mode, sizes)
        self.prepared.clear()
        keys = self.keys_of(mode, sizes)
        return self.give_up(keys) if keys else NOTHING

    def disable(self, key: Key, fault: str) -> None:
        """Serve nothing from a capture that is wrong."""
        self.errors[key] = fault
        self.give_up([key])

    def _padding_fault(self, request: CaptureRequest) -> str | None:
        """Padding is tried piece by piece: at the capture of pieces, or on imitated graphs."""
        if request.fewest == request.sizes:
            return None
        trial = dataclasses.replace(request, pool=TrialPool(self.graph.device, request.pool))
        return capture_size(trial).padding_fault

    def forget(self, args: Sequence[Any]) -> None:
        """Something that graphs read in place lies elsewhere in this call: drop them.

        A parameter that moved was replaced and will stay. Other small tensors that move a
        second time are copied like arguments from then on. What only split ops read is in
        place for whole steps only, so pieces stay.
        """
        moved = self.bound.moved(args)
        self.bound.note_moves(moved)
        if self.keys_of(CUDAGraphMode.PIECEWISE) and self.bound.by_pieces.isdisjoint(moved):
            self.clear_steps()
            self._bind(args, self.bound.positions)
            return
        self._abandon()
        self.bound.release()

    def fit(self, args: Sequence[Any]) -> bool:
        """Everything that graphs read in place lies where it was at capture."""
        return bool(self.bound.positions) and not self.bound.moved(args)

    def drop(self) -> None:
        """Give up all graphs and their memory; nothing has failed."""
        self.give_up(list(self.captured))
        self._start_over()

    def _abandon(self) -> None:
        """The same while somebody is served, or in the middle of somebody's capture."""
        self.remove(list(self.captured))
        self.memory.release_unmeasured()
        self._start_over()

    def _start_over(self) -> None:
        self.errors.clear()
        self.hits.clear()

    def clear_steps(self) -> None:
        """Give up the graphs of whole steps."""
        self.memory.shrank_unmeasured(self.remove(self.keys_of(CUDAGraphMode.FULL)))

    def _bind(self, args: Sequence[Any], positions: Sequence[int]) -> None:
        this = weakref.ref(self)

        def on_death(_: object, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
            captures = None if is_exiting() else this()
            if captures is None or captures.bound.are_alive:
                return
            # Without `by_pieces` pieces read nothing in place.
            (captures._abandon if captures.bound.by_pieces else captures.clear_steps)()

        self.bound.bind(args, positions, on_death)

    def _request(
        self,
        mode: CUDAGraphMode,
        size: int,
        args: Sequence[Any],
        sizes: Sizes,
        whole: CompiledGraph | None = None,
    ) -> CaptureRequest:
        graph = whole or self.graph
        token_dim = graph.token_dim
        largest = self.graph.as_whole_step().token_dim.padded(sizes, self._largest)
        memory = self.memory
        if memory.static_inputs is None:
            memory.static_inputs = StaticInputs.of(
                self.graph,
                memory.arena,
                largest,
                self.bound.copied(args),
                for_whole_steps=self._has_steps,
            )
            self.bound.by_pieces = frozenset(memory.static_inputs.bound)
            self._bind(args, memory.static_inputs.of_whole_step().bound)
        fewest = size
        if token_dim.tokens:  # one less at least: the size below may be given up later
            served = self.dispatcher.tables[mode].smallest_padded(size)
            fewest = min(served, max(size - 1, 1))
        return CaptureRequest(
            graph=graph,
            pool=memory.existing_pool(),
            arena=memory.arena,
            static_inputs=memory.static_inputs,
            args=args,
            sizes=token_dim.padded(sizes, size),
            fewest=token_dim.padded(sizes, fewest),
            half=token_dim.padded(sizes, max(size // 2, 1)),
            tried=self._tried,
            largest=largest,
            num_warmups=self.config.cudagraph_num_of_warmups,
            tune=None,
            has_static_outputs=self.config.outputs == "static",
        )
