"""Traces that other processes made: `pw.compile` with `cache_dir` starts without Dynamo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from piecewise_backend._torch import Read
from piecewise_backend.cache_contents import entries
from piecewise_backend.cache_entry import ARTIFACT
from piecewise_backend.command_line import main
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.trace_reads import questions_of

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
import abc
import dataclasses
import enum
import functools
import importlib.util
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

    def finish(self, x, k: int = 1):
        return x * self.SLOPE * max(k, 1)


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


class Constant(Model):
    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        return {"x": x * scale_now(), "count": x.shape[0]}


@torch.compiler.assume_constant_result
def scale_now():
    return helpers.SCALE


class Hashed(Model):
    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        return {"x": x * (id(ADD) % 7), "count": x.shape[0]}


class Missing(Model):
    def __init__(self, is_there=False):
        super().__init__()
        self.table = {"factor": 3} if is_there else {}

    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        try:
            x = x * self.table["factor"]
        except KeyError:
            x = x * 2
        return {"x": x, "count": x.shape[0]}


class Lacking(Model):
    def __init__(self, is_there=False):
        super().__init__()
        if is_there:
            self.factor = 3

    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        return {"x": x * getattr(self, "factor", 2), "count": x.shape[0]}


class Counting(Model):
    def __init__(self):
        super().__init__()
        self.names = ["a", "b"]

    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        return {"x": x * (0.5 if self.names is None else len(self.names)), "count": x.shape[0]}


class Sharing(Model):
    def __init__(self, is_one=False):
        super().__init__()
        self.one = Settings()
        self.other = self.one if is_one else Settings()

    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        return {"x": x * (2 if self.one is self.other else 3), "count": x.shape[0]}


class Calling(Model):
    def __init__(self, is_one=False):
        super().__init__()
        self.one = adder(1.0)
        self.other = self.one if is_one else adder(1.0)

    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        x = self.other(self.one(x)) * (2 if self.one is self.other else 3)
        return {"x": x, "count": x.shape[0]}


class Kind:
    pass


KIND, KINDS, TEXT = Kind(), [Kind(), Kind()], "a-text"
LAYER, TENSOR, CHOICES = nn.Linear(4, 4), torch.ones(4), {"a": 1}
OTHERS = {
    "KIND": Kind(),
    "KINDS[0]": KINDS[1],
    "KINDS[1]": KIND,
    "TEXT": "-".join(["a", "text"]),
    "LAYER": nn.Linear(4, 4),
    "TENSOR": torch.ones(4),
    "CHOICES": {"a": 1},
}


class Comparing(Model):
    def __init__(self, name, is_other=False):
        super().__init__()
        self.mine = OTHERS[name] if is_other else eval(name)

    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        for factor, kind in enumerate(KINDS):
            if kind is self.mine:
                x = x * (factor + 2)
        for mark in (KIND, TEXT, LAYER, TENSOR, CHOICES):
            x = x * (2 if self.mine is mark else 0.5)
        return {"x": x, "count": x.shape[0]}


class Looking(Model):
    def __init__(self, is_other=False):
        super().__init__()
        self.mine = Kind() if is_other else KINDS[1]

    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        x = x * (2 if self.mine == KINDS[1] else 3) * (2 if self.mine in KINDS else 3)
        return {"x": x, "count": x.shape[0]}


class Naming(Model):
    def __init__(self, place, is_other=False):
        super().__init__()
        text = "-".join(["a", "text"]) if is_other else TEXT
        self.places = {"key": {text: 1}, "item": (text,)}[place]

    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        return {"x": x * (2 if list(self.places)[0] is TEXT else 3), "count": x.shape[0]}


class Finishing(abc.ABC):
    @abc.abstractmethod
    def alpha(self, x): ...

    @abc.abstractmethod
    def beta(self, x): ...

    @abc.abstractmethod
    def gamma(self, x): ...


class Finish(Finishing):
    def alpha(self, x):
        return x * 2

    def beta(self, x):
        return x

    gamma = beta


class Ordered(Model):
    def __init__(self):
        super().__init__()
        self.last = Finish()

    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        return {"x": self.last.alpha(x) * TABLES[Act.SILU], "count": x.shape[0]}


class Act(enum.Enum):
    SILU = "silu"
    GELU = "gelu"


TABLES = {Act.GELU: 3, Act.SILU: 2}


class Raising(dict):
    def items(self):
        raise OSError("not now")


class Refusing(Model):
    table = Raising()

    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        return {"x": x * 2, "count": x.shape[0]}


class Numbers:
    ONES = {0, 8}


class Looping(Model):
    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        for number in Numbers.ONES:
            x = x * 2 + number
        return {"x": x, "count": x.shape[0]}


class Flagged(Model):
    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        flags = torch.backends.cuda.matmul
        x = x * (2 if flags.allow_fp16_reduced_precision_reduction else 3)
        x = x * (2 if torch.is_autocast_enabled("cuda") else 3)
        return {"x": x, "count": x.shape[0]}


class Importing(Model):
    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        x = x * (3 if importlib.util.find_spec("shop.fast") else 2)
        return {"x": x, "count": x.shape[0]}


class Asking(Model):
    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        return {"x": x * getattr(helpers, "FACTOR", 2), "count": x.shape[0]}


class ByUnsetVariable(Model):
    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        return {"x": x * (2 if os.getenv("SHOP") == "double" else 1), "count": x.shape[0]}


class Opaque(Model):
    def forward(self, x: Tensor):
        x = super().forward(x)["x"]
        y = joined(x)
        return {"x": x * y.shape[-1], "count": x.shape[0]}


@torch.compiler.allow_in_graph
def joined(x):
    return torch.cat([x] * int(helpers.SCALE), -1)


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


def in_process(
    folder: Path, *variants: dict[str, Any], home: Path | None = None
) -> list[dict[str, Any]]:
    """What a process counts that starts these variants of the package in the folder."""
    return in_processes((folder, *variants), home=home or folder / f"home{len(os.listdir(folder))}")


def in_processes(*processes: tuple[Any, ...], home: Path) -> list[dict[str, Any]]:
    """What processes count, each of which starts variants of the package in its folder.

    There are no kernels of earlier ones, but of those that had the same home.
    """
    home.mkdir(exist_ok=True)
    environment = os.environ | {
        "HOME": str(home),
        "PYTHONPATH": str(PROJECT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "OMP_NUM_THREADS": "1",
    }
    texts = [json.dumps([str(folder), *variants]) for folder, *variants in processes]
    command = [sys.executable, "-m", "tests.trace_process", *texts]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def was(found: dict[str, Any], wanted: dict[str, int], name: str = "it") -> None:
    """Assert what was counted, and that results were right and nothing was warned about."""
    assert {each: found[each] for each in wanted} == wanted, name
    assert found["is_right"], name
    assert not found["warnings"], name
    assert found["num_replays"] > 0, name


FEW, MANY = [5, 4, 4, 4, 3], [7, 8, 8, 8, 8, 16]
SAME: dict[str, dict[str, Any]] = {
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


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, and a cache that a process filled."""
    folder = shop(tmp_path_factory.mktemp("cold"))
    for found in in_process(folder, SAME["the same"]):
        was(found, TRACED)
    return folder


