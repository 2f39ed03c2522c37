"""Temporary folders that go with the process that made them, however it ends.

In:  nothing.
Out: a folder; and those are gone whose processes are.
Knows nothing of what is in them.

Note [Owners]
A folder has a file that its owner keeps locked: who can lock it knows that the owner has ended,
and is the only one to remove the folder. The file is locked before it has its name, so that
nobody takes a folder for abandoned that is just being made; who is killed before that leaves one
without a name, which is removed when it is a day old and has nothing else in it.

A forked child has the same open file, and with it the lock: it closes that, which unlocks nothing,
or the folder would stay for as long as the child does. So a fork waits until it is known which
files are open. Programs that are started do not get it. Where a disk is shared, machines may not
see each other's locks, so the file says which one its owner runs on.
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
import threading
import time
import weakref
from pathlib import Path

from piecewise_backend.cache_entry import remove_unfinished
from piecewise_backend.file_lock import has_the_name
from piecewise_backend.trust import distrust

log = logging.getLogger(__name__)

_PREFIX = "piecewise-"
_OWNER = "owner.lock"
_NOT_YET = f"{_OWNER}.new"
_SECONDS_TO_MAKE_ONE = 24 * 60 * 60  # far more than it takes
_LONGEST_NAME = 256  # of a machine


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class OwnFolder:
    """A folder that this process has made. See Note [Owners]."""

    path: Path
    descriptor: int
    """Of the file that it keeps locked."""

    def goes_with(self, owner: object) -> None:
        """Remove it when nobody has `owner` any more, or this process ends."""
        weakref.finalize(owner, _remove_own, self)


# What is to be done at a fork cannot be taken back, so it is said once and not for each folder.
_own_folders: weakref.WeakSet[OwnFolder] = weakref.WeakSet()
_no_fork = threading.RLock()  # a signal may be handled in the middle, by a fork


def _leave_to_parent() -> None:
    try:
        for folder in list(_own_folders):
            os.close(folder.descriptor)
    finally:
        _own_folders.clear()
        _no_fork.release()


os.register_at_fork(
    before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_leave_to_parent
)


def make_folder() -> OwnFolder:
    """A new folder.

    Raises:
        OSError: there is no place for temporary files.
    """
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with _no_fork:
            folder = OwnFolder(path, _own(path))
            _own_folders.add(folder)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return folder


def remove_abandoned() -> None:
    """Remove what processes of this user left that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if _is_of_this_user(folder) and (
                _has_removed_unfinished(folder) or _has_removed(folder)
            ):
                log.info("removed %s: its owner has ended", folder)
        except OSError as error:  # it is no such folder, has an owner, or is just being removed
            log.debug("%s is left alone: %s", folder, error)


def _own(folder: Path) -> int:
    """See Note [Owners]."""
    not_yet = folder / _NOT_YET
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


def _has_removed_unfinished(folder: Path) -> bool:
    """Remove it if it was never finished: see Note [Owners].

    Raises:
        OSError: it is just being made, or cannot be removed.
    """
    names = os.listdir(folder)
    is_new = time.time() - folder.lstat().st_mtime < _SECONDS_TO_MAKE_ONE
    if is_new or names not in ([], [_NOT_YET]):
        return False
    if names:
        descriptor = os.open(folder / _NOT_YET, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.read(descriptor, _LONGEST_NAME) not in (b"", _machine()):
                return False
            (folder / _NOT_YET).unlink()
        finally:
            os.close(descriptor)
    folder.rmdir()
    return True


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
    if folder not in _own_folders:  # but its parent's
        return
    with contextlib.suppress(OSError):
        _remove(folder.path)
    with _no_fork:
        _own_folders.discard(folder)
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
