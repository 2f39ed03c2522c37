"""A process that compiles a model with a cache: `python -m tests.warm_process`.

Arguments: the cache directory, sizes with commas between them, and which models. Prints counters,
and whether results are right.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import piecewise_backend as pw
from tests.helpers import Decoder, compile, mark_dynamic, rows

OPS = torch.ops.pwtest


def layered(scale: float = 0.5, first: int = 0) -> Callable[[Tensor], Tensor]:
    """Layers that differ in a name, an index and a scale; a softmax over tokens at the end."""

    def function(x: Tensor) -> Tensor:
        for layer in range(3):
            x = OPS.fresh(x, x, x)
            x = OPS.named(x, str(layer + first)) * (scale + layer)
        return OPS.fresh(x, x, x).softmax(0)

    return function


@torch.library.custom_op("pwwarm::graded", mutates_args=[])
def graded(x: Tensor) -> Tensor:
    """Tracing it asks how large the batch is, as code of some ops for long sequences does."""
    return x * (2 if x.shape[0] <= 16 else 3)


@graded.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x) if x.shape[0] <= 16 else x.new_empty(x.shape)


def linear(*, bias: bool = True, width: int = 8) -> Callable[[Tensor], Tensor]:
    """A layer with weights of its own."""
    weight, added = torch.randn(4, width), torch.randn(width) if bias else None
    return lambda x: x @ weight if added is None else x @ weight + added


MODELS = {
    "decoder": lambda: Decoder(3),
    "layered": layered,
    "layered with other constants": lambda: layered(0.25, first=5),
    "a constant": lambda: lambda x: x + 7,
    "another constant": lambda: lambda x: x + 9,
    "graded": lambda: lambda x: graded(x) + 1,
    "linear": linear,
    "without bias": lambda: linear(bias=False),
    "wider": lambda: linear(width=16),
}


def main() -> None:
    """Compile the models one after the other, and call them at several sizes."""
    cache, sizes, *names = sys.argv[1:]
    is_right = True
    for name in names:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = MODELS[name]()
        compiled = compile(model, compiler="inductor", cache_dir=cache)
        with torch.no_grad():
            for size in map(int, sizes.split(",")):
                x = rows(size)
                result = compiled(*mark_dynamic((x,)))
                is_right &= torch.allclose(result, model(x), rtol=1e-5, atol=1e-6)
    counts = pw.compilation_counter
    found = {"compiled": counts.num_inductor_compiles, "loaded": counts.num_artifacts_loaded}
    print(json.dumps(found | {"is_right": is_right}))


if __name__ == "__main__":
    main()
