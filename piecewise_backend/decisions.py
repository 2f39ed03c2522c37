"""What a decision among versions of a piece depends on.

In:  the key of the piece, the versions that are compared.
Out: the key of the decision.
Knows nothing of how one is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piecewise_backend.artifact_store import Serves
from piecewise_backend.cache_entry import Key
from piecewise_backend.compiler import Specialization
from piecewise_backend.passes import PassList


def decision_key(key: Key, tried: Sequence[Specialization], graphs: str) -> Key:
    """The key of what is found out about versions of a piece.

    Args:
        key: of the version for all sizes.
        tried: those that are compared with it.
        graphs: the kind of graphs under which they are timed.
    """
    wanted = {
        one.name: {
            "options": {name: str(value) for name, value in one.options.items()},
            "limits": {str(i): list(between) for i, between in one.limits.items()},
            "passes": PassList(one.passes).key() if one.passes else None,
        }
        for one in tried
    }
    return {**key, "decision among": wanted, "under": graphs}


def found_at(sizes: list[int]) -> Serves:
    """What was found out at these sizes serves no others."""

    def serves(about: Mapping[str, Any]) -> bool:
        return bool(about["sizes"] == sizes)

    return serves
