"""Whatever is cut, padded, captured and replayed: the numbers are eager's.

Each case runs with emulated graphs: several sizes that share capture sizes, exact and padded,
interleaved, often enough that most calls are replays. Outputs, and inputs after the call, are
compared with eager. Where padding is not safe the call falls back; the numbers are right anyway.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piecewise_backend as pw
from tests.helpers import (
    Decoder,
    agrees_with_eager,
    compile,
    mark_dynamic,
    out_attn,
    quiet_fallbacks,
    rows,
    same,
)

OPS = torch.ops.pwtest
SIZES = (8, 5, 4, 3)

CASES: dict[str, tuple[Callable[..., Any], Callable[[int], Sequence[Any]]]] = {}


def one(size: int) -> Sequence[Tensor]:
    return (rows(size),)


def two(size: int) -> Sequence[Tensor]:
    return (rows(size), rows(size, seed=1))


def three(size: int) -> Sequence[Tensor]:
    return (rows(size), rows(size, seed=1), rows(size, seed=2))


def case(make_inputs: Callable[[int], Sequence[Any]] = one) -> Callable[..., Any]:
    """A function that is a test by itself."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[function.__name__] = (function, make_inputs)
        return function

    return add


# Buffers that a piece allocates and a split op fills


@case()
def out_buffer_of_the_piece_before(x):
    out = torch.empty_like(x)
    OPS.double(x * 2, out)
    return out + 1


@case()
def two_zero_buffers_are_not_one(x):
    a, b = torch.zeros_like(x), torch.zeros_like(x)
    OPS.double(x, a)
    OPS.double(x * 3, b)
    return a + 1, b - 1


@case()
def two_empty_buffers_are_not_one(x):
    a, b = torch.empty_like(x), torch.empty_like(x)
    OPS.double(x, a)
    OPS.double(x * 3, b)
    return a + 1, b - 1


@case()
def buffers_made_in_other_ways(x):
    a, b = x.new_empty(x.shape), torch.empty(x.shape, dtype=x.dtype)
    OPS.double(x, a)
    OPS.double(x * 3, b)
    return a + 1, b - 1


@case()
def filled_buffer_that_is_not_written(x):
    a, b = torch.full((x.shape[0], 4), 2.0), torch.full((x.shape[0], 4), 2.0)
    OPS.double(x, a)
    return a + 1, b - 1


@case()
def constant_buffers(x):
    y = x.sin()
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    OPS.double(torch.ones(4, 4) * 5, a)
    return a + 1, b - 1, y


@case()
def same_expression_twice_one_overwritten(x):
    a, b = x * 2, x * 2
    OPS.double(x, a)
    return a + 1, b - 1


@case()
def buffer_with_a_spare_row_for_each_token(x):
    out = torch.empty(2 * x.shape[0], 4)
    OPS.double(torch.cat([x, x + 1]), out)
    return out.view(2, -1, 4).sum(0)


@case()
def buffer_read_by_a_later_split_op_only(x):
    a, b = torch.empty_like(x), torch.empty_like(x)
    OPS.double(x, a)
    OPS.attn(a, a, x, b)
    return b


@case()
def buffer_is_reused_by_the_next_layer(x):
    out = torch.empty_like(x)
    OPS.double(x, out)
    y = out + 1
    OPS.double(y, out)
    return y, out * 3


@case()
def buffer_written_in_halves(x):
    out, half = torch.empty_like(x), x.shape[0] // 2
    OPS.double(x[:half], out[:half])
    OPS.double(x[half:] * 3, out[half:])
    return out + 1


@case()
def allocations_between_two_split_ops(x):
    a = torch.empty_like(x)
    OPS.double(x, a)
    b, c, d = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    OPS.double(a, b)
    e = torch.empty_like(x)
    OPS.attn(a, b, x, c)
    OPS.attn(a, b, c, d)
    OPS.double(d, e)
    return a + b, c + d + e


