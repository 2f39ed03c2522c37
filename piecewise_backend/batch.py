"""The shape facts of one call, and the table that maps a token count to a capture size.

In:  a token count and the capture sizes.
Out: `BatchDescriptor` (the key of a captured batch) and padded sizes.
Knows nothing of graphs, tensors or models.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from piecewise_backend.errors import ConfigError


class CUDAGraphMode(enum.Enum):
    """Which parts of a step are replayed from graphs."""

    NONE = "none"
    """No graphs: the compiled pieces and the split ops run one after the other."""

    PIECEWISE = "piecewise"
    """Each piece between split ops is a graph; the split ops run in between."""

    FULL = "full"
    """One graph for the whole step, split ops included."""

    FULL_DECODE_ONLY = "full_decode_only"
    """FULL for uniform decode batches, NONE for all others."""

    FULL_AND_PIECEWISE = "full_and_piecewise"
    """FULL for uniform decode batches, PIECEWISE for all others."""

    @property
    def for_decode(self) -> CUDAGraphMode:
        """How uniform decode batches run: NONE, PIECEWISE or FULL."""
        has_two = self in (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE)
        return CUDAGraphMode.FULL if has_two else self

    @property
    def for_mixed(self) -> CUDAGraphMode:
        """How all other batches run: NONE, PIECEWISE or FULL."""
        if self is CUDAGraphMode.FULL_DECODE_ONLY:
            return CUDAGraphMode.NONE
        return CUDAGraphMode.PIECEWISE if self is CUDAGraphMode.FULL_AND_PIECEWISE else self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchDescriptor:
    """The key of a captured batch. As few fields as possible, so that batches share graphs."""

    num_tokens: int
    """Tokens in the batch after padding: a capture size."""
    num_reqs: int | None = None
    """Sequences in the batch; known of uniform batches only."""
    uniform: bool = False
    """A decode batch in which every sequence has the same number of tokens."""
    num_active_loras: int = 0
    """Adapters that the batch uses."""

    @property
    def has_lora(self) -> bool:
        """The batch uses an adapter."""
        return self.num_active_loras > 0


class FallbackReason(enum.Enum):
    """Why a call ran without graphs. The value is what reports and warnings print."""

    DISABLED = "graphs are switched off"
    NO_GRAPHS_ON_DEVICE = "no graphs on this device; graph_impl='emulated' imitates them"
    MODE_HAS_NONE = "the graph mode has no graphs for such batches"
    ANOTHER_RANK = "no graphs of the mode that the ranks agreed on"
    NOT_CAPTURED = "this size is not captured yet; pw.warmup captures ahead of time"
    SIZE_ABOVE_GRID = "more tokens than the largest capture size"
    PADDING_TOO_LARGE = "the next capture size is more than max_padding_factor times the batch"
    PADDING_UNSAFE = "padding would change real rows in a piece of this model"
    EMPTY_BATCH = "a batch of 0 tokens"
    SEVERAL_VARYING_DIMS = "more than one dimension varies"
    TOKEN_DIMS_DIFFER = "inputs disagree about the number of tokens"
    MOVED_INPUT = "a parameter, buffer or cache moved since capture"
    OVERLAPPING_INPUTS = "an input shares memory with one that the model writes"
    CAPTURE_ERROR = "capturing this size failed"
    NESTED_CALL = "the model called itself while a step of it was running"
    OVER_BUDGET = "max_graph_memory leaves no room for graphs of this size"
    EVICTED = "the graphs of this size were evicted; pw.warmup captures them again"
    REBUILDING = "rebuilding: graphs are being captured anew, or that failed"
    ASSUMPTION = "the size violates what a piece was compiled for, and it runs as traced"


# Steps this small are bound by launches: padding costs nothing measurable, whatever its factor.
_ALWAYS_PAD_UP_TO = 64


def default_capture_sizes(
    max_num_seqs: int,
    decode_query_len: int = 1,
    max_num_batched_tokens: int | None = None,
    platform_cap: int = 512,
) -> list[int]:
    """The default grid of capture sizes, ascending.

    1, 2, 4, then steps of 8 below 256 and steps of 16 from there, up to
    `min(2 * max_num_seqs * decode_query_len, platform_cap, max_num_batched_tokens)`, plus
    `max_num_seqs` and `max_num_batched_tokens` where they lie below that cap, off the grid.
    The grid is vLLM's.

    Args:
        max_num_seqs: largest number of sequences in a batch.
        decode_query_len: tokens per sequence in a decode step (1 + speculative tokens).
        max_num_batched_tokens: most tokens in any batch; None means no such limit.
        platform_cap: largest size worth a graph on this platform.

    Raises:
        ConfigError: an argument is not a positive integer.
    """
    limits = {
        "max_num_seqs": max_num_seqs,
        "decode_query_len": decode_query_len,
        "platform_cap": platform_cap,
    }
    if max_num_batched_tokens is not None:
        limits["max_num_batched_tokens"] = max_num_batched_tokens
    for name, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; give a positive integer")
    cap = min(2 * max_num_seqs * decode_query_len, platform_cap)
    cap = min(cap, max_num_batched_tokens or cap)
    grid = {1, 2, 4, *range(8, 256, 8), *range(256, cap + 1, 16)}
    grid |= {max_num_seqs, max_num_batched_tokens or 1}
    return sorted(size for size in grid if size <= cap)


class PaddingTable:
    """Token count -> capture size, or the reason why there is none. O(1) per lookup."""

    def __init__(self, sizes: Sequence[int], max_padding_factor: float) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        self.max_padding_factor = max_padding_factor
        self.largest = self.sizes[-1] if self.sizes else 0
        self._table: list[int | FallbackReason] = [FallbackReason.EMPTY_BATCH]
        below = 0
        for size in self.sizes:
            for num_tokens in range(below + 1, size + 1):
                fits = size <= max(_ALWAYS_PAD_UP_TO, max_padding_factor * num_tokens)
                self._table.append(size if fits else FallbackReason.PADDING_TOO_LARGE)
            below = size

    def lookup(self, num_tokens: int) -> int | FallbackReason:
        """The size whose graphs serve `num_tokens`, or why none does."""
        if num_tokens > self.largest:
            return FallbackReason.SIZE_ABOVE_GRID
        return self._table[num_tokens]

    def smallest_padded(self, size: int) -> int:
        """The smallest token count that `size` serves: the most padding it ever sees."""
        return self._table.index(size)
