"""Graphs of whole steps: which batches they serve, what split ops see, what stands in the way."""

from __future__ import annotations

import contextvars
import random
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_backend as pw
from piecewise_backend.batch import BatchDescriptor, CUDAGraphMode, FallbackReason
from piecewise_backend.capture_step import _Step
from piecewise_backend.current_batch import facts_now
from tests.helpers import (
    SPLIT_OPS,
    Decoder,
    compile,
    declare,
    mark_dynamic,
    out_attn,
    rows,
    same,
)
from tests.runtime_helpers import fallbacks, modes, num_replays, only_runtime, quiet, toy

SIZES = [1, 2, 4, 8]
SEEN: list[Tensor] = []
"""What the ops were given last, as it was then."""


@torch.library.custom_op("pwtest::cached", mutates_args=["out", "cache"])
def cached(x: Tensor, slots: Tensor, out: Tensor, cache: Tensor) -> None:
    """Writes rows to slots of a cache, and x + the number of rows ever written to each slot."""
    SEEN[:] = [x.clone(), slots.clone()]
    cache.index_add_(0, slots, torch.ones(len(slots), 1))
    out.copy_(x + cache[slots])


@cached.register_fake
def _(x: Tensor, slots: Tensor, out: Tensor, cache: Tensor) -> None:
    return None


