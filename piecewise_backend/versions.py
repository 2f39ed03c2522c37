"""The versions of a distinct piece, and which of them serves a size.

In:  a distinct piece, who compiles it, the sizes it is called with.
Out: a callable for each size, compiled if need be.
Knows nothing of graphs, buffers or plans. See Note [Versions] in `compiler`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import sympy

from piecewise_backend.artifact_store import Fetched
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.compiler import PieceCompiler, Specialization
from piecewise_backend.steps import Constant, Host
from piecewise_backend.version import Call, Numbers, Version, num_sizes

if TYPE_CHECKING:
    from piecewise_backend.tuning import Tuning

log = logging.getLogger(__name__)

T = TypeVar("T")

# A piece that needs more versions than this wants one for every size: better as traced.
_MAX_VERSIONS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What serves one size of a piece."""

    call: Call
    violation: str | None = None
    """The condition that no version satisfies: the piece runs as traced."""


class Versions:
    """The versions of one distinct piece."""

    def __init__(self, piece: DistinctPiece, compiler: PieceCompiler) -> None:
        self.piece = piece
        self.compiled: list[Version] = []
        self.preferred: dict[Numbers, Version] = {}
        """By size, what was found to be faster there than the versions for all sizes."""
        self.tunings: dict[Numbers, Tuning] = {}
        """By size, how that was found out."""
        self.is_sealed = False
        self._special: dict[str, Version] = {}
        self._compiler = compiler
        self.num_sizes = num_sizes(piece)
        """How many of its integer inputs are sizes; they come first."""
        self._chosen: dict[Numbers, Choice] = {}

    def choose(self, numbers: Numbers) -> Choice:
        """What serves these sizes, compiled if need be. See Note [Versions].

        A sealed piece compiles nothing, nor does one that has many versions already: it runs
        as traced where no version is valid, and the choice says why.
        """
        choice = self._chosen.get(numbers)
        if choice is None:
            choice = self._choose(numbers)
            self._chosen[numbers] = choice
        return choice

    def special(self, numbers: Numbers, wanted: Specialization) -> Version:
        """A version of a kind, for these sizes and as many more as it has; serves nobody yet."""
        version = self._special.get(wanted.name)
        if version is None or version.violated_by(numbers) is not None:
            version = self._compiler.compile(self.piece, numbers, wanted)
            assert version.violated_by(numbers) is None
            self._special[wanted.name] = version
        return version

    def prefer(self, numbers: Numbers, version: Version) -> None:
        """Serve these sizes by this version from now on."""
        sizes = numbers[: self.num_sizes]
        self.preferred[sizes] = version
        self._chosen = {k: c for k, c in self._chosen.items() if k[: self.num_sizes] != sizes}

    def settle(self, numbers: Numbers, special: Specialization) -> Version | None:
        """Keep a version of a kind for other processes, now that it has run.

        Returns it as they will have it, if that is not as it is; other sizes get that then.
        """
        settled = self._compiler.settle(self.piece, numbers, special)
        if settled is not None:
            self._special[special.name] = settled
        return settled

    def recall(
        self,
        numbers: Numbers,
        tried: Sequence[Specialization],
        decide: Callable[[], bytes],
        load: Callable[[bytes], T],
    ) -> Fetched[T]:
        """What an earlier process found out about these versions, else what `decide` does."""
        return self._compiler.recall(self.piece, numbers, tried, decide, load)

    def unseal(self) -> None:
        """Allow compiling again, also for sizes that ran as traced."""
        self.is_sealed = False
        self._chosen = {k: choice for k, choice in self._chosen.items() if not choice.violation}

    def _choose(self, numbers: Numbers) -> Choice:
        if 0 in numbers[: self.num_sizes]:
            return Choice(self.piece.module.forward)  # nothing to compute, nothing to compile
        violation = None
        preferred = self.preferred.get(numbers[: self.num_sizes])
        for version in (*([preferred] if preferred else []), *self.compiled):
            violation = version.violated_by(numbers)
            if violation is None:
                return Choice(version.call)
        if self.is_sealed or len(self.compiled) >= _MAX_VERSIONS:
            return Choice(self.piece.module.forward, violation or "no version is compiled")
        if violation:
            log.info("piece %d: sizes %s violate %s", self.piece.index, numbers, violation)
        version = self._compiler.compile(self.piece, numbers)
        assert version.violated_by(numbers) is None
        self.compiled.append(version)
        return Choice(version.call)


def numbers_of(refs: Sequence[Any]) -> list[sympy.Expr]:
    """The integer inputs among the inputs of a piece, as expressions, in order."""
    hosts = [ref.expr for ref in refs if isinstance(ref, Host)]
    integers = [r.value for r in refs if isinstance(r, Constant) and isinstance(r.value, int)]
    return hosts + [sympy.Integer(value) for value in integers]
