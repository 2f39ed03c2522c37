"""What a pass is: data.

A `Rewrite` replaces what looks like a pattern, a `Transform` is a function over a graph. Neither
knows when it runs: `order` does. See Note [Two stages].

Note [Two stages]
A pass of stage "piece" sees the graph of one distinct piece, inside Inductor, after torch ops
were decomposed to aten ops and mutation was made functional. It runs once per compilation.
A pass of stage "graph" sees the graph as Dynamo traced it - torch functions and methods as the
user wrote them - before it is cut, so that it can see across a cut. It runs once per trace.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from piecewise_backend import _torch
from piecewise_backend.errors import ConfigError

STAGES = ("graph", "piece")
Function = Callable[[fx.Graph], int | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Replace every occurrence of a pattern.

    The pattern and the replacement are functions of the same tensors, written in plain torch;
    both are traced. An occurrence is not replaced if something in the middle of it is used
    elsewhere as well.
    """

    name: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    example_inputs: Callable[[], Sequence[Any]] = tuple
    """Makes arguments to trace the pattern with; what counts is dtypes and ranks. A rewrite of
    stage "graph" is traced without."""
    scalars: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    """Parameters of the pattern that are numbers, any of which matches (an epsilon, say), each
    with a value that occurs nowhere else in the pattern. They are not among `example_inputs`."""
    requires: Callable[..., bool] | None = None
    """Called with what the parameters of the pattern stand for - tensors without data, numbers -
    by name; False leaves the occurrence alone. Compare sizes only where they are integers."""
    stage: str = "piece"
    min_matches: int = 0
    """Fewer matches in all pieces of a graph are a PassError."""
    enabled: bool = True
    """Whether it runs where `pass_config` does not say."""
    key: str | None = None
    """Stands for the functions in cache keys, instead of their content."""
    uncut: Sequence[str] = ()
    """Ops ("ns::op") that the pattern has to find inside of a piece, so that the graph must not be
    cut at them. See `uncut`, the module, for when that is granted."""

    def matcher(self) -> Callable[[fx.Graph], int]:
        """A function that rewrites a graph and counts; costs a trace of the pattern."""
        make = _torch.graph_rewriter if self.stage == "graph" else _torch.piece_rewriter
        return make(
            self.pattern, self.replacement, self.example_inputs, self.scalars, self.requires
        )

    def ingredients(self) -> tuple[Any, ...]:
        """What the result of the pass depends on."""
        return (self.pattern, self.replacement, self.example_inputs, self.requires, self.scalars)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """A function that changes a graph in place and returns how often, or None."""

    name: str
    function: Function
    stage: str = "piece"
    min_matches: int = 0
    enabled: bool = True
    key: str | None = None
    uncut: Sequence[str] = ()

    def matcher(self) -> Function:
        """The function itself."""
        return self.function

    def ingredients(self) -> tuple[Any, ...]:
        """What the result of the pass depends on."""
        return (self.function,)


Pass = Rewrite | Transform


def as_pass(given: Any, **fields: Any) -> Pass:
    """A pass of whatever a user has: a pass, a function, an object that is called with a graph.

    Args:
        given: that.
        fields: replace fields of the pass; None leaves one as it is.

    Raises:
        ConfigError: it is none, or a field has a wrong value.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    if isinstance(given, Rewrite | Transform):
        made: Pass = dataclasses.replace(given, **fields)
    elif callable(given) and not isinstance(given, type):
        fields.setdefault("name", getattr(given, "__name__", type(given).__name__))
        made = Transform(function=given, **fields)
    else:
        raise ConfigError(
            f"{given!r} is no pass; give a function of an fx.Graph, an object that is called "
            "with one, or pw.Rewrite(...)"
        )
    return _checked(made)


def _checked(made: Pass) -> Pass:
    if not isinstance(made.name, str) or not made.name.isidentifier():
        raise ConfigError(
            f"a pass is named {made.name!r}; pass name= with a word such as 'fuse_gate', which "
            "options and file names are made of"
        )
    if made.stage not in STAGES:
        raise ConfigError(f"pass {made.name!r} has stage {made.stage!r}; use one of {STAGES}")
    least = made.min_matches
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise ConfigError(f"pass {made.name!r} has min_matches={least!r}; give an integer")
    if not isinstance(made.enabled, bool):
        raise ConfigError(f"pass {made.name!r} has enabled={made.enabled!r}; give True or False")
    if made.key is not None and not isinstance(made.key, str):
        raise ConfigError(f"pass {made.name!r} has key={made.key!r}; give a text")
    if isinstance(made.uncut, str) or not all("::" in str(op) for op in made.uncut):
        raise ConfigError(
            f"pass {made.name!r} has uncut={made.uncut!r}; give a list of names such as ['ns::op']"
        )
    if made.uncut and made.stage == "graph":
        raise ConfigError(
            f"pass {made.name!r} has uncut={made.uncut!r}, but stage 'graph' sees the graph before "
            "it is cut; leave one of them out"
        )
    if isinstance(made, Rewrite):
        _check_parameters(made)
    return made


def _check_parameters(rewrite: Rewrite) -> None:
    """Pattern and replacement take the same parameters in the same order, each by name."""
    for role, function in (("pattern", rewrite.pattern), ("replacement", rewrite.replacement)):
        if not callable(function):
            raise ConfigError(f"pass {rewrite.name!r}: {role}={function!r}; give a function")
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            raise ConfigError(
                f"pass {rewrite.name!r}: the {role} takes {inspect.signature(function)}; give "
                "each parameter a name"
            )
    names = _torch.positional_parameters(rewrite.pattern)
    if names != _torch.positional_parameters(rewrite.replacement):
        raise ConfigError(
            f"pass {rewrite.name!r}: the pattern takes {names} and the replacement "
            f"{_torch.positional_parameters(rewrite.replacement)}; they must be the same"
        )
    unknown = set(rewrite.scalars) - set(names)
    if unknown:
        raise ConfigError(
            f"pass {rewrite.name!r}: scalars has {sorted(unknown)}, but the pattern takes {names}"
        )
