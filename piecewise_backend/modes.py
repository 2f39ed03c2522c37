"""Which graph mode a model gets: what was asked, what its split ops can do.

In:  the mode that was asked for, and the capture support that the split ops declare.
Out: the mode that is safe, and in words why it is another one.
Knows nothing of graphs, ops or how a mode is carried out.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable

from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.errors import ConfigError


class CaptureSupport(enum.IntEnum):
    """In which batches a split op may be part of a graph; a larger value allows more."""

    NEVER = 0
    """In none: it reads host values, or what it launches differs from step to step."""

    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """In decode batches of one token per sequence."""

    UNIFORM_BATCH = 2
    """In batches whose sequences all have the same number of tokens."""

    ALWAYS = 3
    """In every batch."""

    @classmethod
    def of(cls, name: str) -> CaptureSupport:
        """The support that a registration names.

        Args:
            name: "always", "uniform_batch", "uniform_single_token_decode" or "never".

        Raises:
            ConfigError: no such name, with the nearest one.
        """
        return cls[_known("capture support", name, [member.name.lower() for member in cls]).upper()]


def weakest(supports: Iterable[CaptureSupport]) -> CaptureSupport:
    """What a model supports whose split ops support `supports`.

    Args:
        supports: one for each split op.

    Returns:
        The minimum; ALWAYS if there is no split op, for then nothing stands in a graph's way.
    """
    return min(supports, default=CaptureSupport.ALWAYS)


def resolve_cudagraph_mode(
    mode: CUDAGraphMode | str,
    support: CaptureSupport | str,
    attention_is_split: bool = True,
    decode_query_len: int = 1,
) -> tuple[CUDAGraphMode, str]:
    """The graph mode nearest to `mode` that never captures an op where it must not be.

    Args:
        mode: what was asked for, as a CUDAGraphMode or its value.
        support: the weakest capture support of the model's attention, or its name.
        attention_is_split: the graph is cut at attention. If not, attention is inside of
            whatever is captured, so "piecewise" means "full".
        decode_query_len: tokens per sequence in a decode step (1 + speculative tokens).

    Returns:
        The mode, and why it is not the one asked for ("" if it is).

    Raises:
        ConfigError: no such mode or support, a query length that is no positive integer, or
            attention that supports no capture would land inside a graph.
    """
    asked, supported = _mode_of(mode), _support_of(support)
    if type(decode_query_len) is not int or decode_query_len < 1:
        raise ConfigError(f"decode_query_len is {decode_query_len!r}; give a positive integer")
    resolved = _resolved(asked, supported, attention_is_split, decode_query_len)
    if resolved is asked:
        return asked, ""
    why = []
    if asked is CUDAGraphMode.PIECEWISE:
        why.append("the graph is not cut at attention, so a piece is the whole step")
    if resolved is not CUDAGraphMode.FULL:
        why.append(_limit(supported, decode_query_len))
    changed = f"cudagraph_mode={asked.value!r} became {resolved.value!r}"
    return resolved, f"{changed}: {'; '.join(why)}"


def _resolved(
    asked: CUDAGraphMode, support: CaptureSupport, attention_is_split: bool, decode_query_len: int
) -> CUDAGraphMode:
    """The mode of one cell of the table."""
    if asked is CUDAGraphMode.NONE or (asked is CUDAGraphMode.PIECEWISE and attention_is_split):
        return asked
    is_for_all_batches = asked in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
    if is_for_all_batches and support is CaptureSupport.ALWAYS:
        return CUDAGraphMode.FULL
    if is_for_all_batches and support is CaptureSupport.NEVER:
        raise _not_capturable(asked, attention_is_split)
    if not _captures_decode(support, decode_query_len):
        return CUDAGraphMode.PIECEWISE if attention_is_split else CUDAGraphMode.NONE
    if not is_for_all_batches:
        return asked
    if attention_is_split:
        return CUDAGraphMode.FULL_AND_PIECEWISE
    return CUDAGraphMode.FULL_DECODE_ONLY


def _captures_decode(support: CaptureSupport, decode_query_len: int) -> bool:
    """Decode batches of this query length may be captured whole."""
    if support is CaptureSupport.UNIFORM_SINGLE_TOKEN_DECODE:
        return decode_query_len == 1
    return support is not CaptureSupport.NEVER


def _limit(support: CaptureSupport, decode_query_len: int) -> str:
    """What `support` rules out, in words."""
    name = repr(support.name.lower())
    if support is CaptureSupport.NEVER:
        return f"attention of this model cannot be captured (capture support {name})"
    if support is CaptureSupport.UNIFORM_BATCH:
        return f"attention of this model is captured in uniform batches only ({name})"
    limit = f"attention of this model is captured in decode of one token only ({name})"
    if decode_query_len == 1:
        return limit
    return f"{limit}, and decode steps have {decode_query_len} tokens per sequence"


def _not_capturable(asked: CUDAGraphMode, attention_is_split: bool) -> ConfigError:
    fix = "use cudagraph_mode='piecewise', which keeps attention out of graphs"
    if not attention_is_split:
        fix = (
            "cut at the op by naming it in splitting_ops and use cudagraph_mode='piecewise', "
            "or use cudagraph_mode='none'"
        )
    return ConfigError(
        f"cudagraph_mode={asked.value!r} would put attention inside a graph, and the attention "
        f"of this model cannot be captured (capture support 'never'); {fix}"
    )


def _mode_of(mode: CUDAGraphMode | str) -> CUDAGraphMode:
    if isinstance(mode, CUDAGraphMode):
        return mode
    return CUDAGraphMode(_known("cudagraph_mode", mode, [known.value for known in CUDAGraphMode]))


def _support_of(support: CaptureSupport | str) -> CaptureSupport:
    return support if isinstance(support, CaptureSupport) else CaptureSupport.of(support)


def _known(what: str, name: object, known: list[str]) -> str:
    """`name` in lower case if it is one of `known`; a ConfigError with the nearest if not."""
    lowered = str(name).lower()
    if isinstance(name, str) and lowered in known:
        return lowered
    close = difflib.get_close_matches(lowered, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"use one of {known}"
    raise ConfigError(f"{what} {name!r} is not known; {hint}")
