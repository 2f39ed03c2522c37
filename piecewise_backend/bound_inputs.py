"""The inputs that graphs read where they are: parameters, buffers, caches.

In:  the arguments of the call that is captured, and later ones.
Out: what has moved since, and whose it was.
Knows nothing of captures.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

# A small tensor that moves again and again is a new argument by another name: copy it.
_MAX_COPIED_BYTES = 16 * 2**20


class BoundInputs:
    """Addresses and owners, by position among the arguments."""

    def __init__(self) -> None:
        self.by_pieces: frozenset[int] = frozenset()
        """What pieces read; the others are in place for graphs of whole steps only."""
        self._addresses: dict[int, int] = {}
        self._owners: dict[int, weakref.ref[torch.Tensor]] = {}
        self._moves: dict[int, int] = {}

    @property
    def positions(self) -> tuple[int, ...]:
        """Of all of them."""
        return tuple(self._addresses)

    def bind(
        self, args: Sequence[Any], positions: Sequence[int], on_death: Callable[[object], None]
    ) -> None:
        """From now on they are to be where they are in `args`.

        Args:
            on_death: called when one of them is gone.
        """
        self._addresses = {i: args[i].data_ptr() for i in positions}
        self._owners = {i: weakref.ref(args[i], on_death) for i in positions}

    def release(self) -> None:
        """Nothing is bound any more."""
        self._addresses, self._owners = {}, {}

    def moved(self, args: Sequence[Any]) -> list[int]:
        """Those that lie elsewhere in this call."""
        return [i for i, address in self._addresses.items() if args[i].data_ptr() != address]

    def note_moves(self, moved: Sequence[int]) -> None:
        """Remember how often each of them moved."""
        for position in moved:
            self._moves[position] = self._moves.get(position, 0) + 1

    def copied(self, args: Sequence[Any]) -> frozenset[int]:
        """Those that move again and again: to be copied like arguments."""
        return frozenset(
            position
            for position, moves in self._moves.items()
            if moves > 1 and _is_copied(args[position])
        )

    def belong_to(self, args: Sequence[Any]) -> bool:
        """The call is one of the instance that they are of, moved or not."""
        owners = {position: owner() for position, owner in self._owners.items()}
        alive = {position: owner for position, owner in owners.items() if owner is not None}
        return bool(alive) and all(args[position] is owner for position, owner in alive.items())

    def belong_to_another(self, args: Sequence[Any]) -> bool:
        """The call is one of another instance of the model, or with another large cache."""
        moved = self.by_pieces.intersection(self.moved(args))
        owners = {position: self._owners[position]() for position in moved}
        return any(
            owner is not None and owner is not args[position] and not _is_copied(args[position])
            for position, owner in owners.items()
        )

    @property
    def are_alive(self) -> bool:
        """Some of them still exists."""
        return any(owner() is not None for owner in self._owners.values())


def _is_copied(tensor: torch.Tensor) -> bool:
    """May be copied, should it move again and again."""
    return not isinstance(tensor, torch.nn.Parameter) and tensor.nbytes <= _MAX_COPIED_BYTES
