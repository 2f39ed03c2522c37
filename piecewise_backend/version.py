"""One compilation of a piece, here and as bytes for other processes.

In:  a version that was compiled; bytes.
Out: bytes; a version that was not.
Knows nothing of where they are kept.

Note [Kept versions]
Beside Inductor's artifact are kept the conditions on sizes, what the passes matched, and the kinds
of the outputs. Conditions are Python expressions over the integer inputs by position, so they hold
in any process, and serve to find a version for sizes that it was not compiled with. One that
speaks of a hoisted constant would not: of those that are no numbers the input is an index into a
table of the process. Such a version is not kept.

Note [Loaded versions]
What a piece takes and returns is known when its artifact is loaded, so an artifact of another
piece does not get as far as being called: how many inputs and outputs it has is read from itself,
dtypes, devices and shapes of the outputs from beside it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.cache_entry import Content
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.passes import PassRecord
from piecewise_backend.steps import Host

Call = Callable[..., Sequence[torch.Tensor]]
Numbers = tuple[int, ...]
"""The integer inputs of a piece: sizes, then hoisted integer constants."""


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """One compilation of a piece, and the sizes it is valid for."""

    call: Call
    violated_by: Callable[[Numbers], str | None]
    """The condition that sizes violate, or None if the version is valid for them."""
    conditions: tuple[str, ...] = ()
    passes: tuple[PassRecord, ...] = ()
    """What the passes did, in their order."""


def num_sizes(piece: DistinctPiece) -> int:
    """How many of the integer inputs of a piece are sizes; they come first."""
    return sum(isinstance(ref, Host) for ref in piece.inputs)


def stored(version: Version, piece: DistinctPiece, *, is_settled: bool = False) -> Content | None:
    """A version as bytes; None if torch cannot store it, or if it is of use to this process only.

    See Note [Kept versions].

    Args:
        is_settled: it was made of kernels that had been tuned, and is not to be tuned again.
    """
    named = re.findall(r"L\['t(\d+)'\]", " ".join(version.conditions))
    if any(int(position) >= num_sizes(piece) for position in named):
        return None
    artifact = _torch.artifact_bytes(version.call)
    if artifact is None:
        return None
    about = {
        "conditions": list(version.conditions),
        "matches": [[record.name, record.matches] for record in version.passes],
        "outputs": list(piece.structure.outputs),
        "settled": is_settled,
    }
    return Content(artifact, about)


def serves(about: Mapping[str, Any], numbers: Numbers) -> bool:
    """Whether a version of which `stored` said this is valid for these sizes."""
    return _torch.SizeEnv().holds(about["conditions"], numbers) is None


def loaded(content: Content, piece: DistinctPiece) -> Version:
    """The version of a piece that `stored` made bytes of.

    Raises:
        ValueError: it is of another piece. See Note [Loaded versions].
    """
    outputs, expected = content.about["outputs"], list(piece.structure.outputs)
    if outputs != expected:
        raise ValueError(f"it returns {outputs}, but the piece {expected}")
    call = _torch.load_artifact(content.artifact, is_settled=content.about["settled"])
    arity, expected_arity = _torch.arity(call), (len(piece.inputs), len(expected))
    if arity != expected_arity:
        raise ValueError(
            "it takes {} inputs and returns {} outputs, but the piece {} and {}".format(
                *arity, *expected_arity
            )
        )
    conditions, env = tuple(content.about["conditions"]), _torch.SizeEnv()
    records = tuple(PassRecord(name, matches, None) for name, matches in content.about["matches"])
    return Version(call, lambda sizes: env.holds(conditions, sizes), conditions, records)
