"""Which things that a trace looked at are one object, for an `is` that it may have gone by.

In:  what was found under each name.
Out: pairs of names, and names of what is equal to something and another object.
Knows nothing of how things were looked at.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator, Mapping
from typing import Any

from piecewise_backend.sources import PLAIN_VALUES
from piecewise_backend.trace_answers import Absent
from piecewise_backend.trace_build import is_of_build
from piecewise_backend.trace_content import Content

_GROUPED = (type, types.FunctionType, types.ModuleType)
_EQUAL = (*PLAIN_VALUES, *_GROUPED, tuple, frozenset, types.NoneType, types.BuiltinFunctionType,
          Absent)  # fmt: skip
_COLLECTIONS = (dict, set, frozenset, tuple, list)


def one_object(values: Mapping[str, Any], *, compares_values: bool) -> list[list[str]]:
    """Two names of each object that has several, the first one first.

    Args:
        compares_values: of tuples, too. Nobody else asks which of equal ones it is.
    """
    names: dict[int, str] = {}
    is_asked = _is_tuple_or_object if compares_values else _is_object
    pairs = ((names.setdefault(id(v), name), name) for name, v in values.items() if is_asked(v))
    return [[first, other] for first, other in pairs if first != other]


def apart(values: Mapping[str, Any], content: Content, *, compares_values: bool) -> list[list[Any]]:
    """What has the content of something before it and is another object: its name and number.

    Of classes, functions and modules, be they in collections or classes of what was found. Mostly
    there is none: a function that makes classes makes several of one content.

    Args:
        content: what has described the functions of the trace, whose literals come first.
        compares_values: of strings and numbers, too, and not of NaN alone. They are made alike
            in each process of a program, and strings that are names are mostly one object.
    """
    objects: dict[Any, list[Any]] = {}
    numbers: dict[int, int] = {}

    def number(thing: Any, key: Any) -> int:
        if id(thing) not in numbers:
            equals = objects.setdefault(key, [])
            numbers[id(thing)] = len(equals)
            equals.append(thing)  # which keeps it, and so its id
        return numbers[id(thing)]

    literals = ((code.co_name, code.co_consts) for code in content.codes.values())
    for _, literal in (pair for item in literals for pair in _with_items(*item)):
        if compares_values and _is_plain(literal):
            number(literal, (type(literal), repr(literal)))
    found: list[list[Any]] = []
    for name, value in (pair for item in values.items() for pair in _with_items(*item)):
        if isinstance(value, _GROUPED):
            found.append([name, number(value, str(content.told(value)))])
        elif _is_plain(value) and (compares_values or _is_nan(value)):
            found.append([name, number(value, (type(value), repr(value)))])
        classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
        for cls in classes:
            if not is_of_build(cls.__module__):
                found.append([f"{cls.__qualname__} of {name}", number(cls, content.told(cls))])
    return [[name, position] for name, position in found if position]


def _with_items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What was found under a name, and what is in it, if that is what it is compared by."""
    yield name, value
    if isinstance(value, enum.Enum):
        yield f"{name}.value", value.value
    if isinstance(value, _COLLECTIONS):
        for position, item in enumerate(value):
            if isinstance(item, (*PLAIN_VALUES, *_GROUPED)):
                yield f"{name} item {position}", item


def _is_plain(value: object) -> bool:
    return isinstance(value, PLAIN_VALUES) and not isinstance(value, enum.Enum)


def _is_nan(value: object) -> bool:
    return isinstance(value, float | complex) and value != value


def _is_object(value: Any) -> bool:
    return not isinstance(value, _EQUAL)


def _is_tuple_or_object(value: Any) -> bool:
    return isinstance(value, tuple | frozenset) or _is_object(value)
