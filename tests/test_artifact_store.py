"""A cache directory under everything that can happen to one."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import signal
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from piecewise_backend import cache_contents, cache_entry, trust
from piecewise_backend.artifact_store import (
    ArtifactStore,
    Fetched,
    Made,
    open_store,
)
from piecewise_backend.cache_entry import ARTIFACT, Content, Damaged, Record, group_of, name_of
from piecewise_backend.errors import ConfigError
from piecewise_backend.file_lock import LockTimeoutError, locked
from tests.store_process import artifact_of, fetch_all, hold, recipe, started

KEY = {"name": "one", "list": [1, 2.5, None], "nested": {"b": 1, "a": 2}}


def fetch(store: ArtifactStore, key: Any = KEY, made: bytes = b"made now") -> Fetched[bytes]:
    return store.fetch(key, *recipe(made))


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path)


@pytest.fixture
def folder(store: ArtifactStore) -> Path:
    """The entry of `KEY`, stored before."""
    assert fetch(store, made=b"made before") == Fetched(b"made before", is_hit=False)
    return store.root / name_of(KEY)


def test_what_was_made_is_loaded_afterwards(store: ArtifactStore, folder: Path) -> None:
    assert fetch(store) == Fetched(b"made before", is_hit=True)
    assert fetch(ArtifactStore(store.root)) == Fetched(b"made before", is_hit=True)


def test_other_keys_are_made(store: ArtifactStore, folder: Path) -> None:
    for other in ({**KEY, "name": "two"}, {**KEY, "list": [1, 2.5]}, {}):
        assert fetch(store, other) == Fetched(b"made now", is_hit=False)
    assert fetch(store).is_hit


def test_the_order_of_a_key_does_not_matter(store: ArtifactStore, folder: Path) -> None:
    assert fetch(store, {**dict(reversed(KEY.items())), "nested": {"a": 2, "b": 1}}).is_hit


def test_the_key_beside_the_artifact_counts_not_its_hash(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_entry, "_hash", lambda text: "0" * 64)
    fetch(store, {"name": "one"}, b"of one")
    with pytest.warns(RuntimeWarning, match="holds another key"):
        assert fetch(store, {"name": "two"}, b"of two") == Fetched(b"of two", is_hit=False)
    assert fetch(store, {"name": "two"}) == Fetched(b"of two", is_hit=True)


def sized(size: int) -> dict[str, Any]:
    return {**KEY, "sizes": [size]}


def fetch_for(store: ArtifactStore, size: int) -> Fetched[bytes]:
    """What was made for a size serves sizes of the same parity."""
    return store.fetch(sized(size), *recipe(f"made for {size}".encode(), size))


def test_what_was_made_for_other_sizes_serves_where_its_maker_says_so(store: ArtifactStore) -> None:
    assert [fetch_for(store, size).is_hit for size in (5, 7, 6, 8)] == [False, True, False, True]
    again = ArtifactStore(store.root)
    assert fetch_for(again, 9) == Fetched(b"made for 5", is_hit=True)
    assert fetch_for(again, 2) == Fetched(b"made for 6", is_hit=True)
    assert {entry.name for entry in cache_contents.entries(store.root)} == {
        name_of(sized(5)), name_of(sized(6)),
    }  # fmt: skip


def test_what_was_made_for_these_sizes_comes_first_then_what_was_used_last(
    store: ArtifactStore,
) -> None:
    for size, age in ((1, 1000), (3, 1002), (5, 1001)):
        make, load, _ = recipe(f"made for {size}".encode(), size)
        store.fetch(sized(size), make, load, lambda about: False)
        os.utime(store.root / name_of(sized(size)), (age, age))
    assert fetch_for(store, 7).value == b"made for 3"
    assert fetch_for(store, 1).value == b"made for 1"


def test_of_damaged_and_sound_versions_the_sound_one_serves(store: ArtifactStore) -> None:
    make, load, _ = recipe(b"sound", 1)
    for size, age in ((5, 1000), (3, 1001), (1, 1002)):
        store.fetch(sized(size), make, load, lambda about: False)
        os.utime(store.root / name_of(sized(size)), (age, age))
    damaged = [store.root / name_of(sized(size)) / ARTIFACT for size in (1, 3)]
    for path in damaged:
        _truncate(path)
    with pytest.warns(RuntimeWarning, match="removed") as warned:
        assert fetch_for(store, 1) == Fetched(b"sound", is_hit=True)
    for warning, path in zip(warned, damaged, strict=True):
        assert f"{path}: " in str(warning.message)
    assert [e.name for e in cache_contents.entries(store.root)] == [name_of(sized(5))]


def test_a_miss_says_what_is_nearest_and_what_differs(
    store: ArtifactStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "piecewise_backend")
    fetch_for(store, 5)
    fetch_for(store, 6)
    fetch(store, {**sized(5), "name": "two"})
    fetch_for(store, 7)
    first, other_size, other_name = [record.getMessage() for record in caplog.records]
    assert first.endswith("nothing was there that could have served")
    assert f"is most like {name_of(sized(5))}" in other_size
    assert "sizes: [5] -> [6]; it serves where size % 2 == 1" in other_size
    assert "name: 'one' -> 'two'" in other_name
    assert "sizes" not in other_name


def test_what_cannot_be_stored_is_made_each_time(store: ArtifactStore) -> None:
    for value in ("first", "second"):
        found = store.fetch(KEY, lambda value=value: Made(value, None), str, bool)
        assert found == Fetched(value, is_hit=False)
    assert cache_contents.entries(store.root) == ()


def test_what_making_raises_is_raised_and_leaves_nothing(store: ArtifactStore) -> None:
    def fails() -> Made[bytes]:
        raise OSError("of the compiler")

    with pytest.raises(OSError, match="of the compiler"):
        store.fetch(KEY, fails, *recipe(b"")[1:])
    assert not fetch(store).is_hit
    assert fetch(store).is_hit


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path) -> None:
    target = path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(target)


def _writable_for_all(path: Path) -> None:
    path.chmod(0o666)


DAMAGES = [_truncate, _empty, Path.unlink, _make_a_folder, _link, _writable_for_all]


@pytest.mark.parametrize("file", [ARTIFACT, cache_entry.KEY])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_named_once_and_made_again(
    store: ArtifactStore, folder: Path, file: str, damage: Any
) -> None:
    damage(folder / file)
    with pytest.warns(RuntimeWarning) as warned:
        assert fetch(store) == Fetched(b"made now", is_hit=False)
    (message,) = [str(warning.message) for warning in warned]
    assert str(folder) in message
    assert "compiled anew" in message
    assert fetch(store) == Fetched(b"made now", is_hit=True)


@pytest.mark.parametrize("file", [ARTIFACT, cache_entry.KEY])
def test_no_flipped_bit_gives_another_artifact(store: ArtifactStore, file: str) -> None:
    assert not fetch_for(store, 5).is_hit
    folder = store.root / name_of(sized(5))
    original = (folder / file).read_bytes()
    damaged = 0
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= 1 << position % 8
        (folder / file).write_bytes(changed)
        record = found = cache_entry.read_record(folder)
        if isinstance(record, Record):
            assert (record.key, record.about) == (sized(5), {"conditions": ["size % 2 == 1"]})
            found = cache_entry.read_artifact(folder, record)
        damaged += isinstance(found, Damaged)
        assert isinstance(found, Damaged) or found == b"made for 5"
    spaces = original.count(b" ") + original.count(b"\n") if file == cache_entry.KEY else 0
    assert damaged >= len(original) - spaces  # a space may become another kind of space


def test_an_entry_that_does_not_load_is_made_again(store: ArtifactStore, folder: Path) -> None:
    def load(content: Content) -> bytes:
        if content.artifact == b"made before":
            raise ValueError("of another age")
        return content.artifact

    def fetch_with(made: bytes) -> Fetched[bytes]:
        return store.fetch(KEY, lambda: Made(made, Content(made)), load, lambda about: True)

    with pytest.warns(RuntimeWarning, match=f"{folder / ARTIFACT}.*ValueError: of another age"):
        assert fetch_with(b"new") == Fetched(b"new", is_hit=False)
    assert fetch_with(b"newer") == Fetched(b"new", is_hit=True)


@pytest.mark.parametrize("function", ["mkdtemp", "fsync", "rename"])
def test_a_full_disk_is_one_warning(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place = cache_entry.tempfile if function == "mkdtemp" else cache_entry.os
    with monkeypatch.context() as patch:
        patch.setattr(place, function, full)
        if function == "rename":  # of an entry that is there nothing is to be removed
            patch.setattr(cache_entry, "remove", lambda folder: None)
        with pytest.warns(RuntimeWarning, match="No space left on device") as warned:
            found = [fetch(store, {"name": name}) for name in "abc"]
        assert [f.is_hit for f in found] == [False] * 3
        assert len(warned) == 1
    assert [p for p in store.root.iterdir() if p.suffix != ".lock"] == []
    fetch(store)
    assert fetch(store).is_hit


def test_a_read_only_directory_serves_and_takes_nothing(
    store: ArtifactStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system has it: whatever would create a file fails. (Root may write anywhere.)"""
    original = os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, flags, *args, **kwargs)

    def no_times(*args: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "utime", no_times)
    assert fetch(store) == Fetched(b"made before", is_hit=True)
    with pytest.warns(RuntimeWarning, match="Read-only file system") as warned:
        found = [fetch(store, {"name": name}) for name in ("two", "three")]
    assert [f.is_hit for f in found] == [False, False]
    assert len(warned) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to what is read-only")
