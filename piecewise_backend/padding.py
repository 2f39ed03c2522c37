"""Does padding change real rows of a piece? Tried out, not guessed.

In:  a compiled piece, its inputs at a capture size, and a smaller token count.
Out: None if padding is safe, else what was observed.

The piece runs on two copies of the inputs whose padded rows differ - plain values in one, NaN
in the other. The real rows of the outputs must agree to the bit, or some row depends on
padding. They must also be near what the piece gives without padding, or they depend on the
size itself. A size used as a number in arithmetic is refused unseen: at 497 of 512 tokens the
difference could pass for rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from piecewise_backend.compiler import Call
from piecewise_backend.sizes import Layout, Sizes

# Relative to the largest magnitude of the output; a layout or scale that is wrong is far above.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.05

_ARITHMETIC = {
    *("add", "sub", "mul", "div", "truediv", "floordiv", "pow", "mod", "rsub", "true_divide"),
    *("floor_divide", "remainder", "fmod", "full_like", "fill_", "masked_fill", "add_", "mul_"),
    *("sub_", "div_", "lt", "le", "gt", "ge", "eq", "ne", "maximum", "minimum", "clamp"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedCall:
    """A piece at a capture size, with what is needed to run it at another."""

    call: Call
    """Valid at the capture size."""
    exact_call: Call
    """Valid at `tokens`."""
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


def find_padding_fault(padded: PaddedCall) -> str | None:
    """What padding does to real rows, or None if nothing."""
    calm = _real_rows(padded, padded.call(*_pad(padded, poison=False)))
    poisoned = _real_rows(padded, padded.call(*_pad(padded, poison=True)))
    exact = _real_rows(padded, padded.exact_call(*_cut(padded)))
    for position, (a, b, c) in enumerate(zip(calm, poisoned, exact, strict=True)):
        if position in padded.undefined:
            continue
        if not _same(a, b):
            return f"real rows of output {position} depend on the padded rows"
        if a.shape != c.shape or not _near(a, c):
            return f"output {position} depends on the padded size"
    return None


def sizes_in_arithmetic(module: fx.GraphModule, num_sizes: int) -> str | None:
    """Name a node that computes with a size as a number, or None."""
    hosts = set(list(module.graph.find_nodes(op="placeholder"))[:num_sizes])
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if all(source in hosts for source in node.all_input_nodes) and node.all_input_nodes:
            if not isinstance(node.meta.get("example_value"), torch.Tensor):
                hosts.add(node)
                continue
        name = node.target if isinstance(node.target, str) else node.target.__name__
        direct = [arg for arg in node.args if isinstance(arg, fx.Node) and arg in hosts]
        if direct and name.split(".")[0] in _ARITHMETIC:
            return f"{node.name} computes with the number of tokens"
    return None


def _pad(padded: PaddedCall, *, poison: bool) -> list[Any]:
    """Copies whose padded rows repeat a real row, or are NaN where NaN exists."""
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
        if poison and copy.is_floating_point():
            copy.fill_(float("nan"))
        else:
            edge = real
            for dim, (rows, total) in enumerate(zip(real.shape, value.shape, strict=True)):
                if rows != total:
                    edge = edge.narrow(dim, rows - 1 if poison else 0, 1)
            copy.copy_(edge.expand_as(copy))
        layout.rows(copy, padded.tokens).copy_(real)
        inputs.append(copy)
    return inputs


def _cut(padded: PaddedCall) -> list[Any]:
    """The inputs without padding, laid out as the piece expects them at that size."""
    inputs = list(padded.exact_numbers)
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
        inputs.append(exact.copy_(layout.rows(value, padded.tokens)))
    return inputs


def _real_rows(padded: PaddedCall, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        (output if layout is None else layout.rows(output, padded.tokens)).clone()
        for output, layout in zip(outputs, padded.output_layouts, strict=True)
    ]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype.itemsize == 1:  # the 8-bit floats have no comparison
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    equal = a == b
    if a.is_floating_point():
        equal |= a.isnan() & b.isnan()
    return bool(equal.all())


def _near(a: torch.Tensor, c: torch.Tensor) -> bool:
    if a.numel() == 0:
        return True
    tolerance = _TOLERANCE.get(a.dtype, _HALF_TOLERANCE)
    a, c = a.double().nan_to_num(), c.double().nan_to_num()
    return bool((a - c).abs().max() <= tolerance * c.abs().max().clamp(min=1e-6))
