"""A process that does jobs for another one: `python -m piecewise_backend.worker NICENESS FD`.

In:  on standard input a `Setup`, then one job after the other, each with its length in front.
Out: on a file descriptor for each job a line of JSON: null, or why it failed.
Knows nothing of what a job is. It ends when the other process does.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import IO

from piecewise_backend import _torch
from piecewise_backend.job_process import read_message
from piecewise_backend.jobs import Setup, job_of
from piecewise_backend.trace_bytes import from_bytes

_SECONDS_BETWEEN_LOOKS = 2.0


def main() -> None:
    """Serve until there is nothing to serve."""
    niceness, descriptor = map(int, sys.argv[1:])
    os.nice(niceness)
    answers = os.fdopen(descriptor, "w")
    stream = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    with open(os.devnull) as nothing:  # for what is imported and asks the user something
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for function, given in ((_read, (stream, messages)), (_watch, (os.getppid(),))):
        threading.Thread(target=function, args=given, daemon=True).start()
    setup: Setup = from_bytes(messages.get())
    with _torch.under_settings(setup.settings, setup.device):
        while True:
            print(json.dumps(_done(messages.get(), setup)), file=answers, flush=True)


def _done(message: bytes, setup: Setup) -> str | None:
    """Why a job failed; None if it did not."""
    try:
        job_of(message).run(setup)
    except Exception as error:
        # Whatever went wrong here, the other process does the job itself, and fails if it has to.
        return f"{type(error).__name__}: {error}"
    return None


def _read(stream: IO[bytes], messages: queue.SimpleQueue[bytes]) -> None:
    """Take messages in the middle of jobs as well: their end is to be seen at once."""
    while (message := read_message(stream)) is not None:
        messages.put(message)
    os._exit(0)


def _watch(parent: int) -> None:
    """End with the other process, even if a child of it still holds its end of the pipe."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(0)


if __name__ == "__main__":
    main()
