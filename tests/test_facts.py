"""What a piece does to memory and to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # `_dtensor::shard_dim_alltoall`
from torch import Tensor

from piecewise_backend.canonical import identify
from piecewise_backend.facts import PieceFacts, find_facts
from piecewise_backend.sizes import find_token_dim
from tests.helpers import rows, split

LIBRARY = torch.library.Library("pwfacts", "DEF")
LIBRARY.define("summed(Tensor x) -> Tensor")


@torch.library.impl(LIBRARY, "summed", "CompositeImplicitAutograd")
def _(x: Tensor) -> Tensor:
    return all_reduce(x)


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def facts_of(function: Callable[..., Any]) -> PieceFacts:
    """Of the only piece."""
    with torch.no_grad():
        graph = split(function, rows(4))
    (instance,) = identify(graph.pieces)
    token_dim = find_token_dim(graph, [4, rows(4)])
    return find_facts(instance.distinct, token_dim, token_dim.hints([4, rows(4)]))


def all_reduce(x: Tensor) -> Tensor:
    name = dist.group.WORLD.group_name
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(x, "sum", name)
    )


def summed(x: Tensor) -> Tensor:
    return all_reduce(x.sin()) * 2


def summed_by_an_op(x: Tensor) -> Tensor:
    return torch.ops.pwfacts.summed(x.sin())


def summed_in_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, summed, torch.cos, (x,))


def summed_in_a_nested_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, summed_in_a_branch, torch.cos, (x,))


region = torch.compiler.nested_compile_region(summed)


def summed_in_a_region(x: Tensor) -> Tensor:
    return region(x.cos())


def legacy(x: Tensor) -> Tensor:
    ops = torch.ops.c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", "", [0], 1))


def sharded(x: Tensor) -> Tensor:
    name = dist.group.WORLD.group_name
    return torch.ops._dtensor.shard_dim_alltoall(x.sin(), 0, 1, name)


REDUCED = {"_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (torch.sin, set()),
        (summed, REDUCED),
        (summed_by_an_op, REDUCED),
        (summed_in_a_branch, REDUCED),
        (summed_in_a_nested_branch, REDUCED),
        (summed_in_a_region, REDUCED),
        (legacy, REDUCED | {"c10d_functional::all_reduce", "c10d_functional::wait_tensor"}),
        (sharded, {"_dtensor::shard_dim_alltoall"}),
    ],
)
def test_ops_that_wait_for_other_ranks(function: Callable[..., Any], names: set[str]) -> None:
    assert facts_of(function).collectives == names
