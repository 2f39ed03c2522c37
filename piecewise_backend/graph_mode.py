"""The graph mode of one graph: what was asked for, as far as the graph allows it.

In:  a compiled graph and the option.
Out: the mode, and why it is another one.
"""

from __future__ import annotations

from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.config import Config
from piecewise_backend.errors import ConfigError
from piecewise_backend.modes import resolve_cudagraph_mode, weakest
from piecewise_backend.registry import traits_of


def graph_mode(graph: CompiledGraph, config: Config) -> tuple[CUDAGraphMode, str]:
    """See `modes` for what split ops allow.

    Returns:
        The mode, and why it or what is captured is not what was asked for, or "".

    Raises:
        ConfigError: the mode needs a split op in a graph that may not be in one.
    """
    mode, reason = _by_split_ops(graph, config)
    return mode, "; ".join(filter(None, (graph.uncut, reason)))


def _by_split_ops(graph: CompiledGraph, config: Config) -> tuple[CUDAGraphMode, str]:
    asked = config.cudagraph_mode
    if asked is CUDAGraphMode.NONE:
        return asked, ""
    ops = graph.split.split_ops
    if not ops:
        # The only piece is the whole step: its graph serves every batch.
        if asked is CUDAGraphMode.FULL_DECODE_ONLY:
            return asked, ""
        return CUDAGraphMode.PIECEWISE, "" if asked is CUDAGraphMode.PIECEWISE else _UNCUT
    support = weakest(traits_of(op.op_name).capture for op in ops)
    weakest_ops = {op.op_name for op in ops if traits_of(op.op_name).capture is support}
    who = f" ({', '.join(sorted(weakest_ops))}: see capture= of register_splitting_op)"
    try:
        mode, reason = resolve_cudagraph_mode(
            asked, support, attention_is_split=True, decode_query_len=config.decode_query_len
        )
    except ConfigError as error:
        raise ConfigError(f"{error}{who}") from None
    return mode, reason and reason + who


_UNCUT = "nothing is cut, so the only piece is the whole step"
