"""Does padding change real rows of a piece? Tried out, not guessed.

In:  a compiled piece, its inputs at a capture size, and a smaller token count.
Out: None if padding is safe, else what was observed.

The piece runs on copies of the inputs whose padded rows differ: a real row, NaN, large and small
values. The real rows of the outputs, and of the inputs that the piece writes, must agree to the
bit, or some row depends on padding. They must also be near what the piece as traced gives without
padding, or they depend on the size itself. Half of the rows are padded: a value that depends on
the size is then mostly off by a factor of about two, which no rounding explains. Where it may
not be, the graph tells: a size that is an operand of arithmetic is refused unseen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from piecewise_backend import _torch
from piecewise_backend.nearness import near
from piecewise_backend.sizes import Layout, Sizes
from piecewise_backend.version import Call

Fill = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Makes values for a whole padded input, given that and its real rows."""


_ARITHMETIC = {
    *("add", "sub", "mul", "div", "truediv", "floordiv", "pow", "mod", "rsub", "true_divide"),
    *("floor_divide", "remainder", "fmod", "full_like", "fill_", "masked_fill", "add_", "mul_"),
    *("sub_", "div_", "lt", "le", "gt", "ge", "eq", "ne", "maximum", "minimum", "clamp", "clip"),
    *("clamp_", "clamp_min", "clamp_max", "where", "full", "new_full", "fill", "masked_fill_"),
    *("multiply", "divide", "subtract", "tensor", "scalar_tensor", "as_tensor", "lerp", "pow_"),
    *("new_tensor", "addcmul", "addcdiv", "addcmul_", "addcdiv_", "linspace", "logspace", "pad"),
}
_NUMBER_KEYWORDS = {"fill_value", "value", "other", "alpha", "min", "max", "exponent", "weight"}
"""What such a number is called when it is not positional."""


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedCall:
    """A piece at a capture size, with what is needed to run it at another."""

    call: Call
    """Valid at the capture size."""
    exact_call: Call
    """The piece as traced, valid at `tokens`."""
    inputs: Sequence[Any]
    """At the capture size. They are copied, not written."""
    exact_numbers: Sequence[int]
    """The integer inputs at `tokens`, which come first among the inputs."""
    input_layouts: Sequence[Layout | None]
    """None for what has no token dimension."""
    output_layouts: Sequence[Layout | None]
    mutated: frozenset[int]
    """Inputs that the piece writes."""
    undefined: frozenset[int]
    """Outputs without values: buffers that a split op will fill."""
    tokens: Sizes
    """The symbol values without padding."""


def find_padding_fault(padded: PaddedCall, *, is_thorough: bool = True) -> str | None:
    """What padding does to real rows, or None if nothing.

    Args:
        padded: the piece, and the calls to compare.
        is_thorough: try all kinds of padding. One kind against NaN is enough at further sizes
            of code that passed a thorough trial.
    """
    if fault := _overlapping_inputs(padded):
        return fault
    exact = _run(padded, padded.exact_call, _cut(padded))
    faults: list[str] = []
    verdicts: list[torch.Tensor] = []
    for real_integers, fills in _trials(padded) if is_thorough else [(None, _FILLS[:2])]:
        runs = [_run(padded, padded.call, _pad(padded, fill, real_integers)) for fill in fills]
        for position, filled in enumerate(zip(*runs, strict=True)):
            if position in padded.undefined:
                continue
            where = _name(padded, position)
            if filled[0].shape != exact[position].shape:
                return f"{where} depends on the padded size"
            faults += [f"real rows of {where} depend on the padded rows"] * (len(filled) - 1)
            verdicts += [_same(filled[0], other) for other in filled[1:]]
            if real_integers is None:
                faults.append(f"{where} depends on the padded size")
                verdicts.append(near(filled[0], exact[position]))
    # One wait for the device, not one per comparison.
    passed = torch.stack(verdicts).tolist() if verdicts else []
    return next((fault for fault, ok in zip(faults, passed, strict=True) if not ok), None)


def _overlapping_inputs(padded: PaddedCall) -> str | None:
    """Copies of inputs that overlap would not; so a write to one of them cannot be tried."""
    spans = {
        i: (x.data_ptr(), x.data_ptr() + _span_bytes(x))
        for i, x in enumerate(padded.inputs)
        if isinstance(x, torch.Tensor) and x.numel()
    }
    for i in sorted(padded.mutated & spans.keys()):
        start, end = spans[i]
        for j, (other_start, other_end) in spans.items():
            if i != j and start < other_end and other_start < end:
                return f"input {i} is written and shares memory with input {j}"
    return None


def _span_bytes(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * step for size, step in steps) + 1) * tensor.element_size()


def _name(padded: PaddedCall, position: int) -> str:
    num_outputs = len(padded.output_layouts)
    if position < num_outputs:
        return f"output {position}"
    return f"input {sorted(padded.mutated)[position - num_outputs]}, which it writes,"


