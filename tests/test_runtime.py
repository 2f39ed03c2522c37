"""Numbers, addresses and lifetimes: every way to call a compiled model, next to eager.

Most tests go through `agrees_with_eager`, which compares outputs and what became of the inputs
after every call, keeps all outputs and compares those again at the end.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_backend as pw
from piecewise_backend.batch import CUDAGraphMode, FallbackReason
from piecewise_backend.static_inputs import StaticInputs
from tests.helpers import (
    Decoder,
    agrees_with_eager,
    assigned_state,
    compile,
    mark_dynamic,
    new_data,
    new_parameters,
    out_attn,
    rows,
    same,
)
from tests.runtime_helpers import (
    fallbacks,
    num_replays,
    of_rows,
    only_runtime,
    quiet,
    runtimes,
    served_from_graphs,
    toy,
)


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def warmed(function: Any, **options: Any) -> Any:
    """Compiled, warmed up for inputs of one tensor, sealed."""
    compiled = compile(function, **options)
    pw.warmup(compiled, of_rows())
    return compiled


def static_inputs_of(compiled: Any) -> StaticInputs:
    """The buffers of a model that was captured."""
    found = only_runtime(compiled).captures.memory.static_inputs
    assert found is not None
    return found


# What split ops return


def fresh_result(x: Tensor) -> Tensor:
    x = torch.ops.pwtest.fresh(x + 1, x, x) * 2
    return torch.ops.pwtest.fresh(x, x, x).cos()


def fresh_results_read_late(x: Tensor) -> Tensor:
    """Of two outputs one is read at once and one two pieces later; one is never read."""
    a, b = torch.ops.pwtest.pair(x + 1, x)
    c = out_attn(a * 2, a, a)
    d, _ = torch.ops.pwtest.pair(c, x)
    return d.sin() + b


def fresh_result_only_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = torch.ops.pwtest.pair(x * 2, x)
    return a + 1, b


def fresh_result_read_and_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.ops.pwtest.fresh(x * 2, x, x)
    return a + 1, a


def split_op_first_and_last(x: Tensor) -> Tensor:
    x = torch.ops.pwtest.fresh(x, x, x) + 1
    return torch.ops.pwtest.fresh(x, x, x)


def adjacent_split_ops(x: Tensor) -> Tensor:
    x = torch.ops.pwtest.fresh(x * 2, x, x)
    x = torch.ops.pwtest.fresh(x, x, x)
    a, b = torch.ops.pwtest.pair(x, x)
    return torch.ops.pwtest.fresh(a, b, b) * 2


def written_and_returned(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    returned = torch.ops.pwtest.both(x + 1, out)
    return returned * out


def list_result(x: Tensor) -> Tensor:
    a, b, c = torch.ops.pwtest.parts(x * 2, 3)
    return (a * b).relu() - c


def keyword_arguments(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.pwtest.keyword(x=x * 2, out=out, scale=0.5)
    return out + 1


def view_of_fresh_result(x: Tensor) -> Tensor:
    a = torch.ops.pwtest.fresh(x * 2, x, x).view(-1, 2, 2).transpose(1, 2)
    return out_attn(a.contiguous(), a.contiguous(), a.contiguous()).flatten(1)


def buffer_of_a_piece_without_kernels(x: Tensor) -> Tensor:
    """Two pieces that only allocate, between and before split ops."""
    first = torch.empty_like(x)
    torch.ops.pwtest.double(x, first)
    second = torch.empty_like(x)
    torch.ops.pwtest.double(first, second)
    return second


@pytest.mark.parametrize(
    "function",
    [
        toy,
        fresh_result,
        fresh_results_read_late,
        fresh_result_only_returned,
        fresh_result_read_and_returned,
        split_op_first_and_last,
        adjacent_split_ops,
        written_and_returned,
        list_result,
        keyword_arguments,
        view_of_fresh_result,
        buffer_of_a_piece_without_kernels,
    ],
)
def test_split_ops_of_every_shape(function: Any) -> None:
    served_from_graphs(agrees_with_eager(function, lambda n: (rows(n),)))


def test_integer_rows_that_a_split_op_leaves_alone_are_no_wild_indices() -> None:
    """Padded rows of a buffer of indices hold what was in the memory before."""

    @torch.library.custom_op("pwtest::route", mutates_args=["out"])
    def route(x: Tensor, out: Tensor) -> None:
        out.copy_(torch.arange(len(x)) % 4)

    @route.register_fake
    def _(x: Tensor, out: Tensor) -> None:
        return None

    table = rows(4, 8)

    def model(x: Tensor) -> Tensor:
        index = torch.empty(x.size(0), dtype=torch.int64)
        torch.ops.pwtest.route(x, index)
        x = table[index] * x.sum(-1, keepdim=True)
        # From here on the memory of `index` is free for other values.
        y = torch.ops.pwtest.fresh(x, x, x).cos() * 1e30
        return out_attn(y, y, y) + x

    ops = ["pwtest::route", "pwtest::fresh", "pwtest::attn"]
    report = agrees_with_eager(model, lambda n: (rows(n),), splitting_ops=ops)
    served_from_graphs(report)


# Inputs


def strided(n: int) -> Tensor:
    return rows(n, 8)[:, ::2]


def part_of_a_larger_buffer(n: int) -> Tensor:
    return rows(n + 3)[3:]


def transposed(n: int) -> Tensor:
    return rows(4, n).t()


def column_block(n: int) -> Tensor:
    return rows(n, 12)[:, 4:8]


LAYOUTS = [rows, strided, part_of_a_larger_buffer, transposed, column_block]


@pytest.mark.parametrize("make", [rows, part_of_a_larger_buffer, transposed])
def test_inputs_of_every_layout(make: Any) -> None:
    served_from_graphs(agrees_with_eager(toy, lambda n: (make(n),)))


@pytest.mark.parametrize("make", [strided, column_block])
def test_marked_inputs_with_gaps_between_rows(make: Any) -> None:
    """With the mark on the rows Dynamo takes the stride for one more number that varies."""
    report = agrees_with_eager(toy, lambda n: (make(n),))
    assert fallbacks(report).keys() == {FallbackReason.SEVERAL_VARYING_DIMS}


def test_layouts_taking_turns() -> None:
    """Dynamo traces some layouts again; no trace may read another's strides."""
    compiled = compile(toy)
    for call in range(4):
        for n in (4, 7, 16, 3):
            for make in LAYOUTS:
                x = make(n).add_(call)
                with quiet():
                    same(compiled(x), toy(x), f"{make.__name__}({n})")
    assert num_replays(pw.report(compiled)) > 0


