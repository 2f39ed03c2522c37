"""Which graph implementation serves a device.

In:  a device and options.
Out: what makes a `GraphPool`, what measures the memory of graphs; and a pool for trials.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from piecewise_backend.config import Config
from piecewise_backend.costs import Meter, of_arenas, of_device
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
