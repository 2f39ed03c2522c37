"""What fusions take together, what they must leave, and that numbers stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from piecewise_backend.passes import PassList, passes_for
from piecewise_backend.passes.ops.reference import MIN_SCALE
from tests.fused_ops import (
    CASES,
    DTYPE_STEP,
    DTYPES,
    EPS,
    FP8,
    NAMES,
    Case,
    plain_dynamic,
    plain_group,
    plain_norm,
    plain_qk,
    plain_rope,
    plain_silu_mul,
    plain_static,
    qk_arguments,
    steps_apart,
)
from tests.post_grad import Rewritten, rewritten

HALF_DTYPES = [torch.bfloat16, torch.float16]
Function = Callable[..., Any]


def as_list(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple | list) else [found]


def equal(found: Rewritten, function: Function, args: tuple[Any, ...]) -> None:
    """To the bit, shapes and layouts too."""
    with torch.no_grad():
        expected = as_list(function(*args))
    for a, b in zip(found.run(), expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        bits = torch.uint8 if a.dtype == FP8 else a.dtype
        assert torch.equal(a.view(bits), b.view(bits))


def near(found: Rewritten, function: Function, args: tuple[Any, ...], share: float) -> None:
    """float8 values are equal or neighbours, the latter at most in `share` of them.

    Scales differ in the dtype's rounding at most.
    """
    with torch.no_grad():
        expected = as_list(function(*args))
    step = DTYPE_STEP[args[0].dtype]
    for a, b in zip(found.run(), expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype == FP8:
            apart = steps_apart(a, b)
            assert apart.max() <= 1
            assert apart.count_nonzero() <= share * apart.numel()
        else:
            torch.testing.assert_close(a, b, rtol=2 * step if share > 0.01 else 3e-7, atol=0)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_arguments(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return values(6, 256, dtype=dtype), values(256, dtype=dtype, seed=1), torch.tensor([0.02])


# Each fusion by itself


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_each_fusion_by_itself(case: Case, dtype: torch.dtype) -> None:
    """Matched once, the ops gone and the new one there, equal to eager to the bit."""
    args = case.arguments((6, 256), dtype)

    def model(*args: Any) -> Any:
        return case.plain(args)

    found = rewritten(model, args, only=case.name)
    assert found.matches == {case.name: 1}
    assert len(found.calls(case.name)) == 1
    assert {"rsqrt", "exp", "amax", "clamp_min", "add", "mul"}.isdisjoint(found.ops())
    equal(found, model, args)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_of_all_fusions_the_right_one_matches(case: Case) -> None:
    for shape, num_dynamic in [((6, 256), 0), ((1, 256), 1), ((2, 3, 384), 1)]:
        args = case.arguments(shape, torch.bfloat16)

        def model(*args: Any) -> Any:
            return case.plain(args)

        found = rewritten(model, args, num_dynamic=num_dynamic)
        assert found.matches == {case.name: 1}, shape
        equal(found, model, args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("angle_dtype", [torch.float32, None], ids=["float32", "same"])
def test_qk_norm_and_rope(dtype: torch.dtype, angle_dtype: torch.dtype | None) -> None:
    args = qk_arguments((6,), 4, 2, 64, dtype, angle_dtype=angle_dtype or dtype)

    def model(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return tuple(
            halves_rotated(plain_norm(x, weight, EPS), cos, sin) for x, weight in ((q, qw), (k, kw))
        )

    found = rewritten(model, args[:-1], only="qk_norm_rope")
    assert found.matches == {"qk_norm_rope": 1}
    assert set(found.ops()) <= {"qk_norm_rope", "getitem"}
    equal(found, model, args[:-1])
    equal(found, lambda *tensors: plain_qk((*tensors, EPS)), args[:-1])


def halves_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.float()[..., None, :], sin.float()[..., None, :]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(rotated, dim=-1).to(x.dtype)


# Spellings


def hugging_face(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + eps)).to(dtype)


def with_a_product(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    return (torch.rsqrt(eps + torch.mean(wide * wide, dim=1, keepdim=True)) * wide).type_as(
        x
    ) * weight


def with_a_square(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    return (wide * wide.square().mean(-1, True).add(eps).rsqrt()).to(x.dtype) * weight


def of_torch(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def weight_in_float32(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * wide).to(x.dtype)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("norm", [hugging_face, with_a_product, with_a_square])
def test_norms_that_are_rounded_as_the_op_rounds(norm: Function, dtype: torch.dtype) -> None:
    args = norm_arguments(dtype)

    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return plain_static(norm(x, weight), scale)

    found = rewritten(model, args)
    assert found.matches == {"rms_norm_static_quant": 1}
    equal(found, model, args)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("quantise", ["static", "dynamic", "group"])
@pytest.mark.parametrize("norm", [of_torch, weight_in_float32])
def test_norms_that_are_rounded_once(norm: Function, quantise: str, dtype: torch.dtype) -> None:
    """Note [The same numbers] in `spellings`."""
    args = norm_arguments(dtype)
    model = quantised(norm, quantise)
    found = rewritten(model, args)
    expected = {f"rms_norm_{quantise}_quant": 1}
    # torch 2.11 takes the last rounding out, and what float16 is not rounded to has more range.
    assert found.matches == expected or (dtype == torch.float16 and not found.matches)
    near(found, model, args, share=1 / 25)


def quantised(norm: Function, quantise: str) -> Function:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = norm(x, weight)
        if quantise == "static":
            return plain_static(y, scale)
        return plain_dynamic(y) if quantise == "dynamic" else plain_group(y, 128)

    return model


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_a_residual_that_is_added_in_float32(dtype: torch.dtype) -> None:
    x, weight, scale = norm_arguments(dtype)
    args = (x, values(6, 256, dtype=dtype, seed=2), weight, scale)

    def model(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = x.float() + residual.float()
        y = (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)).to(dtype) * weight
        return plain_static(y, scale), total.to(dtype)

    found = rewritten(model, args)
    if dtype == torch.float16:  # the rounded sum may overflow where this one does not
        assert found.matches == {}
        big = (x * 0 + 40_000, x * 0 + 40_000, weight, scale)
        assert rewritten(model, big).run()[0].float().isfinite().all()
    else:
        assert found.matches == {"add_rms_norm_static_quant": 1}
    near(found, model, args, share=1 / 25)


CAST_TO_FP8: list[tuple[Function, float]] = [
    (lambda y, s: (y.float() * s.reciprocal()).clamp(-448, 448).to(FP8), 0),
    (lambda y, s: torch.clamp((1 / s) * y.float(), min=-448.0, max=448.0).to(FP8), 0),
    (lambda y, s: (y * s.reciprocal()).clamp(-448.0, 448.0).to(FP8), 0),
    (lambda y, s: (y * (1.0 / s)).clamp_min(-448.0).clamp_max(448.0).to(FP8), 0),
    (lambda y, s: (y.float() / s).clamp(-448.0, 448.0).to(FP8), 1e-3),
    (lambda y, s: (y / s).clamp(-448.0, 448.0).to(FP8), 1e-3),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("quantise", "share"), CAST_TO_FP8)
def test_static_quantisations(quantise: Function, share: float, dtype: torch.dtype) -> None:
    args = norm_arguments(dtype)

    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return quantise(plain_norm(x, weight, EPS), scale)

    found = rewritten(model, args)
    assert found.matches == {"rms_norm_static_quant": 1}
    near(found, model, args, share)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_scales_of_one_element(shape: tuple[int, ...]) -> None:
    x, weight, _ = norm_arguments()
    args = (x, weight, torch.full(shape, 0.02))

    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return (plain_norm(x, weight, EPS).float() * (1 / scale)).clamp(-448, 448).to(FP8)

    found = rewritten(model, args)
    assert found.matches == {"rms_norm_static_quant": 1}
    equal(found, model, args)


LARGEST: list[Function] = [
    lambda y: y.float().abs().amax(-1, keepdim=True),
    lambda y: y.abs().amax(dim=-1, keepdim=True).float(),
    lambda y: y.abs().max(dim=-1, keepdim=True).values.to(torch.float32),
    lambda y: y.float().abs().max(-1)[0].unsqueeze(-1),
    lambda y: y.abs().amax(-1).float()[..., None],
]
SHARES: list[tuple[Function, float]] = [
    (lambda amax: amax * (1 / 448), 0),
    (lambda amax: amax / 448.0, 1e-3),
]


@pytest.mark.parametrize("is_group", [False, True], ids=["rows", "groups"])
@pytest.mark.parametrize(("part", "share"), SHARES)
@pytest.mark.parametrize("largest", LARGEST)
def test_dynamic_quantisations(
    largest: Function, part: Function, share: float, is_group: bool
) -> None:
    args = norm_arguments()[:2]

    def model(x: Tensor, weight: Tensor) -> Any:
        y = plain_norm(x, weight, EPS)
        y = y.view(-1, 2, 128) if is_group else y
        scales = part(largest(y)).clamp(min=MIN_SCALE)
        return (y.float() / scales).clamp(-448.0, 448.0).to(FP8), scales

    found = rewritten(model, args)
    assert found.matches == {f"rms_norm_{'group' if is_group else 'dynamic'}_quant": 1}
    near(found, model, args, max(share, 1e-3))


def test_scales_without_the_last_dimension() -> None:
    """As `row_scale` gives them if nobody keeps it."""

    def model(x: Tensor, weight: Tensor) -> Any:
        y = plain_norm(x, weight, EPS).float()
        scales = (y.abs().amax(-1) * (1 / 448)).clamp(min=MIN_SCALE)
        return (y * (1 / scales.unsqueeze(-1))).clamp(-448, 448).to(FP8), scales

    args = norm_arguments()[:2]
    found = rewritten(model, args)
    assert found.matches == {"rms_norm_dynamic_quant": 1}
    equal(found, model, args)


@pytest.mark.parametrize("group_size", [32, 64, 256])
def test_groups_of_other_sizes(group_size: int) -> None:
    def model(x: Tensor, weight: Tensor) -> Any:
        return plain_group(plain_norm(x, weight, EPS), group_size)

    args = norm_arguments()[:2]
    found = rewritten(model, args, only="rms_norm_group_quant")
    assert [node.args[-1] for node in found.calls("rms_norm_group_quant")] == [group_size]
    equal(found, model, args)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 3e-4, 0.5])
def test_any_epsilon(eps: float) -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return plain_static(plain_norm(x, weight, eps), scale)

    args = norm_arguments()
    found = rewritten(model, args)
    assert [node.args[-1] for node in found.calls("rms_norm_static_quant")] == [eps]
    equal(found, model, args)


def test_each_layer_its_epsilon_and_its_scale() -> None:
    """Layers in a row, the residual of one being the input of the next."""

    def model(x: Tensor, residual: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Any:
        residual = x + residual
        x = plain_static(plain_norm(residual, weight, 1e-5), a).to(x.dtype).sin()
        residual = x + residual
        return plain_static(plain_norm(residual, weight, 1e-6), b), residual

    x, weight, scale = norm_arguments()
    args = (x, values(6, 256, seed=3), weight, scale, torch.tensor([0.5]))
    found = rewritten(model, args)
    assert found.matches == {"add_rms_norm_static_quant": 2}
    assert [node.args[-1] for node in found.calls("add_rms_norm_static_quant")] == [1e-5, 1e-6]
    equal(found, model, args)


def test_an_order_of_summands() -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = x.sin() + x
        return total.cos(), plain_static(weight * plain_norm(total, weight, EPS) / weight, scale)

    assert rewritten(model, norm_arguments()).matches == {}

    def fused(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = x.sin() + x
        return total.cos(), plain_static(hugging_face(total, weight), scale)

    found = rewritten(fused, norm_arguments())
    assert found.matches == {"add_rms_norm_static_quant": 1}
    equal(found, fused, norm_arguments())


@pytest.mark.parametrize("quantise", ["static", "dynamic"])
@pytest.mark.parametrize(
    "between",
    [
        lambda y: y.view(-1, 256),
        lambda y: y.reshape(y.shape[0], -1, 256),
        lambda y: y.view(2, -1, 256).contiguous(),
        lambda y: y.unsqueeze(0),
        lambda y: y[:, None],
    ],
)
def test_views_between_norm_and_quantisation(between: Function, quantise: str) -> None:
    model = quantised(lambda x, weight: between(plain_norm(x, weight, EPS)), quantise)
    args = norm_arguments()
    found = rewritten(model, args)
    assert found.matches == {f"rms_norm_{quantise}_quant": 1}
    equal(found, model, args)


def test_a_cast_of_the_input_may_serve_others() -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        wide = x.float()
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight
        return plain_static(y, scale), wide.sin()

    found = rewritten(model, norm_arguments())
    assert found.matches == {"rms_norm_static_quant": 1}
    equal(found, model, norm_arguments())


GATED: list[Function] = [
    lambda x: (lambda gate, up: F.silu(gate) * up)(*x.chunk(2, dim=-1)),
    lambda x: (lambda gate, up: up * F.silu(gate))(*x.split(128, dim=-1)),
    lambda x: (lambda gate, up: F.silu(gate) * up)(*x.tensor_split(2, dim=1)),
    lambda x: F.silu(x.narrow(-1, 0, 128)) * x[:, 128:],
]


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("gated", GATED)
def test_halves_of_a_gated_mlp(gated: Function, dtype: torch.dtype) -> None:
    args = norm_arguments(dtype)
    model = quantised(lambda x, weight: gated(x), "static")
    found = rewritten(model, args)
    assert found.matches == {"silu_mul_static_quant": 1}
    equal(found, model, args)


# Near misses


def norm(
    x: Tensor,
    weight: Tensor,
    *,
    mean: Function = lambda wide: wide.pow(2).mean(-1, keepdim=True),
    rsqrt: Function = lambda v: torch.rsqrt(v + EPS),
    end: Function = lambda y, weight: y * weight,
) -> Tensor:
    wide = x.float()
    return end((wide * rsqrt(mean(wide))).to(x.dtype), weight)


def test_what_near_misses_are_near_to() -> None:
    for quantise in ("static", "dynamic", "group"):
        found = rewritten(quantised(norm, quantise), norm_arguments())
        assert found.matches == {f"rms_norm_{quantise}_quant": 1}


NEAR_NORMS: dict[str, dict[str, Function]] = {
    "mean over tokens": {"mean": lambda wide: wide.pow(2).mean(0, keepdim=True)},
    "mean over all": {"mean": lambda wide: wide.pow(2).mean()},
    "mean over part": {"mean": lambda wide: wide[:, :128].pow(2).mean(-1, keepdim=True)},
    "sum": {"mean": lambda wide: wide.pow(2).sum(-1, keepdim=True)},
    "cube": {"mean": lambda wide: wide.pow(3).mean(-1, keepdim=True)},
    "absolute": {"mean": lambda wide: wide.abs().mean(-1, keepdim=True)},
    "epsilon outside": {"rsqrt": lambda v: torch.rsqrt(v) + EPS},
    "no epsilon": {"rsqrt": torch.rsqrt},
    "epsilon twice": {"rsqrt": lambda v: torch.rsqrt(v + EPS + EPS)},
    "root": {"rsqrt": lambda v: torch.sqrt(v + EPS)},
    "weight plus one": {"end": lambda y, weight: y * (weight + 1) + 1},
    "no weight": {"end": lambda y, weight: y},
    "two weights": {"end": lambda y, weight: y * weight * weight},
    "part of a weight": {"end": lambda y, weight: y * weight[:1]},
    "a weight of two dimensions": {"end": lambda y, weight: y * weight[None]},
    "float32 weight": {"end": lambda y, weight: y * weight.float()},
}


@pytest.mark.parametrize("quantise", ["static", "dynamic"])
@pytest.mark.parametrize("change", NEAR_NORMS.values(), ids=NEAR_NORMS)
def test_near_norms(change: dict[str, Function], quantise: str) -> None:
    model = quantised(lambda x, weight: norm(x, weight, **change), quantise)
    found = rewritten(model, norm_arguments())
    assert found.matches == {}
    assert not any("quant" in op for op in found.ops())


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("norm", [plain_norm, of_torch, weight_in_float32])
def test_a_weight_of_another_dtype(norm: Function) -> None:
    x, weight, scale = norm_arguments()
    for other in (torch.float32, torch.float16) if norm is not of_torch else (torch.float32,):
        model = quantised(lambda x, weight: norm(x, weight, EPS), "static")
        assert rewritten(model, (x, weight.to(other), scale)).matches == {}
        wide = quantised(lambda x, weight: norm(x.float(), weight, EPS), "static")
        assert rewritten(wide, (x, weight.to(other), scale)).matches == {}


def test_values_of_float64() -> None:
    x, weight, scale = norm_arguments(torch.float64)

    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
        return (y / scale).clamp(-448, 448).to(FP8)

    assert rewritten(model, (x, weight, scale)).matches == {}
    single = (x.float(), weight.float(), scale)
    assert rewritten(model, single).matches == {"rms_norm_static_quant": 1}


NEAR_QUANTISATIONS: dict[str, Function] = {
    "other bounds": lambda y, s: (y.float() / s).clamp(-240, 240).to(FP8),
    "one other bound": lambda y, s: (y.float() / s).clamp(-448, 240).to(FP8),
    "one bound": lambda y, s: (y.float() / s).clamp(max=448).to(FP8),
    "no bounds": lambda y, s: (y.float() / s).to(FP8),
    "other float8": lambda y, s: (y.float() / s).clamp(-448, 448).to(torch.float8_e5m2),
    "times scale": lambda y, s: (y.float() * s).clamp(-448, 448).to(FP8),
    "by columns": lambda y, s: (y.float() / s.expand(256).sin()).clamp(-448, 448).to(FP8),
    "by tokens": lambda y, s: (y.float() / y[:, :1].float()).clamp(-448, 448).to(FP8),
    "a scale of the dtype": lambda y, s: (y / s.to(y.dtype)).clamp(-448, 448).to(FP8),
    "a float64 scale": lambda y, s: (y.float() / s.double()).clamp(-448, 448).to(FP8),
    "rounded once more": lambda y, s: (y / s[0]).clamp(-448, 448).to(FP8),
    "a number": lambda y, s: (y.float() / 0.5).clamp(-448, 448).to(FP8),
    "scaled twice": lambda y, s: (y.float() / s / s).clamp(-448, 448).to(FP8),
    "clamped in the dtype": lambda y, s: (y.float() / s).to(y.dtype).clamp(-448, 448).to(FP8),
}


@pytest.mark.parametrize("quantise", NEAR_QUANTISATIONS.values(), ids=NEAR_QUANTISATIONS)
def test_near_static_quantisations(quantise: Function) -> None:
    for made in (lambda x, weight: plain_norm(x, weight, EPS), lambda x, weight: plain_silu_mul(x)):
        args = norm_arguments()
        if made(*args[:2]).shape[-1] != 256:
            args = (values(6, 512), *args[1:])

        def model(x: Tensor, weight: Tensor, scale: Tensor, made: Function = made) -> Tensor:
            return quantise(made(x, weight), scale)

        assert rewritten(model, args).matches == {}


def dynamically(
    y: Tensor,
    x: Tensor,
    *,
    largest: Function = lambda y, x: y.abs().amax(-1, keepdim=True),
    share: Function = lambda amax: amax * (1 / 448),
    least: float | None = MIN_SCALE,
    rows: Function = lambda y: y,
) -> tuple[Tensor, Tensor]:
    wide = rows(y).float()
    scales = share(largest(wide, x.float()))
    scales = scales if least is None else scales.clamp(min=least)
    return (wide / scales).clamp(-448, 448).to(FP8), scales


NEAR_DYNAMIC: dict[str, dict[str, Any]] = {
    "largest of a column": {"largest": lambda y, x: y.abs().amax(0, keepdim=True)},
    "largest of all": {"largest": lambda y, x: y.abs().amax((0, 1), keepdim=True)},
    "largest, sign kept": {"largest": lambda y, x: y.amax(-1, keepdim=True)},
    "largest of the input": {"largest": lambda y, x: x.abs().amax(-1, keepdim=True)},
    "largest of a part": {"largest": lambda y, x: y[:, :128].abs().amax(-1, keepdim=True)},
    "mean": {"largest": lambda y, x: y.abs().mean(-1, keepdim=True)},
    "another share": {"share": lambda amax: amax / 240},
    "a share of a share": {"share": lambda amax: amax / 448 / 2},
    "another least": {"least": 1e-12},
    "no least": {"least": None},
    "columns as rows": {"rows": lambda y: y.t()},
    "rows of several tokens": {"rows": lambda y: y.reshape(-1, 512)},
    "part of a row": {"rows": lambda y: y[:, :128]},
}


@pytest.mark.parametrize("change", NEAR_DYNAMIC.values(), ids=NEAR_DYNAMIC)
def test_near_dynamic_quantisations(change: dict[str, Any]) -> None:
    def model(x: Tensor, weight: Tensor, **change: Any) -> Any:
        return dynamically(plain_norm(x, weight, EPS), x, **change)

    args = norm_arguments()[:2]
    assert rewritten(model, args).matches == {"rms_norm_dynamic_quant": 1}
    assert rewritten(lambda x, weight: model(x, weight, **change), args).matches == {}


def test_as_many_tokens_as_columns() -> None:
    """A scale of each row that is applied to each column."""

    def model(x: Tensor, weight: Tensor) -> Any:
        y = plain_norm(x, weight, EPS).float()
        scales = (y.abs().amax(-1) / 448).clamp(min=MIN_SCALE)
        return (y / scales).clamp(-448, 448).to(FP8)

    args = (values(256, 256), values(256, seed=1))
    assert rewritten(model, args, num_dynamic=0).matches == {}


@pytest.mark.parametrize(("hidden", "group_size"), [(192, 96), (384, 384), (240, 80)])
def test_groups_that_are_no_power_of_two(hidden: int, group_size: int) -> None:
    def model(x: Tensor, weight: Tensor) -> Any:
        return plain_group(plain_norm(x, weight, EPS), group_size)

    args = (values(6, hidden), values(hidden, seed=1))
    assert rewritten(model, args, only="rms_norm_group_quant").matches == {}


def test_groups_that_do_not_divide_the_hidden_size() -> None:
    """128 divides two rows together, but not one."""

    def model(x: Tensor, weight: Tensor) -> Any:
        return plain_dynamic(plain_norm(x, weight, EPS).view(-1, 128))

    args = (values(6, 192), values(192, seed=1))
    assert rewritten(model, args, num_dynamic=0).matches == {}
    args = (values(6, 256), values(256, seed=1))
    assert rewritten(model, args, num_dynamic=0).matches == {"rms_norm_group_quant": 1}


SUMS: dict[str, Function] = {
    "more than once": lambda x, r: torch.add(x, r, alpha=2),
    "the same for all tokens": lambda x, r: x + r[0],
    "a number": lambda x, r: x + 1,
    "another dtype": lambda x, r: (x + r.float()).to(x.dtype),
    "a difference": lambda x, r: x - r,
}


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
def test_near_sums(add: Function) -> None:
    """The norm is fused with what follows, but not with what was added."""

    def model(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = add(x, residual)
        return plain_static(plain_norm(total, weight, EPS), scale), total

    x, weight, scale = norm_arguments()
    args = (x, values(6, 256, seed=2), weight, scale)
    assert rewritten(model, args, only="add_rms_norm_static_quant").matches == {}
    found = rewritten(model, args)
    assert found.matches == {"rms_norm_static_quant": 1}
    equal(found, model, args)


def test_a_scale_that_depends_on_the_sum() -> None:
    """One op cannot give what it needs itself."""

    def model(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        total = x + residual
        scale = total.float().abs().amax().reshape(1)
        return plain_static(plain_norm(total, weight, EPS), scale), total

    x, weight, _ = norm_arguments()
    args = (x, values(6, 256, seed=2), weight)
    assert rewritten(model, args, only="add_rms_norm_static_quant").matches == {}
    found = rewritten(model, args)
    assert found.matches == {"rms_norm_static_quant": 1}
    equal(found, model, args)


USED_TWICE: dict[str, Function] = {
    "the norm": lambda y, q, parts: (q, y.sin()),
    "the norm, returned": lambda y, q, parts: (q, y),
    "the norm, in another dtype": lambda y, q, parts: (q, y.float()),
    "the variance": lambda y, q, parts: (q, parts[0]),
    "before the weight": lambda y, q, parts: (q, parts[1].cos()),
}


@pytest.mark.parametrize("both", USED_TWICE.values(), ids=USED_TWICE)
def test_what_is_used_elsewhere_stays(both: Function) -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        inner = (x.float() * torch.rsqrt(variance + EPS)).to(x.dtype)
        y = inner * weight
        return both(y, plain_static(y, scale), (variance, inner))

    found = rewritten(model, norm_arguments())
    assert found.matches == {}
    equal(found, model, norm_arguments())


def test_a_norm_that_is_quantised_twice() -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = plain_norm(x, weight, EPS)
        return plain_static(y, scale), plain_static(y, scale * 2)

    assert rewritten(model, norm_arguments()).matches == {}


def test_results_of_another_layout() -> None:
    """Columns next to each other in memory would be so afterwards, too."""

    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return plain_static(plain_norm(x.t(), weight, EPS), scale)

    _, weight, scale = norm_arguments()
    args = (values(256, 6), weight, scale)
    assert rewritten(model, args, num_dynamic=0).matches == {}
    rows = (values(6, 512)[:, :256], weight, scale)
    found = rewritten(lambda x, w, s: model(x.t(), w, s), rows)
    assert found.matches == {"rms_norm_static_quant": 1}


NEAR_GATED: dict[str, Function] = {
    "up first": lambda x: x[..., :128] * F.silu(x[..., 128:]),
    "overlapping": lambda x: F.silu(x[..., :128]) * x[..., 64:192],
    "not all columns": lambda x: F.silu(x[..., :64]) * x[..., 64:128],
    "every other": lambda x: F.silu(x[..., ::2]) * x[..., 1::2],
    "halves of tokens": lambda x: F.silu(x[:3]) * x[3:],
    "gelu": lambda x: F.gelu(x[..., :128]) * x[..., 128:],
    "sigmoid": lambda x: F.sigmoid(x[..., :128]) * x[..., 128:],
    "silu of both": lambda x: F.silu(x[..., :128]) * F.silu(x[..., 128:]),
    "in float32": lambda x: F.silu(x[..., :128].float()) * x[..., 128:].float(),
    "of two tensors": lambda x: F.silu(x[..., :128]) * x.sin()[..., 128:],
}


@pytest.mark.parametrize("gated", NEAR_GATED.values(), ids=NEAR_GATED)
@pytest.mark.parametrize("quantise", ["static", "dynamic"])
def test_near_gated_mlps(gated: Function, quantise: str) -> None:
    model = quantised(lambda x, weight: gated(x), quantise)
    assert rewritten(model, norm_arguments(), num_dynamic=0).matches == {}


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, rotate: Function | None = None, narrow: bool = False
) -> Tensor:
    first, second = (x if narrow else x.float()).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    made = rotate or (lambda a, b, c, s: torch.cat([a * c - b * s, b * c + a * s], dim=-1))
    return made(first, second, cos, sin).to(x.dtype)


def heads(
    change: dict[str, Any] | None = None, k_change: dict[str, Any] | None = None
) -> tuple[Function, tuple[Any, ...]]:
    """Queries and keys with something changed in both, or in keys only."""
    changes = [change or {}, {**(change or {}), **(k_change or {})}]

    def model(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor) -> Any:
        results = []
        for x, weight, given in zip((q, k), (qw, kw), changes, strict=True):
            options = dict(given)
            y = plain_norm(x, weight, options.pop("eps", EPS))
            c, s = options.pop("angles", lambda c, s: (c, s))(cos, sin)
            results.append(rope(y, c, s, **options))
        return tuple(results)

    return model, qk_arguments((6,), 4, 2, 64, torch.bfloat16)[:-1]


@pytest.mark.parametrize("angle_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotations_that_are_not_float32_throughout(angle_dtype: torch.dtype) -> None:
    """With float32 angles by promotion: to the bit. All in bfloat16: Note [The same numbers]."""
    model, args = heads({"narrow": True})
    args = (*args[:4], *(arg.to(angle_dtype) for arg in args[4:]))
    found = rewritten(model, args)
    assert found.matches == {"qk_norm_rope": 1}
    if angle_dtype == torch.float32:
        equal(found, model, args)
    within_three_units(found.run(), model(*args))


def within_three_units(found: list[Tensor], wanted: Sequence[Tensor]) -> None:
    """Of bfloat16, in the largest of its head."""
    for got, expected in zip(found, wanted, strict=True):
        largest = expected.float().abs().amax(-1, keepdim=True)
        assert got.shape == expected.shape
        assert bool(((got.float() - expected.float()).abs() <= 3 * 2**-8 * largest).all())


def test_rotations_of_a_norm_that_is_rounded_once() -> None:
    """Heads normalised by `F.rms_norm`: Note [The same numbers]."""

    def model(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return tuple(rope(F.rms_norm(x, (64,), w, EPS), cos, sin) for x, w in ((q, qw), (k, kw)))

    args = qk_arguments((48,), 4, 2, 64, torch.bfloat16)[:-1]
    found = rewritten(model, args)
    assert found.matches == {"qk_norm_rope": 1}
    within_three_units(found.run(), model(*args))


NEAR_ROTATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the other way": (
        {"rotate": lambda a, b, c, s: torch.cat([a * c + b * s, b * c - a * s], dim=-1)}, {},
    ),
    "interleaved": (
        {"rotate": lambda a, b, c, s: torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)},
        {},
    ),
    "halves swapped": (
        {"rotate": lambda a, b, c, s: torch.cat([b * c + a * s, a * c - b * s], dim=-1)}, {},
    ),
    "other angles for keys": ({}, {"angles": lambda c, s: (c.sin(), s)}),
    "another epsilon for keys": ({}, {"eps": 1e-3}),
    "the angles of one token": ({"angles": lambda c, s: (c[:1], s[:1])}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_ROTATIONS)
def test_near_rotations(name: str) -> None:
    model, args = heads()
    assert rewritten(model, args).matches == {"qk_norm_rope": 1}
    model, args = heads(*NEAR_ROTATIONS[name])
    assert rewritten(model, args).matches == {}


def test_queries_alone() -> None:
    model, args = heads()
    assert rewritten(lambda *args: model(*args)[0], args).matches == {}


def test_cosines_of_whole_heads_may_have_two_halves() -> None:
    """Nothing says that both halves of a table are equal."""

    def model(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return tuple(
            plain_rope(plain_norm(x, weight, EPS), cos, sin) for x, weight in ((q, qw), (k, kw))
        )

    assert rewritten(model, heads()[1]).matches == {}


# Places


def traced_in_order(function: Function, args: tuple[Tensor, ...]) -> fx.GraphModule:
    """As written: Inductor would move nodes to their readers."""
    table = torch._inductor.decomposition.select_decomp_table()
    with torch.no_grad():
        return make_fx(function, table, tracing_mode="fake")(*args)


@pytest.mark.parametrize("draws", [False, True])
def test_readers_do_not_move_behind_what_draws_numbers(draws: bool) -> None:
    """The sum has a reader before the scale is known; as a result of the op it comes later."""

    def model(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = x + residual
        early = total.sin()
        late = torch.rand_like(scale) * 0 if draws else scale * 0
        return plain_static(plain_norm(total, weight, EPS), scale + late), early, total

    x, weight, scale = norm_arguments()
    args = (x, values(6, 256, seed=2), weight, scale)
    gm = traced_in_order(model, args)
    (fuse,) = [
        item
        for item in passes_for((), {"fuse_add_rms_norm_static_quant": True})
        if item.name == "fuse_add_rms_norm_static_quant"
    ]
    (record,) = PassList([fuse], validate=True).run(gm.graph, "a test")
    gm.recompile()
    assert record.matches == (not draws)
    for a, b in zip(gm(*args), model(*args), strict=True):
        assert torch.equal(a.float(), b.float())


def test_an_input_that_is_written_afterwards() -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        quantised = plain_static(plain_norm(x, weight, EPS), scale)
        x.add_(1)
        return quantised, x.sin()

    first, second = norm_arguments(), norm_arguments()
    found = rewritten(model, norm_arguments())
    assert found.matches == {"rms_norm_static_quant": 1}
    got, expected = found.module(*fresh(found, first)), model(*second)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.float(), b.float())


def fresh(found: Rewritten, args: tuple[Tensor, ...]) -> list[Any]:
    """The inputs of a graph with tensors of the same shapes in place of its own."""
    by_shape = {tuple(arg.shape): arg for arg in args}
    return [by_shape[tuple(v.shape)] if isinstance(v, Tensor) else v for v in found.inputs]


def test_norms_of_the_same_values() -> None:
    """What they have in common is read by both ops; nothing else is."""

    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        one = plain_static(plain_norm(x, weight, 1e-5), scale)
        return one, plain_static(plain_norm(x, weight.sin(), 1e-3), scale)

    found = rewritten(model, norm_arguments())
    assert found.matches == {"rms_norm_static_quant": 2}
    equal(found, model, norm_arguments())


@pytest.mark.parametrize(
    "take",
    [
        lambda x: x[2:5],
        lambda x: x[0],
        lambda x: x[:1].expand(4, 256),
        lambda x: x.view(2, 3, 256),
        lambda x: x[:0],
    ],
)
def test_values_of_any_leading_sizes(take: Function) -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = plain_norm(take(x), weight, EPS)
        return plain_static(y, scale)

    found = rewritten(model, norm_arguments(), num_dynamic=0)
    assert found.matches == {"rms_norm_static_quant": 1}
    equal(found, model, norm_arguments())


def test_results_that_are_read_in_many_ways() -> None:
    def model(x: Tensor, weight: Tensor) -> Any:
        quantised, scales = plain_group(plain_norm(x, weight, EPS), 64)
        wide = quantised.view(-1, 4, 64).float() * scales[..., None]
        return wide, scales.t(), scales.sum(), quantised.view(torch.uint8)

    args = norm_arguments()[:2]
    found = rewritten(model, args)
    assert found.matches == {"rms_norm_group_quant": 1}
    equal(found, model, args)
