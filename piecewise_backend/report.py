"""What a compiled model did: pieces, compilations, captures, and every fallback.

In:  a session.
Out: `Report`; `str()` of it is for people.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from piecewise_backend.budget import Estimate
from piecewise_backend.costs import CaptureCost, MemoryUse, cost_table, mib
from piecewise_backend.passes import PassRecord
from piecewise_backend.render import piece_table
from piecewise_backend.runtime import Runtime
from piecewise_backend.session import Session, WarmupState


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
    padding_unsafe: Mapping[int, str]
    """Sizes at which padding changes real rows, with what was observed."""
    capture_errors: Mapping[int, str]
    """Sizes whose capture failed, with the error."""
    capture_seconds: float
    """Wall time of all captures."""
    capture_costs: tuple[CaptureCost, ...]
    """Graphs, seconds and memory of each capture that is kept, in the order of the captures."""
    memory_use: MemoryUse
    """What the graphs take together, in bytes."""
    memory_limit: int | None
    """`max_graph_memory` in bytes."""
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
        lines += [f"assumed about sizes: {condition}" for condition in self.conditions]
        lines += [f"unsafe padding at {size}: {what}" for size, what in self.padding_unsafe.items()]
        lines += [f"capture failed at {size}: {what}" for size, what in self.capture_errors.items()]
        lines += [f"no {mode} graphs at {n}: {why}" for (mode, n), why in self.left_out.items()]
        if self.capture_costs:
            limit = f", at most {mib(self.memory_limit)}" if self.memory_limit is not None else ""
            lines.append(f"memory of graphs: {mib(self.memory_use.num_bytes)} MiB{limit}")
            for mode, estimate in self.estimates.items():
                used = sum(c.memory.num_bytes for c in self.capture_costs if c.mode.value == mode)
                lines.append(f"expected of {mode} graphs: {estimate}; they took {mib(used)} MiB")
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

    def __str__(self) -> str:
        state = f"{self.state.value}, {'sealed' if self.is_sealed else 'not sealed'}"
        guards = f"guards kept ({self.guards_kept})" if self.guards_kept else "no guards"
        head = f"piecewise: {len(self.graphs)} graph(s), {state}, {guards}"
        head += f"\nrebuilding: {self.rebuilding}" if self.rebuilding else ""
        return "\n\n".join([head, *map(str, self.graphs)])


def report_session(session: Session, guards_kept: str) -> Report:
    """The state of a compiled model at this moment."""
    graphs = tuple(map(_report_runtime, session.runtimes))
    return Report(graphs, session.is_sealed, session.state, guards_kept, session.rebuilding)


def _report_runtime(runtime: Runtime) -> GraphReport:
    graph, captures = runtime.graph, runtime.captures
    conditions = {c for v in graph.versions for version in v.compiled for c in version.conditions}
    return GraphReport(
        table=piece_table(graph.split, graph.instances),
        counts=runtime.counters.counts(),
        captured_sizes=tuple(sorted(runtime.captures.sizes, reverse=True)),
        captured_steps=tuple(sorted({size for size, _ in captures.steps}, reverse=True)),
        mode=runtime.mode.value,
        mode_reason=runtime.mode_reason,
        num_replays=runtime.statistics.num_replays,
        fallbacks={r.value: n for r, n in runtime.statistics.fallbacks.items()},
        conditions=tuple(sorted(conditions)),
        passes=graph.pass_records(),
        padding_unsafe={
            size: captured.padding_fault
            for size, captured in runtime.captures.sizes.items()
            if captured.padding_fault is not None
        },
        capture_errors=dict(captures.failed)
        | {size: error for (size, _), error in captures.failed_steps.items()},
        capture_seconds=runtime.captures.seconds,
        capture_costs=tuple(captures.costs.values()),
        memory_use=captures.memory_use,
        memory_limit=captures.memory_limit,
        estimates={mode.value: estimate for mode, estimate in captures.estimates.items()},
        left_out={
            (mode.value, size): why.text
            for (mode, size), why in runtime.dispatcher.left_out.items()
        },
    )
