"""RMSNorm and quantisation in one launch, each row read once and kept in registers.

In:  checked arguments of the ops in ``ops.rms_norm``.
Out: their outputs.
Knows nothing of dispatch; ``ops.launch`` says how many rows a program has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from piecewise_backend.passes.ops.kernels.tiles import (
    as_rows,
    as_vector,
    columns_of,
    new_float8_like,
    new_scales,
    on_device_of,
    store_quantised,
)
from piecewise_backend.passes.ops.launch import Launch, reduced_rows


def rms_norm_quant(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    eps: float,
    group_size: int,
    launch: Launch | None = None,
) -> tuple[Tensor, ...]:
    """All six ops; ``launch`` overrides the choice, to measure another."""
    hidden = x.size(-1)
    out = new_float8_like(x)
    outputs = [out]
    scales = new_residual = None
    if scale is None:
        scales = new_scales(x, hidden // group_size if group_size else 1)
        outputs.append(scales)
    rows, residual_rows, residual_stride = as_rows(x), None, 0
    if residual is not None:
        residual_rows = as_rows(residual)
        residual_stride = residual_rows.stride(0)
        new_residual = torch.empty_like(x, memory_format=torch.contiguous_format)
        outputs.append(new_residual)
    num_rows = rows.size(0)
    if num_rows:
        if launch is None:
            has_residual = residual is not None
            launch = reduced_rows(hidden, num_rows, x.element_size(), has_residual=has_residual)
        with on_device_of(x):
            _rms_norm_quant_kernel[(-(-num_rows // launch.rows),)](
                rows, residual_rows, as_vector(weight), scale, out, scales, new_residual,
                num_rows, rows.stride(0), residual_stride, eps,
                hidden, launch.rows, launch.columns, group_size, num_warps=launch.num_warps,
            )  # fmt: skip
    return tuple(outputs)


@triton.jit(do_not_specialize=["num_rows", "eps"])
def _rms_norm_quant_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, out_ptr, scales_ptr, new_residual_ptr,
    num_rows, x_stride, residual_stride, eps,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = columns_of(COLUMNS, x_ptr.dtype.element_ty)
    in_row = columns < HIDDEN
    mask = (rows < num_rows)[:, None] & in_row[None, :]
    # All loads come before the first use, so that one latency covers them.
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns, mask, 0.0)
    offsets = rows[:, None] * HIDDEN + columns
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows[:, None] * residual_stride + columns, mask, 0.0)
    weight = tl.load(weight_ptr + columns, in_row, 0.0, eviction_policy="evict_last")
    reciprocal = 1.0
    if scale_ptr is not None:
        reciprocal = tl.div_rn(1.0, tl.load(scale_ptr))
    if residual_ptr is not None:
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(new_residual_ptr + offsets, x, mask)
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) * (1.0 / HIDDEN)
    y = (wide * tl.rsqrt(mean + eps)[:, None]).to(x.dtype) * weight[None, :]
    store_quantised(
        y, scale_ptr, reciprocal, out_ptr + offsets, mask, scales_ptr, rows, num_rows, 0,
        HIDDEN, ROWS, COLUMNS, GROUP,
    )  # fmt: skip
