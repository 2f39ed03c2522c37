"""Faults that an attempt to break the package found; each stands for its kind."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_backend as pw
from tests.helpers import compile

LIB = torch.library.Library("pwbreak", "FRAGMENT")
LIB.define("raw_add_(Tensor(a!) x, Tensor y) -> ()")
LIB.define("rope_(Tensor(a!) x) -> Tensor(a!)")
LIB.define("scaled(Tensor x, float scale, bool flip) -> Tensor")
LIB.define("named(Tensor x, str name, Tensor y, str suffix='a,(b)') -> Tensor")
LIB.impl("raw_add_", lambda x, y: (x.add_(y), None)[1], "CompositeExplicitAutograd")
LIB.impl("rope_", lambda x: x.mul_(2), "CompositeExplicitAutograd")
torch.library.register_fake("pwbreak::raw_add_", lambda x, y: None, lib=LIB)
torch.library.register_fake("pwbreak::rope_", lambda x: x, lib=LIB)


def _named(x: Tensor, name: str, y: Tensor, suffix: str = "a,(b)") -> Tensor:
    return x * len(name) + y + len(suffix)


LIB.impl("named", _named, "CompositeExplicitAutograd")
torch.library.register_fake("pwbreak::named", lambda x, name, y, suffix="": x + y, lib=LIB)


@torch.library.custom_op("pwbreak::attn", mutates_args=())
def attn(x: Tensor) -> Tensor:
    return x * 1.5 + 1


@attn.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pwbreak::typed", mutates_args=())
def typed(x: Tensor, scale: float, flags: list[int]) -> Tensor:
    assert isinstance(scale, float)
    assert isinstance(flags, list)
    return x * scale + sum([*flags, -1])


@typed.register_fake
def _(x: Tensor, scale: float, flags: list[int]) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pwbreak::packed", mutates_args=())
def packed(x: Tensor) -> Tensor:
    return x.view(-1).clone().view(x.shape)


@packed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


@torch.library.custom_op("pwbreak::liar", mutates_args=())
def liar(x: Tensor) -> Tensor:
    return x.float()


@liar.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


SPLIT = ["pwbreak::attn", "pwbreak::rope_", "pwbreak::typed", "pwbreak::packed", "pwbreak::liar"]


def rows(n: int) -> Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(n))


COUNTS = (3, 8, 1, 5, 4, 3)


def check(
    model: Callable[..., Any],
    *extra: Callable[[], Any],
    counts: Sequence[int] = COUNTS,
    **options: Any,
) -> Any:
    """Warm up, then compare with eager at padded and at exact sizes, twice; returns the report."""
    options = {"splitting_ops": SPLIT, "cudagraph_capture_sizes": [2, 4, 8]} | options
    compiled = compile(model, **options)
    pw.warmup(compiled, lambda d: (rows(d.num_tokens), *(make() for make in extra)))
    for n in counts:
        ours, eagers = ((rows(n), *(make() for make in extra)) for _ in range(2))
        got, wanted = compiled(*ours), model(*eagers)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(ours, eagers)
    return pw.report(compiled).graphs[0]


def served_from_graphs(report: Any) -> bool:
    return report.num_replays == 6 and not report.fallbacks


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # fallbacks are looked up in the report
        yield


def test_lazily_conjugated_values_keep_their_sign() -> None:
    def imaginary(x: Tensor) -> Tensor:
        return attn(torch.view_as_complex(x.view(x.size(0), -1, 2)).conj().imag)

    assert served_from_graphs(check(imaginary))


def test_conjugated_outputs_keep_their_sign() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.view_as_complex(attn(x).view(x.size(0), -1, 2))
        return z.conj() * 1, z.conj().imag

    assert served_from_graphs(check(both))


def test_an_op_that_counts_no_version_writes_an_argument() -> None:
    def model(x: Tensor) -> Tensor:
        torch.ops.pwbreak.raw_add_(x, x * 2)
        return attn(x) + 1

    assert served_from_graphs(check(model))


def test_an_op_that_counts_no_version_writes_a_buffer_once_a_call() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            torch.ops.pwbreak.raw_add_(self.count, torch.ones(8))
            return attn(x)

    model = Counting()
    compiled = compile(model, splitting_ops=SPLIT, cudagraph_capture_sizes=[2, 4])
    pw.warmup(compiled, lambda d: (rows(d.num_tokens),))
    before = model.count.clone()
    for n in (2, 3, 4):
        compiled(rows(n))
    assert torch.equal(model.count, before + 3)
    assert before.max() <= 3  # the calls of the warm-up, nothing on top


def test_a_write_through_data_is_a_write() -> None:
    def model(x: Tensor) -> Tensor:
        x.data.add_(1)
        return attn(x)

    assert served_from_graphs(check(model))


def test_splitting_at_a_method_that_writes_its_argument() -> None:
    def model(x: Tensor, cache: Tensor) -> Tensor:
        slots = torch.arange(x.size(0))
        cache.index_copy_(0, slots, x * 2)
        return x + cache[:2].sum(0)

    check(model, lambda: torch.zeros(16, 8), splitting_ops=["aten::index_copy_"])


def test_a_split_op_that_returns_what_it_writes() -> None:
    def model(x: Tensor) -> Tensor:
        h = x + 0
        q = torch.ops.pwbreak.rope_(h)
        q.add_(1)
        return h * 1

    check(model)


def test_state_of_the_size_of_the_batch_is_not_frozen() -> None:
    class Context(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attn(self.ids + 1) + x.sum()

    model, all_ids = Context(), rows(8)
    model.ids = all_ids
    options = {"compiler": "eager", "graph_impl": "emulated", "splitting_ops": SPLIT}
    compiled = torch.compile(model, backend="piecewise", dynamic=True, options=options)
    fixed = torch.ones(3, 8)
    for n in (8, 5, 5, 8, 5, 8, 6, 6, 6, 3):
        model.ids = all_ids[:n]
        torch.testing.assert_close(compiled(fixed), model(fixed))


def test_an_op_that_returns_another_type_than_promised_is_named() -> None:
    def model(x: Tensor) -> Tensor:
        return liar(x.bfloat16()) + 1

    compiled = compile(model, splitting_ops=SPLIT, cudagraph_capture_sizes=[4])
    with pytest.raises(pw.ContractError, match=r"liar.*float32.*promised torch.bfloat16"):
        pw.warmup(compiled, lambda d: (rows(d.num_tokens),))
    assert not pw.report(compiled).graphs[0].captured_sizes


def test_a_hoisted_name_in_front_of_a_tensor() -> None:
    class Layer(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            return attn(torch.ops.pwbreak.named(x, self.name, x))

    model = nn.Sequential(*(Layer("n" * i) for i in range(1, 5)))
    report = check(model)
    assert served_from_graphs(report)
    assert len({line.split()[2] for line in report.table.splitlines() if " piece " in line}) <= 3


@pytest.mark.parametrize(
    "number",
    [
        lambda n: 1 / n,
        lambda n: n / 8,
        lambda n: math.ceil(n / 3),
        lambda n: math.floor(n / 3),
        lambda n: n**0.5,
    ],
)
def test_a_size_is_divided(number: Callable[[int], float]) -> None:
    check(lambda x: attn(x * number(x.size(0))), splitting_ops=SPLIT, max_padding_factor=1.0)


def test_a_dataclass_argument_varies_too() -> None:
    @dataclasses.dataclass
    class Batch:
        x: Tensor

    compiled = compile(
        lambda batch: attn(batch.x) + 1, splitting_ops=SPLIT, cudagraph_capture_sizes=[2, 4]
    )
    report = pw.warmup(compiled, lambda d: (Batch(rows(d.num_tokens)),))
    assert report.graphs[0].captured_sizes == (4, 2)
    torch.testing.assert_close(compiled(Batch(rows(3))), attn(rows(3)) + 1)


def test_inputs_that_ignore_the_size_are_refused() -> None:
    compiled = compile(lambda x: attn(x) + 1, splitting_ops=SPLIT)
    with pytest.raises(pw.ContractError, match="same shapes"):
        pw.warmup(compiled, lambda d: (rows(4),))


def test_a_model_that_specialises_on_the_size_is_captured_for_each() -> None:
    def model(x: Tensor) -> Tensor:
        return attn(x) * torch.linspace(0, 1, x.size(0))[:, None]

    compiled = compile(model, splitting_ops=SPLIT, cudagraph_capture_sizes=[2, 4])
    pw.warmup(compiled, lambda d: (rows(d.num_tokens),))
    for n in (2, 4):
        torch.testing.assert_close(compiled(rows(n)), model(rows(n)))


def test_arguments_are_converted_as_the_schema_says() -> None:
    assert served_from_graphs(check(lambda x: typed(x, 2, (1, 2)) + 1))


def test_a_kernel_is_not_given_rows_with_gaps() -> None:
    def model(x: Tensor) -> Tensor:
        return packed(x.view(x.size(0), 2, 4).transpose(0, 1).contiguous()).sum(0)

    report = check(model, counts=(3, 8, 5, 4))
    assert report.num_replays == 2  # the exact sizes


def test_a_condition_inside_a_piece() -> None:
    def model(x: Tensor) -> Tensor:
        return attn(torch.cond(x[0, 0] > 0, lambda y: y + 1, lambda y: y - 1, (x,)))

    check(model, cudagraph_mode="none")
