"""A process that warms a model up on a GPU with a cache: `python -m tests.gpu.warm_process`.

Arguments: the cache directory, the version that is taken for the fastest - "measured" for the one
that is -, and the sizes to tune. Prints what was compiled, loaded, timed and decided, and a hash of
the results.
"""

import hashlib
import json
import os
import sys

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile

import piecewise_backend as pw
from piecewise_backend import ahead, tuning
from tests.fused_ops import EPS, plain_norm, plain_static
from tests.helpers import SPLIT_OPS, attn, declare

SIZES = [1, 16, 64]
HIDDEN = 1024


class Layers(nn.Module):
    """Norms that are quantised, products, attention."""

    def __init__(self) -> None:
        super().__init__()
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self.norms = nn.ParameterList(torch.rand(HIDDEN, **kind) for _ in range(3))
        self.weights = nn.ParameterList(
            torch.randn(HIDDEN, HIDDEN, **kind) / HIDDEN**0.5 for _ in range(3)
        )
        self.scale = nn.Buffer(torch.tensor([0.02], device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        """`x` is `[tokens, HIDDEN]`."""
        for norm, weight in zip(self.norms, self.weights, strict=True):
            y = plain_static(plain_norm(x, norm, EPS), self.scale)
            y = (y.to(x.dtype) * self.scale.to(x.dtype)) @ weight
            out = torch.empty_like(y)
            attn(y, y, y, out)
            x = x + torch.nn.functional.silu(out)
        return x


def main() -> None:
    """Warm up, call at every size, and say what that took."""
    cache, fastest, *sizes = sys.argv[1:]
    ahead._VERSIONS_PER_PROCESS = 1  # where there are to be processes, they are to do something
    if "POOL_IS_READY" in os.environ:  # else that is a matter of time
        AsyncCompile.wait_pool_ready()
    if fastest != "measured":
        tuning.replay_seconds = lambda functions, *_: {n: float(n != fastest) for n in functions}
    torch.manual_seed(0)
    model = Layers()
    declare("never", *SPLIT_OPS)
    options = {
        "cudagraph_capture_sizes": SIZES,
        "compile_sizes": [int(size) for size in sizes],
        "cache_dir": cache,
        "pass_config": {"fuse_rms_norm_static_quant": True},
    }
    compiled = pw.compile(model, **options)
    digest, worst = hashlib.sha256(), 0.0
    with torch.no_grad():
        inputs = {n: torch.randn(n, HIDDEN, device="cuda", dtype=torch.bfloat16) for n in SIZES}
        compiled.warmup(lambda descriptor: (inputs[SIZES[-1]][: descriptor.num_tokens],))
        for x in inputs.values():
            result, expected = compiled(x).float(), model(x).float()
            worst = max(worst, ((result - expected).norm() / expected.norm()).item())
            digest.update(result.cpu().numpy().tobytes())
    report = compiled.report().graphs[0]
    timed = [n for name, n in counters["inductor"].items() if name.startswith("benchmarking.")]
    counts = pw.compilation_counter
    print(json.dumps({
        "compiled": counts.num_inductor_compiles,
        "loaded": counts.num_artifacts_loaded,
        "benchmarks": sum(timed) + counters["inductor"]["coordesc_tuning_bench"],
        "matches": sum(r.matches for rs in report.passes.values() for r in rs if "fuse" in r.name),
        "kept": [[t.piece, list(t.sizes), t.kept] for t in report.tunings],
        "remembered": [t.is_remembered for t in report.tunings],
        "hash": digest.hexdigest(),
        "worst": worst,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
