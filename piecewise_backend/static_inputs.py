"""The buffers from which captured pieces read the arguments of a call.

In:  the inputs of a graph.
Out: for each input whether it is copied into a buffer, bound by address, or passed through,
     and the buffers.
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
from piecewise_backend.steps import Value, reads


@dataclasses.dataclass(frozen=True, slots=True)
class StaticInputs:
    """How each graph input reaches the captured pieces."""

    staged: tuple[int, ...]
    """Copied into a buffer before every replay."""
    bound: tuple[int, ...]
    """Read where they are: parameters, buffers, caches. Their addresses are checked."""
    _graph: CompiledGraph
    _storages: dict[int, torch.UntypedStorage]

    @classmethod
    def of(
        cls, graph: CompiledGraph, arena: Arena, largest: Sizes, copied: frozenset[int]
    ) -> StaticInputs:
        """Allocate buffers for the largest size; smaller ones are views of the same memory.

        Args:
            copied: positions of inputs to copy though they are static.
        """
        read = {name for piece in graph.split.pieces for name in reads(piece)}
        written = written_inputs(graph)
        staged, bound, storages = [], [], {}
        for position, item in enumerate(graph.split.inputs):
            if item.name not in read or not isinstance(item.example, torch.Tensor):
                continue
            layout = graph.layouts[item.name]
            # A cache that a piece updates is not copied to and fro, but written in place.
            is_cache = item.name in written and not layout.is_dynamic
            # State with a token dimension is another tensor for every count: `ctx.ids = ids[:n]`.
            is_in_place = (item.is_static and not layout.is_dynamic) or is_cache
            if is_in_place and position not in copied:
                bound.append(position)
            else:
                staged.append(position)
                storages[position] = arena.lease(layout.num_bytes(largest))
        return cls(tuple(staged), tuple(bound), graph, storages)

    def buffer(self, position: int, sizes: Sizes) -> torch.Tensor:
        """The buffer of a staged input at one capture size."""
        layout = self._graph.layouts[self._graph.split.inputs[position].name]
        empty = torch.empty(0, dtype=layout.dtype, device=layout.device)
        storage = self._storages[position]
        return empty.set_(storage, 0, layout.shape(sizes), layout.stride(sizes))

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
