"""Tuned by another process on the same device, and compiled ahead by several."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import piecewise_backend as pw
from piecewise_backend import _torch
from tests.gpu.warm_process import HIDDEN, SIZES, Layers
from tests.helpers import SPLIT_OPS, declare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


def warmed_up(model: Layers, inputs: dict[int, torch.Tensor], **options: Any) -> Any:
    declare("never", *SPLIT_OPS)
    given = {"cudagraph_capture_sizes": SIZES, "compile_sizes": [1], "on_fallback": "raise"}
    compiled = pw.compile(model, **(given | options))
    compiled.warmup(lambda descriptor: (inputs[SIZES[-1]][: descriptor.num_tokens],))
    return compiled


def require_right(compiled: Any, model: Layers, inputs: dict[int, torch.Tensor]) -> None:
    for x in inputs.values():
        result, expected = compiled(x).float(), model(x).float()
        assert (result - expected).norm() < 0.02 * expected.norm()


@pytest.fixture
def inputs() -> dict[int, torch.Tensor]:
    torch.manual_seed(0)
    return {n: torch.randn(n, HIDDEN, device="cuda", dtype=torch.bfloat16) for n in SIZES}


def test_in_the_background(
    inputs: dict[int, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What serves is loaded: this process compiles what it compiled without."""
    with torch.no_grad(), caplog.at_level(logging.WARNING, "piecewise_backend"):
        model = Layers()
        compiled = warmed_up(model, inputs, tuning="background", cache_dir=tmp_path)
        require_right(compiled, model, inputs)
        assert not compiled.report().graphs[0].tunings
        before = pw.compilation_counter.num_inductor_compiles
        found = pw.adopt_tuned(compiled, wait=True)
        assert pw.compilation_counter.num_inductor_compiles == before
        require_right(compiled, model, inputs)
    assert not caplog.records
    assert sorted(tuning.piece for tuning in found) == [0, 1, 2]
    for tuning in found:
        assert tuning.is_remembered
        assert {"as traced", "static", "coordinate descent", "one row"} <= set(tuning.microseconds)
        # Another program may use the device, now or before.
        assert all(why.startswith("measured again") for why in tuning.failures.values())
    assert compiled.report().graphs[0].captured_sizes == tuple(sorted(SIZES, reverse=True))


def test_compiled_ahead(inputs: dict[int, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """By other processes, of which the first is ready before a dozen versions are compiled here."""
    here: list[Any] = []
    original = _torch.compile_with_inductor

    def compile_with_inductor(*args: Any, **kwargs: Any) -> Any:
        here.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(_torch, "compile_with_inductor", compile_with_inductor)
    with torch.no_grad():
        model = Layers()
        compiled = warmed_up(model, inputs, compile_sizes=SIZES, compile_workers=4)
        require_right(compiled, model, inputs)
    num_compiled = compiled.report().graphs[0].counts["num_inductor_compiles"]
    assert num_compiled >= 3 + 3 * 3 * len(SIZES)
    assert len(here) < num_compiled
