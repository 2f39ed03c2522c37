"""Processes that own a temporary folder, forked as those of `store_process` are."""

import gc
import os
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from piecewise_backend.artifact_store import temporary_store


def own(tell: Connection, place: Path, action: str) -> None:
    """Have a temporary store, until somebody kills this; tells where it is and what was started."""
    tempfile.tempdir = str(place)
    store = temporary_store()
    (store.root / "entry").mkdir()
    (store.root / "entry" / "artifact").write_text("something")
    root, started = store.root, 0
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
