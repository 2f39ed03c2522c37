"""The ops that graphs are cut at.

In:  whatever a user has in hand: a name, an overload, a packet, a custom op object.
Out: `SplitOps`, which says of a graph node whether it is one of them, and by which name.
Knows nothing of pieces.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from piecewise_backend import _torch
from piecewise_backend.errors import ConfigError

T = TypeVar("T")

PRESETS: dict[str, tuple[str, ...]] = {
    "attention": (
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_attention_math",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "higher_order::flex_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::fwd",
        "flashinfer::batch_decode_with_paged_kv_cache_run",
        "flashinfer::batch_prefill_with_paged_kv_cache_run",
    )
}
"""Groups of ops by name. Members that are not installed are left out."""

_registered: dict[str, None] = {}  # an ordered set: torch.library's registry is process-wide too


def register_splitting_op(op: T) -> T:
    """Make graphs be cut at `op`: it runs between pieces, outside of every graph.

    Args:
        op: "ns::op" (every overload), "ns::op.overload", an OpOverload, `torch.ops.ns.op`,
            or the object that `torch.library.custom_op` returns; so it also decorates one.

    Returns:
        `op`, unchanged.

    Raises:
        ConfigError: no such operator exists, with the nearest name that does.
    """
    name = op if isinstance(op, str) else _name_of_object(op)
    _check_exists(name)
    _registered.setdefault(name)
    return op


def registered_splitting_ops() -> tuple[str, ...]:
    """The names registered so far, in order."""
    return tuple(_registered)


@dataclasses.dataclass(frozen=True, slots=True)
class SplitOps:
    """A resolved set of ops to cut at."""

    names: frozenset[str]

    @classmethod
    def resolve(cls, wanted: Iterable[str] | None) -> SplitOps:
        """From option values: names and presets, or None for every registered op.

        Raises:
            ConfigError: a name is misspelt or its library is not imported.
        """
        if wanted is None:
            return cls(frozenset(_registered))
        names: set[str] = set()
        for name in wanted:
            if name in PRESETS:
                names |= {member for member in PRESETS[name] if _exists(member)}
            else:
                _check_exists(name)
                names.add(name)
        return cls(frozenset(names))

    def match(self, node: fx.Node) -> str | None:
        """The name under which this node is cut at, or None."""
        return next((name for name in names_of(node) if name in self.names), None)


def names_of(node: fx.Node) -> tuple[str, ...]:
    """The operator names that a graph node may be called by, most general first."""
    target = node.target
    if node.op == "call_method":
        return (f"aten::{target}",)
    if node.op != "call_function":
        return ()
    if isinstance(target, OpOverload):
        return (target._schema.name, f"{target._schema.name}.{target._overloadname}")
    if isinstance(target, OpOverloadPacket):
        return (target._qualified_op_name, f"{target._qualified_op_name}.default")
    if isinstance(target, HigherOrderOperator):
        return (f"higher_order::{target.name()}",)
    # Dynamo keeps torch functions as they are: F.scaled_dot_product_attention is a builtin.
    if getattr(target, "__module__", "").startswith("torch"):
        return (f"aten::{getattr(target, '__name__', '')}",)
    return ()


def _name_of_object(op: object) -> str:
    if isinstance(op, OpOverload):
        return f"{op._schema.name}.{op._overloadname}" if op._overloadname else op._schema.name
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name
    if isinstance(op, _torch.CustomOpDef):
        return op._qualname
    raise ConfigError(
        f"{op!r} is not an operator; pass its name 'ns::op', torch.ops.ns.op, or the object made "
        "by torch.library.custom_op (as a decorator, put register_splitting_op above custom_op)"
    )


def _exists(name: str) -> bool:
    namespace, _, rest = name.partition("::")
    op, _, overload_name = rest.partition(".")
    if namespace == "higher_order":
        return hasattr(torch.ops.higher_order, op)
    packet = getattr(getattr(torch.ops, namespace), op, None)
    return packet is not None and (not overload_name or overload_name in packet.overloads())


def _check_exists(name: str) -> None:
    if "::" not in name:
        presets = ", ".join(PRESETS)
        raise ConfigError(
            f"splitting op {name!r} names no namespace; write 'namespace::{name}', "
            f"e.g. 'aten::{name}' (presets: {presets})"
        )
    if not _exists(name):
        close = difflib.get_close_matches(name, _torch.operator_names(), n=1)
        hint = f"did you mean {close[0]!r}?" if close else "no operator has a similar name."
        raise ConfigError(
            f"splitting op {name!r} does not exist; {hint} "
            "Import the library that defines it before registering it"
        )
