"""What Dynamo met in a trace under names that it guards nothing of."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch._dynamo import guards
from torch._dynamo.variables import builder

import piecewise_backend as pw
from piecewise_backend import _torch


def is_as_it_was() -> bool:
    return vars(builder)["make_dupe_guard"] is guards.make_dupe_guard


def test_dynamo_is_left_as_it_was(tmp_path: Path) -> None:
    compiled = pw.compile(
        torch.nn.Linear(4, 4).requires_grad_(False),
        compiler="eager",
        graph_impl="emulated",
        cudagraph_capture_sizes=[4],
        cache_dir=tmp_path,
    )
    with torch.no_grad():
        compiled(torch.ones(4, 4))
    assert is_as_it_was()


def test_by_threads_whose_traces_end_in_another_order() -> None:
    one_began, other_ended = threading.Event(), threading.Event()

    def outlive() -> None:
        with _torch.noting_second_names():
            one_began.set()
            assert other_ended.wait(10)

    thread = threading.Thread(target=outlive)
    with _torch.noting_second_names():
        thread.start()
        assert one_began.wait(10)
    other_ended.set()
    thread.join()
    assert is_as_it_was()
