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
all compared, since a look for one that was not there is not always guarded. A kind of guard that
is not known here, or something that has no content, means that the trace is not stored.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.passes.keys import NoContentError, content_key, digest
from piecewise_backend.sources import PLAIN_VALUES
from piecewise_backend.trace_build import is_function_of_build
from piecewise_backend.trace_content import Content, tensor
from piecewise_backend.trace_functions import functions_named, functions_not_seen


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
    for read in rewritten.reads:
        if read.kind not in _ANSWERS:
            raise NoContentError(f"a guard {read.kind} on {read.source or 'the process'}")
        if not isinstance(read.detail, str | int | float | None):
            raise NoContentError(f"a guard {read.kind} about {read.detail!r}")
        if _torch.UNNAMED_SCOPE in f"{read.source} {read.detail}":
            raise NoContentError("globals of no module, or of one that was imported again")
    assert rewritten.code is not None
    names = [*_torch.global_names(rewritten.code), *_aliases(rewritten.reads)]
    aliases = [name for name in dict.fromkeys(names) if name.startswith(_ALIASES)]
    modules = {name: _module_name(name, namespace) for name in aliases}
    reads = tuple(_without_numbers(read) for read in rewritten.reads)
    modules = {_without_number(alias): name for alias, name in modules.items()}
    questions = Questions(reads, dict(varying), modules, (), tuple(ops), tuple(fit))
    content = Content()
    _read_all(questions, content, frame, namespace)
    functions = functions_not_seen(content, rewritten.inlined)
    return dataclasses.replace(questions, functions=tuple(functions))


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
    content = Content()
    reads, same = _read_all(questions, content, frame, namespace)
    return {
        "reads": reads,
        "same": same,
        "functions": {
            f"{module}.{name}": [*map(content.value, functions_named(module, name))]
            for module, name in questions.functions
        },
        "ops": {name: _op(name) for name in questions.ops},
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Absent:
    """What a name does not find."""

    error: str


def _read_all(
    questions: Questions, content: Content, frame: Mapping[str, Any], namespace: Mapping[str, Any]
) -> tuple[dict[str, Any], list[list[str]]]:
    """The answers, and which names are of one object: Dynamo guards no `is` that was not so."""
    scope = scope_of(questions, frame, namespace)
    values: dict[str, Any] = {}

    def look(source: str) -> Any:
        if source not in values:
            try:
                values[source] = eval(source, scope)
            except (AttributeError, KeyError, IndexError, TypeError) as error:
                values[source] = _Absent(type(error).__name__)
        return values[source]

    found: dict[str, Any] = {}
    for read in questions.reads:
        name = f"{read.source} {read.kind}"
        name += "" if read.detail is None else f" {read.detail!r}"
        found[name] = _answer(read, content, look, questions.varying.get(read.source, ()))
    names: dict[int, str] = {}
    pairs = ((names.setdefault(id(v), s), s) for s, v in values.items() if _is_object(v))
    return found, [[first, other] for first, other in pairs if first != other]


def _is_object(value: Any) -> bool:
    """One that is asked for by identity; of those that others are equal to nobody asks that."""
    if isinstance(value, types.FunctionType):
        return not is_function_of_build(value)
    return not isinstance(value, _EQUAL)


_EQUAL = (*PLAIN_VALUES, tuple, frozenset, type, type(None), types.BuiltinFunctionType,
          types.ModuleType, _Absent)  # fmt: skip


def _answer(
    read: _torch.Read, content: Content, look: Callable[[str], Any], varying: tuple[int, ...]
) -> Any:
    value = look(read.source)
    if isinstance(value, _Absent):
        return f"absent ({value.error})"
    if read.kind == "DUPLICATE_INPUT":
        return value is look(str(read.detail))
    if isinstance(value, torch.Tensor) and read.kind == "TENSOR_MATCH":
        return tensor(value, varying)
    return _ANSWERS[read.kind](content, value, read.detail)


def _op(name: str) -> list[list[str]]:
    """What a trace takes from an op: how it is called, and what says of which shape its results
    are. What the op computes is no part of a trace."""
    namespace, _, rest = name.partition("::")
    packet: Any = getattr(getattr(torch.ops, namespace), rest)
    found = []
    for overload in map(functools.partial(getattr, packet), packet.overloads()):
        if _torch.is_hidden_composite(overload):
            raise NoContentError(f"{overload}, whose code is not to be seen")
        fake = _torch.python_functions(overload).get("fake")
        told = digest([content_key([fake])]) if fake is not None else ""
        found.append([str(overload._schema), told])
    return found


def _kind(content: Content, value: Any, detail: Any) -> Any:
    return content.outline(value)


def _value(content: Content, value: Any, detail: Any) -> Any:
    return content.value(value)


def _keys(content: Content, value: Any, detail: Any) -> Any:
    return [content.kind(type(value)), *map(content.value, dict.keys(value))]


def _length(content: Content, value: Any, detail: Any) -> Any:
    return [content.kind(type(value)), len(value)]


_ANSWERS: dict[str, Callable[[Content, Any, Any], Any]] = {
    **dict.fromkeys(("TYPE_MATCH", "TENSOR_MATCH", "DUPLICATE_INPUT"), _kind),
    **dict.fromkeys(("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH"), _value),
    **dict.fromkeys(("ID_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH"), _value),
    **dict.fromkeys(("CLOSURE_MATCH", "BUILTIN_MATCH"), _value),
    **dict.fromkeys(("DICT_KEYS_MATCH", "DICT_CONST_KEYS"), _keys),
    **dict.fromkeys(("DICT_CONTAINS", "DICT_NOT_CONTAINS"), lambda _, value, key: key in value),
    **dict.fromkeys(("SET_CONTAINS", "SET_NOT_CONTAINS"), lambda _, value, item: item in value),
    **dict.fromkeys(("NOT_NONE_MATCH", "WEAKREF_ALIVE"), lambda _, value, __: value is not None),
    "SEQUENCE_LENGTH": _length,
    # Up to torch 2.11 the attribute is the last part of the name, which has been looked up.
    "HASATTR": lambda _, value, detail: detail is None or hasattr(value, detail),
    "NOT_PRESENT_IN_GENERIC_DICT": lambda _, value, detail: detail in value.__dict__,
    "EMPTY_NN_MODULE_HOOKS_DICT": lambda _, value, __: len(value) == 0,
}
"""What is told about a value, by the kind of guard. What is not here cannot be asked about."""
