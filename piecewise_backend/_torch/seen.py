"""All that Dynamo came by in a trace: it guards an object under the first of its names only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch._dynamo.output_graph import OutputGraph, SubgraphTracer
from torch._dynamo.source import GlobalSource, LocalSource
from torch._dynamo.variables import builder
from torch._guards import ChainedSource

from piecewise_backend._torch.reads import source_text

_builder: Any = builder
_HAS_RECORD = "traced_sources" in SubgraphTracer.__init__.__code__.co_names
LOOKS_AT_SETS = _HAS_RECORD
"""A loop over a set that is in a class, or a default, is a look at that set. Before torch 2.13 it
is none: the look at the class or function is all."""

_met: ContextVar[list[Any] | None] = ContextVar("met", default=None)


def seen_in(output: OutputGraph) -> tuple[str, ...]:
    """The names under which a trace found something, guarded or not.

    There is no public list. Before torch 2.13 there is none at all: then these are the names of
    what had been found under another one, in a trace inside of `noting_second_names`.
    """
    root: Any = output.root_tracer
    found = root.traced_sources if _HAS_RECORD else _met.get() or ()
    return tuple(dict.fromkeys(source_text(source) for source in found if _has_name(source)))


def _has_name(source: Any) -> bool:
    """It starts from an argument, a closure variable or a global: others are of the trace alone,
    and some of them cannot be named."""
    start = source.get_base() if isinstance(source, ChainedSource) else source
    return isinstance(start, LocalSource | GlobalSource) and not source.is_ephemeral()


class _Patch:
    """Dynamo's function that is asked about each object that it meets again, while it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._original: Callable[..., Any] = _builder.make_dupe_guard

    def __enter__(self) -> None:
        with self._lock:
            self._num_users += 1
            _builder.make_dupe_guard = self._note

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                _builder.make_dupe_guard = self._original

    def _note(self, source: Any, first: Any) -> Any:
        if (met := _met.get()) is not None:
            met.append(source)
        return self._original(source, first)


_patch = _Patch()


@contextlib.contextmanager
def noting_second_names() -> Iterator[None]:
    """Traces inside, in this thread, have what `seen_in` tells. Ends with torch 2.11."""
    if _HAS_RECORD:
        yield
        return
    token = _met.set([])
    try:
        with _patch:
            yield
    finally:
        _met.reset(token)
