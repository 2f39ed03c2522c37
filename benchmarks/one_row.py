"""Is a linear layer of one token near what memory allows, and is its tile the best one?

In:  the linear layers of two shapes of decoders, as a fused step has them.
Out: for each the time of the chosen tile, of the best of all that were tried, of the chosen one
     without early launch, and of `F.linear` without what the op does besides; the share that
     reading the weight takes. Bars: chosen <= 1.05 x best; chosen <= `F.linear`.

A sample is a graph that goes through so many weights that the cache is of no use.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fused_cases import repeated
from benchmarks.measure import RESULTS, Results, Row, print_table, read_bandwidth, say, time_steps
from piecewise_backend.passes.ops import launch
from piecewise_backend.passes.ops.launch import Launch

EPS = 1e-5
# Rows and columns of the weight, and what the op does besides.
LAYERS = {
    "2048, o": (2048, 2048, "add"),
    "2048, gate and up": (16384, 2048, "norm, gated"),
    "2048, down": (2048, 8192, "add"),
    "2048, qkv": (3072, 2048, "norm"),
    "4096, o": (4096, 4096, "add"),
    "4096, gate and up": (28672, 4096, "norm, gated"),
    "4096, down": (4096, 14336, "add"),
    "4096, qkv": (6144, 4096, "norm"),
}
COLUMNS = (
    "layer", "chosen", "chosen_us", "of_bound", "best", "best_us", "late_us", "linear_us", "ratio",
)  # fmt: skip
_LATE, _LINEAR = "late", "F.linear"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    device = torch.device("cuda")
    results = Results("one_row", device, args.output)
    bandwidth = read_bandwidth(device, 2**31)
    rows = []
    with torch.no_grad():
        for name in args.layers:
            row = measure(name, device, bandwidth, args.samples)
            results.add(row)
            rows.append(row)
            results.bar(f"{name}: chosen tile / best", row["ratio"], 1.05)
            results.bar(f"{name}: chosen / F.linear", row["chosen_us"] / row["linear_us"], 1.0)
    print_table(rows, COLUMNS)
    say(results.summary())
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one layer")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--samples", type=int, default=5, help="per contender")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, and no kernel without one")
    if args.quick:
        args.layers = args.layers[:1]
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if args.quick else RESULTS
    args.output = args.output or folder / "one_row.json"
    return args


def measure(name: str, device: torch.device, bandwidth: float, num_samples: int) -> Row:
    """One layer: all contenders in turns."""
    num_rows, num_columns, besides = LAYERS[name]
    chosen = launch.one_row(num_columns, is_gated="gated" in besides, has_norm="norm" in besides)
    num_weights = max(4, min(48, int(5e8 / (2 * num_rows * num_columns))))
    functions = contenders(name, chosen, num_weights, device)
    steps = {key: repeated(function, device, 1) for key, function in functions.items()}
    timings = time_steps(steps, device, num_samples=num_samples, seconds_per_sample=0.01)
    times = {key: timing.median * 1e3 / num_weights for key, timing in timings.items()}
    best = min(set(times) - {_LATE, _LINEAR}, key=times.__getitem__)
    bound_us = 2 * num_rows * num_columns / bandwidth * 1e6
    return {
        "layer": name,
        "besides": besides,
        "chosen": str(chosen),
        "chosen_us": round(times[str(chosen)], 3),
        "of_bound": round(bound_us / times[str(chosen)], 4),
        "best": best,
        "best_us": round(times[best], 3),
        "late_us": round(times[_LATE], 3),
        "linear_us": round(times[_LINEAR], 3),
        "ratio": round(timings[str(chosen)].over(timings[best]), 4),
        "all_us": {key: round(time, 3) for key, time in times.items()},
    }


def contenders(
    name: str, chosen: Launch, num_weights: int, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Each goes through all weights."""
    from piecewise_backend.passes.ops.kernels.one_row import one_row  # noqa: PLC0415  # Triton

    num_rows, num_columns, besides = LAYERS[name]
    shape = (num_weights, num_rows, num_columns)
    weights = torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(num_columns**-0.5)
    x, norm = torch.randn(2, 1, num_columns, dtype=torch.bfloat16, device=device)
    given: list[tuple[Tensor, Tensor | None]] = [(weight, None) for weight in weights]
    if "gated" in besides:
        given = [tuple(weight.chunk(2)) for weight in weights]
    addend = torch.randn_like(weights[0, :, 0]) if "add" in besides else None
    norm_weight = norm[0] if "norm" in besides else None

    def chain(tile: Launch, is_early: bool | None = None) -> None:
        for weight, up in given:
            one_row(x, weight, up, addend, norm_weight, EPS, tile, is_early)

    functions: dict[str, Callable[[], object]] = {
        str(tile): functools.partial(chain, tile) for tile in tiles_near(chosen)
    }
    functions[_LATE] = functools.partial(chain, chosen, is_early=False)
    functions[_LINEAR] = functools.partial(linear_chain, x, weights)
    return functions


def linear_chain(x: Tensor, weights: Tensor) -> None:
    """The products alone, by the vendor's library."""
    for weight in weights:
        F.linear(x, weight)


def tiles_near(chosen: Launch) -> list[Launch]:
    """The chosen one, and others with 8 to 128 values a thread."""
    tiles = [
        Launch(rows, chosen.columns, num_warps)
        for rows in (1, 2, 4)
        for num_warps in (4, 8, 16)
        if 8 <= rows * chosen.columns / (32 * num_warps) <= 64
    ]
    return list(dict.fromkeys([chosen, *tiles]))


if __name__ == "__main__":
    raise SystemExit(main())
