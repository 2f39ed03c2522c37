"""What a compiled model did: pieces, compilations, captures, and every fallback.

In:  a session.
Out: `Report`; `str()` of it is for people.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from piecewise_backend.background import Progress
from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.budget import Estimate
from piecewise_backend.captured_sizes import Key
from piecewise_backend.costs import NOTHING, CaptureCost, MemoryUse, cost_table, mib
from piecewise_backend.passes import PassRecord
from piecewise_backend.render import piece_table
from piecewise_backend.runtime import Runtime
from piecewise_backend.session import Session, WarmupState
from piecewise_backend.tuning import Tuning


@dataclasses.dataclass(frozen=True, slots=True)
class GraphReport:
    """One trace of a model."""

    table: str
    """The pieces, one line each."""
    counts: Mapping[str, int]
    """The counters of this graph (`CompilationCounter`)."""
    captured_sizes: tuple[int, ...]
    """Token counts that graphs exist for, descending; 0 stands for a graph of static shapes."""
    captured_steps: tuple[int, ...]
    """The same for graphs of whole steps."""
    mode: str
    """The graph mode."""
    mode_reason: str
    """Why it is not the one that was asked for; or empty."""
    num_replays: int
    """Calls served from graphs."""
    fallbacks: Mapping[str, int]
    """Calls served without, by reason."""
    conditions: tuple[str, ...]
    """What compiled versions assumed about sizes."""
    passes: Mapping[str, tuple[PassRecord, ...]]
    """What passes did, by the graph that they ran over: "the whole graph", "piece 0", ... Several
    versions of a piece are added up."""
    tunings: tuple[Tuning, ...]
    """What `compile_sizes` and `compile_ranges_endpoints` tried, and what serves since."""
    background: Progress | None
    """What another process still tunes, has tuned, or could not; None without such a process
    (`tuning="background"`)."""
    padding_unsafe: Mapping[int, str]
    """Sizes at which padding changes real rows, with what was observed."""
    capture_errors: Mapping[int, str]
    """Sizes of pieces whose capture failed or was wrong, with the error."""
    step_errors: Mapping[int, str]
    """The same of whole steps."""
    capture_seconds: float
    """Wall time of all captures."""
    capture_costs: tuple[CaptureCost, ...]
    """Graphs, seconds and memory of each capture that is kept, in the order of the captures."""
    estimates: Mapping[str, Estimate]
    """By mode, what warm-up expected its sizes to take when it had captured the two largest. None
    of a mode with fewer than three sizes, nor where nothing is captured ahead of time."""
    left_out: Mapping[tuple[str, int], str]
    """By mode and size: sizes that the options name and that are not to have graphs, with why."""

    def __str__(self) -> str:
        lines = [self.table, ""]
        lines += [f"{name}: {count}" for name, count in self.counts.items()]
        sizes = ", ".join(map(str, self.captured_sizes)) or "none"
        reason = f" ({self.mode_reason})" if self.mode_reason else ""
        lines.append(f"mode: {self.mode}{reason}")
        lines.append(f"captured sizes: {sizes} ({self.capture_seconds:.2f} s)")
        if self.captured_steps:
            lines.append(f"captured as whole steps: {', '.join(map(str, self.captured_steps))}")
        lines.append(f"steps from graphs: {self.num_replays}")
        lines += [f"steps without, {reason}: {n}" for reason, n in self.fallbacks.items()]
        lines += [f"{r} ({where})" for where, records in self.passes.items() for r in records]
        lines += [f"tuned {tuning}" for tuning in self.tunings]
        lines += self.background.lines() if self.background is not None else []
        lines += [f"assumed about sizes: {condition}" for condition in self.conditions]
        lines += [f"unsafe padding at {size}: {what}" for size, what in self.padding_unsafe.items()]
        lines += [f"capture failed at {size}: {what}" for size, what in self.capture_errors.items()]
        lines += [f"no whole step at {size}: {what}" for size, what in self.step_errors.items()]
        lines += [f"no {mode} graphs at {n}: {why}" for (mode, n), why in self.left_out.items()]
        if self.capture_costs:
            for mode, estimate in self.estimates.items():
                uses = [c.memory.num_bytes for c in self.capture_costs if c.mode.value == mode]
                took = f"{len(uses)} captures took {mib(sum(uses))} MiB"
                lines.append(f"expected of {mode} graphs: {estimate}; {took}")
            lines += ["", cost_table(self.capture_costs)]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All traces of a model, oldest first."""

    graphs: tuple[GraphReport, ...]
    is_sealed: bool
    state: WarmupState
    """How far warm-up came."""
    guards_kept: str
    """Why calls go through Dynamo's guards; empty if they do not."""
    rebuilding: str
    """Why calls run without graphs with the reason `REBUILDING`; empty if they do not."""
    memory_use: MemoryUse
    """What the graphs of all traces and instances took and did not give back, in bytes. It has
    what a driver keeps of graphs that are gone, for graphs to come."""
    memory_limit: int | None
    """`max_graph_memory` in bytes; None if there is no limit."""

    def __str__(self) -> str:
        state = f"{self.state.value}, {'sealed' if self.is_sealed else 'not sealed'}"
        guards = f"guards kept ({self.guards_kept})" if self.guards_kept else "no guards"
        head = f"piecewise: {len(self.graphs)} graph(s), {state}, {guards}"
        head += f"\nrebuilding: {self.rebuilding}" if self.rebuilding else ""
        if self.memory_use.num_bytes:
            limit = f", at most {mib(self.memory_limit)}" if self.memory_limit is not None else ""
            head += f"\nmemory of graphs: {mib(self.memory_use.num_bytes)} MiB{limit}"
        return "\n\n".join([head, *map(str, self.graphs)])


