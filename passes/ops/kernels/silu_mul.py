"""``silu(gate) * up`` and quantisation in one launch.

In:  checked arguments of the ops in ``ops.silu_mul``.
Out: their outputs.
Knows nothing of dispatch; ``ops.launch`` says what tile a program has: whole rows where a scale is
computed for each, else any part of a row that is whole groups.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from piecewise_backend.passes.ops.kernels.tiles import (
    as_rows,
    columns_of,
    new_float8,
    new_scales,
    on_device_of,
    store_quantised,
)
from piecewise_backend.passes.ops.launch import Launch, reduced_rows, split_rows

_MINUS_LOG2_E = tl.constexpr(-math.log2(math.e))


def silu_mul_quant(
    x: Tensor,
    scale: Tensor | None,
    group_size: int,
    num_columns: int,
    launch: Launch | None = None,
) -> tuple[Tensor, ...]:
    """All three ops; ``launch`` overrides the choice, to measure another."""
    out, scales = new_float8(x, num_columns), None
    if scale is None:
        scales = new_scales(x, num_columns // group_size if group_size else 1)
    rows = as_rows(x)
    num_rows = rows.size(0)
    if num_rows:
        if launch is None:
            is_whole = scale is None and not group_size
            choose = reduced_rows if is_whole else split_rows
            launch = choose(num_columns, num_rows, x.element_size(), group_size)
        parts = -(-num_columns // launch.columns)
        with on_device_of(x):
            _silu_mul_quant_kernel[(-(-num_rows // launch.rows) * parts,)](
                rows, scale, out, scales, num_rows, rows.stride(0),
                num_columns, parts, launch.rows, launch.columns, group_size,
                num_warps=launch.num_warps,
            )  # fmt: skip
    return (out,) if scales is None else (out, scales)


@triton.jit(do_not_specialize=["num_rows"])
def _silu_mul_quant_kernel(
    x_ptr, scale_ptr, out_ptr, scales_ptr, num_rows, x_stride,
    NUM_COLUMNS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows = (program // PARTS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_column = program % PARTS * COLUMNS
    columns = first_column + columns_of(COLUMNS, x_ptr.dtype.element_ty)
    mask = (rows < num_rows)[:, None] & (columns < NUM_COLUMNS)[None, :]
    gate_ptrs = x_ptr + rows[:, None] * x_stride + columns
    gate = tl.load(gate_ptrs, mask, 0.0)
    up = tl.load(gate_ptrs + NUM_COLUMNS, mask, 0.0)
    reciprocal = 1.0
    if scale_ptr is not None:
        reciprocal = tl.div_rn(1.0, tl.load(scale_ptr))
    wide = gate.to(tl.float32)
    y = (wide / (1.0 + tl.exp2(wide * _MINUS_LOG2_E))).to(gate.dtype) * up
    store_quantised(
        y, scale_ptr, reciprocal, out_ptr + rows[:, None] * NUM_COLUMNS + columns, mask,
        scales_ptr, rows, num_rows, first_column, NUM_COLUMNS, ROWS, COLUMNS, GROUP,
    )  # fmt: skip
