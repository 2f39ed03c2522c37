"""What the tests of the runtime share: a way to look inside, and the smallest toy model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

import piecewise_backend as pw
from piecewise_backend import _torch
from piecewise_backend.batch import FallbackReason
from piecewise_backend.runtime import Runtime
from piecewise_backend.session import Session
from tests.helpers import out_attn, rows


def toy(x: Tensor) -> Tensor:
    """Two attentions, three pieces: the toy of the hazard list."""
    x = x * 2 + 1
    x = out_attn(x, x, x).sin() + x
    return out_attn(x, x + 1, x) / 3


def runtimes(compiled: Any) -> list[Runtime]:
    """The runtimes of a compiled model, oldest first."""
    return Session.of(_torch.scope_of(compiled)).runtimes


def only_runtime(compiled: Any) -> Runtime:
    """The runtime of a model that was traced once."""
    (runtime,) = runtimes(compiled)
    return runtime


def fallbacks(report: pw.Report) -> dict[FallbackReason, int]:
    """Calls without graphs over all traces, but for those before a size's capture."""
    counts: dict[FallbackReason, int] = {}
    for graph in report.graphs:
        for text, count in graph.fallbacks.items():
            reason = FallbackReason(text)
            if reason is not FallbackReason.NOT_CAPTURED:
                counts[reason] = counts.get(reason, 0) + count
    return counts


def num_replays(report: pw.Report) -> int:
    """Calls served from graphs over all traces."""
    return sum(graph.num_replays for graph in report.graphs)


def modes(compiled: Any) -> dict[str, int]:
    """Steps served from graphs, by mode."""
    counts: dict[str, int] = {}
    for tally in (t for r in runtimes(compiled) for t in r.statistics.tallies):
        counts[tally.mode.value] = counts.get(tally.mode.value, 0) + tally.num_replays
    return counts


def served_from_graphs(report: pw.Report) -> None:
    """Assert: one trace, graphs were used, and no call fell back once its size was captured."""
    assert len(report.graphs) == 1, f"{len(report.graphs)} traces"
    assert not fallbacks(report), fallbacks(report)
    assert num_replays(report) > 0
    assert not report.graphs[0].padding_unsafe


def of_rows(width: int = 4, **kind: Any) -> Callable[[pw.BatchDescriptor], tuple[Tensor]]:
    """`make_inputs` for a model of one input."""
    return lambda descriptor: (rows(descriptor.num_tokens, width, **kind),)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Fallbacks may warn inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
