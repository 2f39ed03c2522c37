"""outputs="static": views without a copy, under the documented ownership."""

import gc

import pytest
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


@torch.no_grad()
def test_a_caller_may_write_the_buffers_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    original = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *args: (copies.append(1), original(*args))[1]
    )
    compiled = compile(_double, cudagraph_capture_sizes=[4, 8])
    pw.warmup(compiled, lambda d: (torch.arange(d.num_tokens * 2.0).view(-1, 2),))
    (buffer,) = pw.static_inputs(compiled, 3).values()
    assert buffer.shape == (3, 2)
    buffer.fill_(5)
    copies.clear()
    assert compiled(buffer).tolist() == [[11.0, 11.0]] * 3
    assert not copies
    assert compiled(torch.ones(3, 2)).tolist() == [[3.0, 3.0]] * 3
    assert copies == [1]


@torch.no_grad()
def test_there_are_no_buffers_for_sizes_without_graphs() -> None:
    with pytest.raises(pw.ContractError, match="no graphs serve 9 tokens"):
        pw.static_inputs(_warmed_up(), 9)
