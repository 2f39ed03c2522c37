"""The same decode step in several ways.

In:  a model compiled with the piecewise backend and warmed up, and the inputs of a step.
Out: functions without arguments that run one step each.
Knows nothing of clocks.

The hand-written loop and the full graph are made from our own parts - the same captured graphs,
compiled pieces and attention calls - so that a difference is due to what lies between them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import piecewise_backend as pw
from benchmarks.workload import Workload
from examples.engine import ModelInputs
from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.entry import Entry
from piecewise_backend.plan import dynamic_plan
from piecewise_backend.runtime import Runtime
from piecewise_backend.sizes import SizeFunction

Step = Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Ours:
    """A model compiled with `pw.compile`, warmed up and sealed."""

    model: nn.Module
    compiled: Callable[..., Tensor]
    entry: Entry
    runtime: Runtime

    @classmethod
    def build(cls, workload: Workload, sizes: Sequence[int], **given: Any) -> "Ours":
        """Compile, and capture these sizes."""
        pw.register_splitting_op("example::paged_attention", capture="always")
        options: dict[str, Any] = {
            "cudagraph_capture_sizes": list(sizes),
            "cudagraph_mode": "piecewise",
            "graph_impl": "cuda" if workload.device.type == "cuda" else "emulated",
            "on_fallback": "raise",
        } | given
        compiled = pw.compile(workload.model, **options)
        compiled.warmup(workload.warmup_inputs)
        return cls(workload.model, compiled, compiled.entry, compiled.runtime)

    def flat_args(self, inputs: ModelInputs) -> list[Any]:
        """What `Runtime.call` takes for these inputs."""
        arguments = self.entry.arguments
        return arguments.collect(arguments.values.copy(), self.model, *inputs)


@dataclasses.dataclass(frozen=True, slots=True)
class _Called:
    """A call that a plan made."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What one captured plan is made of, with every argument resolved."""

    buffers: list[Tensor]
    sources: list[Tensor]
    """The caller's tensors that are copied into the buffers."""
    replays: list[Callable[[], None]]
    attentions: list[tuple[Callable[..., Any], tuple[Any, ...]]]
    output: Tensor
    """Where the last graph leaves the result."""

    @classmethod
    def of(cls, ours: Ours, inputs: ModelInputs) -> "Parts":
        """Take the plan that serves these inputs apart, by watching what it calls."""
        captured = ours.runtime.captures.captured[CUDAGraphMode.PIECEWISE, inputs[0].shape[0], 0]
        args = ours.flat_args(inputs)
        with _watched(captured.plan.function.__globals__) as calls:
            (result,) = ours.runtime.call(*args)
        replays = [call.function for call in calls if call.name.startswith("replay_")]
        attentions = [(c.function, c.args) for c in calls if c.name.startswith("op_")]
        kinds = [call.name.partition("_")[0] for call in calls]
        (copy,) = [call for call in calls if call.function is torch._foreach_copy_]
        expected = ["replay", *["op", "replay"] * len(attentions)]
        if [kind for kind in kinds if kind in ("replay", "op")] != expected:
            raise RuntimeError(
                f"expected graphs and attention calls in turns, the plan has {kinds}"
            )
        rows = captured.rows.at(ours.runtime.graph.token_dim.read(args))
        tensors = [row for row in rows if isinstance(row, Tensor)]
        output = next(t for t in reversed(tensors) if t.dtype == result.dtype and t.equal(result))
        buffers, sources = copy.args
        return cls(buffers, sources, replays, attentions, output)

    def with_attention(self, kernel: Callable[..., Any]) -> "Parts":
        """The same parts, with another function for every attention call."""
        attentions = [(kernel, arguments) for _, arguments in self.attentions]
        return dataclasses.replace(self, attentions=attentions)

    def attention_calls(self) -> Step:
        """Only the attention calls, as the plan makes them."""
        attentions = self.attentions

        def step() -> None:
            for attend, arguments in attentions:
                attend(*arguments)

        return step

    def graph_replays(self) -> Step:
        """Only the replays."""
        replays = self.replays

        def step() -> None:
            for replay in replays:
                replay()

        return step

    def loop(self) -> Step:
        """The loop that a careful engineer writes by hand for this model.

        Like the plan it copies ids and positions, and hands the attention the caller's other
        tensors; those are the same in every step here, so even they are resolved in advance.
        """
        layers = [
            (replay, attend, arguments)
            for replay, (attend, arguments) in zip(self.replays, self.attentions, strict=False)
        ]
        last, output, copy = self.replays[-1], self.output, torch._foreach_copy_
        buffers, sources = self.buffers, self.sources

        def step() -> Tensor:
            copy(buffers, sources)
            for replay, attend, arguments in layers:
                replay()
                attend(*arguments)
            last()
            return output.clone()

        return step


@contextmanager
def _watched(namespace: dict[str, Any]) -> Iterator[list[_Called]]:
    """Record what a plan calls: its namespace names replays, split ops and the copy."""
    calls: list[_Called] = []

    def watch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(_Called(name, function, args))
            return function(*args)

        return call

    original = {
        name: value
        for name, value in namespace.items()
        if name.startswith(("replay_", "op_")) or value is torch._foreach_copy_
    }
    namespace.update({name: watch(name, value) for name, value in original.items()})
    try:
        yield calls
    finally:
        namespace.update(original)


@dataclasses.dataclass(frozen=True, slots=True)
class FullGraph:
    """One CUDA graph of a whole step: our compiled pieces and the attention calls."""

    graph: torch.cuda.CUDAGraph
    buffers: list[Tensor]
    sources: list[Tensor]
    output: Tensor

    @classmethod
    def capture(cls, ours: Ours, inputs: ModelInputs) -> "FullGraph":
        """Capture the plan that runs without graphs, at the size of these inputs."""
        compiled, args = ours.runtime.graph, ours.flat_args(inputs)
        plan, exprs = dynamic_plan(compiled.split, compiled.instances, compiled.device)
        sizes = compiled.token_dim.read(args)
        numbers = SizeFunction(compiled.split.symbols, exprs)(sizes)
        calls = tuple(choice.call for choice in compiled.choices_at(sizes))
        copied = [
            position
            for position, item in enumerate(compiled.split.inputs)
            if isinstance(args[position], Tensor) and not item.is_static
        ]
        sources = [args[position] for position in copied]
        for position in copied:
            args[position] = args[position].clone()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                plan.function(args, numbers, calls)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            (output,) = plan.function(args, numbers, calls)
        return cls(graph, [args[position] for position in copied], sources, output)

    def replay(self) -> Tensor:
        """Only the replay. A bound method, so that whoever calls it keeps the buffers."""
        self.graph.replay()
        return self.output

    def step(self) -> Step:
        """Copy the inputs in, replay, copy the output out."""
        replay, output = self.graph.replay, self.output
        dtypes = dict.fromkeys(buffer.dtype for buffer in self.buffers)
        pairs = list(zip(self.buffers, self.sources, strict=True))
        # One launch for each dtype: a mixed list would be copied tensor by tensor.
        copies = [
            ([b for b, _ in pairs if b.dtype == dtype], [s for b, s in pairs if b.dtype == dtype])
            for dtype in dtypes
        ]

        def run() -> Tensor:
            for targets, sources in copies:
                torch._foreach_copy_(targets, sources)
            replay()
            return output.clone()

        return run
