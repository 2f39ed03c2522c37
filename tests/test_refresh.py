"""Hooks that refresh what a graph of a whole step reads: when they run, in which order, and what
happens if one fails. There are no streams here: see `gpu/test_update_stream.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend.graphs import EmulatedGraphPool
from piecewise_backend.registry import Hook, traits_of
from piecewise_backend.update_stream import UpdateStream
from tests.helpers import compile, declare, mark_dynamic, out_attn, rows, same
from tests.runtime_helpers import fallbacks, modes, quiet

STREAMS = ["current_stream", "update_stream"]
OPS = ["pwtest::attn", "pwtest::by_lengths", "pwtest::by_others"]
LOG: list[str] = []
"""What ran, in order."""


@torch.library.custom_op("pwtest::by_lengths", mutates_args=["out"])
def by_lengths(x: Tensor, out: Tensor, lengths: Tensor) -> None:
    """Its kernel reads lengths from a device buffer."""
    LOG.append("by_lengths")
    out.copy_(x * lengths)


@by_lengths.register_fake
def _(x: Tensor, out: Tensor, lengths: Tensor) -> None:
    return None


@torch.library.custom_op("pwtest::by_others", mutates_args=["out"])
def by_others(x: Tensor, out: Tensor, lengths: Tensor) -> None:
    """The same under another name."""
    LOG.append("by_others")
    out.copy_(x * lengths)


@by_others.register_fake
def _(x: Tensor, out: Tensor, lengths: Tensor) -> None:
    return None


class Metadata:
    """Lengths on the host, and the buffer that kernels read them from."""

    def __init__(self) -> None:
        self.on_host = 1.0
        self.buffer = torch.ones(())
        self.descriptors: list[pw.BatchDescriptor] = []
        self.error: BaseException | None = None

    def refresh(self, descriptor: pw.BatchDescriptor) -> None:
        """The hook."""
        LOG.append("refresh")
        self.descriptors.append(descriptor)
        if self.error is not None:
            raise self.error
        self.buffer.fill_(self.on_host)


def model_of(metadata: Metadata) -> Callable[[Tensor], Tensor]:
    """One op that needs no hook, then two that do."""
    buffer = metadata.buffer

    def model(x: Tensor) -> Tensor:
        x = out_attn(x, x, x)
        first, second = torch.empty_like(x), torch.empty_like(x)
        torch.ops.pwtest.by_lengths(x, first, buffer)
        torch.ops.pwtest.by_others(first + 1, second, buffer)
        return second + 1

    return model


def expected(x: Tensor, length: float) -> Tensor:
    """What the model makes of right lengths."""
    return (3 * x * length + 1) * length + 1


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    LOG.clear()
    with torch.no_grad():
        yield


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log what the pool is asked for, too."""
    run = EmulatedGraphPool.refresh

    def refresh(pool: EmulatedGraphPool, functions: Any) -> None:
        LOG.append("update stream:")
        run(pool, functions)

    monkeypatch.setattr(EmulatedGraphPool, "refresh", refresh)
    monkeypatch.setattr(EmulatedGraphPool, "wait_for_refresh", lambda pool: LOG.append("wait"))


def of_rows(descriptor: pw.BatchDescriptor) -> tuple[Tensor, ...]:
    return (rows(descriptor.num_tokens),)


def warmed(model: Any, **options: Any) -> Any:
    options.setdefault("cudagraph_capture_sizes", [2, 4])
    compiled = compile(model, splitting_ops=OPS, **options)
    pw.warmup(compiled, of_rows)
    LOG.clear()
    return compiled


def hooked(refresh_on: str, hook: Callable[[pw.BatchDescriptor], None], *ops: str) -> None:
    declare("always", *OPS)
    declare("always", *(ops or OPS[1:]), before_replay=hook, refresh_on=refresh_on)


# What a graph reads


@pytest.mark.parametrize("refresh_on", [None, *STREAMS])
def test_values_are_stale_without_a_hook_and_right_with_one(refresh_on: str | None) -> None:
    metadata = Metadata()
    declare("always", *OPS)
    if refresh_on is not None:
        hooked(refresh_on, metadata.refresh)
    compiled = warmed(model_of(metadata))
    for n, length in ((4, 3.0), (3, 5.0), (2, 7.0), (1, 2.0)):
        metadata.on_host = length
        with pw.batch(uniform=True):
            result = compiled(rows(n))
        same(result, expected(rows(n), length if refresh_on else 1.0), f"{n}, {length}")
    assert modes(compiled) == {"full": 4}
    assert not fallbacks(pw.report(compiled))


