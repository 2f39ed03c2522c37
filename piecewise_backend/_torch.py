"""The only door to private torch API, and the only place that knows of torch versions.

Each entry says why it exists and what would end it. Run on torch 2.11, 2.13 and 2.14.
Knows nothing of this package: it imports torch and nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import sympy
import torch
import torch._inductor
import torch.fx.experimental._config as _symbolic_config
from torch import Tensor, fx
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._library.custom_ops import OPDEFS
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, guard_scalar
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = ["CompileScope", "FakeTensorMode", "StorageWeakRef"]


def operator_names() -> list[str]:
    """Every operator torch knows at this moment, as "ns::op". There is no public list."""
    return sorted({schema.name for schema in torch._C._jit_get_all_schemas()})


class UnwrappedByDynamo(ShortenTraceback):
    """An exception that Dynamo hands to the caller as it is.

    Anything else raised in a backend arrives as `BackendCompilerFailed`, and
    `except ConfigError` would never match. Ends when Dynamo keeps the original type.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class CompileScope(Protocol):
    """What one call of `torch.compile` made: torch's wrapper around our backend."""

    kwargs: dict[str, Any]


def calling_scope() -> CompileScope | None:
    """The `torch.compile` call on whose behalf the running backend was called.

    Dynamo passes a backend no handle of it; its wrapper is one of our callers. None when the
    backend was called directly. Ends when the backend protocol carries a compile id.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch._TorchCompileWrapper):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def scope_of(compiled: object) -> CompileScope | None:
    """The same object as `calling_scope`, found from what `torch.compile` returned.

    Takes an OptimizedModule, a compiled function, or a module on which `.compile()` was
    called; None for anything else.
    """
    if isinstance(compiled, OptimizedModule):
        contexts: list[object] = [compiled.dynamo_ctx]
    else:
        function = getattr(compiled, "_compiled_call_impl", None) or compiled
        contexts = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for context in contexts:
        callback = getattr(context, "callback", None)
        if callable(callback):
            scope = innermost_backend(callback)
            if isinstance(scope, torch._TorchCompileWrapper):
                return scope
    return None


def one_trace_for_all_sizes() -> contextlib.AbstractContextManager[object]:
    """Dynamo's sizes stay symbolic at 0 and 1 too, so that one trace serves every count.

    `backed_size_oblivious` has no public spelling that covers sizes of user inputs.
    """
    return _symbolic_config.patch(backed_size_oblivious=True)


def example_of(node: fx.Node) -> object:
    """The fake tensor or symbolic number that Dynamo recorded for a node, or None."""
    return node.meta.get("example_value")


def source_name(node: fx.Node) -> str:
    """How the user's program names a graph input: `L['self'].weight`, else the node's name.

    Only there while Dynamo calls the backend; `name` is a method before torch 2.13.
    """
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    return str(name() if callable(name) else name) if name is not None else node.name


def is_static_input(node: fx.Node) -> bool:
    """Dynamo promises that this input keeps its address (a parameter, buffer or module state)."""
    marked = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return marked is not None or "L['self']" in source_name(node)


def number_of(value: object) -> sympy.Expr | int | float | bool:
    """A python or symbolic number as a plain number, or as an expression over size symbols.

    A symbolic float that does not come from sizes is pinned to its value by a guard: Dynamo
    made it symbolic (`dynamic=True`) though it is a constant of the model, such as an epsilon.
    """
    if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):
        expr = value.node.expr
        if any(str(s).startswith("zf") for s in expr.free_symbols):
            return guard_scalar(value)
        if expr.free_symbols:
            return expr
        return value.node.pytype(expr)  # type: ignore[no-any-return]
    assert isinstance(value, int | float)
    return value


def hint_of(value: int | torch.SymInt) -> int:
    """The number itself, or the example value of a symbolic one."""
    return value if isinstance(value, int) else int(value.node.hint)


def size_expr(value: int | torch.SymInt) -> sympy.Expr:
    """A dimension or stride as a sympy expression."""
    return sympy.sympify(number_of(value))


def expr_source(expr: sympy.Expr, names: Mapping[sympy.Symbol, str]) -> str:
    """Python source of a size expression, with each symbol under the given name."""
    renamed = expr.xreplace({s: sympy.Symbol(n, integer=True) for s, n in names.items()})
    return str(PythonPrinter().doprint(renamed))


def emit_expr(expr: sympy.Expr, symbols: Mapping[sympy.Symbol, fx.Proxy]) -> Any:
    """Write a size expression as nodes of an FX graph; returns the proxy (or a number)."""
    return sympy_interp(PythonReferenceAnalysis, dict(symbols), expr)


def _conjuncts(code: str) -> list[str]:
    """Split a python expression at its outermost `and`s."""
    tree = ast.parse(code, mode="eval").body
    terms = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    return [ast.unparse(term) for term in terms]


class SizeEnv:
    """A shape environment of our own, in which a piece is compiled.

    Compiling in Dynamo's environment would turn what Inductor assumes about the token count
    into guards of the user's function (and lose it once guards are skipped). Here the
    assumptions stay with the piece: see `conditions`.
    """

    def __init__(self) -> None:
        # Not specialised on 0 and 1: a version compiled for many tokens serves those as well
        # unless Inductor says otherwise, and then it says so in `conditions`.
        self.shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.fake_mode = FakeTensorMode(shape_env=self.shape_env)
        self._symints: list[Any] = []

    def symbol(self, hint: int) -> sympy.Symbol:
        """A new size symbol whose example value is `hint`."""
        source = ConstantSource(f"size{len(self._symints)}")
        symbol = self.shape_env.create_symbol(
            hint, source, dynamic_dim=DimDynamic.DYNAMIC, positive=None if hint < 0 else True
        )
        self._symints.append(self.shape_env.create_symintnode(symbol, hint=hint, source=source))
        return symbol

    def symint(self, expr: sympy.Expr) -> int | torch.SymInt:
        """A SymInt of this environment for an expression over its symbols."""
        if not expr.free_symbols:
            return int(expr)
        return self.shape_env.create_symintnode(expr, hint=None)

    def conditions(self) -> tuple[str, ...]:
        """What was assumed so far about the symbols, one python condition each."""
        code = self.shape_env.produce_guards_expression(self._symints, ignore_static=False)
        if not code:
            return ()
        # `0 <= size` is the definition of a size, not an assumption.
        return tuple(part for part in _conjuncts(code) if not part.startswith("0 <= "))

    def holds(self, conditions: Sequence[str], sizes: Sequence[int]) -> str | None:
        """The first condition that the sizes (in order of creation) violate, or None."""
        for condition in conditions:
            if not self.shape_env.evaluate_guards_expression(condition, list(sizes)):
                return condition
        return None

    def assumed_at(self) -> str:
        """Where in the user's source the newest assumption was made, or an empty string."""
        return str(self.shape_env.guards[-1].sloc) if self.shape_env.guards else ""


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


