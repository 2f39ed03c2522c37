"""Keep ops that write their arguments from being given copies.

In:  the graph of a piece, mutation made functional: an op that writes stands in it as
     `auto_functionalized`, which returns what it would have written.
Out: the same nodes in another order; the count of writes that need no copy any more.

Note [What Inductor does by itself]
After our passes Inductor puts every such op back: in place where nobody reads the old value of
what is written afterwards, with a copy elsewhere. It does so by the schema of the op, through
views, for several written arguments, slices and returned values alike; nothing of that is
rebuilt here. But before our passes it has moved every node next to its first reader
(`reorder_for_locality`), behind the write as well: `y = x * 2; op_(x); return y + x` reads the
old `x` last, and is given a copy. The program read before it wrote, so a read can be put back in
front of the write whenever it does not depend on it. That what is read there is also computed
there is seen to by `_torch.compile_with_inductor`; Inductor by itself gets it wrong.

What is read early is kept until it is used. For an input of the graph that is always worth it: a
copy would be made and copied back, which for a cache is all of it. For other tensors it is worth
it if what is kept is no larger than the copy.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from piecewise_backend import _torch

aten = torch.ops.aten


def read_before_write(graph: fx.Graph) -> int:
    """Put reads in front of the writes that would destroy what they read; returns how many
    written tensors are spared a copy."""
    count = 0
    for write in list(graph.nodes):
        for base in dict.fromkeys(_torch.functionalized_writes(write)):
            count += _spare(write, base)
    return count


def _spare(write: fx.Node, base: fx.Node) -> bool:
    order = {node: position for position, node in enumerate(write.graph.nodes)}
    aliases = _aliases(base)
    is_input = any(alias.op in ("placeholder", "get_attr") for alias in aliases)
    write_back = _write_back(aliases)
    if is_input and write_back is None:
        return False  # the caller's tensor must stay as it is: a copy is due
    end = order[write_back] if write_back is not None else len(order)
    late = [u for a in aliases for u in a.users if order[write] < order[u] < end]
    moved = _with_sources(late, write, order)
    if not moved or any(write in node.all_input_nodes for node in moved):
        return False  # nobody reads the old value late, or both values at once
    if any(n.op != "call_function" or any(_torch.functionalized_writes(n)) for n in moved):
        return False
    last = max(order[node] for node in moved)
    if any(_torch.has_order(n) for n, position in order.items() if order[write] < position <= last):
        return False
    if not is_input and _kept_bytes(moved) > _bytes(base):
        return False
    for node in sorted(moved, key=order.__getitem__):
        write.prepend(node)
    return True


def _aliases(base: fx.Node) -> list[fx.Node]:
    """The nodes whose values lie in the same memory."""
    storage = _storage(base)
    return [n for n in base.graph.nodes if n is base or (storage and _storage(n) == storage)]


def _storage(node: fx.Node) -> int | None:
    value = _torch.value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _write_back(aliases: Iterable[fx.Node]) -> fx.Node | None:
    """Where the graph copies the new value into its input, if it does."""
    found = (
        user
        for alias in aliases
        if alias.op == "placeholder"
        for user in alias.users
        if user.target is aten.copy_.default and user.args[0] is alias
    )
    return next(found, None)


def _with_sources(
    nodes: Iterable[fx.Node], write: fx.Node, order: dict[fx.Node, int]
) -> set[fx.Node]:
    """The nodes behind the write among these and what they are computed from."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if order[node] > order[write] and node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _kept_bytes(moved: set[fx.Node]) -> int:
    """What must be kept across the write and was not before."""
    kept = [n for n in moved if any(user not in moved for user in n.users)]
    return sum(map(_bytes, kept))


def _bytes(node: fx.Node) -> int:
    value = _torch.value_of(node)
    if not isinstance(value, torch.Tensor):
        return 0
    elements = 1
    for size in value.shape:
        elements *= _torch.hint_of(size)
    return elements * value.element_size()
