"""How long callables take when they are replayed from graphs, compared within one run.

In:  callables that do the same, and a graph pool.
Out: seconds, by name.
Knows nothing of what is being compared.

Note [How replays are compared]
A graph has a callable several times, so that starting the graph does not count. In a step the
weights of a piece come from memory, because those of other pieces went through the L2 cache
since; here the piece would find its own there. So a buffer larger than the cache is read in front
of each, and what that takes by itself is measured as one more contender and taken off. Rounds go
through all contenders in turn, and the medians count: clocks and neighbours change with time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from piecewise_backend.graphs import GraphPool

Function = Callable[[], Sequence[torch.Tensor]]

_ROUNDS = 9
# One replay, for clocks of a resolution of a microsecond; and at most so many calls in it.
_SECONDS = 1e-3
_MOST_CALLS = 20
_FLUSH = ""


def replay_seconds(
    functions: Mapping[str, Function], pool: GraphPool, device: torch.device
) -> dict[str, float]:
    """Seconds that one call of each takes. See Note [How replays are compared].

    They must have run before: what is compiled or tuned at the first call cannot be recorded.

    Args:
        functions: what to compare, by name.
        pool: takes the recordings; to be thrown away with them.

    Raises:
        CaptureError: one cannot be recorded.
    """
    flush = _flush(device)
    # Kept to the end: graphs share the memory of those that are still there.
    once = [pool.capture(function, ()) for function in functions.values()]
    longest = max(_timed(graph.replay, device) for graph in once)
    num_calls = min(max(int(_SECONDS / max(longest, 1e-9)), 1), _MOST_CALLS)
    repeated = {name: _repeated(flush, f, num_calls) for name, f in functions.items()}
    if flush is not None:
        repeated[_FLUSH] = _repeated(None, flush, num_calls)
    graphs = {name: pool.capture(function, ()) for name, function in repeated.items()}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_ROUNDS):
        for name, graph in graphs.items():
            found[name].append(_timed(graph.replay, device))
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    flushing = medians.pop(_FLUSH, 0.0)
    return {name: max(seconds - flushing, 0.0) / num_calls for name, seconds in medians.items()}


def _repeated(before: Function | None, function: Function, times: int) -> Function:
    def run() -> Sequence[torch.Tensor]:
        for _ in range(times):
            if before is not None:
                before()
            function()
        return ()

    return run


def _flush(device: torch.device) -> Function | None:
    """Reads more than the L2 cache holds. Reads: what is written would be written back later."""
    if device.type != "cuda":
        return None
    num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    return lambda: (buffer.sum(),)


def _timed(replay: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        replay()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
