"""The backend that Dynamo calls: split, identify, compile, hand over to a runtime.

In:  a GraphModule and its example inputs, during a trace.
Out: a function of the graph's arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piecewise_backend import _torch
from piecewise_backend.compiled import compile_graph
from piecewise_backend.compiler import EagerCompiler, InductorCompiler, PieceCompiler
from piecewise_backend.config import Config
from piecewise_backend.counters import CompilationCounter, compilation_counter
from piecewise_backend.dump import GraphDump
from piecewise_backend.errors import ConfigError, ContractError
from piecewise_backend.graphs import collector_paused
from piecewise_backend.past_dynamo import send_past_dynamo
from piecewise_backend.registry import SplitOps
from piecewise_backend.runtime import Runtime
from piecewise_backend.session import Session
from piecewise_backend.splitting import split_graph

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
    _refuse_gradients(gm, example_inputs)
    _refuse_cuda_graphs_elsewhere(config, example_inputs)
    counters = CompilationCounter(parent=compilation_counter)
    split = split_graph(gm, SplitOps.resolve(config.splitting_ops))
    counters.add(
        num_graphs_seen=1,
        num_piecewise_graphs_seen=len(split.steps),
        num_piecewise_capturable_graphs_seen=len(split.pieces),
    )
    dump = GraphDump(config.dump_dir)
    # Compiling makes many objects and few cycles: looking for them only takes time.
    with collector_paused(collects_first=False):
        compiled = compile_graph(split, example_inputs, _make_compiler(config, counters))
    dump.write_graph(split, compiled.instances)
    log.info(
        "graph of %d steps: %d pieces, %d distinct",
        len(split.steps),
        len(split.pieces),
        len(compiled.versions),
    )
    runtime = Runtime(compiled, config, session, counters, dump, example_inputs)
    session.add(runtime)
    module = _torch.calling_module() if config.skip_guards else None

    def on_rewritten(rewritten: _torch.Rewritten) -> None:
        runtime.on_rewritten(rewritten)
        if module is not None:
            send_past_dynamo(module, session, session)

    _torch.when_rewritten(on_rewritten)
    return runtime.call


# Dynamo calls it from `torch._dynamo.reset()`.
piecewise.reset = Session.reset_all  # type: ignore[attr-defined]


def _make_compiler(config: Config, counters: CompilationCounter) -> PieceCompiler:
    if config.compiler == "eager":
        return EagerCompiler()
    return InductorCompiler(dict(config.inductor_compile_config), counters)


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
