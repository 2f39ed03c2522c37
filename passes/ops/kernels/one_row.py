"""A linear layer of one row in one launch: norm, product, and activation or sum.

In:  checked arguments of the ops in ``ops.one_row``; gate and up as two matrices.
Out: their output.
Knows nothing of dispatch; ``ops.launch`` says how many rows of a weight a program has.

Each program has the whole row of values, so that it can compute the norm by itself: 4 to 16 KiB
from the L2 cache instead of one more kernel. It reads its rows of the weight once, front to back;
they are not worth a place in a cache.

Note [Early launch]
Between two kernels of a graph the device is idle for a microsecond: the second starts when the last
program of the first is done. From compute capability 9.0 on, a kernel may be launched as soon as
all programs of the one in front have said so, to be resident when that ends: 0.4 to 1.2 us less for
each of a chain (`late_us` of benchmarks/one_row.py, H200). It then has to wait for what
the other writes. So *every* access to memory comes behind the wait, and every program waits. To
read weights in front of it, as they hardly change, was 1 to 2 % faster, and wrong for those that
do. A program says so behind its wait, not in front: whoever is launched then knows that all but the
one in front of it has ended. The other way round three kernels could be under way at once, for
0.0 to 0.1 us less.

A kernel of somebody else's that starts early as well must not read in front of its wait what any
kernel in front has written. Inductor's kernels with `triton.enable_pdl` may, so that versions with
these ops are compiled without, and are not tried where other pieces are compiled with it.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecewise_backend.passes.ops import launch as launches
from piecewise_backend.passes.ops.kernels.tiles import as_vector, columns_of, on_device_of
from piecewise_backend.passes.ops.launch import Launch

_MINUS_LOG2_E = tl.constexpr(-math.log2(math.e))


def one_row(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    addend: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    launch: Launch | None = None,
    is_early: bool | None = None,
) -> Tensor:
    """Both ops; ``launch`` and ``is_early`` override the choices, to measure others."""
    num_rows, num_columns = weight.shape
    out = torch.empty((*x.shape[:-1], num_rows), dtype=x.dtype, device=x.device)
    if launch is None:
        has_norm = norm_weight is not None
        launch = launches.one_row(num_columns, is_gated=up is not None, has_norm=has_norm)
    if is_early is None:
        is_early = _can_start_early(x.device)
    # Triton knows the option for NVIDIA's GPUs only.
    options = {"launch_pdl": True} if is_early else {}
    norm_weight = None if norm_weight is None else as_vector(norm_weight)
    addend = None if addend is None else as_vector(addend.reshape(-1))
    with on_device_of(x):
        if num_rows:
            _one_row_kernel[(-(-num_rows // launch.rows),)](
                as_vector(x.reshape(-1)), _packed(weight), None if up is None else _packed(up),
                addend, norm_weight, out, num_rows, eps,
                num_columns, launch.rows, launch.columns, is_early,
                num_warps=launch.num_warps, **options,
            )  # fmt: skip
    return out


@functools.cache
def _can_start_early(device: torch.device) -> bool:
    """See Note [Early launch]."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _packed(weight: Tensor) -> Tensor:
    return weight if weight.stride() == (weight.size(1), 1) else weight.contiguous()


@triton.jit(do_not_specialize=["num_rows", "eps"])
def _one_row_kernel(
    x_ptr, weight_ptr, up_ptr, addend_ptr, norm_weight_ptr, out_ptr, num_rows, eps,
    NUM_COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = columns_of(COLUMNS, x_ptr.dtype.element_ty)[None, :]
    in_row, in_matrix = columns < NUM_COLUMNS, rows < num_rows
    if IS_EARLY:
        gdc_wait()  # nothing is read or written above: see Note [Early launch]
        gdc_launch_dependents()
    offsets = rows[:, None].to(tl.int64) * NUM_COLUMNS + columns
    mask = in_matrix[:, None] & in_row
    # All loads come before the first use, so that one latency covers them.
    weight = tl.load(weight_ptr + offsets, mask, 0.0, eviction_policy="evict_first")
    if up_ptr is not None:
        up = tl.load(up_ptr + offsets, mask, 0.0, eviction_policy="evict_first")
    x = tl.load(x_ptr + columns, in_row, 0.0)
    if addend_ptr is not None:
        addend = tl.load(addend_ptr + rows, in_matrix, 0.0)
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + columns, in_row, 0.0)
        wide = x.to(tl.float32)
        mean = tl.sum(wide * wide, axis=1) * (1.0 / NUM_COLUMNS)
        x = (wide * tl.rsqrt(mean + eps)[:, None]).to(x.dtype) * norm_weight
    x = x.to(tl.float32)
    y = tl.sum(weight.to(tl.float32) * x, axis=1)
    if up_ptr is not None:
        gate = y.to(out_ptr.dtype.element_ty)
        wide_gate = gate.to(tl.float32)
        activated = (wide_gate / (1.0 + tl.exp2(wide_gate * _MINUS_LOG2_E))).to(gate.dtype)
        y = activated * tl.sum(up.to(tl.float32) * x, axis=1).to(gate.dtype)
    if addend_ptr is not None:
        y += addend.to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), in_matrix)
