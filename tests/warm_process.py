"""Processes that compile models with a cache: `python -m tests.warm_process`.

Arguments: JSON lists of processes that run at the same time, one list after the other. A process is
a list too: the cache directory, sizes, and names of models. Each prints counters, and whether
results are right.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import piecewise_backend as pw
from tests.forked import at_a_time, tell, warm_torch
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


def start(cache: str, sizes: list[int], *names: str) -> None:
    """Compile the models one after the other, and call them at several sizes."""
    is_right = True
    for name in names:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = MODELS[name]()
        compiled = compile(model, compiler="inductor", cache_dir=cache)
        with torch.no_grad():
            for size in sizes:
                x = rows(size)
                result = compiled(*mark_dynamic((x,)))
                is_right &= torch.allclose(result, model(x), rtol=1e-5, atol=1e-6)
    counts = pw.compilation_counter
    found = {"compiled": counts.num_inductor_compiles, "loaded": counts.num_artifacts_loaded}
    tell(found | {"is_right": is_right})


def main() -> None:
    """Run the lists of processes."""
    warm_torch()
    for text in sys.argv[1:]:
        at_a_time(start, *json.loads(text))


if __name__ == "__main__":
    main()
