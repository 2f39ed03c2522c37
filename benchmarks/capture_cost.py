"""What do many captures cost in time and memory, and does depth cost compilations?

In:  nothing.
Out: seconds and memory of 51 sizes x 33 pieces, of the largest size alone, and of 51 sizes with
     graphs of whole steps beside them; the number of Inductor compilations of 2, 8, 32 and 80
     layers.

Each row is a process of its own, so that its pools are its own. Memory is counted three times:
in the graph pool of the allocator (the bar), in the whole allocator, and on the device, where
the executables of the graphs lie outside the allocator. All three count from the moment at
which the model is traced, compiled, and was run at the largest size.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import piecewise_backend as pw
from benchmarks.child import report_to_parent, run_child
from benchmarks.measure import RESULTS, Results, Row, print_table, say, synchronize
from benchmarks.workload import Workload, shape
from examples.engine import ModelInputs
from piecewise_backend.backend import piecewise

MODULE = "benchmarks.capture_cost"
GRID = tuple(pw.default_capture_sizes(256))
QUICK_GRID = (1, 2, 4, 8, 16)
DEPTHS = (2, 8, 32, 80)
QUICK_DEPTHS = (1, 2, 4)
NUM_DISTINCT = 3
PIECEWISE, BOTH = "piecewise", "full_and_piecewise"
COST_COLUMNS = (
    "what", "num_graphs", "capture_seconds", "phase_seconds",
    "pool_mib", "allocator_mib", "device_mib",
)  # fmt: skip
COMPILE_COLUMNS = ("what", "compiles_of_trace", "compiles", "warmup_seconds")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    if args.child:
        with torch.no_grad():
            report_to_parent(measure(args))
        return 0
    results = Results("capture_cost", torch.device(args.device), args.output)
    compare_costs(args, results)
    if not args.no_depths:
        count_compiles(args, results)
    say(results.summary())
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `--child` and what follows it are for `main` itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny models, few sizes")
    parser.add_argument("--no-depths", action="store_true", help="do not count compilations")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each process")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hidden", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if args.quick else RESULTS
    args.output = args.output or folder / "capture_cost.json"
    return args


def compare_costs(args: argparse.Namespace, results: Results) -> None:
    """All sizes against the largest alone."""
    grid = QUICK_GRID if args.quick else GRID
    layers, hidden = (2, 64) if args.quick else (32, 1024)
    rows = []
    for sizes, mode in ((grid, PIECEWISE), (grid[-1:], PIECEWISE), (grid, BOTH)):
        what = f"{len(sizes)} sizes x {layers + 1} pieces"
        what += ", and whole steps" if mode == BOTH else ""
        found = _run(args, layers, hidden, sizes, mode)
        rows.append({"what": what, "layers": layers, "hidden": hidden, **found})
        results.add(rows[-1])
        say(f"{what}: done")
    print_table(rows, COST_COLUMNS)
    many, one, _ = rows
    if "skipped" in many or "skipped" in one:
        return
    results.bar(f"seconds to capture {many['what']}", many["capture_seconds"], 3.0)
    if one["pool_mib"]:
        ratio = many["pool_mib"] / one["pool_mib"]
        results.bar(f"graph pool, {len(grid)} sizes / largest alone", ratio, 1.15)


def count_compiles(args: argparse.Namespace, results: Results) -> None:
    """Depth must not show in the number of compilations, nor must a batch of one token."""
    rows = []
    for layers in QUICK_DEPTHS if args.quick else DEPTHS:
        what = f"{layers} layers"
        found = _run(args, layers, 64 if args.quick else 512, (1, 8), "none")
        rows.append({"what": what, "layers": layers, **found})
        results.add(rows[-1])
        say(f"{what}: done")
    print_table(rows, COMPILE_COLUMNS)
    done = [row for row in rows if "skipped" not in row and row["layers"] > 1]
    for row in done:
        results.bar(f"Inductor compiles, {row['what']}", row["compiles"], NUM_DISTINCT)


def _run(
    args: argparse.Namespace, layers: int, hidden: int, sizes: Sequence[int], mode: str
) -> dict[str, Any]:
    given = ["--device", args.device, "--layers", str(layers), "--hidden", str(hidden)]
    given += ["--sizes", *map(str, sizes), "--mode", mode]
    return run_child(MODULE, ["--child", *given], timeout=args.timeout)


class Witness:
    """Makes warm-up inputs, and notes the state of things when the first trace is done."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.compiled: Any = None
        self.compiles = 0
        self.memory: Row = {}
        self.started = 0.0

    def __call__(self, descriptor: pw.BatchDescriptor) -> ModelInputs:
        """Inputs of this size."""
        if not self.started and (graphs := pw.report(self.compiled).graphs):
            self.compiles = graphs[0].counts["num_inductor_compiles"]
            self.memory = memory_mib(self.workload.device)
            self.started = time.perf_counter()
        return self.workload.warmup_inputs(descriptor)


def measure(args: argparse.Namespace) -> Row:
    """In a child: build, warm up, and count."""
    device = torch.device(args.device)
    head_dim = 64 if args.hidden >= 512 else 16
    num_kv_heads = min(8, args.hidden // head_dim)
    config = shape(args.layers, args.hidden, head_dim=head_dim, num_kv_heads=num_kv_heads)
    workload = Workload.build(config, device, 20)
    pw.register_splitting_op("example::paged_attention", capture="always")
    options = {
        "cudagraph_capture_sizes": args.sizes,
        "cudagraph_mode": args.mode,
        "graph_impl": "cuda" if device.type == "cuda" else "emulated",
    }
    witness = Witness(workload)
    compiled = torch.compile(workload.model, backend=piecewise, fullgraph=True, options=options)
    witness.compiled = compiled
    began = time.perf_counter()
    pw.warmup(compiled, witness, seal=False)
    with torch.no_grad():
        for size in args.sizes if args.mode == "none" else ():
            compiled(*witness(pw.BatchDescriptor(num_tokens=size)))
    synchronize(device)
    ended = time.perf_counter()
    (graph,) = pw.report(compiled).graphs
    after = memory_mib(device)
    return {
        "num_graphs": graph.counts["num_cudagraph_captured"],
        "compiles_of_trace": witness.compiles,
        "compiles": graph.counts["num_inductor_compiles"],
        "capture_seconds": round(graph.capture_seconds, 3),
        "phase_seconds": round(ended - witness.started, 3),
        "warmup_seconds": round(ended - began, 3),
        **{name: round(mib - witness.memory[name], 2) for name, mib in after.items()},
        "padding_unsafe": len(graph.padding_unsafe),
        "capture_errors": len(graph.capture_errors),
    }


def memory_mib(device: torch.device) -> Row:
    """Memory in graph pools, in the allocator, and on the device, all in MiB."""
    if device.type != "cuda":
        return {"pool_mib": 0.0, "allocator_mib": 0.0, "device_mib": 0.0}
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    pools = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return {
        "pool_mib": sum(segment["total_size"] for segment in pools) / 2**20,
        "allocator_mib": torch.cuda.memory_reserved(device) / 2**20,
        "device_mib": (total - free) / 2**20,
    }


if __name__ == "__main__":
    raise SystemExit(main())
