"""The fused ops on a CPU: numbers, shapes, errors, and that torch may rely on what they declare."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from piecewise_backend.passes.ops import launch, qk_norm_rope, reference, rms_norm, silu_mul
from tests.fused_ops import (
    CASES,
    DTYPE_STEP,
    DTYPES,
    EPS,
    FP8,
    NAMES,
    Case,
    plain_qk,
    qk_arguments,
    steps_apart,
)

ops = torch.ops.piecewise
MIN_SCALE = 1.0 / (448.0 * 512.0)
CASE = {case.name: case for case in CASES}
each_case = pytest.mark.parametrize("case", CASES, ids=NAMES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_the_ops_are_these() -> None:
    assert len(NAMES) == 9
    for name in [*NAMES, "qk_norm_rope"]:
        schema = getattr(ops, name).default._schema
        assert not schema.is_mutable
        assert all(result.alias_info is None for result in schema.returns)


# Numbers


@each_dtype
@each_case
def test_equals_plain_torch_to_the_bit(case: Case, dtype: torch.dtype) -> None:
    for shape in [(5, 256), (2, 3, 384), (128,), (1, 4096)]:
        args = case.arguments(shape, dtype)
        for got, expected in zip(as_list(case.op(*args)), as_list(case.plain(args)), strict=True):
            assert_same(got, expected)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Case, tuple[Any, ...]]:
    case, dtype = draw(st.sampled_from(CASES)), draw(st.sampled_from(DTYPES))
    group_size = draw(st.sampled_from([1, 4, 32, 128]))
    hidden = group_size * draw(st.integers(1, 9))
    lead = draw(st.lists(st.integers(0, 4), max_size=3))
    magnitude = draw(st.sampled_from([0.0, 1e-6, 1e-2, 1.0, 30.0]))
    layout = draw(st.sampled_from([contiguous, with_gaps, transposed, every_other]))
    args = case.arguments(
        (*lead, hidden), dtype, group_size=group_size, seed=draw(st.integers(0, 99)),
        scale=draw(st.sampled_from([1e-4, 0.02, 1.0, 50.0])),
        prepare=lambda x: layout(x * magnitude),
    )  # fmt: skip
    return case, args


def contiguous(x: Tensor) -> Tensor:
    return x


def with_gaps(x: Tensor) -> Tensor:
    """Rows of a wider buffer."""
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]


def transposed(x: Tensor) -> Tensor:
    """Columns that are far apart."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def every_other(x: Tensor) -> Tensor:
    """Columns with gaps."""
    return torch.stack([x, x], dim=-1).flatten(-2)[..., ::2]


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(calls())
def test_close_to_float64(call: tuple[Case, tuple[Any, ...]]) -> None:
    """Within the rounding of float8, of the dtype, and no more."""
    case, args = call
    x, dtype = args[0], args[0].dtype
    before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    quantised, scales, new_residual = case.run(args)
    exact = case.exact(args)
    assert quantised.shape == exact.shape
    assert quantised.dtype == FP8
    assert quantised.is_contiguous()
    slack = 4 * DTYPE_STEP[dtype]
    # What rounding makes of the smallest numbers of a dtype, and a product of that.
    largest = x.abs().max().item() if x.numel() else 0.0
    smallest = torch.finfo(dtype).tiny * DTYPE_STEP[dtype] * (1 + largest)
    if case.scales == "static":
        (scale,) = [arg for arg in args if isinstance(arg, Tensor) and arg.numel() == 1][-1:]
        spread = scale.double()
    else:
        assert scales is not None
        assert scales.dtype == torch.float32
        assert scales.is_contiguous()
        size = args[-1] if case.scales == "group" else exact.shape[-1]
        groups = exact.unflatten(-1, (exact.shape[-1] // size, size))
        expected = (groups.abs().amax(-1) / 448).clamp_min(MIN_SCALE)
        torch.testing.assert_close(
            scales.double(), expected, rtol=slack + 1e-6, atol=smallest / 448
        )
        spread = scales.double().repeat_interleave(size, dim=-1)
    limited = exact.clamp(-448 * spread, 448 * spread)
    error = (quantised.double() * spread - limited).abs()
    # Half a step of 3 bits, half the smallest step, and what the dtype rounded before.
    bound = limited.abs() * (2.0**-4 + slack) + spread * 2.0**-10 + smallest
    assert bool((error <= bound * (1 + 1e-5) + exact.abs() * slack).all())
    if case.is_add:
        assert new_residual is not None
        assert_same(new_residual, (x.double() + args[1].double()).to(dtype))
        assert new_residual.is_contiguous()
    assert all(same(now, then) for now, then in zip(args, before, strict=True))


@each_dtype
@pytest.mark.parametrize("angle_dtype", [torch.float32, None], ids=["float32", "same"])
def test_qk_norm_rope(dtype: torch.dtype, angle_dtype: torch.dtype | None) -> None:
    for lead, heads in [
        ((3,), (4, 2, 64)),
        ((2, 5), (3, 1, 80)),
        ((), (5, 5, 2)),
        ((0,), (4, 1, 8)),
    ]:
        args = qk_arguments(lead, *heads, dtype, angle_dtype=angle_dtype or dtype)
        wide = tuple(arg.double() if isinstance(arg, Tensor) else arg for arg in args)
        q, k = ops.qk_norm_rope(*args)
        for got, expected, exact in zip(
            (q, k), plain_qk(args), plain_in_float64(wide), strict=True
        ):
            assert_same(got, expected)
            assert got.is_contiguous()
            tolerance = 6 * DTYPE_STEP[dtype]
            torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=8 * tolerance)


def plain_in_float64(args: tuple[Any, ...]) -> list[Tensor]:
    """One complex product for each pair."""
    q, k, q_weight, k_weight, cos, sin, eps = args
    turn = torch.complex(cos, sin)[..., None, :]
    rotated = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() * weight
        pairs = torch.complex(*normed.chunk(2, dim=-1)) * turn
        rotated.append(torch.cat([pairs.real, pairs.imag], dim=-1))
    return rotated


@each_dtype
@each_case
def test_rows_of_zeros(case: Case, dtype: torch.dtype) -> None:
    quantised, scales, _ = case.run(case.arguments((3, 256), dtype, prepare=torch.zeros_like))
    assert torch.equal(quantised.float(), torch.zeros(3, 256))
    if scales is not None:
        assert torch.equal(scales, torch.full_like(scales, MIN_SCALE))


@each_case
def test_too_large_saturates_and_nan_stays(case: Case) -> None:
    args = case.arguments((3, 256), torch.float32, scale=1e-3)
    args[0][0].mul_(1e4)
    args[0][1, 200] = math.nan
    quantised, scales, _ = case.run(args)
    assert quantised[0].float().isfinite().all()
    assert quantised[0].float().abs().max() == 448
    assert quantised[2].float().isfinite().all()
    is_nan = quantised[1].float().isnan()
    if case.is_norm or case.scales == "dynamic":
        assert bool(is_nan.all())
    else:
        assert is_nan.sum() == (1 if case.scales == "static" else 128)
    assert scales is None or (bool(scales[1].isnan().any()) and scales[0].isfinite().all())


def test_infinity() -> None:
    x = torch.tensor([[math.inf, 1.0, 1.0, 5.0, 1.0, 2.0, 1.0, 1.0]])
    quantised, scales = ops.silu_mul_dynamic_quant(x)
    assert scales.item() == math.inf
    assert quantised[0, 0].isnan()
    assert quantised[0, 1:].tolist() == [0.0, 0.0, 0.0]
    assert ops.silu_mul_static_quant(x[:, ::4], torch.tensor(1.0)).tolist() == [[448.0]]


def test_the_smallest_scale() -> None:
    """A row below 1/512 shares it and is still right; one above has its own."""
    for magnitude, expected in [(1e-3, MIN_SCALE), (1e-2, 1e-2 / 448)]:
        x = torch.cat([torch.full((1, 4), 100.0), torch.full((1, 4), magnitude / 100)], dim=-1)
        quantised, scales = ops.silu_mul_dynamic_quant(x)
        assert scales.item() == pytest.approx(expected, rel=1e-6)
        assert (quantised.float() * scales).tolist()[0] == pytest.approx([magnitude] * 4, rel=0.07)


@each_case
def test_no_rows(case: Case) -> None:
    for shape in [(0, 256), (2, 0, 256)]:
        outputs = as_list(case.op(*case.arguments(shape, torch.bfloat16)))
        assert [output.numel() for output in outputs] == [0] * len(outputs)
        assert all(output.shape[:-1] == shape[:-1] for output in outputs)


def test_steps_apart() -> None:
    a = torch.tensor([1.0, -1.0, 0.0, 0.0, math.nan, math.nan, 448.0]).to(FP8)
    b = torch.tensor([1.125, -1.0, -0.0, 2.0**-9, math.nan, 1.0, 416.0]).to(FP8)
    assert steps_apart(a, b).tolist() == [1, 0, 0, 1, 0, 255, 1]


# What torch relies on


def check_arguments() -> list[Any]:
    """Every op, with packed and with strided inputs."""
    found = [
        pytest.param(case.op, case.arguments((3, 256), dtype, prepare=layout), id=case.name)
        for case in CASES
        for dtype, layout in ((torch.bfloat16, contiguous), (torch.float32, with_gaps))
    ]
    qk = qk_arguments((3,), 4, 2, 8, torch.bfloat16)
    return [*found, pytest.param(ops.qk_norm_rope.default, qk, id="qk_norm_rope")]


@pytest.mark.parametrize(("op", "args"), check_arguments())
def test_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(op, args)


@pytest.mark.parametrize(("op", "args"), check_arguments())
def test_fake_outputs_are_like_real_ones(op: Any, args: tuple[Any, ...]) -> None:
    with FakeTensorMode() as mode:
        fakes = as_list(op(*pytree.tree_map_only(Tensor, mode.from_tensor, args)))
    for fake, real in zip(fakes, as_list(op(*args)), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert fake.stride() == real.stride()


@pytest.mark.parametrize(("op", "args"), check_arguments())
def test_outputs_are_fresh(op: Any, args: tuple[Any, ...]) -> None:
    storages = [t.untyped_storage().data_ptr() for t in (*as_list(args), *as_list(op(*args)))]
    inputs, outputs = set(storages[: len(as_list(args))]), storages[len(as_list(args)) :]
    assert len(set(outputs)) == len(outputs)
    assert not inputs & set(outputs)


@pytest.mark.parametrize(("op", "args"), check_arguments())
def test_traces_as_one_node(op: Any, args: tuple[Any, ...]) -> None:
    traced = make_fx(lambda *given: op(*given), tracing_mode="symbolic")(*args)
    calls = [n for n in traced.graph.nodes if n.op == "call_function"]
    assert [n.target for n in calls if isinstance(n.target, torch._ops.OpOverload)].count(op) == 1


def test_group_size_is_128_unless_given() -> None:
    x, weight = torch.randn(2, 256), torch.ones(256)
    assert ops.rms_norm_group_quant(x, weight, EPS)[1].shape == (2, 2)
    assert ops.add_rms_norm_group_quant(x, x, weight, EPS)[1].shape == (2, 2)
    assert ops.silu_mul_group_quant(x)[1].shape == (2, 1)


# Errors


X, W, S = torch.ones(2, 256), torch.ones(256), torch.ones(1)
Q, K, HALF = torch.ones(2, 4, 8), torch.ones(2, 1, 8), torch.ones(2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rms_norm_static_quant(X.double(), W, S, EPS), "x is torch.float64; .*float32"),
        (lambda: ops.rms_norm_static_quant(X.bfloat16(), W, S, EPS), r"\.to\(torch.bfloat16\)"),
        (lambda: ops.rms_norm_static_quant(X, W[:9], S, EPS), r"shape \(9,\); .*pass \[256\]"),
        (lambda: ops.rms_norm_static_quant(X, W[None], S, EPS), r"shape \(1, 256\)"),
        (lambda: ops.rms_norm_static_quant(X, W, torch.ones(2), EPS), "scale is .*one float32"),
        (lambda: ops.rms_norm_static_quant(X, W, S.half(), EPS), "scale is torch.float16"),
        (lambda: ops.rms_norm_static_quant(X[:, :0], W[:0], S, EPS), "empty rows"),
        (lambda: ops.rms_norm_static_quant(X[0, 0], W, S, EPS), "no dimension"),
        (lambda: ops.rms_norm_group_quant(X, W, EPS, 512), "256 .*group_size=512"),
        (lambda: ops.rms_norm_group_quant(X, W, EPS, 96), "96 is not a power of two"),
        (lambda: ops.rms_norm_group_quant(X, W, EPS, 0), "group_size=0"),
        (lambda: ops.silu_mul_group_quant(X[:, :192]), "96 .*group_size=128; choose"),
        (lambda: ops.silu_mul_static_quant(X[:, :3], S), "3 columns"),
        (lambda: ops.add_rms_norm_dynamic_quant(X, X[:1], W, EPS), r"residual .*\(1, 256\)"),
        (lambda: ops.add_rms_norm_dynamic_quant(X, X.half(), W, EPS), "residual is torch.float16"),
        (lambda: ops.rms_norm_dynamic_quant(torch.ones(1, 65537), W, EPS), "65537 .*65536"),
        (lambda: ops.silu_mul_dynamic_quant(torch.ones(1, 2 * 65537)), "65537 .*ops of their own"),
        (
            lambda: ops.rms_norm_dynamic_quant(X, W.to("meta"), EPS),
            "weight is on meta and x on",
        ),
        (lambda: ops.qk_norm_rope(Q, K[:1], Q[0, 0], Q[0, 0], HALF, HALF, EPS), "same tokens"),
        (lambda: ops.qk_norm_rope(Q, K.half(), Q[0, 0], Q[0, 0], HALF, HALF, EPS), "and dtype"),
        (lambda: ops.qk_norm_rope(Q, K, Q[0, 0], HALF[0], HALF, HALF, EPS), "k_weight has shape"),
        (lambda: ops.qk_norm_rope(Q, K, Q[0, 0], Q[0, 0], Q[:, 0], HALF, EPS), r"cos .*\(2, 4\)"),
        (lambda: ops.qk_norm_rope(Q, K, Q[0, 0], Q[0, 0], HALF, HALF.half(), EPS), "sin is"),
        (lambda: ops.qk_norm_rope(Q[..., :7], K, W, W, HALF, HALF, EPS), "heads of 7"),
    ],
)
def test_errors_name_value_and_fix(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_silu_mul_in_parts_has_no_limit() -> None:
    assert ops.silu_mul_static_quant(torch.ones(1, 2 * 65537), S).shape == (1, 65537)


@pytest.mark.parametrize("module", [rms_norm, silu_mul, qk_norm_rope])
def test_without_triton_the_reason_is_given(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if "passes.ops.kernels" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    module._kernel.cache_clear()
    with pytest.raises(ImportError, match="pip install triton"):
        module._kernel()
    module._kernel.cache_clear()


# Launches


@given(
    st.integers(1, 65536), st.integers(1, 100_000), st.sampled_from([2, 4]),
    st.sampled_from([0, 32, 128]),
)  # fmt: skip
@settings(max_examples=200, derandomize=True, deadline=None, database=None)
def test_launches(num_columns: int, num_rows: int, element_size: int, group_size: int) -> None:
    whole = launch.reduced_rows(num_columns, num_rows, element_size)
    assert whole.columns >= num_columns
    parts = launch.split_rows(num_columns, num_rows, element_size, group_size)
    assert group_size == 0 or parts.columns % group_size == 0
    heads = launch.halves_of_heads(min(num_columns, 256), num_rows, element_size)
    for tile in (whole, parts, heads):
        assert all(n & (n - 1) == 0 for n in (tile.rows, tile.columns, tile.num_warps))
        assert 1 <= tile.num_warps <= 32
        assert tile.rows * tile.columns <= 65536


def test_one_change_of_regime() -> None:
    """Token counts of one hidden size make two kernels, not more."""
    for choose in (launch.reduced_rows, functools.partial(launch.split_rows, group_size=128)):
        for hidden in (1024, 5120, 8192):
            tiles = [choose(hidden, n, 2) for n in range(1, 4000)]
            assert len({*tiles}) == 2
            assert len([1 for a, b in itertools.pairwise(tiles) if a != b]) == 1


def test_tiles_that_were_the_fastest_of_those_measured() -> None:
    """On an H200, by `benchmarks/fusion_tiles.py`."""
    for num_rows in (1, 131_072):
        tile = launch.reduced_rows(1024, num_rows, 2, has_residual=True)
        assert tile == launch.Launch(rows=1, columns=1024, num_warps=4)
    assert launch.reduced_rows(1024, 131_072, 2) == launch.Launch(4, 1024, 4)
    assert launch.split_rows(8192, 1, 2, 0) == launch.Launch(1, 512, 4)
    assert launch.split_rows(8192, 1, 2, 128) == launch.Launch(1, 512, 2)


@pytest.mark.parametrize(
    ("num_columns", "kind", "expected"),
    [
        (2048, {"is_gated": False, "has_norm": False}, launch.Launch(2, 2048, 8)),
        (2048, {"is_gated": True, "has_norm": True}, launch.Launch(1, 2048, 4)),
        (4096, {"is_gated": False, "has_norm": True}, launch.Launch(4, 4096, 8)),
        (4096, {"is_gated": True, "has_norm": True}, launch.Launch(1, 4096, 4)),
        (14336, {"is_gated": False, "has_norm": False}, launch.Launch(1, 16384, 8)),
    ],
)
def test_tiles_of_one_row(num_columns: int, kind: dict[str, bool], expected: Any) -> None:
    """The fastest of those measured, by `benchmarks/one_row.py`; a launch for any other."""
    assert launch.one_row(num_columns, **kind) == expected
    for columns in (1, 96, 1000, 8192, 28672, 32768):
        tile = launch.one_row(columns, **kind)
        assert tile.columns >= columns
        assert tile.num_warps & (tile.num_warps - 1) == tile.rows & (tile.rows - 1) == 0
        assert tile.rows * tile.columns / (32 * tile.num_warps) <= 64


def test_constants() -> None:
    assert torch.finfo(reference.FP8_DTYPE).max == reference.FP8_MAX
    assert reference.MIN_SCALE == MIN_SCALE


# Small verbs


def as_list(found: Any) -> list[Tensor]:
    return [item for item in pytree.tree_leaves(found) if isinstance(item, Tensor)]


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, NaN included."""
    if not isinstance(a, Tensor):
        return bool(a == b)
    if a.dtype == FP8:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return a.dtype == b.dtype and torch.equal(a, b)


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert same(got, expected)
