"""`tuning="background"`: found out by another process, taken when the user says so."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend import background, compiling
from piecewise_backend.artifact_store import Fetched
from piecewise_backend.batch import CUDAGraphMode, FallbackReason
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.config import Config
from piecewise_backend.handles import session_of
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.piece_record import record_piece
from piecewise_backend.workers import Workers
from tests.helpers import out_attn, rows, same
from tests.test_tuning import Imitation, seconds, tunings, warmed_up

__all__ = ["seconds"]  # a fixture


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Elsewhere:
    """Stands for the process that tunes: what it decides is said by the test."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.sizes: set[int] = set()
        self.waits: list[float] = []

    def start(self, graph: CompiledGraph, config: Config) -> None:
        self.num_starts += 1

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def taken(self, sizes: Collection[int]) -> None:
        self.sizes = self.sizes - set(sizes)

    def ready(self) -> set[int]:
        return self.sizes

    def progress(self) -> background.Progress:
        return background.Progress((), (), {})


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    made = Elsewhere()
    monkeypatch.setattr(compiling.Compiling, "in_background", lambda *args: made)
    return made


@pytest.fixture
def imitation(monkeypatch: pytest.MonkeyPatch) -> Imitation:
    made = Imitation()
    monkeypatch.setattr(compiling.Compiling, "compiler", lambda *args: made)
    return made


def model(x: Tensor) -> Tensor:
    """Two pieces that differ."""
    return out_attn(x.sin(), x, x) + 1


def progress_of(compiled: Any) -> background.Progress:
    (graph,) = pw.report(compiled).graphs
    assert graph.background is not None
    assert all(line in str(graph).splitlines() for line in graph.background.lines())
    return graph.background


def decide(imitation: Imitation, elsewhere: Elsewhere, size: int) -> None:
    imitation.decided |= {(piece, (size,)) for piece in range(2)}
    elsewhere.sizes.add(size)


def test_warm_up_tunes_nothing(
    imitation: Imitation, elsewhere: Elsewhere, seconds: dict[str, float]
) -> None:
    seconds["static"] = 0.5
    compiled = warmed_up(model, tuning="background", compile_sizes=[4, 8])
    assert elsewhere.num_starts == 1
    assert not tunings(compiled)
    assert not imitation.prepared
    assert {name for name, _ in imitation.compiled} == {"as traced"}
    assert pw.adopt_tuned(compiled) == ()
    assert not elsewhere.waits


def test_what_is_decided_serves_from_then_on(
    imitation: Imitation, elsewhere: Elsewhere, seconds: dict[str, float]
) -> None:
    seconds["static"] = 0.5
    compiled = warmed_up(model, tuning="background", compile_sizes=[4, 8])
    (runtime,) = session_of(compiled).runtimes
    before = dict(runtime.captures.captured)
    decide(imitation, elsewhere, 4)
    found = pw.adopt_tuned(compiled, wait=True)
    assert elsewhere.waits == [math.inf]
    assert [(t.piece, t.sizes, t.kept) for t in found] == [(0, (4,), "static"), (1, (4,), "static")]
    assert tunings(compiled) == found
    after = runtime.captures.captured
    assert after.keys() == before.keys()
    assert {key[1] for key in after if after[key] is not before[key]} == {4}
    imitation.runs.clear()
    for size in (3, 4, 8):
        same(compiled(rows(size)), model(rows(size)), f"{size} tokens")
    assert {name for name, size in imitation.runs if size == 4} == {"static"}
    assert {name for name, size in imitation.runs if size == 8} == {"as traced"}
    assert pw.adopt_tuned(compiled) == ()
    decide(imitation, elsewhere, 8)
    assert {t.sizes for t in pw.adopt_tuned(compiled)} == {(8,)}
    assert not pw.report(compiled).graphs[0].fallbacks


def test_what_an_earlier_process_decided_serves_after_warm_up(
    imitation: Imitation, elsewhere: Elsewhere, seconds: dict[str, float]
) -> None:
    seconds["static"] = 0.5
    decide(imitation, elsewhere, 4)
    compiled = warmed_up(model, tuning="background", compile_sizes=[4, 8])
    assert {t.sizes for t in tunings(compiled)} == {(4,)}


