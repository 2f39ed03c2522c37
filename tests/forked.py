"""Processes that are forked from one that has imported torch, which takes longer than they do.

What tells processes apart that have nothing in common, as the order of a set of strings, is the
same in all of them: who compares that starts two of these.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch


def at_a_time(function: Callable[..., None], *processes: Sequence[Any]) -> None:
    """Call the function in processes with these arguments; exit if one of them fails."""
    sys.stdout.flush()
    started = []
    for arguments in processes:
        if (child := os.fork()) == 0:
            function(*arguments)
            sys.exit()
        started.append(child)
    failed = [child for child in started if os.waitpid(child, 0)[1] != 0]
    if failed:
        sys.exit(f"{len(failed)} processes of {len(started)} failed")


def tell(found: dict[str, Any]) -> None:
    """A line of JSON, in one piece: other processes write to the same pipe."""
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


def warm_torch() -> None:
    """Have what torch makes once for all; captures need not look for garbage in it."""
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()
