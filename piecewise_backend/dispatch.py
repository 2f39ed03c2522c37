"""Decide which graphs may serve a batch, or why none can.

In:  the symbol values of a batch, and what the caller states about it.
Out: `Target`s, best first, or a `FallbackReason`.
Knows nothing of what was captured.

The order is vLLM's: a graph of the whole step, then graphs of the pieces, then none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from piecewise_backend.batch import BatchDescriptor, CUDAGraphMode, FallbackReason, PaddingTable
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.config import Config
from piecewise_backend.current_batch import BatchFacts
from piecewise_backend.grid import (
    lora_case_of,
    lora_cases,
    max_sizes_for,
    multiples_of_query_len,
    within_budget,
)
from piecewise_backend.sizes import Sizes, TokenDim

STATIC_SIZE = 0
"""Stands for the only size of a graph without varying dimensions."""

_FULL, _PIECEWISE, _NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The graphs that could serve a batch."""

    mode: CUDAGraphMode
    """FULL or PIECEWISE."""
    size: int
    """A capture size."""
    num_active_loras: int = 0
    """Of the batch they were captured for; pieces do not depend on it."""

    @property
    def key(self) -> tuple[CUDAGraphMode, int, int]:
        """What captures go by."""
        return self.mode, self.size, self.num_active_loras


@dataclasses.dataclass(frozen=True, slots=True)
class LeftOut:
    """Why a capture size has no graphs though the options name it."""

    reason: FallbackReason
    """Of calls that it would have served."""
    text: str
    """What happened, with numbers."""


