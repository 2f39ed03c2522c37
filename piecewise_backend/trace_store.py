"""Stored traces: found by what is known before tracing, checked by what the trace read.

In:  a key, a call; a trace that was made.
Out: a trace of another process that Dynamo would make just so here; a stored one.
Knows nothing of how a trace becomes a runtime.

Note [Two entries]
What a trace depends on is known in full only after it was made: which functions it went through,
which attributes it read. So there are two kinds of entries. Under what is known before - function,
class, arguments, options, torch - lie the questions that a trace asks (`trace_reads`), numbered
where several traces have asked different ones. Under the same and the answers, which are the whole
key, lies the trace. A process answers the questions for its own model and looks for the trace of
its answers: what differs in one of them finds nothing, and is traced anew.

Note [Why not torch's own]
`torch.compile(...).aot_compile` stores a trace, too. It drops the guards on globals and on
identities (functions, classes, modules), and loads whatever source was traced; and it keeps the
graph inside of what the backend returned, where pieces could not be compiled anew. What is stored
here is what `pw.compile` needs anyway: Dynamo's code, its graph, and the names of its inputs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import sympy

from piecewise_backend.artifact_store import ArtifactStore, Made
from piecewise_backend.cache_entry import Content, Key
from piecewise_backend.trace_bytes import from_bytes, to_bytes
from piecewise_backend.trace_graph import RecordedGraph
from piecewise_backend.trace_reads import Questions, answers

log = logging.getLogger(__name__)

_MAX_QUESTIONS = 32  # ways that traces of one function went; to answer all takes a moment


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTrace:
    """One trace: names and numbers only."""

    graph: RecordedGraph
    code: CodeType
    """What Dynamo wrote."""
    globals: tuple[str, ...]
    """The globals of the function that this code uses."""
    shape_guards: tuple[tuple[sympy.Expr, str], ...]
    aliases: tuple[tuple[str, str], ...]
    looked_at: tuple[str, ...]
    """As in `Rewritten`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A stored trace whose key is that of this process."""

    trace: StoredTrace
    questions: Questions


def find(
    store: ArtifactStore, key: Key, frame: Mapping[str, Any], namespace: Mapping[str, Any]
) -> Iterator[Found]:
    """The traces that a call may make, as far as they are stored. See Note [Two entries].

    They differ in what is assumed about the sizes of their inputs: see `trace_fit`.

    Args:
        key: what is known before tracing.
        frame: the arguments of the call and the closure variables, by name.
        namespace: the globals of the function.
    """
    for number in range(_MAX_QUESTIONS):
        questions = store.find(_numbered(key, number), _questions)
        if questions is None:
            return
        try:
            whole = _whole(key, answers(questions, frame, namespace))
        except Exception as error:
            # Questions are about another process's model: what they meet in this one may be
            # anything, and whatever comes of it says that it is another.
            log.info("questions %d of stored traces have no answer here: %s", number, error)
            continue
        trace = store.find(whole, _trace)
        if isinstance(trace, StoredTrace):
            yield Found(trace, questions)


def save(
    store: ArtifactStore,
    key: Key,
    questions: Questions,
    trace: StoredTrace,
    frame: Mapping[str, Any],
    namespace: Mapping[str, Any],
) -> bool:
    """Store a trace for other processes; False if its function has too many already.

    Raises:
        NoContentError: something that it read, or that it is made of, has no content.
    """
    whole, data = _whole(key, answers(questions, frame, namespace)), to_bytes(trace)
    for number in range(_MAX_QUESTIONS):
        there = store.fetch(
            _numbered(key, number),
            lambda: Made(questions, Content(questions.to_json())),
            _questions,
        )
        if there.value == questions:
            store.fetch(whole, lambda: Made(trace, Content(data)), _trace)
            return True
    return False


def _questions(content: Content) -> Questions:
    return Questions.from_json(content.artifact)


def _trace(content: Content) -> Any:
    return from_bytes(content.artifact)


def _numbered(key: Key, number: int) -> Key:
    return {**key, "questions": number}


def _whole(key: Key, answered: Mapping[str, Any]) -> Key:
    return {**key, "answers": answered}
