"""The contracts of the runtime on real CUDA graphs."""

from __future__ import annotations

import gc
import importlib.util
import random
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_backend as pw
from examples import quickstart
from examples.engine import Engine, scratch_inputs
from examples.llama import Llama, LlamaConfig
from examples.paged_attention import PagedCache, paged_attention_reference
from piecewise_backend.batch import FallbackReason
from piecewise_backend.capture_stream import CaptureStream
from tests import helpers
from tests.helpers import (
    SPLIT_OPS,
    Decoder,
    assigned_state,
    new_data,
    new_parameters,
    out_attn,
)
from tests.runtime_helpers import fallbacks, num_replays, only_runtime, quiet, toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = [4, 8, 16]
MIB = 2**20
COMPILERS = ["eager", "inductor"]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    helpers.KEPT.clear()


@pytest.fixture(scope="module", autouse=True)
def _one_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Inductor's kernels of this module only, shared by its tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def rows(num_tokens: int, width: int = 4, *, seed: int = 0, dtype: Any = torch.float32) -> Tensor:
    """Random input on the GPU, the same for the same arguments."""
    return helpers.rows(num_tokens, width, seed=seed, dtype=dtype).cuda()


def compile(function: Any, compiler: str = "eager", **options: Any) -> Any:
    """With real CUDA graphs: `graph_impl` is left to its default."""
    given = {
        "compiler": compiler,
        "splitting_ops": list(SPLIT_OPS),
        "cudagraph_capture_sizes": SIZES,
    }
    return torch.compile(function, backend="piecewise", fullgraph=True, options=given | options)


def warmed(function: Any, compiler: str = "eager", *, width: int = 4, **options: Any) -> Any:
    """Compiled, warmed up, sealed."""
    compiled = compile(function, compiler, **options)
    pw.warmup(compiled, lambda descriptor: (rows(descriptor.num_tokens, width),))
    return compiled


def near(got: Any, expected: Any, where: str, **tolerance: float) -> None:
    """Equal up to rounding."""
    torch.testing.assert_close(got, expected, msg=lambda m: f"{where}: {m}", **tolerance)


def fresh_results(x: Tensor) -> Tensor:
    """One output is read at once, one two pieces later."""
    a, b = torch.ops.pwtest.pair(x + 1, x)
    c = torch.ops.pwtest.fresh(a * 2, a, a)
    d, _ = torch.ops.pwtest.pair(c.sin(), x)
    return d.cos() + b


# Numbers


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("function", [toy, fresh_results])
def test_sizes_in_random_order(function: Any, compiler: str) -> None:
    """Every output and everything a split op returned is kept alive to the end."""
    compiled = warmed(function, compiler)
    order = random.Random(0)
    kept = []
    for seed in range(60):
        x = rows(order.randint(1, 16), seed=seed)
        kept.append((compiled(x), function(x), f"call {seed} of {len(x)} tokens"))
        near(*kept[-1])
    for got, expected, where in kept:
        near(got, expected, where + ", at the end")
    assert not fallbacks(pw.report(compiled))
    assert num_replays(pw.report(compiled)) == 60


@pytest.mark.parametrize("compiler", COMPILERS)
def test_none_one_and_many_tokens_from_one_trace(compiler: str) -> None:
    compiled = warmed(toy, compiler)
    with quiet(), pw.compilation_counter.expect():
        for n in (1, 0, 8, 1, 17, 2, 0, 100):
            x = rows(n) if n else torch.empty(0, 4, device="cuda")
            near(compiled(x), toy(x), f"{n} tokens")
    assert len(pw.report(compiled).graphs) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype) -> None:
    model = Decoder(width=16).cuda().to(dtype)
    compiled = compile(model)
    pw.warmup(compiled, lambda d: (rows(d.num_tokens, 16, dtype=dtype),))
    for n in (3, 16, 7):
        x = rows(n, 16, dtype=dtype)
        near(compiled(x), model(x), f"{n} tokens", rtol=2e-2, atol=2e-2)