def test_a_process_traces_what_differs_and_a_later_one_nothing(tmp_path: Path) -> None:
    """What differs is stored beside what was there."""
    folder = shop(tmp_path / "shop")
    stored = [name for name in SAME if name != "another first size"]
    for name, found in zip(stored, in_process(folder, *map(SAME.get, stored)), strict=True):
        was(found, TRACED, name)
    variants = SAME | OTHERS  # what one changes stays changed for those behind it
    for wanted in (TRACED, LOADED):
        counted = zip(variants, in_process(folder, *variants.values()), strict=True)
        for name, found in counted:
            was(found, LOADED if name in SAME else wanted, name)


def test_the_command_shows_what_was_traced_and_what_differed(
    cold: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(cold, tmp_path / "shop")
    was(in_process(folder, OTHERS["an attribute of its settings"])[0], TRACED)
    for command in ("list", "explain"):
        assert main(["cache", command, "--dir", str(folder / "cache")]) == 0
        text = capsys.readouterr().out
        assert "  trace of shop.model.Model.forward(is_counted: True, x: float32 [*, 4])" in text
    assert text.splitlines()[2:] == ["  reads self.layers[0].settings.heads: 2 -> 3"]


PATCH = """\
ORIGINAL = nn.LayerNorm.forward


@functools.wraps(ORIGINAL)
def doubled(self, x):
    return ORIGINAL(self, x) * 2


nn.LayerNorm.forward = doubled
"""
EDITS = [
    ("helpers.py", "x * heads + SCALE", "x * heads - SCALE"),
    ("helpers.py", "x + amount", "x - amount"),
    ("helpers.py", "x - 0.5", "x - 0.75"),
    ("helpers.py", "SCALE = 3.0", "SCALE = 5.0"),
    ("model.py", "x * self.SLOPE", "x / self.SLOPE"),
    ("model.py", "k: int = 1", "k: int = 2"),
    ("model.py", "out = torch.empty_like(q)", "out = torch.empty_like(v)"),
    # A name that was that of a builtin.
    ("model.py", "ADD = adder(7.0)", "ADD = adder(7.0)\n\n\ndef max(a, b):\n    return 3"),
    # What is called as torch calls its own is not torch's.
    ("model.py", "TABLE = ", PATCH + "TABLE = "),
]
COMMENT = ("helpers.py", "SCALE = 3.0", "# A comment.\n\nSCALE = 3.0")


def copied(cold: Path, elsewhere: Path) -> Path:
    """The package and its cache in another place."""
    shutil.copytree(cold / "shop", elsewhere / "shop")
    shutil.copytree(cold / "cache", elsewhere / "cache")
    return elsewhere


def edited(folder: Path, file: str, old: str, new: str) -> Path:
    """The folder, with other sources."""
    path = folder / "shop" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return folder


def test_changed_code_is_traced_anew_and_other_comments_elsewhere_are_not(
    cold: Path, tmp_path: Path
) -> None:
    edits = [*EDITS, COMMENT]
    folders = [
        edited(copied(cold, tmp_path / f"copy{index}"), *edit) for index, edit in enumerate(edits)
    ]
    counted = in_processes(*((folder, {}) for folder in folders), home=tmp_path / "home")
    for edit, found in zip(edits, counted, strict=True):
        was(found, LOADED if edit is COMMENT else TRACED, str(edit))


def kinds(cache: Path) -> dict[str, list[Path]]:
    """The folders of entries: of questions, of answers, of pieces."""
    found: dict[str, list[Path]] = {"questions": [], "answers": [], "piece": []}
    for entry in entries(cache):
        key = json.loads((entry.folder / "key.json").read_text())["key"]
        found[next(kind for kind in found if kind in key)].append(entry.folder)
    return found


def test_a_damaged_file_is_named_once_and_traced_anew(cold: Path, tmp_path: Path) -> None:
    copies = {kind: copied(cold, tmp_path / kind) for kind in ("questions", "answers")}
    for kind, copy in copies.items():
        for folder in kinds(copy / "cache")[kind]:
            data = bytearray((folder / ARTIFACT).read_bytes())
            data[len(data) // 2] ^= 1
            (folder / ARTIFACT).write_bytes(data)
    counted = in_processes(*((copy, {}, {}) for copy in copies.values()), home=tmp_path / "home")
    for kind, first, second in zip(copies, counted[::2], counted[1::2], strict=True):
        (warning,) = first.pop("warnings")
        assert "checksum" in warning
        assert str(copies[kind] / "cache") in warning
        was(first | {"warnings": []}, TRACED, kind)
        was(second, LOADED, kind)


def test_pieces_that_are_gone_are_compiled_from_the_stored_graph(tmp_path: Path) -> None:
    folder = shop(tmp_path / "shop")
    options = {"compiler": "inductor"}
    variant = {"options": options, "arguments": {"num_layers": 1}, "sizes": FEW}
    (cold,) = in_process(folder, variant, home=tmp_path)
    was(cold, TRACED)
    assert cold["num_inductor_compiles"] == 2
    (warm,) = in_process(folder, variant)
    was(warm, LOADED | {"num_inductor_compiles": 0, "num_artifacts_loaded": 2})
    for piece in kinds(folder / "cache")["piece"]:
        shutil.rmtree(piece)
    (bare,) = in_process(folder, variant, home=tmp_path)
    was(bare, LOADED | {"num_inductor_compiles": 2})


FLAG = "shop.model.torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction"
USELESS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        str(options): ({"options": options, "sizes": FEW},) * 2
        for options in ({"check_guards": True}, {"cache_dir": "off"}, {"dump_dir": "dump"})
    },
    "hash": ({"model": "Hashed"}, {"model": "Hashed"}),
    "constant result": (
        {"model": "Constant"},
        {"model": "Constant", "attributes": {"shop.helpers.SCALE": 4.0}},
    ),
    "a function in the graph": (
        {"model": "Opaque"},
        {"model": "Opaque", "attributes": {"shop.helpers.SCALE": 4.0}},
    ),
    "a variable that is not set": (
        {"model": "ByUnsetVariable"},
        {"model": "ByUnsetVariable", "environment": {"SHOP": "double"}},
    ),
    "an object that does not let itself be looked at": (
        {"model": "Refusing"},
        {"model": "Refusing"},
    ),
    "environment": (
        {"model": "ByVariable"},
        {"model": "ByVariable", "environment": {"SHOP": "double"}},
    ),
}
"""A variant and another one, for neither of which a trace is stored."""
if TorchVersion(torch.__version__) >= "2.13":  # before, Dynamo does not trace it
    USELESS["what can be imported"] = ({"model": "Importing"}, {"model": "Importing"})
