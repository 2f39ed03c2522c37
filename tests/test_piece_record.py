"""A piece as bytes: another process makes one of the same key, that computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from piecewise_backend.cache_key import piece_key
from piecewise_backend.canonical import DistinctPiece, identify
from piecewise_backend.jobs import CompileJob, job_of, message_of
from piecewise_backend.passes import PassList, one_row_passes, passes_for
from piecewise_backend.passes.fusions import FUSIONS
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.piece_record import made_up_inputs, rebuild_piece, record_piece
from piecewise_backend.splitting import split_graph
from piecewise_backend.steps import Host, SplitGraph
from piecewise_backend.trace_bytes import from_bytes, to_bytes
from tests.helpers import (
    SPLIT_OPS,
    attn,
    indexed,
    named,
    out_attn,
    rows,
    widen,
)


def pieces_of(function: Callable[..., Any], *args: Any) -> list[DistinctPiece]:
    """The first dimension of the first argument varies."""
    found: list[SplitGraph] = []

    def record(gm: fx.GraphModule, example_inputs: Any) -> Any:
        found.append(split_graph(gm, SPLIT_OPS))
        return gm.forward

    torch._dynamo.maybe_mark_dynamic(args[0], 0)
    torch.compile(function, backend=record, fullgraph=True, dynamic=False)(*args)
    (traced,) = found
    instances = identify(traced.pieces)
    return list({one.distinct.index: one.distinct for one in instances}.values())


def numbers_of(piece: DistinctPiece) -> tuple[int, ...]:
    """Its integer inputs, with six tokens."""
    values = [6 if isinstance(ref, Host) else getattr(ref, "value", None) for ref in piece.inputs]
    return tuple(value for value in values if isinstance(value, int))


def linear_layers(x: Tensor, weights: Tensor) -> Tensor:
    for weight in weights.unbind():
        x = out_attn(nn.functional.silu(x @ weight), x, x) + x
    return x.sum(-1)


def scales_that_differ(x: Tensor) -> Tensor:
    x = out_attn(x * 0.25, x, x)
    x = out_attn(x * 0.5, x, x)
    return out_attn(x * 0.125, x, x)


def indices_that_differ(x: Tensor) -> Tensor:
    for index in range(3):
        x = out_attn(indexed(x, index), x, x)
    return x


def views_of_one_tensor(x: Tensor) -> Tensor:
    q, k, v = torch.cat([x, x + 1, x + 2], -1).split(4, -1)
    out = torch.empty_like(x)
    attn(q, k, v, out)
    return out * k + q + v


def size_arithmetic(x: Tensor) -> Tensor:
    count = x.shape[0]
    return out_attn(x, x, x).new_ones(2 * count + 1, count) * count


def writes_to_an_input(x: Tensor, cache: Tensor) -> Tensor:
    cache[: x.shape[0]].copy_(x)
    return out_attn(x, x, x) + cache[:1]


def an_expanded_input(x: Tensor, mask: Tensor) -> Tensor:
    return out_attn(x, x, x) * mask


def an_op_of_a_user(x: Tensor) -> Tensor:
    return out_attn(widen(x, 2)[:, :4], x, x)


PROGRAMS = {
    linear_layers: (rows(6), torch.randn(2, 4, 4)),
    scales_that_differ: (rows(6),),
    indices_that_differ: (rows(6),),
    views_of_one_tensor: (rows(6),),
    size_arithmetic: (rows(6),),
    writes_to_an_input: (rows(6), torch.zeros(32, 4)),
    an_expanded_input: (rows(6), torch.ones(1, 4).expand(6, 4)[:1]),
    an_op_of_a_user: (rows(6),),
}


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_a_piece_comes_back(function: Callable[..., Any]) -> None:
    pieces = pieces_of(function, *PROGRAMS[function])
    assert pieces
    for piece in pieces:
        numbers = numbers_of(piece)
        message = message_of(CompileJob(record_piece(piece), numbers, None))
        again = rebuild_piece(job_of(message).piece, numbers)
        assert again.index == piece.index
        assert again.structure == piece.structure
        assert piece_key(again, numbers, {}, {}) == piece_key(piece, numbers, {}, {})
        inputs = made_up_inputs(piece, numbers)
        copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
        torch.use_deterministic_algorithms(True)  # memory that nothing is written to is NaN
        try:
            results, expected = again.module(*inputs), piece.module(*copies)
        finally:
            torch.use_deterministic_algorithms(False)
        assert len(results) == len(expected)
        for got, wanted in zip([*results, *inputs], [*expected, *copies], strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_made_up_inputs_may_be_used() -> None:
    """Of the layout of the trace, with random numbers, and integers that index anything."""
    (first, *_) = pieces_of(linear_layers, *PROGRAMS[linear_layers])
    inputs = made_up_inputs(first, numbers_of(first))
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    assert all(x.isfinite().all() and x.std() > 0 for x in tensors)

    def embed(ids: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        x = table[ids]
        return out_attn(x, x, x) * mask

    table, mask = torch.randn(3, 4), torch.ones(6, 1, dtype=torch.bool)
    first, *_ = pieces_of(embed, torch.tensor([0, 1, 2, 0, 1, 2]), table, mask)
    inputs = made_up_inputs(first, numbers_of(first))
    ids = next(x for x in inputs if isinstance(x, Tensor) and x.dtype == torch.int64)
    assert ids.tolist() == [0] * 6
    first.module(*inputs)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float64, torch.int8])
def test_made_up_inputs_of_every_kind(dtype: torch.dtype) -> None:
    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return out_attn(x, x, x) * weight.to(x.dtype)

    for piece in pieces_of(scaled, rows(6), torch.zeros(4, dtype=dtype)):
        for value in made_up_inputs(piece, numbers_of(piece)):
            assert not isinstance(value, Tensor) or value.double().isfinite().all()


def test_made_up_inputs_whose_elements_share_memory() -> None:
    def scaled(x: Tensor, weight: Tensor, counts: Tensor, nothing: Tensor) -> Tensor:
        x = out_attn(x, x, x) * weight + counts
        return torch.cat([x, nothing])

    expanded = torch.randn(4, 1).expand(4, 4)[:1], torch.ones(1, dtype=torch.int64).expand(4)
    *_, last = pieces_of(scaled, rows(6), *expanded, torch.empty(0, 4))
    inputs = made_up_inputs(last, numbers_of(last))
    tensors = [x for x in inputs if isinstance(x, Tensor) and 0 in x.stride()]
    assert [x.stride() for x in tensors] == [(1, 0), (0,)]
    assert all(x.isfinite().all() for x in tensors)
    last.module(*inputs)


def test_arguments_by_number_stay_here() -> None:
    """A name that differs by layer is an index into a table of this process."""

    def names_that_differ(x: Tensor) -> Tensor:
        for index in range(3):
            x = out_attn(named(x, f"layer.{index}"), x, x)
        return x

    first, *_ = pieces_of(names_that_differ, rows(6))
    with pytest.raises(NoContentError, match="numbered in this process"):
        record_piece(first)


def test_the_program_that_was_started_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = pieces_of(an_op_of_a_user, rows(6))
    assert record_piece(first).modules == ("tests.helpers",)
    monkeypatch.setattr(widen._init_fn, "__module__", "__main__")
    with pytest.raises(NoContentError, match="the program that was started"):
        record_piece(first)


def test_passes_of_the_program_that_was_started_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process would look in its own main module; one like this looks in its own."""
    monkeypatch.setattr(rows, "__module__", "__main__")
    monkeypatch.setattr("__main__.rows", rows, raising=False)
    with pytest.raises(NoContentError, match="rows of the program that was started"):
        to_bytes((rows,), same_program=False)
    assert from_bytes(to_bytes((rows,))) == (rows,)


def test_functions_without_a_name_stay_here() -> None:
    with pytest.raises(NoContentError):
        to_bytes(lambda: None)
    assert from_bytes(to_bytes((torch.ops.aten.add.Tensor, rows))) == (
        torch.ops.aten.add.Tensor,
        rows,
    )


@pytest.mark.parametrize("on_cuda", [False, True])
def test_passes_come_back(on_cuda: bool) -> None:
    """Those of this package, as they are and as more for one row."""
    passes = (*passes_for(on_cuda=on_cuda), *one_row_passes())
    again = from_bytes(to_bytes(passes))
    assert [item.name for item in again] == [item.name for item in passes]
    assert PassList(again).key() == PassList(passes).key()


def test_a_spelling_without_a_name_stays_here() -> None:
    fusion = FUSIONS["fuse_rms_norm_static_quant"]
    mine = fusion.with_spelling("rms_norm", lambda x, weight, eps: x * weight + eps)
    with pytest.raises(NoContentError):
        to_bytes(mine)
    assert from_bytes(to_bytes(fusion)).spellings == fusion.spellings
