"""Start-up: one trace, largest size first, sealed; and what happens when a part of it fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend import capture
from piecewise_backend.batch import FallbackReason
from piecewise_backend.graphs import EmulatedGraphPool
from tests.helpers import Decoder, compile, mark_dynamic, out_attn, rows, same
from tests.runtime_helpers import (
    fallbacks,
    num_replays,
    of_rows,
    only_runtime,
    quiet,
    served_from_graphs,
    toy,
)

SIZES = [1, 2, 4, 8]


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def test_one_trace_serves_none_one_and_many() -> None:
    model = Decoder()
    compiled = compile(model, cudagraph_capture_sizes=SIZES)
    report = pw.warmup(compiled, of_rows())
    assert report.is_sealed
    with pw.compilation_counter.expect(), quiet():
        for n in (0, 1, 2, 3, 8, 9, 100, 1, 0):
            x = rows(n) if n else torch.empty(0, 4)
            same(compiled(x), model(x), f"{n} tokens")
    report = pw.report(compiled)
    assert len(report.graphs) == 1
    assert fallbacks(report) == {FallbackReason.EMPTY_BATCH: 2, FallbackReason.SIZE_ABOVE_GRID: 2}


@pytest.mark.parametrize("sizes", [[1], [2], [3], [1, 2], [16, 1]])
def test_every_grid_is_traced_once(sizes: list[int]) -> None:
    compiled = compile(toy, cudagraph_capture_sizes=sizes)
    pw.warmup(compiled, of_rows())
    with quiet():
        for n in (1, 2, 3, 16, 17):
            same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    assert len(pw.report(compiled).graphs) == 1


@pytest.mark.usefixtures("inductor_cache")
def test_one_inductor_version_serves_none_one_and_many() -> None:
    compiled = compile(toy, cudagraph_capture_sizes=[1, 4], compiler="inductor")
    pw.warmup(compiled, of_rows())
    with pw.compilation_counter.expect(), quiet():
        for n in (0, 1, 3, 4, 9):
            x = rows(n) if n else torch.empty(0, 4)
            same(compiled(x), toy(x), f"{n} tokens")
    assert pw.report(compiled).graphs[0].counts["num_inductor_compiles"] == 3
    assert FallbackReason.ASSUMPTION not in fallbacks(pw.report(compiled))


def test_sizes_are_captured_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile(toy, cudagraph_capture_sizes=SIZES)
    captured = []
    original = EmulatedGraphPool.capture

    def record(self: Any, function: Any, inputs: Any) -> Any:
        captured.append(max(x.size(0) for x in inputs if isinstance(x, Tensor)))
        return original(self, function, inputs)

    monkeypatch.setattr(EmulatedGraphPool, "capture", record)
    report = pw.warmup(compiled, of_rows())
    assert captured == [size for size in (8, 4, 2, 1) for _ in range(3)]
    assert report.graphs[0].captured_sizes == (8, 4, 2, 1)


def test_calls_of_make_inputs() -> None:
    asked = []

    def make_inputs(descriptor: pw.BatchDescriptor) -> tuple[Tensor]:
        asked.append(descriptor.num_tokens)
        return (rows(descriptor.num_tokens),)

    pw.warmup(compile(toy, cudagraph_capture_sizes=SIZES), make_inputs)
    assert asked[:2] == [8, 4], "the largest, and another to see what varies"
    assert asked[2:6] == [8, 4, 2, 1], "captures, largest first"
    assert sorted(asked[6:]) == [1, 2, 3, 4, 5, 7, 8], "comparisons: the ends of each size"


def two(x: Tensor, y: Tensor) -> Tensor:
    return out_attn(x, y, x) + 1


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (toy, lambda n: rows(n)),
        (toy, lambda n: (rows(n),)),
        (toy, lambda n: [rows(n)]),
        (toy, lambda n: ((rows(n),), {})),
        (toy, lambda n: ((), {"x": rows(n)})),
        (two, lambda n: (rows(n), rows(n))),
        (two, lambda n: ([rows(n)], {"y": rows(n)})),
    ],
)
def test_what_make_inputs_may_return(function: Any, make: Any) -> None:
    compiled = compile(function)
    pw.warmup(compiled, lambda descriptor: make(descriptor.num_tokens))
    made = make(5)
    args, kwargs = made if isinstance(made, tuple) and isinstance(made[-1], dict) else (made, {})
    args = (args,) if isinstance(args, Tensor) else args
    same(compiled(*args, **kwargs), function(*args, **kwargs), "5 tokens")
    served_from_graphs(pw.report(compiled))


def test_a_dict_among_two_arguments_is_no_keywords() -> None:
    """Only `(args, kwargs)` with a sequence first is; this is an argument and a dict."""

    def model(x: Tensor, rest: dict[str, Tensor]) -> Tensor:
        return out_attn(x, rest["y"], x) + 1

    compiled = compile(model)
    pw.warmup(compiled, lambda d: (rows(d.num_tokens), {"y": rows(d.num_tokens)}))
    same(compiled(rows(5), {"y": rows(5)}), model(rows(5), {"y": rows(5)}), "5 tokens")


@pytest.mark.parametrize("made", [5, None, "x", {"x": 1}])
def test_make_inputs_returns_no_arguments(made: object) -> None:
    with pytest.raises(pw.ContractError, match=r"make_inputs returned .*return a tuple"):
        pw.warmup(compile(toy), lambda descriptor: made)


def test_make_inputs_returns_other_arguments_for_another_size() -> None:
    def make_inputs(descriptor: pw.BatchDescriptor) -> tuple[Tensor, ...]:
        return (rows(descriptor.num_tokens),) * (1 if descriptor.num_tokens == 16 else 2)

    with pytest.raises(pw.ContractError, match="return the same arguments for every size"):
        pw.warmup(compile(toy), make_inputs)


def test_an_error_in_make_inputs_leaves_the_model_usable() -> None:
    compiled = compile(toy)

    def make_inputs(descriptor: pw.BatchDescriptor) -> tuple[Tensor]:
        if descriptor.num_tokens == 4:
            raise ValueError("no inputs for 4")
        return (rows(descriptor.num_tokens),)

    with pytest.raises(ValueError, match="no inputs for 4"):
        pw.warmup(compiled, make_inputs)
    assert not pw.report(compiled).is_sealed
    assert pw.report(compiled).graphs[0].captured_sizes == (16, 8)
    for n in (5, 4, 4, 4, 3):
        same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    assert pw.report(compiled).graphs[0].captured_sizes == (16, 8, 4)


@pytest.mark.parametrize("make", [lambda: toy, Decoder])
def test_not_compiled(make: Any) -> None:
    for function in (pw.report, pw.seal, lambda m: pw.warmup(m, of_rows())):
        with pytest.raises(pw.ContractError, match=r"is not compiled; pass what torch.compile"):
            function(make())


def test_compiled_with_another_backend() -> None:
    compiled = torch.compile(toy, backend="eager")
    with pytest.raises(pw.ContractError, match="did not reach the piecewise backend"):
        pw.warmup(compiled, of_rows())


# Sealing


def test_sealed_model_that_would_trace_again() -> None:
    """The error comes as itself, names the inputs, and the next call works."""
    compiled = compile(toy)
    pw.warmup(compiled, of_rows())
    with pytest.raises(pw.ContractError, match=r"sealed.*L\['x'\]") as caught:
        compiled(rows(5, width=8))
    assert type(caught.value) is pw.ContractError
    with pw.compilation_counter.expect():
        same(compiled(rows(5)), toy(rows(5)), "next call")


def test_seal_without_warm_up() -> None:
    """What was captured so far is served; other sizes fall back and say why."""
    compiled = compile(toy)
    for _ in range(3):
        compiled(mark_dynamic([rows(8)])[0])
    pw.seal(compiled)
    before = num_replays(pw.report(compiled))
    same(compiled(rows(7)), toy(rows(7)), "7 tokens")
    assert num_replays(pw.report(compiled)) == before + 1
    with pytest.warns(RuntimeWarning, match=r"not captured yet; pw\.warmup captures"):
        same(compiled(rows(4)), toy(rows(4)), "4 tokens")
    with pw.compilation_counter.expect():
        for _ in range(4):
            same(compiled(rows(4)), toy(rows(4)), "4 tokens")
    assert pw.report(compiled).graphs[0].captured_sizes == (8,)


def test_seal_before_the_first_call() -> None:
    compiled = compile(toy)
    pw.seal(compiled)
    with pytest.raises(pw.ContractError, match="sealed"):
        compiled(rows(4))


def test_sealed_model_after_dynamo_reset() -> None:
    compiled = compile(toy)
    pw.warmup(compiled, of_rows())
    torch._dynamo.reset()
    with pytest.raises(pw.ContractError, match="sealed"):
        compiled(rows(5))
    pw.warmup(compiled, of_rows())
    same(compiled(rows(5)), toy(rows(5)), "warmed up again")


def test_warm_up_without_sealing() -> None:
    compiled = compile(toy)
    assert not pw.warmup(compiled, of_rows(), seal=False).is_sealed
    x = rows(5, dtype=torch.float64)
    same(compiled(x), toy(x), "another dtype is traced")


def test_warm_up_twice_captures_nothing_twice() -> None:
    compiled = compile(toy)
    pw.warmup(compiled, of_rows())
    with pw.compilation_counter.expect():
        report = pw.warmup(compiled, of_rows())
    assert report.is_sealed
    same(compiled(rows(5)), toy(rows(5)), "5 tokens")


def test_second_warm_up_for_another_dtype() -> None:
    compiled = compile(toy)
    pw.warmup(compiled, of_rows())
    pw.warmup(compiled, of_rows(dtype=torch.float64))
    for dtype in (torch.float32, torch.float64, torch.float32):
        x = rows(5, dtype=dtype)
        same(compiled(x), toy(x), f"{dtype}")
    report = pw.report(compiled)
    assert [graph.captured_sizes for graph in report.graphs] == [(16, 8, 4)] * 2
    assert [graph.num_replays for graph in report.graphs] == [2, 1]


# Capturing on demand


@pytest.mark.parametrize("capture_after", [0, 1, 2, 5])
def test_lazy_capture(capture_after: int) -> None:
    compiled = compile(toy, capture_after=capture_after)
    needed = max(capture_after, 1)
    for call in range(1, 9):
        x = mark_dynamic([rows(4, seed=call)])[0]
        same(compiled(x), toy(x), f"call {call}")
        sizes = pw.report(compiled).graphs[0].captured_sizes
        assert sizes == ((4,) if call >= needed else ()), f"call {call}"
    report = pw.report(compiled).graphs[0]
    assert report.num_replays == 8 - needed
    assert report.fallbacks == {FallbackReason.NOT_CAPTURED.value: needed}


# Captures that fail


class _Fails:
    """`EmulatedGraphPool.capture` that fails at one size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, error: Exception) -> None:
        self.original = EmulatedGraphPool.capture
        self.size, self.error = size, error
        monkeypatch.setattr(EmulatedGraphPool, "capture", self.make())

    def make(self) -> Any:
        def capture(pool: Any, function: Any, inputs: Any) -> Any:
            if any(isinstance(x, Tensor) and x.size(0) == self.size for x in inputs):
                raise self.error
            return self.original(pool, function, inputs)

        return capture


