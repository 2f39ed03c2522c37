"""One artifact on disk, with the whole key that it was stored under.

In:  a folder, a key, bytes.
Out: the bytes, or why they cannot be had.
Knows nothing of compilers, and of other entries.

`<name>/artifact` has the bytes, `<name>/key.json` the key, what the maker says about the artifact
and the checksums of both files. The name is a hash of the key that finds the folder; what counts
is the key inside, which is compared.

Note [Sizes in a key]
The sizes under "sizes" are those that an artifact was made for, and it may serve others: what its
maker says about it tells. Everything else in a key has to be the same. So a name has two parts,
and entries whose keys differ in sizes only - a group - agree in the first.

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
SIZES = "sizes"
UNFINISHED = ".tmp"
_FORMAT = 2
_FIELDS = {"format", "key", "about", "artifact_sha256", "sha256"}


@dataclasses.dataclass(frozen=True, slots=True)
class Damaged:
    """An entry that is there and cannot be used."""

    folder: Path
    file: str
    """In the folder; empty if it is about the folder itself."""
    reason: str

    def __str__(self) -> str:
        return f"{self.folder / self.file}: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """What is kept of something that was made."""

    artifact: bytes
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What its maker says of it, as JSON has it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What stands beside an artifact."""

    key: Key
    about: Mapping[str, Any]
    artifact_sha256: str

    def differs_from(self, key: Key) -> bool:
        """It belongs to another group. See Note [Sizes in a key]."""
        return _text(_without_sizes(self.key)) != _text(_without_sizes(key))


def group_of(key: Key) -> str:
    """The first part of the name of the folder for a key. See Note [Sizes in a key]."""
    return _hash(_text(_without_sizes(key)))[:16]


def name_of(key: Key) -> str:
    """The name of the folder for a key."""
    return f"{group_of(key)}-{_hash(_text(key))[:8]}"


def read_record(folder: Path) -> Record | Damaged | None:
    """What stands beside the artifact; None if there is no entry."""
    if not os.path.lexists(folder):
        return None
    try:
        if reason := distrust_entry(folder, ARTIFACT, KEY):
            return Damaged(folder, "", reason)
        known = json.loads((folder / KEY).read_bytes())
    except OSError as error:
        return Damaged(folder, _file_of(error, folder), str(error.strerror))
    except (ValueError, RecursionError) as error:
        return Damaged(folder, KEY, f"no JSON: {error}")
    if not isinstance(known, dict) or known.keys() != _FIELDS:
        return Damaged(folder, KEY, "it is not what this package writes")
    if known["format"] != _FORMAT:
        return Damaged(folder, KEY, f"format {known['format']!r}; this version has {_FORMAT}")
    if known.pop("sha256") != _hash(_text(known)):
        return Damaged(folder, KEY, "it does not have the checksum in it")
    return Record(known["key"], known["about"], known["artifact_sha256"])


def read_artifact(folder: Path, record: Record) -> bytes | Damaged:
    """The artifact that this stands beside."""
    try:
        artifact = (folder / ARTIFACT).read_bytes()
    except OSError as error:
        return Damaged(folder, ARTIFACT, str(error.strerror))
    if hashlib.sha256(artifact).hexdigest() != record.artifact_sha256:
        reason = f"{len(artifact)} bytes that do not have the checksum in {KEY}"
        return Damaged(folder, ARTIFACT, reason)
    return artifact


def write(folder: Path, key: Key, content: Content) -> None:
    """Store something where no entry is. See Note [All or nothing].

    Raises:
        OSError: the disk is full or read-only, or an entry is there.
    """
    digest = hashlib.sha256(content.artifact).hexdigest()
    known = {"format": _FORMAT, "key": key, "about": content.about, "artifact_sha256": digest}
    text = json.dumps(known | {"sha256": _hash(_text(known))}, indent=1, sort_keys=True)
    made = Path(tempfile.mkdtemp(UNFINISHED, f"{folder.name}.", folder.parent))
    try:
        _write_file(made / ARTIFACT, content.artifact)
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


def _without_sizes(key: Key) -> Key:
    return {name: value for name, value in key.items() if name != SIZES}


def _file_of(error: OSError, folder: Path) -> str:
    """Which file of an entry it is about."""
    path = Path(str(error.filename))
    return path.name if path.parent == folder else ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
