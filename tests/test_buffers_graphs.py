"""Stable memory and emulated graphs: a wrong lifetime or address gives wrong numbers here too."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from piecewise_backend import _torch
from piecewise_backend.buffers import Arena
from piecewise_backend.errors import CaptureError
from piecewise_backend.graphs import EmulatedGraphPool, collector_paused

CPU = torch.device("cpu")


def leased(arena: Arena, num_rows: int = 4) -> Tensor:
    return arena.tensor(torch.float32, (num_rows, 4), (4, 1), num_rows * 16)


def test_lease_comes_back_with_the_last_view_only() -> None:
    arena = Arena(CPU)
    tensor = leased(arena)
    address, view = tensor.data_ptr(), tensor[1:, :2]
    del tensor
    assert leased(arena).data_ptr() != address
    del view
    assert leased(arena).data_ptr() == address


def test_weak_view_does_not_hold_a_lease() -> None:
    arena = Arena(CPU)
    tensor = leased(arena)
    weak = _torch.weak_view(tensor)
    address = tensor.data_ptr()
    assert (weak.data_ptr(), weak.shape, weak.stride()) == (address, tensor.shape, tensor.stride())
    del tensor
    other = leased(arena)
    assert other.data_ptr() == address
    other.fill_(7)
    assert (weak == 7).all()


def test_live_leases_never_share_memory() -> None:
    arena = Arena(CPU)
    tensors = [leased(arena, num_rows) for num_rows in (1, 8, 2, 8, 3)]
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    assert [tensor.unique().tolist() for tensor in tensors] == [[i] for i in range(5)]


def test_the_smallest_block_that_fits_is_taken() -> None:
    arena = Arena(CPU)
    large, small = leased(arena, 1000), leased(arena, 20)
    addresses = large.data_ptr(), small.data_ptr()
    del large, small
    first = leased(arena, 10)
    second = leased(arena, 10)
    assert (second.data_ptr(), first.data_ptr()) == addresses


def test_memory_does_not_grow_when_sizes_descend_or_room_was_asked_for() -> None:
    arena = Arena(CPU)
    for num_rows in (64, 32, 16):
        leased(arena, num_rows)
    assert arena.num_bytes == 64 * 16
    roomy = Arena(CPU)
    for num_rows in (16, 32, 64):
        roomy.tensor(torch.float32, (num_rows, 4), (4, 1), num_rows * 16, at_least=64 * 16)
    assert roomy.num_bytes == 64 * 16


def test_empty_and_odd_layouts_can_be_leased() -> None:
    arena = Arena(CPU)
    assert arena.tensor(torch.float32, (0, 4), (4, 1), 0).shape == (0, 4)
    assert arena.tensor(torch.int64, (), (), 8).dim() == 0
    assert arena.tensor(torch.bfloat16, (3, 5), (1, 0), 6).stride() == (1, 0)


@pytest.mark.parametrize("inference", [True, False])
def test_leased_tensors_can_be_written_in_every_mode(inference: bool) -> None:
    arena = Arena(CPU)
    with torch.inference_mode(inference):
        tensor = leased(arena)
    with torch.inference_mode(not inference):
        tensor.add_(1)
    tensor.mul_(2)
    assert tensor.is_inference() is False


def test_replay_runs_again_at_the_same_addresses() -> None:
    pool = EmulatedGraphPool(CPU)
    x = torch.ones(4)
    captured = pool.capture(lambda x: (x * 2, x + 1), [x])
    addresses = [output.data_ptr() for output in captured.outputs]
    x.fill_(5)
    captured.replay()
    assert [output.tolist()[0] for output in captured.outputs] == [10, 6]
    assert [output.data_ptr() for output in captured.outputs] == addresses


def test_an_input_that_moved_shows_stale_values() -> None:
    pool = EmulatedGraphPool(CPU)
    x = torch.ones(4)
    captured = pool.capture(lambda x: (x * 2,), [x])
    kept, x = x, torch.full((4,), 5.0)
    captured.replay()
    assert captured.outputs[0].tolist() == [2, 2, 2, 2]
    kept.copy_(x)
    captured.replay()
    assert captured.outputs[0].tolist() == [10, 10, 10, 10]


def test_capture_does_not_keep_inputs_alive() -> None:
    pool, arena = EmulatedGraphPool(CPU), Arena(CPU)
    x = leased(arena)
    address = x.data_ptr()
    captured = pool.capture(lambda x: (x * 2,), [x])
    del x
    assert leased(arena).data_ptr() == address
    captured.replay()


def test_dropped_outputs_are_overwritten_by_a_later_capture() -> None:
    pool = EmulatedGraphPool(CPU)
    x = torch.ones(4)
    first = pool.capture(lambda x: (x * 2,), [x])
    weak, address = _torch.weak_view(first.outputs[0]), first.outputs[0].data_ptr()
    replay = first.replay
    del first
    second = pool.capture(lambda x: (x * 3,), [x])
    assert second.outputs[0].data_ptr() == address
    replay()
    assert weak.tolist() == [2, 2, 2, 2]
    second.replay()
    assert weak.tolist() == [3, 3, 3, 3]


def test_kept_outputs_are_not_overwritten() -> None:
    pool = EmulatedGraphPool(CPU)
    x = torch.ones(4)
    first = pool.capture(lambda x: (x * 2,), [x])
    second = pool.capture(lambda x: (x * 3,), [x])
    first.replay()
    second.replay()
    assert first.outputs[0].tolist() == [2, 2, 2, 2]


def test_outputs_that_alias_one_another_go_on_doing_so() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y[1:3], y.view(2, 2).t()

    pool = EmulatedGraphPool(CPU)
    whole, part, square = pool.capture(function, [torch.ones(4)]).outputs
    whole.copy_(torch.arange(4.0))
    assert part.tolist() == [1, 2]
    assert square.tolist() == [[0, 2], [1, 3]]


def test_outputs_that_are_views_of_an_input_stay_so() -> None:
    x = torch.arange(4.0)
    pool = EmulatedGraphPool(CPU)
    captured = pool.capture(lambda x: (x, x[1:], x.view(2, 2)), [x])
    captured.replay()
    x.fill_(9)
    assert [output.unique().tolist() for output in captured.outputs] == [[9], [9], [9]]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.sum().expand(3, 4),),
        lambda x: (x.view(4, 1).mul(2).expand(4, 3),),
        lambda x: ((x * 2).unfold(0, 2, 1),),
        lambda x: ((x * 2)[::2],),
        lambda x: ((x * 2)[2:],),
        lambda x: (x[:0] * 2,),
        lambda x: (x.sum(),),
        lambda x: (torch.ones(3), x.bool(), x.bfloat16(), x.to(torch.complex64)),
        lambda x: (),
    ],
    ids=["expanded scalar", "expanded", "overlapping", "step", "offset", "empty", "scalar",
         "constants and dtypes", "nothing"],
)  # fmt: skip
def test_outputs_of_every_layout_are_replayed(function) -> None:
    x = torch.arange(4.0)
    pool = EmulatedGraphPool(CPU)
    captured = pool.capture(function, [x])
    x.add_(1)
    captured.replay()
    for output, expected in zip(captured.outputs, function(x), strict=True):
        assert torch.equal(output, expected)
        assert output.stride() == expected.stride()


def test_writes_to_inputs_are_repeated_by_a_replay() -> None:
    x = torch.ones(4)
    pool = EmulatedGraphPool(CPU)
    captured = pool.capture(lambda x: (x.add_(1) * 2,), [x])
    assert x.tolist() == [2, 2, 2, 2]
    captured.replay()
    assert x.tolist() == [3, 3, 3, 3]
    assert captured.outputs[0].tolist() == [6, 6, 6, 6]


def test_numbers_among_inputs_are_frozen() -> None:
    x = torch.ones(2)
    pool = EmulatedGraphPool(CPU)
    captured = pool.capture(lambda n, x: (x * n,), [3, x])
    captured.replay()
    assert captured.outputs[0].tolist() == [3, 3]


def test_what_cannot_be_recorded_leaves_the_pool_usable() -> None:
    pool = EmulatedGraphPool(CPU)
    with pytest.raises(CaptureError, match="the piece cannot be recorded: no such thing"):
        pool.capture(_fail, [])
    x = torch.ones(2)
    captured = pool.capture(lambda x: (x * 2,), [x])
    captured.replay()
    assert captured.outputs[0].tolist() == [2, 2]


def _fail() -> tuple[Tensor, ...]:
    raise ValueError("no such thing")


@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("collects_first", [True, False])
def test_collector_is_paused_and_put_back(was_enabled: bool, collects_first: bool) -> None:
    (gc.enable if was_enabled else gc.disable)()
    try:
        with collector_paused(collects_first=collects_first):
            assert not gc.isenabled()
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