def test_rows_of_wider_and_wider_buffers() -> None:
    """The row stride becomes a number of its own that varies from call to call."""
    compiled = compile(toy)
    for width in (4, 8, 12, 20, 32):
        for n in (4, 7, 16):
            x = rows(n, width)[:, :4]
            with quiet():
                same(compiled(x), toy(x), f"{n} rows, stride {width}")


def test_a_new_tensor_every_call() -> None:
    compiled = warmed(toy)
    kept = []
    for seed in range(20):
        x = rows(5, seed=seed)
        kept.append(x)
        same(compiled(x), toy(x), f"seed {seed}")
    assert num_replays(pw.report(compiled)) == 20


def test_input_that_is_the_static_buffer_is_not_copied() -> None:
    compiled = warmed(toy)
    static_inputs = static_inputs_of(compiled)
    (position,) = static_inputs.staged
    buffer = static_inputs.buffer(position, (8,))
    expected = toy(buffer.copy_(rows(8)))
    with torch.profiler.profile() as profile:
        got = compiled(buffer)
    same(got, expected, "static buffer")
    assert "aten::_foreach_copy_" not in {event.key for event in profile.key_averages()}
    with torch.profiler.profile() as profile:
        same(compiled(rows(8, seed=1)), toy(rows(8, seed=1)), "another tensor")
    assert "aten::_foreach_copy_" in {event.key for event in profile.key_averages()}


def test_a_shorter_batch_from_the_static_buffer() -> None:
    compiled = warmed(toy)
    (position,) = static_inputs_of(compiled).staged
    buffer = static_inputs_of(compiled).buffer(position, (16,))
    for num_tokens in (5, 16, 3, 8):
        buffer.copy_(rows(16, seed=num_tokens))
        part = buffer[:num_tokens]
        same(compiled(part), toy(part), f"{num_tokens} rows")


def test_arguments_without_tokens_may_change_every_call() -> None:
    """A scalar tensor, a vector of the hidden size, a matrix: new values at new addresses."""

    def model(x: Tensor, scale: Tensor, bias: Tensor, matrix: Tensor) -> Tensor:
        x = out_attn(x * scale, x, x) + bias
        return torch.ops.pwtest.fresh(x @ matrix, x, x) * scale

    def make(n: int) -> tuple[Tensor, ...]:
        return rows(n), torch.tensor(1.5), rows(1)[0], rows(4)

    served_from_graphs(agrees_with_eager(model, make))


def test_integer_ids_and_positions() -> None:
    embedding = nn.Embedding(32, 4).requires_grad_(False)

    def model(ids: Tensor, positions: Tensor) -> Tensor:
        x = embedding(ids) + positions[:, None]
        return out_attn(x, x, x) * 2

    def make(n: int) -> tuple[Tensor, ...]:
        return torch.arange(n) * 7 % 32, torch.arange(n, dtype=torch.int32)

    served_from_graphs(agrees_with_eager(model, make))


@pytest.mark.parametrize("value", [None, 3, 2.5, True, "two"])
def test_arguments_that_are_no_tensors(value: object) -> None:
    def model(x: Tensor, option: object, *, flag: object = None) -> Tensor:
        factor = {None: 1, "two": 2}.get(option, option)  # type: ignore[call-overload]
        x = out_attn(x * factor, x, x)
        return x + 1 if flag is None else x * 2

    compiled = compile(model)
    for call in range(4):
        for n in (4, 3):
            x = mark_dynamic([rows(n, seed=call)])[0]
            same(compiled(x, value), model(x, value), f"{value} {call}")
            same(compiled(x, value, flag=value), model(x, value, flag=value), f"flag {call}")
    assert num_replays(pw.report(compiled)) > 0
    assert not fallbacks(pw.report(compiled))


def test_none_that_becomes_a_tensor_and_back() -> None:
    def model(x: Tensor, residual: Tensor | None) -> Tensor:
        x = x if residual is None else x + residual
        return out_attn(x, x, x) * 2

    compiled = compile(model)
    for call in range(5):
        for residual in (None, rows(4, seed=call + 10)):
            x = rows(4, seed=call)
            same(compiled(x, residual), model(x, residual), f"call {call}")


def test_integers_that_change_every_call() -> None:
    def model(x: Tensor, offset: int) -> Tensor:
        return out_attn(x + offset, x, x) * 2

    compiled = compile(model)
    for offset in (5, 6, 7, 8, 9, 5, 6, 7, 8, 9):
        for n in (4, 3, 8):
            with quiet():
                same(compiled(rows(n), offset), model(rows(n), offset), f"offset {offset}")


def test_floats_that_change_every_call() -> None:
    def model(x: Tensor, scale: float) -> Tensor:
        return out_attn(x * scale, x, x) * 2

    compiled = compile(model)
    for scale in (0.5, 1.5, 2.5, 0.5, 1.5):
        for n in (4, 3, 8):
            with quiet():
                same(compiled(rows(n), scale), model(rows(n), scale), f"scale {scale}")


def test_keywords_and_nested_arguments() -> None:
    def model(*, batch: dict[str, Any]) -> Tensor:
        x, (y, z) = batch["x"], batch["rest"]
        return out_attn(x, y, z) * 2 + y

    compiled = compile(model)
    for call in range(4):
        for n in (4, 7):
            x, y, z = mark_dynamic([rows(n, seed=call + i) for i in range(3)])
            batch = {"x": x, "rest": (y, z)}
            same(compiled(batch=batch), model(batch=batch), f"call {call} of {n}")
    served_from_graphs(pw.report(compiled))


@dataclasses.dataclass
class Result:
    """What a model may return."""

    hidden: Tensor
    rest: tuple[Tensor, ...]
    num_tokens: int


def test_outputs_of_every_kind() -> None:
    def as_dict(x: Tensor) -> dict[str, Any]:
        y = out_attn(x * 2, x, x)
        return {"y": y + 1, "x": x, "none": None, "n": x.size(0), "list": [y, (y * 2,)]}

    def as_dataclass(x: Tensor) -> Result:
        y = out_attn(x * 2, x, x)
        return Result(y + 1, (y,), x.size(0))

    served_from_graphs(agrees_with_eager(as_dict, lambda n: (rows(n),)))
    torch._dynamo.reset()
    compiled = compile(as_dataclass)
    for call in range(4):
        for n in (4, 7, 16):
            x = mark_dynamic([rows(n, seed=call)])[0]
            got, expected = compiled(x), as_dataclass(x)
            assert isinstance(got, Result)
            same(dataclasses.astuple(got), dataclasses.astuple(expected), f"{call} {n}")


# Memory that a model writes


