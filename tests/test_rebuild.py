"""Weights are replaced while a model serves: it goes on without graphs until there are new ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_backend as pw
from piecewise_backend.batch import FallbackReason
from piecewise_backend.session import WarmupState
from tests import helpers
from tests.helpers import (
    SPLIT_OPS,
    Decoder,
    assigned_state,
    declare,
    mark_dynamic,
    new_data,
    new_parameters,
    rows,
    same,
)
from tests.runtime_helpers import fallbacks, num_replays, of_rows

WAYS = ["torch.compile", "pw.compile"]
REBUILDING = FallbackReason.REBUILDING


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def compile(model: nn.Module, way: str, **options: Any) -> Any:
    if way == "torch.compile":
        return helpers.compile(model, **options)
    given = {
        "compiler": "eager",
        "graph_impl": "emulated",
        "splitting_ops": list(SPLIT_OPS),
        "cudagraph_capture_sizes": list(helpers.CAPTURE_SIZES),
    }
    return pw.compile(model, **given | options)


class Inputs:
    """`make_inputs` that does something in between, once it is told to."""

    def __init__(self) -> None:
        self.in_between: Any = None
        self.num_calls = 0

    def __call__(self, descriptor: pw.BatchDescriptor) -> tuple[Tensor]:
        if self.in_between is not None:
            self.num_calls += 1
            self.in_between()
        return (rows(descriptor.num_tokens),)


def in_a_thread(function: Any) -> None:
    """Run it there, and raise here what it raises there."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("where", ["another thread", "the same thread"])
@pytest.mark.parametrize("replace", [new_data, new_parameters, assigned_state])
@pytest.mark.parametrize("way", WAYS)
def test_calls_between_the_steps_of_a_rebuild(way: str, replace: Any, where: str) -> None:
    """All of them: on the new weights, without graphs, and counted as nothing else."""
    declare("always")
    model, inputs = Decoder(), Inputs()
    compiled = compile(model, way, on_fallback="raise")
    pw.warmup(compiled, inputs)
    same(compiled(rows(5)), model(rows(5)), "before")
    replace(model)
    seen = []

    def serve() -> None:
        for n, is_uniform in ((3, False), (16, True), (17, False)):
            with pw.batch(uniform=is_uniform):
                same(compiled(rows(n)), model(rows(n)), f"{n} tokens meanwhile")
        report = pw.report(compiled)
        seen.append((num_replays(report), report.rebuilding))

    inputs.in_between = serve if where == "the same thread" else lambda: in_a_thread(serve)
    before = num_replays(pw.report(compiled))
    report = pw.rebind(compiled)
    assert inputs.num_calls > 2 + 2 * 3, "before the trace, at captures, at comparisons"
    assert fallbacks(report) == {REBUILDING: 3 * inputs.num_calls}
    assert {rebuilding for _, rebuilding in seen} == {"under way"}
    assert report.is_sealed
    assert report.rebuilding == ""
    after = num_replays(report)
    assert before <= seen[0][0] <= seen[-1][0] <= after
    for n in (3, 16):
        same(compiled(rows(n)), model(rows(n)), f"{n} tokens afterwards")
    assert num_replays(pw.report(compiled)) == after + 2


@pytest.mark.parametrize("way", WAYS)
def test_a_thread_that_serves_all_the_time(way: str) -> None:
    model = Decoder()
    compiled = compile(model, way)
    pw.warmup(compiled, of_rows())
    same(compiled(rows(3)), model(rows(3)), "before")
    is_done, is_running = threading.Event(), threading.Event()

    def serve() -> None:
        call = 0
        while not is_done.is_set():
            x = rows(1 + call % 16, seed=call)
            same(compiled(x), model(x), f"call {call}")
            call += 1
            is_running.set()

    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad(), helpers.quiet_fallbacks():
                serve()
        except BaseException as error:
            errors.append(error)

    new_parameters(model)
    with helpers.quiet_fallbacks():
        thread = threading.Thread(target=run)
        thread.start()
        is_running.wait(60)
        for _ in range(3):
            pw.rebind(compiled)
        is_done.set()
        thread.join(timeout=60)
    assert not thread.is_alive()
    assert not errors, errors
    report = pw.report(compiled)
    assert fallbacks(report).keys() <= {REBUILDING, FallbackReason.MOVED_INPUT}
    before = num_replays(report)
    same(compiled(rows(3)), model(rows(3)), "afterwards")
    assert num_replays(pw.report(compiled)) == before + 1


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_rebuild_that_fails(way: str, is_sealed: bool) -> None:
    """It goes on serving without graphs, on the new weights, until the next one succeeds."""
    model, inputs = Decoder(), Inputs()
    compiled = compile(model, way)
    pw.warmup(compiled, inputs, seal=is_sealed)
    for num_failed, call in enumerate((1, 2, 3, 5, 6, 8), start=1):
        model.load_state_dict(Decoder(seed=call).state_dict(), assign=True)
        _fail_at(compiled, inputs, call)
        before = num_replays(pw.report(compiled))
        with pw.compilation_counter.expect():
            for n in (3, 16, 3, 3, 3, 17):
                same(compiled(rows(n)), model(rows(n)), f"{n} tokens, failed at {call}")
        report = pw.report(compiled)
        assert fallbacks(report) == {REBUILDING: 6 * num_failed}
        assert num_replays(report) == before
        assert report.graphs[0].captured_sizes == ()
        assert report.is_sealed is is_sealed
        assert report.state is WarmupState.EAGER_WARMED
        assert report.rebuilding == "capturing anew failed (ZeroDivisionError: of the user)"
        assert "\nrebuilding: capturing anew failed (ZeroDivisionError" in str(report)
        assert pw.rebind(compiled).is_sealed is is_sealed
        assert pw.report(compiled).rebuilding == ""
        before = num_replays(pw.report(compiled))
        same(compiled(rows(3)), model(rows(3)), "rebuilt")
        assert num_replays(pw.report(compiled)) == before + 1


