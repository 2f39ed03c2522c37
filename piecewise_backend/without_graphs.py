"""Run a step without graphs, at any size.

In:  a compiled graph, and what its trace assumed about sizes.
Out: `WithoutGraphs`, called with the graph's arguments.
Knows nothing of captures, nor of why a call has no graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from piecewise_backend.assumptions import Assumptions
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.plan import dynamic_plan
from piecewise_backend.sizes import SizeFunction, Sizes
from piecewise_backend.version import Call

_MAX_BINDINGS = 4096  # batches whose numbers and versions are kept


@dataclasses.dataclass(frozen=True, slots=True)
class _Binding:
    """What the plan needs for one batch."""

    numbers: tuple[Any, ...]
    calls: tuple[Call, ...]
    violation: str | None
    """A condition that made a piece run as traced."""


class WithoutGraphs:
    """Compiled pieces and split ops, one after the other."""

    def __init__(self, graph: CompiledGraph, on_violation: Callable[[Sizes, str], None]) -> None:
        """Write the plan.

        Args:
            on_violation: told when a batch violates what a piece was compiled for.
        """
        plan, exprs = dynamic_plan(graph.split, graph.instances, graph.device)
        self.source = plan.source
        self.assumptions = Assumptions(graph.token_dim)
        """Required of every new batch."""
        self._graph = graph
        self._on_violation = on_violation
        self._plan = plan.function
        self._numbers = SizeFunction(graph.split.symbols, exprs)
        self._bindings: dict[Sizes, _Binding] = {}

    def run(self, args: Sequence[Any], sizes: Sizes) -> Any:
        """One step of a batch with these symbol values.

        Raises:
            ContractError: the trace excludes such batches.
        """
        binding = self._bindings.get(sizes)
        if binding is None:
            binding = self._bind(sizes)
            if len(self._bindings) >= _MAX_BINDINGS:
                self._bindings.clear()
            self._bindings[sizes] = binding
        if binding.violation is not None:
            self._on_violation(sizes, binding.violation)
        return self._plan(args, binding.numbers, binding.calls)

    def forget(self) -> None:
        """Versions may be compiled again: choose anew."""
        self._bindings.clear()

    def _bind(self, sizes: Sizes) -> _Binding:
        self.assumptions.require(sizes)
        choices = self._graph.choices_at(sizes)
        violation = next((c.violation for c in choices if c.violation is not None), None)
        calls = tuple(choice.call for choice in choices)
        return _Binding(self._numbers(sizes), calls, violation)
