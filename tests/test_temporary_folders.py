"""Temporary folders: gone when their owner is, and nothing else is ever removed."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from piecewise_backend import temporary_folders
from piecewise_backend.artifact_store import temporary_store
from piecewise_backend.temporary_folders import make_folder, remove_abandoned
from tests.folder_process import own
from tests.store_process import started


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are."""
    made = tmp_path / "temporary"
    made.mkdir(mode=0o700)
    forkserver.ensure_running()  # whose own socket has no room for so long a path
    monkeypatch.setattr("tempfile.tempdir", str(made))
    return made


@contextlib.contextmanager
def owner(place: Path, action: str) -> Iterator[tuple[Any, Path]]:
    """A process with a temporary store, and where that is."""
    process, told = started(own, place, action)
    root, child = told.recv()
    try:
        yield process, root
    finally:
        for pid in filter(None, (process.pid, child)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.join(timeout=60)


@pytest.mark.parametrize(
    "action", ["nothing", "forks", "forks while it is made", "starts a program"]
)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_killed_process_left_goes_with_the_next_store(
    place: Path, action: str, how: signal.Signals
) -> None:
    """Whoever else it has started is still alive."""
    with owner(place, action) as (process, root):
        os.kill(process.pid, how)
        process.join(timeout=60)
        assert process.exitcode == -how
        assert (root / "entry" / "artifact").exists()
        store = temporary_store()
        assert list(place.iterdir()) == [store.root]


@pytest.mark.parametrize("action", ["nothing", "forks", "forks one that ends"])
def test_what_a_process_has_stays_while_it_lives(place: Path, action: str) -> None:
    with owner(place, action) as (_, root):
        own_store = temporary_store()
        remove_abandoned()
        assert (root / "entry" / "artifact").exists()
        assert own_store.root.is_dir()


def test_it_goes_with_its_store(place: Path) -> None:
    store = temporary_store()
    assert [store.root] == list(place.iterdir())
    (store.root / "entry").mkdir()
    before = set(os.listdir("/proc/self/fd"))
    del store
    gc.collect()
    assert list(place.iterdir()) == []
    assert len(before - set(os.listdir("/proc/self/fd"))) == 1


def test_a_fork_is_prepared_for_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said to be done at forks stays for ever."""
    said: list[Any] = []
    before = set(temporary_folders._own_folders)
    monkeypatch.setattr(os, "register_at_fork", lambda **what: said.append(what))
    for _ in range(3):
        temporary_store()
    gc.collect()
    assert not said
    assert set(temporary_folders._own_folders) <= before


def test_one_that_is_just_being_made_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each step."""
    moments: list[str] = []
    is_looking = False

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal is_looking
            if is_looking:
                return function(*args)
            is_looking = True
            remove_abandoned()
            result = function(*args)
            remove_abandoned()
            is_looking = False
            moments.append(function.__name__)
            return result

        return call

    with monkeypatch.context() as patch:
        patch.setattr(temporary_folders.fcntl, "flock", watched(fcntl.flock))
        for name in ("write", "rename"):
            patch.setattr(temporary_folders.os, name, watched(getattr(os, name)))
        folder = make_folder()
    assert moments == ["flock", "write", "rename"]
    assert [path.name for path in folder.path.iterdir()] == ["owner.lock"]
    os.close(folder.descriptor)
    remove_abandoned()
    assert list(place.iterdir()) == []


def abandoned(place: Path, name: str = "piecewise-abandoned") -> Path:
    made = place / name
    made.mkdir(mode=0o700)
    (made / "owner.lock").write_bytes(os.uname().nodename.encode())
    (made / "artifact").touch()
    return made


def _no_marker(folder: Path) -> None:
    (folder / "owner.lock").unlink()


def _of_another_machine(folder: Path) -> None:
    (folder / "owner.lock").write_text("another")


def _marker_is_a_link(folder: Path) -> None:
    target = (folder / "owner.lock").rename(folder / "target")
    (folder / "owner.lock").symlink_to(target)


def _marker_is_a_pipe(folder: Path) -> None:
    (folder / "owner.lock").unlink()
    os.mkfifo(folder / "owner.lock")


def _marker_is_a_folder(folder: Path) -> None:
    (folder / "owner.lock").unlink()
    (folder / "owner.lock").mkdir()


def _another_name(folder: Path) -> None:
    folder.rename(folder.with_name("of-somebody"))


def _a_link(folder: Path) -> None:
    folder.symlink_to(folder.rename(folder.with_name("of-somebody")))


def _others_may_write(folder: Path) -> None:
    folder.chmod(0o777)


def _others_may_replace_it(folder: Path) -> None:
    folder.parent.chmod(0o777)


def unfinished(place: Path, *names: str, hours: float = 25) -> Path:
    """Left by one that was killed so many hours ago, while it made a folder."""
    made = place / "piecewise-unfinished"
    made.mkdir(mode=0o700)
    for name in names:
        (made / name).touch()
    then = time.time() - hours * 60 * 60
    os.utime(made, (then, then))
    return made


@pytest.mark.parametrize("names", [[], ["owner.lock.new"]])
def test_one_that_was_never_finished_goes_after_a_day(place: Path, names: list[str]) -> None:
    unfinished(place, *names)
    remove_abandoned()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "hours"),
    [([], 23), (["owner.lock.new"], 23), (["artifact"], 25), (["owner.lock.new", "artifact"], 25)],
)
def test_one_that_may_be_used_yet_stays(place: Path, names: list[str], hours: float) -> None:
    folder = unfinished(place, *names, hours=hours)
    remove_abandoned()
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_one_that_takes_a_day_to_make_stays(place: Path) -> None:
    folder = unfinished(place, "owner.lock.new")
    with (folder / "owner.lock.new").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_abandoned()
    assert folder.is_dir()


def test_one_that_another_machine_has_not_finished_stays(place: Path) -> None:
    folder = unfinished(place, "owner.lock.new")
    (folder / "owner.lock.new").write_text("another")
    remove_abandoned()
    assert folder.is_dir()


OTHERS = [
    _no_marker, _of_another_machine, _marker_is_a_link, _marker_is_a_pipe, _marker_is_a_folder,
    _another_name, _a_link, _others_may_write, _others_may_replace_it,
]  # fmt: skip


@pytest.mark.parametrize("change", OTHERS)
def test_what_may_be_somebody_elses_stays(place: Path, change: Callable[[Path], None]) -> None:
    change(abandoned(place))
    before = sorted(place.rglob("*"))
    remove_abandoned()
    assert sorted(place.rglob("*")) == before


def test_one_of_another_user_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = abandoned(place)
    monkeypatch.setattr(temporary_folders, "distrust", lambda path: None)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    remove_abandoned()
    assert folder.is_dir()


def test_links_in_one_are_not_followed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    folder = abandoned(place)
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    remove_abandoned()
    assert list(place.iterdir()) == []
    assert (tmp_path / "elsewhere" / "file").exists()


def test_one_that_was_half_removed_goes_with_the_next(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = abandoned(place)

    def fails(path: Path) -> None:
        raise OSError("killed in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(temporary_folders, "remove_unfinished", fails)
        remove_abandoned()
    assert not folder.exists()
    assert len(list(place.iterdir())) == 1
    remove_abandoned()
    assert list(place.iterdir()) == []


def test_a_folder_that_cannot_be_locked_is_none(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int, how: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(temporary_folders.fcntl, "flock", fails)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no locks here"):
        make_folder()
    assert list(place.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)
