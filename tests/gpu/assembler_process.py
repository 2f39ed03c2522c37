"""A process that runs a Triton kernel of its own before a product is tuned, and with the argument
"inductor" a function that Inductor compiles behind that: `python -m tests.gpu.assembler_process`.
Prints how many templates Triton found and compiled here.
"""

import collections
import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from triton import knobs

import piecewise_backend as pw

SIZE = 64


@triton.jit
def _add_one(x_ptr, count, block: tl.constexpr):
    offsets = tl.arange(0, block)
    inside = offsets < count
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, inside) + 1, inside)


def main() -> None:
    """Tune one product at one size."""
    found: collections.Counter[str] = collections.Counter()

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if "mm" in src.name:
            found["found" if cache_hit else "compiled"] += 1

    x = torch.zeros(SIZE, device="cuda")
    _add_one[(1,)](x, SIZE, block=SIZE)
    assert x.sum() == SIZE
    if "inductor" in sys.argv:
        assert torch.compile(lambda y: y.exp() + 1)(torch.zeros_like(x)).sum() == 2 * SIZE
    AsyncCompile.wait_pool_ready()  # else it is a matter of time who compiles
    weight = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)

    def model(rows: Tensor) -> Tensor:
        return torch.relu(rows @ weight)

    options = {"compile_sizes": [SIZE], "cudagraph_capture_sizes": [SIZE], "cache_dir": None}
    compiled = pw.compile(model, **options)
    rows = torch.randn(SIZE, 512, device="cuda", dtype=torch.bfloat16)
    knobs.compilation.listener = listen
    with torch.no_grad():
        compiled.warmup(lambda descriptor: (rows[: descriptor.num_tokens],))
    tried = compiled.report().graphs[0].tunings[0].microseconds
    print(json.dumps({**found, "tried": list(tried)}))


if __name__ == "__main__":
    main()
