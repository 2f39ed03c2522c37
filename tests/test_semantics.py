"""Whatever is cut, padded, captured and replayed: the numbers are eager's.

Each case runs with emulated graphs: several sizes that share capture sizes, exact and padded,
interleaved, often enough that most calls are replays. Outputs, and inputs after the call, are
compared with eager. Where padding is not safe the call falls back; the numbers are right anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import agrees_with_eager, out_attn, rows

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
    buckets = x[:, 0].long().clamp(0, 7)
    return out_attn(x, x, x), torch.bincount(buckets, minlength=8)


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
    fell_back = {reason for graph in report.graphs for reason in graph.fallbacks}
    assert served > 0 or fell_back, "neither replayed nor a reason"
