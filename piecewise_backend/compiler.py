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
from typing import Any, Protocol, TypeVar

import sympy

from piecewise_backend import _torch
from piecewise_backend.artifact_store import ArtifactStore, Fetched, Made
from piecewise_backend.cache_entry import Content
from piecewise_backend.cache_key import Uncacheable, piece_key
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.counters import CompilationCounter
from piecewise_backend.fakes import fake_inputs
from piecewise_backend.passes import Pass, PassList, Write, extended
from piecewise_backend.post_grad import PostGrad
from piecewise_backend.steps import Host
from piecewise_backend.version import Numbers, Version, loaded, num_sizes, serves, stored

log = logging.getLogger(__name__)

T = TypeVar("T")

_PATCHES: dict[str, object] = {
    # Graphs are ours; Inductor's own would nest.
    "triton.cudagraphs": False,
    # standalone_compile would time kernels one by one while compiling (9.0 s against 6.3 for
    # three pieces on an H200 host); they are timed in the first run, which warm-up makes.
    "triton.autotune_at_compile_time": False,
}


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


class PieceCompiler(Protocol):
    """Makes one version of a distinct piece."""

    def compile(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization | None = None
    ) -> Version:
        """A version valid at least for `numbers`, and for no other than `special` says."""
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

    def compile(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization | None = None
    ) -> Version:
        """The traced graph itself."""
        return Version(piece.module.forward, lambda numbers: None)

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

    def compile(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization | None = None
    ) -> Version:
        """Compile with `numbers` as example sizes, or load what was. See `version`."""
        special = special or AS_TRACED
        passes = self._passes.with_passes(extended(self._passes.passes, special.passes))
        with_passes = PostGrad(passes, f"piece {piece.index}", self._writer)
        patches = {**self._patches, **special.options, **with_passes.patches()}

        def compile_now() -> Version:
            inputs, env = _inputs(piece, numbers, special.limits)
            self._counters.add(num_inductor_compiles=1)
            call = _torch.compile_with_inductor(piece.module, inputs, env, patches)
            conditions = env.conditions()
            records = with_passes.records()
            return Version(call, lambda sizes: env.holds(conditions, sizes), conditions, records)

        if self._store is None or with_passes.has_dumps:
            return compile_now()
        key = piece_key(piece, numbers, patches, special.limits)
        if isinstance(key, Uncacheable):
            log.info("piece %d is compiled and not stored: %s", piece.index, key.reason)
            return compile_now()

        def make() -> Made[Version]:
            version = compile_now()
            return Made(version, stored(version, piece))

        fetched = self._store.fetch(
            key, make, lambda content: loaded(content, piece), lambda about: serves(about, numbers)
        )
        if fetched.is_hit:
            self._counters.add(num_artifacts_loaded=1)
        return fetched.value

    def recall(
        self,
        piece: DistinctPiece,
        numbers: Numbers,
        tried: Sequence[Specialization],
        decide: Callable[[], bytes],
        load: Callable[[bytes], T],
    ) -> Fetched[T]:
        """From the store, if there is one."""
        patches = self._patches | PostGrad(self._passes, "", lambda name: None).patches()
        key = piece_key(piece, numbers, patches, {}) if self._store else Uncacheable("no store")
        if self._store is None or isinstance(key, Uncacheable):
            return Fetched(load(decide()), is_hit=False)
        wanted = {
            one.name: {
                "options": {name: str(value) for name, value in one.options.items()},
                "limits": {str(i): list(between) for i, between in one.limits.items()},
                "passes": PassList(one.passes).key() if one.passes else None,
            }
            for one in tried
        }

        sizes = list(numbers[: num_sizes(piece)])

        def make() -> Made[T]:
            decision = decide()
            return Made(load(decision), Content(decision, {"sizes": sizes}))

        return self._store.fetch(
            {**key, "decision among": wanted},
            make,
            lambda content: load(content.artifact),
            lambda about: bool(about["sizes"] == sizes),
        )


def _inputs(
    piece: DistinctPiece, numbers: Numbers, limits: Mapping[int, tuple[int, int]]
) -> tuple[list[Any], _torch.SizeEnv]:
    """Fakes to compile with, and the environment of their sizes."""
    env = _torch.SizeEnv()
    hints = iter(numbers)
    symbols: dict[sympy.Symbol, sympy.Expr] = {}
    hosts = [ref for ref in piece.inputs if isinstance(ref, Host)]
    for position, ref in enumerate(hosts):
        hint, between = next(hints), limits.get(position)
        is_fixed = between is not None and between[0] == between[1]
        symbols[ref.expr] = env.constant(hint) if is_fixed else env.symbol(hint, between)
    with _torch.one_trace_for_all_sizes(), _torch.ordinary_tensors(), env.fake_mode:
        inputs = fake_inputs(
            piece,
            number=lambda expr: env.symint(expr.xreplace(symbols)),
            constant=lambda _: env.symint(env.symbol(next(hints))),
        )
    return inputs, env
