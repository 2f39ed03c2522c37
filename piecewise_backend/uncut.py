"""Leave a graph uncut at ops that a pass has to see inside of a piece.

In:  the ops to cut at, and the passes that run over pieces.
Out: the ops that are left to cut at, and in words what became of each wish.
Knows nothing of graphs.

A pass that fuses attention with what follows finds nothing where the graph is cut at attention.
It may ask for the op to stay (`uncut=`), and then the op becomes part of what is captured: without
other split ops the only piece is the whole step. That is for the op to allow (`capture="always"`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from piecewise_backend.modes import CaptureSupport
from piecewise_backend.passes import Pass
from piecewise_backend.registry import SplitOps, check_exists, traits_of


def leave_uncut(ops: SplitOps, passes: Sequence[Pass]) -> tuple[SplitOps, str]:
    """Take out of `ops` what passes ask for, as far as the ops allow it.

    Returns:
        The others, and the reasons, or "" if no pass asks for an op that is cut at.

    Raises:
        ConfigError: a pass asks for an op that is misspelt, or whose library is not imported.
    """
    names, words = set(ops.names), []
    for item in passes:
        for wanted in item.uncut:
            check_exists(wanted, f"pass {item.name!r}: uncut op")
            found = {name for name in ops.names if _is_same_op(name, wanted)}
            if not found:
                continue
            refusal = _refusal(wanted)
            if not refusal:
                names -= found
            end = f"but is cut off all the same: {refusal}" if refusal else "and is not cut off"
            words.append(f"{wanted} is to be inside of a piece for pass {item.name!r}, {end}")
    return dataclasses.replace(ops, names=frozenset(names)), "; ".join(words)


def _refusal(op: str) -> str:
    """Why it must not be in a piece that is captured, or ""."""
    traits = traits_of(op)
    if traits.capture is not CaptureSupport.ALWAYS:
        return f"it has capture={traits.capture.name.lower()!r} and needs 'always'"
    return "nobody would call its before_replay" if traits.before_replay else ""


def _is_same_op(name: str, other: str) -> bool:
    """The same overload, or one name is that of all overloads."""
    op, _, overload = name.partition(".")
    other_op, _, other_overload = other.partition(".")
    return op == other_op and (not overload or not other_overload or overload == other_overload)
