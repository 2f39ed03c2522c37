"""Compile distinct pieces, and keep what each version assumed about sizes.

In:  a distinct piece and the sizes it is wanted for.
Out: a callable valid for those sizes, and what passes did to it.
Knows nothing of graphs, buffers or plans.

Note [Versions]
Inductor decides things by looking at the example sizes: a softmax over tokens is compiled for
up to 4096 of them, a view for even counts. Each version is compiled in a size environment of
its own, which records these decisions as conditions. For every new size the conditions are
evaluated once and the answer is kept; a size that violates them gets a version of its own.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import sympy

from piecewise_backend import _torch
from piecewise_backend.artifact_store import ArtifactStore, Made
from piecewise_backend.cache_key import Uncacheable, piece_key
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.counters import CompilationCounter
from piecewise_backend.fakes import fake_inputs
from piecewise_backend.passes import PassList, Write
from piecewise_backend.post_grad import PostGrad
from piecewise_backend.steps import Constant, Host
from piecewise_backend.version import Call, Numbers, Version, loaded, num_sizes, serves, stored

log = logging.getLogger(__name__)

_PATCHES: dict[str, object] = {
    # Graphs are ours; Inductor's own would nest.
    "triton.cudagraphs": False,
    # standalone_compile would time kernels one by one while compiling (9.0 s against 6.3 for
    # three pieces on an H200 host); they are timed in the first run, which warm-up makes.
    "triton.autotune_at_compile_time": False,
}

# A piece that needs more versions than this wants one for every size: better as traced.
_MAX_VERSIONS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What serves one size of a piece."""

    call: Call
    violation: str | None = None
    """The condition that no version satisfies: the piece runs as traced."""


class PieceCompiler(Protocol):
    """Makes one version of a distinct piece."""

    def compile(self, piece: DistinctPiece, numbers: Numbers) -> Version:
        """A version valid at least for `numbers`."""
        ...


class EagerCompiler:
    """Runs pieces as they were traced; valid for every size."""

    def compile(self, piece: DistinctPiece, numbers: Numbers) -> Version:
        """The traced graph itself."""
        return Version(piece.module.forward, lambda numbers: None)


class InductorCompiler:
    """Compiles with Inductor, sizes symbolic."""

    def __init__(
        self,
        patches: Mapping[str, object],
        counters: CompilationCounter,
        passes: PassList | None = None,
        writer: Callable[[str], Write | None] = lambda name: None,
        store: ArtifactStore | None = None,
    ) -> None:
        """Args are Inductor options, where to count, the piece passes, who writes their dumps
        - `writer(name of the piece)` -, and where compiled pieces are kept."""
        self._patches = {**_PATCHES, **patches}
        self._counters = counters
        self._passes = passes or PassList(())
        self._writer = writer
        self._store = store

    def compile(self, piece: DistinctPiece, numbers: Numbers) -> Version:
        """Compile with `numbers` as example sizes, or load what was. See `version`."""
        with_passes = PostGrad(self._passes, f"piece {piece.index}", self._writer)
        patches = self._patches | with_passes.patches()
        if self._store is None or with_passes.has_dumps:
            return self._compile(piece, numbers, with_passes, patches)
        key = piece_key(piece, numbers, patches)
        if isinstance(key, Uncacheable):
            log.info("piece %d is compiled and not stored: %s", piece.index, key.reason)
            return self._compile(piece, numbers, with_passes, patches)

        def make() -> Made[Version]:
            version = self._compile(piece, numbers, with_passes, patches)
            return Made(version, stored(version, piece))

        fetched = self._store.fetch(
            key, make, lambda content: loaded(content, piece), lambda about: serves(about, numbers)
        )
        if fetched.is_hit:
            self._counters.add(num_artifacts_loaded=1)
        return fetched.value

    def _compile(
        self,
        piece: DistinctPiece,
        numbers: Numbers,
        with_passes: PostGrad,
        patches: Mapping[str, object],
    ) -> Version:
        env = _torch.SizeEnv()
        hints = iter(numbers)
        symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        for ref in piece.inputs:
            if isinstance(ref, Host):
                symbols[ref.expr] = env.symbol(next(hints))
        with _torch.one_trace_for_all_sizes(), _torch.ordinary_tensors(), env.fake_mode:
            inputs = fake_inputs(
                piece,
                number=lambda expr: env.symint(expr.xreplace(symbols)),
                constant=lambda _: env.symint(env.symbol(next(hints))),
            )
        self._counters.add(num_inductor_compiles=1)
        call = _torch.compile_with_inductor(piece.module, inputs, env, patches)
        conditions = env.conditions()
        records = with_passes.records()
        return Version(call, lambda sizes: env.holds(conditions, sizes), conditions, records)


class Versions:
    """The versions of one distinct piece."""

    def __init__(self, piece: DistinctPiece, compiler: PieceCompiler) -> None:
        self.piece = piece
        self.compiled: list[Version] = []
        self.is_sealed = False
        self._compiler = compiler
        self._num_sizes = num_sizes(piece)
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

    def unseal(self) -> None:
        """Allow compiling again, also for sizes that ran as traced."""
        self.is_sealed = False
        self._chosen = {k: choice for k, choice in self._chosen.items() if not choice.violation}

    def _choose(self, numbers: Numbers) -> Choice:
        if 0 in numbers[: self._num_sizes]:
            return Choice(self.piece.module.forward)  # nothing to compute, nothing to compile
        violation = None
        for version in self.compiled:
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
