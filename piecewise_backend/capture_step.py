"""Capture a whole step, split ops included, as one graph at one size.

In:  a `CaptureRequest`, the descriptor of the batch, and the graph pool of the pieces.
Out: `CapturedSize`: a plan that copies arguments in, replays once, and copies outputs out.
Knows nothing of dispatch.

It is the straight line that also runs without graphs, over static buffers: compiled pieces and
split ops at the padded size. So split ops see padded rows, and write caches for them: where the
inputs of the graph say, which are zero there. Integers that a piece computes from those may be
anything, and say where to write, too; such a step is not padded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.batch import BatchDescriptor
from piecewise_backend.capture_request import (
    CapturedSize,
    CaptureRequest,
    aside,
    keep_with_outputs,
    place_of,
    preserved,
)
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.errors import CaptureError
from piecewise_backend.plan import dynamic_plan
from piecewise_backend.plan_writer import PlanWriter
from piecewise_backend.refresh import Refresh
from piecewise_backend.sizes import SizeFunction
from piecewise_backend.split_ops import inputs_written_by
from piecewise_backend.static_inputs import written_inputs
from piecewise_backend.steps import Value


def capture_step(
    request: CaptureRequest, descriptor: BatchDescriptor, padding_fault: str | None
) -> CapturedSize:
    """Capture one size.

    Args:
        request: what to capture; the call that its arguments are of runs again, split ops
            included, as often as there are warm-ups.
        descriptor: handed to the hooks of split ops, now and before every replay.
        padding_fault: what padding does to real rows of a piece at this size, or None.

    Raises:
        CaptureError: the step cannot be recorded; nothing is kept.
        Exception: whatever a hook does.
    """
    padding_fault = padding_fault or _computed_integers(request.graph)
    refresh = Refresh.of(request.graph.split, descriptor, request.pool)
    # Out here hooks find the inference mode and the random numbers that they find in serving.
    refresh.run()
    with aside(request):
        return _Step(request, refresh).capture(padding_fault)


def _computed_integers(graph: CompiledGraph) -> str | None:
    """Why a step may not be padded, though its pieces may be."""
    given = {item.name for item in graph.split.inputs}
    for op in graph.split.split_ops:
        for value in op.values():
            layout = graph.layouts[value.name]
            is_integer = not (layout.dtype.is_floating_point or layout.dtype.is_complex)
            if value.name not in given and is_integer and layout.is_dynamic:
                return (
                    f"{op.op_name} ({op.location}) is given integers that the model computes; in "
                    "padded rows they may be anybody's slots: pass them to the model instead"
                )
    return None


class _Step:
    """The step as a function of its tensors, which stay where they are."""

    def __init__(self, request: CaptureRequest, refresh: Refresh) -> None:
        self.request = request
        self.refresh = refresh
        self.graph = request.graph
        self.static_inputs = request.static_inputs.of_whole_step()
        self.args = self._args()
        split = self.graph.split
        plan, exprs = dynamic_plan(split, self.graph.instances, self.graph.device, refresh.bind)
        self.plan = plan.function
        self.numbers = SizeFunction(split.symbols, exprs)(request.sizes)
        self.calls = tuple(choice.call for choice in self.graph.choices_at(request.sizes))
        self.tensors = [i for i, value in enumerate(self.args) if isinstance(value, torch.Tensor)]
        inputs = {item.name for item in split.inputs}
        self.outputs = {
            leaf.name: position
            for position, leaf in enumerate(split.outputs)
            if isinstance(leaf, Value) and leaf.name not in inputs
        }

    def _args(self) -> list[Any]:
        """The arguments of the padded call: buffers, state, and numbers."""
        request, split = self.request, self.graph.split
        staged = self.static_inputs.stage(request.args, request.sizes)
        args: list[Any] = []
        for item, value in zip(split.inputs, request.args, strict=True):
            if item.name in staged:
                args.append(staged[item.name])
            elif isinstance(value, torch.Tensor):
                # A tensor made in inference mode could not be written here, its memory can.
                args.append(_torch.weak_view(value) if value.is_inference() else value)
            elif isinstance(item.example, torch.SymInt):
                size = SizeFunction(split.symbols, [_torch.size_expr(item.example)])
                args.append(size(request.sizes)[0])
            else:
                args.append(value)
        return args

    def run(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step; returns the outputs that are no inputs."""
        args = list(self.args)
        for position, tensor in zip(self.tensors, tensors, strict=True):
            args[position] = tensor
        results = self.plan(args, self.numbers, self.calls)
        return tuple(results[position] for position in self.outputs.values())

    def capture(self, padding_fault: str | None) -> CapturedSize:
        """Warm up, record, and write the plan."""
        request, split = self.request, self.graph.split
        writer = PlanWriter(
            self.graph, self.static_inputs, request.args, request.sizes, request.has_static_outputs
        )
        tensors = [self.args[position] for position in self.tensors]
        named = {split.inputs[i].name: self.args[i] for i in self.tensors}
        by_pieces = [named[name] for name in written_inputs(self.graph) if name in named]
        by_ops = [named[name] for name in inputs_written_by(split) if name in named]
        for tensor in (*by_pieces, *by_ops):
            writer.note_write(tensor.untyped_storage().data_ptr())
        with preserved(by_pieces):
            for _ in range(request.num_warmups):
                self.run(*tensors)
            captured = request.pool.capture(self.run, tensors)
        if captured.is_empty:
            raise CaptureError("the step recorded nothing; it launches on a stream of its own")
        writer.add_padding()
        for call in self.refresh.calls:
            writer.add_call(call)
        writer.add_replay(captured.replay)
        self._add_outputs(writer, captured.outputs)
        plan, rows = writer.finish()
        keep_with_outputs(request, writer.static_tensors(), [captured])
        return CapturedSize(
            plan,
            rows,
            num_graphs=1,
            padding_fault=padding_fault,
            is_tried=request.fewest != request.sizes,
            keep_alive=(dataclasses.replace(captured, outputs=()),),
        )

    def _add_outputs(self, writer: PlanWriter, outputs: Sequence[torch.Tensor]) -> None:
        inputs = {place_of(self.args[i]): i for i in self.tensors if self.args[i].numel() > 0}
        for name, output in zip(self.outputs, outputs, strict=True):
            layout = self.graph.layouts[name]
            if output.shape != layout.shape(self.request.sizes) or output.dtype != layout.dtype:
                raise CaptureError(
                    f"a split op returned {output.dtype} of shape {tuple(output.shape)} but its "
                    f"fake implementation promised {layout.dtype} of shape "
                    f"{layout.shape(self.request.sizes)}; correct register_fake"
                )
            writer.add_value(name, _torch.weak_view(output))
            if (position := inputs.get(place_of(output))) is not None:
                writer.add_alias(name, position)
