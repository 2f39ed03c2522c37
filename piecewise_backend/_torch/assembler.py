"""Which assembler Triton says that it uses."""

from __future__ import annotations

import functools
import importlib
import os

from torch._inductor.runtime import compile_tasks
from torch.utils import _triton


@functools.cache
def agree_on_assembler() -> None:
    """Have Triton name the assembler that it uses, as Inductor's compile processes do.

    Torch brings an assembler, and names it in the environment before it compiles its first
    kernel. A Triton that has compiled others before goes on to say that it uses its own, so its
    keys are others than those of Inductor's processes: what these have compiled is not found, and
    all choices of max-autotune are compiled again here, one after the other. For a product of
    64 x 2048 by 2048 x 3072 that took 24 of 28 seconds (H200, torch 2.11, 16 cores). Ends when
    Triton does not keep the answer, or torch names its assembler at import.
    """
    if not _triton.has_triton():
        return
    compile_tasks._set_triton_ptxas_path()
    if "TRITON_PTXAS_PATH" in os.environ:
        _forget_assembler()


def _forget_assembler() -> None:
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    compiler.get_ptxas_version.cache_clear()
    _triton.triton_hash_with_backend.cache_clear()
