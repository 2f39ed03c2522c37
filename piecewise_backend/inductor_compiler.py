"""Compile distinct pieces with Inductor, and keep what each version assumed about sizes.

In:  a distinct piece and the sizes it is wanted for.
Out: a callable valid for those sizes, and what passes did to it; compiled, or loaded.
Knows nothing of graphs, buffers or plans. See Note [Versions] in `compiler`.

Note [Settled]
Inductor's coordinate descent happens when a kernel runs for the first time, and what it compiled
then is not in the artifact, which is of the time before: each process that loads it would tune
it again. So the best version is compiled once more, by kernels that begin with what was chosen, and
this one is stored. Whoever has it tries it before it serves; it is stored even if it is no good.

Note [One mode]
Pieces are compiled at the trace, in captures, aside while they are announced, by other processes:
under inference mode or not. What is compiled serves all of these, so the key must not differ.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import sympy

from piecewise_backend import _torch
from piecewise_backend.artifact_store import ArtifactStore, Fetched, Made
from piecewise_backend.cache_entry import Content, Key
from piecewise_backend.cache_key import Uncacheable, piece_key
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.compiler import AS_TRACED, CompilesAhead, Specialization, Wanted
from piecewise_backend.counters import CompilationCounter
from piecewise_backend.decisions import decision_key, found_at
from piecewise_backend.fakes import piece_inputs
from piecewise_backend.kernel_choices import NotesChoices, restore_choices, store_choices
from piecewise_backend.passes import PassList, Write, extended
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
class _Job:
    """One version that is wanted of Inductor."""

    wanted: Wanted
    special: Specialization
    passes: PostGrad
    patches: Mapping[str, object]
    """Inductor options without those of passes."""
    key: Key
    """Empty if there is none."""

    @property
    def piece(self) -> DistinctPiece:
        """What is compiled."""
        return self.wanted.piece

    @property
    def of_kind(self) -> Hashable:
        """The same for all numbers that a special version serves."""
        limits = tuple(sorted(self.special.limits.items()))
        return self.piece.index, self.special.name, limits

    def serves(self, about: Mapping[str, Any]) -> bool:
        """What was stored is valid for its sizes."""
        return serves(about, self.wanted.numbers)

    def made(self, content: Content) -> Made[Version]:
        """What was stored, as if it had been compiled now."""
        return Made(loaded(content, self.piece), content)


class InductorCompiler:
    """Compiles with Inductor, sizes symbolic."""

    def __init__(
        self,
        patches: Mapping[str, object],
        counters: CompilationCounter,
        passes: PassList | None = None,
        writer: Callable[[str], Write | None] = lambda name: None,
        store: ArtifactStore | None = None,
        ahead: CompilesAhead | None = None,
        graphs: str = "",
    ) -> None:
        """Args are Inductor options, where to count, the piece passes, who writes their dumps
        - `writer(name of the piece)` -, where compiled pieces are kept, who compiles ahead, and the
        kind of graphs that versions are compared under."""
        self._patches = {**_PATCHES, **patches}
        self._counters = counters
        self._passes = passes or PassList(())
        self._writer = writer
        self._store = store
        self._ahead = ahead
        self._graphs = graphs
        self._chosen: dict[Hashable, Mapping[str, str]] = {}
        """What kernels of special versions chose when they ran; see `_Job.of_kind`."""

    def prepare(self, wanted: Sequence[Wanted]) -> None:
        """Have those compiled ahead that are not stored, unless that is a matter of timing."""
        if self._ahead is not None:
            self._ahead.start([one for one in wanted if self._is_for_others(one)])

    def _is_for_others(self, wanted: Wanted) -> bool:
        job = self._job(wanted)
        if not job.key:  # no other process could tell that it is this one
            return False
        # These are timed on the device while they are compiled, with nothing beside them.
        if any(name.startswith("max_autotune") and on for name, on in job.patches.items()):
            return False
        return self._store is None or not self._store.find(job.key, lambda _: True, job.serves)

    def compile(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization | None = None
    ) -> Version:
        """Compile with `numbers` as example sizes, or load what was. See `version`.

        A special version is not stored before it is settled.
        """
        job = self._job(Wanted(piece, numbers, special))
        store = self._store if job.key else None
        if special is not None:
            found = store and store.find(job.key, functools.partial(self._load, job), job.serves)
            if not found:
                return self._to_settle(job)
            fetched = Fetched(found, is_hit=True)
        elif store is None:
            return self._make(job).value
        else:
            load = functools.partial(self._load, job)
            fetched = store.fetch(job.key, lambda: self._make(job), load, job.serves)
        if fetched.is_hit:
            self._counters.add(num_artifacts_loaded=1)
        return fetched.value

    def compile_ahead(self, wanted: Wanted) -> None:
        """Store a version, special or not, as another process is to find it."""
        assert self._store is not None
        job = self._job(wanted)
        assert job.key, "who asks for it has made one of the same piece"
        load = functools.partial(self._load, job)
        self._store.fetch(job.key, lambda: self._make(job), load, job.serves)

    def settle(
        self, piece: DistinctPiece, numbers: Numbers, special: Specialization
    ) -> Version | None:
        """Compile it again with what its kernels chose, and store that. See Note [Settled].

        There is nothing to do for one that was loaded.
        """
        job, store = self._job(Wanted(piece, numbers, special)), self._store
        choices = self._chosen.pop(job.of_kind, None)
        if store is None or not job.key or choices is None or not _torch.keeps_choices():
            return None

        def make() -> Made[Version]:
            version = self._compile(job, anew=True)
            content = stored(version, piece, is_settled=True)
            if content is not None:
                store_choices(store, content.artifact, choices)
            return Made(version, content)

        load = functools.partial(self._load, job)
        return store.fetch(job.key, make, load, job.serves).value

    def _job(self, wanted: Wanted) -> _Job:
        special = wanted.special or AS_TRACED
        listed = self._passes
        if special.passes:
            listed = listed.with_passes(extended(listed.passes, special.passes))
        passes = PostGrad(listed, f"piece {wanted.piece.index}", self._writer)
        patches = {**self._patches, **special.options}
        key: Key | Uncacheable = {}
        if (self._store is not None or self._ahead is not None) and not passes.has_dumps:
            options = patches | passes.patches()
            with _torch.ordinary_tensors():  # See Note [One mode]
                key = piece_key(wanted.piece, wanted.numbers, options, special.limits)
        if isinstance(key, Uncacheable):
            log.info("piece %d is compiled and not stored: %s", wanted.piece.index, key.reason)
            key = {}
        return _Job(wanted, special, passes, patches, key)

    def _compile(self, job: _Job, *, anew: bool = False) -> Version:
        _torch.complete_examples(job.piece.module.graph)
        inputs, env = _inputs(job.piece, job.wanted.numbers, job.special.limits)
        self._counters.add(num_inductor_compiles=1)
        patches = {**job.patches, **job.passes.patches(anew=anew)}
        with _torch.ordinary_tensors():  # See Note [One mode]
            call = _torch.compile_with_inductor(job.piece.module, inputs, env, patches, anew=anew)
        conditions = env.conditions()
        records = job.passes.records()
        return Version(call, lambda sizes: env.holds(conditions, sizes), conditions, records)

    def _compiled(self, job: _Job) -> Made[Version]:
        """By another process meanwhile, or now; with what it is as bytes, where that is needed."""
        if self._ahead is not None and job.key:
            made = self._ahead.take(job.wanted, job.key, job.made, job.serves)
            if made is not None:
                self._counters.add(num_inductor_compiles=1)
                return made
        version = self._compile(job)
        is_kept = self._store is not None and job.key
        return Made(version, stored(version, job.piece) if is_kept else None)

    def _make(self, job: _Job) -> Made[Version]:
        """For the store, which gets what its kernels choose as well, when they run."""
        made = self._compiled(job)
        if self._store is None or made.content is None:
            return made
        return Made(self._noting(made.value, made.content.artifact), made.content)

    def _load(self, job: _Job, content: Content) -> Version:
        """From the store, with kernels as they chose in an earlier process."""
        assert self._store is not None
        have_chosen = restore_choices(self._store, content.artifact)
        version = loaded(content, job.piece)
        return version if have_chosen else self._noting(version, content.artifact)

    def _noting(self, version: Version, artifact: bytes) -> Version:
        assert self._store is not None
        keep = functools.partial(store_choices, self._store, artifact)
        return dataclasses.replace(version, call=NotesChoices(version.call, keep))

    def _to_settle(self, job: _Job) -> Version:
        version = self._compiled(job).value
        keep = functools.partial(self._chosen.__setitem__, job.of_kind)
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
        key = self._decision_key(piece, numbers, tried)
        if self._store is None or key is None:
            return Fetched(load(decide()), is_hit=False)
        sizes = list(numbers[: num_sizes(piece)])

        def make() -> Made[T]:
            decision = decide()
            return Made(load(decision), Content(decision, {"sizes": sizes}))

        return self._store.fetch(key, make, lambda content: load(content.artifact), found_at(sizes))

    def asks_for(
        self, piece: DistinctPiece, numbers: Numbers, tried: Sequence[Specialization]
    ) -> Callable[[], bool]:
        """Looks into the store, under a key that is made now."""
        store = self._store
        key = None if store is None else self._decision_key(piece, numbers, tried)
        if store is None or key is None:
            return lambda: False
        sizes = list(numbers[: num_sizes(piece)])
        return lambda: store.find(key, lambda content: True, found_at(sizes)) is not None

    def _decision_key(
        self, piece: DistinctPiece, numbers: Numbers, tried: Sequence[Specialization]
    ) -> Key | None:
        key = self._job(Wanted(piece, numbers)).key
        return decision_key(key, tried, self._graphs) if key else None


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
        inputs = piece_inputs(
            piece,
            number=lambda expr: env.symint(expr.xreplace(symbols)),
            constant=lambda _: env.symint(env.symbol(next(hints))),
        )
    return inputs, env
