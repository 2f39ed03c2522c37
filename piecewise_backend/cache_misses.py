"""What differs between keys: why an artifact had to be made although others were there.

In:  keys, as JSON has them.
Out: text.
Knows nothing of where keys are kept, nor of what they are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecewise_backend.cache_entry import SIZES, Key, Record
from piecewise_backend.trace_words import function_of, in_words, is_of_trace

_MOST_DIFFERENCES = 12


def why_missed(key: Key, others: Mapping[str, Record]) -> tuple[str, ...]:
    """Which of some entries is nearest to what was wanted, and why it could not serve.

    Args:
        key: what was wanted.
        others: entries by name; those of another kind could not have served.
    """
    others = {name: other for name, other in others.items() if _is_alike(other.key, key)}
    if not others:
        return ("nothing was there that could have served",)
    differences = {name: _differences(other.key, key) for name, other in others.items()}
    nearest = min(differences, key=lambda name: len(differences[name]))
    lines, about = differences[nearest], others[nearest].about
    if not lines:
        sizes = f"{others[nearest].key.get(SIZES)} -> {key.get(SIZES)}"
        lines = (f"{SIZES}: {sizes}; it serves where {' and '.join(about.get('conditions', ()))}",)
    more = len(lines) - _MOST_DIFFERENCES
    return (
        f"is most like {nearest}, which could not serve because of",
        *(f"  {line}" for line in lines[:_MOST_DIFFERENCES]),
        *([f"  and {more} more"] if more > 0 else []),
    )


def _is_alike(key: Key, wanted: Key) -> bool:
    """It is of the same kind, and if it is of a trace, of the same function."""
    if key.keys() != wanted.keys():
        return False
    return not is_of_trace(key) or function_of(key) == function_of(wanted)


def _differences(key: Key, wanted: Key) -> tuple[str, ...]:
    if is_of_trace(key):
        return explain(*in_words(key, wanted))
    # Other sizes are no reason by themselves.
    return tuple(x for x in explain(key, wanted) if not x.startswith(f"{SIZES}."))


def explain(one: Any, other: Any, where: str = "") -> tuple[str, ...]:
    """What differs between two keys, one line each: `torch.version: '2.13.0' -> '2.14.1'`."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = sorted(one.keys() | other.keys())
        pairs = [(str(name), one.get(name, _ABSENT), other.get(name, _ABSENT)) for name in names]
    elif isinstance(one, list) and isinstance(other, list):
        longest = range(max(len(one), len(other)))
        both = [[*values, *[_ABSENT] * (len(longest) - len(values))] for values in (one, other)]
        pairs = [(str(i), both[0][i], both[1][i]) for i in longest]
    else:
        is_same = type(one) is type(other) and one == other
        return () if is_same else (f"{where}: {_shown(one)} -> {_shown(other)}",)
    found = (explain(a, b, f"{where}.{name}" if where else name) for name, a, b in pairs)
    return tuple(line for lines in found for line in lines)


class _Absent:
    """Stands for what is in one key only."""

    def __repr__(self) -> str:
        return "(absent)"


_ABSENT = _Absent()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
