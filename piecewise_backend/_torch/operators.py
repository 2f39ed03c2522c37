"""The registry of operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._library import simple_registry
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

_NAMESPACES_OF_TORCH = frozenset({"aten", "prims", "prim"})


def operator_names() -> list[str]:
    """Every operator torch knows at this moment, as "ns::op". There is no public list."""
    return sorted({schema.name for schema in torch._C._jit_get_all_schemas()})


def is_from_torch(op: OpOverload) -> bool:
    """The op is one of those that torch itself decomposes and compiles."""
    return op.namespace in _NAMESPACES_OF_TORCH


def overloads_named(namespaces: Iterable[str], names: Iterable[str]) -> list[OpOverload]:
    """The ops of these namespaces, none of torch's, that have one of these names.

    Asks the dispatcher first, as `torch.ops.x.y` makes a namespace of any name it is asked for.
    Ends when torch has a public list of ops.
    """
    namespaces, names, found = set(namespaces) - _NAMESPACES_OF_TORCH, set(names), set()
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace in namespaces and (name := name.partition(".")[0]) in names:
            found.add((namespace, name))
    packets = [getattr(getattr(torch.ops, where), name, None) for where, name in sorted(found)]
    return [overload for packet in packets for overload in overloads_of(packet) or ()]


def overloads_of(value: object) -> list[OpOverload] | None:
    """The overloads that an op object stands for; None of what is no op."""
    if isinstance(value, CustomOpDef):
        return [value._opoverload]
    if isinstance(value, OpOverload):
        return [value]
    if isinstance(value, OpOverloadPacket):
        return [getattr(value, name) for name in value.overloads()]
    return [] if isinstance(value, torch._ops.OperatorBase) else None


def kernel_below_dispatcher(op: OpOverload, device: str) -> Callable[..., Any]:
    """The function that finally runs for `op` on a device type.

    A call through `torch.ops` costs 43 us where the kernel costs 22, and the function that a
    custom op object keeps still costs 33: it is wrapped to keep Dynamo out, which a runtime
    called by Dynamo's code has no need of (measured on an H200 host). Only ops made by
    `torch.library.custom_op` keep their function; others are called as they are. Ends when
    custom ops offer the kernel itself.
    """
    definition = OPDEFS.get(op._schema.name) if op._overloadname in ("", "default") else None
    if definition is None:
        return op
    kernels = definition._backend_fns
    registered: Callable[..., Any] | None = kernels.get(device) or kernels.get(None)
    if registered is None or definition._disabled_kernel or _autocast(definition):
        return op
    kernel = inspect.getclosurevars(inspect.unwrap(registered)).nonlocals.get("fn")
    return kernel if callable(kernel) else registered


def _autocast(definition: Any) -> object:
    """Autocast rules of a custom op, which only the dispatcher applies; kept since torch 2.13."""
    return getattr(definition, "_autocast_dtype", None)


def python_functions(op: OpOverload) -> dict[str, Callable[..., Any]]:
    """What users wrote for an op in Python: its kernels by device type, and its "fake".

    A kernel registered with `torch.library.impl` is not among them: torch keeps it in C++ only.
    Ends when torch tells.
    """
    if (definition := OPDEFS.get(op._schema.name)) is not None:
        kernels = definition._backend_fns.items()
        found = {str(device): kernel for device, kernel in kernels if device is not None}
        found["any device"] = definition._init_fn
        if definition._abstract_fn is not None:
            found["fake"] = definition._abstract_fn
    else:
        kernel = simple_registry.singleton.find(op._schema.name).fake_impl.kernel
        found = {} if kernel is None else {"fake": kernel.func}
    return {name: _as_written(function) for name, function in found.items()}


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function without what torch has wrapped around it."""
    while inspect.isfunction(function) and function.__module__.startswith("torch."):
        held = inspect.getclosurevars(function).nonlocals
        inner = held.get("fn", held.get("func"))
        if not callable(inner):
            break
        function = inner
    return function


def is_hidden_composite(op: OpOverload) -> bool:
    """Tracing goes through the op, by code that torch does not show."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return op._schema.name not in OPDEFS and op.has_kernel_for_dispatch_key(composite)


def triton_kernel_of(node: fx.Node) -> tuple[Any, dict[str, Any]] | None:
    """The Triton kernel that a model calls itself, and its constant arguments.

    The graph has indices into a table of the process, and nothing else that names the kernel.
    """
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or (
        "kernel_idx" not in node.kwargs
    ):
        return None
    kernel, constants = node.kwargs["kernel_idx"], node.kwargs["constant_args_idx"]
    table: Any = kernel_side_table
    return table.get_kernel(kernel), table.get_constant_args(constants)


def forget_ops(library: torch.library.Library) -> None:
    """Take the ops that were defined in a library back, so that their names can be used again.

    What torch does itself with the library of a custom op that is defined again. Ends when there
    is a public way.
    """
    library._destroy()
