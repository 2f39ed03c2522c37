"""What compiled code depends on besides its graph: this torch, its options, this machine."""

from __future__ import annotations

import contextlib
import functools
import platform
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._inductor import codecache
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.utils import _triton

# How many processes compile is the machine's, and of no consequence to what they make.
_WITHOUT_CONSEQUENCE = {"compile_threads", "worker_log_path", "torchinductor_worker_logpath"}


def torch_build() -> dict[str, Any]:
    """Which torch, by content of its sources, and which Triton and device driver.

    Inductor keeps this for its own caches; there is no public spelling.
    """
    return {
        "version": str(torch.__version__),
        "sources": codecache.torch_key().hex(),
        "system": codecache.CacheBase.get_system(),
        "python": platform.python_version(),
    }


def portable_options() -> dict[str, dict[str, Any]]:
    """The options of Inductor and of the tracer in front of it, without those of caching."""
    return {
        "inductor": _without_machine(inductor_config.save_config_portable()),
        "functorch": _without_machine(functorch_config.save_config_portable()),
    }


_PASSES = (
    *("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass"),
    *("post_grad_custom_pre_pass", "post_grad_custom_post_pass"),
    *("_pre_fusion_custom_pass", "_post_fusion_custom_pass"),
)


def passes_of_process() -> dict[str, Any]:
    """The passes that a program has given Inductor; they are not among the portable options."""
    found = {name: getattr(inductor_config, name, None) for name in _PASSES}
    return {name: value for name, value in found.items() if value is not None}


def machine(device: torch.device) -> dict[str, Any]:
    """What code for a device depends on."""
    if device.type == "cuda":
        return _cuda_machine(device)
    return traced_machine(device) | {"instructions": str(pick_vec_isa())}


def traced_machine(device: torch.device) -> dict[str, Any]:
    """What a trace for a device may ask about it: nothing that takes a compiler to find out."""
    if device.type == "cuda":
        return _cuda_machine(device)
    return {
        "device": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _cuda_machine(device: torch.device) -> dict[str, Any]:
    found: Any = torch.cuda.get_device_properties(device)
    capability = f"{found.major}.{found.minor}"
    return {"device": found.name, "capability": capability, "cuda": torch.version.cuda}


def numeric_switches(device: torch.device) -> dict[str, Any]:
    """Process-wide settings that tracing bakes into code."""
    kind = device.type
    return {
        "autocast": [torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))],
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        "gradients": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "matmul": [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision],
    }


def asked_switches() -> dict[str, Any]:
    """Process-wide settings that a model may ask for without a guard, whatever its device is."""
    flags = [name for name in dir(torch._C) if re.fullmatch(r"_get_\w+_allow_(fp|bf)16\w*", name)]
    return {
        "autocast": {
            kind: [torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))]
            for kind in ("cpu", "cuda")
        },
        "reductions": {name: str(getattr(torch._C, name)()) for name in flags},
    }


def _without_machine(options: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in sorted(options.items()) if name not in _WITHOUT_CONSEQUENCE}


def settings_of_process(device: torch.device) -> dict[str, Any]:
    """What a process has set that code depends on, for `under_settings` in another one."""
    return {
        "options": portable_options(),
        "switches": numeric_switches(device),
        "threads": torch.get_num_threads(),
        "toolchain": _toolchain(device),
    }


def _toolchain(device: torch.device) -> str | None:
    """What Inductor writes into the source of kernels for the Triton that compiles them.

    It depends on the environment at the time when the process asks first, and torch puts its
    assembler there with the first kernel: a process that is started later gives it another name,
    and a kernel would be another one there. Ends when kernels are named by what they compute.
    """
    if device.type != "cuda" or not _triton.has_triton():
        return None
    return _triton.triton_hash_with_backend()


@contextlib.contextmanager
def under_settings(settings: Mapping[str, Any], device: torch.device) -> Iterator[None]:
    """Run as in the process that had these settings. For a process that does nothing else: what
    was set is not set back."""
    inductor_config.load_config(settings["options"]["inductor"])
    functorch_config.load_config(settings["options"]["functorch"])
    torch.set_num_threads(settings["threads"])
    if (toolchain := settings["toolchain"]) is not None:
        _triton.triton_hash_with_backend = functools.cache(lambda: toolchain)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # whose properties are part of keys
    switches, kind = settings["switches"], device.type
    is_enabled, dtype = switches["autocast"]
    torch.set_autocast_enabled(kind, is_enabled)
    torch.set_autocast_dtype(kind, _dtype(dtype))
    torch.set_default_dtype(_dtype(switches["default dtype"]))
    is_deterministic, warns_only = switches["deterministic"]
    torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
    precision, of_cuda = switches["matmul"]
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.matmul.fp32_precision = of_cuda  # which the other has set as well
    has_gradients, is_inference = switches["gradients"]
    with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients):
        if (found := numeric_switches(device)) != switches:
            raise RuntimeError(f"{switches} were to be set, but there are {found}")
        yield


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))  # type: ignore[no-any-return]
