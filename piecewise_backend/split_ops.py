"""What the schema of a split op says: what it writes, what it returns, how to call it.

In:  a `SplitOp`.
Out: the function a plan calls, and which arguments are written or returned.
Knows nothing of plans or captures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from piecewise_backend import _torch
from piecewise_backend.steps import Host, SplitGraph, SplitOp, Value, leaves_of


def overload_of(op: SplitOp) -> OpOverload | None:
    """The operator that runs, also where Dynamo kept a function or method of torch."""
    target: Any = op.target
    if isinstance(target, OpOverload):
        return target
    if isinstance(target, OpOverloadPacket):
        return getattr(target, "default", None)
    namespace, _, name = op.op_name.partition("::")
    packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
    if packet is None:
        return None
    # Overloads of one name agree about what they write.
    return getattr(packet, packet.overloads()[0])  # type: ignore[no-any-return]


def bind_split_op(op: SplitOp, device: torch.device) -> Callable[..., Any]:
    """The function that a plan calls: the kernel itself, or the op where that would differ."""
    target: Any = op.target
    if isinstance(target, OpOverloadPacket) and hasattr(target, "default"):
        target = target.default
    if not isinstance(target, OpOverload):
        return target  # type: ignore[no-any-return]
    kernel = _torch.kernel_below_dispatcher(target, device.type)
    return kernel if kernel is target or _takes_as_given(kernel, op) else target


def written_arguments(op: SplitOp) -> tuple[Value, ...]:
    """The tensors that a split op declares to write."""
    written: list[Any] = []
    for argument, value in _arguments(op):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += leaves_of(value)
    return tuple(value for value in written if isinstance(value, Value))


def inputs_written_by(split: SplitGraph) -> set[str]:
    """The graph inputs that split ops write, also through a view that a piece made."""
    fakes = {item.name: item.example for item in split.inputs}
    inputs = {
        fake.untyped_storage()._cdata: name
        for name, fake in fakes.items()
        if isinstance(fake, torch.Tensor)
    }
    for step in split.steps:  # a view has the storage of what it is a view of, also among fakes
        fakes |= step.examples
    written = {value.name for op in split.split_ops for value in written_arguments(op)}
    storages = [fakes[name].untyped_storage()._cdata for name in written]
    return {inputs[storage] for storage in storages if storage in inputs}


def returned_arguments(op: SplitOp) -> dict[str, Value]:
    """The outputs that are declared to be an argument, written in place: name -> argument."""
    overload = overload_of(op)
    if overload is None:
        return {}
    arguments = {
        alias: value
        for argument, value in _arguments(op)
        if argument.alias_info is not None and argument.alias_info.is_write
        for alias in argument.alias_info.before_set
    }
    returned = {}
    for name, result in zip(op.outputs, overload._schema.returns, strict=False):
        aliases = result.alias_info.before_set if result.alias_info is not None else ()
        value = next((arguments[a] for a in aliases if a in arguments), None)
        if name is not None and isinstance(value, Value):
            returned[name] = value
    return returned


def _arguments(op: SplitOp) -> Iterator[tuple[Any, Any]]:
    overload = overload_of(op)
    if overload is None:
        return
    schema = overload._schema.arguments
    yield from zip(schema, op.args, strict=False)
    yield from (
        (argument, op.kwargs[argument.name]) for argument in schema if argument.name in op.kwargs
    )


_PYTHON_TYPES = {"float": float, "bool": bool, "int": int, "str": str}


def _takes_as_given(kernel: Callable[..., Any], op: SplitOp) -> bool:
    """The dispatcher would neither convert nor rename an argument of this call."""
    names = [argument.name for argument, _ in _arguments(op)]
    try:
        parameters = list(inspect.signature(kernel).parameters)
    except (TypeError, ValueError):  # a builtin says nothing of its parameters
        return False
    if not set(names) <= set(parameters) or parameters[: len(op.args)] != names[: len(op.args)]:
        return False
    return all(_is_of_type(value, str(argument.type)) for argument, value in _arguments(op))


def _is_of_type(value: Any, kind: str) -> bool:
    if value is None or isinstance(value, Value):
        return True
    if kind.startswith("List["):
        return isinstance(value, list) and all(_is_of_type(v, kind[5:-1]) for v in value)
    wanted = _PYTHON_TYPES.get(kind.removeprefix("Optional[").removesuffix("]"))
    if isinstance(value, Host):
        return wanted is int
    return wanted is None or type(value) is wanted
