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
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import nn

from piecewise_backend import _torch
from piecewise_backend.checks import AS_TRACED, Check, ValueChecks, described
from piecewise_backend.errors import ContractError
from piecewise_backend.sizes import TokenDim
from piecewise_backend.sources import (
    PLAIN_VALUES,
    parameter_expression,
    parameter_name,
    user_name,
)
from piecewise_backend.steps import GraphInput


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

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Dynamo's fakes of the tensors among them, by expression."""
        found = ((text, item.example) for text, item in self.inputs.items())
        return {text: fake for text, fake in found if isinstance(fake, torch.Tensor)}

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
        state: Mapping[int, torch.Tensor],
        device: torch.device,
        looked_at: Sequence[str] = (),
    ) -> None:
        """Read them off a call that is known to be right.

        Args:
            parameters: of that call, by name; `*args` and `**kwargs` are a tuple and a dict.
            own: the name of `self`, if the function is a method.
            calls: the graph inputs among the parameters.
            state: the other graph inputs, by position.
            device: of the graph.
            looked_at: Dynamo's names of what the trace took something from, inside of
                parameters.
        """
        self.names = tuple(map(parameter_name, parameters))
        self._calls = calls
        texts = {f"args_[{position}]": tensor for position, tensor in state.items()}
        self._checks = ValueChecks(calls.inputs, texts)
        kinds = tuple(self._kinds(parameters, own, looked_at))
        self._all_kinds = (*kinds, *self._modes(list(state.values()), device))
        self._all_sizes = tuple(self._sizes())
        self.tensors = tuple(self._checks.tensors)
        """Expressions over the parameters."""
        self.tensor_check = _torch.TensorCheck([self._expected_sizes(t) for t in self.tensors])

    @property
    def namespace(self) -> dict[str, Any]:
        """What `statements` refer to beside the parameters."""
        own = {"explain_": self.explain, "look_again_": self.look_again}
        return self._checks.namespace | own | {"tensors_": self.tensor_check}

    def statements(self) -> list[str]:
        """Generated code that every call runs: it raises, or leaves n0, n1, ... with the values
        of the size symbols. The names `explain_` and `look_again_` are its methods of the kind.
        """
        given = ", ".join(("args_", *self.names))
        kinds = [check.broken for check in self._all_kinds if not check.is_of_tensors]
        sizes = [check.broken for check in self._all_sizes if not check.is_of_tensors]
        lines = [f"if {' or '.join(kinds)}: explain_({given})"] if kinds else []
        if self.tensors:
            tensors = ", ".join(self.tensors)
            lines.append(f"if not tensors_.passes({tensors}): look_again_({given})")
        lines += [f"n{i} = {text}" for i, text in enumerate(self._calls.sizes)]
        return lines + ([f"if {' or '.join(sizes)}: explain_({given})"] if sizes else [])

    def look_again(self, *given: Any) -> None:
        """Called when the check in C++ refuses the tensors of a call: it refuses too much.

        Raises:
            ContractError: what was expected and what was given.
        """
        self.explain(*given)
        namespace = self._named(given)
        self.tensor_check.expect(*(eval(text, namespace) for text in self.tensors))

    def explain(self, *given: Any) -> None:
        """Called when a condition says that a call is broken.

        Raises:
            ContractError: what was expected and what was given.
        """
        namespace = self._named(given)
        self._raise_first(self._all_kinds, namespace)
        for i, text in enumerate(self._calls.sizes):
            namespace[f"n{i}"] = eval(text, namespace)
        self._raise_first(self._all_sizes, namespace)

    def _named(self, given: Sequence[Any]) -> dict[str, Any]:
        return self._checks.namespace | dict(zip(("args_", *self.names), given, strict=True))

    def _raise_first(self, checks: Sequence[Check], namespace: dict[str, Any]) -> None:
        for check in checks:
            if eval(check.broken, namespace):
                given = described(eval(check.expression, namespace))
                raise ContractError(
                    f"{user_name(check.expression)}: expected {check.expected}, got {given}; "
                    f"{check.fix}"
                )

    def _kinds(
        self, parameters: Mapping[str, Any], own: str | None, looked_at: Sequence[str]
    ) -> Iterator[Check]:
        seen = set()
        for name, value in parameters.items():
            if name != own:
                for check in self._checks.visit(parameter_name(name), value):
                    seen.add(check.expression)
                    yield check
        if own is not None and isinstance(model := parameters[own], nn.Module):
            mode = f"{parameter_name(own)}.training"
            fix = "call .train() or .eval() before the first call"
            yield Check(mode, f"{mode} is not {model.training}", str(model.training), fix)
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                hooks = f"{parameter_name(own)}.{name}"
                fix = "they would not be called; register them on submodules before the trace"
                yield Check(hooks, hooks, "no hooks on the compiled module", fix)
        for expression, example in self._calls.tensors.items():
            if expression not in seen:
                yield self._checks.tensor(expression, example)  # from inside of an object
                seen.add(expression)
        named = {parameter_name(name): value for name, value in parameters.items()}
        for source in looked_at:
            expression = parameter_expression(source)
            if expression not in seen:
                yield from self._inside(expression, self._checks.namespace | named)

    def _inside(self, expression: str, namespace: dict[str, Any]) -> Iterator[Check]:
        """A plain value, or None, inside of an object: an attribute that the trace read."""
        try:
            value = eval(expression, namespace)
        except (AttributeError, KeyError, IndexError, TypeError):
            return  # a guard may be about something that is not there
        if value is None or isinstance(value, PLAIN_VALUES):
            yield from self._checks.visit(expression, value)

    def _modes(self, state: Sequence[torch.Tensor], device: torch.device) -> Iterator[Check]:
        mode = f"torch_.is_autocast_enabled({device.type!r})"
        traced = torch.is_autocast_enabled(device.type)
        fix = "call it in the autocast mode of its trace"
        tensors = self._calls.tensors.values()
        is_seen = any(tensor.device.type == device.type for tensor in tensors)
        yield Check(mode, f"{mode} is not {traced}", str(traced), fix, is_of_tensors=is_seen)
        if traced:
            kind = f"torch_.get_autocast_dtype({device.type!r})"
            dtype = torch.get_autocast_dtype(device.type)
            yield Check(kind, f"{kind} is not {self._checks.bind(dtype)}", str(dtype), fix)
        wanted = ["True"] if any(tensor.requires_grad for tensor in state) else []
        is_seen = not wanted
        wanted += [f"{text}.requires_grad" for text in self._calls.tensors]
        if wanted:
            fix = "nothing is differentiated here: call it under torch.no_grad()"
            broken = f"torch_.is_grad_enabled() and ({' or '.join(wanted)})"
            expected = "no gradients to be required"
            yield Check("torch_.is_grad_enabled()", broken, expected, fix, is_of_tensors=is_seen)

    def _sizes(self) -> Iterator[Check]:
        for expression, example in self._calls.tensors.items():
            for dim, size in enumerate(example.shape):
                text = f"{expression}.shape[{dim}]"
                if text in self._calls.sizes:
                    continue
                name = re.split(r"[.\[]", user_name(expression))[0]
                is_static = not isinstance(size, torch.SymInt)
                fix = (
                    f"mark it dynamic: dynamic_dims={{{name!r}: {dim}}}" if is_static else AS_TRACED
                )
                broken = f"{text} != {self._calls.size_text(size)}"
                expected = self._calls.size_for_people(size)
                yield Check(text, broken, expected, fix, is_of_tensors=is_static)

    def _expected_sizes(self, expression: str) -> list[int | None]:
        example = self._calls.tensors.get(expression)
        if example is None:  # given, but not to the graph
            return [None] * self._checks.tensors[expression]
        return [None if isinstance(size, torch.SymInt) else size for size in example.shape]


def _shown(symbol: sympy.Symbol, inputs: Mapping[str, GraphInput]) -> str:
    """The expression that shows the value of a size symbol: a tensor's size, or a number."""
    numbers = []
    for text, item in inputs.items():
        if isinstance(item.example, torch.Tensor):
            for dim, size in enumerate(item.example.shape):
                if _torch.size_expr(size) == symbol:
                    return f"{text}.shape[{dim}]"
        elif isinstance(item.example, torch.SymInt) and _torch.size_expr(item.example) == symbol:
            numbers.append(text)
    if not numbers:
        raise ContractError(f"no input of the graph shows the size {symbol}; mark it static")
    return numbers[0]
