"""Where graphs are cut, what crosses a cut, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import piecewise_backend as pw
from piecewise_backend.render import sketch
from piecewise_backend.steps import Host, SplitGraph, Value, leaves_of
from tests.helpers import Decoder, compile, out_attn, quiet_fallbacks, rows, same, split, trace

OPS = torch.ops.pwtest


def test_each_attention_stands_alone() -> None:
    assert_expected_inline(
        sketch(split(Decoder(num_layers=2), rows(5))),
        """\
0 piece: linear chunk getitem getitem getitem empty_like
1 split op: pwtest::layer_attn
2 piece: linear add linear chunk getitem getitem getitem empty_like
3 split op: pwtest::layer_attn
4 piece: linear add""",
    )


def test_split_op_is_first() -> None:
    def function(x: Tensor) -> Tensor:
        OPS.double(x, x)
        return x * 2

    assert_expected_inline(
        sketch(split(function, rows(5))),
        """\
0 split op: pwtest::double
1 piece: mul""",
    )


def test_split_op_is_last() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        OPS.double(z, y)
        return z

    assert_expected_inline(
        sketch(split(function, rows(5), rows(5))),
        """\
0 piece: mul
1 split op: pwtest::double""",
    )


def test_graph_of_nothing_but_a_split_op() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        OPS.double(x, y)
        return x

    assert_expected_inline(
        sketch(split(function, rows(5), rows(5))), """0 split op: pwtest::double"""
    )


def test_no_empty_piece_between_adjacent_split_ops() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        OPS.double(x, y)
        OPS.double(y, z)
        return y + z

    assert_expected_inline(
        sketch(split(function, rows(5), rows(5), rows(5))),
        """\
0 split op: pwtest::double
1 split op: pwtest::double
2 piece: add""",
    )


def test_graph_without_split_ops_is_one_piece() -> None:
    assert_expected_inline(sketch(split(lambda x: x.sin() + 1, rows(5))), """0 piece: sin add""")


def test_allocations_are_pieces_of_their_own() -> None:
    def function(x: Tensor) -> Tensor:
        a = torch.empty_like(x)
        OPS.double(x, a)
        b, c = torch.empty_like(x), torch.empty_like(x)
        OPS.attn(a, a, x, b)
        OPS.double(b, c)
        return c

    assert_expected_inline(
        sketch(split(function, rows(5))),
        """\
0 piece: empty_like
1 split op: pwtest::double
2 piece: empty_like empty_like
3 split op: pwtest::attn
4 split op: pwtest::double""",
    )


def test_items_of_a_result_belong_to_the_split_op() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        a, b = OPS.pair(x * 2, y)
        c = OPS.fresh(a + 1, x, y)
        return b + c

    graph = split(function, rows(5), rows(5))
    assert_expected_inline(
        sketch(graph),
        """\
0 piece: mul
1 split op: pwtest::pair
2 piece: add
3 split op: pwtest::fresh
4 piece: add""",
    )
    assert [op.outputs for op in graph.split_ops] == [("a", "b"), ("c",)]


def test_unused_results_have_no_name() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        _, b = OPS.pair(x, y)
        OPS.fresh(x, x, y)
        return b + 1

    ops = split(function, rows(5), rows(5)).split_ops
    assert [(op.op_name, op.outputs[0]) for op in ops] == [
        ("pwtest::pair", None),
        ("pwtest::fresh", None),
    ]


@pytest.mark.parametrize(
    ("take", "nodes"),
    [
        (lambda t: t[0], "getitem add"),
        (lambda t: t[::2], "getitem add"),
        (lambda t: t[:, 1], "getitem add"),
        (lambda t: t[0][1:], "getitem getitem add"),
    ],
    ids=["row", "step", "column", "row then columns"],
)
def test_rows_of_a_single_result_are_taken_in_a_piece(
    take: Callable[[Tensor], Tensor], nodes: str
) -> None:
    graph = split(lambda x: take(OPS.fresh(x, x, x)) + 1, rows(6))
    assert sketch(graph) == f"0 split op: pwtest::fresh\n1 piece: {nodes}"


def test_sizes_never_cross_a_cut() -> None:
    def function(x: Tensor) -> Any:
        y = torch.cat([x, x])
        size = y.size()
        n, width = size
        a = OPS.fresh(y, y, y)
        b = OPS.fresh(a.view(size) + a.new_zeros(size), y, torch.ones(1, 1).expand(*size))
        return b.view(n // 2, -1), size, n * 3 + 1, width

    graph = split(function, rows(5))
    assert_expected_inline(
        sketch(graph),
        """\
