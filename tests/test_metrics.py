"""Counts of steps as numbers, as a table, as JSON and as Prometheus reads them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend.batch import CUDAGraphMode, FallbackReason
from piecewise_backend.errors import ConfigError
from piecewise_backend.graphs import EmulatedGraphPool
from piecewise_backend.metrics import Bucket, Metrics, prometheus_text
from piecewise_backend.statistics import Statistics
from tests.helpers import compile, declare, out_attn, rows
from tests.runtime_helpers import of_rows, toy

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def statistics_of(
    replays: Mapping[tuple[CUDAGraphMode, int, int], int],
    fallbacks: Mapping[FallbackReason, int] | None = None,
) -> Statistics:
    """As a runtime leaves it: (mode, size, tokens of a step) -> steps."""
    statistics = Statistics()
    for key, num_replays in replays.items():
        statistics.tally(*key).num_replays += num_replays
    statistics.fallbacks.update(fallbacks or {})
    return statistics


def two_traces() -> list[Statistics]:
    """20 steps: 8 from full graphs, 7 from pieces, 5 eager."""
    first = statistics_of(
        {(PIECEWISE, 16, 16): 1, (PIECEWISE, 16, 10): 2, (FULL, 8, 8): 4, (FULL, 8, 5): 2},
        {FallbackReason.NOT_CAPTURED: 1, FallbackReason.SIZE_ABOVE_GRID: 1},
    )
    second = statistics_of(
        {(FULL, 8, 8): 1, (FULL, 4, 4): 1, (PIECEWISE, 0, 7): 4, (PIECEWISE, 32, 32): 0},
        {FallbackReason.SIZE_ABOVE_GRID: 3},
    )
    return [first, second]


def test_steps_of_all_traces_are_summed_per_mode_and_size() -> None:
    assert Metrics.of(two_traces()).buckets == (
        Bucket(FULL, size=4, num_replays=1, num_tokens=4, num_padded_tokens=0),
        Bucket(FULL, size=8, num_replays=7, num_tokens=50, num_padded_tokens=6),
        Bucket(PIECEWISE, size=0, num_replays=4, num_tokens=28, num_padded_tokens=0),
        Bucket(PIECEWISE, size=16, num_replays=3, num_tokens=36, num_padded_tokens=12),
    )


def test_fallbacks_are_summed_most_frequent_first() -> None:
    fallbacks = Metrics.of(two_traces()).fallbacks
    assert list(fallbacks.items()) == [
        (FallbackReason.SIZE_ABOVE_GRID, 4),
        (FallbackReason.NOT_CAPTURED, 1),
    ]


def test_rates_are_shares_of_steps_and_of_rows() -> None:
    metrics = Metrics.of(two_traces())
    assert (metrics.num_steps, metrics.num_replays) == (20, 15)
    assert (metrics.hit_rate, metrics.fallback_rate) == (0.75, 0.25)
    assert metrics.padding_waste == 18 / 136
    assert [b.padding_waste for b in metrics.buckets] == [0.0, 6 / 56, 0.0, 0.25]


def test_execution_modes_have_the_words_of_dashboards() -> None:
    modes = [bucket.execution_mode for bucket in Metrics.of(two_traces()).buckets]
    assert modes == ["cuda_graph", "cuda_graph", "piecewise", "piecewise"]


@pytest.mark.parametrize("traces", [0, 1, 2])
def test_without_steps_all_is_zero(traces: int) -> None:
    metrics = Metrics.of(Statistics() for _ in range(traces))
    assert metrics == Metrics(buckets=(), fallbacks={}, labels={})
    assert (metrics.num_steps, metrics.num_replays) == (0, 0)
    assert (metrics.hit_rate, metrics.fallback_rate, metrics.padding_waste) == (0.0, 0.0, 0.0)


def test_only_fallbacks_is_a_hit_rate_of_zero() -> None:
    metrics = Metrics.of([statistics_of({}, {FallbackReason.DISABLED: 3})])
    assert (metrics.hit_rate, metrics.fallback_rate, metrics.padding_waste) == (0.0, 1.0, 0.0)


def test_static_graph_of_no_tokens_wastes_nothing() -> None:
    metrics = Metrics.of([statistics_of({(FULL, 0, 0): 2})])
    assert metrics.buckets == (Bucket(FULL, 0, 2, 0, 0),)
    assert (metrics.hit_rate, metrics.buckets[0].padding_waste) == (1.0, 0.0)


def test_snapshot_does_not_follow_later_steps() -> None:
    statistics, labels = statistics_of({(FULL, 8, 8): 1}), {"model_revision": "r1"}
    metrics = Metrics.of([statistics], labels)
    before = metrics.as_dict()
    statistics.tally(FULL, 8, 8).num_replays += 1
    statistics.count(FallbackReason.EMPTY_BATCH)
    labels["model_revision"] = "r2"
    assert metrics.as_dict() == before


def test_table_for_people() -> None:
    text = str(Metrics.of(two_traces(), {"model_revision": "r1"}))
    assert text.splitlines() == [
        "model_revision: r1",
        "execution mode  bucket  steps   share  real tokens  padding waste  reason",
        "--------------  ------  -----  ------  -----------  -------------  " + "-" * 63,
        "cuda_graph           4      1    5.0%            4           0.0%",
        "cuda_graph           8      7   35.0%           50          10.7%",
        "piecewise       static      4   20.0%           28           0.0%",
        "piecewise           16      3   15.0%           36          25.0%",
        "eager                -      4   20.0%            -              -  "
        "more tokens than the largest capture size",
        "eager                -      1    5.0%            -              -  "
        "this size is not captured yet; pw.warmup captures ahead of time",
        "total                      20  100.0%          118          13.2%",
        "hit rate 75.0%, fallback rate 25.0%",
    ]


def test_table_before_the_first_step() -> None:
    assert str(Metrics.of([])).splitlines() == [
        "execution mode  bucket  steps  share  real tokens  padding waste  reason",
        "--------------  ------  -----  -----  -----------  -------------  ------",
        "total                       0   0.0%            0           0.0%",
        "hit rate 0.0%, fallback rate 0.0%",
    ]


def test_dict_survives_json() -> None:
    statistics = statistics_of({(PIECEWISE, 4, 3): 3}, {FallbackReason.SIZE_ABOVE_GRID: 1})
    snapshot = Metrics.of([statistics], {"attention_backend": "flashinfer"}).as_dict()
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert snapshot == {
        "labels": {"attention_backend": "flashinfer"},
        "num_steps": 4,
        "num_replays": 3,
        "hit_rate": 0.75,
        "fallback_rate": 0.25,
        "padding_waste": 0.25,
        "buckets": [
            {
                "execution_mode": "piecewise",
                "bucket": 4,
                "num_replays": 3,
                "num_tokens": 9,
                "num_padded_tokens": 3,
                "padding_waste": 0.25,
            }
        ],
        "fallbacks": {"size_above_grid": 1},
    }


def test_unknown_label_names_the_two_there_are() -> None:
    message = "labels has 'revision'; the labels are 'model_revision' and 'attention_backend'"
    with pytest.raises(ConfigError, match=message):
        Metrics.of([], {"model_revision": "r1", "revision": "r1"})


def test_label_that_is_no_text_is_an_error() -> None:
    with pytest.raises(ConfigError, match="label 'model_revision' is 7; give a string"):
        Metrics.of([], {"model_revision": 7})  # type: ignore[dict-item]


def test_prometheus_text_in_full() -> None:
    pytest.importorskip("prometheus_client")
    statistics = statistics_of(
        {(FULL, 8, 6): 2, (PIECEWISE, 0, 7): 1}, {FallbackReason.SIZE_ABOVE_GRID: 1}
    )
    text = prometheus_text(Metrics.of([statistics], {"model_revision": "r1"}))
    user = 'model_revision="r1"}'
    full = 'attention_backend="",bucket="8",execution_mode="cuda_graph",'
    static = 'attention_backend="",bucket="0",execution_mode="piecewise",'
    eager = 'attention_backend="",bucket="",execution_mode="eager",'
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        f'piecewise_steps_total{{{full}fallback_reason="",{user} 2.0',
        f'piecewise_steps_total{{{static}fallback_reason="",{user} 1.0',
        *(
            f'piecewise_steps_total{{{eager}fallback_reason="{reason.name.lower()}",{user} '
            f"{float(reason is FallbackReason.SIZE_ABOVE_GRID)}"
            for reason in FallbackReason
        ),
        f"piecewise_tokens_total{{{full}{user} 12.0",
        f"piecewise_tokens_total{{{static}{user} 7.0",
        f"piecewise_padded_tokens_total{{{full}{user} 4.0",
        f"piecewise_padded_tokens_total{{{static}{user} 0.0",
        f'piecewise_hit_rate{{attention_backend="",{user} 0.75',
        f'piecewise_fallback_rate{{attention_backend="",{user} 0.25',
    ]
    assert [line for line in text.splitlines() if line.startswith("# TYPE")] == [
        "# TYPE piecewise_steps_total counter",
        "# TYPE piecewise_tokens_total counter",
        "# TYPE piecewise_padded_tokens_total counter",
        "# TYPE piecewise_hit_rate gauge",
        "# TYPE piecewise_fallback_rate gauge",
    ]


def test_missing_prometheus_client_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="pip install prometheus-client"):
        prometheus_text(Metrics.of([]))


# Of a model


def failing(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    capture = EmulatedGraphPool.capture

    def fail(pool: Any, function: Any, inputs: Any) -> Any:
        if any(isinstance(x, Tensor) and x.size(0) == size for x in inputs):
            raise pw.CaptureError("no event")
        return capture(pool, function, inputs)

    monkeypatch.setattr(EmulatedGraphPool, "capture", fail)


@pytest.mark.filterwarnings("ignore:piecewise")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise", "none"])
@torch.no_grad()
def test_calls_of_warm_up_are_no_traffic(
    mode: str, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a second one, after traffic whose plans are kept, and where a capture fails."""
    declare("always")
    failing(monkeypatch, 8)
    compiled = compile(toy, cudagraph_capture_sizes=[2, 4, 8], cudagraph_mode=mode)
    pw.warmup(compiled, of_rows(), verify=verify)
    assert pw.metrics(compiled).num_steps == 0, str(pw.metrics(compiled))
    for n in (2, 3, 4, 8, 9):
        compiled(rows(n))
        with pw.batch(uniform=True):
            compiled(rows(n))
    before = pw.metrics(compiled)
    assert before.num_steps == 10
    assert before.num_replays == (0 if mode == "none" else 6)
    for again in (True, False):
        pw.warmup(compiled, of_rows(), seal=again, verify=verify)
        assert pw.metrics(compiled) == before
    compiled(rows(3))
    assert pw.metrics(compiled).num_steps == 11


@pytest.mark.filterwarnings("ignore:piecewise")
@torch.no_grad()
def test_calls_of_warm_up_are_no_traffic_where_a_piece_runs_as_traced() -> None:
    def model(x: Tensor) -> Tensor:
        return out_attn(x.sum(0, keepdim=True) + x, x, x)

    compiled = compile(model, cudagraph_capture_sizes=[2, 4])
    pw.warmup(compiled, of_rows())
    assert pw.metrics(compiled).num_steps == 0
    for n in (2, 3, 5):
        compiled(rows(n))
    assert pw.metrics(compiled).fallbacks == {
        FallbackReason.PADDING_UNSAFE: 1,
        FallbackReason.SIZE_ABOVE_GRID: 1,
    }
