"""Counts of what the compiler did, exact enough to be asserted in tests.

`compilation_counter` is the total of the process; every runtime has one of its own whose
changes are added to the total.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(slots=True)
class CompilationCounter:
    """How many graphs were seen, pieces compiled and graphs captured.

    L attention layers give 2L+1 steps: L split ops, and L+1 pieces that can be captured.
    """

    num_graphs_seen: int = 0
    """Graphs that Dynamo handed over."""

    num_piecewise_graphs_seen: int = 0
    """Steps after cutting: pieces and split ops."""

    num_piecewise_capturable_graphs_seen: int = 0
    """Pieces after cutting."""

    num_inductor_compiles: int = 0
    """Inductor compilations: one per distinct piece and version."""

    num_artifacts_loaded: int = 0
    """Versions of distinct pieces that were loaded from `cache_dir` instead."""

    num_traces_loaded: int = 0
    """Traces that another process made and `cache_dir` has, which Dynamo did not make."""

    num_cudagraph_captured: int = 0
    """Graphs captured: pieces that compute something, times sizes."""

    parent: CompilationCounter | None = dataclasses.field(default=None, repr=False)
    """Every change is added here as well."""

    def add(self, **deltas: int) -> None:
        """Add to the named counters, here and in the parents."""
        for name, delta in deltas.items():
            setattr(self, name, getattr(self, name) + delta)
        if self.parent is not None:
            self.parent.add(**deltas)

    def counts(self) -> dict[str, int]:
        """The counters by name."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "parent"
        }

    @contextlib.contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """Assert that the block changes exactly these counters by exactly this much.

        Raises:
            AssertionError: a count differs, or a counter that is not named changed.
        """
        before = self.counts()
        unknown = deltas.keys() - before.keys()
        assert not unknown, f"no such counters: {sorted(unknown)}; there are {sorted(before)}"
        yield
        changed = {k: now - before[k] for k, now in self.counts().items() if now != before[k]}
        wanted = {k: delta for k, delta in deltas.items() if delta}
        assert changed == wanted, f"expected {wanted}, got {changed}"


compilation_counter = CompilationCounter()
"""The totals of this process."""
