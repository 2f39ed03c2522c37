"""What real CUDA graphs cost, may cost, and give back.

Figures of the device are taken in processes of their own: what the driver keeps of the graphs of
earlier tests would be in them.
"""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend.batch import FallbackReason
from piecewise_backend.costs import of_device
from tests import helpers
from tests.gpu.test_cuda import MIB, compile, near, rows
from tests.helpers import Decoder, declare, new_parameters, out_attn
from tests.runtime_helpers import fallbacks, num_replays, quiet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GRID = pw.default_capture_sizes(64)
WIDTH = 64
MANY, FEW = 96, 32
"""Layers. Many small graphs, so that a size takes several of the chunks that the device gives out:
whole steps take one or two even so."""


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    helpers.KEPT.clear()


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result(timeout=300)


def taken() -> tuple[int, int]:
    """Bytes of the device, and of the allocator, after everything idle is given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free, torch.cuda.memory_reserved()


def wide_rows(descriptor: pw.BatchDescriptor) -> tuple[Tensor]:
    return (rows(descriptor.num_tokens, WIDTH),)


def close(got: Tensor, expected: Tensor, where: str) -> None:
    """Equal up to the rounding of many layers."""
    near(got, expected, where, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def deep_model(num_layers: int) -> Decoder:
    """Its kernels are loaded, so that loading them is in no figure."""
    declare("always")
    model = Decoder(num_layers, WIDTH).cuda()
    for parameter in model.parameters():
        parameter.mul_(0.25)  # numbers that do not grow from layer to layer
    for n in GRID:
        model(rows(n, WIDTH))
    return model


def measured(mode: str, num_layers: int, limit: int | None) -> dict[str, Any]:
    """In a child: warm up, and look at the device from outside."""
    with torch.no_grad():
        model = deep_model(num_layers)
        compiled = compile(
            model,
            cudagraph_capture_sizes=GRID,
            cudagraph_mode=mode,
            max_graph_memory=limit,
        )
        before = taken()
        report = pw.warmup(compiled, wide_rows)
        after = taken()
        with quiet():
            for n in (1, 2, 7, 64, 100, 128):
                close(compiled(rows(n, WIDTH)), model(rows(n, WIDTH)), f"{n} tokens")
        graph = report.graphs[0]
        return {
            "device": after[0] - before[0],
            "allocator": after[1] - before[1],
            "costs": [(c.mode.value, c.size, c.memory) for c in graph.capture_costs],
            "use": report.memory_use,
            "estimates": dict(graph.estimates),
            "left_out": dict(graph.left_out),
            "text": str(report),
        }


@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
def test_the_estimate_is_near_what_is_used(mode: str) -> None:
    found = alone(measured, mode, MANY, None)
    print(found["text"][-4000:])
    for name, estimate in found["estimates"].items():
        used = sum(memory.num_bytes for of, _, memory in found["costs"] if of == name)
        print(f"{name}: estimated {estimate}, used {used / MIB:.1f} MiB")
        assert estimate.num_bytes == pytest.approx(used, rel=0.2), name
    assert found["estimates"].keys() == set(mode.split("_and_"))
    of_driver = found["device"] - found["allocator"]
    assert found["use"].driver_bytes == pytest.approx(of_driver, rel=0.2, abs=8 * MIB)


def test_the_budget_is_kept() -> None:
    """It is what the largest size takes, and half of what the others take."""
    unlimited = alone(measured, "piecewise", FEW, None)
    first = unlimited["costs"][0][2].num_bytes
    limit = (first + unlimited["use"].num_bytes) // 2
    found = alone(measured, "piecewise", FEW, limit)
    sizes = sorted(size for _, size, _ in found["costs"])
    print(f"limit {limit / MIB:.1f} MiB, device {found['device'] / MIB:.1f} MiB, {sizes}")
    assert found["use"].num_bytes <= limit
    assert found["device"] <= limit
    assert found["device"] >= first, "and it is used"
    assert {sizes[0], sizes[-1]} == {GRID[0], GRID[-1]}
    assert 4 < len(sizes) < len(GRID)
    assert set(found["left_out"]) == {("piecewise", n) for n in GRID if n not in sizes}


def evicted() -> dict[str, Any]:
    """In a child: evict, look at the device, and capture again."""
    with torch.no_grad():
        model = deep_model(FEW)
        compiled = compile(model, cudagraph_capture_sizes=GRID, cudagraph_mode="piecewise")
        before = taken()
        pw.warmup(compiled, wide_rows)
        for n in (3, 128):
            compiled(rows(n, WIDTH))
        warm = taken()
        some = pw.evict(compiled)
        after_some = taken()
        for n in range(1, 129):
            close(compiled(rows(n, WIDTH)), model(rows(n, WIDTH)), f"{n} tokens")
        pw.warmup(compiled, wide_rows)
        again = taken()
        rest = pw.evict(compiled)
        after_rest = taken()
        return {
            "some": some,
            "rest": rest,
            "points": [before, warm, after_some, again, after_rest],
            "use": pw.report(compiled).memory_use,
        }


def test_the_driver_uses_again_what_is_evicted() -> None:
    """The device sees little of it: a driver keeps what it has for graphs to come."""
    found = alone(evicted)
    before, warm, after_some, again, after_rest = (device for device, _ in found["points"])
    print({k: f"{v / MIB:.1f}" for k, v in locals().items() if isinstance(v, int)})
    print(found["some"], found["rest"], sep="\n")
    assert found["some"].sizes == {"piecewise": tuple(n for n in GRID if n not in (4, 128))}
    assert found["some"].memory.device_bytes == pytest.approx(warm - after_some, abs=4 * MIB)
    assert warm - after_some >= 0
    assert again <= warm + 8 * MIB, "graphs that are captured again take what was given up"
    assert len(found["rest"].sizes["piecewise"]) == len(GRID)
    assert before < after_rest <= again


def test_reading_memory_costs_little() -> None:
    """Twice a size: 102 readings for 51 sizes, of 3 s that their capture may take."""
    read = of_device(torch.device("cuda", 0))
    rows(16).sum()
    read(0)
    started = time.perf_counter()
    for _ in range(100):
        read(0)
    seconds = (time.perf_counter() - started) / 100
    print(f"{1e6 * seconds:.0f} us a reading")
    assert seconds < 1e-3


# Out of memory

IS_HUNGRY = [""]
"""When the op of the next test asks for more than there is, at 8 tokens."""


@torch.library.custom_op("pwtest::gpu_hungry", mutates_args=[])
def gpu_hungry(x: Tensor) -> Tensor:
    is_recording = torch.cuda.is_current_stream_capturing()
    if x.size(0) == 8 and IS_HUNGRY[0] == ("recording" if is_recording else "warm-up run"):
        is_on_side = torch.cuda.current_stream() != torch.cuda.default_stream()
        if is_on_side:  # the step without graphs runs on the user's
            torch.empty(2**42, dtype=torch.uint8, device="cuda")
    return x * 2


@gpu_hungry.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
@pytest.mark.parametrize("when", ["recording", "warm-up run"])
def test_memory_ends_in_the_middle_of_a_capture(when: str, mode: str) -> None:
    """That size is disabled with its reason; the pool takes the others, and the next warm-up."""
    declare("always")

    def model(x: Tensor) -> Tensor:
        x = torch.ops.pwtest.gpu_hungry(x + 1)
        return out_attn(x, x, x).sin() + x

    compiled = compile(model, cudagraph_mode=mode)
    IS_HUNGRY[0] = when
    try:
        with quiet():
            report = pw.warmup(compiled, lambda d: (rows(d.num_tokens),))
    finally:
        IS_HUNGRY[0] = ""
    graph = report.graphs[0]
    # Trials of padding for 16 tokens run with 8, outside of a recording.
    expected = (16, 4) if when == "recording" else (4,)
    assert graph.captured_sizes == expected
    assert "out of memory" in graph.capture_errors[8]
    kept = []
    with quiet():
        for call in range(40):
            x = rows(1 + call % 16, seed=call)
            with pw.batch(uniform=call % 3 == 0):
                kept.append((compiled(x), model(x), f"call {call}"))
    for got, wanted, where in kept:
        near(got, wanted, where)
    found = fallbacks(pw.report(compiled))
    assert found.keys() == {FallbackReason.CAPTURE_ERROR}
    again = pw.warmup(compiled, lambda d: (rows(d.num_tokens),)).graphs[0]
    assert set(again.captured_sizes) == {4, 8, 16}
    before = num_replays(pw.report(compiled))
    for n in range(1, 17):
        near(compiled(rows(n)), model(rows(n)), f"{n} tokens, captured again")
    assert num_replays(pw.report(compiled)) == before + 16


# Rebuilding


def test_a_thread_that_serves_while_graphs_are_rebuilt() -> None:
    model = Decoder(4, 64).cuda()
    compiled = pw.compile(
        model,
        compiler="eager",
        splitting_ops=list(helpers.SPLIT_OPS),
        cudagraph_capture_sizes=[4, 8, 16],
    )
    compiled.warmup(lambda d: (rows(d.num_tokens, 64),))
    new_parameters(model)
    inputs = [rows(n, 64, seed=n) for n in range(1, 17)]
    expected = [model(x) for x in inputs]
    torch.cuda.synchronize()
    is_done = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()), quiet():
                while not is_done.is_set():
                    for x, wanted in zip(inputs, expected, strict=True):
                        close(compiled(x), wanted, f"{len(x)} tokens meanwhile")
        except BaseException as error:
            errors.append(error)

    with quiet():
        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(3):
                compiled.rebind()
        finally:
            is_done.set()
            thread.join(timeout=60)
    assert not thread.is_alive()
    assert not errors, errors
    assert FallbackReason.REBUILDING in fallbacks(compiled.report())
    before = num_replays(compiled.report())
    for x, wanted in zip(inputs, expected, strict=True):
        close(compiled(x), wanted, f"{len(x)} tokens afterwards")
    assert num_replays(compiled.report()) == before + 16
