"""What kernels choose at their first run reaches other processes with the artifact.

Kernels that choose need a GPU: see `tests/gpu/test_warm_start.py`. Here they only say
that they have.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from piecewise_backend._torch.kernel_choices import loaded_kernels, noted_choices
from piecewise_backend.artifact_store import ArtifactStore
from piecewise_backend.cache_contents import entries
from piecewise_backend.kernel_choices import NotesChoices, restore_choices, store_choices

ONE, TWO = "ab/one.py", "cd/two.py"
CHOICE = '{"XBLOCK": 64}'


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    root = tmp_path / "store"
    root.mkdir()
    return ArtifactStore(root)


@pytest.fixture
def inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Inductor looks for what kernels chose. What runs chooses, and leaves a note there."""
    folder = tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))

    def run(kernel: CachingAutotuner) -> None:
        if kernel.num_runs == 0:
            note_of(kernel).parent.mkdir(parents=True, exist_ok=True)
            note_of(kernel).write_text(CHOICE)
        kernel.num_runs += 1

    monkeypatch.setattr(CachingAutotuner, "run", run)
    return folder


def kernel(folder: Path, name: str) -> Any:
    """One that can be compiled in several ways, without being compiled in any."""
    made: Any = CachingAutotuner.__new__(CachingAutotuner)
    made.num_runs, made.compile_results = 0, []
    made.filename = str(folder / name)
    notes = AutotuneCache.create({"autotune_remote_cache": False}, made.filename, "")
    assert notes is not None
    made.save_cache_hook = notes.save
    return made


def note_of(kernel: Any) -> Path:
    return Path(kernel.save_cache_hook.__self__.local_cache[1])


def notes_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.best_config"))


def noting(call: Any, store: ArtifactStore) -> NotesChoices:
    return NotesChoices(call, functools.partial(store_choices, store, b"artifact"))


class Piece:
    """Runs kernels."""

    def __init__(self, *kernels: Any) -> None:
        self.kernels = kernels
        self.num_calls = 0

    def __call__(self, *inputs: Any) -> Any:
        self.num_calls += 1
        for one in self.kernels:
            one.run()
        return inputs


def test_what_the_first_call_chose_is_restored(store: ArtifactStore, inductor: Path) -> None:
    kernel(inductor, ONE).run()  # of another artifact
    call = noting(piece := Piece(kernel(inductor, TWO)), store)
    assert not restore_choices(store, b"artifact")
    assert call(1, 2) == (1, 2)
    assert call(3) == (3,)
    assert piece.num_calls == 2
    shutil.rmtree(inductor)
    assert restore_choices(store, b"artifact")
    assert notes_in(inductor) == [note_of(kernel(inductor, TWO))]
    assert notes_in(inductor)[0].read_text() == CHOICE
    assert not restore_choices(store, b"another artifact")


def test_what_a_kernel_chose_for_another_artifact(store: ArtifactStore, inductor: Path) -> None:
    """The process has it in memory, and does not choose again."""
    shared = kernel(inductor, ONE)
    Piece(shared)()
    noting(Piece(shared), store)()
    shutil.rmtree(inductor)
    assert restore_choices(store, b"artifact")
    assert notes_in(inductor) == [note_of(shared)]


@pytest.mark.parametrize("has_hook", [False, True])
def test_an_artifact_without_choices_has_no_entry(
    has_hook: bool, store: ArtifactStore, inductor: Path
) -> None:
    """Of its kernels one has nothing to choose, and one was told what."""
    one = kernel(inductor, ONE)
    one.num_runs = 1
    if not has_hook:
        one.save_cache_hook = None
    assert noting(Piece(one), store)(1) == (1,)
    assert not restore_choices(store, b"artifact")
    assert not entries(store.root)


