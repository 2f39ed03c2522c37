"""Processes that share a cache directory.

They are forked from one that has imported torch, which takes longer than all that they do; no
address and no hash of an object matters here. A key's name may end in a size, as `a:5`: what is
made for it serves sizes of the same parity.
"""

import contextlib
import io
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from piecewise_backend import cache_entry
from piecewise_backend.artifact_store import ArtifactStore, Made
from piecewise_backend.cache_entry import Content
from piecewise_backend.file_lock import locked

Recipe = tuple[
    Callable[[], Made[bytes]], Callable[[Content], bytes], Callable[[Mapping[str, Any]], bool]
]

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload([__name__])


def started(function: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A process that runs it, and what it tells."""
    told, tell = FORKING.Pipe(duplex=False)
    process = FORKING.Process(target=function, args=(tell, *args), daemon=True)
    process.start()
    tell.close()
    return process, told


def recipe(made: bytes, size: int = 0) -> Recipe:
    """What `ArtifactStore.fetch` takes beside a key, for bytes that are their own artifact."""
    content = Content(made, {"conditions": [f"size % 2 == {size % 2}"]} if size else {})
    return (
        lambda: Made(made, content),
        lambda found: found.artifact,
        lambda about: about == content.about,
    )


def artifact_of(name: str) -> bytes:
    """What every process makes for a key."""
    return f"artifact of {name}".encode() * 100


def die() -> None:
    """At once, and without any handler."""
    os.kill(os.getpid(), signal.SIGKILL)


def fetch_all(tell: Connection, root: Path, notes: Path, action: str, names: list[str]) -> None:
    """Fetch every key once; tells what came of it, and what was warned about."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as warned,
    ):
        _fetch_all(ArtifactStore(root), notes, action, names)
    tell.send((printed.getvalue(), warned.getvalue()))


def hold(tell: Connection, path: Path) -> None:
    """Keep a lock, for longer than anybody waits."""
    with locked(path, seconds=9):
        tell.send("held")
        time.sleep(99)


def _fetch_all(store: ArtifactStore, notes: Path, action: str, names: list[str]) -> None:
    if action == "die before renaming":
        cache_entry._sync = lambda folder: die()
    if action == "die in a file":
        cache_entry._write_file = lambda path, content: (path.write_bytes(content[:99]), die())
    for given in names:
        name, _, size = given.partition(":")
        make, load, serves = recipe(artifact_of(name), int(size or 0))

        def noted(given: str = given, make: Callable[[], Made[bytes]] = make) -> Made[bytes]:
            with open(notes, "a") as file:
                file.write(f"{given}\n")
            if action == "die while making":
                die()
            if action == "no room":  # the disk is full in the middle of the artifact
                resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
            time.sleep(0.2)
            return make()

        key = {"name": name} | ({"sizes": [int(size)]} if size else {})
        found = store.fetch(key, noted, load, serves)
        print(given, found.is_hit, found.value == artifact_of(name))
