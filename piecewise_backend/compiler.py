"""Compile distinct pieces, and keep what each version assumed about sizes.

In:  a distinct piece and the sizes it is wanted for.
Out: a callable valid for those sizes, and what passes did to it.
Knows nothing of graphs, buffers or plans.

Note [Versions]
Inductor decides things by looking at the example sizes: a softmax over tokens is compiled for
up to 4096 of them, a view for even counts. Each version is compiled in a size environment of
its own, which records these decisions as conditions. For every new size the conditions are
evaluated once and the answer is kept; a size that violates them gets a version of its own.

Note [Settled]
Inductor's coordinate descent happens when a kernel runs for the first time, and what it compiled
then is not in the artifact, which is of the time before: each process that loads it would tune
it again. So a version that was found to be the best is compiled once more, by kernels that begin
with what was chosen, and this one is stored.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import sympy

from piecewise_backend import _torch
from piecewise_backend.artifact_store import ArtifactStore, Fetched, Made
from piecewise_backend.cache_entry import Content, Key
from piecewise_backend.cache_key import Uncacheable, piece_key
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.counters import CompilationCounter
from piecewise_backend.fakes import fake_inputs
from piecewise_backend.kernel_choices import NotesChoices, restore_choices, store_choices
from piecewise_backend.passes import PassList, Write
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


AS_TRACED = Specialization("as traced")


class PieceCompiler(Protocol):
    """Makes one version of a distinct piece."""

    def compile(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization | None = None
    ) -> Version:
        """A version valid at least for `numbers`, and for no other than `special` says."""
        ...

    def settle(self, piece: DistinctPiece, numbers: Numbers, special: Specialization) -> None:
        """Keep a version that has run, and was found to be the best, for other processes."""
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """One version that is wanted of Inductor."""

    piece: DistinctPiece
    numbers: Numbers
    special: Specialization
    passes: PostGrad
    patches: Mapping[str, object]
    """Inductor options without those of passes."""
    store: ArtifactStore | None
    """Where it is kept; None if it cannot be."""
    key: Key

    def serves(self, about: Mapping[str, Any]) -> bool:
        """What was stored is valid for its sizes."""
        return serves(about, self.numbers)

    def load(self, content: Content) -> Version:
        """What was stored, its kernels as they chose in an earlier process."""
        assert self.store is not None
        have_chosen = restore_choices(self.store, content.artifact)
        version = loaded(content, self.piece)
        return version if have_chosen else self.noting(version, content.artifact)

    def noting(self, version: Version, artifact: bytes) -> Version:
        """The same, which stores what its kernels choose when they run."""
        assert self.store is not None
        keep = functools.partial(store_choices, self.store, artifact)
        return dataclasses.replace(version, call=NotesChoices(version.call, keep))


class EagerCompiler:
    """Runs pieces as they were traced; valid for every size."""

    def compile(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization | None = None
    ) -> Version:
        """The traced graph itself."""
        return Version(piece.module.forward, lambda numbers: None)

    def settle(self, piece: DistinctPiece, numbers: Numbers, special: Specialization) -> None:
        """Nothing is kept for others."""

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
        self._chosen: dict[tuple[int, str], Mapping[str, str]] = {}
        """What kernels of special versions chose when they ran, by piece and name."""

    def compile(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization | None = None
    ) -> Version:
        """Compile with `numbers` as example sizes, or load what was. See `version`.

        A special version is not stored before it is settled.
        """
        job = self._job(piece, numbers, special or AS_TRACED)
        if job.store is None:
            return self._compile(job)
        if special is None:
            fetched = job.store.fetch(job.key, lambda: self._make(job), job.load, job.serves)
        elif (found := job.store.find(job.key, job.load, job.serves)) is not None:
            fetched = Fetched(found, is_hit=True)
        else:
            return self._to_settle(job)
        if fetched.is_hit:
            self._counters.add(num_artifacts_loaded=1)
        return fetched.value

    def settle(self, piece: DistinctPiece, numbers: Numbers, special: Specialization) -> None:
        """Compile it again with what its kernels chose, and store that. See Note [Settled]."""
        job = self._job(piece, numbers, special)
        if (store := job.store) is None:
            return

        def make() -> Made[Version]:
            version = self._compile(job, anew=True)
            content = stored(version, piece, is_settled=True)
            if content is not None:
                store_choices(store, content.artifact, self._chosen[piece.index, special.name])
            return Made(version, content)

        store.fetch(job.key, make, job.load, job.serves)

    def _job(self, piece: DistinctPiece, numbers: Numbers, special: Specialization) -> _Job:
        passes = PostGrad(self._passes, f"piece {piece.index}", self._writer)
        patches = {**self._patches, **special.options}
        if self._store is None or passes.has_dumps:
            return _Job(piece, numbers, special, passes, patches, None, {})
        key = piece_key(piece, numbers, patches | passes.patches(), special.limits)
        if isinstance(key, Uncacheable):
            log.info("piece %d is compiled and not stored: %s", piece.index, key.reason)
            return _Job(piece, numbers, special, passes, patches, None, {})
        return _Job(piece, numbers, special, passes, patches, self._store, key)

    def _compile(self, job: _Job, *, anew: bool = False) -> Version:
        inputs, env = _inputs(job.piece, job.numbers, job.special.limits)
        self._counters.add(num_inductor_compiles=1)
        patches = {**job.patches, **job.passes.patches(anew=anew)}
        call = _torch.compile_with_inductor(job.piece.module, inputs, env, patches, anew=anew)
        conditions = env.conditions()
        records = job.passes.records()
        return Version(call, lambda sizes: env.holds(conditions, sizes), conditions, records)

    def _make(self, job: _Job) -> Made[Version]:
        version = self._compile(job)
        content = stored(version, job.piece)
        if content is not None:
            version = job.noting(version, content.artifact)
        return Made(version, content)

    def _to_settle(self, job: _Job) -> Version:
        version, of = self._compile(job), (job.piece.index, job.special.name)
        keep = functools.partial(self._chosen.__setitem__, of)
        return dataclasses.replace(version, call=NotesChoices(version.call, keep))

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
