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
import math
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Hashable, Iterable
from typing import IO

log = logging.getLogger(__name__)

_LENGTH = struct.Struct(">Q")
# Of one thread: what ends one may end all, such as a device without memory.
_MOST_FAILED = 3
_MOST_SAID = 2048  # bytes of what a process printed that are looked at
_LONGEST_WAIT = 1e9  # which is for ever, and still something that a lock can wait for
# -P: what lies in the current directory is nobody's business, as it is not for a script.
_MODULE = "piecewise_backend.worker"
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
        """By name, why jobs failed: no process tries them again."""
        self.most = most
        """How many processes there may be from the next job on."""
        self._setup = setup
        self._niceness = niceness
        self._changed = threading.Condition()
        self._waiting: collections.OrderedDict[Hashable, bytes] = collections.OrderedDict()
        self._running: set[Hashable] = set()
        self._tried_again: dict[Hashable, str] = {}
        """Of those that wait or run, why the first try failed."""
        self._processes: set[_Process] = set()
        self._num_threads = 0
        self._is_closed = False

    def submit(self, name: Hashable, message: bytes) -> None:
        """Have a job done."""
        with self._changed:
            if self._is_closed:
                return
            self.failures.pop(name, None)
            self._tried_again.pop(name, None)
            self._waiting[name] = message
            if self._num_threads < min(self.most, len(self._waiting) + len(self._running)):
                threading.Thread(target=self._serve, daemon=True).start()
                self._num_threads += 1
            self._changed.notify()

    def take(self, name: Hashable) -> None:
        """The caller does a job: at once if no process has begun it, else when that is done. If its
        process is killed he need not wait for another one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting.pop(name, None) is not None or name not in self._running
            )
            self._note_first_failures([name])

    def is_left(self, name: Hashable) -> bool:
        """It is not done."""
        with self._changed:
            return name in self._waiting or name in self._running

    def wait(self, seconds: float = math.inf) -> bool:
        """Until every job is done, or has failed; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._running, min(seconds, _LONGEST_WAIT)
            )

    def close(self) -> None:
        """End the processes in the middle of whatever they do."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            for process in self._processes:
                process.kill()
            self._changed.notify_all()

    def _serve(self) -> None:
        """Have a process, and another one if that ends, until there are no jobs."""
        num_failed = 0
        try:
            while self._is_needed(num_failed):
                num_failed += not self._serve_by(_Process(self._niceness, self._setup))
        except OSError as error:
            log.warning("no process can be started to compile ahead: %s", error)
            self._leave()
        except BaseException:
            self._leave()
            raise

    def _is_needed(self, num_failed: int) -> bool:
        """There are jobs for the thread that asks; if not, it is gone."""
        with self._changed:
            if self._waiting and num_failed < _MOST_FAILED:
                return True
            self._leave()
            return False

    def _leave(self) -> None:
        """One thread less."""
        with self._changed:
            self._num_threads -= 1
            if self._num_threads == 0:  # what is left is left to the caller
                self.failures |= dict.fromkeys(self._waiting, "no process is left to do it")
                self._note_first_failures(self._waiting)
                self._waiting.clear()
            self._changed.notify_all()

    def _serve_by(self, process: _Process) -> bool:
        """Give a process jobs; False if it ended in the middle of one that is not tried again."""
        with self._changed:
            self._processes.add(process)
        name: Hashable = None
        failure: str | None = None
        try:
            while (job := self._next()) is not None:
                name, message = job
                failure = "who waited for it has ended"
                failure = process.do(message)
                if process.was_killed() and self._is_put_back(name, message, failure):
                    name = None  # which another thread may have by now
                    return True
                self._end(name, failure)
                if process.has_ended():
                    return False
            return True
        finally:
            self._end(name, failure)
            process.close()
            with self._changed:
                self._processes.discard(process)

    def _end(self, name: Hashable, failure: str | None) -> None:
        with self._changed:
            if name in self._running:
                self._running.discard(name)
                self._tried_again.pop(name, None)
                if failure is not None:
                    self.failures[name] = failure
                self._changed.notify_all()

    def _note_first_failures(self, names: Iterable[Hashable]) -> None:
        """Of those that are not tried again after all."""
        for name in names:
            if name in self._tried_again:
                self.failures[name] = self._tried_again.pop(name)

    def _is_put_back(self, name: Hashable, message: bytes, failure: str | None) -> bool:
        """Another process is to try it: this one may have been killed for what others did, for
        their memory, say. Once: or it may have been for what the job does."""
        with self._changed:
            if failure is None or name in self._tried_again or self._is_closed:
                return False
            log.info("tried again: %s", failure)
            self._tried_again[name] = failure
            self._running.discard(name)
            self._waiting[name] = message
            self._changed.notify_all()
            return True

    def _next(self) -> tuple[Hashable, bytes] | None:
        with self._changed:
            if self._is_closed or not self._waiting:
                return None
            name, message = self._waiting.popitem()
            self._running.add(name)
            return name, message


class _Process:
    """One process: it reads messages, and answers each job by a line on a pipe of its own."""

    def __init__(self, niceness: int, setup: bytes) -> None:
        """Starts it; `setup` goes in front of the first job.

        Raises:
            OSError: it cannot be started.
        """
        self._pending: list[bytes] = [setup]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        answers, its_end = os.pipe()
        self._answers = os.fdopen(answers, "rb")
        # Python goes past what is no text as well; "" is the working directory.
        path = [entry or os.curdir for entry in sys.path if isinstance(entry, str)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # each is one of many
        }
        try:
            self._popen = subprocess.Popen(
                [*_COMMAND, str(niceness), str(its_end)], env=environment, pass_fds=[its_end],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said,
                process_group=0,  # Ctrl-C is meant for the caller, and what he does ends with him
            )  # fmt: skip
        except OSError:
            self._answers.close()
            self._said.close()
            raise
        finally:
            os.close(its_end)

    def do(self, message: bytes) -> str | None:
        """Why a job failed; None if it did not."""
        assert self._popen.stdin is not None
        line = b""
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended
                for part in (*self._pending, message):
                    _write_message(self._popen.stdin, part)
                self._pending = []
                line = self._answers.readline()
            if not line:
                return f"its process ended with {self._popen.wait()}: {self._last_words()}"
            failure: str | None = json.loads(line)
        except (OSError, ValueError) as error:
            self.kill()  # what it says next could be of any job
            self._popen.wait()
            return f"its answer cannot be read: {error}"
        return failure

    def has_ended(self) -> bool:
        """It cannot do another one."""
        return self._popen.poll() is not None

    def was_killed(self) -> bool:
        """It has not ended by itself."""
        status = self._popen.poll()
        return status is not None and status < 0

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        self._popen.kill()

    def close(self) -> None:
        """End it, and give back what belongs to it."""
        self.kill()
        self._popen.communicate()
        self._answers.close()
        self._said.close()

    def _last_words(self) -> str:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(size - _MOST_SAID, 0))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