def test_a_size_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is switched off with the reason; others are served; nothing is tried again."""
    compiled = compile(toy)
    _Fails(monkeypatch, 8, pw.CaptureError("the piece cannot be recorded: no event"))
    with pytest.warns(RuntimeWarning, match=r"capturing this size failed.*no event"):
        report = pw.warmup(compiled, of_rows())
    assert report.graphs[0].captured_sizes == (16, 4)
    assert report.graphs[0].capture_errors.keys() == {8}
    assert "no event" in str(report)
    for n in (8, 7, 16, 9, 4, 3):
        same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    report = pw.report(compiled)
    assert num_replays(report) == 4
    assert fallbacks(report) == {FallbackReason.CAPTURE_ERROR: 2}, "calls after warm-up"


def test_an_unexpected_error_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile(toy)
    _Fails(monkeypatch, 8, RuntimeError("out of memory"))
    with pytest.warns(RuntimeWarning, match="out of memory"):
        pw.warmup(compiled, of_rows())
    same(compiled(rows(8)), toy(rows(8)), "8 tokens")
    same(compiled(rows(16)), toy(rows(16)), "16 tokens")


def test_a_failed_capture_keeps_the_call_that_caused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile(toy)
    _Fails(monkeypatch, 8, pw.CaptureError("no"))
    compiled(mark_dynamic([rows(8)])[0])
    with pytest.warns(RuntimeWarning, match="capturing this size failed"):
        same(compiled(rows(8)), toy(rows(8)), "the call after which it is captured")
    for call in range(5):
        same(compiled(rows(8, seed=call)), toy(rows(8, seed=call)), f"call {call}")
    assert not only_runtime(compiled).turns.is_taken


def test_a_failed_capture_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile(toy, on_fallback="raise")
    _Fails(monkeypatch, 8, pw.CaptureError("no event"))
    with pytest.raises(pw.ContractError, match="no event"):
        pw.warmup(compiled, of_rows())


def test_a_failed_capture_undoes_what_its_trial_runs_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = torch.zeros(())

    def model(x: Tensor) -> Tensor:
        counter.add_(1)
        return out_attn(x, x, x) * 2

    compiled = compile(model, cudagraph_capture_sizes=[8])
    _Fails(monkeypatch, 8, pw.CaptureError("no"))
    with quiet():
        for call in range(1, 5):
            compiled(mark_dynamic([rows(8)])[0])
            assert counter == call


def test_interrupting_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile(toy)
    x = mark_dynamic([rows(8)])[0]
    compiled(x)
    with monkeypatch.context() as patch:
        patch.setattr(capture._Capture, "run", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            compiled(x)
    assert not only_runtime(compiled).turns.is_taken
    for call in range(4):
        same(compiled(rows(8, seed=call)), toy(rows(8, seed=call)), f"call {call}")
    assert num_replays(pw.report(compiled)) > 0


def _interrupt(self: Any) -> Any:
    raise KeyboardInterrupt


# The report


def test_report_says_what_happened() -> None:
    compiled = compile(toy)
    assert (
        str(pw.report(compiled))
        == "piecewise: 0 graph(s), model loaded, not sealed, guards kept (until sealed)"
    )
    pw.warmup(compiled, of_rows())
    with quiet():
        for n in (5, 8, 17, 0):
            compiled(rows(n) if n else torch.empty(0, 4))
    text = str(pw.report(compiled))
    for line in (
        "piecewise: 1 graph(s), ready, sealed",
        "1     split op pwtest::attn",
        "num_piecewise_graphs_seen: 5",
        "num_cudagraph_captured: 9",
        "captured sizes: 16, 8, 4 (",
        "steps from graphs: 2",
        f"steps without, {FallbackReason.SIZE_ABOVE_GRID.value}: 1",
        f"steps without, {FallbackReason.EMPTY_BATCH.value}: 1",
    ):
        assert line in text


def test_report_names_sizes_with_unsafe_padding() -> None:
    compiled = compile(lambda x: out_attn(x, x, x) / x.abs().amax())
    report = pw.warmup(compiled, of_rows())
    assert report.graphs[0].padding_unsafe.keys() == {4, 8, 16}
    assert "unsafe padding at 16: piece" in str(report)
