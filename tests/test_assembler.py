"""Triton forgets which assembler it has named, where torch or the user names one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch._inductor.runtime import compile_tasks
from torch.utils import _triton

from piecewise_backend._torch import assembler


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As if there were Triton: how often it has forgotten."""
    found: list[str] = []
    assembler.agree_on_assembler.cache_clear()
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(_triton, "has_triton", lambda: True)
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: None)
    monkeypatch.setattr(assembler, "_forget_assembler", lambda: found.append("forgotten"))
    yield found
    assembler.agree_on_assembler.cache_clear()


def test_once_where_torch_brings_one(forgotten: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def bring() -> None:
        monkeypatch.setenv("TRITON_PTXAS_PATH", "torch's")

    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", bring)
    assembler.agree_on_assembler()
    assembler.agree_on_assembler()
    assert forgotten == ["forgotten"]


def test_where_it_was_named_before_and_triton_may_have_been_asked_before_that(
    forgotten: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "of another compilation")
    assembler.agree_on_assembler()
    assert forgotten == ["forgotten"]


def test_not_where_there_is_none(forgotten: list[str]) -> None:
    assembler.agree_on_assembler()
    assert forgotten == []


def test_not_without_triton(forgotten: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "of the user")
    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    assembler.agree_on_assembler()
    assert forgotten == []
