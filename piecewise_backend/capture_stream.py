"""Streams to record CUDA graphs on, lent out with the memory that recorded kernels scratch in.

In:  a device, and who wants a stream.
Out: `CaptureStream`, which nobody else has meanwhile.
Knows nothing of graphs.

Note [Workspaces]
A matrix product may need scratch memory, cuBLAS one piece of it and cuBLASLt another. torch
allocates each once per thread and stream, and process-wide tables keep them; a graph records their
addresses. `mode="reduce-overhead"` of torch.compile empties those tables, as anybody may, and so
does the end of any graph of the stream on torch >= 2.13: the memory would be freed under our
graphs. So it lies in a pool of its own that is never given back, and a stream for captures is lent
out together with it. There are as many as pools were ever alive at once. Before a size is warmed
up and captured both are allocated there, if the tables lack them; nothing else ever is, so that no
other tensor comes to lie where a graph scratches.
"""

from __future__ import annotations

import functools
import weakref
from typing import ClassVar

import torch

from piecewise_backend import _torch
from piecewise_backend.errors import CaptureError
from piecewise_backend.update_stream import UpdateStream

_NUM_STREAMS = 32  # that torch hands out in turns


class CaptureStream:
    """A stream to record on, and the workspaces of its matrix products. See Note [Workspaces].

    Raises:
        CaptureError: every stream that torch hands out is in use.
    """

    _unused: ClassVar[dict[torch.device, list[CaptureStream]]] = {}
    _taken: ClassVar[set[int]] = set()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._workspaces = torch.cuda.MemPool()
        with _torch.ordinary_tensors():
            self._bias = torch.zeros(16, device=device)
            self._matrix, self._product = torch.zeros(2, 16, 16, device=device)
        for _ in range(_NUM_STREAMS):
            self.stream = torch.cuda.Stream(device)
            if self.stream.cuda_stream in self._taken:
                continue
            with torch.cuda.device(device), torch.cuda.stream(self.stream):
                self.claim_workspaces()
            # Streams are handed out in turns: one that has workspaces is in use.
            if self._workspaces.snapshot(include_traces=False):
                self._taken.add(self.stream.cuda_stream)
                return
        raise CaptureError(
            f"none of the {_NUM_STREAMS} streams of {device} is free to capture graphs on; two "
            "models on one stream would share scratch memory. Delete models or use fewer streams"
        )

    @functools.cached_property
    def updates(self) -> UpdateStream:
        """The stream beside graphs that were recorded on this one. First asked for outside of
        recordings."""
        return UpdateStream(self.device)

    def claim_workspaces(self) -> None:
        """Have the workspaces for this thread and the current stream allocated in our pool."""
        with torch.cuda.use_mem_pool(self._workspaces, self.device):
            torch.cuda.current_blas_handle()
            # A product with a bias goes to cuBLASLt.
            torch.addmm(self._bias, self._matrix, self._matrix, out=self._product)

    @classmethod
    def lend_to(cls, borrower: object, device: torch.device) -> CaptureStream:
        """A stream that nobody else has until `borrower` is gone."""
        unused = cls._unused.setdefault(device, [])
        lent = unused.pop() if unused else cls(device)
        weakref.finalize(borrower, unused.append, lent).atexit = False
        return lent
