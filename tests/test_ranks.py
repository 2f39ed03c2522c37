"""Ranks that share a cache directory: none waits for one that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from piecewise_backend.background import Progress
from tests.rank_process import NUM_RANKS, summed, summed_in_a_branch, warm_up
from tests.store_process import started

SECONDS = 200


@pytest.mark.parametrize(
    ("tuning", "model"),
    [("warmup", summed), ("background", summed), ("warmup", summed_in_a_branch)],
)
def test_a_piece_with_a_collective_is_not_tuned(
    tmp_path: Path, tuning: str, model: Callable[[Tensor], Tensor]
) -> None:
    """See Note [Other ranks] in `tuning`."""
    given = tmp_path, tuning, model
    ranks: list[Any] = [started(warm_up, rank, *given) for rank in range(NUM_RANKS)]
    try:
        for _, told in ranks:
            assert told.poll(SECONDS), "a rank waits"
            taken, (found,), progress, is_right = told.recv()
            assert is_right
            assert taken == ()
            assert found.kept == "as traced"
            assert not found.microseconds
            assert found.failures == dict.fromkeys(
                ("static", "coordinate descent", "max-autotune"),
                "not tried, as other ranks wait in _c10d_functional::all_reduce",
            )
            assert "as traced (nothing was timed); static: not tried" in str(found)
            assert progress == (None if tuning == "warmup" else Progress((), (), {}))
    finally:
        for process, _ in ranks:
            process.kill()
            process.join(timeout=60)
