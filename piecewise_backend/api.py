"""What users call on a compiled model: warm up, seal, report.

In:  what `torch.compile(..., backend="piecewise")` or `module.compile(...)` returned.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.batch import FallbackReason
from piecewise_backend.config import Config
from piecewise_backend.costs import cost_table
from piecewise_backend.current_batch import facts_now
from piecewise_backend.errors import ContractError
from piecewise_backend.eviction import Evicted, evict_idle
from piecewise_backend.handles import scope_of, session_of, traced_of
from piecewise_backend.metrics import Metrics
from piecewise_backend.option_checks import patience
from piecewise_backend.past_dynamo import send_past_dynamo
from piecewise_backend.report import Report, report_session, tunings_of
from piecewise_backend.runtime import Runtime
from piecewise_backend.session import Session, WarmupState
from piecewise_backend.start_up import MakeInputs, warm_up
from piecewise_backend.tuning import Tuning

log = logging.getLogger(__name__)


def warmup(
    compiled: Callable[..., Any],
    make_inputs: MakeInputs,
    *,
    seal: bool = True,
    verify: bool = True,
) -> Report:
    """Trace, compile and capture every size ahead of time, so that serving does none of it.

    The model runs at every size, for each kind of graph, and again to compare graphs with the
    step without them: at the size, one token below, and at the fewest tokens that are padded to
    it. What differs is disabled with its reason, and the other sizes serve. Run it in the mode
    of later calls (`torch.no_grad()` or `torch.inference_mode()`), and give it inputs whose
    traces in caches are nobody's.

    Args:
        compiled: a module or function compiled with this backend.
        make_inputs: called with a `BatchDescriptor`; returns the positional arguments of a
            call with `descriptor.num_tokens` tokens as a tuple, or `(args, kwargs)` with a
            tuple and a dict. What differs between two sizes is taken as the token dimension.
            Of a decode batch if `descriptor.uniform`: `descriptor.num_reqs` sequences.
        seal: afterwards, refuse whatever would compile or capture.
        verify: compare graphs with the step without.

    Returns:
        What was compiled and captured.

    Raises:
        ContractError: not compiled with this backend, a warm-up of the model is under way, or
            `make_inputs` returns something else than arguments, or other arguments for another
            size.
    """
    return _warm_up(compiled, make_inputs, seal, verify, stays_off=False)


def _warm_up(
    compiled: Callable[..., Any],
    make_inputs: MakeInputs,
    seal: bool,
    verify: bool,
    stays_off: bool,
    anew: Mapping[Runtime, Collection[int]] | None = None,
) -> Report:
    """Capture what there is not.

    Args:
        stays_off: all sizes anew, and calls go on without graphs if that fails.
        anew: sizes that are captured anew, by runtime.
    """
    scope = scope_of(compiled)
    config = Config.from_options(scope.kwargs.get("options"), scope.kwargs.get("mode"))
    sizes = sorted(config.cudagraph_capture_sizes, reverse=True)
    own, serving = Session.of(scope), session_of(compiled)
    if not serving.are_graphs_on:
        raise ContractError("graphs are switched off; call pw.switch_graphs(model, True) first")
    with contextlib.ExitStack() as stack:
        for each in dict.fromkeys((own, serving)):
            stack.enter_context(each.rebuild(stays_off=stays_off))
        for runtime, anew_sizes in (anew or {}).items():
            with runtime.turns.held():
                runtime.captures.tune_again(anew_sizes)
        session = warm_up(compiled, make_inputs, sizes, verify, anew=stays_off)
        for each in (own, session):
            each.make_inputs, each.modes = make_inputs, _modes_now()
        if seal:
            _seal(compiled)
    for runtime in session.runtimes:
        if runtime.background is not None:
            runtime.background.start(runtime.graph, runtime.config)
    costs = [cost for runtime in session.runtimes for cost in runtime.captures.costs.values()]
    log.info("captures:\n%s", cost_table(costs))
    return report(compiled)


def seal(compiled: Callable[..., Any]) -> None:
    """From now on nothing compiles or captures: such a call raises, or falls back by reason.

    Guards have nothing left to do then: where `torch.compile` returned a module, calls go past
    them, under the contract of `pw.compile` (the report says why not, if they do not).
    """
    _seal(compiled)


def rebind(compiled: Callable[..., Any]) -> Report:
    """Accept that weights, buffers, adapters or caches were replaced: capture every size anew.

    Calls of other threads are served meanwhile, as are those that `make_inputs` makes: on the new
    values, without graphs, counted with the reason `REBUILDING`. After an error it stays at that,
    until a `rebind` or `warmup` succeeds.

    Raises:
        ContractError: there was no warm-up whose inputs could be used again.
        Exception: what warm-up raises.
    """
    session = session_of(compiled)
    make_inputs = _make_inputs_of(session)
    with _under_modes(session.modes):
        return _warm_up(compiled, make_inputs, session.is_sealed, verify=True, stays_off=True)


def adopt_tuned(compiled: Callable[..., Any], *, wait: bool | float = False) -> tuple[Tuning, ...]:
    """Let versions serve that were found to be faster in the background (`tuning="background"`).

    Sizes whose pieces are all done are captured anew, and all sizes are compared with the step
    without graphs, in the mode (`torch.no_grad` or `torch.inference_mode`) of warm-up; calls of
    other threads are served without graphs meanwhile, with the reason `REBUILDING`. So call it
    where none are waiting. Where no size is done yet nothing happens. After an error the sizes
    are there for the next time.

    Args:
        wait: True is until all that is wanted was tuned, a number is for so many seconds at most:
            then a warning in the log says what is left, which goes on for the next time.

    Returns:
        What was found out, and serves now; see also `tunings` in the report.

    Raises:
        ConfigError: `wait` is neither.
        ContractError: there was no warm-up whose inputs could be used again, one is under way, or
            graphs are switched off.
        Exception: what warm-up raises; the next call tries again.
    """
    seconds, begun = patience("wait", wait), time.monotonic()
    session = session_of(compiled)
    make_inputs = _make_inputs_of(session)
    found: dict[Runtime, set[int]] = {}
    for runtime in session.runtimes:
        if runtime.background is not None:
            if seconds is not None:
                runtime.background.wait(begun + seconds - time.monotonic())
            if sizes := runtime.background.ready():
                found[runtime] = sizes
    known = {id(tuning) for runtime in found for tuning in tunings_of(runtime)}
    if found:
        with _under_modes(session.modes):
            _warm_up(compiled, make_inputs, session.is_sealed, True, stays_off=False, anew=found)
    for runtime, sizes in found.items():
        assert runtime.background is not None
        runtime.background.taken(sizes)
    return tuple(t for runtime in found for t in tunings_of(runtime) if id(t) not in known)


def _modes_now() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@contextlib.contextmanager
def _under_modes(modes: tuple[bool, bool]) -> Iterator[None]:
    """As warm-up ran, whatever thread this is: modes belong to threads."""
    has_gradients, is_inference = modes
    with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients):
        yield


def _make_inputs_of(session: Session) -> MakeInputs:
    if session.make_inputs is None:
        raise ContractError("nothing was warmed up; call warmup(make_inputs), which captures anew")
    return session.make_inputs  # type: ignore[no-any-return]


def _seal(compiled: Callable[..., Any]) -> None:
    own, serving = Session.of(scope_of(compiled)), session_of(compiled)
    own.seal()
    serving.seal()
    serving.state = WarmupState.READY
    if traced_of(compiled) is compiled:
        send_past_dynamo(compiled, own, serving)


def report(compiled: Callable[..., Any]) -> Report:
    """What was compiled, captured, replayed, and every fallback with its reason."""
    return report_session(session_of(compiled), Session.of(scope_of(compiled)).guards_kept)


def metrics(compiled: Callable[..., Any], labels: Mapping[str, str] | None = None) -> Metrics:
    """How many steps ran from which graphs, and why the others did not.

    Args:
        labels: `model_revision` and `attention_backend`, for `pw.prometheus_text`.

    Raises:
        ConfigError: another label.
    """
    return Metrics.of((runtime.statistics for runtime in session_of(compiled).runtimes), labels)


def evict(compiled: Callable[..., Any]) -> Evicted:
    """Give up the graphs of every size that served no call since warm-up or the last `evict`.

    Each mode has sizes of its own: one may be in use for whole steps and idle in pieces. Batches
    of an evicted size are padded to the next larger size that is left, or run without graphs, with
    the reason that it was evicted, until `pw.warmup` or `pw.rebind` captures it again. This waits
    for a call that is running and for the device, and empties the cache of torch's allocator.

    Graphs of one pool share its memory, which stays for as long as one of them does. What comes
    back is what the driver held for the nodes of the graphs, as far as it gives that to the device:
    an H200's keeps it for graphs to come (tests/gpu/test_budgets.py).

    Returns:
        The sizes by mode, and the bytes that came back.

    Raises:
        ContractError: not compiled with this backend, called from inside of a call, or while a
            warm-up is under way, whose graphs have had no call to serve.
    """
    session = session_of(compiled)
    if session.is_warming_up:
        raise ContractError("a warm-up of this model is under way; evict when it is done")
    return evict_idle(session.runtimes)


def switch_graphs(compiled: Callable[..., Any], on: bool) -> None:
    """Run the calls of one model without graphs, or with them again; captures stay.

    Instances of one class that `torch.compile` compiled share a trace, and this; what
    `pw.compile` compiled does not.

    Args:
        on: False counts every call as a fallback, with the reason that graphs are switched off.
    """
    for session in (Session.of(scope_of(compiled)), session_of(compiled)):
        session.switch_graphs(on)


def static_inputs(compiled: Callable[..., Any], num_tokens: int) -> dict[str, torch.Tensor]:
    """The buffers from which graphs read the arguments of a call with `num_tokens` tokens.

    Whoever writes his inputs there and passes these very tensors saves the copy.

    Returns:
        Tensors of `num_tokens` rows, by the name that the traced code gives them: `L['x']`.

    Raises:
        ContractError: no graphs serve so many tokens.
    """
    for runtime in Session.of(scope_of(compiled)).runtimes:
        if buffers := _buffers(runtime, num_tokens):
            return buffers
    raise ContractError(f"no graphs serve {num_tokens} tokens; warm up with a size that does")


def _buffers(runtime: Runtime, num_tokens: int) -> dict[str, torch.Tensor]:
    """Empty if there are no graphs for so many tokens."""
    token_dim, captures = runtime.graph.token_dim, runtime.captures
    sizes = token_dim.padded((0,) * len(token_dim.symbols), num_tokens)
    decision = runtime.dispatcher.decide(sizes, facts_now())
    if isinstance(decision, FallbackReason):
        return {}
    for target in decision:
        if target.key in captures.captured:
            padded, static_inputs = (
                token_dim.padded(sizes, target.size),
                captures.memory.static_inputs,
            )
            with _torch.ordinary_tensors():
                return static_inputs.rows(padded, sizes) if static_inputs is not None else {}
    return {}
