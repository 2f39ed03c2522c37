"""The default grid of capture sizes, and the table from token counts to sizes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import piecewise_backend as pw
from piecewise_backend.batch import BatchDescriptor, FallbackReason, PaddingTable


@pytest.mark.parametrize(
    ("cap", "count"), [(32, 7), (64, 11), (128, 19), (256, 35), (512, 51), (1024, 83)]
)
def test_grid_has_the_documented_number_of_sizes(cap: int, count: int) -> None:
    sizes = pw.default_capture_sizes(cap // 2, platform_cap=1024)
    assert len(sizes) == count
    assert sizes[-1] == cap


def test_platform_cap_limits_the_grid() -> None:
    assert pw.default_capture_sizes(1024) == pw.default_capture_sizes(256)
    assert pw.default_capture_sizes(1024)[-1] == 512


def test_number_of_sequences_off_the_grid_is_added() -> None:
    sizes = pw.default_capture_sizes(264)
    assert len(sizes) == 52
    assert 264 in sizes


def test_grid_in_full() -> None:
    assert pw.default_capture_sizes(20) == [1, 2, 4, 8, 16, 20, 24, 32, 40]
    assert pw.default_capture_sizes(1) == [1, 2]
    assert pw.default_capture_sizes(8, decode_query_len=3) == [1, 2, 4, 8, 16, 24, 32, 40, 48]


def test_most_batched_tokens_are_a_cap_and_a_size() -> None:
    assert pw.default_capture_sizes(64, max_num_batched_tokens=20) == [1, 2, 4, 8, 16, 20]
    assert pw.default_capture_sizes(16, max_num_batched_tokens=100)[-1] == 32


def test_sizes_grow_by_8_below_256_and_by_16_from_there() -> None:
    sizes = pw.default_capture_sizes(512, platform_cap=1024)
    below = [size for size in sizes if 8 <= size <= 256]
    above = [size for size in sizes if size >= 256]
    assert {b - a for a, b in itertools.pairwise(below)} == {8}
    assert {b - a for a, b in itertools.pairwise(above)} == {16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; give a positive integer"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_num_seqs": 8.0}, "max_num_seqs is 8.0"),
        ({"max_num_seqs": 8, "decode_query_len": -1}, "decode_query_len is -1"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_seqs": 8, "platform_cap": 0}, "platform_cap is 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(pw.ConfigError, match=message):
        pw.default_capture_sizes(**arguments)


@given(
    max_num_seqs=st.integers(1, 2000),
    decode_query_len=st.integers(1, 8),
    max_num_batched_tokens=st.none() | st.integers(1, 4000),
)
@settings(deadline=None)
def test_grid_is_ascending_and_below_its_cap(
    max_num_seqs: int, decode_query_len: int, max_num_batched_tokens: int | None
) -> None:
    sizes = pw.default_capture_sizes(max_num_seqs, decode_query_len, max_num_batched_tokens)
    cap = min(2 * max_num_seqs * decode_query_len, 512, max_num_batched_tokens or 512)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] <= cap


@pytest.mark.parametrize(
    ("num_tokens", "found"),
    [
        (0, FallbackReason.EMPTY_BATCH),
        (1, 1),
        (2, 2),
        (3, 4),
        (4, 4),
        (5, 64),
        (64, 64),
        (65, FallbackReason.PADDING_TOO_LARGE),
        (255, FallbackReason.PADDING_TOO_LARGE),
        (256, 512),
        (512, 512),
        (513, FallbackReason.SIZE_ABOVE_GRID),
    ],
)
def test_padding_table(num_tokens: int, found: int | FallbackReason) -> None:
    assert PaddingTable([512, 1, 2, 4, 64], max_padding_factor=2.0).lookup(num_tokens) == found


def test_padding_cliff_is_not_climbed() -> None:
    table = PaddingTable([8, 4096], max_padding_factor=2.0)
    assert table.lookup(8) == 8
    assert table.lookup(9) is FallbackReason.PADDING_TOO_LARGE
    assert table.lookup(2047) is FallbackReason.PADDING_TOO_LARGE
    assert table.lookup(2048) == 4096


@pytest.mark.parametrize(("num_tokens", "sizes", "waste"), [(5, 64, 0.375), (500, 256, 0.0234)])
def test_waste_of_the_default_grid(num_tokens: int, sizes: int, waste: float) -> None:
    padded = PaddingTable(pw.default_capture_sizes(sizes), 2.0).lookup(num_tokens)
    assert isinstance(padded, int)
    assert (padded - num_tokens) / padded == pytest.approx(waste, rel=0.01)


@given(
    sizes=st.sets(st.integers(1, 300), min_size=1, max_size=8),
    factor=st.floats(1, 4),
)
@settings(deadline=None)
def test_smallest_padded_count_is_the_least_that_a_size_serves(
    sizes: set[int], factor: float
) -> None:
    table = PaddingTable(sorted(sizes), factor)
    for size in sizes:
        served = [n for n in range(size + 1) if table.lookup(n) == size]
        assert table.smallest_padded(size) == min(served)
        assert max(served) == size


def test_descriptors_are_keys() -> None:
    assert BatchDescriptor(num_tokens=4) == BatchDescriptor(num_tokens=4)
    assert len({BatchDescriptor(num_tokens=n) for n in (4, 4, 8)}) == 2
