"""What captures cost, what they may cost, and giving some of them up."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tqdm import tqdm

import piecewise_backend as pw
from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.costs import MIB, CaptureCost, MemoryUse, cost_table
from tests.helpers import compile, declare
from tests.runtime_helpers import of_rows, only_runtime, toy

SIZES = [1, 2, 4, 8]
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


# What captures cost


def test_table_of_costs() -> None:
    costs = [
        CaptureCost(PIECEWISE, 512, 0, 33, 0.25, MemoryUse(28 * MIB, 36 * MIB)),
        CaptureCost(PIECEWISE, 1, 0, 33, 0.046, MemoryUse(0, 4 * MIB + 2**19)),
        CaptureCost(FULL, 512, 0, 1, 0.1, MemoryUse(2 * MIB, 6 * MIB)),
    ]
    assert_expected_inline(
        cost_table(costs),
        """\
mode       size  graphs  seconds  allocator MiB  device MiB
piecewise   512      33     0.25           28.0        36.0
piecewise     1      33     0.05            0.0         4.5
full        512       1     0.10            2.0         6.0
total                67     0.40           30.0        46.5""",
    )


def test_table_of_costs_without_figures_and_with_adapters() -> None:
    costs = [
        CaptureCost(FULL, 0, 2, 1, 0.0, MemoryUse(512, None)),
        CaptureCost(FULL, 4, 0, 1, 0.0, MemoryUse(None, None)),
    ]
    assert_expected_inline(
        cost_table(costs),
        """\
mode     size  adapters  graphs  seconds  allocator MiB  device MiB
full   static         2       1     0.00            0.0           -
full        4         0       1     0.00              -           -
total                         2     0.00              -           -""",
    )
    assert cost_table([]) == ""


def test_costs_are_measured_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Emulated graphs have arenas, of which the largest size makes nearly all."""
    declare("uniform_batch")
    compiled = compile(toy, cudagraph_capture_sizes=SIZES)
    with caplog.at_level(logging.INFO, "piecewise_backend.api"):
        report = pw.warmup(compiled, of_rows(1024))
    graph = report.graphs[0]
    found = [(cost.mode, cost.size, cost.num_graphs) for cost in graph.capture_costs]
    assert found == [(PIECEWISE, n, 3) for n in (8, 4, 2, 1)] + [(FULL, n, 1) for n in (8, 4, 2, 1)]
    largest, *others = [cost.memory.allocator_bytes or 0 for cost in graph.capture_costs]
    assert largest >= 8 * 1024 * 4
    assert max(others[:3]) == 0
    assert all(cost.memory.device_bytes is None for cost in graph.capture_costs)
    assert sum(c.seconds for c in graph.capture_costs) == pytest.approx(graph.capture_seconds)
    table = cost_table(graph.capture_costs)
    assert table in str(report)
    assert [record.getMessage() for record in caplog.records] == [f"captures:\n{table}"]


def test_costs_are_those_of_captures_that_are_kept() -> None:
    compiled = compile(toy, cudagraph_capture_sizes=SIZES)
    pw.warmup(compiled, of_rows())
    captures = only_runtime(compiled).captures
    captures.disable(PIECEWISE, 4, 0, "wrong", is_padded=False)
    assert [cost.size for cost in pw.report(compiled).graphs[0].capture_costs] == [8, 2, 1]
    captures.drop()
    assert pw.report(compiled).graphs[0].capture_costs == ()


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_progress_on_a_terminal_only(
    stream: io.StringIO, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    pw.warmup(compile(toy, cudagraph_capture_sizes=SIZES), of_rows())
    shown = stream.getvalue()
    assert ("piecewise: capturing piecewise: 100%" in shown and "4/4" in shown) is is_shown
    assert bool(shown) is is_shown


def test_progress_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def make_inputs(descriptor: pw.BatchDescriptor) -> Any:
        asked.append(descriptor)
        if len(asked) == 4:
            raise ZeroDivisionError("of the user")
        return of_rows()(descriptor)

    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(ZeroDivisionError, match="of the user"):
        pw.warmup(compile(toy, cudagraph_capture_sizes=SIZES), make_inputs)
    assert "1/4" in sys.stderr.getvalue()
    assert not getattr(tqdm, "_instances", ())
