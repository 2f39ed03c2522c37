"""What is captured and what comes of it, whether piece by piece or as a whole step.

In:  a compiled graph, a pool, buffers, a size, the arguments of a real call.
Out: `CapturedSize`. The two ways to make one are in `capture` and `capture_step`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.buffers import Arena
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.errors import CaptureError, PiecewiseError
from piecewise_backend.graphs import CapturedGraph, GraphPool
from piecewise_backend.plan import Plan
from piecewise_backend.rows import RowTable
from piecewise_backend.sizes import Sizes
from piecewise_backend.static_inputs import StaticInputs
from piecewise_backend.version import Call


@dataclasses.dataclass(frozen=True, slots=True)
class CapturedSize:
    """Everything needed to serve batches that are padded to one size."""

    plan: Plan
    rows: RowTable
    num_graphs: int
    padding_fault: str | None
    """What padding would do to real rows, or None."""
    is_tried: bool
    """Padding was tried; it is not for sizes that serve one token count."""
    keep_alive: tuple[CapturedGraph, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What to capture."""

    graph: CompiledGraph
    pool: GraphPool
    arena: Arena
    """Buffers behind split ops that return fresh tensors."""
    static_inputs: StaticInputs
    args: Sequence[Any]
    """Of a real call that this size serves."""
    sizes: Sizes
    """The symbol values after padding."""
    fewest: Sizes
    """The symbol values of the smallest batch that is padded to this size."""
    half: Sizes
    """The symbol values with half as many tokens, to try padding with."""
    largest: Sizes
    """The symbol values at the largest capture size."""
    tried: set[Call]
    """Code that passed a thorough trial of padding; added to."""
    num_warmups: int
    tune: Callable[[int, Sequence[Any]], None] | None
    """Called with the position of an instance and the inputs of its piece, before its capture."""
    has_static_outputs: bool


@contextmanager
def aside(request: CaptureRequest) -> Iterator[None]:
    """Trial runs and captures: on the capture stream, and without a trace in random numbers.

    Raises:
        CaptureError: what runs inside failed.
    """
    device = request.graph.device
    cuda = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=cuda),
        _torch.ordinary_tensors(),
        request.pool.side_stream(),
    ):
        try:
            yield
        except PiecewiseError:
            raise
        except Exception as error:
            raise CaptureError(f"a trial run failed: {error}") from error


def keep_with_outputs(
    request: CaptureRequest, tensors: Sequence[torch.Tensor], kept: Sequence[CapturedGraph]
) -> None:
    """Static outputs: the caller may keep a view of one for longer than the model."""
    if request.has_static_outputs:
        owner = (tuple(kept), request.pool, request.arena)
        for tensor in tensors:
            tensor.untyped_storage().owner = owner  # type: ignore[attr-defined]


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies and how: equal for two tensors that are the same but in name."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


@contextmanager
def preserved(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give tensors back the values they had: trial runs must not count."""
    copies = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
