"""Who else could put files into a directory: loading an artifact runs the code in it.

In:  a path.
Out: None, or why what lies there may be somebody else's.
Knows nothing of artifacts.

The owner of a directory may do anything in it, and who may write to its parent may put another
in its place, unless the parent is sticky as /tmp is. Links are followed, and where they lie is
looked at as well.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def distrust(path: Path) -> str | None:
    """Why others could change what lies at `path`, which exists; None if they could not."""
    absolute, real = Path(os.path.abspath(path)), path.resolve(strict=True)
    if reason := _foreign(real, may_be_sticky=False):
        return reason
    parents = dict.fromkeys((*real.parents, *absolute.parents))
    return next((r for p in parents if (r := _foreign(p, may_be_sticky=True))), None)


def distrust_entry(folder: Path, *names: str) -> str | None:
    """Why others could change these files of a folder whose parents are trusted.

    Raises:
        OSError: one of them is not there.
    """
    paths = (folder, *(folder / name for name in names))
    linked = next((path for path in paths if path.is_symlink()), None)
    if linked is not None:
        return f"{linked} is a link"
    if special := next((path for path in paths[1:] if not path.is_file() and path.exists()), None):
        return f"{special} is no file"
    return next((r for p in paths if (r := _foreign(p, may_be_sticky=False))), None)


def _foreign(path: Path, *, may_be_sticky: bool) -> str | None:
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to {_user(found.st_uid)}"
    if may_be_sticky and found.st_mode & stat.S_ISVTX:
        return None
    if found.st_mode & stat.S_IWOTH:
        return f"{path} can be written by every user"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"{path} can be written by group {_group(found.st_gid)}"
    return None


def _is_own_group(number: int) -> bool:
    """The group that many systems give each user, which nobody else is in; or root's."""
    if number == 0:
        return True
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:  # numbers without names, as in containers
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
