"""Serve a small Llama three ways - eager, ``torch.compile``, piecewise - and compare them.

Run it: ``python examples/quickstart.py`` or ``python -m examples.quickstart``. It needs no GPU.
It prints the tokens of every request, whether the three ways agree, what the piecewise backend
compiled and captured, the time of a decode step, and where the readable graphs are.
The exit status is 1 if piecewise produced other tokens than eager.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import piecewise_backend as pw
from examples.engine import Completion, Engine, ModelInputs, Request, Step, scratch_inputs
from examples.llama import PRESET_NAMES, Llama, LlamaConfig
from examples.paged_attention import PagedCache

CAPTURE_SIZES = [1, 2, 4, 8]
PROMPT_LENGTHS = (5, 9, 3, 6)
LATE_ARRIVAL_STEP = 3
BLOCK_SIZE = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    args = parse_args(argv)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    config = LlamaConfig.preset(args.config)
    dump_dir = args.dump_dir or Path(tempfile.mkdtemp(prefix="piecewise-dump-"))
    where = f"{args.config} model, {args.dtype}, {device.type}"
    with torch.no_grad():
        model = Llama(config, device=device, dtype=dtype, seed=args.seed)
        requests = make_requests(config.vocab_size, args.max_new_tokens, args.seed)
        cache = make_cache(config, requests, device, dtype)
        model.attach(cache)

        runs = {"eager": serve_twice(model, cache, model, requests)}
        default = torch.compile(model, fullgraph=True)
        runs["torch.compile"] = serve_twice(model, cache, default, requests)
        piecewise = compile_piecewise(model, cache, dump_dir, args.graph_impl)
        runs["piecewise"] = serve_twice(model, cache, piecewise, requests)

    print_tokens(runs["eager"][0], where)
    eps = torch.finfo(dtype).eps
    agreement = {way: compare(runs["eager"][0], run[0], eps) for way, run in runs.items()}
    for way in ("torch.compile", "piecewise"):
        print(f"{way} tokens equal eager's: {agreement[way]}")
    print(f"\n{pw.report(piecewise)}\n")
    print_step_times({way: steps for way, (_, steps) in runs.items()}, where)
    print(f"dumps: {dump_dir}")
    return 1 if agreement["piecewise"].errors else 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--config", choices=PRESET_NAMES, default="tiny")
    parser.add_argument("--device", default=default_device)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--dump-dir", type=Path, help="default: a new temporary folder")
    parser.add_argument(
        "--graph-impl", choices=("cuda", "emulated"), help="default: cuda on a GPU, else emulated"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.max_new_tokens < len(PROMPT_LENGTHS):
        parser.error(f"--max-new-tokens {args.max_new_tokens}: use {len(PROMPT_LENGTHS)} or more")
    return args


def make_requests(vocab_size: int, max_new_tokens: int, seed: int) -> list[Request]:
    """Random prompts of different lengths that end at different times; the last arrives late."""
    generator = torch.Generator().manual_seed(seed)
    last = len(PROMPT_LENGTHS) - 1
    return [
        Request(
            prompt=tuple(torch.randint(vocab_size, (length,), generator=generator).tolist()),
            max_new_tokens=max_new_tokens * (last + 1 - i) // (last + 1),
            arrival_step=LATE_ARRIVAL_STEP if i == last else 0,
        )
        for i, length in enumerate(PROMPT_LENGTHS)
    ]


def make_cache(
    config: LlamaConfig, requests: Sequence[Request], device: torch.device, dtype: torch.dtype
) -> PagedCache:
    """A cache that fits all requests at once, plus the scratch block and sequence."""
    blocks = [-(-(len(r.prompt) + r.max_new_tokens) // BLOCK_SIZE) for r in requests]
    return config.new_cache(
        num_blocks=1 + sum(blocks), max_seqs=1 + len(requests), max_blocks_per_seq=max(blocks),
        block_size=BLOCK_SIZE, device=device, dtype=dtype,
    )  # fmt: skip


def compile_piecewise(
    model: Llama, cache: PagedCache, dump_dir: Path, graph_impl: str | None
) -> Callable[..., Tensor]:
    """Compile with the piecewise backend, and do all compiling and capturing now."""
    # The kernel takes nothing from the host but shapes, so it may be part of a graph.
    pw.register_splitting_op("example::paged_attention", capture="always")
    device = cache.block_tables.device
    options: dict[str, object] = {
        "cudagraph_capture_sizes": CAPTURE_SIZES,
        "dump_dir": str(dump_dir),
        "graph_impl": graph_impl or ("cuda" if device.type == "cuda" else "emulated"),
    }
    compiled = torch.compile(model, backend="piecewise", fullgraph=True, options=options)

    def make_inputs(descriptor: pw.BatchDescriptor) -> ModelInputs:
        return scratch_inputs(descriptor.num_tokens, cache, model.config.vocab_size)

    pw.warmup(compiled, make_inputs)
    return compiled


def serve_twice(
    model: Llama, cache: PagedCache, forward: Callable[..., Tensor], requests: Sequence[Request]
) -> tuple[list[Completion], list[Step]]:
    """Serve once to get every compile out of the way, then again for tokens and times."""
    Engine(model, cache, forward).run(requests)
    engine = Engine(model, cache, forward)
    return engine.run(requests), engine.steps


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """How some completions compare with eager's, by request."""

    ties: tuple[int, ...]
    errors: tuple[int, ...]

    def __str__(self) -> str:
        if self.errors:
            return f"no, requests {self.errors} differ"
        return f"yes, up to ties in requests {self.ties}" if self.ties else "yes"


def compare(eager: Sequence[Completion], other: Sequence[Completion], eps: float) -> Agreement:
    """Look at the first token that differs in each request.

    Compiled kernels round differently, so where eager's two best logits are within rounding of
    each other either token is right, and what follows it is another text.
    """
    ties: list[int] = []
    errors: list[int] = []
    for index, (a, b) in enumerate(zip(eager, other, strict=True)):
        pairs = zip(a.tokens, b.tokens, a.margins, strict=True)
        margin = next((margin for x, y, margin in pairs if x != y), None)
        if margin is not None:
            (ties if margin <= 8 * eps else errors).append(index)
    return Agreement(tuple(ties), tuple(errors))


def print_tokens(completions: Sequence[Completion], where: str) -> None:
    """One line per request."""
    print(f"requests ({where}):")
    for index, completion in enumerate(completions):
        request = completion.request
        print(
            f"  {index}: {len(request.prompt)} prompt tokens, arrives at step "
            f"{request.arrival_step} -> {completion.tokens}"
        )


def print_step_times(steps: dict[str, list[Step]], where: str) -> None:
    """The median time of the decode steps, which are the same ones each way."""
    decode = {way: [s for s in timed if s.is_decode] for way, timed in steps.items()}
    sizes = [step.num_tokens for step in decode["eager"]]
    print(f"median of {len(sizes)} decode steps of {min(sizes)} to {max(sizes)} tokens ({where}):")
    for way, timed in decode.items():
        print(f"  {way:14} {statistics.median(s.seconds for s in timed) * 1e3:8.3f} ms")


if __name__ == "__main__":
    sys.exit(main())
