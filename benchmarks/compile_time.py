"""How long is the first call, against `torch.compile`?

In:  nothing.
Out: seconds from compiling a model to the first result, of ours and of the default backend, in a
     first process and in a second one that finds what the first stored, at several depths. Bars,
     at 32 layers: ours <= 0.3 x the default; a second process of ours <= 0.2 x its first, with no
     compilation and no trace; what is not Dynamo's trace, at 80 layers <= 1.5 x at 8.

Each sample is a process of its own, and one is run before them for nothing. The model has been run
eagerly before, so that libraries are loaded and the attention kernel is compiled: what is timed is
the trace, the compilation and one step. All are called with the same inputs: as they are, which
Dynamo traces for the one batch size, and marked dynamic, for every batch size; `pw.compile` always
traces for every one.

"piecewise" is `torch.compile(backend="piecewise")` and keeps nothing. "pw.compile" keeps its
`cache_dir` and nothing else: the Inductor and Triton caches of its second process are empty again.
A second process of the default backend gets the Inductor and Triton caches that the first filled.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import compilation_time_metrics, counters

import piecewise_backend as pw
from benchmarks.child import report_to_parent, run_child
from benchmarks.measure import RESULTS, Results, Row, print_table, say, synchronize
from benchmarks.workload import SHAPES, Workload, shape
from piecewise_backend.backend import piecewise

MODULE = "benchmarks.compile_time"
WAYS = ("torch.compile", "piecewise", "pw.compile")
KEEPING = ("torch.compile", "pw.compile")
TRACES = ("static", "dynamic")
BAR_DEPTH = 32
CASES = ((32, "static"), (32, "dynamic"), (8, "static"), (80, "static"))
QUICK_CASES = ((2, "static"), (3, "static"), (2, "dynamic"))
BATCH = 16
COLUMNS = ("what", "median_s", "samples_s", "trace_s", "build_and_eager_s", "compiles", "loaded",
           "traces")  # fmt: skip
# Ten times the layers have the same distinct pieces; what is left is cutting and storing a graph.
MOST_OF_DEPTH = 1.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    if args.child:
        with torch.no_grad():
            report_to_parent(measure(args))
        return 0
    results = Results("compile_time", torch.device(args.device), args.output)
    if not args.quick:
        _read_files(args)
    first_calls: dict[int, Row] = {}
    for layers, trace in args.cases:
        rows = compare(layers, trace, args, results)
        if trace == "static" and ("pw.compile", "cold") in rows:
            first_calls[layers] = rows["pw.compile", "cold"]
    _judge_depths(first_calls, results)
    say(results.summary())
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `--child` and what follows it are for `main` itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one sample")
    parser.add_argument("--samples", type=int, help="first processes per way at 32 layers")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--depths", type=int, nargs="+", help="only these numbers of layers")
    parser.add_argument("--traces", choices=TRACES, nargs="+", default=TRACES)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each process")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--trace", choices=TRACES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    there = QUICK_CASES if args.quick else CASES
    if unknown := set(args.depths or ()) - {layers for layers, _ in there}:
        parser.error(f"--depths {sorted(unknown)}: there are {sorted({n for n, _ in there})}")
    args.cases = [
        (layers, trace)
        for layers, trace in there
        if (not args.depths or layers in args.depths) and trace in args.traces
    ]
    args.samples = args.samples or (1 if args.quick else 2)
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if args.quick else RESULTS
    args.output = args.output or folder / "compile_time.json"
    return args


def _read_files(args: argparse.Namespace) -> None:
    """The first process of a machine reads torch from disk, seconds which are nobody's."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-cache-") as folder:
        _run(args.ways[0], 2, "static", args, Path(folder), "cold")


def compare(
    layers: int, trace: str, args: argparse.Namespace, results: Results
) -> dict[tuple[str, str], Row]:
    """All ways in turns: a first process each, and a second one of those that keep something.

    Returns:
        By way and state, what was found.
    """
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(args.samples if layers == BAR_DEPTH else 1):
        for way in args.ways:
            with tempfile.TemporaryDirectory(prefix="benchmarks-cache-") as folder:
                for state in ("cold", "warm") if way in KEEPING else ("cold",):
                    found = _run(way, layers, trace, args, Path(folder), state)
                    samples.setdefault((way, state), []).append(found)
                    results.add({"layers": layers, "trace": trace, "way": way, "state": state,
                                 "sample": found})  # fmt: skip
                    say(f"{way}, {layers} layers, {trace}, {state}: {found}")
    rows = {
        (way, state): _row(f"{way}, {layers} layers, {trace}, {state}", found)
        for (way, state), found in samples.items()
    }
    keys = {"layers": layers, "trace": trace}
    results.add(*({**keys, "way": way, "state": state, **r} for (way, state), r in rows.items()))
    print_table(list(rows.values()), COLUMNS)
    _judge(f"{layers} layers, {trace}", layers == BAR_DEPTH, rows, results)
    return rows


