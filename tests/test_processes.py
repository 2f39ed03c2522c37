"""Inductor's processes start with a trace of this backend, and with no other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._inductor import async_compile
from torch._inductor.runtime import compile_tasks
from torch.utils import _triton

import piecewise_backend as pw
from piecewise_backend import _torch, backend
from piecewise_backend._torch import processes

PROJECT = Path(__file__).parents[1]

happened: list[str] = []


def other_backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """Runs the graph."""
    return gm.forward


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As if there were a GPU: what was started, and what was traced, in order."""
    torch._dynamo.reset()
    happened.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: happened.append("started"))
    before = list(callback_handler.start_callbacks)
    callback_handler.start_callbacks.clear()
    _torch.call_before_traces(backend.piecewise, backend._before_trace)
    yield happened
    callback_handler.start_callbacks[:] = before
    torch._dynamo.reset()


@torch.library.custom_op("pwtest::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    """A copy."""
    return x.clone()


@noted.register_fake
def _(x: Tensor) -> Tensor:
    happened.append("traced")
    return torch.empty_like(x)


class Model(nn.Module):
    """Says when it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` of any shape."""
        return noted(x) + 1


@pytest.mark.parametrize("way", ["pw.compile", "torch.compile", "module.compile"])
def test_they_start_before_the_trace(started: list[str], way: str) -> None:
    model: Any = Model()
    options = {"compiler": "inductor", "level": 1}  # traced, and left at that
    if way == "pw.compile":
        compiled = pw.compile(model, **options)
    elif way == "torch.compile":
        compiled = torch.compile(model, backend="piecewise", options=options)
    else:
        model.compile(backend="piecewise", options=options)
        compiled = model
    assert started == []
    compiled(torch.ones(3))
    assert started[:2] == ["started", "traced"]
    compiled(torch.ones(3))
    assert started.count("started") == 1


def test_not_where_pieces_run_as_traced(started: list[str]) -> None:
    pw.compile(Model(), compiler="eager")(torch.ones(3))
    assert "traced" in started
    assert "started" not in started


def test_not_for_other_backends(started: list[str]) -> None:
    torch.compile(Model(), backend=other_backend)(torch.ones(3))
    torch.compile(Model(), backend="eager", dynamic=True)(torch.ones(4))
    assert "traced" in started
    assert "started" not in started


def test_not_without_a_gpu(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    pw.compile(Model(), level=1)(torch.ones(3))
    assert "traced" in started
    assert "started" not in started


def test_importing_the_package_is_enough() -> None:
    program = (
        "import torch\n"
        "from torch._inductor import async_compile\n"
        "import piecewise_backend as pw\n"
        "torch.cuda.is_initialized = lambda: True\n"
        "async_compile.maybe_warm_pool = lambda: print('started')\n"
        "pw.compile(lambda x: x + 1, level=1)(torch.ones(3))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])},
    )  # fmt: skip
    assert done.stdout.split() == ["started"]


@pytest.mark.parametrize("is_known", [False, True])
def test_an_assembler_named_late_is_named_anew(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    forgotten: list[str] = []
    if is_known:
        monkeypatch.setenv("TRITON_PTXAS_PATH", "of the user")
    else:
        monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)

    def bring() -> None:
        if not is_known:
            monkeypatch.setenv("TRITON_PTXAS_PATH", "torch's")

    monkeypatch.setattr(_triton, "has_triton", lambda: True)
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", bring)
    monkeypatch.setattr(processes, "_forget_assembler", lambda: forgotten.append("forgotten"))
    processes.agree_on_assembler()
    processes.agree_on_assembler()
    assert forgotten == ([] if is_known else ["forgotten"])
