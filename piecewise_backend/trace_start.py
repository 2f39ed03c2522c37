"""Start a model from a stored trace, or store the trace that was made.

In:  the function of one compiled model, its options, the parameters of its first call.
Out: a runtime with what Dynamo rewrote, as a trace would leave them; an entry for others.
Knows nothing of how calls are made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx

from piecewise_backend import _torch
from piecewise_backend.artifact_store import ArtifactStore, open_store
from piecewise_backend.cache_entry import Key
from piecewise_backend.cache_key import Uncacheable
from piecewise_backend.config import Config
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.runtime import Runtime
from piecewise_backend.session import Session
from piecewise_backend.subject import Subject
from piecewise_backend.trace_build import is_of_build
from piecewise_backend.trace_fit import Inputs, NoFit, described, inputs_of
from piecewise_backend.trace_graph import (
    RecordedGraph,
    custom_ops_of,
    functions_of,
    rebuild,
    record,
    varying_inputs,
)
from piecewise_backend.trace_key import trace_key, varying_dims
from piecewise_backend.trace_reads import imports_of, questions_of, scope_of
from piecewise_backend.trace_store import Found, StoredTrace, find, save

log = logging.getLogger(__name__)

MakeRuntime = Callable[[fx.GraphModule, Sequence[Any], Session], Runtime]


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """What a trace would have left."""

    runtime: Runtime
    rewritten: _torch.Rewritten
    code: CodeType
    """What Dynamo wrote; `rewritten` does not keep it."""


class StoredTraces:
    """The stored traces of one function, for one call that is to be traced."""

    def __init__(
        self, store: ArtifactStore, key: Key, subject: Subject, parameters: Mapping[str, Any]
    ) -> None:
        self._store = store
        self._key = key
        self._subject = subject
        self._frame = subject.frame(parameters)
        self._namespace: dict[str, Any] = subject.function.__globals__
        self._before = frozenset(self._namespace)
        self._graph: RecordedGraph | Uncacheable | None = None

    @classmethod
    def of(
        cls, subject: Subject, parameters: Mapping[str, Any], config: Config
    ) -> StoredTraces | None:
        """None, which the log explains, if traces of such a call are not stored.

        Args:
            parameters: of the call as it begins, their varying dimensions marked.
        """
        if config.cache_dir is None:
            return None
        try:
            key = _reason_against(config) or trace_key(subject, parameters, config)
        except Exception as error:  # as in `save`
            key = Uncacheable(f"describing its call raised {type(error).__name__}: {error}")
        if isinstance(key, Uncacheable):
            log.info("the trace is made and not stored: %s", key.reason)
            return None
        store = open_store(config.cache_dir, max_bytes=config.max_cache_size)
        return None if store is None else cls(store, key, subject, parameters)

    def start(self, session: Session, make_runtime: MakeRuntime) -> Started | None:
        """What another process has traced for just such a call; None if none has."""
        for found in find(self._store, self._key, self._frame, self._namespace):
            bound = self._bind(found)
            if isinstance(bound, Inputs):
                return self._start(found, bound, session, make_runtime)
            log.info("a stored trace is not for this call: %s", bound.reason)
        return None

    def _bind(self, found: Found) -> Inputs | NoFit:
        scope = scope_of(found.questions, self._frame, self._namespace)
        if gone := self._gone(found):
            return NoFit(f"{gone} is not what it was")
        return inputs_of(found.trace.graph, found.trace.shape_guards, scope)

    def _start(
        self, found: Found, inputs: Inputs, session: Session, make_runtime: MakeRuntime
    ) -> Started:
        self._namespace.update(imports_of(found.questions))  # as Dynamo does
        gm, symbols = rebuild(found.trace.graph, inputs.sizes)
        runtime = make_runtime(gm, inputs.values, session)
        runtime.counters.add(num_traces_loaded=1)
        rewritten = self._rewritten(found, symbols)
        runtime.on_rewritten(rewritten)
        log.info("started from a stored trace: Dynamo traces nothing")
        return Started(runtime, rewritten, found.trace.code)

    def _gone(self, found: Found) -> str:
        """A global that Dynamo's code needs and that is not there, or is something else.

        Dynamo goes on with the first import of a module that was imported again, and refuses to
        trace in globals that have the other one.
        """
        missing = [name for name in found.trace.globals if name not in self._namespace]
        taken = [
            name
            for name, module in imports_of(found.questions).items()
            if self._namespace.get(name, module) is not module
            or _torch.module_of_dynamo(module.__name__) is not module
        ]
        return ", ".join((*missing, *taken))

    def _rewritten(self, found: Found, symbols: Mapping[Any, Any]) -> _torch.Rewritten:
        trace = found.trace
        return _torch.Rewritten(
            traced=weakref.ref(self._subject.function.__code__),
            written=weakref.ref(trace.code),
            shape_guards=tuple((c.xreplace(dict(symbols)), at) for c, at in trace.shape_guards),
            assigned=(),
            aliases=trace.aliases,
            looked_at=trace.looked_at,
            reads=found.questions.reads,
            seen=(),
            inlined=(),
        )

    @contextlib.contextmanager
    def recording(self, session: Session) -> Iterator[None]:
        """What Dynamo hands to the backend inside is kept, to be stored."""
        session.on_graph = self._record
        try:
            with _torch.noting_second_names():
                yield
        finally:
            session.on_graph = None

    def _record(self, gm: fx.GraphModule) -> None:
        try:
            self._graph = record(gm)
        except NoContentError as error:
            self._graph = Uncacheable(str(error))

    def save(self, rewritten: _torch.Rewritten) -> None:
        """Store the trace that was made, for other processes."""
        try:
            is_stored = self._save(rewritten)
        except NoContentError as error:
            log.info("the trace is not stored: it depends on %s", error)
            return
        except Exception as error:
            # What is described are the program's objects, whose code may raise anything; and the
            # call has been served.
            log.info("the trace is not stored: %s: %s", type(error).__name__, error)
            return
        log.info("the trace is stored" if is_stored else "its function has too many traces stored")

    def _save(self, rewritten: _torch.Rewritten) -> bool:
        graph, code = self._graph, rewritten.code
        if isinstance(graph, Uncacheable):
            raise NoContentError(graph.reason)
        assert graph is not None, "Dynamo has just handed it over"
        assert code is not None, "the call has just come through it"
        for function in functions_of(graph):
            if not is_of_build(function.__module__):  # its result had a shape that may be another
                raise NoContentError(f"{function.__qualname__}, which the graph calls as it is")
        ops, varying = custom_ops_of(graph), self._varying(rewritten, graph)
        fit = described(graph, rewritten.shape_guards)
        questions = questions_of(rewritten, varying, ops, fit, self._frame, self._namespace)
        trace = StoredTrace(
            graph=graph,
            code=code,
            globals=self._globals_of(code),
            shape_guards=rewritten.shape_guards,
            aliases=rewritten.aliases,
            looked_at=rewritten.looked_at,
        )
        return save(self._store, self._key, questions, trace, self._frame, self._namespace)

    def _varying(
        self, rewritten: _torch.Rewritten, graph: RecordedGraph
    ) -> dict[str, tuple[int, ...]]:
        """The dimensions that vary: as marked, where the graph does not take the tensor."""
        scope = _torch.source_namespace() | {"L": self._frame, "G": self._namespace}
        found = varying_inputs(graph)
        for read in rewritten.reads:
            if read.kind == "TENSOR_MATCH" and read.source not in found:
                value = eval(read.source, scope)
                if isinstance(value, torch.Tensor) and (dims := varying_dims(value)):
                    found[read.source] = dims
        return found

    def _globals_of(self, code: CodeType) -> tuple[str, ...]:
        """The user's globals in Dynamo's code.

        Raises:
            NoContentError: it uses one that Dynamo has put there.
        """
        names = _torch.global_names(code)
        found = [n for n in names if n in self._namespace and not n.startswith(_torch.IMPORT_ALIAS)]
        if made := [name for name in found if name not in self._before]:
            raise NoContentError(f"{made[0]}, which Dynamo has made")
        return tuple(found)


def _reason_against(config: Config) -> Uncacheable | None:
    if config.check_guards:
        return Uncacheable("check_guards evaluates the guards of a trace of this process")
    if config.dump_dir is not None:
        return Uncacheable("with dump_dir everything is made anew, and shown")
    return None
