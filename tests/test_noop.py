"""What no-op elimination takes out, and what it must leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import piecewise_backend as pw
from piecewise_backend import _torch
from piecewise_backend.passes import PassList, passes_for
from piecewise_backend.passes.noops import eliminate_noops
from tests.helpers import compile, out_attn, same

aten = torch.ops.aten


def graph_of(function: Callable[..., Any], *args: Any, sizes: str = "symbolic") -> fx.GraphModule:
    return make_fx(function, tracing_mode=sizes)(*args)


def eliminated(function: Callable[..., Any], *args: Any, sizes: str = "symbolic") -> list[str]:
    """The ops that are left; numbers, layouts and validity are compared on the way."""
    gm = graph_of(function, *args, sizes=sizes)
    (eliminate,) = passes_for(switches={"read_before_write": False})
    PassList([eliminate], validate=True).run(gm.graph, "a test")
    gm.recompile()
    got, expected = gm(*args), function(*args)
    same(got, expected, "after elimination")
    for a, b in zip(_tensors(got), _tensors(expected), strict=True):
        assert a.stride() == b.stride()
        assert _aliased(a, args) == _aliased(b, args)
    called = [n for n in gm.graph.nodes if n.op == "call_function" and n.users]
    return [_torch.target_name(n) for n in called if "sym_size" not in str(n.target)]


def _tensors(values: Any) -> list[Tensor]:
    return list(values) if isinstance(values, tuple | list) else [values]


def _aliased(value: Tensor, args: Any) -> list[bool]:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return [value.data_ptr() == arg.data_ptr() for arg in tensors]


x = torch.arange(24.0).reshape(6, 4)
VIEW, SIN, COS = "aten.view.default", "aten.sin.default", "aten.cos.default"
SLICE, SCATTER = "aten.slice.Tensor", "aten.slice_scatter.default"


@pytest.mark.parametrize("sizes", ["symbolic", "fake"])
@pytest.mark.parametrize(
    ("function", "left"),
    [
        # chains fold to one reshape of the base
        (lambda x: x.sin().view(-1).view(2, -1).view(3, -1).cos(), [SIN, VIEW, COS]),
        (lambda x: aten._unsafe_view(x.sin().view(-1), [3, 8]).cos(), ["_unsafe_view"]),
        (lambda x: aten.reshape(x.sin().view(-1), [3, 8]).cos(), None),
        # and there and back is nothing
        (lambda x: x.sin().view(-1).view(x.shape).cos(), [SIN, COS]),
        (lambda x: x.sin().view(-1).view(2, -1).view(x.shape[0], -1).cos(), [SIN, COS]),
        # the same shape, in every spelling
        (lambda x: x.sin().view(x.shape).cos(), [SIN, COS]),
        (lambda x: x.sin().view(-1, 4).cos(), [SIN, COS]),
        (lambda x: x.sin().view(x.shape[0], -1).cos(), [SIN, COS]),
        # another shape stays
        (lambda x: x.sin().view(-1).cos(), [SIN, VIEW, COS]),
        (lambda x: x.sin().view(x.shape[1], -1).cos(), [SIN, VIEW, COS]),
        (lambda x: x.sin().view(1, *x.shape).cos(), [SIN, VIEW, COS]),
        # both ends of a chain in use
        (lambda x: (x.sin().view(-1).cos(), x.sin().view(-1).view(3, -1).cos()), None),
    ],
)
def test_reshapes(function: Any, left: list[str] | None, sizes: str) -> None:
    found = eliminated(function, x, sizes=sizes)
    if left is None:
        return
    if left == ["_unsafe_view"]:
        assert found == [SIN, "aten._unsafe_view.default", COS]
    else:
        assert found == left


@pytest.mark.parametrize(
    ("bounds", "is_full"),
    [
        ((0, 0, 2**63 - 1), True),
        ((1, 0, 2**63 - 1), True),
        ((-1, 0, 2**63 - 1), True),
        ((1, 0, 4), True),
        ((1, 0, 9), True),
        ((1, None, None), True),
        ((), True),
        ((1, 0, -1), False),
        ((1, 1, 4), False),
        ((1, -1, 4), False),
        ((1, -4, 4), False),  # it is, but nobody writes that
        ((1, 0, 3), False),
        ((1, 0, 4, 2), False),
        ((0, 0, -1), False),
    ],
)
def test_slices(bounds: tuple[Any, ...], is_full: bool) -> None:
    static = eliminated(lambda x: aten.slice(x.sin(), *bounds).cos(), x, sizes="fake")
    assert static == ([SIN, COS] if is_full else [SIN, SLICE, COS])


@pytest.mark.parametrize(
    ("function", "is_full"),
    [
        (lambda x: aten.slice(x.sin(), 0, 0, x.shape[0]), True),
        (lambda x: aten.slice(x.sin(), 0, 0, 2**63 - 1), True),
        (lambda x: aten.slice(x.sin(), 0, 0, x.shape[1]), False),
        (lambda x: aten.slice(x.sin(), 0, 0, x.shape[0] - 1), False),
        (lambda x: aten.slice(x.sin(), 0, 0, 6), False),  # of this example only
        (lambda x: aten.slice(x.sin(), 0, 0, -1), False),
    ],
)
def test_slices_of_symbolic_sizes(function: Any, is_full: bool) -> None:
    """Nothing is learnt from the size that a symbol happens to have."""
    gm = graph_of(lambda x: function(x).cos(), x)
    mode = _torch.fake_mode_of(gm.graph)
    assert mode is not None
    known = len(mode.shape_env.guards)  # type: ignore[union-attr]
    assert eliminate_noops(gm.graph) == is_full
    assert len(mode.shape_env.guards) == known, "an assumption was added"  # type: ignore[union-attr]


@pytest.mark.parametrize("sizes", ["symbolic", "fake"])
@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: aten.slice_scatter(x.cos(), x.sin()).exp(), [SIN]),
        (lambda x: aten.slice_scatter(x.cos(), x.sin(), 0, 0, x.shape[0]).exp(), [SIN]),
        (lambda x: aten.slice_scatter(x.cos(), x.sin(), 1, 0, 2**63 - 1).exp(), [SIN]),
        (lambda x: aten.slice_scatter(x.cos(), x.sin()[:, :3], 1, 0, -1).exp(), None),
        (lambda x: aten.slice_scatter(x.cos(), x.sin()[:, :2], 1, 0, 4, 2).exp(), None),
        # another layout
        (lambda x: aten.slice_scatter(x.cos(), x.view(4, 6).t().sin()).exp(), None),
        # a fresh tensor is returned, never an input
        (lambda x: aten.slice_scatter(x.cos(), x), None),
    ],
)
def test_slice_scatters(function: Any, left: list[str] | None, sizes: str) -> None:
    found = eliminated(function, x, sizes=sizes)
    if left is None:
        assert SCATTER in found
    else:
        assert found == [*left, "aten.exp.default"]


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        # copies to another layout, or to memory of their own
        (lambda x: x.sin().t().contiguous().cos(), "aten.clone.default"),
        (lambda x: x.sin().clone().cos(), "aten.clone.default"),
        (lambda x: x.sin().view(1, 2, 3, 4).clone(memory_format=torch.channels_last), "aten.clone"),
        # a reshape that copies makes a tensor of another layout; folding would lose that
        (lambda x: aten.reshape(aten.reshape(x.t(), [24]), [4, 6]).sin(), "aten"),
        (
            lambda x: aten.clone(x.t(), memory_format=torch.contiguous_format).view(4, 6),
            "aten.clone",
        ),
    ],
)
def test_copies_stay(function: Any, kept: str) -> None:
    assert any(op.startswith(kept) for op in eliminated(function, x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(x.shape),
        lambda x: (x.view(x.shape), x),
        lambda x: aten.slice(x),
        lambda x: (s := x.sin(), s.view(s.shape)),
        lambda x: x.view(-1).view(x.shape),
        lambda x: aten.slice_scatter(x, x.sin()),
    ],
)
def test_what_is_returned_stays(function: Any) -> None:
    """The caller may tell a tensor from a view of it."""
    gm = graph_of(function, x)
    returned = gm.graph.output_node().args[0]
    eliminate_noops(gm.graph)
    assert gm.graph.output_node().args[0] == returned
    eliminated(function, x)


def test_several_readers_of_the_inner_reshape_keep_it() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.sin().view(-1)
        return flat.cos(), flat.view(3, 8).exp()

    assert eliminated(model, x) == [SIN, VIEW, COS, VIEW, "aten.exp.default"]
    gm = graph_of(model, x)
    eliminate_noops(gm.graph)
    views = gm.graph.find_nodes(op="call_function", target=aten.view.default)
    assert {node.args[0].name for node in views} == {"sin"}


@pytest.mark.usefixtures("inductor_cache")
def test_inside_inductor_with_a_symbolic_token_count() -> None:
    """What the pass sees, and what it leaves."""

    def model(x: Tensor) -> Tensor:
        y = torch.ops.pwtest.indexed(x.sin(), 1)
        y = torch.ops.pwtest.indexed(y.view(-1).view(-1, 2, 2).view(x.shape[0], -1), 1)
        return out_attn(y, y, y)

    seen: list[list[str]] = []

    def look(graph: fx.Graph) -> None:
        seen.append([_torch.target_name(n) for n in graph.nodes if n.op == "call_function"])

    pw.register_pass(look, name="before", before="eliminate_noops")
    compiled = compile(model, compiler="inductor", passes=[look])
    given = torch.arange(24.0).reshape(6, 4)
    torch._dynamo.maybe_mark_dynamic(given, 0)
    with torch.no_grad():
        same(compiled(given), model(given), "compiled")
    reshapes = [sum("view" in op or "reshape" in op for op in ops) for ops in seen]
    assert reshapes == [3, 0], "Inductor folds none of them by itself"
