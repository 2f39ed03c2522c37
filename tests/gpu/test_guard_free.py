"""Calls without guards on real CUDA graphs."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_backend as pw
from tests import helpers
from tests.helpers import SPLIT_OPS, Decoder
from tests.runtime_helpers import fallbacks, num_replays, quiet, toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = [4, 8, 16]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    helpers.KEPT.clear()


def rows(num_tokens: int, width: int = 4, *, seed: int = 0) -> Tensor:
    """Random input on the GPU, the same for the same arguments."""
    return helpers.rows(num_tokens, width, seed=seed).cuda()


def compile(target: Any, compiler: str = "eager", **options: Any) -> Any:
    """With real CUDA graphs."""
    given = {"splitting_ops": list(SPLIT_OPS), "cudagraph_capture_sizes": SIZES}
    return pw.compile(target, compiler=compiler, **given | options)


def warmed(target: Any, compiler: str = "eager", *, width: int = 4, **options: Any) -> Any:
    """Compiled, warmed up, sealed."""
    compiled = compile(target, compiler, **options)
    compiled.warmup(lambda descriptor: (rows(descriptor.num_tokens, width),))
    return compiled


def near(got: Any, expected: Any, where: str) -> None:
    """Equal up to rounding."""
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=lambda m: f"{where}: {m}")


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_sizes_in_random_order(compiler: str) -> None:
    model = Decoder(width=16).cuda()
    compiled = warmed(model, compiler, width=16)
    order = random.Random(0)
    for call in range(60):
        x = rows(order.randint(1, 16), 16, seed=call)
        near(compiled(x), model(x), f"call {call}")
    report = compiled.report()
    assert report.guards_kept == ""
    assert num_replays(report) == 60
    assert not fallbacks(report)
    with quiet():
        for n in (0, 17):
            x = rows(n, 16) if n else torch.empty(0, 16, device="cuda")
            near(compiled(x), model(x), f"{n} tokens")


def test_the_contract_knows_devices() -> None:
    compiled = warmed(toy)
    with pytest.raises(pw.ContractError, match=r"on cuda:0, got .* on cpu"):
        compiled(helpers.rows(4))


@pytest.mark.parametrize("is_data", [False, True])
def test_replaced_weights(is_data: bool) -> None:
    model = Decoder().cuda()
    compiled = warmed(model)
    for layer in model.out:
        if is_data:
            layer.weight.data = layer.weight.data * 2
        else:
            layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)
    torch.cuda.empty_cache()
    with quiet():
        near(compiled(rows(5)), model(rows(5)), "replaced")
    compiled.rebind()
    before = num_replays(compiled.report())
    near(compiled(rows(5)), model(rows(5)), "accepted")
    assert num_replays(compiled.report()) == before + 1


def test_sealed_module_on_streams_and_threads() -> None:
    model = Decoder(4, 64).cuda()
    options = {"compiler": "eager", "splitting_ops": list(SPLIT_OPS)}
    compiled = torch.compile(
        model, backend="piecewise", options=options | {"cudagraph_capture_sizes": SIZES}
    )
    pw.warmup(compiled, lambda descriptor: (rows(descriptor.num_tokens, 64),))
    inputs = {(n, seed): rows(n, 64, seed=seed) for n in (3, 8, 16) for seed in range(2)}
    expected = {key: model(x) for key, x in inputs.items()}
    compiled(rows(4, 64))
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for call in range(30):
                    key = ((3, 8, 16)[call % 3], seed)
                    near(compiled(inputs[key]), expected[key], f"call {call}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert pw.report(compiled).guards_kept == ""
