"""One process that does jobs aside, and the messages that it reads.

In:  messages.
Out: why a job failed, if it did.
Knows nothing of what is in a message.

A process of its own has a main module of its own: the pools of the standard library would run the
user's program again to find functions in it, unless that is written for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from typing import IO

_LENGTH = struct.Struct(">Q")
_MOST_SAID = 2048  # bytes of what a process printed that are looked at
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


class JobProcess:
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
