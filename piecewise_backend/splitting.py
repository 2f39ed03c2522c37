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
from piecewise_backend.registry import SplitOps, names_of, registered_splitting_ops
from piecewise_backend.steps import (
    GraphInput,
    Host,
    Piece,
    SplitGraph,
    SplitOp,
    Step,
    Value,
    leaves_of,
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
        if missed and not chosen.match(node):
            raise SplitError(
                f"{sorted(missed)[0]!r} is a registered splitting op but splitting_ops="
                f"{sorted(chosen.names)} does not name it, so it would be frozen inside a graph "
                f"({location_of(node)}); add it to splitting_ops, or leave the option out"
            )


def location_of(node: fx.Node) -> str:
    """The user's source line of a node, or the node's name."""
    frames = [line.strip() for line in (node.stack_trace or "").splitlines() if "File " in line]
    return frames[-1] if frames else f"node {node.name}"


def _is_host(value: Any) -> bool:
    """A number, or a non-empty sequence of nothing else (torch.Size among them)."""
    if isinstance(value, tuple | list):
        return len(value) > 0 and all(_is_host(item) for item in value)
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _host(value: Any) -> Any:
    """The host value as numbers and `Host` expressions."""
    if isinstance(value, tuple | list):
        return tuple(_host(item) for item in value)
    number = _torch.number_of(value)
    return Host(number) if isinstance(number, sympy.Basic) else number


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
            elif node.op in ("placeholder", "get_attr") or _is_host(_torch.example_of(node)):
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
        example = _torch.example_of(leaf)
        if _is_host(example):
            return _host(example)
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
                is_method=node.op == "call_method",
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
            _refuse_open_regions(self.pending)
            builder = _PieceBuilder(self.gm, self.pending)
            self.steps.append(builder.build(len(self.steps), _read_outside(self.pending)))
            self.pending = []


class _PieceBuilder:
    """Copy a run of nodes into a graph of its own."""

    def __init__(self, gm: fx.GraphModule, nodes: list[fx.Node]) -> None:
        self.gm = gm
        self.nodes = nodes
        self.graph = fx.Graph()
        self.symbols: dict[sympy.Symbol, fx.Proxy] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.tracer = fx.proxy.GraphAppendingTracer(self.graph)

    def build(self, index: int, outputs: list[fx.Node]) -> Piece:
        inputs = self._tensor_inputs()
        examples = {node.name: _torch.example_of(node) for node in (*inputs, *outputs)}
        symbols = _symbols_of([_torch.example_of(node) for node in inputs])
        symbols += [s for s in self._host_symbols() if s not in symbols]
        for position, symbol in enumerate(symbols):
            placeholder = self.graph.placeholder(f"size{position}")
            self.symbols[symbol] = fx.Proxy(placeholder, self.tracer)
        for node in inputs:
            self.copies[node] = self._copy(node)
        for node in self.nodes:
            self.copies[node] = self._copy(node)
        self.graph.output(tuple(self.copies[node] for node in outputs))
        module = fx.GraphModule(self.gm, self.graph)
        refs: tuple[Value | Host, ...] = (
            *(Host(symbol) for symbol in symbols),
            *(Value(node.name) for node in inputs),
        )
        return Piece(index, module, refs, tuple(node.name for node in outputs), examples)

    def _tensor_inputs(self) -> list[fx.Node]:
        own = set(self.nodes)
        found: dict[fx.Node, None] = {}
        for node in self.nodes:
            for source in node.all_input_nodes:
                is_outside = source not in own and source.op != "get_attr"
                if is_outside and not _is_host(_torch.example_of(source)):
                    found.setdefault(source)
        return list(found)

    def _host_symbols(self) -> list[sympy.Symbol]:
        hosts = [
            _torch.example_of(source) for node in self.nodes for source in node.all_input_nodes
        ]
        return _symbols_of([value for value in hosts if _is_host(value)])

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self.nodes:
            copy = self.graph.placeholder(node.name)
        else:
            # Emit the size arithmetic first: nodes must come before their users.
            args = map_leaves(node.args, self._argument)
            kwargs = map_leaves(node.kwargs, self._argument)
            copy = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        copy.meta = {k: node.meta[k] for k in ("example_value", "stack_trace") if k in node.meta}
        return copy

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf.op == "get_attr" and leaf not in self.copies:
            self.copies[leaf] = self.graph.get_attr(str(leaf.target))
        if leaf in self.copies:
            return self.copies[leaf]
        return map_leaves(_host(_torch.example_of(leaf)), self._number)

    def _number(self, leaf: Any) -> Any:
        if not isinstance(leaf, Host):
            return leaf
        emitted = _torch.emit_expr(leaf.expr, self.symbols)
        return emitted.node if isinstance(emitted, fx.Proxy) else emitted


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    return operator.attrgetter(target)(gm)


def _graph_input(node: fx.Node) -> GraphInput:
    example = _torch.example_of(node)
    is_static = isinstance(example, torch.nn.Parameter) or _torch.is_static_input(node)
    return GraphInput(node.name, _torch.source_name(node), example, is_static)


def _symbols_of(values: Iterable[Any]) -> list[sympy.Symbol]:
    """Size symbols in the shapes, strides and numbers among `values`, in order."""
    found: dict[sympy.Symbol, None] = {}
    for value in values:
        numbers = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        for leaf in leaves_of(numbers):
            host = _host(leaf) if _is_host(leaf) else None
            if isinstance(host, Host):
                for symbol in sorted(host.expr.free_symbols, key=str):
                    found.setdefault(symbol)
    return list(found)


def _input_symbols(inputs: tuple[GraphInput, ...]) -> tuple[sympy.Symbol, ...]:
    return tuple(_symbols_of([item.example for item in inputs]))


def _read_outside(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes whose tensors are read after this run of nodes."""
    own = set(nodes)
    outputs = []
    for node in nodes:
        readers = [u for u in node.users if u not in own and not _is_host(_torch.example_of(u))]
        if readers and not isinstance(_torch.example_of(node), torch.Tensor):
            raise SplitError(
                f"{node.name} ({location_of(node)}) is not a tensor but is used on both sides of a "
                "splitting op; unpack it before the op"
            )
        if readers:
            outputs.append(node)
    return outputs


def _refuse_data_dependence(gm: fx.GraphModule, bound: frozenset[sympy.Symbol]) -> None:
    for node in gm.graph.nodes:
        value = _torch.example_of(node)
        if isinstance(value, torch.Tensor) or _is_host(value):
            free = [s for s in _symbols_of([value]) if s not in bound]
            if free:
                raise SplitError(
                    f"{node.name} has a size that depends on data ({location_of(node)}); compute "
                    "it outside of the compiled model, or register the op around it as a splitting op"
                )


_REGION_OPENS = {
    "_enter_autocast": 1,
    "_exit_autocast": -1,
    "_enter_inference_mode": 1,
    "_exit_inference_mode": -1,
    "_vmap_increment_nesting": 1,
    "_vmap_decrement_nesting": -1,
}


def _refuse_open_regions(nodes: list[fx.Node]) -> None:
    """A region that a cut splits would leave the split op under the wrong mode."""
    depth: dict[str, int] = {}
    for node in nodes:
        name = getattr(node.target, "__name__", "")
        if name in _REGION_OPENS:
            region = "vmap" if "vmap" in name else name.split("_", 2)[2]
            depth[region] = depth.get(region, 0) + _REGION_OPENS[name]
            if depth[region] < 0:
                break
    for region in (region for region, level in depth.items() if level):
        raise SplitError(
            f"the {region} region spans a splitting op ({location_of(nodes[0])}); close it before "
            f"the op, or call the whole model under {region}"
        )
