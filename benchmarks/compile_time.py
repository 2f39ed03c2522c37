"""How long is the first call, against `torch.compile`?

In:  nothing.
Out: seconds from `torch.compile(model)` to the first result, of ours and of the default backend,
     at 32 layers (bar: ours <= 0.3 x) and at 8, for static and for dynamic traces; and of a second
     process that finds what a first one stored (bars: ours <= 0.2 x its first, no compilation).

Each sample is a process of its own with empty Inductor and Triton caches. The model has been
run eagerly before, so that libraries are loaded and the attention kernel is compiled: what is
timed is the trace, the compilation and one step. Both are called with the same inputs: as they
are, which Dynamo traces for the one batch size, and marked dynamic, for every batch size.

A second process of ours gets `cache_dir` and nothing else: its Inductor and Triton caches are
empty again. One of the default backend gets the Inductor and Triton caches that the first filled.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

import piecewise_backend as pw
from benchmarks.child import report_to_parent, run_child
from benchmarks.measure import RESULTS, Results, Row, print_table, say, synchronize
from benchmarks.workload import SHAPES, Workload, shape
from piecewise_backend.backend import piecewise

MODULE = "benchmarks.compile_time"
WAYS = ("piecewise", "torch.compile")
TRACES = ("static", "dynamic")
BAR_DEPTH = 32
CASES = ((32, "static"), (32, "dynamic"), (8, "dynamic"))
QUICK_CASES = ((2, "static"), (2, "dynamic"))
BATCH = 16
COLUMNS = ("what", "median_s", "samples_s", "build_and_eager_s", "compiles", "loaded")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    if args.child:
        with torch.no_grad():
            report_to_parent(measure(args))
        return 0
    results = Results("compile_time", torch.device(args.device), args.output)
    for layers, trace in QUICK_CASES if args.quick else CASES:
        if (not args.depths or layers in args.depths) and trace in args.traces:
            compare(layers, trace, args, results)
            if layers == BAR_DEPTH or args.quick:
                compare_warm(layers, trace, args, results)
    say(results.summary())
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `--child` and what follows it are for `main` itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one sample")
    parser.add_argument("--samples", type=int, help="processes per way at 32 layers")
    parser.add_argument("--depths", type=int, nargs="+", help="only these numbers of layers")
    parser.add_argument("--traces", choices=TRACES, nargs="+", default=TRACES)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each process")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--trace", choices=TRACES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.samples = args.samples or (1 if args.quick else 2)
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if args.quick else RESULTS
    args.output = args.output or folder / "compile_time.json"
    return args


def compare(layers: int, trace: str, args: argparse.Namespace, results: Results) -> None:
    """Both ways, in turns; only the depth of the bar is sampled repeatedly."""
    case = f"{layers} layers, {trace}"
    samples: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(args.samples if layers == BAR_DEPTH else 1):
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="benchmarks-cache-") as folder:
                samples[way].append(_run(way, layers, trace, args, Path(folder)))
            say(f"{way}, {case}: {samples[way][-1]}")
    rows = [_row(f"{way}, {case}", found) for way, found in samples.items()]
    results.add(*({"layers": layers, "trace": trace, **row} for row in rows))
    print_table(rows, COLUMNS)
    ours, default = rows
    if "skipped" in ours or "skipped" in default:
        return
    ratio = ours["median_s"] / default["median_s"]
    say(f"  {case}: ours / torch.compile = {ratio:.3f}")
    if layers == BAR_DEPTH:
        results.bar(f"first call, {case}: ours / torch.compile", ratio, 0.3)


def compare_warm(layers: int, trace: str, args: argparse.Namespace, results: Results) -> None:
    """Of each way a first process with empty caches, and a second one."""
    rows: dict[tuple[str, str], Row] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="benchmarks-cache-") as folder:
            for state in ("cold", "warm"):
                ours = way == "piecewise"
                caches = Path(folder) / state if ours else Path(folder)
                kept = Path(folder) / "kept" if ours else None
                found = _run(way, layers, trace, args, caches, kept)
                rows[way, state] = _row(f"{way}, {layers} layers, {trace}, {state}", [found])
    keys = {"layers": layers, "trace": trace}
    results.add(*({**keys, "state": state, **row} for (_, state), row in rows.items()))
    print_table(list(rows.values()), COLUMNS)
    cold, warm = rows["piecewise", "cold"], rows["piecewise", "warm"]
    if "skipped" in cold or "skipped" in warm:
        return
    where = f"second process, {layers} layers, {trace}"
    results.bar(f"{where}: compilations", warm["compiles"], 0)
    ratio = warm["median_s"] / cold["median_s"]
    say(f"  {where}: warm / cold = {ratio:.3f}")
    if layers == BAR_DEPTH:
        results.bar(f"{where}: first call, warm / cold", ratio, 0.2)


def _run(
    way: str,
    layers: int,
    trace: str,
    args: argparse.Namespace,
    caches: Path,
    cache_dir: Path | None = None,
) -> dict[str, Any]:
    """One sample.

    Args:
        caches: where torch and Triton keep theirs.
        cache_dir: where we do, if at all.
    """
    given = ["--child", way, "--layers", str(layers), "--trace", trace, "--device", args.device]
    given += ["--quick"] if args.quick else []
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "PIECEWISE_CACHE_DIR": str(cache_dir or "off"),
    }
    return run_child(MODULE, given, env=env, timeout=args.timeout)


def _row(what: str, found: Sequence[dict[str, Any]]) -> Row:
    done = [sample for sample in found if "skipped" not in sample]
    if not done:
        return {"what": what, "skipped": found[0]["skipped"]}
    seconds = [sample["seconds"] for sample in done]
    return {
        "what": what,
        "median_s": statistics.median(seconds),
        "samples_s": seconds,
        "build_and_eager_s": done[0]["eager_seconds"],
        "compiles": done[0]["compiles"],
        "loaded": done[0]["loaded"],
    }


def measure(args: argparse.Namespace) -> Row:
    """In a child: the first call."""
    device = torch.device(args.device)
    started = time.perf_counter()
    config = SHAPES["32x1024"] if args.layers == 32 else shape(args.layers, 1024)
    if args.quick:
        config = shape(args.layers, 64, head_dim=16, num_kv_heads=2)
    workload = Workload.build(config, device, 20)
    inputs = workload.decode_inputs(BATCH)
    pw.register_splitting_op("example::paged_attention")
    workload.model(*inputs)
    synchronize(device)
    eager_seconds = time.perf_counter() - started
    for rows in inputs if args.trace == "dynamic" else ():
        torch._dynamo.mark_dynamic(rows, 0)
    backend = piecewise if args.child == "piecewise" else "inductor"
    started = time.perf_counter()
    compiled = torch.compile(workload.model, backend=backend, fullgraph=True)
    compiled(*inputs)
    synchronize(device)
    seconds = time.perf_counter() - started
    ours, torchs = pw.compilation_counter, counters["inductor"]
    is_ours = args.child == "piecewise"
    return {
        "seconds": round(seconds, 3),
        "eager_seconds": round(eager_seconds, 3),
        "compiles": ours.num_inductor_compiles if is_ours else torchs["fxgraph_cache_miss"],
        "loaded": ours.num_artifacts_loaded if is_ours else torchs["fxgraph_cache_hit"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
