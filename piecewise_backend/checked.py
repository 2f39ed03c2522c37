"""Evaluate the guards of a trace on every call: `check_guards`.

In:  a call without guards, and the trace that it goes by.
Out: the same call, which looks first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piecewise_backend import _torch
from piecewise_backend.errors import ContractError
from piecewise_backend.subject import Subject


def checked(
    call: Callable[..., Any], subject: Subject, rewritten: _torch.Rewritten
) -> Callable[..., Any]:
    """See `Config.check_guards`."""

    def check(*args: Any, **kwargs: Any) -> Any:
        frame = subject.frame(subject.parameters(args, kwargs))
        if violated := _torch.violated_guard(rewritten, frame):
            raise ContractError(
                f"this call violates a guard of the trace: {violated}; compile another instance "
                "for such calls"
            )
        return call(*args, **kwargs)

    return check
