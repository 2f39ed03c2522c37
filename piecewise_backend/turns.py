"""One call of a runtime at a time, on one CUDA stream after the other.

Knows nothing of what a call does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from piecewise_backend import _torch


class Turns:
    """Calls from several threads wait for each other; a call from within a call does not."""

    def __init__(self, device: torch.device) -> None:
        self._owner = 0
        self._lock = threading.Lock()
        on_stream = _stream_check(device)
        acquire, identify = self._lock.acquire, threading.get_ident

        def enter() -> bool:
            if not acquire(False):
                if self._owner == identify():
                    return False
                acquire()
            self._owner = identify()
            if on_stream is not None:
                try:
                    on_stream()
                except BaseException:
                    self.leave()
                    raise
            return True

        self.enter = enter
        """Wait for one's turn; False if the caller is inside of it already."""

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """No call runs meanwhile, but for one that the caller is inside of: then it is False."""
        is_first = self.enter()
        try:
            yield is_first
        finally:
            if is_first:
                self.leave()

    @property
    def is_taken(self) -> bool:
        """A call is running."""
        return self._lock.locked()

    def leave(self) -> None:
        """The turn is over."""
        self._owner = 0
        self._lock.release()


def _stream_check(device: torch.device) -> Callable[[], None] | None:
    """On CUDA: a call on another stream than the one before must wait for that one."""
    if device.type != "cuda":
        return None
    index = device.index or 0
    last, earlier = _torch.raw_stream(index), torch.cuda.current_stream(device)

    def check() -> None:
        nonlocal last, earlier
        current = _torch.raw_stream(index)
        if current != last:
            stream = torch.cuda.current_stream(device)
            if not torch.cuda.is_current_stream_capturing():  # whoever records has joined streams
                stream.wait_stream(earlier)
            last, earlier = current, stream

    return check
