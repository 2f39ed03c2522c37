"""Serve the calls of one compiled graph: owns its captures, buffers and statistics.

In:  a `CompiledGraph` and options.
Out: `Runtime.call`, which Dynamo calls with the graph's arguments.

The hot path is `_make_run`: one look-up by sizes, then the plan. All else leaves it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.assumptions import Assumptions, refuse_assignments
from piecewise_backend.batch import FallbackReason
from piecewise_backend.capture import CapturedSize
from piecewise_backend.captures import OF_ANOTHER_INSTANCE, Captures
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.compiler import Call
from piecewise_backend.config import Config
from piecewise_backend.counters import CompilationCounter
from piecewise_backend.dispatch import STATIC_SIZE, Dispatcher
from piecewise_backend.dump import GraphDump
from piecewise_backend.errors import CaptureError
from piecewise_backend.fallbacks import Fallbacks
from piecewise_backend.plan import dynamic_plan
from piecewise_backend.plan_writer import InputMoved, InputsOverlap
from piecewise_backend.session import Session
from piecewise_backend.sizes import SizeFunction, Sizes
from piecewise_backend.statistics import Statistics
from piecewise_backend.turns import Turns

Args = Sequence[Any]

_MAX_PREPARED = 4096  # token counts, times sizes that only split ops see, whose views are kept
_MAX_INSTANCES = 64  # models of one class that are served in turn without capturing again


@dataclasses.dataclass(frozen=True, slots=True)
class DynamicBinding:
    """What the plan without graphs needs for one batch."""

    numbers: tuple[Any, ...]
    calls: tuple[Call, ...]
    violation: str | None
    """A condition that made a piece run as traced."""


class Runtime:
    """Plans, buffers and state of one graph."""

    def __init__(
        self,
        graph: CompiledGraph,
        config: Config,
        session: Session,
        counters: CompilationCounter,
        dump: GraphDump,
        example_args: Sequence[Any],
    ) -> None:
        self.graph = graph
        self.config = config
        self.counters = counters
        self.statistics = Statistics()
        self._session = session
        self._dump = dump
        self.captures = Captures(graph, config)
        static_num_tokens = graph.static_num_tokens(example_args)
        self.dispatcher = Dispatcher.of(
            graph.token_dim, config, self.captures.is_possible, static_num_tokens
        )
        self._parked: list[Captures] = []
        self._fallbacks = Fallbacks(self.statistics, config.on_fallback)
        self.turns = Turns(graph.device)
        self._key_of = graph.token_dim.key_function()
        self.rewritten: _torch.Rewritten | None = None
        """What Dynamo made of the function; None until it is done with it."""
        self._assumptions = Assumptions(graph.token_dim)
        plan, exprs = dynamic_plan(graph.split, graph.instances, graph.device)
        self._dynamic = plan.function
        self._dynamic_numbers = SizeFunction(graph.split.symbols, exprs)
        self._dynamic_bindings: dict[Sizes, DynamicBinding] = {}
        dump.write("plan_dynamic.py", plan.source)
        self.run = self._make_run()
        """Serves one call whose turn it is, with a list of the graph's arguments."""
        self.call = self._make_call()

    def _make_call(self) -> Callable[..., Any]:
        """The function that Dynamo's code calls, with the graph's arguments."""
        enter, leave, run = self.turns.enter, self.turns.leave, self.run

        def call(*args: Any) -> Any:
            if not enter():
                return self.run_nested(args)
            try:
                return run(list(args))
            finally:
                leave()

        return call

    def _make_run(self) -> Callable[[list[Any]], Any]:
        """Serve one call whose turn it is; the hot path."""
        key_of, statistics, slow = self._key_of, self.statistics, self._slow

        def run(args: list[Any]) -> Any:
            ready = self.captures.prepared.get(key_of(args))
            if ready is None:
                return slow(args)
            plan, rows = ready
            try:
                result = plan(args, rows)
            except InputMoved:
                return self._recover_from_move(args)
            except InputsOverlap:
                return self._refuse_overlap(args)
            statistics.num_replays += 1
            return result

        return run

    def run_nested(self, args: Args) -> Any:
        """The model was called by one of its own split ops: the buffers are in use."""
        sizes = self.graph.token_dim.read(args)
        return self._fall_back(args, sizes, FallbackReason.NESTED_CALL)

    def _slow(self, args: Args) -> Any:
        sizes = self.graph.token_dim.read(args)
        decision = self.dispatcher.decide(sizes)
        if isinstance(decision, FallbackReason):
            return self._fall_back(args, sizes, decision)
        captured = self.captures.sizes.get(decision)
        if captured is not None:
            is_padded = decision != self.graph.token_dim.num_tokens(sizes)
            if is_padded and decision != STATIC_SIZE and captured.padding_fault is not None:
                detail = f"{captured.padding_fault}; add the exact size to the grid"
                return self._fall_back(args, sizes, FallbackReason.PADDING_UNSAFE, detail)
            return self._prepare(captured, sizes, args)
        if decision in self.captures.failed:
            detail = self.captures.failed[decision]
            return self._fall_back(args, sizes, FallbackReason.CAPTURE_ERROR, detail)
        if self.captures.do_not_fit(args) or any(c.fit(args) for c in self._parked):
            return self._recover_from_move(args)
        return self._not_captured(args, sizes, decision)

    def _prepare(self, captured: CapturedSize, sizes: Sizes, args: Args) -> Any:
        """First batch with these sizes: make its views, keep them, and run."""
        self._assumptions.require(sizes)
        prepared = self.captures.prepared
        if len(prepared) >= _MAX_PREPARED:
            prepared.clear()
        with _torch.ordinary_tensors():
            rows = captured.rows.at(sizes)
            if not captured.rows.are_contiguous_as_promised(sizes):
                detail = "the token dimension of what a split op is given is not the first"
                return self._fall_back(args, sizes, FallbackReason.PADDING_UNSAFE, detail)
        try:
            result = captured.plan.function(args, rows)
        except InputMoved:
            return self._recover_from_move(args)
        except InputsOverlap:
            return self._refuse_overlap(args)
        prepared[self.graph.token_dim.key_of(sizes)] = (captured.plan.function, rows)
        self.statistics.num_replays += 1
        return result

    def _not_captured(self, args: Args, sizes: Sizes, size: int) -> Any:
        """Run without graphs; capture afterwards if it is time to."""
        is_warming_up = self._session.is_capturing
        if self._session.is_sealed:
            detail = OF_ANOTHER_INSTANCE if self._parked else ""
            return self._fall_back(args, sizes, FallbackReason.NOT_CAPTURED, detail)
        if not is_warming_up and not self._session.is_tracing:
            self.statistics.count(FallbackReason.NOT_CAPTURED)
        result = self._run_dynamic(args, sizes)
        hits = self.captures.hits
        hits[size] = hits.get(size, 0) + 1
        is_due = hits[size] >= self.config.capture_after and not self._session.is_tracing
        if is_warming_up or is_due:
            self._capture(args, sizes, size)
        return result

    def _fall_back(self, args: Args, sizes: Sizes, reason: FallbackReason, detail: str = "") -> Any:
        if not self._session.is_tracing:
            self._report_fallback(reason, sizes, detail)
        return self._run_dynamic(args, sizes)

    def _report_fallback(self, reason: FallbackReason, sizes: Sizes, detail: str = "") -> None:
        self._fallbacks.report(reason, sizes, detail or self.dispatcher.detail(reason, sizes))

    def _run_dynamic(self, args: Args, sizes: Sizes) -> Any:
        binding = self._dynamic_bindings.get(sizes)
        if binding is None:
            binding = self._bind_dynamic(sizes)
            if len(self._dynamic_bindings) >= _MAX_PREPARED:
                self._dynamic_bindings.clear()
            self._dynamic_bindings[sizes] = binding
        if binding.violation is not None:
            self._report_fallback(FallbackReason.ASSUMPTION, sizes, binding.violation)
        return self._dynamic(args, binding.numbers, binding.calls)

    def _bind_dynamic(self, sizes: Sizes) -> DynamicBinding:
        self._assumptions.require(sizes)
        choices = self.graph.choices_at(sizes)
        violation = next((c.violation for c in choices if c.violation is not None), None)
        calls = tuple(choice.call for choice in choices)
        return DynamicBinding(self._dynamic_numbers(sizes), calls, violation)

    def _recover_from_move(self, args: Args) -> Any:
        """A bound input lies elsewhere now: no graph that read it may be replayed."""
        self.graph.require_alike({i: args[i] for i in self.captures.bound})
        if self._switch_instance(args):
            return self._slow(args)
        self.captures.forget(args)
        sizes = self.graph.token_dim.read(args)
        return self._fall_back(args, sizes, FallbackReason.MOVED_INPUT)

    def _switch_instance(self, args: Args) -> bool:
        """Dynamo serves all instances of a class with one trace; each has its own captures."""
        own = next((c for c in self._parked if c.fit(args) or c.belong_to(args)), None)
        if own is None and not self.captures.belong_to_another(args):
            return False
        others = [c for c in self._parked if c is not own and c.are_alive]
        self._parked = [*others, self.captures][-_MAX_INSTANCES:]
        self.captures = own or Captures(self.graph, self.config)
        return True

    def _refuse_overlap(self, args: Args) -> Any:
        """A copy of an input would miss what the model writes to it through another one."""
        sizes = self.graph.token_dim.read(args)
        return self._fall_back(args, sizes, FallbackReason.OVERLAPPING_INPUTS)

    def _capture(self, args: Args, sizes: Sizes, size: int) -> None:
        try:
            captured = self.captures.capture(size, args, sizes, self.dispatcher.table)
        except CaptureError as error:
            self._report_fallback(FallbackReason.CAPTURE_ERROR, sizes, str(error))
            return
        self.counters.add(num_cudagraph_captured=captured.num_graphs)
        self._dump.write(f"plan_{size or 'static'}.py", captured.plan.source)

    def on_rewritten(self, rewritten: _torch.Rewritten) -> None:
        """Dynamo has written the code that calls this graph.

        Raises:
            ContractError: the code cannot run without guards, and is to.
        """
        if rewritten.code is not None:
            self._dump.write_transformed(rewritten.code)
        if self.config.skip_guards:
            refuse_assignments(rewritten)
        self.rewritten = rewritten
        self._assumptions = Assumptions(self.graph.token_dim, rewritten)

    def static_inputs(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """The buffers that graphs for so many tokens read; empty if there are no such graphs."""
        token_dim = self.graph.token_dim
        sizes = token_dim.padded((0,) * len(token_dim.symbols), num_tokens)
        decision = self.dispatcher.decide(sizes)
        if isinstance(decision, FallbackReason) or decision not in self.captures.sizes:
            return {}
        with _torch.ordinary_tensors():
            return self.captures.buffers(token_dim.padded(sizes, decision), sizes)

    def has_captured(self, size: int) -> bool:
        """There are graphs for this capture size, or it is known that there can be none."""
        key = size if self.graph.token_dim.tokens else STATIC_SIZE
        return key in self.captures.sizes or key in self.captures.failed

    def seal(self) -> None:
        """Compile nothing any more: a violated assumption runs a piece as traced."""
        for versions in self.graph.versions:
            versions.is_sealed = True

    def unseal(self) -> None:
        """Allow compiling again, and trying again what could not be captured."""
        self.captures.failed.clear()
        self._dynamic_bindings.clear()
        for versions in self.graph.versions:
            versions.unseal()
