"""The backend that Dynamo calls: split, identify, compile, hand over to a runtime.

In:  a GraphModule and its example inputs, during a trace.
Out: a function of the graph's arguments.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piecewise_backend import _torch
from piecewise_backend.compiled import CompiledGraph, compile_graph
from piecewise_backend.compiling import Compiling
from piecewise_backend.config import Config
from piecewise_backend.counters import CompilationCounter, compilation_counter
from piecewise_backend.dump import GraphDump
from piecewise_backend.errors import ConfigError, ContractError
from piecewise_backend.graphs import collector_paused
from piecewise_backend.job_process import is_worker
from piecewise_backend.passes import (
    PassList,
    PassRecord,
    passes_for,
    warn_if_fusing_without_noops,
)
from piecewise_backend.past_dynamo import send_past_dynamo
from piecewise_backend.registry import SplitOps
from piecewise_backend.runtime import Runtime
from piecewise_backend.session import Session
from piecewise_backend.splitting import split_graph
from piecewise_backend.steps import SplitGraph
from piecewise_backend.uncut import leave_uncut

log = logging.getLogger(__name__)


def piecewise(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph piece by piece: `torch.compile(model, backend="piecewise")`.

    Args:
        gm: Dynamo's graph. Not changed, so the function may be called again with it.
        example_inputs: its arguments at the trace.
        options: see `Config`.
        mode: a `torch.compile` mode string, see `Config.from_options`.

    Raises:
        ConfigError: an unknown option or value, or a splitting op that does not exist.
        SplitError: the graph cannot be cut, or spans devices.
        ContractError: gradients are required, or the model is sealed.
    """
    config = Config.from_options(options, mode)
    if config.level < 2:
        return gm.forward
    session = Session.of(_torch.calling_scope())
    _refuse_sealed(session, gm)
    if session.on_graph is not None:
        session.on_graph(gm)
    runtime = make_runtime(gm, example_inputs, session, config)
    runtime.counters.add(num_graphs_seen=1)
    module = _torch.calling_module() if config.skip_guards else None

    def on_rewritten(rewritten: _torch.Rewritten) -> None:
        runtime.on_rewritten(rewritten)
        if module is not None:
            send_past_dynamo(module, session, session)

    _torch.when_rewritten(on_rewritten)
    return runtime.call


def make_runtime(
    gm: fx.GraphModule, example_inputs: Sequence[Any], session: Session, config: Config
) -> Runtime:
    """What serves the calls of a graph, which Dynamo has traced here or elsewhere.

    Raises:
        SplitError: the graph cannot be cut, or spans devices.
        ConfigError: a splitting op that does not exist, or graphs that its device has not.
        ContractError: gradients are required, or this process compiles for another one.
    """
    _refuse_in_worker()
    _refuse_gradients(gm, example_inputs)
    _refuse_cuda_graphs_elsewhere(config, example_inputs)
    counters = CompilationCounter(parent=compilation_counter)
    dump = GraphDump(config.dump_dir)
    passes = Passes.of(config, example_inputs)
    gm, graph_passes = passes.rewrite_whole_graph(gm, dump)
    split, uncut = passes.split(gm, config)
    counters.add(
        num_piecewise_graphs_seen=len(split.steps),
        num_piecewise_capturable_graphs_seen=len(split.pieces),
    )
    compiling = Compiling.of(config, passes.piece, example_inputs)
    compiler = compiling.compiler(counters, dump)
    # Compiling makes many objects and few cycles: looking for them only takes time.
    with collector_paused(collects_first=False):
        compiled = compile_graph(split, example_inputs, compiler, graph_passes, uncut)
    passes.require_matches(compiled)
    dump.write_graph(split, compiled.instances)
    log.info(
        "graph of %d steps: %d pieces, %d distinct",
        len(split.steps),
        len(split.pieces),
        len(compiled.versions),
    )
    runtime = Runtime(compiled, config, session, counters, dump, example_inputs)
    runtime.background = compiling.in_background(compiled.token_dim.hints(example_inputs))
    session.add(runtime)
    return runtime


