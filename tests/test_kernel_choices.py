"""What kernels choose at their first run reaches other processes with the artifact.

Kernels that choose need a GPU: see `tests/gpu/test_warm_start.py`. Here Inductor is told that some
have.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.compiler._cache import CacheArtifactManager

from piecewise_backend.artifact_store import ArtifactStore
from piecewise_backend.cache_contents import entries
from piecewise_backend.kernel_choices import NotesChoices, restore_choices, store_choices

CHOICES = {"ab/one.best_config": {"XBLOCK": 64}, "cd/two.best_config": {"XBLOCK": 8}}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    root = tmp_path / "store"
    root.mkdir()
    return ArtifactStore(root)


@pytest.fixture
def inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Inductor looks for what kernels chose; nobody has compiled anything yet."""
    folder = tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    with CacheArtifactManager.with_fresh_cache():
        yield folder


def choose(*names: str) -> None:
    """What Inductor does when it has timed kernels."""
    for name in names:
        CacheArtifactManager.record_artifact("autotune", name, CHOICES[name])


def noting(call: Any, store: ArtifactStore) -> NotesChoices:
    return NotesChoices(call, functools.partial(store_choices, store, b"artifact"))


class Piece:
    """Times its kernels when it is called, as Inductor's artifacts do: the first time."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.num_calls = 0

    def __call__(self, *inputs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 1:
            choose(*self.names)
        return inputs


def test_what_the_first_call_chose_is_restored(store: ArtifactStore, inductor: Path) -> None:
    choose("ab/one.best_config")  # by another artifact
    call = noting(piece := Piece("cd/two.best_config"), store)
    assert not restore_choices(store, b"artifact")
    assert call(1, 2) == (1, 2)
    assert call(3) == (3,)
    assert piece.num_calls == 2
    assert not inductor.exists()
    assert restore_choices(store, b"artifact")
    (found,) = inductor.rglob("*.best_config")
    assert found == inductor / "cd" / "two.best_config"
    assert found.read_text() == '{"XBLOCK": 8}'
    assert not restore_choices(store, b"another artifact")


def test_an_artifact_without_choices_has_no_entry(store: ArtifactStore, inductor: Path) -> None:
    assert noting(Piece(), store)(1) == (1,)
    assert not restore_choices(store, b"artifact")
    assert not entries(store.root)


def test_two_first_calls(store: ArtifactStore, inductor: Path) -> None:
    """Of two threads, in the middle of each other."""
    barrier = threading.Barrier(2)

    def piece(*inputs: Any) -> Any:
        barrier.wait(timeout=60)
        choose("ab/one.best_config")
        barrier.wait(timeout=60)
        return inputs

    call, results = noting(piece, store), []
    threads = [threading.Thread(target=lambda n=n: results.append(call(n))) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [(0,), (1,)]
    assert restore_choices(store, b"artifact")


def test_a_first_call_that_fails_is_not_the_first(store: ArtifactStore, inductor: Path) -> None:
    piece = Piece("ab/one.best_config")

    def fails_once(*inputs: Any) -> Any:
        if piece.num_calls == 0:
            piece.num_calls = -1
            raise RuntimeError("out of memory")
        piece.num_calls = max(piece.num_calls, 0)
        return piece(*inputs)

    call = noting(fails_once, store)
    with pytest.raises(RuntimeError, match="out of memory"):
        call()
    call()
    assert restore_choices(store, b"artifact")
    assert (inductor / "ab" / "one.best_config").exists()
