"""Which things that a trace looked at are one object, for an `is` that it may have gone by.

In:  what was found under each name.
Out: pairs of names, and names of what is equal to something and another object.
Knows nothing of how things were looked at.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from piecewise_backend.sources import PLAIN_VALUES
from piecewise_backend.trace_answers import Absent
from piecewise_backend.trace_build import is_function_of_build

_EQUAL = (*PLAIN_VALUES, tuple, frozenset, type, types.NoneType, types.BuiltinFunctionType,
          types.ModuleType, Absent)  # fmt: skip
_COLLECTIONS = (dict, set, frozenset, tuple, list)


def one_object(values: Mapping[str, Any], *, compares_values: bool) -> list[list[str]]:
    """Two names of each object that has several, the first one first.

    Args:
        compares_values: of classes and tuples, too. Nobody else asks which of equal ones it is.
    """
    names: dict[int, str] = {}
    is_asked = _may_have_equals if compares_values else _is_object
    pairs = ((names.setdefault(id(v), name), name) for name, v in values.items() if is_asked(v))
    return [[first, other] for first, other in pairs if first != other]


def apart(values: Mapping[str, Any]) -> list[list[Any]]:
    """What is equal to something before it and another object: its name, and the number of it.

    Of strings and numbers, and of those in collections. Mostly there is none: Python keeps one
    of each name in a program, and those of a program are made alike in each process.
    """
    objects: dict[tuple[type, str], list[int]] = {}
    found = []
    for name, value in (pair for item in values.items() for pair in _plain(*item)):
        equals = objects.setdefault((type(value), repr(value)), [])
        if id(value) not in equals:
            equals.append(id(value))
        if number := equals.index(id(value)):
            found.append([name, number])
    return found


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The plain value under a name, and those of a collection."""
    if isinstance(value, PLAIN_VALUES):
        yield name, value
    elif isinstance(value, _COLLECTIONS):
        for number, item in enumerate(value):
            if isinstance(item, str | bytes):
                yield f"{name} item {number}", item


def _is_object(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return not is_function_of_build(value)
    return not isinstance(value, _EQUAL)


def _may_have_equals(value: Any) -> bool:
    return not isinstance(value, (*PLAIN_VALUES, types.NoneType, Absent))
