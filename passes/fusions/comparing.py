"""Compare a place in a graph with a pattern, backwards from its result.

In:  a spelling of a part, and a node of a piece's graph as Inductor has it.
Out: `Found`: what the parameters of the spelling stand for there, and which nodes compute it.
Knows nothing of what the parts mean.

Note [Why not Inductor's matcher]
Norm and quantisation are spelled in some fifty ways each, and a fusion is a pair of them.
Inductor's matcher has no alternatives and no order of operands, so that every pair, order and dtype
would be a pattern of its own, several thousand. Here a part is a pattern, and fusions are put
together from parts. Patterns are traced as Inductor's matcher traces its own, so that they look
like the graphs they are to be found in whatever the version of torch.

Note [What is the same]
The same op, dtype and constants. Operands of sums and products may be swapped. Dimensions count
from the last, so that ranks do not matter. Casts of the same tensor are the same wherever they
stand, as Inductor does not merge them. A parameter stands for any tensor, and for the same one
wherever it appears. Memory that is made to be written is the same as any other. Shapes of what
parameters stand for are left to preconditions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from piecewise_backend import _torch
from piecewise_backend.passes.fusions.spellings import Spelling

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
FACTORIES = (aten.empty.memory_format, aten.empty_strided.default)
"""Memory that an op writes its result to: all there is to compare is the dtype."""
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
# Values that nobody writes; the epsilon is a float32, as some decompositions make it one.
_NUMBERS: Mapping[str, float | int] = {"eps": 51 / 4096, "group_size": 304}
_FLOAT32 = torch.float32

Bound = dict[fx.Node | str, tuple[Any, ...]]
"""Nodes of a pattern, or names of numbers, and what they stand for in a graph."""


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """Stands in a pattern for a number that is a parameter of its spelling."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A part in a graph."""

    arguments: Mapping[str, Any]
    """A node or a number for each parameter of the spelling."""
    outputs: tuple[tuple[fx.Node, ...], ...]
    """For each result the nodes that are it, which may be none."""
    inside: frozenset[fx.Node]
    """The other nodes that compute it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """A traced spelling."""

    parameters: Mapping[str, fx.Node]
    outputs: tuple[fx.Node, ...]

    def unrounded(self) -> Pattern | None:
        """Without the cast at its end, if there is one."""
        last = self.outputs[0]
        if last.target is not CAST:
            return None
        return Pattern(self.parameters, (last.all_input_nodes[0], *self.outputs[1:]))

    def certain(self) -> frozenset[str]:
        """The parameters that stand for something wherever the first result is found."""
        seen: set[fx.Node] = set()
        numbers: list[Any] = []
        todo = [self.outputs[0]]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                fx.node.map_aggregate(_arguments(node), numbers.append)
                todo += node.all_input_nodes
        names = {name for name, given in self.parameters.items() if given in seen}
        names |= {given.name for given in numbers if isinstance(given, Number)}
        return frozenset(names)

    def match(self, node: fx.Node) -> Found | None:
        """Whether `node` is the first result."""
        bound = _same_node(self.outputs[0], node, {})
        for output in self.outputs[1:]:
            bound = bound and _with_output(output, bound)
        if not bound:
            return None
        arguments: dict[str, Any] = {n: bound[p][0] for n, p in self.parameters.items()}
        arguments |= {name: value for name, (value, *_) in bound.items() if isinstance(name, str)}
        outputs = tuple(bound.get(output, ()) for output in self.outputs)
        inside = {
            each
            for wanted, found in bound.items()
            if isinstance(wanted, fx.Node) and wanted.op != "placeholder"
            for each in found
        }
        return Found(arguments, outputs, frozenset(inside.difference(*outputs)))


def traced(spelling: Spelling, dtype: torch.dtype, device: torch.device) -> Pattern:
    """The pattern of a spelling whose values are of `dtype`."""
    return patterns(spelling, dtype, device)[0]


@functools.cache
def patterns(spelling: Spelling, dtype: torch.dtype, device: torch.device) -> tuple[Pattern, ...]:
    """That pattern, and the one that is left of it in Inductor if that is another."""
    names = _torch.positional_parameters(spelling)
    numbers = {name: _NUMBERS[name] for name in names if name in _NUMBERS}
    others = {"dtype": dtype} if "dtype" in names else {}
    tensors = [name for name in names if name not in numbers and name not in others]
    columns = 2 * int(numbers.get("group_size", 64))

    def call(*args: Tensor) -> Any:
        return spelling(**dict(zip(tensors, args, strict=True)), **numbers, **others)

    graph = _torch.trace_pattern(
        call, lambda: [_example(n, columns, dtype, device) for n in tensors]
    )
    graphs = [graph, *filter(None, [_torch.simplified(graph)])]
    return tuple(_pattern(each, tensors, numbers) for each in graphs)


def _pattern(
    graph: fx.Graph, tensors: Sequence[str], numbers: Mapping[str, float | int]
) -> Pattern:
    _mark(graph, numbers)
    placeholders = graph.find_nodes(op="placeholder")
    outputs: Any = graph.output_node().args[0]
    return Pattern(
        dict(zip(tensors, placeholders, strict=True)),
        tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,),
    )


def _mark(graph: fx.Graph, numbers: Mapping[str, float | int]) -> None:
    """Put a `Number` wherever the value of a parameter went."""

    def marked(value: Any) -> Any:
        names = [n for n, v in numbers.items() if type(v) is type(value) and v == value]
        return Number(names[0]) if names else value

    for node in graph.nodes:
        if node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, marked)
            node.kwargs = fx.node.map_aggregate(node.kwargs, marked)


def _example(name: str, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    wide = name == "scale" or name.startswith("wide_")
    shape = {"weight": (columns,), "scale": (1,)}.get(name, (2, columns))
    return torch.empty(shape, dtype=_FLOAT32 if wide else dtype, device=device)


def same_value(a: fx.Node, b: fx.Node) -> bool:
    """The same node, or casts of the same node to the same dtype."""
    if a is b:
        return True
    if a.target is not CAST or b.target is not CAST or a.args[1:] != b.args[1:]:
        return False
    return same_value(a.all_input_nodes[0], b.all_input_nodes[0])


def _same(wanted: Any, found: Any, bound: Bound) -> Bound | None:
    """`bound` with what is in these, if they are the same."""
    if isinstance(wanted, fx.Node):
        return _same_node(wanted, found, bound) if isinstance(found, fx.Node) else None
    if isinstance(wanted, list | tuple):
        return _same_items(wanted, found, bound)
    if isinstance(found, fx.Node):
        return None
    if not isinstance(wanted, Number):
        return bound if wanted == found else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    name = wanted.name
    return bound | {name: (found,)} if bound.get(name, (found,)) == (found,) else None


def _same_items(wanted: Any, found: Any, bound: Bound | None) -> Bound | None:
    if not isinstance(found, list | tuple) or len(wanted) != len(found):
        return None
    for a, b in zip(wanted, found, strict=True):
        if bound is not None:
            bound = _same(a, b, bound)
    return bound


def _same_node(wanted: fx.Node, found: fx.Node, bound: Bound) -> Bound | None:
    known = bound.get(wanted)
    if known is not None:
        if not same_value(known[0], found):
            return None
        return bound if found in known else bound | {wanted: (*known, found)}
    if wanted.op == "placeholder":
        return bound | {wanted: (found,)} if isinstance(_torch.value_of(found), Tensor) else None
    if wanted.op != found.op or wanted.target != found.target or _dtype(wanted) != _dtype(found):
        return None
    expected = _arguments(wanted)
    for given in _orders(found):
        result = _same_items(expected, given, bound)
        if result is not None:
            return result | {wanted: (found,)}
    return None


def _with_output(output: fx.Node, bound: Bound) -> Bound:
    """Look for another result among the readers of what it is computed from."""
    if output in bound:
        return bound
    for source in bound.get(output.all_input_nodes[0], ()):
        for user in source.users:
            result = _same_node(output, user, {k: v for k, v in bound.items() if k is not output})
            if result is not None:
                bound = result | {output: (*bound.get(output, ()), user)}
    return bound


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(_torch.value_of(node), "dtype", None)


def _orders(node: fx.Node) -> Iterator[list[Any]]:
    """The arguments of a call, in each order that means the same."""
    arguments = _arguments(node)
    yield arguments
    if node.target in _COMMUTATIVE:
        first, second, *rest = arguments
        yield [second, first, *rest]


def _arguments(node: fx.Node) -> list[Any]:
    """All arguments of a call, defaults too; dimensions counted from the last."""
    if node.target in FACTORIES:
        return []
    if not isinstance(node.target, torch._ops.OpOverload):
        return [*node.args, *(part for item in sorted(node.kwargs.items()) for part in item)]
    values = []
    for position, declared in enumerate(node.target._schema.arguments):
        is_given = position < len(node.args)
        value = node.args[position] if is_given else node.kwargs.get(declared.name)
        if not is_given and declared.name not in node.kwargs and declared.has_default_value():
            value = declared.default_value
        values.append(_from_last(value, node) if declared.name == "dim" else value)
    return values


def _from_last(dims: Any, node: fx.Node) -> Any:
    first = node.all_input_nodes[0]
    rank = getattr(_torch.value_of(first), "ndim", 0) + (node.target is aten.unsqueeze.default)
    if isinstance(dims, int):
        return dims - rank if dims >= 0 else dims
    if isinstance(dims, list | tuple):
        return [d - rank if isinstance(d, int) and d >= 0 else d for d in dims]
    return dims