@case()
def views_between_two_split_ops(x):
    a, b = torch.empty_like(x), torch.empty_like(x)
    OPS.double(x, a)
    OPS.double(a.view(-1, 2, 2), b.view(-1, 2, 2))
    return b


# Copies, clones and views across a cut


@case()
def clone_of_an_input_is_overwritten(x):
    y = x.clone()
    OPS.double(x * 3, y)
    return x + 1, y + 2


@case()
def clone_of_a_value_is_overwritten(x):
    t = x * 2
    y = t.clone()
    OPS.double(x, y)
    return t + 1, y + 2


@case()
def contiguous_is_the_same_tensor(x):
    t = x * 2
    y = t.contiguous()
    OPS.double(x, y)
    return t + 1, y + 2


@case()
def adding_zero_is_a_copy(x):
    t = x * 2
    y = t + 0
    OPS.double(x, y)
    return t + 1, y + 2


@case()
def sum_over_tokens_expanded_and_cloned(x):
    t = x.sum(0, keepdim=True).expand(x.shape[0], 4).clone()
    OPS.double(x, t)
    return t + 1


@case()
def expanded_and_made_contiguous(x):
    t = x.sum(1, keepdim=True).expand(-1, 4).contiguous()
    OPS.double(x, t)
    return t + 1


@case()
def expanded_value_crosses(x):
    t = x.sum(1, keepdim=True).expand(-1, 4)
    return out_attn(t, x, x) + t


@case()
def view_of_a_buffer_crosses(x):
    out = torch.empty_like(x)
    OPS.double((x * 2).view(-1, 2, 2), out.view(-1, 2, 2))
    return out + 1


@case()
def value_and_its_view_cross(x):
    t = x * 2
    v = t.view(-1, 2, 2)
    OPS.double((x * 5).view(-1, 2, 2), v)
    return t + 1, v + 1


@case()
def slice_of_an_input_is_written(x):
    v = x[:, :2]
    OPS.double(v.clone() * 3, v)
    return x + 1


@case()
def chunks_of_one_projection_cross(x):
    q, k, v = torch.cat([x, x * 2, x * 3], -1).split([4, 4, 4], -1)
    out = torch.empty(x.shape[0], 2, 2, dtype=x.dtype)
    OPS.attn(q, k, v, out.view(-1, 4))
    return out.reshape(-1, 4) + q


@case()
def value_with_tokens_last(x):
    t = (x * 2).t()
    out = torch.empty_like(x)
    OPS.double(x, out)
    return t.t() + out, t


@case()
def contiguous_value_with_tokens_last(x):
    t = (x * 2).t().contiguous()
    out = torch.empty_like(t)
    OPS.double(t, out)
    return out.t() + x, t, out


@case()
def heads_before_tokens(x):
    t = (x * 2).view(-1, 2, 2).transpose(0, 1)
    return out_attn(t, t * 2, t.contiguous()).transpose(0, 1).reshape(-1, 4)


@case()
def heads_before_tokens_through_a_fresh_result(x):
    t = (x * 2).view(-1, 2, 2).transpose(0, 1).contiguous()
    return OPS.fresh(t, t, t).transpose(0, 1).reshape(-1, 4) + x


@case()
def value_is_read_by_far_later_pieces(x):
    residual = x * 3
    for _ in range(3):
        x = out_attn(x, x + 1, x * 2) * 0.25
    return x + residual


@case()
def aliases_of_one_value_in_two_pieces(x):
    t = x * 2
    v = t[:, 1:3]
    a = out_attn(x, x, x)
    v.add_(1)
    b = out_attn(t, a, a)
    return t + b, v


# Mutation


@case()
def input_is_written_before_and_after(x):
    x.add_(1)
    out = torch.empty_like(x)
    OPS.double(x, out)
    x.mul_(2)
    return out + x


@case()
def value_is_written_in_a_later_piece(x):
    t, out = x * 2, torch.empty_like(x)
    OPS.double(t, out)
    t.add_(out)
    OPS.double(t, out)
    return out + t


@case()
def split_op_writes_an_input(x):
    OPS.double(x * 2, x)
    return x + 1