@pytest.mark.parametrize("refresh_on", STREAMS)
def test_a_hook_is_called_once_before_the_replay(refresh_on: str) -> None:
    """Two ops share it."""
    metadata = Metadata()
    hooked(refresh_on, metadata.refresh)
    compiled = warmed(model_of(metadata))
    metadata.descriptors.clear()
    with pw.batch(uniform=True, num_reqs=3):
        compiled(rows(3))
    assert LOG == ["refresh", "by_lengths", "by_others"]
    assert metadata.descriptors == [pw.BatchDescriptor(num_tokens=4, num_reqs=4, uniform=True)]


@pytest.mark.parametrize("refresh_on", STREAMS)
def test_warm_up_and_capture_see_refreshed_values(refresh_on: str) -> None:
    """What a buffer holds before may be anything."""
    metadata = Metadata()
    hooked(refresh_on, metadata.refresh)
    compiled = compile(model_of(metadata), splitting_ops=OPS, cudagraph_capture_sizes=[4])

    def make_inputs(descriptor: pw.BatchDescriptor) -> tuple[Tensor, ...]:
        LOG.append(f"{descriptor.num_tokens}")
        return of_rows(descriptor)

    pw.warmup(compiled, make_inputs, verify=False)
    of_whole_step = LOG[len(LOG) - LOG[::-1].index("4") :]
    # Without graphs, then the refresh, a warm-up run and the recording.
    ops = ["by_lengths", "by_others"]
    assert of_whole_step == [*ops, "refresh", *ops, *ops]
    assert {descriptor.num_tokens for descriptor in metadata.descriptors} == {4}


@pytest.mark.usefixtures("waits")
def test_the_first_op_that_needs_it_waits() -> None:
    metadata = Metadata()
    hooked("update_stream", metadata.refresh)
    compiled = warmed(model_of(metadata))
    with pw.batch(uniform=True):
        compiled(rows(4))
    assert LOG == ["update stream:", "refresh", "wait", "by_lengths", "by_others"]


@pytest.mark.usefixtures("waits")
def test_an_op_without_such_a_hook_does_not_wait() -> None:
    metadata = Metadata()
    hooked("update_stream", metadata.refresh, "pwtest::by_others")
    compiled = warmed(model_of(metadata))
    with pw.batch(uniform=True):
        compiled(rows(4))
    assert LOG == ["update stream:", "refresh", "by_lengths", "wait", "by_others"]


@pytest.mark.usefixtures("waits")
def test_hooks_of_both_streams() -> None:
    """Those of the update stream may use what the others launched."""
    metadata = Metadata()
    hooked("update_stream", metadata.refresh, "pwtest::by_lengths")
    hooked("current_stream", lambda descriptor: LOG.append("first"), "pwtest::by_others")
    compiled = warmed(model_of(metadata))
    with pw.batch(uniform=True):
        compiled(rows(4))
    order = ["first", "update stream:", "refresh", "wait", "by_lengths", "by_others"]
    assert order == LOG


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("order", [STREAMS, STREAMS[::-1]])
def test_a_hook_of_two_ops_with_different_streams(order: list[str]) -> None:
    """The current stream is early enough for both."""
    metadata = Metadata()
    for op, refresh_on in zip(OPS[1:], order, strict=True):
        hooked(refresh_on, metadata.refresh, op)
    compiled = warmed(model_of(metadata))
    with pw.batch(uniform=True):
        compiled(rows(4))
    assert LOG == ["refresh", "by_lengths", "by_others"]


@pytest.mark.parametrize("refresh_on", STREAMS)
def test_no_hook_for_calls_that_run_the_op_itself(refresh_on: str) -> None:
    metadata = Metadata()
    hooked(refresh_on, metadata.refresh)
    compiled = warmed(model_of(metadata))
    with pw.batch(uniform=True, mode=pw.CUDAGraphMode.PIECEWISE):
        compiled(rows(4))
    assert modes(compiled) == {"piecewise": 1}
    pw.switch_graphs(compiled, False)
    with pw.batch(uniform=True):
        compiled(rows(4))
    assert LOG == ["by_lengths", "by_others"] * 2


