"""Compiled pieces that other processes have compiled before: `cache_dir`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import piecewise_backend as pw
from piecewise_backend import cache_entry
from piecewise_backend.artifact_store import ArtifactStore, Fetched, Made
from piecewise_backend.cache_contents import entries
from piecewise_backend.cache_entry import ARTIFACT, Content
from piecewise_backend.errors import ConfigError
from piecewise_backend.inductor_compiler import InductorCompiler
from piecewise_backend.version import Version, loaded, stored
from tests.helpers import Decoder, compile, mark_dynamic, rows, same
from tests.test_canonical import instances
from tests.warm_process import MODELS

PROJECT = Path(__file__).parents[1]


Process = tuple[Path, list[int], *tuple[str, ...]]
"""The cache, sizes, and models."""


def in_processes(home: Path, *processes: list[Process]) -> list[dict[str, Any]]:
    """What processes count that compile these, in lists of those that run at the same time.

    What Inductor and the C++ compiler keep is beside `home`, to save time.
    """
    home.mkdir()
    environment = os.environ | {
        "HOME": str(home),
        "PYTHONPATH": str(PROJECT),
        "TORCHINDUCTOR_CACHE_DIR": str(home.parent / "inductor"),
        "OMP_NUM_THREADS": "1",
    }
    texts = [json.dumps(each, default=str) for each in processes]
    command = [sys.executable, "-m", "tests.warm_process", *texts]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_processes_compile_each_piece_once_and_a_later_one_nothing(tmp_path: Path) -> None:
    """At a time on an empty directory; then from a copy, in other order, at other sizes."""
    cache, names = tmp_path / "cache", ("decoder", "layered")
    started: list[Process] = [(cache, sizes, *names) for sizes in ([5, 2, 33], [7, 3], [300, 4])]
    cold = in_processes(tmp_path / "cold", started)
    assert sum(found["compiled"] for found in cold) == 5
    assert sum(found["loaded"] for found in cold) == 10
    assert all(found["is_right"] for found in cold)
    shutil.copytree(cache, tmp_path / "elsewhere")
    shutil.rmtree(cache)
    # Other names of layers come first, so that the tables that hoisted inputs index into differ.
    others = ("layered with other constants", "layered", "decoder")
    (warm,) = in_processes(tmp_path / "warm", [(tmp_path / "elsewhere", [11, 2, 64], *others)])
    assert warm == {"compiled": 0, "loaded": 7, "is_right": True}


def test_models_that_differ_in_little_do_not_serve_each_other(tmp_path: Path) -> None:
    """And sizes that a stored version excludes get another one, beside it."""
    cache, others = tmp_path / "cache", ("another constant", "without bias", "wider")
    counted = in_processes(
        tmp_path / "home",
        [(cache, [5], "a constant", "linear", "graded")],
        [(cache, [40, 50], *others, "graded", "linear", "a constant")],
        [(cache, [7, 60], "graded", *others)],
    )
    assert counted == [
        {"compiled": 3, "loaded": 0, "is_right": True},
        {"compiled": 4, "loaded": 2, "is_right": True},
        {"compiled": 0, "loaded": 5, "is_right": True},
    ]
    versions = [e.record() for e in entries(cache) if "graded" in str(e.record())]
    assert {record.key["sizes"][0]: record.about["conditions"] for record in versions} == {
        5: ["L['t0'] <= 16"], 40: ["17 <= L['t0']"],
    }  # fmt: skip


def step(cache: Any, name: str = "a constant", **options: Any) -> None:
    """Compile and call a model anew in this process."""
    torch._dynamo.reset()
    first_step(cache, name, **options)


def first_step(cache: Any, name: str = "a constant", **options: Any) -> None:
    """Compile and call a model that this process has not compiled since the last reset."""
    model = MODELS[name]()
    compiled = compile(model, compiler="inductor", cache_dir=cache, **options)
    with torch.no_grad():
        for size in (5, 2, 8):
            x = rows(size)
            same(compiled(*mark_dynamic((x,))), model(x), f"{size} rows")


@pytest.mark.usefixtures("inductor_cache")
def test_a_damaged_artifact_is_compiled_again(tmp_path: Path) -> None:
    step(tmp_path)
    ((entry,),) = (entries(tmp_path),)
    artifact = entry.folder / ARTIFACT
    changed = bytearray(artifact.read_bytes())
    changed[len(changed) // 2] ^= 1
    artifact.write_bytes(changed)
    before = pw.compilation_counter.counts()
    with pytest.warns(RuntimeWarning, match=f"{artifact}: .*checksum.*compiled anew"):
        step(tmp_path)
    step(tmp_path)
    after = pw.compilation_counter.counts()
    assert after["num_inductor_compiles"] - before["num_inductor_compiles"] == 1
    assert after["num_artifacts_loaded"] - before["num_artifacts_loaded"] == 1


@pytest.mark.usefixtures("inductor_cache")
@pytest.mark.parametrize("value", [None, "off"])
def test_without_a_cache_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIECEWISE_CACHE_DIR", str(tmp_path))
    before = pw.compilation_counter.num_inductor_compiles
    step("off" if value else None)
    step("off" if value else None)
    assert pw.compilation_counter.num_inductor_compiles - before == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("inductor_cache")
def test_the_cache_takes_no_more_than_it_may(tmp_path: Path) -> None:
    for name in ("a constant", "another constant"):
        step(tmp_path, name, max_cache_size="2KiB")
        assert len(entries(tmp_path)) == 1
    step(tmp_path, "a constant", max_cache_size="1GiB")
    assert len(entries(tmp_path)) == 2


@pytest.mark.usefixtures("inductor_cache")
def test_with_dumps_nothing_is_taken_from_the_cache_or_put_there(tmp_path: Path) -> None:
    before = pw.compilation_counter.num_inductor_compiles
    for _ in range(2):
        step(tmp_path / "cache", dump_dir=str(tmp_path / "dumps"))
    assert pw.compilation_counter.num_inductor_compiles - before == 2
    assert entries(tmp_path / "cache") == ()


def test_a_directory_that_others_can_write_reaches_the_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by every user"):
        step(tmp_path)


@pytest.mark.usefixtures("inductor_cache")
def test_what_torch_does_not_store_is_compiled_without_a_warning(tmp_path: Path) -> None:
    with torch._inductor.config.patch(fx_graph_cache=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        step(tmp_path)
    assert entries(tmp_path) == ()


def test_a_version_that_assumes_something_about_a_table_is_not_kept() -> None:
    def violated_by(numbers: tuple[int, ...]) -> None:
        return None

    (instance,) = instances(torch.sin)
    version = Version(torch.sin, violated_by, ("L['t0'] <= 4", "L['t1'] == 3"))
    assert stored(version, instance.distinct) is None


@pytest.mark.usefixtures("inductor_cache")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x: (x.sin(), x.cos()), r"it takes 2 inputs and returns 1 outputs, .* 2 and 2"),
        (lambda x, y: x + y, r"it takes 2 inputs and returns 1 outputs, but the piece 3 and 1"),
        (lambda x: x.sin().double(), r"returns .*float32 cpu .*but the piece .*float64 cpu"),
        (lambda x: x.sin().sum(1), r"returns \['torch.float32 cpu \[c0, 4\]'\].*'.* \[c0\]'"),
    ],
    ids=["outputs", "inputs", "dtype", "shape"],
)
def test_an_artifact_of_another_piece_is_found_when_loaded(
    tmp_path: Path, change: Any, named: str
) -> None:
    """As if a key lacked something: entries are put in each other's place."""
    given = [rows(5, seed=seed) for seed in range(change.__code__.co_argcount)]
    piece, other = (instances(f, *given)[0].distinct for f in (change, lambda x, *_: x.sin()))
    compiler = InductorCompiler({}, pw.CompilationCounter())
    made = stored(compiler.compile(other, (5,)), other)
    if named.startswith("it takes"):
        made = Content(made.artifact, {**made.about, "outputs": list(piece.structure.outputs)})
    store, key = ArtifactStore(tmp_path), {"sizes": [5]}
    cache_entry.write(tmp_path / cache_entry.name_of(key), key, made)

    def make() -> Made[str]:
        return Made("made anew", Content(b"made anew"))

    with pytest.warns(RuntimeWarning, match=f"{ARTIFACT}: it does not load.*{named}"):
        found = store.fetch(key, make, lambda content: loaded(content, piece), bool)
    assert found == Fetched("made anew", is_hit=False)


