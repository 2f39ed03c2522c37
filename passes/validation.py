"""Find out whether a pass broke the graph that it changed.

In:  the interface of a graph before a pass, and the graph after it.
Out: `BrokenGraphError`, which names the node.

Always checked: that every input of a node exists and comes before it, that inputs are the same,
outputs as many and of the same dtypes, sizes and devices, that new nodes can be computed from
their inputs, and, in pieces, that they call what Inductor compiles. On request every node is
computed anew, but calls of subgraphs, which finds recorded values that the pass left wrong.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from piecewise_backend import _torch


class BrokenGraphError(Exception):
    """What is wrong, and at which node."""


@dataclasses.dataclass(frozen=True, slots=True)
class Interface:
    """What the surroundings of a graph rely on."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[tuple[Any, ...], ...]
    foreign: frozenset[str]
    """What it calls that a pass may not put into a piece: Inductor itself does."""

    @classmethod
    def of(cls, graph: fx.Graph) -> Interface:
        """The interface of a graph at this moment."""
        inputs = tuple(str(node.target) for node in graph.find_nodes(op="placeholder"))
        outputs = tuple(_kind(leaf) for leaf in _returned(graph))
        unknown = (node for node in graph.nodes if not _torch.is_for_inductor(node))
        sizes = tuple(_sizes(leaf) for leaf in _returned(graph))
        return cls(inputs, outputs, sizes, frozenset(map(_torch.target_name, unknown)))


def check(
    graph: fx.Graph, before: Interface, *, for_inductor: bool = False, recompute: bool = False
) -> None:
    """Raise if the graph is broken; nodes may be reordered, and values are completed.

    Args:
        graph: as the pass left it.
        before: how it was.
        for_inductor: Inductor compiles it next, so new nodes call what that knows.
        recompute: compute every node anew.

    Raises:
        BrokenGraphError: it is.
    """
    _check_references(graph)
    _check_order(graph)
    if for_inductor:
        _check_calls(graph, before.foreign)
    mode = _torch.fake_mode_of(graph)
    if mode is not None:
        _complete(graph, mode, recompute)
    after = Interface.of(graph)
    if after.inputs != before.inputs:
        raise BrokenGraphError(f"the graph takes {after.inputs} and took {before.inputs}")
    if len(after.outputs) != len(before.outputs):
        raise BrokenGraphError(
            f"the graph returns {len(after.outputs)} values and returned {len(before.outputs)} "
            f"(node {graph.output_node().name!r})"
        )
    returned = zip(_returned(graph), after.outputs, before.outputs, strict=True)
    for position, (leaf, now, then) in enumerate(returned):
        if now != then:
            raise BrokenGraphError(
                f"output {position} (node {str(leaf)!r}) is {now} and was {then}"
            )
        sizes, sizes_before = after.sizes[position], before.sizes[position]
        if not all(map(_torch.may_be_same_size, sizes, sizes_before)):
            raise BrokenGraphError(
                f"output {position} (node {str(leaf)!r}) has sizes {sizes} and had {sizes_before}"
            )


def _returned(graph: fx.Graph) -> list[Any]:
    found = [node for node in graph.nodes if node.op == "output"]
    if len(found) != 1:
        raise BrokenGraphError(f"the graph has {len(found)} output nodes")
    return pytree.tree_leaves(found[0].args[0])


def _kind(leaf: Any) -> str:
    """Dtype, rank and device; sizes are expressions that may be written in several ways."""
    value = _torch.value_of(leaf) if isinstance(leaf, fx.Node) else leaf
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of rank {value.dim()} on {value.device}"
    return type(value).__name__


def _sizes(leaf: Any) -> tuple[Any, ...]:
    value = _torch.value_of(leaf) if isinstance(leaf, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _check_references(graph: fx.Graph) -> None:
    present = set(graph.nodes)
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in present:
                raise BrokenGraphError(
                    f"node {node.name!r} reads {source.name!r}, which is not in the graph"
                )


def _check_calls(graph: fx.Graph, known: frozenset[str]) -> None:
    for node in graph.nodes:
        name = _torch.target_name(node)
        if not _torch.is_for_inductor(node) and name not in known:
            kind = "method" if node.op == "call_method" else "function"
            raise BrokenGraphError(
                f"node {node.name!r} calls the {kind} {name!r}, which Inductor does not compile; "
                "call an overload of an op, such as torch.ops.aten.relu.default"
            )


def _check_order(graph: fx.Graph) -> None:
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            break
        seen.add(node)
    else:
        return
    if cycle := _cycle(graph):
        names = " -> ".join(repr(node.name) for node in cycle)
        raise BrokenGraphError(f"nodes depend on themselves: {names}")
    _torch.sort_nodes(graph)


def _cycle(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that read one another in a circle, or none."""
    waiting = set(graph.nodes)
    while ready := [n for n in waiting if waiting.isdisjoint(n.all_input_nodes)]:
        waiting.difference_update(ready)
    if not waiting:
        return []
    path = [min(waiting)]
    while True:
        source = next(n for n in path[-1].all_input_nodes if n in waiting)
        if source in path:
            return [*path[path.index(source) :], source][::-1]
        path.append(source)


def _complete(graph: fx.Graph, mode: _torch.FakeTensorMode, recompute: bool) -> None:
    for node in graph.nodes:
        try:
            _torch.complete_value(node, mode)
            value = _torch.fake_call(node, mode) if recompute and _is_computable(node) else None
        except Exception as error:
            raise BrokenGraphError(
                f"node {node.name!r} cannot be computed from its inputs: "
                f"{type(error).__name__}: {error}"
            ) from error
        recorded = _torch.value_of(node)
        are_tensors = isinstance(value, torch.Tensor) and isinstance(recorded, torch.Tensor)
        if are_tensors and not _agree(value, recorded):
            raise BrokenGraphError(
                f"node {node.name!r} computes {_facts(value)}, but is recorded as "
                f"{_facts(recorded)}"
            )


def _is_computable(node: fx.Node) -> bool:
    """A call of no subgraph, whose inputs all have values."""
    if not node.op.startswith("call_") or _torch.is_higher_order(node):
        return False
    return all(map(_torch.has_value, node.all_input_nodes))


def _facts(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"


def _agree(a: Any, b: Any) -> bool:
    if (a.dtype, a.device, a.dim()) != (b.dtype, b.device, b.dim()):
        return False
    return all(map(_torch.may_be_same_size, a.shape, b.shape))
