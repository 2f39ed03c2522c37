"""Versions of a piece: which sizes they serve, and what happens when none may be made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import piecewise_backend as pw
from piecewise_backend.steps import Host
from piecewise_backend.version import Version
from piecewise_backend.versions import Choice, Versions


class EvenOnly:
    """Compiles versions that are valid for sizes of the same parity."""

    def __init__(self) -> None:
        self.num_compiles = 0

    def compile(self, piece: Any, numbers: tuple[int, ...]) -> Version:
        self.num_compiles += 1
        parity = numbers[0] % 2

        def violated_by(sizes: tuple[int, ...]) -> str | None:
            return None if sizes[0] % 2 == parity else f"size % 2 == {parity}"

        return Version(lambda *args: (parity,), violated_by, (f"size % 2 == {parity}",))


class Traced:
    """A distinct piece with one size input."""

    index = 0
    inputs: Sequence[Any] = (Host(None),)

    class module:
        @staticmethod
        def forward(*args: Any) -> tuple[str]:
            return ("as traced",)


def test_a_size_that_violates_a_condition_gets_a_version_of_its_own() -> None:
    compiler = EvenOnly()
    versions = Versions(Traced(), compiler)  # type: ignore[arg-type]
    assert [versions.choose((n,)).call()[0] for n in (4, 5, 6, 7, 4)] == [0, 1, 0, 1, 0]
    assert compiler.num_compiles == 2


def test_a_sealed_piece_runs_as_traced_and_says_why_every_time() -> None:
    compiler = EvenOnly()
    versions = Versions(Traced(), compiler)  # type: ignore[arg-type]
    versions.choose((4,))
    versions.is_sealed = True
    for _ in range(2):
        choice = versions.choose((5,))
        assert choice.call() == ("as traced",)
        assert choice.violation == "size % 2 == 0"
    assert compiler.num_compiles == 1


def test_unsealing_forgets_what_ran_as_traced() -> None:
    compiler = EvenOnly()
    versions = Versions(Traced(), compiler)  # type: ignore[arg-type]
    versions.choose((4,))
    versions.is_sealed = True
    versions.choose((5,))
    versions.unseal()
    assert versions.choose((5,)) == Choice(versions.compiled[1].call)
    assert compiler.num_compiles == 2


def test_nothing_is_compiled_for_no_tokens() -> None:
    compiler = EvenOnly()
    assert Versions(Traced(), compiler).choose((0,)).call() == ("as traced",)  # type: ignore[arg-type]
    assert compiler.num_compiles == 0


@torch.no_grad()
def test_a_failed_size_is_tried_again_by_the_next_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from piecewise_backend.graphs import EmulatedGraphPool  # noqa: PLC0415 - patched here only

    def fail(*args: Any) -> None:
        raise pw.CaptureError("out of memory, say")

    options = {"compiler": "eager", "graph_impl": "emulated", "cudagraph_capture_sizes": [2, 4]}
    compiled = torch.compile(lambda x: x * 2, backend="piecewise", options=options)
    make_inputs = lambda d: (torch.ones(d.num_tokens, 3),)  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(EmulatedGraphPool, "capture", fail)
        with pytest.warns(RuntimeWarning, match="capturing this size failed"):
            report = pw.warmup(compiled, make_inputs)
    assert set(report.graphs[0].capture_errors) == {2, 4}
    report = pw.warmup(compiled, make_inputs)
    assert report.graphs[0].captured_sizes == (4, 2)
    assert not report.graphs[0].capture_errors
