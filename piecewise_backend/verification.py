"""Compare a step from graphs with the same step without, and say how they differ.

In:  a captured size, and a call that it serves.
Out: the result without graphs, and the difference if there is one.
Knows nothing of what is done about it.

The padded rows of buffers are poisoned before: a row that depends on them shows. Both steps
start from the same state, and the call counts once: what the model writes in place is put back
in between. Large caches are not: writing one twice is taken to change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecewise_backend import _torch
from piecewise_backend.capture_request import CapturedSize
from piecewise_backend.compiled import CompiledGraph
from piecewise_backend.nearness import is_near
from piecewise_backend.sizes import Sizes
from piecewise_backend.split_ops import inputs_written_by
from piecewise_backend.static_inputs import written_inputs
from piecewise_backend.steps import leaves_of

_MAX_RESTORED_BYTES = 2**28


def verify(
    graph: CompiledGraph,
    captured: CapturedSize,
    args: Sequence[Any],
    sizes: Sizes,
    run_without: Callable[[], Any],
) -> tuple[Any, str | None]:
    """Run a step both ways.

    Args:
        captured: serves batches with the symbol values `sizes`.
        args: of the call.
        run_without: the step without graphs.

    Returns:
        Its result without graphs, and what differs, or None.
    """
    by_pieces = written_inputs(graph)
    by_split_ops = inputs_written_by(graph.split) - by_pieces
    state, caches = _tensors(graph, args, by_pieces), _tensors(graph, args, by_split_ops)
    restored = [*state, *(tensor for tensor in caches if tensor.nbytes <= _MAX_RESTORED_BYTES)]
    with _torch.ordinary_tensors():
        before = _copies(restored)
        rows = captured.rows.at(sizes)
        _fill(captured, sizes, float("nan"))
    found: list[Any] = []
    try:
        results = captured.plan.function(args, rows)
        with _torch.ordinary_tensors():
            found = _copies([*leaves_of(results), *state])
    finally:
        with _torch.ordinary_tensors():
            _fill(captured, sizes, 0.0)
            for tensor, old in zip(restored, before, strict=True):
                tensor.copy_(old)
    random_state = _random_state(graph.device)
    result = run_without()
    if not random_state.equal(_random_state(graph.device)):
        return result, None  # random numbers: the two cannot agree
    with _torch.ordinary_tensors():
        return result, _difference(found, [*leaves_of(result), *state])


def _random_state(device: torch.device) -> torch.Tensor:
    is_cuda = device.type == "cuda"
    return torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()


def _tensors(graph: CompiledGraph, args: Sequence[Any], names: set[str]) -> list[torch.Tensor]:
    """Arguments by name, as tensors that may be written here."""
    return [
        _torch.weak_view(value) if value.is_inference() else value
        for item, value in zip(graph.split.inputs, args, strict=True)
        if item.name in names and isinstance(value, torch.Tensor)
    ]


def _copies(values: Sequence[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in values]


def _fill(captured: CapturedSize, sizes: Sizes, number: float) -> None:
    for tensor, layout in captured.rows.tensors:
        if tensor.is_floating_point():
            for part in layout.padding(tensor, sizes):
                part.fill_(number)


def _difference(found: Sequence[Any], expected: Sequence[Any]) -> str | None:
    for position, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(b, torch.Tensor):
            if a != b:
                return f"output {position} is {a!r} from graphs and {b!r} without"
        elif a.shape != b.shape or a.dtype != b.dtype:
            return (
                f"output {position} is {a.dtype} {tuple(a.shape)} from graphs and "
                f"{b.dtype} {tuple(b.shape)} without"
            )
        elif not is_near(a, b):
            return f"output {position} from graphs differs from the result without"
    return None
