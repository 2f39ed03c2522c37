"""Versions that will be wanted are compiled by other processes meanwhile.

In:  versions in the order in which they will be wanted.
Out: what was compiled, when it is wanted.
Knows nothing of what a version is for.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TypeVar

from piecewise_backend.artifact_store import ArtifactStore, Serves, temporary_store
from piecewise_backend.cache_entry import Content, Key
from piecewise_backend.compiler import Wanted
from piecewise_backend.jobs import CompileJob, Setup, message_of
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.piece_record import record_piece
from piecewise_backend.workers import Workers

T = TypeVar("T")

log = logging.getLogger(__name__)

# A process starts for as long as a few versions compile, and who waits for what it has begun waits
# for that too: with 8 processes for 15 versions a warm-up took 66 s, with none 52 (H200, 16 cores).
_VERSIONS_PER_PROCESS = 8


class Ahead:
    """Compiles ahead for one model."""

    def __init__(self, make_setup: Callable[[Path], Setup], num_processes: int) -> None:
        """Nothing is compiled yet.

        Args:
            make_setup: called with a directory for what is compiled, when there is something to
                compile, in the state of the process that it is to be compiled in.
            num_processes: most of them, at least one.
        """
        self._make_setup = make_setup
        self._most = num_processes
        self._store: ArtifactStore | None = None
        self._workers: Workers | None = None
        self._begun: set[Hashable] = set()

    def start(self, wanted: Sequence[Wanted]) -> None:
        """Begin with these, the last one first: the caller begins at the other end. Nothing is
        begun of a few."""
        wanted = [one for one in wanted if _name(one) not in self._begun]
        num_processes = min(self._most, len(wanted) // _VERSIONS_PER_PROCESS)
        for one in wanted if num_processes > 0 else ():
            try:
                self._start(one, num_processes)
            except NoContentError as error:
                log.info("piece %d is not compiled ahead: it depends on %s", one.piece.index, error)
            except OSError as error:  # no temporary directory
                log.info("nothing is compiled ahead: %s", error)
                return

    def _start(self, one: Wanted, num_processes: int) -> None:
        self._begun.add(_name(one))
        message = message_of(CompileJob(record_piece(one.piece), one.numbers, one.special))
        self._workers = self._workers or self._make_workers()
        self._workers.most = max(self._workers.most, num_processes)
        self._workers.submit(_name(one), message)

    def take(
        self, wanted: Wanted, key: Key, load: Callable[[Content], T], serves: Serves
    ) -> T | None:
        """What was compiled, as soon as it is, if a process has begun; None if it is the caller's.

        Args:
            key: of the version.
            load: from what was compiled. What it raises is a warning, and None.
            serves: whether what was compiled serves the version's sizes, by what is said of it.
        """
        if self._workers is None or self._store is None:
            return None
        name = _name(wanted)
        self._workers.take(name)
        if (failure := self._workers.failures.pop(name, None)) is not None:
            log.info("compiled here, as another process could not: %s", failure)
        return self._store.find(key, load, serves)

    def _make_workers(self) -> Workers:
        self._store = temporary_store()
        workers = Workers(self._make_setup(self._store.root).as_message(), 1)
        weakref.finalize(self, workers.close)
        return workers


def _name(wanted: Wanted) -> Hashable:
    return wanted.piece.index, wanted.numbers, wanted.special and wanted.special.name
