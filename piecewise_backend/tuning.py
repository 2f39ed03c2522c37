"""Try versions of a piece that are made for one size, and keep the fastest.

In:  a compiled graph, a size, and the inputs that its pieces have there.
Out: what serves each distinct piece at that size, and a `Tuning` that says how it came about.
Knows nothing of how sizes are captured.

Note [Why everything is measured]
Tuning by the compiler is no promise. It times kernels one by one, on inputs that its own loop
has left in the cache, and picks templates that lose against the vendor's library: an 8B decode
step became 13 % slower by max-autotune, and 5 % faster by coordinate descent. So each version is
timed as it will run, replayed from a graph, beside the one for all sizes, and serves only if it
is faster by more than what two runs of the same differ, and computes the same.

Note [Other ranks]
A collective ends when all ranks call it. A rank that tries versions of a piece calls it more
often than one that takes what the first has found, and that one waits for the first to be done:
for ever. Nor would two that both try agree on the number of runs, which depends on times. So a
piece with a collective is not tuned.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecewise_backend.candidates import Candidates, candidates_of
from piecewise_backend.capture_request import preserved
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.compiler import AS_TRACED, Specialization
from piecewise_backend.config import Config
from piecewise_backend.facts import PieceFacts
from piecewise_backend.graphs import CapturedGraph, GraphPool
from piecewise_backend.nearness import is_near
from piecewise_backend.replay_timing import replay_seconds
from piecewise_backend.sizes import Sizes
from piecewise_backend.version import Call, Numbers, Version
from piecewise_backend.versions import Versions

log = logging.getLogger(__name__)

# Medians of the same code differ by less.
_MARGIN = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class Tuning:
    """What was tried for a piece at a size, and what serves it."""

    piece: int
    """Index of the distinct piece."""
    sizes: Numbers
    """What it was tried at: the sizes that the piece takes."""
    kept: str
    """The version that serves; "as traced" is the one for all sizes."""
    microseconds: Mapping[str, float]
    """Of one replay of each version, by name."""
    failures: Mapping[str, str]
    """Versions that could not be compiled, recorded or tried, or are wrong, and why."""
    is_remembered: bool = False
    """Another process decided (`cache_dir`, `tuning`). What it has found is at most compared with
    the version for all sizes once more."""

    def as_json(self) -> bytes:
        """What another process may know of it."""
        return json.dumps(dataclasses.asdict(self)).encode()

    def __str__(self) -> str:
        times = ", ".join(f"{name} {time:.1f} us" for name, time in self.microseconds.items())
        times = times or "nothing was timed"
        how = ", measured by another process" if self.is_remembered else ""
        failed = "".join(f"; {name}: {why}" for name, why in self.failures.items())
        return f"piece {self.piece} at {list(self.sizes)}: {self.kept} ({times}{how}){failed}"


class Tuner:
    """Tunes the pieces of a graph at one size, each when its inputs are there."""

    def __init__(
        self, graph: CompiledGraph, config: Config, sizes: Sizes, make_pool: Callable[[], GraphPool]
    ) -> None:
        """Nothing is tuned yet.

        Args:
            sizes: the symbol values that it tunes for.
            make_pool: makes a pool for recordings that are thrown away.
        """
        self._graph = graph
        self._config = config
        self._sizes = sizes
        self._make_pool = make_pool

    def tune(self, position: int, inputs: Sequence[Any]) -> None:
        """Let the fastest version serve the piece of an instance from now on.

        Args:
            position: of the instance.
            inputs: what the piece is called with; those that it writes are given back as
                they were.
        """
        candidates = candidates_of(self._graph, self._config, position, self._sizes)
        if candidates is None:
            return
        graph, index, numbers = self._graph, candidates.index, candidates.numbers
        versions, facts = graph.versions[index], graph.facts[index]
        sizes = numbers[: versions.num_sizes]
        if versions.is_sealed or sizes in versions.tunings:
            return
        is_elsewhere = self._config.tuning == "background"
        if facts.collectives:
            why = f"not tried, as other ranks wait in {min(facts.collectives)}"
            failures = {special.name: why for special in candidates.tried}
            tuning = Tuning(index, sizes, AS_TRACED.name, {}, failures)
        elif is_elsewhere and not self._is_decided(candidates):
            return
        else:
            trial = Trial(versions, facts, numbers, inputs, self._make_pool(), graph.device)
            tuning = trial.find_fastest(candidates.tried, compares=is_elsewhere)
        versions.tunings[sizes] = tuning
        log.info("%s", tuning)

    def _is_decided(self, one: Candidates) -> bool:
        piece = self._graph.pieces[one.index]
        return self._graph.compiler.asks_for(piece, one.numbers, one.tried)()


class Trial:
    """One piece with inputs, on which versions are tried."""

    def __init__(
        self,
        versions: Versions,
        facts: PieceFacts,
        numbers: Numbers,
        inputs: Sequence[Any],
        pool: GraphPool,
        device: torch.device,
    ) -> None:
        self.made: dict[str, Version] = {}
        """By name, the versions that can serve."""
        self.failures: dict[str, str] = {}
        """By name, why others cannot."""
        self._recorded: list[CapturedGraph] = []  # later ones share the memory
        self._expected: list[torch.Tensor] | None = None
        self._as_traced = versions.choose(numbers).call
        self._versions = versions
        self._facts = facts
        self._numbers = numbers
        self._inputs = inputs
        self._pool = pool
        self._device = device

    def find_fastest(self, tried: Sequence[Specialization], *, compares: bool = False) -> Tuning:
        """Let the fastest version serve the sizes of the inputs from now on.

        Args:
            tried: versions to compare with the one for all sizes. Another process may have done
                that; what it found is tried before it serves.
            compares: what another process found, beside whatever used the device meanwhile, is
                compared with the version for all sizes once more.
        """
        index, sizes = self._versions.piece.index, self._numbers[: self._versions.num_sizes]

        def load(text: bytes) -> Tuning:
            return Tuning(**json.loads(text) | {"piece": index, "sizes": sizes})

        recalled = self._versions.recall(
            self._numbers, tried, lambda: self._decide(tried).as_json(), load
        )
        tuning = dataclasses.replace(recalled.value, is_remembered=recalled.is_hit)
        wanted = {special.name: special for special in tried}
        if tuning.kept in wanted and tuning.kept not in self.made:
            self.make(wanted[tuning.kept])
            if tuning.kept in self.made:  # no process may have kept it, or one has lost it
                self._settle(wanted[tuning.kept])
        if compares and tuning.is_remembered and tuning.kept in self.made:
            self._drop_if_slower(tuning.kept)
        if tuning.kept in self.made:
            self._versions.prefer(self._numbers, self.made[tuning.kept])
        else:
            tuning = dataclasses.replace(tuning, kept=AS_TRACED.name)
        return dataclasses.replace(tuning, failures={**tuning.failures, **self.failures})

    def _drop_if_slower(self, name: str) -> None:
        calls = {AS_TRACED.name: self._as_traced, name: self.made[name].call}
        functions = {which: self._bound(call) for which, call in calls.items()}
        seconds = replay_seconds(functions, self._pool, self._device)
        if not _is_faster(seconds, name):
            del self.made[name]
            its, others = (f"{1e6 * seconds[which]:.1f} us" for which in (name, AS_TRACED.name))
            self.failures[name] = f"measured again it takes {its}, and as traced {others}"

    def _decide(self, wanted: Sequence[Specialization]) -> Tuning:
        """Make them all, and compare the times of those that can serve."""
        for special in wanted:
            self.make(special)
        functions = {AS_TRACED.name: self._bound(self._as_traced)}
        functions |= {name: self._bound(version.call) for name, version in self.made.items()}
        seconds = replay_seconds(functions, self._pool, self._device)
        kept = AS_TRACED.name
        for special in sorted(wanted, key=lambda special: seconds.get(special.name, math.inf)):
            if special.name in self.made and _is_faster(seconds, special.name):
                self._settle(special)  # before others may know of it
                if special.name in self.made:
                    kept = special.name
                    break
        times = {name: 1e6 * found for name, found in seconds.items()}
        return Tuning(self._versions.piece.index, self._numbers, kept, times, dict(self.failures))

    def _settle(self, special: Specialization) -> None:
        """Keep a version for other processes, if as they will have it it can serve and is faster.

        What they will have was compiled once more, so it is tried and measured once more, and
        serves here as well.
        """
        tried = self.made[special.name]
        self._try(special, lambda: self._versions.settle(self._numbers, special) or tried)
        if self.made.get(special.name, tried) is not tried:
            self._drop_if_slower(special.name)

    def make(self, special: Specialization) -> None:
        """Make a version, and run it: what tunes itself at the first run does so."""
        self._try(special, lambda: self._versions.special(self._numbers, special))

    def _try(self, special: Specialization, make: Callable[[], Version]) -> None:
        """Take what is made for the version of a kind, if it can serve."""
        try:
            version = make()
            is_known = version is self.made.get(special.name)
            fault = None if is_known else self._fault(version.call)
        except torch.OutOfMemoryError:
            raise  # which tells nothing of the version: it is not to be remembered
        except Exception as error:
            # What a compiler may raise is not known, and the piece has a version that works.
            fault = f"{type(error).__name__}: {error}"
        if fault is None:
            self.made[special.name] = version
        else:
            self.made.pop(special.name, None)
            self.failures[special.name] = fault

    def _fault(self, call: Call) -> str | None:
        """Why a version cannot serve, if it cannot."""
        if self._expected is None:
            self._expected = self._results(self._as_traced)
        found, expected = self._results(call), self._expected
        if len(found) != len(expected) or not all(map(is_near, found, expected)):
            return "it computes other numbers than the version for all sizes"
        self._recorded.append(self._pool.capture(self._bound(call), ()))
        return None

    def _bound(self, call: Call) -> Callable[[], Sequence[torch.Tensor]]:
        return lambda: call(*self._inputs)

    def _results(self, call: Call) -> list[torch.Tensor]:
        """Copies of what one run returns and writes."""
        written = [self._inputs[position] for position in sorted(self._facts.mutated)]
        with preserved(written):
            returned = call(*self._inputs)
            defined = [x for i, x in enumerate(returned) if i not in self._facts.undefined]
            return [tensor.clone() for tensor in (*defined, *written)]


def _is_faster(seconds: Mapping[str, float], name: str) -> bool:
    return seconds[name] < (1 - _MARGIN) * seconds[AS_TRACED.name]