def test_cache_passed_as_an_argument() -> None:
    """Pieces update it by index_put_ and copy_; a split op reads it."""

    def model(x: Tensor, slots: Tensor, cache: Tensor, last: Tensor) -> Tensor:
        cache.index_put_((slots,), x * 2)
        last.copy_(cache[0])
        y = torch.ops.pwtest.fresh(cache[slots], x, x)
        return y + cache.sum()

    compiled, reference = compile(model), torch.zeros(32, 4)
    cache, last, last_reference = torch.zeros(32, 4), torch.zeros(4), torch.zeros(4)
    for call in range(6):
        for n in (4, 8, 16):
            x, slots = mark_dynamic([rows(n, seed=call), (torch.arange(n) * 5 + call) % 32])
            with quiet():
                got = compiled(x, slots, cache, last)
            same(got, model(x, slots, reference, last_reference), f"call {call} of {n}")
            same((cache, last), (reference, last_reference), f"cache, call {call} of {n}")
    assert num_replays(pw.report(compiled)) > 0


def test_padded_rows_write_nothing_that_counts_into_a_cache() -> None:
    """Rows of padding repeat the first real row, so they write what that writes."""

    def model(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        cache[slots] = x * 2
        return torch.ops.pwtest.fresh(cache[slots], x, x) + 1

    compiled, cache, reference = compile(model), torch.zeros(32, 4), torch.zeros(32, 4)
    for call in range(5):
        for n in (4, 3, 5, 8, 13):
            slots = torch.arange(n).flip(0) + 7 + call
            x, slots = mark_dynamic([rows(n, seed=call), slots])
            with quiet():
                same(compiled(x, slots, cache), model(x, slots, reference), f"{call} {n}")
            same(cache, reference, f"cache, call {call} of {n}")


def test_two_caches_taking_turns() -> None:
    """The first time one moves everything is captured anew; then both are copied to and fro."""

    def model(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x.sum())
        return torch.ops.pwtest.fresh(x, x, x) + cache

    compiled = compile(model, cudagraph_capture_sizes=[4])
    caches = [(torch.zeros(4), torch.zeros(4)) for _ in range(2)]
    for call in range(4):
        for cache, reference in caches:
            for _ in range(4):
                x = mark_dynamic([rows(4, seed=call)])[0]
                with quiet():
                    same(compiled(x, cache), model(x, reference), f"call {call}")
                same(cache, reference, f"cache, call {call}")
    assert 0 < fallbacks(pw.report(compiled))[FallbackReason.MOVED_INPUT] <= 2
    assert num_replays(pw.report(compiled)) > 20


class Counting(nn.Module):
    """Counts its calls in a buffer, within a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counter", torch.zeros(()))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.counter.add_(1)
        y = out_attn(x * self.counter, x, x)
        self.total += y[0]
        return y + self.total


def test_buffers_change_once_per_call() -> None:
    """Also in the calls after which a size is captured, and in warm-up."""
    model, reference = Counting(), Counting()
    compiled = compile(model)
    for call in range(5):
        for n in (4, 3, 8, 7):
            x = mark_dynamic([rows(n, seed=call)])[0]
            same(compiled(x), reference(x), f"call {call} of {n}")
            same(model.state_dict(), reference.state_dict(), f"state, call {call} of {n}")
    served_from_graphs(pw.report(compiled))


def test_buffers_change_once_per_call_of_a_warm_up() -> None:
    model = Counting()
    compiled = compile(model)
    pw.warmup(compiled, of_rows())
    assert model.counter == 1 + 3 + 9, "the trace, three sizes, three comparisons of each"
    compiled(rows(5))
    assert model.counter == 14


def test_input_written_by_a_piece() -> None:
    def model(x: Tensor) -> Tensor:
        x.mul_(2)
        y = out_attn(x, x, x)
        x.add_(y)
        return y + 1

    served_from_graphs(agrees_with_eager(model, lambda n: (rows(n),)))


def test_input_written_by_a_split_op() -> None:
    def model(x: Tensor, out: Tensor) -> Tensor:
        torch.ops.pwtest.double(x * 3, out)
        return out + x

    served_from_graphs(agrees_with_eager(model, lambda n: (rows(n), rows(n, seed=1))))


def test_input_written_by_a_split_op_that_no_piece_reads() -> None:
    def model(x: Tensor, out: Tensor) -> Tensor:
        torch.ops.pwtest.double(x * 3, out)
        return x + 1

    served_from_graphs(agrees_with_eager(model, lambda n: (rows(n), rows(n, seed=1))))


def test_view_of_an_input_written_by_a_split_op() -> None:
    def model(x: Tensor, out: Tensor) -> Tensor:
        torch.ops.pwtest.double(x * 3, out.view(-1, 2, 2).flatten(1))
        return out + x

    served_from_graphs(agrees_with_eager(model, lambda n: (rows(n), rows(n, seed=1))))


def test_two_inputs_that_share_memory() -> None:
    """One is written: the other changes with it."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        z = out_attn(x * y, x, x)
        return z + y

    def make(n: int) -> tuple[Tensor, Tensor]:
        both = rows(n, 8)
        return both[:, :4], both[:, 2:6]

    compiled = compile(model)
    for call in range(4):
        for n in (4, 3, 8):
            given, wanted = make(n), make(n)
            mark_dynamic(given)
            with quiet():
                same(compiled(*given), model(*wanted), f"call {call} of {n}")
            same(given, wanted, f"inputs, call {call} of {n}")


def test_inputs_that_start_to_share_memory() -> None:
    """The same trace, first with tensors of their own, then with overlapping ones."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        z = out_attn(x * y, x, x)
        return z + y

    compiled = compile(model)
    for call in range(4):
        x, y = mark_dynamic([rows(8, 4), rows(8, 4, seed=1)])
        same(compiled(x, y), model(rows(8, 4), rows(8, 4, seed=1)), f"apart, call {call}")
    for call in range(3):
        a, b = rows(9, 4), rows(9, 4)
        with quiet():
            same(compiled(a[1:], a[:-1]), model(b[1:], b[:-1]), f"shared, call {call}")
        same(a, b, f"input, call {call}")


def test_output_that_is_an_input_is_that_input() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        return x, out_attn(x, x, x)

    compiled = compile(model)
    for n in (4, 3, 4, 3, 4, 3, 4):
        x = mark_dynamic([rows(n)])[0]
        got, _ = compiled(x)
        assert got is x or got.data_ptr() == x.data_ptr()
        same(got, rows(n) + 1, f"{n}")


def test_result_of_an_in_place_operation_is_its_argument() -> None:
    """So that `self.total += y` binds the buffer to itself, not to a copy."""

    def model(x: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        y = out_attn(x, x, x)
        total += y[0]
        return total, x.mul_(2), y

    compiled, total = compile(model), torch.zeros(4)
    for n in (4, 3, 4, 3, 4, 3, 4):
        x = mark_dynamic([rows(n)])[0]
        first, second, _ = compiled(x, total)
        assert first.data_ptr() == total.data_ptr()
        assert second.data_ptr() == x.data_ptr()
    served_from_graphs(pw.report(compiled))


# Padding


def scaled_by_amax(x: Tensor) -> Tensor:
    x = out_attn(x * 2, x, x)
    return x / x.abs().amax()


def mean_over_tokens(x: Tensor) -> Tensor:
    return out_attn(x, x, x) - x.mean(0)


def softmax_over_tokens(x: Tensor) -> Tensor:
    return out_attn(x, x, x).softmax(0)


def divided_by_the_count(x: Tensor) -> Tensor:
    return out_attn(x, x, x) / x.size(0)


def reversed_tokens(x: Tensor) -> Tensor:
    return out_attn(x, x, x).flip(0) + 1


def last_token(x: Tensor) -> Tensor:
    return out_attn(x, x, x)[-1] * 2


def cumulative(x: Tensor) -> Tensor:
    """Safe: a row depends on the rows before it."""
    return out_attn(x, x, x).cumsum(0)


def doubled_tokens(x: Tensor) -> Tensor:
    return torch.cat([x, out_attn(x, x, x)]) + 1


@pytest.mark.parametrize(
    "function",
    [
        scaled_by_amax,
        mean_over_tokens,
        softmax_over_tokens,
        divided_by_the_count,
        reversed_tokens,
        last_token,
        doubled_tokens,
    ],
)
def test_padding_that_would_reach_real_rows(function: Any) -> None:
    report = agrees_with_eager(function, lambda n: (rows(n),))
    assert set(fallbacks(report)) == {FallbackReason.PADDING_UNSAFE}
    assert num_replays(report) > 0, "exact sizes are served from graphs"
    assert set(report.graphs[0].padding_unsafe) == {4, 8, 16}


def test_causal_dependence_on_rows_is_safe() -> None:
    served_from_graphs(agrees_with_eager(cumulative, lambda n: (rows(n),)))


def test_a_split_op_gets_exactly_the_real_rows() -> None:
    seen = []

    @torch.library.custom_op("pwtest::watch", mutates_args=["out"])
    def watch(x: Tensor, num_tokens: int, out: Tensor) -> None:
        seen.append((len(x), num_tokens, len(out)))
        out.copy_(x)

    @watch.register_fake
    def _(x: Tensor, num_tokens: int, out: Tensor) -> None:
        return None

    def model(x: Tensor) -> Tensor:
        x = x + 1
        out = torch.empty_like(x)
        torch.ops.pwtest.watch(x, x.size(0), out)
        return out * 2

    compiled = warmed(model, splitting_ops=["pwtest::watch"])
    seen.clear()
    for n in (1, 5, 8, 13):
        compiled(rows(n))
    assert seen == [(n, n, n) for n in (1, 5, 8, 13)]


def test_a_piece_that_cannot_run_at_every_count() -> None:
    """Pairs of tokens: odd counts do not exist, so padding from them cannot be tried."""

    def model(x: Tensor) -> Tensor:
        x = x.view(-1, 2, 4).sum(1).repeat_interleave(2, 0) + x
        return out_attn(x, x, x)

    compiled = compile(model)
    for call in range(5):
        for n in (4, 6, 8, 16, 14):
            x = mark_dynamic([rows(n, seed=call)])[0]
            with quiet():
                same(compiled(x), model(x), f"call {call} of {n}")
    assert num_replays(pw.report(compiled)) > 0


# Weights


def new_values_in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(1.5)


def copied_state(model: nn.Module) -> None:
    model.load_state_dict({name: p * 1.5 for name, p in model.state_dict().items()})


@pytest.mark.parametrize("change", [new_values_in_place, copied_state])
def test_weights_changed_in_place_are_seen(change: Any) -> None:
    model = Decoder()
    compiled = warmed(model)
    for n in (5, 8):
        change(model)
        same(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    served_from_graphs(pw.report(compiled))


@pytest.mark.parametrize("change", [new_data, new_parameters, assigned_state])
def test_rebound_weights_are_noticed(change: Any) -> None:
    model = Decoder()
    compiled = compile(model)
    for _ in range(3):
        for n in (4, 8):
            compiled(mark_dynamic([rows(n)])[0])
    old = [p.detach() for p in model.parameters()]
    change(model)
    for p in old:
        p.fill_(float("nan"))  # whoever reads the old weights shows it
    with pytest.warns(RuntimeWarning, match="moved since capture"):
        same(compiled(rows(4)), model(rows(4)), "first call after")
    before = num_replays(pw.report(compiled))
    for _ in range(3):
        for n in (4, 8):
            same(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    report = pw.report(compiled)
    assert fallbacks(report) == {FallbackReason.MOVED_INPUT: 1}
    assert num_replays(report) > before, "captured again"


def test_rebound_weights_of_a_sealed_model() -> None:
    """Nothing is captured after sealing: served without graphs, right, until warmed up again."""
    model = Decoder()
    compiled = warmed(model)
    new_data(model)
    with pytest.warns(RuntimeWarning, match="moved since capture"):
        same(compiled(rows(5)), model(rows(5)), "moved")
    with pytest.warns(RuntimeWarning, match="not captured yet"):
        same(compiled(rows(5)), model(rows(5)), "not captured")
    before = num_replays(pw.report(compiled))
    pw.warmup(compiled, of_rows())
    same(compiled(rows(5)), model(rows(5)), "warmed up again")
    assert num_replays(pw.report(compiled)) == before + 1


def test_replaced_weights_of_a_sealed_model() -> None:
    """The old ones are still somebody's, so it might be another instance: the warning says both."""
    model = Decoder()
    compiled = warmed(model)
    kept = [layer.weight for layer in model.out]
    for layer in model.out:
        layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)
    with pytest.warns(RuntimeWarning, match="whose weights or caches were replaced"):
        same(compiled(rows(5)), model(rows(5)), "replaced")
    assert len(kept) == 2


