"""How long is a decode step, and how much of that is ours?

In:  shapes and batches.
Out: for each the step time of eager, `torch.compile`, one full graph, a hand-written loop over
     our graphs, and us; bar: us <= 1.05 x that loop.

`torch.compile` is compiled for each batch by itself with static shapes, the usual way to decode
with it; ours serves both batches from one trace.
"""

import argparse
import functools
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.contenders import FullGraph, Ours, Parts, Step
from benchmarks.measure import RESULTS, Results, Row, copy_bandwidth, print_table, say, time_steps
from benchmarks.workload import MAX_BATCH, SHAPES, TINY_SHAPES, Workload
from examples.engine import ModelInputs
from examples.llama import LlamaConfig

BATCHES = (1, 16)
COLUMNS = ("contender", "median_ms", "min_ms", "p99_ms", "submit_ms", "of_ours", "error")
OURS, LOOP, BARE_LOOP = "ours", "hand-written loop", "hand-written loop, bare kernel"
NO_CUDA = "needs CUDA"
# Kernels round differently, and in bfloat16 that adds up over layers; a wrong result is off by 1.
_TOLERANCE = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    device = torch.device(args.device)
    results = Results("step_time", device, args.output)
    # Contenders and batches share one function, so Dynamo keeps many versions of it.
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
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--context", type=int, help="cached tokens of the shortest sequence")
    parser.add_argument("--samples", type=int, help="per contender")
    parser.add_argument("--no-torch-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if max(args.batches) > MAX_BATCH:
        parser.error(f"--batches {args.batches}: there are {MAX_BATCH} sequences")
    args.shapes = TINY_SHAPES if args.quick else {name: SHAPES[name] for name in args.shapes}
    args.context = args.context or (20 if args.quick else 256)
    args.samples = args.samples or (3 if args.quick else 11)
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if args.quick else RESULTS
    args.output = args.output or folder / "step_time.json"
    return args


def run_shape(
    name: str,
    config: LlamaConfig,
    device: torch.device,
    args: argparse.Namespace,
    results: Results,
) -> None:
    """All batches of one shape."""
    started = time.perf_counter()
    workload = Workload.build(config, device, args.context)
    say(f"{name}: model and contexts in {time.perf_counter() - started:.1f} s")
    started = time.perf_counter()
    ours = Ours.build(workload, args.batches)
    say(f"{name}: ours compiled and captured in {time.perf_counter() - started:.1f} s")
    results.add({"shape": name, **bound(workload, args.quick)})
    for batch in args.batches:
        rows = run_batch(workload, ours, batch, args, results, f"{name}, batch {batch}")
        results.add(*({"shape": name, "batch": batch, **row} for row in rows))


def bound(workload: Workload, is_quick: bool) -> Row:
    """What a step costs at least: reading the weights."""
    bandwidth = copy_bandwidth(workload.device, 2**24 if is_quick else 2**31)
    read_ms = workload.weight_bytes() / bandwidth * 1e3
    say(f"weights: {workload.weight_bytes() / 1e9:.3f} GB, {read_ms:.3f} ms to read")
    return {
        "contender": "reading the weights",
        "weight_bytes": workload.weight_bytes(),
        "copy_bytes_per_second": round(bandwidth),
        "median_ms": round(read_ms, 5),
    }


def run_batch(
    workload: Workload,
    ours: Ours,
    batch: int,
    args: argparse.Namespace,
    results: Results,
    where: str,
) -> list[Row]:
    """One table: every contender at one batch."""
    inputs = workload.decode_inputs(batch)
    steps, skipped = our_steps(ours, inputs, workload.device)
    steps["eager"] = lambda: workload.model(*inputs)
    if args.no_torch_compile:
        skipped["torch.compile"] = "--no-torch-compile"
    else:
        add_torch_compile(steps, skipped, workload, inputs)
    errors = check_results(steps, workload.model(*inputs))
    timings = time_steps(steps, workload.device, num_samples=args.samples, seconds_per_sample=0.08)
    rows: list[Row] = [{"contender": name, "skipped": reason} for name, reason in skipped.items()]
    for name, timing in timings.items():
        of_ours = round(timing.over(timings[OURS]), 4)
        error = {"error": errors[name]} if name in errors else {}
        rows.append({"contender": name, **timing.as_row(), "of_ours": of_ours, **error})
    say(f"\n{where}:")
    print_table(rows, COLUMNS)
    for loop in [name for name in (LOOP, BARE_LOOP) if name in timings]:
        results.bar(f"{where}: ours / {loop}", timings[OURS].over(timings[loop]), 1.05)
    return rows


def our_steps(
    ours: Ours, inputs: ModelInputs, device: torch.device
) -> tuple[dict[str, Step], dict[str, str]]:
    """What is made of our parts, and what cannot be made here."""
    parts = Parts.of(ours, inputs)
    call, flat_args = ours.runtime.call, ours.flat_args(inputs)
    steps: dict[str, Step] = {
        OURS: lambda: ours.compiled(*inputs),
        "ours, plan alone": lambda: call(*flat_args),
        LOOP: parts.loop(),
        "attention calls alone": parts.attention_calls(),
        "graph replays alone": parts.graph_replays(),
    }
    if device.type != "cuda":
        return steps, dict.fromkeys((BARE_LOOP, "full graph", "full graph, replay alone"), NO_CUDA)
    from examples.triton_attention import paged_attention_triton  # noqa: PLC0415  # needs Triton

    bare = parts.with_attention(paged_attention_triton)
    steps[BARE_LOOP], steps["attention kernels alone"] = bare.loop(), bare.attention_calls()
    full = FullGraph.capture(ours, inputs)
    steps["full graph"] = full.step()
    steps["full graph, replay alone"] = full.replay
    return steps, {}


def add_torch_compile(
    steps: dict[str, Step],
    skipped: dict[str, str],
    workload: Workload,
    inputs: ModelInputs,
    modes: Sequence[str] = ("default", "reduce-overhead"),
) -> None:
    """The two usual modes; one that fails is skipped with its error."""
    for mode in modes:
        name = f"torch.compile {mode}"
        if mode == "reduce-overhead" and workload.device.type != "cuda":
            skipped[name] = NO_CUDA
            continue
        started = time.perf_counter()
        compiled = torch.compile(workload.model, mode=mode, dynamic=False, fullgraph=True)
        step = functools.partial(compiled, *inputs)
        try:
            step()
        except Exception as error:
            skipped[name] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        steps[name] = step
        say(f"{name}, batch {len(inputs[0])}: first call {time.perf_counter() - started:.1f} s")


def check_results(steps: dict[str, Step], expected: Tensor) -> dict[str, float]:
    """How far every result is from eager's, relative to its norm."""
    found = {}
    for name, step in steps.items():
        for _ in range(3):
            result = step()
        if isinstance(result, tuple | list):
            (result,) = result
        if not isinstance(result, Tensor):
            continue
        difference = result.float() - expected.float()
        error = (difference.norm() / expected.float().norm()).item()
        if not error <= _TOLERANCE:
            raise RuntimeError(f"{name} is off by {error:.3f}: it does not compute the same")
        found[name] = round(error, 6)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
