"""Conditions on one parameter of a call, read off the value that the trace was given.

In:  an expression over the parameters of a call, and its value.
Out: `Check`s: what later calls must have there.
Knows nothing of graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from piecewise_backend import _torch
from piecewise_backend.errors import ContractError
from piecewise_backend.sources import PLAIN_VALUES, user_name

_IDENTITIES = (FunctionType, BuiltinFunctionType, type, nn.Module)
AS_TRACED = "pass what the trace was given, or compile another instance for this"


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One condition on a call."""

    expression: str
    """What is looked at, over the parameters of the call."""
    broken: str
    """A python condition: true if the call breaks the contract."""
    expected: str
    fix: str = AS_TRACED
    is_of_tensors: bool = False
    """It holds for tensors that the check in C++ lets pass."""


class ValueChecks:
    """Makes checks, and keeps what their conditions refer to."""

    def __init__(self, varying: Collection[str], state: Mapping[str, torch.Tensor]) -> None:
        """For one call.

        Args:
            varying: expressions of the graph's inputs: a number among them may vary.
            state: tensors that a parameter may be, too, by expression.
        """
        self.namespace = _torch.source_namespace() | {"Tensor_": torch.Tensor, "torch_": torch}
        """What conditions refer to beside the parameters."""
        self.tensors: dict[str, int] = {}
        """Ranks by expression, of all that checks say is a tensor."""
        self._varying = varying
        self._first = {id(tensor): text for text, tensor in state.items()}
        self._visiting: set[int] = set()

    def visit(self, expression: str, value: Any) -> Iterator[Check]:
        """All conditions on a value and what it holds."""
        if isinstance(value, torch.Tensor):
            first = self._first.setdefault(id(value), expression)
            if first == expression:
                yield self.tensor(expression, value)
            else:
                expected = "the very tensor that another parameter is, or the model's own"
                yield Check(expression, f"{expression} is not {first}", expected)
        elif value is None:
            yield Check(expression, f"{expression} is not None", "None")
        elif isinstance(value, PLAIN_VALUES):
            yield self._value(expression, value)
        elif isinstance(value, tuple | list | dict):
            yield from self._container(expression, value)
        elif isinstance(value, _IDENTITIES):
            broken = f"{expression} is not {self.bind(value)}"
            yield Check(expression, broken, f"{described(value)} itself")
        else:
            yield self._type(expression, value)
            yield from self._fields(expression, value)

    def _fields(self, expression: str, value: Any) -> Iterator[Check]:
        if not dataclasses.is_dataclass(value) or id(value) in self._visiting:
            return
        self._visiting.add(id(value))  # one may hold itself
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield from self.visit(f"{expression}.{field.name}", getattr(value, field.name))
        self._visiting.discard(id(value))

    def tensor(self, expression: str, value: torch.Tensor) -> Check:
        """Kind, dtype, device and rank of a tensor."""
        self.tensors[expression] = value.dim()
        broken = (
            f"not isinstance({expression}, Tensor_) or {expression}.dtype is not "
            f"{self.bind(value.dtype)} or {_is_elsewhere(expression, value.device)} "
            f"or {expression}.dim() != {value.dim()}"
        )
        expected = f"a {value.dtype} tensor of rank {value.dim()} on {value.device}"
        return Check(expression, broken, expected, is_of_tensors=True)

    def _type(self, expression: str, value: Any) -> Check:
        broken = f"type({expression}) is not {self.bind(type(value))}"
        return Check(expression, broken, f"an object of type {type(value).__qualname__}")

    def _value(self, expression: str, value: Any) -> Check:
        kind = self._type(expression, value)
        if expression in self._varying:  # a number that may vary
            return kind
        is_nan = value != value
        if isinstance(value, float) and value == 0:  # which has a sign
            broken = f"{kind.broken} or repr({expression}) != {repr(value)!r}"
            return Check(expression, broken, f"{value!r}, which is part of the compiled code")
        other = f"{expression} == {expression}" if is_nan else f"{expression} != {self.bind(value)}"
        expected = f"{value!r}, which is part of the compiled code"
        return Check(expression, f"{kind.broken} or {other}", expected)

    def _container(self, expression: str, value: Any) -> Iterator[Check]:
        if isinstance(value, dict):
            keys = self.bind(list(value))
            broken = f"{self._type(expression, value).broken} or list({expression}) != {keys}"
            yield Check(expression, broken, f"a dict with the keys {list(value)}, in this order")
        else:
            broken = f"{self._type(expression, value).broken} or len({expression}) != {len(value)}"
            yield Check(expression, broken, f"a {type(value).__name__} of length {len(value)}")
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if not isinstance(key, str | int):
                raise ContractError(
                    f"{user_name(expression)} has the key {key!r}; a dict argument needs keys that "
                    "are strings or integers"
                )
            yield from self.visit(f"{expression}[{key!r}]", item)

    def bind(self, value: Any) -> str:
        """A name for an object that a condition refers to."""
        name = f"c{len(self.namespace)}_"
        self.namespace[name] = value
        return name


def _is_elsewhere(expression: str, device: torch.device) -> str:
    """A condition: the tensor is on another device. Asking for `.device` makes an object."""
    if device.type == "cuda":
        return f"not {expression}.is_cuda or {expression}.get_device() != {device.index or 0}"
    if device.type == "cpu":
        return f"not {expression}.is_cpu"
    return f"{expression}.device.type != {device.type!r}"


def described(value: Any) -> str:
    """A value in an error."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    if isinstance(value, FunctionType | type):
        return value.__qualname__
    text = repr(value)
    return text if len(text) <= 80 else f"an object of type {type(value).__qualname__}"
