"""Put one op in place of the parts that it computes.

In:  what parts a graph has at a node, as arguments and results of the op.
Out: the changed graph, if nothing else needs what lies inside.
Knows nothing of which parts there are.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from piecewise_backend import _torch
from piecewise_backend.passes.fusions.comparing import CAST, FACTORIES
from piecewise_backend.passes.fusions.parts import VIEWS, Outputs, sizes, tensor

aten = torch.ops.aten
Order = dict[fx.Node, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Occurrence:
    """One place where an op can stand."""

    arguments: tuple[Any, ...]
    """Of the op, in its order."""
    outputs: Outputs
    """For each result of the op the nodes that are it, in whatever shape."""
    inside: frozenset[fx.Node]
    """What computes them and is of no use then; may name outputs and arguments, too."""

    @property
    def inputs(self) -> set[fx.Node]:
        """The nodes among the arguments."""
        return {arg for arg in self.arguments if isinstance(arg, fx.Node)}

    @property
    def made(self) -> set[fx.Node]:
        """All nodes that are results."""
        return {node for nodes in self.outputs for node in nodes}

    def is_self_contained(self) -> bool:
        """Nobody else needs what lies inside; casts and views of an input stay for those."""
        inputs, made = self.inputs, self.made
        inside = self.inside - made - inputs
        return all(
            node.users.keys() <= inside | made or _is_seen_through(node, inputs) for node in inside
        )

    def replace(self, graph: fx.Graph, op: Callable[..., Any]) -> frozenset[fx.Node]:
        """Put `op` in, if that is possible; returns the nodes that are gone."""
        order = {node: position for position, node in enumerate(graph.nodes)}
        mode, inputs = _torch.fake_mode_of(graph), self.inputs
        last = max(inputs, key=order.__getitem__)
        if mode is None or _depend(inputs, self.made) or _passes_a_write(self.made, last, order):
            return frozenset()
        if last.op == "placeholder":
            last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            fused = graph.call_function(op, self.arguments)
        _torch.complete_value(fused, mode)
        values = _torch.value_of(fused)
        results = [values] if isinstance(values, Tensor) else list(values)
        pairs = list(zip(results, self.outputs, strict=True))
        if not all(_is_like(old, new) for new, nodes in pairs for old in nodes):
            graph.erase_node(fused)
            return frozenset()
        for number, nodes in enumerate(self.outputs):
            for old in nodes:
                _stand_in(fused, None if len(results) == 1 else number, results[number], old)
        return frozenset(_erase(graph, self.inside | self.made, order))


def _is_seen_through(node: fx.Node, inputs: set[fx.Node]) -> bool:
    if node.target in FACTORIES:
        return True
    while node.target in (CAST, *VIEWS):
        node = node.all_input_nodes[0]
        if node in inputs:
            return True
    return False


def _depend(inputs: set[fx.Node], made: set[fx.Node]) -> bool:
    """An input is computed from a result: together they would be a cycle."""
    seen: set[fx.Node] = set()
    pending = list(made)
    while pending:
        node = pending.pop()
        if node in inputs:
            return True
        if node not in seen:
            seen.add(node)
            pending.extend(node.users)
    return False


def _passes_a_write(made: set[fx.Node], last: fx.Node, order: Order) -> bool:
    """A reader of a result would move behind something that writes, or draws numbers."""
    early = [order[user] for node in made for user in node.users if order[user] < order[last]]
    if not early:
        return False
    between = (n for n, position in order.items() if min(early) <= position <= order[last])
    return any(_torch.has_order(node) for node in between)


def _is_like(old: fx.Node, new: Tensor) -> bool:
    """What is computed is of the same dtype, packed, and can be given the shape that was."""
    was = tensor(old)
    if was.dtype != new.dtype or was.device != new.device or not _is_packed(was):
        return False
    if sizes(old) == _exprs(new.shape):
        return True
    is_as_many = math.prod(sizes(old)) == math.prod(_exprs(new.shape))
    return is_as_many and _literal_shape(was) is not None


def _is_packed(value: Tensor) -> bool:
    """Contiguous, as far as can be told without an assumption about a size."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not isinstance(size, int) or size != 1:
            if _torch.size_expr(stride) != expected:
                return False
            expected = expected * _torch.size_expr(size)
    return True


def _literal_shape(value: Tensor) -> list[int] | None:
    """The shape in integers, the one that is symbolic as -1; None if it cannot be said so."""
    shape = [size if isinstance(size, int) else -1 for size in value.shape]
    return shape if shape.count(-1) == 0 or (shape.count(-1) == 1 and 0 not in shape) else None


def _stand_in(fused: fx.Node, number: int | None, value: Tensor, old: fx.Node) -> None:
    """Let a result of the op be read where `old` is."""
    graph, new = fused.graph, fused
    if number is not None:
        with graph.inserting_after(fused):
            new = graph.call_function(operator.getitem, (fused, number))
    if sizes(old) != _exprs(value.shape):
        with graph.inserting_after(new):
            new = graph.call_function(aten.reshape.default, (new, _literal_shape(tensor(old))))
    if new is not fused:
        new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


def _exprs(shape: Iterable[Any]) -> list[Any]:
    return [_torch.size_expr(size) for size in shape]


def _erase(graph: fx.Graph, nodes: Iterable[fx.Node], order: Order) -> Iterator[fx.Node]:
    """Those that nobody reads any more, readers first."""
    for node in sorted(set(nodes), key=order.__getitem__, reverse=True):
        if not node.users and node.op == "call_function":
            graph.erase_node(node)
            yield node
