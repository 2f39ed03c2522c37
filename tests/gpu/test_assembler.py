"""What Inductor's processes compiled for max-autotune is not compiled again here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("others", [[], ["inductor"]])
def test_templates_are_compiled_once_though_triton_was_asked_before(
    tmp_path: Path, others: list[str]
) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }
    environment.pop("TRITON_PTXAS_PATH", None)  # as this process may have got it by now
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.assembler_process", *others],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "max-autotune" in found["tried"]
    assert found["found"] > 5
    assert found.get("compiled", 0) == 0
