"""What things are, so that another process can tell whether it has the same.

In:  what a trace looked at: plain values, tensors, functions, classes.
Out: JSON that is the same in every process where the trace would be.
Knows nothing of how a trace looked at it.

Note [Content of code]
Of a function count its compiled code and its defaults, of a class the functions and plain values
in it and in its bases: all of which a trace may go through without a look that it records. So do
names of builtins, where the module of a function has something else by that name. Comments, line
numbers and places of files do not count. torch and the standard library count by name, as a key has
their versions. The values that code reads from globals and closures are looks of their own, which
Dynamo does record.
"""

from __future__ import annotations

import abc
import argparse
import builtins
import enum
import importlib.util
import math
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from piecewise_backend import _torch
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.trace_build import is_function_of_build, is_of_build
from piecewise_backend.trace_code import code_digest, names_used, text_digest
from piecewise_backend.trace_members import (
    attributes_of,
    held_by,
    is_in_place,
    names_in,
    parts_of,
    replaced_in,
)

_BY_REPR: tuple[type, ...] = (
    *(bool, int, str, bytes, complex, type(None), type(Ellipsis), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_OF_PROCESS = (id, hash, importlib.util.find_spec)
_BY_NAME: tuple[type, ...] = (
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.MemberDescriptorType),
    *(types.ClassMethodDescriptorType, types.MethodWrapperType, types.GetSetDescriptorType),
)
_METACLASSES = (type, abc.ABCMeta, object)
_OF_ENUM = {"_value_", "_name_", "_sort_order_", "__objclass__"}
_BUILTINS = {name for name in vars(builtins) if not name.startswith("__")}
_NOT_OF_CLASS = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__"),
    # Sets of what the class has anyway, in another order in each process.
    *("__abstractmethods__", "__protocol_attrs__", "__non_callable_proto_members__"),
}


