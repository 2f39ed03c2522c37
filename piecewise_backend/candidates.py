"""Which versions of a piece are worth a trial at a size.

In:  a compiled graph, options, sizes.
Out: `Candidates`.
Knows nothing of how they are compiled or compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from piecewise_backend import _torch
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.compiler import Specialization, Wanted
from piecewise_backend.config import Config
from piecewise_backend.passes import one_row_passes
from piecewise_backend.passes.ops import one_row
from piecewise_backend.sizes import Sizes
from piecewise_backend.steps import Host
from piecewise_backend.version import Numbers
from piecewise_backend.versions import Versions

EFFORTS: Mapping[str, Mapping[str, object]] = {
    "static": {},
    "coordinate descent": {"coordinate_descent_tuning": True},
    "max-autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
}
"""Inductor options of the versions that are tried."""

_ONE_ROW: Mapping[str, object] = {
    # Products of one row that are tuned like this are none any more when passes run.
    "coordinate_descent_tuning": False,
    # See Note [Early launch] in `passes.ops.kernels.one_row`.
    "triton.enable_pdl": False,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Candidates:
    """What is tried for one distinct piece at one size, beside the version for all sizes."""

    index: int
    """Of the distinct piece."""
    num_tokens: int
    """The capture size."""
    numbers: Numbers
    """Its integer inputs there."""
    tried: tuple[Specialization, ...]


def is_wanted(config: Config, num_tokens: int) -> bool:
    """Options ask for something at this size."""
    largest = max(config.compile_ranges_endpoints, default=0)
    return num_tokens in config.compile_sizes or 0 < num_tokens <= largest


def candidates_of(
    graph: CompiledGraph, config: Config, position: int, sizes: Sizes
) -> Candidates | None:
    """What is tried for the piece of an instance; None if nothing is.

    Args:
        position: of the instance.
        sizes: the symbol values.
    """
    index = graph.instances[position].distinct.index
    num_tokens = graph.token_dim.num_tokens(sizes)
    if not isinstance(num_tokens, int) or num_tokens == 0 or not graph.facts[index].has_kernels:
        return None
    numbers = graph.numbers_at(position, sizes)
    tried = _specializations(graph, config, graph.versions[index], numbers, num_tokens)
    return Candidates(index, num_tokens, numbers, tried) if tried else None


def undecided(graph: CompiledGraph, config: Config, sizes: Sizes) -> list[Candidates]:
    """What is to be tried for every distinct piece, in the order in which warm-up goes, but
    nothing for those of Note [Other ranks] in `tuning`.

    Args:
        sizes: symbol values, for those that are no token counts.
    """
    first = {one.distinct.index: i for i, one in reversed(list(enumerate(graph.instances)))}
    found = []
    for num_tokens in reversed(config.cudagraph_capture_sizes):
        if not is_wanted(config, num_tokens):
            continue
        padded = graph.token_dim.padded(sizes, num_tokens)
        for index in sorted(first):
            if graph.facts[index].collectives:
                continue
            one, piece = candidates_of(graph, config, first[index], padded), graph.pieces[index]
            if one and not graph.compiler.asks_for(piece, one.numbers, one.tried)():
                found.append(one)
    return found


def prepare(graph: CompiledGraph, config: Config, sizes: Sizes) -> None:
    """Have the versions that will be tried compiled ahead.

    Args:
        sizes: as of `undecided`.
    """
    wanted: dict[tuple[int, Any], Wanted] = {}
    for candidates in undecided(graph, config, sizes):
        for special in candidates.tried:
            # One for an interval serves the other sizes in it.
            key = candidates.index, (special.name, tuple(special.limits.items()))
            piece = graph.pieces[candidates.index]
            wanted.setdefault(key, Wanted(piece, candidates.numbers, special))
    graph.compiler.prepare(list(wanted.values()))


def _specializations(
    graph: CompiledGraph, config: Config, versions: Versions, numbers: Numbers, num_tokens: int
) -> tuple[Specialization, ...]:
    found = []
    if num_tokens in config.compile_sizes:
        sizes = numbers[: versions.num_sizes]
        exact = {position: (size, size) for position, size in enumerate(sizes)}
        found += [Specialization(name, how, exact) for name, how in EFFORTS.items()]
        is_offered = one_row.runs_on(graph.device) and not _others_start_early(config)
        if num_tokens == 1 and is_offered:
            found.append(Specialization("one row", _ONE_ROW, exact, one_row_passes()))
    if (between := _range_of(config, num_tokens)) is not None:
        limits = dict.fromkeys(_token_positions(graph, versions), between)
        name = f"coordinate descent, {between[0]} to {between[1]} tokens"
        found.append(Specialization(name, EFFORTS["coordinate descent"], limits))
    return tuple(found)


def _others_start_early(config: Config) -> bool:
    """Kernels of other versions and pieces may run before those in front of them have ended: see
    Note [Early launch] in `passes.ops.kernels.one_row`."""
    option = "triton.enable_pdl"
    of_process = _torch.portable_options()["inductor"].get(option)
    return bool(dict(config.inductor_compile_config).get(option, of_process))


def _range_of(config: Config, num_tokens: int) -> tuple[int, int] | None:
    low = 1
    for high in config.compile_ranges_endpoints:
        if num_tokens <= high:
            return low, high
        low = high + 1
    return None


def _token_positions(graph: CompiledGraph, versions: Versions) -> list[int]:
    tokens = {graph.token_dim.symbols[index] for index in graph.token_dim.tokens}
    hosts = [ref for ref in versions.piece.inputs if isinstance(ref, Host)]
    return [position for position, ref in enumerate(hosts) if ref.expr in tokens]
