"""`pw.compile` of a class: each instance is compiled for itself, at its first call.

In:  a class, and how one of its methods is compiled.
Out: the class, its instances call what was compiled.
Knows nothing of traces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from piecewise_backend.dynamic_dims import Dims, DynamicDims
from piecewise_backend.errors import ConfigError

_ATTRIBUTE = "_piecewise_compiled"


def compile_class(
    target: type,
    compile_method: Callable[..., Any],
    dynamic_dims: Dims | None,
    mode: str | None,
    options: dict[str, Any],
) -> type:
    """Instances call themselves through a compiled method of their own, made at the first call.

    Args:
        compile_method: makes it, with a property `instance`, of a method and the other arguments.

    Raises:
        ConfigError: instances cannot be called, or cannot hold what is compiled.
    """
    is_module = issubclass(target, nn.Module)
    if not any("__call__" in base.__dict__ for base in target.__mro__):
        raise ConfigError(f"instances of {target.__qualname__} cannot be called; give it __call__")
    DynamicDims.of(getattr(target, "forward" if is_module else "__call__"), dynamic_dims)
    call_original = target.__call__

    def compiled_of(self: Any) -> Any:
        if not hasattr(self, "__dict__"):
            raise ConfigError(
                f"{type(self).__qualname__} has __slots__, which leave no room for what is "
                "compiled; add '__dict__' to them"
            )
        own = self.__dict__.get(_ATTRIBUTE)
        if own is None or own.instance is not self:  # a shallow copy has that of the original
            method = self.forward if is_module else MethodType(call_original, self)
            self.__dict__[_ATTRIBUTE] = compile_method(method, dynamic_dims, mode, options)
        return self.__dict__[_ATTRIBUTE]

    @functools.wraps(call_original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # part of a larger model that is being traced
            return call_original(self, *args, **kwargs)
        return compiled_of(self)(*args, **kwargs)

    target.__call__ = __call__  # type: ignore[method-assign]
    target.piecewise = property(compiled_of)  # type: ignore[attr-defined]
    return target
