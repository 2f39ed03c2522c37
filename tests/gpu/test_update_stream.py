"""Refreshing what a graph of a whole step reads, beside its replay.

Nothing here synchronises between steps unless it says so: what is not ordered by streams and events
shows as a wrong number. Sleeps make the windows wide.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_backend as pw
from tests import helpers
from tests.gpu.test_cuda import compile, near, rows, warmed
from tests.helpers import declare, out_attn
from tests.runtime_helpers import fallbacks, modes, quiet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STREAMS = ["current_stream", "update_stream"]
OPS = ["pwtest::attn", "pwtest::naps", "pwtest::planned", "pwtest::refuses"]
MS = 2_000_000  # cycles: about a millisecond
NAPS = {"before": 0, "read": 0, "refresh": 0}
"""Cycles for which the GPU sleeps before an op reads lengths, and before they are refreshed."""


class Metadata:
    """Lengths on the host, and the buffer that the kernels of `planned` read them from."""

    def __init__(self, device: str = "cuda") -> None:
        self.on_host = 1.0
        self.buffer = torch.ones((), device=device)
        self.streams: list[torch.cuda.Stream] = []
        self.error: Exception | None = None

    def write(self) -> None:
        """A launch, with the number as an argument of the kernel: the host may go on."""
        self.buffer.fill_(self.on_host)

    def refresh(self, descriptor: pw.BatchDescriptor) -> None:
        """The hook."""
        self.streams.append(torch.cuda.current_stream())
        nap("refresh")
        self.write()
        if self.error is not None:
            raise self.error


METADATA: list[Metadata] = []
"""Of the model that is run: as the forward context of an engine would have it."""


def nap(where: str) -> None:
    if NAPS[where]:
        torch.cuda._sleep(NAPS[where])


@torch.library.custom_op("pwtest::naps", mutates_args=["out"])
def naps(x: Tensor, out: Tensor) -> None:
    """Whatever comes before the op that reads lengths."""
    nap("before")
    out.copy_(x)


@naps.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


@torch.library.custom_op("pwtest::planned", mutates_args=["out"])
def planned(x: Tensor, out: Tensor) -> None:
    """Takes lengths from the host: writes them to a buffer, where it is not being recorded, and
    launches a kernel that reads the buffer."""
    (metadata,) = METADATA
    if not torch.cuda.is_current_stream_capturing():
        metadata.write()
    nap("read")
    torch.mul(x, metadata.buffer, out=out)


@planned.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


@torch.library.custom_op("pwtest::refuses", mutates_args=["out"])
def refuses(x: Tensor, out: Tensor) -> None:
    """Reads a result on the host, which a recording cannot."""
    out.copy_(x * (1 if x.sum().item() > 0 else 2))


@refuses.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


@pytest.fixture(autouse=True)
def metadata() -> Iterator[Metadata]:
    """The lengths of a test."""
    METADATA[:] = [Metadata()]
    with torch.no_grad():
        yield METADATA[0]
    METADATA.clear()
    NAPS.update(dict.fromkeys(NAPS, 0))
    helpers.KEPT.clear()


def model(x: Tensor) -> Tensor:
    """Two ops that need no hook, and two calls of one that does."""
    x = out_attn(x, x, x)
    rested, first, second = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    torch.ops.pwtest.naps(x, rested)
    torch.ops.pwtest.planned(rested, first)
    torch.ops.pwtest.planned(first + 1, second)
    return second + 1


def expected(x: Tensor, length: float) -> Tensor:
    """What the model makes of right lengths."""
    return (3 * x * length + 1) * length + 1


def refreshed(refresh_on: str, function: Callable[..., Any] = model, **options: Any) -> Any:
    """The model warmed up, with the hook on a stream."""
    declare("always", *OPS)
    hook = METADATA[0].refresh
    declare("always", "pwtest::planned", before_replay=hook, refresh_on=refresh_on)
    compiled = warmed(function, splitting_ops=OPS, **options)
    METADATA[0].streams.clear()
    return compiled


def finish(seconds: float = 60) -> None:
    """Wait for the GPU, but not for ever: a wait that nobody ends would hang the tests."""
    deadline = time.monotonic() + seconds
    done = torch.cuda.Event()
    done.record()
    while not done.query():
        if time.monotonic() > deadline:
            pytest.exit("the GPU hangs: a graph waits for a refresh that waits for it", 3)
        time.sleep(0.001)
    torch.cuda.synchronize()


def serve(compiled: Any, metadata: Metadata, num_steps: int = 40) -> None:
    """Steps with other lengths and other numbers of rows each, and a look at all of them."""
    order = random.Random(0)
    results = []
    for step in range(num_steps):
        metadata.on_host = float(step % 7 + 2)
        x = rows(order.randint(3, 16), seed=step)
        with pw.batch(uniform=True):
            results.append((compiled(x), x, metadata.on_host, step))
    finish()
    for found, x, length, step in results:
        near(found, expected(x, length), f"step {step} of {len(x)} rows, lengths {length}")


# Numbers


def test_lengths_from_the_host_are_stale_without_a_hook(metadata: Metadata) -> None:
    declare("always", *OPS)
    compiled = warmed(model, splitting_ops=OPS)
    metadata.on_host = 3.0
    x = rows(8)
    with pw.batch(uniform=True):
        near(compiled(x), expected(x, 1.0), "the lengths of the warm-up")
    near(compiled(x), expected(x, 3.0), "in pieces the op itself takes them from the host")
    assert modes(compiled) == {"full": 1, "piecewise": 1}


@pytest.mark.parametrize("refresh_on", STREAMS)
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_lengths_are_right_with_a_hook(metadata: Metadata, refresh_on: str, compiler: str) -> None:
    compiled = refreshed(refresh_on, compiler=compiler)
    with pw.compilation_counter.expect():
        serve(compiled, metadata)
    assert modes(compiled) == {"full": 40}
    assert not fallbacks(pw.report(compiled))
    is_current = [stream == torch.cuda.current_stream() for stream in metadata.streams]
    assert is_current == [refresh_on == "current_stream"] * 40


@pytest.mark.parametrize("naps", [{"refresh": MS}, {"read": MS}, {"refresh": MS, "read": MS}])
@pytest.mark.parametrize("refresh_on", STREAMS)
def test_neither_overtakes_the_other(
    metadata: Metadata, refresh_on: str, naps: dict[str, int]
) -> None:
    """A slow refresh: its own step must not read too early. A slow op: the refresh of the next
    step must not write too early."""
    NAPS.update(naps)  # before the capture, which records those of ops
    serve(refreshed(refresh_on), metadata)


def test_a_refresh_before_the_first_op_of_a_step(metadata: Metadata) -> None:
    """Nothing at all comes before the wait."""

    def starts_with_it(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.pwtest.planned(x, out)
        return out

    NAPS["refresh"] = MS
    compiled = refreshed("update_stream", starts_with_it)
    results = []
    for step in range(20):
        metadata.on_host = step + 2.0
        with pw.batch(uniform=True):
            results.append(compiled(rows(8)))
    finish()
    for step, found in enumerate(results):
        near(found, rows(8) * (step + 2.0), f"step {step}")


def test_the_refresh_overlaps_what_comes_before_the_op(metadata: Metadata) -> None:
    """Two sleeps side by side on one stream less than one after the other."""
    seconds = {}
    for refresh_on in STREAMS:
        torch._dynamo.reset()
        NAPS.update(before=0, refresh=0)
        NAPS["before"] = 20 * MS
        compiled = refreshed(refresh_on)
        NAPS["refresh"] = 20 * MS
        x = rows(8)
        with pw.batch(uniform=True):
            compiled(x)
            finish()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for step in range(5):
                metadata.on_host = step + 2.0
                found = compiled(x)
            end.record()
        finish()
        near(found, expected(x, metadata.on_host), refresh_on)
        seconds[refresh_on] = start.elapsed_time(end) / 1000
    assert seconds["update_stream"] < 0.7 * seconds["current_stream"], seconds


def test_modes_taking_turns(metadata: Metadata) -> None:
    """In pieces the op writes the buffer on the stream of the call."""
    NAPS.update(read=MS, refresh=MS)
    compiled = refreshed("update_stream")
    results = []
    for step in range(40):
        metadata.on_host = step % 5 + 2.0
        x = rows(8, seed=step)
        with pw.batch(uniform=step % 3 != 0):
            results.append((compiled(x), x, metadata.on_host, step))
    finish()
    for found, x, length, step in results:
        near(found, expected(x, length), f"step {step}")
    assert set(modes(compiled)) == {"full", "piecewise"}


def test_what_follows_a_step_does_not_overtake_its_refresh(metadata: Metadata) -> None:
    """The caller writes the buffer, too."""
    NAPS["refresh"] = 5 * MS
    compiled = refreshed("update_stream")
    metadata.on_host = 3.0
    with pw.batch(uniform=True):
        found = compiled(rows(8))
    metadata.buffer.fill_(-1.0)
    finish()
    near(found, expected(rows(8), 3.0), "the step")
    assert metadata.buffer.item() == -1.0


def test_a_caller_who_uses_two_streams(metadata: Metadata) -> None:
    NAPS.update(read=MS, refresh=MS)
    compiled = refreshed("update_stream")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    x = rows(8)
    results = []
    torch.cuda.synchronize()
    for step in range(30):
        metadata.on_host = step % 5 + 2.0
        with torch.cuda.stream(streams[step % 3]), pw.batch(uniform=True):
            results.append((compiled(x), metadata.on_host, step))
    for stream in streams[1:]:
        torch.cuda.current_stream().wait_stream(stream)
    finish()
    for found, length, step in results:
        near(found, expected(x, length), f"step {step}")


def test_two_models_with_one_buffer(metadata: Metadata) -> None:
    """Their update streams know of each other through the stream of the calls only."""
    NAPS.update(read=MS, refresh=MS)
    first = refreshed("update_stream")
    second = warmed(lambda x: model(x) * 2, splitting_ops=OPS)
    x = rows(8)
    results = []
    for step in range(30):
        metadata.on_host = step % 5 + 2.0
        with pw.batch(uniform=True):
            found = first(x) if step % 2 else second(x) / 2
        results.append((found, metadata.on_host, step))
    finish()
    for found, length, step in results:
        near(found, expected(x, length), f"step {step}")
    assert modes(first) == modes(second) == {"full": 15}


def test_calls_from_threads(metadata: Metadata) -> None:
    """One after the other, each with its own length."""
    NAPS.update(read=MS, refresh=MS)
    compiled = refreshed("update_stream")
    turn = threading.Lock()
    results = []

    def call(length: float) -> None:
        x = rows(8)
        for _ in range(10):
            with turn, torch.no_grad(), pw.batch(uniform=True):
                metadata.on_host = length
                results.append((compiled(x), length))

    threads = [threading.Thread(target=call, args=(number + 2.0,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    finish()
    assert len(results) == 30
    for found, length in results:
        near(found, expected(rows(8), length), f"{length}")


def test_a_copy_from_pinned_memory(metadata: Metadata) -> None:
    """As engines refresh: memory of the host per step, and temporaries on the device."""
    NAPS.update(read=MS, refresh=MS)

    def hook(descriptor: pw.BatchDescriptor) -> None:
        nap("refresh")
        numbers = torch.full((1024,), metadata.on_host / 1024, pin_memory=True)
        on_device = numbers.to("cuda", non_blocking=True)
        metadata.buffer.copy_(on_device.sum())

    declare("always", *OPS)
    declare("always", "pwtest::planned", before_replay=hook, refresh_on="update_stream")
    serve(warmed(model, splitting_ops=OPS), metadata)


def test_captured_again(metadata: Metadata) -> None:
    """A weight moved: other graphs, perhaps on another update stream."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4, device="cuda"), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return model(x + self.bias)

    NAPS.update(read=MS, refresh=MS)
    module = Biased()
    compiled = refreshed("update_stream", module)
    serve(compiled, metadata, 10)
    module.bias.data = torch.zeros(4, device="cuda")
    with quiet():
        pw.warmup(compiled, lambda d: (rows(d.num_tokens),))
    serve(compiled, metadata, 20)
    assert modes(compiled)["full"] >= 30


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_another_device_than_the_current_one() -> None:
    METADATA[:] = [Metadata("cuda:1")]
    (metadata,) = METADATA
    NAPS.update(read=MS, refresh=MS)
    declare("always", *OPS)
    declare("always", "pwtest::planned", before_replay=metadata.refresh, refresh_on="update_stream")
    compiled = compile(model, splitting_ops=OPS)
    with torch.cuda.device(1):
        pw.warmup(compiled, lambda d: (rows(d.num_tokens),))
    x = rows(8).to("cuda:1")
    metadata.streams.clear()
    results = []
    for step in range(20):
        metadata.on_host = step + 2.0
        with pw.batch(uniform=True):
            results.append(compiled(x))
    torch.cuda.synchronize(1)
    for step, found in enumerate(results):
        near(found, expected(x, step + 2.0), f"step {step}")
    assert {stream.device.index for stream in metadata.streams} == {1}
    assert torch.cuda.current_device() == 0