def compile_with_inductor(
    module: fx.GraphModule,
    inputs: Sequence[object],
    env: SizeEnv,
    patches: Mapping[str, object],
) -> Callable[..., Any]:
    """Compile a piece with Inductor; `inputs` are fakes and SymInts of `env`.

    Returns a callable that takes the piece's inputs and returns a sequence of tensors.
    `aot=True` gives an artifact that holds all it needs.
    """
    with (
        one_trace_for_all_sizes(),
        _views_for_every_size(),
        tracing(TracingContext(env.fake_mode)),
    ):
        return torch._inductor.standalone_compile(
            module,
            list(inputs),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": dict(patches)},
            aot=True,
        )


def mode_patches(mode: str) -> dict[str, object]:
    """The Inductor options that a `torch.compile` mode string stands for."""
    return dict(torch._inductor.list_mode_options(mode))


def kernel_below_dispatcher(op: torch._ops.OpOverload, device: str) -> Callable[..., Any]:
    """The function that finally runs for `op` on a device type.

    A call through `torch.ops` costs 43 us where the kernel costs 22 (design section 6, H200
    host). Only ops made by `torch.library.custom_op` keep their function; others are called
    as they are. Ends when custom ops can be called without the Python dispatcher.
    """
    definition = OPDEFS.get(op._schema.name) if op._overloadname in ("", "default") else None
    if definition is None:
        return op
    functions = definition._backend_fns
    return functions.get(device) or functions.get(None) or op  # type: ignore[return-value]


def weak_view(tensor: Tensor) -> Tensor:
    """The same memory, without keeping it alive.

    Graph outputs stay readable as long as their pool exists, but must not stop the pool from
    reusing them in the next capture. torch has no public non-owning tensor.
    """
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        alias, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def borrowed_storage(memory: Tensor, num_bytes: int) -> torch.UntypedStorage:
    """A storage over the first bytes of `memory` that does not own them."""
    return torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), memory.device, num_bytes
    )


def _same_addresses_in_python(
    values: list[Any], addresses: list[int | None], indices: list[int]
) -> bool:
    return all(values[index].data_ptr() == addresses[index] for index in indices)


same_addresses: Callable[[list[Any], list[int | None], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _same_addresses_in_python
)
"""Does `values[i]` lie at `addresses[i]`, for these indices? In C++ where torch has CUDA."""


def raw_stream(device_index: int) -> int:
    """The current CUDA stream as a number; the public way costs a microsecond."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def bound_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """`graph.replay` without its Python wrapper, which does nothing we need."""
    return torch._C._CUDAGraph.replay.__get__(graph)  # type: ignore[no-any-return]


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Tensors made inside can be written both in and outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
