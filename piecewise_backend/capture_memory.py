"""The pool and the buffers that all captures of one instance share, measured.

In:  a device, options, the account of the whole model.
Out: what a capture needs, and what captures took and gave back.
Knows nothing of how sizes are captured.
"""

from __future__ import annotations

import weakref

import torch

from piecewise_backend.buffers import Arena
from piecewise_backend.config import Config
from piecewise_backend.costs import NOTHING, MemoryUse
from piecewise_backend.graph_memory import Account, GraphMemory
from piecewise_backend.graphs import GraphPool
from piecewise_backend.pools import empty_cache, memory_limit_of, meter_of, pool_maker
from piecewise_backend.static_inputs import StaticInputs


class CaptureMemory:
    """Made with the first capture, and again with the first after a release."""

    def __init__(self, device: torch.device, config: Config, model: GraphMemory) -> None:
        """Nothing yet: the collector may make or clear one in the middle of a capture."""
        self.device = device
        self.model = model
        """What all graphs of the model take."""
        self.limit = memory_limit_of(device, config)
        """Most bytes that they may take; None if there is no limit."""
        self.pool: GraphPool | None = None
        self.arena = Arena(device)
        """Of buffers behind split ops that return fresh tensors."""
        self.static_inputs: StaticInputs | None = None
        self._make_pool = pool_maker(device, config)
        self._meter = meter_of(device, config)
        self._account = Account()
        # Whoever forgets a model does not tell.
        weakref.finalize(self, model.close, self._account).atexit = False

    def existing_pool(self) -> GraphPool:
        """The pool, made if there is none."""
        self.pool = self.pool or self.new_pool()
        return self.pool

    def new_pool(self) -> GraphPool:
        """Another pool, for recordings that are thrown away."""
        assert self._make_pool is not None
        return self._make_pool(self.device)

    def reading(self) -> MemoryUse:
        """What is in use on the device at this moment."""
        pool_bytes = self.pool.num_arena_bytes if self.pool is not None else 0
        return self._meter(self.arena.num_bytes + pool_bytes)

    def reading_before_capture(self) -> MemoryUse:
        """The same, not counting what the allocator keeps of a pool that was released."""
        if self.pool is None:
            empty_cache(self.device)
        return self.reading()

    def grew(self, growth: MemoryUse, expected_driver_bytes: int | None) -> int:
        """A capture took that much; see `GraphMemory.grow`."""
        return self.model.grow(self._account, growth, expected_driver_bytes)

    def failed(self, growth: MemoryUse) -> None:
        """A capture took that much and left no graph."""
        self.model.fail(self._account, growth)

    def shrank(self, before: MemoryUse, driver_bytes: int) -> MemoryUse:
        """Some graphs are gone; returns what came back.

        Args:
            before: the reading while they existed.
            driver_bytes: what the driver held for them.
        """
        empty_cache(self.device)
        freed = before - self.reading()
        self.model.give_up(self._account, freed, driver_bytes)
        return freed

    def shrank_unmeasured(self, driver_bytes: int) -> None:
        """Some graphs are gone, others hold the pool."""
        self.model.give_up(self._account, NOTHING, driver_bytes)

    def release(self) -> None:
        """No graph is left: forget pool and buffers."""
        self.static_inputs = None
        self.arena = Arena(self.device)
        self.pool = None

    def release_unmeasured(self) -> None:
        """The same at a time when nothing may be measured, such as in somebody's capture."""
        self.release()
        self.model.close(self._account)