@pytest.mark.parametrize("refresh_on", STREAMS)
def test_buffers_made_in_inference_mode(refresh_on: str) -> None:
    """They can be written there only, also by the hook at capture."""
    with torch.inference_mode():
        metadata = Metadata()
        hooked(refresh_on, metadata.refresh)
        compiled = warmed(model_of(metadata))
        metadata.on_host = 3.0
        with pw.batch(uniform=True):
            same(compiled(rows(4)), expected(rows(4), 3.0), "in inference mode")
    assert modes(compiled) == {"full": 1}


# What goes wrong


@pytest.mark.parametrize("kind", [ZeroDivisionError, pw.ContractError, KeyboardInterrupt])
@pytest.mark.parametrize("refresh_on", STREAMS)
def test_an_error_in_a_hook_reaches_the_caller(refresh_on: str, kind: type[BaseException]) -> None:
    metadata = Metadata()
    hooked(refresh_on, metadata.refresh)
    compiled = warmed(model_of(metadata))
    for n in (3, 4):  # 3: prepared by the call before, 4: not
        with pw.batch(uniform=True):
            same(compiled(rows(3)), expected(rows(3), metadata.on_host), "the call before")
            before = modes(compiled)
            LOG.clear()
            metadata.error = kind("of the user")
            with pytest.raises(kind, match="of the user"):
                compiled(rows(n))
            assert LOG == ["refresh"], "nothing was replayed"
            assert modes(compiled) == before
            metadata.error = None
            metadata.on_host += 1
            same(compiled(rows(n)), expected(rows(n), metadata.on_host), "the next call")
    assert not fallbacks(pw.report(compiled))


@pytest.mark.parametrize("refresh_on", STREAMS)
def test_an_error_in_a_hook_at_warm_up(refresh_on: str) -> None:
    metadata = Metadata()
    hooked(refresh_on, metadata.refresh)
    compiled = compile(model_of(metadata), splitting_ops=OPS, cudagraph_capture_sizes=[4])
    metadata.error = ZeroDivisionError("of the user")
    with pytest.raises(ZeroDivisionError, match="of the user"):
        pw.warmup(compiled, of_rows)
    assert not pw.report(compiled).is_sealed
    with quiet(), pw.batch(uniform=True):
        same(compiled(mark_dynamic([rows(4)])[0]), expected(rows(4), 1.0), "the next call")
    metadata.error = None
    pw.warmup(compiled, of_rows)
    metadata.on_host = 3.0
    with pw.batch(uniform=True):
        same(compiled(rows(4)), expected(rows(4), 3.0), "warmed up again")


@pytest.mark.parametrize("refresh_on", STREAMS)
def test_an_op_that_cannot_be_recorded(refresh_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = Metadata()
    hooked(refresh_on, metadata.refresh)
    capture, is_failing = EmulatedGraphPool.capture, True

    def fail(pool: EmulatedGraphPool, function: Any, inputs: Any) -> Any:
        if is_failing and "_Step" in getattr(function, "__qualname__", ""):
            raise pw.CaptureError("cannot be recorded")
        return capture(pool, function, inputs)

    monkeypatch.setattr(EmulatedGraphPool, "capture", fail)
    options = {"cudagraph_mode": "full_and_piecewise"}
    with pytest.warns(RuntimeWarning, match="cannot be recorded"):
        compiled = warmed(model_of(metadata), **options)
    with pw.batch(uniform=True):
        same(compiled(rows(4)), expected(rows(4), 1.0), "in pieces")
    assert LOG == ["by_lengths", "by_others"]
    is_failing = False
    pw.warmup(compiled, of_rows)
    metadata.on_host = 3.0
    with pw.batch(uniform=True):
        same(compiled(rows(4)), expected(rows(4), 3.0), "warmed up again")
    assert modes(compiled)["full"] >= 1


@pytest.mark.parametrize("refresh_on", STREAMS)
def test_an_op_with_a_hook_inside_of_a_piece(refresh_on: str) -> None:
    """Nobody would call it."""
    hooked(refresh_on, Metadata().refresh)
    compiled = compile(model_of(Metadata()), splitting_ops=["pwtest::attn", "pwtest::by_others"])
    with pytest.raises(pw.SplitError, match=r"by_lengths' .*add it to splitting_ops or leave"):
        compiled(rows(4))


# Registering


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"refresh_on": "update_streem"}, "'update_streem' is not known; did you mean 'update_str"),
        ({"refresh_on": "gpu"}, r"'gpu' is not known; use one of \['current_stream', 'update_str"),
        ({"refresh_on": None}, "None is not known"),
        ({"refresh_on": True}, "True is not known"),
        ({"before_replay": None}, "without before_replay has nothing to run there; pass before_re"),
        ({"before_replay": 3}, "before_replay is 3; pass a function"),
        ({"before_replay": [print]}, "before_replay is .*; pass a function"),
        ({"capture": "alwys"}, "'alwys' is not known; did you mean 'always'"),
    ],
)
def test_values_that_are_refused(given: dict[str, Any], message: str) -> None:
    before = traits_of("pwtest::by_lengths")
    call = {"before_replay": print, "refresh_on": "update_stream", "capture": "always"} | given
    with pytest.raises(pw.ConfigError, match=message):
        pw.register_splitting_op("pwtest::by_lengths", **call)
    assert traits_of("pwtest::by_lengths") == before, "nothing is registered"


