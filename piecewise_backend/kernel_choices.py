"""What the kernels of a stored artifact chose at their first run, for processes that load it.

In:  an artifact, a callable that it is, and where artifacts are kept.
Out: the callable, which notes what its kernels choose; or kernels that have chosen.
Knows nothing of pieces.

An artifact is stored when it was compiled, and its kernels are timed later, when it runs. So what
they chose is an entry of its own, under the content of the artifact.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.artifact_store import ArtifactStore, Made
from piecewise_backend.cache_entry import Content, Key
from piecewise_backend.version import Call


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


def store_choices(store: ArtifactStore, artifact: bytes, choices: Mapping[str, str]) -> None:
    """For processes that load the artifact."""
    if choices:
        content = Content(json.dumps(choices).encode())
        store.fetch(_key(artifact), lambda: Made(choices, content), _choices)


class NotesChoices:
    """A compiled piece that notes what its kernels choose at the first call."""

    def __init__(self, call: Call, keep: Callable[[Mapping[str, str]], None]) -> None:
        """Args are the piece, and what is called once with what was chosen, by kernel."""
        self._call = call
        self._keep = [keep]  # whoever takes it out was first

    def __call__(self, *inputs: Any) -> Sequence[torch.Tensor]:
        """What the piece returns."""
        if not self._keep:
            return self._call(*inputs)
        with _torch.noted_choices() as choices:
            result = self._call(*inputs)
        with contextlib.suppress(IndexError):  # of two threads one was first
            self._keep.pop()(choices)
        return result


def _key(artifact: bytes) -> Key:
    return {"kernel choices of": hashlib.sha256(artifact).hexdigest()}


def _choices(content: Content) -> Mapping[str, str]:
    found: dict[str, str] = json.loads(content.artifact)
    return found
