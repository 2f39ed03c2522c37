"""Everything that the compiled code of a piece depends on, as JSON.

In:  a distinct piece, the sizes to compile it with, Inductor options.
Out: its key; or why no key can be made, so that it is compiled anew in every process.
Knows nothing of where artifacts are kept.

Note [What a key is made of]
The content of the graph, not the files that it was traced from: what a model's code does shows
in the graph, so a comment changes nothing and a constant of a configuration object does. Code
that the graph only names - custom ops, their fake implementations, the Triton kernels they use -
counts by its own content. Nothing says where things are: no path, no address, and of hoisted
constants only that they are inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from piecewise_backend import _torch, hoisting
from piecewise_backend.cache_entry import Key
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.passes.keys import NoContentError, content_key, digest, op_content
from piecewise_backend.steps import Constant, Host

_TORCH_MODULES = {"torch", "_operator", "operator", "builtins", "math"}


@dataclasses.dataclass(frozen=True, slots=True)
class Uncacheable:
    """No other process could tell that its piece is this one."""

    reason: str


def piece_key(
    piece: DistinctPiece,
    numbers: tuple[int, ...],
    options: Mapping[str, object],
    limits: Mapping[int, tuple[int, int]],
) -> Key | Uncacheable:
    """The key of one version of a piece. See Note [What a key is made of].

    Args:
        numbers: the integer inputs that it is compiled with, as examples.
        options: Inductor options beside those that are set in the process.
        limits: the smallest and largest value that a size may have, by position.
    """
    if piece.structure.only_here:
        return Uncacheable(f"it has {piece.structure.only_here[0]}, which has no name")
    try:
        all_options = options_key(options)
        called = dict(_called(piece.module))
    except NoContentError as error:
        return Uncacheable(f"it depends on {error}, which has no content to compare")
    if hidden := [name for name, how in called.items() if how == _HIDDEN]:
        return Uncacheable(f"tracing goes through {hidden[0]}, whose code is not to be seen")
    device = _device(piece)
    num_sizes = sum(isinstance(ref, Host) for ref in piece.inputs)
    return {
        "piece": {
            "nodes": list(piece.structure.nodes),
            "constants": list(piece.structure.constants),
            "hoisted": list(piece.structure.hoisted),
            "inputs": [_input(ref) for ref in piece.inputs],
        },
        "sizes": list(numbers[:num_sizes]),
        "limits": {str(position): list(between) for position, between in limits.items()},
        "negative constants": [number < 0 for number in numbers[num_sizes:]],
        "called": called,
        "options": all_options,
        "switches": _torch.numeric_switches(device),
        "machine": _torch.machine(device),
        "torch": _torch.torch_build(),
        "package": package_version(),
    }


_HIDDEN = "composite, without a body that torch shows"


def _input(ref: Any) -> str:
    if isinstance(ref, Host):
        return "size"
    if isinstance(ref, Constant):
        value = ref.value
        return f"constant {value.dtype}" if isinstance(value, torch.Tensor) else "constant int"
    return "tensor"


def _device(piece: DistinctPiece) -> torch.device:
    """Where the piece computes; its tensors are on one device. No example is made in vain."""
    values = (_torch.example_of(node) for node in piece.module.graph.nodes)
    tensors = filter(torch.is_tensor, itertools.chain(piece.examples.values(), values))
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


def options_key(options: Mapping[str, object]) -> dict[str, Any]:
    """Inductor's options, and those of the tracer in front of it, with their values here."""
    found = _torch.portable_options()
    found["inductor"] |= _torch.passes_of_process() | dict(options)
    return {
        group: {name: option_key(value) for name, value in sorted(values.items())}
        for group, values in found.items()
    }


def option_key(value: Any) -> Any:
    """The content of a value of some option."""
    is_plain = value is None or type(value) in (bool, int, str)
    return value if is_plain else content_key([value])


def _called(module: fx.GraphModule) -> Iterator[tuple[str, Any]]:
    """What the nodes of a piece call that is not torch's, with its content."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                if node.op == "call_function":
                    yield from _callee(node)


def _callee(node: fx.Node) -> Iterator[tuple[str, Any]]:
    target: Any = node.target
    if (kernel := _torch.triton_kernel_of(node)) is not None:
        yield f"Triton kernel of {node.name}", digest([content_key(kernel)])
    elif isinstance(target, OpOverload | OpOverloadPacket):
        for overload in _torch.overloads_of(target) or ():
            yield from _op(overload)
    elif str(target.__module__).partition(".")[0] not in _TORCH_MODULES:
        yield f"{target.__module__}.{target.__qualname__}", digest([content_key([target])])


def _op(op: OpOverload) -> Iterator[tuple[str, Any]]:
    original = hoisting.original_of(op)
    if _torch.is_from_torch(original):
        return
    if _torch.is_hidden_composite(original):
        yield str(original), _HIDDEN
        return
    yield str(original), op_content(original)


@functools.cache
def package_version() -> dict[str, str]:
    """Which version of this package; its sources too, as they change between versions."""
    folder = Path(__file__).parent
    texts = [path.read_text() for path in sorted(folder.rglob("*.py"))]
    try:
        version = importlib.metadata.version("piecewise-backend")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        version = "not installed"
    return {"version": version, "sources": digest(texts)}