def _fail_at(compiled: Any, inputs: Inputs, call: int) -> None:
    """Rebuild, and raise when inputs are made for the `call`-th time."""

    def fail() -> None:
        if inputs.num_calls == call:
            raise ZeroDivisionError("of the user")

    inputs.num_calls, inputs.in_between = 0, fail
    with pytest.raises(ZeroDivisionError, match="of the user"):
        pw.rebind(compiled)


def test_a_failed_rebuild_and_a_failed_warm_up() -> None:
    model, inputs = Decoder(), Inputs()
    compiled = compile(model, "torch.compile")
    pw.warmup(compiled, inputs)

    def fail() -> None:
        raise ZeroDivisionError

    inputs.in_between = fail
    for function in (lambda: pw.rebind(compiled), lambda: pw.warmup(compiled, inputs)):
        with pytest.raises(ZeroDivisionError):
            function()
        assert pw.report(compiled).rebuilding == "capturing anew failed (ZeroDivisionError: )"
    pw.warmup(compiled, of_rows())
    assert pw.report(compiled).rebuilding == ""


def test_warm_up_of_a_model_that_serves() -> None:
    model, inputs = Decoder(), Inputs()
    compiled = compile(model, "torch.compile")
    compiled(mark_dynamic([rows(8)])[0])

    def serve() -> None:
        same(compiled(rows(7)), model(rows(7)), "meanwhile")

    inputs.in_between = lambda: in_a_thread(serve)
    report = pw.warmup(compiled, inputs)
    assert fallbacks(report) == {REBUILDING: inputs.num_calls}
    assert report.graphs[0].captured_sizes == (16, 8, 4)


def test_rebind_captures_anew_though_no_input_moved() -> None:
    """A split op may find its cache by name, where nothing shows that it was replaced."""
    model, inputs = Decoder(), Inputs()
    compiled = compile(model, "torch.compile")
    pw.warmup(compiled, inputs)
    num_graphs = sum(cost.num_graphs for cost in pw.report(compiled).graphs[0].capture_costs)
    with pw.compilation_counter.expect(num_cudagraph_captured=num_graphs):
        pw.rebind(compiled)
    same(compiled(rows(3)), model(rows(3)), "afterwards")


def test_nothing_is_evicted_meanwhile() -> None:
    """What was just captured has served nobody."""
    model, inputs = Decoder(), Inputs()
    compiled = compile(model, "torch.compile")
    pw.warmup(compiled, inputs)

    def evict() -> None:
        with pytest.raises(pw.ContractError, match="warm-up of this model is under way"):
            pw.evict(compiled)

    inputs.in_between = lambda: in_a_thread(evict)
    assert pw.rebind(compiled).graphs[0].captured_sizes == (16, 8, 4)
    assert pw.evict(compiled).sizes == {"piecewise": (4, 8, 16)}


def test_graphs_switched_off_come_first() -> None:
    model, inputs = Decoder(), Inputs()
    compiled = compile(model, "torch.compile")
    pw.warmup(compiled, inputs)
    pw.switch_graphs(compiled, False)
    with pytest.raises(pw.ContractError, match="switched off"):
        pw.rebind(compiled)
    pw.switch_graphs(compiled, True)
    same(compiled(rows(3)), model(rows(3)), "from the graphs that there were")
    assert not fallbacks(pw.report(compiled))