def _judge(case: str, has_bars: bool, rows: dict[tuple[str, str], Row], results: Results) -> None:
    done = {which: row for which, row in rows.items() if "skipped" not in row}

    def ratio(what: str, one: tuple[str, str], other: tuple[str, str], limit: float) -> None:
        if one in done and other in done:
            found = done[one]["median_s"] / done[other]["median_s"]
            say(f"  {what}, {case}: {found:.3f}")
            if has_bars:
                results.bar(f"{what}, {case}", found, limit)

    ratio("first call: ours / torch.compile", ("piecewise", "cold"), ("torch.compile", "cold"), 0.3)
    ratio("first call of a second process / of the first", ("pw.compile", "warm"),
          ("pw.compile", "cold"), 0.2)  # fmt: skip
    if (warm := done.get(("pw.compile", "warm"))) is not None:
        results.bar(f"second process: compilations, {case}", warm["compiles"], 0)
        results.bar(f"second process: traces, {case}", warm["traces"], 0)


def _judge_depths(rows: dict[int, Row], results: Results) -> None:
    """Is a first call the same at every depth, but for Dynamo's trace?"""
    rest = {n: row["median_s"] - row["trace_s"] for n, row in rows.items() if "skipped" not in row}
    if len(rest) > 1:
        fewest, most = min(rest), max(rest)
        what = f"first call of pw.compile without its trace: {most} layers / {fewest}"
        results.bar(what, rest[most] / rest[fewest], MOST_OF_DEPTH)


def _run(
    way: str,
    layers: int,
    trace: str,
    args: argparse.Namespace,
    folder: Path,
    state: str,
) -> dict[str, Any]:
    """One sample.

    Args:
        folder: for what is kept.
        state: "cold" or "warm", of the process.
    """
    caches = folder / state if way == "pw.compile" else folder
    given = ["--child", way, "--layers", str(layers), "--trace", trace, "--device", args.device]
    given += ["--quick"] if args.quick else []
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "PIECEWISE_CACHE_DIR": str(folder / "kept") if way == "pw.compile" else "off",
    }
    found = run_child(MODULE, given, env=env, timeout=args.timeout)
    if way == "pw.compile":  # what it keeps has paths: they are not to lead a second process here
        shutil.rmtree(caches, ignore_errors=True)
    return found


def _row(what: str, found: Sequence[dict[str, Any]]) -> Row:
    done = [sample for sample in found if "skipped" not in sample]
    if not done:
        return {"what": what, "skipped": found[0]["skipped"]}
    seconds = [sample["seconds"] for sample in done]
    return {
        "what": what,
        "median_s": statistics.median(seconds),
        "samples_s": seconds,
        "trace_s": statistics.median(sample["trace_seconds"] for sample in done),
        "build_and_eager_s": done[0]["eager_seconds"],
        "compiles": done[0]["compiles"],
        "loaded": done[0]["loaded"],
        "traces": done[0]["traces"],
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
    started = time.perf_counter()
    if args.child == "pw.compile":
        compiled = pw.compile(workload.model)
    else:
        backend = piecewise if args.child == "piecewise" else "inductor"
        compiled = torch.compile(workload.model, backend=backend, fullgraph=True)
    compiled(*inputs)
    synchronize(device)
    seconds = time.perf_counter() - started
    ours, torchs = pw.compilation_counter, counters["inductor"]
    is_ours = args.child != "torch.compile"
    return {
        "seconds": round(seconds, 3),
        "trace_seconds": round(_trace_seconds(), 3),
        "eager_seconds": round(eager_seconds, 3),
        "compiles": ours.num_inductor_compiles if is_ours else torchs["fxgraph_cache_miss"],
        "loaded": ours.num_artifacts_loaded if is_ours else torchs["fxgraph_cache_hit"],
        "traces": ours.num_graphs_seen if is_ours else counters["stats"]["unique_graphs"],
    }


def _trace_seconds() -> float:
    """Of this process's calls of Dynamo, what was not its backend's."""
    seconds = {name: sum(found) for name, found in compilation_time_metrics.items()}
    backend = seconds.get("OutputGraph.call_user_compiler", 0)
    return seconds.get("_compile.compile_inner", 0) - backend


if __name__ == "__main__":
    raise SystemExit(main())