class WithCache(nn.Module):
    """Slot 0 belongs to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(32, 1))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        x = x * 2
        out = torch.empty_like(x)
        torch.ops.pwtest.cached(x, slots, out, self.cache)
        return out + 1


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def of_rows(descriptor: BatchDescriptor) -> tuple[Tensor, ...]:
    return (rows(descriptor.num_tokens),)


def of_slots(descriptor: BatchDescriptor) -> tuple[Tensor, ...]:
    """Writes to slots that no test reads: not to slot 0, where padded rows write, too."""
    return rows(descriptor.num_tokens), torch.arange(16, 16 + descriptor.num_tokens)


def warmed(model: Any, make_inputs: Any = of_rows, **options: Any) -> Any:
    options.setdefault("cudagraph_capture_sizes", SIZES)
    compiled = compile(model, **options)
    pw.warmup(compiled, make_inputs)
    return compiled


# Which batches


def test_uniform_batches_run_as_one_graph_and_others_in_pieces() -> None:
    declare("uniform_batch")
    compiled = warmed(toy)
    report = pw.report(compiled).graphs[0]
    assert report.counts["num_cudagraph_captured"] == (3 + 1) * len(SIZES)
    assert report.mode == "full_and_piecewise"
    assert report.captured_sizes == report.captured_steps == (8, 4, 2, 1)
    for n in range(1, 9):
        with pw.batch(num_reqs=n, uniform=True):
            same(compiled(rows(n)), toy(rows(n)), f"{n}, uniform")
    assert modes(compiled) == {"full": 8}
    for n in range(1, 9):
        same(compiled(rows(n)), toy(rows(n)), f"{n}, mixed")
    assert modes(compiled) == {"full": 8, "piecewise": 8}
    assert not fallbacks(pw.report(compiled))


@pytest.mark.parametrize("way", ["torch.compile", "pw.compile"])
def test_modes_taking_turns(way: str) -> None:
    """One set of buffers, one pool."""
    declare("uniform_batch")
    model = Decoder()
    if way == "torch.compile":
        compiled = warmed(model)
    else:
        compiled = pw.compile(
            model, compiler="eager", graph_impl="emulated", cudagraph_capture_sizes=SIZES,
            splitting_ops=list(SPLIT_OPS),
        )  # fmt: skip
        compiled.warmup(of_rows)
    order = random.Random(0)
    for call in range(60):
        n, is_uniform = order.randint(1, 8), order.random() < 0.5
        x = rows(n, seed=call)
        with pw.batch(uniform=is_uniform):
            same(compiled(x), model(x), f"call {call}: {n}")
    assert num_replays(pw.report(compiled)) == 60
    assert not fallbacks(pw.report(compiled))


def test_full_serves_every_batch_where_ops_allow_it() -> None:
    declare("always")
    compiled = warmed(toy, cudagraph_mode="full")
    assert pw.report(compiled).graphs[0].captured_sizes == ()
    for n in range(1, 9):
        same(compiled(rows(n)), toy(rows(n)), f"{n}")
        with pw.batch(uniform=True):
            same(compiled(rows(n)), toy(rows(n)), f"{n}, uniform")
    assert modes(compiled) == {"full": 16}


def test_full_decode_only_has_no_graphs_for_others() -> None:
    declare("uniform_single_token_decode")
    compiled = warmed(toy, cudagraph_mode="full_decode_only")
    with pw.batch(uniform=True):
        same(compiled(rows(3)), toy(rows(3)), "uniform")
    with pytest.warns(RuntimeWarning, match="state uniform decode batches with pw.batch"):
        same(compiled(rows(3)), toy(rows(3)), "mixed")
    assert modes(compiled) == {"full": 1}
    assert fallbacks(pw.report(compiled)) == {FallbackReason.MODE_HAS_NONE: 1}


@pytest.mark.parametrize(
    ("capture", "query_len", "mode"),
    [
        ("never", 1, "piecewise"),
        ("uniform_single_token_decode", 1, "full_and_piecewise"),
        ("uniform_single_token_decode", 2, "piecewise"),
        ("uniform_batch", 2, "full_and_piecewise"),
    ],
)
def test_the_mode_follows_from_the_weakest_op(capture: str, query_len: int, mode: str) -> None:
    declare("always")
    declare(capture, "pwtest::attn")

    def model(x: Tensor) -> Tensor:
        return torch.ops.pwtest.fresh(out_attn(x, x, x), x, x) + 1

    compiled = warmed(model, decode_query_len=query_len)
    report = pw.report(compiled).graphs[0]
    assert report.mode == mode
    assert bool(report.mode_reason) == (mode == "piecewise")
    assert report.mode_reason in str(report)
    assert ("pwtest::attn: see capture=" in report.mode_reason) == (mode == "piecewise")


def test_full_of_an_op_that_may_not_be_in_a_graph() -> None:
    declare("never")
    with pytest.raises(pw.ConfigError, match=r"cannot be captured.*'piecewise'.*pwtest::attn: see"):
        compile(toy, cudagraph_mode="full")(rows(4))


def test_sizes_that_only_split_ops_see() -> None:
    """Where they are the token count the step is one graph; else it runs in pieces."""
    declare("always")

    def model(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = torch.ops.pwtest.pair(other, other)
        return torch.ops.pwtest.fresh(x * 2, x, x) + 1, y

    compiled = warmed(model, lambda d: (rows(d.num_tokens), rows(d.num_tokens)))
    with pw.batch(uniform=True):
        for n, m in ((4, 4), (3, 3), (3, 6), (4, 2), (1, 1)):
            same(compiled(rows(n), rows(m)), model(rows(n), rows(m)), f"{n}, {m}")
    assert modes(compiled) == {"full": 3, "piecewise": 2}


def test_speculative_decode_rounds_sizes() -> None:
    declare("uniform_batch")
    compiled = warmed(toy, decode_query_len=3)
    assert pw.report(compiled).graphs[0].captured_steps == (9, 6, 3)
    for num_reqs in (1, 2, 3):
        with pw.batch(num_reqs=num_reqs, uniform=True):
            same(compiled(rows(3 * num_reqs)), toy(rows(3 * num_reqs)), f"{num_reqs}")
    assert modes(compiled) == {"full": 3}
    with pw.batch(num_reqs=4, uniform=True), pytest.raises(pw.ContractError, match="num_reqs=4"):
        compiled(rows(6))


def test_warm_up_makes_decode_inputs_for_whole_steps() -> None:
    declare("uniform_batch")
    made: list[BatchDescriptor] = []

    def make_inputs(descriptor: BatchDescriptor) -> tuple[Tensor, ...]:
        made.append(descriptor)
        return of_rows(descriptor)

    warmed(toy, make_inputs, decode_query_len=2, cudagraph_capture_sizes=[2, 4], max_loras=1)
    uniform = [d for d in made if d.uniform]
    assert uniform[:4] == [
        BatchDescriptor(num_tokens=n, num_reqs=n // 2, uniform=True, num_active_loras=loras)
        for n in (4, 2)
        for loras in (1, 0)
    ]
    assert {d.num_tokens for d in uniform} == {2, 4}, "trials are of whole sequences, too"
    assert made[-len(uniform) :] == uniform, "pieces come first"


def test_graphs_for_numbers_of_adapters() -> None:
    declare("uniform_batch")
    compiled = warmed(toy, max_loras=2, cudagraph_capture_sizes=[4])
    keys = only_runtime(compiled).captures.keys_of(CUDAGraphMode.FULL)
    assert [loras for _, _, loras in keys] == [2, 1, 0]
    for loras in (0, 1, 2):
        with pw.batch(uniform=True, num_active_loras=loras):
            same(compiled(rows(4)), toy(rows(4)), f"{loras} adapters")
    assert modes(compiled) == {"full": 3}
    with (
        pw.batch(uniform=True, num_active_loras=3),
        pytest.raises(pw.ContractError, match="num_active_loras=3, but max_loras=2"),
    ):
        compiled(rows(4))


def test_whole_steps_are_captured_by_warm_up_only() -> None:
    """Their capture runs split ops again, which would write caches twice while serving."""
    declare("always")
    compiled = compile(toy, cudagraph_capture_sizes=SIZES)
    with pw.batch(uniform=True), quiet():
        for call in range(6):
            x = mark_dynamic([rows(4, seed=call)])[0]
            same(compiled(x), toy(x), f"call {call}")
    report = pw.report(compiled).graphs[0]
    assert report.captured_steps == ()
    assert modes(compiled) == {"piecewise": 4}


# What split ops see


def test_padded_rows_are_zero_in_every_argument() -> None:
    declare("always", "pwtest::cached")
    model, reference = WithCache(), WithCache()
    compiled = warmed(model, of_slots, splitting_ops=["pwtest::cached"])
    before = model.cache.clone()
    for n in (8, 3, 5, 1, 7, 2):
        slots = torch.arange(1, n + 1)
        with pw.batch(uniform=True):
            result = compiled(rows(n, seed=n), slots)
        x, seen = SEEN
        same(result, reference(rows(n, seed=n), slots), f"{n}")
        size = next(size for size in SIZES if size >= n)
        assert (x.shape[0], seen.tolist()) == (size, [*range(1, n + 1), *[0] * (size - n)])
        assert not x[n:].any(), "pieces compute 2 * 0 for padded rows"
    assert modes(compiled) == {"full": 6}
    same(model.cache[1:16], reference.cache[1:16], "slots of somebody")
    assert (before[1:16] == 0).all()


def test_hooks_are_called_with_the_descriptor_before_the_replay() -> None:
    calls: list[tuple[BatchDescriptor, int]] = []

    def refresh(descriptor: BatchDescriptor) -> None:
        calls.append((descriptor, len(SEEN)))
        SEEN.clear()

    declare("always", "pwtest::cached", before_replay=refresh)
    compiled = warmed(WithCache(), of_slots, splitting_ops=["pwtest::cached"])
    calls.clear()
    for n in (3, 4):
        with pw.batch(uniform=True, num_reqs=n):
            compiled(rows(n), torch.arange(n))
    expected = BatchDescriptor(num_tokens=4, num_reqs=4, uniform=True)
    assert [descriptor for descriptor, _ in calls] == [expected, expected]
    assert len(SEEN) == 2, "the op ran after the hook"
    compiled(rows(4), torch.arange(4))
    assert len(calls) == 2, "pieces do not contain the op"


def fresh_results(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = torch.ops.pwtest.pair(x * 2, x)
    return a, b + 1, torch.ops.pwtest.both(b, a)


def in_place(x: Tensor, y: Tensor) -> Tensor:
    y.add_(x)
    return out_attn(x, y, x)


def sizes_as_outputs(x: Tensor) -> dict[str, Any]:
    return {"n": x.shape[0] * 2, "y": out_attn(x, x, x), "x": x, "none": None}


@pytest.mark.parametrize(
    ("model", "num_args"),
    [(fresh_results, 1), (in_place, 2), (sizes_as_outputs, 1)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_models_of_all_kinds(model: Any, num_args: int) -> None:
    declare("always")

    def inputs(n: int) -> list[Tensor]:
        return [rows(n, seed=i) for i in range(num_args)]

    compiled = warmed(model, lambda d: tuple(inputs(d.num_tokens)))
    for n in (8, 3, 1, 4, 7):
        given, expected = inputs(n), inputs(n)
        with pw.batch(uniform=True):
            same(compiled(*given), model(*expected), f"{n}")
        same(given, expected, f"arguments, {n}")
    assert modes(compiled) == {"full": 5}


def test_outputs_belong_to_the_caller() -> None:
    declare("always")
    compiled = warmed(toy)
    with pw.batch(uniform=True):
        outputs = [compiled(rows(5, seed=i)) for i in range(4)]
    for i, output in enumerate(outputs):
        same(output, toy(rows(5, seed=i)), f"output {i}")


def test_buffers_change_once_per_call() -> None:
    declare("always")

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counter", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.counter.add_(1)
            return out_attn(x * self.counter, x, x)

    model = Counting()
    compiled = warmed(model)
    calls_of_warmup = model.counter.item()
    num_trials = 1 + 1 + 2 + 3  # of 1, 2, 4 and 8, which serve 1, 1, 2 and 4 counts
    assert calls_of_warmup == 1 + 2 * (len(SIZES) + num_trials), "the trace, and twice each size"
    with pw.batch(uniform=True):
        for call in range(1, 5):
            same(compiled(rows(3)), rows(3) * (calls_of_warmup + call) + 2 * rows(3), f"{call}")


# What goes wrong


@pytest.mark.parametrize(
    ("facts", "n", "message"),
    [
        ({"num_tokens": 5}, 4, "num_tokens=5, the inputs have 4"),
        ({"num_reqs": 5}, 4, "num_reqs=5, but there are 4 tokens"),
        ({"num_reqs": 2, "uniform": True}, 4, "uniform and num_reqs=2, but 4 tokens"),
    ],
)
def test_facts_that_contradict_the_inputs(facts: dict[str, Any], n: int, message: str) -> None:
    declare("uniform_batch")
    compiled = warmed(toy)
    with pw.batch(**facts), pytest.raises(pw.ContractError, match=message):
        compiled(rows(n))
    with pw.batch(num_tokens=4, num_reqs=4, uniform=True):
        same(compiled(rows(4)), toy(rows(4)), "the next call")


@pytest.mark.parametrize(
    "facts",
    [
        {"uniform": 1}, {"num_reqs": 0}, {"num_reqs": True}, {"num_reqs": 1.0}, {"num_tokens": -1},
        {"num_tokens": "4"}, {"num_tokens": [4]}, {"num_active_loras": None}, {"pad_to": None},
        {"mode": "FULL"}, {"mode": CUDAGraphMode.FULL_AND_PIECEWISE},
    ],
)  # fmt: skip
def test_facts_of_the_wrong_kind(facts: dict[str, Any]) -> None:
    for equal in ({"uniform": True}, {"num_reqs": 1}):  # what was seen is not checked again
        pw.batch(**equal)
    ((name, value),) = facts.items()
    with pytest.raises(pw.ConfigError, match=re.escape(f"{name}={value!r}")):
        pw.batch(**facts)


def test_facts_of_generators_that_close_in_another_order() -> None:
    def held(facts: Any) -> Any:
        with facts:
            yield

    decode, prefill = held(pw.batch(uniform=True)), held(pw.batch(num_reqs=1))
    next(decode)
    next(prefill)
    decode.close()
    assert facts_now() is pw.batch(num_reqs=1)
    prefill.close()
    assert facts_now() is None
    contextvars.Context().run(pw.batch(uniform=True).__exit__)  # entered in another task


def test_facts_end_with_the_block() -> None:
    def fail() -> None:
        with pw.batch(uniform=True):
            with pw.batch(num_reqs=3):
                pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert facts_now() is None


def test_a_step_that_cannot_be_captured_is_served_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declare("always")
    run = _Step.run

    def fail(self: Any, *tensors: Tensor) -> Any:
        if self.request.sizes == (4,):
            raise RuntimeError("not allowed while recording")
        return run(self, *tensors)

    monkeypatch.setattr(_Step, "run", fail)
    with pytest.warns(RuntimeWarning, match="not allowed while recording"):
        compiled = warmed(toy, cudagraph_mode="full_and_piecewise")
    report = pw.report(compiled).graphs[0]
    assert report.captured_steps == (8, 2, 1)
    assert "not allowed while recording" in report.step_errors[4]
    with pw.batch(uniform=True):
        for n in (8, 4, 3, 2):
            same(compiled(rows(n)), toy(rows(n)), f"{n}")
    assert modes(compiled) == {"full": 2, "piecewise": 2}


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
def test_padding_that_is_unsafe(mode: str) -> None:
    declare("always")

    def model(x: Tensor) -> Tensor:
        return out_attn(x / x.amax(), x, x)

    compiled = warmed(model, cudagraph_mode=mode)
    with pw.batch(uniform=True), quiet():
        for n in (8, 3, 4):
            same(compiled(rows(n)), model(rows(n)), f"{n}")
    assert modes(compiled) == {"full": 2}
    assert fallbacks(pw.report(compiled)) == {FallbackReason.PADDING_UNSAFE: 1}


def test_a_cache_that_moved_leaves_the_pieces() -> None:
    declare("always", "pwtest::cached")
    model, reference = WithCache(), WithCache()
    compiled = warmed(model, of_slots, splitting_ops=["pwtest::cached"])
    model.cache = torch.zeros(32, 1)
    slots = torch.arange(1, 5)
    with pw.batch(uniform=True):
        with pytest.warns(RuntimeWarning, match="whole steps are gone"):
            same(compiled(rows(4), slots), reference(rows(4), slots), "moved")
        same(compiled(rows(4), slots), reference(rows(4), slots), "again")
        same(model.cache[1:16], reference.cache[1:16], "cache")
        assert modes(compiled) == {"piecewise": 2}
        pw.warmup(compiled, of_slots)
        before = modes(compiled).get("full", 0)
        same(compiled(rows(4), slots), reference(rows(4), slots), "warmed up again")
    assert modes(compiled)["full"] == before + 1


def test_presets() -> None:
    found = [pw.Config.from_options(None, f"O{level}").cudagraph_mode for level in range(4)]
    mode = CUDAGraphMode
    assert found == [
        mode.NONE, mode.PIECEWISE, mode.FULL_AND_PIECEWISE, mode.FULL_AND_PIECEWISE,
    ]  # fmt: skip
    assert pw.Config.from_options(None, "O0").compiler == "eager"
    assert pw.Config.from_options({"cudagraph_mode": "full"}, "O1").cudagraph_mode is mode.FULL


def test_a_budget_of_graphs() -> None:
    """Three pieces and one whole step a size: 8 graphs are two sizes."""
    declare("uniform_batch")
    compiled = warmed(toy, max_graphs=8)
    report = pw.report(compiled).graphs[0]
    assert report.captured_sizes == report.captured_steps == (8, 1)
    assert report.counts["num_cudagraph_captured"] == 8
    with pytest.raises(pw.ConfigError, match="max_graphs"):
        warmed(toy, max_graphs=3)


def test_sizes_for_tensor_parallelism() -> None:
    options = {"cudagraph_capture_sizes": [1, 2, 4, 6, 8], "tensor_parallel_size": 4}
    assert pw.Config.from_options(options).cudagraph_capture_sizes == (4, 8)
    with pytest.raises(pw.ConfigError, match="16"):
        pw.Config.from_options(options | {"tensor_parallel_size": 16})


def test_what_another_rank_needs() -> None:
    declare("uniform_batch")
    compiled = warmed(toy)
    with pw.batch(uniform=True, pad_to=7):
        same(compiled(rows(2)), toy(rows(2)), "padded for another rank")
    (tally,) = (t for t in only_runtime(compiled).statistics.tallies if t.num_replays)
    assert (tally.mode, tally.size, tally.num_tokens) == (CUDAGraphMode.FULL, 8, 2)
    with pw.batch(uniform=True, mode=CUDAGraphMode.PIECEWISE):
        same(compiled(rows(2)), toy(rows(2)), "pieces")
    assert modes(compiled) == {"full": 1, "piecewise": 1}
    with pw.batch(uniform=True, mode=CUDAGraphMode.NONE), quiet():
        same(compiled(rows(2)), toy(rows(2)), "none")
    assert fallbacks(pw.report(compiled)) == {FallbackReason.ANOTHER_RANK: 1}
    with pytest.raises(pw.ConfigError, match="FULL_AND_PIECEWISE"):
        pw.batch(mode=CUDAGraphMode.FULL_AND_PIECEWISE)


def test_graphs_switched_off_and_on() -> None:
    declare("uniform_batch")
    compiled = warmed(toy)
    for is_on in (True, False, True):
        pw.switch_graphs(compiled, is_on)
        with pw.batch(uniform=True):
            same(compiled(rows(3)), toy(rows(3)), f"on: {is_on}")
    metrics = pw.metrics(compiled, {"model_revision": "r1"})
    assert metrics.num_replays == 2
    assert metrics.fallbacks == {FallbackReason.DISABLED: 1}
    (bucket,) = metrics.buckets
    assert (bucket.execution_mode, bucket.size, bucket.num_tokens) == ("cuda_graph", 4, 6)


def test_states_of_warm_up() -> None:
    declare("uniform_batch")
    compiled = compile(toy, cudagraph_capture_sizes=SIZES)
    states = [pw.report(compiled).state.name]

    def make_inputs(descriptor: BatchDescriptor) -> tuple[Tensor, ...]:
        states.append(pw.report(compiled).state.name)
        return of_rows(descriptor)

    pw.warmup(compiled, make_inputs, seal=False)
    states.append(pw.report(compiled).state.name)
    pw.seal(compiled)
    states.append(pw.report(compiled).state.name)
    assert list(dict.fromkeys(states)) == [
        "MODEL_LOADED", "EAGER_WARMED", "GRAPH_CAPTURED", "READY",
    ]  # fmt: skip


@pytest.mark.parametrize("call", [0, 1, 3, 7, 12])
def test_an_error_in_make_inputs_leaves_nothing_half_done(call: int) -> None:
    declare("uniform_batch")
    compiled = compile(toy, cudagraph_capture_sizes=SIZES)
    calls = 0

    def make_inputs(descriptor: BatchDescriptor) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise ZeroDivisionError("of the user")
        return of_rows(descriptor)

    with pytest.raises(ZeroDivisionError, match="of the user"):
        pw.warmup(compiled, make_inputs)
    assert not pw.report(compiled).is_sealed
    assert pw.report(compiled).state.name != "READY"
    steps = [graph.captured_steps for graph in pw.report(compiled).graphs]
    assert not any(steps), "that were not compared"
    with quiet():
        same(compiled(mark_dynamic([rows(3)])[0]), toy(rows(3)), "the next call")
    pw.warmup(compiled, make_inputs)
    before = modes(compiled).get("full", 0)
    with pw.batch(uniform=True):
        same(compiled(rows(3)), toy(rows(3)), "warmed up again")
    assert modes(compiled)["full"] == before + 1


def test_verification_finds_a_wrong_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What capture cannot know: the recording does not repeat what the step does."""
    declare("uniform_batch")
    run = _Step.run

    def wrong(self: Any, *tensors: Tensor) -> Any:
        (result,) = run(self, *tensors)
        return (result + (self.request.sizes[0] == 4),)

    monkeypatch.setattr(_Step, "run", wrong)
    compiled = warmed(toy)
    report = pw.report(compiled).graphs[0]
    assert report.captured_steps == (8, 2, 1)
    assert "verification at 4 tokens" in report.step_errors[4]
    for n in (3, 4, 8):
        with pw.batch(uniform=True):
            same(compiled(rows(n)), toy(rows(n)), f"{n}")
    assert modes(compiled) == {"piecewise": 2, "full": 1}


