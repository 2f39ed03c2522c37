"""Leave out the sizes that `max_graph_memory` has no room for.

In:  a runtime of which warm-up has captured some sizes of a mode, largest first.
Out: an estimate of what all of them will take, and a runtime that wants no more than fit.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection

from piecewise_backend.batch import CUDAGraphMode, FallbackReason
from piecewise_backend.budget import CHUNK, Estimate, sizes_that_fit
from piecewise_backend.costs import mib
from piecewise_backend.dispatch import LeftOut
from piecewise_backend.grid import within_budget
from piecewise_backend.runtime import Runtime

log = logging.getLogger(__name__)


def fit(runtime: Runtime, mode: CUDAGraphMode) -> None:
    """Estimate once two sizes are captured; then, and after each further one, keep what fits."""
    captures = runtime.captures
    taken = captures.memory_by_size(mode)
    sizes = [
        size
        for size in runtime.dispatcher.tables[mode].sizes
        if size in taken or not captures.error_of(mode, size, 0)
    ]
    left = [size for size in sizes if size not in taken]
    if not left or not runtime.graph.token_dim.tokens:
        return
    if mode in captures.estimates:
        estimate = captures.estimates[mode]
        further = [use.driver_bytes for use in taken.values()][1:]
        mean = sum(further) // len(further) if further else 0
        each = max(estimate.bytes_per_size, mean)
        fitting = sizes_that_fit(left, _room(runtime), each)
        _keep(runtime, estimate, sizes, [*taken, *fitting])
    elif list(taken) == sizes[:-3:-1]:
        first, second = taken.values()
        estimate = Estimate.of(mode, first, second, len(sizes))
        log.info("%s graphs are expected to take %s", mode.value, estimate)
        captures.estimates[mode] = estimate
        num_sizes = 2 + _room(runtime) // max(estimate.bytes_per_size, 1)
        # Perhaps without the second of the two, should others save more padding.
        _keep(runtime, estimate, sizes, within_budget(sizes, num_sizes))


def _room(runtime: Runtime) -> int:
    """Bytes that further graphs may take, less a chunk that the last of them may take too much."""
    captures = runtime.captures
    if captures.memory_limit is None:
        return 2**63
    spare = CHUNK if captures.memory_use.device_bytes is not None else 0
    return max(captures.memory_limit - captures.bytes_in_use - spare, 0)


def _keep(
    runtime: Runtime, estimate: Estimate, sizes: Collection[int], kept: Collection[int]
) -> None:
    """Leave out those of `sizes` that are not `kept`."""
    captures, mode = runtime.captures, estimate.mode
    captures.estimates[mode] = dataclasses.replace(estimate, num_sizes=len(kept))
    if len(kept) == len(sizes):
        return
    left_out = sorted(set(sizes).difference(kept))
    text = (
        f"max_graph_memory is {mib(captures.memory_limit)} MiB, and {mode.value} graphs would take "
        f"{estimate}; raise it, or name fewer cudagraph_capture_sizes"
    )
    log.warning("no %s graphs at %s: %s", mode.value, left_out, text)
    why = LeftOut(FallbackReason.OVER_BUDGET, text)
    runtime.leave_out(mode, dict.fromkeys(left_out, why))
