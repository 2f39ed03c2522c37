"""A trace, or a job for another process, as bytes, and back.

In:  values made of names and numbers; bytes.
Out: bytes, or why there are none; the values.
Knows nothing of what they mean.

Python's pickle finds functions and classes by name, and refuses those that it would not find.
Operators and modules are found by theirs, spellings of parts of fusions by their place. Tensors
and modules of a model are refused.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from piecewise_backend.passes.fusions.spellings import BUILT_IN, PLACES
from piecewise_backend.passes.keys import NoContentError


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, *, same_program: bool) -> None:
        super().__init__(buffer, protocol=5)
        self._same_program = same_program

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and obj.__module__ == "__main__":
            # The main module of another program may have something else by that name.
            if not self._same_program:
                raise NoContentError(f"{obj.__qualname__} of the program that was started")
        elif isinstance(obj, torch.Tensor | nn.Module):
            raise NoContentError(f"a {type(obj).__qualname__}")
        if isinstance(obj, OpOverload):
            return "overload", obj._schema.name, obj._overloadname
        if isinstance(obj, OpOverloadPacket):
            return "packet", obj._qualified_op_name
        if isinstance(obj, HigherOrderOperator):
            raise NoContentError(f"{obj}, a higher-order operator")
        if isinstance(obj, ModuleType):
            return "module", obj.__name__
        if isinstance(obj, FunctionType) and obj in PLACES:
            return "spelling", *PLACES[obj]
        return ("code", marshal.dumps(obj)) if isinstance(obj, CodeType) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("overload", name, overload):
                return getattr(_packet(name), overload or "default")
            case ("packet", name):
                return _packet(name)
            case ("module", name):
                return importlib.import_module(name)
            case ("spelling", part, index):
                return BUILT_IN[part][index]
            case ("code", data):
                return marshal.loads(data)
        raise pickle.UnpicklingError(f"{pid!r} stands for nothing")


def _packet(name: str) -> OpOverloadPacket:
    namespace, _, op = name.partition("::")
    found: OpOverloadPacket = getattr(getattr(torch.ops, namespace), op)
    return found


def to_bytes(value: object, *, same_program: bool = True) -> bytes:
    """What is made of names and numbers, as bytes.

    Args:
        same_program: who reads it was started like this process.

    Raises:
        NoContentError: something in it has no name.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, same_program=same_program).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise NoContentError(f"something that cannot be stored ({error})") from None
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """The opposite of `to_bytes`: runs what is in the data."""
    return _Unpickler(io.BytesIO(data)).load()
