"""A second process with a cache: nothing is compiled, tuned or timed on the GPU any more."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROJECT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


def in_process(
    cache: Path, home: Path, num_workers: int, fastest: str, *sizes: int, num_threads: int = 0
) -> dict[str, Any]:
    """What a process did that shares nothing with others but the cache.

    Args:
        num_threads: of Inductor's pool, which is ready before anything is compiled; 0 for as many
            as it likes, when it likes.
    """
    home.mkdir()
    environment = os.environ | {
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "TRITON_CACHE_DIR": str(home / "triton"),
        "PIECEWISE_COMPILE_WORKERS": str(num_workers),
    }
    if num_threads:
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": str(num_threads), "POOL_IS_READY": "1"}
    command = [
        sys.executable,
        "-m",
        "tests.gpu.warm_process",
        str(cache),
        fastest,
        *map(str, sizes),
    ]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(home)  # what it has left is of no use to the next one
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("num_workers", "fastest", "sizes", "num_threads"),
    [
        (0, "measured", (), 0),
        (0, "measured", (1, 16), 0),
        (0, "static", (16,), 0),
        (0, "coordinate descent", (1, 16), 0),
        # Two, of which one has compiled a kernel before it is to be compiled anew.
        (0, "coordinate descent", (16,), 2),
        (0, "max-autotune", (16,), 0),
        (2, "static", (16,), 0),
        (2, "coordinate descent", (1,), 0),
    ],
)
def test_a_second_process_compiles_and_times_nothing(
    tmp_path: Path, num_workers: int, fastest: str, sizes: tuple[int], num_threads: int
) -> None:
    cold, warm = (
        in_process(tmp_path / "cache", home, num_workers, fastest, *sizes, num_threads=num_threads)
        for home in (tmp_path / "one", tmp_path / "two")
    )
    assert cold["compiled"] >= 3
    assert cold["loaded"] == 0
    assert cold["matches"] == warm["matches"] >= 2
    assert cold["worst"] < 0.02
    assert cold["benchmarks"] > 0
    assert not any(cold["remembered"])
    assert all(warm["remembered"])
    assert len(cold["kept"]) == 3 * len(sizes)
    if fastest != "measured":
        assert {kept for _, _, kept in cold["kept"]} == {fastest}
    assert warm["kept"] == cold["kept"]
    assert (warm["compiled"], warm["benchmarks"]) == (0, 0)
    assert 0 < warm["loaded"] <= cold["compiled"]
    assert warm["hash"] == cold["hash"]