# What goes wrong


@pytest.mark.parametrize("refresh_on", STREAMS)
def test_an_error_in_a_hook(metadata: Metadata, refresh_on: str) -> None:
    """What it launched before is done before anything that the caller launches next."""
    NAPS["refresh"] = 5 * MS
    compiled = refreshed(refresh_on)
    serve(compiled, metadata, 5)
    before = modes(compiled)
    metadata.on_host, metadata.error = -100.0, ZeroDivisionError("of the user")
    with pw.batch(uniform=True), pytest.raises(ZeroDivisionError, match="of the user"):
        compiled(rows(8))
    metadata.buffer.fill_(3.0)
    finish()
    assert metadata.buffer.item() == 3.0
    assert modes(compiled) == before
    metadata.error = None
    serve(compiled, metadata, 10)
    assert modes(compiled)["full"] == before["full"] + 10


@pytest.mark.parametrize("refresh_on", STREAMS)
def test_an_error_in_a_hook_at_warm_up(metadata: Metadata, refresh_on: str) -> None:
    metadata.error = ZeroDivisionError("of the user")
    with pytest.raises(ZeroDivisionError, match="of the user"):
        refreshed(refresh_on)
    metadata.error = None
    torch._dynamo.reset()
    serve(refreshed(refresh_on), metadata, 10)


def test_an_op_that_cannot_be_recorded(metadata: Metadata) -> None:
    """Behind the wait: the recording that failed contained it."""

    def refusing(x: Tensor) -> Tensor:
        x = model(x)
        out = torch.empty_like(x)
        torch.ops.pwtest.refuses(x, out)
        return out

    NAPS.update(read=MS, refresh=MS)
    with quiet():
        compiled = refreshed("update_stream", refusing)
    report = pw.report(compiled).graphs[0]
    assert report.captured_steps == ()
    assert set(report.step_errors) == {4, 8, 16}
    x = rows(8)
    for step in range(5):
        metadata.on_host = step + 2.0
        with pw.batch(uniform=True):
            near(compiled(x), expected(x, metadata.on_host), f"in pieces, step {step}")
    assert modes(compiled) == {"piecewise": 5}
    assert metadata.streams == [], "pieces contain no op"
    torch._dynamo.reset()
    serve(refreshed("update_stream"), metadata, 20)
