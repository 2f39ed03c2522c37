"""Decide how one batch is served: from graphs of some size, or without and why.

In:  the symbol values of a batch.
Out: a capture size, or a `FallbackReason`.
Knows nothing of what was captured.
"""

from __future__ import annotations

import dataclasses

from piecewise_backend.batch import CUDAGraphMode, FallbackReason, PaddingTable
from piecewise_backend.config import Config
from piecewise_backend.sizes import Sizes, TokenDim

STATIC_SIZE = 0
"""Stands for the only size of a graph without varying dimensions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatcher:
    """The dispatch table of one graph."""

    token_dim: TokenDim
    table: PaddingTable
    mode: CUDAGraphMode
    has_graphs: bool
    """A graph implementation exists for the device."""
    static_num_tokens: int
    """For a graph without varying dimensions: how many tokens it was traced with."""
    unsafe_sizes: dict[int, str] = dataclasses.field(default_factory=dict)
    """Sizes at which padding changes real rows, with what was observed."""
    failed_sizes: dict[int, str] = dataclasses.field(default_factory=dict)
    """Sizes whose capture failed, with the error."""

    @classmethod
    def of(
        cls, token_dim: TokenDim, config: Config, has_graphs: bool, static_num_tokens: int
    ) -> Dispatcher:
        """From the options of a model."""
        table = PaddingTable(config.cudagraph_capture_sizes, config.max_padding_factor)
        return cls(token_dim, table, config.cudagraph_mode, has_graphs, static_num_tokens)

    def decide(self, sizes: Sizes) -> int | FallbackReason:
        """The capture size for a batch, or why it runs without graphs."""
        if self.mode is CUDAGraphMode.NONE:
            return FallbackReason.DISABLED
        if not self.has_graphs:
            return FallbackReason.NO_GRAPHS_ON_DEVICE
        num_tokens = self.token_dim.num_tokens(sizes)
        if isinstance(num_tokens, FallbackReason):
            return num_tokens
        if not self.token_dim.tokens:
            return self._decide_static()
        size = self.table.lookup(num_tokens)
        if isinstance(size, FallbackReason):
            return size
        if size in self.failed_sizes:
            return FallbackReason.CAPTURE_ERROR
        if size != num_tokens and size in self.unsafe_sizes:
            return FallbackReason.PADDING_UNSAFE
        return size

    def _decide_static(self) -> int | FallbackReason:
        if self.static_num_tokens == 0:
            return FallbackReason.EMPTY_BATCH
        if self.static_num_tokens > self.table.largest:
            return FallbackReason.SIZE_ABOVE_GRID
        return FallbackReason.CAPTURE_ERROR if STATIC_SIZE in self.failed_sizes else STATIC_SIZE

    def detail(self, reason: FallbackReason, sizes: Sizes) -> str:
        """What to tell the user about a fallback beside its reason."""
        if reason in (FallbackReason.SEVERAL_VARYING_DIMS, FallbackReason.TOKEN_DIMS_DIFFER):
            return f"varying: {self.token_dim.description} = {sizes}; mark all but one static"
        if reason is FallbackReason.EMPTY_BATCH:
            return "branches of the model on an empty batch go as for more tokens"
        if reason is FallbackReason.SIZE_ABOVE_GRID:
            return f"largest size: {self.table.largest}; raise max_cudagraph_capture_size"
        if reason is FallbackReason.PADDING_TOO_LARGE:
            return f"sizes: {self.table.sizes}; add one nearer to the batch"
        if reason is FallbackReason.PADDING_UNSAFE:
            return f"{next(iter(self.unsafe_sizes.values()))}; add the exact size to the grid"
        if reason is FallbackReason.CAPTURE_ERROR:
            return next(iter(self.failed_sizes.values()))
        return ""
