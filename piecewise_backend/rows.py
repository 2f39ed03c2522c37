"""The views of padded buffers that a captured plan needs for one batch.

In:  the buffers with their layouts, and the symbol values of a batch.
Out: the `rows` argument of a plan, made once for each batch of these sizes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from piecewise_backend.sizes import Layout, SizeFunction, Sizes


@dataclasses.dataclass(frozen=True, slots=True)
class RowTable:
    """What a plan needs for one token count: views of its buffers, and numbers."""

    tensors: tuple[tuple[torch.Tensor, Layout], ...]
    numbers: SizeFunction
    for_split_ops: frozenset[int]
    """Positions of the tensors that split ops are given."""
    zeroed: tuple[tuple[torch.Tensor, Layout], ...] = ()
    """Buffers whose padded rows must be zero."""

    def are_contiguous_as_promised(self, sizes: Sizes) -> bool:
        """What eager would give to split ops contiguous is so in the rows of a padded tensor.

        It is not if the token dimension is not the first, and a kernel may rely on it.
        """
        return all(
            layout.rows(tensor, sizes).is_contiguous() or not layout.is_contiguous(sizes)
            for tensor, layout in (self.tensors[i] for i in self.for_split_ops)
        )

    def at(self, sizes: Sizes) -> tuple[Any, ...]:
        """The `rows` argument of the plan for a batch of these sizes."""
        views = (layout.rows(tensor, sizes) for tensor, layout in self.tensors)
        padding = [self._padding(sizes)] if self.zeroed else []
        return (*views, *self.numbers(sizes), *padding)

    def _padding(self, sizes: Sizes) -> list[list[torch.Tensor]]:
        """By dtype, because one kernel takes one."""
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor, layout in self.zeroed:
            groups.setdefault(tensor.dtype, []).extend(layout.padding(tensor, sizes))
        return [group for group in groups.values() if group]
