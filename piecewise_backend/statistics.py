"""What one runtime did so far."""

from __future__ import annotations

import dataclasses
from collections import Counter

from piecewise_backend.batch import FallbackReason


@dataclasses.dataclass(slots=True)
class Statistics:
    """Counts per runtime; `report` prints them."""

    num_replays: int = 0
    """Steps served from graphs."""
    fallbacks: Counter[FallbackReason] = dataclasses.field(default_factory=Counter)
    """Steps served without, by reason."""

    def count(self, reason: FallbackReason) -> int:
        """Count one fallback; returns how often that reason occurred."""
        self.fallbacks[reason] += 1
        return self.fallbacks[reason]
