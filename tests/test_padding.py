"""Padding is tried out on a piece: what is safe passes, what is not is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from piecewise_backend.canonical import identify
from piecewise_backend.facts import find_facts
from piecewise_backend.padding import PaddedCall, find_padding_fault, sizes_in_arithmetic
from piecewise_backend.sizes import Layout, find_token_dim
from piecewise_backend.splitting import split_graph
from piecewise_backend.steps import Host, Value
from tests.helpers import rows

PADDED, REAL = 8, 4


def fault(function: Callable[..., Any], *args: Any, real: int = REAL) -> str | None:
    """What is found for a function whose graph is one piece; `args` have `PADDED` rows."""
    seen: list[str | None] = []

    def look(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        graph = split_graph(gm, [])
        token_dim = find_token_dim(graph, example_inputs)
        (instance,) = identify(graph.pieces)
        values = {
            item.name: value.clone()
            for item, value in zip(graph.inputs, example_inputs, strict=True)
            if isinstance(value, Tensor)
        }
        module = instance.distinct.module
        num_sizes = sum(isinstance(ref, Host) for ref in instance.inputs)

        def layout(name: str) -> Layout | None:
            found = Layout.of(instance.piece.examples[name], token_dim)
            return found if found.is_dynamic else None

        names = [ref.name for ref in instance.inputs if isinstance(ref, Value)]
        inputs = [*[PADDED] * num_sizes, *(values[name] for name in names)]
        seen.append(
            sizes_in_arithmetic(module, num_sizes)
            or find_padding_fault(
                PaddedCall(
                    call=module.forward,
                    exact_call=module.forward,
                    inputs=inputs,
                    exact_numbers=[real] * num_sizes,
                    input_layouts=[*[None] * num_sizes, *map(layout, names)],
                    output_layouts=list(map(layout, instance.piece.outputs)),
                    mutated=find_facts(
                        instance.distinct, token_dim, token_dim.hints(example_inputs)
                    ).mutated,
                    undefined=frozenset(),
                    tokens=(real,) * len(token_dim.symbols),
                )
            )
        )
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=look, fullgraph=True)(*mark_varying_rows(args))
    (found,) = seen
    return found


def mark_varying_rows(args: Sequence[Any]) -> Sequence[Any]:
    """Mark the dimensions of `PADDED` rows."""
    for arg in args:
        for dim, size in enumerate(arg.shape):
            if size == PADDED:
                torch._dynamo.mark_dynamic(arg, dim)
    return args


def floats() -> tuple[Tensor]:
    return (rows(PADDED),)


def integers() -> tuple[Tensor]:
    return (torch.arange(PADDED) * 3 % 7 + 1,)


def _scatter(x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    cache[slots] = x
    return x + 1


def _add_first_row(x: Tensor, state: Tensor) -> Tensor:
    state.add_(x[0])
    return x + 1


def _add_all_rows(x: Tensor, state: Tensor) -> Tensor:
    state.add_(x.sum(0))
    return x + 1


def _write_rows(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def _write_the_other_way(x: Tensor) -> Tensor:
    x.copy_(x.flip(0))
    return x * 0


SAFE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rowwise": (lambda x: (x * 2 + 1).relu(), floats()),
    "softmax over features": (lambda x: x.softmax(-1), floats()),
    "matmul": (lambda x: x @ torch.ones(4, 6), floats()),
    "sum over features": (lambda x: x.sum(-1), floats()),
    "cumulative sum": (lambda x: x.cumsum(0), floats()),
    "cumulative maximum": (lambda x: x.cummax(0).values, floats()),
    "first row": (lambda x: x[0] + 1, floats()),
    "positions": (lambda x: x + torch.arange(x.shape[0]).unsqueeze(1), floats()),
    "transposed": (lambda x: x.t() * 2, floats()),
    "made contiguous": (lambda x: x.t().contiguous(), floats()),
    "heads first": (lambda x: x.view(-1, 2, 2).transpose(0, 1).contiguous(), floats()),
    "flattened": (lambda x: x.view(-1) * 2, floats()),
    "twice as many rows": (lambda x: x.repeat_interleave(2, 0), floats()),
    "every second row": (lambda x: x[::2] * 2, floats()),
    "zeros of the same shape": (lambda x: torch.zeros(x.shape[0], 3), floats()),
    "tokens last": (lambda x: x * 2, (rows(4, PADDED),)),
    "embedding": (lambda i: torch.arange(20.0).view(10, 2)[i], integers()),
    "integer arithmetic": (lambda i: i * 2 + 1, integers()),
    "integer cumulative sum": (lambda i: i.cumsum(0), integers()),
    "comparison": (lambda x: x > 3, floats()),
    "rows written in place": (_write_rows, floats()),
    "first row added to a state": (_add_first_row, (*floats(), torch.zeros(4))),
    "no gradient of NaN": (lambda x: torch.where(x > 3, x, 0.0), floats()),
    "half": (lambda x: x * 2 + 1, (rows(PADDED, dtype=torch.bfloat16),)),
    "complex": (lambda x: x * 2, (rows(PADDED).to(torch.complex64),)),
    "bool": (lambda x: ~x, (rows(PADDED) > 3,)),
}

UNSAFE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "largest of all": (lambda x: x / x.amax(), floats()),
    "smallest of all": (lambda x: x / x.amin(), floats()),
    "scale from all": (lambda x: x / x.abs().amax().clamp(min=1e-6), floats()),
    "sum of all": (lambda x: x.sum(), floats()),
    "sum that passes over NaN": (lambda x: x + x.nansum(), floats()),
    "sum of limited values": (lambda x: x + x.nan_to_num(0, 0, 0).clamp(-1, 1).sum(), floats()),
    "count of large values": (lambda x: (x > 100).sum(0), floats()),
    "count of small values": (lambda x: (x < -100).sum(0), floats()),
    "count of NaN": (lambda x: x.isnan().sum(0), floats()),
    "softmax over tokens": (lambda x: x.softmax(0), floats()),
    "mean over tokens": (lambda x: x - x.mean(0), floats()),
    "sorted": (lambda x: x.sort(0).values, floats()),
    "sorted descending": (lambda x: x.sort(0, descending=True).values, floats()),
    "largest of each column": (lambda x: x.topk(1, 0).values, floats()),
    "position of the largest": (lambda x: x.argmax(0), floats()),
    "flipped": (lambda x: x.flip(0), floats()),
    "rolled": (lambda x: x.roll(1, 0), floats()),
    "reverse cumulative sum": (lambda x: x.flip(0).cumsum(0).flip(0), floats()),
    "last row": (lambda x: x[-1] + 1, floats()),
    "last row, a view": (lambda x: x[-1], floats()),
    "last two rows": (lambda x: x[-2:] + 1, floats()),
    "row at the number of tokens": (lambda x: x[x.shape[0] - 1] + 1, floats()),
    "count of tokens as a factor": (lambda x: x * x.shape[0], floats()),
    "count of tokens as a divisor": (lambda x: x / x.shape[0], floats()),
    "count of tokens filled in": (lambda x: torch.full((4,), x.shape[0]) + x, floats()),
    "count of tokens by keyword": (
        lambda x: torch.full(size=(4,), fill_value=x.shape[0]) + x,
        floats(),
    ),
    "positions reversed": (
        lambda x: x + torch.arange(x.shape[0] - 1, -1, -1).unsqueeze(1),
        floats(),
    ),
    "distance to the end": (
        lambda x: x + (x.shape[0] - torch.arange(x.shape[0]))[:, None],
        floats(),
    ),
    "second half": (lambda x: x[x.shape[0] // 2 :] + 1, floats()),
    "two copies in a row": (lambda x: torch.cat([x, x]), floats()),
    "row at the end": (lambda x: torch.cat([x, torch.zeros(1, 4)]), floats()),
    "gram matrix": (lambda x: x.t() @ x, floats()),
    "attention over all": (lambda x: (x @ x.t()).softmax(-1) @ x, floats()),
    "flattened the other way": (lambda x: x.t().reshape(-1) * 2, floats()),
    "largest integer": (lambda i: i * 0 + i.amax(), integers()),
    "smallest integer": (lambda i: i * 0 + i.amin(), integers()),
    "largest integer, held by the first row": (
        lambda i: i + i.amax(),
        (torch.tensor([7, *[1] * 7]),),
    ),
    "sum of integers": (lambda i: i + i.sum(), integers()),
    "integers counted": (lambda i: torch.nn.functional.one_hot(i, 8).sum(0), integers()),
    "any of booleans": (lambda x: x.any(0), (rows(PADDED) > 100,)),
    "all of booleans": (lambda x: x.all(0), (rows(PADDED) > -100,)),
    "all rows added to a state": (_add_all_rows, (*floats(), torch.zeros(4))),
    "rows written to slots of a cache": (_scatter, (*floats(), torch.zeros(9, 4), *integers())),
    "rows written the other way": (_write_the_other_way, floats()),
    "real part": (lambda x: x.real + x.real.amax(), (rows(PADDED).to(torch.complex64),)),
}


@pytest.mark.parametrize("real", [1, REAL, PADDED - 1])
@pytest.mark.parametrize("what", SAFE)
def test_safe_pieces_pass(what: str, real: int) -> None:
    function, args = SAFE[what]
    assert fault(function, *(arg.clone() for arg in args), real=real) is None


@pytest.mark.parametrize("real", [1, REAL])
@pytest.mark.parametrize("what", UNSAFE)
def test_unsafe_pieces_are_found_out(what: str, real: int) -> None:
    function, args = UNSAFE[what]
    assert fault(function, *(arg.clone() for arg in args), real=real) is not None


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (lambda x: x / x.amax(), floats(), "real rows of output 0 depend on the padded rows"),
        (
            lambda x: x[:, :1] * 0 + torch.arange(x.shape[0] - 1, -1, -1).unsqueeze(1),
            floats(),
            "output 0 depends on the padded size",
        ),
        (lambda x: x * x.shape[0], floats(), "mul computes with the number of tokens"),
        (
            _add_all_rows,
            (*floats(), torch.zeros(4)),
            "real rows of input 2, which it writes, depend on the padded rows",
        ),
    ],
)
def test_fault_says_what_was_seen(function: Any, args: Any, message: str) -> None:
    assert fault(function, *(arg.clone() for arg in args)) == message


def test_inputs_are_not_written() -> None:
    x, state = rows(PADDED), torch.zeros(4)
    fault(_add_all_rows, x, state)
    assert torch.equal(x, rows(PADDED))


def test_input_that_is_written_and_overlaps_another_is_not_tried() -> None:
    base = rows(PADDED)
    padded = PaddedCall(
        call=lambda a, b: (a.add_(1) + b,),
        exact_call=lambda a, b: (a.add_(1) + b,),
        inputs=[base, base[:, :2]],
        exact_numbers=[],
        input_layouts=[None, None],
        output_layouts=[None],
        mutated=frozenset({0}),
        undefined=frozenset(),
        tokens=(REAL,),
    )
    assert find_padding_fault(padded) == "input 0 is written and shares memory with input 1"
    assert torch.equal(base, rows(PADDED))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.new_full((1,), x.shape[0]),
        lambda x: torch.addcmul(x, x, x, value=x.shape[0]),
        lambda x: x * torch.arange(x.shape[0])[-1],
        lambda x: x * torch.full((), x.shape[0]),
    ],
    ids=["new_full", "addcmul", "arange", "full"],
)
def test_a_size_that_becomes_a_value_is_found_in_half_precision(
    function: Callable[[Tensor], Tensor],
) -> None:
    assert fault(function, rows(PADDED).bfloat16())
