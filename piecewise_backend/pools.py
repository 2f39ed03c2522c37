"""Which graph implementation serves a device.

In:  a device and options.
Out: what makes a `GraphPool`; what measures and limits the memory of graphs; a pool for trials.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from piecewise_backend.config import Config
from piecewise_backend.costs import Meter, of_arenas, of_device
from piecewise_backend.errors import ConfigError
from piecewise_backend.graphs import CudaGraphPool, EmulatedGraphPool, GraphPool


class TrialPool(EmulatedGraphPool):
    """Imitates graphs on the stream of a real pool."""

    def __init__(self, device: torch.device, pool: GraphPool) -> None:
        super().__init__(device)
        self._pool = pool

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        with self._pool.side_stream():
            yield


def pool_maker(device: torch.device, config: Config) -> Callable[[torch.device], GraphPool] | None:
    """What makes graphs for a device, if they exist."""
    if config.graph_impl == "emulated":
        return EmulatedGraphPool
    return CudaGraphPool if device.type == "cuda" else None


def meter_of(device: torch.device, config: Config) -> Meter:
    """What reads the memory that graphs on a device take."""
    is_emulated = config.graph_impl == "emulated" or device.type != "cuda"
    return of_arenas if is_emulated else of_device(device)


def memory_limit_of(device: torch.device, config: Config) -> int | None:
    """Most bytes that graphs may take on a device; None if there is no limit.

    Raises:
        ConfigError: the limit is a fraction of the memory of a device that has none of its own.
    """
    limit = config.max_graph_memory
    if not isinstance(limit, float) or pool_maker(device, config) is None:
        return limit if isinstance(limit, int) else None
    if device.type != "cuda":
        raise ConfigError(
            f"max_graph_memory={limit} is a fraction of the device's memory, which {device} has "
            "none of; give bytes"
        )
    return int(limit * torch.cuda.get_device_properties(device).total_memory)


def empty_cache(device: torch.device) -> None:
    """Wait for a device, and give it back what torch's allocator keeps of it for later."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
