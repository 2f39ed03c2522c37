"""Read parts off a graph: a norm, a gated activation, a quantisation, a rotation.

In:  spellings, and a node of a piece's graph as Inductor has it.
Out: the part whose result the node is, whichever way it is spelled; or None.
Knows nothing of what a fused op can serve.

Note [Views in between]
A reshape keeps the order of elements, so that it may stand between any two parts if only the rows
stay: what a norm makes of rows is quantised by rows of the same length, or by groups that divide
it. A copy to another layout keeps the order as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from piecewise_backend import _torch
from piecewise_backend.passes.fusions.comparing import CAST, Found, patterns, same_value, traced
from piecewise_backend.passes.fusions.spellings import NOT_IN_FLOAT16, Spellings
from piecewise_backend.passes.ops.reference import FP8_DTYPE

aten = torch.ops.aten
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VIEWS = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.clone.default,
    }
)
_NOTHING: frozenset[fx.Node] = frozenset()
Outputs = tuple[tuple[fx.Node, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Quantised:
    """A quantisation: by a scale of one element, by rows, or by groups of columns."""

    kind: str
    y: fx.Node
    scale: fx.Node | None
    group_size: int | None
    outputs: Outputs
    inside: frozenset[fx.Node]


@dataclasses.dataclass(frozen=True, slots=True)
class Normed:
    """An RMSNorm, perhaps of a sum that is a result as well."""

    x: fx.Node
    residual: fx.Node | None
    weight: fx.Node
    eps: float
    outputs: Outputs
    """The sum, if there is one."""
    inside: frozenset[fx.Node]


@dataclasses.dataclass(frozen=True, slots=True)
class Halves:
    """Two tensors that are the halves of the columns of one."""

    whole: fx.Node
    inside: frozenset[fx.Node]


@dataclasses.dataclass(frozen=True, slots=True)
class Rotated:
    """A rotary embedding of halves of heads."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    inside: frozenset[fx.Node]


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """Finds parts in all their spellings."""

    spellings: Spellings

    def _all(self, part: str, node: fx.Node, dtype: torch.dtype) -> Iterator[Found]:
        for spelling in self.spellings[part]:
            if dtype == torch.float16 and spelling in NOT_IN_FLOAT16:
                continue
            for pattern in patterns(spelling, dtype, tensor(node).device):
                if (found := pattern.match(node)) is not None:
                    yield found

    def quantised(self, node: fx.Node) -> Iterator[Quantised]:
        """The quantisations whose float8 values `node` may be."""
        if tensor(node).dtype != FP8_DTYPE:
            return
        # A spelling that casts y is no other if y is float32: then the cast is not there.
        for dtype in (torch.bfloat16, torch.float32):
            for part in ("dynamic_quant", "group_quant"):
                for found in self._all(part, node, dtype):
                    group_size = found.arguments.get("group_size")
                    yield from _by_rows(found, found.outputs, found.inside, group_size)
            for found in self._all("static_quant", node, dtype):
                yield from self._by_its_scale(found, dtype)

    def _by_its_scale(self, found: Found, dtype: torch.dtype) -> Iterator[Quantised]:
        scale, views = behind_views(found.arguments["scale"])
        is_dynamic = False
        for scales in self._all("row_scale", scale, dtype):
            if _is_by_rows(found, scales):
                is_dynamic = True
                inside = found.inside | scales.inside | (views - {scale})
                yield from _by_rows(found, (*found.outputs, *scales.outputs), inside, None)
        if not is_dynamic:
            y, views = behind_views(found.arguments["y"])
            given = found.arguments["scale"]
            yield Quantised("static", y, given, None, found.outputs, found.inside | views)

    def normed(self, node: fx.Node) -> Iterator[Normed]:
        """The norms whose result `node` may be."""
        dtype = tensor(node).dtype
        if dtype not in DTYPES:
            return
        for found in self._all("add_rms_norm", node, dtype):
            yield _normed(found, found.outputs[1:], found.inside)
        for found in (*self._all("rms_norm", node, dtype), *self._unrounded(node)):
            yield from self._of_sum(found)
            yield _normed(found, (), found.inside)

    def _unrounded(self, node: fx.Node) -> Iterator[Found]:
        """Norms whose last rounding is not there.

        torch 2.11 takes it out if the next op casts to float32 again. float16 is left alone: the op
        rounds, and what is not rounded has more range.
        """
        if tensor(node).dtype != torch.float32:
            return
        for spelling in self.spellings["rms_norm"]:
            pattern = traced(spelling, torch.bfloat16, tensor(node).device).unrounded()
            found = pattern and pattern.match(node)
            if found:
                yield found

    def _of_sum(self, found: Found) -> Iterator[Normed]:
        total = found.arguments["x"]
        if total.target is aten.add.Tensor and not total.kwargs and len(total.args) == 2:
            x, residual = total.args
            if isinstance(x, fx.Node) and isinstance(residual, fx.Node):
                summands = dataclasses.replace(
                    found, arguments={**found.arguments, "x": x, "residual": residual}
                )
                yield _normed(summands, ((total,),), found.inside)

    def gated(self, node: fx.Node) -> Iterator[Halves]:
        """The gated activations, `silu(gate) * up`, whose result `node` may be."""
        dtype = tensor(node).dtype
        if dtype not in DTYPES:
            return
        for found in self._all("silu_mul", node, dtype):
            yield Halves(found.arguments["x"], found.inside)
        for gate, up, inside in self.gate_and_up(node):
            both = halves(gate, up)
            # Of halves that were cast to float32 the product is not rounded, and has more range.
            if both is not None and tensor(both.whole).dtype == dtype:
                yield Halves(both.whole, inside | both.inside)

    def gate_and_up(self, node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, frozenset[fx.Node]]]:
        """What `silu(gate) * up` is computed of wherever `node` is that, and what lies inside."""
        for found in self._all("gated", node, tensor(node).dtype):
            yield found.arguments["gate"], found.arguments["up"], found.inside

    def rotated(self, node: fx.Node) -> Iterator[Rotated]:
        """The rotary embeddings whose result `node` may be."""
        dtype = tensor(node).dtype
        if dtype not in DTYPES:
            return
        for found in self._all("rope", node, dtype):
            first, second, cos, sin = found.arguments.values()
            both = halves(first, second)
            if both is not None:
                x, cast = uncast(both.whole)
                yield Rotated(x, cos, sin, found.inside | both.inside | cast)


