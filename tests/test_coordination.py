"""What data-parallel ranks agree on: three gloo processes on the CPU, and the errors of one."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.coordination import _backends, _device_of, agree
from piecewise_backend.errors import ConfigError

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
TIMEOUT = timedelta(seconds=30)
NUM_RANKS = 3


@dataclasses.dataclass(frozen=True)
class Step:
    """What each rank brings, and what all of them must get."""

    ranks: tuple[int, ...]
    brought: tuple[tuple[int, CUDAGraphMode], ...]
    agreed: tuple[int, CUDAGraphMode]


STEPS = [
    # All three ranks: the same, the most tokens on each rank, the weakest mode on each rank.
    Step((0, 1, 2), ((8, FULL), (8, FULL), (8, FULL)), (8, FULL)),
    Step((0, 1, 2), ((9, PIECEWISE), (1, FULL), (2, FULL)), (9, PIECEWISE)),
    Step((0, 1, 2), ((1, FULL), (9, FULL), (2, PIECEWISE)), (9, PIECEWISE)),
    Step((0, 1, 2), ((1, FULL), (2, PIECEWISE), (9, NONE)), (9, NONE)),
    Step((0, 1, 2), ((3, NONE), (2, PIECEWISE), (1, PIECEWISE)), (3, NONE)),
    # Nothing is kept of the step before, which had more tokens and a weaker mode.
    Step((0, 1, 2), ((1, FULL), (2, FULL), (1, FULL)), (2, FULL)),
    # Ranks without work.
    Step((0, 1, 2), ((0, FULL), (5, PIECEWISE), (0, FULL)), (5, PIECEWISE)),
    Step((0, 1, 2), ((0, NONE), (5, FULL), (7, FULL)), (7, NONE)),
    Step((0, 1, 2), ((0, FULL), (0, FULL), (0, FULL)), (0, FULL)),
    # Counts that neither 32-bit integers nor 32-bit floats hold exactly.
    Step((0, 1, 2), ((2**40 + 1, FULL), (2**40, FULL), (1, FULL)), (2**40 + 1, FULL)),
    # Two of the three: the third rank neither joins nor counts.
    Step((0, 1), ((4, FULL), (6, PIECEWISE)), (6, PIECEWISE)),
    Step((0, 1), ((0, FULL), (1, FULL)), (1, FULL)),
    Step((1, 2), ((16, NONE), (3, FULL)), (16, NONE)),
    Step((1, 2), ((3, FULL), (16, FULL)), (16, FULL)),
    # All three again.
    Step((0, 1, 2), ((2, PIECEWISE), (4, PIECEWISE), (3, FULL)), (4, PIECEWISE)),
]
SUBGROUPS = [(0, 1), (1, 2)]


def _refused(*args: Any, **kwargs: Any) -> str:
    """What the error says."""
    with pytest.raises(ConfigError) as caught:
        agree(*args, **kwargs)
    return str(caught.value)


def _worker(rank: int, folder: Path) -> None:
    """One rank: all steps that it has a part in, into a file of its own."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=TIMEOUT,
    )
    groups: dict[tuple[int, ...], Any] = {(0, 1, 2): None}
    for ranks in SUBGROUPS:
        groups[ranks] = dist.new_group(list(ranks), timeout=TIMEOUT)
    agreed = {}
    for number, step in enumerate(STEPS):
        if rank in step.ranks:
            brought = step.brought[step.ranks.index(rank)]
            num_tokens, mode = agree(*brought, group=groups[step.ranks])
            agreed[number] = (num_tokens, mode.name)
    outside = [_refused(1, FULL, groups[ranks]) for ranks in SUBGROUPS if rank not in ranks]
    # What was refused took no part: the ranks still meet in the same step.
    if rank == 0:
        _refused(-1, FULL)
    last, mode = agree(rank, FULL)
    agreed[len(STEPS)] = (last, mode.name)
    (folder / f"{rank}.json").write_text(json.dumps({"agreed": agreed, "outside": outside}))
    dist.barrier()
    dist.destroy_process_group()


def _run_ranks(folder: Path) -> list[dict[str, Any]]:
    """What each rank wrote; no rank outlives the call."""
    # One clean process imports torch and forks the ranks: spawning would import it in each.
    mp.set_forkserver_preload([__name__])
    ranks = mp.start_processes(
        _worker, args=(folder,), nprocs=NUM_RANKS, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + 2 * TIMEOUT.total_seconds()
    try:
        while not ranks.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks did not end"
    finally:
        for process in ranks.processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def test_all_ranks_take_the_most_tokens_and_the_weakest_mode(tmp_path: Path) -> None:
    wrote = _run_ranks(tmp_path)
    for rank in range(NUM_RANKS):
        expected = {str(n): step.agreed for n, step in enumerate(STEPS) if rank in step.ranks}
        expected[str(len(STEPS))] = (NUM_RANKS - 1, FULL)
        assert wrote[rank]["agreed"] == {n: [t, mode.name] for n, (t, mode) in expected.items()}
    assert [len(ranks["outside"]) for ranks in wrote] == [1, 0, 1]
    for ranks in wrote:
        assert all("is no group that this rank is in" in message for message in ranks["outside"])


@pytest.mark.parametrize("num_tokens", [-1, True, 8.0, "8", None])
def test_token_count_is_an_integer_of_at_least_0(num_tokens: Any) -> None:
    message = f"num_tokens={num_tokens!r}; give an integer of at least 0"
    assert _refused(num_tokens, FULL) == message


@pytest.mark.parametrize(
    "mode",
    [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE, "full", 2, None],
)
def test_mode_is_that_of_one_batch(mode: Any) -> None:
    assert _refused(8, mode).startswith(f"mode={mode!r}; give NONE, PIECEWISE or FULL")


def test_without_a_default_group_the_error_says_how_to_make_one() -> None:
    message = "call torch.distributed.init_process_group, or pass group"
    with pytest.raises(ConfigError, match=re.escape(message)):
        agree(8, FULL)


def test_group_that_torch_distributed_did_not_make_is_refused() -> None:
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert "pass one of torch.distributed.new_group" in _refused(8, FULL, group)


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl,cpu:gloo", "cpu"),
    ],
)
def test_integers_travel_on_the_cpu_where_the_group_can(backends: str, device: str) -> None:
    assert _device_of(backends) == device


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_group_says_that_it_reduces_on_the_cpu(tmp_path: Path, backend: str) -> None:
    store = dist.FileStore(str(tmp_path / "meeting"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
    try:
        assert _backends(None).startswith("cpu:gloo")
        assert agree(7, PIECEWISE) == (7, PIECEWISE)
    finally:
        dist.destroy_process_group()
