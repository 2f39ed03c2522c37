"""`pw.compile`: a model that is traced once, and called without guards from then on.

In:  a module, function or class, and options.
Out: `Compiled`, called like the original.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from piecewise_backend import _torch, backend
from piecewise_backend.api import rebind, report, seal, static_inputs, warmup
from piecewise_backend.checked import checked
from piecewise_backend.compiled_class import compile_class
from piecewise_backend.config import Config
from piecewise_backend.dynamic_dims import Dims, DynamicDims
from piecewise_backend.entry import Entry, make_entry
from piecewise_backend.errors import ContractError
from piecewise_backend.graphs import collector_paused
from piecewise_backend.past_dynamo import reason_in_hooks
from piecewise_backend.presets import options_of_mode
from piecewise_backend.report import Report
from piecewise_backend.runtime import Runtime
from piecewise_backend.session import Session
from piecewise_backend.start_up import MakeInputs
from piecewise_backend.subject import name_of, snapshot, subject_of
from piecewise_backend.trace_start import StoredTraces

_OWN_ATTRIBUTES = {
    "original", "runtime", "entry", "traced",
    "_settings", "_config", "_subject", "_dims", "_tracing", "_call",
}  # fmt: skip


def compile(
    target: Any = None,
    /,
    *,
    dynamic_dims: Dims | None = None,
    mode: str | None = None,
    **options: Any,
) -> Any:
    """Compile a model for calls without guards.

    The first call (or `warmup`) traces it, for every token count at once. From then on a call
    goes straight to the captured plan, under a contract that is checked each time: what was
    None, a dtype, a device, a static size or a plain value at the trace must be so again.

    Args:
        target: a module, a function or method, or a class of modules; without it, a decorator.
        dynamic_dims: the dimensions that vary, by parameter: `{"input_ids": 0}`. Without it,
            dimension 0 of every parameter that is annotated as a tensor.
        mode: a `torch.compile` mode string, see `Config.from_options`.
        options: see `Config`.

    Returns:
        A `Compiled`; for a class the class, whose instances are compiled each for itself.

    Raises:
        ConfigError: an unknown option or value, a parameter that does not exist, or a target
            that has no Python function to trace.
    """
    if target is None:
        return functools.partial(compile, dynamic_dims=dynamic_dims, mode=mode, **options)
    Config.from_options(options, mode)
    if isinstance(target, Compiled):
        target = target.original
    if isinstance(target, type):
        return compile_class(target, Compiled, dynamic_dims, mode, options)
    return Compiled(target, dynamic_dims, mode, options)


class Compiled:
    """One model or function without guards. Attributes are those of the original."""

    def __init__(
        self, target: Any, dynamic_dims: Dims | None, mode: str | None, options: dict[str, Any]
    ) -> None:
        self.original = target
        """What was compiled."""
        self._settings = (dynamic_dims, mode, options)
        self._config = Config.from_options(options, mode)
        self._subject = subject_of(target).with_own_code()
        self._dims = DynamicDims.of(self._subject.function, dynamic_dims)
        self._tracing = threading.RLock()
        self.runtime: Runtime | None = None
        """Serves the calls; None before the first."""
        self.entry: Entry | None = None
        self.traced = torch.compile(
            self._subject.callable,
            backend=backend.piecewise,
            fullgraph=True,
            options=self._options(),
        )
        """The way through Dynamo, which the first call takes."""
        self._call: Callable[..., Any] = self._first_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns.

        Raises:
            ContractError: the model cannot be traced as one graph, the call breaks the
                contract, or it would compile something after sealing.
        """
        if torch.compiler.is_dynamo_compiling() or _torch.original_is_wanted():
            return self.original(*args, **kwargs)  # part of what is traced, or switched off
        return self._call(*args, **kwargs)

    def warmup(self, make_inputs: MakeInputs, *, seal: bool = True, verify: bool = True) -> Report:
        """See `pw.warmup`."""
        return warmup(self, make_inputs, seal=seal, verify=verify)

    def rebind(self) -> Report:
        """See `pw.rebind`."""
        return rebind(self)

    def seal(self) -> None:
        """See `pw.seal`."""
        seal(self)

    def report(self) -> Report:
        """See `pw.report`."""
        return report(self)

    def static_inputs(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """See `pw.static_inputs`."""
        return static_inputs(self, num_tokens)

    @property
    def instance(self) -> object | None:
        """What `self` is in calls; None for a function."""
        return self._subject.instance

    def __getattr__(self, name: str) -> Any:
        if name in ("original", "_subject"):  # not built yet, as in copying
            raise AttributeError(name)
        return getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            setattr(self.original, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """A copy of the original, not traced yet."""
        return type(self)(copy.deepcopy(self.original, memo), *self._settings)

    def __reduce__(self) -> NoReturn:
        raise ContractError(
            "a compiled model holds graphs and code of this process and cannot be pickled; "
            "pickle its .original and compile it again"
        )

    def _options(self) -> dict[str, Any]:
        _, mode, given = self._settings
        options = options_of_mode(mode) | given  # torch.compile takes one or the other
        if self._config.level >= 2:
            options["skip_guards"] = True
        return options

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        if self._config.level == 0:
            return self.original(*args, **kwargs)
        if self._config.level == 1:
            self._prepare_to_trace(args, kwargs)
            return self._trace(args, kwargs)
        # As in `backend.make_runtime`: a trace, too, makes many objects and few cycles.
        with self._tracing, collector_paused(collects_first=False):
            if self.runtime is not None:  # another thread was faster
                return self._call(*args, **kwargs)
            session, parameters = self._prepare_to_trace(args, kwargs)
            before = snapshot(parameters)
            stored = StoredTraces.of(self._subject, before, self._config)
            if stored is not None and self._start_from(stored, session, before):
                return self._call(*args, **kwargs)
            with stored.recording(session) if stored is not None else contextlib.nullcontext():
                result = self._trace(args, kwargs)
            if not session.runtimes and not _torch.stance_is_default():
                return result  # it was asked not to compile now
            try:
                self._call = self._without_guards(session, before, stored)
            except ContractError:  # what could not be used must not serve the next attempt
                _torch.forget_traces(self._subject.function.__code__)
                session.forget_runtimes()
                raise
            return result

    def _start_from(
        self, stored: StoredTraces, session: Session, parameters: dict[str, Any]
    ) -> bool:
        """Serve calls from the trace of another process, if there is one for this call."""
        if session.is_sealed or not _torch.stance_is_default():
            return False
        make_runtime = functools.partial(backend.make_runtime, config=self._config)
        with _torch.tracing_once():
            started = stored.start(session, make_runtime)
        if started is None:
            return False
        self._call = self._enter(session, started.runtime, started.rewritten, parameters)
        return True

    def _prepare_to_trace(self, args: Any, kwargs: Any) -> tuple[Session, dict[str, Any]]:
        """The session, and the parameters of a call, with marks where they vary."""
        if hooked := reason_in_hooks(self._subject.instance):
            raise ContractError(f"{hooked}, which would not be called; register it on a submodule")
        session = Session.of(_torch.scope_of(self.traced))
        parameters = self._subject.parameters(args, kwargs)
        if not session.is_tracing:  # else warm-up has marked them
            self._dims.mark(parameters)
        return session, parameters

    def _trace(self, args: Any, kwargs: Any) -> Any:
        """Go through Dynamo."""
        with _torch.tracing_once():
            try:
                return self.traced(*args, **kwargs)
            except _torch.TRACE_ERRORS as error:
                raise ContractError(
                    f"{name_of(self.original)} cannot be traced as one graph: {error}"
                ) from error

    def _without_guards(
        self, session: Session, parameters: dict[str, Any], stored: StoredTraces | None
    ) -> Callable[..., Any]:
        runtimes = session.runtimes
        if len(runtimes) != 1 or runtimes[0].rewritten is None:
            raise ContractError(
                f"{name_of(self.original)} was traced into {len(runtimes)} graphs, which needs to "
                "be one; a model that computes nothing with tensors needs no compilation"
            )
        runtime, rewritten = runtimes[0], runtimes[0].rewritten
        assert rewritten is not None
        if violated := _torch.violated_guard(rewritten, self._subject.frame(parameters)):
            raise ContractError(
                f"{name_of(self.original)} changes what its own trace depends on: {violated}; "
                "return the value, or keep it in a tensor that is written in place"
            )
        call = self._enter(session, runtime, rewritten, parameters)
        if stored is not None:
            stored.save(rewritten)
        # Not needed any more, and it holds what the trace read.
        code = self._subject.function.__code__
        if self._config.check_guards:
            weakref.finalize(self, _torch.forget_traces, code).atexit = False
            return checked(call, self._subject, rewritten)
        _torch.forget_traces(code)
        return call

    def _enter(
        self,
        session: Session,
        runtime: Runtime,
        rewritten: _torch.Rewritten,
        parameters: dict[str, Any],
    ) -> Callable[..., Any]:
        self.entry = make_entry(runtime, rewritten, self._subject, parameters)
        self.runtime = runtime
        session.guards_kept = ""
        session.call_on_reset(self._forget)
        return self.entry.call

    def _forget(self) -> None:
        """Dynamo's traces are gone: the next call traces again, if that is allowed."""
        self._call, self.runtime, self.entry = self._first_call, None, None
