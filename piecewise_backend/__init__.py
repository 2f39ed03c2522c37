"""Piecewise compilation for torch.compile: cut at attention, compile and graph the rest.

`torch.compile(model, backend="piecewise")` needs no import of this package.
"""

from piecewise_backend.api import (
    adopt_tuned,
    evict,
    metrics,
    rebind,
    report,
    seal,
    static_inputs,
    switch_graphs,
    warmup,
)
from piecewise_backend.batch import BatchDescriptor, CUDAGraphMode, default_capture_sizes
from piecewise_backend.config import Config
from piecewise_backend.coordination import agree
from piecewise_backend.counters import CompilationCounter, compilation_counter
from piecewise_backend.current_batch import batch
from piecewise_backend.errors import (
    CaptureError,
    ConfigError,
    ContractError,
    PassError,
    PiecewiseError,
    SplitError,
)
from piecewise_backend.guard_free import Compiled, compile
from piecewise_backend.metrics import Metrics, prometheus_text
from piecewise_backend.modes import resolve_cudagraph_mode
from piecewise_backend.passes import PassRecord, Rewrite, register_pass, register_spelling
from piecewise_backend.registry import register_splitting_op
from piecewise_backend.report import Report
from piecewise_backend.splitting import split_graph

__all__ = [
    "BatchDescriptor",
    "CUDAGraphMode",
    "CaptureError",
    "CompilationCounter",
    "Compiled",
    "Config",
    "ConfigError",
    "ContractError",
    "Metrics",
    "PassError",
    "PassRecord",
    "PiecewiseError",
    "Report",
    "Rewrite",
    "SplitError",
    "adopt_tuned",
    "agree",
    "batch",
    "compilation_counter",
    "compile",
    "default_capture_sizes",
    "evict",
    "metrics",
    "prometheus_text",
    "rebind",
    "register_pass",
    "register_spelling",
    "register_splitting_op",
    "report",
    "resolve_cudagraph_mode",
    "seal",
    "split_graph",
    "static_inputs",
    "switch_graphs",
    "warmup",
]
