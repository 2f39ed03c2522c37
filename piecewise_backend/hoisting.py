"""Turn constants of a piece into inputs of it.

In:  nodes of a piece.
Out: the constants that may become inputs (`Slot`), and the piece rewritten to take them.
Knows nothing of which pieces are alike.

What may be hoisted, and how it stays exact:

* a float that multiplies or divides a tensor (a per-layer scale) becomes a 0-dim tensor of the
  precision in which torch computes the product: float32 for half types, else the tensor's own;
* an integer argument of a custom op becomes a SymInt;
* a string or float argument of a custom op becomes an index into a table, passed to a twin of
  the op that looks the value up and calls the original.

Additive floats stay constants: an epsilon is one value for the whole model, and the compiler
and the fusion passes make use of knowing it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from piecewise_backend import _torch
from piecewise_backend.steps import Constant, map_leaves

_SCALINGS = {operator.mul, operator.truediv, torch.mul, torch.div, "mul", "div"}
_COMPUTE_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
_TORCH_NAMESPACES = {"aten", "prims", "prim", "quantized", "quantized_decomposed"}


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One constant argument of one node."""

    node: fx.Node
    place: int | str
    """Position among the arguments, or the keyword."""
    value: str | int | float

    @property
    def typed(self) -> tuple[str, str]:
        """The value with its type, so that 2 and 2.0 differ."""
        exact = self.value.hex() if isinstance(self.value, float) else repr(self.value)
        return type(self.value).__name__, exact

    @property
    def is_scaling(self) -> bool:
        """The constant scales a tensor, rather than being an argument of a custom op."""
        return self.node.target in _SCALINGS


def places(node: fx.Node) -> Iterator[tuple[int | str, Any]]:
    """The arguments of a node by position or keyword."""
    yield from enumerate(node.args)
    yield from node.kwargs.items()


def slots_of(node: fx.Node) -> tuple[Slot, ...]:
    """The constants of a node that could become inputs of its piece."""
    if node.target in _SCALINGS:
        return _scaling_slots(node)
    if node.op != "call_function" or _custom_op(node) is None:
        return ()
    return tuple(
        Slot(node, place, value)
        for place, value in places(node)
        if isinstance(value, str | int | float) and not isinstance(value, bool)
    )


def _scaling_slots(node: fx.Node) -> tuple[Slot, ...]:
    if len(node.args) != 2 or node.kwargs:
        return ()
    for place, value in enumerate(node.args):
        other = node.args[1 - place]
        if isinstance(value, float) and isinstance(other, fx.Node):
            example = _torch.example_of(other)
            if isinstance(example, torch.Tensor) and example.dtype in _COMPUTE_DTYPE:
                return (Slot(node, place, value),)
    return ()


def _custom_op(node: fx.Node) -> OpOverload | None:
    target = node.target
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, "default", None)  # type: ignore[assignment]
    if isinstance(target, OpOverload) and target.namespace not in _TORCH_NAMESPACES:
        return target
    return None


def as_input(slot: Slot) -> Constant:
    """What a piece with this slot hoisted is called with in its place."""
    if slot.is_scaling:
        example = _scaled_tensor(slot)
        dtype = _COMPUTE_DTYPE[example.dtype]
        with _torch.ordinary_tensors():
            return Constant(torch.tensor(slot.value, dtype=dtype, device=example.device))
    return Constant(slot.value if _takes_symint(slot) else _table_index(slot.value))


def hoist(module: fx.GraphModule, slots: Sequence[Slot]) -> fx.GraphModule:
    """The module with one more input per slot, after the inputs it has."""
    if not slots:
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        copies[node] = graph.node_copy(node)
    inputs = {slot: graph.placeholder(f"constant{i}") for i, slot in enumerate(slots)}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        own = [slot for slot in slots if slot.node is node]
        if own and own[0].is_scaling:
            copies[node] = _emit_scaling(graph, node, own[0], inputs[own[0]], copies)
        elif own:
            copies[node] = _emit_custom_op(graph, node, own, inputs, copies)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def _scaled_tensor(slot: Slot) -> torch.Tensor:
    assert isinstance(slot.place, int)
    example = _torch.example_of(slot.node.args[1 - slot.place])  # type: ignore[arg-type]
    assert isinstance(example, torch.Tensor)
    return example


def _emit_scaling(
    graph: fx.Graph, node: fx.Node, slot: Slot, scale: fx.Node, copies: dict[fx.Node, fx.Node]
) -> fx.Node:
    """`x * c` in the precision that torch uses for a python number, rounded once."""
    assert isinstance(slot.place, int)
    tensor = copies[node.args[1 - slot.place]]  # type: ignore[index]
    dtype = _scaled_tensor(slot).dtype
    is_product = node.target in (operator.mul, torch.mul, "mul")
    if not is_product and slot.place == 0:
        # What torch makes of `c / x`, in this order of roundings.
        tensor, is_product = graph.call_function(torch.reciprocal, (tensor,)), True
    # Functions, not methods: those torch would not store unless their tensor has an example.
    to_dtype = torch.ops.aten.to.dtype
    wide = graph.call_function(to_dtype, (tensor, _COMPUTE_DTYPE[dtype]))
    operands = (scale, wide) if slot.place == 0 else (wide, scale)
    scaled = graph.call_function(torch.mul if is_product else torch.div, operands)
    result = graph.call_function(to_dtype, (scaled, dtype))
    result.meta = dict(node.meta)
    return result


