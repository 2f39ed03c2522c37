"""Send the calls of a module that `torch.compile` compiled past Dynamo and its guards.

In:  the compiled module and its session.
Out: the module calls our function, until it is unsealed or Dynamo forgets its trace; or the
     session says why it does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from piecewise_backend import _torch
from piecewise_backend.entry import make_entry
from piecewise_backend.runtime import Runtime
from piecewise_backend.session import UNTIL_SEALED, Session
from piecewise_backend.subject import Subject, snapshot

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def send_past_dynamo(compiled: object, session: Session, serving: Session) -> None:
    """From the next call on, without guards.

    That call still passes them: so its arguments are known to be what the trace is right for,
    and the contract is read off them.

    Args:
        compiled: what `torch.compile` returned, or a module after `.compile()`.
        session: of that compile call.
        serving: of the compile call whose traces serve it; often the same.
    """
    model = _torch.original_of(compiled)
    subject = Subject.of(model.forward) if model is not None else None
    session.guards_kept = _reason(subject, model, serving)
    if session.guards_kept or subject is None:
        return
    (runtime,) = serving.runtimes
    name = "forward" if compiled is not model else "_compiled_call_impl"
    attributes: dict[str, Any] = compiled.__dict__
    if hasattr(attributes[name], _torch.GUARDED):
        return
    owner = weakref.ref(compiled)  # torch keeps sessions for longer than models
    attributes[name] = _LastGuarded(subject, runtime, owner, name)

    def undo() -> None:
        session.guards_kept = UNTIL_SEALED
        if (alive := owner()) is not None:
            current = alive.__dict__[name]
            alive.__dict__[name] = getattr(current, _torch.GUARDED, current)
            session.on_seal.append(again)

    def again() -> None:
        if (alive := owner()) is not None:
            send_past_dynamo(alive, session, serving)

    session.on_unseal.append(undo)


class _LastGuarded:
    """The last call that passes guards; the entry is made of its arguments."""

    def __init__(
        self,
        subject: Subject,
        runtime: Runtime,
        owner: weakref.ref[object],
        name: str,
    ) -> None:
        self._subject = subject
        self._runtime = runtime
        self._owner = owner
        self._name = name
        setattr(self, _torch.GUARDED, owner().__dict__[name])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        guarded = getattr(self, _torch.GUARDED)
        parameters = snapshot(self._subject.parameters(args, kwargs))
        result = guarded(*args, **kwargs)
        attributes = self._owner().__dict__
        if attributes.get(self._name) is self:
            attributes[self._name] = self._next(guarded, parameters)
        return result

    def _next(self, guarded: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
        """What to call from now on."""
        rewritten = self._runtime.rewritten
        assert rewritten is not None
        entry = make_entry(self._runtime, rewritten, self._subject, parameters).call

        def call(*args: Any, **kwargs: Any) -> Any:
            if _torch.original_is_wanted():
                return guarded(*args, **kwargs)
            return entry(*args, **kwargs)

        setattr(call, _torch.GUARDED, guarded)
        return call


def reason_in_hooks(model: object) -> str:
    """A hook on the outermost module, which only `Module.__call__` would call; or nothing."""
    for name in _HOOKS if isinstance(model, nn.Module) else ():
        if getattr(model, name):
            return f"{type(model).__qualname__} has {name.strip('_').replace('_', ' ')}"
    return ""


def _reason(subject: Subject | None, model: object, session: Session) -> str:
    """Why guards are kept; empty if they need not be."""
    if subject is None:
        return "torch.compile of a function; pw.compile calls one without guards"
    if len(session.runtimes) != 1:
        return f"{len(session.runtimes)} traces"
    (runtime,) = session.runtimes
    rewritten = runtime.rewritten
    if rewritten is None or rewritten.original is not subject.function.__code__:
        return "what Dynamo rewrote is not the forward of the module"
    if rewritten.assigned:
        return f"the model assigns {', '.join(rewritten.assigned)}"
    if runtime.config.check_guards:
        return "check_guards"
    return reason_in_hooks(model)
