"""The Triton kernels of the fused ops against the ops on a CPU.

float8 values are equal, or neighbours in at most 1 in 1000 (and 8 more): the order of a sum and the
last bit of an exponential differ, which now and then rounds a value of 16 bits to its neighbour,
and with it, if it was the largest of its row, the scale.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from tests.fused_ops import (
    CASES,
    DTYPE_STEP,
    DTYPES,
    EPS,
    NAMES,
    Case,
    qk_arguments,
    steps_apart,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

ops = torch.ops.piecewise
SHARE, MOST = 1e-3, 8
SHAPES = [
    ((1, 1024), 128),
    ((16, 2048), 64),
    ((3, 5, 4096), 128),
    ((300, 640), 128),
    ((2000, 96), 32),
    ((8192,), 128),
    ((5, 5120), 128),
    ((1500, 1024), 128),
    ((4, 16384), 128),
    ((700, 7168), 128),
    ((2, 65536), 128),
    ((0, 1024), 128),
]
FEW_SHAPES = [((3, 5, 1024), 128), ((1200, 1536), 64), ((2, 16384), 128)]
each_case = pytest.mark.parametrize("case", CASES, ids=NAMES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def on_cpu(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments, with the same values."""
    moved: tuple[Any, ...] = pytree.tree_map_only(Tensor, Tensor.cpu, args)
    return moved


def compare(case: Case, args: tuple[Any, ...]) -> None:
    """The op on the device against the op on the CPU."""
    got, expected = case.run(args), case.run(on_cpu(args))
    allowed = MOST + SHARE * expected[0].numel()
    assert got[0].shape == expected[0].shape
    assert got[0].is_contiguous()
    apart = steps_apart(got[0].cpu(), expected[0])
    assert apart.numel() == 0 or apart.max() <= 1
    assert apart.count_nonzero() <= allowed
    if expected[1] is not None:
        assert got[1] is not None
        assert got[1].is_contiguous()
        compare_scales(got[1].cpu(), expected[1], args[0].dtype)
    if expected[2] is not None:
        assert got[2] is not None
        torch.testing.assert_close(got[2].cpu(), expected[2], rtol=0, atol=0, equal_nan=True)


def compare_scales(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """To 1e-6, except where the largest of a row was rounded to its neighbour, or was twice: before
    the weight, and after it."""
    assert got.shape == expected.shape
    error = ((got - expected).abs() / expected).nan_to_num()
    assert torch.equal(got.isnan(), expected.isnan())
    assert bool((error <= 2 * DTYPE_STEP[dtype] + 4e-6).all())
    assert (error > 1e-6).sum() <= MOST + SHARE * expected.numel()


@each_case
@pytest.mark.parametrize(("shape", "group_size"), SHAPES, ids=str)
def test_bfloat16(case: Case, shape: tuple[int, ...], group_size: int) -> None:
    compare(case, case.arguments(shape, torch.bfloat16, group_size=group_size, device="cuda"))


@pytest.mark.parametrize("case", [case for case in CASES if case.is_norm], ids=lambda c: c.name)
def test_a_weight_that_is_a_column(case: Case) -> None:
    args = case.arguments((16, 1024), torch.bfloat16, device="cuda")
    position = 2 if case.is_add else 1
    column = torch.stack([args[position], args[position] + 1], dim=1)[:, 0]
    compare(case, (*args[:position], column, *args[position + 1 :]))


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "group_size"), FEW_SHAPES, ids=str)
def test_other_dtypes(
    case: Case, dtype: torch.dtype, shape: tuple[int, ...], group_size: int
) -> None:
    compare(case, case.arguments(shape, dtype, group_size=group_size, device="cuda"))


def with_gaps(x: Tensor) -> Tensor:
    return torch.cat([x, x + 1], -1)[..., : x.shape[-1]]


def not_aligned(x: Tensor) -> Tensor:
    return torch.cat([x[..., :1], x, x[..., :1]], -1)[..., 1:-1]


