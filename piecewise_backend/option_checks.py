"""What each option may be, and the form it is kept in.

In:  the name of an option, or of an argument, and a value that a user gave.
Out: the value as `Config` keeps it, or a ConfigError that names it.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piecewise_backend import _torch
from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.budget import amount
from piecewise_backend.errors import ConfigError
from piecewise_backend.passes import Pass, as_pass

ALL_CAPTURE_SIZES = "cudagraph_capture_sizes"


def nearest(name: str, known: set[str]) -> str:
    """What to tell a user who wrote `name` where one of `known` belongs."""
    close = difflib.get_close_matches(str(name), sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"


def is_int(value: object) -> bool:
    """An integer, and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def capture_sizes(name: str, value: Any) -> tuple[int, ...] | None:
    """Ascending positive integers."""
    if value is None:
        return None
    sizes = list(value) if isinstance(value, list | tuple | set | range) else [value]
    bad = [size for size in sizes if not is_int(size) or size < 1]
    if bad or not sizes:
        raise ConfigError(f"{name}={value!r}: {bad or 'empty'}; give positive integers, [1, 2, 4]")
    return tuple(sorted(set(sizes)))


def range_endpoints(name: str, value: Any) -> tuple[int, ...]:
    """The same, or none."""
    return () if value is None or value in ([], ()) else capture_sizes(name, value) or ()


def tuned_sizes(name: str, value: Any) -> tuple[int, ...] | str:
    """The same, or a word for all capture sizes."""
    if isinstance(value, str) and value != ALL_CAPTURE_SIZES:
        raise ConfigError(f"{name}={value!r}; give integers, or {ALL_CAPTURE_SIZES!r}")
    return value if isinstance(value, str) else range_endpoints(name, value)


def splitting_ops(name: str, value: Any) -> tuple[str, ...] | None:
    """Names of ops; whether they exist is found out later."""
    if value is None:
        return None
    ops = [value] if isinstance(value, str) else value
    if not isinstance(ops, list | tuple | set) or not all(isinstance(op, str) for op in ops):
        raise ConfigError(f"{name}={value!r}; give a list of names such as 'mylib::attention'")
    return tuple(ops)


def graph_mode(name: str, value: Any) -> CUDAGraphMode:
    """A mode, or its name."""
    if isinstance(value, CUDAGraphMode):
        return value
    names = [mode.value for mode in CUDAGraphMode]
    if not isinstance(value, str) or value.lower() not in names:
        raise ConfigError(f"{name}={value!r}; use one of {names}")
    return CUDAGraphMode(value.lower())


def inductor_options(name: str, value: Any) -> tuple[tuple[str, Any], ...]:
    """Options that Inductor knows and that are not ours to set."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r}; give a mapping of Inductor options")
    if "triton.cudagraphs" in value:
        raise ConfigError(f"{name} has 'triton.cudagraphs'; graphs are made by this backend")
    for place in sorted({"joint_custom_pre_pass", "post_grad_custom_post_pass"} & set(value)):
        raise ConfigError(
            f"{name} has {place!r}; register it with pw.register_pass, or give it in "
            "passes=[...]: it runs in the latter place, with a name"
        )
    known = set(_torch.inductor_options())
    for option in value:
        if option not in known:
            close = difflib.get_close_matches(str(option), sorted(known), n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see torch._inductor.list_options()"
            raise ConfigError(f"{name} has {option!r}, which is no Inductor option; {hint}")
    return tuple(sorted(value.items()))


def factor(name: str, value: Any) -> float:
    """A number of at least 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 1:
        raise ConfigError(f"{name}={value!r}; give a number of at least 1")
    return float(value)


def patience(name: str, value: Any) -> float | None:
    """For how many seconds to wait; None for False, which is not at all."""
    if isinstance(value, bool):
        return math.inf if value else None
    if not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{name}={value!r}; give True, False, or a number of seconds from 0 on")
    return float(value)


def path(name: str, value: Any) -> Path | None:
    """A path, or None."""
    if value is not None and not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name}={value!r}; give a path, or None")
    return Path(value) if value else None


def default_cache_dir() -> Path:
    """Where the XDG specification has caches of users."""
    # Relative paths are to be ignored, as the specification says.
    home = os.environ.get("XDG_CACHE_HOME", "")
    parent = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return parent / "piecewise_backend"


def cache_dir(name: str, value: Any) -> Path | None:
    """A path, "default", or "off"."""
    if value is None or value == "off":
        return None
    if value == "default":
        return default_cache_dir()
    if not isinstance(value, str | os.PathLike) or not value:
        raise ConfigError(f"{name}={value!r}; give a path, 'default', or 'off'")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{name}={value!r}: {error}; give an absolute path") from error


def cache_size(name: str, value: Any) -> int:
    """Bytes, as a number or as text."""
    found = amount(value) if isinstance(value, str) else value
    if type(found) is not int or found < 1:
        raise ConfigError(
            f"{name}={value!r}; give bytes, at least 1, or text such as '4GiB' or '512MiB'; "
            "cache_dir='off' keeps nothing"
        )
    return found


def pass_config(name: str, value: Any) -> tuple[tuple[str, bool], ...]:
    """Which passes run."""
    if not isinstance(value, Mapping) or not all(isinstance(v, bool) for v in value.values()):
        raise ConfigError(f"{name}={value!r}; give a mapping such as {{'eliminate_noops': False}}")
    return tuple(sorted(value.items()))


def passes(name: str, value: Any) -> tuple[Pass, ...]:
    """Passes of one model."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name}={value!r}; give a list of passes, see pw.register_pass")
    return tuple(as_pass(item) for item in value)


def check_tuned(values: Mapping[str, Any], capture_sizes: tuple[int, ...]) -> None:
    """Versions are measured as they will run: compiled, and replayed from graphs."""
    if other := _excludes_tuning(values):
        for name in ("compile_sizes", "compile_ranges_endpoints"):
            if sizes := values.get(name):
                raise ConfigError(
                    f"{name}={list(sizes)} with {other}; versions are compiled, and measured "
                    "under replay: leave one of the two out"
                )
        if values.get("tuning") == "background":
            raise ConfigError(
                f"tuning='background' with {other}; nothing is tuned: leave one of the two out"
            )
    others = sorted(set(values.get("compile_sizes", ())) - set(capture_sizes))
    if others:
        raise ConfigError(
            f"compile_sizes has {others}, which are not among the capture sizes "
            f"{list(capture_sizes)}; batches are padded to these: name some of them"
        )


def _excludes_tuning(values: Mapping[str, Any]) -> str | None:
    """The option because of which nothing is compiled, or nothing is replayed."""
    if (level := values.get("level", 3)) < 3:  # it decides the other two
        return f"level={level}"
    if values.get("compiler") == "eager":
        return "compiler='eager'"
    return "cudagraph_mode='none'" if values.get("cudagraph_mode") is CUDAGraphMode.NONE else None
