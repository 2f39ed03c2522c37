"""Which passes run, and in which order: the only place that says so.

In:  the passes of this package, those registered by users, those of one model, `pass_config`.
Out: the ordered passes of one model.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from piecewise_backend.errors import ConfigError
from piecewise_backend.passes.definition import Pass, Rewrite, Transform, as_pass
from piecewise_backend.passes.functionalization import read_before_write
from piecewise_backend.passes.fusions import FUSIONS, ONE_ROW, Fusion, check_spelling
from piecewise_backend.passes.keys import key_of
from piecewise_backend.passes.noops import eliminate_noops

_AS_FAST_WITHOUT = {"fuse_add_rms_norm_static_quant", "fuse_silu_mul_static_quant"}
NEVER_SLOWER: frozenset[str] = frozenset(FUSIONS) - _AS_FAST_WITHOUT
"""The fusions that run on CUDA where `pass_config` does not say: those that were never slower, at
any size, than what Inductor makes of the same (benchmarks/results/fusions.json, one H200)."""

BUILT_IN: tuple[Pass, ...] = (
    Transform(name="eliminate_noops", function=eliminate_noops),
    *(
        Transform(name=name, function=fusion, enabled=name in NEVER_SLOWER)
        for name, fusion in FUSIONS.items()
    ),
    Transform(name="read_before_write", function=read_before_write),
)

# Passes go in front of this one unless they say otherwise: it is to see what they made.
_LAST = BUILT_IN[-1].name

_DECORATE = object()
_ordered: list[Pass] = list(BUILT_IN)  # process-wide, as torch.library's registry is


def register_pass(
    item: Any = _DECORATE,
    /,
    *,
    name: str | None = None,
    before: str | None = None,
    after: str | None = None,
    stage: str | None = None,
    min_matches: int | None = None,
    enabled: bool | None = None,
    key: str | None = None,
    uncut: Sequence[str] | None = None,
) -> Any:
    """Add a pass for all models compiled from now on.

    Args:
        item: a function that changes an `fx.Graph` in place and returns how often it did (or
            None), an object that is called like one, or a `pw.Rewrite`. Without it, a decorator.
        name: a word for options, reports and file names; that of the function or rewrite if not
            given. Registering a name again replaces the pass.
        before: the name of the pass that it runs right before. Without `before` and `after` it
            runs after every other but the last, which fixes what the others made.
        after: the name of the pass that it runs right after.
        stage: "piece" (the default): it sees each distinct piece inside Inductor, as aten ops.
            With compiler="eager" it does not run. "graph": it sees the whole graph as
            Dynamo traced it, before it is cut. Sizes must not be compared with numbers there:
            that is an assumption about the token count.
        min_matches: fewer matches in all distinct pieces of a graph are a PassError.
        enabled: False: it runs only where `pass_config={name: True}`.
        key: stands for the functions in cache keys. Needed only if they depend on something
            that has no content to compare. It must change whenever what the pass does changes.
        uncut: ops that it has to find inside of a piece, as "ns::op": the graph is not cut at
            those that may be captured in every batch (`capture="always"`).

    Returns:
        `item`, unchanged.

    Raises:
        ConfigError: it is no pass, there is none of the name to run before or after, or no key
            can be made of it.
    """
    if item is _DECORATE:
        return functools.partial(
            register_pass,
            name=name,
            before=before,
            after=after,
            stage=stage,
            min_matches=min_matches,
            enabled=enabled,
            key=key,
            uncut=uncut,
        )
    made = as_pass(
        item,
        name=name,
        stage=stage,
        min_matches=min_matches,
        enabled=enabled,
        key=key,
        uncut=uncut,
    )
    key_of(made)
    _ordered[:] = _with(_ordered, made, before, after)
    return item


def register_spelling(part: str, spelling: Callable[..., Any]) -> None:
    """Let fusions find a part that is spelled by ops of yours, in models compiled from now on.

    Args:
        part: "rms_norm", "add_rms_norm", "silu_mul", "static_quant", "dynamic_quant",
            "group_quant" or "row_scale".
        spelling: a function of the parameters of the part (`spellings.PARTS`) in torch and ops of
            yours, `lambda x, weight, eps: torch.ops.my.norm(x, weight, eps)`; where an op writes
            its result into an argument, the function makes that. It is traced, not run. It must
            compute what `passes/ops/reference.py` says: the fused op takes its place.

    Raises:
        ConfigError: there is no such part, or the function takes or returns something else.
    """
    check_spelling(part, spelling)
    for position, item in enumerate(_ordered):
        if isinstance(item, Transform) and isinstance(item.function, Fusion):
            function = item.function.with_spelling(part, spelling)
            _ordered[position] = dataclasses.replace(item, function=function)


def passes_for(
    own: Sequence[Pass] = (), switches: Mapping[str, bool] | None = None, *, on_cuda: bool = False
) -> tuple[Pass, ...]:
    """The passes that run for one model, in order.

    Args:
        own: passes of this model alone, which go where `register_pass` would put them.
        switches: which of them run, by name; others as their `enabled` says.
        on_cuda: the model runs on CUDA, where fusions were measured: elsewhere they have to be
            switched on.

    Raises:
        ConfigError: `switches` names a pass that does not exist, or `own` has a name twice.
    """
    ordered = list(_ordered)
    own_names = [item.name for item in own]
    if twice := sorted({name for name in own_names if own_names.count(name) > 1}):
        raise ConfigError(f"passes= has several passes named {twice[0]!r}; give each a name=")
    for item in own:
        ordered = _with(ordered, item, None, None)
    switches = switches or {}
    known = [item.name for item in ordered]
    for name in switches:
        _position(known, name, "pass_config")
    return tuple(
        item for item in ordered if switches.get(item.name, _runs_by_default(item, on_cuda))
    )


def _runs_by_default(item: Pass, on_cuda: bool) -> bool:
    is_fusion = isinstance(item, Transform) and isinstance(item.function, Fusion)
    return item.enabled and (on_cuda or not is_fusion)


def one_row_passes() -> tuple[Pass, ...]:
    """What a version for one token may run as well: is it faster? That is measured, by `tuning`."""
    functions = (item.function for item in _ordered if isinstance(item, Transform))
    spellings = next(f.spellings for f in functions if isinstance(f, Fusion))
    return tuple(
        Transform(name=name, function=dataclasses.replace(fusion, spellings=spellings))
        for name, fusion in ONE_ROW.items()
    )


def extended(passes: Sequence[Pass], more: Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes of a model and more, those where `register_pass` would put them."""
    names = [item.name for item in passes]
    position = names.index(_LAST) if _LAST in names else len(names)
    return (*passes[:position], *more, *passes[position:])