@case()
def split_op_reads_and_writes_the_same_input(x):
    OPS.double(x, x)
    return x * 2


@case(two)
def one_input_overwrites_another(x, y):
    y.copy_(x * 2)
    out = out_attn(x, y, y)
    x.copy_(out)
    return y + 1


@case()
def written_input_is_returned(x):
    out = out_attn(x, x, x)
    x.add_(out)
    return x


@case()
def written_row_of_an_input(x):
    x[0] = x[0] * 2
    out = out_attn(x, x, x)
    x[:, 1] = 7
    return out


@case()
def fresh_result_is_written_in_place(x):
    out = OPS.fresh(x, x, x)
    out.mul_(2)
    again = OPS.fresh(out, x, x)
    out.add_(1)
    return out, again


# Results of split ops


@case()
def fresh_result_is_read_by_the_next_piece(x):
    return OPS.fresh(x * 2, x, x) + 1


@case()
def fresh_result_is_read_two_pieces_later(x):
    a = OPS.fresh(x, x, x)
    b = OPS.fresh(x + 1, x, x)
    c = OPS.fresh(b * 2, x, x)
    return a + c


@case()
def fresh_result_is_only_returned(x):
    y = x * 2
    return OPS.fresh(y, y, x)


@case()
def fresh_result_is_returned_and_read(x):
    out = OPS.fresh(x, x, x)
    return out, out * 2


@case()
def fresh_result_goes_to_a_split_op(x):
    y = x * 2
    return OPS.fresh(OPS.fresh(y, x, x), y, x)


@case()
def fresh_result_is_viewed(x):
    out = OPS.fresh(x * 2, x, x).view(-1, 2, 2)
    return OPS.fresh(out, out, out).transpose(1, 2), out


@case()
def fresh_result_is_not_used(x):
    OPS.fresh(x, x, x)
    return x * 2


@case()
def fresh_results_in_many_layers(x):
    for layer in range(4):
        x = x + OPS.fresh(x, x * 2, x + layer) * 0.1
    return x


@case(two)
def one_of_two_results_at_once_the_other_later(x, y):
    a, b = OPS.pair(x * 2, y)
    c = OPS.fresh(a + 1, x, y)
    d = OPS.fresh(c * 2, c, y)
    return b + d


@case(two)
def second_result_is_not_used(x, y):
    a, _ = OPS.pair(x * 2, y)
    return a + 1


@case(two)
def first_result_is_not_used(x, y):
    _, b = OPS.pair(x * 2, y)
    return b + 1


@case(two)
def both_results_are_only_returned(x, y):
    return OPS.pair(x * 2, y * 3)


@case(two)
def results_swapped(x, y):
    a, b = OPS.pair(x * 2, y)
    c, d = OPS.pair(b, a)
    return d + 1, c, b


@case()
def list_of_results(x):
    a, b, c = OPS.parts(x * 2, 3)
    return a + c, b


@case()
def item_of_a_list_taken_twice(x):
    items = OPS.parts(x * 2, 3)
    return items[0] + items[-1], items[0] * 2


@case()
def writes_one_and_returns_another(x):
    out = torch.empty_like(x)
    result = OPS.both(x * 2, out)
    return result + 1, out - 1


@case()
def called_with_keywords(x):
    out = torch.empty_like(x)
    OPS.keyword(x=x + 1, out=out, scale=3.0)
    return out + 1


@case()
def called_with_keywords_in_another_order(x):
    out = torch.empty_like(x)
    OPS.keyword(scale=3.0, out=out, x=x + 1)
    return out + 1


# Where the split op stands


@case()
def split_op_is_first(x):
    OPS.double(x, x)
    return x * 2


@case(two)
def split_op_is_first_with_another_output(x, y):
    OPS.double(x, y)
    return y * 2


@case(two)
def split_op_is_last(x, y):
    z = x * 2
    OPS.double(z, y)
    return z


@case(two)
def only_a_split_op(x, y):
    OPS.double(x, y)
    return x


