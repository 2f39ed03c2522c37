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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from piecewise_backend import cache_entry
from piecewise_backend.cache_contents import entries, folders_of, lock_of, make_room
from piecewise_backend.cache_entry import UNFINISHED, Content, Damaged, Key, Record
from piecewise_backend.cache_misses import why_missed
from piecewise_backend.errors import ConfigError
from piecewise_backend.file_lock import LockTimeoutError, locked
from piecewise_backend.temporary_folders import make_folder, remove_abandoned
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
    content: Content | None
    """None: it cannot be stored."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched(Generic[T]):
    """What belongs to a key."""

    value: T
    is_hit: bool
    """It was stored, and nothing was made."""


Serves = Callable[[Mapping[str, Any]], bool]


def _always(about: Mapping[str, Any]) -> bool:
    return True


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
        self,
        key: Key,
        make: Callable[[], Made[T]],
        load: Callable[[Content], T],
        serves: Serves = _always,
    ) -> Fetched[T]:
        """What belongs to `key`, loaded if any process stored it, else made and stored.

        Other processes and threads that ask for the same meanwhile wait for it.

        Args:
            key: everything that the artifact depends on.
            make: makes it; what it raises is raised.
            load: from what was stored. What it raises makes the entry a damaged one.
            serves: whether what was made for other sizes serves those of `key`, by what its
                maker said about it. See Note [Sizes in a key] in `cache_entry`.
        """
        group = cache_entry.group_of(key)
        found = self._find(key, load, serves)
        if isinstance(found, Fetched):
            return found
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(lock_of(self.root, group), seconds=self._lock_seconds))
            except (OSError, LockTimeoutError) as error:
                # Who has the lock may have stored this before, and be at other sizes by now.
                found = self._find(key, load, serves)
                if isinstance(found, Fetched):
                    return found
                reason = f"{found} ({error})" if found else error
                self._warn(f"{reason}; compiled anew, and not stored")
                return Fetched(make().value, is_hit=False)
            # Another process may have stored it, or replaced what was damaged, meanwhile.
            found = self._find(key, load, serves)
            while isinstance(found, Damaged) and self._has_removed(found):
                found = self._find(key, load, serves)
            if isinstance(found, Fetched):
                return found
            self._log_miss(key)
            is_free = found is None and self._has_cleared(group, cache_entry.name_of(key))
            made = make()
            if made.content is None or not is_free or not self._has_stored(key, made.content):
                return Fetched(made.value, is_hit=False)
        self._make_room(keep=cache_entry.name_of(key))
        return Fetched(made.value, is_hit=False)

    def find(self, key: Key, load: Callable[[Content], T], serves: Serves = _always) -> T | None:
        """What belongs to `key` if any process stored it. What is damaged is removed.

        Args:
            key: everything that the artifact depends on.
            load: from what was stored. What it raises makes the entry a damaged one.
            serves: as of `fetch`.
        """
        found = self._find(key, load, serves)
        if isinstance(found, Damaged):
            lock = lock_of(self.root, cache_entry.group_of(key))
            try:
                with locked(lock, seconds=self._lock_seconds):
                    # Another process may have replaced it meanwhile.
                    found = self._find(key, load, serves)
                    while isinstance(found, Damaged) and self._has_removed(found):
                        found = self._find(key, load, serves)
            except (OSError, LockTimeoutError) as error:
                self._warn(f"{found} ({error}); not used")
        return found.value if isinstance(found, Fetched) else None

    def _find(
        self,
        key: Key,
        load: Callable[[Content], T],
        serves: Serves,
    ) -> Fetched[T] | Damaged | None:
        """What serves, or the first entry on the way there that is damaged."""
        exact = cache_entry.name_of(key)
        folders = folders_of(self.root, cache_entry.group_of(key))
        for folder in sorted(folders, key=lambda folder: folder.name != exact):
            record = cache_entry.read_record(folder)
            if isinstance(record, Damaged):
                return record
            if record is None:  # another process has just removed it
                continue
            if record.differs_from(key):
                return Damaged(folder, cache_entry.KEY, "it holds another key")
            if serves(record.about):
                return self._load(folder, record, load)
        return None

    def _load(
        self, folder: Path, record: Record, load: Callable[[Content], T]
    ) -> Fetched[T] | Damaged:
        artifact = cache_entry.read_artifact(folder, record)
        if isinstance(artifact, Damaged):
            return artifact
        try:
            value = load(Content(artifact, record.about))
        except Exception as error:
            # Of the loaders of compilers nothing is known. What was stored by this same build
            # of torch and does not load is of no use to anybody.
            log.debug("loading %s failed", folder, exc_info=True)
            reason = f"it does not load: {type(error).__name__}: {error}"
            return Damaged(folder, cache_entry.ARTIFACT, reason)
        with contextlib.suppress(OSError):  # the time of last use matters to eviction only
            os.utime(folder)
        return Fetched(value, is_hit=True)

    def _has_removed(self, found: Damaged) -> bool:
        message = f"compilation cache: {found}; removed, and compiled anew if nothing else serves"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        try:
            cache_entry.remove(found.folder)
        except OSError as error:
            self._warn(f"{error}; not stored")
            return False
        return True

    def _has_cleared(self, group: str, name: str) -> bool:
        """Remove what is in the way, and what killed processes left of this group."""
        try:
            cache_entry.remove(self.root / name)
            for path in self.root.glob(f"{group}-*{UNFINISHED}"):
                cache_entry.remove_unfinished(path)
        except OSError as error:
            self._warn(f"{error}; not stored")
            return False
        return True

    def _has_stored(self, key: Key, content: Content) -> bool:
        folder = self.root / cache_entry.name_of(key)
        try:
            cache_entry.write(folder, key, content)
        except OSError as error:
            self._warn(f"{folder}: {error}; not stored")
            return False
        return True

    def _make_room(self, keep: str) -> None:
        try:
            removed = make_room(self.root, self._max_bytes, keep=keep)
        except OSError as error:
            self._warn(f"{error}; nothing removed")
            return
        if removed:
            names = [entry.name for entry in removed]
            log.info("compilation cache: over %d bytes, removed %s", self._max_bytes, names)

    def _log_miss(self, key: Key) -> None:
        if not log.isEnabledFor(logging.INFO):  # it reads every key there is
            return
        there = {entry.name: entry.record() for entry in entries(self.root)}
        records = {name: found for name, found in there.items() if isinstance(found, Record)}
        try:
            reasons = "\n  ".join(why_missed(key, records))
        except Exception as error:
            # Keys there may be of any program and version; a call is not to fail over its log.
            reasons = f"why cannot be said ({type(error).__name__}: {error})"
        log.info(
            "compilation cache: %s is not in %s: %s", cache_entry.name_of(key), self.root, reasons
        )

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
        is_taken = isinstance(error, FileExistsError | NotADirectoryError)
        why = "there is a file of that name, or above it" if is_taken else error.strerror
        text = f"no compilation cache: cache_dir={str(root)!r} cannot be used: {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None
    if reason is not None:
        raise ConfigError(
            f"cache_dir={str(root)!r}: {reason}, and loading an artifact runs the code in it; "
            "name a directory that only you can write, chmod 700"
        )
    return ArtifactStore(root, max_bytes=max_bytes)


def temporary_store() -> ArtifactStore:
    """A store for processes that work for this one, which goes with it. Removes those, too, that
    killed processes left.

    Raises:
        OSError: there is no place for temporary files.
    """
    remove_abandoned()
    folder = make_folder()
    store = ArtifactStore(folder.path)
    folder.goes_with(store)
    return store
