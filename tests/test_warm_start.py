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
from piecewise_backend.cache_contents import entries
from piecewise_backend.cache_entry import ARTIFACT
from piecewise_backend.errors import ConfigError
from piecewise_backend.version import Version, stored
from tests.helpers import Decoder, compile, mark_dynamic, rows, same
from tests.warm_process import MODELS

PROJECT = Path(__file__).parents[1]


def in_process(cache: Path, home: Path, *models: str) -> dict[str, Any]:
    """What a process counts that compiles these, without kernels of earlier ones."""
    home.mkdir(exist_ok=True)
    environment = os.environ | {
        "HOME": str(home),
        "PYTHONPATH": str(PROJECT),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.warm_process", str(cache), *models]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    names = ("decoder", "layered")
    cold = in_process(tmp_path / "cache", tmp_path / "one", *names)
    assert cold == {"compiled": 5, "loaded": 0, "is_right": True}
    shutil.move(tmp_path / "cache", tmp_path / "elsewhere")
    warm = in_process(tmp_path / "elsewhere", tmp_path / "two", *reversed(names))
    assert warm == {"compiled": 0, "loaded": 5, "is_right": True}


def test_hoisted_constants_of_a_process_are_its_own(tmp_path: Path) -> None:
    first = in_process(tmp_path / "cache", tmp_path / "one", "layered")
    # Another order of names, so that the tables that inputs index into differ.
    other = "layered with other constants"
    second = in_process(tmp_path / "cache", tmp_path / "two", other, "layered")
    assert first["is_right"]
    assert second == {"compiled": 0, "loaded": 2 * first["compiled"], "is_right": True}


def test_models_that_differ_in_a_constant_do_not_serve_each_other(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert in_process(cache, tmp_path / "one", "a constant")["compiled"] == 1
    second = in_process(cache, tmp_path / "two", "another constant", "a constant")
    assert second == {"compiled": 1, "loaded": 1, "is_right": True}


def step(cache: Any, name: str = "a constant") -> None:
    """Compile and call a model anew in this process."""
    torch._dynamo.reset()
    first_step(cache, name)


def first_step(cache: Any, name: str = "a constant") -> None:
    """Compile and call a model that this process has not compiled since the last reset."""
    model = MODELS[name]()
    compiled = compile(model, compiler="inductor", cache_dir=cache)
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

    version = Version(torch.sin, violated_by, ("L['t0'] <= 4", "L['t1'] == 3"))
    assert stored(version, num_sizes=1) is None


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
