"""Versions that another process compiles ahead: they are those that this one would compile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime import autotune_cache
from torch._inductor.runtime.autotune_cache import inductor_meta_from_config
from torch.utils import _triton

import piecewise_backend as pw
from piecewise_backend import _torch
from piecewise_backend import ahead as ahead_module
from piecewise_backend.ahead import Ahead
from piecewise_backend.artifact_store import ArtifactStore
from piecewise_backend.cache_contents import entries
from piecewise_backend.candidates import EFFORTS
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.compiler import Specialization, Wanted
from piecewise_backend.inductor_compiler import InductorCompiler
from piecewise_backend.jobs import Setup
from piecewise_backend.passes import PassList, passes_for
from tests.helpers import named, out_attn, rows, same
from tests.test_piece_record import numbers_of, pieces_of

CPU = torch.device("cpu")
MATMUL = torch.backends.cuda.matmul
STATIC = Specialization("static", {}, {0: (6, 6)})


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _a_process_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "_VERSIONS_PER_PROCESS", 1)


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Inductor was asked for in this process."""
    found: list[Any] = []
    original = _torch.compile_with_inductor

    def compile_with_inductor(*args: Any, **kwargs: Any) -> Any:
        found.append(args[0])
        return original(*args, **kwargs)

    monkeypatch.setattr(_torch, "compile_with_inductor", compile_with_inductor)
    return found


def ahead_with(passes: PassList, patches: dict[str, object], most: int = 1) -> Ahead:
    def setup(folder: Path) -> Setup:
        settings = _torch.settings_of_process(CPU)
        return Setup(CPU, settings, patches, passes.passes, False, folder, 2**30, "")

    return Ahead(setup, most)


def scaled(x: Tensor) -> Tensor:
    return out_attn(x * 0.25, x, x) * 2


def first_piece(function: Callable[..., Any]) -> DistinctPiece:
    return pieces_of(function, rows(6))[0]


def test_what_was_compiled_ahead_is_taken(compiled_here: list[Any], tmp_path: Path) -> None:
    """For all sizes and for one, under options and switches of this process."""
    patches: dict[str, object] = {"max_fusion_size": 32}
    passes, counters = PassList(passes_for(on_cuda=True)), pw.CompilationCounter()
    with torch._inductor.config.patch(realize_opcount_threshold=29):
        before = torch.get_float32_matmul_precision(), MATMUL.fp32_precision
        torch.set_float32_matmul_precision("high")
        ahead = ahead_with(passes, patches)
        store = ArtifactStore(tmp_path)
        compiler = InductorCompiler(patches, counters, passes, store=store, ahead=ahead)
        piece = first_piece(scaled)
        numbers = numbers_of(piece)
        compiler.prepare([Wanted(piece, numbers), Wanted(piece, numbers, STATIC)])
        assert ahead._workers is not None
        ahead._workers.wait()
        assert not ahead._workers.failures
        for_all, for_one = (
            compiler.compile(piece, numbers),
            compiler.compile(piece, numbers, STATIC),
        )
    torch.set_float32_matmul_precision(before[0])
    MATMUL.fp32_precision = before[1]
    assert not compiled_here
    assert counters.num_inductor_compiles == 2
    for num_tokens, version in ((6, for_all), (9, for_all), (6, for_one)):
        x = rows(num_tokens)
        (got, *_), (expected, *_) = version.call(num_tokens, x), piece.module(num_tokens, x)
        same(got, expected, f"{num_tokens} tokens")
    assert for_one.violated_by((9,)) is not None
    assert len(entries(tmp_path)) == 1  # the one for one size is not settled


