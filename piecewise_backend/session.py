"""What belongs to one call of `torch.compile`: its runtimes, and the phase they are in.

Dynamo may trace a model more than once; each trace has a runtime of its own, all share the
session. The session hangs on torch's own object for the compile call, so it lives as long.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from piecewise_backend._torch import CompileScope

if TYPE_CHECKING:
    from piecewise_backend.runtime import Runtime

_ATTRIBUTE = "_piecewise_session"
UNTIL_SEALED = "until sealed"
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Of all models, for `torch._dynamo.reset()`, which says no more than that it was called."""


class Session:
    """State shared by the runtimes of one compiled model."""

    def __init__(self) -> None:
        self.is_sealed = False
        """Nothing may compile or capture any more."""
        self.is_tracing = False
        """Warm-up runs the model to have it traced and compiled: captures wait."""
        self.is_capturing = False
        """Warm-up runs the model to have the size of the call captured."""
        self.make_inputs: Any = None
        """What the last warm-up made its inputs with."""
        self.guards_kept = UNTIL_SEALED
        """Why calls go through Dynamo's guards; empty if they do not."""
        self.on_seal: list[Callable[[], None]] = []
        """Called once, when nothing may compile any more."""
        self.on_unseal: list[Callable[[], None]] = []
        """Called once, when something may compile again."""
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

    @property
    def can_capture(self) -> bool:
        """Some trace runs where graphs exist and are wanted."""
        return any(runtime.captures.is_possible for runtime in self.runtimes)

    def has_captured(self, size: int) -> bool:
        """Every trace has graphs for this size, or is known not to have them."""
        return all(runtime.has_captured(size) for runtime in self.runtimes)

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

    @contextlib.contextmanager
    def phase(self, *, tracing: bool = False, capturing: bool = False) -> Iterator[None]:
        """Calls inside belong to warm-up."""
        self.is_tracing, self.is_capturing = tracing, capturing
        try:
            yield
        finally:
            self.is_tracing = self.is_capturing = False


def _call_once(functions: list[Callable[[], None]]) -> None:
    while functions:
        functions.pop()()
