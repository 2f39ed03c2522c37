"""One artifact on disk, with the whole key that it was stored under.

In:  a folder, a key, bytes.
Out: the bytes, or why they cannot be had.
Knows nothing of compilers, and of other entries.

`<name>/artifact` has the bytes, `<name>/key.json` the key and the checksum of the bytes. The name
is a hash of the key that finds the folder; what counts is the key inside, which is compared.

Note [All or nothing]
A folder is written under another name and renamed when everything is on the disk, and renamed
away before it is removed. Who is killed in between leaves a folder that nobody looks into. A
reader that is overtaken sees files of two entries or none: the checksum tells.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piecewise_backend.trust import distrust_entry

Key = Mapping[str, Any]
"""What an artifact depends on, as JSON has it."""

ARTIFACT, KEY = "artifact", "key.json"
UNFINISHED = ".tmp"
_FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Damaged:
    """An entry that is there and cannot be used."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def name_of(key: Key) -> str:
    """The name of the folder for a key."""
    return hashlib.sha256(_text(key).encode()).hexdigest()[:32]


def read_key(folder: Path) -> Key | Damaged | None:
    """The key that an entry was stored under; None if there is no entry."""
    record = _record(folder)
    return record["key"] if isinstance(record, dict) else record


def read(folder: Path, key: Key) -> bytes | Damaged | None:
    """The artifact that was stored under this key; None if there is none."""
    record = _record(folder)
    if not isinstance(record, dict):
        return record
    if _text(record["key"]) != _text(key):
        return Damaged(folder / KEY, "it holds another key")
    path = folder / ARTIFACT
    try:
        artifact = path.read_bytes()
    except OSError as error:
        return Damaged(path, str(error.strerror))
    if hashlib.sha256(artifact).hexdigest() != record["sha256"]:
        return Damaged(path, f"{len(artifact)} bytes that do not have the checksum in {KEY}")
    return artifact


def write(folder: Path, key: Key, artifact: bytes) -> None:
    """Store an artifact where no entry is. See Note [All or nothing].

    Raises:
        OSError: the disk is full or read-only, or an entry is there.
    """
    record = {"format": _FORMAT, "sha256": hashlib.sha256(artifact).hexdigest(), "key": key}
    text = json.dumps(record, indent=1, sort_keys=True)
    made = Path(tempfile.mkdtemp(UNFINISHED, f"{folder.name}.", folder.parent))
    try:
        _write_file(made / ARTIFACT, artifact)
        _write_file(made / KEY, text.encode())
        _sync(made)
        os.rename(made, folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    _sync(folder.parent)


def remove(folder: Path) -> None:
    """Remove an entry, whatever it is. See Note [All or nothing].

    Raises:
        OSError: it cannot be removed.
    """
    away = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}{UNFINISHED}")
    try:
        os.rename(folder, away)
    except FileNotFoundError:
        return
    remove_unfinished(away)


def remove_unfinished(path: Path) -> None:
    """Remove what a process left that was killed.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _record(folder: Path) -> dict[str, Any] | Damaged | None:
    if not os.path.lexists(folder):
        return None
    path = folder / KEY
    try:
        if reason := distrust_entry(folder, ARTIFACT, KEY):
            return Damaged(folder, reason)
        record = json.loads(path.read_bytes())
    except OSError as error:
        return Damaged(path, str(error.strerror))
    except ValueError as error:
        return Damaged(path, f"no JSON: {error}")
    if not isinstance(record, dict) or record.keys() != {"format", "sha256", "key"}:
        return Damaged(path, "it is not what this package writes")
    if record["format"] != _FORMAT or not isinstance(record["key"], dict):
        return Damaged(path, f"format {record['format']!r} where this version has {_FORMAT}")
    return record


def _text(key: Key) -> str:
    return json.dumps(key, sort_keys=True)


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make what was created or renamed in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
