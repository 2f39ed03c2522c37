"""Find out which versions are fastest while the model serves.

In:  a compiled graph; its owner's question whether something was found out.
Out: decisions and versions in the store that the graph's compiler looks into.
Knows nothing of captures: its owner takes what was found out when nobody is served.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Collection, Mapping

import torch

from piecewise_backend.candidates import Candidates, undecided
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.config import Config
from piecewise_backend.graphs import GraphPool
from piecewise_backend.jobs import Setup, TuneJob, message_of
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.piece_record import record_piece
from piecewise_backend.sizes import Sizes
from piecewise_backend.version import Numbers
from piecewise_backend.workers import Workers

log = logging.getLogger(__name__)

# Of the process, beside one that serves.
_NICENESS = 10


Name = tuple[int, Numbers]
"""Of a distinct piece, and its integer inputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far the other process came."""

    left: tuple[Name, ...]
    """What it is to tune, or is just tuning."""
    done: tuple[Name, ...]
    """What is decided and does not serve yet: `pw.adopt_tuned` takes sizes of which nothing is
    left."""
    given_up: Mapping[Name, str]
    """What is not tuned, and why."""

    def lines(self) -> list[str]:
        """For people."""
        left = [f"being tuned in the background: {_text(self.left)}"] if self.left else []
        done = [f"tuned, for pw.adopt_tuned to take: {_text(self.done)}"] if self.done else []
        return left + done + [f"not tuned: {_text([n])}: {why}" for n, why in self.given_up.items()]


class BackgroundTuning:
    """Tunes the pieces of one graph in another process, one after the other."""

    def __init__(
        self,
        make_setup: Callable[[], Setup],
        make_pool: Callable[[torch.device], GraphPool],
        sizes: Sizes,
    ) -> None:
        """Nothing is tuned yet.

        Args:
            make_setup: called when there is something to tune, in the state of the process that
                pieces are to be compiled in.
            make_pool: makes graphs like those of the model.
            sizes: symbol values, for those that are no token counts.
        """
        self._make_setup = make_setup
        self._make_pool = make_pool
        self._sizes = sizes
        self._workers: Workers | None = None
        self._left: dict[Name, tuple[Candidates, Callable[[], bool]]] = {}
        """What is being tuned, and whether it is."""
        self._seen: set[Name] = set()
        self._given_up: dict[Name, str] = {}

    def start(self, graph: CompiledGraph, config: Config) -> None:
        """Begin with what is not decided. What was begun, or has failed, is not begun again."""
        for one in reversed(undecided(graph, config, self._sizes)):
            try:
                self._submit(graph, one)
            except NoContentError as error:
                self._give_up((one.index, one.numbers), f"it depends on {error}")

    def _submit(self, graph: CompiledGraph, one: Candidates) -> None:
        name, piece = (one.index, one.numbers), graph.pieces[one.index]
        if name in self._seen:
            return
        self._seen.add(name)
        facts = graph.facts[one.index]
        job = TuneJob(record_piece(piece), one.numbers, one.tried, facts, self._make_pool)
        message = message_of(job)
        if self._workers is None:
            # One: what is timed would be slower beside another that is.
            self._workers = Workers(self._make_setup().as_message(), 1, niceness=_NICENESS)
            weakref.finalize(self, self._workers.close)
        is_decided = graph.compiler.asks_for(piece, one.numbers, one.tried)
        self._workers.submit(name, message)
        self._left[name] = one, is_decided

    def wait(self, seconds: float) -> None:
        """Until there is nothing left to tune, or for so long; then a warning says what is left."""
        begun = time.monotonic()
        if self._workers is None or self._workers.wait(seconds):
            return
        if left := self.progress().left:
            log.warning("still being tuned after %.1f s: %s", time.monotonic() - begun, _text(left))

    def progress(self) -> Progress:
        """At this moment; another thread may be taking what is done."""
        # In this order, as what is given up moves from the first to the second.
        submitted, given_up = list(self._left.items()), dict(self._given_up)
        left, done = [], []
        for name, (_, is_decided) in submitted:
            is_left = self._is_left(name)  # asked first: it is decided before it is not left
            if is_decided():
                done.append(name)
            elif is_left:
                left.append(name)
            else:
                given_up[name] = self._why_not(name)
        return Progress(tuple(left), tuple(done), given_up)

    def ready(self) -> set[int]:
        """The sizes of which all pieces are done, and some are decided."""
        found = self.progress()
        decided = {self._left[name][0].num_tokens for name in found.done}
        open_ = {self._left[name][0].num_tokens for name in found.left}
        for name, reason in found.given_up.items():
            if name not in self._given_up:
                self._give_up(name, reason)
        return decided - open_

    def taken(self, sizes: Collection[int]) -> None:
        """What was found out about these sizes serves now."""
        self._left = {n: left for n, left in self._left.items() if left[0].num_tokens not in sizes}

    def _is_left(self, name: Name) -> bool:
        return self._workers is None or self._workers.is_left(name)

    def _why_not(self, name: Name) -> str:
        assert self._workers is not None
        # A pass or an op may be another one there: see the keys in the cache.
        unknown = "what was found was not stored, or under another key"
        return self._workers.failures.get(name, unknown)

    def _give_up(self, name: Name, reason: str) -> None:
        log.warning("piece %d at %s is not tuned: %s", *name, reason)
        self._given_up[name] = reason
        self._left.pop(name, None)


def _text(names: Collection[Name]) -> str:
    return ", ".join(f"piece {index} at {list(numbers)}" for index, numbers in names)
