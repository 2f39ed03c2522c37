"""Linear layers of one token: the ops, where passes put them, and versions that have them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import piecewise_backend as pw
from examples.llama import Llama, LlamaConfig
from piecewise_backend import candidates, compiling, tuning
from piecewise_backend.passes import one_row_passes, register_pass
from piecewise_backend.passes.ops import one_row
from tests.fused_ops import EPS, plain_norm
from tests.helpers import compile
from tests.post_grad import Rewritten, rewritten
from tests.test_tuning import Imitation, tunings

ops = torch.ops.piecewise
DTYPES = (torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def weights(num_rows: int, num_columns: int, **given: Any) -> Tensor:
    """So that a product with values of unit size has such."""
    return values(num_rows, num_columns, **given) * num_columns**-0.5


def close(got: Tensor, expected: Tensor) -> None:
    """Equal but for a few roundings: what is around a product rounds once, or not at all."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    tolerance = 4 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# The ops


@each_dtype
@pytest.mark.parametrize("lead", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_addend", [False, True])
def test_linear(
    lead: tuple[int, ...], has_norm: bool, has_addend: bool, dtype: torch.dtype
) -> None:
    x, weight = values(*lead, 96, dtype=dtype), weights(40, 96, dtype=dtype)
    norm_weight = values(96, dtype=dtype, seed=1) if has_norm else None
    addend = values(*lead, 40, dtype=dtype) if has_addend else None
    y = plain_norm(x, norm_weight, EPS) if norm_weight is not None else x
    expected = F.linear(y.float(), weight.float())
    expected = expected if addend is None else expected + addend.float()
    got = ops.one_row_linear(x, weight, addend, norm_weight, EPS)
    assert torch.equal(got, expected.to(dtype))


@each_dtype
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_one", [False, True])
def test_gated(has_norm: bool, is_one: bool, dtype: torch.dtype) -> None:
    x, gate, up = (
        values(1, 96, dtype=dtype),
        *(weights(40, 96, dtype=dtype, seed=s) for s in (1, 2)),
    )
    norm_weight = values(96, dtype=dtype, seed=1) if has_norm else None
    y = plain_norm(x, norm_weight, EPS) if norm_weight is not None else x
    products = [F.linear(y.float(), weight.float()).to(dtype) for weight in (gate, up)]
    matrices = (torch.cat([gate, up]), None) if is_one else (gate, up)
    got = ops.one_row_gated(x, *matrices, norm_weight, EPS)
    assert torch.equal(got, F.silu(products[0]) * products[1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": values(2, 8)}, r"x has shape \(2, 8\); the op takes one row"),
        ({"x": values(1, 8).float()}, "x is torch.float32; the op takes float16 or bfloat16"),
        ({"x": values(1, 40000), "weight": values(3, 40000)}, "one row of 1 to 32768 columns"),
        ({"weight": values(4, 9)}, r"weight is torch.bfloat16 \(4, 9\).* with 8 columns"),
        ({"weight": values(4, 8).half()}, r"weight is torch.float16 \(4, 8\)"),
        ({"addend": values(1, 3)}, r"addend is torch.bfloat16 \(1, 3\); pass one value"),
        ({"addend": values(4, 1)}, r"addend is torch.bfloat16 \(4, 1\); pass one value"),
        ({"norm_weight": values(7)}, r"norm_weight has shape \(7,\); rows have 8 columns"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changed: dict[str, Tensor], message: str) -> None:
    given = {"x": values(1, 8), "weight": values(4, 8)} | changed
    with pytest.raises(ValueError, match=message):
        ops.one_row_linear(**given)


def test_gates_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="weight has 5 rows, which are not two halves"):
        ops.one_row_gated(values(1, 8), values(5, 8))
    with pytest.raises(ValueError, match="weight has 4 rows and up 5"):
        ops.one_row_gated(values(1, 8), values(4, 8), values(5, 8))


@pytest.mark.parametrize("op", ["one_row_linear", "one_row_gated"])
def test_opcheck(op: str) -> None:
    args = (values(1, 8), values(4, 8), None, values(8), EPS)
    torch.library.opcheck(getattr(ops, op).default, args)


# Where passes put them


def found_in(function: Callable[..., Any], *args: Tensor) -> Rewritten:
    """What passes make of a function; its results are those of the function."""
    found = rewritten(function, args, num_dynamic=0, more=one_row_passes())
    with torch.no_grad():
        expected = function(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for got, wanted in zip(found.run(), expected, strict=True):
        close(got, wanted)
    return found


LAYER = ["one_row_linear", "one_row_gated", "one_row_linear", "one_row_linear"]


def test_a_layer_of_llama_is_four_ops() -> None:
    """Norms, sums, activation: nothing else is left. What remains is the sum for the next layer."""
    model = Llama(LlamaConfig.preset("tiny"), dtype=torch.bfloat16)
    first, second = model.layers[0], model.layers[1]

    def between_attentions(attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden = first.attention.project(attended)
        hidden, residual = first.mlp_norm(hidden, residual)
        hidden, residual = second.attention_norm(first.mlp(hidden), residual)
        return second.attention.qkv(hidden), residual

    found = found_in(between_attentions, values(1, 64), values(1, 64, seed=1))
    assert found.ops() == LAYER
    gated, qkv = found.calls("one_row_gated")[0], found.calls("one_row_linear")[-1]
    assert gated.args[-1] == qkv.args[-1] == 1e-5
    addends = [call.args[2] for call in found.calls("one_row_linear") if len(call.args) > 2]
    assert addends[1:] == [found.calls("one_row_linear")[0], None]


@each_dtype
def test_separate_projections_in_three_dimensions(dtype: torch.dtype) -> None:
    """As Hugging Face's decoders have them: the norm is computed by each of its readers."""
    q, k, v = (weights(48, 64, dtype=dtype, seed=s) for s in range(3))
    gate, up = (weights(80, 64, dtype=dtype, seed=s) for s in range(2))
    o, down = weights(64, 48, dtype=dtype), weights(64, 80, dtype=dtype)
    scale, bias = values(64, dtype=dtype), values(48, dtype=dtype)

    def model(x: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        total = x + F.linear(attended, o)
        y = plain_norm(total, scale, EPS)
        total = total + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
        y = plain_norm(total, scale, EPS)
        return F.linear(y, q, bias), F.linear(y, k, bias), F.linear(y, v), total

    found = found_in(model, values(1, 1, 64, dtype=dtype), values(1, 1, 48, dtype=dtype))
    assert [op for op in found.ops() if op != "reshape"] == [*LAYER, *LAYER[-1:] * 2]
    assert sum(isinstance(call.args[-1], float) for call in found.calls("one_row_linear")) == 3


def test_a_norm_that_others_read_is_read() -> None:
    weight, scale = weights(8, 64), values(64)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = plain_norm(x, scale, EPS)
        return F.linear(y, weight), y + 1

    found = found_in(model, values(1, 64))
    assert found.ops().count("one_row_linear") == 1
    assert found.calls("one_row_linear")[0].args[0].target is torch.ops.aten.mul.Tensor


def test_a_product_that_others_read_is_added_to_apart() -> None:
    weight = weights(64, 64)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, weight)
        return y + x, y * 2

    assert found_in(model, values(1, 64)).ops() == ["one_row_linear", "add", "mul"]


WEIGHT = weights(64, 64)
LEFT_ALONE: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "two rows": (lambda x: F.linear(x, WEIGHT), values(2, 64)),
    "float32": (lambda x: F.linear(x, WEIGHT.float()), values(1, 64).float()),
    "a weight that is computed": (lambda x: F.linear(x, WEIGHT.sin()), values(1, 64)),
    "a weight that is not turned": (lambda x: x @ WEIGHT, values(1, 64)),
    "a weight of packed columns": (lambda x: F.linear(x, WEIGHT.mT), values(1, 64)),
    "an addend of several rows": (
        lambda x: torch.addmm(x.expand(1, 64), x, WEIGHT.mT, beta=2.0), values(1, 64)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_no_op_serves_is_left_alone(name: str) -> None:
    function, x = LEFT_ALONE[name]
    assert not any(op.startswith("one_row") for op in found_in(function, x).ops())


def test_a_token_count_that_varies_is_left_alone() -> None:
    weight = weights(64, 64)
    found = rewritten(lambda x: F.linear(x, weight), (values(5, 64),), more=one_row_passes())
    assert found.matches == {}


def test_norms_of_users() -> None:
    """What `register_spelling` told the fusions is known here as well."""
    torch.library.define("pwonerow::norm", "(Tensor x, Tensor w, float eps) -> Tensor")
    torch.library.impl("pwonerow::norm", "CompositeExplicitAutograd", plain_norm)
    torch.library.register_fake("pwonerow::norm", plain_norm)
    norm = torch.ops.pwonerow.norm
    weight, scale = weights(8, 64), values(64)

    def model(x: Tensor) -> Tensor:
        return F.linear(norm(x, scale, 3e-6), weight)

    assert found_in(model, values(1, 64)).ops() == ["norm", "one_row_linear"]
    pw.register_spelling("rms_norm", lambda x, weight, eps: norm(x, weight, eps))
    assert found_in(model, values(1, 64)).ops() == ["one_row_linear"]


def test_names_are_taken() -> None:
    with pytest.raises(pw.ConfigError, match="is one of this package's"):
        register_pass(lambda graph: 0, name="fuse_one_row_gated")


# Versions that have them


def warmed_up(**options: Any) -> Any:
    weight, scale = weights(64, 64), values(64)

    def model(x: Tensor) -> Tensor:
        return F.linear(plain_norm(x, scale, EPS), weight) + x

    given = {
        "compiler": "inductor", "cudagraph_capture_sizes": [1, 2], "compile_sizes": [1, 2],
        "splitting_ops": [],
    }  # fmt: skip
    compiled = compile(model, **(given | options))
    pw.warmup(compiled, lambda descriptor: (values(descriptor.num_tokens, 64),))
    with torch.no_grad():
        for size in (1, 2):
            close(compiled(values(size, 64)), model(values(size, 64)))
    return compiled


@pytest.fixture
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the ops are their reference: slow, and right."""
    monkeypatch.setattr(one_row, "runs_on", lambda device: True)


@pytest.fixture
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken for the fastest, and few others are compiled."""
    monkeypatch.setattr(candidates, "EFFORTS", {"static": {}})
    monkeypatch.setattr(
        tuning,
        "replay_seconds",
        lambda functions, *_: {name: 1.0 - 0.5 * (name == "one row") for name in functions},
    )


@pytest.mark.usefixtures("_everywhere", "_faster", "inductor_cache")
def test_one_token_is_served_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by nothing else at any other size. A cache gives what it has of the same passes."""
    for attempt in ("first", "second", "other passes"):
        torch._dynamo.reset()
        if attempt == "other passes":
            monkeypatch.setattr(candidates, "one_row_passes", lambda: one_row_passes()[:-1])
        with torch.no_grad():
            compiled = warmed_up(cache_dir=tmp_path)
        found = {t.sizes: t for t in tunings(compiled)}
        assert {sizes: t.kept for sizes, t in found.items()} == {(1,): "one row", (2,): "as traced"}
        assert {s: "one row" in t.microseconds for s, t in found.items()} == {
            (1,): True, (2,): False,
        }  # fmt: skip
        assert {sizes: t.is_remembered for sizes, t in found.items()} == {
            (1,): attempt == "second", (2,): attempt != "first",
        }  # fmt: skip
        assert not any(t.failures for t in found.values())


@pytest.mark.usefixtures("_everywhere")
@pytest.mark.parametrize("others_start_early", [False, True])
def test_it_is_not_tried_beside_others_that_start_early(
    monkeypatch: pytest.MonkeyPatch, others_start_early: bool
) -> None:
    """Those might read what a kernel before the last has not written yet."""
    imitation = Imitation()
    monkeypatch.setattr(compiling.Compiling, "compiler", lambda *args: imitation)
    monkeypatch.setattr(tuning, "replay_seconds", lambda functions, *_: dict.fromkeys(functions, 1))
    options = {"triton.enable_pdl": others_start_early}
    compiled = pw.compile(
        _sine, graph_impl="emulated", cudagraph_capture_sizes=[1, 2], compile_sizes=[1],
        inductor_compile_config=options,
    )  # fmt: skip
    with torch.no_grad():
        compiled.warmup(lambda descriptor: (values(descriptor.num_tokens, 8),))
    names = {name for name, _ in imitation.compiled}
    assert "static" in names
    assert ("one row" in names) == (not others_start_early)


def _sine(x: Tensor) -> Tensor:
    return x.sin()


def test_a_cpu_has_no_such_version() -> None:
    assert not one_row.runs_on(torch.device("cpu"))


def test_a_gpu_has_it_with_triton_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    found = importlib.util.find_spec
    for has_triton in (True, False):
        one_row.runs_on.cache_clear()
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, has_triton=has_triton: os if has_triton and name == "triton" else None,
        )
        assert one_row.runs_on(torch.device("cuda", 0)) == has_triton
    monkeypatch.setattr(importlib.util, "find_spec", found)
    one_row.runs_on.cache_clear()
