"""What does each graph mode make of a decode step, and of a mixed batch?

In:  a shape.
Out: mean, median and 99th percentile of a step in every mode, against the bare replay of one
     graph of a whole step and against `reduce-overhead`; what dispatch costs. Bars: FULL <= 1.02 x
     bare replay and <= `reduce-overhead`, dispatch <= 2 us.

`reduce-overhead` is compiled for each batch by itself with static shapes, the usual way to decode
with it; a mode of ours serves all batches from one trace. It hands out memory that the next step
overwrites, which is our `outputs="static"`: that is what its bar compares it with. Our default, a
copy, is in the table too.
"""

import argparse
import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import piecewise_backend as pw
from benchmarks.contenders import FullGraph, Ours, Step
from benchmarks.measure import RESULTS, Results, Row, print_table, say, time_steps
from benchmarks.step_time import NO_CUDA, add_torch_compile, check_results
from benchmarks.workload import SHAPES, TINY_SHAPES, Workload
from examples.engine import ModelInputs
from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.current_batch import stack_now

MODES = ("none", "piecewise", "full", "full_and_piecewise")
BATCHES = (1, 8, 64)
NUM_DECODES, CHUNK = 8, 56
SIZES = (1, 8, 64)
COLUMNS = ("contender", "mean_ms", "median_ms", "p99_ms", "submit_ms", "of_full")
FULL, STATIC, BARE = "full", "full, static outputs", "bare replay"
REDUCE = "torch.compile reduce-overhead"
_NUM_DISPATCHES = 2000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    device = torch.device(args.device)
    results = Results("modes", device, args.output)
    shapes = TINY_SHAPES if args.quick else {args.shape: SHAPES[args.shape]}
    (config,) = shapes.values()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        workload = Workload.build(config, device, 20 if args.quick else 256, num_seqs=max(BATCHES))
        ours = {}
        options = {mode: {"cudagraph_mode": mode} for mode in MODES}
        options[STATIC] = {"cudagraph_mode": FULL, "outputs": "static"}
        for name, given in options.items():
            started = time.perf_counter()
            ours[name] = Ours.build(workload, SIZES, on_fallback="warn", **given)
            say(f"{name}: compiled and captured in {time.perf_counter() - started:.1f} s")
        for batch in BATCHES:
            inputs = workload.decode_inputs(batch)
            run_batch(f"decode, batch {batch}", workload, ours, inputs, args, results, uniform=True)
        mixed = workload.mixed_inputs(NUM_DECODES, CHUNK)
        run_batch(f"mixed, {SIZES[-1]} tokens", workload, ours, mixed, args, results, uniform=False)
        microseconds = dispatch_cost(ours["full_and_piecewise"], workload.decode_inputs(8))
    results.add({"what": "dispatch with stated facts", "us": round(microseconds, 3)})
    results.bar("dispatch, us", microseconds, 2.0)
    say(results.summary())
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few samples")
    parser.add_argument("--shape", choices=SHAPES, default="16x2048")
    parser.add_argument("--samples", type=int, help="per contender")
    parser.add_argument("--no-torch-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    args.samples = args.samples or (3 if args.quick else 101)
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if args.quick else RESULTS
    args.output = args.output or folder / "modes.json"
    return args


def run_batch(
    where: str,
    workload: Workload,
    ours: dict[str, Ours],
    inputs: ModelInputs,
    args: argparse.Namespace,
    results: Results,
    *,
    uniform: bool,
) -> None:
    """One table: every mode at one batch."""
    steps: dict[str, Step] = {
        mode: stated(functools.partial(each.compiled, *inputs), uniform)
        for mode, each in ours.items()
    }
    skipped: dict[str, str] = {}
    if workload.device.type == "cuda":
        steps[BARE] = FullGraph.capture(ours[FULL], inputs).replay
    else:
        skipped[BARE] = NO_CUDA
    if args.no_torch_compile:
        skipped[REDUCE] = "--no-torch-compile"
    else:
        add_torch_compile(steps, skipped, workload, inputs, modes=("reduce-overhead",))
    check_results(steps, workload.model(*inputs))
    timings = time_steps(steps, workload.device, num_samples=args.samples, seconds_per_sample=0.02)
    rows: list[Row] = [{"contender": name, "skipped": reason} for name, reason in skipped.items()]
    for name, timing in timings.items():
        of_full = round(timing.over(timings[FULL]), 4)
        rows.append({"contender": name, **timing.as_row(), "of_full": of_full})
    results.add(*({"batch": where, **row} for row in rows))
    say(f"\n{where}:")
    print_table(rows, COLUMNS)
    if uniform:
        for mine, theirs, limit in ((FULL, BARE, 1.02), (STATIC, REDUCE, 1.0)):
            if theirs in timings:
                ratio = timings[mine].over(timings[theirs])
                results.bar(f"{where}: {mine} / {theirs}", ratio, limit)


def stated(step: Step, uniform: bool) -> Step:
    """The step with what an engine knows about its batch."""

    def call() -> object:
        with pw.batch(uniform=uniform):
            return step()

    return call


def dispatch_cost(ours: Ours, inputs: ModelInputs) -> float:
    """Microseconds from a batch to its graphs: stating the facts, and one look-up."""
    runtime = ours.runtime
    args, prepared, key_of = ours.flat_args(inputs), runtime.captures.prepared, runtime.key_of
    known = runtime.agreement.known

    def once() -> Any:
        with pw.batch(uniform=True):
            key, facts = key_of(args), stack_now()[0]
            ready = prepared.get((facts.kind, key))
            return ready if (facts, key) in known else None

    with pw.batch(uniform=True):
        ours.compiled(*inputs)
    assert once()[2].mode is CUDAGraphMode.FULL
    samples = []
    for _ in range(9):
        started = time.perf_counter()
        for _ in range(_NUM_DISPATCHES):
            once()
        samples.append((time.perf_counter() - started) * 1e6 / _NUM_DISPATCHES)
    return min(samples)


if __name__ == "__main__":
    raise SystemExit(main())
