"""What the kernels of a stored artifact chose at their first run, for processes that load it.

In:  an artifact, a callable that it is, and where artifacts are kept.
Out: the callable, which notes what its kernels choose; or kernels that have chosen.
Knows nothing of pieces.

An artifact is stored when it was compiled, and its kernels are timed later, when it runs. So what
they chose is an entry of its own, under the content of the artifact.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.artifact_store import ArtifactStore, Made
from piecewise_backend.cache_entry import Content, Key


def restore_choices(store: ArtifactStore, artifact: bytes) -> bool:
    """Before an artifact is loaded: let its kernels choose as they did; False if nothing is known.

    Args:
        artifact: its bytes, as they are stored.
    """
    choices = store.find(_key(artifact), _choices)
    if choices is None:
        return False
    _torch.set_choices(choices)
    return True


class NotesChoices:
    """A compiled piece that stores what its kernels choose at the first call."""

    def __init__(self, call: Any, store: ArtifactStore, artifact: bytes) -> None:
        self._call = call
        self._store: ArtifactStore | None = store
        self._key = _key(artifact)

    def __call__(self, *inputs: Any) -> Sequence[torch.Tensor]:
        """What the piece returns."""
        store = self._store
        if store is None:
            return self._call(*inputs)  # type: ignore[no-any-return]
        noted = _torch.num_noted()
        result: Sequence[torch.Tensor] = self._call(*inputs)
        self._store = None
        if choices := _torch.choices_since(noted):
            content = Content(json.dumps(choices).encode())
            store.fetch(self._key, lambda: Made(choices, content), _choices)
        return result


def _key(artifact: bytes) -> Key:
    return {"kernel choices of": hashlib.sha256(artifact).hexdigest()}


def _choices(content: Content) -> dict[str, str]:
    found: dict[str, str] = json.loads(content.artifact)
    return found
