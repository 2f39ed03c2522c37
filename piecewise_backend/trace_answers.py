"""What is told about a value that a trace looked at, by the kind of the look.

In:  a look, what describes values, and what finds them by name.
Out: JSON that is the same in every process where that look finds the same.
Knows nothing of other looks, and of how names are found.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.passes.keys import NoContentError, content_key, digest
from piecewise_backend.trace_content import Content, tensor

_HASH = f"G['{_torch.BUILTINS_ALIAS}']['hash']"


@dataclasses.dataclass(frozen=True, slots=True)
class Absent:
    """What a name does not find."""

    error: str


def is_known(read: _torch.Read) -> bool:
    """There is an answer to looks of this kind."""
    return read.kind in _ANSWERS


def answer(
    read: _torch.Read, content: Content, look: Callable[[str], Any], varying: tuple[int, ...]
) -> Any:
    """What a look finds.

    Args:
        read: of a kind that is known.
        look: finds what a name stands for, or an `Absent`.
        varying: the dimensions of a tensor whose size may be any.

    Raises:
        NoContentError: something that only its identity tells.
    """
    if read.source == _HASH:  # whether the program calls it is a matter of its code
        return "builtins.hash"
    value = look(read.source)
    if isinstance(value, Absent):
        return f"absent ({value.error})"
    if read.kind == "DUPLICATE_INPUT":
        return value is look(str(read.detail))
    if isinstance(value, torch.Tensor) and read.kind == "TENSOR_MATCH":
        return tensor(value, varying)
    return _ANSWERS[read.kind](content, value, read.detail)


def op_answer(name: str) -> list[list[str]]:
    """What a trace takes from an op: how it is called, and what says of which shape its results
    are. What the op computes is no part of a trace."""
    namespace, _, rest = name.partition("::")
    packet: Any = getattr(getattr(torch.ops, namespace), rest)
    found = []
    for overload in map(functools.partial(getattr, packet), packet.overloads()):
        if _torch.is_hidden_composite(overload):
            raise NoContentError(f"{overload}, whose code is not to be seen")
        fake = _torch.python_functions(overload).get("fake")
        told = digest([content_key([fake])]) if fake is not None else ""
        found.append([str(overload._schema), told])
    return found


def _kind(content: Content, value: Any, detail: Any) -> Any:
    return content.outline(value)


def _value(content: Content, value: Any, detail: Any) -> Any:
    return content.value(value)


def _keys(content: Content, value: Any, detail: Any) -> Any:
    return [content.kind(type(value)), *map(content.value, dict.keys(value))]


def _length(content: Content, value: Any, detail: Any) -> Any:
    return [content.kind(type(value)), len(value)]


_ANSWERS: dict[str, Callable[[Content, Any, Any], Any]] = {
    **dict.fromkeys(("TYPE_MATCH", "TENSOR_MATCH", "DUPLICATE_INPUT"), _kind),
    **dict.fromkeys(("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH"), _value),
    **dict.fromkeys(("ID_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH"), _value),
    **dict.fromkeys(("CLOSURE_MATCH", "BUILTIN_MATCH"), _value),
    **dict.fromkeys(("DICT_KEYS_MATCH", "DICT_CONST_KEYS"), _keys),
    **dict.fromkeys(("DICT_CONTAINS", "DICT_NOT_CONTAINS"), lambda _, value, key: key in value),
    **dict.fromkeys(("SET_CONTAINS", "SET_NOT_CONTAINS"), lambda _, value, item: item in value),
    **dict.fromkeys(("NOT_NONE_MATCH", "WEAKREF_ALIVE"), lambda _, value, __: value is not None),
    "SEQUENCE_LENGTH": _length,
    _torch.SEEN: lambda content, value, _: content.kind(type(value)),
    # Up to torch 2.11 the attribute is the last part of the name, which has been looked up.
    "HASATTR": lambda _, value, detail: detail is None or hasattr(value, detail),
    "NOT_PRESENT_IN_GENERIC_DICT": lambda _, value, detail: detail in value.__dict__,
    "EMPTY_NN_MODULE_HOOKS_DICT": lambda _, value, __: len(value) == 0,
}
"""What is told about a value, by the kind of guard. What is not here cannot be asked about."""
