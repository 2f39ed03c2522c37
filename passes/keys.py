"""A key that changes whenever what a pass would do may change.

In:  functions, classes, objects and plain values.
Out: text to be hashed.

Of a function count its compiled code - which is what its source says, without comments and line
numbers -, its defaults, the values it closes over and the globals that it names. Functions of
its own package that it calls are followed; those of other packages count by name. Of an object
count its class and its attributes; one that has a method `uuid` is asked instead.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import logging
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from piecewise_backend.errors import ConfigError
from piecewise_backend.passes.definition import Pass


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
    """The content of things of several packages.

    Raises:
        NoContentError: one of them depends on something that has none.
    """
    return repr([_Describer(_package_of(part)).describe(part) for part in parts])


def digest(texts: list[str]) -> str:
    """One hash of several texts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


class NoContentError(Exception):
    """Something that can only be compared by identity."""


_BY_REPR: tuple[type, ...] = (
    *(bool, int, str, bytes, complex, type(None), type(Ellipsis), enum.Enum, slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _package_of(value: Any) -> str:
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0]


class _Describer:
    """Walks through everything that the functions of one package depend on."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._seen: dict[int, tuple[int, Any]] = {}  # kept alive, so that ids stay theirs

    def describe(self, value: Any) -> Any:
        if isinstance(value, float):
            return ("float", value.hex())
        if isinstance(value, _BY_REPR):
            return (type(value).__name__, repr(value))
        if id(value) in self._seen:
            return ("seen", self._seen[id(value)][0])
        self._seen[id(value)] = (len(self._seen), value)
        if isinstance(value, tuple | list):
            return (type(value).__name__, [self.describe(item) for item in value])
        if isinstance(value, set | frozenset):
            return ("set", sorted(repr(_Describer(self._package).describe(v)) for v in value))
        if isinstance(value, Mapping):
            return ("map", [(self.describe(k), self.describe(v)) for k, v in value.items()])
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return self._callable_or_object(value)

    def _tensor(self, value: torch.Tensor) -> Any:
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        kind = (str(value.dtype), str(value.device), tuple(value.shape), value.stride())
        return ("tensor", kind, hashlib.sha256(data).hexdigest())

    def _callable_or_object(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return ("partial", self.describe((value.func, value.args, value.keywords)))
        if isinstance(value, types.MethodType):
            return ("method", self.describe(value.__func__), self.describe(value.__self__))
        if _is_triton_kernel(value):
            return ("triton kernel", value.cache_key)
        if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return ("operator", str(value))
        if isinstance(value, types.ModuleType):
            return ("module", value.__name__)
        if isinstance(value, types.FunctionType):
            is_own = _package_of(value) == self._package
            return self._function(value) if is_own else _named(value)
        if isinstance(value, type):
            is_own = _package_of(value) == self._package
            return self._class(value) if is_own else _named(value)
        if isinstance(value, types.BuiltinFunctionType):
            if value.__self__ is None or isinstance(value.__self__, types.ModuleType):
                return _named(value)
            raise NoContentError(repr(value))
        return self._object(value)

    def _function(self, function: types.FunctionType) -> Any:
        cells = function.__closure__ or ()
        closed = [self.describe(_content(cell)) for cell in cells]
        defaults = self.describe((function.__defaults__, function.__kwdefaults__))
        names = sorted(_names_in(function.__code__))
        found = {n: function.__globals__[n] for n in names if n in function.__globals__}
        for name, module in list(found.items()):
            if isinstance(module, types.ModuleType) and module.__name__.startswith(self._package):
                found |= {f"{name}.{n}": getattr(module, n) for n in names if hasattr(module, n)}
        used = [(name, self._global(value)) for name, value in found.items()]
        return ("function", self._code(function.__code__), closed, defaults, used)

    def _code(self, code: types.CodeType) -> Any:
        constants = [
            self._code(c) if isinstance(c, types.CodeType) else _Describer("").describe(c)
            for c in code.co_consts
        ]
        names = (code.co_names, code.co_varnames, code.co_freevars)
        return (code.co_code.hex(), constants, names)

    def _global(self, value: Any) -> Any:
        """A global may be anything, a logger for example; most of it does not steer the pass."""
        try:
            return self.describe(value)
        except NoContentError:
            return _named(type(value))

    def _class(self, cls: type) -> Any:
        """Its functions and plain attributes, and those of its bases in the same package."""
        members = [
            (name, self._global(getattr(member, "__func__", member)))
            for name, member in sorted(vars(cls).items())
            if name not in ("__dict__", "__weakref__", "__doc__", "__module__")
            and not isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType)
        ]
        return ("class", cls.__qualname__, members, [self.describe(b) for b in cls.__bases__])

    def _object(self, value: Any) -> Any:
        uuid = getattr(value, "uuid", None)
        if callable(uuid) and (known := uuid()) is not None:
            return ("uuid", repr(known))
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            state = [(name, self.describe(getattr(value, name))) for name in names]
            return ("object", self.describe(type(value)), state)
        if isinstance(value, logging.Logger):
            return _named(type(value))
        if not hasattr(value, "__dict__"):
            raise NoContentError(f"{value!r}, a {type(value).__qualname__}")
        state = [(name, self.describe(member)) for name, member in sorted(vars(value).items())]
        return ("object", self.describe(type(value)), state)


def _is_triton_kernel(value: Any) -> bool:
    """Triton hashes the source of a kernel and of what that calls; the rest is state."""
    return type(value).__module__.startswith("triton.") and hasattr(value, "cache_key")


def _named(value: Any) -> Any:
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
