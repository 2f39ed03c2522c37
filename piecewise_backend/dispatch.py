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
        return self.table.lookup(num_tokens)

    def _decide_static(self) -> int | FallbackReason:
        if self.static_num_tokens == 0:
            return FallbackReason.EMPTY_BATCH
        if self.static_num_tokens > self.table.largest:
            return FallbackReason.SIZE_ABOVE_GRID
        return STATIC_SIZE

    def detail(self, reason: FallbackReason, sizes: Sizes) -> str:
        """What to tell the user about a fallback beside its reason."""
        if reason in (FallbackReason.SEVERAL_VARYING_DIMS, FallbackReason.TOKEN_DIMS_DIFFER):
            return f"varying: {self.token_dim.description} = {sizes}; mark all but one static"
        if reason is FallbackReason.EMPTY_BATCH:
            return "branches of the model on an empty batch go as for more tokens"
        if reason is FallbackReason.SIZE_ABOVE_GRID:
            largest = self.table.largest
            return f"largest size: {largest}; add larger ones to cudagraph_capture_sizes"
        if reason is FallbackReason.PADDING_TOO_LARGE:
            return f"sizes: {self.table.sizes}; add one nearer to the batch"
        return ""
