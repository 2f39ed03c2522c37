"""The captures of models that are called in turn through one trace.

Dynamo serves all instances of a class with one trace; each instance has captures of its own.
Those of the last call are in use, the others wait here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from piecewise_backend.captures import Captures

_MAX_INSTANCES = 64  # models of one class that are served in turn without capturing again


class Parked:
    """Captures that other calls may come back to."""

    def __init__(self) -> None:
        self._captures: list[Captures] = []

    def __bool__(self) -> bool:
        return bool(self._captures)

    def __iter__(self) -> Iterator[Captures]:
        return iter(self._captures)

    def have(self, args: Sequence[Any]) -> bool:
        """Some were captured for the instance of this call."""
        return any(captures.fit(args) for captures in self._captures)

    def exchange(self, in_use: Captures, args: Sequence[Any]) -> Captures | None:
        """Park what is in use, if the call is of another instance.

        Returns:
            The captures of that instance; new ones if it has none; None if the call is of the
            instance whose captures are in use.
        """
        own = next((c for c in self._captures if c.fit(args) or c.bound.belong_to(args)), None)
        if own is None and not in_use.bound.belong_to_another(args):
            return None
        others = [c for c in self._captures if c is not own and c.bound.are_alive]
        self._captures = [*others, in_use][-_MAX_INSTANCES:]
        return own or in_use.empty()
