"""Where each fused op can stand: parts put together, and what the op demands of them.

In:  parts, and the node that would be the first result of the op.
Out: `Occurrence`s.
Knows nothing of how parts are spelled.

Note [Preconditions]
What an op refuses (`ops.checks`) is no occurrence: another dtype of weights than of values, a scale
of several elements or of another dtype, a residual of another shape, rows that groups do not
divide. Sizes are compared as expressions, so that no assumption about the token count is made.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, fx

from piecewise_backend import _torch
from piecewise_backend.passes.fusions.fusing import Occurrence
from piecewise_backend.passes.fusions.parts import (
    DTYPES,
    Normed,
    Quantised,
    Reader,
    behind_views,
    sizes,
    tensor,
    uncast,
)
from piecewise_backend.passes.ops.checks import MAX_ROW

_DEVICES = ("cpu", "cuda")


def norm_quant(reader: Reader, node: fx.Node, *, kind: str, is_add: bool) -> Iterator[Occurrence]:
    """RMSNorm, perhaps of a sum, and quantisation."""
    for quant in reader.quantised(node):
        if quant.kind != kind:
            continue
        for norm in reader.normed(quant.y):
            if (norm.residual is not None) != is_add:
                continue
            if _is_norm(norm) and _is_quant(quant, norm.x, tensor(norm.x).shape[-1]):
                residual = [norm.residual] if norm.residual is not None else []
                scale = [quant.scale] if quant.scale is not None else []
                groups = [quant.group_size] if quant.group_size is not None else []
                arguments = (norm.x, *residual, norm.weight, *scale, norm.eps, *groups)
                inside = quant.inside | norm.inside | {quant.y}
                yield Occurrence(arguments, (*quant.outputs, *norm.outputs), inside)


def silu_mul_quant(reader: Reader, node: fx.Node, *, kind: str) -> Iterator[Occurrence]:
    """The product of a gated MLP and quantisation."""
    for quant in reader.quantised(node):
        if quant.kind != kind:
            continue
        for both in reader.gated(quant.y):
            x = both.whole
            width = tensor(x).shape[-1]
            if not _is_values(x) or width % 2:
                continue
            if (kind != "dynamic" or width // 2 <= MAX_ROW) and _is_quant(quant, x, width // 2):
                scale = [quant.scale] if quant.scale is not None else []
                groups = [quant.group_size] if quant.group_size is not None else []
                inside = quant.inside | both.inside | {quant.y}
                yield Occurrence((x, *scale, *groups), quant.outputs, inside)


@dataclasses.dataclass(frozen=True, slots=True)
class _Heads:
    """Heads that are normalised and rotated."""

    norm: Normed
    cos: fx.Node
    sin: fx.Node
    result: fx.Node
    inside: frozenset[fx.Node]

    def shared(self) -> tuple[object, ...]:
        """What heads of queries and keys must have in common."""
        x = tensor(self.norm.x)
        *tokens, _, head_dim = sizes(self.norm.x)
        return (self.cos, self.sin, self.norm.eps, x.dtype, x.device, tokens, head_dim)


def qk_norm_rope(reader: Reader, node: fx.Node) -> Iterator[Occurrence]:
    """Norms of query and key heads, then their rotation by the same angles."""
    for q in _heads(reader, node):
        others = itertools.dropwhile(lambda other: other is not node, node.graph.nodes)
        for k in _readable(reader, itertools.islice(others, 1, None)):
            if q.shared() == k.shared():
                norms = (q.norm.x, k.norm.x, q.norm.weight, k.norm.weight)
                arguments = (*norms, q.cos, q.sin, q.norm.eps)
                yield Occurrence(arguments, ((q.result,), (k.result,)), q.inside | k.inside)


def _readable(reader: Reader, nodes: Iterable[fx.Node]) -> Iterator[_Heads]:
    for node in nodes:
        if isinstance(_torch.value_of(node), Tensor):
            yield from _heads(reader, node)


def _heads(reader: Reader, node: fx.Node) -> Iterator[_Heads]:
    for rope in reader.rotated(node):
        for norm in reader.normed(rope.x):
            x = norm.x
            if not _is_norm(norm) or norm.residual is not None or tensor(x).dim() < 2:
                continue
            cos, sin = (_angles(given, x) for given in (rope.cos, rope.sin))
            is_like = sizes(x) == sizes(node) and tensor(x).dtype == tensor(node).dtype
            if cos is not None and sin is not None and is_like:
                inside = rope.inside | norm.inside | {rope.x} | cos[1] | sin[1]
                yield _Heads(norm, cos[0], sin[0], node, inside)


def _angles(given: fx.Node, x: fx.Node) -> tuple[fx.Node, frozenset[fx.Node]] | None:
    """One row for each token, of what is broadcast over its heads."""
    *tokens, _, head_dim = sizes(x)
    if sizes(given) != [*tokens, 1, head_dim / 2]:
        return None
    node, views = behind_views(given)
    node, cast = uncast(node)
    node, more = behind_views(node)
    is_row = sizes(node) == [*tokens, head_dim / 2]
    is_known = tensor(node).dtype in (torch.float32, tensor(x).dtype)
    return (node, views | cast | more) if is_row and is_known else None


def _is_norm(norm: Normed) -> bool:
    x, weight = tensor(norm.x), tensor(norm.weight)
    if not _is_values(norm.x) or x.shape[-1] > MAX_ROW:
        return False
    other = norm.residual
    if other is not None and not (
        _is_same_kind(other, norm.x) and sizes(other) == sizes(norm.x) and _is_values(other)
    ):
        return False
    return _is_same_kind(norm.weight, norm.x) and list(weight.shape) == [x.shape[-1]]


def _is_quant(quant: Quantised, x: fx.Node, num_columns: int) -> bool:
    if quant.scale is not None:
        scale = tensor(quant.scale)
        is_one = all(isinstance(size, int) and size == 1 for size in scale.shape)
        return is_one and scale.dtype == torch.float32 and scale.device == tensor(x).device
    size = quant.group_size
    return size is None or (size > 0 and size & (size - 1) == 0 and num_columns % size == 0)


def _is_values(node: fx.Node) -> bool:
    x = tensor(node)
    if x.dim() == 0 or not isinstance(x.shape[-1], int) or x.shape[-1] == 0:
        return False
    if uncast(node)[1]:
        return False  # it would be written as float32 only to be read by the op
    return x.dtype in DTYPES and x.device.type in _DEVICES and _has_float8(x.device)


@functools.cache
def _has_float8(device: torch.device) -> bool:
    """Triton converts to `float8_e4m3fn` since compute capability 8.9."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _is_same_kind(node: fx.Node, other: fx.Node) -> bool:
    a, b = tensor(node), tensor(other)
    return (a.dtype, a.device) == (b.dtype, b.device)
