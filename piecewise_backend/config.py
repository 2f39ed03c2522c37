"""Options: one frozen value, checked when built.

In:  the `options` and `mode` of `torch.compile`, `PIECEWISE_*` environment variables.
Out: `Config`; argument beats environment beats default.
Knows nothing of what the options do.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piecewise_backend import option_checks
from piecewise_backend.artifact_store import MAX_BYTES
from piecewise_backend.batch import CUDAGraphMode, default_capture_sizes
from piecewise_backend.budget import memory_limit
from piecewise_backend.errors import ConfigError
from piecewise_backend.grid import divisible_by
from piecewise_backend.passes import Pass, passes_for
from piecewise_backend.presets import options_of_mode

_ENV_PREFIX = "PIECEWISE_"
_CHOICES: dict[str, tuple[object, ...]] = {
    "compiler": ("inductor", "eager"),
    "graph_impl": ("cuda", "emulated", None),
    "outputs": ("fresh", "static"),
    "on_fallback": ("warn", "raise"),
    "level": (0, 1, 2, 3),
    "tuning": ("warmup", "background"),
    "skip_guards": (False, True),
    "check_guards": (False, True),
    "cudagraph_specialize_lora": (False, True),
    "validate_passes": (False, True),
}
# The grid when the user names no sizes: up to 256 sequences, as serving engines default to.
_DEFAULT_MAX_NUM_SEQS = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How one model is split, compiled and captured. Build it with `Config.from_options`."""

    splitting_ops: tuple[str, ...] | None = None
    """Ops to cut at, as "ns::op" or "ns::op.overload". "attention" stands for the attention
    ops that torch and known libraries define. None: every registered op."""

    compiler: str = "inductor"
    """Who compiles pieces: "inductor", or "eager" to run them as traced."""

    inductor_compile_config: tuple[tuple[str, Any], ...] = ()
    """Inductor options for every piece; given as a mapping."""

    pass_config: tuple[tuple[str, bool], ...] = ()
    """Passes to switch on or off, by name; given as a mapping."""

    passes: tuple[Pass, ...] = ()
    """Passes of this model alone: what `pw.register_pass` takes, in a list."""

    validate_passes: bool = False
    """After each pass compute every node anew and compare. Always done where graphs are dumped."""

    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE
    """What is replayed from graphs, as far as the split ops can be part of one."""

    decode_query_len: int = 1
    """Tokens of each sequence in a uniform decode batch: 1 + speculative tokens."""

    max_loras: int = 0
    """Most adapters that a batch may use (`pw.batch(num_active_loras=...)`)."""

    cudagraph_specialize_lora: bool = True
    """Graphs of whole steps for several numbers of active adapters; False: with and without."""

    cudagraph_capture_sizes: tuple[int, ...] = ()
    """Token counts that graphs exist for, ascending; `default_capture_sizes(256)` if not given."""

    max_cudagraph_capture_size: int | None = None
    """Sizes above this are dropped."""

    compile_sizes: tuple[int, ...] = ()
    """Token counts, out of the capture sizes, for which warm-up compiles each distinct piece anew
    with static sizes, and with Inductor's coordinate descent and max-autotune. The version that is
    fastest under replay serves, be it the one for all sizes."""

    compile_ranges_endpoints: tuple[int, ...] = ()
    """Token counts at which ranges end: [64, 512] stands for 1 to 64 and 65 to 512 tokens. Warm-up
    tunes a version for each range, and it serves the capture sizes at which it is faster."""

    tuning: str = "warmup"
    """When these versions are made and compared: "warmup", which takes a minute for each size of a
    large model, or "background": by another process on the same device while the model serves.
    `pw.adopt_tuned` lets what it has found serve."""

    compile_workers: int = 0
    """Most processes that compile versions ahead of the one that needs them: those of
    `compile_sizes`, and distinct pieces; one for every eight. Each takes a core, and half a GiB of
    a GPU meanwhile. None are started with `max_graph_memory`, as their memory would count."""

    tensor_parallel_size: int = 1
    """Sizes that are no multiples of this are dropped."""

    max_graphs: int | None = None
    """Most graphs that one trace may have: pieces times sizes, and whole steps. Of too many
    sizes the smallest, the largest, and those that save most padding are kept."""

    max_graph_memory: int | float | None = None
    """Most memory that all graphs of a model may take on a device, pools included: bytes, a part
    of the device's memory between 0 and 1, or text such as "2GiB". Warm-up captures the two largest
    sizes, estimates the rest, and chooses among those as `max_graphs` does. Pieces come first."""

    cudagraph_num_of_warmups: int = 1
    """Runs of each compiled piece before its first capture at a size, and of a whole step, split
    ops included, before its capture. Leave it above 0 if something is compiled at its first run."""

    graph_impl: str | None = None
    """"cuda", or "emulated": graphs imitated in Python, for debugging and machines without a
    GPU. None: CUDA graphs on a CUDA device, no graphs elsewhere."""

    outputs: str = "fresh"
    """"fresh": outputs belong to the caller. "static": they are views that the next call
    overwrites, without a copy."""

    on_fallback: str = "warn"
    """"warn" once per reason when a call runs without graphs, or "raise" ContractError. Neither
    happens where graphs are switched off, are rebuilt or do not exist, nor before a size is
    captured."""

    capture_after: int = 2
    """Without warm-up: a size is captured once it was called this often."""

    max_padding_factor: float = 2.0
    """A batch is not padded to more than this many times its tokens (sizes up to 64 always are)."""

    dump_dir: Path | None = None
    """Where `computation_graph.py`, the plans and `transformed_code.py` are written; None
    writes nothing."""

    cache_dir: Path | None = None
    """Where compiled pieces are kept for other processes; "default" is `piecewise_backend` in the
    user's cache directory. None, or "off": nowhere."""

    max_cache_size: int = MAX_BYTES
    """Most bytes that `cache_dir` may take, or text such as "4GiB": entries that were used least
    recently are removed."""

    level: int = 3
    """0: no compilation (`pw.compile` only). 1: graphs run as Dynamo traced them, guards kept.
    2: the same, traced once and called without guards. 3: everything."""

    skip_guards: bool = False
    """Call a module that `torch.compile` compiled without guards from the first call on, under
    the contract that sealed models and `pw.compile` are under."""

    check_guards: bool = False
    """On every call evaluate the guards that were dropped; a violation is a ContractError. For
    tests and first deployments: it costs more than the guards."""

    @classmethod
    def from_options(
        cls, options: Mapping[str, Any] | None = None, mode: str | None = None
    ) -> Config:
        """Defaults, then `PIECEWISE_*` variables, then `options`.

        Args:
            options: the `options=` of `torch.compile`.
            mode: its `mode=`. "reduce-overhead" is what this backend does anyway; "O0" to "O3"
                are presets; "max-autotune" and "max-autotune-no-cudagraphs" set Inductor's options.

        Raises:
            ConfigError: an unknown option, variable or mode, or a value of the wrong kind.
        """
        given = _from_env(os.environ) | options_of_mode(mode) | dict(options or {})
        known = {field.name for field in dataclasses.fields(cls)}
        for name in given:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}{option_checks.nearest(name, known)}")
        values = {name: _checked(name, value) for name, value in given.items()}
        limit = values.get("max_cudagraph_capture_size")
        sizes = values.get("cudagraph_capture_sizes")
        if sizes is None:
            sizes = tuple(default_capture_sizes(_DEFAULT_MAX_NUM_SEQS))
        kept = tuple(size for size in sizes if limit is None or size <= limit)
        if not kept:
            raise ConfigError(
                f"max_cudagraph_capture_size={limit} leaves none of the sizes {list(sizes)}; "
                "raise it, or set cudagraph_mode='none' to run without graphs"
            )
        kept = divisible_by(kept, values.get("tensor_parallel_size", 1))
        if values.get("level", 3) < 3:
            values |= {"compiler": "eager", "cudagraph_mode": CUDAGraphMode.NONE}
        if values.get("compile_sizes") == option_checks.ALL_CAPTURE_SIZES:
            values["compile_sizes"] = kept
        option_checks.check_tuned(values, kept)
        passes_for(values.get("passes", ()), dict(values.get("pass_config", ())))
        return cls(**(values | {"cudagraph_capture_sizes": kept}))


