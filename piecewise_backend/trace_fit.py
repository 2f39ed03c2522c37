"""The inputs that a stored graph has in this process, and whether it is right for them.

In:  a recorded graph with what the trace assumed about sizes, and a scope to look names up in.
Out: the graph's inputs and the values of its size symbols; or why it does not fit.
Knows nothing of where traces are stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch

from piecewise_backend.trace_graph import Fake, Number, RecordedGraph


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What a backend would be given."""

    values: tuple[Any, ...]
    sizes: Mapping[sympy.Symbol, int]


@dataclasses.dataclass(frozen=True, slots=True)
class NoFit:
    """The trace was made for other calls."""

    reason: str


def inputs_of(
    graph: RecordedGraph,
    conditions: Sequence[tuple[sympy.Expr, str]],
    scope: Mapping[str, Any],
) -> Inputs | NoFit:
    """Bind the inputs of a graph to what this process has.

    Args:
        conditions: on the size symbols, each with where it was asked for.
        scope: what the names of inputs start from.
    """
    found = {}
    for source, example in graph.inputs:
        if not isinstance(example, Number):
            try:
                found[source] = eval(source, dict(scope))
            except (AttributeError, KeyError, IndexError, TypeError, NameError) as error:
                return NoFit(f"{source} is not there ({type(error).__name__}: {error})")
    sizes = _sizes(graph, found, scope)
    if isinstance(sizes, NoFit):
        return sizes
    misfits = (_misfit(source, example, found, sizes) for source, example in graph.inputs)
    if reason := next((misfit for misfit in misfits if misfit), None):
        return NoFit(reason)
    if _sharing(graph, found) != _recorded_sharing(graph):
        return NoFit("other inputs share memory")
    for condition, where in conditions:
        if condition.xreplace(_numbers(sizes)) != sympy.true:
            return NoFit(f"{condition} does not hold ({where})")
    return Inputs(
        tuple(
            _at(example.expr, sizes) if isinstance(example, Number) else found[source]
            for source, example in graph.inputs
        ),
        sizes,
    )


def described(
    graph: RecordedGraph, conditions: Sequence[tuple[sympy.Expr, str]]
) -> tuple[str, ...]:
    """What `inputs_of` compares, as text."""
    texts = [str(condition) for condition, _ in conditions]
    for source, example in graph.inputs:
        if isinstance(example, Fake):
            memory = "" if example.is_alone else f" at {example.offset} of {example.storage}"
            texts.append(f"{source}: {example.shape} {example.stride}{memory}")
        elif isinstance(example, Number):
            texts.append(f"{source}: {example.expr}")
    return tuple(texts)


def _sizes(
    graph: RecordedGraph, found: Mapping[str, Any], scope: Mapping[str, Any]
) -> dict[sympy.Symbol, int] | NoFit:
    """The value of each symbol: the size of some tensor, or an integer that is given."""
    sizes: dict[sympy.Symbol, int] = {}
    for source, example in graph.inputs:
        if isinstance(example, Fake) and isinstance(found[source], torch.Tensor):
            for expr, size in zip(example.shape, found[source].shape, strict=False):
                if expr.is_Symbol:
                    sizes.setdefault(expr, size)
    for source, example in graph.inputs:
        if isinstance(example, Number) and example.expr.is_Symbol and example.expr not in sizes:
            value = eval(source, dict(scope)) if source.startswith(("L[", "G[")) else None
            if type(value) is not int:
                return NoFit(f"nothing shows the size {example.expr}")
            sizes[example.expr] = value
    unknown = [symbol for symbol, _ in graph.symbols if symbol not in sizes]
    return NoFit(f"nothing shows the sizes {unknown}") if unknown else sizes


def _misfit(
    source: str, example: Any, found: Mapping[str, Any], sizes: Mapping[sympy.Symbol, int]
) -> str | None:
    if isinstance(example, Number):
        return None
    value = found[source]
    if not isinstance(example, Fake) or not isinstance(value, torch.Tensor):
        return f"{source} is no tensor"
    wanted = (example.dtype, example.device, _all_at(example.shape, sizes))
    given = (value.dtype, value.device, tuple(value.shape))
    if wanted != given:
        return f"{source} is {given}, and was {wanted}"
    if not example.is_alone and value.storage_offset() != _at(example.offset, sizes):
        return f"{source} lies elsewhere in memory that it shares"
    return None


def _sharing(graph: RecordedGraph, found: Mapping[str, Any]) -> list[int]:
    """For each tensor the number of its memory, in the order of first appearance."""
    tensors = (found[source] for source, e in graph.inputs if isinstance(e, Fake))
    return _numbered(tensor.untyped_storage()._cdata for tensor in tensors)


def _recorded_sharing(graph: RecordedGraph) -> list[int]:
    return _numbered(example.storage for _, example in graph.inputs if isinstance(example, Fake))


def _numbered(values: Iterable[int]) -> list[int]:
    seen: dict[int, int] = {}
    return [seen.setdefault(value, len(seen)) for value in values]


def _all_at(exprs: Iterable[sympy.Expr], sizes: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
    return tuple(_at(expr, sizes) for expr in exprs)


def _at(expr: sympy.Expr, sizes: Mapping[sympy.Symbol, int]) -> int:
    return int(expr.xreplace(_numbers(sizes)))


def _numbers(sizes: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, sympy.Integer]:
    return {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
