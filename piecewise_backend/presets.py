"""The options that a `torch.compile` mode string stands for.

In:  the string.
Out: option values, by name.
"""

from __future__ import annotations

from typing import Any

from piecewise_backend import _torch
from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.errors import ConfigError

_LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"compiler": "eager", "cudagraph_mode": CUDAGraphMode.NONE},
    "O1": {"cudagraph_mode": CUDAGraphMode.PIECEWISE},
    "O2": {"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE},
    "O3": {"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE},
}
"""Named as vLLM's, where O3 is O2, too."""


def options_of_mode(mode: str | None) -> dict[str, Any]:
    """The options that a `torch.compile` mode string stands for.

    Raises:
        ConfigError: no such mode.
    """
    if mode in (None, "default", "reduce-overhead"):
        return {}
    if mode in _LEVELS:
        return dict(_LEVELS[mode])
    if mode not in ("max-autotune", "max-autotune-no-cudagraphs"):
        raise ConfigError(
            f"mode={mode!r} is not known; use 'default', 'reduce-overhead', 'max-autotune', "
            f"'max-autotune-no-cudagraphs', one of {list(_LEVELS)}, or options={{...}}"
        )
    patches = _torch.mode_patches(mode)
    patches.pop("triton.cudagraphs", None)
    values: dict[str, Any] = {"inductor_compile_config": patches}
    if mode.endswith("no-cudagraphs"):
        values["cudagraph_mode"] = CUDAGraphMode.NONE
    return values