Decision = tuple[Target, ...] | FallbackReason


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatcher:
    """The dispatch table of one graph."""

    token_dim: TokenDim
    tables: dict[CUDAGraphMode, PaddingTable]
    """For FULL and for PIECEWISE."""
    mode: CUDAGraphMode
    has_graphs: bool
    """A graph implementation exists for the device."""
    static_num_tokens: int
    """For a graph without varying dimensions: how many tokens it was traced with."""
    decode_query_len: int
    loras: tuple[int, ...]
    grid: dict[CUDAGraphMode, PaddingTable]
    """The tables with all sizes that the options name."""
    left_out: dict[tuple[CUDAGraphMode, int], LeftOut] = dataclasses.field(default_factory=dict)
    """Sizes of `grid` that `tables` lack."""

    @classmethod
    def of(
        cls,
        graph: CompiledGraph,
        config: Config,
        mode: CUDAGraphMode,
        has_graphs: bool,
        static_num_tokens: int,
    ) -> Dispatcher:
        """From the options of a model.

        Args:
            mode: what the option for it became, see `modes`.

        Raises:
            ConfigError: the graphs of one size are more than there may be.
        """
        loras = lora_cases(config.max_loras, config.cudagraph_specialize_lora)
        sizes = config.cudagraph_capture_sizes
        if config.max_graphs is not None:
            used = {mode.for_decode, mode.for_mixed}
            per_size = len(graph.instances) * (_PIECEWISE in used) + len(loras) * (_FULL in used)
            sizes = within_budget(sizes, max_sizes_for(config.max_graphs, max(per_size, 1)))
        # Only uniform batches have a query length; FULL alone serves all others, too.
        is_uniform = mode is not _FULL
        step = math.lcm(config.decode_query_len, config.tensor_parallel_size)
        full = multiples_of_query_len(sizes, step) if is_uniform else sizes
        limit = config.max_cudagraph_capture_size
        full = tuple(size for size in full if limit is None or size <= limit)
        tables = {
            _FULL: PaddingTable(full, config.max_padding_factor),
            _PIECEWISE: PaddingTable(sizes, config.max_padding_factor),
        }
        return cls(
            graph.token_dim,
            tables,
            mode,
            has_graphs,
            static_num_tokens,
            config.decode_query_len,
            loras,
            tables,
        )

    def without(self, mode: CUDAGraphMode, sizes: Mapping[int, LeftOut]) -> Dispatcher:
        """The same with fewer sizes: batches are padded to those that are left."""
        kept = [size for size in self.tables[mode].sizes if size not in sizes]
        table = PaddingTable(kept, self.tables[mode].max_padding_factor)
        left_out = {(mode, size): why for size, why in sizes.items()}
        return dataclasses.replace(
            self, tables=self.tables | {mode: table}, left_out=self.left_out | left_out
        )

    def with_all_sizes(self) -> Dispatcher:
        """The same with nothing left out."""
        return dataclasses.replace(self, tables=self.grid, left_out={})

    @property
    def largest(self) -> int:
        """The largest capture size of any mode."""
        return max(table.largest for table in self.tables.values())

    def decide(self, sizes: Sizes, facts: BatchFacts | None) -> Decision:
        """What may serve a batch, best first, or why it runs without graphs.

        Raises:
            ContractError: the facts contradict the sizes.
        """
        if facts is not None:
            self.require(sizes, facts)
        num_tokens = self.token_dim.num_tokens(sizes)
        if self.mode is _NONE:
            return FallbackReason.DISABLED
        if not self.has_graphs:
            return FallbackReason.NO_GRAPHS_ON_DEVICE
        if isinstance(num_tokens, FallbackReason):
            return num_tokens
        if facts is not None and facts.kind.mode is _NONE:
            return FallbackReason.ANOTHER_RANK
        is_uniform = facts is not None and facts.kind.uniform
        best = self.mode.for_decode if is_uniform else self.mode.for_mixed
        modes = [mode for mode in dict.fromkeys((best, self.mode.for_mixed)) if mode is not _NONE]
        if facts is not None and facts.kind.mode is _PIECEWISE:
            modes = [mode for mode in modes if mode is _PIECEWISE]
            if not modes:
                return FallbackReason.ANOTHER_RANK
        if not modes:
            return FallbackReason.MODE_HAS_NONE
        found = [self._target(mode, num_tokens, sizes, facts) for mode in modes]
        targets = tuple(target for target in found if isinstance(target, Target))
        return targets or next(reason for reason in found if isinstance(reason, FallbackReason))

    def require(self, sizes: Sizes, facts: BatchFacts) -> None:
        """What is stated agrees with the symbol values of a call.

        Raises:
            ContractError: it does not.
        """
        num_tokens = self.token_dim.num_tokens(sizes)
        if isinstance(num_tokens, int) and self.token_dim.tokens:
            facts.require(num_tokens, self.decode_query_len, self.loras[-1])

    def _target(
        self, mode: CUDAGraphMode, num_tokens: int, sizes: Sizes, facts: BatchFacts | None
    ) -> Target | FallbackReason:
        if mode is _FULL and any(size != num_tokens for size in sizes):
            return FallbackReason.TOKEN_DIMS_DIFFER  # of what only split ops see
        loras = facts.kind.num_active_loras if facts is not None and mode is _FULL else 0
        if self.token_dim.tokens:
            at_least = facts.kind.pad_to if facts is not None and num_tokens else 0
            size = self._lookup(mode, max(num_tokens, at_least))
        else:
            size = self._static_size(self.tables[mode].largest)
        if isinstance(size, FallbackReason):
            return size
        return Target(mode, size, lora_case_of(loras, self.loras))

    def _lookup(self, mode: CUDAGraphMode, num_tokens: int) -> int | FallbackReason:
        size = self.tables[mode].lookup(num_tokens)
        if isinstance(size, int):
            return size
        wanted = self.grid[mode].lookup(num_tokens)
        return self.left_out[mode, wanted].reason if isinstance(wanted, int) else wanted

    def _static_size(self, largest: int) -> int | FallbackReason:
        if self.static_num_tokens == 0:
            return FallbackReason.EMPTY_BATCH
        return FallbackReason.SIZE_ABOVE_GRID if self.static_num_tokens > largest else STATIC_SIZE

    def not_whole(self, sizes: Sizes, facts: BatchFacts | None) -> tuple[tuple[int, int], str]:
        """Why a whole step of these sizes cannot be captured, with the size and its adapters."""
        loras = facts.kind.num_active_loras if facts is not None else 0
        reason = f"the sizes of the inputs, {sizes}, are not all the token count: one of them is "
        reason += "seen by split ops only, or is a stride"
        return (self.num_tokens(sizes), loras), reason

    def num_tokens(self, sizes: Sizes) -> int:
        """Real tokens of a batch that graphs serve."""
        counted = self.token_dim.num_tokens(sizes)
        is_varying = self.token_dim.tokens and isinstance(counted, int)
        return counted if is_varying else self.static_num_tokens  # type: ignore[return-value]

    def descriptor(self, target: Target, facts: BatchFacts | None) -> BatchDescriptor:
        """Of the batch that a capture of a whole step is made for."""
        size = target.size or self.static_num_tokens
        is_uniform = facts is not None and facts.kind.uniform
        return BatchDescriptor(
            num_tokens=size,
            num_reqs=size // self.decode_query_len if is_uniform else None,
            uniform=is_uniform,
            num_active_loras=target.num_active_loras,
        )

    def wanted(self, mode: CUDAGraphMode) -> list[BatchDescriptor]:
        """What warm-up captures in FULL or in PIECEWISE mode; nothing if it is not used."""
        if not self.has_graphs or mode not in (self.mode.for_decode, self.mode.for_mixed):
            return []
        sizes = self.tables[mode].sizes
        if mode is _PIECEWISE:
            return [BatchDescriptor(num_tokens=size) for size in sizes]
        is_uniform = self.mode.for_mixed is not _FULL
        return [
            BatchDescriptor(
                num_tokens=size,
                num_reqs=size // self.decode_query_len if is_uniform else None,
                uniform=is_uniform,
                num_active_loras=loras,
            )
            for size in sizes
            for loras in self.loras
        ]

    def trials(self, mode: CUDAGraphMode) -> list[BatchDescriptor]:
        """The batches to verify captures with: without padding, with the least, with the most."""
        if not self.token_dim.tokens:
            return []
        found = []
        for descriptor in self.wanted(mode):
            size, step = descriptor.num_tokens, self.decode_query_len if descriptor.uniform else 1
            fewest = -(-self.tables[mode].smallest_padded(size) // step) * step
            for num_tokens in dict.fromkeys((size, max(size - step, fewest), fewest)):
                num_reqs = num_tokens // step if descriptor.uniform else None
                trial = dataclasses.replace(descriptor, num_tokens=num_tokens, num_reqs=num_reqs)
                found.append(trial)
        return found

    def detail(self, reason: FallbackReason, sizes: Sizes) -> str:
        """What to tell the user about a fallback beside its reason."""
        if reason in (FallbackReason.SEVERAL_VARYING_DIMS, FallbackReason.TOKEN_DIMS_DIFFER):
            return f"varying: {self.token_dim.description} = {sizes}; mark all but one static"
        if reason is FallbackReason.EMPTY_BATCH:
            return "branches of the model on an empty batch go as for more tokens"
        if reason is FallbackReason.SIZE_ABOVE_GRID:
            return f"largest size: {self.largest}; add larger ones to cudagraph_capture_sizes"
        if reason is FallbackReason.PADDING_TOO_LARGE:
            return f"sizes: {self.tables[_PIECEWISE].sizes}; add one nearer to the batch"
        texts = [why.text for why in self.left_out.values() if why.reason is reason]
        if texts:
            return texts[-1]
        if reason is FallbackReason.MODE_HAS_NONE:
            return f"{self.mode.value}; state uniform decode batches with pw.batch"
        return ""
