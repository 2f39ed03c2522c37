"""Capture a callable into a graph and replay it: on CUDA, or imitated on any device.

In:  a callable and its tensor inputs, whose addresses stay.
Out: a `CapturedGraph`: its output tensors, and a function that replays it.
Knows nothing of pieces, sizes or models.

All captures of one pool share memory: what an earlier capture no longer keeps alive may be
overwritten by a later one. So whoever captures keeps outputs (strongly) until their last
reader is captured, then drops them and goes on with `_torch.weak_view`s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from piecewise_backend import _torch
from piecewise_backend.buffers import Arena
from piecewise_backend.capture_stream import CaptureStream
from piecewise_backend.errors import CaptureError

Outputs = Sequence[torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class CapturedGraph:
    """One captured graph."""

    replay: Callable[[], None]
    outputs: tuple[torch.Tensor, ...]
    """Owning: drop them as soon as nothing that is captured later reads them."""
    owner: object
    """Keeps the graph alive."""
    is_empty: bool = False
    """Nothing was recorded."""


class GraphPool(Protocol):
    """Captures graphs that share one memory pool and one stream."""

    @property
    def num_arena_bytes(self) -> int:
        """Bytes that it holds in an arena of its own; 0 if all is the allocator's."""
        ...

    def capture(self, function: Callable[..., Outputs], inputs: Sequence[Any]) -> CapturedGraph:
        """Record `function(*inputs)`; the outputs are undefined until the first replay.

        Raises:
            CaptureError: the function did something a graph cannot record. The pool stays
                usable.
        """
        ...

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        """Everything inside runs on the capture stream, ordered with the current one."""
        ...

    def refresh(self, functions: Sequence[Callable[[], object]]) -> None:
        """Before a replay: run functions that write what the graph reads, beside the graph.

        Raises:
            Exception: whatever a function does; the graph must not be replayed then.
        """
        ...

    def wait_for_refresh(self) -> None:
        """While recording: what follows waits for the refresh before the replay. Else for the
        last one."""
        ...


class CudaGraphPool:
    """CUDA graphs on one device, in one pool, recorded on one stream of their own."""

    num_arena_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self._in_pool: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        torch.cuda.current_blas_handle()  # cannot be made while recording
        self._lent = CaptureStream.lend_to(self, device)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        stream = self._lent.stream
        with torch.cuda.device(self.device):
            outside = torch.cuda.current_stream(self.device)
            torch.cuda.current_blas_handle()  # of this thread; cannot be made while recording
            stream.wait_stream(outside)
            try:
                with torch.cuda.stream(stream):
                    self._lent.claim_workspaces()
                    yield
            finally:
                outside.wait_stream(stream)

    def refresh(self, functions: Sequence[Callable[[], object]]) -> None:
        self._lent.updates.refresh(functions)

    def wait_for_refresh(self) -> None:
        self._lent.updates.wait()

    def capture(self, function: Callable[..., Outputs], inputs: Sequence[Any]) -> CapturedGraph:
        # Held, so that the pool stays alive: the allocator refuses one whose last graph is gone,
        # such as that of the first piece of a size whose second piece could not be recorded.
        some_graph = next(iter(self._in_pool), None)
        if some_graph is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            outputs, is_empty = self._record(graph, function, inputs)
        except Exception as error:
            raise CaptureError(f"the piece cannot be recorded: {error}") from error
        self._in_pool.add(graph)
        return CapturedGraph(_torch.bound_replay(graph), outputs, graph, is_empty)

    def _record(
        self, graph: torch.cuda.CUDAGraph, function: Callable[..., Outputs], inputs: Sequence[Any]
    ) -> tuple[tuple[torch.Tensor, ...], bool]:
        """Returns the outputs, and whether nothing was recorded.

        Raises:
            BaseException: what failed, to begin, to run or to end; nothing is recording then.
        """
        try:
            # Not `torch.cuda.graph`: that synchronises and empties the cache around every capture.
            # "thread_local": other threads of the program may go on using CUDA meanwhile.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            return tuple(function(*inputs)), _end_capture(graph)
        except BaseException:
            self._stop_recording(graph)
            raise

    def _stop_recording(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            _end_capture(graph)
        except RuntimeError:  # it never began, became invalid, or could not be made a graph
            _torch.leave_failed_capture(self.device, self.pool)
            # The allocator takes the old pool for one that is still being recorded to.
            self._in_pool.clear()


def _end_capture(graph: torch.cuda.CUDAGraph) -> bool:
    """End a recording; returns whether it is empty, which torch tells by a warning only."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.capture_end()
    is_empty = [str(warning.message).startswith("The CUDA Graph is empty") for warning in caught]
    for warning, is_about_empty in zip(caught, is_empty, strict=True):
        if not is_about_empty:
            warnings.warn(warning.message, stacklevel=2)
    return any(is_empty)


class EmulatedGraphPool:
    """Graphs imitated in Python, with the same rules about addresses and shared memory.

    A replay calls the function again and copies what it returns to the addresses that the
    capture handed out. Those lie in an arena that later captures reuse, so that a wrong
    lifetime gives wrong numbers here as it would on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._arena = Arena(device)

    @property
    def num_arena_bytes(self) -> int:
        return self._arena.num_bytes

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def refresh(self, functions: Sequence[Callable[[], object]]) -> None:
        for function in functions:
            function()

    def wait_for_refresh(self) -> None:
        """There are no streams: it is done."""

    def capture(self, function: Callable[..., Outputs], inputs: Sequence[Any]) -> CapturedGraph:
        try:
            fresh = tuple(function(*inputs))
        except Exception as error:
            raise CaptureError(f"the piece cannot be recorded: {error}") from error
        outputs = self._place(fresh, [x for x in inputs if isinstance(x, torch.Tensor)])
        del fresh
        static = [_torch.weak_view(output) for output in outputs]
        # Like a real graph, the recording keeps addresses, not tensors.
        addresses = [_torch.weak_view(x) if isinstance(x, torch.Tensor) else x for x in inputs]

        def replay() -> None:
            for target, value in zip(static, function(*addresses), strict=True):
                if target.data_ptr() != value.data_ptr():
                    # The whole storage: an expanded output could not be written element-wise.
                    target.untyped_storage().copy_(value.untyped_storage())

        return CapturedGraph(replay, outputs, replay)

    def _place(self, fresh: Outputs, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """New outputs moved into the arena; those that share memory go on sharing it."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in inputs}
        placed = []
        for output in fresh:
            own = output.untyped_storage()
            if own.data_ptr() not in storages:
                storages[own.data_ptr()] = self._arena.lease(own.nbytes())
            storage = storages[own.data_ptr()]
            with _torch.ordinary_tensors():
                placed.append(_torch.same_layout(output, storage))
        return tuple(placed)


one_capture = threading.RLock()
"""Held while a size is captured: one at a time, of all threads. Taken inside of a call, so never
around one."""

_pausing = threading.Lock()
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def collector_paused(*, collects_first: bool = True) -> Iterator[None]:
    """No garbage collection inside: one per size cost most of the 15 s that 1,683 captures took
    (benchmarks/results/capture_cost.json), and one may free CUDA objects in the middle of a
    capture. The last of all threads to leave turns it on again, if it was on.

    Args:
        collects_first: nothing that is garbage now is to be freed inside, either.
    """
    global _pauses, _was_enabled
    with _pausing:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
        is_first = _pauses == 0 and _was_enabled
        _pauses += 1
        gc.disable()
    try:
        if is_first and collects_first:
            gc.collect()
        yield
    finally:
        with _pausing:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
