"""What the nodes of a graph call, and what that does."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

_IN_PLACE = (
    *("add", "and", "concat", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow"),
    *("rshift", "sub", "truediv", "xor"),
)
_WRITING_OPERATORS = {
    *("setitem", "__setitem__"),
    *(f"i{name}" for name in _IN_PLACE),
    *(f"__i{name}__" for name in _IN_PLACE),
}


def is_higher_order(node: fx.Node) -> bool:
    """It calls an op over other functions, as `torch.cond` over its branches."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def is_for_inductor(node: fx.Node) -> bool:
    """Inductor knows what the node calls: an overload of an op, a function of numbers, a subgraph.

    It fails at others with errors of its own, far from who put them into the graph.
    """
    target = node.target
    if node.op != "call_function":
        return node.op not in ("call_method", "call_module")
    if isinstance(target, torch._ops.OpOverload) or is_higher_order(node):
        return True
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    return module in ("_operator", "builtins", "math") or (
        module == "torch" and name.lstrip("_").startswith("sym_")
    )


def may_write(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph writes a tensor, as far as what it calls shows."""
    target, kwargs = node.target, node.kwargs
    if isinstance(target, torch._ops.OpOverload):
        return _schema_writes(target._schema, node)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(_schema_writes(getattr(target, n)._schema, node) for n in target.overloads())
    if not node.op.startswith("call_"):
        return False
    if node.op == "call_module" or is_higher_order(node):
        return True
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    writes_by_name = name in _WRITING_OPERATORS or (name[-1:] == "_" and name[-2:] != "__")
    return writes_by_name or kwargs.get("out") is not None or _is_inplace(node)


def _schema_writes(schema: Any, node: fx.Node) -> bool:
    """Whether an argument that an op writes is given; `out=` often is not."""
    return any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and (argument.name in node.kwargs or (not argument.kwarg_only and i < len(node.args)))
        for i, argument in enumerate(schema.arguments)
    )


def _is_inplace(node: fx.Node) -> bool:
    """It is called with `inplace=True`, by name or, as in `silu(x, True)`, by position."""
    given: Mapping[str, Any] = node.kwargs
    if inspect.isfunction(node.target):
        with contextlib.suppress(TypeError):
            given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    return bool(given.get("inplace", False))
