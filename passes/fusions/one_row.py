"""Where the ops of `ops.one_row` can stand: linear layers of one row, and what is around them.

In:  parts, and the node that would be the result of the op.
Out: `Occurrence`s.
Knows nothing of how parts are spelled, nor of when such an op is faster.

Note [What Inductor leaves of a linear layer]
`mm(x, permute(weight))`, or `addmm(addend, x, permute(weight))` with a bias; a residual that is
added becomes an addend as well, or stays a sum of its own. Options that tune products by
coordinate descent write those of one row as a sum over a product instead: nothing is found there.

Note [A norm with several readers]
The norm in front of separate projections is read by each of them. Each op computes it by itself,
and the norm is gone with the last of its readers. If something else reads it as well, it has to be
computed anyway, and the ops read the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from piecewise_backend import _torch
from piecewise_backend.passes.fusions.fusing import Occurrence
from piecewise_backend.passes.fusions.parts import VIEWS, Reader, behind_views, sizes, tensor
from piecewise_backend.passes.ops.one_row import DTYPES, MAX_COLUMNS

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class _Product:
    """A linear layer of one row."""

    x: fx.Node
    """The row, in whatever shape."""
    weight: fx.Node
    addend: fx.Node | None
    inside: frozenset[fx.Node]


def linear(reader: Reader, node: fx.Node) -> Iterator[Occurrence]:
    """A product, perhaps with an addend of its own."""
    product = _product(node)
    if product is not None:
        yield from _with_norm(reader, node, product, (product.weight, product.addend))


def sum_with_linear(reader: Reader, node: fx.Node) -> Iterator[Occurrence]:
    """A product, and what is added to it behind."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return
    for given, addend in (node.args, node.args[::-1]):
        if isinstance(given, fx.Node) and isinstance(addend, fx.Node):
            inner, views = behind_views(given)
            product = _product(inner)
            if product is not None and product.addend is None and _is_addend(addend, inner):
                product = dataclasses.replace(product, inside=product.inside | views | {inner})
                yield from _with_norm(reader, node, product, (product.weight, addend))


def gated(reader: Reader, node: fx.Node) -> Iterator[Occurrence]:
    """The first half of a gated MLP: one product that is halved, or two of the same row."""
    if tensor(node).dtype not in DTYPES:
        return
    for both in reader.gated(node):
        whole, views = behind_views(both.whole)
        product = _product(whole)
        if product is not None and product.addend is None and sizes(whole)[-1] % 2 == 0:
            inside = product.inside | both.inside | views | {both.whole, whole}
            product = dataclasses.replace(product, inside=inside)
            yield from _with_norm(reader, node, product, (product.weight, None))
    for gate, up, inside in reader.gate_and_up(node):
        yield from _gated_by_two(reader, node, gate, up, inside)


def _gated_by_two(
    reader: Reader, node: fx.Node, gate: fx.Node, up: fx.Node, inside: frozenset[fx.Node]
) -> Iterator[Occurrence]:
    (gate, gate_views), (up, up_views) = behind_views(gate), behind_views(up)
    products = (_product(gate), _product(up))
    if products[0] is None or products[1] is None:
        return
    first, second = products[0], products[1]
    are_alike = first.addend is None and second.addend is None and first.x is second.x
    if are_alike and sizes(gate) == sizes(up):
        inside = inside | first.inside | second.inside | gate_views | up_views | {gate, up}
        product = dataclasses.replace(first, inside=inside)
        yield from _with_norm(reader, node, product, (first.weight, second.weight))


def _with_norm(
    reader: Reader, node: fx.Node, product: _Product, others: tuple[Any, ...]
) -> Iterator[Occurrence]:
    """The op with the norm in front of the product, if there is one; then without."""
    x, ours = product.x, product.inside | {node}
    others_products = [_product(user) for user in _readers(x) if user not in ours]
    # See Note [A norm with several readers]
    if all(other is not None and other.x is x for other in others_products):
        for norm in reader.normed(x):
            if norm.residual is None and _is_norm(norm.x, norm.weight, x):
                gone = frozenset() if others_products else norm.inside | {x}
                arguments = (norm.x, *others, norm.weight, norm.eps)
                yield Occurrence(arguments, ((node,),), product.inside | gone)
    yield Occurrence((x, *others), ((node,),), product.inside)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads it, or a view of it."""
    for user in node.users:
        if user.target in VIEWS:
            yield from _readers(user)
        else:
            yield user


def _product(node: fx.Node) -> _Product | None:
    """The linear layer of one row whose result this is. See Note [What Inductor leaves of a
    linear layer]."""
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return None
    *addends, x, turned = node.args
    if len(addends) != (node.target is aten.addmm.default) or not isinstance(turned, fx.Node):
        return None
    if not isinstance(x, fx.Node) or not _is_turned(turned) or sizes(x)[0] != 1:
        return None
    weight = turned.all_input_nodes[0]
    values, addend = tensor(x), addends[0] if addends else None
    num_columns = values.shape[1]
    is_served = values.dtype in DTYPES and values.device.type in ("cpu", "cuda")
    if not is_served or not isinstance(num_columns, int) or not 0 < num_columns <= MAX_COLUMNS:
        return None
    if tensor(weight).dtype != values.dtype or not _is_stored(weight):
        return None
    if addend is not None and not (isinstance(addend, fx.Node) and _is_addend(addend, node)):
        return None
    inside = {turned} if len(turned.users) == 1 else set()
    given, views = behind_views(x)
    # Heads that lie side by side are a row as well, but not by their shape.
    if sizes(given)[-1:] == sizes(x)[-1:]:
        return _Product(given, weight, addend, frozenset(inside | views))
    return _Product(x, weight, addend, frozenset(inside))


def _is_turned(node: fx.Node) -> bool:
    """The transpose of a matrix, as `F.linear` takes it."""
    if node.target is aten.permute.default:
        return list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return node.target is aten.t.default


def _is_stored(weight: fx.Node) -> bool:
    """It lies in memory, row behind row: what is computed may be better off in the product."""
    value = tensor(weight)
    is_given = weight.op in ("placeholder", "get_attr")
    return is_given and all(isinstance(n, int) for n in value.shape) and value.is_contiguous()


def _is_addend(addend: fx.Node, node: fx.Node) -> bool:
    """One value for each of the product's."""
    given, product = _torch.value_of(addend), tensor(node)
    if not isinstance(given, Tensor) or given.dtype != product.dtype:
        return False
    num_values = sizes(node)[-1]
    is_row = given.dim() > 0 and sizes(addend)[-1:] == [num_values]
    return is_row and all(size == 1 for size in sizes(addend)[:-1])


def _is_norm(x: fx.Node, weight: fx.Node, result: fx.Node) -> bool:
    """The op can compute it: a row of the same dtype, and one weight for each column."""
    values, scale = tensor(x), tensor(weight)
    is_kind = values.dtype == scale.dtype == tensor(result).dtype
    return is_kind and sizes(x) == sizes(result) and sizes(weight) == sizes(result)[-1:]
