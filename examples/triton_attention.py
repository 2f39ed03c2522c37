"""The GPU kernel of ``example::paged_attention``: one Triton launch for prefill and decode.

In:  the op's arguments.
Out: ``out`` and the cache slots of this batch, written in one launch.
Knows nothing of models or of how sequences get their blocks. Imported only where Triton is.

One program serves one token and one key/value head: all query heads of the group share its loads.
Its softmax starts from the token's own key, which is always visible, then folds in earlier rows of
this batch (none in decode) and then the cache. So the running maximum is finite from the start.
The host side only reads shapes and strides: a decode step launches it once per layer.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor


def paged_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    context_lens: Tensor,
    layer_name: str,
) -> None:
    """Launch the kernel; rows of q, k, v and out may be strided, heads must be packed."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q_strides, k_strides, v_strides, out_strides = q.stride(), k.stride(), v.stride(), out.stride()
    packed = (head_dim, 1)
    if not q_strides[1:] == k_strides[1:] == v_strides[1:] == out_strides[1:] == packed:
        raise ValueError(
            f"strides of q, k, v, out are {q_strides}, {k_strides}, {v_strides}, {out_strides}; "
            f"the last two of each must be {packed}: pass contiguous heads"
        )
    _paged_attention_kernel[(num_tokens, num_kv_heads)](
        q, k, v, out, kv_cache, block_tables, seq_ids, positions, context_lens,
        q_strides[0], k_strides[0], v_strides[0], out_strides[0], kv_cache.stride(0),
        BLOCK_SIZE=kv_cache.shape[2], MAX_BLOCKS=block_tables.shape[1],
        **_constants(num_heads, num_kv_heads, head_dim, q.dtype, q.device),
    )  # fmt: skip


@functools.cache
def _constants(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Compile-time values that depend on the model and the device only."""
    group = num_heads // num_kv_heads
    block_n, num_stages = _tile(head_dim, dtype, device)
    return {
        "SLOT_WIDTH": num_kv_heads * head_dim,
        "GROUP": group,
        # tl.dot wants at least 16 rows; the rows past the group are masked.
        "GROUP_ROWS": max(16, triton.next_power_of_2(group)),
        "HEAD_DIM": head_dim,
        "BLOCK_N": block_n,
        # Scores are in base 2, where the hardware has an exponential.
        "SCALE": head_dim**-0.5 * math.log2(math.e),
        "num_stages": num_stages,
    }


def _tile(head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """How many keys are folded in at once, and how many tiles are on their way.

    One sequence's few tiles are one after the other, so that large ones make a decode step shorter;
    two of keys and two of values have to fit into shared memory, with some room.
    """
    if dtype == torch.float32:  # its dots run on plain FMA units, with both operands in registers
        return 32, 3
    properties = torch.cuda.get_device_properties(device)
    by_default = properties.shared_memory_per_block
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", by_default)
    keys = min(256, max(64, 2**14 // head_dim))
    if 2 * 2 * keys * head_dim * dtype.itemsize > shared_bytes - 2**14:
        return 64, 3
    return keys, 2


@triton.jit
def _fold(q, keys, values, valid, best, total, acc, SCALE: tl.constexpr):
    """Add one tile of keys to the running softmax ``(best, total, acc)``."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * SCALE
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_best[:, None])
    keep = tl.exp2(best - new_best)
    acc = acc * keep[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_best, total * keep + tl.sum(weights, axis=1), acc


@triton.jit
def _slot_offsets(table_ptr, positions, valid, BLOCK_SIZE: tl.constexpr, SLOT_WIDTH: tl.constexpr):
    """Where the cache entries of some positions of one sequence start."""
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    return (blocks * BLOCK_SIZE + positions % BLOCK_SIZE) * SLOT_WIDTH


@triton.jit
def _paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cache_ptr, tables_ptr, seq_ids_ptr, positions_ptr, contexts_ptr,
    q_stride, k_stride, v_stride, out_stride, values_offset,
    BLOCK_SIZE: tl.constexpr, MAX_BLOCKS: tl.constexpr, SLOT_WIDTH: tl.constexpr,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, heads, tile = tl.arange(0, HEAD_DIM), tl.arange(0, GROUP_ROWS), tl.arange(0, BLOCK_N)
    table_ptr = tables_ptr + tl.load(seq_ids_ptr + row).to(tl.int64) * MAX_BLOCKS
    position, context = tl.load(positions_ptr + row).to(tl.int32), tl.load(contexts_ptr + row)
    lane = kv_head * HEAD_DIM + dims
    in_group = (heads < GROUP)[:, None]
    head_offsets = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + row * q_stride + head_offsets, mask=in_group, other=0.0)
    key = tl.load(k_ptr + row * k_stride + lane)
    value = tl.load(v_ptr + row * v_stride + lane)
    best = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * SCALE
    total = tl.full([GROUP_ROWS], 1.0, tl.float32)
    acc = tl.zeros([GROUP_ROWS, HEAD_DIM], tl.float32) + value.to(tl.float32)[None, :]

    for start in range(context, position, BLOCK_N):
        valid = start + tile < position
        rows = (row - position + start + tile)[:, None]
        keys = tl.load(k_ptr + rows * k_stride + lane[None, :], mask=valid[:, None], other=0.0)
        values = tl.load(v_ptr + rows * v_stride + lane[None, :], mask=valid[:, None], other=0.0)
        best, total, acc = _fold(q, keys, values, valid, best, total, acc, SCALE)

    for start in range(0, context, BLOCK_N):
        valid = start + tile < context
        slots = _slot_offsets(table_ptr, start + tile, valid, BLOCK_SIZE, SLOT_WIDTH)
        entry_ptrs = cache_ptr + slots[:, None] + lane[None, :]
        keys = tl.load(entry_ptrs, mask=valid[:, None], other=0.0)
        values = tl.load(entry_ptrs + values_offset, mask=valid[:, None], other=0.0)
        best, total, acc = _fold(q, keys, values, valid, best, total, acc, SCALE)

    tl.store(out_ptr + row * out_stride + head_offsets, acc / total[:, None], mask=in_group)
    entry_ptr = cache_ptr + _slot_offsets(table_ptr, position, True, BLOCK_SIZE, SLOT_WIDTH) + lane
    tl.store(entry_ptr, key)
    tl.store(entry_ptr + values_offset, value)
