"""The buffers from which captured pieces read the arguments of a call.

In:  the inputs of a graph.
Out: for each input whether it is copied into a buffer, bound by address, or passed through,
     and the buffers; for pieces, and for whole steps.
Knows nothing of captures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from piecewise_backend.buffers import Arena
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.sizes import Sizes
from piecewise_backend.split_ops import inputs_written_by
from piecewise_backend.steps import Value, reads


@dataclasses.dataclass(frozen=True, slots=True)
class StaticInputs:
    """How each graph input reaches the captured pieces."""

    staged: tuple[int, ...]
    """Copied into a buffer before every replay."""
    bound: tuple[int, ...]
    """Read where they are: parameters, buffers, caches. Their addresses are checked."""
    _read_by_split_ops: tuple[tuple[int, ...], tuple[int, ...]]
    _graph: CompiledGraph
    _storages: dict[int, torch.UntypedStorage]

    @classmethod
    def of(
        cls,
        graph: CompiledGraph,
        arena: Arena,
        largest: Sizes,
        copied: frozenset[int],
        *,
        for_whole_steps: bool,
    ) -> StaticInputs:
        """Allocate buffers for the largest size; smaller ones are views of the same memory.

        Args:
            copied: positions of inputs to copy though they are static.
            for_whole_steps: also of what only split ops read, see `of_whole_step`.
        """
        by_pieces = {name for piece in graph.split.pieces for name in reads(piece)}
        by_all = {name for step in graph.split.steps for name in reads(step)}
        written = written_inputs(graph)
        written |= inputs_written_by(graph.split) - by_pieces
        staged: dict[bool, list[int]] = {True: [], False: []}
        bound: dict[bool, list[int]] = {True: [], False: []}
        storages = {}
        for position, item in enumerate(graph.split.inputs):
            is_read = item.name in (by_all if for_whole_steps else by_pieces)
            if not is_read or not isinstance(item.example, torch.Tensor):
                continue
            is_pieces = item.name in by_pieces
            layout = graph.layouts[item.name]
            is_dynamic = layout.is_dynamic if is_pieces else layout.is_varying
            # A cache that a piece updates is not copied to and fro, but written in place.
            is_cache = item.name in written and not is_dynamic
            # State with a token dimension is another tensor for every count: `ctx.ids = ids[:n]`.
            is_in_place = (item.is_static and not is_dynamic) or is_cache
            if is_in_place and position not in copied:
                bound[is_pieces].append(position)
            else:
                staged[is_pieces].append(position)
                storages[position] = arena.lease(layout.num_bytes(largest))
        others = (tuple(staged[False]), tuple(bound[False]))
        return cls(tuple(staged[True]), tuple(bound[True]), others, graph, storages)

    def of_whole_step(self) -> StaticInputs:
        """The same buffers, and those of what only split ops read: they are in the graph, too."""
        staged, bound = self._read_by_split_ops
        return dataclasses.replace(
            self,
            staged=tuple(sorted(self.staged + staged)),
            bound=tuple(sorted(self.bound + bound)),
        )

    def buffer(self, position: int, sizes: Sizes) -> torch.Tensor:
        """The buffer of a staged input at one capture size."""
        layout = self._graph.layouts[self._graph.split.inputs[position].name]
        empty = torch.empty(0, dtype=layout.dtype, device=layout.device)
        storage = self._storages[position]
        return empty.set_(storage, 0, layout.shape(sizes), layout.stride(sizes))

    def rows(self, padded: Sizes, sizes: Sizes) -> dict[str, torch.Tensor]:
        """The rows of a batch in the buffers of one capture size, by the source of the input."""
        found = {}
        for position in self.staged:
            item = self._graph.split.inputs[position]
            layout = self._graph.layouts[item.name]
            found[item.source] = layout.rows(self.buffer(position, padded), sizes)
        return found

    def stage(self, args: Sequence[Any], sizes: Sizes) -> dict[str, torch.Tensor]:
        """Copy the staged arguments into their buffers at `sizes`; the padded rows repeat
        the first real row."""
        values = {}
        for position in self.staged:
            item = self._graph.split.inputs[position]
            buffer = self.buffer(position, sizes)
            real = args[position]
            edge = real
            for dim, size in enumerate(buffer.shape):
                if real.size(dim) != size:
                    edge = edge.narrow(dim, 0, 1)
            buffer.copy_(edge.expand_as(buffer))
            for dim, size in enumerate(real.shape):
                if buffer.size(dim) != size:
                    buffer = buffer.narrow(dim, 0, size)
            buffer.copy_(real)
            values[item.name] = self.buffer(position, sizes)
        return values


def written_inputs(graph: CompiledGraph) -> set[str]:
    """The graph inputs that pieces write in place."""
    written = set()
    for instance in graph.instances:
        for position in graph.facts[instance.distinct.index].mutated:
            ref = instance.inputs[position]
            if isinstance(ref, Value):
                written.add(ref.name)
    return written
