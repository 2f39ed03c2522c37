"""What one trace of Dynamo read, as its guards record it, and what may change what it means."""

from __future__ import annotations

import dataclasses
from types import CodeType, ModuleType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import symbolic_convert
from torch._guards import TracingContext
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

IMPORT_ALIAS = "__import_"
"""How the names begin under which Dynamo puts modules into the globals of the function that it
traces, for good. What else it puts there goes with the trace."""

BUILTINS_ALIAS = "__builtins_dict__"
"""The same for the dictionary of builtins, which goes with the trace."""

UNNAMED_SCOPE = "___unnamed_scope"
"""The same for the globals of a function that are those of no module in `sys.modules`; the rest of
the name is an address."""

_OF_PROCESS = {
    *("SHAPE_ENV", "GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "DEFAULT_DEVICE"),
    *("TORCH_FUNCTION_STATE", "AUTOGRAD_SAVED_TENSORS_HOOKS"),
}
"""Guards of no source: what they check is in `process_state`, and `Rewritten.shape_guards`."""

_PLACES = {"debug_dir_root", "base_dir"}
"""Options of Dynamo's that say where something is."""

_DETAILS = ("attr", "key")

SEEN = "SEEN"
"""The kind of a look that no guard of Dynamo's records. See `seen_in`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One guard: a kind of look that the trace took at something."""

    kind: str
    """The name of Dynamo's guard."""
    source: str
    """What was looked at, as the user's program names it; empty for the state of the process."""
    detail: Any = None
    """The attribute, the key or the other source that the guard is about."""


def reads_of(guards: Any) -> tuple[Read, ...]:
    """From Dynamo's own record, each once and in order. There is no public list."""
    found: dict[tuple[str, str, str], Read] = {}
    for guard in guards:
        source, detail = source_text(guard.originating_source), _detail(guard)
        kind = guard.create_fn_name()
        if not source and kind in _OF_PROCESS:
            continue
        found.setdefault((kind, source, repr(detail)), Read(kind, source, detail))
    return tuple(found.values())


def _detail(guard: Any) -> Any:
    given: dict[str, Any] = getattr(guard.create_fn, "keywords", None) or {}
    if "source_b" in given:
        return source_text(given["source_b"])
    return next((given[name] for name in _DETAILS if name in given), None)


def source_text(source: Any) -> str:
    """How Dynamo names a source; a method before torch 2.13."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def module_of_dynamo(name: str) -> ModuleType:
    """The module that Dynamo puts into globals: the first import that it has seen, for good.

    There is no public way to ask; drop when torch looks into `sys.modules` anew.
    """
    return symbolic_convert._import_module(name)


def traced_code(context: TracingContext) -> tuple[CodeType, ...]:
    """The functions that the trace went through to their ends."""
    return tuple(dict.fromkeys(context.traced_code))


def is_taken_as_constant(function: object) -> bool:
    """`torch.compiler.assume_constant_result`: what it returned is nowhere guarded."""
    return hasattr(function, "_dynamo_marked_constant")


def marked_dims(tensor: torch.Tensor) -> dict[str, list[int]]:
    """What `mark_dynamic` and its like noted on a tensor. They have no public getters."""
    kinds = ("dynamic", "weak_dynamic", "unbacked", "strict_unbacked", "static")
    found = {kind: getattr(tensor, f"_dynamo_{kind}_indices", ()) for kind in kinds}
    return {kind: sorted(dims) for kind, dims in found.items() if dims}


def process_state() -> dict[str, Any] | str:
    """What else a trace takes from the process, or what is in effect that cannot be compared."""
    if _get_current_function_mode_stack() or _get_current_dispatch_mode_stack():
        return "a mode of torch functions or of dispatch is active"
    if peek_interpreter_stack() is not None:
        return "a functorch transform is active"
    if torch.nn.modules.module._has_any_global_hook():
        return "hooks are registered for all modules"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return "hooks for saved tensors are active"
    ranks = None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = [torch.distributed.get_rank(), torch.distributed.get_world_size()]
    options: Any = dynamo_config
    return {
        "default device": str(torch.get_default_device()),
        "rank": ranks,
        "devices": [torch.cuda.is_available(), torch.cuda.device_count()],
        "anomaly": torch.is_anomaly_enabled(),
        "dynamo": {
            name: value
            for name, value in sorted(options.save_config_portable().items())
            if name not in _PLACES
        },
    }
