"""Capture sizes under constraints, next to brute force."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piecewise_backend.batch import default_capture_sizes
from piecewise_backend.errors import ConfigError
from piecewise_backend.grid import (
    divisible_by,
    lora_case_of,
    lora_cases,
    max_sizes_for,
    multiples_of_query_len,
    within_budget,
)

QUICK = settings(deadline=None, derandomize=True, database=None)
SMALL_GRIDS = st.sets(st.integers(1, 40), min_size=1, max_size=8).map(sorted)
WEIGHTS = st.dictionaries(st.integers(1, 45), st.integers(0, 9), max_size=12)


def padding(sizes: tuple[int, ...], largest: int, weights: Mapping[int, int] | None) -> int:
    """What all batches pad together; uniform over 1..largest without weights."""
    weights = dict.fromkeys(range(1, largest + 1), 1) if weights is None else weights
    return sum(
        weight * (sizes[bisect.bisect_left(sizes, num_tokens)] - num_tokens)
        for num_tokens, weight in weights.items()
        if num_tokens <= largest
    )


def usable(grid: list[int], weights: dict[int, int] | None) -> dict[int, int] | None:
    """The weights, with one more where none of the grid's counts has any."""
    return None if weights is None else {**weights, grid[-1]: weights.get(grid[-1], 0) + 1}


@given(grid=SMALL_GRIDS, max_sizes=st.integers(1, 9), weights=st.none() | WEIGHTS)
@QUICK
def test_no_other_choice_pads_less(
    grid: list[int], max_sizes: int, weights: dict[int, int] | None
) -> None:
    weights = usable(grid, weights)
    chosen = within_budget(grid, max_sizes, weights)
    least = min(
        padding((*others, grid[-1]), grid[-1], weights)
        for others in itertools.combinations(grid[:-1], len(chosen) - 1)
        if max_sizes == 1 or others[:1] == (grid[0],) or len(grid) == 1
    )
    assert padding(chosen, grid[-1], weights) == least


@given(grid=SMALL_GRIDS, max_sizes=st.integers(1, 9), weights=st.none() | WEIGHTS)
@QUICK
def test_choice_uses_the_budget_and_keeps_the_ends(
    grid: list[int], max_sizes: int, weights: dict[int, int] | None
) -> None:
    chosen = within_budget(grid, max_sizes, usable(grid, weights))
    assert len(chosen) == min(max_sizes, len(grid))
    assert list(chosen) == sorted(set(chosen) & set(grid))
    assert chosen[-1] == grid[-1]
    assert max_sizes == 1 or chosen[0] == grid[0]


@given(grid=SMALL_GRIDS, weights=st.none() | WEIGHTS)
@QUICK
def test_a_larger_budget_never_pads_more(grid: list[int], weights: dict[int, int] | None) -> None:
    weights = usable(grid, weights)
    paddings = [
        padding(within_budget(grid, max_sizes, weights), grid[-1], weights)
        for max_sizes in range(1, len(grid) + 2)
    ]
    assert paddings == sorted(paddings, reverse=True)


@pytest.mark.parametrize(
    ("max_sizes", "chosen"),
    [
        (1, (16,)),
        (2, (1, 16)),
        (3, (1, 8, 16)),
        (4, (1, 4, 8, 16)),
        (5, (1, 2, 4, 8, 16)),
        (99, (1, 2, 4, 8, 16)),
    ],
)
def test_budget_of_uniform_token_counts(max_sizes: int, chosen: tuple[int, ...]) -> None:
    assert within_budget([16, 8, 4, 2, 1, 1], max_sizes) == chosen


def test_weights_move_the_choice_to_the_traffic() -> None:
    assert within_budget((1, 2, 4, 8, 16), 3, {2: 90, 13: 1}) == (1, 2, 16)
    assert within_budget((1, 2, 4, 8, 16), 3, {3: 0.9, 8: 0.1}) == (1, 4, 16)


def test_traffic_above_the_grid_has_no_influence() -> None:
    assert within_budget((1, 2, 4, 8, 16), 3, {3: 1, 17: 1e9}) == (1, 4, 16)


def test_default_grid_on_a_budget_of_graphs() -> None:
    max_sizes = max_sizes_for(1800, 81)
    chosen = within_budget(default_capture_sizes(256), max_sizes)
    assert len(chosen) == max_sizes == 22
    assert (chosen[0], chosen[-1]) == (1, 512)


@pytest.mark.parametrize(
    ("sizes", "decode_query_len", "expected"),
    [
        ((1, 2, 4, 8), 1, (1, 2, 4, 8)),
        ((1, 2, 4, 8), 3, (3, 6, 9)),
        ((8, 4, 2, 1), 4, (4, 8)),
        ((5,), 64, (64,)),
    ],
)
def test_sizes_of_speculative_decode(
    sizes: tuple[int, ...], decode_query_len: int, expected: tuple[int, ...]
) -> None:
    assert multiples_of_query_len(sizes, decode_query_len) == expected


