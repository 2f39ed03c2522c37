"""Counts of graphs, pieces, compilations and captures, exact."""

from __future__ import annotations

import pytest
import torch

import piecewise_backend as pw
from tests.helpers import Decoder, compile, rows
from tests.runtime_helpers import of_rows, only_runtime, toy

SIZES = [1, 2]


def test_toy_has_three_capturable_pieces_among_five() -> None:
    compiled = compile(toy, cudagraph_capture_sizes=SIZES)
    expected = {
        "num_graphs_seen": 1,
        "num_piecewise_graphs_seen": 5,
        "num_piecewise_capturable_graphs_seen": 3,
        "num_cudagraph_captured": 6,
    }
    with torch.no_grad(), pw.compilation_counter.expect(**expected):
        report = pw.warmup(compiled, of_rows())
    nothing = ("num_inductor_compiles", "num_artifacts_loaded", "num_traces_loaded")
    assert report.graphs[0].counts == expected | dict.fromkeys(nothing, 0)


def test_twelve_layers() -> None:
    compiled = compile(Decoder(12), cudagraph_capture_sizes=SIZES)
    with (
        torch.no_grad(),
        pw.compilation_counter.expect(
            num_graphs_seen=1,
            num_piecewise_graphs_seen=25,
            num_piecewise_capturable_graphs_seen=13,
            num_cudagraph_captured=26,
        ),
    ):
        pw.warmup(compiled, of_rows())


@pytest.mark.parametrize("num_layers", [2, 8, 32])
def test_depth_does_not_change_the_number_of_distinct_pieces(num_layers: int) -> None:
    compiled = compile(Decoder(num_layers))
    with torch.no_grad():
        compiled(rows(4))
    assert len(only_runtime(compiled).graph.versions) == 3


@pytest.mark.usefixtures("inductor_cache")
def test_inductor_compiles_each_distinct_piece_once() -> None:
    """Two sizes, four layers whose names differ: three compilations, at warm-up only."""
    model = Decoder(4)
    compiled = compile(model, compiler="inductor", cudagraph_capture_sizes=SIZES)
    with torch.no_grad():
        with pw.compilation_counter.expect(
            num_graphs_seen=1,
            num_piecewise_graphs_seen=9,
            num_piecewise_capturable_graphs_seen=5,
            num_inductor_compiles=3,
            num_cudagraph_captured=10,
        ):
            pw.warmup(compiled, of_rows())
        assert len(only_runtime(compiled).graph.versions) == 3
        with pw.compilation_counter.expect():
            for size in (1, 2):
                torch.testing.assert_close(compiled(rows(size)), model(rows(size)))


def test_pieces_without_kernels_are_not_captured() -> None:
    """What lies between two split ops here only takes views: no graph would hold anything."""

    def model(x: torch.Tensor) -> torch.Tensor:
        a, _ = torch.ops.pwtest.pair(x, x)
        b, _ = torch.ops.pwtest.pair(a.t().t(), x)
        return b * 2

    compiled = compile(model, cudagraph_capture_sizes=SIZES)
    with (
        torch.no_grad(),
        pw.compilation_counter.expect(
            num_graphs_seen=1,
            num_piecewise_graphs_seen=4,
            num_piecewise_capturable_graphs_seen=2,
            num_cudagraph_captured=2,
        ),
    ):
        pw.warmup(compiled, of_rows())


def test_replays_count_nothing() -> None:
    compiled = compile(toy, cudagraph_capture_sizes=SIZES)
    with torch.no_grad():
        pw.warmup(compiled, of_rows())
        with pw.compilation_counter.expect():
            for size in (1, 2, 1, 2):
                compiled(rows(size))
    assert pw.report(compiled).graphs[0].num_replays == 4
