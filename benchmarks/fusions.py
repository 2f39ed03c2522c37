"""Are the fused ops as fast as memory allows, and never slower than Inductor's own code?

In:  ops, hidden sizes, token counts.
Out: for each the time of the fused kernel, of what Inductor makes of the same plain torch function
     (`torch.compile(dynamic=False)`), and of eager; bars: inputs of 64 MiB and more at >= 0.9 of
     copy bandwidth, fused / Inductor <= 1.0 at every size.

Times are those of Note [Repeated calls] in `fused_cases`: launches cost all contenders the same.
Copy bandwidth is measured with a buffer of half the bytes that the call moves.

Note [Compiling ahead]
Two hundred Inductor compilations one after the other take minutes. So processes next to each other
compile everything first, into a cache directory that this process then reads. What they found by
timing on a shared device (Inductor's choice among a few tiles) is deleted, and timed again here.
"""

import argparse
import functools
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from benchmarks.child import report_to_parent, run_child
from benchmarks.fused_cases import OPS, FusedCase, check_same, make_case, repeated, rows_of_bytes
from benchmarks.measure import (
    RESULTS,
    Results,
    Row,
    Timing,
    copy_bandwidth,
    print_table,
    say,
    time_steps,
)

HIDDEN = (1024, 2048, 4096, 8192)
TOKENS = (1, 16, 256, 8192)
LARGE_BYTES = 2**28
MIN_LARGE_BYTES = 2**26
COLUMNS = ("op", "hidden", "tokens", "fused_us", "inductor_us", "eager_us", "ratio", "of_copy")
FUSED, INDUCTOR, EAGER = "fused", "inductor", "eager"
_STEP_SECONDS, _BYTES_PER_SECOND, _MOST_CALLS = 2e-4, 4e12, 50


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    device = torch.device(args.device)
    if args.compile_only:
        report_to_parent({"compiled": compile_all(args, device)})
        return 0
    results = Results("fusions", device, args.output)
    with torch.no_grad(), fresh_cache():
        if args.jobs > 1:
            compile_ahead(args)
        bandwidth = functools.cache(functools.partial(copy_bandwidth, device))
        for name in args.ops:
            for hidden in args.hidden:
                rows = list(measure(name, hidden, args, device, bandwidth))
                results.add(*rows)
                print_table(rows, COLUMNS)
                add_bars(results, rows)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    say(results.summary())
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="two ops, tiny sizes, few samples")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--hidden", nargs="+", type=int, default=list(HIDDEN))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--samples", type=int, help="per contender")
    parser.add_argument("--jobs", type=int, help="processes that compile ahead")
    parser.add_argument("--compile-only", action="store_true", help="fill the caches, time nothing")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    args.large_bytes = 2**16 if args.quick else LARGE_BYTES
    if args.quick:
        args.ops, args.hidden, args.tokens = [OPS[5], OPS[6]], [256], [1]
    args.samples = args.samples or (3 if args.quick else 5)
    args.jobs = args.jobs or (1 if args.quick else min(10, max(1, (os.cpu_count() or 2) - 2)))
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if args.quick else RESULTS
    args.output = args.output or folder / "fusions.json"
    return args


def sizes(name: str, hidden: int, args: argparse.Namespace) -> list[int]:
    """Token counts, and one that makes a large input."""
    return [*args.tokens, rows_of_bytes(name, hidden, args.large_bytes)]


def compiled(case: FusedCase) -> Callable[..., Any]:
    """Inductor's code for this case, which is run once."""
    torch._dynamo.reset()
    function = torch.compile(case.plain, dynamic=False, fullgraph=True)
    function(*case.args)
    return function


