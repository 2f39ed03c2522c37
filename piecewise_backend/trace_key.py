"""What is known of a trace before it is made, as JSON.

In:  the function and the instance to be traced, the parameters of a call, options.
Out: the key that other processes look for it by; or why it has none.
Knows nothing of what the trace will read: see `trace_reads`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from piecewise_backend import _torch
from piecewise_backend.cache_entry import Key
from piecewise_backend.cache_key import Uncacheable, option_key, options_key, package_version
from piecewise_backend.config import Config
from piecewise_backend.errors import ConfigError
from piecewise_backend.passes import passes_for
from piecewise_backend.passes.keys import NoContentError, digest, key_of
from piecewise_backend.registry import registered_splitting_ops, traits_of
from piecewise_backend.subject import Subject, is_dataclass_instance
from piecewise_backend.trace_content import Content, tensor

_WITHOUT_CONSEQUENCE = {"cache_dir", "dump_dir", "passes"}
"""Of the options; passes count by their own keys."""


def trace_key(subject: Subject, parameters: Mapping[str, Any], config: Config) -> Key | Uncacheable:
    """The key of the trace that a call would make.

    Args:
        subject: what would be traced.
        parameters: of the call, by name, their varying dimensions marked.
    """
    state = _torch.process_state()
    if isinstance(state, str):
        return Uncacheable(state)
    given = {name: value for name, value in parameters.items() if name != subject.own}
    device = _device([given, subject.instance])
    content = Content()
    try:
        return {
            "trace": {
                "function": content.function(subject.function),
                "instance": _instance(subject.instance),
                "parameters": {name: _described(content, v) for name, v in given.items()},
                "tensors": content.kind(torch.Tensor),  # methods may be the program's
            },
            "config": _config(config),
            "passes": _passes(config, device),
            "split ops": {name: _traits(name) for name in registered_splitting_ops()},
            "options": options_key({}),
            "process": state | {"dynamo": _all_keys(state["dynamo"])},
            "switches": _torch.numeric_switches(device) | {"asked": _torch.asked_switches()},
            "machine": _torch.traced_machine(device),
            "torch": _torch.torch_build(),
            "package": package_version(),
        }
    except (NoContentError, ConfigError) as error:
        return Uncacheable(f"it depends on {error}")


def _instance(instance: object) -> Any:
    name = f"{type(instance).__module__}.{type(instance).__qualname__}"
    if not isinstance(instance, nn.Module):
        return name
    tree = [f"{path} {type(m).__qualname__}" for path, m in instance.named_modules()]
    return {"class": name, "modules": len(tree), "tree": digest(tree)}


def _described(content: Content, value: Any) -> Any:
    """A parameter: as much as decides what the trace of it is like."""
    if isinstance(value, torch.Tensor):
        return [tensor(value, varying_dims(value)), _torch.marked_dims(value)]
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_described(content, item) for item in value)]
    if type(value) is dict:
        return {repr(name): _described(content, item) for name, item in value.items()}
    try:
        return content.value(value)
    except NoContentError:  # an object, of which the trace reads what it needs
        return content.kind(type(value))


def varying_dims(value: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor that are marked as varying."""
    marks = _torch.marked_dims(value)
    return tuple(sorted({dim for kind, dims in marks.items() if kind != "static" for dim in dims}))


def _config(config: Config) -> dict[str, Any]:
    fields = (field.name for field in dataclasses.fields(config))
    values = {name: getattr(config, name) for name in fields if name not in _WITHOUT_CONSEQUENCE}
    return {
        name: value.value if isinstance(value, enum.Enum) else option_key(value)
        for name, value in values.items()
    }


def _all_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: option_key(value) for name, value in options.items()}


def _passes(config: Config, device: torch.device) -> list[str]:
    switches = dict(config.pass_config)
    chosen = passes_for(config.passes, switches, on_cuda=device.type == "cuda")
    return [f"{item.name} {digest([key_of(item)])}" for item in chosen]


def _traits(name: str) -> list[Any]:
    traits = traits_of(name)
    hooks = [getattr(hook.function, "__qualname__", "") for hook in traits.before_replay]
    return [traits.capture.value, *hooks]


def _device(values: Any) -> torch.device:
    """Where the model computes: on the first device that is not the CPU."""
    devices = (found.device for found in _tensors(values))
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, nn.Module):
            yield from (*leaf.parameters(), *leaf.buffers())
        elif is_dataclass_instance(leaf):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
