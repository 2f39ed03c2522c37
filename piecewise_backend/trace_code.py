"""The content of compiled code, and of text.

In:  a code object.
Out: a digest that is the same in every process and for every file with the same code.
Knows nothing of functions, and of what code reads.
"""

from __future__ import annotations

import dis
import hashlib
import itertools
import types
from typing import Any


def names_used(code: types.CodeType) -> set[str]:
    """That a code object and those in it use, of globals and of attributes."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(names_used, inner))


def code_digest(code: types.CodeType) -> str:
    """The content of a code object, whatever file and line it is from."""
    return text_digest(repr(_code(code)))


def _code(code: types.CodeType) -> Any:
    ordered = _in_order(code)
    constants = [
        _code(c) if isinstance(c, types.CodeType) else _constant(c, has_order=i in ordered)
        for i, c in enumerate(code.co_consts)
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return (code.co_qualname, code.co_code, code.co_exceptiontable, constants, names, counts)


def _in_order(code: types.CodeType) -> set[int | None]:
    """Positions of the constant sets that code does more with than to look for something."""
    if not any(isinstance(constant, frozenset) for constant in code.co_consts):
        return set()
    return {
        one.arg
        for one, after in itertools.pairwise(dis.get_instructions(code))
        if isinstance(one.argval, frozenset) and after.opname != "CONTAINS_OP"
    }


def _constant(value: Any, *, has_order: bool = False) -> Any:
    if isinstance(value, tuple):
        return ("tuple", [_constant(item) for item in value])
    if isinstance(value, frozenset):
        items = [repr(_constant(item)) for item in value]
        return ("frozenset", items if has_order else sorted(items))
    return (type(value).__name__, value.hex() if isinstance(value, float) else repr(value))


def text_digest(text: str) -> str:
    """Of 128 bits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
