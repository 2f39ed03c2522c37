"""Processes that start variants of a model with a cache: `python -m tests.trace_process`.

Arguments: for each process, in their order, a JSON list of a folder and settings for the variants
it starts one after the other. The model is that of the package `shop` in the folder, and its traces
are in the `cache` there. Prints for each variant what was counted, and whether results are right.
"""

import contextlib
import importlib
import json
import os
import sys
import warnings
from typing import Any

import torch
from torch._dynamo import convert_frame

import piecewise_backend as pw
from tests.forked import at_a_time, tell, warm_torch
from tests.helpers import SPLIT_OPS, declare, rows

SIZES = (5, 4, 8, 3, 3, 3, 16, 2, 33, 1, 7, 7, 7)


def run(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Compile a variant of the model, and call it at several sizes."""
    for name in settings.get("imported again", ()):
        del sys.modules[name]
        importlib.import_module(name)
    shop = sys.modules["shop"]
    torch._dynamo.reset()
    torch.manual_seed(0)
    for name, value in settings.get("environment", {}).items():
        os.environ[name] = value
    for op, capture in settings.get("declare", {}).items():
        declare(capture, op)
    model = getattr(shop.model, settings.get("model", "Model"))(**settings.get("arguments", {}))
    dtype = getattr(torch, settings.get("dtype", "float32"))
    if isinstance(model, torch.nn.Module):
        model = model.to(dtype).requires_grad_(False)
    for path, value in settings.get("attributes", {}).items():
        holder, _, name = path.rpartition(".")
        if isinstance(value, str) and value.startswith("eval "):  # what JSON does not have
            value = eval(value.removeprefix("eval "))
        setattr(eval(holder, {"model": model, "shop": shop}), name, value)
    options = {
        "compiler": "eager",
        "graph_impl": "emulated",
        "splitting_ops": list(SPLIT_OPS),
        "cudagraph_capture_sizes": [4, 8, 16],
        "cache_dir": f"{folder}/cache",
    }
    before, num_frames = pw.compilation_counter.counts(), convert_frame.FRAME_COUNTER
    compiled = pw.compile(model, **options | settings.get("options", {}))
    mode = getattr(torch, settings.get("mode", "no_grad"), contextlib.nullcontext)
    is_right = True
    with mode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in settings.get("sizes", SIZES):
            x = rows(size, dtype=dtype)
            got, wanted = compiled(x), model(x)
            is_right &= got["count"] == wanted["count"] == size
            tolerance = 1e-5 if dtype is torch.float32 else 1e-2
            is_right &= torch.allclose(got["x"], wanted["x"], rtol=tolerance, atol=tolerance)
    after = pw.compilation_counter.counts()
    told = [str(w.message) for w in caught if "compilation cache" in str(w.message)]
    return {name: after[name] - before[name] for name in after} | {
        "frames": convert_frame.FRAME_COUNTER - num_frames,
        "is_right": bool(is_right),
        "warnings": told,
        "num_replays": sum(graph.num_replays for graph in compiled.report().graphs),
    }


def start(folder: str, *variants: dict[str, Any]) -> None:
    """Run the variants one after the other."""
    sys.path.insert(0, folder)
    importlib.import_module("shop.model")
    for variant in variants:
        tell(run(folder, variant))


def main() -> None:
    """Run the processes one after the other."""
    warm_torch()
    for text in sys.argv[1:]:
        at_a_time(start, json.loads(text))


if __name__ == "__main__":
    main()
