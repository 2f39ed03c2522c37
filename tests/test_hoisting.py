"""Constants that differ by layer become inputs, and every layer keeps its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend.canonical import identify
from tests.helpers import compile, mark_dynamic, out_attn, quiet_fallbacks, rows, split

OPS = torch.ops.pwtest

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def written(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`x` changed in place by an op with constants."""
    x = x.clone()
    OPS.optional(x, *args, **kwargs)
    return x


PER_LAYER: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a factor": lambda x, i: x * (0.37 + 0.1 * i),
    "a factor on the left": lambda x, i: (0.37 + 0.1 * i) * x,
    "a divisor": lambda x, i: x / (1.7 + i),
    "a dividend": lambda x, i: (1.7 + i) / x,
    "a factor through torch.mul": lambda x, i: torch.mul(x, 0.37 + 0.1 * i),
    "a divisor through torch.div": lambda x, i: torch.div(x, 1.7 + i),
    "a factor through a method": lambda x, i: x.mul(0.37 + 0.1 * i),
    "a divisor through a method": lambda x, i: x.div(1.7 + i),
    "two factors": lambda x, i: x * (0.37 + i) + x.sin() * (0.11 + i),
    "the same factor twice": lambda x, i: x * (0.37 + i) + x.sin() * (0.37 + i),
    "a tiny factor": lambda x, i: x * (1e-30 * (i + 1)) * 1e10,
    "a factor of a transposed tensor": lambda x, i: (x.t() * (0.37 + i)).t(),
    "a factor of a reduction": lambda x, i: x + x.sum(-1, keepdim=True) * (0.03 * (i + 1)),
    "a string": lambda x, i: OPS.named(x, f"layers.{i}"),
    "a string by keyword": lambda x, i: OPS.named(x=x, name=f"layers.{i}"),
    "an integer": lambda x, i: OPS.indexed(x, i),
    "a large integer": lambda x, i: OPS.indexed(x, i * 1000 - 1500),
    "a float": lambda x, i: OPS.scaled(x, 0.37 + i),
    "a keyword-only float": lambda x, i: OPS.scaled(x, 0.5, bias=0.25 * i),
    "two floats": lambda x, i: OPS.scaled(x, 0.37 + i, bias=0.25 * i),
    "a string, an integer and a factor": lambda x, i: OPS.indexed(
        OPS.named(x * (0.3 + i), f"layers.{i}"), i + 2
    ),
    "an optional string": lambda x, i: written(x, f"layers.{i}"),
    "an optional string and an optional float": lambda x, i: written(x, f"{i}", 0.37 + i),
    "an optional float by keyword": lambda x, i: written(x, scale=0.37 + i),
    "zero and one among integers": lambda x, i: OPS.indexed(x, i % 2),
    "infinities": lambda x, i: (x * float("inf" if i % 2 else "-inf")).clamp(-5, 5),
}


def model(layer: Callable[[Tensor, int], Tensor], num_layers: int) -> Callable[[Tensor], Tensor]:
    """The layer after each of `num_layers` attentions, kept in range."""

    def function(x: Tensor) -> Tensor:
        x = x.sigmoid()
        for index in range(num_layers):
            x = layer(out_attn(x, x, x), index).clamp(-3, 3)
        return out_attn(x, x, x).tanh()

    return function


@pytest.mark.parametrize("num_layers", [2, 8])
@pytest.mark.parametrize("what", PER_LAYER)
def test_distinct_pieces_stay_three(what: str, num_layers: int) -> None:
    graph = split(model(PER_LAYER[what], num_layers), rows(5))
    assert len({i.distinct.index for i in identify(graph.pieces)}) == 3


# Precision matters where pieces do the arithmetic themselves, not in the custom op.
NUMBERS = [
    pytest.param(what, dtype, id=f"{what}, {dtype}")
    for what in PER_LAYER
    for dtype in DTYPES
    if dtype == torch.bfloat16 or any(w in what for w in ("factor", "divi", "infinities"))
]


@pytest.mark.parametrize(("what", "dtype"), NUMBERS)
def test_numbers_of_every_layer_are_eagers_to_the_bit(what: str, dtype: torch.dtype) -> None:
    function = model(PER_LAYER[what], 3)
    compiled = compile(function, cudagraph_capture_sizes=[4])
    with torch.no_grad(), quiet_fallbacks():
        for seed in range(3):
            for size in (4, 3):
                x = rows(size, seed=seed, dtype=dtype)
                got, expected = compiled(*mark_dynamic((x,))), function(x)
                assert got.dtype == dtype
                assert torch.equal(got, expected), f"call {seed} of size {size}"
    (graph,) = pw.report(compiled).graphs
    assert graph.num_replays > 0
    assert graph.padding_unsafe == {}


@pytest.mark.parametrize(
    ("what", "num_slots"),
    [("a factor", 1), ("the same factor twice", 2), ("two floats", 2), ("an integer", 1)],
)
def test_only_what_differs_becomes_an_input(what: str, num_slots: int) -> None:
    middle = identify(split(model(PER_LAYER[what], 2), rows(5)).pieces)[1]
    assert len(middle.inputs) - len(middle.piece.inputs) == num_slots


def test_equal_constants_stay_constants() -> None:
    def layer(x: Tensor, index: int) -> Tensor:
        return OPS.scaled(OPS.named(x * 0.5, "all"), 2.0)

    for instance in identify(split(model(layer, 3), rows(5)).pieces):
        assert instance.inputs == instance.piece.inputs


