"""What the kernels share: quantising a tile in registers, and preparing rows on the host.

In:  a tile ``[ROWS, COLUMNS]`` of values; tensors of any leading dimensions.
Out: float8 and scales in memory; tensors ``[rows, columns]``.
Knows nothing of norms or activations.

The hardware's conversion to float8 saturates and keeps NaN, so nothing is clamped.
Offsets of rows are 64-bit: a tensor may have more than 2**31 elements.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from piecewise_backend.passes.ops.reference import FP8_DTYPE, FP8_MAX, MIN_SCALE

_STEP = tl.constexpr(1.0 / FP8_MAX)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_ALL = tl.constexpr(tl.PropagateNan.ALL)


def as_rows(x: Tensor) -> Tensor:
    """``[rows, columns]`` with packed columns: a view where the strides allow, else a copy."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def as_vector(x: Tensor) -> Tensor:
    """``[columns]``, packed: a column of a matrix, or what is expanded, is copied."""
    return x if x.stride(0) == 1 else x.contiguous()


def new_float8_like(x: Tensor) -> Tensor:
    """Where values go, of the shape of ``x``. Costs half of ``torch.empty`` with a shape."""
    return torch.empty_like(x, dtype=FP8_DTYPE, memory_format=torch.contiguous_format)


def new_float8(x: Tensor, num_columns: int) -> Tensor:
    """Where values go, like ``x`` but for the columns."""
    return torch.empty((*x.shape[:-1], num_columns), dtype=FP8_DTYPE, device=x.device)


def new_scales(x: Tensor, num_scales: int) -> Tensor:
    """Where scales go, so many a row of ``x``."""
    return torch.empty((*x.shape[:-1], num_scales), dtype=torch.float32, device=x.device)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device, which need not be that of ``x``."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.get_device())


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@triton.jit
def columns_of(COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Columns of a tile, with as many in a row of one thread as are 16 bytes of ``dtype``.

    Without the hint Triton stores float8 in rows of 16, and shuffles the tile through shared memory
    from the rows of 8 (of 16 bits) that it loaded.
    """
    return tl.max_contiguous(tl.arange(0, COLUMNS), 128 // dtype.primitive_bitwidth)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=_ALL)


@triton.jit
def _scales_of(magnitudes):
    """A dynamic scale for each row of a tile."""
    amax = tl.reduce(magnitudes, 1, _larger)
    return tl.maximum(amax * _STEP, _MIN_SCALE, propagate_nan=_ALL)


@triton.jit
def store_quantised(
    y, scale_ptr, reciprocal, out_ptrs, mask, scales_ptr, rows, num_rows, first_column,
    NUM_COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Quantise ``y`` by ``reciprocal`` if there is a scale, else per GROUP, or (0) per row."""
    wide = y.to(tl.float32)
    if scale_ptr is not None:
        scaled = wide * reciprocal
    elif GROUP == 0:
        scales = _scales_of(tl.abs(wide))
        tl.store(scales_ptr + rows, scales, rows < num_rows)
        scaled = wide * tl.div_rn(1.0, scales)[:, None]
    else:
        PER_ROW: tl.constexpr = COLUMNS // GROUP
        tiles = tl.reshape(wide, [ROWS * PER_ROW, GROUP])
        scales = _scales_of(tl.abs(tiles))
        scaled = tl.reshape(tiles * tl.div_rn(1.0, scales)[:, None], [ROWS, COLUMNS])
        groups = first_column // GROUP + tl.arange(0, PER_ROW)[None, :]
        scale_ptrs = scales_ptr + rows[:, None] * (NUM_COLUMNS // GROUP) + groups
        has_scale = (rows < num_rows)[:, None] & (groups < NUM_COLUMNS // GROUP)
        tl.store(scale_ptrs, tl.reshape(scales, [ROWS, PER_ROW]), has_scale)
    tl.store(out_ptrs, scaled.to(out_ptrs.dtype.element_ty), mask)