def test_what_nobody_has_begun_is_compiled_here(
    compiled_here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piecewise_backend.job_process._COMMAND", ["sleep"])
    ahead = ahead_with(PassList(()), {})
    compiler = InductorCompiler({}, pw.CompilationCounter(), ahead=ahead)
    piece = first_piece(scaled)
    compiler.prepare([Wanted(piece, (6,))])
    compiler.compile(piece, (6,))
    assert compiled_here == [piece.module]


def test_what_cannot_be_sent_is_compiled_here(
    compiled_here: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def names_that_differ(x: Tensor) -> Tensor:
        for index in range(3):
            x = out_attn(named(x, f"layer.{index}"), x, x)
        return x

    ahead = ahead_with(PassList(()), {})
    compiler = InductorCompiler({}, pw.CompilationCounter(), ahead=ahead)
    piece = first_piece(names_that_differ)
    with caplog.at_level(logging.INFO, "piecewise_backend.ahead"):
        compiler.prepare([Wanted(piece, numbers_of(piece))])
    assert "numbered in this process" in caplog.text
    compiler.compile(piece, numbers_of(piece))
    assert compiled_here == [piece.module]


def test_a_piece_that_cannot_be_sent_does_not_keep_others_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("piecewise_backend.job_process._COMMAND", ["/no/such/program"])

    def one_has_names_that_differ(x: Tensor) -> Tensor:
        x = out_attn(x, x, x)
        for index in range(3):
            x = out_attn(named(x, f"layer.{index}") * 2, x, x)
        return x.cos()

    *_, differing, last = pieces_of(one_has_names_that_differ, rows(6))
    ahead = ahead_with(PassList(()), {})
    ahead.start([Wanted(piece, numbers_of(piece)) for piece in (differing, last)])
    assert ahead._workers is not None
    ahead._workers.wait()
    assert {index for index, *_ in ahead._workers.failures} == {last.index}


def test_without_a_place_for_temporary_files_it_is_compiled_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    ahead, piece = ahead_with(PassList(()), {}), first_piece(scaled)
    with caplog.at_level(logging.INFO, "piecewise_backend.ahead"):
        ahead.start([Wanted(piece, (6,))])
    assert "nothing is compiled ahead: [Errno 2]" in caplog.text
    assert ahead._workers is None


def test_kernels_are_the_same_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their source has what Triton compiles with, and that depends on when a process asks."""
    monkeypatch.setattr(_triton, "has_triton", lambda: True)
    monkeypatch.setattr(autotune_cache, "has_triton", lambda: True)
    monkeypatch.setattr(_triton, "triton_hash_with_backend", lambda: "HERE")
    settings = _torch.settings_of_process(torch.device("cuda"))
    assert _torch.settings_of_process(CPU)["toolchain"] is None
    monkeypatch.setattr(_triton, "triton_hash_with_backend", lambda: "THERE")
    with _torch.under_settings(settings, CPU):
        assert inductor_meta_from_config()["backend_hash"] == "HERE"


@pytest.mark.parametrize("patches", [{}, {"max_autotune": True}])
def test_what_is_timed_while_it_compiles_is_not_compiled_ahead(patches: dict[str, object]) -> None:
    ahead, piece = ahead_with(PassList(()), patches), first_piece(scaled)
    compiler = InductorCompiler(patches, pw.CompilationCounter(), ahead=ahead)
    timed = Specialization("max-autotune", EFFORTS["max-autotune"], STATIC.limits)
    compiler.prepare([Wanted(piece, (6,), STATIC if patches else timed)])
    assert ahead._workers is None


def test_what_is_stored_is_not_compiled_ahead(tmp_path: Path) -> None:
    store, piece = ArtifactStore(tmp_path), first_piece(scaled)
    InductorCompiler({}, pw.CompilationCounter(), store=store).compile(piece, (6,))
    ahead = ahead_with(PassList(()), {})
    compiler = InductorCompiler({}, pw.CompilationCounter(), store=store, ahead=ahead)
    compiler.prepare([Wanted(piece, (6,)), Wanted(piece, (9,))])
    assert ahead._workers is None


def test_the_mode_of_calls_is_no_matter(tmp_path: Path) -> None:
    """Versions are announced in the mode of the user's call, and wanted in captures."""
    counters, piece = pw.CompilationCounter(), first_piece(scaled)
    compiler = InductorCompiler({}, counters, store=ArtifactStore(tmp_path))
    compiler.recall(piece, (6,), [STATIC], lambda: b"decided", len)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            assert compiler.asks_for(piece, (6,), [STATIC])()
            version = compiler.compile(piece, (6,))
    assert (counters.num_inductor_compiles, counters.num_artifacts_loaded) == (1, 2)
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode():
            (got, *_) = version.call(6, rows(6))
            same(got, piece.module(6, rows(6))[0], "whatever it was compiled under")


def test_processes_are_started_for_many_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for every few of them; a later batch may start more."""
    monkeypatch.setattr(ahead_module, "_VERSIONS_PER_PROCESS", 4)
    monkeypatch.setattr("piecewise_backend.workers.Workers.submit", lambda *args: None)
    ahead, piece = ahead_with(PassList(()), {}, 3), first_piece(scaled)
    for numbers, num_processes in ((3, None), (11, 2), (15, 2), (27, 3), (90, 3)):
        ahead.start([Wanted(piece, (number,)) for number in range(numbers)])
        found = None if ahead._workers is None else ahead._workers.most
        assert found == num_processes


def test_none_unless_the_user_wants_some(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("piecewise_backend.workers.Workers.submit", started.append)
    compiled = pw.compile(
        scaled, compile_sizes=[4], cudagraph_capture_sizes=[4, 8], graph_impl="emulated",
    )  # fmt: skip
    monkeypatch.setattr("piecewise_backend.candidates.EFFORTS", {"static": EFFORTS["static"]})
    compiled.warmup(lambda descriptor: (rows(descriptor.num_tokens),))
    assert not started
    assert compiled.report().graphs[0].tunings
