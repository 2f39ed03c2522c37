"""Norm and rotation of query and key heads in one launch.

In:  checked arguments of ``ops.qk_norm_rope``.
Out: its outputs.
Knows nothing of dispatch; ``ops.launch`` says how many heads a program has.

A row of a tile is one head of one token, and a program serves heads of ``q`` or heads of ``k``, so
that no lane waits for a head that does not exist. Programs of the two are spread evenly: those of
the same tokens run at about the same time, and the second finds the angles in the L2 cache. With
all of ``k`` behind all of ``q`` they are read from memory twice, 4.8 % of the bytes at 20 heads.
Both halves of a head are in registers of the same thread, and are rotated there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from piecewise_backend.passes.ops.kernels.tiles import as_rows, as_vector, columns_of, on_device_of
from piecewise_backend.passes.ops.launch import Launch, halves_of_heads


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """The op; ``launch`` overrides the choice, to measure another."""
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    q_rows, k_rows = q_out.numel() // q.size(-1), k_out.numel() // q.size(-1)
    if q_rows + k_rows:
        half = q.size(-1) // 2
        q, k, cos, sin = _as_tokens(q), _as_tokens(k), as_rows(cos), as_rows(sin)
        if launch is None:
            launch = halves_of_heads(half, q_rows + k_rows, q.element_size())
        k_programs = -(-k_rows // launch.rows)
        num_programs = -(-q_rows // launch.rows) + k_programs
        with on_device_of(q):
            _qk_norm_rope_kernel[(num_programs,)](
                q, k, as_vector(q_weight), as_vector(k_weight), cos, sin, q_out, k_out,
                q_rows, k_rows, num_programs, k_programs,
                q.stride(0), k.stride(0), cos.stride(0), sin.stride(0), eps,
                q.size(1), k.size(1), half, launch.rows, launch.columns,
                num_warps=launch.num_warps,
            )  # fmt: skip
    return q_out, k_out


def _as_tokens(heads: Tensor) -> Tensor:
    """``[tokens, heads, D]`` with packed heads: a view where the strides allow, else a copy."""
    tokens = heads if heads.dim() == 3 else heads.reshape(-1, *heads.shape[-2:])
    return tokens if tokens.stride()[1:] == (tokens.size(2), 1) else tokens.contiguous()


@triton.jit
def _norm_rope(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, first_row, num_rows,
    x_stride, cos_stride, sin_stride, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = first_row + tl.arange(0, ROWS)
    tokens = (rows // HEADS).to(tl.int64)[:, None]
    columns = columns_of(COLUMNS, x_ptr.dtype.element_ty)
    mask = (rows < num_rows)[:, None] & (columns < HALF)[None, :]
    x_ptrs = x_ptr + tokens * x_stride + (rows % HEADS)[:, None] * (2 * HALF) + columns
    a, b = tl.load(x_ptrs, mask, 0.0), tl.load(x_ptrs + HALF, mask, 0.0)
    cos = tl.load(cos_ptr + tokens * cos_stride + columns, mask, 0.0).to(tl.float32)
    sin = tl.load(sin_ptr + tokens * sin_stride + columns, mask, 0.0).to(tl.float32)
    # Of the shape of the tile, so that each thread loads what it needs.
    weight_ptrs = weight_ptr + tl.broadcast_to(columns[None, :], [ROWS, COLUMNS])
    a_weight = tl.load(weight_ptrs, mask, 0.0, eviction_policy="evict_last")
    b_weight = tl.load(weight_ptrs + HALF, mask, 0.0, eviction_policy="evict_last")
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    mean = tl.sum(wide_a * wide_a + wide_b * wide_b, axis=1) * (0.5 / HALF)
    inverse = tl.rsqrt(mean + eps)[:, None]
    a = ((wide_a * inverse).to(a.dtype) * a_weight).to(tl.float32)
    b = ((wide_b * inverse).to(b.dtype) * b_weight).to(tl.float32)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * (2 * HALF) + columns
    tl.store(out_ptrs, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask)
    tl.store(out_ptrs + HALF, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["q_rows", "k_rows", "num_programs", "k_programs", "eps"])
def _qk_norm_rope_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_rows, k_rows, num_programs, k_programs, q_stride, k_stride, cos_stride, sin_stride, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # How many programs of k come before this one, and before the next.
    k_program = (program.to(tl.int64) * k_programs // num_programs).to(tl.int32)
    k_next = ((program.to(tl.int64) + 1) * k_programs // num_programs).to(tl.int32)
    if k_program == k_next:
        _norm_rope(
            q_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, (program - k_program) * ROWS, q_rows,
            q_stride, cos_stride, sin_stride, eps, Q_HEADS, HALF, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _norm_rope(
            k_ptr, k_weight_ptr, cos_ptr, sin_ptr, k_out_ptr, k_program * ROWS, k_rows,
            k_stride, cos_stride, sin_stride, eps, K_HEADS, HALF, ROWS, COLUMNS,
        )  # fmt: skip