ABSENT = {
    model: ({"model": model}, {"model": model, "arguments": {"is_there": True}})
    for model in ("Missing", "Lacking")
} | {
    "Counting": ({"model": "Counting"}, {"model": "Counting", "attributes": {"model.names": None}}),
    "Sharing": ({"model": "Sharing"}, {"model": "Sharing", "arguments": {"is_one": True}}),
    "Calling": ({"model": "Calling", "arguments": {"is_one": True}}, {"model": "Calling"}),
    **{
        f"Comparing {name}": (
            {"model": "Comparing", "arguments": {"name": name}},
            {"model": "Comparing", "arguments": {"name": name, "is_other": True}},
        )
        for name in ("KIND", "KINDS[0]", "KINDS[1]", "TEXT", "LAYER", "TENSOR", "CHOICES")
    },
    **{
        f"Naming {place}": (
            {"model": "Naming", "arguments": {"place": place}},
            {"model": "Naming", "arguments": {"place": place, "is_other": True}},
        )
        for place in ("key", "item")
    },
    "Looking": ({"model": "Looking"}, {"model": "Looking", "arguments": {"is_other": True}}),
    "Flagged": ({"model": "Flagged"}, {"model": "Flagged", "attributes": {FLAG: False}}),
    "Looping": (
        {"model": "Looping"},
        {"model": "Looping", "attributes": {"shop.model.Numbers.ONES": "eval {8, 0}"}},
    ),
    "Asking": ({"model": "Asking"}, {"model": "Asking", "attributes": {"shop.helpers.FACTOR": 3}}),
}
"""A variant for which a trace is stored, and another one that it does not serve."""


