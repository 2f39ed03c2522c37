"""A distinct piece as names and numbers, and back, for a process that compiles or times it.

In:  a distinct piece; a `RecordedPiece`.
Out: a `RecordedPiece`, or why there is none; a piece with the same key; inputs to time it with.
Knows nothing of processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._ops import OpOverload, OpOverloadPacket

from piecewise_backend import _torch
from piecewise_backend.canonical import DistinctPiece, Structure
from piecewise_backend.fakes import piece_inputs
from piecewise_backend.hoisting import original_of
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.steps import Constant, Host, Value
from piecewise_backend.trace_graph import RecordedGraph, rebuild, record

# Large enough to tell results apart, small enough for sums of thousands of products.
_DEVIATION = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """A hoisted factor."""

    value: float
    dtype: torch.dtype
    device: torch.device


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedPiece:
    """See Note [Only names and numbers] in `trace_graph`."""

    index: int
    graph: RecordedGraph
    inputs: tuple[Value | Host | Scale | int, ...]
    structure: Structure
    modules: tuple[str, ...]
    """What defines the ops that it calls, and has to be imported first."""


def record_piece(piece: DistinctPiece) -> RecordedPiece:
    """The piece, its graph not changed.

    Raises:
        NoContentError: it has something that another process could not make again.
    """
    if piece.structure.only_here:
        raise NoContentError(f"{piece.structure.only_here[0]}, which has no name")
    modules = tuple(sorted(_modules(piece)))
    inputs = tuple(map(_input, piece.inputs))
    return RecordedPiece(piece.index, record(piece.module), inputs, piece.structure, modules)


def rebuild_piece(recorded: RecordedPiece, numbers: Sequence[int]) -> DistinctPiece:
    """The piece again, its sizes in an environment of their own.

    Args:
        numbers: the integer inputs, as examples.
    """
    hosts = [ref.expr for ref in recorded.inputs if isinstance(ref, Host)]
    sizes = dict(zip(hosts, numbers, strict=False))
    module, symbols = rebuild(recorded.graph, sizes)
    nodes = {node.name: _torch.example_of(node) for node in module.graph.nodes}
    refs = tuple(_reference(ref, symbols) for ref in recorded.inputs)
    examples = {ref.name: nodes[ref.name] for ref in refs if isinstance(ref, Value)}
    return DistinctPiece(recorded.index, module, refs, examples, recorded.structure)


def made_up_inputs(piece: DistinctPiece, numbers: Sequence[int]) -> list[Any]:
    """Inputs to time a piece with: random numbers, and integers that are 0, as an index may be.

    Args:
        numbers: the integer inputs.
    """
    values, rest = {}, list(numbers)
    for ref in piece.inputs:
        if isinstance(ref, Host):
            values[ref.expr] = rest.pop(0)
    made = piece_inputs(piece, lambda expr: int(expr.xreplace(values)), lambda _: rest.pop(0))
    for position, (ref, value) in enumerate(zip(piece.inputs, made, strict=True)):
        if isinstance(ref, Constant) and isinstance(ref.value, torch.Tensor):
            made[position] = ref.value
        elif isinstance(value, torch.Tensor) and value.numel() > 0:
            _fill(value)
    return made


def _fill(tensor: torch.Tensor) -> None:
    """All memory that it spans: of one that was expanded no element could be written by itself."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    memory = tensor.as_strided((1 + sum((size - 1) * step for size, step in steps),), (1,))
    if not tensor.is_floating_point():
        memory.zero_()
        return
    wide = torch.empty(memory.shape, dtype=torch.float32, device=memory.device)
    memory.copy_(wide.normal_(std=_DEVIATION))


def _modules(piece: DistinctPiece) -> set[str]:
    found = set()
    for node in piece.module.graph.nodes:
        target: Any = node.target
        for op in _torch.overloads_of(target) or () if _is_op(target) else ():
            if original_of(op) is not op:
                raise NoContentError(f"{op}, whose arguments are numbered in this process")
            found |= {f.__module__ for f in _torch.python_functions(op).values()}
    if "__main__" in found:
        raise NoContentError("an op of the program that was started, which no other imports")
    return {name for name in found if name.partition(".")[0] != "torch"}


def _is_op(target: Any) -> bool:
    return isinstance(target, OpOverload | OpOverloadPacket)


def _input(ref: Value | Host | Constant) -> Value | Host | Scale | int:
    if not isinstance(ref, Constant):
        return ref
    if isinstance(ref.value, torch.Tensor):
        return Scale(float(ref.value), ref.value.dtype, ref.value.device)
    return int(ref.value)


def _reference(
    recorded: Value | Host | Scale | int, symbols: dict[sympy.Symbol, sympy.Symbol]
) -> Value | Host | Constant:
    if isinstance(recorded, Host):
        return Host(recorded.expr.xreplace(symbols))
    if isinstance(recorded, Scale):
        kind: Any = {"dtype": recorded.dtype, "device": recorded.device}
        with _torch.ordinary_tensors():
            return Constant(torch.tensor(recorded.value, **kind))
    return recorded if isinstance(recorded, Value) else Constant(recorded)
