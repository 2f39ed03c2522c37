"""Memory runs out, or the user's code fails, in the middle of warm-up: nothing is half captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend.batch import FallbackReason
from piecewise_backend.static_inputs import StaticInputs
from tests.helpers import compile, declare, mark_dynamic, out_attn, rows, same
from tests.runtime_helpers import fallbacks, num_replays, of_rows, only_runtime, quiet, toy

BEFORE: list[Callable[[int], None]] = []
"""Called with the number of tokens before a hungry op runs."""


@torch.library.custom_op("pwtest::hungry", mutates_args=[])
def hungry(x: Tensor) -> Tensor:
    """An op of a piece."""
    for function in BEFORE:
        function(x.size(0))
    return x * 2


@hungry.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pwtest::hungry_attn", mutates_args=["out"])
def hungry_attn(x: Tensor, out: Tensor) -> None:
    """A split op."""
    for function in BEFORE:
        function(x.size(0))
    out.copy_(x * 2)


@hungry_attn.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


def model(x: Tensor) -> Tensor:
    x = torch.ops.pwtest.hungry(x + 1)
    return out_attn(x, x, x).sin() + x


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    BEFORE.clear()


class RunsOut:
    """`make_inputs` after which memory ends: at the n-th run of the op in the capture of a size."""

    def __init__(self, size: int, at_run: int, uniform: bool = False) -> None:
        self.size, self.at_run, self.uniform = size, at_run, uniform
        self.num_runs = 0
        self._num_calls = 0
        self._is_now = False
        BEFORE.append(self.run)

    def __call__(self, descriptor: pw.BatchDescriptor) -> tuple[Tensor]:
        self._num_calls += 1
        is_size = (descriptor.num_tokens, descriptor.uniform) == (self.size, self.uniform)
        self._is_now = is_size and self._num_calls > 2  # those are for the trace
        return (rows(descriptor.num_tokens),)

    def run(self, num_tokens: int) -> None:
        if self._is_now:
            self.num_runs += 1
            if self.num_runs == self.at_run:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def works(compiled: Any, reference: Any, sizes: tuple[int, ...]) -> None:
    """Values are right at every count, and graphs of `sizes` serve theirs."""
    with quiet():
        for n in range(1, 18):
            same(compiled(rows(n)), reference(rows(n)), f"{n} tokens")
        before = num_replays(pw.report(compiled))
        for n in sizes:
            same(compiled(rows(n, seed=1)), reference(rows(n, seed=1)), f"{n} tokens again")
    assert num_replays(pw.report(compiled)) == before + len(sizes)


STAGES = ["warm-up run", "first trial", "last trial", "recording", "replay"]


@pytest.mark.parametrize("size", [16, 8, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_memory_ends_in_the_middle_of_a_capture(size: int, stage: str) -> None:
    """That size is disabled with its reason; others are captured, into the same pool."""
    dry_run = RunsOut(size, at_run=0)
    pw.warmup(compile(model), dry_run, verify=False)
    torch._dynamo.reset()
    recording = dry_run.num_runs - 1  # then it is replayed, which runs it here
    assert recording > 4, "after the step without graphs, a run, and trials of padding"
    at_run = {"warm-up run": 2, "first trial": 3, "last trial": recording - 1}
    at_run |= {"recording": recording, "replay": recording + 1}
    compiled = compile(model)
    with pytest.warns(RuntimeWarning, match="capturing this size failed .*out of memory"):
        report = pw.warmup(compiled, RunsOut(size, at_run[stage]), verify=False)
    BEFORE.clear()
    others = tuple(n for n in (16, 8, 4) if n != size)
    assert report.graphs[0].captured_sizes == others
    assert report.graphs[0].capture_errors.keys() == {size}
    assert "Tried to allocate 2.00 GiB" in report.graphs[0].capture_errors[size]
    assert not report.graphs[0].padding_unsafe
    assert report.is_sealed
    assert [cost.size for cost in report.graphs[0].capture_costs] == list(others)
    works(compiled, model, others)
    again = pw.warmup(compiled, of_rows())
    assert set(again.graphs[0].captured_sizes) == {4, 8, 16}
    works(compiled, model, (4, 8, 16))


@pytest.mark.parametrize("size", [16, 8, 4])
@pytest.mark.parametrize("run", [2, 3])
def test_memory_ends_in_the_middle_of_a_whole_step(size: int, run: int) -> None:
    """In its split op; the pieces of that size serve."""
    declare("always", "pwtest::hungry_attn")

    def whole(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.pwtest.hungry_attn(x + 1, out)
        return out * 3

    compiled = compile(whole, splitting_ops=["pwtest::hungry_attn"])
    with pytest.warns(RuntimeWarning, match="capturing this size failed .*out of memory"):
        report = pw.warmup(compiled, RunsOut(size, run, uniform=True), verify=False)
    BEFORE.clear()
    graph = report.graphs[0]
    assert graph.captured_sizes == (16, 8, 4)
    assert graph.captured_steps == tuple(n for n in (16, 8, 4) if n != size)
    with pw.batch(uniform=True):
        works(compiled, whole, (4, 8, 16))
    assert FallbackReason.CAPTURE_ERROR not in fallbacks(pw.report(compiled)), "pieces serve"


def test_memory_ends_in_a_step_without_graphs() -> None:
    """The model itself does not fit: the user's error, and nothing is sealed."""
    compiled = compile(model)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        pw.warmup(compiled, RunsOut(8, 1))
    BEFORE.clear()
    report = pw.report(compiled)
    assert not report.is_sealed
    assert report.rebuilding == ""
    assert not only_runtime(compiled).turns.is_taken
    assert report.graphs[0].captured_sizes == (16,)
    pw.warmup(compiled, of_rows())
    works(compiled, model, (4, 8, 16))