def test_a_directory_without_write_permission(store: ArtifactStore, folder: Path) -> None:
    store.root.chmod(0o500)
    try:
        assert fetch(store).is_hit
        with pytest.warns(RuntimeWarning, match="Permission denied"):
            assert not fetch(store, {"name": "two"}).is_hit
    finally:
        store.root.chmod(0o700)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_directory_that_cannot_be_made_is_a_warning(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    why = f"cache_dir='{tmp_path / place}' cannot be used: there is a file"
    with pytest.warns(RuntimeWarning, match=re.escape(f"no compilation cache: {why}")):
        assert open_store(tmp_path / place) is None


def test_a_new_directory_is_the_users_alone(tmp_path: Path) -> None:
    made = open_store(tmp_path / "new" / "cache")
    assert made is not None
    assert made.root.stat().st_mode & 0o777 == 0o700
    fetch(made)
    (folder,) = [path for path in made.root.iterdir() if path.is_dir()]
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("writable", ["root", "parent"])
def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, writable: str) -> None:
    root = tmp_path / "parent" / "root"
    root.mkdir(parents=True)
    place = root if writable == "root" else root.parent
    place.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{place} can be written by every user"):
        open_store(root)
    place.chmod(0o755)
    assert open_store(root) is not None


def test_a_sticky_parent_will_do_but_a_sticky_directory_will_not(tmp_path: Path) -> None:
    root = tmp_path / "parent" / "root"
    root.mkdir(parents=True)
    root.parent.chmod(0o1777)
    assert open_store(root) is not None
    root.chmod(0o1777)
    with pytest.raises(ConfigError, match="can be written by every user"):
        open_store(root)


