"""The Triton kernels on a CPU, through Triton's interpreter.

`TRITON_INTERPRET=1 pytest tests/test_fused_kernels.py`, where triton and numpy are installed. The
interpreter rounds float8 and bfloat16 otherwise than the hardware, so values are stored as float32
before the cast, and inputs are float32 and float16. `tests/gpu/test_fused_ops.py` has the rest.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from piecewise_backend.passes.ops import reference
from tests.fused_ops import (
    CASES,
    EPS,
    NAMES,
    Case,
    plain_norm,
    plain_qk,
    plain_silu_mul,
    qk_arguments,
)

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton and TRITON_INTERPRET=1", allow_module_level=True)

from piecewise_backend.passes.ops import one_row as one_row_ops
from piecewise_backend.passes.ops import rms_norm, silu_mul
from piecewise_backend.passes.ops.kernels import tiles
from piecewise_backend.passes.ops.kernels.one_row import one_row
from piecewise_backend.passes.ops.kernels.qk_norm_rope import qk_norm_rope
from piecewise_backend.passes.ops.launch import Launch

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def _stored_before_the_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "FP8_DTYPE", torch.float32)


def interpreted(case: Case, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The op's outputs from the kernel, what would be float8 as float32."""
    module, name = (rms_norm, case.name) if case.is_norm else (silu_mul, case.name)
    form = {
        "rms_norm_static_quant": rms_norm._static,
        "rms_norm_dynamic_quant": rms_norm._dynamic,
        "rms_norm_group_quant": rms_norm._group,
        "add_rms_norm_static_quant": rms_norm._add_static,
        "add_rms_norm_dynamic_quant": rms_norm._add_dynamic,
        "add_rms_norm_group_quant": rms_norm._add_group,
        "silu_mul_static_quant": silu_mul._static,
        "silu_mul_dynamic_quant": silu_mul._dynamic,
        "silu_mul_group_quant": silu_mul._group,
    }[name]
    return case.outputs(form(module._on_cuda, *args))


