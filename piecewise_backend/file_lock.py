"""One process at a time, told apart by a file.

In:  a path, and for how long to wait.
Out: a block that no other process or thread is in.
Knows nothing of what is being guarded.

Note [Killed holders]
The lock belongs to an open file, not to the file's existence: the system gives it up when its
holder ends, however that ends. So nothing stale can block, and no lock has to be broken. A
holder may remove the file; who waited for it then finds that another file, or none, has the
name, and starts over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_LONGEST_PAUSE = 0.2


class LockTimeoutError(Exception):
    """Another process holds the lock for longer than was to be waited."""


@contextlib.contextmanager
def locked(path: Path, *, seconds: float) -> Iterator[None]:
    """Hold the lock of this name for the block. See Note [Killed holders].

    Raises:
        LockTimeoutError: it was not free within `seconds`.
        OSError: the file cannot be made or locked, on a read-only disk for example.
    """
    deadline = time.monotonic() + seconds
    descriptor = _acquire(path, deadline)
    try:
        yield
    finally:
        # Not left to `close`: a forked child may have the same open file.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _acquire(path: Path, deadline: float) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            _wait(descriptor, path, deadline)
            if has_the_name(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _wait(descriptor: int, path: Path, deadline: float) -> None:
    pause = 0.005
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise LockTimeoutError(f"{path} is locked by another process") from None
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, _LONGEST_PAUSE)


def has_the_name(descriptor: int, path: Path) -> bool:
    """An open file is still the one that is found there. See Note [Killed holders]."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
