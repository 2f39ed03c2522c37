"""Size symbols: where a call shows them, which are tokens, and shapes that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from piecewise_backend.batch import FallbackReason
from piecewise_backend.sizes import Layout, SizeFunction, TokenDim, find_token_dim
from piecewise_backend.splitting import split_graph
from piecewise_backend.steps import SplitGraph
from tests.helpers import SPLIT_OPS, mark_dynamic, out_attn, rows, trace

OPS = torch.ops.pwtest

S, T = sympy.symbols("s t", integer=True, positive=True)


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        (sympy.Integer(3), {1: 3, 7: 3}),
        (2 * S + 1, {1: 3, 7: 15, 0: 1}),
        (S * S - S, {1: 0, 7: 42}),
        (sympy.Max(S, 4), {1: 4, 7: 7}),
        (sympy.Min(S, 4), {1: 1, 7: 4}),
    ],
)
def test_size_functions_compute(expression: sympy.Expr, values: dict[int, int]) -> None:
    function = SizeFunction((S,), (expression, S))
    assert {size: function((size,))[0] for size in values} == values


def test_size_functions_of_several_symbols_and_of_none() -> None:
    assert SizeFunction((S, T), (S - T, T * 2, sympy.Integer(1)))((5, 3)) == (2, 6, 1)
    assert SizeFunction((), (sympy.Integer(4),))(()) == (4,)
    assert SizeFunction((S,), ())((3,)) == ()


@pytest.mark.parametrize(
    ("function", "sizes", "expected"),
    [
        (lambda x: x[: x.shape[0] // 2] + 1, (7, 8, 1), [3, 4, 0]),
        (lambda x: x[::2] + 1, (7, 8, 1), [4, 4, 1]),
        (lambda x: torch.cat([x, x]) + 1, (7, 1), [14, 2]),
        (lambda x: x.view(-1) + 1, (7, 1), [28, 4]),
    ],
)
def test_shapes_follow_python_arithmetic(
    function: Callable[[Tensor], Tensor], sizes: Sequence[int], expected: list[int]
) -> None:
    graph, token_dim = cut(function, rows(6))
    name = graph.outputs[0].name
    layout = Layout.of(graph.pieces[-1].examples[name], token_dim)
    assert [layout.shape((size,))[0] for size in sizes] == expected


def cut(function: Any, *args: Any) -> tuple[SplitGraph, TokenDim]:
    """The split graph, and its token dimension as found during the trace."""
    seen: list[tuple[SplitGraph, TokenDim]] = []

    def look(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        graph = split_graph(gm, SPLIT_OPS)
        seen.append((graph, find_token_dim(graph, example_inputs)))
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=look, fullgraph=True)(*mark_dynamic(args))
    return seen[0]


def test_token_dimension_is_read_off_the_arguments() -> None:
    graph, token_dim = cut(lambda x: out_attn(x, x, x) + 1, rows(6))
    args = [rows(9) if isinstance(item.example, Tensor) else 9 for item in graph.inputs]
    assert token_dim.read(args) == (9,)
    assert token_dim.num_tokens((9,)) == 9
    assert token_dim.padded((9,), 16) == (16,)
    assert "x" in token_dim.description
    for place in token_dim.places:
        assert eval(place.source(), {"args": args}) == place.read(args) == 9


def test_graph_of_static_shapes_has_no_tokens() -> None:
    seen: list[TokenDim] = []

    def look(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        seen.append(find_token_dim(split_graph(gm, SPLIT_OPS), example_inputs))
        return gm.forward

    torch.compile(lambda x: x + 1, backend=look, fullgraph=True)(torch.ones(3, 4))
    assert seen[0].symbols == ()
    assert seen[0].num_tokens(()) == 0


def test_symbols_that_agree_at_the_trace_are_one_token_count() -> None:
    _, token_dim = cut(lambda x, y: (x + 1, y * 2), rows(6), rows(6, seed=1))
    assert len(token_dim.symbols) == 2
    assert token_dim.num_tokens((5, 5)) == 5
    assert token_dim.num_tokens((5, 6)) is FallbackReason.TOKEN_DIMS_DIFFER
    assert token_dim.padded((5, 5), 8) == (8, 8)


def test_symbols_that_differ_at_the_trace_are_a_problem() -> None:
    _, token_dim = cut(lambda x, y: (x + 1, y * 2), rows(6), rows(7))
    assert token_dim.num_tokens((6, 7)) is FallbackReason.SEVERAL_VARYING_DIMS
    assert token_dim.num_tokens((6, 6)) is FallbackReason.SEVERAL_VARYING_DIMS


def test_a_symbol_that_only_split_ops_see_is_no_token_count() -> None:
    def function(x: Tensor, offsets: Tensor) -> Any:
        return out_attn(x, x, x) + 1, OPS.fresh(offsets, offsets, offsets)

    _, token_dim = cut(function, rows(6), rows(7))
    assert len(token_dim.symbols) == 2
    assert len(token_dim.tokens) == 1
    assert token_dim.padded((6, 7), 8) in {(8, 7), (6, 8)}


@pytest.mark.parametrize(
    ("make", "at_3", "strides_at_3", "num_bytes"),
    [
        (lambda x: x + 1, (3, 4), (4, 1), 48),
        (lambda x: (x + 1).t(), (4, 3), (1, 4), 48),
        (lambda x: (x + 1).t().contiguous(), (4, 3), (3, 1), 48),
        (lambda x: (x + 1).view(-1, 2, 2).transpose(0, 1), (2, 3, 2), (2, 4, 1), 48),
        (lambda x: (x + 1)[:, 1:3], (3, 2), (4, 1), 40),
        (lambda x: (x + 1).sum(1, keepdim=True).expand(-1, 5), (3, 5), (1, 0), 12),
        (lambda x: (x + 1).sum(), (), (), 4),
        (lambda x: (x + 1).bfloat16(), (3, 4), (4, 1), 24),
    ],
)
def test_layouts_at_any_size(
    make: Callable[[Tensor], Tensor], at_3: Any, strides_at_3: Any, num_bytes: int
) -> None:
    graph, token_dim = cut(make, rows(6))
    layout = Layout.of(graph.pieces[-1].examples[graph.outputs[0].name], token_dim)
    assert layout.shape((3,)) == at_3
    assert layout.stride((3,)) == strides_at_3
    assert layout.num_bytes((3,)) == num_bytes
    assert layout.is_dynamic is (3 in at_3)
    padded = torch.empty_strided(layout.shape((8,)), layout.stride((8,)), dtype=layout.dtype)
    real = layout.rows(padded, (3,))
    assert tuple(real.shape) == at_3
    assert real.untyped_storage().data_ptr() == padded.untyped_storage().data_ptr()


def test_layout_of_no_tokens_has_no_bytes() -> None:
    graph, token_dim = cut(lambda x: x + 1, rows(6))
    layout = Layout.of(graph.pieces[0].examples[graph.outputs[0].name], token_dim)
    assert layout.num_bytes((0,)) == 0
    assert layout.rows(torch.empty(8, 4), (0,)).shape == (0, 4)


def test_tracing_helper_gives_graphs_with_symbols() -> None:
    gm = trace(lambda x: x + 1, rows(6))
    assert any(isinstance(node.meta["example_value"], torch.SymInt)
               for node in gm.graph.find_nodes(op="placeholder"))  # fmt: skip
