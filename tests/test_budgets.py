"""What captures cost, what they may cost, and giving some of them up."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from tqdm import tqdm

import piecewise_backend as pw
from piecewise_backend.batch import CUDAGraphMode, FallbackReason
from piecewise_backend.budget import CHUNK, Estimate, memory_limit, sizes_that_fit
from piecewise_backend.costs import MIB, CaptureCost, MemoryUse, cost_table
from piecewise_backend.grid import within_budget
from tests.driver import Driver
from tests.helpers import SPLIT_OPS, Decoder, compile, declare, mark_dynamic, rows, same
from tests.runtime_helpers import fallbacks, modes, of_rows, only_runtime, quiet, toy

SIZES = [1, 2, 4, 8]
GRID = [1, 2, 4, 8, 12, 16, 24, 32]
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
    kept = only_runtime(compiled).captures
    kept.disable((PIECEWISE, 4, 0), "wrong")
    assert [cost.size for cost in pw.report(compiled).graphs[0].capture_costs] == [8, 2, 1]
    kept.drop()
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


# What they may cost


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (None, None), (1, 1), (2**31, 2**31), (0.25, 0.25), ("2GiB", 2**31), ("512 MiB", 2**29),
        ("1.5KiB", 1536), ("1048576", MIB), ("0.05", 0.05), (".5", 0.5),
    ],
)  # fmt: skip
def test_limits(value: Any, limit: Any) -> None:
    assert memory_limit("max_graph_memory", value) == limit


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        True,
        0.0,
        1.0,
        2.5,
        "2 GB",
        "much",
        "",
        "0",
        "1.0",
        "-1",
        b"1",
        [1],
        "9" * 400 + "GiB",
    ],
)
def test_limits_that_are_none(value: Any) -> None:
    with pytest.raises(pw.ConfigError, match=r"max_graph_memory=.*give bytes, a fraction .*2GiB"):
        compile(toy, max_graph_memory=value)(rows(4))


def test_a_limit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, limit in (("3GiB", 3 * 2**30), ("0.1", 0.1)):
        monkeypatch.setenv("PIECEWISE_MAX_GRAPH_MEMORY", text)
        assert pw.Config.from_options().max_graph_memory == limit


def test_a_fraction_of_a_device_without_memory_of_its_own() -> None:
    with pytest.raises(pw.ConfigError, match=r"max_graph_memory=0.1 is a fraction .*give bytes"):
        compile(toy, max_graph_memory=0.1)(rows(4))
    compiled = compile(toy, max_graph_memory=0.1, graph_impl=None)
    same(compiled(rows(4)), toy(rows(4)), "no graphs, no limit")


@pytest.mark.parametrize(
    ("first", "second", "each"),
    [
        ((28, 33), (0, 4), 4 * MIB + 2**19),  # they agree but for a chunk: the mean
        ((28, 90), (0, 4), 4 * MIB),  # the first loaded something
        ((28, 33), (20, 26), 5 * MIB + 2**19),  # the pool grows once
        ((28, None), (2, None), 0),
        ((0, 0), (0, -2), 0),
    ],
)
def test_estimates(first: Any, second: Any, each: int) -> None:
    grown = [
        MemoryUse(*(None if n is None else n * MIB for n in figures)) for figures in (first, second)
    ]
    estimate = Estimate.of(PIECEWISE, *grown, num_sizes=51)
    assert estimate.bytes_per_size == each
    assert estimate.num_bytes == sum(use.num_bytes for use in grown) + 49 * each


def test_the_smallest_is_kept_longest() -> None:
    assert sizes_that_fit(GRID, 8, 1) == tuple(GRID)
    assert sizes_that_fit(GRID, 0, 0) == tuple(GRID)
    assert sizes_that_fit(GRID, 7, 2) == within_budget(GRID, 3)
    assert sizes_that_fit(GRID, 3, 2) == (1,)
    assert sizes_that_fit(GRID, 1, 2) == sizes_that_fit(GRID, -5, 2) == ()


@pytest.mark.parametrize("chunk", [1, 2 * MIB])
@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
def test_the_estimate_is_near_what_is_used(
    mode: str, chunk: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    declare("always")
    driver = Driver(monkeypatch, int(1.4 * MIB) if mode == "piecewise" else 3 * MIB, chunk)
    compiled = compile(toy, cudagraph_capture_sizes=GRID, cudagraph_mode=mode)
    with caplog.at_level(logging.INFO, "piecewise_backend.fitting"):
        report = pw.warmup(compiled, of_rows())
    graph = report.graphs[0]
    assert graph.estimates.keys() == set(mode.split("_and_"))
    for name, estimate in graph.estimates.items():
        used = sum(c.memory.num_bytes for c in graph.capture_costs if c.mode.value == name)
        assert estimate.num_bytes == pytest.approx(used, rel=0.2)
        line = f"expected of {name} graphs: {estimate}; 8 captures took {used / MIB:.1f} MiB"
        assert line in str(report)
        assert f"{name} graphs are expected to take {estimate}" in caplog.text
    assert report.memory_use.num_bytes == pytest.approx(driver.num_bytes, abs=2**16)


@pytest.mark.parametrize("driver_keeps", [False, True])
def test_sizes_over_the_budget_are_left_out(
    driver_keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two largest are captured, and of the others those that save most padding are kept."""
    driver = Driver(monkeypatch, keeps=driver_keeps)
    limit = 4 * 3 * MIB + CHUNK + 2**19  # of 8 sizes 4 fit
    compiled = compile(toy, cudagraph_capture_sizes=GRID, max_graph_memory=limit)
    report = pw.warmup(compiled, of_rows())
    graph = report.graphs[0]
    kept = (*within_budget(GRID[:-2], 2), *GRID[-2:])
    assert graph.captured_sizes == kept[::-1]
    assert driver.most_bytes <= limit
    assert report.memory_use.num_bytes <= (report.memory_limit or 0) == limit
    assert graph.estimates["piecewise"].num_sizes == len(GRID)
    assert graph.left_out.keys() == {("piecewise", n) for n in GRID if n not in kept}
    text = graph.left_out["piecewise", 2]
    assert text.startswith("max_graph_memory is 14.5 MiB, of which 6.0 MiB are in use, and each ")
    assert "further size of piecewise graphs takes about 3.0 MiB; raise it" in text
    assert text.endswith("raise it, or name fewer cudagraph_capture_sizes")
    assert f"no piecewise graphs at 2: {text}" in str(report)
    with pw.compilation_counter.expect():
        for n in range(1, 33):
            same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    assert not fallbacks(pw.report(compiled))
    assert modes(compiled) == {"piecewise": 32}


