"""What captures cost: graphs, seconds and memory.

In:  readings of memory before and after a capture.
Out: `CaptureCost`, one per capture, and a table of them for people.
Knows nothing of graphs.

Note [Two figures]
The allocator's figure is the memory that it has reserved. Graphs of one pool share it, so that the
largest size pays for it and smaller ones add next to nothing. The device's figure is what is taken
of the whole device: it has the allocator's, and what the driver keeps for the nodes of the graphs.
It also has what other models and processes take at the same time, in steps of some MiB.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

from piecewise_backend.batch import CUDAGraphMode

MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory in use at a moment, or its growth. See Note [Two figures]."""

    allocator_bytes: int | None = None
    """Reserved by torch's allocator; for emulated graphs, held by their arenas."""
    device_bytes: int | None = None
    """Taken on the device; None where graphs are emulated."""

    @property
    def num_bytes(self) -> int:
        """The device's figure; the allocator's where there is none."""
        found = self.allocator_bytes if self.device_bytes is None else self.device_bytes
        return found or 0

    @property
    def driver_bytes(self) -> int:
        """What is taken outside of the allocator; 0 if not known."""
        if self.device_bytes is None or self.allocator_bytes is None:
            return 0
        return self.device_bytes - self.allocator_bytes

    def __add__(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(
            _sum(self.allocator_bytes, other.allocator_bytes),
            _sum(self.device_bytes, other.device_bytes),
        )

    def __sub__(self, other: MemoryUse) -> MemoryUse:
        return self + MemoryUse(_minus(other.allocator_bytes), _minus(other.device_bytes))


NOTHING = MemoryUse(0, 0)
"""No memory; added to a figure that is not known it stays unknown."""


class Meter(Protocol):
    """Reads how much memory is in use."""

    def __call__(self, arena_bytes: int) -> MemoryUse:
        """The use at this moment.

        Args:
            arena_bytes: held by the arenas of the captures that are measured.
        """
        ...


def of_device(device: torch.device) -> Meter:
    """Reads the allocator and the driver; waits for no kernel and empties no cache."""

    def read(arena_bytes: int) -> MemoryUse:  # which the allocator has reserved
        free, total = torch.cuda.mem_get_info(device)
        return MemoryUse(torch.cuda.memory_reserved(device), total - free)

    return read


def of_arenas(arena_bytes: int) -> MemoryUse:
    """For emulated graphs: they have no other memory."""
    return MemoryUse(arena_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureCost:
    """What one capture took."""

    mode: CUDAGraphMode
    """FULL or PIECEWISE."""
    size: int
    """The capture size; 0 for a graph of static shapes."""
    num_active_loras: int
    """Adapters of the batch that it was captured for."""
    num_graphs: int
    seconds: float
    """Wall time, trial runs included."""
    memory: MemoryUse
    """By how much it grew."""


def cost_table(costs: Sequence[CaptureCost]) -> str:
    """The costs and their sum, for people; empty if nothing was captured.

    Memory is in MiB, `-` where there is no figure.
    """
    if not costs:
        return ""
    has_loras = any(cost.num_active_loras for cost in costs)
    head = ["mode", "size", "adapters", "graphs", "seconds", "allocator MiB", "device MiB"]
    lines = [head]
    for cost in costs:
        name = [cost.mode.value, str(cost.size or "static"), str(cost.num_active_loras)]
        lines.append([*name, *_figures(cost.num_graphs, cost.seconds, cost.memory)])
    memory = sum((cost.memory for cost in costs), start=NOTHING)
    num_graphs, seconds = sum(c.num_graphs for c in costs), sum(c.seconds for c in costs)
    lines.append(["total", "", "", *_figures(num_graphs, seconds, memory)])
    if not has_loras:
        lines = [[*line[:2], *line[3:]] for line in lines]
    return _aligned(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text: the first column to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, others, strict=True)]
        lines.append("  ".join([name.ljust(first), *right]))
    return "\n".join(lines)


def mib(num_bytes: int | None) -> str:
    """As text in MiB; `-` for None."""
    return "-" if num_bytes is None else f"{num_bytes / MIB:.1f}"


def _figures(num_graphs: int, seconds: float, memory: MemoryUse) -> list[str]:
    used = (mib(memory.allocator_bytes), mib(memory.device_bytes))
    return [str(num_graphs), f"{seconds:.2f}", *used]


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _minus(a: int | None) -> int | None:
    return None if a is None else -a
