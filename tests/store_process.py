"""A process that shares a cache directory with others: `python -m tests.store_process`.

Arguments: the directory, a file to note each making in, what to do, the names of the keys. A name
may end in a size, as `a:5`: what is made for it serves sizes of the same parity.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from piecewise_backend import cache_entry
from piecewise_backend.artifact_store import ArtifactStore, Made
from piecewise_backend.cache_entry import Content

Recipe = tuple[
    Callable[[], Made[bytes]], Callable[[Content], bytes], Callable[[Mapping[str, Any]], bool]
]


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


def main() -> None:
    """Fetch every key once and print what came of it."""
    root, notes, action, *names = sys.argv[1:]
    store = ArtifactStore(Path(root))
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


if __name__ == "__main__":
    main()
