"""Compiled artifacts on disk, made once by all processes together.

In:  a key, and how to make, and how to load, what belongs to it.
Out: what was made, now or by an earlier process.
Knows nothing of compilers.

A cache must never be the reason that a program fails or computes something else: what cannot be
read is made anew, what cannot be stored is not stored, and a warning says so once. The one thing
that is refused is a directory that other users could put files into.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from piecewise_backend import cache_entry
from piecewise_backend.cache_contents import LOCK, make_room
from piecewise_backend.cache_entry import UNFINISHED, Damaged, Key
from piecewise_backend.errors import ConfigError
from piecewise_backend.file_lock import LockTimeoutError, locked
from piecewise_backend.trust import distrust

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BYTES = 4 * 2**30
# Longer than one compilation takes, or the waiting process compiles in vain.
_LOCK_SECONDS = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Made(Generic[T]):
    """Something new, and what to store of it."""

    value: T
    artifact: bytes | None
    """None: it cannot be stored."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched(Generic[T]):
    """What belongs to a key."""

    value: T
    is_hit: bool
    """It was stored, and nothing was made."""


class ArtifactStore:
    """The artifacts in one directory. Made by `open_store`."""

    def __init__(
        self, root: Path, *, max_bytes: int = MAX_BYTES, lock_seconds: float = _LOCK_SECONDS
    ) -> None:
        self.root = root
        self._max_bytes = max_bytes
        self._lock_seconds = lock_seconds
        self._has_warned = False

    def fetch(
        self, key: Key, make: Callable[[], Made[T]], load: Callable[[bytes], T]
    ) -> Fetched[T]:
        """What belongs to `key`, loaded if any process stored it, else made and stored.

        Other processes and threads that ask for the same meanwhile wait for it.

        Args:
            key: everything that the artifact depends on.
            make: makes it; what it raises is raised.
            load: from stored bytes. What it raises makes the entry a damaged one.
        """
        folder = self.root / cache_entry.name_of(key)
        found = self._load(folder, key, load)
        if isinstance(found, Fetched):
            return found
        with contextlib.ExitStack() as held:
            try:
                lock = folder.with_suffix(LOCK)
                held.enter_context(locked(lock, seconds=self._lock_seconds))
            except (OSError, LockTimeoutError) as error:
                self._warn(f"{found or error}; compiled anew, and not stored")
                return Fetched(make().value, is_hit=False)
            # Another process may have stored it, or replaced what was damaged, meanwhile.
            found = self._load(folder, key, load)
            if isinstance(found, Fetched):
                return found
            is_free = self._clear_place(folder, found)
            made = make()
            if made.artifact is not None and is_free:
                self._store(folder, key, made.artifact)
        return Fetched(made.value, is_hit=False)

    def find(self, key: Key, load: Callable[[bytes], T]) -> T | None:
        """What belongs to `key` if any process stored it. What is damaged is removed.

        Args:
            key: everything that the artifact depends on.
            load: from stored bytes. What it raises makes the entry a damaged one.
        """
        folder = self.root / cache_entry.name_of(key)
        found = self._load(folder, key, load)
        if isinstance(found, Damaged):
            try:
                with locked(folder.with_suffix(LOCK), seconds=self._lock_seconds):
                    # Another process may have replaced it meanwhile.
                    found = self._load(folder, key, load)
                    if isinstance(found, Damaged):
                        self._clear_place(folder, found)
            except (OSError, LockTimeoutError) as error:
                self._warn(f"{found} ({error}); not used")
        return found.value if isinstance(found, Fetched) else None

    def _load(
        self, folder: Path, key: Key, load: Callable[[bytes], T]
    ) -> Fetched[T] | Damaged | None:
        found = cache_entry.read(folder, key)
        if not isinstance(found, bytes):
            return found
        try:
            value = load(found)
        except Exception as error:
            # Of the loaders of compilers nothing is known. What was stored by this same build
            # of torch and does not load is of no use to anybody.
            log.debug("loading %s failed", folder, exc_info=True)
            reason = f"it does not load: {type(error).__name__}: {error}"
            return Damaged(folder / cache_entry.ARTIFACT, reason)
        with contextlib.suppress(OSError):  # the time of last use matters to eviction only
            os.utime(folder)
        return Fetched(value, is_hit=True)

    def _clear_place(self, folder: Path, found: Damaged | None) -> bool:
        """Remove what is in the way; what killed processes left of this entry, too."""
        if found is not None:
            message = f"{found}; removed and compiled anew"
            warnings.warn(f"compilation cache: {message}", RuntimeWarning, stacklevel=3)
        try:
            cache_entry.remove(folder)
            for path in self.root.glob(f"{folder.name}.*{UNFINISHED}"):
                cache_entry.remove_unfinished(path)
        except OSError as error:
            self._warn(f"{error}; not stored")
            return False
        return True

    def _store(self, folder: Path, key: Key, artifact: bytes) -> None:
        try:
            cache_entry.write(folder, key, artifact)
            removed = make_room(self.root, self._max_bytes, keep=folder.name)
        except OSError as error:
            self._warn(f"{folder}: {error}; not stored")
            return
        if removed:
            names = [entry.name for entry in removed]
            log.info("compilation cache: over %d bytes, removed %s", self._max_bytes, names)

    def _warn(self, message: str) -> None:
        """Say once what is wrong with the directory: the next entry will have the same."""
        log.info("compilation cache: %s", message)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"compilation cache: {message}", RuntimeWarning, stacklevel=4)


def open_store(root: Path, *, max_bytes: int = MAX_BYTES) -> ArtifactStore | None:
    """The store in a directory, which is made if need be; None, with a warning, if it cannot be.

    Raises:
        ConfigError: others could put files there, and loading runs what is in them.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = distrust(root)
    except OSError as error:
        warnings.warn(f"no compilation cache: {error}", RuntimeWarning, stacklevel=2)
        return None
    if reason is not None:
        raise ConfigError(
            f"cache_dir={str(root)!r}: {reason}, and loading an artifact runs the code in it; "
            "name a directory that only you can write, chmod 700"
        )
    return ArtifactStore(root, max_bytes=max_bytes)
