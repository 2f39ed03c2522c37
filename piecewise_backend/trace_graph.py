"""Dynamo's graph as names and numbers, and back, for a process that does not trace.

In:  a graph as Dynamo hands it to a backend; a `RecordedGraph`.
Out: a `RecordedGraph`, or why there is none; a graph that a backend takes like one of Dynamo's.
Knows nothing of keys, and of what a trace read.

Note [Only names and numbers]
A node has the names of what it calls, and shapes instead of tensors: sizes and strides as
expressions over the size symbols, and which share memory. What a model holds is bound again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._ops import OpOverload, OpOverloadPacket

from piecewise_backend import _torch
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.pieces import location_of
from piecewise_backend.steps import leaves_of, map_leaves


@dataclasses.dataclass(frozen=True, slots=True)
class _Ref:
    """A node."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A symbolic integer."""

    expr: sympy.Expr


@dataclasses.dataclass(frozen=True, slots=True)
class Fake:
    """A tensor without contents."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]
    offset: sympy.Expr
    storage: int
    """The number of its storage in the graph."""
    is_alone: bool
    """No other tensor of the graph shares it."""
    requires_grad: bool

    @property
    def is_all(self) -> bool:
        """It has a storage of its own, and begins where that does."""
        return self.is_alone and self.offset == 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    example: Any
    has_example: bool
    location: str
    source: tuple[str, bool] | None
    """Of an input: how the user's program names it, and whether it is expected to stay."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A graph as names and numbers. See Note [Only names and numbers]."""

    nodes: tuple[_Node, ...]
    symbols: tuple[tuple[sympy.Symbol, str], ...]
    """The size symbols, and how Dynamo names what shows each."""

    @property
    def inputs(self) -> tuple[tuple[str, Any], ...]:
        """For each input its source, and its recorded example."""
        return tuple((node.source[0], node.example) for node in self.nodes if node.source)


def custom_ops_of(recorded: RecordedGraph) -> tuple[str, ...]:
    """The operators that are not torch's, `ns::op`."""
    targets = (node.target for node in recorded.nodes if node.op == "call_function")
    names = (
        t._schema.name if isinstance(t, OpOverload) else t._qualified_op_name
        for t in targets
        if isinstance(t, OpOverload | OpOverloadPacket)
    )
    own = (name for name in names if not name.startswith(("aten::", "prims::", "prim::")))
    return tuple(dict.fromkeys(own))


def functions_of(recorded: RecordedGraph) -> Iterator[types.FunctionType]:
    """The Python functions that the graph calls as they are (`torch.compiler.allow_in_graph`)."""
    for node in recorded.nodes:
        if isinstance(node.target, types.FunctionType):
            yield node.target


def varying_inputs(recorded: RecordedGraph) -> dict[str, tuple[int, ...]]:
    """The dimensions that vary of the inputs that have some, by source."""
    found: dict[str, tuple[int, ...]] = {}
    for source, example in recorded.inputs:
        if isinstance(example, Fake):
            dims = tuple(dim for dim, size in enumerate(example.shape) if not size.is_number)
            found |= {source: dims} if dims else {}
    return found


def record(gm: fx.GraphModule) -> RecordedGraph:
    """The graph of the trace that is current.

    Raises:
        NoContentError: it has something that another process could not make again.
    """
    return _Recorder(gm).run()


