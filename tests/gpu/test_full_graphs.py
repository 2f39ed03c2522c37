"""Graphs of whole steps on real CUDA graphs."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend.batch import BatchDescriptor
from tests import helpers
from tests.gpu.test_cuda import MIB, compile, near, rows, warmed
from tests.helpers import (
    Decoder,
    declare,
)
from tests.runtime_helpers import fallbacks, modes, quiet, toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCALE = [1.0]
"""A number on the host, as sequence lengths are for some kernels."""


@torch.library.custom_op("pwtest::host_scaled", mutates_args=["out"])
def host_scaled(x: Tensor, out: Tensor) -> None:
    """Its kernel is launched with a number from the host."""
    torch.mul(x, SCALE[0], out=out)


@host_scaled.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


@torch.library.custom_op("pwtest::device_scaled", mutates_args=["out"])
def device_scaled(x: Tensor, out: Tensor, scale: Tensor) -> None:
    """Its kernel reads the number from the device."""
    torch.mul(x, scale, out=out)


@device_scaled.register_fake
def _(x: Tensor, out: Tensor, scale: Tensor) -> None:
    return None


@torch.library.custom_op("pwtest::waiting", mutates_args=["out"])
def waiting(x: Tensor, out: Tensor) -> None:
    """Reads a result on the host, which a recording cannot."""
    out.copy_(x * (2 if x.sum().item() > 0 else 1))


@waiting.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    helpers.KEPT.clear()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_modes_taking_turns(compiler: str) -> None:
    """One set of buffers, one pool."""
    declare("uniform_batch")
    model = Decoder().cuda()
    compiled = warmed(model, compiler)
    order = random.Random(0)
    outputs = []
    for call in range(60):
        n, is_uniform = order.randint(1, 16), order.random() < 0.5
        x = rows(n, seed=call)
        with pw.batch(uniform=is_uniform):
            outputs.append((compiled(x), model(x), f"call {call}: {n}"))
    for found, expected, where in outputs:  # they belong to the caller
        near(found, expected, where)
    assert set(modes(compiled)) == {"full", "piecewise"}
    assert sum(modes(compiled).values()) == 60
    assert not fallbacks(pw.report(compiled))


def test_a_number_from_the_host_is_frozen_in_a_graph() -> None:
    """Why such an op needs a hook."""
    declare("always", "pwtest::host_scaled")

    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.pwtest.host_scaled(x * 2, out)
        return out + 1

    SCALE[0] = 1.0
    compiled = warmed(model, splitting_ops=["pwtest::host_scaled"])
    SCALE[0] = 3.0
    x = rows(8)
    near(compiled(x), x * 6 + 1, "in pieces")
    with pw.batch(uniform=True):
        near(compiled(x), x * 2 + 1, "the number of the capture")


def test_a_hook_refreshes_what_a_graph_reads() -> None:
    scale = torch.ones((), device="cuda")
    seen: list[BatchDescriptor] = []

    def refresh(descriptor: BatchDescriptor) -> None:
        seen.append(descriptor)
        scale.fill_(SCALE[0])

    declare("always", "pwtest::device_scaled", before_replay=refresh)

    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.pwtest.device_scaled(x * 2, out, scale)
        return out + 1

    SCALE[0] = 1.0
    compiled = warmed(model, splitting_ops=["pwtest::device_scaled"])
    seen.clear()
    for number in (3.0, 5.0, 7.0):
        SCALE[0] = number
        x = rows(7)
        with pw.batch(uniform=True):
            near(compiled(x), x * 2 * number + 1, f"{number}")
    assert seen == [BatchDescriptor(num_tokens=8, num_reqs=8, uniform=True)] * 3


def test_an_op_that_cannot_be_recorded() -> None:
    declare("always", "pwtest::waiting")

    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.pwtest.waiting(x * 2, out)
        return out + 1

    with quiet():
        compiled = warmed(model, splitting_ops=["pwtest::waiting"])
    report = pw.report(compiled).graphs[0]
    assert report.captured_steps == ()
    assert set(report.step_errors) == {4, 8, 16}
    for n in (3, 8, 16):
        with pw.batch(uniform=True):
            near(compiled(rows(n)), model(rows(n)), f"{n}")
    assert modes(compiled) == {"piecewise": 3}
    torch.cuda.synchronize()
    torch.rand(4, device="cuda")
    other = warmed(toy)
    near(other(rows(5)), toy(rows(5)), "another model")


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
def test_workspaces_that_somebody_clears(mode: str) -> None:
    """`mode="reduce-overhead"` of another model does so; matrix products scratch there."""
    declare("always")
    width = 2048
    model = Decoder(3, width).cuda().bfloat16()
    compiled = compile(model, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 8, 64])
    pw.warmup(compiled, lambda d: (rows(d.num_tokens, width, dtype=torch.bfloat16),))
    inputs = [rows(n, width, dtype=torch.bfloat16) for n in (1, 5, 8, 64)]
    with pw.batch(uniform=True):
        before = [compiled(x) for x in inputs]
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.full((MIB,), torch.nan, device="cuda") for _ in range(64)]
        for x, expected in zip(inputs, before, strict=True):
            for _ in range(8):
                assert torch.equal(compiled(x), expected)
    assert all(other.isnan().all() for other in others)
    assert modes(compiled)["full"] == 4 + 4 * 8


def test_memory_is_shared_and_given_back() -> None:
    declare("always")
    model = Decoder(width=1024).cuda()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    pieces = warmed(model, width=1024, cudagraph_mode="piecewise")
    of_pieces = torch.cuda.memory_reserved() - before
    del pieces
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    # What is left is scratch memory of matrix products, which is kept for the next capture.
    before = torch.cuda.memory_reserved()
    both = warmed(model, width=1024)
    assert pw.report(both).graphs[0].captured_steps == (16, 8, 4)
    assert torch.cuda.memory_reserved() - before <= of_pieces + 2 * MIB
    del both
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_lazily_captured_sizes_run_in_pieces() -> None:
    declare("always")
    compiled = compile(toy)
    for call in range(4):
        x = rows(8, seed=call)
        torch._dynamo.mark_dynamic(x, 0)
        with pw.batch(uniform=True), quiet():
            near(compiled(x), toy(x), f"{call}")
    assert modes(compiled) == {"piecewise": 2}
