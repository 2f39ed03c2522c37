"""Take out of a graph what changes neither values nor layout, so that patterns meet.

In:  the graph of a piece as Inductor has it: aten ops, functional, values on nodes.
Out: the same graph with fewer nodes; the count of those that went or were folded.

- A reshape of a reshape becomes one of the base tensor.
- A reshape to the same shape, and a slice over the full width, become the base tensor.
- A slice_scatter over the full width becomes what is scattered.

Two sizes are the same if they are the same integer, or the same expression over size symbols, or
if the reshape leaves its size open (-1). Nothing is asked of a symbol, so that no assumption
about the token count is made. An end of -1 is not the full width. Whatever copies - a reshape
that cannot be a view, `contiguous`, `clone` - stays, because what it makes has another layout or
memory of its own; and so does what the graph returns, because its caller may tell the difference.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx

from piecewise_backend import _torch

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def eliminate_noops(graph: fx.Graph) -> int:
    """Remove and fold no-ops; returns how many."""
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        count += node.target in _RESHAPES and _fold(node)
        same = _replacement(node)
        if same is not None and not _is_returned(node):
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            count += 1
    return count


def _fold(node: fx.Node) -> bool:
    """Let a reshape read the base of the reshape that it reads; the inner one may go."""
    inner = node.args[0]
    if not isinstance(inner, fx.Node) or inner.target not in _RESHAPES:
        return False
    base = inner.args[0]
    if not isinstance(base, fx.Node) or not _shares_memory(inner, base):
        return False
    node.update_arg(0, base)
    if not inner.users:
        inner.graph.erase_node(inner)
    return True


def _replacement(node: fx.Node) -> fx.Node | None:
    """The node that this one is no different from, if there is one."""
    tensors = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
    if not tensors or not isinstance(_torch.value_of(tensors[0]), torch.Tensor):
        return None
    base = tensors[0]
    if node.target in _RESHAPES and len(node.args) == 2:
        return base if _is_same_shape(base, node.args[1]) and _shares_memory(node, base) else None
    if node.target is aten.slice.Tensor:
        is_full = _is_full_width(base, *node.args[1:], **node.kwargs)
        return base if is_full and _shares_memory(node, base) else None
    if node.target is aten.slice_scatter.default:
        is_full = _is_full_width(base, *node.args[2:], **node.kwargs)
        return tensors[1] if is_full and _is_same_layout(node, tensors[1]) else None
    return None


def _is_full_width(
    base: fx.Node, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1
) -> bool:
    width = _torch.value_of(base).shape[dim]
    if not (start is None or _expr(start) == 0) or step != 1:
        return False
    if isinstance(end, int):
        return end == sys.maxsize or (isinstance(width, int) and end >= width)
    return end is None or bool(_expr(end) == _expr(width))


def _is_same_shape(base: Any, shape: Any) -> bool:
    sizes = _torch.value_of(base).shape
    if len(sizes) != len(shape):
        return False
    pairs = zip(sizes, shape, strict=True)
    # At most one size is -1, and the others leave it no choice.
    return all((isinstance(b, int) and b == -1) or _expr(a) == _expr(b) for a, b in pairs)


def _shares_memory(node: fx.Node, base: Any) -> bool:
    """The values say that one is a view of the other, or the same."""
    a, b = _torch.value_of(node), _torch.value_of(base)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _is_same_layout(node: fx.Node, other: Any) -> bool:
    a, b = _torch.value_of(node), _torch.value_of(other)
    if a.dtype != b.dtype or a.device != b.device or a.dim() != b.dim():
        return False
    return all(
        _expr(x) == _expr(y)
        for x, y in zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=True)
    )


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _expr(size: Any) -> Any:
    """An integer, or the expression that a symbolic size or the node of one stands for."""
    value = _torch.value_of(size) if isinstance(size, fx.Node) else size
    return _torch.size_expr(value) if isinstance(value, int | torch.SymInt) else value