def test_a_link_is_judged_by_what_it_points_to_and_where_it_lies(tmp_path: Path) -> None:
    target, place = tmp_path / "target", tmp_path / "place"
    target.mkdir()
    place.mkdir()
    (place / "link").symlink_to(target)
    assert open_store(place / "link") is not None
    place.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{place} can be written"):
        open_store(place / "link")
    place.chmod(0o755)
    target.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{target} can be written"):
        open_store(place / "link")


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    else:
        monkeypatch.setattr(trust.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to"):
        open_store(tmp_path)


@pytest.mark.parametrize("members", [[], ["somebody"]])
def test_a_group_that_others_are_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: list[str]
) -> None:
    user = trust.pwd.getpwuid(os.geteuid()).pw_name
    group = trust.grp.struct_group((user, "x", 4321, members))
    monkeypatch.setattr(trust.grp, "getgrgid", lambda number: group)
    if os.geteuid() == 0:  # group 0 is root's own
        os.chown(tmp_path, -1, 4321)
    tmp_path.chmod(0o770)
    reason = trust.distrust(tmp_path)
    assert (reason is None) == (members == [])


def processes(root: Path, notes: Path, action: str, *names: list[str]) -> list[tuple[str, str]]:
    """Run processes at the same time, one for each list; returns what each printed."""
    root.mkdir(mode=0o700)
    return [outcome(*each) for each in [started(fetch_all, root, notes, action, n) for n in names]]