def test_rebound_buffer_that_only_the_split_op_reads() -> None:
    """It is read where it is at every call: no capture depends on it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", rows(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.pwtest.fresh(x * 2, x, self.cache[0]) + 1

    class Whole(Model):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.pwtest.fresh(x * 2, x, self.cache) + 1

    model = Whole()
    compiled = compile(model, cudagraph_capture_sizes=[4])
    for call in range(6):
        model.cache = rows(4, seed=call)
        same(compiled(rows(4)), model(rows(4)), f"call {call}")
    served_from_graphs(pw.report(compiled))


# Outputs


def test_outputs_belong_to_the_caller() -> None:
    """Held, and written to, across calls of the same size."""
    compiled = warmed(toy)
    outputs = [compiled(rows(8, seed=i)) for i in range(4)]
    for i, output in enumerate(outputs):
        same(output, toy(rows(8, seed=i)), f"output {i}")
    outputs[0].zero_()
    same(compiled(rows(8, seed=3)), outputs[3], "after writing to an earlier output")


def test_static_outputs_are_views_of_one_buffer() -> None:
    compiled = warmed(toy, outputs="static")
    first = compiled(rows(8))
    same(first, toy(rows(8)), "first")
    second = compiled(rows(8, seed=1))
    same(second, toy(rows(8, seed=1)), "second")
    assert first.data_ptr() == second.data_ptr()
    shorter = compiled(rows(5))
    same(shorter, toy(rows(5)), "shorter")
    assert shorter.shape == (5, 4)


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_an_in_place_split_op_does_not_hand_out_its_buffer(outputs: str) -> None:
    """`aten::add_` returns the tensor that it wrote, which is a static buffer."""

    def model(x: Tensor) -> Tensor:
        y = x * 2
        return y.add_(x)

    compiled = compile(model, splitting_ops=["aten::add_"], outputs=outputs)
    kept = []
    for call in range(4):
        for n in (4, 3, 8):
            x = mark_dynamic([rows(n, seed=call)])[0]
            kept.append((compiled(x), model(x)))
            same(*kept[-1], f"call {call} of {n}")
    if outputs == "fresh":
        for index, (got, expected) in enumerate(kept):
            same(got, expected, f"output {index} at the end")


def test_outputs_of_a_graph_without_arithmetic() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :2], out_attn(x, x, x)

    served_from_graphs(agrees_with_eager(model, lambda n: (rows(n),)))


# Dimensions and sizes


def test_two_varying_dimensions() -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return out_attn(x * 2, x, x) + y.sum(), y * 2

    compiled = compile(model)
    x, y = mark_dynamic([rows(4), rows(6)])
    with pytest.warns(RuntimeWarning, match="more than one dimension varies"):
        same(compiled(x, y), model(x, y), "first call")
    for call in range(3):
        for n, m in ((4, 6), (3, 7), (8, 5)):
            x, y = rows(n, seed=call), rows(m, seed=call)
            same(compiled(x, y), model(x, y), f"{n}, {m}")
    assert fallbacks(pw.report(compiled)) == {FallbackReason.SEVERAL_VARYING_DIMS: 10}


def test_token_dimensions_that_agreed_at_the_trace_only() -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return out_attn(x * 2, x, x) + 1, y * 2

    compiled = compile(model)
    pw.warmup(compiled, lambda d: (rows(d.num_tokens), rows(d.num_tokens)))
    x, y = rows(5), rows(5, seed=1)
    same(compiled(x, y), model(x, y), "agree")
    assert num_replays(pw.report(compiled)) == 1
    x, y = rows(5), rows(7)
    with pytest.warns(RuntimeWarning, match="inputs disagree about the number of tokens"):
        same(compiled(x, y), model(x, y), "differ")
    x, y = rows(3), rows(3, seed=1)
    same(compiled(x, y), model(x, y), "agree again")


def test_a_dimension_that_only_the_split_op_sees() -> None:
    """Lengths and block tables vary as they like; graphs are used all the same."""

    @torch.library.custom_op("pwtest::lookup", mutates_args=["out"])
    def lookup(x: Tensor, table: Tensor, out: Tensor) -> None:
        out.copy_(x * len(table) + table.sum())

    @lookup.register_fake
    def _(x: Tensor, table: Tensor, out: Tensor) -> None:
        return None

    def model(x: Tensor, table: Tensor) -> Tensor:
        x = x + 1
        out = torch.empty_like(x)
        torch.ops.pwtest.lookup(x, table, out)
        return out * 2

    compiled = compile(model, splitting_ops=["pwtest::lookup"])
    for call in range(4):
        for n, m in ((4, 6), (3, 7), (8, 5), (8, 9)):
            x, table = mark_dynamic([rows(n, seed=call), rows(m, seed=call)])
            same(compiled(x, table), model(x, table), f"{n}, {m}")
    served_from_graphs(pw.report(compiled))


@pytest.mark.parametrize(
    ("make", "num_fallbacks"),
    [
        (lambda n: rows(n)[None].clone(), 0),
        (lambda n: rows(n).t(), 0),
        # Rows of a padded buffer would not be contiguous, as the split op may expect.
        (lambda n: rows(3, n), 8),
    ],
    ids=["one_sequence", "transposed", "three_positions"],
)
def test_tokens_in_the_second_dimension(make: Callable[[int], Tensor], num_fallbacks: int) -> None:
    def model(x: Tensor) -> Tensor:
        return out_attn(x * 2, x, x) + x

    compiled = compile(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # fallbacks are looked up below
        for n in (4, 8, 16):  # exact sizes are captured
            for call in range(3):
                x = make(n)
                torch._dynamo.maybe_mark_dynamic(x, 1)
                same(compiled(x), model(x), f"{tuple(x.shape)}, call {call}")
        for call in range(4):
            for n in (4, 7, 16, 5):
                x = make(n).add_(call)
                torch._dynamo.maybe_mark_dynamic(x, 1)
                same(compiled(x), model(x), f"{tuple(x.shape)}, call {call}")
    found = fallbacks(pw.report(compiled))
    assert found.get(FallbackReason.PADDING_UNSAFE, 0) == num_fallbacks
    assert pw.report(compiled).graphs[0].num_replays >= 8


def test_static_shapes() -> None:
    """No dimension varies: one size."""
    compiled = torch.compile(
        toy,
        backend="piecewise",
        dynamic=False,
        options={
            "compiler": "eager",
            "graph_impl": "emulated",
            "splitting_ops": ["pwtest::attn"],
        },
    )
    for call in range(6):
        same(compiled(rows(6, seed=call)), toy(rows(6, seed=call)), f"call {call}")
    report = pw.report(compiled)
    served_from_graphs(report)
    assert report.graphs[0].captured_sizes == (0,)


def test_no_tensor_input_at_all() -> None:
    weight = rows(4)

    def model() -> Tensor:
        return out_attn(weight * 2, weight, weight) + 1

    compiled = compile(model)
    for call in range(5):
        weight.add_(call)
        same(compiled(), model(), f"call {call}")
    served_from_graphs(pw.report(compiled))


def test_graph_without_any_piece() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.ops.pwtest.fresh(x, x, x)

    compiled = compile(model)
    for call in range(4):
        for n in (4, 3):
            x = mark_dynamic([rows(n, seed=call)])[0]
            same(compiled(x), model(x), f"call {call}")


def test_one_token_first() -> None:
    compiled = compile(toy, cudagraph_capture_sizes=[1, 2, 4, 8])
    for call in range(4):
        for n in (1, 8, 5, 2):
            with quiet():
                same(compiled(rows(n, seed=call)), toy(rows(n, seed=call)), f"{n} tokens")
    assert not fallbacks(pw.report(compiled))
    assert num_replays(pw.report(compiled)) > 0


def test_no_tokens() -> None:
    compiled = compile(toy)
    for _ in range(2):
        for n in (0, 5, 0, 4, 1, 0):
            x = rows(n) if n else torch.empty(0, 4)
            with quiet():
                same(compiled(x), toy(x), f"{n} tokens")
    torch._dynamo.reset()
    compiled = warmed(toy)
    with pytest.warns(RuntimeWarning, match="0 tokens"):
        same(compiled(torch.empty(0, 4)), toy(torch.empty(0, 4)), "sealed")
    assert fallbacks(pw.report(compiled)) == {FallbackReason.EMPTY_BATCH: 1}


def test_more_tokens_than_the_largest_size() -> None:
    compiled = warmed(toy)
    with pytest.warns(RuntimeWarning, match=r"largest size: 16.*cudagraph_capture_sizes"):
        same(compiled(rows(17)), toy(rows(17)), "17 tokens")
    same(compiled(rows(1000)), toy(rows(1000)), "warned once")
    assert fallbacks(pw.report(compiled)) == {FallbackReason.SIZE_ABOVE_GRID: 2}


def test_too_much_padding() -> None:
    compiled = warmed(toy, cudagraph_capture_sizes=[8, 512])
    with pytest.warns(RuntimeWarning, match="max_padding_factor"):
        same(compiled(rows(9)), toy(rows(9)), "9 tokens")
    same(compiled(rows(300)), toy(rows(300)), "300 tokens")
    assert fallbacks(pw.report(compiled)) == {FallbackReason.PADDING_TOO_LARGE: 1}


def test_every_batch_up_to_the_largest_size_is_served_from_graphs() -> None:
    compiled = warmed(toy, cudagraph_capture_sizes=[1, 2, 4, 8])
    for n in range(1, 9):
        same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    report = pw.report(compiled)
    served_from_graphs(report)
    assert report.graphs[0].num_replays == 8


# Options


def test_fallback_as_an_error() -> None:
    compiled = warmed(toy, on_fallback="raise")
    with pytest.raises(pw.ContractError, match="more tokens than the largest"):
        compiled(rows(17))
    same(compiled(rows(5)), toy(rows(5)), "next call")
    with pytest.raises(pw.ContractError, match="0 tokens"):
        compiled(torch.empty(0, 4))
    same(compiled(rows(5)), toy(rows(5)), "next call")
    assert fallbacks(pw.report(compiled)) == {
        FallbackReason.SIZE_ABOVE_GRID: 1,
        FallbackReason.EMPTY_BATCH: 1,
    }


def test_without_graphs() -> None:
    report = agrees_with_eager(toy, lambda n: (rows(n),), cudagraph_mode="none")
    assert set(fallbacks(report)) == {FallbackReason.DISABLED}
    assert report.graphs[0].counts["num_cudagraph_captured"] == 0


def test_no_graphs_on_a_cpu_unless_asked_for() -> None:
    report = agrees_with_eager(toy, lambda n: (rows(n),), graph_impl=None)
    assert set(fallbacks(report)) == {FallbackReason.NO_GRAPHS_ON_DEVICE}


def test_cuda_graphs_on_a_cpu() -> None:
    compiled = compile(toy, graph_impl="cuda")
    with pytest.raises(pw.ConfigError, match="input is on cpu; move the model"):
        compiled(rows(4))


@pytest.mark.parametrize("num_warmups", [0, 3])
def test_number_of_warm_up_runs(num_warmups: int) -> None:
    report = agrees_with_eager(toy, lambda n: (rows(n),), cudagraph_num_of_warmups=num_warmups)
    served_from_graphs(report)


OPTIONS = {
    "compiler": "eager",
    "graph_impl": "emulated",
    "splitting_ops": ["pwtest::attn", "pwtest::layer_attn"],
    "cudagraph_capture_sizes": [4, 8, 16],
}


def test_dynamic_true() -> None:
    """Not with 4 tokens first: Dynamo would take tokens and width for the same number."""
    model = Decoder()
    compiled = torch.compile(model, backend="piecewise", dynamic=True, options=OPTIONS)
    for call in range(4):
        for n in (5, 7, 16):
            same(compiled(rows(n, seed=call)), model(rows(n, seed=call)), f"{n}")
    served_from_graphs(pw.report(compiled))


def test_automatic_dynamic() -> None:
    """No marks: Dynamo traces once statically, once with a symbol that then serves all."""
    compiled = torch.compile(toy, backend="piecewise", options=OPTIONS)
    for call in range(5):
        for n in (4, 7, 16):
            same(compiled(rows(n, seed=call)), toy(rows(n, seed=call)), f"{n}")
    static, dynamic = pw.report(compiled).graphs
    assert static.num_replays == 0
    assert dynamic.num_replays > 0


def test_marked_dimension() -> None:
    compiled = torch.compile(toy, backend="piecewise", options=OPTIONS)
    for call in range(4):
        for n in (4, 7, 16):
            x = rows(n, seed=call)
            torch._dynamo.mark_dynamic(x, 0)
            same(compiled(x), toy(x), f"{n}")
    served_from_graphs(pw.report(compiled))


def test_module_compile() -> None:
    model, reference = Decoder(), Decoder()
    model.compile(backend="piecewise", options=OPTIONS)
    pw.warmup(model, of_rows())
    for n in (5, 8, 16, 1):
        same(model(rows(n)), reference(rows(n)), f"{n}")
    served_from_graphs(pw.report(model))


def test_compiled_function_and_method() -> None:
    class Scaler:
        def __init__(self) -> None:
            self.scale = torch.tensor(2.0)

        def run(self, x: Tensor) -> Tensor:
            return out_attn(x * self.scale, x, x) + 1

    scaler = Scaler()
    compiled = compile(scaler.run)
    pw.warmup(compiled, of_rows())
    for n in (5, 8):
        same(compiled(rows(n)), scaler.run(rows(n)), f"{n}")
    served_from_graphs(pw.report(compiled))


# Grad modes

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("built_in", MODES)
@pytest.mark.parametrize("called_in", MODES)
def test_modes_that_models_are_built_and_called_in(built_in: str, called_in: str) -> None:
    """In inference mode a model writes to what was made outside, but not the other way round."""
    make = Decoder if (built_in, called_in) == ("inference_mode", "no_grad") else Counting
    with MODES[built_in]():
        model, reference = make(), make()
    compiled = compile(model)
    with MODES[called_in]():
        for call in range(4):
            for n in (4, 5, 8, 3):
                x = mark_dynamic([rows(n, seed=call)])[0]
                same(compiled(x), reference(x), f"call {call} of {n}")
                same(model.state_dict(), reference.state_dict(), f"state, call {call} of {n}")
    served_from_graphs(pw.report(compiled))


@pytest.mark.parametrize(("first", "second"), [tuple(MODES), tuple(MODES)[::-1]])
def test_other_mode_than_in_warm_up(first: str, second: str) -> None:
    """To Dynamo tensors made in inference mode are of another kind: it would trace again."""
    compiled = compile(toy)
    with MODES[first]():
        pw.warmup(compiled, of_rows())
        inside = rows(5)
        same(compiled(inside), toy(inside), "as warmed up")
    with MODES[second](), pytest.raises(pw.ContractError, match=r"in the mode of this call"):
        compiled(inside)
    with MODES[first]():
        same(compiled(rows(5)), toy(rows(5)), "first mode again")


def test_warmed_up_in_both_modes() -> None:
    compiled = compile(toy)
    for mode in MODES.values():
        with mode():
            pw.warmup(compiled, of_rows())
    for mode in MODES.values():
        with mode():
            for n in (5, 8):
                same(compiled(rows(n)), toy(rows(n)), f"{n} tokens")
    assert num_replays(pw.report(compiled)) == 4


def test_modes_taking_turns_while_sizes_are_captured() -> None:
    """Captured in one mode, replayed in the other, buffers written in both."""
    model, reference = Counting(), Counting()
    compiled = compile(model)
    for call in range(4):
        for mode in MODES.values():
            with mode():
                for n in (4, 3, 8):
                    x = mark_dynamic([rows(n, seed=call)])[0]
                    with quiet():
                        same(compiled(x), reference(x), f"call {call} of {n}")
    assert num_replays(pw.report(compiled)) > 0


# Several models, threads, nesting, errors, lifetimes


def test_two_instances_of_one_class() -> None:
    models = [Decoder(seed=0), Decoder(seed=1)]
    compiled = [compile(model) for model in models]
    for each in compiled:
        pw.warmup(each, of_rows())
    for n in (5, 8, 5, 16):
        for each, model in zip(compiled, models, strict=True):
            same(each(rows(n)), model(rows(n)), f"{n}")
    for each in compiled:
        served_from_graphs(pw.report(each))


def test_rebound_weights_of_one_of_two_instances() -> None:
    """Noticed also when the other one was called last; its captures stay."""
    first, second = Decoder(seed=0), Decoder(seed=1)
    compiled_first = warmed(first)
    memory = memory_of(compiled_first)
    compiled_second = warmed(second)
    new_data(first)
    with pytest.warns(RuntimeWarning, match="moved since capture"):
        same(compiled_first(rows(5)), first(rows(5)), "moved")
    same(compiled_second(rows(5)), second(rows(5)), "the other one")
    report = pw.report(compiled_first)
    assert fallbacks(report) == {FallbackReason.MOVED_INPUT: 1}
    assert num_replays(report) == 1
    pw.warmup(compiled_first, of_rows())
    same(compiled_first(rows(5)), first(rows(5)), "warmed up again")
    same(compiled_second(rows(5)), second(rows(5)), "the other one again")
    assert num_replays(pw.report(compiled_first)) == 3
    gc.collect()
    assert memory[0]() is None, "captures of the old weights are dropped"


def test_one_model_compiled_twice() -> None:
    """Dynamo lets equal compile calls share traces: warm-up, report and seal share them too."""
    model = Decoder()
    first, second = compile(model), compile(model)
    with pw.compilation_counter.expect(
        num_graphs_seen=1,
        num_piecewise_graphs_seen=5,
        num_piecewise_capturable_graphs_seen=3,
        num_cudagraph_captured=9,
    ):
        pw.warmup(first, of_rows(), seal=False)
        pw.warmup(second, of_rows())
    assert pw.report(first).is_sealed
    for n in (5, 8):
        same(first(rows(n)), model(rows(n)), f"first {n}")
        same(second(rows(n)), model(rows(n)), f"second {n}")
    for each in (first, second):
        served_from_graphs(pw.report(each))
        with pytest.raises(
            pw.ContractError, match=r"sealed|expected a torch.float32 tensor of rank 2"
        ):
            each(rows(5)[None])


def test_one_model_compiled_with_other_options() -> None:
    """Such calls have traces, captures and seals of their own."""
    model = Decoder()
    first, second = compile(model), compile(model, outputs="static")
    pw.warmup(first, of_rows())
    assert not pw.report(second).is_sealed
    assert pw.report(second).graphs == ()
    pw.warmup(second, of_rows())
    for n in (5, 8):
        same(first(rows(n)), model(rows(n)), f"first {n}")
        same(second(rows(n)), model(rows(n)), f"second {n}")
    assert num_replays(pw.report(first)) == num_replays(pw.report(second)) == 2


def test_many_instances_of_one_class() -> None:
    """More than Dynamo's limit on traces of one function; they share one, alive or not."""
    alive = []
    with pw.compilation_counter.expect(
        num_graphs_seen=1,
        num_piecewise_graphs_seen=3,
        num_piecewise_capturable_graphs_seen=2,
        num_cudagraph_captured=2 * 24,
    ):
        for seed in range(24):
            model = Decoder(num_layers=1, seed=seed)
            compiled = compile(model)
            if seed % 2:
                alive.append((model, compiled))
            for _ in range(4):
                x = mark_dynamic([rows(4)])[0]
                with quiet():  # what took the place of a model that is gone has moved
                    same(compiled(x), model(x), f"instance {seed}")
    before = num_replays(pw.report(compiled))
    for model, compiled in alive * 2:
        same(compiled(rows(3)), model(rows(3)), "alive")
    assert num_replays(pw.report(compiled)) == before + 2 * len(alive)


