"""What a trace read, as questions that another process answers about its own model.

In:  what Dynamo rewrote, and the functions and values of a call.
Out: `Questions`; and their answers, as JSON.
Knows nothing of files, and of the graph.

Note [Questions and answers]
Dynamo guards all that it takes from the program: each constant, class, length, set of keys,
function and tensor, by a name that starts from an argument, a closure variable or a global. These
names are the questions. What is found under them is described by content, and the trace serves a
process whose answers are all the same: there Dynamo would go the same way. More is asked than
Dynamo guards: classes and functions are compared by their code, and the functions that it went
through are looked for among those, and else asked for by name; keys and names of attributes are
all compared, since a look for one that was not there is not always guarded. An object that
was met again, under a name that no guard has, is looked for there, and which names are of one
object is compared: an `is` may depend on it. A kind of guard that is not known here, or something
that has no content, means that the trace is not stored.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import json
import operator
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from piecewise_backend import _torch
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.trace_answers import Absent, answer, is_known, op_answer
from piecewise_backend.trace_content import Content
from piecewise_backend.trace_functions import (
    asks_names,
    compares_identities,
    functions_named,
    functions_not_seen,
)
from piecewise_backend.trace_same import apart, one_object


@dataclasses.dataclass(frozen=True, slots=True)
class Questions:
    """What to look at. See Note [Questions and answers]."""

    reads: tuple[_torch.Read, ...]
    varying: Mapping[str, tuple[int, ...]]
    """The dimensions that vary, of the tensors that have some."""
    modules: Mapping[str, str]
    """Dynamo's names of modules in the globals of the function: which module each is."""
    functions: tuple[tuple[str, str], ...]
    """Module and name of the functions that no read leads to."""
    ops: tuple[str, ...]
    """The custom ops that the graph calls."""
    compares_values: bool
    """It matters which equal strings and the like are one object: the program asks by `is`."""
    asks_names: bool
    """Which names modules of torch and Python have matters."""
    fit: tuple[str, ...]
    """What the trace assumes about sizes, and the sizes and memory of its inputs: not asked here,
    but traces that differ in it are different ones. See `trace_fit`."""

    def to_json(self) -> bytes:
        """As text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Questions:
        """The opposite of `to_json`."""
        known = json.loads(data)
        return cls(
            reads=tuple(_torch.Read(**read) for read in known["reads"]),
            varying={name: tuple(dims) for name, dims in known["varying"].items()},
            modules=known["modules"],
            functions=tuple((module, name) for module, name in known["functions"]),
            ops=tuple(known["ops"]),
            compares_values=known["compares_values"],
            asks_names=known["asks_names"],
            fit=tuple(known["fit"]),
        )


def questions_of(
    rewritten: _torch.Rewritten,
    varying: Mapping[str, tuple[int, ...]],
    ops: Sequence[str],
    fit: Sequence[str],
    frame: Mapping[str, Any],
    namespace: Mapping[str, Any],
) -> Questions:
    """The questions of a trace.

    Args:
        varying: the dimensions that vary, by source.
        ops: the custom ops of the graph.
        fit: what it assumes about its inputs.
        frame: the arguments and closure variables of its call, by name.
        namespace: the globals of the function.

    Raises:
        NoContentError: a read that cannot be asked about, or a function without a name.
    """
    guarded = {read.source for read in rewritten.reads}
    seen = (_torch.Read(_torch.SEEN, name) for name in rewritten.seen if name not in guarded)
    reads = (*rewritten.reads, *seen)
    for read in reads:
        if not is_known(read):
            raise NoContentError(f"a guard {read.kind} on {read.source or 'the process'}")
        if not isinstance(read.detail, str | int | float | None):
            raise NoContentError(f"a guard {read.kind} about {read.detail!r}")
        if _torch.UNNAMED_SCOPE in f"{read.source} {read.detail}":
            raise NoContentError("globals of no module, or of one that was imported again")
    assert rewritten.code is not None
    names = [*_torch.global_names(rewritten.code), *_aliases(reads)]
    aliases = [name for name in dict.fromkeys(names) if name.startswith(_ALIASES)]
    modules = {name: _module_name(name, namespace) for name in aliases}
    questions = Questions(
        reads=tuple(map(_without_numbers, reads)),
        varying=dict(varying),
        modules={_without_number(alias): name for alias, name in modules.items()},
        functions=(),
        ops=tuple(ops),
        compares_values=False,
        asks_names=asks_names(rewritten.inlined),
        fit=tuple(fit),
    )
    content = Content(asks_names=questions.asks_names)
    _, values = _read_all(questions, content, frame, namespace)
    functions = functions_not_seen(content, rewritten.inlined)
    compares = any(value is operator.is_ or value is operator.is_not for value in values.values())
    return dataclasses.replace(
        questions,
        functions=tuple(functions),
        compares_values=compares or compares_identities(rewritten.inlined),
    )


def answers(
    questions: Questions, frame: Mapping[str, Any], namespace: Mapping[str, Any]
) -> dict[str, Any]:
    """What this process has.

    Args:
        frame: the arguments and closure variables of a call, by name.
        namespace: the globals of the function.

    Raises:
        NoContentError: something that only its identity tells.
    """
    content = Content(asks_names=questions.asks_names)
    reads, values = _read_all(questions, content, frame, namespace)
    functions = {
        f"{module}.{name}": [*map(content.value, functions_named(module, name))]
        for module, name in questions.functions
    }
    return {
        "reads": reads,
        "same": one_object(values, compares_values=questions.compares_values),
        "apart": apart(values, content, compares_values=questions.compares_values),
        "functions": functions,
        "ops": {name: op_answer(name) for name in questions.ops},
        "fit": list(questions.fit),
    }


_ALIASES = (_torch.IMPORT_ALIAS, _torch.BUILTINS_ALIAS)
_BUILTINS = "builtins.__dict__"


def modules_of(questions: Questions) -> dict[str, Any]:
    """What Dynamo's names of modules stand for in this process.

    Raises:
        ImportError: one of them is gone.
    """
    return {
        alias: vars(builtins) if name == _BUILTINS else importlib.import_module(name)
        for alias, name in questions.modules.items()
    }


def imports_of(questions: Questions) -> dict[str, Any]:
    """Those of them that Dynamo leaves in the globals of the function."""
    found = modules_of(questions).items()
    return {alias: value for alias, value in found if alias.startswith(_torch.IMPORT_ALIAS)}


def scope_of(
    questions: Questions, frame: Mapping[str, Any], namespace: Mapping[str, Any]
) -> dict[str, Any]:
    """What Dynamo's names of sources start from, and the helpers that they call."""
    everywhere = dict(namespace) | modules_of(questions)
    return _torch.source_namespace() | {"L": frame, "G": everywhere}