def far_apart(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


@each_case
@pytest.mark.parametrize("prepare", [with_gaps, not_aligned, far_apart])
def test_strides(case: Case, prepare: Any) -> None:
    for shape in [(3, 5, 1024), (1300, 1024)]:
        compare(case, case.arguments(shape, torch.bfloat16, device="cuda", prepare=prepare))


@each_case
@each_dtype
def test_special_rows(case: Case, dtype: torch.dtype) -> None:
    """Zeros, one NaN, saturation, one infinity."""
    args = case.arguments((5, 1024), dtype, device="cuda", scale=1e-3)
    x = args[0]
    x[0] = 0
    x[1, 700] = torch.nan
    x[2] *= 3e3
    x[3, 100] = torch.inf
    if case.is_add:
        args[1][0] = 0
    compare(case, args)


@each_dtype
@pytest.mark.parametrize(
    ("lead", "heads"),
    [
        ((1,), (32, 8, 128)),
        ((7,), (16, 16, 64)),
        ((2, 5), (3, 1, 80)),
        ((1500,), (32, 8, 128)),
        ((3,), (4, 2, 256)),
        ((0,), (4, 1, 128)),
    ],
    ids=str,
)
def test_qk_norm_rope(
    lead: tuple[int, ...], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    for angle_dtype in (torch.float32, dtype):
        args = qk_arguments(lead, *heads, dtype, device="cuda", angle_dtype=angle_dtype)
        expected = ops.qk_norm_rope(*on_cpu(args))
        for got, wanted in zip(ops.qk_norm_rope(*args), expected, strict=True):
            assert got.is_contiguous()
            tolerance = max(2 * DTYPE_STEP[dtype], 1e-5)
            torch.testing.assert_close(got.cpu(), wanted, rtol=tolerance, atol=4 * tolerance)
            if dtype != torch.float32:
                assert (got.cpu() != wanted).sum() <= MOST + 1e-2 * wanted.numel()


def all_calls(shape: tuple[int, ...] = (37, 1024)) -> list[Any]:
    found = [
        pytest.param(case.op, case.arguments(shape, torch.bfloat16), id=case.name) for case in CASES
    ]
    qk = qk_arguments(shape[:-1], 8, 2, 128, torch.bfloat16)
    return [*found, pytest.param(ops.qk_norm_rope.default, qk, id="qk_norm_rope")]


def on_cuda(args: tuple[Any, ...]) -> tuple[Any, ...]:
    moved: tuple[Any, ...] = pytree.tree_map_only(Tensor, Tensor.cuda, args)
    return moved


@pytest.mark.parametrize(("op", "args"), all_calls())
def test_one_launch(op: Any, args: tuple[Any, ...]) -> None:
    args = on_cuda(args)
    op(*args)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        op(*args)
        torch.cuda.synchronize()
    kernels = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


@pytest.mark.parametrize(("op", "args"), all_calls())
def test_in_a_graph(op: Any, args: tuple[Any, ...]) -> None:
    """A replay reads what is in the inputs then, and gives what a call gives."""
    args = on_cuda(args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = op(*args)
    args[0].mul_(-1.5)
    graph.replay()
    for got, expected in zip(leaves(outputs), leaves(op(*args)), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def leaves(outputs: Any) -> list[Tensor]:
    return [output.contiguous() for output in pytree.tree_leaves(outputs)]


@pytest.mark.parametrize(("op", "args"), all_calls())
def test_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(op, on_cuda(args))


@pytest.mark.parametrize(("op", "args"), all_calls((5, 1024)))
def test_compiled_by_inductor(op: Any, args: tuple[Any, ...]) -> None:
    args = on_cuda(args)
    compiled = torch.compile(lambda *given: op(*given), fullgraph=True)
    for got, expected in zip(leaves(compiled(*args)), leaves(op(*args)), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize(("op", "args"), all_calls())
def test_on_another_device(op: Any, args: tuple[Any, ...]) -> None:
    moved = pytree.tree_map_only(Tensor, lambda t: t.to("cuda:1"), args)
    for got, expected in zip(leaves(op(*moved)), leaves(op(*on_cuda(args))), strict=True):
        assert got.device.index == 1
        assert torch.equal(got.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


def test_other_devices_are_refused() -> None:
    x, weight = torch.randn(2, 128, device="cuda"), torch.ones(128)
    with pytest.raises(ValueError, match="weight is on cpu and x on cuda:0; move it"):
        ops.rms_norm_dynamic_quant(x, weight, EPS)


@pytest.mark.parametrize("name", ["add_rms_norm_group_quant", "silu_mul_static_quant"])
def test_more_elements_than_32_bits_count(name: str) -> None:
    """The last rows of 2**31 elements and more are those of a call on them alone."""
    case = CASES[NAMES.index(name)]
    hidden, num_rows = 8192, 2**31 // 8192 + 3
    few = case.arguments((4, hidden), torch.bfloat16, device="cuda")
    many = list(few)
    for index in range(2 if case.is_add else 1):
        many[index] = torch.zeros(
            num_rows, few[index].shape[1], dtype=torch.bfloat16, device="cuda"
        )
        many[index][-4:] = few[index]
    for got, expected in zip(leaves(case.op(*many)), leaves(case.op(*few)), strict=True):
        assert torch.equal(got[-4:].view(torch.uint8), expected.view(torch.uint8))


def test_more_head_elements_than_32_bits_count() -> None:
    few = qk_arguments((4,), 32, 8, 128, torch.bfloat16, device="cuda")
    num_tokens = 2**31 // 4096 + 3
    q, k = (torch.zeros(num_tokens, n, 128, dtype=torch.bfloat16, device="cuda") for n in (32, 8))
    cos, sin = (torch.zeros(num_tokens, 64, device="cuda") for _ in range(2))
    for many, part in ((q, few[0]), (k, few[1]), (cos, few[4]), (sin, few[5])):
        many[-4:] = part
    outputs = ops.qk_norm_rope(q, k, few[2], few[3], cos, sin, EPS)
    for got, expected in zip(outputs, ops.qk_norm_rope(*few), strict=True):
        assert torch.equal(got[-4:], expected)
