"""Capture every piece of a graph at one size, and write the plan that replays them.

In:  a `CompiledGraph`, a pool, static buffers, a size, and the arguments of a real call.
Out: `CapturedSize`: the plan, and the views it needs for each token count.
Knows nothing of dispatch.

Pieces are captured in the order in which they run. After its capture a piece is replayed once,
and what a split op would write is filled with random numbers, so that every later piece is
warmed up and tried on defined values. A value is dropped after the capture of its last reader:
from then on its memory in the pool is free for the next capture, as it is at every replay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.canonical import Instance
from piecewise_backend.capture_request import (
    CapturedSize,
    CaptureRequest,
    aside,
    keep_with_outputs,
    place_of,
    preserved,
)
from piecewise_backend.errors import CaptureError
from piecewise_backend.graphs import CapturedGraph
from piecewise_backend.padding import PaddedCall, find_padding_fault, sizes_in_arithmetic
from piecewise_backend.plan_writer import PlanWriter
from piecewise_backend.sizes import Layout
from piecewise_backend.split_ops import returned_arguments, written_arguments
from piecewise_backend.steps import Constant, Host, Piece, SplitOp, Value


def capture_size(request: CaptureRequest) -> CapturedSize:
    """Capture one size.

    Raises:
        CaptureError: a piece cannot be recorded; nothing is kept.
    """
    with aside(request):
        return _Capture(request).run()


class _Capture:
    """One walk over the steps."""

    def __init__(self, request: CaptureRequest) -> None:
        self.request = request
        self.graph = request.graph
        self.writer = PlanWriter(
            request.graph,
            request.static_inputs,
            request.args,
            request.sizes,
            request.has_static_outputs,
        )
        self.values: dict[str, torch.Tensor] = dict(
            request.static_inputs.stage(request.args, request.sizes)
        )
        for item, value in zip(self.graph.split.inputs, request.args, strict=True):
            if isinstance(value, torch.Tensor):
                # A tensor made in inference mode could not be written here, its memory can.
                usable = _torch.weak_view(value) if value.is_inference() else value
                self.values.setdefault(item.name, usable)
        self.outside = {x.untyped_storage().data_ptr() for x in self.values.values()}
        self.input_at = {
            place_of(self.values[item.name]): position
            for position, item in enumerate(self.graph.split.inputs)
            if item.name in self.values and self.values[item.name].numel() > 0
        }
        self.undefined: set[str] = set()
        self.seen: set[int] = set()
        self.kept: list[CapturedGraph] = []
        self.num_graphs = 0
        self.padding_fault: str | None = None

    def run(self) -> CapturedSize:
        last_use = self.graph.split.last_use()
        for step in self.graph.split.steps:
            if isinstance(step, Piece):
                self._capture_piece(step)
            else:
                self._imitate_split_op(step)
            for name in [name for name in self.values if last_use.get(name) == step.index]:
                del self.values[name]
        plan, rows = self.writer.finish()
        keep_with_outputs(self.request, self.writer.static_tensors(), self.kept)
        is_tried = self.request.fewest != self.request.sizes
        kept = tuple(self.kept)
        return CapturedSize(plan, rows, self.num_graphs, self.padding_fault, is_tried, kept)

    def _capture_piece(self, piece: Piece) -> None:
        position = self.graph.position_of[piece.index]
        instance = self.graph.instances[position]
        facts = self.graph.facts[instance.distinct.index]
        inputs = self._inputs(instance, position)
        self._note_writes([inputs[i] for i in facts.mutated])
        with preserved([inputs[i] for i in facts.mutated]):
            is_first = instance.distinct.index not in self.seen
            self.seen.add(instance.distinct.index)
            if is_first and self.request.tune is not None:
                self.request.tune(position, inputs)
            call = self.graph.call_at(position, self.request.sizes)
            if is_first:
                for _ in range(self.request.num_warmups if facts.has_kernels else 0):
                    call(*inputs)
                self.padding_fault = self.padding_fault or self._try_padding(position, inputs)
            captured = self.request.pool.capture(call, inputs)
            if facts.has_kernels:
                _refuse_unrecorded(captured, piece, inputs)
                captured.replay()
        self.kept.append(dataclasses.replace(captured, outputs=()))
        if facts.has_kernels:
            self.num_graphs += 1
            self.writer.add_replay(captured.replay)
        for name, output in zip(piece.outputs, captured.outputs, strict=True):
            self.values[name] = output
            self.writer.add_value(name, _torch.weak_view(output))
            if (source := self.input_at.get(place_of(output))) is not None:
                self.writer.add_alias(name, source)
        self.undefined |= {piece.outputs[position] for position in facts.undefined}

    def _inputs(self, instance: Instance, position: int) -> list[Any]:
        numbers = iter(self.graph.numbers_at(position, self.request.sizes))
        inputs: list[Any] = []
        for ref in instance.inputs:
            if isinstance(ref, Value):
                inputs.append(self.values[ref.name])
            elif isinstance(ref, Constant) and isinstance(ref.value, torch.Tensor):
                inputs.append(ref.value)
            else:
                inputs.append(next(numbers))
        return inputs

    def _imitate_split_op(self, op: SplitOp) -> None:
        read_by_pieces = self.writer.read_by_pieces
        returned = returned_arguments(op)
        for name in op.outputs:
            if name in returned:
                self.values[str(name)] = self.values[returned[name].name]
            elif name is not None and name in read_by_pieces:
                self.values[name] = self._stable_buffer(self.graph.layouts[name])
                self.writer.add_value(name, _torch.weak_view(self.values[name]))
        names = dict.fromkeys(value.name for value in written_arguments(op))
        written = [self.values[name] for name in names if name in self.values]
        self._note_writes(written)
        fresh = [self.values[n] for n in op.outputs if n in self.values and n not in returned]
        for tensor in (*written, *fresh):
            if tensor.untyped_storage().data_ptr() not in self.outside:
                _fill_with_noise(tensor)
        if self.request.fewest != self.request.sizes:
            for name in (*op.outputs, *(name for name in names if name in self.undefined)):
                if name in self.values and not self.values[name].is_floating_point():
                    self.writer.add_zeros(_torch.weak_view(self.values[name]))
        self.undefined.difference_update(names)
        self.writer.add_split_op(op)

    def _stable_buffer(self, layout: Layout) -> torch.Tensor:
        sizes, largest = self.request.sizes, self.request.largest
        return self.request.arena.tensor(
            layout.dtype,
            layout.shape(sizes),
            layout.stride(sizes),
            layout.num_bytes(sizes),
            at_least=layout.num_bytes(largest),
        )

    def _note_writes(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self.writer.note_write(tensor.untyped_storage().data_ptr())

    def _try_padding(self, position: int, inputs: Sequence[Any]) -> str | None:
        """See `padding`. Sizes that are never padded need no trial."""
        if self.request.fewest == self.request.sizes:
            return None
        call = self.graph.call_at(position, self.request.sizes)
        is_new = call not in self.request.tried
        instance = self.graph.instances[position]
        num_sizes = sum(isinstance(ref, Host) for ref in instance.inputs)
        if fault := sizes_in_arithmetic(instance.distinct.module, num_sizes):
            return f"piece {instance.piece.index}: {fault}"
        try:
            fault = find_padding_fault(self._padded_call(position, inputs), is_thorough=is_new)
        except torch.OutOfMemoryError:  # says nothing of padding
            raise
        except Exception as error:  # such as a count that the model does not accept
            fault = f"trying padding failed: {error}"
        if fault is None:
            self.request.tried.add(call)
            return None
        return f"piece {instance.piece.index}: {fault}"

    def _padded_call(self, position: int, inputs: Sequence[Any]) -> PaddedCall:
        tokens = self.request.half
        instance = self.graph.instances[position]
        num_sizes = sum(isinstance(ref, Host) for ref in instance.inputs)
        facts = self.graph.facts[instance.distinct.index]
        outputs = map(Value, instance.piece.outputs)
        return PaddedCall(
            call=self.graph.call_at(position, self.request.sizes),
            exact_call=instance.distinct.module.forward,
            inputs=inputs,
            exact_numbers=self.graph.numbers_at(position, tokens)[:num_sizes],
            input_layouts=[self._dynamic_layout(ref) for ref in instance.inputs],
            output_layouts=[self._dynamic_layout(ref) for ref in outputs],
            mutated=facts.mutated,
            undefined=facts.undefined,
            tokens=tokens,
        )

    def _dynamic_layout(self, ref: Any) -> Layout | None:
        layout = self.graph.layouts[ref.name] if isinstance(ref, Value) else None
        return layout if layout is not None and layout.is_dynamic else None


def _refuse_unrecorded(captured: CapturedGraph, piece: Piece, inputs: Sequence[Any]) -> None:
    """A piece that launched work where the recording could not see it would replay nothing.

    One that the compiler found to compute nothing returns what it was given.
    """
    given = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
    fresh = [x for x in captured.outputs if x.untyped_storage().data_ptr() not in given]
    if captured.is_empty and any(x.numel() > 0 for x in fresh):
        raise CaptureError(
            f"piece {piece.index} recorded nothing though it computes something; an op in it "
            "launches kernels on a stream of its own: register it as a splitting op"
        )


def _fill_with_noise(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        tensor.normal_()
    else:
        tensor.zero_()
