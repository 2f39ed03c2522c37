"""What users call on a compiled model: warm up, seal, report.

In:  what `torch.compile(..., backend="piecewise")` or `module.compile(...)` returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piecewise_backend import _torch
from piecewise_backend.batch import BatchDescriptor, CUDAGraphMode
from piecewise_backend.config import Config
from piecewise_backend.current_batch import stated
from piecewise_backend.errors import ContractError
from piecewise_backend.graphs import collector_paused
from piecewise_backend.metrics import Metrics
from piecewise_backend.past_dynamo import send_past_dynamo
from piecewise_backend.report import Report, report_session
from piecewise_backend.session import Session, WarmupState

MakeInputs = Callable[[BatchDescriptor], Any]


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
        ContractError: not compiled with this backend, or `make_inputs` returns something else
            than arguments, or other arguments for another size.
    """
    scope = _scope(compiled)
    config = Config.from_options(scope.kwargs.get("options"), scope.kwargs.get("mode"))
    sizes = sorted(config.cudagraph_capture_sizes, reverse=True)
    if not _session(compiled).are_graphs_on:
        raise ContractError("graphs are switched off; call pw.switch_graphs(model, True) first")
    session = _trace(compiled, make_inputs, sizes)
    for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
        with session.phase(capturing=mode), collector_paused():
            _capture(compiled, make_inputs, session, mode)
        if verify:
            with session.phase(capturing=mode, verifying=True), _nothing_unverified(session):
                _run_all(compiled, make_inputs, session.trials(mode))
    session.state = WarmupState.GRAPH_CAPTURED
    for each in (Session.of(scope), session):
        each.make_inputs = make_inputs
    if seal:
        _seal(compiled)
    return report(compiled)


@contextlib.contextmanager
def _nothing_unverified(session: Session) -> Iterator[None]:
    """An error in the middle of comparing leaves no graph that was not compared."""
    try:
        yield
    except BaseException:
        session.drop_captures()
        raise


def _capture(
    compiled: Callable[..., Any], make_inputs: MakeInputs, session: Session, mode: CUDAGraphMode
) -> None:
    wanted = session.wanted(mode)
    # A second round finds something to do only if module state moved between two sizes.
    _run_all(compiled, make_inputs, wanted)
    _run_all(compiled, make_inputs, [d for d in wanted if not session.has_captured(mode, d)])


def _run_all(
    compiled: Callable[..., Any], make_inputs: MakeInputs, batches: list[BatchDescriptor]
) -> None:
    for descriptor in batches:
        args, kwargs = _inputs(make_inputs, descriptor)
        with stated(descriptor):
            compiled(*args, **kwargs)


def seal(compiled: Callable[..., Any]) -> None:
    """From now on nothing compiles or captures: such a call raises, or falls back by reason.

    Guards have nothing left to do then: where `torch.compile` returned a module, calls go past
    them, under the contract of `pw.compile` (the report says why not, if they do not).
    """
    _seal(compiled)


def rebind(compiled: Callable[..., Any]) -> Report:
    """Accept that weights, buffers or caches were replaced: capture every size anew.

    Raises:
        ContractError: there was no warm-up whose inputs could be used again.
    """
    session = _session(compiled)
    if session.make_inputs is None:
        raise ContractError("nothing was warmed up; call warmup(make_inputs), which captures anew")
    return warmup(compiled, session.make_inputs, seal=session.is_sealed)


def _seal(compiled: Callable[..., Any]) -> None:
    own, serving = Session.of(_scope(compiled)), _session(compiled)
    own.seal()
    serving.seal()
    serving.state = WarmupState.READY
    if _traced(compiled) is compiled:
        send_past_dynamo(compiled, own, serving)


def report(compiled: Callable[..., Any]) -> Report:
    """What was compiled, captured, replayed, and every fallback with its reason."""
    return report_session(_session(compiled), Session.of(_scope(compiled)).guards_kept)


def metrics(compiled: Callable[..., Any], labels: Mapping[str, str] | None = None) -> Metrics:
    """How many steps ran from which graphs, and why the others did not.

    Args:
        labels: `model_revision` and `attention_backend`, for `pw.prometheus_text`.

    Raises:
        ConfigError: another label.
    """
    return Metrics.of((runtime.statistics for runtime in _session(compiled).runtimes), labels)


def switch_graphs(compiled: Callable[..., Any], on: bool) -> None:
    """Run the calls of one model without graphs, or with them again; captures stay.

    Instances of one class that `torch.compile` compiled share a trace, and this; what
    `pw.compile` compiled does not.

    Args:
        on: False counts every call as a fallback, with the reason that graphs are switched off.
    """
    for session in (Session.of(_scope(compiled)), _session(compiled)):
        session.switch_graphs(on)


