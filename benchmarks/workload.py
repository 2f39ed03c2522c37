"""Models in the middle of decoding: every sequence has a context in the paged cache.

In:  a shape, a device.
Out: `Workload`: a model, its cache, and the inputs of a decode step of some sequences.
Knows nothing of compilers or clocks.
"""

import dataclasses

import torch

import piecewise_backend as pw
from examples.engine import ModelInputs, as_inputs, scratch_inputs
from examples.llama import Llama, LlamaConfig
from examples.paged_attention import PagedCache

BLOCK_SIZE = 16
MAX_BATCH = 16
MAX_CHUNK = 56

# The output layer is not part of a step, so the vocabulary is small.
_VOCAB_SIZE = 1024


def shape(
    num_layers: int,
    hidden_size: int,
    *,
    head_dim: int = 64,
    num_kv_heads: int = 8,
    intermediate_size: int | None = None,
) -> LlamaConfig:
    """A decoder of this depth and width, its MLP 3.5 times as wide unless given."""
    return LlamaConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=hidden_size // head_dim,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size or hidden_size * 7 // 2,
        vocab_size=_VOCAB_SIZE,
    )


SHAPES = {
    "32x1024": shape(32, 1024),
    "16x2048": shape(16, 2048, intermediate_size=8192),
    "32x4096": shape(32, 4096, head_dim=128),
}
"""The shapes of the design, layers by width."""

TINY_SHAPES = {"2x64": shape(2, 64, head_dim=16, num_kv_heads=2)}
"""For trying a benchmark out on any machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A model, and sequences that are ready for their next token."""

    model: Llama
    cache: PagedCache
    device: torch.device
    seq_ids: tuple[int, ...]
    contexts: tuple[int, ...]
    """Cached tokens of each sequence."""

    @classmethod
    def build(
        cls, config: LlamaConfig, device: torch.device, context: int, num_seqs: int = MAX_BATCH
    ) -> "Workload":
        """Random weights in bfloat16, and sequences of `context` tokens or a bit more."""
        contexts = tuple(context + 8 * (i % MAX_BATCH) for i in range(num_seqs))
        blocks = [-(-(length + MAX_CHUNK) // BLOCK_SIZE) for length in contexts]
        cache = config.new_cache(
            num_blocks=1 + sum(blocks), max_seqs=1 + num_seqs, max_blocks_per_seq=max(blocks),
            block_size=BLOCK_SIZE, device=device, dtype=torch.bfloat16,
        )  # fmt: skip
        model = Llama(config, device=device, dtype=torch.bfloat16)
        model.attach(cache)
        seq_ids = tuple(cache.add_sequence(length + MAX_CHUNK) for length in contexts)
        workload = cls(model, cache, device, seq_ids, contexts)
        workload._prefill()
        return workload

    def _prefill(self) -> None:
        for seq_id, length in zip(self.seq_ids, self.contexts, strict=True):
            ids = [(seq_id + 7 * position) % _VOCAB_SIZE for position in range(length)]
            zeros = [0] * length
            self.model(*as_inputs(ids, range(length), [seq_id] * length, zeros, self.device))

    def decode_inputs(self, batch: int) -> ModelInputs:
        """The next token of the first `batch` sequences; no dimension is marked."""
        positions = self.contexts[:batch]
        ids = [11 + i for i in range(batch)]
        marked = as_inputs(ids, positions, self.seq_ids[:batch], positions, self.device)
        ids_, positions_, seq_ids, contexts = (rows.clone() for rows in marked)
        return ids_, positions_, seq_ids, contexts

    def mixed_inputs(self, num_decodes: int, chunk: int) -> ModelInputs:
        """The next token of some sequences, and the next `chunk` tokens of one more."""
        contexts = [*self.contexts[:num_decodes], *[self.contexts[num_decodes]] * chunk]
        positions = [c + max(0, i - num_decodes) for i, c in enumerate(contexts)]
        seq_ids = [*self.seq_ids[:num_decodes], *[self.seq_ids[num_decodes]] * chunk]
        ids = [11 + i for i in range(len(contexts))]
        marked = as_inputs(ids, positions, seq_ids, contexts, self.device)
        ids_, positions_, seq_ids_, contexts_ = (rows.clone() for rows in marked)
        return ids_, positions_, seq_ids_, contexts_

    def warmup_inputs(self, descriptor: pw.BatchDescriptor) -> ModelInputs:
        """Inputs of any size that touch no sequence."""
        return scratch_inputs(descriptor.num_tokens, self.cache, _VOCAB_SIZE)

    def weight_bytes(self) -> int:
        """What a step reads: all weights but the embedding and the output layer."""
        read = [*self.model.layers.parameters(), *self.model.norm.parameters()]
        return sum(weight.numel() * weight.element_size() for weight in read)