def test_padding_that_would_reach_real_rows() -> None:
    def model(x: Tensor) -> Tensor:
        x = out_attn(x * 2, x, x)
        return x / x.abs().amax()

    compiled = warmed(model)
    with quiet():
        for n in (3, 8, 5, 16):
            near(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    assert fallbacks(pw.report(compiled)) == {FallbackReason.PADDING_UNSAFE: 2}
    assert num_replays(pw.report(compiled)) == 2


def test_padded_indices_stay_in_range() -> None:
    """An index out of range would abort the process at the device side."""

    @torch.library.custom_op("pwtest_gpu::route", mutates_args=["out"])
    def route(x: Tensor, out: Tensor) -> None:
        out.copy_(torch.arange(len(x), device=x.device) % 4)

    @route.register_fake
    def _(x: Tensor, out: Tensor) -> None:
        return None

    table = rows(4, 8)

    def model(x: Tensor) -> Tensor:
        index = torch.empty(x.size(0), dtype=torch.int64, device=x.device)
        torch.ops.pwtest_gpu.route(x, index)
        x = table[index] * x.sum(-1, keepdim=True)
        y = torch.ops.pwtest.fresh(x, x, x).cos() * 1e30
        return out_attn(y, y, y) + x

    compiled = warmed(model, splitting_ops=[*SPLIT_OPS, "pwtest_gpu::route"])
    for n in (3, 16, 5, 9, 1):
        near(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    torch.cuda.synchronize()


def test_counters() -> None:
    with pw.compilation_counter.expect(
        num_graphs_seen=1,
        num_piecewise_graphs_seen=5,
        num_piecewise_capturable_graphs_seen=3,
        num_cudagraph_captured=6,
    ):
        warmed(toy, cudagraph_capture_sizes=[1, 2])


def test_inductor_counters_do_not_grow_with_depth() -> None:
    with pw.compilation_counter.expect(
        num_graphs_seen=1,
        num_piecewise_graphs_seen=25,
        num_piecewise_capturable_graphs_seen=13,
        num_inductor_compiles=3,
        num_cudagraph_captured=26,
    ):
        warmed(Decoder(12).cuda(), "inductor", cudagraph_capture_sizes=[1, 2])


# Inputs, outputs, weights


def test_inputs_of_every_layout() -> None:
    """A new tensor each call, rows with gaps, a view of a larger buffer, a transposed one."""
    compiled = compile(toy, capture_after=1)
    for call in range(3):
        for n in (4, 7, 16):
            for x in (
                rows(n, seed=call),
                rows(n, 8, seed=call)[:, ::2],
                rows(n + 3, seed=call)[3:],
                rows(4, n, seed=call).t(),
            ):
                with quiet():
                    near(compiled(x), toy(x), f"{n} tokens, strides {x.stride()}")
    assert num_replays(pw.report(compiled)) > 0


def test_outputs_belong_to_the_caller() -> None:
    compiled = warmed(toy)
    outputs = [compiled(rows(8, seed=i)) for i in range(10)]
    for i, output in enumerate(outputs):
        near(output, toy(rows(8, seed=i)), f"output {i}")


def test_static_outputs() -> None:
    compiled = warmed(toy, outputs="static")
    first = compiled(rows(8))
    near(first, toy(rows(8)), "first")
    second = compiled(rows(5, seed=1))
    near(second, toy(rows(5, seed=1)), "second")


@pytest.mark.parametrize("change", [new_data, new_parameters, assigned_state])
def test_rebound_weights(change: Any) -> None:
    model = Decoder().cuda()
    compiled = warmed(model)
    near(compiled(rows(5)), model(rows(5)), "before")
    old = [p.detach() for p in model.parameters()]
    change(model)
    for p in old:
        p.fill_(float("nan"))  # whoever reads the old weights shows it
    with quiet():
        near(compiled(rows(5)), model(rows(5)), "first call after")
        pw.warmup(compiled, lambda d: (rows(d.num_tokens),))
    before = num_replays(pw.report(compiled))
    for n in (5, 16):
        near(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    assert num_replays(pw.report(compiled)) == before + 2
    assert fallbacks(pw.report(compiled)) == {FallbackReason.MOVED_INPUT: 1}


def test_weights_changed_in_place() -> None:
    model = Decoder().cuda()
    compiled = warmed(model)
    for n in (5, 8):
        for p in model.parameters():
            p.mul_(1.5)
        near(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    assert not fallbacks(pw.report(compiled))


def test_cache_and_counter_that_a_piece_updates() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), device="cuda"))
            self.register_buffer("cache", torch.zeros(64, 4, device="cuda"))

        def forward(self, x: Tensor, slots: Tensor) -> Tensor:
            self.calls.add_(1)
            self.cache.index_put_((slots,), x * self.calls)
            return torch.ops.pwtest.fresh(self.cache[slots], x, x) + 1

    model, reference = Model(), Model()
    compiled = compile(model, capture_after=1)
    for call in range(4):
        for n in (16, 8, 5, 3):
            x, slots = rows(n, seed=call), torch.arange(n, device="cuda") + call
            for rows_of in (x, slots):
                torch._dynamo.maybe_mark_dynamic(rows_of, 0)
            with quiet():
                near(compiled(x, slots), reference(x, slots), f"call {call} of {n}")
            near(model.state_dict(), reference.state_dict(), f"state, call {call} of {n}")
    assert num_replays(pw.report(compiled)) > 0


def test_two_instances_of_one_class() -> None:
    models = [Decoder(seed=seed).cuda() for seed in range(2)]
    compiled = [warmed(model) for model in models]
    for n in (5, 8, 16, 3):
        for each, model in zip(compiled, models, strict=True):
            near(each(rows(n)), model(rows(n)), f"{n} tokens")
    assert not fallbacks(pw.report(compiled[0]))


# Memory


def pool_bytes(compiled: Any) -> int:
    """What the graphs' pool has reserved."""
    pool = tuple(only_runtime(compiled).captures.memory.pool.pool)
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == pool)


