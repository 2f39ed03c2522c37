"""The content of what code depends on: functions, classes, objects and plain values.

In:  a value, and the package whose functions are followed.
Out: nested tuples whose text is the same in every process, and the ops that were named on the way.
Knows nothing of passes, and nothing of what an op does: `keys` adds that.

Note [Which ops code names]
An op is a chain of attributes, `torch.ops.ns.op.default`, that any part of the code may begin and
any other may end: through `from torch import ops`, a variable, an attribute of an object, a
function that returns the namespace. So no chain is followed: an op counts if all the code that
was walked through has a name or a text `ns` and one `op`, and one `ops` or a value that is a part
of the chain. An op too many costs one compilation; one too few would serve stale code. What a
program puts together when it runs, `getattr(torch.ops.ns, f"{kind}_norm")`, is not to be seen.
"""

from __future__ import annotations

import collections
import dataclasses
import dis
import enum
import functools
import hashlib
import logging
import pathlib
import re
import threading
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from piecewise_backend import _torch


class NoContentError(Exception):
    """Something that can only be compared by identity."""


_BY_REPR: tuple[type, ...] = (
    *(bool, int, str, bytes, complex, type(None), type(Ellipsis), enum.Enum, slice, range),
    *(pathlib.PurePath, types.UnionType, types.GenericAlias),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_WITHOUT_EFFECT: tuple[type, ...] = (
    *(logging.Logger, type(threading.Lock()), type(threading.RLock())),
    *(threading.Condition, threading.Event, threading.Semaphore),
)
"""Has no content, but steers no pass either."""
_NAMED: tuple[type, ...] = (
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodWrapperType),
)
_NOT_OF_CLASS = frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "_abc_impl"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__static_attributes__", "__dataclass_fields__", "__dataclass_params__"),
    }
)
_THIS_PACKAGE = __name__.partition(".")[0]


def package_of(value: Any) -> str:
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Mentioned:
    """What the code that was walked through says of ops. See Note [Which ops code names]."""

    names: set[str] = dataclasses.field(default_factory=set)
    namespaces: set[str] = dataclasses.field(default_factory=set)
    overloads: set[torch._ops.OpOverload] = dataclasses.field(default_factory=set)

    def ops(self) -> dict[str, torch._ops.OpOverload]:
        """Those that are none of torch's own, by name."""
        namespaces = self.namespaces | (self.names if "ops" in self.names else set())
        named = _torch.overloads_named(namespaces, self.names) if namespaces else []
        found = [*self.overloads, *named]
        return {str(op): op for op in found if not _torch.is_from_torch(op)}


