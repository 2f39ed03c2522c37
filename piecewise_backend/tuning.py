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
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecewise_backend.capture_request import preserved
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.compiler import AS_TRACED, Specialization
from piecewise_backend.config import Config
from piecewise_backend.facts import PieceFacts
from piecewise_backend.graphs import CapturedGraph, GraphPool
from piecewise_backend.nearness import is_near
from piecewise_backend.passes import one_row_passes
from piecewise_backend.passes.ops import one_row
from piecewise_backend.replay_timing import replay_seconds
from piecewise_backend.sizes import Sizes
from piecewise_backend.steps import Host
from piecewise_backend.version import Call, Numbers, Version
from piecewise_backend.versions import Versions

log = logging.getLogger(__name__)

# Medians of the same code differ by less.
_MARGIN = 0.01

EFFORTS: Mapping[str, Mapping[str, object]] = {
    "static": {},
    "coordinate descent": {"coordinate_descent_tuning": True},
    "max-autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
}
"""Inductor options of the versions that are tried."""

_ONE_ROW: Mapping[str, object] = {
    # Products of one row that are tuned like this are none any more when passes run.
    "coordinate_descent_tuning": False,
    # See Note [Early launch] in `passes.ops.kernels.one_row`.
    "triton.enable_pdl": False,
}


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
    """Versions that could not be compiled or recorded, or are wrong, and why."""
    is_remembered: bool = False
    """An earlier process decided (`cache_dir`), and nothing was measured now."""

    def as_json(self) -> bytes:
        """What another process may know of it."""
        return json.dumps(dataclasses.asdict(self)).encode()

    def __str__(self) -> str:
        times = ", ".join(f"{name} {time:.1f} us" for name, time in self.microseconds.items())
        how = ", measured by an earlier process" if self.is_remembered else ""
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
        index = self._graph.instances[position].distinct.index
        versions, facts = self._graph.versions[index], self._graph.facts[index]
        numbers = self._graph.numbers_at(position, self._sizes)
        sizes = numbers[: versions.num_sizes]
        if versions.is_sealed or sizes in versions.tunings or not facts.has_kernels:
            return
        wanted = {special.name: special for special in self._specializations(versions, sizes)}
        if not wanted:
            return
        tried = tuple(wanted.values())
        trial = _Trial(versions, facts, numbers, inputs, self._make_pool(), self._graph.device)

        def load(text: bytes) -> Tuning:
            return Tuning(**json.loads(text) | {"piece": index, "sizes": sizes})

        recalled = versions.recall(numbers, tried, lambda: trial.decide(tried).as_json(), load)
        tuning = dataclasses.replace(recalled.value, is_remembered=recalled.is_hit)
        if tuning.kept in wanted and tuning.kept not in trial.made:
            trial.make(wanted[tuning.kept])
        if tuning.kept in trial.made:
            versions.prefer(numbers, trial.made[tuning.kept])
        else:
            tuning = dataclasses.replace(tuning, kept=AS_TRACED.name)
        failures = {**tuning.failures, **trial.failures}
        versions.tunings[sizes] = dataclasses.replace(tuning, failures=failures)
        log.info("%s", tuning)

    def _specializations(self, versions: Versions, sizes: Numbers) -> list[Specialization]:
        num_tokens = self._graph.token_dim.num_tokens(self._sizes)
        assert isinstance(num_tokens, int)  # as of every size that is captured
        found = []
        if num_tokens in self._config.compile_sizes:
            exact = {position: (size, size) for position, size in enumerate(sizes)}
            found += [Specialization(name, how, exact) for name, how in EFFORTS.items()]
            if num_tokens == 1 and one_row.runs_on(self._graph.device):
                found.append(Specialization("one row", _ONE_ROW, exact, one_row_passes()))
        if (between := self._range_of(num_tokens)) is not None:
            limits = dict.fromkeys(self._token_positions(versions), between)
            name = f"coordinate descent, {between[0]} to {between[1]} tokens"
            found.append(Specialization(name, EFFORTS["coordinate descent"], limits))
        return found

    def _range_of(self, num_tokens: int) -> tuple[int, int] | None:
        low = 1
        for high in self._config.compile_ranges_endpoints:
            if num_tokens <= high:
                return low, high
            low = high + 1
        return None

    def _token_positions(self, versions: Versions) -> list[int]:
        token_dim = self._graph.token_dim
        tokens = {token_dim.symbols[index] for index in token_dim.tokens}
        hosts = [ref for ref in versions.piece.inputs if isinstance(ref, Host)]
        return [position for position, ref in enumerate(hosts) if ref.expr in tokens]


class _Trial:
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
        self._recorded: list[CapturedGraph] = []  # a pool whose last graph is gone takes no other
        self._expected: list[torch.Tensor] | None = None
        self._as_traced = versions.choose(numbers).call
        self._versions = versions
        self._facts = facts
        self._numbers = numbers
        self._inputs = inputs
        self._pool = pool
        self._device = device

    def decide(self, wanted: Sequence[Specialization]) -> Tuning:
        """Make them all, and compare the times of those that can serve."""
        for special in wanted:
            self.make(special)
        functions = {AS_TRACED.name: self._bound(self._as_traced)}
        functions |= {name: self._bound(version.call) for name, version in self.made.items()}
        seconds = replay_seconds(functions, self._pool, self._device)
        fastest = min(seconds, key=seconds.__getitem__)
        is_faster = seconds[fastest] < (1 - _MARGIN) * seconds[AS_TRACED.name]
        kept = fastest if is_faster else AS_TRACED.name
        times = {name: 1e6 * found for name, found in seconds.items()}
        return Tuning(self._versions.piece.index, self._numbers, kept, times, dict(self.failures))

    def make(self, special: Specialization) -> None:
        """Make a version, and run it: what tunes itself at the first run does so."""
        try:
            version = self._versions.special(self._numbers, special)
            fault = self._fault(version.call)
        except Exception as error:
            # What a compiler may raise is not known, and the piece has a version that works.
            fault = f"{type(error).__name__}: {error}"
        if fault is None:
            self.made[special.name] = version
        else:
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