def warn_if_fusing_without_noops(passes: Sequence[Pass], switches: Mapping[str, bool]) -> None:
    """A no-op in the middle of a pattern hides it; of fusions, those that were asked for count."""
    fusing = [p.name for p in passes if _looks_for_patterns(p, switches)]
    if fusing and "eliminate_noops" not in {item.name for item in passes}:
        warnings.warn(
            f"pass_config switches 'eliminate_noops' off, but {fusing} look for patterns, which "
            "a no-op in the middle hides; leave it on",
            RuntimeWarning,
            stacklevel=2,
        )


def _looks_for_patterns(item: Pass, switches: Mapping[str, bool]) -> bool:
    if isinstance(item, Rewrite):
        return item.stage == "piece"
    return isinstance(item.function, Fusion) and item.name in switches


def _with(ordered: Sequence[Pass], made: Pass, before: str | None, after: str | None) -> list[Pass]:
    """The list with one more pass, or with another under a name that is there."""
    if made.name in ONE_ROW or made.name in {item.name for item in BUILT_IN}:
        raise ConfigError(f"pass {made.name!r} is one of this package's; pass another name=")
    if before is not None and after is not None:
        raise ConfigError(f"pass {made.name!r} has before= and after=; give one of them")
    names = [item.name for item in ordered]
    rest = [item for item in ordered if item.name != made.name]
    others = [item.name for item in rest]
    if before is not None:
        position = _position(others, before, f"before= of pass {made.name!r}")
    elif after is not None:
        position = _position(others, after, f"after= of pass {made.name!r}") + 1
    elif made.name in names:
        position = names.index(made.name)
    else:
        position = others.index(_LAST) if _LAST in others else len(others)
    return [*rest[:position], made, *rest[position:]]


def _position(names: Sequence[str], name: str, who: str) -> int:
    if name not in names:
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {list(names)}"
        raise ConfigError(f"{who} names pass {name!r}, which does not exist; {hint}")
    return names.index(name)
