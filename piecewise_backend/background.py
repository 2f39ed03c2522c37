"""Find out which versions are fastest while the model serves.

In:  a compiled graph; its owner's question whether something was found out.
Out: decisions and versions in the store that the graph's compiler looks into.
Knows nothing of captures: its owner takes what was found out when nobody is served.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.candidates import Candidates, undecided
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.config import Config
from piecewise_backend.errors import ContractError
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
        self._left: dict[Name, Candidates] = {}
        self._seen: set[Name] = set()
        self._switches: Mapping[str, Any] = {}
        """Of the process, when it was started last."""

    def start(self, graph: CompiledGraph, config: Config) -> None:
        """Begin with what is not decided. What was begun, or has failed, is not begun again."""
        self._switches = _torch.numeric_switches(graph.device)
        reasons = set()
        for one in reversed(undecided(graph, config, self._sizes)):
            try:
                self._submit(graph, one)
            except NoContentError as error:
                reasons.add(str(error))
        for reason in sorted(reasons):
            log.warning("not everything is tuned in the background: it depends on %s", reason)

    def _submit(self, graph: CompiledGraph, one: Candidates) -> None:
        name = (one.index, one.numbers)
        if name in self._seen:
            return
        self._seen.add(name)
        piece, facts = record_piece(graph.pieces[one.index]), graph.facts[one.index]
        job = TuneJob(piece, one.numbers, one.tried, facts, self._make_pool)
        message = message_of(job)
        if self._workers is None:
            # One: what is timed would be slower beside another that is.
            self._workers = Workers(self._make_setup().as_message(), 1, niceness=_NICENESS)
            weakref.finalize(self, self._workers.close)
        self._left[name] = one
        self._workers.submit(name, message)

    def wait(self) -> None:
        """Until there is nothing left to tune."""
        if self._workers is not None:
            self._workers.wait()

    def ready(self, graph: CompiledGraph) -> set[int]:
        """The sizes of which all pieces are done, and some are decided, and that nobody took.

        Raises:
            ContractError: the mode is another one than that of warm-up, so that nothing is found.
        """
        if self._workers is None or not self._left:
            return set()
        found = _torch.numeric_switches(graph.device)
        if changed := {name: was for name, was in self._switches.items() if found[name] != was}:
            raise ContractError(
                f"warm-up ran under {changed}, and this call under "
                f"{ {name: found[name] for name in changed} }; take what was tuned in the mode of "
                "warm-up (torch.no_grad or torch.inference_mode)"
            )
        open_, decided = set(), set()
        for name, one in list(self._left.items()):
            is_done = not self._workers.is_left(name)
            if graph.compiler.is_decided(graph.pieces[one.index], one.numbers, one.tried):
                decided.add(one.num_tokens)
            elif is_done:
                # It has other settings, say, or another version of an op: see the keys there.
                unknown = "what was found was not stored, or under another key"
                reason = self._workers.failures.get(name, unknown)
                log.warning("piece %d at %s is not tuned: %s", *name, reason)
                self._left.pop(name, None)
            else:
                open_.add(one.num_tokens)
        return decided - open_

    def taken(self, sizes: Collection[int]) -> None:
        """What was ready serves."""
        self._left = {n: one for n, one in self._left.items() if one.num_tokens not in sizes}
