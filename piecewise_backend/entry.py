"""Build the function that a model is called through once guards are gone.

In:  a runtime, what Dynamo rewrote, and the parameters of one call that is known to be right.
Out: one function object per instance: Dynamo's code, with its graph call replaced.

Dynamo's code fetches the graph's inputs one by one through the model's modules, calls the
graph, and builds what the user's function returns. Only the last part is kept: state is fetched
once (`ModelState`), and what comes with the call is checked (`Contract`) and fetched by
generated code.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.contract import CallInputs, Contract
from piecewise_backend.runtime import Runtime
from piecewise_backend.sources import is_plain, root_of
from piecewise_backend.split_ops import inputs_written_by
from piecewise_backend.state import ModelState
from piecewise_backend.static_inputs import written_inputs
from piecewise_backend.steps import GraphInput
from piecewise_backend.subject import Subject


class InstanceArguments:
    """The graph's arguments for calls of one instance: its state, and what each call brings."""

    def __init__(
        self,
        runtime: Runtime,
        rewritten: _torch.Rewritten,
        subject: Subject,
        parameters: Mapping[str, Any],
    ) -> None:
        inputs = runtime.graph.split.inputs
        own = subject.own
        names = {
            position: item.source
            for position, item in enumerate(inputs)
            if not isinstance(item.example, torch.SymInt)
            and not _comes_with_call(item.source, parameters, own)
        }
        namespace = _torch.source_namespace() | {
            "L": {} if own is None else {own: subject.instance},
            "G": subject.function.__globals__,
        }
        aliases = [
            pair
            for pair in rewritten.aliases
            if not any(_comes_with_call(name, parameters, own) for name in pair)
        ]
        looked_at = [name for name in rewritten.looked_at if is_plain(name)]
        inside = [name for name in looked_at if _comes_with_call(name, parameters, own)]
        outside = [name for name in looked_at if name not in set(inside)]
        state = ModelState(names, namespace, subject.cells, aliases, outside)
        self.values: list[Any] = [state.values.get(i) for i in range(len(inputs))]
        """One per graph input; what belongs to the model is there already."""
        self._varying = tuple(i for i in range(len(inputs)) if i not in names)
        calls = CallInputs.of(inputs, runtime.graph.token_dim, state.values)
        contract = Contract(parameters, own, calls, state.values, runtime.graph.device, inside)
        self.collect = self._write_collect(runtime, calls, contract, state)
        """`collect(values, *parameters)` completes `values` from the parameters of a call, or
        raises ContractError if it is not a call that the code was made for."""
        self.call = self._write_call(runtime, contract.names)
        """Called with the parameters of the model, in order; returns what the graph returns."""

    def _write_collect(
        self, runtime: Runtime, calls: CallInputs, contract: Contract, state: ModelState
    ) -> Callable[..., list[Any]]:
        lines = ["if state_.was_replaced(): fetch_(args_)", *contract.statements()]
        expressions = {id(item): text for text, item in calls.inputs.items()}
        for position in self._varying:
            item = runtime.graph.split.inputs[position]
            if isinstance(item.example, torch.SymInt):
                value = calls.size_text(item.example)
            else:
                value = _fetched(runtime, item, expressions[id(item)])
            lines.append(f"args_[{position}] = {value}")
        body = "".join(f"    {line}\n" for line in [*lines, "return args_"])
        fetch = _fetch_function(runtime, state, self.values)
        namespace = contract.namespace | {"state_": state, "fetch_": fetch}
        source = f"def collect({', '.join(('args_', *contract.names))}):\n{body}"
        exec(compile(source, "<piecewise contract>", "exec"), namespace)
        return namespace.pop("collect")  # type: ignore[no-any-return]  # no cycle

    def _write_call(self, runtime: Runtime, names: Sequence[str]) -> Callable[..., Any]:
        given = ", ".join(names)
        # The caller's tensors are not ours to keep.
        release = "".join(f"kept_[{i}] = " for i in self._varying) + "None"
        source = f"""def call({given}):
    if not enter_():
        return run_nested_(collect_(kept_.copy(), {given}))
    try:
        return run_(collect_(kept_, {given}))
    finally:
        {release}
        leave_()
"""
        namespace: dict[str, Any] = {
            "enter_": runtime.turns.enter,
            "leave_": runtime.turns.leave,
            "run_": runtime.run,
            "run_nested_": runtime.run_nested,
            "collect_": self.collect,
            "kept_": self.values,
        }
        exec(compile(source, "<piecewise call>", "exec"), namespace)
        return namespace.pop("call")  # type: ignore[no-any-return]  # no cycle


def _fetch_function(
    runtime: Runtime, state: ModelState, kept: list[Any]
) -> Callable[[list[Any]], None]:
    """Something of the model was replaced: for this call and all later ones."""

    def fetch(values: list[Any]) -> None:
        state.fetch()
        runtime.graph.require_alike(state.values)
        for position, value in state.values.items():
            kept[position] = values[position] = value

    return fetch


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """The way into one instance."""

    call: Callable[..., Any]
    """Called like the user's function, bound to the instance."""
    arguments: InstanceArguments


def make_entry(
    runtime: Runtime, rewritten: _torch.Rewritten, subject: Subject, parameters: Mapping[str, Any]
) -> Entry:
    """The way into an instance that needs no guards.

    Args:
        runtime: serves the only graph of the function.
        rewritten: what Dynamo made of the function.
        subject: the function that the user wrote, with the instance.
        parameters: of a call that `runtime` is right for.

    Raises:
        ContractError: the graph reads something that is not known from its name alone.
    """
    arguments = InstanceArguments(runtime, rewritten, subject, parameters)
    call = arguments.call
    assert rewritten.code is not None, "a call has just come through it"
    own, namespace = subject.function.__code__.co_names, subject.function.__globals__
    # The collector does not look into code: a model that holds its own entry would never go.
    code = _torch.replace_graph_call(rewritten.code, weakref.proxy(call), own, namespace)
    code = code.replace(co_filename=f"<piecewise {code.co_qualname}>")  # not the user's lines
    made = subject.with_code(code)
    made.function.__dict__["call"] = call
    return Entry(made.callable, arguments)


def _comes_with_call(source: str, parameters: Mapping[str, Any], own: str | None) -> bool:
    root = root_of(source)
    return root is not None and root != own and root in parameters


def _fetched(runtime: Runtime, item: GraphInput, expression: str) -> str:
    """A tensor as pieces were compiled to read it: without gaps, if the trace had none."""
    graph = runtime.graph
    layout = graph.layouts.get(item.name)
    is_written = item.name in inputs_written_by(graph.split) | written_inputs(graph)
    if layout is None or is_written or not layout.is_contiguous(_sizes_unlike_each_other(runtime)):
        return expression
    return f"{expression} if {expression}.is_contiguous() else {expression}.contiguous()"


def _sizes_unlike_each_other(runtime: Runtime) -> tuple[int, ...]:
    return tuple(range(7, 7 + len(runtime.graph.token_dim.symbols)))
