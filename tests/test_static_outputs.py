"""outputs="static": views without a copy, under the documented ownership."""

import gc

import torch

import piecewise_backend as pw
from tests.helpers import compile


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def _warmed_up():
    compiled = compile(_double, outputs="static", cudagraph_capture_sizes=[4, 8])
    pw.warmup(compiled, lambda d: (torch.arange(d.num_tokens * 2.0).view(-1, 2),))
    return compiled


@torch.no_grad()
def test_the_next_call_overwrites_a_static_output() -> None:
    compiled = _warmed_up()
    first = compiled(torch.ones(3, 2))
    assert first.tolist() == [[3.0, 3.0]] * 3
    compiled(torch.zeros(3, 2))
    assert first.tolist() == [[1.0, 1.0]] * 3


@torch.no_grad()
def test_a_static_output_outlives_the_model() -> None:
    kept = _warmed_up()(torch.ones(3, 2))
    torch._dynamo.reset()
    gc.collect()
    noise = [torch.full((64,), 7.0) for _ in range(200)]
    assert kept.tolist() == [[3.0, 3.0]] * 3
    assert len(noise) == 200


@torch.no_grad()
def test_a_slice_of_a_static_output_outlives_the_model() -> None:
    kept = _warmed_up()(torch.ones(3, 2))[1:]
    torch._dynamo.reset()
    gc.collect()
    noise = [torch.full((64,), 7.0) for _ in range(200)]
    assert kept.tolist() == [[3.0, 3.0]] * 2
    assert len(noise) == 200
