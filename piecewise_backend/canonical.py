"""Find out which pieces are the same but for values that can be inputs.

In:  the pieces of a split graph.
Out: for each piece the `DistinctPiece` that serves it, and the inputs to call that with.
Knows nothing of compilers.

Two pieces are the same when their graphs agree node by node: operators, constants with their
types, dtypes, devices, symbolic shapes and strides, and which inputs share memory. Layers often
differ in one constant only - a name, an index, a scale. Such a constant becomes an input
(`hoisting`), so that depth does not change the number of compilations. Constants that steer
code generation, an epsilon for example, stay: pieces that differ in one are distinct.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from piecewise_backend import _torch, hoisting
from piecewise_backend.registry import names_of
from piecewise_backend.steps import Constant, Host, Piece, Value, map_leaves


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """A piece without names: what it has in common with those that are the same."""

    nodes: tuple[str, ...]
    """What each does to which, in order."""
    constants: tuple[str, ...]
    """Those that could have been inputs."""
    hoisted: tuple[int, ...]
    """Which ones are, in the order of all."""
    outputs: tuple[str, ...]
    """The dtype, device and shape of each."""
    only_here: tuple[str, ...]
    """Parts that another process could not recognise, functions without a name for example."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DistinctPiece:
    """What is compiled: one graph that serves every piece of the same structure."""

    index: int
    module: fx.GraphModule
    """Takes sizes, tensors and hoisted constants; returns a tuple of tensors."""
    inputs: tuple[Value | Host | Constant, ...]
    """The inputs of the first piece of this structure, as examples."""
    examples: Mapping[str, Any]
    structure: Structure

    @property
    def key(self) -> str:
        """Hash of the structure."""
        return hashlib.sha256(repr(self.structure).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """One piece of the graph as a call of a distinct piece."""

    piece: Piece
    distinct: DistinctPiece
    inputs: tuple[Value | Host | Constant, ...]


def identify(pieces: Sequence[Piece]) -> tuple[Instance, ...]:
    """Map every piece to the distinct piece that serves it, in the order of `pieces`."""
    described = [_describe(piece) for piece in pieces]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, description in enumerate(described):
        groups.setdefault(description.skeleton, []).append(position)
    instances: dict[int, Instance] = {}
    for index, (skeleton, members) in enumerate(groups.items()):
        varying = _varying_slots([described[m].slots for m in members])
        first = described[members[0]]
        kept = tuple(s.typed for i, s in enumerate(first.slots) if i not in varying)
        module = hoisting.hoist(pieces[members[0]].module, [first.slots[i] for i in varying])
        nodes = tuple(repr(node) for node in skeleton)
        constants = tuple(map(repr, kept))
        structure = Structure(nodes, constants, varying, first.outputs, first.only_here)
        distinct: DistinctPiece | None = None
        for member in members:
            slots = [described[member].slots[i] for i in varying]
            inputs = (*pieces[member].inputs, *(hoisting.as_input(slot) for slot in slots))
            distinct = distinct or DistinctPiece(
                index, module, inputs, pieces[member].examples, structure
            )
            instances[member] = Instance(pieces[member], distinct, inputs)
    return tuple(instances[position] for position in range(len(pieces)))


def _varying_slots(members: list[tuple[hoisting.Slot, ...]]) -> tuple[int, ...]:
    return tuple(
        position
        for position, slots in enumerate(zip(*members, strict=True))
        if len({slot.typed for slot in slots}) > 1
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Description:
    skeleton: tuple[Any, ...]
    """Everything but the values of the slots."""
    slots: tuple[hoisting.Slot, ...]
    """The constants that could be inputs, in order."""
    outputs: tuple[str, ...]
    only_here: tuple[str, ...]
    """What is told apart by identity."""


def _describe(piece: Piece) -> _Description:
    describer = _Describer(piece.module, piece.inputs)
    description = describer.run()
    outputs = tuple(describer.kind(piece.examples[name]) for name in piece.outputs)
    return dataclasses.replace(description, outputs=outputs)


class _Describer:
    """Writes a graph down without names: nodes by position, symbols by first appearance."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Value | Host] = ()) -> None:
        self.module = module
        self.inputs = iter(inputs)
        self.symbols: dict[sympy.Symbol, int] = {}
        self.positions: dict[fx.Node, int] = {}
        self.storages: dict[int, int] = {}
        self.slots: list[hoisting.Slot] = []
        self.only_here: list[str] = []

    def run(self) -> _Description:
        records = []
        for position, node in enumerate(self.module.graph.nodes):
            self.positions[node] = position
            records.append(self._record(node))
        return _Description(tuple(records), tuple(self.slots), (), tuple(self.only_here))

    def kind(self, example: torch.Tensor) -> str:
        """What a tensor is, in a few words."""
        sizes = ", ".join(self._number(size) for size in example.shape)
        return f"{example.dtype} {example.device} [{sizes}]"

    def _record(self, node: fx.Node) -> tuple[Any, ...]:
        if node.op == "placeholder":
            ref = next(self.inputs, None)
            if isinstance(ref, Host):
                return ("size", self._expr(ref.expr))
            return ("input", self._example(_torch.example_of(node)))
        if node.op == "get_attr":
            return ("attribute", self._constant(_attribute_value(self.module, node)))
        slots = {slot.place: slot for slot in hoisting.slots_of(node)}
        self.slots.extend(slots.values())
        arguments = tuple(
            (place, "slot" if place in slots else repr(map_leaves(value, self._constant)))
            for place, value in hoisting.places(node)
        )
        # What an op returns may depend on a constant: pieces are alike only if it does not.
        returned = repr(map_leaves(_torch.example_of(node), self._example)) if slots else ""
        return (node.op, self._target(node), arguments, returned)

    def _example(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, torch.Tensor):
            return ("number", repr(value))
        storage = value.untyped_storage()._cdata
        return (
            str(value.dtype),
            str(value.device),
            tuple(self._number(size) for size in value.shape),
            tuple(self._number(stride) for stride in value.stride()),
            self._number(value.storage_offset()),
            self.storages.setdefault(storage, len(self.storages)),
            value.is_conj(),
            value.is_neg(),
        )

    def _number(self, value: Any) -> str:
        number = _torch.number_of(value)
        return self._expr(number) if isinstance(number, sympy.Basic) else repr(number)

    def _expr(self, expr: sympy.Expr) -> str:
        for symbol in sorted(expr.free_symbols, key=str):
            self.symbols.setdefault(symbol, len(self.symbols))
        return str(expr.xreplace({s: sympy.Symbol(f"c{i}") for s, i in self.symbols.items()}))

    def _constant(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, fx.Node):
            return ("node", self.positions[value])
        if isinstance(value, float):
            return ("float", value.hex())
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return ("number", self._number(value))
        if isinstance(value, fx.GraphModule):
            inner = _Describer(value).run()
            self.only_here.extend(inner.only_here)
            return ("graph", inner)
        if isinstance(value, torch.Tensor):
            return ("tensor", self._example(value), _content_hash(value))
        if value is None or value is Ellipsis or isinstance(value, _BY_REPR):
            return (type(value).__name__, repr(value))
        self.only_here.append(f"a {type(value).__qualname__}")
        return ("unlike anything else", id(value))

    def _target(self, node: fx.Node) -> str:
        """The operator by name where names are unique, by identity where they are not."""
        target = node.target
        if isinstance(target, str) or node.op == "output":
            return str(target)
        if (names := names_of(node)) and "aten::" not in names[-1]:
            return names[-1]
        name = getattr(target, "__qualname__", None) or str(target)
        qualified = f"{getattr(target, '__module__', '')}.{name}"
        if "<" not in name:
            return qualified
        self.only_here.append(qualified)
        return f"{qualified}@{id(target)}"


_BY_REPR = (bool, int, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _attribute_value(module: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _content_hash(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()
