"""Traces that other processes made: `pw.compile` with `cache_dir` starts without Dynamo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[1]

HELPERS = """\
import functools


def noted(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call


SCALE = 3.0


@noted
def scaled(x, heads):
    return x * heads + SCALE


def adder(amount):
    def add(x):
        return x + amount
    return add


def shifted(x):
    return x - 0.5
"""

MODEL = """\
import dataclasses
import os

import torch
from torch import Tensor, nn

from shop import helpers
from shop.helpers import adder, scaled

ADD = adder(7.0)
TABLE = torch.arange(4.0)


@dataclasses.dataclass
class Settings:
    heads: int = 2
    act: str = "silu"
    eps: float = 1e-5


class Base(nn.Module):
    SLOPE = 0.25

    def finish(self, x):
        return x * self.SLOPE


class Block(Base):
    def __init__(self, settings, index):
        super().__init__()
        self.settings, self.index = settings, index
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4, eps=settings.eps)
        self.register_buffer("offset", torch.ones(4))
        self.options = {"bias": 1.5}

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        out = torch.empty_like(q)
        torch.ops.pwtest.layer_attn(q, k, v, out, f"layers.{self.index}")
        y = self.out(out) + self.options["bias"] + self.offset
        if self.settings.act == "silu":
            y = nn.functional.silu(y)
        y = helpers.shifted(ADD(scaled(y, self.settings.heads)))
        return x + self.finish(y) + TABLE.to(y.dtype)


class Model(nn.Module):
    def __init__(self, num_layers=2):
        super().__init__()
        self.settings = Settings()
        self.layers = nn.ModuleList(Block(self.settings, i) for i in range(num_layers))

    def forward(self, x: Tensor, is_counted: bool = True):
        for layer in self.layers:
            x = layer(x)
        return {"x": x, "count": x.shape[0] if is_counted else None}


class Patched(Model):
    def __init__(self):
        super().__init__()
        self.layers[0].norm.forward = lambda x: x * 2


class ByVariable(Model):
    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        return {"x": x * (2 if os.environ.get("SHOP") == "double" else 1), "count": x.shape[0]}


class Branching(Model):
    def forward(self, x: Tensor):
        count = x.shape[0]
        x = super().forward(x)["x"]
        return {"x": x * 2 if count > 6 else x, "count": count}


def function(factor=2.0):
    amount = factor * 2

    def run(x: Tensor):
        x = torch.ops.pwtest.fresh(x, x, x)
        return {"x": ADD(x) * amount, "count": x.shape[0]}

    return run
"""

LOADED = {"num_traces_loaded": 1, "num_graphs_seen": 0, "frames": 0}
TRACED = {"num_traces_loaded": 0, "num_graphs_seen": 1, "frames": 1}


def shop(folder: Path) -> Path:
    """Write the package that is compiled; returns its folder."""
    (folder / "shop").mkdir(parents=True)
    (folder / "shop" / "__init__.py").write_text("")
    (folder / "shop" / "helpers.py").write_text(HELPERS)
    (folder / "shop" / "model.py").write_text(MODEL)
    return folder


def in_process(folder: Path, cache: Path, *variants: dict[str, Any]) -> list[dict[str, Any]]:
    """What a process counts that starts these variants, without kernels of earlier ones."""
    home = folder / f"home{len(list(folder.iterdir()))}"
    home.mkdir()
    environment = os.environ | {
        "HOME": str(home),
        "PYTHONPATH": f"{PROJECT}{os.pathsep}{folder}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "OMP_NUM_THREADS": "1",
    }
    texts = map(json.dumps, variants)
    command = [sys.executable, "-m", "tests.trace_process", str(cache), *texts]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def was(found: dict[str, Any], wanted: dict[str, int]) -> None:
    """Assert what was counted, and that results were right and nothing was warned about."""
    assert {name: found[name] for name in wanted} == wanted
    assert found["is_right"]
    assert not found["warnings"]
    assert found["num_replays"] > 0


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, and a cache that a process filled."""
    folder = shop(tmp_path_factory.mktemp("cold"))
    filled = in_process(
        folder, folder / "cache", {}, {"model": "Branching", "sizes": FEW}, {"model": "function"}
    )
    for found in filled:
        was(found, TRACED)
    return folder


@pytest.fixture
def copied(cold: Path, tmp_path: Path) -> Path:
    """The same in another place."""
    shutil.copytree(cold, tmp_path / "copied")
    return tmp_path / "copied"


FEW, MANY = [5, 4, 4, 4, 3], [7, 8, 8, 8, 8, 16]
VARIANTS: dict[str, dict[str, Any]] = {
    "the same": {},
    "another first size": {"sizes": [16, 3, 8, 8, 8]},
    "the same branch": {"model": "Branching", "sizes": FEW},
    "the same function": {"model": "function"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "the other branch": {"model": "Branching", "sizes": MANY},
    "an attribute of its settings": {"attributes": {"model.settings.heads": 3}},
    "a string of its settings": {"attributes": {"model.settings.act": "none"}},
    "an attribute of a layer": {"attributes": {"model.layers[1].options": {"bias": 2.5}}},
    "an attribute of a layer of torch": {"attributes": {"model.layers[1].norm.eps": 0.5}},
    "a global": {"attributes": {"shop.helpers.SCALE": 4.0}},
    "a closure": {"attributes": {"shop.model.ADD.__closure__[0].cell_contents": 8.0}},
    "a class attribute": {"attributes": {"shop.model.Base.SLOPE": 0.5}},
    "another number of layers": {"arguments": {"num_layers": 3}},
    "another closure of a function": {"model": "function", "arguments": {"factor": 3.0}},
    "a method of its own": {"model": "Patched"},
    "another dtype": {"dtype": "float64"},
    "other options": {"options": {"outputs": "static"}},
    "other splitting ops": {"options": {"splitting_ops": ["pwtest::layer_attn"]}},
    "inference mode": {"mode": "inference_mode"},
    "gradients on": {"mode": "enable_grad"},
    "a registered splitting op": {"declare": {"pwtest::layer_attn": "always"}},
}
"""Each after the other in one process: what one changes stays changed for those behind it."""


def test_a_second_process_traces_nothing(cold: Path) -> None:
    found = in_process(cold, cold / "cache", *VARIANTS.values())
    for one in found:
        was(one, LOADED)
