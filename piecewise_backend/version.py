"""One compilation of a piece, here and as bytes for other processes.

In:  a version that was compiled; bytes.
Out: bytes; a version that was not.
Knows nothing of where they are kept.

Note [Kept versions]
Bytes are a line of JSON - the conditions on sizes, and what the passes matched - and Inductor's
artifact. Conditions are Python expressions over the integer inputs by position, so they hold in
any process. One that speaks of a hoisted constant would not: of those that are no numbers the
input is an index into a table of the process. Such a version is not kept.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence

import torch

from piecewise_backend import _torch
from piecewise_backend.passes import PassRecord

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


def stored(version: Version, num_sizes: int) -> bytes | None:
    """A version as bytes; None if torch cannot store it, or if it is of use to this process only.

    See Note [Kept versions].

    Args:
        num_sizes: how many of its integer inputs are sizes; they come first.
    """
    named = re.findall(r"L\['t(\d+)'\]", " ".join(version.conditions))
    if any(int(position) >= num_sizes for position in named):
        return None
    artifact = _torch.artifact_bytes(version.call)
    if artifact is None:
        return None
    matches = [(record.name, record.matches) for record in version.passes]
    head = json.dumps({"conditions": version.conditions, "matches": matches})
    return head.encode() + b"\n" + artifact


def loaded(data: bytes) -> Version:
    """The version that `stored` made bytes of."""
    head, _, artifact = data.partition(b"\n")
    known = json.loads(head)
    conditions, env = tuple(known["conditions"]), _torch.SizeEnv()
    records = tuple(PassRecord(name, matches, None) for name, matches in known["matches"])
    call = _torch.load_artifact(artifact)
    return Version(call, lambda sizes: env.holds(conditions, sizes), conditions, records)
