"""What the graphs of a model take together: whatever fails, moves, or is called in turn."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import piecewise_backend as pw
from piecewise_backend import agreement, captures
from piecewise_backend.batch import CUDAGraphMode, FallbackReason
from piecewise_backend.budget import CHUNK
from piecewise_backend.costs import MIB, MemoryUse
from piecewise_backend.errors import CaptureError
from piecewise_backend.graph_memory import Account, GraphMemory
from piecewise_backend.session import WarmupState
from tests.driver import Driver
from tests.helpers import Decoder, compile, declare, mark_dynamic, rows, same
from tests.runtime_helpers import fallbacks, num_replays, of_rows, only_runtime, quiet, toy

GRID = [1, 2, 4, 8, 12, 16, 24, 32]
SIZE_MIB = 3  # three pieces
PIECEWISE = CUDAGraphMode.PIECEWISE


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def limit_for(num_sizes: int) -> int:
    return num_sizes * SIZE_MIB * MIB + CHUNK + 2**19


# The account


def test_what_is_given_up_is_reusable_as_far_as_it_did_not_come_back() -> None:
    memory, account = GraphMemory(), Account()
    memory.grow(account, MemoryUse(10, 110), None)
    memory.grow(account, MemoryUse(0, 100), 100)
    assert (memory.bytes_in_use, account) == (210, Account(10, 200))
    memory.give_up(account, MemoryUse(0, 30), 100)
    assert (memory.use, memory.reusable_bytes) == (MemoryUse(10, 180), 70)
    assert memory.bytes_in_use == 110
    memory.grow(account, MemoryUse(0, 60), 100)
    assert (memory.use, memory.reusable_bytes) == (MemoryUse(10, 240), 30), "40 were used again"
    memory.close(account)
    assert (memory.use, memory.reusable_bytes) == (MemoryUse(0, 230), 230)
    assert (memory.bytes_in_use, account) == (0, Account())


def test_room_leaves_a_chunk_of_a_device() -> None:
    memory = GraphMemory()
    assert memory.room(None) is None
    assert memory.room(3 * CHUNK) == 2 * CHUNK
    memory.grow(Account(), MemoryUse(0, 5 * CHUNK), None)
    assert memory.room(3 * CHUNK) == 0
    emulated = GraphMemory()
    emulated.grow(Account(), MemoryUse(CHUNK), None)
    assert emulated.room(3 * CHUNK) == 2 * CHUNK


# Whatever happens


@pytest.mark.parametrize("driver_keeps", [False, True])
def test_captured_anew_within_the_budget(
    driver_keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch, keeps=driver_keeps)
    model = Decoder(2)
    compiled = compile(model, cudagraph_capture_sizes=GRID, max_graph_memory=limit_for(4))
    first = pw.warmup(compiled, of_rows())
    for _ in range(3):
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5
        again = pw.rebind(compiled)
        assert again.graphs[0].captured_sizes == first.graphs[0].captured_sizes
        assert driver.most_bytes <= limit_for(4)
        memory = only_runtime(compiled).captures.memory.model
        assert memory.bytes_in_use == pytest.approx(4 * SIZE_MIB * MIB, abs=2**16)
        assert again.memory_use.num_bytes >= driver.num_bytes, "what is moved is not measured"
        for n in (1, 16, 32):
            same(compiled(rows(n)), model(rows(n)), f"{n} tokens")


@pytest.mark.parametrize("driver_keeps", [False, True])
def test_a_capture_that_is_disabled(driver_keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, keeps=driver_keeps)
    compiled = compile(toy, cudagraph_capture_sizes=[4, 8, 16])
    pw.warmup(compiled, of_rows())
    kept = only_runtime(compiled).captures
    kept.disable((PIECEWISE, 8, 0), "wrong")
    gc.collect()
    assert kept.memory.model.use.num_bytes == pytest.approx(driver.num_bytes, abs=2**16)
    assert kept.memory.model.bytes_in_use == pytest.approx(2 * SIZE_MIB * MIB, abs=2**16)
    assert pw.report(compiled).graphs[0].capture_errors == {8: "wrong"}


def test_a_capture_that_fails_halfway(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver keeps what it gave; the next captures use it again."""
    driver = Driver(monkeypatch, keeps=True)
    original = captures.capture_size

    def fails_at_8(request: Any) -> Any:
        captured = original(request)
        if request.sizes == (8,):
            del captured
            raise CaptureError("of the test")
        return captured

    monkeypatch.setattr(captures, "capture_size", fails_at_8)
    compiled = compile(toy, cudagraph_capture_sizes=[4, 8, 16])
    with quiet():
        report = pw.warmup(compiled, of_rows())
    assert report.graphs[0].captured_sizes == (16, 4)
    assert report.memory_use.num_bytes == pytest.approx(driver.num_bytes, abs=2**16)
    memory = only_runtime(compiled).captures.memory.model
    assert memory.bytes_in_use == pytest.approx(2 * SIZE_MIB * MIB, abs=2**16)


