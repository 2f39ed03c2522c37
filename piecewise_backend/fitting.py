"""Leave out the sizes that `max_graph_memory` has no room for.

In:  a runtime of which warm-up has captured some sizes of a mode, largest first.
Out: an estimate of what all of them will take, and a runtime that wants no more than fit.
"""

from __future__ import annotations

import logging

from piecewise_backend.batch import CUDAGraphMode, FallbackReason
from piecewise_backend.budget import Estimate, sizes_that_fit
from piecewise_backend.costs import MemoryUse, mib
from piecewise_backend.dispatch import LeftOut
from piecewise_backend.runtime import Runtime

log = logging.getLogger(__name__)


def fit(runtime: Runtime, mode: CUDAGraphMode) -> None:
    """Once two sizes are captured, estimate; then, and after each further one, keep what fits.

    What is captured already stays: giving it up for a size that pads less would be a gamble.
    """
    captures = runtime.captures
    taken = captures.memory_by_size(mode)
    sizes = [
        size
        for size in captures.dispatcher.tables[mode].sizes
        if size in taken or (mode, size, 0) not in captures.errors
    ]
    left = [size for size in sizes if size not in taken]
    # The largest pays for the pool.
    if not left or len(taken) < 2 or sizes[-1] not in taken or not runtime.graph.token_dim.tokens:
        return
    if mode not in captures.estimates:
        first, second = list(taken.values())[:2]
        captures.estimates[mode] = Estimate.of(mode, first, second, len(sizes))
        log.info("%s graphs are expected to take %s", mode.value, captures.estimates[mode])
    each = max(captures.estimates[mode].bytes_per_size, _mean_of_further(list(taken.values())))
    room = captures.memory.model.room(captures.memory.limit)
    fitting = sizes_that_fit(left, room, each)
    if len(fitting) < len(left):
        _leave_out(runtime, mode, sorted(set(left).difference(fitting)), each)


def _mean_of_further(uses: list[MemoryUse]) -> int:
    """What the driver held for each size but the first, which may have loaded something."""
    further = [use.driver_bytes for use in uses[1:]]
    return sum(further) // len(further)


def _leave_out(
    runtime: Runtime, mode: CUDAGraphMode, sizes: list[int], bytes_per_size: int
) -> None:
    memory = runtime.captures.memory
    text = (
        f"max_graph_memory is {mib(memory.limit)} MiB, of which {mib(memory.model.bytes_in_use)} "
        f"MiB are in use, and each further size of {mode.value} graphs takes about "
        f"{mib(bytes_per_size)} MiB; raise it, or name fewer cudagraph_capture_sizes"
    )
    log.warning("no %s graphs at %s: %s", mode.value, sizes, text)
    why = LeftOut(FallbackReason.OVER_BUDGET, text)
    runtime.captures.leave_out(mode, dict.fromkeys(sizes, why))
