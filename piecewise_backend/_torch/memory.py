"""Addresses and lifetimes of tensors, CUDA streams and graphs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def weak_view(tensor: Tensor) -> Tensor:
    """The same memory, without keeping it alive.

    Graph outputs stay readable as long as their pool exists, but must not stop the pool from
    reusing them in the next capture. torch has no public non-owning tensor.
    """
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    return same_layout(tensor, alias)


def same_layout(tensor: Tensor, storage: Any) -> Tensor:
    """A tensor over another storage that is read as `tensor` is: shape, strides, lazy bits."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    view = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    view = torch.conj(view) if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


def borrowed_storage(memory: Tensor, num_bytes: int) -> torch.UntypedStorage:
    """A storage over the first bytes of `memory` that does not own them."""
    return torch._C._construct_storage_from_data_pointer(  # type: ignore[return-value]
        memory.data_ptr(), memory.device, num_bytes
    )


def _same_addresses_in_python(
    values: Sequence[Any], addresses: list[int | None], indices: list[int]
) -> bool:
    return all(values[index].data_ptr() == addresses[index] for index in indices)


same_addresses: Callable[[Any, list[int | None], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _same_addresses_in_python
)
"""Does `values[i]` lie at `addresses[i]`, for these indices? In C++ where torch has CUDA."""


def raw_stream(device_index: int) -> int:
    """The current CUDA stream as a number; the public way costs a microsecond."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def leave_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Bring generator and allocator out of a capture that did not begin or end properly.

    `capture_begin` tells the generator before it fails, `capture_end` fails before it tells them
    (torch 2.11). Every random number would be an error from then on; a capture of nothing ends
    properly. The allocator is told directly, but goes on refusing captures into the pool, which
    must be replaced. Ends when `capture_begin` and `capture_end` clean up.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # a torch that has told the allocator already
        torch._C._cuda_endAllocateToPool(index, pool)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def bound_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """`graph.replay` without its Python wrapper, which does nothing we need."""
    return torch._C._CUDAGraph.replay.__get__(graph)  # type: ignore[no-any-return]


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Tensors made inside can be written both in and outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