def test_a_batch_for_which_no_size_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    sizes = [1, 100, 200, 400]
    compiled = compile(
        toy, cudagraph_capture_sizes=sizes, max_graph_memory=3 * 3 * MIB + CHUNK + 2**19
    )
    pw.warmup(compiled, of_rows())
    assert pw.report(compiled).graphs[0].captured_sizes == (400, 200, 1)
    with pytest.warns(RuntimeWarning, match=r"leaves no room .*max_graph_memory is 11.5 MiB"):
        same(compiled(rows(90)), toy(rows(90)), "90 tokens")
    with quiet():
        same(compiled(rows(60)), toy(rows(60)), "60 tokens")
        same(compiled(rows(30)), toy(rows(30)), "30 tokens")
        same(compiled(rows(401)), toy(rows(401)), "401 tokens")
    found = fallbacks(pw.report(compiled))
    assert found.pop(FallbackReason.OVER_BUDGET) == 2
    assert found == {FallbackReason.PADDING_TOO_LARGE: 1, FallbackReason.SIZE_ABOVE_GRID: 1}


def test_estimates_that_prove_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller sizes that take more than the second are noticed while there is room."""
    driver = Driver(monkeypatch)
    limit = 7 * 3 * MIB
    compiled = compile(toy, cudagraph_capture_sizes=GRID, max_graph_memory=limit)

    def make_inputs(descriptor: pw.BatchDescriptor) -> Any:
        if descriptor.num_tokens <= 16 and only_runtime(compiled).captures.captured:
            driver.graph_bytes = int(1.3 * MIB)
        return of_rows()(descriptor)

    report = pw.warmup(compiled, make_inputs)
    graph = report.graphs[0]
    assert {1, 32} <= set(graph.captured_sizes)
    assert report.memory_use.num_bytes <= limit
    for n in range(1, 33):
        same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")


def test_sizes_too_large_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is disabled, its memory given back, and the next smaller becomes the largest."""
    compiled = compile(toy, cudagraph_capture_sizes=SIZES, max_graph_memory=320 * 2**10)
    with pytest.warns(RuntimeWarning, match=r"max_graph_memory is 0.3 MiB, of which 0.0 MiB are"):
        report = pw.warmup(compiled, of_rows(2**11))
    graph = report.graphs[0]
    assert graph.captured_sizes == (4, 2, 1)
    assert graph.capture_errors.keys() == {8}
    assert report.memory_use.num_bytes <= 320 * 2**10
    assert "raise it, or name smaller sizes" in graph.capture_errors[8]
    with quiet():
        for n in range(1, 9):
            same(compiled(rows(n, 2**11)), toy(rows(n, 2**11)), f"{n} tokens")
    assert fallbacks(pw.report(compiled)) == {FallbackReason.CAPTURE_ERROR: 4}


