"""What belongs to one call of `torch.compile`: its runtimes, and the phase they are in.

Dynamo may trace a model more than once; each trace has a runtime of its own, all share the
session. The session hangs on torch's own object for the compile call, so it lives as long.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from piecewise_backend._torch import CompileScope
from piecewise_backend.batch import BatchDescriptor, CUDAGraphMode, FallbackReason
from piecewise_backend.errors import ContractError
from piecewise_backend.graph_memory import GraphMemory

if TYPE_CHECKING:
    from piecewise_backend.runtime import Runtime

log = logging.getLogger(__name__)


class WarmupState(enum.Enum):
    """How far the start-up of a model came."""

    MODEL_LOADED = "model loaded"
    EAGER_WARMED = "eager warmed"
    """Traced, compiled, and run at the largest size without graphs."""
    GRAPH_CAPTURED = "graph captured"
    """And every size captured and verified, or disabled with a reason."""
    READY = "ready"
    """And sealed: nothing compiles or captures any more."""


_ATTRIBUTE = "_piecewise_session"
UNTIL_SEALED = "until sealed"
_warming_up: ContextVar[tuple[Session, ...]] = ContextVar("piecewise_warming_up", default=())
"""Whose warm-up the call that runs belongs to."""
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Of all models, for `torch._dynamo.reset()`, which says no more than that it was called."""


