"""What functions, modules and classes have, and whether it was written there.

In:  one of them.
Out: names and parts of it, and texts of what is plain.
Knows nothing of how other parts are described.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.sources import PLAIN_VALUES
from piecewise_backend.trace_build import is_function_of_build, is_of_build
from piecewise_backend.trace_code import text_digest

_OF_DYNAMO = ("torch._dynamo.mutation_guard",)


def attributes_of(thing: Any) -> Iterator[str]:
    """Names, and values that are plain; of an op these alone, as it keeps what it was asked for."""
    for name, value in vars(thing).items():
        if isinstance(value, PLAIN_VALUES):
            yield f"{name} {_plain_text(value)}"
        elif isinstance(thing, types.FunctionType):
            yield name


def replaced_in(function: types.FunctionType) -> Iterator[str]:
    """Code of another function, and defaults: its name does not tell those of torch's."""
    if not _has_own_code(function):
        yield f"code of {function.__code__.co_qualname}"
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if defaults:
        texts = (_plain_text(v) if _is_plain(v) else type(v).__qualname__ for v in defaults)
        yield text_digest(repr([*texts]))


def _has_own_code(function: types.FunctionType) -> bool:
    return function.__code__.co_qualname == function.__qualname__


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, PLAIN_VALUES)


def held_by(function: types.FunctionType) -> Iterator[str]:
    """What a function that another one made was made with; there are several of such a name."""
    cells = function.__closure__ if "<locals>" in function.__qualname__ else None
    for name, cell in zip(function.__code__.co_freevars, cells or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # it is not assigned yet
            continue
        if isinstance(value, types.FunctionType):
            value = f"{value.__module__}.{value.__qualname__}"
        yield f"{name} {_plain_text(value)}" if isinstance(value, PLAIN_VALUES) else name


def _plain_text(value: object) -> str:
    """Members of enums by their names: their values may be anything."""
    return str(value.name) if isinstance(value, enum.Enum) else repr(value)


def _is_import(value: object, *, into_build: bool) -> bool:
    """What an import leaves in a module; in one of torch's that is a part of torch."""
    if not isinstance(value, types.ModuleType):
        return False
    return not into_build or is_of_build(value.__name__)


def names_in(module: types.ModuleType, *, is_built: bool) -> list[str]:
    """What can be looked for in a module, but for what imports leave in it; in one of torch's
    those are parts of torch.

    Args:
        is_built: it is one of torch's or the standard library's.
    """
    if isinstance(module, torch._ops._OpNamespace):  # has those that were used so far
        return [name for name in _torch.operator_names() if name.startswith(f"{module.name}::")]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("__") and not _is_import(value, into_build=is_built)
    ]


def parts_of(member: Any) -> tuple[Any, ...]:
    """What a class has under a name, taken apart."""
    if isinstance(member, property):
        return member.fget, member.fset, member.fdel
    is_wrapped = isinstance(member, staticmethod | classmethod | types.MethodType)
    return (member.__func__ if is_wrapped else member,)


def is_in_place(part: Any, cls: type, name: str) -> bool:
    """It was written there, or put there by Dynamo with its first trace."""
    if isinstance(part, type):
        return True
    if isinstance(part, types.BuiltinFunctionType):
        return part.__self__ is cls
    if not isinstance(part, types.FunctionType):
        return getattr(part, "__objclass__", None) is cls
    if not is_function_of_build(part) or not _has_own_code(part):
        return False
    home, own = part.__module__, (cls.__module__, f"{cls.__qualname__}.{name}")
    return (home, part.__qualname__) == own or home in _OF_DYNAMO