class _Recorder:
    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.symbols: dict[sympy.Symbol, str] = {}
        self.storages: dict[int, int] = {}
        self.num_sharing: dict[int, int] = {}

    def run(self) -> RecordedGraph:
        nodes = [self._node(node) for node in self.gm.graph.nodes]
        shared = {number for number, count in self.num_sharing.items() if count > 1}

        def mark(leaf: Any) -> Any:
            if isinstance(leaf, Fake) and leaf.storage in shared:
                return dataclasses.replace(leaf, is_alone=False)
            return leaf

        marked = (dataclasses.replace(n, example=map_leaves(n.example, mark)) for n in nodes)
        return RecordedGraph(tuple(marked), tuple(self.symbols.items()))

    def _node(self, node: fx.Node) -> _Node:
        if node.op in ("get_attr", "call_module"):
            raise NoContentError(f"{node.name}, which is part of the graph itself")
        source = None
        if node.op == "placeholder":
            is_static = isinstance(_torch.example_of(node), nn.Parameter)
            source = (_torch.source_name(node), is_static or _torch.is_static_input(node))
        return _Node(
            op=node.op,
            name=node.name,
            target=node.target,
            args=map_leaves(node.args, self._argument),
            kwargs=map_leaves(dict(node.kwargs), self._argument),
            example=map_leaves(_torch.example_of(node), self._example),
            has_example="example_value" in node.meta,
            location=location_of(node),
            source=source,
        )

    def _argument(self, leaf: Any) -> Any:
        return _Ref(leaf.name) if isinstance(leaf, fx.Node) else self._example(leaf)

    def _example(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return Number(self._expr(leaf))
        if isinstance(leaf, torch.SymFloat | torch.SymBool):
            raise NoContentError(f"a symbolic number that is no integer, {leaf}")
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not _torch.is_plain_fake(leaf):
            raise NoContentError(f"a {type(leaf).__qualname__} of layout {leaf.layout}")
        storage = leaf.untyped_storage()._cdata
        number = self.storages.setdefault(storage, len(self.storages))
        self.num_sharing[number] = self.num_sharing.get(number, 0) + 1
        return Fake(
            dtype=leaf.dtype,
            device=leaf.device,
            shape=tuple(map(self._expr, leaf.shape)),
            stride=tuple(map(self._expr, leaf.stride())),
            offset=self._expr(leaf.storage_offset()),
            storage=number,
            is_alone=True,
            requires_grad=leaf.requires_grad,
        )

    def _expr(self, value: int | torch.SymInt) -> sympy.Expr:
        if isinstance(value, torch.SymInt):
            for symbol, source in _torch.symbols_of_size(value).items():
                self.symbols.setdefault(symbol, source)
        return _torch.size_expr(value)


def rebuild(
    recorded: RecordedGraph, sizes: Mapping[sympy.Symbol, int]
) -> tuple[fx.GraphModule, dict[sympy.Symbol, sympy.Symbol]]:
    """The graph again, its sizes in an environment of their own.

    Args:
        sizes: the example values of the size symbols.

    Returns:
        The graph, and for each recorded symbol the new one.
    """
    maker = _Maker(recorded, sizes)
    return maker.run(), maker.symbols


class _Maker:
    def __init__(self, recorded: RecordedGraph, sizes: Mapping[sympy.Symbol, int]) -> None:
        self.recorded = recorded
        self.env = _torch.SizeEnv()
        self.symbols = {
            symbol: self.env.symbol(sizes[symbol], name=source)
            for symbol, source in recorded.symbols
        }
        self.nodes: dict[str, fx.Node] = {}
        self.bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.extents = self._extents()

    def run(self) -> fx.GraphModule:
        graph = fx.Graph()
        with self._making():
            for item in self.recorded.nodes:
                args = map_leaves(item.args, self._value)
                kwargs = map_leaves(item.kwargs, self._value)
                node = graph.create_node(item.op, item.target, args, kwargs, item.name)
                node.stack_trace = item.location if "File " in item.location else None
                if item.has_example:
                    node.meta["example_value"] = self._example(item)
                if item.source is not None:
                    node.meta[_torch.KNOWN_SOURCE] = item.source
                self.nodes[item.name] = node
        return fx.GraphModule(nn.Module(), graph)

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        with self.env.fake_mode, torch.no_grad(), _torch.ordinary_tensors():
            yield

    def _example(self, item: _Node) -> Any:
        """Of tensors in the middle of the graph most are asked for by nobody."""
        is_tensor = isinstance(item.example, Fake)
        has_tensors = any(isinstance(leaf, Fake) for leaf in leaves_of(item.example))
        if item.source is not None or not has_tensors:
            return map_leaves(item.example, self._value)
        make = functools.partial(self._made_later, item.example)
        return _torch.ExampleLater(make, is_tensor=is_tensor)

    def _made_later(self, example: Any) -> Any:
        with self._making():
            return map_leaves(example, self._value)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, _Ref):
            return self.nodes[leaf.name]
        if isinstance(leaf, Number):
            return self._number(leaf.expr)
        return self._fake(leaf) if isinstance(leaf, Fake) else leaf

    def _number(self, expr: sympy.Expr) -> int | torch.SymInt:
        return self.env.symint(expr.xreplace(self.symbols))

    def _fake(self, fake: Fake) -> torch.Tensor:
        shape, stride = map(self._number, fake.shape), map(self._number, fake.stride)
        kind: Any = {"dtype": fake.dtype, "device": fake.device}
        key = (fake.storage, fake.dtype)
        if fake.is_all:
            made = torch.empty_strided(tuple(shape), tuple(stride), **kind)
        else:
            if key not in self.bases:
                self.bases[key] = torch.empty(self._number(self.extents[key]), **kind)
            offset = self._number(fake.offset)
            made = self.bases[key].as_strided(tuple(shape), tuple(stride), offset)
        return made.requires_grad_(fake.requires_grad) if fake.requires_grad else made

    def _extents(self) -> dict[tuple[int, torch.dtype], sympy.Expr]:
        """For each storage to be made first, as many elements as any of its tensors reaches."""
        found: dict[tuple[int, torch.dtype], sympy.Expr] = {}

        def reach(leaf: Any) -> None:
            if isinstance(leaf, Fake) and not leaf.is_all:
                steps = zip(leaf.shape, leaf.stride, strict=True)
                extent = sum(((n - 1) * step for n, step in steps), leaf.offset + 1)
                key = (leaf.storage, leaf.dtype)
                found[key] = found.get(key, sympy.Integer(0)) + extent

        for node in self.recorded.nodes:
            map_leaves(node.example, reach)
        return found
