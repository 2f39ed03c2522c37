"""`compile_sizes` and `compile_ranges_endpoints`: what is fastest under replay serves.

Most tests compile with `Imitation`, whose versions run pieces as traced and note that they ran,
and say themselves how long versions take.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend import candidates, compiling, tuning
from piecewise_backend.artifact_store import Fetched
from piecewise_backend.compiler import AS_TRACED, Specialization
from piecewise_backend.config import Config
from piecewise_backend.graphs import EmulatedGraphPool
from piecewise_backend.replay_timing import replay_seconds
from piecewise_backend.version import Version
from tests.helpers import Decoder, compile, mark_dynamic, out_attn, rows, same

CPU = torch.device("cpu")
Times = Callable[[], Mapping[str, float]]


class Imitation:
    """Compiles nothing; each version is one by its name and counts its runs."""

    def __init__(self) -> None:
        self.runs: collections.Counter[tuple[str, int]] = collections.Counter()
        """By name of the version and rows of the first tensor."""
        self.compiled: list[tuple[str, tuple[int, ...]]] = []
        """Names of versions, and the numbers that they were compiled for."""
        self.prepared: list[tuple[int, tuple[int, ...], str]] = []
        """Special ones that were announced: pieces, numbers and names."""
        self.decided: set[tuple[int, tuple[int, ...]]] = set()
        """What another process has decided: pieces and numbers."""
        self.settled: list[tuple[str, tuple[int, ...]]] = []
        """The same of those that were kept for other processes."""
        self.settled_once: set[tuple[str, int]] = set()
        """Names and pieces: what was kept is what other sizes get then."""
        self.anew: set[str] = set()
        """Names of versions that are compiled once more to be kept, as "anew"."""
        self.broken: dict[str, Callable[[Any], Any]] = {}
        """By name, what a version makes of the results."""

    def compile(
        self, piece: Any, numbers: tuple[int, ...], special: Specialization | None = None
    ) -> Version:
        name = special.name if special is not None else AS_TRACED.name
        limits = special.limits if special is not None else {}
        self.compiled.append((name, numbers))

        def call(*inputs: Any) -> Any:
            tensor = next(x for x in inputs if isinstance(x, Tensor))
            self.runs[name, tensor.shape[0]] += 1
            return self.broken.get(name, lambda results: results)(piece.module.forward(*inputs))

        def violated_by(sizes: tuple[int, ...]) -> str | None:
            outside = [i for i, (low, high) in limits.items() if not low <= sizes[i] <= high]
            return f"limits of {outside}" if outside else None

        return Version(call, violated_by)

    def prepare(self, wanted: Any) -> None:
        self.prepared += [(w.piece.index, w.numbers, w.special.name) for w in wanted if w.special]

    def asks_for(self, piece: Any, numbers: tuple[int, ...], tried: Any) -> Callable[[], bool]:
        return lambda: (piece.index, numbers) in self.decided

    def settle(
        self, piece: Any, numbers: tuple[int, ...], special: Specialization
    ) -> Version | None:
        self.settled.append((special.name, numbers))
        if (special.name, piece.index) in self.settled_once or special.name not in self.anew:
            return None
        self.settled_once.add((special.name, piece.index))
        return self.compile(piece, numbers, dataclasses.replace(special, name="anew"))

    def recall(self, piece: Any, numbers: Any, tried: Any, decide: Any, load: Any) -> Fetched[Any]:
        return Fetched(load(decide()), is_hit=False)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def imitation(monkeypatch: pytest.MonkeyPatch) -> Imitation:
    made = Imitation()
    monkeypatch.setattr(compiling.Compiling, "compiler", lambda *args: made)
    return made


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """How long versions take, by name; 1 if it does not say."""
    taken: dict[str, float] = {}
    monkeypatch.setattr(
        tuning, "replay_seconds", lambda functions, *_: {n: taken.get(n, 1.0) for n in functions}
    )
    return taken


def model(x: Tensor) -> Tensor:
    """Two pieces that differ."""
    return out_attn(x.sin(), x, x) + 1


def warmed_up(function: Any = model, **options: Any) -> Any:
    made = compile(function, **({"compiler": "inductor", "compile_sizes": [4]} | options))
    pw.warmup(made, lambda descriptor: (rows(descriptor.num_tokens),))
    return made


def tunings(compiled: Any) -> tuple[tuning.Tuning, ...]:
    return pw.report(compiled).graphs[0].tunings


def test_the_fastest_version_serves(imitation: Imitation, seconds: dict[str, float]) -> None:
    seconds["coordinate descent"] = 0.5
    compiled = warmed_up()
    assert {t.kept for t in tunings(compiled)} == {"coordinate descent"}
    assert imitation.settled == 2 * [("coordinate descent", (4,))]
    assert [t.piece for t in tunings(compiled)] == [0, 1]
    imitation.runs.clear()
    for size in (3, 4, 8, 13):
        same(compiled(rows(size)), model(rows(size)), f"{size} tokens")
    served = {
        name: {rows for (n, rows) in imitation.runs if n == name} for name, _ in imitation.runs
    }
    assert served == {"coordinate descent": {4}, "as traced": {8, 16}}


def test_what_other_processes_will_have_serves_here_too(
    imitation: Imitation, seconds: dict[str, float]
) -> None:
    seconds["static"] = 0.5
    imitation.anew.add("static")
    compiled = warmed_up()
    assert [t.kept for t in tunings(compiled)] == ["static", "static"]
    imitation.runs.clear()
    same(compiled(rows(4)), model(rows(4)), "served")
    assert imitation.runs.keys() == {("anew", 4)}


def fail(results: Any) -> Any:
    raise RuntimeError("no valid configuration")


@pytest.mark.parametrize(
    ("broken", "again", "reason"),
    [
        (None, 1.0, "measured again it takes 1000000.0 us, and as traced 1000000.0 us"),
        (lambda results: results[:0], 0.5, "it computes other numbers than the version for all"),
        (fail, 0.5, "RuntimeError: no valid configuration"),
    ],
)
def test_what_other_processes_would_have_is_tried_and_measured_too(
    broken: Any, again: float, reason: str, imitation: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one that is faster than as traced is kept then."""

    def replay_seconds(functions: Any, *_: Any) -> dict[str, float]:
        is_first = len(functions) > 2
        taken = {"static": 0.25 if is_first else again, "max-autotune": 0.5}
        return {name: taken.get(name, 1.0) for name in functions}

    monkeypatch.setattr(tuning, "replay_seconds", replay_seconds)
    imitation.anew.add("static")
    if broken is not None:
        imitation.broken["anew"] = broken
    compiled = warmed_up()
    for found in tunings(compiled):
        assert found.kept == "max-autotune"
        assert found.failures.keys() == {"static"}
        assert reason in found.failures["static"]
    assert [name for name, _ in imitation.settled] == 2 * ["static", "max-autotune"]
    imitation.runs.clear()
    same(compiled(rows(4)), model(rows(4)), "served")
    assert imitation.runs.keys() == {("max-autotune", 4)}


