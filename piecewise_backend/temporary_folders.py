"""Temporary folders that go with the process that made them, however it ends.

In:  nothing.
Out: a folder; and those are gone whose processes are.
Knows nothing of what is in them.

Note [Owners]
A folder has a file that its owner keeps locked: who can lock it knows that the owner has ended,
and is the only one to remove the folder. The file is locked before it has its name, so that
nobody takes a folder for abandoned that is just being made. A forked child has the same open file,
and with it the lock: it closes that, which unlocks nothing, or the folder would stay for as long
as the child does. Programs that are started do not get it. Where a disk is shared, machines may
not see each other's locks, so the file says which one its owner runs on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

from piecewise_backend.cache_entry import remove_unfinished
from piecewise_backend.file_lock import has_the_name
from piecewise_backend.trust import distrust

log = logging.getLogger(__name__)

_PREFIX = "piecewise-"
_OWNER = "owner.lock"
_LONGEST_NAME = 256  # of a machine


@dataclasses.dataclass(frozen=True, slots=True)
class OwnFolder:
    """A folder that this process has made. See Note [Owners]."""

    path: Path
    descriptor: int
    """Of the file that it keeps locked."""

    def goes_with(self, owner: object) -> None:
        """Remove it when nobody has `owner` any more, or this process ends."""
        removal = weakref.finalize(owner, _remove_own, self)

        def leave_to_parent() -> None:
            if removal.detach():
                os.close(self.descriptor)

        os.register_at_fork(after_in_child=leave_to_parent)


def make_folder() -> OwnFolder:
    """A new folder.

    Raises:
        OSError: there is no place for temporary files.
    """
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        return OwnFolder(path, _own(path))
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def remove_abandoned() -> None:
    """Remove what processes of this user left that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if _is_of_this_user(folder) and _has_removed(folder):
                log.info("removed %s: its owner has ended", folder)
        except OSError as error:  # it is no such folder, has an owner, or is just being removed
            log.debug("%s is left alone: %s", folder, error)


def _own(folder: Path) -> int:
    """See Note [Owners]."""
    not_yet = folder / f"{_OWNER}.new"
    descriptor = os.open(not_yet, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, _machine())
        os.rename(not_yet, folder / _OWNER)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_of_this_user(folder: Path) -> bool:
    """And nobody else can put something in its place."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and distrust(folder) is None


def _has_removed(folder: Path) -> bool:
    """Remove it if it has no owner.

    Raises:
        OSError: it has one, or cannot be removed, or is no such folder.
    """
    path = folder / _OWNER
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.read(descriptor, _LONGEST_NAME) == _machine()
        if not is_ours or not has_the_name(descriptor, path):
            return False
        _remove(folder)
    finally:
        os.close(descriptor)
    return True


def _remove_own(folder: OwnFolder) -> None:
    with contextlib.suppress(OSError):
        _remove(folder.path)
    os.close(folder.descriptor)


def _remove(folder: Path) -> None:
    """Its name goes first, so that nobody puts something into it, and what tells the owner last:
    who is killed in between leaves a folder that is removed by another one."""
    away = folder.with_name(f"{folder.name}.away")
    os.rename(folder, away)
    for path in away.iterdir():
        if path.name != _OWNER:
            remove_unfinished(path)
    shutil.rmtree(away)


def _machine() -> bytes:
    return os.uname().nodename.encode()[:_LONGEST_NAME]