def test_memory_ends_while_graphs_are_compared() -> None:
    """What was not compared does not serve."""
    compiled = compile(model)
    dry_run = RunsOut(8, at_run=0)
    pw.warmup(compile(lambda x: model(x)), dry_run, verify=False)
    torch._dynamo.reset()
    with pytest.raises(torch.OutOfMemoryError):
        pw.warmup(compiled, RunsOut(8, dry_run.num_runs + 1))
    BEFORE.clear()
    report = pw.report(compiled)
    assert report.graphs[0].captured_sizes == ()
    assert not report.is_sealed
    pw.warmup(compiled, of_rows())
    works(compiled, model, (4, 8, 16))


def test_memory_ends_when_buffers_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = StaticInputs.of, []

    def of(*args: Any, **kwargs: Any) -> StaticInputs:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args, **kwargs)

    monkeypatch.setattr(StaticInputs, "of", of)
    compiled = compile(toy)
    with pytest.warns(RuntimeWarning, match="no memory for the buffers of this size: CUDA out of"):
        report = pw.warmup(compiled, of_rows())
    assert report.graphs[0].captured_sizes == (8, 4)
    assert report.graphs[0].capture_errors.keys() == {16}
    works(compiled, toy, (4, 8))


def test_memory_ends_in_a_capture_on_demand() -> None:
    compiled = compile(model)
    memory = RunsOut(8, 3)
    with quiet():
        compiled(mark_dynamic([rows(8)])[0])
        for _ in range(3):
            memory(pw.BatchDescriptor(num_tokens=8))
        for call in range(4):
            found = compiled(rows(8, seed=call))
            memory(pw.BatchDescriptor(num_tokens=4))
            same(found, model(rows(8, seed=call)), f"call {call}")
            memory(pw.BatchDescriptor(num_tokens=8))
    report = pw.report(compiled).graphs[0]
    assert report.capture_errors.keys() == {8}
    assert not only_runtime(compiled).turns.is_taken


# Warm-up twice


def test_warm_up_of_a_model_that_was_sealed_without() -> None:
    compiled = compile(toy)
    pw.seal(compiled)
    with pytest.raises(pw.ContractError, match="sealed"):
        compiled(rows(4))
    assert pw.warmup(compiled, of_rows()).is_sealed
    works(compiled, toy, (4, 8, 16))


def test_an_error_in_make_inputs_of_a_sealed_model() -> None:
    """The second warm-up fails: what the first captured goes on serving."""
    compiled = compile(toy)
    pw.warmup(compiled, of_rows())

    def make_inputs(descriptor: pw.BatchDescriptor) -> Any:
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        pw.warmup(compiled, make_inputs)
    assert pw.report(compiled).rebuilding == ""
    works(compiled, toy, (4, 8, 16))


def test_warm_up_inside_of_warm_up() -> None:
    compiled = compile(toy)
    pw.warmup(compiled, of_rows())
    errors = []

    def make_inputs(descriptor: pw.BatchDescriptor) -> Any:
        for function in (lambda: pw.warmup(compiled, of_rows()), lambda: pw.rebind(compiled)):
            with pytest.raises(pw.ContractError, match="a warm-up of this model is under way"):
                function()
            errors.append(function)
        return of_rows()(descriptor)

    report = pw.warmup(compiled, make_inputs)
    assert errors
    assert report.is_sealed
    assert report.graphs[0].captured_sizes == (16, 8, 4)
    works(compiled, toy, (4, 8, 16))


def test_two_threads_that_warm_up_at_once() -> None:
    """One does, the other is told so."""
    compiled = compile(toy)
    pw.warmup(compiled, of_rows())
    is_at_it, may_go_on = threading.Event(), threading.Event()

    def make_inputs(descriptor: pw.BatchDescriptor) -> Any:
        is_at_it.set()
        assert may_go_on.wait(60)
        return of_rows()(descriptor)

    def run() -> None:
        with torch.no_grad():
            pw.warmup(compiled, make_inputs)

    thread = threading.Thread(target=run)
    thread.start()
    assert is_at_it.wait(60)
    with pytest.raises(pw.ContractError, match="under way; wait for it"):
        pw.warmup(compiled, of_rows())
    may_go_on.set()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert pw.report(compiled).is_sealed
    works(compiled, toy, (4, 8, 16))