def test_the_version_for_all_sizes_serves_where_no_other_is_faster(
    imitation: Imitation, seconds: dict[str, float]
) -> None:
    seconds.update({"static": 0.995, "max-autotune": 3.0})  # half a percent is noise
    compiled = warmed_up()
    assert {t.kept for t in tunings(compiled)} == {"as traced"}
    assert not imitation.settled
    imitation.runs.clear()
    compiled(rows(4))
    assert {name for name, _ in imitation.runs} == {"as traced"}


def test_the_report_has_all_times(imitation: Imitation, seconds: dict[str, float]) -> None:
    seconds["static"] = 0.25e-6
    seconds["as traced"] = 0.5e-6
    compiled = warmed_up()
    assert dict(tunings(compiled)[0].microseconds) == pytest.approx({
        "as traced": 0.5, "static": 0.25, "coordinate descent": 1e6, "max-autotune": 1e6,
    })  # fmt: skip
    text = str(pw.report(compiled))
    assert "tuned piece 0 at [4]: static (as traced 0.5 us, static 0.2 us, " in text


def test_a_version_that_computes_something_else_never_serves(
    imitation: Imitation, seconds: dict[str, float]
) -> None:
    seconds.update(dict.fromkeys(candidates.EFFORTS, 0.5))
    imitation.broken["static"] = lambda results: tuple(x + 1 for x in results)
    imitation.broken["max-autotune"] = lambda results: results[:0]
    compiled = warmed_up()
    for found in tunings(compiled):
        assert found.kept == "coordinate descent"
        assert found.failures.keys() == {"static", "max-autotune"}
        assert "computes other numbers" in found.failures["static"]
    same(compiled(rows(4)), model(rows(4)), "served")