def outcome(process: Any, told: Any) -> tuple[str, str]:
    """What a process printed and warned about; nothing if it was killed."""
    process.join(timeout=600)
    if process.exitcode == -signal.SIGKILL:
        return "", ""
    assert process.exitcode == 0
    return told.recv()


def test_processes_on_an_empty_directory_make_each_entry_once(tmp_path: Path) -> None:
    root, notes = tmp_path / "cache", tmp_path / "notes"
    names = [["a", "b", f"c:{size}"] for size in (4, 5, 6, 7)]
    printed = processes(root, notes, "make", *names)
    lines = [line.split() for text, _ in printed for line in text.splitlines()]
    made = notes.read_text().split()
    assert sorted(name.partition(":")[0] for name in made) == ["a", "b", "c", "c"]
    assert {int(name[2:]) % 2 for name in made if ":" in name} == {0, 1}
    assert Counter(is_hit for _, is_hit, _ in lines) == {"False": 4, "True": 8}
    assert all(is_right == "True" for *_, is_right in lines)


def test_a_disk_that_is_full_in_the_middle_of_a_file_is_one_warning(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    ((printed, warned),) = processes(root, tmp_path / "notes", "no room", ["a", "b", "c"])
    assert printed.splitlines() == [f"{name} False True" for name in "abc"]
    assert warned.count("RuntimeWarning") == 1
    assert "File too large; not stored" in warned
    assert {path.suffix for path in root.iterdir()} == {".lock"}


@pytest.mark.parametrize("moment", ["die while making", "die in a file", "die before renaming"])
def test_a_killed_writer_blocks_nobody_and_leaves_nothing(tmp_path: Path, moment: str) -> None:
    root, notes = tmp_path / "cache", tmp_path / "notes"
    assert processes(root, notes, moment, ["a"]) == [("", "")]
    left = [path.name for path in root.iterdir() if path.suffix == ".tmp"]
    assert len(left) == (moment != "die while making")
    store = ArtifactStore(root, lock_seconds=5)
    found = fetch(store, {"name": "a"}, b"mine")
    assert found == Fetched(b"mine", is_hit=False)
    assert {path.name for path in root.iterdir()} == {
        name_of({"name": "a"}), f"{group_of({'name': 'a'})}.lock",
    }  # fmt: skip


def test_a_killed_holder_lets_the_waiting_process_go_on(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder, told = started(hold, path)
    assert told.recv() == "held"
    with pytest.raises(LockTimeoutError, match="lock"), locked(path, seconds=0.1):
        pass
    timer = threading.Timer(0.3, holder.kill)
    timer.start()
    with locked(path, seconds=30):
        holder.join(timeout=10)
        assert holder.exitcode == -signal.SIGKILL
    timer.join()


def test_who_waited_for_a_removed_lock_starts_over(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", []

    def wait() -> None:
        with locked(path, seconds=10):
            order.append("second")
            assert path.exists()

    with locked(path, seconds=0):
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.1)
        path.unlink()
        with locked(path, seconds=0):  # the name is free, and so is its lock
            time.sleep(0.3)
            order.append("first")
    waiting.join()
    assert order == ["first", "second"]


def test_a_lock_that_stays_taken_means_compiling_alone(store: ArtifactStore) -> None:
    impatient = ArtifactStore(store.root, lock_seconds=0.1)
    lock = cache_contents.lock_of(store.root, group_of(KEY))
    with locked(lock, seconds=0), pytest.warns(RuntimeWarning, match="locked by another process"):
        assert fetch(impatient) == Fetched(b"made now", is_hit=False)
    assert cache_contents.entries(store.root) == ()


def test_what_was_stored_while_the_lock_stayed_taken_serves(store: ArtifactStore) -> None:
    """Its holder makes it, and goes on to other sizes before the one that waits has the lock."""
    impatient = ArtifactStore(store.root, lock_seconds=0.5)
    content = Content(b"made for 5", {"conditions": ["size % 2 == 1"]})
    entry = store.root / name_of(sized(5))
    timer = threading.Timer(0.1, cache_entry.write, [entry, sized(5), content])
    with locked(cache_contents.lock_of(store.root, group_of(sized(5))), seconds=0):
        timer.start()
        assert fetch_for(impatient, 7) == Fetched(b"made for 5", is_hit=True)


def test_a_lock_that_stays_taken_in_front_of_a_damaged_entry_is_named(
    store: ArtifactStore, folder: Path
) -> None:
    _truncate(folder / ARTIFACT)
    impatient = ArtifactStore(store.root, lock_seconds=0.1)
    lock = cache_contents.lock_of(store.root, group_of(KEY))
    with (
        locked(lock, seconds=0),
        pytest.warns(RuntimeWarning, match=f"{folder / ARTIFACT}: .*{lock} is locked by") as warned,
    ):
        assert fetch(impatient) == Fetched(b"made now", is_hit=False)
    assert len(warned) == 1


def test_a_copied_directory_serves_elsewhere(
    store: ArtifactStore, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "cache"
    shutil.copytree(store.root, elsewhere)
    shutil.rmtree(folder)
    assert fetch(ArtifactStore(elsewhere)) == Fetched(b"made before", is_hit=True)


def test_the_least_recently_used_entry_goes_first(tmp_path: Path) -> None:
    content = bytes(10_000)
    store = ArtifactStore(tmp_path, max_bytes=35_000)
    for age, name in enumerate("abc"):
        fetch(store, {"name": name}, content)
        os.utime(tmp_path / name_of({"name": name}), (1000 + age, 1000 + age))
    assert fetch(store, {"name": "a"}).is_hit
    fetch(store, {"name": "d"}, content)
    assert {entry.name for entry in cache_contents.entries(tmp_path)} == {
        name_of({"name": name}) for name in "acd"
    }
    assert cache_contents.entries(tmp_path)[-1].name == name_of({"name": "c"})


def test_versions_of_one_piece_make_room_for_each_other(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, max_bytes=15_000)
    for size in (1, 2):
        store.fetch(sized(size), *recipe(bytes(10_000), size))
    assert [e.name for e in cache_contents.entries(tmp_path)] == [name_of(sized(2))]


def test_what_was_just_made_stays_and_what_is_in_use_too(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, max_bytes=5_000)
    fetch(store, {"name": "a"}, bytes(10_000))
    with locked(cache_contents.lock_of(tmp_path, group_of({"name": "a"})), seconds=0):
        fetch(store, {"name": "b"}, bytes(10_000))
        assert fetch(store, {"name": "a"}).is_hit
        assert fetch(store, {"name": "b"}).is_hit
    fetch(store, {"name": "c"}, bytes(10_000))
    assert [e.name for e in cache_contents.entries(tmp_path)] == [name_of({"name": "c"})]
    assert {path.suffix for path in tmp_path.iterdir()} == {"", ".lock"}
    assert len(list(tmp_path.iterdir())) == 2


def test_clearing_removes_entries_and_leftovers_only(store: ArtifactStore, folder: Path) -> None:
    (store.root / f"{name_of({})}.abc.tmp").mkdir()
    (store.root / "notes.txt").write_text("of the user")
    assert [entry.folder for entry in cache_contents.clear(store.root)] == [folder]
    assert [p.name for p in store.root.iterdir() if p.suffix != ".lock"] == ["notes.txt"]
    assert cache_contents.clear(store.root / "nowhere") == ()


def test_nothing_is_warned_about_in_a_healthy_directory(store: ArtifactStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [fetch(store, {"name": artifact_of("a").decode()}).is_hit for _ in "123"] == [
            False, True, True,
        ]  # fmt: skip
