"""Options: what is accepted, in which order they win, and what an error says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import piecewise_backend as pw
from piecewise_backend.config import Config


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in dataclasses.fields(Config):
        monkeypatch.delenv(f"PIECEWISE_{field.name.upper()}", raising=False)


def test_zero_options_work() -> None:
    config = Config.from_options()
    assert config.compiler == "inductor"
    assert config.splitting_ops is None
    assert config.cudagraph_mode is pw.CUDAGraphMode.FULL_AND_PIECEWISE
    assert config.cudagraph_capture_sizes == tuple(pw.default_capture_sizes(256))
    assert Config.from_options({}) == Config.from_options(None) == config


def test_config_is_frozen() -> None:
    config = Config.from_options()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.compiler = "eager"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "given", "kept"),
    [
        ("cudagraph_capture_sizes", [8, 1, 4, 4], (1, 4, 8)),
        ("cudagraph_capture_sizes", (2,), (2,)),
        ("cudagraph_capture_sizes", range(1, 4), (1, 2, 3)),
        ("cudagraph_capture_sizes", {16, 2}, (2, 16)),
        ("cudagraph_capture_sizes", 8, (8,)),
        ("splitting_ops", "attention", ("attention",)),
        ("splitting_ops", ["a::b", "c::d"], ("a::b", "c::d")),
        ("splitting_ops", [], ()),
        ("splitting_ops", None, None),
        ("cudagraph_mode", "none", pw.CUDAGraphMode.NONE),
        ("cudagraph_mode", "PIECEWISE", pw.CUDAGraphMode.PIECEWISE),
        ("cudagraph_mode", pw.CUDAGraphMode.NONE, pw.CUDAGraphMode.NONE),
        ("cudagraph_num_of_warmups", 0, 0),
        ("capture_after", 0, 0),
        ("max_padding_factor", 1, 1.0),
        ("max_cudagraph_capture_size", None, None),
        ("graph_impl", None, None),
        ("dump_dir", "somewhere", Path("somewhere")),
        ("dump_dir", "", None),
        ("inductor_compile_config", {"max_autotune": True}, (("max_autotune", True),)),
    ],
)
def test_values_are_kept_in_one_form(option: str, given: Any, kept: Any) -> None:
    assert getattr(Config.from_options({option: given}), option) == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cudagraph_capture_size": [1]}, "did you mean 'cudagraph_capture_sizes'"),
        ({"splitting_op": []}, "did you mean 'splitting_ops'"),
        ({"zzz": 1}, "unknown option 'zzz'; known: .*capture_after, .*compiler"),
        ({3: 1}, "unknown option 3"),
        ({"compiler": "inducter"}, r"compiler='inducter'; use one of \['inductor', 'eager'\]"),
        ({"compiler": None}, "compiler=None; use one of"),
        ({"graph_impl": "metal"}, "graph_impl='metal'"),
        ({"outputs": "borrowed"}, "outputs='borrowed'"),
        ({"on_fallback": "ignore"}, "on_fallback='ignore'"),
        ({"cudagraph_mode": "fulll"}, r"cudagraph_mode='fulll'; use one of \['none'"),
        ({"cudagraph_mode": 2}, "cudagraph_mode=2"),
        ({"cudagraph_capture_sizes": []}, "empty; give positive integers"),
        ({"cudagraph_capture_sizes": [1, 0]}, r"\[0\]; give positive integers"),
        ({"cudagraph_capture_sizes": [1, -2, True]}, r"\[-2, True\]; give positive"),
        ({"cudagraph_capture_sizes": "1,2"}, "give positive integers"),
        ({"cudagraph_capture_sizes": [1.0]}, r"\[1.0\]; give positive"),
        ({"max_cudagraph_capture_size": 0}, "give an integer of at least 1"),
        ({"max_cudagraph_capture_size": True}, "max_cudagraph_capture_size=True"),
        ({"cudagraph_num_of_warmups": -1}, "give an integer of at least 0"),
        ({"capture_after": "2"}, "capture_after='2'"),
        ({"max_padding_factor": 0.5}, "give a number of at least 1"),
        ({"max_padding_factor": float("nan")}, "give a number of at least 1"),
        ({"max_padding_factor": "2"}, "max_padding_factor='2'"),
        ({"splitting_ops": 3}, "give a list of names such as 'mylib::attention'"),
        ({"splitting_ops": [torch.add]}, "give a list of names"),
        ({"dump_dir": 3}, "dump_dir=3; give a path"),
        ({"inductor_compile_config": "max_autotune"}, "give a mapping of Inductor options"),
        (
            {"cudagraph_capture_sizes": [8, 16], "max_cudagraph_capture_size": 4},
            r"max_cudagraph_capture_size=4 leaves none of the sizes \[8, 16\]",
        ),
    ],
)
def test_wrong_options_are_refused_with_what_to_do(options: Any, message: str) -> None:
    with pytest.raises(pw.ConfigError, match=message):
        Config.from_options(options)


def test_sizes_above_the_limit_are_dropped() -> None:
    options = {"cudagraph_capture_sizes": [1, 8, 64], "max_cudagraph_capture_size": 8}
    assert Config.from_options(options).cudagraph_capture_sizes == (1, 8)
    config = Config.from_options({"max_cudagraph_capture_size": 32})
    assert config.cudagraph_capture_sizes == (1, 2, 4, 8, 16, 24, 32)


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("PIECEWISE_CUDAGRAPH_CAPTURE_SIZES", "1,2,8", "cudagraph_capture_sizes", (1, 2, 8)),
        ("PIECEWISE_SPLITTING_OPS", "a::b,c::d", "splitting_ops", ("a::b", "c::d")),
        ("PIECEWISE_COMPILER", "eager", "compiler", "eager"),
        ("PIECEWISE_MAX_PADDING_FACTOR", "1.5", "max_padding_factor", 1.5),
        ("PIECEWISE_CAPTURE_AFTER", "7", "capture_after", 7),
        ("PIECEWISE_CUDAGRAPH_MODE", "NONE", "cudagraph_mode", pw.CUDAGraphMode.NONE),
        ("PIECEWISE_DUMP_DIR", "/tmp/x", "dump_dir", Path("/tmp/x")),
    ],
)
def test_variables_set_options(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, option: str, value: Any
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(Config.from_options(), option) == value


def test_argument_beats_variable_beats_mode_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config.from_options().capture_after == 2
    monkeypatch.setenv("PIECEWISE_CAPTURE_AFTER", "5")
    assert Config.from_options().capture_after == 5
    assert Config.from_options({"capture_after": 9}).capture_after == 9


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("PIECEWISE_CAPTURE_AFTR", "2", "PIECEWISE_CAPTURE_AFTR sets no option; did you mean"),
        ("PIECEWISE_CAPTURE_AFTER", "two", "PIECEWISE_CAPTURE_AFTER='two' is not a number"),
        ("PIECEWISE_CUDAGRAPH_CAPTURE_SIZES", "1;2", "is not a number, or numbers with commas"),
        ("PIECEWISE_OUTPUTS", "mine", "outputs='mine'"),
        ("PIECEWISE_INDUCTOR_COMPILE_CONFIG", "{}", "cannot be set by environment"),
    ],
)
def test_wrong_variables_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(pw.ConfigError, match=message):
        Config.from_options()


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_modes_that_change_nothing(mode: str | None) -> None:
    assert Config.from_options(mode=mode) == Config.from_options()


def test_max_autotune_sets_inductors_options_but_not_its_graphs() -> None:
    chosen = dict(Config.from_options(mode="max-autotune").inductor_compile_config)
    assert chosen["max_autotune"] is True
    assert "triton.cudagraphs" not in chosen
    config = Config.from_options(mode="max-autotune-no-cudagraphs")
    assert config.cudagraph_mode is pw.CUDAGraphMode.NONE


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(pw.ConfigError, match="mode='fast' is not known; use 'default'"):
        Config.from_options(mode="fast")


def test_wrong_option_is_raised_through_torch_compile() -> None:
    compiled = torch.compile(torch.sin, backend="piecewise", options={"compilr": "eager"})
    with pytest.raises(pw.ConfigError, match="did you mean 'compiler'"):
        compiled(torch.ones(2))


def test_a_misspelt_inductor_option_names_the_nearest() -> None:
    options = {"inductor_compile_config": {"max_autotun": True}}
    with pytest.raises(pw.ConfigError, match=r"max_autotun.*did you mean 'max_autotune'"):
        Config.from_options(options)
