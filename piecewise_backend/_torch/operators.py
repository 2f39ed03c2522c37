"""The registry of operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS


def operator_names() -> list[str]:
    """Every operator torch knows at this moment, as "ns::op". There is no public list."""
    return sorted({schema.name for schema in torch._C._jit_get_all_schemas()})


def kernel_below_dispatcher(op: torch._ops.OpOverload, device: str) -> Callable[..., Any]:
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