def test_two_models_interleaved() -> None:
    """While one is captured, the other is called; each has memory of its own."""
    first, second = compile(toy), compile(fresh_result)
    for call in range(5):
        for n in (4, 3, 8):
            x = mark_dynamic([rows(n, seed=call)])[0]
            a = first(x)
            b = second(x)
            same(a, toy(x), f"first {call} {n}")
            same(b, fresh_result(x), f"second {call} {n}")
    for each in (first, second):
        served_from_graphs(pw.report(each))


def test_a_model_called_by_another() -> None:
    compiled = warmed(toy)

    @torch.library.custom_op("pwtest::other_model", mutates_args=[])
    def other_model(x: Tensor) -> Tensor:
        return compiled(x)

    @other_model.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def model(x: Tensor) -> Tensor:
        return torch.ops.pwtest.other_model(x * 2) + 1

    outer = compile(model, splitting_ops=["pwtest::other_model"])
    pw.warmup(outer, of_rows())
    for n in (5, 8):
        same(outer(rows(n)), toy(rows(n) * 2) + 1, f"{n}")
    served_from_graphs(pw.report(outer))


def test_threads_take_turns() -> None:
    """Results are right whichever thread comes first, also while sizes are still captured."""
    model = Decoder()
    compiled = compile(model)
    compiled(mark_dynamic([rows(4)])[0])
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            with torch.no_grad():
                start.wait()
                for call in range(25):
                    x = rows((4, 3, 8, 13)[(call + number) % 4], seed=number)
                    same(compiled(x), model(x), f"thread {number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert num_replays(pw.report(compiled)) > 50


def test_model_called_by_its_own_split_op() -> None:
    depth = 0

    @torch.library.custom_op("pwtest::recurse", mutates_args=["out"])
    def recurse(x: Tensor, out: Tensor) -> None:
        nonlocal depth
        depth += 1
        try:
            out.copy_(compiled(x) if depth == 1 else x)
        finally:
            depth -= 1

    @recurse.register_fake
    def _(x: Tensor, out: Tensor) -> None:
        return None

    def model(x: Tensor) -> Tensor:
        x = x * 2
        out = torch.empty_like(x)
        torch.ops.pwtest.recurse(x, out)
        return out + 1

    compiled = compile(model, splitting_ops=["pwtest::recurse"])
    for call in range(4):
        for n in (4, 3):
            x = mark_dynamic([rows(n, seed=call)])[0]
            with quiet():
                same(compiled(x), (x * 4 + 1) + 1, f"call {call} of {n}")
    assert fallbacks(pw.report(compiled)).keys() == {FallbackReason.NESTED_CALL}
    assert num_replays(pw.report(compiled)) > 0


def test_an_error_in_a_split_op_leaves_the_model_usable() -> None:
    fails = False

    @torch.library.custom_op("pwtest::fragile", mutates_args=["out"])
    def fragile(x: Tensor, out: Tensor) -> None:
        if fails:
            raise ValueError("no such block")
        out.copy_(x)

    @fragile.register_fake
    def _(x: Tensor, out: Tensor) -> None:
        return None

    def model(x: Tensor) -> Tensor:
        x = x * 2
        out = torch.empty_like(x)
        torch.ops.pwtest.fragile(x, out)
        return out + 1

    compiled = compile(model, splitting_ops=["pwtest::fragile"])
    for _ in range(5):
        for n in (4, 3):
            fails = True
            x = mark_dynamic([rows(n)])[0]
            with pytest.raises(ValueError, match="no such block"):
                compiled(x)
            fails = False
            same(compiled(x), rows(n) * 2 + 1, f"{n}")
            assert not only_runtime(compiled).turns.is_taken
    served_from_graphs(pw.report(compiled))


def test_dynamo_reset() -> None:
    compiled = compile(toy)
    for _ in range(2):
        for call in range(3):
            x = mark_dynamic([rows(4, seed=call)])[0]
            same(compiled(x), toy(x), f"call {call}")
        assert num_replays(pw.report(compiled)) > 0
        torch._dynamo.reset()
        gc.collect()
        assert runtimes(compiled) == [], "a reset frees what was captured"


def memory_of(compiled: Any) -> list[weakref.ref[Any]]:
    """What must be gone after the model: graphs, buffers, the pool."""
    captures = only_runtime(compiled).captures
    memory = captures.memory
    graphs = [kept.owner for size in captures.captured.values() for kept in size.keep_alive]
    return [*map(weakref.ref, graphs), *map(weakref.ref, (memory.arena, memory.pool))]


def test_deleting_the_model_gives_the_memory_back() -> None:
    model = Decoder()
    compiled = warmed(model)
    compiled(rows(5))
    memory = [weakref.ref(next(model.parameters())), *memory_of(compiled)]
    assert len(memory) > 3
    del model, compiled
    gc.collect()
    assert [ref() for ref in memory] == [None] * len(memory)


def test_deleting_one_of_two_instances() -> None:
    first, second = Decoder(seed=0), Decoder(seed=1)
    compiled_first = warmed(first)
    memory = memory_of(compiled_first)
    compiled_second = warmed(second)
    same(compiled_second(rows(5)), second(rows(5)), "before")
    del first, compiled_first
    gc.collect()
    assert [ref() for ref in memory] == [None] * len(memory)
    same(compiled_second(rows(5)), second(rows(5)), "after")
    served_from_graphs(pw.report(compiled_second))


def test_moving_on_frees_old_captures() -> None:
    """Graphs of weights that moved are dropped before new ones are captured."""
    model = Decoder()
    compiled = warmed(model)
    graph = weakref.ref(
        only_runtime(compiled).captures.captured[CUDAGraphMode.PIECEWISE, 16, 0].keep_alive[0].owner
    )
    new_data(model)
    with quiet():
        compiled(rows(5))
    gc.collect()
    assert graph() is None


def test_deep_copy_of_the_original_model() -> None:
    model = Decoder()
    compiled = warmed(model)
    twin = copy.deepcopy(model)
    new_values_in_place(twin)
    same(compiled(rows(5)), model(rows(5)), "original")
    compiled_twin = warmed(twin)
    same(compiled_twin(rows(5)), twin(rows(5)), "copy")
    same(compiled(rows(5)), model(rows(5)), "original again")


def test_deep_copy_of_the_compiled_model() -> None:
    model = Decoder()
    compiled = compile(model)
    pw.warmup(compiled, of_rows(), seal=False)
    twin = copy.deepcopy(compiled)
    new_values_in_place(twin)
    pw.warmup(twin, of_rows(), seal=False)
    for n in (5, 8):
        same(twin(rows(n)), twin._orig_mod(rows(n)), "copy")
        same(compiled(rows(n)), model(rows(n)), "original")
    served_from_graphs(pw.report(twin))
    served_from_graphs(pw.report(compiled))
