"""Which pieces are the same, and which only look alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_backend as pw
from piecewise_backend.canonical import Instance, identify
from tests.helpers import Decoder, compile, mark_dynamic, out_attn, rows, same, split

OPS = torch.ops.pwtest

Layer = Callable[[Tensor], Tensor]


def layers(*layer: Layer) -> Callable[[Tensor], Tensor]:
    """Each layer, then attention; the first and the last piece are made distinct."""

    def function(x: Tensor) -> Tensor:
        x = x.sigmoid()
        for one in layer:
            x = one(out_attn(x, x, x))
        return out_attn(x, x, x).tanh()

    return function


def instances(function: Any, *args: Any) -> tuple[Instance, ...]:
    return identify(split(function, *(args or (rows(5),))).pieces)


def num_distinct(function: Any, *args: Any) -> int:
    return len({instance.distinct.index for instance in instances(function, *args)})


def num_middle(*layer: Layer) -> int:
    """Distinct pieces among the middle ones."""
    return num_distinct(layers(*layer)) - 2


@pytest.mark.parametrize("num_layers", [2, 3, 8])
def test_depth_does_not_change_the_number_of_distinct_pieces(num_layers: int) -> None:
    found = instances(Decoder(num_layers), rows(5))
    assert len(found) == num_layers + 1
    assert [i.distinct.index for i in found] == [0, *[1] * (num_layers - 1), 2]


def test_names_and_positions_do_not_matter() -> None:
    def first(x: Tensor) -> Tensor:
        alpha = x * 2
        return alpha + 1

    def second(y: Tensor) -> Tensor:
        beta_with_another_name = y * 2
        return beta_with_another_name + 1

    assert num_middle(first, second, first) == 1


def test_instances_of_a_distinct_piece_get_their_own_inputs() -> None:
    found = instances(Decoder(3), rows(5))
    middle = [instance for instance in found if instance.distinct.index == 1]
    assert middle[0].inputs != middle[1].inputs
    assert all(i.inputs == i.piece.inputs for i in middle)


def _bias(x: Tensor) -> Tensor:
    return nn.functional.linear(x, torch.ones(4, 4), torch.ones(4))


def _no_bias(x: Tensor) -> Tensor:
    return nn.functional.linear(x, torch.ones(4, 4))


ALMOST_ALIKE: dict[str, tuple[Layer, Layer]] = {
    "additive constants": (lambda x: x + 1e-5, lambda x: x + 1e-6),
    "epsilons": (
        lambda x: nn.functional.layer_norm(x, (4,), eps=1e-5),
        lambda x: nn.functional.layer_norm(x, (4,), eps=1e-6),
    ),
    "integer constants": (lambda x: x + 1, lambda x: x + 2),
    "an integer and a float": (lambda x: x + 1, lambda x: x + 1.0),
    "positive and negative zero": (lambda x: x.clamp(0.0), lambda x: x.clamp(-0.0)),
    "integer factors": (lambda x: x * 2, lambda x: x * 3),
    "dims": (lambda x: x + x.sum(-1, keepdim=True), lambda x: x + x.sum(0, keepdim=True)),
    "dtypes": (
        lambda x: x.to(torch.bfloat16).to(torch.float32),
        lambda x: x.to(torch.float16).to(torch.float32),
    ),
    "bias and none": (_bias, _no_bias),
    "operators": (torch.sin, torch.cos),
    "a function and its in-place twin": (lambda x: x.relu() + 1, lambda x: x.relu_() + 1),
    "argument order": (lambda x: x.sin() - x, lambda x: x - x.sin()),
    "slices": (lambda x: x[:, :2].repeat(1, 2), lambda x: x[:, 2:].repeat(1, 2)),
    "constant tensors": (
        lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0, 5.0]),
    ),
    "strings of torch ops": (
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: torch.div(x, 2, rounding_mode="trunc"),
    ),
    "activations": (
        lambda x: nn.functional.gelu(x, approximate="tanh"),
        lambda x: nn.functional.gelu(x, approximate="none"),
    ),
    "which custom op": (lambda x: OPS.named(x, "1"), lambda x: OPS.indexed(x, 1)),
    "shapes that a custom op makes of its integer": (
        lambda x: OPS.widen(x, 2).sum(-1, keepdim=True) + x,
        lambda x: OPS.widen(x, 3).sum(-1, keepdim=True) + x,
    ),
    "outputs": (lambda x: x.sin().cos(), lambda x: x.sin() + x.sin().cos()),
}


@pytest.mark.parametrize("what", ALMOST_ALIKE)
def test_pieces_that_differ_stay_distinct(what: str) -> None:
    one, other = ALMOST_ALIKE[what]
    assert num_middle(one, other, one) == 2


@pytest.mark.parametrize("what", ALMOST_ALIKE)
def test_distinct_pieces_give_each_layer_its_numbers(what: str) -> None:
    one, other = ALMOST_ALIKE[what]
    function = layers(one, other, one)
    compiled = compile(function)
    with torch.no_grad():
        for seed in range(3):
            x = rows(4, seed=seed)
            same(compiled(*mark_dynamic((x,))), function(x), f"call {seed}")


class Norms(nn.Module):
    """Layers whose parameters differ in what `change` does to one of them."""

    def __init__(self, change: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        change(self.layers[1])
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sigmoid()
        for layer in self.layers:
            y = out_attn(x, x, x)
            x = nn.functional.linear(y, layer.weight.to(y.dtype), layer.bias)
        return out_attn(x, x, x).tanh()


def _transposed(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.t().contiguous().t())


def _wide(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.double())


def _without_bias(layer: nn.Linear) -> None:
    layer.bias = None


@pytest.mark.parametrize(
    ("change", "expected"),
    [(lambda layer: None, 3), (_transposed, 4), (_wide, 4), (_without_bias, 4)],
    ids=["nothing", "strides of a weight", "dtype of a weight", "no bias"],
)
def test_one_parameter_that_differs_makes_a_piece_distinct(change: Any, expected: int) -> None:
    model = Norms(change)
    assert num_distinct(model, rows(5)) == expected
    compiled = compile(model)
    torch._dynamo.reset()
    with torch.no_grad():
        for seed in range(3):
            x = rows(4, seed=seed)
            same(compiled(*mark_dynamic((x,))), model(x), f"call {seed}")


def test_inputs_that_alias_make_a_piece_distinct() -> None:
    def function(x: Tensor) -> Tensor:
        a, b = x.sin(), x.cos()
        out_attn(x, x, x)
        y = a.add_(1) + b
        out_attn(y, y, y)
        c = y * 2
        d = c[:]
        out_attn(c, c, c)
        z = c.add_(1) + d
        return out_attn(z, z, z)

    found = instances(function)
    texts = [[n.target for n in i.piece.module.graph.find_nodes(op="call_method")] for i in found]
    adding = [i.distinct.index for i, names in zip(found, texts, strict=True) if "add_" in names]
    assert len(adding) == 2
    assert adding[0] != adding[1]


def test_sizes_of_different_symbols_with_the_same_relations_are_alike() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.cat([x, x])
        a = out_attn(x, x, x).sin()
        b = OPS.fresh(y, y, y).sin()
        return OPS.fresh(a, a, a), OPS.fresh(b, b, b)

    found = instances(function)
    (symbol,) = split(function, rows(5)).symbols
    sizes = [[str(size) for size in i.piece.examples[i.piece.outputs[0]].shape] for i in found]
    assert sizes[1][0] == str(symbol)
    assert sizes[2][0] == f"2*{symbol}"
    assert found[1].distinct.index != found[2].distinct.index


def test_keys_are_equal_in_another_trace_and_differ_between_pieces() -> None:
    first = [i.distinct.key for i in instances(Decoder(3), rows(5))]
    torch._dynamo.reset()
    second = [i.distinct.key for i in instances(Decoder(3), rows(7))]
    assert first == second
    assert len(set(first)) == 3


def test_equal_constants_in_two_traces_have_equal_keys_and_others_do_not() -> None:
    keys = set()
    for scale in (0.5, 0.5, 0.25):
        torch._dynamo.reset()
        keys.add(instances(lambda x, scale=scale: x * scale)[0].distinct.key)
    assert len(keys) == 2


def test_distinct_pieces_are_compiled_once_each() -> None:
    compiled = compile(Decoder(4))
    with (
        torch.no_grad(),
        pw.compilation_counter.expect(
            num_graphs_seen=1,
            num_piecewise_graphs_seen=9,
            num_piecewise_capturable_graphs_seen=5,
        ),
    ):
        compiled(*mark_dynamic((rows(4),)))
