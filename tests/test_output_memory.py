"""What a piece returns is in memory of its own if it was so in the program.

Split ops write what pieces return; a result that became a view of an input would change the
input as well. See Note [Results that became views].
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import piecewise_backend as pw
from piecewise_backend.passes.output_memory import keep_apart, note_memory
from tests.helpers import compile, rows, same

aten = torch.ops.aten


@torch.library.custom_op("pwtest::triple_", mutates_args=["x"])
def triple_(x: Tensor) -> None:
    """Writes what it is given: 3 * x."""
    x.mul_(3)


@triple_.register_fake
def _(x: Tensor) -> None:
    return None


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    pw.register_splitting_op("pwtest::triple_")
    with torch.no_grad():
        yield


def transposed(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:] = x
    y = y.transpose(0, -1)
    w = torch.empty_like(y)
    w[:] = y
    return w


def copied_twice(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.copy_(x)
    return y.unsqueeze(0).clone()


def added_zero(x: Tensor) -> Tensor:
    return x + torch.zeros_like(x)


def times_one(x: Tensor) -> Tensor:
    return (x * torch.ones_like(x)).view(-1)


def scattered(x: Tensor) -> Tensor:
    y = torch.empty(1, *x.shape)
    y[0] = x
    return y.flatten()


@pytest.mark.parametrize(
    "copy", [transposed, copied_twice, added_zero, times_one, scattered], ids=lambda f: f.__name__
)
def test_a_split_op_writes_no_input(copy: Callable[[Tensor], Tensor]) -> None:
    def model(x: Tensor) -> Tensor:
        x = x.sin()
        y = copy(x)
        torch.ops.pwtest.triple_(y)
        return y.sum() + x.sum(-1)

    compiled = compile(
        model, splitting_ops=["pwtest::triple_"], compiler="inductor", cudagraph_mode="none"
    )
    x = rows(6)
    same(compiled(x), model(x), copy.__name__)


def test_a_split_op_writes_no_argument_of_the_caller() -> None:
    def model(x: Tensor) -> Tensor:
        y = transposed(x)
        torch.ops.pwtest.triple_(y)
        return y.sum(0) + x.sum(-1)

    compiled = compile(
        model, splitting_ops=["pwtest::triple_"], compiler="inductor", cudagraph_mode="none"
    )
    x = rows(6)
    given = x.clone()
    same(compiled(x), model(given.clone()), "values")
    same(x, given, "the argument")


def test_views_of_a_result_stay_views_of_it() -> None:
    def model(x: Tensor) -> Tensor:
        x = x.sin()
        y = transposed(x)
        z = y.unsqueeze(0)
        torch.ops.pwtest.triple_(y)
        return y.sum() + z.sum() + x.sum(-1)

    compiled = compile(
        model, splitting_ops=["pwtest::triple_"], compiler="inductor", cudagraph_mode="none"
    )
    same(compiled(rows(6)), model(rows(6)), "both were written")


def test_a_pass_that_returns_what_it_was_given() -> None:
    """A fusion that finds nothing to do; what its piece returns was a tensor of its own."""

    def drop_sin(graph: fx.Graph) -> int:
        found = graph.find_nodes(op="call_function", target=aten.sin.default)
        for node in found:
            drop(node)
        return len(found)

    def model(x: Tensor) -> Tensor:
        y = x.sin()
        torch.ops.pwtest.triple_(y)
        return y + x

    compiled = compile(
        model,
        splitting_ops=["pwtest::triple_"],
        compiler="inductor",
        cudagraph_mode="none",
        passes=[drop_sin],
    )
    x = rows(6)
    given = x.clone()
    same(compiled(x), 3 * given + given, "values")
    same(x, given, "the argument")


def traced(build: Callable[[fx.Graph, fx.Node, fx.Node], Any]) -> fx.Graph:
    """A graph of two inputs and what `build` returns, with values."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("a", "b")]
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        for node in inputs:
            node.meta["val"] = torch.empty(4, 8)
    graph.output(build(graph, *inputs))
    with mode:
        for node in graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
    return graph


def call(graph: fx.Graph, op: Any, *args: Any) -> fx.Node:
    return graph.call_function(op, args)


def returned(graph: fx.Graph) -> Sequence[fx.Node]:
    found: Sequence[fx.Node] = graph.output_node().args[0]
    return found


def drop(node: fx.Node) -> None:
    """Take out a copy, as Inductor does."""
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def test_views_of_inputs_stay_views() -> None:
    def build(graph: fx.Graph, a: fx.Node, b: fx.Node) -> Any:
        halves = call(graph, aten.split.Tensor, b, 2)
        return (
            call(graph, aten.view.default, a, [32]),
            call(graph, operator.getitem, halves, 1),
            a,
            None,
        )

    graph = traced(build)
    note_memory(graph)
    assert keep_apart(graph) == 0


def test_one_result_returned_twice_stays_one() -> None:
    def build(graph: fx.Graph, a: fx.Node, b: fx.Node) -> Any:
        total = call(graph, aten.add.Tensor, a, b)
        return total, total, call(graph, aten.t.default, total)

    graph = traced(build)
    note_memory(graph)
    assert keep_apart(graph) == 0


def test_two_results_that_became_one_are_taken_apart() -> None:
    def build(graph: fx.Graph, a: fx.Node, b: fx.Node) -> Any:
        total = call(graph, aten.add.Tensor, a, b)
        copy = call(graph, aten.clone.default, total)
        return total, copy, call(graph, aten.t.default, copy)

    graph = traced(build)
    note_memory(graph)
    drop(returned(graph)[1])
    assert keep_apart(graph) == 1
    first, second, third = returned(graph)
    assert first.target is aten.add.Tensor
    assert second.target is aten.clone.default
    assert third.target is aten.t.default
    assert third.args == (second,)


def test_parts_of_what_became_an_input_are_parts_of_one_copy() -> None:
    def build(graph: fx.Graph, a: fx.Node, b: fx.Node) -> Any:
        halves = call(graph, aten.split.Tensor, call(graph, aten.clone.default, a), 2)
        return tuple(call(graph, operator.getitem, halves, i) for i in (0, 1))

    graph = traced(build)
    note_memory(graph)
    drop(next(iter(graph.find_nodes(op="call_function", target=aten.clone.default))))
    assert keep_apart(graph) == 1
    (copy,) = graph.find_nodes(op="call_function", target=aten.clone.default)
    assert copy.args == (next(iter(graph.nodes)),)
    a, b = torch.zeros(4, 8), torch.ones(4, 8)
    found = fx.GraphModule({}, graph)(a, b)
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    assert found[0].untyped_storage().data_ptr() != a.untyped_storage().data_ptr()


def test_a_copy_of_one_input_may_not_become_another() -> None:
    def build(graph: fx.Graph, a: fx.Node, b: fx.Node) -> Any:
        return (call(graph, aten.view.default, a, [32]), b)

    graph = traced(build)
    note_memory(graph)
    view = returned(graph)[0]
    view.replace_input_with(view.args[0], graph.find_nodes(op="placeholder")[1])
    assert keep_apart(graph) == 1


def test_a_graph_that_was_never_noted_is_left_alone() -> None:
    graph = traced(lambda graph, a, b: (a, b))
    assert keep_apart(graph) == 0