class Content:
    """Describes things, and remembers which code was described."""

    def __init__(self, *, asks_names: bool = False) -> None:
        """For one trace.

        Args:
            asks_names: it may have looked for what is not in modules of torch or Python.
        """
        self._asks_names = asks_names
        self.codes: dict[str, types.CodeType] = {}
        """The code objects that were in what was described, by content."""
        self._classes: dict[type, str] = {}
        self._functions: dict[Any, str] = {}
        self._open: set[int] = set()  # collections that are being described
        self._sorts_sets = False

    def value(self, value: Any) -> Any:
        """A constant of the trace.

        Raises:
            NoContentError: nothing but its identity tells what it is.
        """
        if isinstance(value, float):
            return f"float {'nan' if math.isnan(value) else value.hex()}"
        if isinstance(value, enum.Enum):
            own = {n: self.told(v) for n, v in vars(value).items() if n not in _OF_ENUM}
            told = self.told(value.value)
            return f"{self.kind(type(value))} {value.name} {told} {own or ''}".rstrip()
        if type(value) in _BY_REPR or isinstance(value, _BY_REPR[-4:]):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, tuple | list | set | frozenset | Mapping):
            if id(value) in self._open:
                raise NoContentError(f"a {type(value).__qualname__} that contains itself")
            self._open.add(id(value))
            try:
                return [type(value).__qualname__, *self._items(value)]
            finally:
                self._open.discard(id(value))
        return self._named(value)

    def _items(self, value: Any) -> list[Any]:
        """Of sets in their order, which differs between processes: a loop was unrolled in it."""
        if isinstance(value, Mapping):
            return [[self.value(key), self.value(item)] for key, item in value.items()]
        items = [*map(self.value, value)]
        is_sorted = self._sorts_sets and isinstance(value, set | frozenset)
        return sorted(items, key=repr) if is_sorted else items

    def _named(self, value: Any) -> str:
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, types.MethodType):
            return f"method of {self.kind(type(value.__self__))}: {self.function(value.__func__)}"
        if isinstance(value, type):
            return self.kind(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, types.CodeType):
            return f"code {self.code(value)}"
        if isinstance(value, torch._ops.OperatorBase | torch._ops.OpOverloadPacket):
            told = attributes_of(value) if self._asks_names else ()
            return " ".join([f"operator {value}", *told])
        if isinstance(value, types.BuiltinFunctionType):
            return self.function(value)
        if isinstance(value, _BY_NAME):
            value = cast(Any, value)
            return f"{getattr(value, '__module__', '')} {value.__qualname__}"
        raise NoContentError(f"a {type(value).__module__}.{type(value).__qualname__}")

    def function(self, function: Any) -> str:
        """A function by its code and defaults. See Note [Content of code]."""
        function = getattr(function, "__func__", function)
        if function not in self._functions:
            self._functions[function] = "itself"  # for a default that refers back to it
            try:
                self._functions[function] = self._function(function)
            except NoContentError:
                del self._functions[function]
                raise
        return self._functions[function]

    def _function(self, function: Any) -> str:
        if function in _OF_PROCESS:
            raise NoContentError(f"what {function.__name__}() returned, which no other process has")
        if _torch.is_taken_as_constant(function):
            raise NoContentError(f"what {function.__qualname__} returned, taken as a constant")
        name = f"{function.__module__}.{function.__qualname__}"
        if not isinstance(function, types.FunctionType):
            return name
        attributes = " ".join(["with", *attributes_of(function)]) if vars(function) else ""
        if is_function_of_build(function):
            about = (*held_by(function), *replaced_in(function), attributes)
            return " ".join(filter(None, (name, *about)))
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
        told = text_digest(repr([self.told(value) for value in defaults])) if defaults else ""
        # Dynamo does not guard that a name is that of a builtin.
        hidden = names_used(function.__code__) & _BUILTINS & function.__globals__.keys()
        hides = " ".join(["where the module has", *sorted(hidden)]) if hidden else ""
        return " ".join(filter(None, (name, self.code(function.__code__), told, attributes, hides)))

    def _module(self, module: types.ModuleType) -> str:
        """By name, and what can be looked for in it, of which Dynamo guards nothing if it is not
        there. What an import has left in it, or Dynamo, is a matter of what else the process does.
        """
        is_torchs = is_of_build(module.__name__)
        if is_torchs and (not self._asks_names or isinstance(module, torch._ops._Ops)):
            return f"module {module.__name__}"
        names = names_in(module, is_built=is_torchs)
        return f"module {module.__name__} {text_digest(repr(sorted(names)))}"

    def kind(self, cls: type) -> str:
        """A class by what is in it. See Note [Content of code]."""
        if cls not in self._classes:
            name = f"{cls.__module__}.{cls.__qualname__}"
            self._classes[cls] = name  # for what refers back to it
            bases = [base for base in cls.__mro__ if not is_of_build(base.__module__)]
            members = [list(self._members(base)) for base in bases]
            order = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
            patches = [list(self._patches(base)) for base in cls.__mro__ if base not in bases]
            about = self._metaclass(cls)
            if bases or any(patches) or about:
                self._classes[cls] = f"{name} {text_digest(repr((order, members, patches, about)))}"
        return self._classes[cls]

    def _metaclass(self, cls: type) -> list[str]:
        """What isinstance asks, beside the class itself.

        Raises:
            NoContentError: a metaclass of the program's that answers as it likes.
        """
        meta: Any = type(cls)
        if not is_of_build(meta.__module__):
            asked = {"__instancecheck__", "__subclasscheck__"}
            if any(asked & vars(base).keys() for base in meta.__mro__ if base not in _METACLASSES):
                raise NoContentError(f"{cls.__qualname__}, whose metaclass says what is one")
            return [self.kind(meta)]
        if not isinstance(cls, abc.ABCMeta):
            return []
        hook = getattr(cls.__subclasshook__, "__func__", None)
        if isinstance(hook, types.FunctionType) and not is_function_of_build(hook):
            raise NoContentError(f"{cls.__qualname__}, which itself says what is one")
        is_own = not is_of_build(cls.__module__)
        found = (reference() for reference in abc._get_dump(cls)[0])  # type: ignore[attr-defined]  # no public way
        registered = (one for one in found if one and (is_own or not is_of_build(one.__module__)))
        below = map(self._metaclass, cls.__subclasses__()) if is_own else ()  # it asks them as well
        names = {f"{one.__module__}.{one.__qualname__}" for one in registered}
        return sorted(names.union(*below))

    def _patches(self, cls: type) -> Iterator[tuple[str, Any]]:
        """What is not in its place in a class of torch's or the standard library's."""
        for name, member in vars(cls).items():
            for part in parts_of(member):
                is_method = callable(part) or hasattr(type(part), "__get__")
                if is_method and not is_in_place(part, cls, name):
                    yield name, self.told(part)

    def outline(self, value: Any) -> Any:
        """An object that is looked into: its class, and what can be looked for in it.

        Raises:
            NoContentError: the environment, of which Dynamo guards nothing that is not set.
        """
        if value is os.environ:
            raise NoContentError("the environment")
        kind = self.kind(type(value))
        if isinstance(value, dict):
            return [kind, *map(self.value, dict.keys(value))]
        if isinstance(value, set | frozenset):
            return [kind, self.value(value)]
        if isinstance(value, tuple | list):
            return [kind, len(value)]
        is_known = isinstance(value, nn.Module | types.SimpleNamespace | argparse.Namespace)
        if (is_known or not is_of_build(type(value).__module__)) and hasattr(value, "__dict__"):
            # In their order, which a loop over them has. Dynamo does not guard methods of builtins.
            unguarded = (types.BuiltinFunctionType, *_BY_NAME)
            return [
                kind,
                *(f"{n} {self.told(v)}" if isinstance(v, unguarded) else n
                  for n, v in vars(value).items()),
            ]  # fmt: skip
        return kind

    def _members(self, cls: type) -> Iterator[tuple[str, Any]]:
        for name, member in vars(cls).items():
            if name in _NOT_OF_CLASS or name.startswith(("__annot", "_abc_", "__static_attr")):
                continue
            yield name, [*map(self.told, parts_of(member))]

    def told(self, value: Any) -> Any:
        """As much as is to be told of a part; a trace that takes more of it looks at it: at a set
        whose order it goes by, say."""
        before, self._sorts_sets = self._sorts_sets, _torch.LOOKS_AT_SETS
        try:
            return self.value(value)
        except NoContentError as error:
            return str(error)
        finally:
            self._sorts_sets = before

    def code(self, code: types.CodeType) -> str:
        """A code object and those in it."""
        found = code_digest(code)
        if found not in self.codes:
            self.codes[found] = code
            for constant in code.co_consts:
                if isinstance(constant, types.CodeType):
                    self.code(constant)
        return found


def tensor(value: torch.Tensor, varying: tuple[int, ...] = ()) -> list[Any]:
    """What a trace takes from a tensor: everything but its contents.

    Args:
        varying: the dimensions whose size may be any.

    Raises:
        NoContentError: a tensor of another kind.
    """
    if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) or value.layout != torch.strided:
        raise NoContentError(f"a {type(value).__qualname__} of layout {value.layout}")
    if value.is_conj() or value.is_neg() or value.is_quantized or value.is_nested:
        raise NoContentError("a conjugate, negated, quantised or nested tensor")
    sizes = [None if dim in varying else size for dim, size in enumerate(value.shape)]
    usual = list(torch.empty(value.shape, device="meta").stride())
    has_usual = list(value.stride()) == usual or (varying and value.is_contiguous())
    strides = "contiguous" if has_usual else list(value.stride())
    kinds = [value.requires_grad, value.is_inference()]
    return [type(value).__name__, str(value.dtype), str(value.device), sizes, strides, kinds]