@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
def test_a_budget_for_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declare("always")
    driver = Driver(monkeypatch)
    compiled = compile(toy, max_graph_memory=1, cudagraph_mode=mode)
    with quiet():
        report = pw.warmup(compiled, of_rows())
        graph = report.graphs[0]
        for n in (3, 8):
            with pw.batch(uniform=True):
                same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    assert graph.captured_sizes == graph.captured_steps == ()
    assert graph.capture_costs == ()
    assert report.memory_use.num_bytes == driver.num_bytes == 0
    assert fallbacks(pw.report(compiled)) == {FallbackReason.CAPTURE_ERROR: 2}


def test_pieces_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps get what is left."""
    declare("always")
    Driver(monkeypatch)
    limit = len(GRID) * 3 * MIB + CHUNK + int(3.5 * MIB)
    compiled = compile(toy, cudagraph_capture_sizes=GRID, max_graph_memory=limit)
    graph = pw.warmup(compiled, of_rows()).graphs[0]
    assert graph.captured_sizes == tuple(GRID[::-1])
    assert graph.captured_steps == (*GRID[:-3:-1], GRID[0])
    with pw.batch(uniform=True):
        for n in range(1, 33):
            same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    assert not fallbacks(pw.report(compiled))


def test_a_budget_without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    compiled = compile(toy, max_graph_memory=7 * MIB)
    with quiet():
        for n in (4, 8, 16) * 3:
            same(compiled(mark_dynamic([rows(n)])[0]), toy(rows(n)), f"{n} tokens")
    graph = pw.report(compiled).graphs[0]
    assert graph.captured_sizes == (8, 4)
    assert "max_graph_memory" in graph.capture_errors[16]


def test_warm_up_again_keeps_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    limit = 4 * 3 * MIB + CHUNK + 2**19
    model = pw.compile(
        toy, compiler="eager", graph_impl="emulated", cudagraph_capture_sizes=GRID,
        splitting_ops=list(SPLIT_OPS), max_graph_memory=limit,
    )  # fmt: skip
    first = model.warmup(of_rows()).graphs[0]
    with pw.compilation_counter.expect():
        second = model.warmup(of_rows()).graphs[0]
    assert first.captured_sizes == second.captured_sizes
    assert first.captured_sizes == (*GRID[:-3:-1], *within_budget(GRID[:-2], 2)[::-1])
    assert first.left_out.keys() == second.left_out.keys()
    assert driver.most_bytes <= limit


# Giving some of them up


def evicted_sizes(compiled: Any) -> dict[str, tuple[int, ...]]:
    return dict(pw.evict(compiled).sizes)


@pytest.mark.parametrize("way", ["torch.compile", "pw.compile"])
def test_sizes_that_served_nothing_are_evicted(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    options = {"cudagraph_capture_sizes": GRID, "splitting_ops": list(SPLIT_OPS)}
    compiled = compile(toy, **options)
    if way == "pw.compile":
        compiled = pw.compile(toy, compiler="eager", graph_impl="emulated", **options)
    pw.warmup(compiled, of_rows())
    for n in (3, 4, 16, 32):
        same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    evicted = pw.evict(compiled)
    assert evicted.sizes == {"piecewise": (1, 2, 8, 12, 24)}
    assert evicted.memory.device_bytes == 5 * 3 * MIB
    assert driver.num_bytes == 3 * 3 * MIB
    assert str(evicted).startswith("evicted: piecewise 1, 2, 8, 12, 24 (allocator 0.0 MiB, device")
    report = pw.report(compiled)
    graph = report.graphs[0]
    assert graph.captured_sizes == (32, 16, 4)
    assert report.memory_use.num_bytes == pytest.approx(driver.num_bytes, abs=2**16)
    assert "no piecewise graphs at 12: evicted: it served no call since" in str(graph)
    with pw.compilation_counter.expect():
        for n in range(1, 33):
            same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    assert not fallbacks(pw.report(compiled))
    assert evicted_sizes(compiled) == {}, "all three served since"
    same(compiled(rows(32)), toy(rows(32)), "32 tokens")
    assert evicted_sizes(compiled) == {"piecewise": (4, 16)}


def test_evicted_sizes_are_captured_by_the_next_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile(toy, cudagraph_capture_sizes=SIZES)
    pw.warmup(compiled, of_rows())
    same(compiled(rows(4)), toy(rows(4)), "4 tokens")
    assert evicted_sizes(compiled) == {"piecewise": (1, 2, 8)}
    with pw.compilation_counter.expect(num_cudagraph_captured=9):
        report = pw.warmup(compiled, of_rows())
    assert set(report.graphs[0].captured_sizes) == set(SIZES)
    assert report.graphs[0].left_out == {}
    assert evicted_sizes(compiled) == {"piecewise": (1, 2, 4, 8)}, "none served since"


def test_batches_of_which_all_sizes_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to hold the pool: all memory comes back."""
    driver = Driver(monkeypatch)
    compiled = compile(toy, cudagraph_capture_sizes=SIZES)
    pw.warmup(compiled, of_rows())
    evicted = pw.evict(compiled)
    assert evicted.sizes == {"piecewise": tuple(SIZES)}
    assert (evicted.memory.allocator_bytes or 0) > 0
    assert driver.num_bytes == pw.report(compiled).memory_use.num_bytes == 0
    with pytest.warns(
        RuntimeWarning, match=r"graphs of this size were evicted; pw\.warmup captures"
    ):
        same(compiled(rows(3)), toy(rows(3)), "3 tokens")
    same(compiled(rows(8)), toy(rows(8)), "8 tokens")
    with quiet():
        same(compiled(rows(9)), toy(rows(9)), "9 tokens")
    found = fallbacks(pw.report(compiled))
    assert found == {FallbackReason.EVICTED: 2, FallbackReason.SIZE_ABOVE_GRID: 1}
    assert evicted_sizes(compiled) == {}


