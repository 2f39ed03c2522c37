"""The fused ops as cases: how to make their arguments, and what they mean in plain torch.

The plain functions are written apart from the package's own reference, as a model would write
them; on the CPU an op equals them to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import piecewise_backend.passes.ops  # noqa: F401  # defines the ops

EPS = 1e-5
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_STEP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Distance of two neighbours, relative to the larger, at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One op that quantises."""

    name: str
    is_norm: bool
    is_add: bool
    scales: str
    """`static`, `dynamic` (per row) or `group`."""

    @property
    def op(self) -> Any:
        """The overload."""
        return getattr(torch.ops.piecewise, self.name).default

    def arguments(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        group_size: int = 128,
        device: str = "cpu",
        scale: float = 0.02,
        seed: int = 0,
        prepare: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> tuple[Any, ...]:
        """Random arguments; `shape` is that of the output, `prepare` may change x and residual."""
        generator = torch.Generator().manual_seed(seed)
        *lead, hidden = shape

        def values(*size: int) -> Tensor:
            # On the CPU first, so that every device sees the same.
            return torch.randn(size, generator=generator).to(dtype).to(device)

        x = [prepare(values(*lead, hidden if self.is_norm else 2 * hidden))]
        if self.is_add:
            x.append(prepare(values(*lead, hidden)))
        weight = [values(hidden)] if self.is_norm else []
        scales = [torch.tensor([scale], device=device)] if self.scales == "static" else []
        eps = [EPS] if self.is_norm else []
        groups = [group_size] if self.scales == "group" else []
        return (*x, *weight, *scales, *eps, *groups)

    def outputs(self, found: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """float8, scales, new residual: what the op returned, by name."""
        if isinstance(found, Tensor):
            return found, None, None
        quantised, *rest = found
        scales = rest.pop(0) if self.scales != "static" else None
        return quantised, scales, rest.pop(0) if rest else None

    def run(self, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Call the op."""
        return self.outputs(self.op(*args))

    def plain(self, args: tuple[Any, ...]) -> Any:
        """What a model in plain torch computes: the op's outputs in its order."""
        x, rest = args[0], list(args[1:])
        residual = None
        if self.is_add:
            residual = x = x + rest.pop(0)
        y = plain_norm(x, rest[0], EPS) if self.is_norm else plain_silu_mul(x)
        if self.scales == "static":
            outputs = [plain_static(y, rest[1 if self.is_norm else 0])]
        elif self.scales == "dynamic":
            outputs = list(plain_dynamic(y))
        else:
            outputs = list(plain_group(y, rest[-1]))
        outputs += [] if residual is None else [residual]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def exact(self, args: tuple[Any, ...]) -> Tensor:
        """In float64, what is to be quantised, rounded nowhere but after the residual add."""
        x, *rest = args
        if self.is_add:
            x = x + rest.pop(0)
        wide = x.double()
        if not self.is_norm:
            gate, up = wide.tensor_split(2, dim=-1)
            return gate / (1 + torch.exp(-gate)) * up
        return wide / ((wide**2).mean(-1, keepdim=True) + EPS).sqrt() * rest[0].double()


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as Hugging Face's decoders have it."""
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(variance + eps)).to(x.dtype) * weight


def plain_silu_mul(x: Tensor) -> Tensor:
    """Gated activation as vLLM's native path has it."""
    size = x.shape[-1] // 2
    return F.silu(x[..., :size]) * x[..., size:]


def plain_static(y: Tensor, scale: Tensor) -> Tensor:
    """By a given scale."""
    return (y.float() * (1.0 / scale[0])).clamp(-448.0, 448.0).to(FP8)


def plain_dynamic(y: Tensor) -> tuple[Tensor, Tensor]:
    """By the largest of each row."""
    amax = y.float().abs().amax(-1, keepdim=True)
    scales = torch.clamp_min(amax * (1.0 / 448.0), 1.0 / (448.0 * 512.0))
    return (y.float() * (1.0 / scales)).clamp(-448.0, 448.0).to(FP8), scales


def plain_group(y: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """By the largest of each group of columns."""
    groups = y.reshape(*y.shape[:-1], y.shape[-1] // group_size, group_size)
    quantised, scales = plain_dynamic(groups)
    return quantised.reshape(y.shape), scales[..., 0]


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation as Llama's, with both halves of the angles and `rotate_half`."""
    cos, sin = (torch.cat([part, part], dim=-1)[..., None, :].float() for part in (cos, sin))
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def plain_qk(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` in plain torch."""
    q, k, q_weight, k_weight, cos, sin, eps = args
    return (
        plain_rope(plain_norm(q, q_weight, eps), cos, sin),
        plain_rope(plain_norm(k, k_weight, eps), cos, sin),
    )


def qk_arguments(
    lead: Sequence[int],
    q_heads: int,
    k_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    angle_dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:
    """q and k are views of one projection; cosines and sines of one table."""
    generator = torch.Generator().manual_seed(0)
    width = (q_heads + 2 * k_heads) * head_dim
    qkv = torch.randn(*lead, width, generator=generator).to(dtype).to(device)
    q, k, _ = qkv.split([n * head_dim for n in (q_heads, k_heads, k_heads)], dim=-1)
    q, k = q.unflatten(-1, (q_heads, head_dim)), k.unflatten(-1, (k_heads, head_dim))
    weights = torch.randn(2, head_dim, generator=generator).to(dtype).to(device)
    angles = torch.randn(*lead, head_dim // 2, generator=generator) * 10
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(angle_dtype).to(device)
    cos, sin = table.chunk(2, dim=-1)
    return q, k, weights[0], weights[1], cos, sin, EPS


CASES = [
    Case(f"{prefix}_{scales}_quant", is_norm=is_norm, is_add=prefix[:3] == "add", scales=scales)
    for prefix, is_norm in (("rms_norm", True), ("add_rms_norm", True), ("silu_mul", False))
    for scales in ("static", "dynamic", "group")
]
NAMES = [case.name for case in CASES]


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many float8 values lie between two; 0 for two NaN, 255 for one."""
    codes = [t.contiguous().view(torch.uint8).to(torch.int16) for t in (a, b)]
    ranks = [torch.where(code >= 128, 128 - code, code) for code in codes]
    is_nan = [code & 127 == 127 for code in codes]
    apart = (ranks[0] - ranks[1]).abs().masked_fill(is_nan[0] & is_nan[1], 0)
    return apart.masked_fill(is_nan[0] ^ is_nan[1], 255)