def test_calls_are_served_while_it_is_taken(
    imitation: Imitation, elsewhere: Elsewhere, seconds: dict[str, float]
) -> None:
    """Of another thread; and the model stays sealed."""
    seconds["static"] = 0.5
    compiled = warmed_up(model, tuning="background", compile_sizes=[4])
    session = session_of(compiled)
    results: list[Tensor] = []
    made = session.make_inputs

    def make_inputs(descriptor: pw.BatchDescriptor) -> Any:
        def serve() -> None:
            with torch.no_grad():
                results.append(compiled(rows(4)))

        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
        return made(descriptor)

    session.make_inputs = make_inputs
    decide(imitation, elsewhere, 4)
    assert pw.adopt_tuned(compiled)
    assert results
    for result in results:
        same(result, model(rows(4)), "meanwhile")
    assert session.is_sealed
    assert set(pw.report(compiled).graphs[0].fallbacks) == {FallbackReason.REBUILDING.value}


def test_an_error_leaves_a_model_that_serves(
    imitation: Imitation, elsewhere: Elsewhere, seconds: dict[str, float]
) -> None:
    compiled = warmed_up(model, tuning="background", compile_sizes=[4], on_fallback="warn")
    session = session_of(compiled)
    made, session.make_inputs = session.make_inputs, lambda descriptor: 1 / 0
    decide(imitation, elsewhere, 4)
    with pytest.raises(ZeroDivisionError):
        pw.adopt_tuned(compiled)
    with pytest.warns(RuntimeWarning, match="without"):
        same(compiled(rows(4)), model(rows(4)), "without graphs")
    same(compiled(rows(8)), model(rows(8)), "another size")
    session.make_inputs = made
    assert {t.sizes for t in pw.adopt_tuned(compiled)} == {(4,)}
    assert pw.report(compiled).graphs[0].captured_sizes == (16, 8, 4)


