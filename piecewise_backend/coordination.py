"""Data parallel: every rank runs the same padded size in the weakest mode.

In:  what this rank would run on its own (a token count and a mode), and a process group.
Out: the largest token count and the weakest mode of all its ranks.
Knows nothing of graphs, capture sizes or models.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.errors import ConfigError

# Ranks exchange positions in this tuple, so that the largest of them is the weakest mode.
_STRONGEST_FIRST = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE)


def agree(
    num_tokens: int, mode: CUDAGraphMode, group: dist.ProcessGroup | None = None
) -> tuple[int, CUDAGraphMode]:
    """The largest token count and the weakest mode (NONE < PIECEWISE < FULL) of all ranks.

    A collective: every rank of the group calls it in every step, or the others wait until the
    group times out. A rank without work calls it with 0 tokens, and with the best mode that it
    could run a made-up batch in: NONE would hold back the others. What it returns is what
    `pw.batch` takes:

        num_tokens, mode = pw.agree(len(tokens), pw.CUDAGraphMode.PIECEWISE)
        with pw.batch(pad_to=num_tokens, mode=mode):
            model(tokens)

    The two integers travel in CPU memory where the group can do that (gloo). On a group of NCCL
    alone they are on the current CUDA device, and the call waits for the work queued on it.

    Args:
        num_tokens: of this rank's batch, before padding.
        mode: that this rank would run it in: NONE, PIECEWISE or FULL.
        group: the data-parallel ranks; None means the default group.

    Raises:
        ConfigError: a value of the wrong kind, no default group, or a group that this rank is not
            in. This rank then took no part, and the others wait for it.
    """
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 0:
        raise ConfigError(f"num_tokens={num_tokens!r}; give an integer of at least 0")
    if mode not in _STRONGEST_FIRST:
        raise ConfigError(
            f"mode={mode!r}; give NONE, PIECEWISE or FULL, e.g. the mode's for_decode or for_mixed"
        )
    device = _device_of(_backends(group))
    largest = torch.tensor(
        [num_tokens, _STRONGEST_FIRST.index(mode)], dtype=torch.int64, device=device
    )
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    most_tokens, weakest = largest.tolist()
    return most_tokens, _STRONGEST_FIRST[weakest]


def _backends(group: dist.ProcessGroup | None) -> str:
    """The group's backends with their devices: 'cpu:gloo,cuda:nccl'."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "torch.distributed is not initialised, so there is no default group; "
            "call torch.distributed.init_process_group, or pass group"
        )
    try:
        return dist.get_backend_config(group)
    except (TypeError, ValueError) as error:  # a group torch does not know; a rank outside of it
        raise ConfigError(
            f"group={group!r} is no group that this rank is in; "
            "pass one of torch.distributed.new_group, on its ranks only"
        ) from error


def _device_of(backends: str) -> str:
    """Where a tensor lives that such a group can reduce: on the CPU if it can."""
    devices = [pair.partition(":")[0] for pair in backends.split(",")]
    return "cpu" if "cpu" in devices else devices[0]
