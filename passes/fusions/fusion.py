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
from piecewise_backend.passes.fusions.comparing import Pattern, traced
from piecewise_backend.passes.fusions.fusing import Occurrence
from piecewise_backend.passes.fusions.parts import Reader
from piecewise_backend.passes.fusions.spellings import (
    BUILT_IN,
    PARTS,
    Part,
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
    if not callable(spelling) or isinstance(spelling, type):
        raise ConfigError(
            f"the spelling of {part!r} is {spelling!r}; give a function of {known.parameters}"
        )
    pattern = _traced(part, known, spelling)
    _check_results(part, known, pattern)
    names = known.parameters
    unused = [name for name in names if name not in pattern.certain()]
    if unused:
        raise ConfigError(
            f"the spelling of {part!r} makes no use of {unused}; its first result must depend on "
            "each tensor, and an op must take each number as it is"
        )


def _traced(part: str, known: Part, spelling: Spelling) -> Pattern:
    try:
        names = tuple(_torch.positional_parameters(spelling))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the spelling of {part!r} has no readable parameters ({error}); give a function of "
            f"{known.parameters}"
        ) from error
    if names != known.parameters:
        raise ConfigError(
            f"the spelling of {part!r} takes {names}; its parameters must be {known.parameters}"
        )
    try:
        return traced(spelling, torch.bfloat16, torch.device("cpu"))
    except Exception as error:  # it is the user's: anything may come
        raise ConfigError(
            f"the spelling of {part!r} cannot be traced, {type(error).__name__}: {error}; it must "
            "compute tensors from tensors, by torch and ops that have a fake implementation"
        ) from error


def _check_results(part: str, known: Part, pattern: Pattern) -> None:
    if not all(isinstance(given, fx.Node) for given in pattern.outputs):
        raise ConfigError(
            f"the spelling of {part!r} returns {pattern.outputs}; return {len(known.dtypes)} "
            "tensors that it computes"
        )
    if len(pattern.outputs) != len(known.dtypes):
        raise ConfigError(
            f"the spelling of {part!r} returns {len(pattern.outputs)} tensors; "
            f"return {len(known.dtypes)}"
        )
    expected = tuple(dtype or torch.bfloat16 for dtype in known.dtypes)
    dtypes = tuple(getattr(_torch.value_of(node), "dtype", None) for node in pattern.outputs)
    if dtypes != expected:
        raise ConfigError(
            f"the spelling of {part!r} makes {dtypes} of torch.bfloat16; it must make {expected}"
        )
    if any(node.op == "placeholder" for node in pattern.outputs):
        raise ConfigError(f"the spelling of {part!r} returns a parameter; return what it computes")
