"""A split graph as frozen data: inputs, steps and outputs of a straight-line program.

Knows nothing of how it was cut, nor of what is done with it.

Note [Host values]
Numbers computed from sizes (`x.shape[0] // 2`, `x.size()`) belong to no piece. A piece that
needs one recomputes it from the size symbols, which it gets as SymInt inputs; a split op or a
graph output gets it as a `Host` expression. So no torch.Size ever crosses a cut, and no piece
exists only to do arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import sympy
from torch import fx


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A tensor by name: a graph input, or an output of an earlier step."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """A number computed from size symbols on the host. See Note [Host values]."""

    expr: sympy.Expr


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value that is the same in every call: a hoisted constant of one layer."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class GraphInput:
    """One positional argument of the graph."""

    name: str
    source: str
    """How the user's program names it."""
    example: Any
    """A fake tensor or a SymInt of Dynamo's, or a constant."""
    is_static: bool
    """A parameter, buffer or other module state: its address is expected to stay."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part between cuts: compiled and captured as one."""

    index: int
    module: fx.GraphModule
    """Takes the values of `inputs` in order and returns a tuple of tensors, `outputs`."""
    inputs: tuple[Value | Host, ...]
    outputs: tuple[str, ...]
    examples: Mapping[str, Any]
    """Dynamo's fake tensor for each value among inputs and outputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class SplitOp:
    """One call that runs between pieces, outside of every graph."""

    index: int
    op_name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    """Arguments; `Value` and `Host` stand for what is known only at run time."""
    outputs: tuple[str | None, ...]
    """Names of the tensors it returns, None for those nobody uses."""
    returns_tuple: bool
    examples: Mapping[str, Any]
    location: str
    """The user's source line."""

    def values(self) -> tuple[Value, ...]:
        """The tensors among its arguments, in order."""
        return tuple(
            leaf for leaf in leaves_of((self.args, self.kwargs)) if isinstance(leaf, Value)
        )


Step = Piece | SplitOp


@dataclasses.dataclass(frozen=True, slots=True)
class SplitGraph:
    """A graph as a straight line of steps."""

    inputs: tuple[GraphInput, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    """`Value`, `Host` or a constant each."""
    symbols: tuple[sympy.Symbol, ...]
    """The size symbols of the inputs, in order of appearance."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The capturable steps."""
        return tuple(step for step in self.steps if isinstance(step, Piece))

    @property
    def split_ops(self) -> tuple[SplitOp, ...]:
        """The steps in between."""
        return tuple(step for step in self.steps if isinstance(step, SplitOp))

    def last_use(self) -> dict[str, int]:
        """For each value, the index of the last step that reads it (past the end: an output)."""
        last: dict[str, int] = {}
        for step in self.steps:
            for name in (*reads(step), *filter(None, step.outputs)):
                last[name] = step.index
        for leaf in self.outputs:
            if isinstance(leaf, Value):
                last[leaf.name] = len(self.steps)
        return last


def reads(step: Step) -> tuple[str, ...]:
    """The names of the tensors that a step is given."""
    refs = step.inputs if isinstance(step, Piece) else step.values()
    return tuple(ref.name for ref in refs if isinstance(ref, Value))


def map_leaves(structure: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to every leaf of nested tuples, lists, dicts and slices."""
    if isinstance(structure, tuple):
        return tuple(map_leaves(item, function) for item in structure)
    if isinstance(structure, list):
        return [map_leaves(item, function) for item in structure]
    if isinstance(structure, dict):
        return {key: map_leaves(item, function) for key, item in structure.items()}
    if isinstance(structure, slice):
        parts = (structure.start, structure.stop, structure.step)
        return slice(*(map_leaves(part, function) for part in parts))
    return function(structure)


def leaves_of(structure: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(structure, found.append)
    return found