0 piece: cat
1 split op: pwtest::fresh
2 piece: mul view mul new_zeros add ones mul expand
3 split op: pwtest::fresh
4 piece: view""",
    )
    assert all(
        isinstance(piece.examples[name], Tensor) for piece in graph.pieces for name in piece.outputs
    )
    hosts = [str(leaf.expr) for leaf in leaves_of(graph.outputs) if isinstance(leaf, Host)]
    (symbol,) = map(str, graph.symbols)
    assert hosts == [f"2*{symbol}", f"6*{symbol} + 1"]


def test_piece_that_would_only_compute_sizes_does_not_exist() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> Any:
        OPS.double(x, y)
        n = x.shape[0] * 3
        OPS.double(y, z)
        return z.new_zeros(n), n

    graph = split(function, rows(5), rows(5), rows(5))
    assert_expected_inline(
        sketch(graph),
        """\
0 split op: pwtest::double
1 split op: pwtest::double
2 piece: mul new_zeros""",
    )


def test_split_op_gets_numbers_as_host_expressions() -> None:
    def function(x: Tensor) -> Tensor:
        n = x.shape[0]
        return OPS.indexed(x * 2, n * 2 + 1) + 1

    graph = split(function, rows(5), ops=["pwtest::indexed"])
    (op,) = graph.split_ops
    (symbol,) = graph.symbols
    assert op.args == (Value("mul"), Host(2 * symbol + 1))


def test_constants_and_keywords_of_a_split_op_are_kept() -> None:
    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        OPS.keyword(x + 1, scale=3.0, out=out)
        OPS.layer_attn(x, x, out, out, "layers.7")
        return out

    keyword, attention = split(function, rows(5)).split_ops
    assert (keyword.args, dict(keyword.kwargs)) == (
        (Value("add"),),
        {"scale": 3.0, "out": Value("out")},
    )
    assert attention.args[-1] == "layers.7"


def test_location_is_the_users_line() -> None:
    graph = split(lambda x: out_attn(x, x, x), rows(5))
    assert "helpers.py" in graph.split_ops[0].location
    assert "in out_attn" in graph.split_ops[0].location


@pytest.mark.parametrize(
    "op",
    ["aten::relu", "aten::add_", "aten::softmax"],
)
def test_methods_and_functions_can_be_split_ops(op: str) -> None:
    def function(x: Tensor) -> Tensor:
        y = (x * 2).add_(1)
        return F.softmax(y.relu(), -1) + torch.softmax(y, -1) + y.softmax(-1) + F.relu(y)

    graph = split(function, rows(5), ops=[op])
    assert {step.op_name for step in graph.split_ops} == {op}
    compiled = compile(function, splitting_ops=[op])
    with torch.no_grad():
        for seed in range(4):
            x = rows(4, seed=seed)
            same(compiled(x), function(x), f"call {seed}")
    assert len(graph.split_ops) == {"aten::relu": 2, "aten::add_": 1, "aten::softmax": 3}[op]


@pytest.mark.parametrize("ops", [["pwtest::attn"], ["pwtest::attn.default"]])
def test_overload_and_packet_names_cut_alike(ops: list[str]) -> None:
    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.pwtest.attn.default(x, x, x, out)
        return out_attn(out, x, x)

    assert len(split(function, rows(5), ops=ops).split_ops) == 2


# Purity


def test_split_graph_is_pure() -> None:
    gm = trace(Decoder(num_layers=2), rows(5))
    before = gm.print_readable(print_output=False)
    first, second = pw.split_graph(gm, ["pwtest::layer_attn"]), None
    second = pw.split_graph(gm, ["pwtest::layer_attn"])
    assert gm.print_readable(print_output=False) == before
    assert sketch(first) == sketch(second)
    assert _shapes(first) == _shapes(second)
    assert sketch(pw.split_graph(gm, [])).count("piece") == 1


def _shapes(graph: SplitGraph) -> list[Any]:
    return [(step.outputs, sorted(step.examples)) for step in graph.steps]


def test_pieces_called_in_order_give_eagers_numbers() -> None:
    model = Decoder(num_layers=2)
    gm = trace(model, rows(5))
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    graph = pw.split_graph(gm, ["pwtest::layer_attn"])
    assert [item.name for item in graph.inputs] == names


# What is refused


@pytest.mark.parametrize(
    ("region", "name"),
    [
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "autocast"),
        (torch.inference_mode, "inference_mode"),
    ],
)
def test_region_that_spans_a_split_op_is_refused(region: Callable[[], Any], name: str) -> None:
    def function(x: Tensor) -> Tensor:
        with region():
            y = x @ x.t()
            out = out_attn(y, y, y)
            return out @ y

    with torch.no_grad(), pytest.raises(pw.SplitError, match=f"{name} region spans") as error:
        compile(function)(rows(4))
    assert "close it before the op" in str(error.value)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("region", [torch.no_grad, torch.enable_grad])
def test_gradient_mode_may_change_around_a_split_op(region: Any, outside: bool) -> None:
    def function(x: Tensor) -> Tensor:
        y = x + 1
        with region():
            out = out_attn(y, y, y) * 2
            out = out_attn(out, y, y)
        return out + 1

    compiled = compile(function)
    with torch.set_grad_enabled(outside):
        for seed in range(4):
            x = rows(4, seed=seed)
            same(compiled(x), function(x), f"call {seed}")
            assert torch.is_grad_enabled() is outside


def test_autocast_inside_of_a_piece_is_kept() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.t()
        out = out_attn(y, y, y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return out @ y

    compiled = compile(function)
    with torch.no_grad():
        for seed in range(4):
            x = rows(4, seed=seed)
            same(compiled(x), function(x), f"call {seed}")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: out_attn(x, x, x) + x[: int(x.sum().long().clamp(1, 1).item())],
        lambda x: out_attn(x, x, x)[x[:, 0] > 3],
        lambda x: out_attn(x, x, x).sum() + torch.nonzero(x).sum(),
        lambda x: out_attn(x, x, x) * x.sum().item(),
    ],
    ids=["item as a size", "boolean mask", "nonzero", "item as a number"],
)
def test_data_dependent_values_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    capture = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with (
        torch._dynamo.config.patch(capture),
        torch.no_grad(),
        pytest.raises(pw.SplitError, match="depends on data") as error,
    ):
        compile(function)(rows(4))
    assert "test_splitting.py" in str(error.value)


def test_registered_op_that_would_be_frozen_in_a_piece_is_refused() -> None:
    pw.register_splitting_op("pwtest::attn")
    with (
        torch.no_grad(),
        pytest.raises(
            pw.SplitError, match=r"'pwtest::attn' is a registered splitting op but splitting_ops="
        ),
    ):
        compile(lambda x: out_attn(x, x, x), splitting_ops=["pwtest::fresh"])(rows(4))


def test_registered_op_may_stay_uncut_if_the_caller_allows() -> None:
    pw.register_splitting_op("pwtest::attn")
    gm = trace(lambda x: out_attn(x, x, x), rows(4))
    assert len(pw.split_graph(gm, [], allow_uncut=True).steps) == 1


def test_registered_ops_are_the_default() -> None:
    pw.register_splitting_op("pwtest::attn")
    compiled = compile(lambda x: out_attn(x, x, x) + 1, splitting_ops=None)
    with torch.no_grad():
        compiled(rows(4))
    assert pw.report(compiled).graphs[0].counts["num_piecewise_graphs_seen"] == 3


# The "attention" preset


def heads(size: int, seed: int = 0) -> Tensor:
    return rows(size, 16, seed=seed).view(1, size, 2, 8).transpose(1, 2)


def _attend(x: Tensor) -> Tensor:
    q = x * 2
    out = F.scaled_dot_product_attention(q, x, x + 1, is_causal=True)
    return out.transpose(1, 2).reshape(x.shape[2], 16) + 1


def test_preset_cuts_at_scaled_dot_product_attention() -> None:
    assert_expected_inline(
        sketch(split(_attend, heads(4), ops=["attention"])),
        """\
0 piece: mul add
1 split op: aten::scaled_dot_product_attention
2 piece: transpose reshape add""",
    )


def test_preset_numbers_are_eagers() -> None:
    compiled = compile(_attend, splitting_ops="attention")
    with torch.no_grad(), quiet_fallbacks():
        for seed in range(3):
            for size in (8, 5, 8, 6):
                x = heads(size, seed)
                torch._dynamo.maybe_mark_dynamic(x, 2)
                same(compiled(x), _attend(x), f"{size} tokens")
    (graph,) = pw.report(compiled).graphs
    assert graph.num_replays > 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_preset_cuts_at_flex_attention() -> None:
    def function(x: Tensor) -> Tensor:
        return flex_attention(x * 2, x, x + 1).transpose(1, 2) + 1

    graph = split(function, heads(16), ops=["attention"])
    assert [op.op_name for op in graph.split_ops] == ["higher_order::flex_attention"]
    compiled = compile(function, splitting_ops="attention")
    with torch.no_grad():
        for seed in range(4):
            x = heads(16, seed)
            same(compiled(x), function(x), f"call {seed}")
    (report,) = pw.report(compiled).graphs
    assert report.num_replays > 0
