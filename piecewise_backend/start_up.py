"""Run a model ahead of time: trace it, capture its sizes, compare graphs with the step without.

In:  what users hold, and `make_inputs`.
Out: sessions whose runtimes have captures.
Knows nothing of how a call is served.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from tqdm import tqdm

from piecewise_backend import _torch
from piecewise_backend.batch import BatchDescriptor, CUDAGraphMode
from piecewise_backend.current_batch import stated
from piecewise_backend.errors import ContractError
from piecewise_backend.fitting import fit
from piecewise_backend.graphs import collector_paused
from piecewise_backend.handles import scope_of, session_of
from piecewise_backend.session import Session, WarmupState, own_calls

MakeInputs = Callable[[BatchDescriptor], Any]


def warm_up(
    compiled: Callable[..., Any],
    make_inputs: MakeInputs,
    sizes: list[int],
    verify: bool,
    *,
    anew: bool,
) -> Session:
    """Everything but sealing; see `pw.warmup`.

    Args:
        sizes: capture sizes, descending.
        verify: compare graphs with the step without.
        anew: keep no capture that there is.
    """
    session = _trace(compiled, make_inputs, sizes)
    if anew:  # what was replaced may be no input of the graph: an op finds it by name
        session.drop_captures()
    traces = session.runtimes
    for runtime in traces:
        runtime.captures.try_all_again()
    for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
        # Pieces were tried with padding when they were captured, whole steps were not.
        is_untried = verify and mode is CUDAGraphMode.FULL
        kept = _no_whole_steps(session) if is_untried else contextlib.nullcontext()
        with session.phase(capturing=mode), collector_paused(), kept:
            _capture_all(compiled, make_inputs, session, mode)
        if verify:
            with session.phase(capturing=mode, verifying=True), _nothing_unverified(session):
                trials, title = session.trials(mode), f"comparing {mode.value}"
                _run_all(compiled, make_inputs, session, trials, len(trials), title)
    if not set(traces).issubset(session.runtimes):
        session.drop_captures()
        raise ContractError(
            "torch._dynamo.reset() was called while the model was warmed up, and its trace is "
            "gone; warm up again"
        )
    session.state = WarmupState.GRAPH_CAPTURED
    for runtime in traces:
        runtime.statistics.mark()
    return session


def _trace(compiled: Callable[..., Any], make_inputs: MakeInputs, sizes: list[int]) -> Session:
    """Run the model once at the largest size, so that one trace serves every size."""
    own, serving = Session.of(scope_of(compiled)), session_of(compiled)
    own.unseal()
    serving.unseal()
    args, kwargs = _inputs(make_inputs, BatchDescriptor(num_tokens=sizes[0]))
    other = sizes[1] if len(sizes) > 1 else (sizes[0] - 1 or 2)
    _mark_varying(
        _tensors(args, kwargs), _tensors(*_inputs(make_inputs, BatchDescriptor(num_tokens=other)))
    )
    with (
        own.phase(tracing=True),
        serving.phase(tracing=True),
        own_calls(own, serving),
        _torch.one_trace_for_all_sizes(),
    ):
        compiled(*args, **kwargs)
    session = session_of(compiled)
    if not session.runtimes:
        raise ContractError(
            f"a call of {type(compiled).__name__} did not reach the piecewise backend; compile "
            "with backend='piecewise', and see that torch.compile is not switched off"
        )
    session.state = WarmupState.EAGER_WARMED
    return session


def _capture_all(
    compiled: Callable[..., Any], make_inputs: MakeInputs, session: Session, mode: CUDAGraphMode
) -> None:
    """Run the model at every size that is wanted in a mode, so that it is captured."""
    wanted = session.wanted(mode)
    fitting = _while_they_fit(session, mode, wanted)
    _run_all(compiled, make_inputs, session, fitting, len(wanted), f"capturing {mode.value}")
    # There is something left only if module state moved between two sizes.
    missing = [d for d in wanted if not session.has_captured(mode, d)]
    title = f"capturing {mode.value} again"
    _run_all(compiled, make_inputs, session, missing, len(missing), title)
    _require_captured(session, mode, missing)


def _require_captured(
    session: Session, mode: CUDAGraphMode, tried_twice: list[BatchDescriptor]
) -> None:
    """What still is neither captured nor given up with a reason never will be."""
    missing = [d for d in tried_twice if not session.has_captured(mode, d)]
    if len(session.runtimes) == 1 and missing:  # of several traces not all need serve all sizes
        raise ContractError(
            f"calls with what make_inputs returned for {[d.num_tokens for d in missing]} tokens "
            f"were served without graphs twice, so that no {mode.value} graphs could be captured; "
            "return that many tokens, and replace no weight or cache in make_inputs"
        )


def _while_they_fit(
    session: Session, mode: CUDAGraphMode, wanted: list[BatchDescriptor]
) -> Iterator[BatchDescriptor]:
    """Those that the budget has room for when it is their turn."""
    for size, batches in itertools.groupby(wanted, lambda descriptor: descriptor.num_tokens):
        for runtime in session.runtimes:
            fit(runtime, mode)
        if any(size in runtime.dispatcher.tables[mode].sizes for runtime in session.runtimes):
            yield from batches


@contextlib.contextmanager
def _nothing_unverified(session: Session) -> Iterator[None]:
    """An error in the middle of comparing leaves no graph that was not compared."""
    try:
        yield
    except BaseException:
        session.drop_captures()
        raise


@contextlib.contextmanager
def _no_whole_steps(session: Session) -> Iterator[None]:
    """An error in the middle of capturing leaves none that was not compared."""
    try:
        yield
    except BaseException:
        for runtime in session.runtimes:
            runtime.captures.clear_steps()
        raise


def _run_all(
    compiled: Callable[..., Any],
    make_inputs: MakeInputs,
    session: Session,
    batches: Iterable[BatchDescriptor],
    num_batches: int,
    what: str,
) -> None:
    """Call the model once with each batch, behind a progress bar if that can be seen.

    Args:
        num_batches: that there will be at most.
        what: is being done, for the bar.
    """
    if num_batches == 0:
        return
    title = f"piecewise: {what}"
    with tqdm(desc=title, total=num_batches, unit="batch", disable=None) as bar:
        for descriptor in batches:
            args, kwargs = _inputs(make_inputs, descriptor)
            with stated(descriptor), own_calls(session):
                compiled(*args, **kwargs)
            bar.update()
        bar.total = bar.n  # a budget may have left some out
        bar.refresh()


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
