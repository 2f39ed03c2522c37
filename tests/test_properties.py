"""Random programs, sizes and orders, next to eager.

A program is a chain of steps on a few tensors: arithmetic inside of pieces, and split ops of
every style at random places. Each is called with random token counts, 0 and 1 among them, in a
random order; graphs are emulated, so a wrong address or lifetime gives wrong numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend.batch import FallbackReason, PaddingTable
from tests.helpers import KEPT, compile, out_attn
from tests.runtime_helpers import fallbacks, quiet

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EXAMPLES = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def _out_style(a: Tensor, b: Tensor) -> Tensor:
    return out_attn(a, b, a)


def _fresh(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.pwtest.fresh(a, b, b)


def _first_of_two(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.pwtest.pair(a, b)[0]


def _both_of_two(a: Tensor, b: Tensor) -> Tensor:
    x, y = torch.ops.pwtest.pair(a, b)
    return x * 0.5 + y


def _list(a: Tensor, b: Tensor) -> Tensor:
    x, _, z = torch.ops.pwtest.parts(a, 3)
    return x - z * b


def _written_and_returned(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty_like(a)
    return torch.ops.pwtest.both(a, out) + out * b


def _in_place(a: Tensor, b: Tensor) -> Tensor:
    a = a + 1
    a.mul_(b)
    return a


def _whole_sum(a: Tensor, b: Tensor) -> Tensor:
    """No row is safe from padding."""
    return (a.float() / (b.float().abs().sum() + 1)).to(a.dtype)


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "scale": lambda a, b: a * 0.5,
    "sin": lambda a, b: (a - b).sin(),
    "rows": lambda a, b: a * b.float().mean(-1, keepdim=True).to(a.dtype),
    "view": lambda a, b: a.view(-1, a.size(-1)).relu() + b,
    "transposed": lambda a, b: (a.t() * 2).t() + b,
    "cumsum": lambda a, b: (a.float().cumsum(0) * 0.01).to(a.dtype) + b,
    "half": lambda a, b: a.chunk(2, -1)[0].repeat(1, 2) + b,
    "in place": _in_place,
    "whole sum": _whole_sum,
    "out-style": _out_style,
    "fresh": _fresh,
    "first of two": _first_of_two,
    "both of two": _both_of_two,
    "list": _list,
    "written and returned": _written_and_returned,
}
SPLITTING = ("out-style", "fresh", "first of two", "both of two", "list", "written and returned")


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps, each applied to two earlier values; which values are returned."""

    steps: tuple[tuple[str, int, int], ...]
    returned: tuple[int, ...]
    dtype: torch.dtype
    width: int

    def inputs(self, num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Activations, ids, and a bias that has no token dimension."""
        generator = torch.Generator().manual_seed(31 * seed + num_tokens)
        x = torch.randn(num_tokens, self.width, generator=generator)
        ids = torch.randint(0, 7, (num_tokens,), generator=generator)
        bias = torch.randn(self.width, generator=generator)
        return x.to(self.dtype), ids, bias.to(self.dtype)

    def __call__(self, x: Tensor, ids: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        values = [x, (ids[:, None] + bias).to(x.dtype)]
        for name, first, second in self.steps:
            a, b = values[first % len(values)], values[second % len(values)]
            # Bounded, so that no half type overflows on the way.
            values.append(STEPS[name](a, b).clamp(-8, 8))
        return tuple(values[-1 - position % len(values)] for position in self.returned)


@st.composite
def programs(draw: Any) -> Program:
    index = st.integers(0, 6)
    step = st.tuples(st.sampled_from(sorted(STEPS)), index, index)
    split = st.tuples(st.sampled_from(SPLITTING), index, index)
    steps = [*draw(st.lists(step, max_size=5)), draw(split), *draw(st.lists(step, max_size=4))]
    return Program(
        steps=tuple(steps),
        returned=tuple(draw(st.lists(index, min_size=1, max_size=3))),
        dtype=draw(st.sampled_from(FLOATS)),
        width=draw(st.sampled_from((2, 4, 6, 16))),
    )


grids = st.lists(st.integers(1, 40), min_size=1, max_size=4)
batches = st.lists(st.one_of(st.integers(0, 2), st.integers(0, 45)), min_size=1, max_size=12)


@EXAMPLES
@given(program=programs(), grid=grids, batches=batches, is_warmed_up=st.booleans())
def test_random_programs(
    program: Program, grid: list[int], batches: list[int], is_warmed_up: bool
) -> None:
    torch._dynamo.reset()
    compiled = compile(program.__call__, cudagraph_capture_sizes=grid, capture_after=1)
    with torch.no_grad(), quiet():
        if is_warmed_up:
            pw.warmup(compiled, lambda d: program.inputs(d.num_tokens, 0))
        kept = []
        for seed, num_tokens in enumerate([*batches, *batches]):
            given_to_compiled = program.inputs(num_tokens, seed)
            given_to_eager = program.inputs(num_tokens, seed)
            got, expected = compiled(*given_to_compiled), program(*given_to_eager)
            _near(got, expected, f"call {seed} with {num_tokens} tokens")
            _near(given_to_compiled, given_to_eager, "inputs afterwards")
            kept.append((got, expected))
        for got, expected in kept:
            _near(got, expected, "looked at after all calls")
    KEPT.clear()
    assert FallbackReason.MOVED_INPUT not in fallbacks(pw.report(compiled))
    assert FallbackReason.CAPTURE_ERROR not in fallbacks(pw.report(compiled))
    if is_warmed_up:
        report = pw.report(compiled)
        assert len(report.graphs) == 1, "one trace serves every size"
        _explained(report, grid, [*batches, *batches])


def _near(got: Any, expected: Any, where: str) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m: f"{where}: {m}")


def _explained(report: pw.Report, grid: list[int], counts: list[int]) -> None:
    """Every call was a replay or has the reason that the grid gives for its size."""
    table = PaddingTable(grid, 2.0)
    looked_up = [table.lookup(count) for count in counts]
    reasons = fallbacks(report)
    unsafe = reasons.pop(FallbackReason.PADDING_UNSAFE, 0)
    for reason in {*reasons, *(r for r in looked_up if isinstance(r, FallbackReason))}:
        assert reasons.get(reason, 0) == looked_up.count(reason), reason
    replays = sum(isinstance(size, int) for size in looked_up) - unsafe
    assert report.graphs[0].num_replays == replays


@EXAMPLES
@given(
    grid=st.lists(st.integers(1, 600), min_size=1, max_size=8),
    num_tokens=st.integers(0, 700),
    factor=st.floats(1, 4),
)
def test_padding_table(grid: list[int], num_tokens: int, factor: float) -> None:
    """The smallest size that fits, unless it is too far away: what the table stands for."""
    found = PaddingTable(grid, factor).lookup(num_tokens)
    fitting = min((size for size in grid if size >= num_tokens), default=None)
    if num_tokens == 0:
        assert found is FallbackReason.EMPTY_BATCH
    elif fitting is None:
        assert found is FallbackReason.SIZE_ABOVE_GRID
    elif fitting > max(64, factor * num_tokens):
        assert found is FallbackReason.PADDING_TOO_LARGE
    else:
        assert found == fitting
