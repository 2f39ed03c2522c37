"""Counters are exact, and `expect` fails for what is not named too."""

from __future__ import annotations

import re

import pytest

import piecewise_backend as pw
from piecewise_backend.counters import CompilationCounter


def test_changes_reach_the_parent() -> None:
    total = CompilationCounter()
    one, other = CompilationCounter(parent=total), CompilationCounter(parent=total)
    one.add(num_graphs_seen=1, num_inductor_compiles=3)
    other.add(num_graphs_seen=2)
    assert (one.num_graphs_seen, other.num_graphs_seen, total.num_graphs_seen) == (1, 2, 3)
    assert total.num_inductor_compiles == 3
    assert "parent" not in total.counts()


def test_expect_passes_for_exact_changes() -> None:
    counter = CompilationCounter()
    with counter.expect(num_graphs_seen=2, num_inductor_compiles=0):
        counter.add(num_graphs_seen=1)
        counter.add(num_graphs_seen=1)
    with counter.expect():
        pass


@pytest.mark.parametrize(
    ("added", "expected", "message"),
    [
        ({"num_graphs_seen": 1}, {"num_graphs_seen": 2}, "expected {'num_graphs_seen': 2}, got"),
        ({"num_graphs_seen": 1}, {}, "expected {}, got {'num_graphs_seen': 1}"),
        ({}, {"num_graphs_seen": 1}, "expected {'num_graphs_seen': 1}, got {}"),
    ],
)
def test_expect_fails_for_anything_else(added: dict, expected: dict, message: str) -> None:
    counter = CompilationCounter()
    with pytest.raises(AssertionError, match=re.escape(message)), counter.expect(**expected):
        counter.add(**added)


def test_expect_names_a_counter_that_does_not_exist() -> None:
    with (
        pytest.raises(AssertionError, match=r"no such counters: \['num_graphs'\]; there are"),
        pw.compilation_counter.expect(num_graphs=1),
    ):
        pass


def test_an_error_inside_of_expect_is_not_replaced() -> None:
    with pytest.raises(ZeroDivisionError), CompilationCounter().expect(num_graphs_seen=1):
        _ = 1 / 0


@pytest.mark.parametrize("name", ["num_graphs", "parent", "counts"])
def test_unknown_counter_is_not_made_up(name: str) -> None:
    with pytest.raises((AttributeError, TypeError)):
        CompilationCounter().add(**{name: 1})
