"""A fusion: wherever a graph has the parts that a fused op computes, the op takes their place.

In:  the graph of a piece as Inductor has it, after no-ops are gone.
Out: the same graph with fused ops; the count of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, fx

from piecewise_backend import _torch
from piecewise_backend.passes.fusions.fusing import Occurrence
from piecewise_backend.passes.fusions.parts import Reader
from piecewise_backend.passes.fusions.spellings import BUILT_IN, Spellings
from piecewise_backend.passes.keys import content_key

Find = Callable[[Reader, fx.Node], Iterator[Occurrence]]


@dataclasses.dataclass(frozen=True, slots=True)
class Fusion:
    """A function over a graph, as a pass has it."""

    op: Any
    """What is put in."""
    find: Find
    """The places whose first result a node may be."""
    spellings: Spellings = dataclasses.field(default_factory=lambda: BUILT_IN)

    def __call__(self, graph: fx.Graph) -> int:
        """Fuse; returns how often."""
        reader, count = Reader(self.spellings), 0
        gone: set[fx.Node] = set()
        for node in list(graph.nodes):
            if node not in gone and isinstance(_torch.value_of(node), Tensor):
                erased = self._fuse(reader, node)
                gone |= erased
                count += bool(erased)
        if count:
            _torch.sort_nodes(graph)
        return count

    def _fuse(self, reader: Reader, node: fx.Node) -> frozenset[fx.Node]:
        for found in self.find(reader, node):
            if found.is_self_contained() and (erased := found.replace(node.graph, self.op)):
                return erased
        return frozenset()

    def uuid(self) -> str:
        """Changes whenever the outcome may change; spellings may be those of users."""
        spelled = [s for spellings in self.spellings.values() for s in spellings]
        return repr((str(self.op), content_key([self.find, *spelled])))
