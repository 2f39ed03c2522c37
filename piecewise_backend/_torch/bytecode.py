"""The code that Dynamo writes in place of a traced function."""

from __future__ import annotations

import dataclasses
import dis
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import convert_frame, guards
from torch._dynamo import eval_frame as _eval_frame
from torch._dynamo.bytecode_transformation import (
    Instruction,
    add_push_null,
    create_call_function,
    create_instruction,
    transform_code_object,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.nn_module import NNModuleVariable, UnspecializedNNModuleVariable
from torch._guards import TracingContext

from piecewise_backend._torch.reads import Read, reads_of, source_text, traced_code
from piecewise_backend._torch.seen import seen_in


@dataclasses.dataclass(frozen=True, slots=True)
class Rewritten:
    """What Dynamo made of one function."""

    traced: weakref.ref[CodeType]
    """The user's function, to which Dynamo ties what it wrote."""
    written: weakref.ref[CodeType]
    """What Dynamo wrote. It clears away the globals that this code uses, the graph among them,
    when the code is gone: so neither may be kept."""
    shape_guards: tuple[tuple[Any, str], ...]
    """What the trace assumed about sizes: sympy conditions over size symbols, each with the
    user's source line that asked."""
    assigned: tuple[str, ...]
    """Module attributes that the function assigns, as the user's program names them."""
    aliases: tuple[tuple[str, str], ...]
    """Names of sources that were one object: the graph has it once."""
    looked_at: tuple[str, ...]
    """Names of all sources of which the trace took something."""
    reads: tuple[Read, ...]
    """What the trace looked at, and how."""
    seen: tuple[str, ...]
    """Names of what it came by, guarded or not: as `seen_in` tells them."""
    inlined: tuple[CodeType, ...]
    """The functions that it went through."""

    @property
    def original(self) -> CodeType | None:
        """The code of the user's function."""
        return self.traced()

    @property
    def code(self) -> CodeType | None:
        """Fetches the graph's inputs, calls the graph, and builds what the function returns;
        None once Dynamo has forgotten the trace."""
        return self.written()


_handles: dict[CodeType, Any] = {}


def when_rewritten(function: Callable[[Rewritten], None]) -> None:
    """Call `function` once Dynamo has rewritten the frame it is tracing now.

    The hook is Dynamo's, for all frames; this one removes itself. Nothing happens if the
    backend was not called by Dynamo. Ends when a backend is handed the rewritten code.
    """
    if TracingContext.try_get() is None:
        return
    output = InstructionTranslator.current_tx().output
    shape_env, assigned = output.shape_env, _assigned_attributes(output.side_effects)
    context = TracingContext.get()
    found = list(context.guards_context.dynamo_guards)
    aliases = tuple(_aliases(found))
    looked_at = tuple(dict.fromkeys(source_text(guard.originating_source) for guard in found))
    original = output.root_tx.f_code
    if stale := _handles.pop(original, None):  # of a trace that failed after the backend
        stale.remove()

    def hook(code: CodeType, new_code: CodeType) -> None:
        if code is original:
            _handles.pop(original).remove()
            conditions = tuple(
                (shape_env.replace(guard.expr), _location(guard)) for guard in shape_env.guards
            )
            function(
                Rewritten(
                    traced=weakref.ref(code),
                    written=weakref.ref(new_code),
                    shape_guards=conditions,
                    assigned=assigned,
                    aliases=aliases,
                    looked_at=looked_at,
                    reads=reads_of(context.guards_context.dynamo_guards),
                    seen=seen_in(output),
                    inlined=traced_code(context),
                )
            )

    _handles[original] = convert_frame.register_bytecode_hook(hook)


def _location(guard: Any) -> str:
    return str(guard.sloc.maybe_user_loc or guard.sloc.framework_loc or "")


def _aliases(found: Any) -> Iterator[tuple[str, str]]:
    """From the guards which say that two sources are one object."""
    for guard in found:
        function = guard.create_fn
        if getattr(function, "func", None) is guards.GuardBuilder.DUPLICATE_INPUT:
            other = function.keywords["source_b"]
            yield source_text(guard.originating_source), source_text(other)


def _assigned_attributes(side_effects: Any) -> tuple[str, ...]:
    """From Dynamo's own record of side effects: exact, where names in the code are not."""
    modules = (NNModuleVariable, UnspecializedNNModuleVariable)
    return tuple(
        f"{source_text(variable.source)}.{name}"
        for variable, attributes in side_effects.store_attr_mutations.items()
        if isinstance(variable, modules) and variable.source is not None
        for name in attributes
    )


def replace_graph_call(
    code: CodeType, call: Callable[..., Any], own_names: Sequence[str], namespace: dict[str, Any]
) -> CodeType:
    """The same code, but instead of fetching the graph's inputs and calling it, it calls
    `call` with the function's own parameters, in order.

    Dynamo's code reads every parameter of a model through its modules, one by one; what that
    costs is what benchmarks/call_overhead.py shows for dropped guards.

    Args:
        code: what Dynamo wrote.
        call: returns what the graph returns.
        own_names: the global names of the user's function. Others are Dynamo's, which it
            clears away one day; their values become part of the code.
        namespace: the globals of the user's function.
    """

    def transform(instructions: list[Instruction], options: dict[str, Any]) -> None:
        start = next(i for i, inst in enumerate(instructions) if _loads_graph(inst))
        end = _end_of_call(instructions, start)
        temporaries = {i.argval for i in instructions[start:end] if i.opname == "STORE_FAST"}
        rest = [
            instruction
            for instruction in instructions[end + 1 :]
            if instruction.opname != "DELETE_FAST" or instruction.argval not in temporaries
        ]
        used = {i.argval for i in rest if i.opname.startswith("LOAD_FAST")}
        assert not temporaries & used, "Dynamo reads a temporary of the call after the call"
        names = parameter_names(code)
        instructions[start:] = [
            *add_push_null(create_instruction("LOAD_CONST", argval=call)),
            *(_load(name, options) for name in names),
            *create_call_function(len(names), push_null=False),
            *rest,
        ]
        for position in reversed(range(len(instructions))):
            instruction = instructions[position]
            name = str(instruction.argval)
            if instruction.opname == "LOAD_GLOBAL" and name not in own_names and name in namespace:
                instructions[position : position + 1] = _load_value(instruction, namespace[name])
        # A frame has room for every local variable, and Dynamo's code has one per parameter.
        still_used = {i.argval for i in instructions if "_FAST" in i.opname}
        locals_ = (name for name in options["co_varnames"][len(names) :] if name in still_used)
        options["co_varnames"] = (*names, *locals_)

    # A copy, because torch keeps the last codes that it took apart.
    return transform_code_object(code.replace(), transform)[0]


def parameter_names(code: CodeType) -> tuple[str, ...]:
    """The parameters of a function, `*args` and `**kwargs` last."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # CO_VARARGS, CO_VARKEYWORDS
    return code.co_varnames[:count]


def global_names(code: CodeType) -> tuple[str, ...]:
    """The globals that code looks up, but for the graph that it calls."""
    loads = (i for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    names = (str(instruction.argval) for instruction in loads)
    return tuple(dict.fromkeys(name for name in names if not name.startswith("__compiled_fn")))


def _loads_graph(instruction: Instruction) -> bool:
    return instruction.opname == "LOAD_GLOBAL" and str(instruction.argval).startswith(
        "__compiled_fn"
    )


def _end_of_call(instructions: list[Instruction], start: int) -> int:
    """The call that consumes what is loaded from `start` on: one value is left of all."""
    depth = 0
    for position in range(start, len(instructions)):
        instruction = instructions[position]
        depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if instruction.opname == "CALL" and depth == 1:
            return position
    raise AssertionError("Dynamo's code never calls its graph")


def _load_value(instruction: Instruction, value: Any) -> list[Instruction]:
    load = create_instruction("LOAD_CONST", argval=value)
    is_to_be_called = bool(instruction.arg and instruction.arg & 1)  # pushes a NULL as well
    return add_push_null(load) if is_to_be_called else [load]


def _load(name: str, options: dict[str, Any]) -> Instruction:
    is_cell = name in options["co_cellvars"]
    return create_instruction("LOAD_DEREF" if is_cell else "LOAD_FAST", argval=name)


def source_namespace() -> dict[str, Any]:
    """The helpers that Dynamo's names of sources call."""
    return dict(guards._get_closure_vars())


def stance_is_default() -> bool:
    """`torch.compiler.set_stance` asks for nothing. There is no public getter."""
    return _eval_frame._stance.stance == "default"


def original_is_wanted() -> bool:
    """`torch.compiler.set_stance("force_eager")` is in effect, or an export looks at the model.

    There is no public getter of the stance. `torch.compiler.is_compiling` has the flag, and
    calls something before. The flag is of the process, and the modes that look at calls are of
    the thread: another one that compiles something does not switch this one off.
    """
    if _eval_frame._stance.stance == "force_eager":
        return True
    return torch.compiler._is_compiling_flag and torch._C._len_torch_dispatch_stack() > 0


def forget_traces(code: CodeType) -> None:
    """Drop what Dynamo wrote for a function; there is no public way to drop one of its traces."""
    reset_code(code)


def violated_guard(rewritten: Rewritten, frame: dict[str, Any]) -> str | None:
    """The first guard of Dynamo's that a call breaks, with the user's line, or None.

    Args:
        rewritten: the trace.
        frame: the arguments of the call and the closure variables, by name.
    """
    traces = _debug_get_cache_entry_list(rewritten.original) if rewritten.original else []
    for entry in traces:
        if entry.code is rewritten.code:
            found = entry.guard_manager.check_verbose(frame)
            return None if found.result else "; ".join(map(str, found.verbose_code_parts))
    return None