def test_integers_that_a_piece_computes_are_not_padded() -> None:
    """0 + 1 is somebody's slot."""
    declare("always", "pwtest::cached")

    class Shifted(WithCache):
        def forward(self, x: Tensor, slots: Tensor) -> Tensor:
            return super().forward(x, slots + 1)

    model, reference = Shifted(), Shifted()
    compiled = warmed(model, of_slots, splitting_ops=["pwtest::cached"])
    for n in (4, 3):
        slots = torch.arange(1, n + 1)
        with pw.batch(uniform=True):
            same(compiled(rows(n), slots), reference(rows(n), slots), f"{n}")
    same(model.cache[1:16], reference.cache[1:16], "slots of somebody")
    assert modes(compiled) == {"full": 1, "piecewise": 1}


def test_padding_for_another_rank_that_was_not_tried() -> None:
    """On a grid without gaps nothing is padded but for other ranks."""
    declare("uniform_batch")

    def model(x: Tensor) -> Tensor:
        return out_attn(x / x.amax(), x, x)

    compiled = warmed(model, cudagraph_capture_sizes=[1, 2, 3, 4])
    with pw.batch(uniform=True, pad_to=4), quiet():
        same(compiled(rows(2)), model(rows(2)), "padded")
        same(compiled(rows(4)), model(rows(4)), "not padded")
    assert modes(compiled) == {"full": 1}
    assert fallbacks(pw.report(compiled)) == {FallbackReason.PADDING_UNSAFE: 1}


