"""What Dynamo knows about a trace and does not tell a backend."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import fx
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.exc import ShortenTraceback, Unsupported, UserError
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

KNOWN_SOURCE = "piecewise_source"
"""Under which a node of a graph that was not traced here keeps what `source_name` and
`is_static_input` say of it."""

GUARDED = "_piecewise_guarded"
"""Where a function that stands in for a compiled one keeps it."""

TRACE_ERRORS: tuple[type[Exception], ...] = (Unsupported, UserError, ConstraintViolationError)
"""What Dynamo raises for code that it cannot trace as asked."""


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
    wrapper = torch._TorchCompileWrapper.__call__
    return next((owner for owner in _callers_of(wrapper)), None)


def scope_of(compiled: object) -> CompileScope | None:
    """The same object as `calling_scope`, found from what `torch.compile` returned.

    Takes an OptimizedModule, a compiled function, or a module on which `.compile()` was
    called; None for anything else.
    """
    if isinstance(compiled, OptimizedModule):
        contexts: list[object] = [compiled.dynamo_ctx]
    else:
        function = getattr(compiled, "_compiled_call_impl", None) or compiled
        function = getattr(function, GUARDED, function)
        contexts = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for context in contexts:
        callback = getattr(context, "callback", None)
        if callable(callback):
            scope = innermost_backend(callback)
            if isinstance(scope, torch._TorchCompileWrapper):
                return scope
    return None


def scopes_with_traces(compiled: object, scope: CompileScope) -> list[CompileScope]:
    """Other `torch.compile` calls whose traces serve `compiled`.

    Dynamo lets equal calls (same backend, same options) share the traces of one function, or
    of all modules of a class; a trace knows only the call that made it. Ends when a backend is
    told for whom it is called.
    """
    function = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    if isinstance(compiled, OptimizedModule):
        function = compiled._orig_mod
    if isinstance(function, torch.nn.Module):
        function = function.forward
    code = getattr(function, "__code__", None)
    entries = _debug_get_cache_entry_list(code) if code is not None else []
    backends: list[Any] = [entry.backend for entry in entries]
    return [backend for backend in backends if backend == scope]


def calling_module() -> OptimizedModule | None:
    """The module that `torch.compile` returned and whose call is being traced, if it is one."""
    scope = calling_scope()
    for owner in _callers_of(OptimizedModule.__call__):
        if isinstance(owner, OptimizedModule) and scope_of(owner) is scope:
            return owner
    return None


def _callers_of(method: Any) -> Iterator[Any]:
    """The `self` of every call of a method that is under way in this thread, innermost first.

    Only those frames are looked into: to ask a frame for its variables makes a copy of them,
    which would keep the user's alive until his function returns.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is method.__code__:
            yield frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]


def original_of(compiled: object) -> torch.nn.Module | None:
    """The module behind `torch.compile(module)` or `module.compile()`."""
    if isinstance(compiled, OptimizedModule):
        return compiled._orig_mod
    return compiled if isinstance(compiled, torch.nn.Module) else None


class ExampleLater:
    """Stands for fake tensors until somebody asks for them: to make one takes a millisecond."""

    def __init__(self, make: Callable[[], object], *, is_tensor: bool) -> None:
        """Calls `make` once, if at all; what it makes is a tensor, or has several."""
        self._make = make
        self.is_tensor = is_tensor

    @functools.cached_property
    def made(self) -> object:
        """The example."""
        return self._make()


def example_of(node: fx.Node) -> object:
    """The fake tensor or symbolic number that Dynamo recorded for a node, or None."""
    found = node.meta.get("example_value")
    return found.made if isinstance(found, ExampleLater) else found


def example_if_made(node: fx.Node) -> object:
    """The same, None for tensors that nobody has asked for."""
    found = node.meta.get("example_value")
    return None if isinstance(found, ExampleLater) else found


def has_tensor_example(node: fx.Node) -> bool:
    """What `example_of` returns is a tensor."""
    found = node.meta.get("example_value")
    return found.is_tensor if isinstance(found, ExampleLater) else isinstance(found, torch.Tensor)


def complete_examples(graph: fx.Graph) -> None:
    """Put fake tensors where they are looked for by others than this package."""
    for node in graph.nodes:
        if isinstance(node.meta.get("example_value"), ExampleLater):
            node.meta["example_value"] = example_of(node)


def source_name(node: fx.Node) -> str:
    """How the user's program names a graph input: `L['self'].weight`, else the node's name.

    Only there while Dynamo calls the backend; `name` is a method before torch 2.13.
    """
    if KNOWN_SOURCE in node.meta:
        return str(node.meta[KNOWN_SOURCE][0])
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    return str(name() if callable(name) else name) if name is not None else node.name


def is_static_input(node: fx.Node) -> bool:
    """This input is module state, a global or a closure variable, not an argument of the call.

    Such tensors are expected to stay where they are. Dynamo marks the state of modules.
    """
    if KNOWN_SOURCE in node.meta:
        return bool(node.meta[KNOWN_SOURCE][1])
    if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") is not None:
        return True
    source: Any = getattr(node.meta.get("grapharg"), "source", None)
    while hasattr(source, "base"):
        source = source.base
    return source is not None and not getattr(source, "is_input", False)
