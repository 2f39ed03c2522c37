"""From what a user holds to the sessions behind it.

In:  what `torch.compile(..., backend="piecewise")`, `module.compile(...)` or `pw.compile` made.
Out: torch's own object for the compile call, and the session that serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piecewise_backend import _torch
from piecewise_backend.errors import ContractError
from piecewise_backend.session import Session


def session_of(compiled: Callable[..., Any]) -> Session:
    """The session that has the traces which serve `compiled`."""
    scope = scope_of(compiled)
    sessions = [Session.of(scope)]
    if not sessions[0].runtimes:
        sessions += map(Session.of, _torch.scopes_with_traces(traced_of(compiled), scope))
    return next((session for session in sessions if session.runtimes), sessions[0])


def traced_of(compiled: object) -> object:
    """What `torch.compile` returned, also from inside of what `pw.compile` did."""
    inner = getattr(type(compiled), "piecewise", None)  # an instance of a compiled class
    compiled = compiled.piecewise if isinstance(inner, property) else compiled  # type: ignore[attr-defined]
    return getattr(compiled, "__dict__", {}).get("traced", compiled)


def scope_of(compiled: object) -> _torch.CompileScope:
    """Torch's own object for the compile call.

    Raises:
        ContractError: there was none.
    """
    scope = _torch.scope_of(traced_of(compiled))
    if scope is None:
        raise ContractError(
            f"{type(compiled).__name__} is not compiled; pass what torch.compile(..., "
            "backend='piecewise') returned, or a module after module.compile(...)"
        )
    return scope
