"""Keep what a piece returns in memory of its own.

In:  the graph of a piece before Inductor changes it, and again after the passes.
Out: the same graph, with copies of results that came to share memory in between.
Knows nothing of pieces or passes.

Note [Results that became views]
Inductor takes out copies that change no value, such as `y = empty_like(x); y.copy_(x)`, and asks
first whether the result would then be the memory of an input. With two copies on the way, or a
view between them, it looks at memory that was recorded before the first copy went, and returns a
view of the input after all. A user's pass may do the same. Inside of one graph nobody can tell.
But a piece is followed by split ops, and what they write into such a result they would write
into the input, which others still read.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from piecewise_backend import _torch

aten = torch.ops.aten
_META_KEY = "piecewise_result_memory"
# Lowered to a view, though its schema says that it makes a tensor.
_UNDECLARED_VIEWS = (aten._unsafe_view.default,)


def note_memory(graph: fx.Graph) -> None:
    """Write down, in the graph, which results share memory with inputs or with one another."""
    owners = [_owner(result) for result in _results(graph)]
    # On a node: Inductor copies graphs, and a copy keeps what its nodes have.
    graph.output_node().meta[_META_KEY] = [
        owner if isinstance(owner, str) else owners.index(owner) for owner in owners
    ]


def keep_apart(graph: fx.Graph) -> int:
    """Copy results that share memory and did not when it was noted; returns how many copies."""
    noted = graph.output_node().meta.get(_META_KEY)
    if noted is None:
        return 0  # with Inductor's `use_joint_graph_passes` off nobody is asked to note
    results = _results(graph)
    rightful: dict[Hashable, Hashable] = {}
    apart: dict[Hashable, list[int]] = {}
    for position, before in enumerate(noted):
        now = _owner(results[position])
        if before != (now if isinstance(now, str) else rightful.setdefault(now, before)):
            apart.setdefault((now, before), []).append(position)
    for positions in apart.values():
        _copy(graph, results, positions)
    return len(apart)


def _copy(graph: fx.Graph, results: list[Any], positions: list[int]) -> None:
    """Let these results be views of one copy, which is made as late as they are the same."""
    chains = [_chain(results[position]) for position in positions]
    shared = [node for node in chains[0] if all(node in chain for chain in chains)]
    source = next(node for node in shared if isinstance(_torch.value_of(node), torch.Tensor))
    output = graph.output_node()
    with graph.inserting_before(output):
        copies = {source: graph.call_function(aten.clone.default, (source,))}
        _torch.complete_value(copies[source], _torch.value_of(source).fake_mode)
        for position, chain in zip(positions, chains, strict=True):
            for node in reversed(chain[: chain.index(source)]):
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
            results[position] = copies[chain[0]]
    is_sequence = isinstance(output.args[0], tuple | list)
    output.args = (tuple(results) if is_sequence else results[0],)


def _results(graph: fx.Graph) -> list[Any]:
    (results,) = graph.output_node().args
    return list(results) if isinstance(results, tuple | list) else [results]


def _owner(result: Any) -> Hashable:
    """Names the memory of a result: by a string if it belongs to an input or a constant."""
    if not isinstance(result, fx.Node):
        return id(result)  # None, or a number
    base = _chain(result)[-1]
    if base.op in ("placeholder", "get_attr"):
        return str(base.target)
    return base.args if base.target is operator.getitem else base


def _chain(result: fx.Node) -> list[fx.Node]:
    """The node, what it is a view of, what that is a view of, and so on."""
    chain = [result]
    while (base := _viewed(chain[-1])) is not None:
        chain.append(base)
    return chain


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a node makes a view of, or one of several views."""
    if node.target is operator.getitem:
        source = node.args[0]
        if not isinstance(source, fx.Node) or _viewed(source) is None:
            return None
        return source
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    is_view = any(result.alias_info is not None for result in node.target._schema.returns)
    if not is_view and node.target not in _UNDECLARED_VIEWS:
        return None
    return next(iter(node.all_input_nodes), None)
