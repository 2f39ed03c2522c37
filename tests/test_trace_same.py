"""Which things that a trace looked at are one object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from piecewise_backend.trace_same import apart, one_object


class Kind:
    pass


def function() -> None:
    pass


def text() -> str:
    """The same each time, and each time another object."""
    return "-".join(["a", "text"])


@pytest.mark.parametrize("thing", [Kind(), function, nn.Linear(1, 1), torch.ones(1), [1], {"a": 1}])
def test_two_names_of_one_object(thing: Any) -> None:
    values = {"self.kind": thing, "DEFAULT": thing, "other": Kind(), "again": thing}
    for compares_values in (False, True):
        found = one_object(values, compares_values=compares_values)
        assert found == [["self.kind", "DEFAULT"], ["self.kind", "again"]]


@pytest.mark.parametrize("thing", [Kind, (1, 2), frozenset([1]), torch])
def test_of_what_others_may_be_equal_to_only_an_is_asks(thing: Any) -> None:
    values = {"self.kind": thing, "DEFAULT": thing}
    assert one_object(values, compares_values=False) == []
    assert one_object(values, compares_values=True) == [["self.kind", "DEFAULT"]]


@pytest.mark.parametrize("thing", [None, True, 3, "a", torch.float32, nn.functional.silu])
def test_what_there_is_one_of(thing: Any) -> None:
    values = {"self.kind": thing, "DEFAULT": thing}
    assert one_object(values, compares_values=False) == apart(values) == []


def test_equal_strings_that_are_two_objects() -> None:
    one, other = text(), text()
    values = {"first": one, "second": other, "third": one, "number": 1.5, "same": other}
    assert apart(values) == [["second", 1], ["same", 1]]


@pytest.mark.parametrize("collection", [{text(): 1}, {text()}, frozenset([text()]), (text(),)])
def test_equal_strings_in_collections(collection: Any) -> None:
    own = next(iter(collection))
    assert apart({"all": collection, "one": text()}) == [["one", 1]]
    assert apart({"all": collection, "one": own}) == []
    assert apart({"one": text(), "all": collection}) == [["all item 0", 1]]