def compile_ahead(args: argparse.Namespace) -> None:
    """Fill the caches of this process. See Note [Compiling ahead]."""
    started = time.perf_counter()
    work = [(name, str(hidden)) for name in args.ops for hidden in args.hidden]
    shares = [work[start :: args.jobs] for start in range(args.jobs)]
    common = ["--device", args.device, "--compile-only", "--tokens", *map(str, args.tokens)]
    common += ["--quick"] if args.quick else []

    def compile_share(share: list[tuple[str, str]]) -> dict[str, Any]:
        # A share is given as pairs, which --ops and --hidden cannot say.
        env = {_PAIRS: json.dumps(share), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        return run_child("benchmarks.fusions", common, env=env, timeout=120)

    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(compile_share, [share for share in shares if share]))
    for result in found:
        if "skipped" in result:
            say(f"compiling ahead failed, so this takes longer: {result['skipped']}")
    for choice in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.best_config"):
        choice.unlink()
    seconds = time.perf_counter() - started
    say(f"{sum(r.get('compiled', 0) for r in found)} cases compiled ahead in {seconds:.1f} s")


_PAIRS = "BENCH_FUSIONS_PAIRS"


def compile_all(args: argparse.Namespace, device: torch.device) -> int:
    """In a process of its own: call both contenders once at every size."""
    count = 0
    for name, hidden in json.loads(os.environ[_PAIRS]):
        for num_tokens in sizes(name, int(hidden), args):
            case = make_case(name, int(hidden), num_tokens, device)
            with torch.no_grad():
                case.fused(*case.args)
                compiled(case)
            count += 1
    return count


def measure(
    name: str,
    hidden: int,
    args: argparse.Namespace,
    device: torch.device,
    bandwidth: Callable[[int], float],
) -> Iterator[Row]:
    """One op at one hidden size, all token counts."""
    for num_tokens in sizes(name, hidden, args):
        case = make_case(name, hidden, num_tokens, device)
        contenders = {FUSED: case.fused, INDUCTOR: compiled(case), EAGER: case.plain}
        if num_tokens <= max(args.tokens):
            for contender, call in contenders.items():
                check_same(case, contender, call)
        timings, num_calls = time_case(case, contenders, device, args.samples)
        microseconds = {n: t.median * 1e3 / num_calls for n, t in timings.items()}
        num_bytes = case.bytes_moved()
        copied = bandwidth(num_bytes // 2) if num_tokens > max(args.tokens) else None
        yield {
            "op": name,
            "hidden": hidden,
            "tokens": num_tokens,
            **{f"{n}_us": round(value, 3) for n, value in microseconds.items()},
            "ratio": round(timings[FUSED].over(timings[INDUCTOR]), 4),
            "num_bytes": num_bytes,
            "num_calls": num_calls,
            "num_samples": len(timings[FUSED].samples),
            "of_copy": round(num_bytes / (microseconds[FUSED] / 1e6) / copied, 4) if copied else "",
        }


def time_case(
    case: FusedCase,
    contenders: dict[str, Callable[..., Any]],
    device: torch.device,
    num_samples: int,
) -> tuple[dict[str, Timing], int]:
    """Time per step, and how many calls a step has."""
    # A step is about as long for every size: 0.2 ms where memory is the bound.
    num_calls = max(
        2, min(_MOST_CALLS, int(_STEP_SECONDS * _BYTES_PER_SECOND / case.bytes_moved()))
    )
    steps = {
        name: repeated(functools.partial(call, *case.args), device, num_calls)
        for name, call in contenders.items()
    }
    timings = time_steps(steps, device, num_samples=num_samples, seconds_per_sample=0.01)
    return timings, num_calls


def add_bars(results: Results, rows: Sequence[Row]) -> None:
    """For one op and hidden size: the large input against a copy, and the worst ratio."""
    where = f"{rows[0]['op']}, hidden {rows[0]['hidden']}"
    for row in rows:
        if row["of_copy"] and row["num_bytes"] >= MIN_LARGE_BYTES:
            name = f"{where}, {row['tokens']} tokens: time / that of copying as many bytes"
            results.bar(name, 1 / row["of_copy"], 1 / 0.9)
    worst = max(rows, key=lambda row: float(row["ratio"]))
    name = f"{where}: fused / Inductor, worst of {len(rows)} sizes ({worst['tokens']} tokens)"
    results.bar(name, worst["ratio"], 1.0)


if __name__ == "__main__":
    raise SystemExit(main())
