"""Processes that do jobs aside, and threads that wait for them.

In:  messages, each with a name; names.
Out: nothing but the time when a job is done, or why it failed.
Knows nothing of what is in a message.
"""

from __future__ import annotations

import collections
import logging
import math
import threading
from collections.abc import Hashable, Iterable

from piecewise_backend.job_process import JobProcess

log = logging.getLogger(__name__)

# Of one thread: what ends one may end all, such as a device without memory.
_MOST_FAILED = 3
_LONGEST_WAIT = 1e9  # which is for ever, and still something that a lock can wait for


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
        self._processes: set[JobProcess] = set()
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
                self._num_threads += 1
                self._start_thread()
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

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._serve, daemon=True).start()
        except RuntimeError as error:  # the system has no more
            log.warning("no thread can be started to compile ahead: %s", error)
            self._leave()

    def _serve(self) -> None:
        """Have a process, and another one if that ends, until there are no jobs."""
        num_failed = 0
        try:
            while self._is_needed(num_failed):
                num_failed += not self._serve_by(JobProcess(self._niceness, self._setup))
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

    def _serve_by(self, process: JobProcess) -> bool:
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