def test_random_numbers_are_no_difference() -> None:
    declare("always")

    def model(x: Tensor) -> Tensor:
        return out_attn(x + torch.rand_like(x), x, x)

    compiled = warmed(model)
    report = pw.report(compiled).graphs[0]
    assert report.captured_sizes == report.captured_steps == (8, 4, 2, 1)
    with pw.batch(uniform=True):
        first, second = compiled(rows(4)), compiled(rows(4))
    assert not first.equal(second)


def test_query_length_and_tensor_parallelism_together() -> None:
    declare("uniform_batch")
    options = {"decode_query_len": 3, "tensor_parallel_size": 4, "max_cudagraph_capture_size": 12}
    compiled = warmed(toy, cudagraph_capture_sizes=[4, 8, 12, 16], **options)
    report = pw.report(compiled).graphs[0]
    assert (report.captured_sizes, report.captured_steps) == ((12, 8, 4), (12,))


def put_through_a_view(x: Tensor, y: Tensor) -> Tensor:
    torch.ops.pwtest.double(x[:, :2] * 3, y[:, :2])
    return x + y


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
def test_a_write_through_a_view_that_a_piece_makes(mode: str) -> None:
    declare("always")

    def inputs(n: int) -> list[Tensor]:
        return [rows(n), rows(n, seed=1)]

    model = put_through_a_view
    compiled = warmed(model, lambda d: tuple(inputs(d.num_tokens)), cudagraph_mode=mode)
    for n in (4, 3, 8):
        given, expected = inputs(n), inputs(n)
        with pw.batch(uniform=True):
            same(compiled(*given), model(*expected), f"{n}")
        same(given, expected, f"arguments, {n}")
    assert modes(compiled) == {"full": 3}
    memory, reference = rows(4), rows(4)
    with pw.batch(uniform=True), quiet():
        same(compiled(memory, memory[:]), model(reference, reference[:]), "one memory")
    same(memory, reference, "one memory")
    assert fallbacks(pw.report(compiled)) == {FallbackReason.OVERLAPPING_INPUTS: 1}