def _from_env(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    known = {field.name for field in dataclasses.fields(Config)}
    for variable, text in environ.items():
        if not variable.startswith(_ENV_PREFIX):
            continue
        name = variable.removeprefix(_ENV_PREFIX).lower()
        if name not in known:
            hint = option_checks.nearest(name, known)
            raise ConfigError(f"environment variable {variable} sets no option{hint}")
        values[name] = _parse(name, text, variable)
    return values


def _parse(name: str, text: str, variable: str) -> Any:
    """The value that a variable's text stands for."""
    try:
        if name in _SIZES and text != option_checks.ALL_CAPTURE_SIZES:
            return [int(part) for part in text.split(",")]
        if name == "splitting_ops":
            return text.split(",")
        if name == "pass_config":
            return dict(_parse_switch(part, variable) for part in text.split(","))
        if name in _INTEGERS or name == "level":
            return int(text)
        if name == "max_padding_factor":
            return float(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a number, or numbers with commas") from None
    if _CHOICES.get(name) == (False, True):
        return _SWITCHES.get(text.lower(), text)
    if name in ("inductor_compile_config", "passes"):
        raise ConfigError(f"{variable} cannot be set by environment; pass it in options=")
    return text


def _parse_switch(text: str, variable: str) -> tuple[str, bool]:
    name, _, state = text.partition("=")
    if state.lower() not in _SWITCHES:
        raise ConfigError(f"{variable} has {text!r}; write name=on or name=off, with commas")
    return name, _SWITCHES[state.lower()]


_SWITCHES = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_INTEGERS = {
    "max_cudagraph_capture_size": 1,
    "cudagraph_num_of_warmups": 0,
    "capture_after": 0,
    "decode_query_len": 1,
    "max_loras": 0,
    "tensor_parallel_size": 1,
    "max_graphs": 1,
    "compile_workers": 0,
}
_SIZES = ("cudagraph_capture_sizes", "compile_sizes", "compile_ranges_endpoints")
_MAY_BE_NONE = ("max_cudagraph_capture_size", "max_graphs")


def _checked(name: str, value: Any) -> Any:
    """The value in the form that `Config` keeps, or a ConfigError naming it."""
    if name in _CHOICES:
        if not any(value == choice and type(value) is type(choice) for choice in _CHOICES[name]):
            raise ConfigError(f"{name}={value!r}; use one of {list(_CHOICES[name])}")
        return value
    if name in _INTEGERS:
        least = _INTEGERS[name]
        if name in _MAY_BE_NONE and value is None:
            return None
        if not option_checks.is_int(value) or value < least:
            raise ConfigError(f"{name}={value!r}; give an integer of at least {least}")
        return value
    return _CHECKS[name](name, value)


_CHECKS = {
    "splitting_ops": option_checks.splitting_ops,
    "inductor_compile_config": option_checks.inductor_options,
    "cudagraph_mode": option_checks.graph_mode,
    "cudagraph_capture_sizes": option_checks.capture_sizes,
    "compile_sizes": option_checks.tuned_sizes,
    "compile_ranges_endpoints": option_checks.range_endpoints,
    "max_padding_factor": option_checks.factor,
    "max_graph_memory": memory_limit,
    "dump_dir": option_checks.path,
    "cache_dir": option_checks.cache_dir,
    "max_cache_size": option_checks.cache_size,
    "pass_config": option_checks.pass_config,
    "passes": option_checks.passes,
}
