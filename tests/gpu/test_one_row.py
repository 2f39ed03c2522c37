"""Linear layers of one token on a GPU: the kernel, its early launch, and versions that have it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import piecewise_backend as pw
from examples.llama import Llama, LlamaConfig
from piecewise_backend import candidates
from piecewise_backend.passes.ops.one_row import _on_cpu, runs_on
from tests.fused_ops import EPS
from tests.test_one_row import DTYPES, close, values, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

ops = torch.ops.piecewise
# Those of decoders; rows and columns that fill no tile; odd columns; the widest row.
SHAPES = [
    (2048, 2048), (8192, 2048), (2048, 8192), (4096, 14336), (6144, 4096), (4864, 896), (896, 4864),
    (33, 1000), (7, 99), (1, 8), (19, 32768),
]  # fmt: skip


STARTS_EARLY = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="kernels start early from compute capability 9.0 on",
)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.bfloat16) for shape in SHAPES),
        *((shape, torch.float16) for shape in [(8192, 2048), (33, 1000)]),
    ],
    ids=str,
)
def test_kernel(shape: tuple[int, int], has_norm: bool, dtype: torch.dtype) -> None:
    """Both ops against their reference: sums in another order, hence now and then a neighbour."""
    num_rows, num_columns = shape
    x, weight = values(1, num_columns, dtype=dtype).cuda(), weights(*shape, dtype=dtype).cuda()
    up, addend = weights(*shape, dtype=dtype, seed=1).cuda(), values(num_rows, dtype=dtype).cuda()
    norm = values(num_columns, dtype=dtype).cuda() if has_norm else None
    for got, expected in [
        (ops.one_row_linear(x, weight, None, norm, EPS), _on_cpu(x, weight, None, None, norm, EPS)),
        (
            ops.one_row_linear(x, weight, addend, norm, EPS),
            _on_cpu(x, weight, None, addend, norm, EPS),
        ),
        (ops.one_row_gated(x, weight, up, norm, EPS), _on_cpu(x, weight, up, None, norm, EPS)),
        (
            ops.one_row_gated(x, torch.cat([weight, up]), None, norm, EPS),
            _on_cpu(x, weight, up, None, norm, EPS),
        ),
    ]:
        close(got, expected)


def test_weights_that_are_not_aligned() -> None:
    """Rows of a matrix in the middle of memory, and values that start anywhere."""
    whole, x = weights(9, 129, dtype=torch.bfloat16).cuda(), values(1, 129).cuda()
    close(
        ops.one_row_linear(x[:, 1:], whole[:, 1:]),
        _on_cpu(x[:, 1:], whole[:, 1:], None, None, None, EPS),
    )
    close(ops.one_row_linear(x, whole[1:]), _on_cpu(x, whole[1:], None, None, None, EPS))


def test_one_launch() -> None:
    args = values(1, 512).cuda(), weights(64, 512).cuda(), None, values(512).cuda(), EPS
    ops.one_row_gated(*args)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        ops.one_row_gated(*args)
        torch.cuda.synchronize()
    kernels = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


@STARTS_EARLY
@pytest.mark.parametrize("hidden", [64, 1024, 4096])
def test_a_chain_of_nothing_else(hidden: int) -> None:
    """Each reads what was written one, two and four kernels before, and its memory is used again:
    whoever starts early must have waited for all of them."""
    from piecewise_backend.passes.ops.kernels.one_row import one_row  # noqa: PLC0415  # Triton

    length = 24
    x, norm = values(1, hidden).cuda(), values(hidden).cuda()
    square = [weights(hidden, hidden, seed=s).cuda() for s in range(3)]

    def chain(is_early: bool) -> list[Tensor]:
        found = [x, x, x, x]
        for number in range(length):
            weight, addend = square[number % 3], found[-2 if number % 2 else -4]
            found.append(one_row(found[-1], weight, None, addend, norm, EPS, None, is_early))
            if number % 5 == 4:  # its memory is free for the next one
                found[-4:] = [found[-1]] * 4
        return found[-1:]

    (late, expected), (early, got) = captured(lambda: chain(False)), captured(lambda: chain(True))
    for _ in range(200):
        x.normal_()
        late.replay()
        wanted = expected[0].clone()
        got[0].fill_(torch.nan)
        early.replay()
        assert torch.equal(got[0], wanted)


@STARTS_EARLY
@pytest.mark.parametrize("hidden", [64, 1024, 4096])
def test_early_launch_changes_nothing(hidden: int) -> None:
    """A chain of layers in one graph, many times, with new values, bit for bit.

    In between are a copy, a fill and a kernel of torch's, whose memory the next op reads or gets;
    a weight is written right in front of the op that reads it.
    """
    from piecewise_backend.passes.ops.kernels.one_row import one_row  # noqa: PLC0415  # Triton

    inner, layers = 2 * hidden, 6
    x, norm = values(1, hidden).cuda(), values(hidden).cuda()
    source = [weights(inner, hidden, seed=s).cuda() for s in range(3)]
    gate, up, down = (torch.empty_like(weight) for weight in source)
    out = weights(hidden, inner).cuda()

    def chain(is_early: bool) -> list[Tensor]:
        found, total = [], x
        for _ in range(layers):
            gate.copy_(source[0])
            gated = one_row(total, gate, up.copy_(source[1]), None, norm, EPS, None, is_early)
            total = one_row(gated, out, None, total, None, EPS, None, is_early)
            wide = one_row(total, down.copy_(source[2]), None, None, norm, EPS, None, is_early)
            scratch = torch.empty_like(total).fill_(torch.nan)
            total = one_row(wide, out, None, total, None, EPS, None, is_early)
            del scratch
            total = total * 0.5
            found += [gated, wide, total]
        return found

    (late, expected), (early, got) = captured(lambda: chain(False)), captured(lambda: chain(True))
    for _ in range(100):
        x.normal_()
        for weight in source:
            weight.mul_(-1.01)
        late.replay()
        wanted = [tensor.clone() for tensor in expected]
        for tensor in got:
            tensor.fill_(torch.nan)
        for weight in (gate, up, down):
            weight.fill_(torch.nan)
        early.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        if not wanted[-1].isfinite().all():
            raise AssertionError("the values grow too much to be compared")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_decoder_is_tuned_with_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of a layer is right, and its time is compared; no other effort is made."""
    monkeypatch.setattr(candidates, "EFFORTS", {"static": {}})
    config = LlamaConfig.preset("tiny", hidden_size=1024, intermediate_size=2048, head_dim=64)
    layer = Llama(config, device="cuda", dtype=dtype).layers[0]

    def model(attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden = layer.attention.project(attended)
        hidden, residual = layer.mlp_norm(hidden, residual)
        hidden, residual = layer.attention_norm(layer.mlp(hidden), residual)
        return layer.attention.qkv(hidden), residual

    def inputs(num_tokens: int) -> tuple[Tensor, Tensor]:
        return (
            values(num_tokens, 256, dtype=dtype).cuda(),
            values(num_tokens, 1024, dtype=dtype).cuda(),
        )

    assert runs_on(torch.device("cuda", torch.cuda.current_device()))
    compiled = pw.compile(
        model, splitting_ops=[], cudagraph_capture_sizes=[1, 2], compile_sizes=[1, 2]
    )
    pw.warmup(compiled, lambda descriptor: inputs(descriptor.num_tokens))
    tunings = pw.report(compiled).graphs[0].tunings
    assert {t.sizes: "one row" in t.microseconds for t in tunings} == {(1,): True, (2,): False}
    assert not any("one row" in t.failures for t in tunings)
    for size in (1, 2):
        for got, expected in zip(compiled(*inputs(size)), model(*inputs(size)), strict=True):
            torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