def _without_numbers(read: _torch.Read) -> _torch.Read:
    """Dynamo numbers the dictionary of builtins: a later trace of a process has another name."""
    detail = _without_number(read.detail) if isinstance(read.detail, str) else read.detail
    return _torch.Read(read.kind, _without_number(read.source), detail)


def _without_number(source: str) -> str:
    return re.sub(rf"\b{_torch.BUILTINS_ALIAS}_\d+\b", _torch.BUILTINS_ALIAS, source)


def _module_name(alias: str, namespace: Mapping[str, Any]) -> str:
    value = namespace.get(alias)
    if value is vars(builtins):
        return _BUILTINS
    if not isinstance(value, types.ModuleType):
        raise NoContentError(f"{alias}, which is no module")
    if sys.modules.get(value.__name__) is not value:
        raise NoContentError(f"{value.__name__}, which was imported again since Dynamo took it")
    return value.__name__


def _aliases(reads: Sequence[_torch.Read]) -> Iterator[str]:
    for read in reads:
        yield from re.findall(r"G\['(\w+)'\]", f"{read.source} {read.detail}")


def _read_all(
    questions: Questions, content: Content, frame: Mapping[str, Any], namespace: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answers, and what was found under each name."""
    scope = scope_of(questions, frame, namespace)
    values: dict[str, Any] = {}

    def look(source: str) -> Any:
        if source not in values:
            try:
                values[source] = eval(source, scope)
            except (AttributeError, KeyError, IndexError, TypeError, NameError) as error:
                values[source] = Absent(type(error).__name__)
        return values[source]

    found: dict[str, Any] = {}
    for read in questions.reads:
        name = f"{read.source} {read.kind}"
        name += "" if read.detail is None else f" {read.detail!r}"
        found[name] = answer(read, content, look, questions.varying.get(read.source, ()))
    return found, values
