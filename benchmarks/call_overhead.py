"""What does a call cost outside of its plan, and does that grow with the number of parameters?

In:  nothing.
Out: microseconds of a call that computes nothing, for models of 30, 300 and 3,000 parameters:
     through Dynamo's guards, with guards dropped, with parameters out of the call as well, and
     ours. Bars: ours <= 5 us, flat in the number of parameters within 10 %, contract <= 3 us.

The other ways get a backend whose code returns a tensor at once. Ours is warmed up as always,
and then the plan of the size is replaced by one that returns a tensor at once: so what is left
is everything outside of the plan. What a plan itself spends on parameters - comparing their
addresses before the first replay - is a row of its own.
"""

import argparse
import functools
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

import piecewise_backend as pw
from benchmarks.measure import RESULTS, Results, Row, print_table, say
from piecewise_backend import _torch

NUM_PARAMETERS = (30, 300, 3000)
NUM_TOKENS = 8
WIDTH = 16
COLUMNS = ("what", "median_us", "min_us")
OURS, CONTRACT = "ours", "of that: contract and state"
_Key = TypeVar("_Key")
_NUM_SAMPLES = 41
_CALLS_PER_SAMPLE = 200


class Chain(nn.Module):
    """Adds up its parameters; four tensors come with a call."""

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        super().__init__()
        kind = {"device": device, "dtype": torch.float32}
        layers = (nn.Linear(WIDTH, WIDTH, **kind) for _ in range(num_parameters // 2))
        self.layers = nn.ModuleList(layers).requires_grad_(False)

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """All of shape (tokens, ...)."""
        total = self.layers[0].bias
        for layer in self.layers:
            total = total + layer.weight[0] + layer.bias
        return x + total + positions[:, None] + slots[:, None] + lengths[:, None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_args(argv)
    device = torch.device(args.device)
    results = Results("call_overhead", device, args.output)
    with torch.no_grad():
        for size in args.parameters:
            samples = sample_in_turns(contenders(size, device), args.samples)
            torch._dynamo.reset()
            rows = rows_of(samples)
            results.add(*({"parameters": size, **row} for row in rows))
            say(f"\n{size} parameters:")
            print_table(rows, COLUMNS)
            found = {row["what"]: row["median_us"] for row in rows}
            results.bar(f"{size} parameters: ours, us", found[OURS], 5.0)
            results.bar(f"{size} parameters: contract and state, us", found[CONTRACT], 3.0)
        fewest, most = min(args.parameters), max(args.parameters)
        ratio = growth(fewest, most, device, args.samples)
    results.bar(f"ours, {most} / {fewest} parameters", ratio, 1.1)
    say(results.summary())
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few samples, no model of 3,000")
    parser.add_argument("--parameters", type=int, nargs="+")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    args.parameters = args.parameters or (NUM_PARAMETERS[:2] if args.quick else NUM_PARAMETERS)
    args.samples = args.samples or (5 if args.quick else _NUM_SAMPLES)
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if args.quick else RESULTS
    args.output = args.output or folder / "call_overhead.json"
    return args


def contenders(num_parameters: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """All ways to call one model."""
    model, inputs = Chain(num_parameters, device).eval(), make_inputs(NUM_TOKENS, device)
    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(compiled, *inputs)
        for name, compiled in through_dynamo(model, inputs).items()
    }
    return calls | ours(model, inputs, device)


def growth(fewest: int, most: int, device: torch.device, num_samples: int) -> float:
    """Our call of the largest model over that of the smallest, both in one loop: machines are
    too noisy for samples that lie apart."""
    inputs = make_inputs(NUM_TOKENS, device)
    calls = {
        size: ours(Chain(size, device).eval(), inputs, device)[OURS] for size in (fewest, most)
    }
    samples = sample_in_turns(calls, num_samples)
    turns = zip(samples[most], samples[fewest], strict=True)
    return statistics.median(many / few for many, few in turns)


def sample_in_turns(
    calls: Mapping[_Key, Callable[[], object]], num_samples: int
) -> dict[_Key, list[float]]:
    """Microseconds of each."""
    samples: dict[_Key, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_samples):
            for name, call in calls.items():
                samples[name].append(_sample(call))
    finally:
        gc.enable()
    return samples


def rows_of(samples: dict[str, list[float]]) -> list[Row]:
    """One row per contender."""
    return [
        {
            "what": name,
            "median_us": round(statistics.median(found), 3),
            "min_us": round(min(found), 3),
        }
        for name, found in samples.items()
    ]


def make_inputs(num_tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """Four tensors with a token dimension."""
    x = torch.ones(num_tokens, WIDTH, device=device)
    return (x, *(torch.ones(num_tokens, device=device, dtype=torch.int64) for _ in range(3)))


def through_dynamo(model: Chain, inputs: Sequence[Tensor]) -> dict[str, Callable[..., Any]]:
    """`torch.compile` with a backend that does nothing; traced."""
    drop = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    compiled: dict[str, Callable[..., Any]] = {}
    for name, options, has_free_tensors in (
        ("guards", {}, False),
        ("guards dropped", drop, False),
        ("guards dropped, free tensors", drop, True),
    ):
        compiled[name] = torch.compile(
            model, backend=_backend_that_does_nothing(), fullgraph=True, options=dict(options)
        )
        with torch._dynamo.config.patch(install_free_tensors=has_free_tensors):
            compiled[name](*inputs)
    return compiled


def _backend_that_does_nothing() -> Callable[..., Any]:
    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        result = (torch.zeros(1),)
        return lambda *args: result

    return backend


def ours(
    model: Chain, inputs: Sequence[Tensor], device: torch.device
) -> dict[str, Callable[[], object]]:
    """Our call with an empty plan, and what it and the plan spend on the model's state."""
    graph_impl = "cuda" if device.type == "cuda" else "emulated"
    options: dict[str, Any] = {"cudagraph_capture_sizes": [NUM_TOKENS], "graph_impl": graph_impl}
    compiled = pw.compile(model, compiler="eager", splitting_ops=[], outputs="static", **options)
    compiled.warmup(lambda descriptor: make_inputs(descriptor.num_tokens, device))
    result = compiled(*inputs)
    arguments, prepared = compiled.entry.arguments, compiled.runtime.captures.prepared
    ((key, (_, rows, tally)),) = prepared.items()
    prepared[key] = (lambda args, rows: (result,), rows, tally)
    values = arguments.values
    tensors = [value for value in values if isinstance(value, torch.nn.Parameter)]
    addresses: list[int | None] = [tensor.data_ptr() for tensor in tensors]
    positions = list(range(len(tensors)))
    return {
        OURS: lambda: compiled(*inputs),
        CONTRACT: lambda: arguments.collect(values, model, *inputs),
        "in the plan: addresses": lambda: _torch.same_addresses(tensors, addresses, positions),
    }


def _sample(call: Callable[[], object]) -> float:
    """Microseconds of a call."""
    started = time.perf_counter()
    for _ in range(_CALLS_PER_SAMPLE):
        call()
    return (time.perf_counter() - started) * 1e6 / _CALLS_PER_SAMPLE


if __name__ == "__main__":
    raise SystemExit(main())
