"""A Llama-shaped decoder with random weights, written so that it traces as one graph.

In:  flattened tokens: ids, positions, and for each token its sequence and cached length.
Out: hidden states ``[T, hidden]``; ``compute_logits`` is apart, as only last tokens need it.
Knows nothing of batches, requests or the compiler backend.

Each layer works on ``(hidden, residual)`` so that the residual add sits beside the norm that
follows it and both end up in one kernel. Between two attention calls every layer does the same
work, so a backend that cuts at attention sees three distinct pieces whatever the depth.
"""

import dataclasses
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import examples.paged_attention  # noqa: F401  # defines torch.ops.example.paged_attention
from examples.paged_attention import PagedCache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shape of a model; ``preset`` has three, each field of which can be overridden."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int = 8192
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}; change one of them"
            )

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The preset called ``name``, with some fields replaced."""
        if name not in _PRESETS:
            raise ValueError(f"no preset {name!r}; choose one of {', '.join(PRESET_NAMES)}")
        return cls(**{**_PRESETS[name], **overrides})

    def new_cache(
        self,
        *,
        num_blocks: int,
        max_seqs: int,
        max_blocks_per_seq: int,
        block_size: int = 16,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> PagedCache:
        """A cache with this model's layers and heads."""
        return PagedCache(
            self.num_layers, self.num_kv_heads, self.head_dim,
            num_blocks=num_blocks, max_seqs=max_seqs, max_blocks_per_seq=max_blocks_per_seq,
            block_size=block_size, device=device, dtype=dtype,
        )  # fmt: skip


_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "vocab_size": 256,
    },
    "1b": {
        "num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "vocab_size": 128_256,
    },
    "8b": {
        "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
        "intermediate_size": 14_336, "vocab_size": 128_256,
    },
}  # fmt: skip

PRESET_NAMES = tuple(_PRESETS)
"""What ``LlamaConfig.preset`` accepts."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, of the sum of ``hidden`` and ``residual``."""

    def __init__(self, config: LlamaConfig, **factory: Any) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size, **factory))

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The normalised sum, and the sum itself as the next residual."""
        total = hidden if residual is None else hidden + residual
        wide = total.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale).to(total.dtype) * self.weight, total


class Attention(nn.Module):
    """Fused qkv projection, rotary embedding, paged attention, output projection."""

    kv_cache: Tensor
    block_tables: Tensor

    def __init__(self, config: LlamaConfig, layer: int, **factory: Any) -> None:
        super().__init__()
        self.layer_name = f"layers.{layer}"
        self.head_dim = config.head_dim
        self.widths = [n * config.head_dim for n in (config.num_heads, *[config.num_kv_heads] * 2)]
        self.qkv = nn.Linear(config.hidden_size, sum(self.widths), bias=False, **factory)
        self.project = nn.Linear(self.widths[0], config.hidden_size, bias=False, **factory)
        self.register_buffer("kv_cache", None, persistent=False)
        self.register_buffer("block_tables", None, persistent=False)

    def forward(
        self, hidden: Tensor, rotary: Tensor, positions: Tensor, seq_ids: Tensor, contexts: Tensor
    ) -> Tensor:
        """Attention of the normalised hidden states, before the residual add."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in self.qkv(hidden).split(self.widths, dim=-1)
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        out = torch.empty_like(q)
        torch.ops.example.paged_attention(
            q, k, v, out, self.kv_cache, self.block_tables,
            seq_ids, positions, contexts, self.layer_name,
        )  # fmt: skip
        return self.project(out.flatten(1))


class SwiGLU(nn.Module):
    """``down(silu(gate) * up)`` with gate and up in one projection."""

    def __init__(self, config: LlamaConfig, **factory: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False, **factory)
        self.down = nn.Linear(inner, hidden, bias=False, **factory)

    def forward(self, hidden: Tensor) -> Tensor:
        """The block's contribution, before the residual add."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: LlamaConfig, layer: int, **factory: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config, **factory)
        self.attention = Attention(config, layer, **factory)
        self.mlp_norm = RMSNorm(config, **factory)
        self.mlp = SwiGLU(config, **factory)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, *attention_inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``(hidden, residual)``: what the layer adds, and what it adds it to."""
        hidden, residual = self.attention_norm(hidden, residual)
        hidden = self.attention(hidden, *attention_inputs)
        hidden, residual = self.mlp_norm(hidden, residual)
        return self.mlp(hidden), residual


class Llama(nn.Module):
    """The decoder. Call ``attach`` with a cache before the first forward."""

    rotary: Tensor

    def __init__(
        self,
        config: LlamaConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList(Layer(config, i, **factory) for i in range(config.num_layers))
        self.norm = RMSNorm(config, **factory)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
        self.register_buffer("rotary", rotary_table(config, device), persistent=False)
        self.requires_grad_(False)
        _randomise(self, seed)

    def attach(self, cache: PagedCache) -> None:
        """Use ``cache`` from now on; its tensors become buffers of the attention modules."""
        if len(cache.kv) != len(self.layers):
            raise ValueError(
                f"the cache has {len(cache.kv)} layers, the model {len(self.layers)}; "
                "make it with config.new_cache"
            )
        for layer, kv in zip(self.layers, cache.kv, strict=True):
            layer.attention.kv_cache = kv
            layer.attention.block_tables = cache.block_tables

    def forward(
        self, input_ids: Tensor, positions: Tensor, seq_ids: Tensor, context_lens: Tensor
    ) -> Tensor:
        """Hidden states ``[T, hidden]`` of ``T`` flattened tokens."""
        hidden, residual = self.embedding(input_ids), None
        rotary = self.rotary[positions]
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotary, positions, seq_ids, context_lens)
        return self.norm(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` of some rows of ``forward``'s output."""
        return self.lm_head(hidden)


def rotary_table(config: LlamaConfig, device: torch.device | str) -> Tensor:
    """Cosines and sines ``[max_positions, 2, head_dim // 2]`` in float32."""
    exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
    angles = torch.outer(
        torch.arange(config.max_positions, device=device).float(), config.rope_theta**-exponents
    )
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the halves of every head of ``x`` ``[T, heads, D]`` by its row's angles, in float32."""
    cos, sin = rotary[:, None].unbind(dim=2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _randomise(model: Llama, seed: int) -> None:
    """Fill the matrices in place so that every layer keeps activations near unit size."""
    generator = torch.Generator(model.rotary.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 1.0 if name.startswith("embedding") else parameter.shape[1] ** -0.5
            parameter.normal_(std=std, generator=generator)