def test_a_model_that_is_gone_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, keeps=True)
    compiled = compile(toy, cudagraph_capture_sizes=[4, 8])
    pw.warmup(compiled, of_rows())
    memory = only_runtime(compiled).captures.memory.model
    assert memory.bytes_in_use > 0
    torch._dynamo.reset()
    gc.collect()
    assert memory.bytes_in_use == 0
    assert memory.use.num_bytes == 2 * SIZE_MIB * MIB, "the driver keeps it"


# Several instances, one limit


def test_instances_share_a_budget_and_have_sizes_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch)
    one, other = Decoder(2), Decoder(2)
    options = {"cudagraph_capture_sizes": GRID, "max_graph_memory": limit_for(10)}
    first, second = compile(one, **options), compile(other, **options)
    assert len(pw.warmup(first, of_rows(), seal=False).graphs[0].captured_sizes) == len(GRID)
    with quiet():
        report = pw.warmup(second, of_rows(), seal=False)
    assert report.graphs[0].captured_sizes == (32, 24)
    assert driver.num_bytes <= limit_for(10)
    assert report.memory_use.num_bytes == pytest.approx(driver.num_bytes, abs=2**16)
    text = report.graphs[0].left_out["piecewise", 1]
    assert "max_graph_memory is 32.5 MiB, of which 30.0 MiB are in use" in text
    before = num_replays(report)
    with quiet():
        for n in range(1, 33):
            same(first(rows(n)), one(rows(n)), f"first, {n} tokens")
            same(second(rows(n)), other(rows(n)), f"second, {n} tokens")
    found = pw.report(second)
    assert num_replays(found) - before == 64
    assert not fallbacks(found)


def two_warmed() -> list[tuple[Any, Decoder]]:
    found = []
    for model in (Decoder(2, seed=1), Decoder(2, seed=2)):
        compiled = compile(model, cudagraph_capture_sizes=[4, 8])
        pw.warmup(compiled, of_rows())
        for n in (3, 8):
            same(compiled(rows(n)), model(rows(n)), f"{n} tokens")
        found.append((compiled, model))
    return found