def test_integer_factors_are_not_hoisted() -> None:
    found = identify(split(model(lambda x, i: x * (i + 2), 3), rows(5)).pieces)
    assert len({i.distinct.index for i in found}) == 5


def test_integer_tensor_times_a_float_keeps_its_dtype() -> None:
    def function(x: Tensor) -> Any:
        outputs = []
        for index in range(3):
            y = OPS.fresh(x, x, x)
            outputs.append(y.long() * (0.37 + index))
        return OPS.fresh(x, x, x), outputs

    compiled = compile(function)
    with torch.no_grad():
        for seed in range(3):
            x = rows(4, seed=seed)
            for got, expected in zip(compiled(x)[1], function(x)[1], strict=True):
                assert got.dtype == torch.float32
                assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_factor_is_rounded_as_eager_rounds_it(dtype: torch.dtype) -> None:
    """0.1 has no exact half; a factor converted to half first would give other numbers."""

    def layer(x: Tensor, index: int) -> Tensor:
        return x * (0.1 + index * 1e-4)

    function = model(layer, 3)
    compiled = compile(function, cudagraph_capture_sizes=[64])
    with torch.no_grad():
        for seed in range(4):
            x = rows(64, 64, seed=seed, dtype=dtype)
            assert torch.equal(compiled(x), function(x))


def test_scale_of_a_tensor_that_stays_in_place() -> None:
    def function(x: Tensor) -> Tensor:
        for index in range(3):
            x = out_attn(x, x, x)
            x.mul_(0.3 + index)
            x *= 0.5 + index
        return out_attn(x, x, x)

    compiled = compile(function)
    with torch.no_grad():
        for seed in range(4):
            x = rows(4, seed=seed)
            assert torch.equal(compiled(x), function(x))


def test_zero_dimensional_operand_does_not_lift_the_result() -> None:
    def layer(x: Tensor, index: int) -> Tensor:
        scale = x.sum() * (0.01 * (index + 1))
        return x * scale

    function = model(layer, 3)
    for dtype in DTYPES:
        torch._dynamo.reset()
        compiled = compile(function, cudagraph_capture_sizes=[4])
        with torch.no_grad():
            for seed in range(3):
                x = rows(4, seed=seed, dtype=dtype)
                got = compiled(x)
                assert got.dtype == dtype
                assert torch.equal(got, function(x))


@pytest.mark.usefixtures("inductor_cache")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor_compiles_three_pieces_whatever_the_depth(dtype: torch.dtype) -> None:
    layer = PER_LAYER["a string, an integer and a factor"]
    function = model(layer, 6)
    compiled = compile(function, compiler="inductor", cudagraph_capture_sizes=[4])
    with (
        torch.no_grad(),
        pw.compilation_counter.expect(
            num_graphs_seen=1,
            num_piecewise_graphs_seen=15,
            num_piecewise_capturable_graphs_seen=8,
            num_inductor_compiles=3,
            num_cudagraph_captured=8,
        ),
    ):
        pw.warmup(compiled, lambda descriptor: (rows(descriptor.num_tokens, dtype=dtype),))
    with torch.no_grad():
        for size in (1, 3, 4):
            x = rows(size, seed=5, dtype=dtype)
            torch.testing.assert_close(compiled(x), function(x))


def defined(more: str = "", factor: float = 1.0, tags: tuple[torch.Tag, ...] = ()) -> Any:
    """An op with a name for each layer, of the library that is returned."""
    library = torch.library.Library("pwhoist", "FRAGMENT")
    library.define(f"layer(Tensor x, str name{more}) -> Tensor", tags=tags)

    def kernel(x: Tensor, name: str, power: int = 1) -> Tensor:
        return x * (factor * int(name)) ** power

    library.impl("layer", kernel, "CompositeExplicitAutograd")
    return library


def layers(x: Tensor) -> Tensor:
    """Three layers that differ in a name."""
    for name in "123":
        x = torch.ops.pwhoist.layer(OPS.fresh(x, x, x), name)
    return x


def twins() -> set[Any]:
    """What the pieces of `layers` call in place of the op."""
    targets = [
        node.target
        for piece in {
            i.distinct.index: i.distinct for i in identify(split(layers, rows(5)).pieces)
        }.values()
        for node in piece.module.graph.nodes
        if node.op == "call_function"
    ]
    return {target for target in targets if getattr(target, "namespace", "") == "piecewise_hoisted"}


def test_an_op_that_is_defined_again_has_its_constants_hoisted_again() -> None:
    first = None
    for more, factor in (("", 1.0), ("", 2.0), (", int power=2", 3.0)):
        library = defined(more, factor)
        try:
            torch._dynamo.reset()
            compiled = compile(layers)
            with quiet_fallbacks():
                torch.testing.assert_close(compiled(rows(5)), layers(rows(5)))
                if first is not None and not more:  # which goes on calling the op by its name
                    torch.testing.assert_close(first(rows(5)), layers(rows(5)))
            first = compiled
        finally:
            library._destroy()


def test_what_stands_for_an_op_has_its_tags() -> None:
    for tags in ((), (torch.Tag.flexible_layout,), (torch.Tag.needs_fixed_stride_order,)):
        library = defined(tags=tags)
        try:
            (twin,) = twins()
            assert tuple(twin.tags) == tags
        finally:
            library._destroy()
