"""Write the plan of one captured size.

In:  replays, values and split ops in the order in which they are captured.
Out: a `Plan` that is called as `plan(args, rows)`, and the table that makes `rows`.
Knows nothing of how a capture is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from piecewise_backend import _torch
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.errors import ContractError
from piecewise_backend.plan import Plan, Source, unpack
from piecewise_backend.rows import RowTable
from piecewise_backend.sizes import Layout, SizeFunction, Sizes
from piecewise_backend.split_ops import bind_split_op, returned_arguments
from piecewise_backend.static_inputs import StaticInputs
from piecewise_backend.steps import Constant, Host, SplitOp, Value, reads


class InputMoved(Exception):
    """A bound input is no longer where it was at capture."""


class InputsOverlap(Exception):
    """An input that is copied shares memory with one that a step writes."""


class PlanWriter:
    """Collects the statements of a captured plan."""

    def __init__(
        self,
        graph: CompiledGraph,
        static_inputs: StaticInputs,
        args: Sequence[Any],
        sizes: Sizes,
        has_static_outputs: bool,
    ) -> None:
        self.graph = graph
        self.sizes = sizes
        self.static_inputs = static_inputs
        self.args = args
        self.has_static_outputs = has_static_outputs
        self.read_by_pieces = {name for p in graph.split.pieces for name in reads(p)}
        self.code = Source("args, rows")
        self.texts: dict[str, str] = {}
        self.tensors: list[tuple[torch.Tensor, Layout]] = []
        self.numbers: dict[sympy.Expr, int] = {}
        self.given_to_split_ops: set[int] = set()
        self.written: set[int] = set()
        self.aliases: dict[str, int] = {}
        self.zeroed: list[tuple[torch.Tensor, Layout]] = []
        self.positions = {item.name: i for i, item in enumerate(graph.split.inputs)}

    def note_write(self, storage_address: int) -> None:
        """A step writes to this storage; staged inputs among them are copied back."""
        self.written.add(storage_address)

    def add_replay(self, replay: Callable[[], None]) -> None:
        """Append the replay of a captured piece."""
        self.code.add(f"{self.code.bind(replay, 'replay_')}()")

    def add_value(self, name: str, tensor: torch.Tensor) -> None:
        """A value that stays at one address, padded; the plan uses its real rows."""
        layout = self.graph.layouts[name]
        if layout.is_dynamic:
            self.texts[name] = f"r{len(self.tensors)}"
            self.tensors.append((tensor, layout))
        else:
            self.texts[name] = self.code.bind(tensor, "static_")

    def add_alias(self, name: str, position: int) -> None:
        """A value that is an input, written in place perhaps: returned, it is that very tensor."""
        self.aliases[name] = position

    def add_zeros(self, tensor: torch.Tensor) -> None:
        """Before a split op fills a buffer of integers: a piece may use padded rows as indices,
        and whatever the memory held before need not be one."""
        self.code.add(f"{self.code.bind(tensor, 'padded_')}.zero_()")

    def add_padding(self) -> None:
        """Split ops are in the graph and will see padded rows: of zeros, in inputs."""
        for position in self.static_inputs.staged:
            layout = self.graph.layouts[self.graph.split.inputs[position].name]
            if layout.is_dynamic:
                buffer = self.static_inputs.buffer(position, self.sizes)
                self.zeroed.append((_torch.weak_view(buffer), layout))
        if self.zeroed:
            zero = self.code.bind(torch._foreach_zero_)
            self.code.add(f"for group in padding: {zero}(group)")

    def add_call(self, function: Callable[[], object]) -> None:
        """Append the call of a function that takes nothing."""
        self.code.add(f"{self.code.bind(function)}()")

    def add_split_op(self, op: SplitOp) -> None:
        """Append the call of a split op; what pieces read of its results goes to buffers."""
        function = self.code.bind(bind_split_op(op, self.graph.device), "op_")
        call = self.code.call(op, function, self._text)
        rows = [self.texts[value.name] for value in op.values()]
        self.given_to_split_ops |= {int(text[1:]) for text in rows if text.startswith("r")}
        results = ["_" if name is None else f"t{op.index}_{i}" for i, name in enumerate(op.outputs)]
        if not any(op.outputs):
            self.code.add(call)
            return
        returned = returned_arguments(op)
        targets = f"({''.join(f'{r}, ' for r in results)})" if op.returns_tuple else results[0]
        self.code.add(f"{targets} = {call}")
        for name, result in zip(op.outputs, results, strict=True):
            if name in returned:
                self.texts[str(name)] = self._text(returned[name])
            elif name in self.read_by_pieces:
                self._copy_to_buffer(op, result, self.texts[name])
            elif name is not None:
                self.texts[name] = result

    def _copy_to_buffer(self, op: SplitOp, result: str, buffer: str) -> None:
        """A broadcasting copy would hide an op whose fake implementation lies."""
        mismatch = self.code.bind(_shape_mismatch(op), "mismatch_")
        same = f"{result}.shape == {buffer}.shape and {result}.dtype is {buffer}.dtype"
        self.code.add(f"if not ({same}): {mismatch}({result}, {buffer})")
        self.code.add(f"{buffer}.copy_({result})")

    def finish(self) -> tuple[Plan, RowTable]:
        """Add the head and the tail, and compile."""
        body, self.code.lines = self.code.lines, []
        returned = self.code.expression(self.graph.split.outputs, self._output_text)
        head = self._head()
        tail = [*self._copies_back(), f"return {returned}"]
        names = [f"r{i}" for i in range(len(self.tensors))]
        names += [f"n{i}" for i in range(len(self.numbers))]
        names += ["padding"] if self.zeroed else []
        self.code.lines = [*head[:1], unpack(names, "rows"), *head[1:], *body, *tail]
        numbers = SizeFunction(self.graph.split.symbols, tuple(self.numbers))
        table = RowTable(
            tuple(self.tensors), numbers, frozenset(self.given_to_split_ops), tuple(self.zeroed)
        )
        return self.code.build("plan"), table

    def _text(self, ref: Value | Host | Constant) -> str:
        if isinstance(ref, Host):
            return f"n{self.numbers.setdefault(ref.expr, len(self.numbers))}"
        if isinstance(ref, Constant):
            return self.code.bind(ref.value)
        if ref.name not in self.texts:
            position = self.positions[ref.name]
            if position in self.static_inputs.staged:
                self._add_staged(position)
            else:
                self.texts[ref.name] = f"args[{position}]"
        return self.texts[ref.name]

    def _add_staged(self, position: int) -> None:
        name = self.graph.split.inputs[position].name
        self.add_value(name, self.static_inputs.buffer(position, self.sizes))

    def _output_text(self, ref: Value | Host | Constant) -> str:
        """An output is copied out of a buffer, unless it is the caller's or fresh already."""
        if not isinstance(ref, Value):
            return self._text(ref)
        position = self.positions.get(ref.name, self.aliases.get(ref.name))
        if position is not None:
            return f"args[{position}]"
        text = self._text(ref)
        if self.has_static_outputs:
            return text
        if text.startswith("t"):  # from a split op, which may have returned what it was given
            return f"{self.code.bind(_owned(self._static_storages()), 'owned_')}({text})"
        return f"{text}.clone()"

    def static_tensors(self) -> list[torch.Tensor]:
        """The tensors at fixed addresses that the plan refers to."""
        bound = [value for value in self.code.names.values() if isinstance(value, torch.Tensor)]
        return [*(tensor for tensor, _ in self.tensors), *bound]

    def _static_storages(self) -> frozenset[int]:
        return frozenset(x.untyped_storage().data_ptr() for x in self.static_tensors())

    def _head(self) -> list[str]:
        bound = self.static_inputs.bound
        lines = []
        is_bound = set(bound)
        addresses = [x.data_ptr() if i in is_bound else None for i, x in enumerate(self.args)]
        same = self.code.bind(_torch.same_addresses)
        moved = self.code.bind(InputMoved)
        where, at = self.code.bind(addresses), self.code.bind(list(bound))
        lines.append(f"if not {same}(args, {where}, {at}): raise {moved}")
        staged = self.static_inputs.staged
        if staged and (written := self._written_inputs()):
            given = staged if set(written).isdisjoint(staged) else self._read_tensors()
            overlap = self.code.bind(_overlap(written, staged, given, self.args), "overlap_")
            lines.append(f"if {overlap}(args): raise {self.code.bind(InputsOverlap)}")
        if staged:
            buffers = [self._text(Value(self.graph.split.inputs[i].name)) for i in staged]
            fresh = " or ".join(
                f"args[{i}].data_ptr() != {self.static_inputs.buffer(i, self.sizes).data_ptr()}"
                for i in staged
            )
            lines.append(f"if {fresh}:")
            copy = self.code.bind(torch._foreach_copy_)
            # One kernel per dtype: a list of several would be copied tensor by tensor.
            for group in self._staged_by_dtype():
                targets = ", ".join(buffers[staged.index(i)] for i in group)
                sources = ", ".join(f"args[{i}]" for i in group)
                lines.append(f"    {copy}([{targets}], [{sources}])")
        return lines

    def _staged_by_dtype(self) -> list[list[int]]:
        groups: dict[torch.dtype, list[int]] = {}
        for position in self.static_inputs.staged:
            groups.setdefault(self.args[position].dtype, []).append(position)
        return list(groups.values())

    def _written_inputs(self) -> tuple[int, ...]:
        """Positions of the inputs that a step writes."""
        staged = {i: self.static_inputs.buffer(i, self.sizes) for i in self.static_inputs.staged}
        tensors = {i: x for i, x in enumerate(self.args) if isinstance(x, torch.Tensor)} | staged
        return tuple(
            i for i, x in tensors.items() if x.untyped_storage().data_ptr() in self.written
        )

    def _read_tensors(self) -> tuple[int, ...]:
        """Positions of all tensors that some step reads, or writes."""
        names = {name for step in self.graph.split.steps for name in reads(step)}
        return tuple(
            i
            for name, i in self.positions.items()
            if name in names and isinstance(self.args[i], torch.Tensor)
        )

    def _copies_back(self) -> list[str]:
        """Staged inputs that a step wrote: the caller sees the new values."""
        lines = []
        for position in self._written_inputs():
            if position in self.static_inputs.staged:
                name = self.graph.split.inputs[position].name
                lines.append(f"args[{position}].copy_({self._text(Value(name))})")
        return lines