def test_verification_sees_past_infinities() -> None:
    """The real rows depend on how many there are, beside a mask of -inf."""
    declare("always", "pwtest::centred")

    def model(x: Tensor) -> Tensor:
        y = torch.ops.pwtest.centred(x * 2)
        return torch.where(x > 4, float("-inf"), y)

    compiled = warmed(model, splitting_ops=["pwtest::centred"])
    with pw.batch(uniform=True), quiet():
        for n in (8, 3, 4, 5):
            same(compiled(rows(n)), model(rows(n)), f"{n}")
    assert modes(compiled) == {"full": 2, "piecewise": 2}


@torch.library.custom_op("pwtest::centred", mutates_args=[])
def centred(x: Tensor) -> Tensor:
    """Every row depends on all."""
    return x - x.mean(0)


@centred.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_error_while_comparing_leaves_nothing_that_was_not() -> None:
    declare("always", "pwtest::centred")

    def model(x: Tensor) -> Tensor:
        return torch.ops.pwtest.centred(x * 2) + 1

    def make_inputs(descriptor: BatchDescriptor) -> tuple[Tensor, ...]:
        if descriptor.num_tokens == 3 and descriptor.uniform:
            raise ZeroDivisionError
        return of_rows(descriptor)

    compiled = compile(model, splitting_ops=["pwtest::centred"], cudagraph_capture_sizes=SIZES)
    with pytest.raises(ZeroDivisionError):
        pw.warmup(compiled, make_inputs)
    assert pw.report(compiled).graphs[0].captured_steps == ()
    with pw.batch(uniform=True), quiet():
        for n in (3, 7, 8):
            same(compiled(mark_dynamic([rows(n)])[0]), model(rows(n)), f"{n}")


