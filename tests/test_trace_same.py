"""Which things that a trace looked at are one object."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from piecewise_backend.trace_content import Content
from piecewise_backend.trace_same import apart, one_object


class Kind:
    pass


def text() -> str:
    """The same each time, and each time another object."""
    return "-".join(["a", "text"])


def make_class(name: str = "Made") -> Any:
    """Of one content each time."""

    class Made:
        pass

    Made.__name__ = Made.__qualname__ = name
    return Made


def make_enum() -> Any:
    class Act(enum.Enum):
        SILU = 1

    return Act


def make_function(amount: float = 1.0) -> Any:
    return lambda x: x + amount


def make_module() -> Any:
    return types.ModuleType("settings")


def pairs(values: dict[str, Any], *, compares_values: bool = False) -> list[list[str]]:
    return one_object(values, compares_values=compares_values)


def numbers(values: dict[str, Any], *, compares_values: bool = False) -> list[list[Any]]:
    return apart(values, Content(), compares_values=compares_values)


@pytest.mark.parametrize("thing", [Kind(), nn.Linear(1, 1), torch.ones(1), [1], {"a": 1}])
def test_two_names_of_one_object(thing: Any) -> None:
    values = {"self.kind": thing, "DEFAULT": thing, "other": Kind(), "again": thing}
    for compares_values in (False, True):
        found = pairs(values, compares_values=compares_values)
        assert found == [["self.kind", "DEFAULT"], ["self.kind", "again"]]


@pytest.mark.parametrize("thing", [(1, 2), frozenset([1])])
def test_of_tuples_only_an_is_asks(thing: Any) -> None:
    values = {"self.kind": thing, "DEFAULT": thing}
    assert pairs(values) == []
    assert pairs(values, compares_values=True) == [["self.kind", "DEFAULT"]]


@pytest.mark.parametrize("thing", [None, True, 3, "a", torch.float32, nn.functional.silu, Kind])
def test_what_there_is_one_of(thing: Any) -> None:
    values = {"self.kind": thing, "DEFAULT": thing}
    for compares_values in (False, True):
        assert pairs(values, compares_values=compares_values) == []
        assert numbers(values, compares_values=compares_values) == []


@pytest.mark.parametrize("make", [make_class, make_function, make_module])
def test_what_has_the_content_of_another_object(make: Callable[[], Any]) -> None:
    """`==`, `isinstance` and keys of dictionaries tell them apart."""
    one, other = make(), make()
    for place in ({other: 1}, {other}, (other,), [other]):
        found = [name for name, _ in numbers({"one": one, "place": place})]
        assert "place item 0" in found
    assert numbers({"one": one, "again": one}) == []


def test_objects_whose_classes_have_one_content() -> None:
    one, other = make_class(), make_class()
    assert numbers({"self.kind": one(), "Made": other})[0] == ["Made", 1]
    assert numbers({"self.kind": one(), "other": other()}) == [["Made of other", 1]]
    assert numbers({"self.kind": one(), "Made": one}) == []
    derived = [type("Own", (cls,), {})() for cls in (one, other)]
    assert ["Made of second", 1] in numbers({"first": derived[0], "second": derived[1]})


def test_members_of_enums_of_one_content() -> None:
    one, other = make_enum(), make_enum()
    assert numbers({"self.act": one.SILU, "SILU": other.SILU}) == [
        [f"{other.__qualname__} of SILU", 1]
    ]
    assert numbers({"self.act": one.SILU, "SILU": one.SILU}) == []


def test_functions_of_torch_of_one_name() -> None:
    """Which are closures."""
    functional = nn.functional
    contents = [Content().value(f) for f in (functional.max_pool1d, functional.max_pool2d)]
    assert contents[0] != contents[1]


def test_equal_strings_that_are_two_objects() -> None:
    one, other = text(), text()
    values = {"first": one, "second": other, "third": one, "number": 1.5, "same": other}
    assert numbers(values) == []
    assert numbers(values, compares_values=True) == [["second", 1], ["same", 1]]


@pytest.mark.parametrize("collection", [{text(): 1}, {text()}, frozenset([text()]), (text(),)])
def test_equal_strings_in_collections(collection: Any) -> None:
    own = next(iter(collection))

    def found(**values: Any) -> list[list[Any]]:
        return numbers(values, compares_values=True)

    assert found(all=collection, one=text()) == [["one", 1]]
    assert found(all=collection, one=own) == []
    assert found(one=text(), all=collection) == [["all item 0", 1]]


def test_nan_is_found_in_a_list_by_what_object_it_is() -> None:
    one, other = float("nan"), float("nan")
    assert numbers({"self.pad": one, "PADS": [other]}) == [["PADS item 0", 1]]
    assert numbers({"self.pad": one, "PADS": [one]}) == []


def test_literals_of_the_code_come_first() -> None:
    """`text = "relu"; self.act is text`."""
    namespace: dict[str, Any] = {}
    exec("def choose(x):\n    names = ('other text', 1000)\n    return 'a-text', names", namespace)
    content = Content()
    content.value(namespace["choose"])
    literals = namespace["choose"].__code__.co_consts
    own = next(one for one in literals if one == "a-text")
    other = next(one for one in literals if isinstance(one, tuple))[0]
    values = {"own": own, "copy": text(), "other": other, "another": "".join(["other ", "text"])}
    found = apart(values, content, compares_values=True)
    assert found == [["copy", 1], ["another", 1]]
    assert apart(values, content, compares_values=False) == []
