"""Compile one graph with Inductor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._inductor.compile_fx  # the compiler itself: seconds that belong to an import
from torch import fx
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor import ir
from torch._inductor.standalone_compile import AOTCompiledArtifact
from torch._inductor.virtualized import V
from torch._subclasses import fake_impls
from torch.utils import _pytree as pytree

from piecewise_backend._torch.assembler import agree_on_assembler
from piecewise_backend._torch.kernel_choices import kernels_made_anew, loaded_kernels
from piecewise_backend._torch.symbols import SizeEnv, one_trace_for_all_sizes

# One compilation at a time: two overlapping ones would restore what they patch in wrong order.
_compiling = threading.RLock()


@contextlib.contextmanager
def _views_for_every_size() -> Iterator[None]:
    """Inductor computes strides of views without asking whether a size is 1.

    Its lowering asks, though the strides for any other size serve 1 as well; each asking
    restricts the version to sizes of at least 2, and one token would need a second compile.
    Ends when `torch._inductor.ir.View` passes size_oblivious=True for backed sizes too.
    """
    original = fake_impls._compute_stride

    def compute(*args: Any, **kwargs: Any) -> Any:
        stride = original(*args, **(kwargs | {"size_oblivious": True}))
        return original(*args, **kwargs) if stride is None else stride

    fake_impls._compute_stride = compute
    try:
        yield
    finally:
        fake_impls._compute_stride = original


@contextlib.contextmanager
def _reads_before_writes() -> Iterator[None]:
    """What the program read from a tensor before an op wrote it is computed before the op.

    Inductor computes element-wise nodes when somebody needs them. It means to compute those that
    read a buffer before an op writes the buffer, but enters the op first and them behind it, so
    that they read what was written: wrong numbers for `y = out * 2; op_(y, out); return y + out`.
    Ends when `torch._inductor.ir.FallbackKernel` marks what it writes before it is registered.
    """
    original = ir.FallbackKernel.create

    def create(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        schema = getattr(kernel, "_schema", None)
        if schema is not None and schema.is_mutable:
            for value in _written(schema, args, kwargs):
                value.realize()
                V.graph.mark_buffer_mutated(value.get_name())
        return original(kernel, *args, **kwargs)

    ir.FallbackKernel.create = create  # type: ignore[method-assign]
    try:
        yield
    finally:
        ir.FallbackKernel.create = original  # type: ignore[method-assign]


def _written(schema: torch.FunctionSchema, args: Sequence[Any], kwargs: Any) -> list[ir.TensorBox]:
    """The tensors among the arguments of a call that it writes."""
    given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    written = [given.get(a.name) for a in schema.arguments if a.is_write]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, ir.TensorBox)]


def compile_with_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    env: SizeEnv,
    patches: Mapping[str, object],
    *,
    anew: bool = False,
) -> Callable[..., Any]:
    """Compile a piece with Inductor; `inputs` are fakes and SymInts of `env`.

    Returns a callable that takes the piece's inputs and returns a sequence of tensors.
    `aot=True` gives an artifact that holds all it needs.

    Args:
        anew: share no kernel with what was compiled before; see `kernels_made_anew`. Inductor's
            caches do not serve it if a pass among `patches` has another key.
    """
    agree_on_assembler()
    with (
        _compiling,
        kernels_made_anew() if anew else contextlib.nullcontext(),
        one_trace_for_all_sizes(),
        _views_for_every_size(),
        _reads_before_writes(),
        tracing(TracingContext(env.fake_mode)),
    ):
        return torch._inductor.standalone_compile(
            module,
            list(inputs),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": dict(patches)},
            aot=True,
        )


def artifact_bytes(compiled: Callable[..., Any]) -> bytes | None:
    """What `compile_with_inductor` returned, for another process.

    None: torch cannot store it. It stores what its own caches take: nothing where those are
    switched off, and no graph with a function that it does not know.
    """
    assert isinstance(compiled, AOTCompiledArtifact)
    if compiled.inner_fn.compiled_fn.serialize is None:
        return None
    with _compiling, _no_triton_kernels():
        return compiled.serialize()


def load_artifact(data: bytes, *, is_settled: bool = False) -> Callable[..., Any]:
    """The opposite of `artifact_bytes`: runs what is in the data, and compiles nothing.

    Args:
        is_settled: its kernels are as they are to be, so that they do not tune themselves.
    """
    with _compiling, _no_triton_kernels(), loaded_kernels(are_settled=is_settled):
        return AOTCompiledArtifact.deserialize(data)


def arity(compiled: Callable[..., Any]) -> tuple[int, int]:
    """How many inputs and outputs has what `load_artifact` returned?"""
    assert isinstance(compiled, AOTCompiledArtifact)
    known = compiled.inner_fn.compiled_fn.serialize().runtime_metadata
    return len(known.input_info), len(known.output_info)


@contextlib.contextmanager
def _no_triton_kernels() -> Iterator[None]:
    """An artifact is stored and loaded without the process's table of Triton kernels.

    torch stores the table of all kernels of the process with every artifact, by number, and
    loading puts them in the places of those that this process has under the numbers. Code that
    Inductor made has its kernels in itself. Ends when torch stores what the artifact uses only.
    """
    table: Any = kernel_side_table
    kept = table.id_to_kernel, table.kernel_to_id, table.constant_args
    table.reset_table()
    try:
        yield
    finally:
        table.id_to_kernel, table.kernel_to_id, table.constant_args = kept


def inductor_options() -> list[str]:
    """The names that `inductor_compile_config` may hold."""
    return list(torch._inductor.list_options())


def mode_patches(mode: str) -> dict[str, object]:
    """The Inductor options that a `torch.compile` mode string stands for."""
    return dict(torch._inductor.list_mode_options(mode))