class Session:
    """State shared by the runtimes of one compiled model."""

    def __init__(self) -> None:
        self.is_sealed = False
        """Nothing may compile or capture any more."""
        self.is_tracing = False
        """Warm-up runs the model to have it traced and compiled: captures wait."""
        self.capturing: CUDAGraphMode | None = None
        """Warm-up runs the model to have the size of the call captured: PIECEWISE or FULL."""
        self.is_verifying = False
        """Warm-up runs the model to compare graphs with the step without."""
        self.rebuilding = ""
        """Why all calls but those of warm-up run without graphs: it is under way, or capturing
        anew has failed. Empty if they need not."""
        self.state = WarmupState.MODEL_LOADED
        """How far warm-up came."""
        self.are_graphs_on = True
        """False: calls run without, until they are switched on again."""
        self.make_inputs: Any = None
        """What the last warm-up made its inputs with."""
        self.modes = (False, False)
        """Whether gradients and inference mode were on then."""
        self.guards_kept = UNTIL_SEALED
        """Why calls go through Dynamo's guards; empty if they do not."""
        self.on_graph: Callable[[fx.GraphModule], None] | None = None
        """Called with each graph as Dynamo hands it over."""
        self.on_seal: list[Callable[[], None]] = []
        """Called once, when nothing may compile any more."""
        self.on_unseal: list[Callable[[], None]] = []
        """Called once, when something may compile again."""
        self.memories: dict[torch.device, GraphMemory] = {}
        """What graphs take, by device."""
        self._one_rebuild = threading.Lock()
        self._on_reset: list[Callable[[], None]] = []
        self._runtimes: list[weakref.ref[Runtime]] = []
        _sessions.add(self)

    @classmethod
    def of(cls, scope: CompileScope | None) -> Session:
        """The session of a compile call; a new one for a backend that was called directly."""
        if scope is None:
            return cls()
        session = getattr(scope, _ATTRIBUTE, None)
        if session is None:
            session = cls()
            setattr(scope, _ATTRIBUTE, session)
        return session

    def __deepcopy__(self, memo: object) -> Session:
        """A copy of a compiled model is traced by itself."""
        return type(self)()

    def add(self, runtime: Runtime) -> None:
        """A new trace."""
        self._runtimes.append(weakref.ref(runtime))

    @property
    def runtimes(self) -> list[Runtime]:
        """The runtimes that are alive: one per trace."""
        return [runtime for ref in self._runtimes if (runtime := ref()) is not None]

    def memory_of(self, device: torch.device) -> GraphMemory:
        """What the graphs of all traces take on a device."""
        return self.memories.setdefault(device, GraphMemory())

    def wanted(self, mode: CUDAGraphMode) -> list[BatchDescriptor]:
        """What warm-up captures in a mode, largest first, for all traces together."""
        found = {d: None for runtime in self.runtimes for d in runtime.dispatcher.wanted(mode)}
        return sorted(found, key=lambda d: (d.num_tokens, d.num_active_loras), reverse=True)

    def trials(self, mode: CUDAGraphMode) -> list[BatchDescriptor]:
        """The batches that captures of a mode are verified with."""
        return list({d: None for runtime in self.runtimes for d in runtime.dispatcher.trials(mode)})

    def has_captured(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> bool:
        """Every trace has graphs for it, or is not to have them."""
        return all(runtime.captures.has(mode, descriptor) for runtime in self.runtimes)

    def switch_graphs(self, on: bool) -> None:
        """Run calls without graphs, or with them again; what was captured stays.

        Raises:
            ContractError: a warm-up, which needs them, is under way.
        """
        if self.is_warming_up and not on:
            raise ContractError(
                "a warm-up of this model is under way, and captures graphs; switch them off when "
                "it is done"
            )
        self.are_graphs_on = on
        self._forget_prepared()

    def drop_captures(self) -> None:
        """Serve the instance that was called last without graphs until it is captured anew."""
        for runtime in self.runtimes:
            with runtime.turns.held():
                runtime.captures.drop()

    def seal(self) -> None:
        """Freeze: from now on nothing compiles or captures."""
        self.is_sealed = True
        _call_once(self.on_seal)
        for runtime in self.runtimes:
            runtime.seal()

    def unseal(self) -> None:
        """Allow compiling and capturing again."""
        self.is_sealed = False
        _call_once(self.on_unseal)
        for runtime in self.runtimes:
            runtime.unseal()

    @staticmethod
    def reset_all() -> None:
        """Dynamo has forgotten what it traced, of every model."""
        for session in list(_sessions):
            _call_once(session.on_unseal)
            _call_once(session._on_reset)
            session.forget_runtimes()

    def call_on_reset(self, method: Callable[[], None]) -> None:
        """Call a bound method once, when Dynamo forgets what it traced, if its object lives."""
        reference = weakref.WeakMethod(method)

        def call() -> None:
            if (alive := reference()) is not None:
                alive()

        self._on_reset.append(call)

    def forget_runtimes(self) -> None:
        """What was traced serves nobody any more, though it may not be collected yet."""
        self._runtimes.clear()

    @property
    def is_warming_up(self) -> bool:
        """A warm-up or a rebuild is under way, in whatever thread."""
        return self._one_rebuild.locked()

    @property
    def is_own_call(self) -> bool:
        """The call that runs is one of warm-up's."""
        return self in _warming_up.get()

    def is_serving(self) -> bool:
        """The call that runs is the user's: it is counted. Those of warm-up are not."""
        return not self.is_own_call

    @property
    def reason_without_graphs(self) -> FallbackReason | None:
        """Why the call that runs has none, whatever its batch is."""
        if not self.are_graphs_on:
            return FallbackReason.DISABLED
        return FallbackReason.REBUILDING if self.rebuilding and not self.is_own_call else None

    @property
    def is_quiet(self) -> bool:
        """The call is a trial run of warm-up: nothing is warned about."""
        return (self.is_tracing or self.is_verifying) and self.is_own_call

    @contextlib.contextmanager
    def rebuild(self, *, stays_off: bool) -> Iterator[None]:
        """Calls run without graphs meanwhile, unless they are warm-up's own.

        Args:
            stays_off: after an error they go on like that, until a warm-up succeeds.

        Raises:
            ContractError: another thread is at it.
        """
        if not self._one_rebuild.acquire(blocking=False):
            raise ContractError(
                "a warm-up of this model is under way; wait for it, and start none in make_inputs"
            )
        before, was_sealed, self.rebuilding = self.rebuilding, self.is_sealed, "under way"
        state = self.state
        try:
            self._forget_prepared()
            yield
            self.rebuilding = ""
        except BaseException as error:
            self.rebuilding = before
            if stays_off:
                self._stay_off(f"capturing anew failed ({type(error).__name__}: {error})")
            elif any(runtime.captures.captured for runtime in self.runtimes):
                self.state = state
            if was_sealed:
                self.seal()
            raise
        finally:
            self._one_rebuild.release()

    def _stay_off(self, why: str) -> None:
        self.rebuilding, self.state = why, WarmupState.EAGER_WARMED
        self.drop_captures()
        log.error("calls run without graphs: %s", why)

    def _forget_prepared(self) -> None:
        for runtime in self.runtimes:
            with runtime.turns.held():  # a call that runs may be about to keep its plan
                for captures in runtime.instances:
                    captures.prepared.clear()

    @contextlib.contextmanager
    def phase(
        self,
        *,
        tracing: bool = False,
        capturing: CUDAGraphMode | None = None,
        verifying: bool = False,
    ) -> Iterator[None]:
        """Calls inside belong to warm-up; in `capturing` mode, where that is given."""
        self.is_tracing, self.capturing, self.is_verifying = tracing, capturing, verifying
        try:
            self._forget_prepared()  # what serves at once is neither compared nor counted
            yield
        finally:
            self.is_tracing, self.capturing, self.is_verifying = False, None, False


@contextlib.contextmanager
def own_calls(*sessions: Session) -> Iterator[None]:
    """Calls inside are those of warm-up."""
    token = _warming_up.set(sessions)
    try:
        yield
    finally:
        _warming_up.reset(token)


def _call_once(functions: list[Callable[[], None]]) -> None:
    while functions:
        functions.pop()()
