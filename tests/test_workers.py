"""Processes that do jobs aside: whatever becomes of them, the caller goes on."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from piecewise_backend import _torch, job_process
from piecewise_backend.jobs import Setup
from piecewise_backend.trace_bytes import to_bytes
from piecewise_backend.workers import Workers

CPU = torch.device("cpu")

# Stands for `piecewise_backend.worker`, without torch: a job is a line of Python.
WORKER = """
import json, os, struct, sys, time
def read():
    head = sys.stdin.buffer.read(8)
    return sys.stdin.buffer.read(*struct.unpack(">Q", head)) if head else None
print("a banner of somebody else's")
answers = os.fdopen(int(sys.argv[2]), "w")
folder = read().decode()
while (message := read()) is not None:
    try:
        given = {"os": os, "time": time, "folder": folder, "answers": answers}
        exec(message.decode(), given)
        print("null", file=answers, flush=True)
    except Exception as error:
        print(json.dumps(str(error)), file=answers, flush=True)
"""


def done(folder: Path) -> list[str]:
    """What jobs wrote, in the order in which they ran."""
    path = folder / "done"
    return path.read_text().split() if path.exists() else []


def job(text: str, before: str = "pass") -> bytes:
    lines = f"{before}\nwith open(folder + '/done', 'a') as file: file.write('{text} ')"
    return lines.encode()


def waiting_for(name: str) -> str:
    return f"while not os.path.exists(folder + '/{name}'): time.sleep(0.01)"


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Workers]]:
    stands_for = tmp_path / "stands_for_worker.py"
    stands_for.write_text(textwrap.dedent(WORKER))
    monkeypatch.setattr(job_process, "_COMMAND", [sys.executable, str(stands_for)])
    made: list[Workers] = []

    def new(most: int = 1) -> Workers:
        made.append(Workers(str(tmp_path).encode(), most))
        return made[-1]

    yield new
    for each in made:
        each.close()


def test_jobs_are_done_the_last_one_first(make: Callable[..., Workers], tmp_path: Path) -> None:
    pool = make()
    pool.submit("held", job("held", waiting_for("go")))
    eventually(lambda: "held" in pool._running)
    for name in "abc":
        pool.submit(name, job(name))
    assert all(map(pool.is_left, ["held", *"abc"]))
    (tmp_path / "go").touch()
    pool.wait()
    assert not any(map(pool.is_left, ["held", *"abc"]))
    assert done(tmp_path) == ["held", "c", "b", "a"]
    assert not pool.failures


def test_what_is_taken_is_not_done(make: Callable[..., Workers], tmp_path: Path) -> None:
    pool = make()
    pool.submit("held", job("held", waiting_for("go")))
    eventually(lambda: "held" in pool._running)
    pool.submit("a", job("a"))
    pool.take("a")
    pool.take("unknown")
    (tmp_path / "go").touch()
    pool.take("held")  # begun: waited for
    assert done(tmp_path) == ["held"]
    pool.wait()
    assert done(tmp_path) == ["held"]


def test_several_at_once(make: Callable[..., Workers], tmp_path: Path) -> None:
    pool = make(3)
    for name in "abc":  # each waits for the next one
        following = chr(ord(name) + 1) if name != "c" else "a"
        started = f"open(folder + '/{name}', 'w').close()\n"
        pool.submit(name, job(name, started + waiting_for(following)))
    pool.wait()
    assert sorted(done(tmp_path)) == ["a", "b", "c"]


def test_a_job_that_fails(make: Callable[..., Workers], tmp_path: Path) -> None:
    pool = make()
    pool.submit("held", job("held", waiting_for("go")))
    eventually(lambda: "held" in pool._running)
    pool.submit("b", job("b"))
    pool.submit("a", job("a", "raise ValueError('no such thing')"))
    (tmp_path / "go").touch()
    pool.wait()
    assert pool.failures == {"a": "no such thing"}
    assert done(tmp_path) == ["held", "b"]


# Of a job: who does it.
WRITE_PID = """
open(folder + '/new', 'w').write(str(os.getpid()))
os.rename(folder + '/new', folder + '/pid')
"""


def killed_in_the_middle(folder: Path) -> int:
    """Kill the process that has said who it is, as the kernel does when memory ends."""
    eventually((folder / "pid").exists)
    pid = int((folder / "pid").read_text())
    (folder / "pid").unlink()
    os.kill(pid, signal.SIGKILL)
    return pid


def test_what_a_killed_process_did_is_done_by_another(
    make: Callable[..., Workers], tmp_path: Path
) -> None:
    pool = make()
    pool.submit("a", job("a", WRITE_PID + waiting_for("go")))
    killed = killed_in_the_middle(tmp_path)
    pool.submit("b", job("b"))
    eventually((tmp_path / "pid").exists)
    assert pool.is_left("a")
    assert not pool.failures, "it is being tried again"
    (tmp_path / "go").touch()
    pool.wait()
    assert sorted(done(tmp_path)) == ["a", "b"]
    assert int((tmp_path / "pid").read_text()) != killed
    assert not pool.failures


def test_a_process_that_is_killed_twice(make: Callable[..., Workers], tmp_path: Path) -> None:
    """Its job has failed, and another process does those that wait."""
    pool = make()
    pool.submit("a", job("a", WRITE_PID + waiting_for("never")))
    assert killed_in_the_middle(tmp_path) != killed_in_the_middle(tmp_path)
    pool.submit("b", job("b"))
    pool.wait()
    assert pool.failures == {"a": "its process ended with -9: it said nothing"}
    assert done(tmp_path) == ["b"]


def test_a_thread_whose_job_another_one_tries_again_leaves_it_alone(
    make: Callable[..., Workers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has it before the first has done with its process."""
    pool = make(2)
    pool.submit("held", job("held", waiting_for("go")))
    pool.submit("a", job("a", WRITE_PID + waiting_for("on")))
    eventually((tmp_path / "pid").exists)
    put_back = pool._is_put_back

    def put_back_slowly(*args: Any) -> bool:
        is_so = put_back(*args)
        (tmp_path / "go").touch()
        eventually((tmp_path / "pid").exists)
        return is_so

    monkeypatch.setattr(pool, "_is_put_back", put_back_slowly)
    killed_in_the_middle(tmp_path)
    eventually((tmp_path / "pid").exists)
    assert pool.is_left("a")
    (tmp_path / "on").touch()
    pool.wait()
    assert sorted(done(tmp_path)) == ["a", "held"]
    assert not pool.failures


