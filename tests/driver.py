"""What a driver does with the memory of graphs, imitated for emulated graphs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from piecewise_backend import capture_memory
from piecewise_backend.costs import MIB, MemoryUse
from piecewise_backend.graphs import EmulatedGraphPool


class Driver:
    """A meter for emulated graphs: each takes memory on the "device" for as long as it lives."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        graph_bytes: int = MIB,
        chunk: int = 1,
        keeps: bool = False,
    ) -> None:
        self.graph_bytes, self.chunk = graph_bytes, chunk
        self.keeps = keeps
        """It gives nothing back to the device, and uses it for the next graphs."""
        self.most_bytes = 0
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        original = EmulatedGraphPool.capture

        def capture(pool: Any, function: Any, inputs: Any) -> Any:
            graph = original(pool, function, inputs)
            self._alive.add(graph.owner)
            return graph

        patch.setattr(EmulatedGraphPool, "capture", capture)
        patch.setattr(capture_memory, "meter_of", lambda device, config: self)

    @property
    def num_bytes(self) -> int:
        needed = -(-len(self._alive) * self.graph_bytes // self.chunk) * self.chunk
        return max(needed, self.most_bytes) if self.keeps else needed

    def __call__(self, arena_bytes: int) -> MemoryUse:
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        return MemoryUse(arena_bytes, arena_bytes + self.num_bytes)
