"""The ops that graphs are cut at.

In:  whatever a user has in hand: a name, an overload, a packet, a custom op object.
Out: `SplitOps`, which says of a graph node whether it is one of them, and by which name.
Knows nothing of pieces.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from piecewise_backend import _torch
from piecewise_backend.batch import BatchDescriptor
from piecewise_backend.errors import ConfigError
from piecewise_backend.modes import CaptureSupport

T = TypeVar("T")
BeforeReplay = Callable[[BatchDescriptor], None]

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


@dataclasses.dataclass(frozen=True, slots=True)
class Hook:
    """A function that refreshes what an op reads in a graph."""

    function: BeforeReplay
    is_on_update_stream: bool
    """It overlaps the part of the graph that comes before the op."""

    @classmethod
    def of(cls, function: BeforeReplay | None, refresh_on: str) -> Hook | None:
        """The hook that a registration names.

        Raises:
            ConfigError: there is no such stream, or the function cannot be one.
        """
        if refresh_on not in _STREAMS:
            close = difflib.get_close_matches(str(refresh_on), _STREAMS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"use one of {list(_STREAMS)}"
            raise ConfigError(f"refresh_on {refresh_on!r} is not known; {hint}")
        is_on_update_stream = refresh_on == "update_stream"
        if function is None:
            if is_on_update_stream:
                raise ConfigError(
                    "refresh_on='update_stream' without before_replay has nothing to run there; "
                    "pass before_replay= in the same call, or leave refresh_on out"
                )
            return None
        if not callable(function) or not isinstance(function, Hashable):
            raise ConfigError(
                f"before_replay is {function!r}; pass a function, or another hashable callable, "
                "that takes a BatchDescriptor"
            )
        return cls(function, is_on_update_stream)


_STREAMS = ("current_stream", "update_stream")


@dataclasses.dataclass(frozen=True, slots=True)
class SplitOpTraits:
    """What the registration of an op says about it."""

    capture: CaptureSupport = CaptureSupport.NEVER
    before_replay: tuple[Hook, ...] = ()
    """Called before every replay of a graph that the op is part of."""

    def with_hook(self, hook: Hook) -> SplitOpTraits:
        """The same and a hook; one of the same function keeps its place and is replaced."""
        hooks = {known.function: known for known in self.before_replay} | {hook.function: hook}
        return dataclasses.replace(self, before_replay=tuple(hooks.values()))


_DECORATE = object()
_registered: dict[str, SplitOpTraits] = {}  # process-wide, as torch.library's registry is


def register_splitting_op(
    op: Any = _DECORATE,
    /,
    *,
    capture: str | None = None,
    before_replay: BeforeReplay | None = None,
    refresh_on: str = "current_stream",
) -> Any:
    """Make graphs be cut at `op`: it runs between pieces, outside of every piece's graph.

    Args:
        op: "ns::op" (every overload), "ns::op.overload", an OpOverload, `torch.ops.ns.op`,
            or the object that `torch.library.custom_op` returns; so it also decorates one.
            Without it, a decorator.
        capture: the batches for which the op may be part of a graph of the whole step:
            "always"; "uniform_batch", if all sequences have as many tokens;
            "uniform_single_token_decode", if all have one; "never", which is the default.
            In such a graph the op is given padded rows, in which the inputs of the model are
            zero.
        before_replay: called with the descriptor of the capture that serves a batch, before a
            graph that contains the op is captured, and before each replay of it. A graph repeats
            the numbers that the op took from the host at capture: here is the place to write
            those of this batch to the device buffers that the op's kernels read. The buffers
            must be the op's or the model's own; arguments of the model are copied before. Calls
            in pieces or without graphs run the op itself and no hook. What the hook raises
            reaches the caller, and nothing is replayed. Registering an op again adds a hook; the
            same hook again moves it to another stream. One that several ops share is called once.
        refresh_on: the CUDA stream that is current in `before_replay`. "current_stream": that
            of the call, so that the replay starts afterwards. "update_stream": one beside it,
            which starts when earlier calls are done, so that the refresh overlaps all of the
            step that comes before the first op with such a hook; that op waits for it. Nothing
            before that op may read what is refreshed. Copies from the host overlap only from
            pinned memory with `non_blocking=True`. A hook that two ops register with different
            streams runs on the current one.

    Returns:
        `op`, unchanged.

    Raises:
        ConfigError: no such operator exists, with the nearest name that does; a value of
            `capture` or `refresh_on` is not known; `before_replay` cannot be called.
    """
    if op is _DECORATE:
        return functools.partial(
            register_splitting_op,
            capture=capture,
            before_replay=before_replay,
            refresh_on=refresh_on,
        )
    name = op if isinstance(op, str) else _name_of_object(op)
    check_exists(name)
    traits = _registered.get(name, SplitOpTraits())
    if capture is not None:
        traits = dataclasses.replace(traits, capture=CaptureSupport.of(capture))
    if (hook := Hook.of(before_replay, refresh_on)) is not None:
        traits = traits.with_hook(hook)
    _registered[name] = traits
    return op


def traits_of(name: str) -> SplitOpTraits:
    """What was registered for an op, by all of its names together; nothing if it was not.

    Where two names say otherwise about capture, the overload's word counts.
    """
    op, _, overload = name.partition(".")
    names = (f"{op}.{overload or 'default'}", op)
    found = [_registered[known] for known in names if known in _registered]
    if not found:
        return SplitOpTraits()
    stated = [traits.capture for traits in found if traits.capture is not CaptureSupport.NEVER]
    merged = SplitOpTraits(stated[0] if stated else CaptureSupport.NEVER)
    for hook in (hook for traits in reversed(found) for hook in traits.before_replay):
        merged = merged.with_hook(hook)
    return merged


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
                check_exists(name)
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


def check_exists(name: str, role: str = "splitting op") -> None:
    """Raise ConfigError if no operator has this name; `role` is what the user wants it for."""
    if "::" not in name:
        presets = ", ".join(PRESETS)
        raise ConfigError(
            f"{role} {name!r} names no namespace; write 'namespace::{name}', "
            f"e.g. 'aten::{name}' (presets: {presets})"
        )
    if not _exists(name):
        close = difflib.get_close_matches(name, _torch.operator_names(), n=1)
        hint = f"did you mean {close[0]!r}?" if close else "no operator has a similar name."
        raise ConfigError(
            f"{role} {name!r} does not exist; {hint} "
            "Import the library that defines it before naming it"
        )
