"""Which dimensions of a function's arguments vary, as its author says.

In:  a signature with annotations, and dimensions by parameter name.
Out: marks on the tensors of the call that is traced.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piecewise_backend.errors import ConfigError, ContractError

Dims = Mapping[str, int | Sequence[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class DynamicDims:
    """The dimensions that vary, by parameter."""

    named: Mapping[str, tuple[int, ...]]
    """Named by the user: one that the model makes static is an error."""
    annotated: tuple[str, ...]
    """Parameters annotated as tensors, or all where none is: dimension 0, if it can vary."""

    @classmethod
    def of(cls, function: Callable[..., Any], named: Dims | None) -> DynamicDims:
        """From a function's annotations, unless the user names the dimensions.

        Raises:
            ConfigError: a name that is no parameter, or a dimension that is no integer.
        """
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters)
        if named is not None:
            return cls({n: _checked(n, d, parameters) for n, d in named.items()}, ())
        annotated = tuple(
            name for name in parameters if _is_tensor(_annotations(function).get(name))
        )
        return cls({}, annotated or tuple(parameters))

    def mark(self, parameters: Mapping[str, Any]) -> None:
        """Tell Dynamo, by marks on the tensors of one call.

        Raises:
            ContractError: a named dimension that a tensor does not have.
        """
        for name, dims in self.named.items():
            for tensor in _tensors(parameters[name]):
                for dim in dims:
                    if not -tensor.dim() <= dim < tensor.dim():
                        raise ContractError(
                            f"dynamic_dims names dimension {dim} of {name}, which has shape "
                            f"{tuple(tensor.shape)}; name one that exists"
                        )
                    torch._dynamo.mark_dynamic(tensor, dim % tensor.dim())
        for name in self.annotated:
            for tensor in _tensors(parameters.get(name)):
                if tensor.dim() > 0:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _checked(name: str, dims: Any, parameters: Sequence[str]) -> tuple[int, ...]:
    if name not in parameters:
        close = difflib.get_close_matches(name, parameters, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"parameters: {', '.join(parameters)}"
        raise ConfigError(f"dynamic_dims names {name!r}, which is no parameter; {hint}")
    found = (dims,) if isinstance(dims, int) else tuple(dims) if isinstance(dims, Sequence) else ()
    if not found or not all(isinstance(d, int) and not isinstance(d, bool) for d in found):
        raise ConfigError(f"dynamic_dims[{name!r}] = {dims!r}; give a dimension or a list of them")
    return found


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # names for type checkers only
        return dict(getattr(function, "__annotations__", {}))


def _is_tensor(annotation: Any) -> bool:
    """`Tensor`, `Tensor | None`, `list[Tensor]`, a dataclass, or such as text."""
    if isinstance(annotation, str):
        return "Tensor" in annotation
    if dataclasses.is_dataclass(annotation):
        return True
    members = typing.get_args(annotation)
    is_tensor = isinstance(annotation, type) and issubclass(annotation, torch.Tensor)
    return is_tensor or any(map(_is_tensor, members))


def _tensors(value: Any) -> list[torch.Tensor]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) is torch.Tensor]
