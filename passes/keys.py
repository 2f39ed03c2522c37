"""A key that changes whenever what a pass would do may change.

In:  functions, classes, objects and plain values.
Out: text to be hashed.

Of a function count its compiled code - which is what its source says, without comments and line
numbers -, its defaults, the values it closes over and the globals that it names. Functions of
its own package that it calls are followed; those of other packages count by name. Of an object
count its class and its attributes; one that has a method `uuid` is asked instead. Loggers, locks
and modules count by type or name, wherever they are. Whatever else has no content is an error.

Of an op that code names and that is none of torch's own count its schema and what is written of
it in Python: kernels and "fake" of `torch.library.custom_op`, the fake of any other. A kernel in
C++, or one that was registered with `torch.library.impl`, is not to be seen; nor is an op
whose name is put together at run time: a pass that depends on one says so with `key=`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.errors import ConfigError
from piecewise_backend.passes.content import (
    Describer,
    Mentioned,
    NoContentError,
    package_of,
)
from piecewise_backend.passes.definition import Pass

__all__ = ["NoContentError", "content_key", "digest", "key_of", "op_content"]


def key_of(item: Pass) -> str:
    """The key of one pass.

    Raises:
        ConfigError: something it depends on has no content that could be compared.
    """
    head = (type(item).__name__, item.name, item.stage)
    if item.key is not None:
        return repr((*head, "key", item.key))
    try:
        content = content_key(item.ingredients())
    except NoContentError as error:
        raise ConfigError(
            f"pass {item.name!r} depends on {error}, which has no content that a cache key could "
            "be made of; pass key= with a text that changes whenever the pass changes"
        ) from None
    return repr((*head, content))


def content_key(parts: Iterable[Any]) -> str:
    """The content of things of several packages, and of the ops that they name.

    Raises:
        NoContentError: one of them depends on something that has none.
    """
    described, ops = _described(parts)
    contents: dict[str, dict[str, str]] = {}
    while unknown := ops.keys() - contents.keys():
        name = min(unknown)
        contents[name], named_by_it = _op(ops[name])
        ops |= named_by_it
    return repr([described, sorted(contents.items())])


def op_content(op: torch._ops.OpOverload) -> dict[str, str]:
    """The schema of an op, its tags, which Inductor goes by (whether it keeps strides, say), and a
    hash of each function that users wrote of it in Python.

    Raises:
        NoContentError: one of them depends on something that has none.
    """
    functions = _torch.python_functions(op).items()
    content = {name: digest([content_key([function])]) for name, function in sorted(functions)}
    return {**_declared(op), **content}


def _declared(op: torch._ops.OpOverload) -> dict[str, str]:
    return {"schema": str(op._schema), "tags": ", ".join(sorted(map(str, op.tags)))}


def digest(texts: list[str]) -> str:
    """One hash of several texts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


_Ops = dict[str, torch._ops.OpOverload]


def _described(parts: Iterable[Any]) -> tuple[list[Any], _Ops]:
    """The content of things, without that of the ops they name; those ops."""
    mentioned = Mentioned()
    described = [Describer(_package(part), mentioned).describe(part) for part in parts]
    return described, mentioned.ops()


def _package(part: Any) -> str:
    """Whose functions are followed: not torch's, unless one wraps what may be a user's."""
    package = package_of(part)
    return package if package != "torch" or getattr(part, "__closure__", None) else ""


def _op(op: torch._ops.OpOverload) -> tuple[dict[str, str], _Ops]:
    """As `op_content`, without the content of the ops that it names itself."""
    content, ops = _declared(op), _Ops()
    for name, function in sorted(_torch.python_functions(op).items()):
        try:
            described, named_by_it = _described([function])
        except NoContentError as error:
            raise NoContentError(f"op {op}, whose code depends on {error}") from None
        content[name] = digest([repr(described)])
        ops |= named_by_it
    return content, ops
