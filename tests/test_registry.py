"""Registering splitting ops in every form, and what is said about names that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from piecewise_backend.modes import CaptureSupport
from piecewise_backend.registry import PRESETS, SplitOps, registered_splitting_ops, traits_of
from tests import helpers


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("pwtest::attn", "pwtest::attn"),
        ("pwtest::attn.default", "pwtest::attn.default"),
        ("aten::add.Tensor", "aten::add.Tensor"),
        (torch.ops.pwtest.attn, "pwtest::attn"),
        (torch.ops.pwtest.attn.default, "pwtest::attn.default"),
        (torch.ops.aten.add.Tensor, "aten::add.Tensor"),
        (torch.ops.aten.add, "aten::add"),
        (helpers.attn, "pwtest::attn"),
    ],
    ids=str,
)
def test_every_form_registers_a_name_and_returns_what_it_got(op: Any, name: str) -> None:
    assert pw.register_splitting_op(op) is op
    assert name in registered_splitting_ops()
    assert name in SplitOps.resolve(None).names


def test_registering_twice_is_registering_once() -> None:
    for _ in range(2):
        pw.register_splitting_op("pwtest::attn")
    assert registered_splitting_ops().count("pwtest::attn") == 1


def test_decorator_above_custom_op() -> None:
    @pw.register_splitting_op
    @torch.library.custom_op("pwtest::decorated", mutates_args=[])
    def decorated(x: Tensor) -> Tensor:
        return x + 1

    assert isinstance(decorated, torch.library.CustomOpDef)
    assert "pwtest::decorated" in registered_splitting_ops()


@pytest.mark.parametrize(
    ("op", "splits"),
    [
        ("pwtest::attn", 2),
        ("pwtest::attn.default", 2),
        (torch.ops.pwtest.attn, 2),
        (torch.ops.pwtest.attn.default, 2),
        (helpers.attn, 2),
    ],
    ids=str,
)
def test_every_form_cuts_packets_overloads_and_objects(op: Any, splits: int) -> None:
    pw.register_splitting_op(op)

    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.pwtest.attn.default(x, x, x, out)
        return helpers.out_attn(out, out, x)

    graph = helpers.split(function, helpers.rows(4), ops=registered_splitting_ops())
    assert len(graph.split_ops) == splits


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pwtest::atn", "'pwtest::atn' does not exist; did you mean 'pwtest::attn'"),
        ("aten::scaled_dot_product_attentio", "did you mean 'aten::scaled_dot_product_attention'"),
        ("pwtest::attn.other", "'pwtest::attn.other' does not exist"),
        ("nowhere::zzzzzzzz", "no operator has a similar name. Import the library that defines"),
        ("attn", "'attn' names no namespace; write 'namespace::attn'"),
        ("atention", r"names no namespace.*presets: attention"),
        ("::attn", "does not exist"),
        ("pwtest::", "does not exist"),
        ("", "names no namespace"),
    ],
)
@pytest.mark.parametrize("how", [pw.register_splitting_op, lambda name: SplitOps.resolve([name])])
def test_names_that_do_not_exist_are_refused(how: Any, name: str, message: str) -> None:
    with pytest.raises(pw.ConfigError, match=message):
        how(name)
    assert name not in registered_splitting_ops()


@pytest.mark.parametrize("op", [3, None, torch.sin, lambda x: x, torch.nn.Linear, b"pwtest::attn"])
def test_objects_that_are_no_operators_are_refused(op: Any) -> None:
    with pytest.raises(pw.ConfigError, match="is not an operator; pass its name 'ns::op'"):
        pw.register_splitting_op(op)


def test_preset_is_made_of_what_is_installed() -> None:
    names = SplitOps.resolve(["attention"]).names
    assert "aten::scaled_dot_product_attention" in names
    assert names < set(PRESETS["attention"])
    assert SplitOps.resolve(["attention", "pwtest::attn"]).names == names | {"pwtest::attn"}


def test_misspelt_splitting_op_is_raised_through_torch_compile() -> None:
    compiled = helpers.compile(torch.sin, splitting_ops=["pwtest::atn"])
    with pytest.raises(pw.ConfigError, match="did you mean 'pwtest::attn'"):
        compiled(torch.ones(2))


@pytest.mark.parametrize("spelling", ["pwtest::attn.default", torch.ops.pwtest.attn.default])
def test_what_two_spellings_of_an_op_say_is_added_up(spelling: Any) -> None:
    """A hook that is registered under another name than the op is not lost."""

    def hook(descriptor: pw.BatchDescriptor) -> None: ...

    pw.register_splitting_op("pwtest::attn", capture="always")
    pw.register_splitting_op(spelling, before_replay=hook)
    for name in ("pwtest::attn", "pwtest::attn.default"):
        traits = traits_of(name)
        assert traits.capture is CaptureSupport.ALWAYS
        assert [known.function for known in traits.before_replay] == [hook]