def _overlap(
    written: Sequence[int], staged: Sequence[int], given: Sequence[int], captured: Sequence[Any]
) -> Callable[[Sequence[Any]], bool]:
    """Would a step write what another input was copied from, or is read from?

    Caches are written where they were at capture: one comparison tells. What is copied and
    written comes back to the caller's tensor only in the end, too late for others.
    """
    caches = [i for i in written if i not in staged]
    addresses = [x.data_ptr() if i in caches else None for i, x in enumerate(captured)]
    storages = frozenset(captured[i].untyped_storage().data_ptr() for i in caches)
    is_simple = len(caches) == len(written)

    def overlap(args: Sequence[Any]) -> bool:
        if is_simple and _torch.same_addresses(args, addresses, caches):
            return any(args[i].untyped_storage().data_ptr() in storages for i in staged)
        places = {i: args[i].untyped_storage().data_ptr() for i in {*written, *given}}
        writers = {places[i]: i for i in written}
        if any(writers.get(places[i], i) != i for i in staged):
            return True
        copied_back = {places[i]: i for i in written if i in staged}
        return any(copied_back.get(places[i], i) != i for i in given)

    return overlap


def _owned(static_storages: frozenset[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """An in-place op returns its argument: a static buffer, which must not leave the plan."""

    def owned(result: torch.Tensor) -> torch.Tensor:
        is_static = result.untyped_storage().data_ptr() in static_storages
        return result.clone() if is_static else result

    return owned


def _shape_mismatch(op: SplitOp) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def report(result: torch.Tensor, buffer: torch.Tensor) -> None:
        raise ContractError(
            f"{op.op_name} ({op.location}) returned {result.dtype} of shape "
            f"{tuple(result.shape)} but its fake implementation promised {buffer.dtype} of shape "
            f"{tuple(buffer.shape)}; correct register_fake"
        )

    return report