def _emit_custom_op(
    graph: fx.Graph,
    node: fx.Node,
    slots: Sequence[Slot],
    inputs: dict[Slot, fx.Node],
    copies: dict[fx.Node, fx.Node],
) -> fx.Node:
    op = _custom_op(node)
    assert op is not None
    indexed = tuple(sorted(_argument_name(slot) for slot in slots if not _takes_symint(slot)))
    replaced = {slot.place: inputs[slot] for slot in slots}

    def argument(place: int | str, value: Any) -> Any:
        def copied(leaf: Any) -> Any:
            return copies[leaf] if isinstance(leaf, fx.Node) else leaf

        return replaced.get(place) or map_leaves(value, copied)

    args = tuple(argument(place, value) for place, value in enumerate(node.args))
    kwargs = {name: argument(name, value) for name, value in node.kwargs.items()}
    if indexed:
        args, kwargs = _with_defaults(op, args, kwargs)
    copy = graph.call_function(_twin(op, indexed) if indexed else op, args, kwargs)
    copy.meta = dict(node.meta)
    return copy


def _with_defaults(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with every argument given."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    values = {a.name: given.get(a.name, a.default_value) for a in op._schema.arguments}
    keyword_only = {a.name for a in op._schema.arguments if a.kwarg_only}
    positional = tuple(value for name, value in values.items() if name not in keyword_only)
    return positional, {name: values[name] for name in values if name in keyword_only}


def _argument_name(slot: Slot) -> str:
    return slot.place if isinstance(slot.place, str) else _schema_argument(slot).name


def _schema_argument(slot: Slot) -> Any:
    op = _custom_op(slot.node)
    assert op is not None
    arguments = op._schema.arguments
    if isinstance(slot.place, int):
        return arguments[slot.place]
    return next(argument for argument in arguments if argument.name == slot.place)


def _takes_symint(slot: Slot) -> bool:
    # `real_type` prints as "int" for a SymInt too.
    return isinstance(slot.value, int) and _schema_argument(slot).real_type.kind() == "SymIntType"


_values: list[Any] = []  # like torch.library's own registry, for the life of the process
_indices: dict[tuple[str, str], int] = {}
_filling = threading.Lock()
_originals: dict[OpOverload, OpOverload] = {}
_libraries: dict[str, torch.library.Library] = {}  # by the name of the only op in each


def _table_index(value: Any) -> int:
    typed = (type(value).__name__, value.hex() if isinstance(value, float) else repr(value))
    with _filling:
        if typed not in _indices:
            _values.append(value)
            _indices[typed] = len(_values) - 1
        return _indices[typed]


def _declared_types(op: OpOverload) -> dict[str, str]:
    """The types of the arguments as the schema spells them, with what they say of aliasing.

    Read off the schema's text: its objects print `SymInt` as `int`.
    """
    text = str(op._schema).partition("(")[2]
    types: dict[str, str] = {}
    quote, depth, part = "", 0, ""
    for character in text:
        quote = "" if character == quote else quote or (character if character in "\"'" else "")
        depth += 0 if quote else (character in "([") - (character in ")]")
        if not quote and (depth < 0 or (depth == 0 and character == ",")):
            kind, _, name = part.partition("=")[0].strip().rpartition(" ")
            types[name] = kind
            part = ""
            if depth < 0:
                break
        else:
            part += character
    return types


def original_of(op: OpOverload) -> OpOverload:
    """The op that a twin stands for; any other op itself."""
    return _originals.get(op, op)


@functools.cache
def _twin(op: OpOverload, indexed: tuple[str, ...]) -> OpOverload:
    """An op like `op` whose arguments named in `indexed` are indices into the table."""
    name = f"{op._schema.name.replace('::', '__')}_{op._overloadname}__{'_'.join(indexed)}"
    parts, types = [], _declared_types(op)
    for argument in op._schema.arguments:
        if argument.kwarg_only and "*" not in parts:
            parts.append("*")
        kind = "SymInt" if argument.name in indexed else types[argument.name]
        parts.append(f"{kind} {argument.name}")
    # No defaults: a caller passes every argument.
    returns = str(op._schema).rpartition("->")[2]
    schema = f"{name}({', '.join(parts)}) ->{returns}"
    if (of_earlier := _libraries.pop(name, None)) is not None:  # of an `op` defined again since
        _torch.forget_ops(of_earlier)
    library = _libraries[name] = torch.library.Library("piecewise_hoisted", "FRAGMENT")
    library.define(schema, tags=tuple(op.tags))

    def call_original(*args: Any, **kwargs: Any) -> Any:
        bound = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        for argument_name in indexed:
            bound[argument_name] = _values[_torch.hint_of(bound[argument_name])]
        order = [a.name for a in op._schema.arguments if not a.kwarg_only and a.name in bound]
        positional = [bound.pop(n) for n in order]
        return op(*positional, **bound)

    library.impl(name, call_original, "CompositeExplicitAutograd")
    torch.library.register_fake(f"piecewise_hoisted::{name}", call_original, lib=library)
    twin: OpOverload = getattr(torch.ops.piecewise_hoisted, name).default
    _originals[twin] = op
    return twin