def test_what_is_slower_here_does_not_serve(
    imitation: Imitation,
    elsewhere: Elsewhere,
    seconds: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other process timed it beside whatever this one did."""

    def recall(piece: Any, numbers: Any, tried: Any, decide: Any, load: Any) -> Fetched[Any]:
        text = b'{"kept": "static", "microseconds": {"static": 0.5}, "failures": {}}'
        return Fetched(load(text), is_hit=True)

    monkeypatch.setattr(imitation, "recall", recall)
    seconds.update({"as traced": 1e-6, "static": 2e-6})
    compiled = warmed_up(model, tuning="background", compile_sizes=[4])
    decide(imitation, elsewhere, 4)
    for found in pw.adopt_tuned(compiled):
        assert found.kept == "as traced"
        assert found.failures == {"static": "measured again it takes 2.0 us, and as traced 1.0 us"}
    imitation.runs.clear()
    compiled(rows(4))
    assert {name for name, _ in imitation.runs} == {"as traced"}


def test_a_piece_that_cannot_be_sent_stops_no_other(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[Any] = []

    def record(piece: DistinctPiece) -> Any:
        if piece.index == 1:
            raise NoContentError("an op of somebody")
        return record_piece(piece)

    monkeypatch.setattr(background, "record_piece", record)
    monkeypatch.setattr(Workers, "submit", lambda self, name, message: sent.append(name))
    monkeypatch.setattr(Workers, "is_left", lambda self, name: True)
    with caplog.at_level(logging.WARNING, "piecewise_backend.background"):
        compiled = warmed_up(model, tuning="background", compile_sizes=[4, 8])
    assert sent == [(0, (4,)), (0, (8,))]
    assert "piece 1 at (8,) is not tuned: it depends on an op of somebody" in caplog.text
    assert progress_of(compiled).given_up == {
        (1, (size,)): "it depends on an op of somebody" for size in (4, 8)
    }


def test_what_was_not_stored_is_not_done(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the other process has done its job: the disk is full, say."""
    monkeypatch.setattr(Workers, "submit", lambda self, name, message: None)
    compiled = warmed_up(model, tuning="background", compile_sizes=[4])
    imitation.decided.add((0, (4,)))
    why = "what was found was not stored, or under another key"
    expected = background.Progress((), ((0, (4,)),), {(1, (4,)): why})
    assert progress_of(compiled) == expected
    assert not caplog.records
    assert [found.piece for found in pw.adopt_tuned(compiled)] == [0]
    assert progress_of(compiled) == background.Progress((), (), expected.given_up)
    assert [r.getMessage() for r in caplog.records] == [f"piece 1 at (4,) is not tuned: {why}"]


def test_without_a_warm_up_there_are_no_inputs(imitation: Imitation, elsewhere: Elsewhere) -> None:
    compiled = pw.compile(model, compile_sizes=[4], tuning="background", graph_impl="emulated")
    with pytest.raises(pw.ContractError, match="nothing was warmed up"):
        pw.adopt_tuned(compiled)


def test_where_it_is_not_asked_for_there_is_nothing_to_take(imitation: Imitation) -> None:
    compiled = warmed_up(model, compile_sizes=[])
    assert pw.adopt_tuned(compiled) == ()
    assert pw.report(compiled).graphs[0].background is None


def scaled(x: Tensor) -> Tensor:
    return x * 2


def test_across_processes(
    seconds: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other process really compiles, times, and stores; this one compiles nothing for it."""
    options: Any = {"splitting_ops": [], "compile_sizes": [4], "cache_dir": tmp_path}
    with caplog.at_level(logging.WARNING):
        compiled = warmed_up(scaled, tuning="background", **options)
        assert not tunings(compiled)
        before = pw.compilation_counter.num_inductor_compiles
        with torch.enable_grad():  # as a thread of its own begins
            (found,) = pw.adopt_tuned(compiled, wait=True)
        assert pw.compilation_counter.num_inductor_compiles == before
    assert not caplog.records
    assert found.is_remembered
    assert set(found.microseconds) >= {"as traced", "static", "coordinate descent"}
    same(compiled(rows(4)), scaled(rows(4)), "served")
    (runtime,) = session_of(compiled).runtimes
    assert runtime.captures.has(CUDAGraphMode.PIECEWISE, pw.BatchDescriptor(num_tokens=4))
    torch._dynamo.reset()
    again = warmed_up(scaled, tuning="background", **options)
    assert tunings(again) == (found,)


def test_a_process_that_hangs_is_waited_for_as_long_as_one_likes(
    seconds: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    """And what it did when it is killed is done by another one."""
    options: Any = {"splitting_ops": [], "compile_sizes": [4]}
    compiled = warmed_up(scaled, tuning="background", **options)
    tuning = session_of(compiled).runtimes[0].background
    workers = tuning._workers
    while not (processes := set(workers._processes)):
        time.sleep(0.01)
    (process,) = processes
    os.kill(process._popen.pid, signal.SIGSTOP)
    begun = time.monotonic()
    assert pw.adopt_tuned(compiled, wait=0.5) == ()
    assert 0.5 <= time.monotonic() - begun < 60
    assert pw.adopt_tuned(compiled, wait=0) == ()
    said = [record.getMessage() for record in caplog.records]
    assert all(re.fullmatch(r"still being tuned after .* s: piece 0 at \[4\]", s) for s in said)
    assert len(said) == 2
    caplog.clear()
    assert pw.adopt_tuned(compiled) == ()
    assert progress_of(compiled) == background.Progress(((0, (4,)),), (), {})
    assert progress_of(compiled).lines() == ["being tuned in the background: piece 0 at [4]"]
    os.kill(process._popen.pid, signal.SIGKILL)
    tuning.wait(600)
    assert progress_of(compiled) == background.Progress((), ((0, (4,)),), {})
    assert progress_of(compiled).lines() == ["tuned, for pw.adopt_tuned to take: piece 0 at [4]"]
    (found,) = pw.adopt_tuned(compiled, wait=600)
    assert found.is_remembered
    assert progress_of(compiled) == background.Progress((), (), {})
    assert not caplog.records


@pytest.mark.parametrize("wait", [-1, -0.5, float("nan"), "1", None])
def test_what_is_no_time_to_wait(imitation: Imitation, elsewhere: Elsewhere, wait: Any) -> None:
    compiled = warmed_up(model, tuning="background", compile_sizes=[4])
    with pytest.raises(pw.ConfigError, match=f"wait={wait!r}; give True, False, or a number"):
        pw.adopt_tuned(compiled, wait=wait)
    assert not elsewhere.waits


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [(True, math.inf), (math.inf, math.inf), (1, 1), (2.5, 2.5), (0, 0), (False, None)],
)
def test_times_to_wait(
    imitation: Imitation, elsewhere: Elsewhere, wait: Any, seconds: float | None
) -> None:
    compiled = warmed_up(model, tuning="background", compile_sizes=[4])
    pw.adopt_tuned(compiled, wait=wait)
    expected = [] if seconds is None else [pytest.approx(seconds, abs=0.5)]
    assert elsewhere.waits == expected


def test_what_another_process_cannot_do_is_said(
    seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("piecewise_backend.job_process._COMMAND", ["/no/such/program"])
    with caplog.at_level(logging.WARNING):
        compiled = warmed_up(scaled, tuning="background", splitting_ops=[], compile_sizes=[4])
        session_of(compiled).runtimes[0].background.wait(60)
        before = progress_of(compiled)
        assert pw.adopt_tuned(compiled, wait=True) == ()
    assert progress_of(compiled) == before
    assert before.lines() == ["not tuned: piece 0 at [4]: no process is left to do it"]
    text = caplog.text
    assert "no process can be started" in text
    assert "piece 0 at (4,) is not tuned: no process is left to do it" in text
    same(compiled(rows(4)), scaled(rows(4)), "served")


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecewise_backend.job_process._COMMAND", ["/no/such/program"])


def test_without_a_usable_cache_dir_it_is_tuned_all_the_same(
    imitation: Imitation, no_process: None, seconds: dict[str, float], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    options: Any = {"compile_sizes": [4], "cache_dir": tmp_path / "file" / "cache"}
    with pytest.warns(RuntimeWarning, match="no compilation cache"):
        compiled = warmed_up(model, tuning="background", **options)
    imitation.decided |= {(piece, (4,)) for piece in range(2)}
    assert pw.adopt_tuned(compiled, wait=True)


def test_without_a_place_for_temporary_files_nothing_is_tuned(
    imitation: Imitation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    compiled = warmed_up(model, tuning="background", compile_sizes=[4])
    assert "nothing is tuned in the background: [Errno 2]" in caplog.text
    assert pw.adopt_tuned(compiled, wait=True) == ()
    same(compiled(rows(4)), model(rows(4)), "served")


def test_what_could_not_be_taken_is_taken_later(
    imitation: Imitation, elsewhere: Elsewhere, seconds: dict[str, float]
) -> None:
    seconds["static"] = 0.5
    compiled = warmed_up(model, tuning="background", compile_sizes=[4])
    decide(imitation, elsewhere, 4)
    pw.switch_graphs(compiled, False)
    with pytest.raises(pw.ContractError, match="switched off"):
        pw.adopt_tuned(compiled)
    pw.switch_graphs(compiled, True)
    session = session_of(compiled)
    made, session.make_inputs = session.make_inputs, lambda descriptor: pw.adopt_tuned(compiled)
    with pytest.raises(pw.ContractError, match="start none in make_inputs"):
        pw.adopt_tuned(compiled)
    session.make_inputs = made
    assert {t.kept for t in pw.adopt_tuned(compiled)} == {"static"}
    assert pw.report(compiled).graphs[0].captured_sizes == (16, 8, 4)
    assert pw.adopt_tuned(compiled) == ()


def test_in_another_mode_than_that_of_warm_up(
    imitation: Imitation, no_process: None, seconds: dict[str, float]
) -> None:
    """It is done in that of warm-up, which a thread of its own need not be in."""
    seconds["static"] = 0.5
    compiled = warmed_up(model, tuning="background", compile_sizes=[4])
    imitation.decided |= {(piece, (4,)) for piece in range(2)}
    with torch.enable_grad():
        assert {t.kept for t in pw.adopt_tuned(compiled, wait=True)} == {"static"}