def test_a_version_that_fails_is_left_out(imitation: Imitation, seconds: dict[str, float]) -> None:
    seconds["static"] = 0.5
    imitation.broken["static"] = fail
    compiled = warmed_up()
    assert tunings(compiled)[0].kept == "as traced"
    assert tunings(compiled)[0].failures == {"static": "RuntimeError: no valid configuration"}
    assert "; static: RuntimeError: no valid configuration" in str(pw.report(compiled))
    same(compiled(rows(4)), model(rows(4)), "served")


def test_memory_that_ends_tells_nothing(
    imitation: Imitation, seconds: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    """It is not remembered: another time there may be room."""

    def fail(results: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    imitation.broken["static"] = fail
    with caplog.at_level("WARNING", "piecewise_backend.tuning_trial"):
        compiled = warmed_up()
    assert "pieces are not tuned for sizes (4,): a trial run failed: no room" in caplog.text
    assert not tunings(compiled)
    same(compiled(rows(4)), model(rows(4)), "served")


def test_a_remembered_version_is_tried_before_it_serves(
    imitation: Imitation, seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def recall(piece: Any, numbers: Any, tried: Any, decide: Any, load: Any) -> Fetched[Any]:
        text = b'{"kept": "static", "microseconds": {"static": 1.0}, "failures": {}}'
        return Fetched(load(text), is_hit=True)

    monkeypatch.setattr(imitation, "recall", recall)
    assert {t.kept for t in tunings(warmed_up())} == {"static"}
    assert collections.Counter(name for name, _ in imitation.compiled) == {
        "as traced": 2, "static": 2,
    }  # fmt: skip
    torch._dynamo.reset()
    imitation.broken["static"] = lambda results: tuple(x + 1 for x in results)
    compiled = warmed_up()
    assert {t.kept for t in tunings(compiled)} == {"as traced"}
    assert "computes other numbers" in tunings(compiled)[0].failures["static"]
    same(compiled(rows(4)), model(rows(4)), "served")


def test_what_a_piece_writes_is_as_it_was(imitation: Imitation, seconds: dict[str, float]) -> None:
    seconds["static"] = 0.5
    state = torch.zeros(4)

    def counts(x: Tensor) -> Tensor:
        state.add_(1)
        return out_attn(x * state, x, x)

    compiled = warmed_up(counts)
    state.zero_()
    with_state = [compiled(rows(4)) for _ in range(3)]
    assert tunings(compiled)[0].kept == "static"
    state.zero_()
    for got in with_state:
        same(got, counts(rows(4)), "as often as it was called")


def test_a_version_for_a_range_is_compiled_once(
    imitation: Imitation, seconds: dict[str, float]
) -> None:
    first, second = (f"coordinate descent, {between} tokens" for between in ("1 to 8", "9 to 16"))
    seconds.update({first: 0.5, second: 2.0})
    compiled = warmed_up(compile_sizes=None, compile_ranges_endpoints=[8, 16])
    assert collections.Counter(name for name, _ in imitation.compiled) == {
        "as traced": 2, first: 2, second: 2,
    }  # fmt: skip
    assert {(t.sizes, t.kept) for t in tunings(compiled)} == {
        ((4,), first), ((8,), first), ((16,), "as traced"),
    }  # fmt: skip
    imitation.runs.clear()
    for size in (2, 8, 16, 5):
        same(compiled(rows(size)), model(rows(size)), f"{size} tokens")
    assert imitation.runs.keys() == {(first, 4), (first, 8), ("as traced", 16)}


def test_what_other_processes_will_have_of_a_range_is_compiled_once(
    imitation: Imitation, seconds: dict[str, float]
) -> None:
    name = "coordinate descent, 1 to 16 tokens"
    seconds[name] = 0.5
    imitation.anew.add(name)
    compiled = warmed_up(compile_sizes=None, compile_ranges_endpoints=[16])
    assert collections.Counter(n for n, _ in imitation.compiled)["anew"] == 2
    imitation.runs.clear()
    for size in (4, 8, 16):
        same(compiled(rows(size)), model(rows(size)), f"{size} tokens")
    assert {n for n, _ in imitation.runs} == {"anew"}


def test_sizes_beyond_the_last_range_are_not_tuned(imitation: Imitation) -> None:
    compiled = warmed_up(compile_sizes=None, compile_ranges_endpoints=[4])
    assert {t.sizes for t in tunings(compiled)} == {(4,)}


def test_every_capture_size(imitation: Imitation, seconds: dict[str, float]) -> None:
    compiled = warmed_up(compile_sizes="cudagraph_capture_sizes")
    assert {t.sizes for t in tunings(compiled)} == {(4,), (8,), (16,)}


def test_whole_steps_have_the_same_versions(
    imitation: Imitation, seconds: dict[str, float]
) -> None:
    seconds["static"] = 0.5
    pw.register_splitting_op("pwtest::attn", capture="always")
    for mode in ("full", "full_and_piecewise"):
        torch._dynamo.reset()
        imitation.compiled.clear()
        compiled = warmed_up(cudagraph_mode=mode)
        assert [name for name, _ in imitation.compiled].count("static") == 2, mode
        imitation.runs.clear()
        same(compiled(rows(4)), model(rows(4)), mode)
        assert imitation.runs.keys() == {("static", 4)}, mode


def test_instances_share_what_was_found_out(
    imitation: Imitation, seconds: dict[str, float]
) -> None:
    seconds["static"] = 0.5
    modules = [Decoder(seed=seed) for seed in (0, 1)]
    compiled = [warmed_up(module) for module in modules]
    assert [name for name, _ in imitation.compiled].count("static") == 3
    for made, module in zip(compiled, modules, strict=True):
        imitation.runs.clear()
        same(made(rows(4)), module(rows(4)), "each with its weights")
        assert {name for name, _ in imitation.runs} == {"static"}


def test_only_warm_up_tunes(imitation: Imitation) -> None:
    compiled = compile(model, compiler="inductor", compile_sizes=[4], capture_after=1)
    for _ in range(3):
        compiled(*mark_dynamic((rows(4),)))
    assert pw.report(compiled).graphs[0].captured_sizes == (4,)
    assert not tunings(compiled)
    assert {name for name, _ in imitation.compiled} == {"as traced"}


def test_another_warm_up_compiles_nothing_again(
    imitation: Imitation, seconds: dict[str, float]
) -> None:
    seconds["static"] = 0.5
    compiled = warmed_up()
    before, found = list(imitation.compiled), tunings(compiled)
    pw.warmup(compiled, lambda descriptor: (rows(descriptor.num_tokens),))
    assert imitation.compiled == before
    assert tunings(compiled) == found
    imitation.runs.clear()
    compiled(rows(4))
    assert {name for name, _ in imitation.runs} == {"static"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile_sizes": [3]}, r"compile_sizes has \[3\], which are not among the capture sizes"),
        ({"compile_sizes": [0]}, "give positive integers"),
        ({"compile_sizes": "all"}, "compile_sizes='all'"),
        ({"compile_ranges_endpoints": [-1]}, "give positive integers"),
        ({"compile_sizes": [4], "compiler": "eager"}, "with compiler='eager'"),
        ({"compile_sizes": [4], "cudagraph_mode": "none"}, "with cudagraph_mode='none'"),
        ({"compile_ranges_endpoints": [4], "compiler": "eager"}, "leave one of the two out"),
        ({"compile_sizes": [4], "level": 0}, r"compile_sizes=\[4\] with level=0; .*leave one"),
        ({"compile_sizes": "cudagraph_capture_sizes", "level": 1}, r"=\[4, 8\] with level=1"),
        ({"compile_ranges_endpoints": [4], "level": 2}, r"endpoints=\[4\] with level=2"),
        ({"tuning": "background", "level": 0}, "tuning='background' with level=0.*leave one"),
        ({"tuning": "background", "compiler": "eager"}, "with compiler='eager'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pw.ConfigError, match=message):
        Config.from_options({"cudagraph_capture_sizes": [4, 8]} | options)


def test_options_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config.from_options({"compile_sizes": [], "level": 0}).compile_sizes == ()
    monkeypatch.setenv("PIECEWISE_COMPILE_SIZES", "8,4")
    monkeypatch.setenv("PIECEWISE_COMPILE_RANGES_ENDPOINTS", "64")
    config = Config.from_options({"cudagraph_capture_sizes": [4, 8]})
    assert config.compile_sizes == (4, 8)
    assert config.compile_ranges_endpoints == (64,)
    monkeypatch.setenv("PIECEWISE_LEVEL", "0")
    with pytest.raises(pw.ConfigError, match=r"compile_sizes=\[4, 8\] with level=0"):
        Config.from_options({"cudagraph_capture_sizes": [4, 8]})


def test_replays_are_compared() -> None:
    def sleeps(milliseconds: float) -> Callable[[], tuple[Tensor, ...]]:
        def function() -> tuple[Tensor, ...]:
            time.sleep(milliseconds / 1e3)
            return (torch.zeros(1),)

        return function

    found = replay_seconds({"a": sleeps(1), "b": sleeps(4)}, EmulatedGraphPool(CPU), CPU)
    assert 0.001 <= found["a"] < 0.004 <= found["b"]


@pytest.mark.parametrize("kept", ["as traced", "coordinate descent"])
def test_with_inductor_and_a_cache(seconds: dict[str, float], kept: str, tmp_path: Path) -> None:
    """Decided once, and what was kept is stored as it is: later nothing is compiled or timed."""
    seconds[kept] = 0.5
    is_special = kept != "as traced"

    def scaled(x: Tensor) -> Tensor:
        return x * 2

    for attempt in range(2):
        torch._dynamo.reset()
        with pw.compilation_counter.expect(
            num_graphs_seen=1, num_piecewise_graphs_seen=1, num_piecewise_capturable_graphs_seen=1,
            num_inductor_compiles=0 if attempt else 4 + is_special, num_cudagraph_captured=3,
            num_artifacts_loaded=1 + is_special if attempt else 0,
        ):  # fmt: skip
            compiled = warmed_up(scaled, cache_dir=tmp_path, splitting_ops=[])
        (found,) = tunings(compiled)
        assert found.kept == kept
        assert found.is_remembered == bool(attempt)
        assert ("measured by another process" in str(found)) == bool(attempt)
        same(compiled(rows(4)), scaled(rows(4)), "served")
