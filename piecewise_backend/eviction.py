"""Give up the graphs of sizes that nobody uses.

In:  a runtime.
Out: it serves nothing from them any more, and the memory that came back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from piecewise_backend.batch import CUDAGraphMode, FallbackReason
from piecewise_backend.costs import NOTHING, MemoryUse, mib
from piecewise_backend.dispatch import STATIC_SIZE, LeftOut
from piecewise_backend.errors import ContractError
from piecewise_backend.runtime import Runtime

_WHY = LeftOut(
    FallbackReason.EVICTED,
    "evicted: it served no call since warm-up or the eviction before; pw.warmup captures it again",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Evicted:
    """What `pw.evict` gave up."""

    sizes: Mapping[str, tuple[int, ...]]
    """Capture sizes by mode, `"piecewise"` and `"full"`; ascending."""
    memory: MemoryUse
    """The bytes that came back: to the allocator's reserve, and to the device."""

    def __str__(self) -> str:
        sizes = [f"{mode} {', '.join(map(str, of_mode))}" for mode, of_mode in self.sizes.items()]
        memory = self.memory
        return (
            f"evicted: {'; '.join(sizes) or 'nothing'} (allocator {mib(memory.allocator_bytes)} "
            f"MiB, device {mib(memory.device_bytes)} MiB)"
        )


def evict_idle(runtimes: Iterable[Runtime]) -> Evicted:
    """See `pw.evict`."""
    sizes: dict[str, set[int]] = {}
    freed = NOTHING
    for runtime in runtimes:
        with runtime.turns.held() as is_free:
            if not is_free:
                raise ContractError(
                    "pw.evict was called from inside of a call of the model, whose graphs are in "
                    "use; call it between two calls"
                )
            for mode, idle in _idle(runtime).items():
                for captures in runtime.instances:
                    freed += captures.leave_out(mode, dict.fromkeys(idle, _WHY))
                sizes.setdefault(mode.value, set()).update(idle)
            runtime.statistics.mark()
    return Evicted({mode: tuple(sorted(found)) for mode, found in sizes.items()}, freed)


def _idle(runtime: Runtime) -> dict[CUDAGraphMode, list[int]]:
    """Captured sizes that served no call since the mark; those of static shapes stay."""
    served = runtime.statistics.served_since_mark()
    captured = {(m, size) for captures in runtime.instances for m, size, _ in captures.captured}
    idle: dict[CUDAGraphMode, list[int]] = {}
    for mode, size in captured - served:
        if size != STATIC_SIZE:
            idle.setdefault(mode, []).append(size)
    return idle