def tunings_of(runtime: Runtime) -> tuple[Tuning, ...]:
    """What was found out about versions of its pieces."""
    return tuple(t for versions in runtime.graph.versions for t in dict(versions.tunings).values())


def report_session(session: Session, guards_kept: str) -> Report:
    """The state of a compiled model at this moment."""
    runtimes = session.runtimes
    limits = [r.captures.memory.limit for r in runtimes if r.captures.memory.limit is not None]
    return Report(
        graphs=tuple(map(_report_runtime, runtimes)),
        is_sealed=session.is_sealed,
        state=session.state,
        guards_kept=guards_kept,
        rebuilding=session.rebuilding,
        memory_use=sum((m.use for m in tuple(session.memories.values())), start=NOTHING),
        memory_limit=min(limits, default=None),
    )


def _report_runtime(runtime: Runtime) -> GraphReport:
    """Copies come first: another thread may serve, or capture, meanwhile."""
    graph, captures = runtime.graph, runtime.captures
    captured, errors, costs = dict(captures.captured), dict(captures.errors), dict(captures.costs)
    conditions = {c for v in graph.versions for version in v.compiled for c in version.conditions}
    return GraphReport(
        table=piece_table(graph.split, graph.instances),
        counts=runtime.counters.counts(),
        captured_sizes=_sizes(captured, CUDAGraphMode.PIECEWISE),
        captured_steps=_sizes(captured, CUDAGraphMode.FULL),
        mode=runtime.mode.value,
        mode_reason=runtime.mode_reason,
        num_replays=runtime.statistics.num_replays,
        fallbacks={r.value: n for r, n in dict(runtime.statistics.fallbacks).items()},
        conditions=tuple(sorted(conditions)),
        passes=graph.pass_records(),
        tunings=tunings_of(runtime),
        background=runtime.background.progress() if runtime.background is not None else None,
        padding_unsafe={
            size: found.padding_fault
            for (mode, size, _), found in captured.items()
            if mode is CUDAGraphMode.PIECEWISE and found.padding_fault is not None
        },
        capture_errors=_errors(errors, CUDAGraphMode.PIECEWISE),
        step_errors=_errors(errors, CUDAGraphMode.FULL),
        capture_seconds=captures.seconds,
        capture_costs=tuple(costs.values()),
        estimates={mode.value: estimate for mode, estimate in dict(captures.estimates).items()},
        left_out={
            (mode.value, size): why.text
            for (mode, size), why in captures.dispatcher.left_out.items()
        },
    )


def _sizes(keys: Iterable[Key], wanted: CUDAGraphMode) -> tuple[int, ...]:
    return tuple(sorted({size for mode, size, _ in keys if mode is wanted}, reverse=True))


def _errors(errors: Mapping[Key, str], wanted: CUDAGraphMode) -> dict[int, str]:
    return {size: error for (mode, size, _), error in errors.items() if mode is wanted}
