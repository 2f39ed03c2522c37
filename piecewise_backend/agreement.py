"""Do the counts that are stated of a batch agree with the inputs of the call?

In:  stated facts, and the arguments of a graph.
Out: an error, or nothing; what was found to agree once is not looked at again.
Knows nothing of captures. Counts choose no graph, and may be many: they are no part of what plans
are found by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from piecewise_backend.current_batch import BatchFacts
from piecewise_backend.sizes import Sizes

_MAX_KNOWN = 4096


class Agreement:
    """Of the calls of one graph."""

    def __init__(
        self,
        read: Callable[[Sequence[Any]], Sizes],
        require: Callable[[Sizes, BatchFacts], None],
    ) -> None:
        """Nothing is known yet.

        Args:
            read: the symbol values of a call.
            require: raises ContractError if facts contradict them.
        """
        self.known: set[tuple[BatchFacts, Any]] = set()
        """Facts, and the key of arguments that they agree with; for the hot path."""
        self._read, self._require = read, require

    def check(self, facts: BatchFacts, key: Any, args: Sequence[Any]) -> None:
        """Look at what is not known.

        Raises:
            ContractError: the facts contradict the arguments.
        """
        self._require(self._read(args), facts)
        if len(self.known) >= _MAX_KNOWN:
            self.known.clear()
        self.known.add((facts, key))
