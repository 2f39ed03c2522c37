"""Say that a call ran without graphs, and why: count it, warn once, or raise.

In:  a reason and what is known about the batch.
Knows nothing of how the call is served.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from piecewise_backend.batch import FallbackReason
from piecewise_backend.errors import ContractError
from piecewise_backend.sizes import Sizes
from piecewise_backend.statistics import Statistics

_NEVER_REPORTED = {
    FallbackReason.DISABLED,
    FallbackReason.NO_GRAPHS_ON_DEVICE,
    FallbackReason.REBUILDING,
}
"""What the user has asked for, or was told by an error."""
_NOT_THE_USERS = (
    str(Path(__file__).parent),
    "<piecewise ",  # generated code
    "/torch/_dynamo/",
    "/torch/nn/modules/",
)


OF_ANOTHER_INSTANCE = (
    "the call is of another instance of the model, or of one whose weights or caches were replaced"
)
"""Why captures that exist do not serve a call of a sealed model."""
STEPS_ARE_GONE = (
    "piecewise: a cache moved; graphs of whole steps are gone until the next warm-up, pieces serve"
)


class Fallbacks:
    """What one runtime says about its fallbacks."""

    def __init__(
        self, statistics: Statistics, on_fallback: str, is_serving: Callable[[], bool]
    ) -> None:
        """Nothing so far.

        Args:
            is_serving: calls are the user's, and are counted; False during warm-up.
        """
        self._statistics = statistics
        self._is_serving = is_serving
        self._on_fallback = on_fallback
        self._warned: set[object] = set()

    def report(self, reason: FallbackReason, sizes: Sizes, detail: str) -> None:
        """One call with these symbol values.

        Raises:
            ContractError: `on_fallback="raise"`.
        """
        if self._is_serving():
            self._statistics.count(reason)
        if reason in _NEVER_REPORTED:
            return
        message = f"piecewise: batch {sizes} runs without graphs: {reason.value}"
        message += f" ({detail})" if detail else ""
        if self._on_fallback == "raise":
            raise ContractError(f"{message}; on_fallback='raise' makes this an error")
        self._warn_once(reason, message)

    def warn_once(self, message: str) -> None:
        """About a call that graphs serve, but not the best."""
        self._warn_once(message, message)

    def _warn_once(self, subject: object, message: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            warnings.warn(message, RuntimeWarning, stacklevel=_level_of_user())


def _level_of_user() -> int:
    """The `stacklevel` at which the caller warns about the line of the user's program."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and any(p in frame.f_code.co_filename for p in _NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    return level
