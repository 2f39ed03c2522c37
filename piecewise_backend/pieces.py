"""Copy a run of nodes into a graph of its own.

In:  nodes between two cuts.
Out: a `Piece`, its inputs in order of first use, sizes first.
Knows nothing of where to cut. See Note [Host values] in `steps`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from piecewise_backend import _torch
from piecewise_backend.errors import SplitError
from piecewise_backend.steps import Host, Piece, Value, leaves_of, map_leaves


def location_of(node: fx.Node) -> str:
    """The user's source line of a node, or the node's name."""
    frames = [line.strip() for line in (node.stack_trace or "").splitlines() if "File " in line]
    return frames[-1] if frames else f"node {node.name}"


def is_host(value: Any) -> bool:
    """A number, or a non-empty sequence of nothing else (torch.Size among them)."""
    if isinstance(value, tuple | list):
        return len(value) > 0 and all(is_host(item) for item in value)
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def is_host_node(node: fx.Node) -> bool:
    """`is_host` of what a node is known to return."""
    return is_host(_torch.example_if_made(node))  # what is made later are tensors


def host_value(value: Any) -> Any:
    """The host value as numbers and `Host` expressions."""
    if isinstance(value, tuple | list):
        return tuple(host_value(item) for item in value)
    number = _torch.number_of(value)
    return Host(number) if isinstance(number, sympy.Basic) else number


class PieceBuilder:
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
        symbols = symbols_of([_torch.example_of(node) for node in inputs])
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
                if is_outside and not is_host_node(source):
                    found.setdefault(source)
        return list(found)

    def _host_symbols(self) -> list[sympy.Symbol]:
        sources = [source for node in self.nodes for source in node.all_input_nodes]
        return symbols_of([_torch.example_of(source) for source in sources if is_host_node(source)])

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
        return map_leaves(host_value(_torch.example_of(leaf)), self._number)

    def _number(self, leaf: Any) -> Any:
        if not isinstance(leaf, Host):
            return leaf
        emitted = _torch.emit_expr(leaf.expr, self.symbols)
        return emitted.node if isinstance(emitted, fx.Proxy) else emitted


def symbols_of(values: Iterable[Any]) -> list[sympy.Symbol]:
    """Size symbols in the shapes, strides and numbers among `values`, in order."""
    found: dict[sympy.Symbol, None] = {}
    for value in values:
        numbers = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        for leaf in leaves_of(numbers):
            host = host_value(leaf) if is_host(leaf) else None
            if isinstance(host, Host):
                for symbol in sorted(host.expr.free_symbols, key=str):
                    found.setdefault(symbol)
    return list(found)


def read_outside(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes whose tensors are read after this run of nodes."""
    own = set(nodes)
    outputs = []
    for node in nodes:
        readers = [u for u in node.users if u not in own and not is_host_node(u)]
        if readers and not _torch.has_tensor_example(node):
            raise SplitError(
                f"{node.name} ({location_of(node)}) is not a tensor but is used on both sides of a "
                "splitting op; unpack it before the op"
            )
        if readers:
            outputs.append(node)
    return outputs


_REGION_OPENS = {
    "_enter_autocast": 1,
    "_exit_autocast": -1,
    "_enter_inference_mode": 1,
    "_exit_inference_mode": -1,
    "_vmap_increment_nesting": 1,
    "_vmap_decrement_nesting": -1,
}


def refuse_open_regions(nodes: list[fx.Node]) -> None:
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