def test_registering_an_op_again() -> None:
    def register(**given: Any) -> tuple[Hook, ...]:
        pw.register_splitting_op("pwtest::by_lengths", **given)
        return traits_of("pwtest::by_lengths").before_replay

    metadata = Metadata()  # bound methods are equal, not identical
    assert register() == ()
    assert register(before_replay=print) == (Hook(print, False),)
    both = (Hook(print, False), Hook(metadata.refresh, True))
    assert register(before_replay=metadata.refresh, refresh_on="update_stream") == both
    assert register(before_replay=metadata.refresh, refresh_on="update_stream") == both, "again"
    assert register(capture="always") == both, "other traits leave hooks alone"
    moved = (Hook(print, True), Hook(metadata.refresh, True))
    assert register(before_replay=print, refresh_on="update_stream") == moved
    assert register(before_replay=print) == both, "moved back, in its place"
    assert traits_of("pwtest::by_lengths").capture.name == "ALWAYS"


def test_a_decorator_takes_all_of_it() -> None:
    @pw.register_splitting_op(capture="always", before_replay=print, refresh_on="update_stream")
    @torch.library.custom_op("pwtest::decorated_with_hook", mutates_args=[])
    def decorated(x: Tensor) -> Tensor:
        return x + 1

    assert traits_of("pwtest::decorated_with_hook").before_replay == (Hook(print, True),)


# The update stream, on streams that only take notes


class NotedStream:
    """A stream by name."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.notes = notes

    def wait_stream(self, other: NotedStream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


class NotedEvent:
    """The event of the update stream."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def record(self, stream: NotedStream) -> None:
        self.notes.append(f"recorded on {stream.name}")

    def wait(self, stream: NotedStream) -> None:
        self.notes.append(f"{stream.name} waits for the event")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What CUDA would be told."""
    found: list[str] = []
    current = [NotedStream("call", found)]

    @contextlib.contextmanager
    def switch(stream: NotedStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def make_event(*, external: bool) -> NotedEvent:
        assert external, "a graph cannot wait for others"
        return NotedEvent(found)

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: NotedStream("update", found))
    monkeypatch.setattr(torch.cuda, "Event", make_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", switch)
    return found


def test_order_on_the_update_stream(notes: list[str]) -> None:
    updates = UpdateStream(torch.device("cuda", 0))
    assert notes == ["recorded on update"], "or a graph would not wait"
    notes.clear()

    def function() -> None:
        notes.append(f"runs on {torch.cuda.current_stream(torch.device('cuda', 0)).name}")

    updates.refresh([function, function])
    updates.wait()
    assert notes == [
        "update waits for call", "runs on update", "runs on update", "recorded on update",
        "call waits for the event",
    ]  # fmt: skip


def test_an_error_on_the_update_stream(notes: list[str]) -> None:
    updates = UpdateStream(torch.device("cuda", 0))
    notes.clear()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        updates.refresh([fail, lambda: notes.append("never")])
    assert notes == ["update waits for call", "call waits for update"]
