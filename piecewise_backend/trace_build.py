"""What is part of what a key has the version of: torch, this package, the standard library.

In:  a module's name, a code object or a function.
Out: whether it is, so that its name says what it is.
Knows nothing of traces.
"""

from __future__ import annotations

import os
import sys
import types

import torch

_OF_TORCH = ("torch", "builtins", "piecewise_backend")


def is_of_build(module: str | None) -> bool:
    """By the name of its module."""
    root = str(module).partition(".")[0]
    return root in _OF_TORCH or root in sys.stdlib_module_names


def is_code_of_build(code: types.CodeType) -> bool:
    """By its file."""
    file = code.co_filename
    own, library = (f"{os.path.dirname(f)}{os.sep}" for f in (__file__, os.__file__))
    is_library = file.startswith(library) and f"{os.sep}site-packages{os.sep}" not in file
    is_torchs = file.startswith(f"{os.path.dirname(torch.__file__)}{os.sep}")
    return is_library or is_torchs or file.startswith((own, "<frozen "))


def is_function_of_build(function: types.FunctionType) -> bool:
    """By both: `functools.wraps` gives a function of the program's the name of what it wraps."""
    return is_of_build(function.__module__) and is_code_of_build(function.__code__)
