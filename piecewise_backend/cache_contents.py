"""What a cache directory holds, and making room in it.

In:  the directory.
Out: its entries; fewer of them.
Knows nothing of what artifacts are.

An entry is removed by whoever holds the lock of its group, so never while it is being made. A
process that has loaded one does not need it any more.
"""

from __future__ import annotations

import dataclasses
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from piecewise_backend import cache_entry
from piecewise_backend.cache_entry import UNFINISHED, Damaged, Record
from piecewise_backend.file_lock import LockTimeoutError, locked

_LOCK = ".lock"
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One artifact in a cache directory."""

    folder: Path
    num_bytes: int
    made: float
    """When it was stored, in seconds since 1970."""
    used: float
    """When it was stored or last loaded."""

    @property
    def name(self) -> str:
        """What it is found by."""
        return self.folder.name

    def record(self) -> Record | Damaged | None:
        """What it was stored under."""
        return cache_entry.read_record(self.folder)


def lock_of(root: Path, group: str) -> Path:
    """Who makes or removes an entry of a group holds this."""
    return root / (group + _LOCK)


def folders_of(root: Path, group: str) -> list[Path]:
    """The entries of a group, last used first."""
    return sorted(_named(root, group), key=_last_used, reverse=True)


def entries(root: Path) -> tuple[Entry, ...]:
    """The entries in a directory, last used first; none if it does not exist."""
    found = (_entry(path) for path in _named(root))
    return tuple(sorted((e for e in found if e), key=lambda entry: entry.used, reverse=True))


def make_room(root: Path, max_bytes: int, *, keep: str) -> tuple[Entry, ...]:
    """Remove what was used least recently until what stays has at most `max_bytes`.

    Args:
        keep: the name of an entry that stays, however large it is.

    Returns:
        What was removed. Entries that a process is working on stay.
    """
    _remove_unfinished(root)
    there = entries(root)
    excess = sum(entry.num_bytes for entry in there) - max_bytes
    removed = []
    for entry in reversed(there):
        if excess <= 0:
            break
        if entry.name != keep and _remove(entry.folder):
            excess -= entry.num_bytes
            removed.append(entry)
    return tuple(removed)


def clear(root: Path) -> tuple[Entry, ...]:
    """Remove every entry that no process is working on, and return those removed."""
    _remove_unfinished(root)
    return tuple(entry for entry in entries(root) if _remove(entry.folder))


def _named(root: Path, group: str = "") -> Iterator[Path]:
    return (path for path in root.glob(f"{group}*") if _NAME.fullmatch(path.name))


def _last_used(folder: Path) -> float:
    try:
        return folder.lstat().st_mtime
    except FileNotFoundError:  # another process has just removed it
        return 0.0


def _entry(folder: Path) -> Entry | None:
    try:
        # What a link points to is no part of an entry, and may be the link itself.
        found = folder.lstat()
        is_folder = stat.S_ISDIR(found.st_mode)
        sizes = [path.lstat() for path in folder.iterdir()] if is_folder else [found]
    except FileNotFoundError:  # another process has just removed it
        return None
    except PermissionError:  # it is damaged, which who reads it is told
        sizes = []
    made = max((size.st_mtime for size in sizes), default=found.st_mtime)
    return Entry(folder, sum(size.st_size for size in sizes), made, found.st_mtime)


def _remove(folder: Path) -> bool:
    lock = lock_of(folder.parent, _group(folder))
    try:
        with locked(lock, seconds=0):
            cache_entry.remove(folder)
            lock.unlink(missing_ok=True)
    except LockTimeoutError:
        return False
    return True


def _remove_unfinished(root: Path) -> None:
    """Remove what killed processes left: nobody holds the lock of its group."""
    for path in root.glob(f"*{UNFINISHED}"):
        try:
            with locked(lock_of(root, _group(path)), seconds=0):
                cache_entry.remove_unfinished(path)
        except LockTimeoutError:
            continue


def _group(path: Path) -> str:
    return path.name.partition("-")[0]