@pytest.mark.usefixtures("inductor_cache")
def test_loading_leaves_the_triton_kernels_of_the_process_alone(tmp_path: Path) -> None:
    table, kernel = torch._higher_order_ops.triton_kernel_wrap.kernel_side_table, object()
    try:
        for num_loaded in (0, 1):  # the first stores, with a kernel that could not be stored
            torch._dynamo.reset()  # empties the table since torch 2.13
            index = table.add_kernel(kernel)
            before = pw.compilation_counter.num_artifacts_loaded
            first_step(tmp_path)
            assert pw.compilation_counter.num_artifacts_loaded == before + num_loaded
            assert table.get_kernel(index) is kernel
            assert table.add_kernel(kernel) == index
    finally:
        table.reset_table()


@pytest.mark.usefixtures("inductor_cache")
def test_the_report_has_the_matches_of_passes_that_another_run_made(tmp_path: Path) -> None:
    def records() -> Any:
        torch._dynamo.reset()
        compiled = compile(Decoder(2), compiler="inductor", cache_dir=tmp_path)
        with torch.no_grad():
            compiled(*mark_dynamic((rows(5),)))
        return pw.report(compiled).graphs[0].passes

    cold, warm = records(), records()
    assert cold
    for where, found in cold.items():
        assert [(r.name, r.matches) for r in found] == [(r.name, r.matches) for r in warm[where]]
        assert all(record.milliseconds is None for record in warm[where])
