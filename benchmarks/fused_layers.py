"""Are compiled layers faster with fusions than without, at every batch?

In:  a stack of float8 feed-forward layers, token counts.
Out: the time of a step with fusions off, with them on, and of `torch.compile` default; bars: on /
     off <= 1.0 at every token count, which is what fusions have to show to be on by default.

A layer is `add + RMSNorm + quantise -> float8 matmul -> SiLU-and-mul + quantise -> float8 matmul`,
quantised by a static scale or by rows. All contenders run the same matmuls, and all are replayed
from one CUDA graph of the whole stack, so that launches cost all of them the same.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from benchmarks.fused_cases import repeated, results
from benchmarks.measure import RESULTS, Results, Row, print_table, say, time_steps
from piecewise_backend.passes.ops import reference

EPS = 1e-6
COLUMNS = ("quantised", "tokens", "off_us", "on_us", "torch_us", "on_over_off", "on_over_torch")
OFF, ON, TORCH = "fusions off", "fusions on", "torch.compile default"
FUSED = {
    "static": ("fuse_add_rms_norm_static_quant", "fuse_silu_mul_static_quant"),
    "dynamic": ("fuse_add_rms_norm_dynamic_quant", "fuse_silu_mul_dynamic_quant"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    device = torch.device(args.device)
    found = Results("fused_layers", device, args.output)
    with torch.no_grad(), fresh_cache():
        for kind in FUSED:
            stack = Stack(kind, args.layers, args.hidden, device)
            rows = [measure(stack, tokens, device, args.samples) for tokens in args.tokens]
            found.add(*rows)
            print_table(rows, COLUMNS)
            for row in rows:
                name = f"{kind}, {row['tokens']} tokens: fusions on / off"
                found.bar(name, row["on_over_off"], 1.0)
    say(found.summary())
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny stack, few samples")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256, 2048, 8192])
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if args.quick:
        args.layers, args.hidden, args.tokens, args.samples = 2, 64, [3], 2
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if args.quick else RESULTS
    args.output = args.output or folder / "fused_layers.json"
    return args


class Stack(nn.Module):
    """Feed-forward layers with float8 weights, quantised by a static scale or by rows."""

    def __init__(self, kind: str, num_layers: int, hidden: int, device: torch.device) -> None:
        super().__init__()
        self.kind, self.num_layers, self.hidden = kind, num_layers, hidden
        torch.manual_seed(0)
        for index in range(num_layers):
            for name, shape in (("up", (4 * hidden, hidden)), ("down", (hidden, 2 * hidden))):
                weight = (torch.randn(shape, device=device) / 8).to(reference.FP8_DTYPE)
                self.register_buffer(f"{name}{index}", weight)
            norm = torch.rand(hidden, device=device).add(0.5).to(torch.bfloat16)
            self.register_buffer(f"norm{index}", norm)
        self.register_buffer("scale", torch.full((1,), 0.02, device=device))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        for index in range(self.num_layers):
            residual = x + residual
            y = reference.rms_norm(residual, getattr(self, f"norm{index}"), EPS)
            y = self._matmul(y, getattr(self, f"up{index}"))
            x = self._matmul(reference.silu_mul(y), getattr(self, f"down{index}"))
        return x, residual

    def _matmul(self, y: Tensor, weight: Tensor) -> Tensor:
        """Quantise, and multiply as float8 (on a CPU, which may lack that, as float32)."""
        if self.kind == "static":
            quantised, scales = reference.static_quant(y, self.scale), self.scale.reshape(())
        else:
            quantised, scales = reference.dynamic_quant(y)
        width = weight.shape[0]
        if y.device.type != "cuda":
            return ((quantised.float() * scales) @ weight.float().t() / 64).to(y.dtype)
        ones = torch.full((1, width) if scales.dim() else (), 1 / 64, device=y.device)
        return torch._scaled_mm(
            quantised, weight.t(), scale_a=scales, scale_b=ones, out_dtype=y.dtype
        )


def compiled(stack: Stack, contender: str, inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
    """The stack as this contender compiles it, called once."""
    torch._dynamo.reset()
    if contender == TORCH:
        model = torch.compile(stack, dynamic=False, fullgraph=True)
    else:
        switches = dict.fromkeys(FUSED[stack.kind], contender == ON)
        options = {"splitting_ops": [], "cudagraph_mode": "none", "pass_config": switches}
        model = torch.compile(stack, backend="piecewise", fullgraph=True, options=options)
    model(*inputs)
    return functools.partial(model, *inputs)


def measure(stack: Stack, num_tokens: int, device: torch.device, num_samples: int) -> Row:
    """One token count."""
    torch.manual_seed(1)
    inputs = tuple(
        torch.randn(num_tokens, stack.hidden, device=device).to(torch.bfloat16) for _ in range(2)
    )
    steps = {}
    for contender in (OFF, ON, TORCH):
        call = compiled(stack, contender, inputs)
        check_same(contender, call(), stack(*inputs))
        steps[contender] = repeated(call, device, 1)
    taken = time_steps(steps, device, num_samples=num_samples, seconds_per_sample=0.02)
    return {
        "quantised": stack.kind,
        "tokens": num_tokens,
        "hidden": stack.hidden,
        "layers": stack.num_layers,
        **{
            f"{short}_us": round(taken[name].median * 1e3, 2)
            for short, name in (("off", OFF), ("on", ON), ("torch", TORCH))
        },
        "on_over_off": round(taken[ON].over(taken[OFF]), 4),
        "on_over_torch": round(taken[ON].over(taken[TORCH]), 4),
        "num_samples": num_samples,
    }


def check_same(name: str, got: Any, expected: Any) -> None:
    """Refuse to time what computes something else; float8 values that flip add up over layers."""
    for a, b in zip(results(got), results(expected), strict=True):
        difference = ((a.float() - b.float()).norm() / b.float().norm()).item()
        if not difference <= 0.25:
            raise RuntimeError(f"{name} is off by {difference:.3f}")


if __name__ == "__main__":
    raise SystemExit(main())
