"""A process that shares a cache directory with others: `python -m tests.store_process`.

Arguments: the directory, a file to note each making in, what to do, the names of the keys.
"""

import os
import signal
import sys
import time
from pathlib import Path

from piecewise_backend import cache_entry
from piecewise_backend.artifact_store import ArtifactStore, Made


def artifact_of(name: str) -> bytes:
    """What every process makes for a key."""
    return f"artifact of {name}".encode() * 100


def main() -> None:
    """Fetch every key once and print what came of it."""
    root, notes, action, *names = sys.argv[1:]
    if action == "die while writing":
        cache_entry._sync = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
    for name in names:

        def make(name: str = name) -> Made[bytes]:
            with open(notes, "a") as file:
                file.write(f"{name}\n")
            if action == "die while making":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)
            return Made(artifact_of(name), artifact_of(name))

        found = ArtifactStore(Path(root)).fetch({"name": name}, make, bytes)
        print(name, found.is_hit, found.value == artifact_of(name))


if __name__ == "__main__":
    main()
