"""Capture sizes under constraints.

In:  capture sizes, and what limits them: query length, parallelism, a budget, adapters.
Out: the sizes (and numbers of adapters) that are worth graphs, ascending.
Knows nothing of graphs, models or devices.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from piecewise_backend.errors import ConfigError


def multiples_of_query_len(sizes: Iterable[int], decode_query_len: int) -> tuple[int, ...]:
    """Sizes for speculative decode: each rounded up to a multiple of the query length.

    The largest result can exceed the largest of `sizes`, by less than `decode_query_len`, so
    every batch that had a size keeps one.

    Args:
        sizes: capture sizes in any order.
        decode_query_len: tokens per sequence in a decode step (1 + speculative tokens).

    Returns:
        The multiples, each once, ascending.

    Raises:
        ConfigError: no sizes, or something is not a positive integer.
    """
    query_len = _integer("decode_query_len", decode_query_len, 1)
    return tuple(sorted({-(-size // query_len) * query_len for size in _ascending(sizes)}))


def divisible_by(sizes: Iterable[int], parallel_size: int) -> tuple[int, ...]:
    """Sizes for tensor or sequence parallel: those that every rank gets an equal share of.

    Args:
        sizes: capture sizes in any order.
        parallel_size: number of ranks that share a batch.

    Returns:
        The sizes that are divisible, ascending.

    Raises:
        ConfigError: no size is divisible, or something is not a positive integer.
    """
    num_ranks = _integer("parallel_size", parallel_size, 1)
    given = _ascending(sizes)
    kept = tuple(size for size in given if size % num_ranks == 0)
    if not kept:
        raise ConfigError(
            f"none of the capture sizes {list(given)} is divisible by parallel_size={num_ranks}; "
            f"add a multiple of it, e.g. {-(-given[-1] // num_ranks) * num_ranks}"
        )
    return kept


def within_budget(
    sizes: Iterable[int], max_sizes: int, weights: Mapping[int, float] | None = None
) -> tuple[int, ...]:
    """At most `max_sizes` of `sizes`, chosen for the least expected padding.

    The smallest and the largest are always kept; with `max_sizes` 1 only the largest is. No
    other choice of as many sizes that keeps both pads less.

    Args:
        sizes: capture sizes in any order.
        max_sizes: how many to keep.
        weights: token count -> how often batches have it, e.g. from real traffic. Counts above
            the largest size have no influence. None: all counts up to the largest size are
            equally frequent.

    Returns:
        The chosen sizes, ascending; all of them if they fit the budget.

    Raises:
        ConfigError: no sizes, something is not a positive integer, a weight is not a finite
            number of at least 0, or no count that a size could serve has a weight.
    """
    _integer("max_sizes", max_sizes, 1)
    given = _ascending(sizes)
    below = given if weights is None else _weight_up_to(given, weights)
    if len(given) <= max_sizes:
        return given
    if max_sizes == 1:
        return given[-1:]
    return _least_padding(given, max_sizes, below)


def max_sizes_for(max_graphs: int, graphs_per_size: int) -> int:
    """How many capture sizes a budget of graphs allows.

    Args:
        max_graphs: most graphs that may exist.
        graphs_per_size: graphs that each size needs: pieces x cases of active adapters.

    Returns:
        A number for `within_budget`, at least 1.

    Raises:
        ConfigError: the graphs of one size exceed the budget, or an argument is not a positive
            integer.
    """
    _integer("max_graphs", max_graphs, 1)
    _integer("graphs_per_size", graphs_per_size, 1)
    if graphs_per_size > max_graphs:
        raise ConfigError(
            f"one capture size needs {graphs_per_size} graphs and max_graphs is {max_graphs}; "
            f"allow at least {graphs_per_size}, or cut at fewer ops"
        )
    return max_graphs // graphs_per_size


def lora_cases(max_loras: int, specialize: bool = True) -> tuple[int, ...]:
    """The numbers of active adapters that graphs are captured for.

    Args:
        max_loras: most adapters in one batch; 0 if the model has none.
        specialize: also capture the powers of two in between; without, a batch with any
            adapter pays for `max_loras`.

    Returns:
        0, the powers of two below `max_loras`, and `max_loras`; ascending.

    Raises:
        ConfigError: `max_loras` is not an integer of at least 0.
    """
    _integer("max_loras", max_loras, 0)
    powers = {1 << exponent for exponent in range(max_loras.bit_length())} if specialize else set()
    return tuple(sorted({0, *powers, max_loras}))


def lora_case_of(num_active: int, cases: Sequence[int]) -> int:
    """The case whose graphs serve a batch with `num_active` adapters.

    Args:
        num_active: adapters that the batch uses.
        cases: what `lora_cases` returned.

    Returns:
        The smallest case that is at least `num_active`.

    Raises:
        ConfigError: more adapters than the largest case, or something is not an integer of at
            least 0.
    """
    _integer("num_active", num_active, 0)
    known = _ascending(cases, "cases of active adapters", 0)
    if num_active > known[-1]:
        raise ConfigError(
            f"{num_active} active adapters are more than the largest case, {known[-1]}; "
            f"raise max_loras to at least {num_active}"
        )
    return next(case for case in known if case >= num_active)


def _least_padding(
    sizes: tuple[int, ...], num_kept: int, below: Sequence[float]
) -> tuple[int, ...]:
    """The `num_kept` of `sizes`, first and last among them, of the least expected padding.

    `below[i]` is the weight of all counts up to `sizes[i]`. What a batch pads is the size it
    gets less its count; the counts are the same for every choice, so only sizes are summed.
    """
    num_dropped = len(sizes) - num_kept
    # costs[j]: the least for counts up to sizes[j], with that and `num_so_far` smaller sizes.
    costs = {0: below[0] * sizes[0]}
    came_from: list[dict[int, int]] = []
    for num_so_far in range(1, num_kept):
        best = {
            j: min(
                (cost + (below[j] - below[i]) * sizes[j], i) for i, cost in costs.items() if i < j
            )
            for j in range(num_so_far, num_so_far + num_dropped + 1)
        }
        costs = {j: cost for j, (cost, _) in best.items()}
        came_from.append({j: i for j, (_, i) in best.items()})
    chosen = [len(sizes) - 1]
    for smaller in reversed(came_from):
        chosen.append(smaller[chosen[-1]])
    return tuple(sizes[j] for j in reversed(chosen))


def _weight_up_to(sizes: tuple[int, ...], weights: Mapping[int, float]) -> list[float]:
    """For each size the weight of all token counts up to it."""
    for num_tokens, weight in weights.items():
        _integer("a token count in weights", num_tokens, 1)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < math.inf:
            raise ConfigError(
                f"the weight of {num_tokens} tokens is {weight!r}; give a finite number of at "
                "least 0"
            )
    served = [0.0] * len(sizes)
    for num_tokens, weight in weights.items():
        if num_tokens <= sizes[-1]:
            served[bisect.bisect_left(sizes, num_tokens)] += weight
    if not any(served):
        raise ConfigError(
            f"weights of {len(weights)} token counts give none to any count up to the largest "
            f"size, {sizes[-1]}; leave weights out to take all counts as equally frequent"
        )
    return list(itertools.accumulate(served))


def _ascending(
    values: Iterable[int], what: str = "capture sizes", least: int = 1
) -> tuple[int, ...]:
    """The values, each once, ascending; a ConfigError if one is no integer or none is there."""
    given = list(values) if isinstance(values, Iterable) else [values]
    bad = [value for value in given if type(value) is not int or value < least]
    if bad or not given:
        raise ConfigError(
            f"{what} {given!r}: {bad or 'empty'}; give integers of at least {least}, [1, 2, 4]"
        )
    return tuple(sorted(set(given)))


def _integer(name: str, value: int, least: int) -> int:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} is {value!r}; give an integer of at least {least}")
    return value