@case(three)
def two_adjacent_split_ops(x, y, z):
    OPS.double(x, y)
    OPS.double(y, z)
    return y + z


@case()
def no_split_op(x):
    return x * 2 + 1, x.relu()


# Sizes


@case()
def size_is_used_on_both_sides(x):
    n = x.shape[0]
    out = torch.empty_like(x)
    OPS.double(x, out)
    return out.view(n * 2, 2) * n


@case()
def expression_of_a_size(x):
    y = torch.cat([x, x])
    m, out = y.shape[0], torch.empty_like(y)
    OPS.double(y, out)
    return out[: m // 2] + x, m


@case()
def size_object_crosses(x):
    y = torch.cat([x, x])
    size = y.size()
    out = torch.empty(size, dtype=x.dtype)
    OPS.double(y, out)
    return out.view(size) + 1


@case()
def size_object_is_unpacked_and_returned(x):
    y = torch.cat([x, x])
    size = y.size()
    a, b = size
    out = torch.empty(*size, dtype=x.dtype)
    OPS.double(y, out)
    return out.view(size[0], -1).reshape(a * 2, b // 2) + 1, size


@case()
def new_zeros_and_expand_of_a_size(x):
    size = x.shape
    a = OPS.fresh(x * 2, x, x)
    b = OPS.fresh(a.new_zeros(size) + 1, x, x)
    return b + torch.ones(1, 1).expand(*size) + a.new_ones(size[0], 1)


@case(three)
def piece_of_sizes_only(x, y, z):
    OPS.double(x, y)
    n = x.shape[0] * 3
    OPS.double(y, z)
    return z.new_zeros(n), z


@case()
def sizes_are_returned(x):
    out = out_attn(x, x, x)
    return out, x.shape[0], out.shape[0] * 2 + 1, out.shape[1]


@case()
def size_reaches_a_split_op(x):
    items = OPS.parts(x, x.shape[1])
    return items[3] * 2


@case()
def every_second_token(x):
    y = (x * 2)[::2]
    return OPS.fresh(y, y, y) + 1


@case()
def leading_half_of_the_tokens(x):
    y = (x * 2)[: x.shape[0] // 2]
    return OPS.fresh(y, y, y) + 1


@case()
def one_more_row_than_tokens(x):
    y = F.pad(x, (0, 0, 1, 0))
    return OPS.fresh(y, y, y) + 1


@case()
def one_more_row_at_the_end(x):
    y = F.pad(x, (0, 0, 0, 1), value=2.0)
    return OPS.fresh(y, y, y) + 1


@case()
def tokens_flattened_with_features(x):
    y = (x * 2).view(-1)
    return OPS.fresh(y, y, y).view(-1, 4) + x


@case()
def tokens_and_features_flattened_the_other_way(x):
    y = (x * 2).t().reshape(-1)
    return OPS.fresh(y, y, y).view(4, -1).t() + x


@case()
def tokens_repeated(x):
    y = x.repeat_interleave(2, dim=0)
    return OPS.fresh(y, y, y)[::2] + x


# Rows that look at other rows


@case()
def largest_of_all_rows(x):
    return out_attn(x, x, x) / x.abs().amax()


@case()
def largest_of_what_a_split_op_filled(x):
    out = out_attn(x, x, x)
    return out / out.abs().amax()


@case()
def softmax_over_tokens(x):
    return out_attn(x, x, x).softmax(0)


@case()
def mean_over_tokens(x):
    return out_attn(x, x, x) - x.mean(0)


@case()
def sum_of_everything(x):
    return out_attn(x, x, x).sum()


@case()
def count_of_tokens_as_a_number(x):
    return out_attn(x, x, x) * x.shape[0]


@case()
def cumulative_sum(x):
    return out_attn(x, x, x).cumsum(0)


@case()
def flipped(x):
    return out_attn(x, x, x).flip(0)


@case()
def last_row(x):
    return out_attn(x, x, x)[-1]


@case()
def last_row_kept_as_a_batch(x):
    return out_attn(x, x, x)[-1:] * 2


@case()
def all_but_the_last_row(x):
    return out_attn(x, x, x)[:-1] * 2


@case()
def first_row(x):
    return out_attn(x, x, x)[0] * 2


@case()
def positions(x):
    return out_attn(x, x, x) + torch.arange(x.shape[0]).unsqueeze(1)


@case()
def positions_reversed(x):
    return out_attn(x, x, x) + torch.arange(x.shape[0] - 1, -1, -1).unsqueeze(1)


@case()
def causal_mask(x):
    n = x.shape[0]
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    scores = (x @ x.t()).masked_fill(~mask, float("-inf")).softmax(-1)
    return out_attn(scores @ x, x, x)


@case()
def sorted_by_value(x):
    return out_attn(x, x, x).sort(0).values


@case()
def rolled(x):
    return out_attn(x, x, x).roll(1, 0)


@case()
def shape_in_a_linspace(x):
    return out_attn(x, x, x) + torch.linspace(0, 1, x.shape[0]).unsqueeze(1)


@case()
def reduction_that_ignores_nan(x):
    return out_attn(x, x, x) - x.nansum()


@case()
def integers_counted(x):
    buckets = F.one_hot(x[:, 0].long().clamp(0, 7), 8)
    return out_attn(x, x, x), buckets.sum(0)


def counts(size: int) -> Sequence[Any]:
    return (rows(size), torch.arange(size) % 5 + 1)


@case(counts)
def largest_integer(x, count):
    return out_attn(x, x, x) / count.amax(), count.cumsum(0)


@case(counts)
def smallest_integer(x, count):
    return out_attn(x, x, x) / count.amin()


@case()
def total_without_nan_or_large_values(x):
    kept = x.nan_to_num(0).clamp(-1, 1)
    return out_attn(x, x, x) + kept.sum()


# Arguments and outputs


def ids_and_positions(size: int) -> Sequence[Any]:
    return (torch.arange(size) % 7, torch.arange(size), rows(size, dtype=torch.bfloat16))


@case(ids_and_positions)
def integer_and_half_inputs(ids, where, x):
    table = torch.arange(28.0).view(7, 4).to(torch.bfloat16)
    y = F.embedding(ids, table) + x * 2
    return out_attn(y, y, x) + where.unsqueeze(1), ids + 1, where > 2


@case()
def nested_outputs_with_constants(x):
    out = out_attn(x, x, x)
    return {"out": out, "rest": [x, None, 3, (out + 1, "text")]}, 2.5, True


@case()
def inputs_are_returned(x):
    out = torch.empty_like(x)
    OPS.double(x, out)
    return x, out, None, 3


@case()
def outputs_are_returned_twice(x):
    y, out = x * 2, torch.empty_like(x)
    OPS.double(y, out)
    return y, y, out, out


@case()
def views_are_returned(x):
    y = x * 2
    out = out_attn(y, y, x)
    return out.t(), out[:, 1], y.view(-1, 2, 2), out[:, None]


@case()
def input_view_is_returned(x):
    return x.t(), out_attn(x, x, x), x[:, 1:]


@case(lambda size: (rows(size, 8)[:, 2:6],))
def strided_input(x):
    return out_attn(x, x, x) + x


@case(lambda size: (rows(4, size).t(),))
def transposed_input(x):
    return out_attn(x, x, x) + x


@case(lambda size: (rows(size + 2)[1:-1],))
def input_inside_a_larger_buffer(x):
    return out_attn(x, x, x) + x


@case(lambda size: (rows(1).expand(size, 4),))
def expanded_input(x):
    return x * 2 + out_attn(x, x, x)


@case(lambda size: (rows(4, size),))
def tokens_last(x):
    return out_attn(x, x * 2, x) + 1


@case(lambda size: (rows(size), torch.tensor(2.5)))
def scalar_tensor_input(x, scale):
    return out_attn(x * scale, x, x) * scale, scale + 1


@case(lambda size: (rows(size), None))
def none_input(x, bias):
    out = out_attn(x, x, x) + 1
    return out if bias is None else out + bias


@case(lambda size: (rows(size), [rows(size, seed=1), {"z": rows(size, seed=2)}]))
def nested_inputs(x, more):
    return out_attn(x, more[0], more[1]["z"]) + more[0]


@case(lambda size: (rows(size), torch.arange(size + 1, dtype=torch.int32)))
def offsets_have_one_more_row(x, offsets):
    return out_attn(x, x, x) + 1, OPS.fresh(offsets, offsets, offsets)


@case(lambda size: (rows(size), torch.arange(size + 1, dtype=torch.int32)))
def offsets_are_read_by_a_piece(x, offsets):
    return out_attn(x, x, x) + 1, offsets[1:] - offsets[:-1]


@case(lambda size: (rows(size), rows(size // 2, seed=1)))
def half_as_many_rows(x, y):
    return out_attn(x, x, x) + 1, OPS.fresh(y, y, y) * 2


@case(lambda size: (rows(size), size * 3))
def integer_argument(x, count):
    return out_attn(x, x, x) + 1, x * count


@case(lambda size: (rows(size), rows(6, seed=1)))
def cache_is_updated(x, cache):
    cache[0] = x[0]
    out = out_attn(x, x, x)
    cache.mul_(0.5)
    return out + cache[1]


@case(lambda size: (rows(size), rows(32, seed=1), torch.arange(size) * 2 % 31))
def cache_is_scattered_into(x, cache, slots):
    cache[slots] = x * 2
    out = out_attn(x, cache[slots], x)
    return out + 1


@case(lambda size: (rows(size), rows(6, seed=1)))
def cache_is_written_by_the_split_op(x, cache):
    OPS.double(cache * 2, cache)
    return x + cache[0], cache.sum()


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_eagers(name: str) -> None:
    function, make_inputs = CASES[name]
    report = agrees_with_eager(function, make_inputs, sizes=SIZES)
    served = sum(graph.num_replays for graph in report.graphs)
    assert served > 0 or name in NEVER_REPLAYED


NEVER_REPLAYED = {
    "offsets_are_read_by_a_piece",  # two varying dimensions, n and n + 1
    "half_as_many_rows",
    "integer_argument",  # varies beside the tokens
    "cache_is_updated",  # another cache in every call
    "cache_is_scattered_into",
    "expanded_input",  # a buffer laid out like it cannot be written
}


class Scattering(nn.Module):
    """Writes rows to a cache that stays, inside of a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = nn.Buffer(torch.zeros(32, 4))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.cache[slots] = x * 2
        return out_attn(x, self.cache[slots], x) + 1


class Counting(nn.Module):
    """Buffers that a piece changes: a count of calls, a running mean, the last row."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.mean = nn.Buffer(torch.zeros(4))
        self.first = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.calls.add_(1)
        out = out_attn(x, x, x)
        self.first.copy_(out[0])
        self.mean.lerp_(out[0], 0.5)
        return out + self.mean + self.calls


class TwoViews(nn.Module):
    """Two caches in one allocation, both written."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Buffer(torch.zeros(2, 32, 4))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        keys, values = self.both.unbind(0)
        keys.index_put_((slots,), x * 2)
        values.index_put_((slots,), x * 3)
        return out_attn(x, keys[slots], values[slots])


class LargestSoFar(nn.Module):
    """A buffer that is updated from all rows: padding must not reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.amax()))
        return out_attn(x, x, x) + 1


class SplitOpState(nn.Module):
    """A buffer that a split op fills and the next piece reads."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Buffer(torch.ones(3, 4))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        OPS.double(self.state * 0.75, self.state)
        return x + self.state[1]


@pytest.mark.parametrize("module", [Scattering, Counting, TwoViews, LargestSoFar, SplitOpState])
def test_state_of_a_module_stays_eagers(module: type[nn.Module]) -> None:
    eager, piecewise = module(), module()
    compiled = compile(piecewise)
    with torch.no_grad():
        for call in range(5):
            for size in SIZES:
                x, slots = rows(size, seed=call), (torch.arange(size) * 3 + call) % 32
                with quiet_fallbacks():
                    got = compiled(*mark_dynamic((x, slots)))
                where = f"call {call} of size {size}"
                same(got, eager(x, slots), where)
                same(dict(piecewise.named_buffers()), dict(eager.named_buffers()), where)
    (graph,) = pw.report(compiled).graphs
    assert graph.num_replays > 0


def test_padding_that_would_reach_a_cache_is_found_out() -> None:
    compiled = compile(Scattering(), cudagraph_capture_sizes=[4])
    with torch.no_grad():
        for _ in range(2):
            compiled(*mark_dynamic((rows(4), torch.arange(4))))
        with pytest.warns(RuntimeWarning, match="padding would change real rows"):
            compiled(rows(3), torch.arange(3))


@pytest.mark.parametrize("outputs", ["fresh", "static"])
@pytest.mark.parametrize("first_size", [1, 2, 7, 16, 40])
def test_first_call_of_any_size_serves_all_others(outputs: str, first_size: int) -> None:
    model = Decoder(num_layers=2)
    compiled = compile(model, outputs=outputs)
    with torch.no_grad(), quiet_fallbacks():
        compiled(*mark_dynamic((rows(first_size),)))
        for call in range(3):
            for size in (1, 2, 3, 4, 5, 8, 9, 16, 17, 0):
                x = rows(size, seed=call)
                same(compiled(*mark_dynamic((x,))), model(x), f"call {call} of size {size}")


def test_two_inputs_that_disagree_about_tokens_fall_back() -> None:
    def function(x, y):
        return out_attn(x, x, x) + 1, out_attn(y, y, y) * 2

    compiled = compile(function)
    with torch.no_grad(), quiet_fallbacks():
        for size, other in [(4, 4), (4, 4), (4, 4), (4, 3), (3, 4), (4, 4)]:
            args = (rows(size), rows(other, seed=1))
            same(compiled(*mark_dynamic(args)), function(*args), f"{size} and {other} rows")
    (graph,) = pw.report(compiled).graphs
    assert graph.num_replays > 0
    assert graph.fallbacks["inputs disagree about the number of tokens"] == 2


def test_outputs_are_not_overwritten_by_later_calls() -> None:
    model = Decoder()
    compiled = compile(model)
    with torch.no_grad():
        for _ in range(3):
            compiled(*mark_dynamic((rows(4),)))
        kept = [(compiled(rows(4, seed=seed)), model(rows(4, seed=seed))) for seed in range(9)]
    for got, expected in kept:
        same(got, expected, "kept output")


@pytest.mark.parametrize(
    "name",
    ["sum_of_everything", "softmax_over_tokens", "last_row", "largest_integer", "sorted_by_value"],
)
def test_warm_up_leaves_exact_sizes_their_graphs(name: str) -> None:
    function, make_inputs = CASES[name]
    compiled = compile(function)
    with torch.no_grad():
        pw.warmup(compiled, lambda descriptor: make_inputs(descriptor.num_tokens))
        with quiet_fallbacks():
            for size in (16, 13, 8, 5, 4, 3):
                args = make_inputs(size)
                same(compiled(*args), function(*make_inputs(size)), f"size {size}")
    (graph,) = pw.report(compiled).graphs
    assert graph.num_replays >= 3
    assert set(graph.padding_unsafe) == {4, 8, 16}
    assert graph.fallbacks == {"padding would change real rows in a piece of this model": 3}


def test_every_size_in_random_order_agrees() -> None:
    generator = random.Random(0)
    model = Decoder(num_layers=3)
    compiled = compile(model)
    with torch.no_grad():
        pw.warmup(compiled, lambda descriptor: (rows(descriptor.num_tokens),))
        for call in range(120):
            x = rows(generator.randint(1, 16), seed=call)
            same(compiled(x), model(x), f"call {call} of size {x.size(0)}")
    (graph,) = pw.report(compiled).graphs
    assert graph.fallbacks == {}
