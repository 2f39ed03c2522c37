"""What a call must be like for code without guards to be right for it.

In:  the parameters of one call that is known to be right, and the inputs of its graph.
Out: `Contract`: conditions over the parameters of a call, and the error for one that breaks them.
Knows nothing of captures, and nothing of how a call is made.

Everything that Dynamo took from the parameters of the trace is checked: kinds, dtypes, devices,
ranks, sizes that did not vary, and values that became part of the code. What it took from
elsewhere (attributes, globals) is not: see `check_guards`.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import sympy
import torch
from torch import nn

from piecewise_backend import _torch
from piecewise_backend.errors import ContractError
from piecewise_backend.sizes import TokenDim
from piecewise_backend.sources import parameter_expression, parameter_name, user_name
from piecewise_backend.steps import GraphInput

_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
_IDENTITIES = (FunctionType, BuiltinFunctionType, type, nn.Module)
_AS_TRACED = "pass what the trace was given, or compile another instance for this"


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One condition on a call."""

    expression: str
    """What is looked at, over the parameters of the call."""
    broken: str
    """A python condition: true if the call breaks the contract."""
    expected: str
    fix: str = _AS_TRACED


@dataclasses.dataclass(frozen=True, slots=True)
class CallInputs:
    """The graph inputs that come with each call, and the sizes that they show."""

    inputs: Mapping[str, GraphInput]
    """By expression over the parameters."""
    sizes: tuple[str, ...]
    """For each size symbol, the expression that shows its value."""
    token_dim: TokenDim

    @classmethod
    def of(
        cls, inputs: Sequence[GraphInput], token_dim: TokenDim, state: Mapping[int, Any]
    ) -> CallInputs:
        """All but `state`, which is by position."""
        found = {
            parameter_expression(item.source): item
            for position, item in enumerate(inputs)
            if position not in state
        }
        kept = {f"args_[{position}]": inputs[position] for position in state}
        sizes = (_shown(symbol, found | kept) for symbol in token_dim.symbols)
        return cls(found, tuple(sizes), token_dim)

    def size_text(self, size: int | torch.SymInt) -> str:
        """A size of one of Dynamo's fakes over the names n0, n1, ... of the size symbols."""
        names = {symbol: f"n{i}" for i, symbol in enumerate(self.token_dim.symbols)}
        return _torch.expr_source(_torch.size_expr(size), names)

    def size_for_people(self, size: int | torch.SymInt) -> str:
        """The same over what the user's program calls them."""
        shown = map(user_name, self.sizes)
        names = dict(zip(self.token_dim.symbols, shown, strict=True))
        return _torch.expr_source(_torch.size_expr(size), names)