def sizes_in_arithmetic(module: fx.GraphModule, num_sizes: int) -> str | None:
    """Name a node that computes with a size as a number, or None."""
    hosts = set(list(module.graph.find_nodes(op="placeholder"))[:num_sizes])
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        is_number = not _torch.has_tensor_example(node)
        if is_number and node.all_input_nodes and hosts.issuperset(node.all_input_nodes):
            hosts.add(node)
            continue
        name = node.target if isinstance(node.target, str) else node.target.__name__
        numbers = [*node.args, *(node.kwargs.get(name) for name in _NUMBER_KEYWORDS)]
        direct = [arg for arg in numbers if isinstance(arg, fx.Node) and arg in hosts]
        if direct and name.split(".")[0] in _ARITHMETIC:
            return f"{node.name} computes with the number of tokens"
    return None


def _trials(padded: PaddedCall) -> list[tuple[Fill | None, Sequence[Fill]]]:
    """What to put in the real rows of integers (None: what they hold), and in padded rows."""
    has_integers = any(
        layout is not None and not value.is_floating_point() and not value.is_complex()
        for value, layout in zip(padded.inputs, padded.input_layouts, strict=True)
    )
    trials: list[tuple[Fill | None, Sequence[Fill]]] = [(None, _FILLS)]
    if has_integers:
        # Padding shows in a maximum only if no real row holds the largest value that is valid.
        trials += [(_LOW, (_LOW, _HIGH)), (_HIGH, (_LOW, _HIGH))]
    return trials


def _pad(padded: PaddedCall, fill: Fill, real_integers: Fill | None) -> list[Any]:
    """Copies with other values in their padded rows, and in the real rows of integers."""
    inputs = []
    for position, (value, layout) in enumerate(
        zip(padded.inputs, padded.input_layouts, strict=True)
    ):
        if layout is None:
            inputs.append(value.clone() if position in padded.mutated else value)
            continue
        copy = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        real = layout.rows(value, padded.tokens)
        _write(copy, fill(value, real))
        if real_integers is not None and not (value.is_floating_point() or value.is_complex()):
            real = layout.rows(real_integers(value, real), padded.tokens)
        _write(layout.rows(copy, padded.tokens), real)
        inputs.append(copy)
    return inputs


def _repeat_first_row(value: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """What a careful caller would pad with."""
    for dim, (num_rows, total) in enumerate(zip(real.shape, value.shape, strict=True)):
        if num_rows == 0:
            return value
        if num_rows != total:
            real = real.narrow(dim, 0, 1)
    return real.expand_as(value)


def _constant_fill(number: float) -> Fill:
    """Floats become `number`. Integers may be indices: they become the least or the largest
    that occurs."""

    def fill(value: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() or value.is_complex():
            largest = torch.finfo(value.dtype).max
            filler = max(-largest, min(largest, number)) if number == number else number
            return torch.full((), filler, dtype=value.dtype, device=value.device).expand_as(value)
        if value.dtype == torch.bool:
            return torch.full_like(value, number > 0)
        if value.numel() == 0:
            return value
        wide = value.long()
        extreme = wide.amin() if number < 0 else wide.amax()
        return extreme.to(value.dtype).expand_as(value)

    return fill


_HIGH, _LOW = _constant_fill(1e4), _constant_fill(-1e4)
# A reduction may pass over NaN, or a sort move it behind all real rows: hence large and small.
_FILLS: tuple[Fill, ...] = (_repeat_first_row, _constant_fill(float("nan")), _HIGH, _LOW)


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, also into an expanded tensor: each of its elements once."""
    for dim, step in enumerate(target.stride()):
        if step == 0 and target.size(dim) > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _cut(padded: PaddedCall) -> list[Any]:
    """The inputs without padding, laid out as the piece expects them at that size."""
    inputs: list[Any] = list(padded.exact_numbers)
    for position in range(len(inputs), len(padded.inputs)):
        value, layout = padded.inputs[position], padded.input_layouts[position]
        if layout is None:
            inputs.append(value.clone() if position in padded.mutated else value)
            continue
        exact = torch.empty_strided(
            layout.shape(padded.tokens),
            layout.stride(padded.tokens),
            dtype=value.dtype,
            device=value.device,
        )
        _write(exact, layout.rows(value, padded.tokens))
        inputs.append(exact)
    return inputs


def _run(padded: PaddedCall, call: Call, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The real rows of the outputs, then of the inputs that the piece wrote."""
    outputs = call(*inputs)
    written = sorted(padded.mutated)
    layouts = [*padded.output_layouts, *(padded.input_layouts[i] for i in written)]
    return [
        (value if layout is None else layout.rows(value, padded.tokens)).clone()
        for value, layout in zip((*outputs, *(inputs[i] for i in written)), layouts, strict=True)
    ]


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype.itemsize == 1:  # the 8-bit floats have no comparison
        return (a.view(torch.uint8) == b.view(torch.uint8)).all()
    equal = a == b
    if a.is_floating_point() or a.is_complex():
        equal |= a.isnan() & b.isnan()
    return equal.all()