def test_smaller_sizes_reuse_the_memory_of_the_largest() -> None:
    """Captured 512, 256, 128: the later ones reserve next to nothing; dead values are reused."""
    width, num_layers = 2048, 8
    model = Decoder(num_layers, width).cuda()
    compiled = compile(model, cudagraph_capture_sizes=[128, 256, 512], capture_after=1)
    taken = []
    for n in (512, 256, 128):
        x = rows(n, width)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        compiled(x)
        taken.append(pool_bytes(compiled))
    assert pw.report(compiled).graphs[0].captured_sizes == (512, 256, 128)
    assert taken[0] > 0
    assert taken[2] - taken[0] <= 4 * MIB, [n // MIB for n in taken]
    one_value = 512 * width * 4
    assert taken[0] < num_layers * 5 * one_value, "outputs of every layer are kept"
    for n in (512, 300, 128, 7):
        with quiet():
            near(compiled(rows(n, width)), model(rows(n, width)), f"{n}", rtol=1e-3, atol=1e-3)


def test_deleting_the_model_gives_the_memory_back() -> None:
    def run() -> None:
        model = Decoder(4, 1024).cuda()
        compiled = warmed(model, width=1024, cudagraph_capture_sizes=[64, 256])
        compiled(rows(200, 1024))
        assert torch.cuda.memory_reserved() > before + 16 * MIB

    warmed(toy)(rows(5))  # libraries, work spaces
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        run()
        helpers.KEPT.clear()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # cuBLAS keeps a work space per stream.
        assert torch.cuda.memory_reserved() <= before + 48 * MIB


# Captures that fail


_WAITS_AT = {8}


@torch.library.custom_op("pwtest_gpu::wait", mutates_args=[])
def wait(x: Tensor) -> Tensor:
    """Not to be captured at some numbers of tokens: it waits for the device."""
    if x.size(0) in _WAITS_AT:
        torch.cuda.synchronize()
    return x + 1


@wait.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("waits_at", [[8], [16], [16, 8]])
def test_a_failed_capture_leaves_everything_usable(
    waits_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of the first size, whose first piece has been recorded by then."""
    monkeypatch.setattr(f"{__name__}._WAITS_AT", set(waits_at))

    def model(x: Tensor) -> Tensor:
        x = out_attn(x * 2, x, x)
        x = out_attn(torch.ops.pwtest_gpu.wait(x), x, x)
        return x.sin() * 2

    compiled = compile(model)
    with pytest.warns(RuntimeWarning, match="capturing this size failed"):
        report = pw.warmup(compiled, lambda d: (rows(d.num_tokens),))
    captured = [n for n in (16, 8, 4) if n not in waits_at]
    assert report.graphs[0].captured_sizes == tuple(captured)
    assert set(report.graphs[0].capture_errors) == set(waits_at)
    for n in (8, 16, 3, 7, 9):
        near(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    served = [n for n in (8, 16, 3, 7, 9) if min(c for c in SIZES if c >= n) in captured]
    assert num_replays(pw.report(compiled)) == len(served)
    # The stream, the generator and the allocator are not left in the middle of a capture.
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.randn(8, device="cuda").isfinite().all()
    near(warmed(toy)(rows(5)), toy(rows(5)), "another model")
    big = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del big
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 64 * MIB


_OTHER_STREAM: list[torch.cuda.Stream] = []


@torch.library.custom_op("pwtest_gpu::unseen", mutates_args=[])
def unseen(x: Tensor) -> Tensor:
    """Computes on a stream of its own, which a recording does not see."""
    if not _OTHER_STREAM:
        _OTHER_STREAM.append(torch.cuda.Stream())
    y = torch.empty_like(x)
    with torch.cuda.stream(_OTHER_STREAM[0]):
        torch.mul(x, 2, out=y)
    return y


@unseen.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_what_a_recording_does_not_see_is_an_error() -> None:
    """Replaying nothing would return whatever the memory holds."""

    def model(x: Tensor) -> Tensor:
        return out_attn(torch.ops.pwtest_gpu.unseen(x), x, x).sin()

    compiled = compile(model)
    with pytest.warns(RuntimeWarning, match="recorded nothing though it computes"):
        report = pw.warmup(compiled, lambda d: (rows(d.num_tokens),))
    errors = report.graphs[0].capture_errors
    assert set(errors) == {4, 8, 16}
    assert all("recorded nothing though it computes" in error for error in errors.values()), errors


def test_a_piece_that_computes_nothing_is_no_error() -> None:
    """Inductor finds that the first piece returns its input; its graph is empty."""

    def model(x: Tensor) -> Tensor:
        return out_attn(x.to(x.dtype) * 1, x, x).sin()

    compiled = warmed(model, "inductor")
    for n in (3, 8):
        near(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    assert not fallbacks(pw.report(compiled))


# Memory that is not ours


@pytest.mark.parametrize("compiler", COMPILERS)
def test_workspaces_that_somebody_clears(compiler: str) -> None:
    """`mode="reduce-overhead"` of another model does so; matrix products scratch there."""
    width = 1024
    model = Decoder(3, width).cuda().bfloat16()
    compiled = warmed_wide(model, compiler, width)
    inputs = [rows(n, width, dtype=torch.bfloat16) for n in (1, 3, 8, 16)]
    before = [compiled(x) for x in inputs]
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((MIB,), torch.nan, device="cuda") for _ in range(64)]
    for x, expected in zip(inputs, before, strict=True):
        for _ in range(3):
            assert torch.equal(compiled(x), expected)
    assert all(other.isnan().all() for other in others)
    assert not fallbacks(pw.report(compiled))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_graphs_scratch_in_memory_of_their_own(compiler: str) -> None:
    """Workspaces of cuBLAS and of cuBLASLt: none is left in memory that anybody may get."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    before = shared_blocks()
    compiled = warmed_wide(Decoder(3, 1024).cuda().bfloat16(), compiler, 1024)
    assert pw.report(compiled).graphs[0].captured_sizes == (16, 8, 4)
    new = {block: size for block, size in shared_blocks().items() if block not in before}
    # The seeds of the generator, and nothing else: torch makes them at the first capture.
    assert sum(new.values()) <= 1024, new


def shared_blocks() -> dict[int, int]:
    """Sizes of tensors outside of private pools and off the default stream, by address."""
    return {
        block["address"]: block["size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == (0, 0) and segment["stream"] != 0
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def test_no_stream_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models on one stream would share scratch memory."""
    streams = [torch.cuda.Stream() for _ in range(32)]
    monkeypatch.setattr(CaptureStream, "_unused", {})
    monkeypatch.setattr(CaptureStream, "_taken", {s.cuda_stream for s in streams})
    with pytest.warns(RuntimeWarning, match="capturing this size failed"):
        compiled = warmed(toy)
    report = pw.report(compiled).graphs[0]
    assert report.captured_sizes == ()
    assert set(report.capture_errors) == set(SIZES)
    assert all("none of the 32 streams" in error for error in report.capture_errors.values())
    for n in (4, 5, 16):
        near(compiled(rows(n)), toy(rows(n)), f"{n} tokens")


def warmed_wide(model: nn.Module, compiler: str, width: int) -> Any:
    """Warmed up with bfloat16 rows."""
    compiled = compile(model, compiler)
    pw.warmup(compiled, lambda d: (rows(d.num_tokens, width, dtype=torch.bfloat16),))
    return compiled


def test_beside_reduce_overhead() -> None:
    width = 512
    model, other = Decoder(2, width).cuda().bfloat16(), Decoder(2, width, seed=1).cuda().bfloat16()
    compiled = warmed_wide(model, "eager", width)
    x = rows(8, width, dtype=torch.bfloat16)
    expected = compiled(x)
    theirs = torch.compile(other, mode="reduce-overhead", dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own empty graph
        for _ in range(4):
            near(theirs(x), other(x), "the other model", rtol=0.05, atol=0.05)
    torch.cuda.empty_cache()
    for _ in range(3):
        assert torch.equal(compiled(x), expected)


# Streams and threads


def test_two_streams() -> None:
    """Calls on either stream use the same buffers, so one waits for the other."""
    width = 1024
    model = Decoder(8, width).cuda()
    compiled = warmed(model, width=width, cudagraph_capture_sizes=[64])
    inputs = [rows(64, width, seed=seed) for seed in range(16)]
    expected = [model(x) for x in inputs]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outputs = []
    for number, x in enumerate(inputs):
        with torch.cuda.stream(streams[number % 3]):
            outputs.append(compiled(x))
    torch.cuda.synchronize()
    for number, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
        near(got, wanted, f"call {number}", rtol=1e-3, atol=1e-3)
    assert not fallbacks(pw.report(compiled))


def test_a_step_inside_of_a_graph_of_the_users() -> None:
    """With graphs off the step is code like any other, whatever stream it ran on before."""
    model = Decoder(2, 64).cuda()
    compiled = compile(model, cudagraph_mode="none")
    x = rows(8, 64)
    with torch.cuda.stream(torch.cuda.Stream()):
        compiled(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compiled(x)
    for seed in (1, 2):
        x.copy_(rows(8, 64, seed=seed))
        graph.replay()
        near(result, model(x), f"seed {seed}")
    near(compiled(x), model(x), "afterwards")


@pytest.mark.parametrize("has_own_stream", [False, True])
def test_two_threads(has_own_stream: bool) -> None:
    model = Decoder(4, 64).cuda()
    compiled = warmed(model, width=64)
    inputs = {(n, seed): rows(n, 64, seed=seed) for n in (3, 8, 16) for seed in range(2)}
    expected = {key: model(x) for key, x in inputs.items()}
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream() if has_own_stream else torch.cuda.current_stream()
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for call in range(30):
                    key = ((3, 8, 16)[call % 3], seed)
                    got = compiled(inputs[key])
                    stream.synchronize()
                    near(got, expected[key], f"thread {seed}", rtol=1e-3, atol=1e-3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert num_replays(pw.report(compiled)) == 60


# The examples


def attention_case(
    sequences: list[tuple[int, int]],
    dtype: torch.dtype,
    num_scratch: int = 0,
    head_dim: int = 64,
) -> tuple[PagedCache, list[Tensor]]:
    """A cache with `context` tokens of each sequence, and the arguments for `new` more of each."""
    num_heads, num_kv_heads, block_size = 8, 2, 16
    blocks = [-(-(context + new) // block_size) for context, new in sequences]
    cache = PagedCache(
        1, num_kv_heads, head_dim, num_blocks=2 + sum(blocks), max_seqs=2 + len(sequences),
        max_blocks_per_seq=max(blocks, default=1), block_size=block_size, device="cuda",
        dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    cache.kv[0].normal_()
    seq_ids, positions, contexts = [], [], []
    for context, new in sequences:
        seq_id = cache.add_sequence(context + new)
        seq_ids += [seq_id] * new
        positions += range(context, context + new)
        contexts += [context] * new
    seq_ids += [0] * num_scratch
    positions += [row % block_size for row in range(num_scratch)]
    contexts += [0] * num_scratch
    shapes = [(len(seq_ids), heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    q, k, v = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    return cache, [
        q, k, v, torch.full_like(q, float("nan")), cache.kv[0], cache.block_tables,
        torch.tensor(seq_ids, dtype=torch.int32, device="cuda"),
        torch.tensor(positions, device="cuda"),
        torch.tensor(contexts, dtype=torch.int32, device="cuda"),
    ]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("sequences", "num_scratch", "head_dim"),
    [
        ([(1, 1), (15, 1), (16, 1), (17, 1), (300, 1)], 0, 64),
        ([(0, 1), (0, 7), (0, 16), (0, 129)], 0, 64),
        ([(5, 9), (16, 33), (100, 70)], 0, 64),
        ([(0, 20), (40, 1), (64, 3), (3, 1)], 5, 64),
        ([], 40, 64),
        # Several tiles of the cache and of the batch, whatever their size.
        ([(600, 1), (520, 300)], 0, 64),
        ([(600, 1), (260, 140)], 0, 128),
        ([(600, 1), (260, 140)], 0, 16),
        ([(600, 1), (130, 70)], 0, 256),
    ],
    ids=["decode", "prefill", "chunked", "mixed", "scratch", "long", "wide", "narrow", "widest"],
)
def test_paged_attention_kernel(
    sequences: list[tuple[int, int]], num_scratch: int, head_dim: int, dtype: torch.dtype
) -> None:
    _, args = attention_case(sequences, dtype, num_scratch, head_dim)
    wanted = [arg.clone() for arg in args]
    torch.ops.example.paged_attention(*args, "layers.0")
    paged_attention_reference(*wanted)
    tolerance = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    near(args[3].float(), wanted[3].float(), "out", rtol=tolerance, atol=tolerance)
    # Block 0 is scratch: runs of scratch rows may write it in any order.
    near(args[4][:, 1:], wanted[4][:, 1:], "cache", rtol=0, atol=0)


def test_llama_generates_the_tokens_that_eager_generates() -> None:
    """Pieces run as traced, so the numbers are eager's to the bit."""
    pw.register_splitting_op("example::paged_attention")
    config = LlamaConfig.preset("tiny")
    model = Llama(config, device="cuda")
    requests = quickstart.make_requests(config.vocab_size, 16, seed=0)
    cache = quickstart.make_cache(config, requests, torch.device("cuda"), torch.float32)
    model.attach(cache)
    options = {"compiler": "eager", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
    compiled = torch.compile(model, backend="piecewise", fullgraph=True, options=options)
    pw.warmup(compiled, lambda d: scratch_inputs(d.num_tokens, cache, config.vocab_size))
    tokens = [
        [completion.tokens for completion in Engine(model, cache, forward).run(requests)]
        for forward in (model, compiled)
    ]
    assert tokens[0] == tokens[1]
    assert all(tokens[0])
    assert not fallbacks(pw.report(compiled))
    assert num_replays(pw.report(compiled)) > 10


@pytest.mark.filterwarnings("ignore:piecewise:RuntimeWarning")  # prefills lie above the grid
def test_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cuda", "--dtype", "bfloat16", "--dump-dir", str(tmp_path)]
    assert quickstart.main(arguments) == 0
    assert "piecewise tokens equal eager's: yes" in capsys.readouterr().out
