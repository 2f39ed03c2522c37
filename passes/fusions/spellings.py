"""The parts that fusions are made of, each in the ways that models spell it.

In:  nothing.
Out: plain functions, by the name of the part that they spell.
Knows nothing of graphs: a spelling is traced, by Inductor's own decompositions, to become a pattern
(`comparing`). Order of factors and summands, views in between, dtype and epsilon need no spellings
of their own.

Note [The same numbers]
A fused op computes what `ops.reference` says. A part computes that to the bit, except
for these, which tests bound as said:

- `divided`: `y / scale` where the op has `y * (1 / scale)`, and `amax / 448` where it has
  `amax * (1 / 448)`: one rounding of float32 away. Scales differ in their last bit, and at most
  1 in 1000 float8 values is the neighbour.
- `rounded once`: a norm that is float32 up to and including its weight, as `F.rms_norm` is, where
  the op rounds after the norm and after the weight; likewise a residual that is added in float32
  and normalised before it is rounded. At most 1 in 25 float8 values is the neighbour; of rotated
  heads 3 units in the last place of the largest of the head. (Inductor does not round between ops
  that it fuses, so that it is as far from eager.)
- `rotated as stored`: a rotary embedding in float16 or bfloat16, where the op is float32 and rounds
  once. 3 units in the last place of the largest of its head.

What would be further off is no spelling: another lower bound of dynamic scales than `MIN_SCALE`
(a row of small values would get another scale), a cast that does not clamp (it gives NaN where the
op saturates), a clamp to other bounds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from piecewise_backend.passes.ops.reference import FP8_DTYPE, FP8_MAX, MIN_SCALE

Spelling = Callable[..., Any]
Spellings = Mapping[str, tuple[Spelling, ...]]


def _mean_square(wide: Tensor) -> Tensor:
    return wide.pow(2).mean(-1, keepdim=True)


def _mean_product(wide: Tensor) -> Tensor:
    return (wide * wide).mean(-1, keepdim=True)


def _rms_norm(mean: Callable[[Tensor], Tensor]) -> Spelling:
    def spelling(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(mean(wide) + eps)).to(x.dtype) * weight

    return spelling


def _rms_norm_rounded_once(mean: Callable[[Tensor], Tensor]) -> Spelling:
    def spelling(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(mean(wide) + eps) * weight.float()).to(x.dtype)

    return spelling


def _rms_norm_of_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _add_rms_norm_rounded_once(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    inverse = torch.rsqrt(_mean_square(total) + eps)
    return (total * inverse).to(x.dtype) * weight, total.to(x.dtype)


NOT_IN_FLOAT16: tuple[Spelling, ...] = (_add_rms_norm_rounded_once,)
"""The op rounds the sum of these, which in float16 may overflow: bfloat16 has float32's range."""


def _quantised(apply: Callable[[Tensor, Tensor], Tensor]) -> Spelling:
    def spelling(y: Tensor, scale: Tensor) -> Tensor:
        return apply(y, scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)

    return spelling


# A scale has a dimension, so that it makes `y * scale` float32 by promotion as `y.float()` does.
_APPLICATIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda y, scale: y.float() * scale.reciprocal(),
    lambda y, scale: y.float() * (1.0 / scale),
    lambda y, scale: y.float() / scale,  # divided
    lambda y, scale: y * scale.reciprocal(),
    lambda y, scale: y * (1.0 / scale),
    lambda y, scale: y / scale,  # divided
)
# The largest of 16-bit values is one of them, whichever dtype it is looked for in.
_LARGEST: tuple[Callable[[Tensor, bool], Tensor], ...] = (
    lambda y, keepdim: y.float().abs().amax(-1, keepdim=keepdim),
    lambda y, keepdim: y.abs().amax(-1, keepdim=keepdim).float(),
    lambda y, keepdim: y.float().abs().max(-1, keepdim=keepdim).values,
    lambda y, keepdim: y.abs().max(-1, keepdim=keepdim).values.float(),
)
_SHARES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda amax: amax * (1.0 / FP8_MAX),
    lambda amax: amax / FP8_MAX,  # divided
)


_LAST: tuple[str, ...] = ("kept", "dropped", "put back")


def _row_scale(
    largest: Callable[[Tensor, bool], Tensor], share: Callable[[Tensor], Tensor], last: str
) -> Spelling:
    def spelling(y: Tensor) -> Tensor:
        amax = largest(y, last == "kept")
        return share(amax.unsqueeze(-1) if last == "put back" else amax).clamp(min=MIN_SCALE)

    return spelling


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _rope(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(rotated, dim=-1)


def _rope_of_wide(
    wide_first: Tensor, wide_second: Tensor, wide_cos: Tensor, wide_sin: Tensor, dtype: torch.dtype
) -> Tensor:
    return _rope(wide_first, wide_second, wide_cos, wide_sin).to(dtype)


def _rope_promoted(
    first: Tensor, second: Tensor, wide_cos: Tensor, wide_sin: Tensor, dtype: torch.dtype
) -> Tensor:
    return _rope(first, second, wide_cos, wide_sin).to(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What a spelling of a part takes, and the tensors it returns."""

    parameters: tuple[str, ...]
    dtypes: tuple[torch.dtype | None, ...] = (None,)
    """Of each result; None is that of the first parameter."""


PARTS: Mapping[str, Part] = {
    "rms_norm": Part(("x", "weight", "eps")),
    "add_rms_norm": Part(("x", "residual", "weight", "eps"), (None, None)),
    "static_quant": Part(("y", "scale"), (FP8_DTYPE,)),
    "row_scale": Part(("y",), (torch.float32,)),
    "dynamic_quant": Part(("y",), (FP8_DTYPE, torch.float32)),
    "group_quant": Part(("y", "group_size"), (FP8_DTYPE, torch.float32)),
    "silu_mul": Part(("x",)),
}
"""Those that can be spelled by custom ops."""

BUILT_IN: Spellings = {
    "rms_norm": (
        _rms_norm(_mean_square),
        _rms_norm(_mean_product),
        _rms_norm_of_torch,  # rounded once
        _rms_norm_rounded_once(_mean_square),
        _rms_norm_rounded_once(_mean_product),
    ),
    # That of a sum that was rounded needs no spelling: it is "rms_norm" of a sum.
    "add_rms_norm": (_add_rms_norm_rounded_once,),
    "static_quant": tuple(_quantised(apply) for apply in _APPLICATIONS),
    # A dynamic quantisation in plain torch is "static_quant" by such a scale.
    "row_scale": tuple(
        _row_scale(*choice) for choice in itertools.product(_LARGEST, _SHARES, _LAST)
    ),
    "dynamic_quant": (),
    "group_quant": (),
    "gated": (_gated,),
    "silu_mul": (),
    "rope": (_rope_of_wide, _rope_promoted, _rope),  # the last: rotated as stored
}

PLACES: Mapping[Spelling, tuple[str, int]] = {
    spelling: (part, index)
    for part, spellings in BUILT_IN.items()
    for index, spelling in enumerate(spellings)
}
"""Where those are, which other processes find them by: they have no names."""