def _trace(compiled: Callable[..., Any], make_inputs: MakeInputs, sizes: list[int]) -> Session:
    """Run the model once at the largest size, so that one trace serves every size."""
    own, serving = Session.of(_scope(compiled)), _session(compiled)
    own.unseal()
    serving.unseal()
    args, kwargs = _inputs(make_inputs, BatchDescriptor(num_tokens=sizes[0]))
    other = sizes[1] if len(sizes) > 1 else (sizes[0] - 1 or 2)
    _mark_varying(
        _tensors(args, kwargs), _tensors(*_inputs(make_inputs, BatchDescriptor(num_tokens=other)))
    )
    with own.phase(tracing=True), serving.phase(tracing=True), _torch.one_trace_for_all_sizes():
        compiled(*args, **kwargs)
    session = _session(compiled)
    if not session.runtimes:
        raise ContractError(
            f"a call of {type(compiled).__name__} did not reach the piecewise backend; compile "
            "with backend='piecewise', and see that torch.compile is not switched off"
        )
    session.state = WarmupState.EAGER_WARMED
    return session


def _session(compiled: Callable[..., Any]) -> Session:
    """The session that has the traces which serve `compiled`."""
    scope = _scope(compiled)
    sessions = [Session.of(scope)]
    if not sessions[0].runtimes:
        sessions += map(Session.of, _torch.scopes_with_traces(_traced(compiled), scope))
    return next((session for session in sessions if session.runtimes), sessions[0])


def static_inputs(compiled: Callable[..., Any], num_tokens: int) -> dict[str, torch.Tensor]:
    """The buffers from which graphs read the arguments of a call with `num_tokens` tokens.

    Whoever writes his inputs there and passes these very tensors saves the copy.

    Returns:
        Tensors of `num_tokens` rows, by the name that the traced code gives them: `L['x']`.

    Raises:
        ContractError: no graphs serve so many tokens.
    """
    for runtime in Session.of(_scope(compiled)).runtimes:
        if buffers := runtime.static_inputs(num_tokens):
            return buffers
    raise ContractError(f"no graphs serve {num_tokens} tokens; warm up with a size that does")


def _traced(compiled: object) -> object:
    """What `torch.compile` returned, also from inside of what `pw.compile` did."""
    inner = getattr(type(compiled), "piecewise", None)  # an instance of a compiled class
    compiled = compiled.piecewise if isinstance(inner, property) else compiled  # type: ignore[attr-defined]
    return getattr(compiled, "__dict__", {}).get("traced", compiled)


def _scope(compiled: object) -> _torch.CompileScope:
    scope = _torch.scope_of(_traced(compiled))
    if scope is None:
        raise ContractError(
            f"{type(compiled).__name__} is not compiled; pass what torch.compile(..., "
            "backend='piecewise') returned, or a module after module.compile(...)"
        )
    return scope


def _inputs(
    make_inputs: MakeInputs, descriptor: BatchDescriptor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made = make_inputs(descriptor)
    if isinstance(made, torch.Tensor):
        return (made,), {}
    is_pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)
    if is_pair and isinstance(made[0], tuple | list):
        return tuple(made[0]), dict(made[1])
    if not isinstance(made, tuple | list):
        raise ContractError(
            f"make_inputs returned {type(made).__name__}; return a tuple of arguments, "
            "or (args, kwargs)"
        )
    return tuple(made), {}


def _tensors(args: Iterable[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors([getattr(leaf, f.name) for f in dataclasses.fields(leaf)], {})
    return found


def _mark_varying(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Tell Dynamo which dimensions differ between two sizes, so that it traces once."""
    ranks, other_ranks = ([tensor.dim() for tensor in each] for each in (tensors, others))
    if ranks != other_ranks:
        raise ContractError(
            f"make_inputs returned tensors of rank {ranks} for one size and {other_ranks} for "
            "another; return the same arguments for every size"
        )
    if tensors and all(a.shape == b.shape for a, b in zip(tensors, others, strict=True)):
        raise ContractError(
            f"make_inputs returned the same shapes, {[tuple(t.shape) for t in tensors]}, for two "
            "sizes; return descriptor.num_tokens tokens"
        )
    for tensor, other in zip(tensors, others, strict=True):
        for dim, (size, other_size) in enumerate(zip(tensor.shape, other.shape, strict=True)):
            if size != other_size:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
