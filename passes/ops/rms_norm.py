"""RMSNorm, with or without a residual add, and quantisation to float8: six ops.

In:  ``x`` ``[.., hidden]``, the norm's weight ``[hidden]``, perhaps a residual like ``x``.
Out: float8 ``[.., hidden]``, its scales where they are computed, and the next residual.
Knows nothing of graphs or patterns.

=================================================================  ================================
``rms_norm_static_quant(x, weight, scale, eps)``                   ``-> fp8``
``rms_norm_dynamic_quant(x, weight, eps)``                         ``-> fp8, scales [.., 1]``
``rms_norm_group_quant(x, weight, eps, group_size=128)``           ``-> fp8, scales [.., groups]``
``add_rms_norm_static_quant(x, residual, weight, scale, eps)``     ``-> fp8, new_residual``
``add_rms_norm_dynamic_quant(x, residual, weight, eps)``           ``-> fp8, scales, new_residual``
``add_rms_norm_group_quant(x, residual, weight, eps,``             ``-> fp8, scales, new_residual``
``group_size=128)``
=================================================================  ================================

``y = rms_norm(x, weight, eps)``, or of ``new_residual = x + residual`` in ``x.dtype``; then ``y``
is quantised. What is rounded where: Note [Rounding] in ``reference``; what scales mean: Note
[Scales] there.

Dtypes: ``x`` float16, bfloat16 or float32; ``weight`` and ``residual`` of the same; scales float32.
Any leading dimensions, none and empty ones among them. Outputs are fresh and contiguous. Rows may
be strided; an ``x`` whose last dimension has gaps, or whose rows are not evenly spaced, is copied.
Errors: ``ValueError`` for another dtype of ``x``, a weight, residual or scale that does not fit, a
``group_size`` that is no power of two or does not divide ``hidden``, ``hidden`` over 65536.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from piecewise_backend.passes.ops import checks, reference
from piecewise_backend.passes.ops.define import Runner, define, needs_triton

Outputs = tuple[Tensor, ...]


def _check(
    x: Tensor, residual: Tensor | None, weight: Tensor, scale: Tensor | None, group_size: int
) -> None:
    hidden = checks.row_of(x)
    checks.values(x, hidden, is_reduced=True)
    checks.weight("weight", weight, x, hidden)
    checks.quant(scale, group_size, x, hidden)
    if residual is not None:
        checks.residual(residual, x)


def _on_cpu(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    eps: float,
    group_size: int,
) -> Outputs:
    _check(x, residual, weight, scale, group_size)
    total = x if residual is None else (x + residual).contiguous()
    outputs = reference.quant(reference.rms_norm(total, weight, eps), scale, group_size)
    outputs = tuple(output.contiguous() for output in outputs)
    return outputs if residual is None else (*outputs, total)


def _on_cuda(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    eps: float,
    group_size: int,
) -> Outputs:
    _check(x, residual, weight, scale, group_size)
    return _kernel()(x, residual, weight, scale, eps, group_size)


def _fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    eps: float,
    group_size: int,
) -> Outputs:
    _check(x, residual, weight, scale, group_size)
    outputs = [x.new_empty(x.shape, dtype=reference.FP8_DTYPE)]
    if scale is None:
        num_scales = x.shape[-1] // group_size if group_size else 1
        outputs.append(x.new_empty((*x.shape[:-1], num_scales), dtype=torch.float32))
    if residual is not None:
        outputs.append(x.new_empty(x.shape))
    return tuple(outputs)


@functools.cache
def _kernel() -> Callable[..., Outputs]:
    """The Triton kernel; the CPU needs no Triton, so it is imported at the first call on CUDA."""
    try:
        from piecewise_backend.passes.ops.kernels.rms_norm import (  # noqa: PLC0415
            rms_norm_quant,
        )
    except ImportError as error:
        raise needs_triton(error) from error
    return rms_norm_quant


def _static(run: Runner, x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    output: Tensor = run(x, None, weight, scale, eps, 0)[0]
    return output


def _dynamic(run: Runner, x: Tensor, weight: Tensor, eps: float) -> object:
    return run(x, None, weight, None, eps, 0)


def _group(run: Runner, x: Tensor, weight: Tensor, eps: float, group_size: int = 128) -> object:
    return run(x, None, weight, None, eps, checks.group_size(group_size))


def _add_static(
    run: Runner, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> object:
    return run(x, residual, weight, scale, eps, 0)


def _add_dynamic(run: Runner, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> object:
    return run(x, residual, weight, None, eps, 0)


def _add_group(
    run: Runner, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group_size: int = 128
) -> object:
    return run(x, residual, weight, None, eps, checks.group_size(group_size))


_TWO, _THREE = "(Tensor, Tensor)", "(Tensor, Tensor, Tensor)"
_ADD = "Tensor x, Tensor residual, Tensor weight"
_define = functools.partial(define, cpu=_on_cpu, cuda=_on_cuda, fake=_fake)

_define(
    "rms_norm_static_quant(Tensor x, Tensor weight, Tensor scale, float eps) -> Tensor", _static
)
_define(f"rms_norm_dynamic_quant(Tensor x, Tensor weight, float eps) -> {_TWO}", _dynamic)
_define(
    f"rms_norm_group_quant(Tensor x, Tensor weight, float eps, int group_size=128) -> {_TWO}",
    _group,
)
_define(f"add_rms_norm_static_quant({_ADD}, Tensor scale, float eps) -> {_TWO}", _add_static)
_define(f"add_rms_norm_dynamic_quant({_ADD}, float eps) -> {_THREE}", _add_dynamic)
_define(f"add_rms_norm_group_quant({_ADD}, float eps, int group_size=128) -> {_THREE}", _add_group)