def test_a_trace_that_cannot_be_compared_is_not_stored_and_what_was_not_there_is_missed(
    tmp_path: Path,
) -> None:
    cases = USELESS | ABSENT
    folders = {name: shop(tmp_path / str(index)) for index, name in enumerate(cases)}
    firsts = [(folders[name], first) for name, (first, _) in cases.items()]
    for name, found in zip(cases, in_processes(*firsts, home=tmp_path / "first"), strict=True):
        was(found, TRACED, name)
    again = [(folders[name], *ABSENT[name]) for name in ABSENT]
    others = [(folders[name], other) for name, (_, other) in USELESS.items()]
    counted = in_processes(*again, *others, home=tmp_path / "second")
    for name in ABSENT:
        was(counted.pop(0), LOADED, name)
        was(counted.pop(0), TRACED, name)
    for name, found in zip(USELESS, counted, strict=True):
        was(found, TRACED, name)
        assert entries(folders[name] / "cache") == (), name


def test_where_a_trace_is_made_in_a_process_is_no_question(tmp_path: Path) -> None:
    """Dynamo numbers what it puts into globals, in the order of its traces."""
    folder = shop(tmp_path)
    names = ("an attribute of its settings", "a global", "a closure")
    for found in in_process(folder, {}, *(OTHERS[name] for name in names)):
        was(found, TRACED)
    assert {kind: len(found) for kind, found in kinds(folder / "cache").items()} == {
        "questions": 1,
        "answers": 4,
        "piece": 0,
    }


def test_the_order_of_abstract_methods_is_no_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It differs between processes, as does that of members of an enum by their hash."""
    folder = shop(tmp_path)
    for seed, wanted in (("1", TRACED), ("2", LOADED), ("3", LOADED)):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        was(in_process(folder, {"model": "Ordered"})[0], wanted, seed)


def test_globals_that_only_this_process_has_are_no_question() -> None:
    """So Dynamo of torch 2.14 names those of a module that was imported again."""
    read = Read("CONSTANT_MATCH", "G['___unnamed_scope_139677612826752_c2']['SCALE']")
    rewritten: Any = SimpleNamespace(reads=(read,), seen=())
    with pytest.raises(NoContentError, match="imported again"):
        questions_of(rewritten, {}, (), (), {}, {})


@pytest.mark.skipif(
    TorchVersion(torch.__version__) >= "2.14", reason="Dynamo traces no such model, cache or not"
)
def test_a_module_that_is_imported_again_is_traced_as_without_a_cache(
    cold: Path, tmp_path: Path
) -> None:
    """Dynamo goes on with the first import, and so must what it finds in the globals."""
    other = OTHERS["an attribute of its settings"]
    for number, names in enumerate((["shop.helpers"], ["shop.helpers", "shop.model"])):
        folder = copied(cold, tmp_path / str(number))
        again: dict[str, Any] = {"imported again": names}
        first, *later = in_process(folder, {}, again, other)
        was(first, LOADED, str(names))
        for found in later:
            was(found, TRACED, str(names))
        was(in_process(folder, other)[0], TRACED, str(names))
        was(in_process(folder, other)[0], LOADED, str(names))


def test_no_weight_is_in_what_is_stored(cold: Path) -> None:
    for folder in kinds(cold / "cache")["answers"]:
        assert b"torch._utils" not in (folder / ARTIFACT).read_bytes()
