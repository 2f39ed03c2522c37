"""Hang the piece passes into one compilation by Inductor.

In:  passes, and the name of the piece that is about to be compiled.
Out: Inductor options, and afterwards the records of the passes.
Knows nothing of pieces.

Note [Cached results]
Inductor takes graphs from its caches, and then no pass runs. It does give its counters back,
which is how matches are still known; times and dumps are not. So that dumps are always written,
the key of a compilation that writes some is like no other.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from torch import fx

from piecewise_backend import _torch
from piecewise_backend.passes import PassList, PassRecord, Write, merged
from piecewise_backend.passes.output_memory import keep_apart, note_memory

_COUNTER = "piecewise_pass_"


class PostGrad:
    """The passes of one compilation. See Note [Cached results]."""

    def __init__(self, passes: PassList, where: str, writer: Callable[[str], Write | None]) -> None:
        self._passes = passes
        self._where = where
        self._write = writer(where.replace(" ", "_")) if passes.passes else None
        self._runs: list[tuple[PassRecord, ...]] = []
        self._counted = _torch.inductor_counts(_COUNTER)

    @property
    def has_dumps(self) -> bool:
        """It has to run: what was compiled before is of no use. See Note [Cached results]."""
        return self._write is not None

    def patches(self, *, anew: bool = False) -> dict[str, object]:
        """The Inductor options that make it run the passes.

        Args:
            anew: with a key under which Inductor's caches have nothing of the usual one.
        """
        # Without passes too: the key keeps what was compiled here (see `_torch.inductor`) apart.
        key = self._passes.key() + (uuid.uuid4().hex if self._write else "")
        key += " anew" if anew else ""
        return {
            "joint_custom_pre_pass": _torch.GraphPass(note_memory, key),
            "post_grad_custom_post_pass": _torch.GraphPass(self._run, key),
        }

    def records(self) -> tuple[PassRecord, ...]:
        """What the passes did, once Inductor is done."""
        if self._runs:
            return merged(self._runs)
        counts = _torch.inductor_counts(_COUNTER)
        return tuple(
            PassRecord(p.name, counts.get(p.name, 0) - self._counted.get(p.name, 0), None)
            for p in self._passes.passes
        )

    def _run(self, graph: fx.Graph) -> None:
        # Inductor calls for each graph inside of the graph first; what is dumped last stays.
        self._runs.append(self._passes.run(graph, self._where, self._write))
        for record in self._runs[-1]:
            _torch.count_in_inductor(_COUNTER + record.name, record.matches)
        keep_apart(graph)
