"""The only door to private torch API, and the only place that knows of torch versions.

Each entry says why it exists and what would end it. Run on torch 2.11, 2.13 and 2.14.
Knows nothing of this package: it imports torch and nothing else.
"""

from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from piecewise_backend._torch.bytecode import (
    Rewritten,
    forget_traces,
    original_is_wanted,
    parameter_names,
    replace_graph_call,
    source_namespace,
    stance_is_default,
    violated_guard,
    when_rewritten,
)
from piecewise_backend._torch.dynamo import (
    GUARDED,
    TRACE_ERRORS,
    CompileScope,
    UnwrappedByDynamo,
    calling_module,
    calling_scope,
    example_of,
    is_static_input,
    original_of,
    scope_of,
    scopes_with_traces,
    source_name,
)
from piecewise_backend._torch.inductor import (
    compile_with_inductor,
    inductor_options,
    mode_patches,
)
from piecewise_backend._torch.memory import (
    borrowed_storage,
    bound_replay,
    leave_failed_capture,
    ordinary_tensors,
    raw_stream,
    same_addresses,
    same_layout,
    weak_view,
)
from piecewise_backend._torch.operators import kernel_below_dispatcher, operator_names
from piecewise_backend._torch.symbols import (
    SizeEnv,
    emit_expr,
    expr_source,
    hint_of,
    number_of,
    one_trace_for_all_sizes,
    size_expr,
    tracing_once,
)
from piecewise_backend._torch.tensors import TensorCheck

__all__ = [
    "GUARDED",
    "TRACE_ERRORS",
    "CompileScope",
    "CustomOpDef",
    "FakeTensorMode",
    "Rewritten",
    "SizeEnv",
    "StorageWeakRef",
    "TensorCheck",
    "UnwrappedByDynamo",
    "borrowed_storage",
    "bound_replay",
    "calling_module",
    "calling_scope",
    "compile_with_inductor",
    "emit_expr",
    "example_of",
    "expr_source",
    "forget_traces",
    "hint_of",
    "inductor_options",
    "is_static_input",
    "kernel_below_dispatcher",
    "leave_failed_capture",
    "mode_patches",
    "number_of",
    "one_trace_for_all_sizes",
    "operator_names",
    "ordinary_tensors",
    "original_is_wanted",
    "original_of",
    "parameter_names",
    "raw_stream",
    "replace_graph_call",
    "same_addresses",
    "same_layout",
    "scope_of",
    "scopes_with_traces",
    "size_expr",
    "source_name",
    "source_namespace",
    "stance_is_default",
    "tracing_once",
    "violated_guard",
    "weak_view",
    "when_rewritten",
]
