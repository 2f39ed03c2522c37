"""Triton forgets which assembler it has named, if another one is named meanwhile."""

from __future__ import annotations

import pytest
from torch._inductor.runtime import compile_tasks
from torch.utils import _triton

from piecewise_backend._torch import assembler


@pytest.mark.parametrize("is_known", [False, True])
def test_an_assembler_named_late_is_named_anew(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    forgotten: list[str] = []
    if is_known:
        monkeypatch.setenv("TRITON_PTXAS_PATH", "of the user")
    else:
        monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)

    def bring() -> None:
        if not is_known:
            monkeypatch.setenv("TRITON_PTXAS_PATH", "torch's")

    monkeypatch.setattr(_triton, "has_triton", lambda: True)
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", bring)
    monkeypatch.setattr(assembler, "_forget_assembler", lambda: forgotten.append("forgotten"))
    assembler.agree_on_assembler()
    assembler.agree_on_assembler()
    assert forgotten == ([] if is_known else ["forgotten"])
