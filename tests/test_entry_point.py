"""`torch.compile(model, backend="piecewise")` needs no import of this package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch

assert "piecewise" in torch.compiler.list_backends()
assert not any(name.startswith("piecewise_backend") for name in sys.modules)

def model(x):
    return torch.nn.functional.silu(x @ x.t()) * 2

options = {"compiler": "eager", "graph_impl": "emulated", "cudagraph_capture_sizes": [4, 8]}
compiled = torch.compile(model, backend="piecewise", fullgraph=True, options=options)
with torch.no_grad():
    for _ in range(4):
        x = torch.randn(4, 4)
        torch.testing.assert_close(compiled(x), model(x))
print("served", "piecewise_backend" in sys.modules)
"""


def test_backend_is_found_by_name(tmp_path: Path) -> None:
    """In a process that knows of the package only what its installation says."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "served True"