class Describer:
    """Walks through everything that the functions of one package depend on."""

    def __init__(self, package: str, mentioned: Mentioned) -> None:
        self._package = package
        self._mentioned = mentioned
        self._seen: dict[int, tuple[int, Any]] = {}  # kept alive, so that ids stay theirs

    def describe(self, value: Any) -> Any:
        if isinstance(value, float):
            return ("float", value.hex())
        if isinstance(value, str):
            self._mentioned.names.add(value)
        if isinstance(value, _BY_REPR):
            return (type(value).__name__, repr(value))
        if id(value) in self._seen:
            return ("seen", self._seen[id(value)][0])
        self._seen[id(value)] = (len(self._seen), value)
        if isinstance(value, tuple | list | collections.deque):
            return (type(value).__name__, [self.describe(item) for item in value])
        if isinstance(value, set | frozenset):
            return ("set", sorted(repr(self._apart(self._package).describe(v)) for v in value))
        if isinstance(value, Mapping):
            return ("map", [(self.describe(k), self.describe(v)) for k, v in value.items()])
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return self._callable_or_object(value)

    def _apart(self, package: str) -> Describer:
        """Another one that has seen nothing yet."""
        return Describer(package, self._mentioned)

    def _tensor(self, value: torch.Tensor) -> Any:
        try:
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        except (RuntimeError, TypeError):  # sparse, on no device, conjugate: of another kind
            sort = f"{value.layout} {value.dtype} on {value.device}"
            raise NoContentError(f"a tensor, {sort}") from None
        kind = (str(value.dtype), str(value.device), tuple(value.shape), value.stride())
        return ("tensor", kind, hashlib.sha256(data).hexdigest())

    def _callable_or_object(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return ("partial", self.describe((value.func, value.args, value.keywords)))
        if isinstance(value, types.MethodType):
            return ("method", self.describe(value.__func__), self.describe(value.__self__))
        if _is_triton_kernel(value):
            return ("triton kernel", value.cache_key)
        if (overloads := _torch.overloads_of(value)) is not None:
            self._mentioned.overloads.update(overloads)
            is_definition = isinstance(value, _torch.CustomOpDef)
            return ("operator", str(value._opoverload if is_definition else value))
        if isinstance(value, types.ModuleType):
            self._module(value)
            return ("module", value.__name__)
        if isinstance(value, types.FunctionType):
            is_own = package_of(value) == self._package
            return self._function(value) if is_own else named(value)
        if isinstance(value, type):
            is_own = package_of(value) == self._package
            return self._class(value) if is_own else named(value)
        if isinstance(value, types.BuiltinFunctionType):
            if value.__self__ is None or isinstance(value.__self__, types.ModuleType):
                return named(value)
            return ("method", value.__name__, self.describe(value.__self__))
        return self._object(value)

    def _module(self, module: types.ModuleType) -> None:
        if module is torch.ops:
            self._mentioned.names.add("ops")
        elif isinstance(module, type(torch.ops.aten)):
            self._mentioned.namespaces.add(module.__name__.rpartition(".")[2])

    def _function(self, function: types.FunctionType) -> Any:
        cells = function.__closure__ or ()
        closed = [self.describe(_content(cell)) for cell in cells]
        defaults = self.describe((function.__defaults__, function.__kwdefaults__))
        names = sorted(_names_in(function.__code__))
        if self._package != _THIS_PACKAGE:  # its sources are part of every key
            self._mentioned.names.update(names)
        found = {n: function.__globals__[n] for n in names if n in function.__globals__}
        found |= dict(self._imported(function.__code__, function.__globals__))
        for name, value in list(found.items()):
            found |= self._in_module(name, value, names, {})
        used = [(name, self.describe(value)) for name, value in found.items()]
        return ("function", self._code(function.__code__), closed, defaults, used)

    def _code(self, code: types.CodeType) -> Any:
        constants = [
            self._code(c) if isinstance(c, types.CodeType) else self._apart("").describe(c)
            for c in code.co_consts
        ]
        names = (code.co_names, code.co_varnames, code.co_freevars)
        return (code.co_code.hex(), constants, names)

    def _imported(self, code: types.CodeType, scope: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """The modules of its own package that a function imports when it runs."""
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for position, step in enumerate(steps):
            if step.opname != "IMPORT_NAME":
                continue
            level, members = (before.argval for before in steps[position - 2 : position])
            if level or step.argval.partition(".")[0] == self._package:
                name = f"import {'.' * level}{step.argval} {members}"
                try:
                    yield name, __import__(step.argval, scope, None, members or (), level)
                except Exception as error:  # whatever it is, the function has to expect it
                    yield name, type(error).__name__
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._imported(constant, scope)

    def _in_module(
        self, path: str, module: Any, names: list[str], passed: dict[int, Any]
    ) -> dict[str, Any]:
        """What these names are in a module of the package, and in those of it that they name."""
        is_own = isinstance(module, types.ModuleType) and (
            module.__name__.partition(".")[0] == self._package
        )
        if not is_own or id(module) in passed:
            return {}
        passed[id(module)] = module
        found = {f"{path}.{n}": getattr(module, n) for n in names if hasattr(module, n)}
        for name, value in list(found.items()):
            found |= self._in_module(name, value, names, passed)
        return found

    def _class(self, cls: type) -> Any:
        """Its functions and plain attributes, and those of its bases in the same package."""
        members = [
            (name, self.describe(getattr(member, "__func__", member)))
            for name, member in sorted(vars(cls).items())
            if name not in _NOT_OF_CLASS
            and not isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType)
        ]
        return ("class", cls.__qualname__, members, [self.describe(b) for b in cls.__bases__])

    def _object(self, value: Any) -> Any:
        uuid = getattr(value, "uuid", None)
        if callable(uuid) and (known := uuid()) is not None:
            return ("uuid", repr(known))
        if isinstance(value, property):
            return ("property", self.describe((value.fget, value.fset, value.fdel)))
        if isinstance(value, re.Pattern):
            return ("regex", self.describe(value.pattern), value.flags)
        if isinstance(value, _WITHOUT_EFFECT):
            return named(type(value))
        if isinstance(value, _NAMED):
            return named(value)
        if type(value).__module__ == typing.__name__:
            return ("typing", repr(value))
        state = _state(value)
        if state is None:
            return _bytes(value)
        members = [(name, self.describe(member)) for name, member in state.items()]
        return ("object", self.describe(type(value)), members)


def _is_triton_kernel(value: Any) -> bool:
    """Triton hashes the source of a kernel and of what that calls; the rest is state."""
    return type(value).__module__.startswith("triton.") and hasattr(value, "cache_key")


def _state(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, by name; None if it is none of Python's."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    bases = type(value).__mro__[:-1]
    if not hasattr(value, "__dict__") and not all("__slots__" in vars(base) for base in bases):
        return None
    slots = {
        name
        for base in bases
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType) and "__slots__" in vars(base)
    }
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return dict(sorted((found | getattr(value, "__dict__", {})).items()))


def _bytes(value: Any) -> Any:
    """Of arrays: of numpy, of the standard library."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError):
        raise NoContentError(f"{value!r}, a {type(value).__qualname__}") from None
    if "O" in view.format:
        raise NoContentError(f"{value!r}, which holds objects")
    data = hashlib.sha256(view.tobytes()).hexdigest()
    return ("bytes", named(type(value)), view.format, view.shape, data)


def named(value: Any) -> Any:
    return ("name", getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(value)))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _names_in(code: types.CodeType) -> set[str]:
    """The names that a function and the functions inside it may look up globally."""
    nested = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, nested))
