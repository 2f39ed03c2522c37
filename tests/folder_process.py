"""Processes that own a temporary folder, forked as those of `store_process` are."""

import fcntl
import gc
import os
import subprocess
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from piecewise_backend.artifact_store import temporary_store


def own(tell: Connection, place: Path, action: str) -> None:
    """Have a temporary store, until somebody kills this; tells where it is and what was started."""
    tempfile.tempdir = str(place)
    forked: list[int] = []
    thread = threading.Thread(target=_fork, args=(forked,))
    if action == "forks while it is made":
        _begin_once_locked(thread)
    store = temporary_store()
    (store.root / "entry").mkdir()
    (store.root / "entry" / "artifact").write_text("something")
    root, started = store.root, 0
    if action == "forks while it is made":
        thread.join()
        (started,) = forked
    if action == "forks":
        started = os.fork()
    if action == "forks one that ends":
        if (child := os.fork()) == 0:
            del store
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
    if action == "starts a program":
        started = subprocess.Popen(["sleep", "99"], close_fds=False).pid
    if action != "forks" or started:
        tell.send((root, started))
    time.sleep(99)


def _fork(forked: list[int]) -> None:
    if (child := os.fork()) == 0:
        time.sleep(99)
        os._exit(0)
    forked.append(child)


def _begin_once_locked(thread: threading.Thread) -> None:
    """As soon as a file has been locked, and before anything else is done."""
    lock = fcntl.flock

    def flock(*given: Any) -> None:
        fcntl.flock = lock
        lock(*given)
        thread.start()
        thread.join(timeout=0.5)

    fcntl.flock = flock
