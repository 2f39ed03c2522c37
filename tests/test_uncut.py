"""Passes that have to see a split op inside of a piece, attention and its quantisation say."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend.registry import SplitOps
from piecewise_backend.uncut import leave_uncut
from tests.fused_ops import FP8, plain_static, steps_apart
from tests.helpers import compile

NAMES = ("always", "never", "uniform_batch")
ATTENTIONS = {name: f"pwuncut::{name}" for name in NAMES}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + k + v


def fused(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Attention that gives float8."""
    return plain_static(q + k + v, scale)


for name in NAMES:
    torch.library.define(ATTENTIONS[name], "(Tensor q, Tensor k, Tensor v) -> Tensor")
    torch.library.impl(ATTENTIONS[name], "CompositeExplicitAutograd", attention)
    torch.library.register_fake(ATTENTIONS[name], attention)
torch.library.define("pwuncut::fused", "(Tensor q, Tensor k, Tensor v, Tensor scale) -> Tensor")
torch.library.impl("pwuncut::fused", "CompositeExplicitAutograd", fused)
torch.library.register_fake("pwuncut::fused", fused)
ops = torch.ops.pwuncut


@pytest.fixture(autouse=True)
def _registered() -> None:
    for name in NAMES:
        pw.register_splitting_op(ATTENTIONS[name], capture=name)


def attention_and_quant(name: str, **fields: Any) -> pw.Rewrite:
    attend = getattr(ops, name)
    return pw.Rewrite(
        name="fuse_attention_quant",
        pattern=lambda q, k, v, scale: plain_static(attend(q, k, v), scale),
        replacement=lambda q, k, v, scale: ops.fused(q, k, v, scale),
        example_inputs=lambda: (*(torch.empty(4, 8) for _ in range(3)), torch.ones(1)),
        uncut=[ATTENTIONS[name]],
        **fields,
    )


def model_of(name: str) -> Any:
    def model(x: Tensor, scale: Tensor) -> Tensor:
        attended = getattr(ops, name)(x + 1, x, x * 2)
        return plain_static(attended, scale).float() + 1

    return model


def compiled(name: str, *passes: Any, **options: Any) -> tuple[Any, Any]:
    """The model of one of the ops, and its report after a few calls."""
    model = model_of(name)
    given = {"compiler": "inductor", "splitting_ops": list(ATTENTIONS.values()), "passes": passes}
    made = compile(model, **(given | options))
    scale = torch.tensor([0.1])
    for num_tokens in (5, 3, 8):
        x = torch.randn(num_tokens, 8)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        with torch.no_grad():
            got, expected = made(x, scale), model(x, scale)
        assert steps_apart((got - 1).to(FP8), (expected - 1).to(FP8)).max() <= 1
    return made, pw.report(made).graphs[0]


@pytest.mark.usefixtures("inductor_cache")
def test_a_pass_asks_for_attention_inside_of_the_piece() -> None:
    """The whole step is one piece, which is captured as such, and the report says why."""
    made, report = compiled("always", attention_and_quant("always", min_matches=1))
    matches = [r.matches for r in report.passes["piece 0"] if r.name == "fuse_attention_quant"]
    assert matches == [1]
    assert list(report.passes) == ["piece 0"]
    assert report.mode_reason == (
        "pwuncut::always is to be inside of a piece for pass 'fuse_attention_quant', and is not "
        "cut off; nothing is cut, so the only piece is the whole step"
    )
    assert report.mode_reason in str(pw.report(made))


@pytest.mark.usefixtures("inductor_cache")
def test_without_the_pass_the_graph_is_cut() -> None:
    _, report = compiled("always")
    assert "split op pwuncut::always" in report.table
    assert report.mode_reason == ""


@pytest.mark.usefixtures("inductor_cache")
@pytest.mark.parametrize("name", ["never", "uniform_batch"])
def test_an_op_that_must_not_be_captured_is_cut_off_all_the_same(name: str) -> None:
    _, report = compiled(name, attention_and_quant(name))
    assert f"split op pwuncut::{name}" in report.table
    assert f"but is cut off all the same: it has capture={name!r} and needs 'always'" in (
        report.mode_reason
    )
    torch._dynamo.reset()
    with pytest.raises(pw.PassError, match="'fuse_attention_quant' matched 0 times"):
        compiled(name, attention_and_quant(name, min_matches=1))


def test_what_does_not_run_asks_for_nothing() -> None:
    """Piece passes do not run with the eager compiler, nor one that is switched off."""
    asked = attention_and_quant("always")
    _, report = compiled("always", asked, compiler="eager")
    assert "split op pwuncut::always" in report.table
    torch._dynamo.reset()
    switches = {"fuse_attention_quant": False}
    _, report = compiled("always", asked, compiler="eager", pass_config=switches)
    assert report.mode_reason == ""


@pytest.mark.parametrize(
    ("cut_at", "asked", "left"),
    [
        (["pwuncut::always"], ["pwuncut::always"], []),
        (["pwuncut::always.default"], ["pwuncut::always"], []),
        (["pwuncut::always"], ["pwuncut::always.default"], []),
        (["pwuncut::always", "pwuncut::never"], ["pwuncut::always"], ["pwuncut::never"]),
        (["pwuncut::never"], ["pwuncut::never"], ["pwuncut::never"]),
        (["pwuncut::never"], ["pwuncut::always"], ["pwuncut::never"]),
        (["pwuncut::always"], [], ["pwuncut::always"]),
    ],
)
def test_which_ops_are_left(cut_at: list[str], asked: list[str], left: list[str]) -> None:
    item = pw.passes.as_pass(lambda graph: 0, name="p", uncut=asked)
    ops, words = leave_uncut(SplitOps(frozenset(cut_at)), [item])
    assert sorted(ops.names) == left
    assert bool(words) == bool({name.partition(".")[0] for name in asked} & {
        name.partition(".")[0] for name in cut_at
    })  # fmt: skip


def test_an_op_that_does_not_exist() -> None:
    item = pw.passes.as_pass(lambda graph: 0, name="p", uncut=["pwuncut::alway"])
    wanted = "pass 'p': uncut op 'pwuncut::alway' does not exist; did you mean 'pwuncut::always'"
    with pytest.raises(pw.ConfigError, match=re.escape(wanted)):
        leave_uncut(SplitOps(frozenset()), [item])


def test_an_op_whose_hook_somebody_has_to_call() -> None:
    pw.register_splitting_op("pwuncut::always", capture="always", before_replay=lambda batch: None)
    item = pw.passes.as_pass(lambda graph: 0, name="p", uncut=["pwuncut::always"])
    ops, words = leave_uncut(SplitOps(frozenset(["pwuncut::always"])), [item])
    assert ops.names == {"pwuncut::always"}
    assert words.endswith("nobody would call its before_replay")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"uncut": "pwuncut::always"}, "give a list of names"),
        ({"uncut": ["always"]}, "give a list of names"),
        ({"uncut": ["pwuncut::always"], "stage": "graph"}, "sees the graph before it is cut"),
    ],
)
def test_wrong_wishes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(pw.ConfigError, match=message):
        pw.register_pass(lambda graph: 0, name="p", **fields)
