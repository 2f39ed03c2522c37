"""A paged KV cache and one custom op, ``example::paged_attention``, for prefill and decode alike.

In:  the flattened tokens of a batch, and for each token its sequence and its position.
Out: attention written into ``out``; the tokens' own keys and values written into the cache.
Knows nothing of models, schedulers or the compiler backend.

Row ``r`` reads keys from two places. Tokens cached before this call (positions below
``context_lens[r]``) come from the cache, through the block table. Tokens of this call come from
``k`` and ``v`` themselves: rows ``r - (positions[r] - context_lens[r])`` to ``r``, because the rows
of one sequence are contiguous and in order. No row reads a slot that this call writes, so one
launch needs no ordering between rows, and whole prompts, chunks of prompts and single decode
tokens can share a batch. Every size is the token count or fixed: nothing else varies.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

SCRATCH_SEQUENCE = 0
"""The sequence no request gets. All-zero inputs name its first slot, so padding writes there."""

_SCRATCH_BLOCK = 0


@torch.library.custom_op(
    "example::paged_attention", mutates_args=("out", "kv_cache"), device_types="cpu"
)
def paged_attention(
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
    """Causal grouped-query attention over a paged cache; this is the CPU kernel.

    Shapes: ``q`` and ``out`` ``[T, Hq, D]``, ``k`` and ``v`` ``[T, Hkv, D]``, ``kv_cache``
    ``[2, num_blocks, block_size, Hkv, D]``, ``block_tables`` ``[max_seqs, max_blocks]`` int32,
    ``seq_ids`` and ``context_lens`` ``[T]`` int32, ``positions`` ``[T]`` int64.
    ``layer_name`` only labels the call in graphs and dumps.
    """
    if q.shape[0] == 0:
        return
    cached, is_cached = _cached_keys(kv_cache, block_tables, seq_ids, context_lens)
    fresh, is_fresh = _batch_keys(k, v, positions, context_lens)
    valid = torch.cat([is_cached, is_fresh], dim=1)
    keys_values = torch.cat([cached, fresh], dim=2).float()
    # A weight of zero does not hide a NaN, and slots that are not this row's may hold anything.
    keys_values.masked_fill_(~valid[:, :, None, None], 0.0)
    keys, values = keys_values.transpose(2, 3)
    attended = F.scaled_dot_product_attention(
        q.float()[:, :, None], keys, values, attn_mask=valid[:, None, None], enable_gqa=True
    )
    out.copy_(attended[:, :, 0])
    _write_cache(k, v, kv_cache, block_tables, seq_ids, positions)


@paged_attention.register_fake
def _paged_attention_fake(
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
    """Nothing to return; ties the row counts, so that a traced graph has one token symbol."""
    for rows in (k, v, out, seq_ids, positions, context_lens):
        torch._check(rows.shape[0] == q.shape[0], lambda: "all inputs need one row per token")


if importlib.util.find_spec("triton") is not None:
    from examples.triton_attention import paged_attention_triton

    paged_attention.register_kernel("cuda", paged_attention_triton)


def _cached_keys(
    kv_cache: Tensor, block_tables: Tensor, seq_ids: Tensor, context_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values each row finds in the cache, ``[2, T, N, Hkv, D]``, and which are real."""
    num_blocks = -(-int(context_lens.max()) // kv_cache.shape[2])
    gathered = kv_cache[:, block_tables[seq_ids, :num_blocks]].flatten(2, 3)
    return gathered, torch.arange(gathered.shape[2]) < context_lens[:, None]


def _batch_keys(
    k: Tensor, v: Tensor, positions: Tensor, context_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values each row finds in this batch, ``[2, T, N, Hkv, D]``, and which are real."""
    num_tokens = k.shape[0]
    num_before = positions - context_lens
    offsets = torch.arange(int(num_before.max()) + 1)
    rows = (torch.arange(num_tokens) - num_before)[:, None] + offsets
    rows = rows.clamp_(0, num_tokens - 1)
    return torch.stack([k[rows], v[rows]]), offsets <= num_before[:, None]


def _write_cache(
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
) -> None:
    """Store each row's key and value in the slot of its position."""
    block_size = kv_cache.shape[2]
    blocks = block_tables[seq_ids, positions // block_size]
    kv_cache[0, blocks, positions % block_size] = k
    kv_cache[1, blocks, positions % block_size] = v


def paged_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    context_lens: Tensor,
    layer_name: str = "",
) -> None:
    """What the op means, one sequence and one query head at a time; slow, for tests."""
    block_size, group = kv_cache.shape[2], q.shape[1] // k.shape[1]
    starts = (positions == context_lens).nonzero().flatten().tolist()
    for first, last in zip(starts, [*starts[1:], q.shape[0]], strict=True):
        table = block_tables[int(seq_ids[first])].tolist()
        context = int(context_lens[first])
        slots = [(table[p // block_size], p % block_size) for p in range(context + last - first)]
        past = torch.stack([kv_cache[:, b, i] for b, i in slots[:context]], 1) if context else None
        now = torch.stack([k[first:last], v[first:last]])
        keys, values = now if past is None else torch.cat([past, now], dim=1)
        is_future = torch.ones(last - first, len(slots), device=q.device).triu(context + 1).bool()
        for head in range(q.shape[1]):
            head_keys, head_values = keys[:, head // group], values[:, head // group]
            scores = q[first:last, head].float() @ head_keys.float().T * q.shape[2] ** -0.5
            weights = scores.masked_fill(is_future, float("-inf")).softmax(dim=-1)
            out[first:last, head] = (weights @ head_values.float()).to(out.dtype)
        for row, (block, index) in enumerate(slots[context:], start=first):
            kv_cache[0, block, index], kv_cache[1, block, index] = k[row], v[row]


class PagedCache:
    """Per-layer key/value blocks, the block tables, and which blocks are free.

    The tensors live as long as the cache and never move. Sequence 0 and block 0 are scratch: the
    unused entries of every table name block 0, so a stray write cannot reach a real sequence.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_blocks: int,
        max_seqs: int,
        max_blocks_per_seq: int,
        block_size: int = 16,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if num_blocks < 2 or max_seqs < 2:
            raise ValueError(
                f"num_blocks={num_blocks} and max_seqs={max_seqs} must both be at least 2: "
                "block 0 and sequence 0 are reserved as scratch"
            )
        shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.kv = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(num_layers)]
        self.block_tables = torch.full(
            (max_seqs, max_blocks_per_seq), _SCRATCH_BLOCK, device=device, dtype=torch.int32
        )
        self._free_blocks = list(range(num_blocks - 1, _SCRATCH_BLOCK, -1))
        self._free_seqs = list(range(max_seqs - 1, SCRATCH_SEQUENCE, -1))
        self._blocks: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free_blocks)

    def add_sequence(self, num_tokens: int) -> int:
        """Reserve slots for a new sequence of ``num_tokens`` tokens; returns its id."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens}; a sequence has at least one token")
        if not self._free_seqs:
            raise RuntimeError(
                f"all {len(self._blocks)} sequences are in use; free one first, "
                f"or build the cache with max_seqs > {self.block_tables.shape[0]}"
            )
        seq_id = self._free_seqs.pop()
        self._blocks[seq_id], self._lengths[seq_id] = [], 0
        try:
            self.extend(seq_id, num_tokens)
        except RuntimeError:
            self.free(seq_id)
            raise
        return seq_id

    def extend(self, seq_id: int, num_tokens: int = 1) -> None:
        """Reserve slots for ``num_tokens`` more tokens of a sequence."""
        blocks = self._blocks_of(seq_id)
        length = self._lengths[seq_id] + num_tokens
        num_needed = -(-length // self.block_size)
        num_new = num_needed - len(blocks)
        max_blocks = self.block_tables.shape[1]
        if num_needed > max_blocks:
            raise RuntimeError(
                f"sequence {seq_id} would have {length} tokens, over the limit of "
                f"{max_blocks * self.block_size}; build the cache with "
                f"max_blocks_per_seq >= {num_needed}"
            )
        if num_new > len(self._free_blocks):
            raise RuntimeError(
                f"sequence {seq_id} needs {num_new} more blocks of {self.block_size} tokens, "
                f"{len(self._free_blocks)} are free; free a sequence first, "
                f"or build the cache with more than num_blocks={self.kv[0].shape[1]}"
            )
        if num_new > 0:
            new = [self._free_blocks.pop() for _ in range(num_new)]
            self.block_tables[seq_id, len(blocks) : num_needed] = torch.tensor(
                new, dtype=torch.int32, device=self.block_tables.device
            )
            blocks.extend(new)
        self._lengths[seq_id] = length

    def free(self, seq_id: int) -> None:
        """Give a finished sequence's blocks and its id back."""
        self._free_blocks.extend(reversed(self._blocks_of(seq_id)))
        self._free_seqs.append(seq_id)
        self.block_tables[seq_id] = _SCRATCH_BLOCK
        del self._blocks[seq_id], self._lengths[seq_id]

    def _blocks_of(self, seq_id: int) -> list[int]:
        if seq_id not in self._blocks:
            raise ValueError(
                f"sequence {seq_id} is not in the cache; live ones are {sorted(self._blocks)}, "
                "use the id that add_sequence returned"
            )
        return self._blocks[seq_id]