def test_who_waits_for_what_a_killed_process_did_does_it_himself(
    make: Callable[..., Workers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make()
    pool.submit("a", job("a", WRITE_PID + waiting_for("never")))
    eventually((tmp_path / "pid").exists)
    monkeypatch.setattr(job_process, "_COMMAND", ["/no/such/program"])
    threading.Timer(0.2, killed_in_the_middle, [tmp_path]).start()
    pool.take("a")
    assert pool.failures == {"a": "its process ended with -9: it said nothing"}
    assert not done(tmp_path)


def test_what_fails_is_not_tried_again(make: Callable[..., Workers], tmp_path: Path) -> None:
    pool = make()
    count = "open(folder + '/tries', 'a').write('x')\n"
    pool.submit("a", job("a", count + "raise ValueError('no such thing')"))
    pool.submit("b", job("b", count + "os.write(2, b'cannot go on'); os._exit(3)"))
    pool.wait()
    assert (tmp_path / "tries").read_text() == "xx"
    assert pool.failures == {
        "a": "no such thing", "b": "its process ended with 3: cannot go on",
    }  # fmt: skip


def test_processes_that_all_end(make: Callable[..., Workers], tmp_path: Path) -> None:
    pool = make()
    pool.submit("held", job("held", waiting_for("go")))
    eventually(lambda: "held" in pool._running)
    for name in "abcd":
        pool.submit(name, job(name, "os.write(2, b'cannot go on\\n'); os._exit(3)"))
    (tmp_path / "go").touch()
    pool.wait()
    assert set(pool.failures) == set("abcd")
    assert pool.failures["d"] == "its process ended with 3: cannot go on"
    assert pool.failures["a"] == "no process is left to do it"
    pool.submit("e", job("e"))  # perhaps it was these
    pool.wait()
    assert done(tmp_path) == ["held", "e"]


@pytest.mark.parametrize(
    ("answer", "num_tries"),
    [
        ("print('nul', end='', file=answers, flush=True); os._exit(3)", 1),
        ("print('nonsense', file=answers, flush=True); time.sleep(99)", 2),
        ("answers.buffer.write(bytes([255, 10])); answers.flush(); time.sleep(99)", 2),
    ],
)
def test_an_answer_that_cannot_be_read(
    make: Callable[..., Workers], tmp_path: Path, answer: str, num_tries: int
) -> None:
    """Jobs before it and after it are none the worse, and it is no answer."""
    pool = make()
    pool.submit("held", job("held", waiting_for("go")))
    eventually(lambda: "held" in pool._running)
    pool.submit("b", job("b"))
    pool.submit("a", job("a", f"open(folder + '/tries', 'a').write('x')\n{answer}"))
    (tmp_path / "go").touch()
    assert pool.wait(60)
    assert list(pool.failures) == ["a"]
    assert pool.failures["a"].startswith("its answer cannot be read: ")
    assert (tmp_path / "tries").read_text() == "x" * num_tries
    assert done(tmp_path) == ["held", "b"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_a_thread_dies_of_leaves_no_job(
    make: Callable[..., Workers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make()
    pool.submit("held", job("held", waiting_for("go")))
    eventually(lambda: "held" in pool._running)
    pool.submit("b", job("b"))
    pool.submit("a", job("a"))

    def dies(process: Any, message: bytes) -> None:
        raise RuntimeError("of something")

    with monkeypatch.context() as patch:
        patch.setattr(job_process.JobProcess, "do", dies)
        (tmp_path / "go").touch()
        assert pool.wait(60)
    assert pool.failures == {
        "a": "who waited for it has ended", "b": "no process is left to do it",
    }  # fmt: skip
    pool.submit("c", job("c"))
    assert pool.wait(60)
    assert done(tmp_path) == ["held", "c"]


def test_no_process_can_be_started(
    make: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_process, "_COMMAND", ["/no/such/program"])
    pool = make(2)
    pool.submit("a", job("a"))
    pool.submit("b", job("b"))
    pool.wait()
    assert set(pool.failures) == {"a", "b"}
    assert not pool.is_left("a")


@pytest.mark.parametrize("num_there", [0, 1])
def test_no_thread_can_be_started(
    make: Callable[..., Workers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_there: int
) -> None:
    pool = make(2)
    for i in range(num_there):
        pool.submit(i, job(str(i), waiting_for("go")))
        eventually(lambda: bool(pool._running))

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        pool.submit("a", job("a"))
    (tmp_path / "go").touch()
    assert pool.wait(60), "for nobody"
    assert pool.failures == ({} if num_there else {"a": "no process is left to do it"})
    assert done(tmp_path) == (["0", "a"] if num_there else [])


def test_closing_ends_what_runs(make: Callable[..., Workers], tmp_path: Path) -> None:
    pool = make()
    write = "open(folder + '/pid', 'w').write(str(os.getpid()))\n"
    pool.submit("a", job("a", write + waiting_for("never")))
    eventually(lambda: bool((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    pool.submit("b", job("b"))
    pool.close()
    pool.wait()
    assert not done(tmp_path)
    eventually(lambda: not _is_alive(int((tmp_path / "pid").read_text())))
    pool.submit("c", job("c"))
    pool.wait()
    assert not done(tmp_path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Nothing:
    """A job."""

    def run(self, setup: Setup) -> None:
        """Do it."""


def test_what_is_imported_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found where this process finds it, and nowhere else; it may ask for input, and not start
    such processes itself."""
    (tmp_path / "queue.py").write_text("raise SystemExit('this is no module of the program')")
    (tmp_path / "asks.py").write_text("import sys\nassert sys.stdin.read() == ''")
    (tmp_path / "runs.py").write_text(
        "import torch\n"
        "function = torch.compile(torch.sin, backend='piecewise', options={'compiler': 'eager'})\n"
        "function(torch.ones(4))"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "", tmp_path])
    settings = _torch.settings_of_process(CPU)
    pool = Workers(Setup(CPU, settings, {}, (), False, tmp_path, 2**30, "").as_message(), 1)
    for module in ("asks", "runs"):
        pool.submit(module, to_bytes(((module,), to_bytes(Nothing()))))
    pool.wait()
    pool.close()
    assert list(pool.failures) == ["runs"]
    assert pool.failures["runs"].startswith("ContractError: a module with an op or pass")


def test_an_interrupt_is_for_the_caller(make: Callable[..., Workers], tmp_path: Path) -> None:
    pool = make()
    write = "open(folder + '/group', 'w').write(str(os.getpgrp()))"
    pool.submit("a", job("a", write))
    pool.wait()
    assert int((tmp_path / "group").read_text()) != os.getpgrp()


def test_a_message_that_is_cut_off_is_none(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    whole = job_process._LENGTH.pack(5) + b"hello"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with path.open("rb") as stream:
            assert job_process.read_message(stream) is None
    path.write_bytes(whole + whole[:3])
    with path.open("rb") as stream:
        assert job_process.read_message(stream) == b"hello"
        assert job_process.read_message(stream) is None
