"""The table of graph modes, cell by cell, and the words for each change."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.errors import ConfigError
from piecewise_backend.modes import CaptureSupport, resolve_cudagraph_mode, weakest

SUPPORTS = ("always", "uniform_batch", "uniform_single_token_decode", "never")
KEPT_AS_ASKED = ""


@pytest.mark.parametrize(
    ("mode", "support", "decode_query_len", "if_split", "if_not_split"),
    [
        ("full", "always", 1, "full", "full"),
        ("full", "always", 3, "full", "full"),
        ("full", "uniform_batch", 1, "full_and_piecewise", "full_decode_only"),
        ("full", "uniform_batch", 3, "full_and_piecewise", "full_decode_only"),
        ("full", "uniform_single_token_decode", 1, "full_and_piecewise", "full_decode_only"),
        ("full", "uniform_single_token_decode", 3, "piecewise", "none"),
        ("full_decode_only", "always", 1, "full_decode_only", "full_decode_only"),
        ("full_decode_only", "always", 3, "full_decode_only", "full_decode_only"),
        ("full_decode_only", "uniform_batch", 1, "full_decode_only", "full_decode_only"),
        ("full_decode_only", "uniform_batch", 3, "full_decode_only", "full_decode_only"),
        (
            "full_decode_only",
            "uniform_single_token_decode",
            1,
            "full_decode_only",
            "full_decode_only",
        ),
        ("full_decode_only", "uniform_single_token_decode", 3, "piecewise", "none"),
        ("full_decode_only", "never", 1, "piecewise", "none"),
        ("full_decode_only", "never", 3, "piecewise", "none"),
        ("full_and_piecewise", "always", 1, "full_and_piecewise", "full_and_piecewise"),
        ("full_and_piecewise", "always", 3, "full_and_piecewise", "full_and_piecewise"),
        ("full_and_piecewise", "uniform_batch", 1, "full_and_piecewise", "full_and_piecewise"),
        ("full_and_piecewise", "uniform_batch", 3, "full_and_piecewise", "full_and_piecewise"),
        (
            "full_and_piecewise",
            "uniform_single_token_decode",
            1,
            "full_and_piecewise",
            "full_and_piecewise",
        ),
        ("full_and_piecewise", "uniform_single_token_decode", 3, "piecewise", "none"),
        ("full_and_piecewise", "never", 1, "piecewise", "none"),
        ("full_and_piecewise", "never", 3, "piecewise", "none"),
        ("piecewise", "always", 1, "piecewise", "full"),
        ("piecewise", "always", 3, "piecewise", "full"),
        ("piecewise", "uniform_batch", 1, "piecewise", "full_decode_only"),
        ("piecewise", "uniform_batch", 3, "piecewise", "full_decode_only"),
        ("piecewise", "uniform_single_token_decode", 1, "piecewise", "full_decode_only"),
        ("piecewise", "uniform_single_token_decode", 3, "piecewise", "none"),
        ("none", "always", 1, "none", "none"),
        ("none", "always", 3, "none", "none"),
        ("none", "uniform_batch", 1, "none", "none"),
        ("none", "uniform_batch", 3, "none", "none"),
        ("none", "uniform_single_token_decode", 1, "none", "none"),
        ("none", "uniform_single_token_decode", 3, "none", "none"),
        ("none", "never", 1, "none", "none"),
        ("none", "never", 3, "none", "none"),
    ],
)
def test_table(
    mode: str, support: str, decode_query_len: int, if_split: str, if_not_split: str
) -> None:
    for attention_is_split, expected in ((True, if_split), (False, if_not_split)):
        resolved, reason = resolve_cudagraph_mode(
            mode, support, attention_is_split, decode_query_len
        )
        assert resolved is CUDAGraphMode(expected)
        assert (reason == KEPT_AS_ASKED) == (expected == mode)


@pytest.mark.parametrize("decode_query_len", [1, 3])
@pytest.mark.parametrize(
    ("mode", "attention_is_split", "fix"),
    [
        ("full", True, "use cudagraph_mode='piecewise', which keeps attention out of graphs$"),
        ("full", False, "cut at the op by naming it in splitting_ops .* cudagraph_mode='none'$"),
        ("piecewise", False, "cut at the op by naming it in splitting_ops"),
    ],
)
def test_attention_that_is_never_captured_refuses_to_be_inside_a_graph(
    mode: str, attention_is_split: bool, fix: str, decode_query_len: int
) -> None:
    message = f"cudagraph_mode='{mode}' would put attention inside a graph.*'never'.*{fix}"
    with pytest.raises(ConfigError, match=message):
        resolve_cudagraph_mode(mode, "never", attention_is_split, decode_query_len)


@pytest.mark.parametrize("decode_query_len", [1, 3])
def test_attention_that_is_never_captured_may_be_between_pieces(decode_query_len: int) -> None:
    resolved = resolve_cudagraph_mode("piecewise", "never", True, decode_query_len)
    assert resolved == (CUDAGraphMode.PIECEWISE, KEPT_AS_ASKED)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ("full", "uniform_batch"),
            "cudagraph_mode='full' became 'full_and_piecewise': attention of this model is "
            "captured in uniform batches only ('uniform_batch')",
        ),
        (
            ("full", "uniform_single_token_decode"),
            "cudagraph_mode='full' became 'full_and_piecewise': attention of this model is "
            "captured in decode of one token only ('uniform_single_token_decode')",
        ),
        (
            ("full_decode_only", "uniform_single_token_decode", False, 4),
            "cudagraph_mode='full_decode_only' became 'none': attention of this model is "
            "captured in decode of one token only ('uniform_single_token_decode'), and decode "
            "steps have 4 tokens per sequence",
        ),
        (
            ("full_and_piecewise", "never"),
            "cudagraph_mode='full_and_piecewise' became 'piecewise': attention of this model "
            "cannot be captured (capture support 'never')",
        ),
        (
            ("piecewise", "always", False),
            "cudagraph_mode='piecewise' became 'full': the graph is not cut at attention, so a "
            "piece is the whole step",
        ),
        (
            ("piecewise", "uniform_batch", False),
            "cudagraph_mode='piecewise' became 'full_decode_only': the graph is not cut at "
            "attention, so a piece is the whole step; attention of this model is captured in "
            "uniform batches only ('uniform_batch')",
        ),
    ],
)
def test_reason_of_a_change(arguments: tuple[Any, ...], reason: str) -> None:
    assert resolve_cudagraph_mode(*arguments)[1] == reason


@pytest.mark.parametrize("mode", CUDAGraphMode)
@pytest.mark.parametrize("support", [support for support in CaptureSupport if support > 0])
def test_members_and_names_are_the_same(mode: CUDAGraphMode, support: CaptureSupport) -> None:
    by_name = resolve_cudagraph_mode(mode.value.upper(), support.name.lower())
    assert resolve_cudagraph_mode(mode, support) == by_name


def test_a_resolved_mode_is_not_resolved_further() -> None:
    grid = itertools.product(CUDAGraphMode, CaptureSupport, (True, False), (1, 2))
    for mode, support, attention_is_split, decode_query_len in grid:
        facts = (support, attention_is_split, decode_query_len)
        try:
            resolved, _ = resolve_cudagraph_mode(mode, *facts)
        except ConfigError:
            continue
        assert resolve_cudagraph_mode(resolved, *facts) == (resolved, KEPT_AS_ASKED)


@pytest.mark.parametrize(
    ("name", "support"),
    [
        ("always", CaptureSupport.ALWAYS),
        ("uniform_batch", CaptureSupport.UNIFORM_BATCH),
        ("uniform_single_token_decode", CaptureSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ("never", CaptureSupport.NEVER),
    ],
)
def test_names_of_support(name: str, support: CaptureSupport) -> None:
    assert CaptureSupport.of(name) is support


def test_support_is_ordered() -> None:
    assert [CaptureSupport.of(name).value for name in SUPPORTS] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("supports", "expected"),
    [
        ([], CaptureSupport.ALWAYS),
        ([CaptureSupport.ALWAYS], CaptureSupport.ALWAYS),
        ([CaptureSupport.ALWAYS, CaptureSupport.UNIFORM_BATCH], CaptureSupport.UNIFORM_BATCH),
        (list(CaptureSupport), CaptureSupport.NEVER),
    ],
)
def test_weakest_support_is_that_of_the_model(
    supports: list[CaptureSupport], expected: CaptureSupport
) -> None:
    assert weakest(iter(supports)) is expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ful", "always"), "cudagraph_mode 'ful' is not known; did you mean 'full'"),
        ((None, "always"), "cudagraph_mode None is not known; did you mean 'none'"),
        ((7, "always"), r"cudagraph_mode 7 is not known; use one of \['none', 'piecewise', "),
        (("full", "uniform_batches"), "'uniform_batches' is not known; did you mean 'uniform_b"),
        (("full", "x"), "capture support 'x' is not known; use one of"),
        (("full", 3), "capture support 3 is not known"),
        (("none", "always", True, 0), "decode_query_len is 0; give a positive integer"),
        (("none", "always", True, True), "decode_query_len is True"),
        (("none", "always", True, 1.0), "decode_query_len is 1.0"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cudagraph_mode(*arguments)
