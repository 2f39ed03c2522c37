"""What the ops compute, in plain torch.

In:  tensors that were checked.
Out: what the op returns; on the CPU, this is the op.
Knows nothing of dispatch or of kernels.

Note [Rounding]
``x`` is float16, bfloat16 or float32. Sums, means, exponentials and the rotation are float32.
Values are rounded to ``x.dtype`` where a model in plain torch rounds them: after the residual add,
after the norm and again after its weight, after SiLU and again after the product. Nothing is
rounded in between, and the cast to float8 sees the rounded value. A linear layer sums in float32,
what is added behind it too, and rounds once.

Note [Scales]
``value = float8 * scale``, scales are float32. To quantise is to *multiply by the reciprocal* of
the scale, ``y.float() * (1 / scale)``, one rounding away from a division. A static scale is a
tensor of one element, which must be positive and normal; its value is not looked at, as that would
wait for the device. A dynamic scale is ``max(amax(|y|) * (1 / 448), MIN_SCALE)``, per row or per
group of columns, so that a row of zeros has the scale ``MIN_SCALE`` and gives zeros. Casts saturate
at +-448 (infinity too); a NaN stays one, and makes the dynamic scale of its row or group NaN, with
all its values. An infinite value makes a dynamic scale infinite: it becomes NaN, and others 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
"""What the ops quantise to."""

FP8_MAX = 448.0
"""The largest finite float8_e4m3fn."""

MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
"""The smallest dynamic scale, about 4.4e-6: rows below 1/512 share it, and keep 3 bits to 7e-8."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, as decoders write it."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse).to(x.dtype) * weight


def silu_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``x`` ``[.., 2 * d]``, gate first."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear(x: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
    """``x @ weight.T + addend``."""
    total = F.linear(x.float(), weight.float())
    return (total if addend is None else total + addend.float().flatten()).to(x.dtype)


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """``silu`` of one linear layer times another."""
    return F.silu(linear(x, gate)) * linear(x, up)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head ``[.., H, D]`` by the token's angles ``[.., D // 2]``."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(rotated, dim=-1).to(x.dtype)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Norm of each head by itself, then its rotation."""
    return rope(rms_norm(q, q_weight, eps), cos, sin), rope(rms_norm(k, k_weight, eps), cos, sin)


def static_quant(y: Tensor, scale: Tensor) -> Tensor:
    """Quantise by a given scale. See Note [Scales]."""
    return _saturate(y.float() * scale.reshape(()).reciprocal())


def dynamic_quant(y: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row by its own scale, ``[.., 1]``. See Note [Scales]."""
    wide = y.float()
    amax = wide.abs().amax(dim=-1, keepdim=True)
    scales = (amax * (1.0 / FP8_MAX)).clamp(min=MIN_SCALE)
    return _saturate(wide * scales.reciprocal()), scales


def group_quant(y: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Quantise each group of columns by its own scale, ``[.., hidden // group_size]``."""
    groups = y.unflatten(-1, (y.shape[-1] // group_size, group_size))
    quantised, scales = dynamic_quant(groups)
    return quantised.flatten(-2), scales.squeeze(-1)


def quant(y: Tensor, scale: Tensor | None, group_size: int) -> tuple[Tensor, ...]:
    """One of the three: by ``scale`` if given, else per group, else (``group_size`` 0) per row."""
    if scale is not None:
        return (static_quant(y, scale),)
    return group_quant(y, group_size) if group_size else dynamic_quant(y)


def _saturate(wide: Tensor) -> Tensor:
    """To float8; torch's own cast gives NaN for what is too large."""
    return wide.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