def test_warm_up_of_a_model_whose_graphs_are_off() -> None:
    declare("always")
    compiled = warmed(toy)
    pw.switch_graphs(compiled, False)
    with pytest.raises(pw.ContractError, match="switched off"):
        pw.warmup(compiled, of_rows)


def test_why_a_whole_step_is_not_captured_is_reported() -> None:
    """Such as cumulative lengths, of which there is one more than tokens."""
    declare("always")

    def model(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = torch.ops.pwtest.pair(lengths, lengths)
        return torch.ops.pwtest.fresh(x * 2, x, x) + 1, y

    compiled = warmed(model, lambda d: (rows(d.num_tokens), rows(d.num_tokens + 1)))
    report = pw.report(compiled).graphs[0]
    assert report.captured_steps == ()
    assert "not all the token count" in report.step_errors[8]
    with pw.batch(uniform=True):
        same(compiled(rows(3), rows(4)), model(rows(3), rows(4)), "pieces")
    assert modes(compiled) == {"piecewise": 1}


def test_one_statement_in_several_threads() -> None:
    statement, found = pw.batch(num_reqs=3), []
    barrier = threading.Barrier(2)

    def enter() -> None:
        with statement:
            barrier.wait(10)
            with statement:
                found.append(facts_now())
            barrier.wait(10)
        found.append(facts_now())

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [facts is not None and facts.num_reqs for facts in found] == [3, 3, False, False]
