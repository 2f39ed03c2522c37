"""What a compiler of pieces is, and the one that leaves them as they are.

In:  a distinct piece and the sizes it is wanted for.
Out: a callable valid for those sizes.
Knows nothing of graphs, buffers or plans. `inductor_compiler` has the other one.

Note [Versions]
Inductor decides things by looking at the example sizes: a softmax over tokens is compiled for
up to 4096 of them, a view for even counts. Each version is compiled in a size environment of
its own, which records these decisions as conditions. For every new size the conditions are
evaluated once and the answer is kept; a size that violates them gets a version of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from piecewise_backend.artifact_store import Fetched, Serves
from piecewise_backend.cache_entry import Content, Key
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.passes import Pass
from piecewise_backend.version import Numbers, Version

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Specialization:
    """A version for fewer sizes than all, and made with more effort."""

    name: str
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Inductor options, beside those of the model."""
    limits: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """The smallest and largest value of integer inputs, by position; equal for constants."""
    passes: tuple[Pass, ...] = ()
    """Piece passes, beside those of the model."""


AS_TRACED = Specialization("as traced")


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A version that will be wanted."""

    piece: DistinctPiece
    numbers: Numbers
    special: Specialization | None = None


class CompilesAhead(Protocol):
    """Compiles versions into the caches of the compiler before they are wanted."""

    def start(self, wanted: Sequence[Wanted]) -> None:
        """Begin; they will be wanted in this order."""
        ...

    def take(
        self, wanted: Wanted, key: Key, load: Callable[[Content], T], serves: Serves
    ) -> T | None:
        """What was compiled under the key; None if the caller is to do it."""
        ...


class PieceCompiler(Protocol):
    """Makes one version of a distinct piece."""

    def prepare(self, wanted: Sequence[Wanted]) -> None:
        """These will be wanted, in this order."""
        ...

    def compile(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization | None = None
    ) -> Version:
        """A version valid at least for `numbers`, and for no other than `special` says."""
        ...

    def settle(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization
    ) -> Version | None:
        """Keep a version that has run, and was found to be the best, for other processes.

        Returns it as they will have it, if that is not as it is.
        """
        ...

    def asks_for(
        self, piece: DistinctPiece, numbers: Numbers, tried: Sequence[Specialization]
    ) -> Callable[[], bool]:
        """Tells, whenever it is called, whether some process has found out what `recall` asks for
        now: under the settings that are in force now."""
        ...

    def recall(
        self,
        piece: DistinctPiece,
        numbers: Numbers,
        tried: Sequence[Specialization],
        decide: Callable[[], bytes],
        load: Callable[[bytes], T],
    ) -> Fetched[T]:
        """What `decide` found out about these versions, in this process or an earlier one."""
        ...


class EagerCompiler:
    """Runs pieces as they were traced; valid for every size."""

    def prepare(self, wanted: Sequence[Wanted]) -> None:
        """There is nothing to compile."""

    def compile(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization | None = None
    ) -> Version:
        """The traced graph itself."""
        return Version(piece.module.forward, lambda numbers: None)

    def settle(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization
    ) -> Version | None:
        """Nothing is kept for others."""
        return None

    def asks_for(
        self, piece: DistinctPiece, numbers: Numbers, tried: Sequence[Specialization]
    ) -> Callable[[], bool]:
        """Nothing is kept for others."""
        return lambda: False

    def recall(
        self,
        piece: DistinctPiece,
        numbers: Numbers,
        tried: Sequence[Specialization],
        decide: Callable[[], bytes],
        load: Callable[[bytes], T],
    ) -> Fetched[T]:
        """Nothing is kept for others."""
        return Fetched(load(decide()), is_hit=False)
