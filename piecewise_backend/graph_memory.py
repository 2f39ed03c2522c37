"""What the graphs of one model take of one device, those of all its traces and instances together.

In:  readings of memory around captures, and around giving them up.
Out: bytes in use, and the room that a limit leaves.
Knows nothing of captures.

Note [What a driver keeps]
A driver does not give back what it holds for graphs that are gone, but takes it for graphs to
come (on an H200: tests/gpu/test_budgets.py). So that memory is neither free nor in use. It counts
as reusable, and as used again when a capture takes less from the device than was expected.
"""

from __future__ import annotations

import dataclasses

from piecewise_backend.budget import CHUNK
from piecewise_backend.costs import NOTHING, MemoryUse


@dataclasses.dataclass(slots=True)
class Account:
    """The part of one instance, in bytes."""

    allocator_bytes: int = 0
    """Reserved for its pool."""
    driver_bytes: int = 0
    """Held by the driver for its graphs."""


class GraphMemory:
    """The sum over all accounts, and what the driver keeps of graphs that are gone."""

    def __init__(self) -> None:
        self.use = NOTHING
        """What was taken and is not known to have come back. Graphs that go because something that
        they read was replaced are not measured: they are taken to stay with the driver."""
        self.reusable_bytes = 0
        """Part of it; see Note [What a driver keeps]."""

    @property
    def bytes_in_use(self) -> int:
        """What the graphs that exist take."""
        return self.use.num_bytes - self.reusable_bytes

    def room(self, limit: int | None) -> int | None:
        """Bytes that further graphs may take; None if there is no limit.

        It leaves a chunk that the last of them may take too much.
        """
        if limit is None:
            return None
        spare = CHUNK if self.use.device_bytes is not None else 0
        return max(limit - self.bytes_in_use - spare, 0)

    def grow(self, account: Account, growth: MemoryUse, expected_driver_bytes: int | None) -> int:
        """Something was captured.

        Args:
            growth: what it took.
            expected_driver_bytes: what it would have taken if nothing could be used again; None
                if nobody knows.

        Returns:
            Bytes that the driver holds for it.
        """
        self._take(account, growth)
        reused = self.reusable_bytes  # perhaps all
        if expected_driver_bytes is not None:
            reused = min(reused, max(expected_driver_bytes - growth.driver_bytes, 0))
        self.reusable_bytes -= reused
        account.driver_bytes += growth.driver_bytes + reused
        return growth.driver_bytes + reused

    def fail(self, account: Account, growth: MemoryUse) -> None:
        """A capture failed: it left no graph, and took memory all the same."""
        self._take(account, growth)
        self.reusable_bytes += max(growth.driver_bytes, 0)

    def _take(self, account: Account, growth: MemoryUse) -> None:
        self.use += growth
        account.allocator_bytes += growth.allocator_bytes or 0

    def give_up(self, account: Account, freed: MemoryUse, driver_bytes: int) -> None:
        """Some graphs are gone.

        Args:
            freed: what came back.
            driver_bytes: what the driver held for them.
        """
        self.use -= freed
        account.allocator_bytes -= freed.allocator_bytes or 0
        account.driver_bytes -= driver_bytes
        self.reusable_bytes += max(driver_bytes - freed.driver_bytes, 0)

    def close(self, account: Account) -> None:
        """All graphs of an account and their pool are gone, at a time when nothing is measured."""
        pool = MemoryUse(account.allocator_bytes, account.allocator_bytes)
        self.give_up(account, pool, account.driver_bytes)
