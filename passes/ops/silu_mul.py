"""The product of a gated MLP, ``silu(gate) * up``, and quantisation to float8: three ops.

In:  ``x`` ``[.., 2 * d]``: ``d`` columns of gate, then ``d`` of up.
Out: float8 ``[.., d]``, and its scales where they are computed.
Knows nothing of graphs or patterns.

=====================================================  =================================
``silu_mul_static_quant(x, scale)``                    ``-> fp8``
``silu_mul_dynamic_quant(x)``                          ``-> fp8, scales [.., 1]``
``silu_mul_group_quant(x, group_size=128)``            ``-> fp8, scales [.., d // group_size]``
=====================================================  =================================

``y = silu(gate) * up``, each rounded to ``x.dtype`` (Note [Rounding] in ``reference``), then it is
quantised (Note [Scales] there). In float16 the product may overflow, as it does in plain torch.

Dtypes: ``x`` float16, bfloat16 or float32; scales float32. Any leading dimensions, strided rows and
copies as in ``rms_norm``. Errors: ``ValueError`` for another dtype, an odd number of columns, a
scale that does not fit, a ``group_size`` that is no power of two or does not divide ``d``, and in
``silu_mul_dynamic_quant`` a ``d`` over 65536.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from piecewise_backend.passes.ops import checks, reference
from piecewise_backend.passes.ops.define import Runner, define, needs_triton

Outputs = tuple[Tensor, ...]


def _check(x: Tensor, scale: Tensor | None, group_size: int) -> int:
    """Number of columns of the output."""
    both = checks.row_of(x)
    if both % 2:
        raise ValueError(
            f"x has {both} columns, which are not two halves; pass gate and up side by side"
        )
    checks.values(x, both // 2, is_reduced=scale is None and not group_size)
    checks.quant(scale, group_size, x, both // 2)
    return both // 2


def _on_cpu(x: Tensor, scale: Tensor | None, group_size: int) -> Outputs:
    _check(x, scale, group_size)
    outputs = reference.quant(reference.silu_mul(x), scale, group_size)
    return tuple(output.contiguous() for output in outputs)


def _on_cuda(x: Tensor, scale: Tensor | None, group_size: int) -> Outputs:
    return _kernel()(x, scale, group_size, _check(x, scale, group_size))


def _fake(x: Tensor, scale: Tensor | None, group_size: int) -> Outputs:
    num_columns = _check(x, scale, group_size)
    quantised = x.new_empty((*x.shape[:-1], num_columns), dtype=reference.FP8_DTYPE)
    if scale is not None:
        return (quantised,)
    num_scales = num_columns // group_size if group_size else 1
    return quantised, x.new_empty((*x.shape[:-1], num_scales), dtype=torch.float32)


@functools.cache
def _kernel() -> Callable[..., Outputs]:
    """The Triton kernel; the CPU needs no Triton, so it is imported at the first call on CUDA."""
    try:
        from piecewise_backend.passes.ops.kernels.silu_mul import (  # noqa: PLC0415
            silu_mul_quant,
        )
    except ImportError as error:
        raise needs_triton(error) from error
    return silu_mul_quant


def _static(run: Runner, x: Tensor, scale: Tensor) -> Tensor:
    output: Tensor = run(x, scale, 0)[0]
    return output


def _dynamic(run: Runner, x: Tensor) -> object:
    return run(x, None, 0)


def _group(run: Runner, x: Tensor, group_size: int = 128) -> object:
    return run(x, None, checks.group_size(group_size))


_define = functools.partial(define, cpu=_on_cpu, cuda=_on_cuda, fake=_fake)

_define("silu_mul_static_quant(Tensor x, Tensor scale) -> Tensor", _static)
_define("silu_mul_dynamic_quant(Tensor x) -> (Tensor, Tensor)", _dynamic)
_define("silu_mul_group_quant(Tensor x, int group_size=128) -> (Tensor, Tensor)", _group)
