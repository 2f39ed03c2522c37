"""Cut one graph into pieces at the split ops, keeping its order.

In:  a GraphModule from Dynamo (nodes carry example values), and the ops to cut at.
Out: a `SplitGraph`.
Knows nothing of compilers, captures or batches. See Note [Host values] in `steps`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from piecewise_backend import _torch
from piecewise_backend.errors import SplitError
from piecewise_backend.modes import CaptureSupport
from piecewise_backend.pieces import (
    PieceBuilder,
    host_value,
    is_host,
    is_host_node,
    location_of,
    read_outside,
    refuse_open_regions,
    symbols_of,
)
from piecewise_backend.registry import SplitOps, names_of, registered_splitting_ops, traits_of
from piecewise_backend.steps import (
    GraphInput,
    SplitGraph,
    SplitOp,
    Step,
    Value,
    map_leaves,
)


def split_graph(
    gm: fx.GraphModule, ops: SplitOps | Iterable[str], *, allow_uncut: bool = False
) -> SplitGraph:
    """Cut `gm` at `ops`.

    Args:
        gm: a graph as Dynamo hands it to a backend, called while Dynamo's trace is current
            for source names (they are node names otherwise). It is not changed.
        ops: names to cut at, or a resolved set.
        allow_uncut: let a registered op that is not among `ops` stay inside a piece.

    Raises:
        SplitError: data-dependent shapes; an autocast region or a registered op that a cut or
            the lack of one would break.
        ConfigError: a name among `ops` that does not exist.
    """
    chosen = ops if isinstance(ops, SplitOps) else SplitOps.resolve(ops)
    if not allow_uncut:
        _refuse_uncut(gm, chosen)
    return _Cutter(gm, chosen).run()


def _refuse_uncut(gm: fx.GraphModule, chosen: SplitOps) -> None:
    registered = set(registered_splitting_ops())
    for node in gm.graph.nodes:
        missed = registered.intersection(names_of(node))
        if not missed or chosen.match(node):
            continue
        traits = traits_of(min(missed))
        is_captured = traits.capture is CaptureSupport.ALWAYS
        if is_captured and not traits.before_replay:
            continue
        # Nobody would call the hooks of an op in a piece.
        other_way = "" if is_captured else "; or register it with capture='always'"
        raise SplitError(
            f"{min(missed)!r} is a registered splitting op but splitting_ops="
            f"{sorted(chosen.names)} does not name it, so it would be frozen inside a graph "
            f"({location_of(node)}); add it to splitting_ops or leave the option out{other_way}"
        )


class _Cutter:
    """One pass over the nodes, collecting steps."""

    def __init__(self, gm: fx.GraphModule, ops: SplitOps) -> None:
        self.gm = gm
        self.ops = ops
        self.steps: list[Step] = []
        self.pending: list[fx.Node] = []

    def run(self) -> SplitGraph:
        inputs = tuple(_graph_input(node) for node in self.gm.graph.find_nodes(op="placeholder"))
        symbols = _input_symbols(inputs)
        _refuse_data_dependence(self.gm, frozenset(symbols))
        outputs: tuple[Any, ...] = ()
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self._close_piece()
                returned = node.args[0]
                leaves = returned if isinstance(returned, tuple | list) else (returned,)
                outputs = tuple(self._ref(leaf) for leaf in leaves)
            elif node.op in ("placeholder", "get_attr") or is_host_node(node):
                continue
            elif op_name := self.ops.match(node):
                self._close_piece()
                self._add_split_op(node, op_name)
            elif not self._belongs_to_split_op(node):
                self.pending.append(node)
        return SplitGraph(inputs, tuple(self.steps), outputs, symbols)

    def _belongs_to_split_op(self, node: fx.Node) -> bool:
        """An item of the tuple that a split op returned is one of its outputs, not a piece."""
        source = node.args[0] if node.target is operator.getitem else None
        if not isinstance(source, fx.Node) or self.ops.match(source) is None:
            return False
        return isinstance(_torch.example_of(source), tuple | list)

    def _ref(self, leaf: Any) -> Any:
        """A node or constant as it appears in a step's arguments."""
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf.op == "get_attr":
            return _attribute(self.gm, str(leaf.target))
        if is_host_node(leaf):
            return host_value(_torch.example_of(leaf))
        return Value(leaf.name)

    def _add_split_op(self, node: fx.Node, op_name: str) -> None:
        example = _torch.example_of(node)
        returns_tuple = isinstance(example, tuple | list)
        outputs: list[str | None] = [None] * (len(example) if returns_tuple else 0)  # type: ignore[arg-type]
        examples: dict[str, Any] = {}
        if returns_tuple:
            for user in node.users:
                outputs[user.args[1]] = user.name  # type: ignore[index]
                examples[user.name] = _torch.example_of(user)
        elif isinstance(example, torch.Tensor):
            outputs = [node.name if node.users else None]
            examples[node.name] = example
        target = (
            getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        )
        self.steps.append(
            SplitOp(
                index=len(self.steps),
                op_name=op_name,
                target=target,  # type: ignore[arg-type]
                args=map_leaves(node.args, self._ref),
                kwargs=map_leaves(node.kwargs, self._ref),
                outputs=tuple(outputs),
                returns_tuple=returns_tuple,
                examples=examples,
                location=location_of(node),
            )
        )

    def _close_piece(self) -> None:
        if self.pending:
            refuse_open_regions(self.pending)
            builder = PieceBuilder(self.gm, self.pending)
            self.steps.append(builder.build(len(self.steps), read_outside(self.pending)))
            self.pending = []


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    return operator.attrgetter(target)(gm)


def _graph_input(node: fx.Node) -> GraphInput:
    example = _torch.example_of(node)
    is_static = isinstance(example, torch.nn.Parameter) or _torch.is_static_input(node)
    return GraphInput(node.name, _torch.source_name(node), example, is_static)


def _input_symbols(inputs: tuple[GraphInput, ...]) -> tuple[sympy.Symbol, ...]:
    return tuple(symbols_of([item.example for item in inputs]))


def _refuse_data_dependence(gm: fx.GraphModule, bound: frozenset[sympy.Symbol]) -> None:
    for node in gm.graph.nodes:
        value = _torch.example_if_made(node)  # of a stored trace: sizes are those of its inputs
        if isinstance(value, torch.Tensor) or is_host(value):
            free = [s for s in symbols_of([value]) if s not in bound]
            if free:
                raise SplitError(
                    f"{node.name} has a size that depends on data ({location_of(node)}); "
                    "compute it outside of the compiled model, or register the op around it as a "
                    "splitting op"
                )