# Dynamo calls it from `torch._dynamo.reset()`.
piecewise.reset = Session.reset_all  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, slots=True)
class Passes:
    """The passes of one trace, by stage."""

    graph: PassList
    piece: PassList

    @classmethod
    def of(cls, config: Config, example_inputs: Sequence[Any]) -> Passes:
        """Those that run under these options; none below level 3."""
        tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
        on_cuda, switches = any(tensor.is_cuda for tensor in tensors), dict(config.pass_config)
        chosen = passes_for(config.passes, switches, on_cuda=on_cuda) if config.level == 3 else ()
        # With the eager compiler pieces stay as traced: there is no graph of aten ops to change.
        lowered = chosen if config.compiler == "inductor" else ()
        warn_if_fusing_without_noops(lowered, switches)
        validate = config.validate_passes or config.dump_dir is not None
        return cls(
            PassList([item for item in chosen if item.stage == "graph"], validate=validate),
            PassList([item for item in lowered if item.stage == "piece"], validate=validate),
        )

    def rewrite_whole_graph(
        self, gm: fx.GraphModule, dump: GraphDump
    ) -> tuple[fx.GraphModule, tuple[PassRecord, ...]]:
        """Run the passes that come before the split, on a copy of the graph."""
        if not self.graph.passes:
            return gm, ()
        _torch.complete_examples(gm.graph)
        copied = fx.Graph()
        copied.output(copied.graph_copy(gm.graph, {}))
        rewritten = fx.GraphModule(gm, copied)
        records = self.graph.run(copied, "the whole graph", dump.pass_writer("graph"))
        self.graph.require_matches({"the whole graph": records})
        return rewritten, records

    def split(self, gm: fx.GraphModule, config: Config) -> tuple[SplitGraph, str]:
        """Cut where no pass has to see across, and what became of the wishes of passes."""
        ops, uncut = leave_uncut(SplitOps.resolve(config.splitting_ops), self.piece.passes)
        return split_graph(gm, ops), uncut

    def require_matches(self, compiled: CompiledGraph) -> None:
        """Every piece pass matched as often as it must; without compiled pieces it cannot say."""
        if any(versions.compiled for versions in compiled.versions):
            self.piece.require_matches(compiled.pass_records())


def _refuse_sealed(session: Session, gm: fx.GraphModule) -> None:
    if session.is_sealed:
        shapes = {
            _torch.source_name(node): tuple(example.shape)
            for node in gm.graph.find_nodes(op="placeholder")
            if isinstance(example := _torch.example_of(node), torch.Tensor)
            and not _torch.is_static_input(node)
        }
        raise ContractError(
            f"the model is sealed but this call would trace it again, with inputs {shapes}; "
            "warm up with such inputs and in the mode of this call (torch.no_grad or "
            "torch.inference_mode), or mark what varies with torch._dynamo.mark_dynamic"
        )


def _refuse_in_worker() -> None:
    """Processes that compile ahead would start such processes, without end."""
    if is_worker():
        raise ContractError(
            "a module with an op or pass of the model runs a compiled model as soon as it is "
            "imported, so that processes that compile or tune pieces would do so too; run it in a "
            "function that the program calls"
        )


def _refuse_cuda_graphs_elsewhere(config: Config, example_inputs: Sequence[Any]) -> None:
    if config.graph_impl != "cuda":
        return
    for value in example_inputs:
        if isinstance(value, torch.Tensor) and value.device.type != "cuda":
            raise ConfigError(
                f"graph_impl='cuda' but an input is on {value.device}; move the model and its "
                "inputs to a CUDA device, or use graph_impl='emulated'"
            )


def _refuse_gradients(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    if not torch.is_grad_enabled():
        return
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ContractError(
                f"{_torch.source_name(node)} requires gradients, but pieces are compiled for "
                "inference; call the model under torch.no_grad() or torch.inference_mode()"
            )