@given(grid=SMALL_GRIDS, decode_query_len=st.integers(1, 50))
@QUICK
def test_multiples_serve_every_size_with_less_than_a_query_more(
    grid: list[int], decode_query_len: int
) -> None:
    rounded = multiples_of_query_len(grid, decode_query_len)
    assert list(rounded) == sorted(set(rounded))
    assert all(size % decode_query_len == 0 for size in rounded)
    for size in grid:
        served_by = rounded[bisect.bisect_left(rounded, size)]
        assert size <= served_by < size + decode_query_len
    assert multiples_of_query_len(rounded, decode_query_len) == rounded


def test_sizes_that_ranks_cannot_share_are_dropped() -> None:
    assert divisible_by((1, 2, 4, 6, 8), 4) == (4, 8)
    assert divisible_by([6, 2], 1) == (2, 6)


@given(grid=SMALL_GRIDS, parallel_size=st.integers(1, 8))
@QUICK
def test_divisible_sizes_are_all_that_are_kept(grid: list[int], parallel_size: int) -> None:
    expected = tuple(size for size in grid if size % parallel_size == 0)
    if expected:
        assert divisible_by(grid, parallel_size) == expected
    else:
        with pytest.raises(ConfigError, match=f"divisible by parallel_size={parallel_size}"):
            divisible_by(grid, parallel_size)


@pytest.mark.parametrize(
    ("max_graphs", "graphs_per_size", "max_sizes"), [(1800, 81, 22), (81, 81, 1), (5, 1, 5)]
)
def test_sizes_that_a_budget_of_graphs_allows(
    max_graphs: int, graphs_per_size: int, max_sizes: int
) -> None:
    assert max_sizes_for(max_graphs, graphs_per_size) == max_sizes


@pytest.mark.parametrize(
    ("max_loras", "specialized", "plain"),
    [
        (0, (0,), (0,)),
        (1, (0, 1), (0, 1)),
        (2, (0, 1, 2), (0, 2)),
        (4, (0, 1, 2, 4), (0, 4)),
        (6, (0, 1, 2, 4, 6), (0, 6)),
    ],
)
def test_cases_of_active_adapters(
    max_loras: int, specialized: tuple[int, ...], plain: tuple[int, ...]
) -> None:
    assert lora_cases(max_loras) == specialized
    assert lora_cases(max_loras, specialize=False) == plain


@given(max_loras=st.integers(0, 100), specialize=st.booleans(), data=st.data())
@QUICK
def test_a_case_is_the_smallest_that_holds_the_active_adapters(
    max_loras: int, specialize: bool, data: st.DataObject
) -> None:
    cases = lora_cases(max_loras, specialize)
    num_active = data.draw(st.integers(0, max_loras))
    case = lora_case_of(num_active, cases)
    assert case >= num_active
    assert not [other for other in cases if num_active <= other < case]
    assert not specialize or num_active == 0 or case < 2 * num_active


def test_adapters_above_the_largest_case_are_refused() -> None:
    message = "5 active adapters are more than the largest case, 4; raise max_loras to at least 5"
    with pytest.raises(ConfigError, match=message):
        lora_case_of(5, lora_cases(4))


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (multiples_of_query_len, ((), 2), r"capture sizes \[\]: empty; give integers of at least"),
        (multiples_of_query_len, ((1, 0), 2), r"capture sizes \[1, 0\]: \[0\]; give integers"),
        (multiples_of_query_len, ((1, 2), 0), "decode_query_len is 0; give an integer of at le"),
        (divisible_by, ((1, 6), 4), r"none of the capture sizes \[1, 6\] .* e\.g\. 8$"),
        (divisible_by, ((True,), 1), r"\[True\]"),
        (divisible_by, (4, 0), "parallel_size is 0"),
        (divisible_by, ("4", 2), r"\['4'\]"),
        (within_budget, ((1, 2), 0), "max_sizes is 0; give an integer of at least 1"),
        (within_budget, ((1, 2.0), 1), r"\[2\.0\]"),
        (within_budget, ((1, 2), 1, {0: 1}), "a token count in weights is 0"),
        (within_budget, ((1, 2), 1, {1: -1}), "the weight of 1 tokens is -1; give a finite"),
        (within_budget, ((1, 2), 1, {1: float("nan")}), "the weight of 1 tokens is nan"),
        (within_budget, ((1, 2), 1, {2: float("inf")}), "the weight of 2 tokens is inf"),
        (within_budget, ((1, 2), 1, {3: 1}), "of 1 token counts give none .* size, 2; leave"),
        (within_budget, ((1, 2), 1, {}), "weights of 0 token counts give none"),
        (max_sizes_for, (80, 81), "needs 81 graphs and max_graphs is 80; allow at least 81"),
        (max_sizes_for, (0, 1), "max_graphs is 0"),
        (max_sizes_for, (1, True), "graphs_per_size is True"),
        (lora_cases, (-1,), "max_loras is -1; give an integer of at least 0"),
        (lora_case_of, (-1, (0, 1)), "num_active is -1"),
        (lora_case_of, (0, ()), r"cases of active adapters \[\]: empty"),
    ],
)
def test_wrong_arguments_are_named(
    function: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        function(*arguments)
