"""The processes in which Inductor compiles kernels, and when a trace begins that will need them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import callback as dynamo_callback
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.eval_frame import innermost_backend
from torch._inductor import async_compile
from torch._inductor.runtime import compile_tasks
from torch.utils import _triton

from piecewise_backend._torch.dynamo import callers_of


def start_processes() -> None:
    """Start them, unless they are there or the environment says that there are to be none.

    They take as long to start as Dynamo takes for a few layers, and until then kernels are
    compiled here, one after the other. Inductor starts them when it is called, which is early
    enough for a whole model and too late for a piece. Ends when it starts them with the trace.
    """
    async_compile.maybe_warm_pool()


def agree_on_assembler() -> None:
    """Have Triton name the assembler that it will use, as Inductor's processes do.

    Torch brings an assembler, and names it in the environment before it compiles its first
    kernel. A Triton that has compiled others before goes on to say that it uses its own, so its
    keys are others than those of Inductor's processes: what these have compiled is not found, and
    all choices of max-autotune are compiled again here, one after the other. Of an 8B layer at 64
    tokens that took 21 of 25 seconds per matrix product (H200, torch 2.11). Ends when Triton does
    not keep the answer, or torch names its assembler at import.
    """
    if not _triton.has_triton():
        return
    before = os.environ.get("TRITON_PTXAS_PATH")
    compile_tasks._set_triton_ptxas_path()
    if os.environ.get("TRITON_PTXAS_PATH") != before:
        _forget_assembler()


def _forget_assembler() -> None:
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    compiler.get_ptxas_version.cache_clear()
    _triton.triton_hash_with_backend.cache_clear()


def call_before_traces(backend: Callable[..., Any], function: Callable[..., None]) -> None:
    """Call `function(**keywords)` when Dynamo begins a trace for `backend`, until somebody resets
    Dynamo.

    Args:
        function: gets the keywords that `torch.compile` would hand to the backend.
    """

    def on_start(given: dynamo_callback.CallbackArgs) -> None:
        if given.callback_trigger is not dynamo_callback.CallbackTrigger.DYNAMO:
            return
        # Dynamo does not say for whom it traces; the wrapper that catches its errors called it.
        for caller in callers_of(CatchErrorsWrapper.__call__):
            scope = innermost_backend(caller)
            if isinstance(scope, torch._TorchCompileWrapper) and scope.compiler_fn is backend:
                function(**scope.kwargs)
            return

    dynamo_callback.callback_handler.register_start_callback(on_start)