def test_modes_are_evicted_each_for_itself() -> None:
    declare("always")
    compiled = compile(toy, cudagraph_capture_sizes=SIZES)
    pw.warmup(compiled, of_rows())
    with pw.batch(uniform=True):
        same(compiled(rows(8)), toy(rows(8)), "whole step")
    same(compiled(rows(4)), toy(rows(4)), "pieces")
    assert evicted_sizes(compiled) == {"piecewise": (1, 2, 8), "full": (1, 2, 4)}
    with pw.batch(uniform=True):
        for n in (3, 8):
            same(compiled(rows(n)), toy(rows(n)), "whole step")
    same(compiled(rows(3)), toy(rows(3)), "pieces")
    assert modes(compiled) == {"full": 3, "piecewise": 2}


def test_eviction_without_warm_up() -> None:
    """An evicted size is not captured again by calls."""
    compiled = compile(toy)
    with quiet():
        for _ in range(3):
            compiled(mark_dynamic([rows(8)])[0])
            compiled(mark_dynamic([rows(16)])[0])
        compiled(rows(4))
        compiled(rows(4))
        assert evicted_sizes(compiled) == {"piecewise": (4,)}
        for _ in range(5):
            same(compiled(rows(4)), toy(rows(4)), "4 tokens")
    assert pw.report(compiled).graphs[0].captured_sizes == (16, 8)


def test_other_instances_lose_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    models = [Decoder(seed=seed) for seed in (1, 2)]
    both = [compile(model, cudagraph_capture_sizes=SIZES) for model in models]
    for compiled in both:
        pw.warmup(compiled, of_rows())
    before = driver.num_bytes
    for compiled, model in zip(both, models, strict=True):
        same(compiled(rows(8)), model(rows(8)), "8 tokens")
    assert evicted_sizes(both[0]) == {"piecewise": (1, 2, 4)}
    assert driver.num_bytes == before // 4
    for compiled, model in zip(both, models, strict=True):
        for n in range(1, 9):
            same(compiled(rows(n)), model(rows(n)), f"{n} tokens")


def test_a_model_that_evicts_itself() -> None:
    errors = []

    @torch.library.custom_op("pwtest::evicting", mutates_args=["out"])
    def evicting(x: Tensor, out: Tensor) -> None:
        out.copy_(x)
        if is_on:
            with pytest.raises(pw.ContractError, match="inside of a call") as caught:
                pw.evict(compiled)
            errors.append(caught.value)

    @evicting.register_fake
    def _(x: Tensor, out: Tensor) -> None:
        return None

    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.pwtest.evicting(x * 2, out)
        return out + 1

    is_on = False
    compiled = compile(model, splitting_ops=["pwtest::evicting"])
    pw.warmup(compiled, of_rows())
    is_on = True
    same(compiled(rows(8)), rows(8) * 2 + 1, "8 tokens")
    assert len(errors) == 1
    assert pw.report(compiled).graphs[0].captured_sizes == (16, 8, 4)


def test_eviction_between_the_calls_of_other_threads() -> None:
    model = Decoder()
    compiled = compile(model, cudagraph_capture_sizes=GRID)
    pw.warmup(compiled, of_rows())
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.no_grad():
                for call in range(200):
                    x = rows(1 + (7 * call + number) % 32, seed=call)
                    same(compiled(x), model(x), f"thread {number}, call {call}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    with quiet():
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            pw.evict(compiled)
        for thread in threads:
            thread.join()
    assert not errors, errors


def test_eviction_of_what_is_not_compiled() -> None:
    with pytest.raises(pw.ContractError, match="is not compiled"):
        pw.evict(toy)
    assert evicted_sizes(compile(toy)) == {}
