"""The functions that a trace went through, by name.

In:  code objects, and what was described already.
Out: the names of those that were not; what has such a name in this process; whether one of them
     compares by `is`.
Knows nothing of how a trace looked at something.
"""

from __future__ import annotations

import dis
import enum
import importlib
import itertools
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, EllipsisType
from typing import Any

from piecewise_backend import _torch
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.trace_build import is_code_of_build
from piecewise_backend.trace_code import code_digest
from piecewise_backend.trace_content import Content

_MAX_WRAPPED = 16
_OF_OS = (os.__file__, "<frozen os>")
_OF_ENVIRONMENT = ("_createenviron.", "_Environ.", "getenv")
_UNGUARDED = {
    "hash": "what hash() returned, which no other process has",
    "__hash__": "a hash",
    "storage_offset": "where a tensor begins in its memory",
    "_base": "what a tensor is a view of",
}
"""What code may ask for and Dynamo does not guard. Members of enums are hashed to be found only."""
_NAME_FUNCTIONS = {"hasattr", "getattr", "AttributeError", "vars", "dir"}
_IS_FUNCTIONS = {"is_", "is_not"}  # of the module operator


def functions_not_seen(content: Content, inlined: Sequence[CodeType]) -> Iterator[tuple[str, str]]:
    """The functions that were gone through and that no read led to, by name.

    Raises:
        NoContentError: one of them is not found by its name, or reads the environment.
    """
    for code in inlined:
        if code.co_filename in _OF_OS and code.co_qualname.startswith(_OF_ENVIRONMENT):
            raise NoContentError("the environment")  # Dynamo guards nothing that is not set
        for name in _UNGUARDED.keys() & code.co_names if code.co_filename != enum.__file__ else ():
            if name != "hash" or name in _torch.global_names(code):
                raise NoContentError(f"{_UNGUARDED[name]}, which {code.co_qualname} may ask for")
        if code_digest(code) in content.codes or is_code_of_build(code):
            continue
        outer = code.co_qualname.partition(".<locals>")[0]
        holders = [n for n, m in list(sys.modules.items()) if _file_of(m) == code.co_filename]
        for module in holders:
            for function in functions_named(module, outer):
                content.value(function)
            if code_digest(code) in content.codes:
                yield module, outer
                break
        else:
            raise NoContentError(f"{code.co_qualname}, which is not found by its name")


def functions_named(module: str, name: str) -> list[Any]:
    """A function by its name, and those that it wraps; nothing if there is none."""
    try:
        found: Any = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return []
    chain = [found]
    while hasattr(found, "__wrapped__") and len(chain) < _MAX_WRAPPED:
        found = found.__wrapped__
        chain.append(found)
    return chain


def compares_identities(inlined: Sequence[CodeType]) -> bool:
    """The program's code that was gone through has an `is` beside those with None and the like."""
    return any(map(_compares, (code for code in inlined if not is_code_of_build(code))))


def asks_names(inlined: Sequence[CodeType]) -> bool:
    """The program's code may have asked for an attribute that is not there, or for all of them."""
    own = (code for code in inlined if not is_code_of_build(code))
    return any(not _NAME_FUNCTIONS.isdisjoint(code.co_names) for code in own)


def _compares(code: CodeType) -> bool:
    if _IS_FUNCTIONS.intersection(code.co_names):
        return True
    pairs = itertools.pairwise(dis.get_instructions(code))
    return any(one.opname == "IS_OP" and not _is_single(right) for right, one in pairs)


def _is_single(loaded: dis.Instruction) -> bool:
    return loaded.opname == "LOAD_CONST" and isinstance(loaded.argval, bool | None | EllipsisType)


def _file_of(module: object) -> str | None:
    return getattr(module, "__file__", None)
