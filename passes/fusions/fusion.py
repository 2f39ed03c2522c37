"""A fusion: wherever a graph has the parts that a fused op computes, the op takes their place.

In:  the graph of a piece as Inductor has it, after no-ops are gone.
Out: the same graph with fused ops; the count of them.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, fx

from piecewise_backend import _torch
from piecewise_backend.errors import ConfigError
from piecewise_backend.passes.fusions.comparing import traced
from piecewise_backend.passes.fusions.fusing import Occurrence
from piecewise_backend.passes.fusions.parts import Reader
from piecewise_backend.passes.fusions.spellings import (
    BUILT_IN,
    PARTS,
    Spelling,
    Spellings,
)
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

    def with_spelling(self, part: str, spelling: Spelling) -> Self:
        """The same with one more way to spell a part."""
        spelled = {**self.spellings, part: (*self.spellings[part], spelling)}
        return dataclasses.replace(self, spellings=spelled)

    def uuid(self) -> str:
        """Changes whenever the outcome may change; spellings may be those of users."""
        spelled = [s for spellings in self.spellings.values() for s in spellings]
        return repr((str(self.op), content_key([self.find, *spelled])))


def check_spelling(part: str, spelling: Spelling) -> None:
    """Refuse what is no spelling of a part.

    Raises:
        ConfigError: there is no such part, or the function takes or returns something else.
    """
    known = PARTS.get(part)
    if known is None:
        close = difflib.get_close_matches(str(part), PARTS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {list(PARTS)}"
        raise ConfigError(f"a spelling is registered for {part!r}, which is no part; {hint}")
    names = tuple(_torch.positional_parameters(spelling))
    if names != known.parameters:
        raise ConfigError(
            f"the spelling of {part!r} takes {names}; its parameters must be {known.parameters}"
        )
    pattern = traced(spelling, torch.bfloat16, torch.device("cpu"))
    if len(pattern.outputs) != known.num_results:
        raise ConfigError(
            f"the spelling of {part!r} returns {len(pattern.outputs)} tensors; "
            f"return {known.num_results}"
        )
    unused = [name for name in names if name not in pattern.certain()]
    if unused:
        raise ConfigError(
            f"the spelling of {part!r} makes no use of {unused}; its first result must depend on "
            "each tensor, and an op must take each number as it is"
        )
