"""The pool of CUDA graphs: what fails while it records leaves it, and torch, usable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from piecewise_backend.errors import CaptureError
from piecewise_backend.graphs import CapturedGraph, CudaGraphPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20


@pytest.fixture
def x() -> Tensor:
    """What is recorded reads it."""
    return torch.arange(8.0, device="cuda")


@pytest.fixture
def pool(x: Tensor) -> Iterator[CudaGraphPool]:
    """A pool, on its own stream."""
    pool = CudaGraphPool(x.device)
    with pool.side_stream():
        yield pool


def plus_one(x: Tensor) -> list[Tensor]:
    """Something to record."""
    return [x + 1]


def is_right(graph: CapturedGraph, x: Tensor) -> bool:
    """Replayed, `plus_one` has its result."""
    graph.outputs[0].zero_()
    graph.replay()
    return torch.equal(graph.outputs[0], x + 1)


def raises(x: Tensor) -> list[Tensor]:
    """A recording that is sound and unfinished."""
    y = x + 1
    raise ValueError(f"no more than {len(y)}")


def waits(x: Tensor) -> list[Tensor]:
    """Makes the recording invalid."""
    y = x + 1
    torch.cuda.synchronize()
    return [y]


def leaves_a_stream(x: Tensor) -> list[Tensor]:
    """Returns, and the recording cannot be ended: another stream has joined it and is not back."""
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        return [x + 1]


def random_and_raises(x: Tensor) -> list[Tensor]:
    """Random numbers were asked for by then."""
    torch.rand_like(x)
    raise ValueError("no more")


FAULTS = [raises, waits, leaves_a_stream, random_and_raises]


def test_a_pool_whose_last_graph_is_gone_records_again(pool: CudaGraphPool, x: Tensor) -> None:
    """Even if what that graph returned is alive, and with it the memory of the pool."""
    first = pool.capture(plus_one, [x])
    kept = first.outputs
    del first
    again = pool.capture(plus_one, [x])
    assert is_right(again, x)
    assert kept[0].data_ptr() != again.outputs[0].data_ptr()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("has_graphs", [True, False])
def test_a_recording_that_fails(
    fault: Callable[[Tensor], Any], has_graphs: bool, pool: CudaGraphPool, x: Tensor
) -> None:
    before = [pool.capture(plus_one, [x])] if has_graphs else []
    for _ in range(2):
        with pytest.raises(CaptureError, match="cannot be recorded"):
            pool.capture(fault, [x])
        assert_usable(x)
    after = pool.capture(plus_one, [x])
    assert all(is_right(graph, x) for graph in (*before, after))


def test_a_recording_that_cannot_begin(pool: CudaGraphPool, x: Tensor) -> None:
    """Whatever the allocator has against it: here, that all graphs of the pool are gone."""
    before = pool.capture(plus_one, [x])
    other = CudaGraphPool(x.device)
    gone = other.capture(plus_one, [x])
    kept = gone.outputs  # and with it the pool, as one that is to be given back
    del gone
    pool.pool = other.pool
    with pytest.raises(CaptureError, match="cannot be recorded"):
        pool.capture(plus_one, [x])
    assert_usable(x)
    after = pool.capture(plus_one, [x])
    assert all(is_right(graph, x) for graph in (before, after))
    del kept


def assert_usable(x: Tensor) -> None:
    """Nothing is recording, neither for the generator nor for the allocator."""
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.rand_like(x).isfinite().all()
    torch.cuda.synchronize()
    big = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del big
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 64 * MIB
