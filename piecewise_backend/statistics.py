"""What one runtime did so far."""

from __future__ import annotations

import dataclasses
from collections import Counter

from piecewise_backend.batch import CUDAGraphMode, FallbackReason


@dataclasses.dataclass(slots=True)
class Tally:
    """Steps of one kind that were served from graphs."""

    mode: CUDAGraphMode
    """FULL or PIECEWISE."""
    size: int
    """The capture size; 0 for a graph of static shapes."""
    num_tokens: int
    """Real tokens of each of these steps."""
    num_replays: int = 0
    """Steps so far."""


class Statistics:
    """Counts per runtime; `report` and `metrics` print them."""

    def __init__(self) -> None:
        self.fallbacks: Counter[FallbackReason] = Counter()
        """Steps served without graphs, by reason."""
        self._tallies: dict[tuple[CUDAGraphMode, int, int], Tally] = {}
        self._marked: Counter[tuple[CUDAGraphMode, int]] = Counter()

    def tally(self, mode: CUDAGraphMode, size: int, num_tokens: int) -> Tally:
        """The counter of one kind of step; the hot path adds to it."""
        key = (mode, size, num_tokens)
        return self._tallies.setdefault(key, Tally(mode, size, num_tokens))

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """All kinds of steps served from graphs so far."""
        return tuple(self._tallies.values())

    @property
    def num_replays(self) -> int:
        """Steps served from graphs."""
        return sum(tally.num_replays for tally in self.tallies)

    def mark(self) -> None:
        """Remember this moment, for `served_since_mark`."""
        self._marked = self._by_size()

    def served_since_mark(self) -> set[tuple[CUDAGraphMode, int]]:
        """The modes and capture sizes that served a step since the mark, or since the start."""
        return set(self._by_size() - self._marked)

    def _by_size(self) -> Counter[tuple[CUDAGraphMode, int]]:
        counts: Counter[tuple[CUDAGraphMode, int]] = Counter()
        for tally in self.tallies:
            counts[tally.mode, tally.size] += tally.num_replays
        return counts

    def count(self, reason: FallbackReason) -> int:
        """Count one fallback; returns how often that reason occurred."""
        self.fallbacks[reason] += 1
        return self.fallbacks[reason]
