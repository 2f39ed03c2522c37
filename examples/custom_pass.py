"""Write a pass: replace plain torch by a fused op, and see what it did.

Run it: ``python examples/custom_pass.py`` or ``python -m examples.custom_pass``. It needs no GPU.
It prints how often the pattern was found in each piece, whether the result equals eager's, and
where the graphs before and after each pass are. The exit status is 1 if it does not.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import tempfile
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piecewise_backend as pw


@torch.library.custom_op("example::silu_and_mul", mutates_args=[])
def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Stands for a kernel of yours."""
    return F.silu(gate) * up


@silu_and_mul.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


# The pass: these lines, and nothing in the model.
FUSE_GATE = pw.Rewrite(
    name="fuse_gate",
    pattern=lambda gate, up: F.silu(gate) * up,
    replacement=lambda gate, up: torch.ops.example.silu_and_mul(gate, up),
    example_inputs=lambda: (torch.empty(4, 8), torch.empty(4, 8)),
    requires=lambda gate, up: gate.dtype == up.dtype,
    min_matches=1,
)


class FeedForward(nn.Module):
    """A layer as anybody writes it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def main(argv: Sequence[str] | None = None) -> int:
    """Compile with the pass and compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dump-dir", type=Path, help="default: a new temporary directory")
    dump_dir = parser.parse_args(argv).dump_dir or Path(tempfile.mkdtemp(prefix="piecewise-dump-"))
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(), FeedForward()).requires_grad_(False)
    options = {"splitting_ops": [], "cudagraph_mode": "none", "dump_dir": dump_dir}
    compiled = torch.compile(
        model, backend="piecewise", fullgraph=True, options=options | {"passes": [FUSE_GATE]}
    )
    x = torch.randn(5, 16)
    is_equal = torch.allclose(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    for where, records in pw.report(compiled).graphs[0].passes.items():
        for record in records:
            print(f"{where}: {record}")
    print(f"result equals eager's: {'yes' if is_equal else 'NO'}")
    print(f"graphs before and after each pass: {dump_dir}/graph_0/passes")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