def _normed(found: Found, outputs: Outputs, inside: frozenset[fx.Node]) -> Normed:
    given = found.arguments
    return Normed(given["x"], given.get("residual"), given["weight"], given["eps"], outputs, inside)


def _is_by_rows(found: Found, scales: Found) -> bool:
    """Each row of what is quantised is scaled by the scale that is computed of it."""
    y, scale = found.arguments["y"], found.arguments["scale"]
    return same_value(scales.arguments["y"], y) and sizes(scale) == [*sizes(y)[:-1], 1]


def _by_rows(
    found: Found, outputs: Outputs, inside: frozenset[fx.Node], group_size: int | None
) -> Iterator[Quantised]:
    """See Note [Views in between]."""
    given = found.arguments["y"]
    y, views = behind_views(given)
    row, size = tensor(y).shape[-1], group_size or tensor(given).shape[-1]
    if not isinstance(row, int) or not isinstance(size, int):
        return
    inside = inside | views
    if group_size is None and row == size:
        yield Quantised("dynamic", y, None, None, outputs, inside)
    if group_size is not None or row != size or tensor(given).dim() > tensor(y).dim():
        yield Quantised("group", y, None, size, outputs, inside)


def halves(first: fx.Node, second: fx.Node) -> Halves | None:
    """What these are the first and the last half of the columns of.

    A cast may stand in front of them, in both.
    """
    if first.target is CAST and second.target is CAST and first.args[1:] == second.args[1:]:
        narrow = halves(first.all_input_nodes[0], second.all_input_nodes[0])
        return narrow and Halves(narrow.whole, narrow.inside | {first, second})
    places = [_columns(node) for node in (first, second)]
    if places[0] is None or places[1] is None:
        return None
    (whole, start, middle, nodes), (other, after, end, more) = places[0], places[1]
    is_cut_in_two = start == 0 and middle == after and end == 2 * middle
    if not same_value(whole, other) or not is_cut_in_two or end != tensor(whole).shape[-1]:
        return None
    return Halves(whole, nodes | more | ({other} if other is not whole else _NOTHING))


def _columns(node: fx.Node) -> tuple[fx.Node, int, int, frozenset[fx.Node]] | None:
    """The tensor that this is columns of, from where to where, and the nodes that take them."""
    width = tensor(node).shape[-1] if isinstance(_torch.value_of(node), Tensor) else None
    if not isinstance(width, int) or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    if node.target is aten.slice.Tensor and len(node.args) in (3, 4) and not node.kwargs:
        dim, start = node.args[1:3]
        is_last = dim in (-1, tensor(source).dim() - 1)
        if is_last and isinstance(start, int) and start >= 0:
            return source, start, start + width, frozenset({node})
    if source.target in (aten.split.Tensor, aten.split_with_sizes.default):
        return _columns_of_split(node, source, width)
    return None


def _columns_of_split(
    node: fx.Node, split: fx.Node, width: int
) -> tuple[fx.Node, int, int, frozenset[fx.Node]] | None:
    base, sizes, *dim = (*split.args, *split.kwargs.values())
    number = node.args[1]
    if not isinstance(base, fx.Node) or dim not in ([-1], [tensor(base).dim() - 1]):
        return None
    before = [sizes] * number if isinstance(sizes, int) else list(sizes[:number])  # type: ignore
    if not all(isinstance(size, int) for size in before):
        return None
    return base, sum(before), sum(before) + width, frozenset({node, split})


def behind_views(node: fx.Node) -> tuple[fx.Node, frozenset[fx.Node]]:
    """The tensor that this is a view or a copy of, and the nodes on the way."""
    passed = set()
    while node.target in VIEWS:
        passed.add(node)
        node = node.all_input_nodes[0]
    return node, frozenset(passed)


def uncast(node: fx.Node) -> tuple[fx.Node, frozenset[fx.Node]]:
    """What is cast to float32 here, if anything is, and the cast."""
    if node.target is CAST and tensor(node).dtype == torch.float32:
        return node.all_input_nodes[0], frozenset({node})
    return node, _NOTHING


def sizes(node: fx.Node) -> list[Any]:
    """The shape, with expressions for symbolic sizes: comparing them assumes nothing."""
    return [_torch.size_expr(size) for size in tensor(node).shape]


def tensor(node: fx.Node) -> Tensor:
    """The value of a node that is a tensor."""
    value = _torch.value_of(node)
    assert isinstance(value, Tensor), f"{node} is {value}"
    return value