class Contract:
    """The conditions on a call."""

    def __init__(
        self,
        parameters: Mapping[str, Any],
        own: str | None,
        calls: CallInputs,
        state: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        """Read them off a call that is known to be right.

        Args:
            parameters: of that call, by name; `*args` and `**kwargs` are a tuple and a dict.
            own: the name of `self`, if the function is a method.
            calls: the graph inputs among the parameters.
            state: the other graph inputs.
            device: of the graph.
        """
        self.names = tuple(map(parameter_name, parameters))
        self.namespace = _torch.source_namespace() | {"Tensor_": torch.Tensor, "torch_": torch}
        """What the conditions refer to beside the parameters."""
        self._calls = calls
        self._first = {id(tensor): self._bind(tensor) for tensor in state}
        self.shapes: dict[str, str] = {}
        """By expression of a tensor, the name of its shape once kinds are checked."""
        kinds = tuple(self._kinds(parameters, own))
        self.kinds = (*kinds, *self._modes(state, device))
        """To be checked first, in order."""
        self.sizes = tuple(self._sizes())
        """To be checked once n0, n1, ... have the values of the size symbols."""

    def size_symbols(self) -> list[str]:
        """Where n0, n1, ... come from, once kinds are checked: shapes have names by then."""
        texts = []
        for text in self._calls.sizes:
            tensor, _, dim = text.rpartition(".size(")
            shape = self.shapes.get(tensor)
            texts.append(text if shape is None else f"{shape}[{dim.removesuffix(')')}]")
        return texts

    def explain(self, *given: Any) -> None:
        """Called when a condition says that a call is broken.

        Raises:
            ContractError: what was expected and what was given.
        """
        namespace = self.namespace | dict(zip(("args_", *self.names), given, strict=True))
        self._raise_first(self.kinds, namespace)
        for i, text in enumerate(self._calls.sizes):
            namespace[f"n{i}"] = eval(text, namespace)
        self._raise_first(self.sizes, namespace)

    def _raise_first(self, checks: Sequence[Check], namespace: dict[str, Any]) -> None:
        for check in checks:
            if eval(check.broken, namespace):
                given = _described(eval(check.expression, namespace))
                raise ContractError(
                    f"{user_name(check.expression)}: expected {check.expected}, got {given}; "
                    f"{check.fix}"
                )

    def _kinds(self, parameters: Mapping[str, Any], own: str | None) -> Iterator[Check]:
        seen = set()
        for name, value in parameters.items():
            if name != own:
                for check in self._visit(parameter_name(name), value):
                    seen.add(check.expression)
                    yield check
        if own is not None and isinstance(model := parameters[own], nn.Module):
            mode = f"{parameter_name(own)}.training"
            fix = "call .train() or .eval() before the first call"
            yield Check(mode, f"{mode} is not {model.training}", str(model.training), fix)
        for expression, item in self._calls.inputs.items():
            if expression not in seen and isinstance(item.example, torch.Tensor):
                yield self._tensor(expression, item.example)  # from inside of an object

    def _modes(self, state: Sequence[torch.Tensor], device: torch.device) -> Iterator[Check]:
        mode = f"torch_.is_autocast_enabled({device.type!r})"
        traced = torch.is_autocast_enabled(device.type)
        fix = "call it in the autocast mode of its trace"
        yield Check(mode, f"{mode} is not {traced}", str(traced), fix)
        wanted = [
            f"{text}.requires_grad"
            for text, item in self._calls.inputs.items()
            if isinstance(item.example, torch.Tensor)
        ]
        wanted += ["True"] if any(tensor.requires_grad for tensor in state) else []
        if wanted:
            fix = "nothing is differentiated here: call it under torch.no_grad()"
            broken = f"torch_.is_grad_enabled() and ({' or '.join(wanted)})"
            yield Check("torch_.is_grad_enabled()", broken, "no gradients to be required", fix)

    def _visit(self, expression: str, value: Any) -> Iterator[Check]:
        if isinstance(value, torch.Tensor):
            first = self._first.setdefault(id(value), expression)
            if first == expression:
                yield self._tensor(expression, value)
            else:
                expected = "the very tensor that another parameter is, or the model's own"
                yield Check(expression, f"{expression} is not {first}", expected)
        elif value is None:
            yield Check(expression, f"{expression} is not None", "None")
        elif isinstance(value, _VALUES):
            yield self._value(expression, value)
        elif isinstance(value, tuple | list | dict):
            yield from self._container(expression, value)
        elif isinstance(value, _IDENTITIES):
            broken = f"{expression} is not {self._bind(value)}"
            yield Check(expression, broken, f"{_described(value)} itself")
        else:
            yield self._type(expression, value)
            for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
                yield from self._visit(f"{expression}.{field.name}", getattr(value, field.name))

    def _tensor(self, expression: str, value: torch.Tensor) -> Check:
        shape = self.shapes.setdefault(expression, f"s{len(self.shapes)}")
        broken = (
            f"not isinstance({expression}, Tensor_) or {expression}.dtype is not "
            f"{self._bind(value.dtype)} or {_is_elsewhere(expression, value.device)} "
            f"or len({shape} := {expression}.shape) != {value.dim()}"
        )
        expected = f"a {value.dtype} tensor of rank {value.dim()} on {value.device}"
        return Check(expression, broken, expected)

    def _type(self, expression: str, value: Any) -> Check:
        broken = f"type({expression}) is not {self._bind(type(value))}"
        return Check(expression, broken, f"an object of type {type(value).__qualname__}")

    def _value(self, expression: str, value: Any) -> Check:
        kind = self._type(expression, value)
        if expression in self._calls.inputs:  # a number that may vary
            return kind
        is_nan = value != value
        other = (
            f"{expression} == {expression}" if is_nan else f"{expression} != {self._bind(value)}"
        )
        expected = f"{value!r}, which is part of the compiled code"
        return Check(expression, f"{kind.broken} or {other}", expected)

    def _container(self, expression: str, value: Any) -> Iterator[Check]:
        broken = f"{self._type(expression, value).broken} or len({expression}) != {len(value)}"
        yield Check(expression, broken, f"a {type(value).__name__} of length {len(value)}")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(value, dict):
                missing = f"{key!r} not in {expression}"
                yield Check(expression, missing, f"a dict with the key {key!r}")
            yield from self._visit(f"{expression}[{key!r}]", item)

    def _sizes(self) -> Iterator[Check]:
        for expression, item in self._calls.inputs.items():
            shape = item.example.shape if isinstance(item.example, torch.Tensor) else ()
            for dim, size in enumerate(shape):
                text = f"{expression}.size({dim})"
                if text in self._calls.sizes:
                    continue
                name = re.split(r"[.\[]", user_name(expression))[0]
                is_static = not isinstance(size, torch.SymInt)
                fix = (
                    f"mark it dynamic: dynamic_dims={{{name!r}: {dim}}}"
                    if is_static
                    else _AS_TRACED
                )
                broken = f"{self.shapes[expression]}[{dim}] != {self._calls.size_text(size)}"
                yield Check(text, broken, self._calls.size_for_people(size), fix)

    def _bind(self, value: Any) -> str:
        name = f"c{len(self.namespace)}_"
        self.namespace[name] = value
        return name


def _shown(symbol: sympy.Symbol, inputs: Mapping[str, GraphInput]) -> str:
    """The expression that shows the value of a size symbol: a tensor's size, or a number."""
    numbers = []
    for text, item in inputs.items():
        if isinstance(item.example, torch.Tensor):
            for dim, size in enumerate(item.example.shape):
                if _torch.size_expr(size) == symbol:
                    return f"{text}.size({dim})"
        elif isinstance(item.example, torch.SymInt) and _torch.size_expr(item.example) == symbol:
            numbers.append(text)
    if not numbers:
        raise ContractError(f"no input of the graph shows the size {symbol}; mark it static")
    return numbers[0]


def _is_elsewhere(expression: str, device: torch.device) -> str:
    """A condition: the tensor is on another device. Asking for `.device` makes an object."""
    if device.type == "cuda":
        return f"not {expression}.is_cuda or {expression}.get_device() != {device.index or 0}"
    if device.type == "cpu":
        return f"not {expression}.is_cpu"
    return f"{expression}.device.type != {device.type!r}"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    if isinstance(value, FunctionType | type):
        return value.__qualname__
    text = repr(value)
    return text if len(text) <= 80 else f"an object of type {type(value).__qualname__}"
