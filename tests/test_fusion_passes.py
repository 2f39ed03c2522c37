"""Fusions as passes: which run, spellings by ops of users, cache keys, and whole compilations."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from benchmarks.measure import RESULTS
from piecewise_backend.config import Config
from piecewise_backend.passes import PassList, passes_for
from piecewise_backend.passes.fusions import FUSIONS
from piecewise_backend.passes.order import NEVER_SLOWER
from tests.fused_ops import (
    CASES,
    EPS,
    FP8,
    plain_dynamic,
    plain_group,
    plain_norm,
    plain_silu_mul,
    plain_static,
    steps_apart,
)
from tests.helpers import compile, out_attn
from tests.post_grad import rewritten
from tests.test_fusions import equal, norm_arguments, values

PAIR = "(Tensor, Tensor)"
SCHEMAS = {
    "norm": ("(Tensor x, Tensor w, float eps) -> Tensor", plain_norm),
    "norm_of_sum": (f"(Tensor x, Tensor r, Tensor w, float eps) -> {PAIR}", None),
    "fp8": ("(Tensor y, Tensor scale) -> Tensor", plain_static),
    "fp8_rows": (f"(Tensor y) -> {PAIR}", plain_dynamic),
    "fp8_groups": (f"(Tensor y, int size) -> {PAIR}", plain_group),
    "silu": ("(Tensor x) -> Tensor", plain_silu_mul),
}


def norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return plain_norm(total, weight, eps), total


for name, (schema, function) in SCHEMAS.items():
    torch.library.define(f"pwfusion::{name}", schema)
    torch.library.impl(f"pwfusion::{name}", "CompositeExplicitAutograd", function or norm_of_sum)
    torch.library.register_fake(f"pwfusion::{name}", function or norm_of_sum)
mine = torch.ops.pwfusion


@pytest.fixture
def _spelled() -> None:
    """The ops above are known for what they are."""
    pw.register_spelling("rms_norm", lambda x, weight, eps: mine.norm(x, weight, eps))
    pw.register_spelling(
        "add_rms_norm", lambda x, residual, weight, eps: mine.norm_of_sum(x, residual, weight, eps)
    )
    pw.register_spelling("static_quant", lambda y, scale: mine.fp8(y, scale))
    pw.register_spelling("dynamic_quant", lambda y: mine.fp8_rows(y))
    pw.register_spelling("group_quant", lambda y, group_size: mine.fp8_groups(y, group_size))
    pw.register_spelling("silu_mul", lambda x: mine.silu(x))


# Spelled by ops

NORMS: dict[str, Any] = {
    "rms_norm": lambda x, r, w: (mine.norm(x, w, 3e-6),),
    "add_rms_norm": lambda x, r, w: mine.norm_of_sum(x, r, w, 3e-6),
    "silu_mul": lambda x, r, w: (mine.silu(torch.cat([x, r], dim=-1).sin()),),
}
PLAIN_NORMS: dict[str, Any] = {
    "rms_norm": lambda x, r, w: (plain_norm(x, w, 3e-6),),
    "add_rms_norm": lambda x, r, w: (plain_norm(total := x + r, w, 3e-6), total),
    "silu_mul": lambda x, r, w: (plain_silu_mul(torch.cat([x, r], dim=-1).sin()),),
}
QUANTISED: dict[str, Any] = {
    "static": lambda y, scale: mine.fp8(y, scale),
    "dynamic": lambda y, scale: mine.fp8_rows(y),
    "group": lambda y, scale: mine.fp8_groups(y, 64),
}
PLAIN_QUANTISED: dict[str, Any] = {
    "static": plain_static,
    "dynamic": lambda y, scale: plain_dynamic(y),
    "group": lambda y, scale: plain_group(y, 64),
}


@pytest.mark.usefixtures("_spelled")
@pytest.mark.parametrize("quantise", QUANTISED)
@pytest.mark.parametrize("first", NORMS)
@pytest.mark.parametrize("is_op", [(True, True), (True, False), (False, True)], ids=str)
def test_ops_of_users(is_op: tuple[bool, bool], first: str, quantise: str) -> None:
    """Both parts are ops, or one is and the other plain torch."""
    norm = (NORMS if is_op[0] else PLAIN_NORMS)[first]
    quant = (QUANTISED if is_op[1] else PLAIN_QUANTISED)[quantise]

    def model(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y, *total = norm(x, residual, weight)
        results = quant(y, scale)
        return (*(results if isinstance(results, tuple) else (results,)), *total[:1])

    x, weight, scale = norm_arguments()
    args = (x, values(6, 256, seed=2), weight, scale)
    found = rewritten(model, args)
    op = f"{first}_{quantise}_quant"
    assert found.matches == {op: 1}
    numbers = [arg for call in found.calls(op) for arg in call.args if isinstance(arg, float)]
    assert numbers == [3e-6] * (first != "silu_mul") * len(found.calls(op))
    assert not any("pwfusion" in str(node.target) for node in found.module.graph.nodes)
    equal(found, model, args)


def test_ops_that_nobody_spelled() -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return mine.fp8(mine.norm(x, weight, EPS), scale)

    assert rewritten(model, norm_arguments()).matches == {}


@pytest.mark.usefixtures("_spelled")
def test_near_misses_of_ops() -> None:
    x, weight, scale = norm_arguments()

    def of_floats(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return mine.fp8(mine.norm(x, weight, EPS), scale)

    def used(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = mine.norm(x, weight, EPS)
        return mine.fp8(y, scale), y

    assert rewritten(of_floats, (x, weight, scale)).matches == {"rms_norm_static_quant": 1}
    assert rewritten(of_floats, (x, weight.float(), scale)).matches == {}
    assert rewritten(of_floats, (x, weight, scale.expand(256).clone())).matches == {}
    assert rewritten(used, (x, weight, scale)).matches == {}


OUT = "(Tensor(a!) out, Tensor x, Tensor w, float eps) -> ()"
IN_PLACE = "(Tensor(a!) x, Tensor(b!) r, Tensor w, float eps) -> ()"
TO_FP8 = "(Tensor(a!) out, Tensor y, Tensor scale) -> ()"


def norm_out(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(plain_norm(x, weight, eps))


def norm_in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    y, total = norm_of_sum(x, residual, weight, eps)
    x.copy_(y)
    residual.copy_(total)


def fp8_out(out: Tensor, y: Tensor, scale: Tensor) -> None:
    out.copy_(plain_static(y, scale))


for name, schema, function in (
    ("norm_out", OUT, norm_out),
    ("norm_in_place", IN_PLACE, norm_in_place),
    ("fp8_out", TO_FP8, fp8_out),
):
    torch.library.define(f"pwfusion::{name}", schema)
    torch.library.impl(f"pwfusion::{name}", "CompositeExplicitAutograd", function)
    torch.library.register_fake(f"pwfusion::{name}", lambda *args: None)


def norm_into(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    mine.norm_out(out, x, weight, eps)
    return out


def sum_in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mine.norm_in_place(x, residual, weight, eps)
    return x, residual


def fp8_into(y: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty_like(y, dtype=FP8)
    mine.fp8_out(out, y, scale)
    return out


@pytest.mark.parametrize("is_add", [False, True], ids=["norm", "norm of a sum, in place"])
def test_ops_that_write_their_results(is_add: bool) -> None:
    """As kernel libraries have them; in the graph they are functional, with copies."""

    def model(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        x, residual = x.sin(), residual.cos()
        if is_add:
            y, residual = sum_in_place(x, residual, weight, 3e-6)
        else:
            y = norm_into(x, weight, 3e-6)
        return fp8_into(y, scale), residual

    x, weight, scale = norm_arguments()
    args = (x, values(6, 256, seed=2), weight, scale)
    assert rewritten(model, args).matches == {}
    pw.register_spelling("rms_norm", norm_into)
    pw.register_spelling("add_rms_norm", sum_in_place)
    pw.register_spelling("static_quant", fp8_into)
    found = rewritten(model, args)
    assert found.matches == {f"{'add_' * is_add}rms_norm_static_quant": 1}
    assert not any("auto_functionalized" in op or op == "empty" for op in found.ops())
    equal(found, model, args)


def test_an_op_that_writes_what_others_read() -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = norm_into(x.sin(), weight, EPS)
        return fp8_into(y, scale), y + 1

    pw.register_spelling("rms_norm", norm_into)
    pw.register_spelling("static_quant", fp8_into)
    assert rewritten(model, norm_arguments()).matches == {}


def fp8_of(y: Tensor) -> Tensor:
    return y.clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_up_to(y: Tensor, scale: Tensor, bound: int) -> Tensor:
    return fp8_of((y.float() * scale.reciprocal()).clamp(-bound, bound))


torch.library.define("pwfusion::fp8_up_to", "(Tensor y, Tensor scale, int bound) -> Tensor")
torch.library.impl("pwfusion::fp8_up_to", "CompositeExplicitAutograd", fp8_up_to)
torch.library.register_fake("pwfusion::fp8_up_to", fp8_up_to)


def static_with_a_factor_of_one(y: Tensor, scale: Tensor) -> Tensor:
    """Since torch 2.14 Inductor takes such factors out of graphs."""
    return fp8_of(y.float() * torch.rsqrt(scale * scale * 1.0))


def test_a_spelling_may_have_what_inductor_leaves_out() -> None:
    def model(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return static_with_a_factor_of_one(plain_norm(x, weight, EPS), scale)

    assert rewritten(model, norm_arguments()).matches == {}
    pw.register_spelling("static_quant", static_with_a_factor_of_one)
    assert rewritten(model, norm_arguments()).matches == {"rms_norm_static_quant": 1}


@pytest.mark.parametrize("bound", [64, 304])
def test_a_number_written_in_a_spelling_stands_for_itself(bound: int) -> None:
    pw.register_spelling("static_quant", lambda y, scale: mine.fp8_up_to(y, scale, bound))
    for used, matches in ((bound, {"rms_norm_static_quant": 1}), (32, {})):
        found = rewritten(
            lambda x, weight, scale, used=used: mine.fp8_up_to(
                plain_norm(x, weight, EPS), scale, used
            ),
            norm_arguments(),
        )
        assert found.matches == matches


@pytest.mark.parametrize(
    ("part", "spelling", "message"),
    [
        ("rms_nrom", lambda x: x, "did you mean 'rms_norm'"),
        ("gated", lambda gate, up: gate, "is no part"),
        ("rms_norm", lambda x, w, eps: x, r"takes \('x', 'w', 'eps'\); .* \('x', 'weight', 'eps'"),
        ("dynamic_quant", lambda y: y.sin(), "returns 1 tensors; return 2"),
        ("rms_norm", 3, r"'rms_norm' is 3; give a function of \('x', 'weight', 'eps'\)"),
        ("static_quant", lambda y, scale: mine.nothing(y, scale), "'static_quant' cannot be trac"),
        ("static_quant", lambda y, scale: 1 / 0, "cannot be traced, ZeroDivisionError: "),
        ("static_quant", lambda y, scale: None, r"returns \(None,\); return 1"),
        ("static_quant", lambda y, scale: 2.0, r"returns \(2.0,\); return 1"),
        ("static_quant", lambda y, scale: y * scale, "makes .* it must make .*float8_e4m3fn"),
        ("dynamic_quant", lambda y: (fp8_of(y), y.sin()), "it must make .*torch.float32"),
        ("silu_mul", lambda x: x, "returns a parameter"),
        ("static_quant", lambda y, scale: fp8_of(y), r"makes no use of \['scale'\]"),
        ("rms_norm", lambda x, weight, eps: x * weight, r"no use of \['eps'\]; .* each number"),
        ("rms_norm", lambda x, weight, eps: mine.norm(x, weight, 2 * eps), r"no use of \['eps'\]"),
        ("group_quant", lambda y, group_size: mine.fp8_rows(y), r"no use of \['group_size'\]"),
        (
            "group_quant",
            lambda y, group_size: (fp8_of(y), mine.fp8_groups(y, group_size)[1]),
            r"no use of \['group_size'\]",
        ),
    ],
)
def test_what_is_no_spelling_is_refused(part: str, spelling: Any, message: str) -> None:
    before = passes_for()
    with pytest.raises(pw.ConfigError, match=message):
        pw.register_spelling(part, spelling)
    assert passes_for() == before


# Which run


def test_on_by_default_where_they_were_measured() -> None:
    """Never slower than Inductor, on CUDA: `order.NEVER_SLOWER`."""
    rows = json.loads((RESULTS / "fusions.json").read_text())["rows"]
    worst = {op: max(r["ratio"] for r in rows if r["op"] == op) for op in {r["op"] for r in rows}}
    assert {f"fuse_{op}" for op in worst} == set(FUSIONS)
    assert {f"fuse_{op}" for op, ratio in worst.items() if ratio <= 1} == NEVER_SLOWER
    names = [item.name for item in passes_for(on_cuda=True)]
    fused = [name for name in FUSIONS if name in NEVER_SLOWER]
    assert names == ["eliminate_noops", *fused, "read_before_write"]
    names = [item.name for item in passes_for((), {fused[0]: True})]
    assert names == ["eliminate_noops", fused[0], "read_before_write"]
    names = [item.name for item in passes_for((), {fused[0]: False}, on_cuda=True)]
    assert names == ["eliminate_noops", *fused[1:], "read_before_write"]


def test_switched_on_by_name_and_in_order() -> None:
    asked = dict.fromkeys(reversed(FUSIONS), True)
    config = Config.from_options({"pass_config": asked})
    names = [item.name for item in passes_for(config.passes, dict(config.pass_config))]
    assert names == ["eliminate_noops", *FUSIONS, "read_before_write"]
    assert len(FUSIONS) == len(CASES) + 1
    with pytest.raises(pw.ConfigError, match="did you mean 'fuse_rms_norm_group_quant'"):
        Config.from_options({"pass_config": {"fuse_rms_norm_groups_quant": True}})


def test_without_noop_elimination_there_is_a_warning() -> None:
    switches = {"eliminate_noops": False, "fuse_qk_norm_rope": True}
    with pytest.warns(RuntimeWarning, match=r"'eliminate_noops' off, but \['fuse_qk_norm_rope'\]"):
        pw.passes.warn_if_fusing_without_noops(passes_for((), switches), switches)
    switches = {"eliminate_noops": False}
    pw.passes.warn_if_fusing_without_noops(passes_for((), switches), switches)


def test_passes_of_users_see_what_fusions_made() -> None:
    @pw.register_pass
    def after(graph: Any) -> int:
        return 0

    names = [item.name for item in passes_for((), dict.fromkeys(FUSIONS, True))]
    assert names.index("after") > max(map(names.index, FUSIONS))


def test_keys_depend_on_fusions_and_on_spellings() -> None:
    def key(**switches: bool) -> str:
        return PassList(passes_for((), switches)).key()

    one, other = {"fuse_rms_norm_static_quant": True}, {"fuse_rms_norm_group_quant": True}
    keys = [key(), key(**one), key(**other)]
    for eps_first in (False, True):
        if eps_first:
            pw.register_spelling("rms_norm", lambda x, weight, eps: mine.norm(x, weight, eps))
        else:
            pw.register_spelling("rms_norm", lambda x, weight, eps: mine.norm(x, weight, eps + 0))
        keys.append(key(**one))
    assert len(set(keys)) == len(keys)
    assert key() == keys[0], "what does not run does not count"


# Whole compilations


def layer(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Every kind of quantisation, with attention in the middle."""
    residual = x + residual
    x = plain_norm(residual, weight, EPS)
    quantised = plain_static(x, scale)
    x = quantised.float().to(residual.dtype)
    x = out_attn(x, x, x)
    residual = x + residual
    rows, row_scales = plain_dynamic(plain_norm(residual, weight, 1e-6))
    groups, group_scales = plain_group(plain_silu_mul(torch.cat([x, x], -1)), 64)
    return quantised, rows, row_scales, groups, group_scales, residual


@pytest.mark.usefixtures("inductor_cache")
def test_compiled_with_inductor_for_every_token_count() -> None:
    options = {"compiler": "inductor", "pass_config": dict.fromkeys(FUSIONS, True)}
    compiled = compile(layer, **options)
    weight, scale = values(128, seed=1), torch.tensor([0.02])
    with torch.no_grad():
        for num_tokens in (5, 1, 8):
            args = (values(num_tokens, 128), values(num_tokens, 128, seed=2), weight, scale)
            for position in (0, 1):
                torch._dynamo.maybe_mark_dynamic(args[position], 0)
            for a, b in zip(compiled(*args), layer(*args), strict=True):
                assert a.shape == b.shape
                assert a.dtype == b.dtype
                if a.dtype == FP8:
                    assert steps_apart(a, b).max() == 0
                else:
                    assert torch.equal(a, b)
    found = [
        {r.name: r.matches for r in records if r.name in FUSIONS and r.matches}
        for records in pw.report(compiled).graphs[0].passes.values()
    ]
    assert found == [
        {"fuse_add_rms_norm_static_quant": 1},
        {"fuse_add_rms_norm_dynamic_quant": 1, "fuse_silu_mul_group_quant": 1},
    ]