def test_switching_off_is_for_every_instance() -> None:
    both = two_warmed()
    before = num_replays(pw.report(both[0][0]))
    pw.switch_graphs(both[1][0], False)
    for compiled, model in both * 2:
        for n in (3, 8, 8):
            same(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    report = pw.report(both[0][0])
    assert num_replays(report) == before
    assert fallbacks(report) == {FallbackReason.DISABLED: 12}


def test_rebinding_one_instance_leaves_the_other_its_graphs() -> None:
    both = two_warmed()
    (first, model), (other, other_model) = both
    same(other(rows(4)), other_model(rows(4)), "the other is called last")
    for parameter in model.parameters():
        parameter.mul_(2)
    with pw.compilation_counter.expect(num_cudagraph_captured=2 * 3):
        pw.rebind(first)
    before = num_replays(pw.report(first))
    for n in range(1, 9):
        same(first(rows(n)), model(rows(n)), f"{n} tokens")
        same(other(rows(n)), other_model(rows(n)), f"{n} tokens of the other")
    assert num_replays(pw.report(first)) == before + 16


# Padding to a size whose neighbour is gone


def test_batches_of_an_evicted_size_go_to_its_neighbour() -> None:
    """Which served one token count, and is padded to now."""
    compiled = compile(toy, cudagraph_capture_sizes=[6, 7, 8])
    pw.warmup(compiled, of_rows())
    for n in (6, 8):
        same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    assert pw.evict(compiled).sizes == {"piecewise": (7,)}
    for n in (5, 6, 7, 8):
        same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    assert not fallbacks(pw.report(compiled))


# Estimates


def test_an_estimate_though_a_size_was_captured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    compiled = compile(toy, cudagraph_capture_sizes=GRID[1:], max_graph_memory=limit_for(4))
    for _ in range(3):
        (x,) = mark_dynamic([rows(8)])
        same(compiled(x), toy(rows(8)), "before warm-up")
    assert pw.report(compiled).graphs[0].captured_sizes == (8,)
    graph = pw.warmup(compiled, of_rows(), verify=False).graphs[0]
    assert "piecewise" in graph.estimates
    assert len(graph.captured_sizes) == 4
    assert {8, 32} <= set(graph.captured_sizes)
    assert driver.most_bytes <= limit_for(4)


def test_what_is_captured_is_not_given_up_for_what_may_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Driver(monkeypatch)
    compiled = compile(toy, cudagraph_capture_sizes=GRID, max_graph_memory=limit_for(2))
    with quiet():
        graph = pw.warmup(compiled, of_rows()).graphs[0]
    assert graph.captured_sizes == (32, 24)
    assert not graph.capture_errors


def test_the_bar_ends_full_though_sizes_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Driver(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    compiled = compile(toy, cudagraph_capture_sizes=GRID, max_graph_memory=limit_for(4))
    pw.warmup(compiled, of_rows())
    shown = capsys.readouterr().err
    assert "capturing piecewise: 100%" in shown
    assert "4/4" in shown


# A warm-up that is disturbed


def test_graphs_are_not_switched_off_while_they_are_captured() -> None:
    compiled = compile(toy, cudagraph_capture_sizes=[4, 8])

    def make_inputs(descriptor: pw.BatchDescriptor) -> Any:
        if descriptor.num_tokens == 4:
            pw.switch_graphs(compiled, False)
        return of_rows()(descriptor)

    with pytest.raises(pw.ContractError, match=r"a warm-up of this model is under way, and capt"):
        pw.warmup(compiled, make_inputs)
    assert set(pw.warmup(compiled, of_rows()).graphs[0].captured_sizes) == {4, 8}
    pw.switch_graphs(compiled, False)
    same(compiled(rows(4)), toy(rows(4)), "without")


@pytest.mark.parametrize("at", range(3, 9))
def test_a_reset_in_the_middle_of_a_warm_up(at: int) -> None:
    compiled = compile(toy, cudagraph_capture_sizes=[4, 8])
    made = []

    def make_inputs(descriptor: pw.BatchDescriptor) -> Any:
        made.append(descriptor)
        if len(made) == at:
            torch._dynamo.reset()
        return of_rows()(descriptor)

    with quiet(), pytest.raises(pw.ContractError, match=r"reset\(\) was called while the model"):
        pw.warmup(compiled, make_inputs)
    report = pw.warmup(compiled, of_rows())
    assert report.state is WarmupState.READY
    before = num_replays(report)
    for n in (4, 8):  # a trace of its own may serve what was called in between
        same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    assert num_replays(pw.report(compiled)) == before + 2


def test_make_inputs_that_never_gives_a_size() -> None:
    compiled = compile(toy, cudagraph_capture_sizes=[4, 8, 16])

    def make_inputs(descriptor: pw.BatchDescriptor) -> Any:
        return (rows(16 if descriptor.num_tokens == 4 else descriptor.num_tokens),)

    with pytest.raises(pw.ContractError, match=r"for \[4\] tokens were served without graphs"):
        pw.warmup(compiled, make_inputs)


def test_a_sealed_model_stays_sealed_when_a_warm_up_fails() -> None:
    compiled = compile(toy, cudagraph_capture_sizes=[4, 8])
    pw.warmup(compiled, of_rows())

    def make_inputs(descriptor: pw.BatchDescriptor) -> Any:
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError):
        pw.warmup(compiled, make_inputs)
    report = pw.report(compiled)
    assert report.is_sealed
    assert report.state is WarmupState.READY
    before = num_replays(report)
    with pw.compilation_counter.expect():
        for n in range(1, 9):
            same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    assert num_replays(pw.report(compiled)) == before + 8


# Many facts, many threads


def test_counts_that_are_stated_make_no_plans_of_their_own() -> None:
    declare("always")
    compiled = compile(toy, cudagraph_capture_sizes=[4, 8])
    pw.warmup(compiled, of_rows())
    x = rows(6)
    for num_reqs in (1, 2, 3, 4, 5, 6):
        with pw.batch(num_tokens=6, num_reqs=num_reqs):
            same(compiled(x), toy(x), f"{num_reqs} sequences")
    assert len(only_runtime(compiled).captures.prepared) == 1
    for facts in ({"num_tokens": 7}, {"num_reqs": 7}):
        for _ in range(2):
            with pytest.raises(pw.ContractError, match=r"pw\.batch says"), pw.batch(**facts):
                compiled(x)


def test_facts_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MAX_KNOWN", 4)
    compiled = compile(toy, cudagraph_capture_sizes=[8])
    pw.warmup(compiled, of_rows())
    known = only_runtime(compiled).agreement.known
    for call in range(20):
        with pw.batch(num_reqs=1 + call % 7):
            same(compiled(rows(8)), toy(rows(8)), f"call {call}")
        assert 0 < len(known) <= 4


def test_a_report_while_another_thread_captures() -> None:
    compiled = compile(toy, cudagraph_capture_sizes=GRID, capture_after=1)
    (x,) = mark_dynamic([rows(32)])
    compiled(x)
    is_done = threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        try:
            while not is_done.is_set():
                str(pw.report(compiled))
                str(pw.metrics(compiled))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        with quiet():
            for n in range(32, 0, -1):
                same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    finally:
        is_done.set()
        thread.join(timeout=60)
        sys.setswitchinterval(interval)
    assert not errors, errors
