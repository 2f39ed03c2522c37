"""Memory with stable addresses, reused as soon as nobody reads it.

In:  byte counts.
Out: storages that stay where they are; a lease ends when the last tensor on it is gone.
Knows nothing of graphs: it serves the buffers behind split ops and the emulated pool alike.
"""

from __future__ import annotations

import dataclasses

import torch

from piecewise_backend import _torch

_ALIGNMENT = 256  # what the CUDA allocator gives, so that compiled code sees aligned inputs


@dataclasses.dataclass(slots=True)
class _Block:
    memory: torch.Tensor
    lease: _torch.StorageWeakRef


class Arena:
    """Blocks of memory on one device that are leased out and come back by themselves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[_Block] = []

    @property
    def num_bytes(self) -> int:
        """Bytes held, leased or not."""
        return sum(block.memory.numel() for block in self._blocks)

    def lease(self, num_bytes: int, *, at_least: int = 0) -> torch.UntypedStorage:
        """A storage of `num_bytes`; a new block is made for `at_least` bytes if that is more."""
        free = [
            block
            for block in self._blocks
            if block.lease.expired() and block.memory.numel() >= num_bytes
        ]
        if free:
            block = min(free, key=lambda candidate: candidate.memory.numel())
        else:
            size = max(num_bytes, at_least, _ALIGNMENT)
            with _torch.ordinary_tensors():
                memory = torch.zeros(size, dtype=torch.uint8, device=self.device)
            block = _Block(memory, lease=None)  # type: ignore[arg-type]
            self._blocks.append(block)
        storage = _torch.borrowed_storage(block.memory, num_bytes)
        block.lease = _torch.StorageWeakRef(storage)
        return storage

    def tensor(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        num_bytes: int,
        *,
        at_least: int = 0,
    ) -> torch.Tensor:
        """A leased tensor; the lease lasts until it and its views are gone."""
        storage = self.lease(num_bytes, at_least=at_least)
        with _torch.ordinary_tensors():
            empty = torch.empty(0, dtype=dtype, device=self.device)
            return empty.set_(storage, 0, shape, stride)
