"""Is a decode step faster with tuned sizes, and how near is it to what memory allows?

In:  shapes and batches.
Out: for each the step time of the versions for all sizes and of what `compile_sizes` chose, of
     pieces and of whole steps, against reading the weights once; every decision with its times.
     Bars: tuned <= untuned at each batch; at batch 1 reading the weights is at least 85 % of a
     step of the 8B shape, and 60 % of the 1B shape.
"""

import argparse
import functools
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import piecewise_backend as pw
from benchmarks.contenders import Ours, Step
from benchmarks.measure import (
    RESULTS,
    Results,
    Row,
    copy_bandwidth,
    print_table,
    read_bandwidth,
    say,
    time_steps,
)
from benchmarks.modes import stated
from benchmarks.step_time import check_results
from benchmarks.workload import MAX_BATCH, SHAPES, TINY_SHAPES, Workload
from examples.llama import LlamaConfig

BATCHES = (1, 16)
MODES = ("full", "piecewise")
COLUMNS = ("contender", "median_ms", "min_ms", "p99_ms", "of_bound", "of_untuned")
# The part of a step of one sequence that reading the weights takes at least.
LEAST_OF_BOUND = {"16x2048": 0.60, "32x4096": 0.85}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    device = torch.device(args.device)
    results = Results("tuned_sizes", device, args.output)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        for name, config in args.shapes.items():
            run_shape(name, config, device, args, results)
            torch._dynamo.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    say(results.summary())
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few samples")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(LEAST_OF_BOUND))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--samples", type=int, help="per contender")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if max(args.batches) > MAX_BATCH:
        parser.error(f"--batches {args.batches}: there are {MAX_BATCH} sequences")
    args.shapes = TINY_SHAPES if args.quick else {name: SHAPES[name] for name in args.shapes}
    args.context = 20 if args.quick else 256
    args.samples = args.samples or (3 if args.quick else 11)
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if args.quick else RESULTS
    args.output = args.output or folder / "tuned_sizes.json"
    return args


def run_shape(
    name: str,
    config: LlamaConfig,
    device: torch.device,
    args: argparse.Namespace,
    results: Results,
) -> None:
    """All batches of one shape."""
    workload = Workload.build(config, device, args.context)
    num_bytes = 2**24 if args.quick else 2**31
    bandwidth = max(read_bandwidth(device, num_bytes), copy_bandwidth(device, num_bytes))
    bound_ms = workload.weight_bytes() / bandwidth * 1e3
    say(f"{name}: {workload.weight_bytes() / 1e9:.3f} GB of weights, {bound_ms:.3f} ms to read")
    ours = {}
    for contender, sizes in (("untuned", []), ("tuned", args.batches)):
        started = time.perf_counter()
        ours[contender] = Ours.build(
            workload, args.batches, cudagraph_mode="full_and_piecewise", compile_sizes=sizes
        )
        seconds = time.perf_counter() - started
        say(f"{name}, {contender}: compiled and captured in {seconds:.1f} s")
        results.add({"shape": name, "contender": contender, "start_up_seconds": round(seconds, 2)})
    for tuning in pw.report(ours["tuned"].compiled).graphs[0].tunings:
        say(f"  {tuning}")
        results.add({
            "shape": name, "piece": tuning.piece, "sizes": list(tuning.sizes), "kept": tuning.kept,
            "microseconds": {n: round(t, 3) for n, t in tuning.microseconds.items()},
            "failures": dict(tuning.failures),
        })  # fmt: skip
    for batch in args.batches:
        run_batch(name, workload, ours, batch, bound_ms, args, results)


def run_batch(
    name: str,
    workload: Workload,
    ours: dict[str, Ours],
    batch: int,
    bound_ms: float,
    args: argparse.Namespace,
    results: Results,
) -> None:
    """One table: both contenders in both modes."""
    inputs = workload.decode_inputs(batch)
    steps: dict[str, Step] = {}
    for contender, built in ours.items():
        step = functools.partial(built.compiled, *inputs)
        steps[f"{contender}, full"] = stated(step, uniform=True)
        steps[f"{contender}, piecewise"] = stated(step, uniform=False)
    check_results(steps, workload.model(*inputs))
    timings = time_steps(steps, workload.device, num_samples=args.samples, seconds_per_sample=0.08)
    rows: list[Row] = []
    for contender, timing in timings.items():
        mode = contender.partition(", ")[2]
        of_untuned = timing.over(timings[f"untuned, {mode}"])
        rows.append({
            "contender": contender, **timing.as_row(),
            "of_bound": round(bound_ms / timing.median, 4), "of_untuned": round(of_untuned, 4),
        })  # fmt: skip
    say(f"\n{name}, batch {batch}:")
    print_table(rows, COLUMNS)
    results.add(*({"shape": name, "batch": batch, **row} for row in rows))
    for mode in MODES:
        ratio = timings[f"tuned, {mode}"].over(timings[f"untuned, {mode}"])
        results.bar(f"{name}, batch {batch}, {mode}: tuned / untuned", ratio, 1.0)
    if batch == 1 and name in LEAST_OF_BOUND:
        step_of_bound = timings["tuned, full"].median / bound_ms
        what = f"{name}, batch 1: a tuned step / reading the weights"
        results.bar(what, step_of_bound, 1 / LEAST_OF_BOUND[name])


if __name__ == "__main__":
    raise SystemExit(main())