def test_two_first_calls(store: ArtifactStore, inductor: Path) -> None:
    """Of two threads, in the middle of each other; each notes what itself has run."""
    barrier = threading.Barrier(2)
    others = kernel(inductor, TWO)

    def piece(number: int) -> Any:
        barrier.wait(timeout=60)
        kernel(inductor, ONE).run()
        barrier.wait(timeout=60)
        return number

    def other() -> None:
        barrier.wait(timeout=60)
        others.run()
        barrier.wait(timeout=60)

    original = CachingAutotuner.run
    call, results = noting(piece, store), []
    for beside in (lambda: results.append(call(1)), other):
        thread = threading.Thread(target=beside)
        thread.start()
        results.append(call(0) if beside is not other else noting(piece, store)(2))
        thread.join()
        assert CachingAutotuner.run is original
    assert sorted(results) == [0, 1, 2]
    assert others.num_runs == 1
    shutil.rmtree(inductor)
    assert restore_choices(store, b"artifact")
    assert notes_in(inductor) == [note_of(kernel(inductor, ONE))]


def test_a_first_call_that_fails_is_not_the_first(store: ArtifactStore, inductor: Path) -> None:
    piece = Piece(kernel(inductor, ONE))
    original = CachingAutotuner.run

    def fails_once(*inputs: Any) -> Any:
        if not notes_in(inductor):
            piece()
            raise RuntimeError("out of memory")
        return piece(*inputs)

    call = noting(fails_once, store)
    with pytest.raises(RuntimeError, match="out of memory"):
        call()
    assert CachingAutotuner.run is original
    assert not restore_choices(store, b"artifact")
    call()
    assert restore_choices(store, b"artifact")


def test_notes_that_are_gone(store: ArtifactStore, inductor: Path) -> None:
    """Somebody has cleared Inductor's folder during the call, whose results are there."""
    one, two = kernel(inductor, ONE), kernel(inductor, TWO)

    def piece() -> str:
        one.run()
        shutil.rmtree(inductor)
        two.run()
        return "result"

    assert noting(piece, store)() == "result"
    shutil.rmtree(inductor)
    assert restore_choices(store, b"artifact")
    assert notes_in(inductor) == [note_of(two)]


def test_a_forked_process_watches_nothing(inductor: Path) -> None:
    """None of its threads does, whatever those of this one do; nor does it wait for them."""
    original = CachingAutotuner.run
    with noted_choices():
        pid = os.fork()
        if pid == 0:
            is_right = CachingAutotuner.run is original
            with noted_choices() as choices:
                kernel(inductor, ONE).run()
            os._exit(0 if is_right and len(choices) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert CachingAutotuner.run is original


def test_what_somebody_else_puts_in_front_stays(inductor: Path) -> None:
    with noted_choices() as choices:
        ours = CachingAutotuner.run

        def run(kernel: Any) -> None:
            ours(kernel)

        CachingAutotuner.run = run  # type: ignore[assignment, method-assign]
        kernel(inductor, ONE).run()
    assert CachingAutotuner.run is run
    assert len(choices) == 1
    kernel(inductor, TWO).run()
    assert len(notes_in(inductor)) == 2


def test_kernels_of_other_threads_are_left_alone(inductor: Path) -> None:
    """They are loaded meanwhile, by somebody else."""
    theirs = kernel(Path("/nowhere"), ONE)
    theirs.compile_results = [SimpleNamespace(config=SimpleNamespace())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachingAutotuner, "recheck_autotune_cache", lambda *args: None)
        with loaded_kernels(are_settled=True):
            thread = threading.Thread(target=theirs.recheck_autotune_cache, args=(None,))
            thread.start()
            thread.join()
    assert theirs.filename == f"/nowhere/{ONE}"
    assert not hasattr(theirs.compile_results[0].config, "found_by_coordesc")


@pytest.mark.parametrize("are_settled", [False, True])
def test_kernels_that_come_from_elsewhere(are_settled: bool, inductor: Path) -> None:
    """They look and write where this process does, not where they were compiled."""
    moved = kernel(Path("/nowhere"), ONE)
    moved.compile_results = [SimpleNamespace(config=SimpleNamespace())]
    looked: list[str] = []

    def recheck(kernel: Any, reload: Any) -> None:
        looked.append(kernel.filename)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachingAutotuner, "recheck_autotune_cache", recheck)
        with loaded_kernels(are_settled=are_settled):
            moved.recheck_autotune_cache(None)
        assert CachingAutotuner.recheck_autotune_cache is recheck
    assert looked == [str(inductor / ONE)]
    moved.run()
    assert notes_in(inductor) == [note_of(kernel(inductor, ONE))]
    (result,) = moved.compile_results
    assert getattr(result.config, "found_by_coordesc", False) is are_settled
