"""Processes that do jobs aside, and threads that wait for them.

In:  messages, each with a name; names.
Out: nothing but the time when a job is done, or why it failed.
Knows nothing of what is in a message.

A process of its own has a main module of its own: the pools of the standard library would run the
user's program again to find functions in it, unless that is written for them.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Hashable, Sequence
from typing import IO

log = logging.getLogger(__name__)

_LENGTH = struct.Struct(">Q")
_IDLE_SECONDS = 30.0
# Of one thread: what ends one may end all, such as a device without memory.
_MOST_PROCESSES = 3
_MODULE = "piecewise_backend.worker"
# -P: a module in the working directory is not to be found where the caller does not find it.
_COMMAND = [sys.executable, "-P", "-m", _MODULE]


def is_worker() -> bool:
    """This process does jobs for another one."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == _MODULE


def read_message(stream: IO[bytes]) -> bytes | None:
    """One message; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    message = stream.read(length)
    return message if len(message) == length else None


def _write_message(stream: IO[bytes], message: bytes) -> None:
    stream.write(_LENGTH.pack(len(message)) + message)
    stream.flush()


class Workers:
    """Some processes that do jobs: the one that was submitted last comes first.

    Whoever needs the results in the order of submission does jobs himself from the other end,
    while the processes start.
    """

    def __init__(self, setup: bytes, most: int, *, niceness: int = 0) -> None:
        """No process is started before there is a job.

        Args:
            setup: the first message to each process.
            most: how many processes there may be.
            niceness: of the processes, added to that of this one.
        """
        self.failures: dict[Hashable, str] = {}
        """By name, why jobs failed."""
        self._setup = setup
        self._most = most
        self._niceness = niceness
        self._changed = threading.Condition()
        self._waiting: collections.OrderedDict[Hashable, bytes] = collections.OrderedDict()
        self._running: set[Hashable] = set()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._num_threads = 0
        self._is_closed = False

    def submit(self, name: Hashable, message: bytes) -> None:
        """Have a job done."""
        with self._changed:
            if self._is_closed:
                return
            self._waiting[name] = message
            if self._num_threads < min(self._most, len(self._waiting) + len(self._running)):
                self._num_threads += 1
                threading.Thread(target=self._serve, daemon=True).start()
            self._changed.notify()

    def take(self, name: Hashable) -> None:
        """The caller does a job: at once if no process has begun it, else when that is done."""
        with self._changed:
            self._waiting.pop(name, None)
            self._changed.wait_for(lambda: name not in self._running)

    def is_left(self, name: Hashable) -> bool:
        """It is not done."""
        with self._changed:
            return name in self._waiting or name in self._running

    def wait(self) -> None:
        """Until every job is done, or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._running)

    def close(self) -> None:
        """End the processes in the middle of whatever they do."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            for process in self._processes:
                process.kill()
            self._changed.notify_all()

    def _serve(self) -> None:
        """Have a process, and another one if that ends, until there are no jobs for a while."""
        try:
            for _ in range(_MOST_PROCESSES):
                if self._has_jobs():
                    self._serve_by(self._start())
        except OSError as error:
            log.warning("no process can be started to compile ahead: %s", error)
        finally:
            with self._changed:
                self._num_threads -= 1
                if self._num_threads == 0:  # what is left is left to the caller
                    self.failures |= dict.fromkeys(self._waiting, "no process is left to do it")
                    self._waiting.clear()
                self._changed.notify_all()

    def _has_jobs(self) -> bool:
        with self._changed:
            return bool(self._waiting)

    def _serve_by(self, process: subprocess.Popen[bytes]) -> None:
        messages = [self._setup]
        while (job := self._next(process)) is not None:
            name, message = job
            failure = _done(process, [*messages, message])
            messages = []
            with self._changed:
                self._running.discard(name)
                if failure is not None:
                    self.failures[name] = failure
                self._changed.notify_all()
        process.kill()
        process.communicate()
        with self._changed:
            self._processes.discard(process)

    def _start(self) -> subprocess.Popen[bytes]:
        # Python goes past what is no text as well; "" is the working directory.
        paths = [path or os.curdir for path in sys.path if isinstance(path, str)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # each is one of many
        }
        command = [*_COMMAND, str(self._niceness)]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is meant for the caller, and what he does ends with him
        )  # fmt: skip
        with self._changed:
            self._processes.add(process)
        return process

    def _next(self, process: subprocess.Popen[bytes]) -> tuple[Hashable, bytes] | None:
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._is_closed or self._waiting, timeout=_IDLE_SECONDS
            )
            if not is_there or self._is_closed or process.poll() is not None:
                return None
            name, message = self._waiting.popitem()
            self._running.add(name)
            return name, message


def _done(process: subprocess.Popen[bytes], messages: Sequence[bytes]) -> str | None:
    """Why a job failed; None if it did not."""
    assert process.stdin is not None
    assert process.stdout is not None
    line = b""
    with contextlib.suppress(BrokenPipeError):  # it has ended
        for message in messages:
            _write_message(process.stdin, message)
        line = process.stdout.readline()
    if not line:
        return f"its process ended with {process.wait()}"
    failure: str | None = json.loads(line)
    return failure