def scaled(case: Case, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same in plain torch."""
    x, *rest = args
    residual = None
    if case.is_add:
        residual = x = x + rest.pop(0)
    y = plain_norm(x, rest[0], rest[-2 if case.scales == "group" else -1]) if case.is_norm else None
    y = plain_silu_mul(x) if y is None else y
    if case.scales == "static":
        return y.float() * (1.0 / rest[1 if case.is_norm else 0]), None, residual
    size = args[-1] if case.scales == "group" else y.shape[-1]
    _, scales = reference.group_quant(y, size)
    return y.float() * (1.0 / scales.repeat_interleave(size, -1)), scales, residual


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_kernel_equals_plain_torch(case: Case, dtype: torch.dtype) -> None:
    """Many short rows, several rows a program, hidden sizes that are no power of two, one row."""
    for shape, group_size in [
        ((300, 8), 8), ((2, 3, 384), 128), ((1, 2048), 128), ((7, 640), 128), ((5, 96), 32),
        ((0, 256), 128), ((1, 5), 1), ((3, 1), 1),
    ]:  # fmt: skip
        args = case.arguments(shape, dtype, group_size=group_size)
        got, expected = interpreted(case, args), scaled(case, args)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=tolerance)
        if expected[1] is not None:
            torch.testing.assert_close(got[1], expected[1], rtol=tolerance, atol=0)
        assert expected[2] is None or torch.equal(got[2], expected[2])


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_strided_rows(case: Case) -> None:
    wide = case.arguments(
        (2, 3, 256), torch.float32, prepare=lambda x: torch.cat([x, x + 1], -1)[..., : x.shape[-1]]
    )
    apart = case.arguments((2, 3, 256), torch.float32, prepare=lambda x: x.mT.contiguous().mT)
    packed = case.arguments((2, 3, 256), torch.float32)
    expected = interpreted(case, packed)
    for args in (wide, apart):
        for got, wanted in zip(interpreted(case, args), expected, strict=True):
            assert got is wanted is None or torch.equal(got, wanted)


def strided(weight: Tensor) -> Tensor:
    """The same values, each with others in between."""
    return torch.stack([weight, weight + 1], dim=1)[:, 0]


@pytest.mark.parametrize("case", [case for case in CASES if case.is_norm], ids=lambda c: c.name)
def test_strided_weights(case: Case) -> None:
    args = case.arguments((3, 256), torch.float32)
    position = 2 if case.is_add else 1
    assert args[position].shape == (256,)
    for prepare in (strided, lambda weight: weight[:1].expand(256)):
        other = (*args[:position], prepare(args[position]), *args[position + 1 :])
        packed = (*args[:position], other[position].contiguous(), *args[position + 1 :])
        for got, wanted in zip(interpreted(case, other), interpreted(case, packed), strict=True):
            assert got is wanted is None or torch.equal(got, wanted)


def test_strided_weights_of_heads() -> None:
    q, k, q_weight, k_weight, *rest = qk_arguments((3,), 4, 2, 64, torch.float32)
    expected = qk_norm_rope(q, k, q_weight, k_weight, *rest)
    for got, wanted in zip(
        qk_norm_rope(q, k, strided(q_weight), strided(k_weight), *rest), expected, strict=True
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_zeros_and_nan(case: Case) -> None:
    args = case.arguments((3, 256), torch.float32)
    args[0][0] = 0.0
    args[0][1, 200] = torch.nan
    if case.is_add:
        args[1][0] = 0.0
    values, scales, _ = interpreted(case, args)
    assert not values[0].any()
    assert values[2].isfinite().all()
    assert values[1].isnan().sum() == (
        256 if case.is_norm or case.scales == "dynamic" else 1 if case.scales == "static" else 128
    )
    if scales is not None:
        assert bool((scales[0] == torch.tensor(reference.MIN_SCALE)).all())
        assert bool(scales[1].isnan().any())


@pytest.mark.parametrize("launch", [Launch(1, 512, 1), Launch(4, 512, 4), Launch(16, 512, 4)])
def test_any_tile_gives_the_same(launch: Launch) -> None:
    """What a benchmark may try out."""
    x, weight = torch.randn(11, 384), torch.randn(384)
    kernel = rms_norm._kernel()
    for scale, group_size in ((torch.tensor([0.5]), 0), (None, 0), (None, 128)):
        expected = kernel(x, x, weight, scale, 1e-5, group_size)
        for got, wanted in zip(
            kernel(x, x, weight, scale, 1e-5, group_size, launch), expected, strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@each_dtype
@pytest.mark.parametrize("angle_dtype", [torch.float32, None], ids=["float32", "same"])
def test_qk_norm_rope(dtype: torch.dtype, angle_dtype: torch.dtype | None) -> None:
    for lead, heads in [
        ((3,), (4, 2, 64)), ((2, 5), (3, 1, 80)), ((1,), (32, 8, 128)), ((17,), (5, 5, 2)),
        ((0,), (4, 1, 8)), ((), (2, 1, 8)),
    ]:  # fmt: skip
        args = qk_arguments(lead, *heads, dtype, angle_dtype=angle_dtype or dtype)
        for got, expected in zip(qk_norm_rope(*args), plain_qk(args), strict=True):
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=10 * tolerance)
            assert got.is_contiguous()


ONE_ROW_SHAPES = [(48, 96), (33, 384), (7, 2048), (5, 5), (1, 8), (260, 1000), (3, 20000)]


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", ONE_ROW_SHAPES, ids=str)
def test_one_row(shape: tuple[int, int], has_norm: bool, is_gated: bool) -> None:
    """Rows and columns that fill no tile, one row, wide rows; each kind of tile."""
    num_rows, num_columns = shape
    dtype = torch.float16
    x, norm_weight = torch.randn(1, 1, num_columns).to(dtype), torch.randn(num_columns).to(dtype)
    weight, up = (torch.randn(2, *shape) * num_columns**-0.5).to(dtype)
    addend = None if is_gated else torch.randn(1, num_rows).to(dtype)
    norm = (norm_weight if has_norm else None, EPS)
    got = one_row(x, weight, up if is_gated else None, addend, *norm)
    expected = one_row_ops._on_cpu(x, weight, up if is_gated else None, addend, *norm)
    assert got.shape == (1, 1, num_rows)
    torch.testing.assert_close(got, expected, rtol=4e-3, atol=4e-3)


def test_one_row_of_strided_arguments() -> None:
    def apart(given: Tensor) -> Tensor:
        return torch.stack([given, given + 1], dim=-1)[..., 0]

    x, weight, addend, norm_weight = (
        torch.randn(*shape).half() for shape in ((1, 96), (40, 96), (40,), (96,))
    )
    expected = one_row(x, weight, None, addend, norm_weight, EPS)
    got = one_row(apart(x), apart(weight), None, apart(addend), apart(norm_weight), EPS)
    assert torch.equal(got, expected)
