"""Ranks that compile one model, forked as the processes of `store_process` are."""

from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor

import piecewise_backend as pw
from tests.helpers import rows

NUM_RANKS = 2


def summed(x: Tensor) -> Tensor:
    """One piece that computes, waits for the other ranks, and computes."""
    return collectives.all_reduce(x.sin(), "sum", dist.group.WORLD) * 2


def summed_in_a_branch(x: Tensor) -> Tensor:
    """The same, where no dispatcher sees the collective."""
    return torch.cond(x.shape[0] + x.cos().max() > 0, summed, torch.cos, (x,)) + 1


def warm_up(
    tell: Connection, rank: int, folder: Path, tuning: str, model: Callable[[Tensor], Tensor]
) -> None:
    """Tells what was tuned, and whether calls are right."""
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(
        "gloo", meeting, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=30)
    )
    with torch.no_grad():
        compiled = pw.compile(
            model, cudagraph_capture_sizes=[4, 8], compile_sizes=[4], graph_impl="emulated",
            cache_dir=folder / "cache", tuning=tuning,
        )  # fmt: skip
        compiled.warmup(lambda descriptor: (rows(descriptor.num_tokens),))
        taken = pw.adopt_tuned(compiled, wait=30)
        is_right = torch.allclose(compiled(rows(4)), model(rows(4)))
    (graph,) = compiled.report().graphs
    tell.send((taken, graph.tunings, graph.background, is_right))
    dist.barrier()
    dist.destroy_process_group()
