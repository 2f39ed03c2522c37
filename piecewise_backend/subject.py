"""The function that is traced, with the instance that it belongs to.

Knows nothing of graphs.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from piecewise_backend import _torch
from piecewise_backend.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """The function that was traced, and for which instance."""

    function: FunctionType
    instance: object | None
    """What `self` is; None for a plain function."""

    @classmethod
    def of(cls, target: object) -> Subject | None:
        """From a function or method; None for anything else."""
        if isinstance(target, MethodType) and isinstance(target.__func__, FunctionType):
            return cls(target.__func__, target.__self__)
        return cls(target, None) if isinstance(target, FunctionType) else None

    def with_own_code(self) -> Subject:
        """The same function with a code object that nothing else runs.

        Dynamo keeps its traces by code object: so none is shared with another instance.
        """
        if _hides_its_parameters(self.function):
            return Subject(_called_by_name(self.function), self.instance)
        code = self.function.__code__.replace()
        if str(self.function.__module__).startswith("torch."):
            # Dynamo skips the files of torch, unless they are called from elsewhere.
            code = code.replace(co_filename=f"<{self.function.__module__}>")
        return self.with_code(code)

    def with_code(self, code: Any) -> Subject:
        """Another function object, for this instance alone."""
        made = FunctionType(
            code,
            self.function.__globals__,
            self.function.__name__,
            self.function.__defaults__,
            self.function.__closure__,
        )
        made.__kwdefaults__ = self.function.__kwdefaults__
        for name in ("__qualname__", "__doc__", "__annotations__", "__module__"):
            setattr(made, name, getattr(self.function, name))
        return Subject(made, self.instance)

    @property
    def callable(self) -> Callable[..., Any]:
        """The function, bound to the instance if there is one."""
        return self.function if self.instance is None else MethodType(self.function, self.instance)

    @property
    def own(self) -> str | None:
        """The name of `self`."""
        names = _torch.parameter_names(self.function.__code__)
        return names[0] if self.instance is not None else None

    def parameters(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every parameter in a call, `self` and defaults included.

        Raises:
            TypeError: the call does not fit the signature.
        """
        given = args if self.instance is None else (self.instance, *args)
        bound = inspect.signature(self.function, follow_wrapped=False).bind(*given, **kwargs)
        bound.apply_defaults()
        names = _torch.parameter_names(self.function.__code__)
        return {name: bound.arguments[name] for name in names}

    def frame(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The local variables of a call as it begins: parameters and closure variables."""
        return dict(parameters) | {name: cell.cell_contents for name, cell in self.cells.items()}

    @property
    def cells(self) -> dict[str, CellType]:
        """The closure variables."""
        names = self.function.__code__.co_freevars
        return dict(zip(names, self.function.__closure__ or (), strict=True))


def subject_of(target: Any) -> Subject:
    """What a call of a module, function or method runs.

    Raises:
        ConfigError: nothing that is written in Python.
    """
    if isinstance(target, nn.Module) and _torch.original_of(target) is not target:
        raise ConfigError(
            f"{name_of(target)} is what torch.compile returned; pass the module that it was given"
        )
    function = target.forward if isinstance(target, nn.Module) else target
    subject = Subject.of(function) or Subject.of(getattr(function, "__call__", None))  # noqa: B004
    if subject is None:
        raise ConfigError(
            f"{name_of(target)} is no module, function or method written in Python; wrap it in one"
        )
    return subject


def name_of(target: Any) -> str:
    """What messages call it."""
    return str(getattr(target, "__qualname__", None) or type(target).__qualname__)


def snapshot(value: Any) -> Any:
    """Arguments as they are before a call, which may put results into them.

    Containers and dataclasses are copied, what they hold is not.
    """
    if type(value) in (list, tuple):
        return type(value)(map(snapshot, value))
    if type(value) is dict:
        return {key: snapshot(item) for key, item in value.items()}
    return copy.copy(value) if is_dataclass_instance(value) else value


def is_dataclass_instance(value: Any) -> bool:
    """An object with fields, not the class of one."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _hides_its_parameters(function: FunctionType) -> bool:
    """A decorator's `*args`: `self` is in there, and no parameter has a name."""
    code = function.__code__
    has_only_args = code.co_argcount == 0 and bool(code.co_flags & inspect.CO_VARARGS)
    return hasattr(function, "__wrapped__") or has_only_args


_STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def _called_by_name(function: FunctionType) -> FunctionType:
    """A function with the signature that `function` shows, which calls it.

    `torch.no_grad()` around a forward has a wrapper of torch's as the outermost function.
    """
    signature = inspect.signature(function)
    namespace: dict[str, Any] = {"called_": function}
    declared: list[str] = []
    passed: list[str] = []
    for index, (name, parameter) in enumerate(signature.parameters.items()):
        star = _STARS.get(parameter.kind, "")
        is_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if is_keyword and "*" not in declared and not any(d.startswith("*") for d in declared):
            declared.append("*")
        default = ""
        if parameter.default is not parameter.empty:
            namespace[f"default{index}_"] = parameter.default
            default = f"=default{index}_"
        declared.append(f"{star}{name}{default}")
        passed.append(f"{name}={name}" if is_keyword else f"{star}{name}")
    source = f"def call({', '.join(declared)}):\n    return called_({', '.join(passed)})\n"
    file = f"<{function.__qualname__}>"
    exec(compile(source, file, "exec"), namespace)
    made: FunctionType = namespace.pop("call")
    made.__name__, made.__qualname__ = function.__name__, function.__qualname__
    made.__doc__, made.__module__ = function.__doc__, function.__module__
    made.__annotations__ = dict(getattr(inspect.unwrap(function), "__annotations__", {}))
    return made
