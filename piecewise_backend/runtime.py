"""Serve the calls of one compiled graph: owns its captures, buffers and statistics.

In:  a `CompiledGraph` and options.
Out: `Runtime.call`, which Dynamo calls with the graph's arguments.

The hot path is `_make_run`: one look-up by sizes, then the plan. All else leaves it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from piecewise_backend import _torch
from piecewise_backend.agreement import Agreement
from piecewise_backend.assumptions import Assumptions, refuse_assignments
from piecewise_backend.batch import CUDAGraphMode, FallbackReason
from piecewise_backend.capture_request import CapturedSize
from piecewise_backend.captures import Captures
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.config import Config
from piecewise_backend.counters import CompilationCounter
from piecewise_backend.current_batch import facts_now, stack_now
from piecewise_backend.dispatch import STATIC_SIZE, Decision, Dispatcher, Target
from piecewise_backend.dump import GraphDump
from piecewise_backend.errors import CaptureError
from piecewise_backend.fallbacks import OF_ANOTHER_INSTANCE, STEPS_ARE_GONE, Fallbacks
from piecewise_backend.graph_mode import graph_mode
from piecewise_backend.parked import Parked
from piecewise_backend.plan_writer import InputMoved, InputsOverlap
from piecewise_backend.pools import pool_maker
from piecewise_backend.session import Session
from piecewise_backend.sizes import Sizes
from piecewise_backend.statistics import Statistics
from piecewise_backend.turns import Turns
from piecewise_backend.verification import verify
from piecewise_backend.without_graphs import WithoutGraphs

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from piecewise_backend.background import BackgroundTuning

Args = Sequence[Any]

_MAX_PREPARED = 4096  # token counts, times sizes that only split ops see, whose views are kept


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
        self.mode, self.mode_reason = graph_mode(graph, config)  # what the option became, and why
        log.info("cudagraph_mode=%s %s", self.mode.value, self.mode_reason)
        has_graphs = pool_maker(graph.device, config) is not None
        num_tokens = graph.static_num_tokens(example_args)
        dispatcher = Dispatcher.of(graph, config, self.mode, has_graphs, num_tokens)
        self.captures = Captures(graph, config, dispatcher, session.memory_of(graph.device))
        self._parked = Parked()
        self._fallbacks = Fallbacks(self.statistics, config.on_fallback, session.is_serving)
        self.turns = Turns(graph.device)
        self.key_of = graph.token_dim.key_function()
        """Reads off the graph's arguments what `captures.prepared` goes by, beside facts."""
        self.agreement = Agreement(graph.token_dim.read, dispatcher.require)
        self.rewritten: _torch.Rewritten | None = None
        """What Dynamo made of the function; None until it is done with it."""
        self.background: BackgroundTuning | None = None
        on_violation = functools.partial(self._report_fallback, FallbackReason.ASSUMPTION)
        self._without_graphs = WithoutGraphs(graph, on_violation)
        dump.write("plan_dynamic.py", self._without_graphs.source)
        self.run = self._make_run()
        """Serves one call whose turn it is, with a list of the graph's arguments."""
        self.call = self._make_call()

    @property
    def dispatcher(self) -> Dispatcher:
        """Of the instance that was called last."""
        return self.captures.dispatcher

    @property
    def instances(self) -> list[Captures]:
        """The captures of each instance of the model that has some."""
        return [self.captures, *self._parked]

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
        key_of, slow = self.key_of, self._slow
        known, check = self.agreement.known, self.agreement.check

        def run(args: list[Any]) -> Any:
            key, stated = key_of(args), stack_now()
            if stated is None:
                ready = self.captures.prepared.get(key)
            else:
                facts = stated[0]
                ready = self.captures.prepared.get((facts.kind, key))
                if (facts, key) not in known:
                    check(facts, key, args)
            if ready is None:
                return slow(args)
            plan, rows, tally = ready
            try:
                result = plan(args, rows)
            except InputMoved:
                return self._recover_from_move(args)
            except InputsOverlap:
                return self._refuse_overlap(args)
            tally.num_replays += 1
            return result

        return run

    def run_nested(self, args: Args) -> Any:
        """The model was called by one of its own split ops: the buffers are in use."""
        return self._fall_back(args, self.graph.token_dim.read(args), FallbackReason.NESTED_CALL)

    def _slow(self, args: Args) -> Any:
        sizes = self.graph.token_dim.read(args)
        if self._parked and self.captures.bound.moved(args):  # another instance's turn, perhaps
            return self._recover_from_move(args)
        decision: Decision | None = self._session.reason_without_graphs
        decision = decision or self.dispatcher.decide(sizes, facts_now())
        if isinstance(decision, FallbackReason):
            return self._fall_back(args, sizes, decision)
        if (mode := self._session.capturing) is not None:  # warm-up captures one after the other
            wanted = tuple(target for target in decision if target.mode is mode)
            if not wanted:
                key, reason = self.dispatcher.not_whole(sizes, facts_now())
                self.captures.errors[mode, *key] = reason
                return self._without_graphs.run(args, sizes)
            decision = wanted
        fault = None
        for target in decision:
            captured = self.captures.captured.get(target.key)
            if captured is None:
                continue
            is_padded = target.size not in (STATIC_SIZE, self.graph.token_dim.num_tokens(sizes))
            if not is_padded or (captured.is_tried and captured.padding_fault is None):
                return self._prepare(captured, target, sizes, args)
            fault = captured.padding_fault or "padding to this size was not tried"
        if fault is not None:
            detail = f"{fault}; add the exact size to the grid"
            return self._fall_back(args, sizes, FallbackReason.PADDING_UNSAFE, detail)
        errors = [self.captures.errors.get(target.key) for target in decision]
        if all(errors):
            return self._fall_back(args, sizes, FallbackReason.CAPTURE_ERROR, str(errors[-1]))
        if self.captures.bound.moved(args) or self._parked.have(args):
            return self._recover_from_move(args)
        return self._not_captured(args, sizes, decision[-1])

    def _prepare(self, captured: CapturedSize, target: Target, sizes: Sizes, args: Args) -> Any:
        """First batch with these sizes: make its views, keep them, and run."""
        self._without_graphs.assumptions.require(sizes)
        prepared = self.captures.prepared
        if len(prepared) >= _MAX_PREPARED:
            prepared.clear()
        with _torch.ordinary_tensors():
            rows = captured.rows.at(sizes)
            if not captured.rows.are_contiguous_as_promised(sizes):
                detail = "the token dimension of what a split op is given is not the first"
                return self._fall_back(args, sizes, FallbackReason.PADDING_UNSAFE, detail)
        try:
            if self._session.is_verifying:
                return self._verify(captured, target, sizes, args)
            result = captured.plan.function(args, rows)
        except InputMoved:
            return self._recover_from_move(args)
        except InputsOverlap:
            return self._refuse_overlap(args)
        if not self._session.is_serving():
            return result
        tally = self.statistics.tally(target.mode, target.size, self.dispatcher.num_tokens(sizes))
        key, facts = self.graph.token_dim.key_of(sizes), facts_now()
        if self._session.reason_without_graphs is None:  # this call itself may have given one
            ready = (captured.plan.function, rows, tally)
            prepared[key if facts is None else (facts.kind, key)] = ready
        tally.num_replays += 1
        return result

    def _verify(self, captured: CapturedSize, target: Target, sizes: Sizes, args: Args) -> Any:
        """Compare, and give up what is wrong: the size, or padding to it."""
        run_without = functools.partial(self._without_graphs.run, args, sizes)
        result, fault = verify(self.graph, captured, args, sizes, run_without)
        if fault is not None:
            num_tokens = self.dispatcher.num_tokens(sizes)
            is_padded = target.size not in (STATIC_SIZE, num_tokens)
            give_up = self.captures.allow_no_padding if is_padded else self.captures.disable
            give_up(target.key, f"verification at {num_tokens} tokens: {fault}")
        return result

    def _not_captured(self, args: Args, sizes: Sizes, target: Target) -> Any:
        """Run without graphs; capture afterwards if it is time to."""
        if self._session.is_sealed:
            detail = OF_ANOTHER_INSTANCE if self._parked else ""
            return self._fall_back(args, sizes, FallbackReason.NOT_CAPTURED, detail)
        if self._session.is_serving():
            self.statistics.count(FallbackReason.NOT_CAPTURED)
        result = self._without_graphs.run(args, sizes)
        hits = self.captures.hits
        hits[target.size] = hits.get(target.size, 0) + 1
        is_due = hits[target.size] >= self.config.capture_after and not self._session.is_quiet
        # The capture of a whole step runs its split ops again, which only warm-up may.
        is_due = is_due and target.mode is CUDAGraphMode.PIECEWISE
        if self._session.capturing is not None or is_due:
            self._capture(args, sizes, target)
        return result

    def _fall_back(self, args: Args, sizes: Sizes, reason: FallbackReason, detail: str = "") -> Any:
        if not self._session.is_quiet:
            self._report_fallback(reason, sizes, detail)
        return self._without_graphs.run(args, sizes)

    def _report_fallback(self, reason: FallbackReason, sizes: Sizes, detail: str = "") -> None:
        self._fallbacks.report(reason, sizes, detail or self.dispatcher.detail(reason, sizes))

    def _recover_from_move(self, args: Args) -> Any:
        """A bound input lies elsewhere now: no graph that read it may be replayed."""
        self.graph.require_alike({i: args[i] for i in self.captures.bound.positions})
        if (others := self._parked.exchange(self.captures, args)) is not None:
            self.captures = others
            return self._slow(args)
        self.captures.forget(args)
        if self.captures.captured:  # what only whole steps read where it was
            self._fallbacks.warn_once(STEPS_ARE_GONE)
            return self._slow(args)
        return self._fall_back(args, self.graph.token_dim.read(args), FallbackReason.MOVED_INPUT)

    def _refuse_overlap(self, args: Args) -> Any:
        """A copy of an input would miss what the model writes to it through another one."""
        read, reason = self.graph.token_dim.read, FallbackReason.OVERLAPPING_INPUTS
        return self._fall_back(args, read(args), reason)

    def _capture(self, args: Args, sizes: Sizes, target: Target) -> None:
        try:
            if self._session.capturing is not None:
                self.captures.tune(target, args, sizes)
            if target.mode is CUDAGraphMode.FULL:
                descriptor = self.dispatcher.descriptor(target, facts_now())
                captured = self.captures.capture_step(descriptor, args, sizes)
            else:
                captured = self.captures.capture(target.size, args, sizes)
        except CaptureError as error:
            self._report_fallback(FallbackReason.CAPTURE_ERROR, sizes, str(error))
            return
        self.counters.add(num_cudagraph_captured=captured.num_graphs)
        self._dump.write_captured(target.mode, target.size, captured.plan.source)

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
        self._without_graphs.assumptions = Assumptions(self.graph.token_dim, rewritten)

    def seal(self) -> None:
        """Compile nothing any more: a violated assumption runs a piece as traced."""
        for versions in self.graph.versions:
            versions.is_sealed = True

    def unseal(self) -> None:
        """Allow compiling again."""
        self._without_graphs.forget()
        for versions in self.graph.versions:
            versions.unseal()
