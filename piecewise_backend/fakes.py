"""Inputs for a distinct piece, in whatever environment its sizes are to live.

In:  a distinct piece, and what each size expression shall become (an int or a SymInt).
Out: inputs with the shapes, strides and sharing of memory of the piece; fakes in a fake mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import sympy
import torch

from piecewise_backend import _torch
from piecewise_backend.canonical import DistinctPiece
from piecewise_backend.steps import Constant, Host, Value

Number = Callable[[sympy.Expr], Any]


def piece_inputs(piece: DistinctPiece, number: Number, constant: Callable[[int], Any]) -> list[Any]:
    """The inputs of `piece`, without values; fakes if a fake mode is active.

    Args:
        number: turns an expression over the graph's symbols into an int or SymInt.
        constant: the same for a hoisted integer constant.
    """
    examples = [piece.examples[r.name] for r in piece.inputs if isinstance(r, Value)]
    sharing = Counter((_storage(example), example.dtype) for example in examples)
    extents = dict.fromkeys(sharing, sympy.Integer(0))
    for example in examples:
        extents[_storage(example), example.dtype] += _extent(example)
    bases: dict[Any, torch.Tensor] = {}
    inputs: list[Any] = []
    for ref in piece.inputs:
        if isinstance(ref, Host):
            inputs.append(number(ref.expr))
        elif isinstance(ref, Constant) and isinstance(ref.value, torch.Tensor):
            inputs.append(torch.empty((), dtype=ref.value.dtype, device=ref.value.device))
        elif isinstance(ref, Constant):
            inputs.append(constant(ref.value))
        else:
            example = piece.examples[ref.name]
            key = (_storage(example), example.dtype)
            shape = [number(_torch.size_expr(size)) for size in example.shape]
            stride = [number(_torch.size_expr(step)) for step in example.stride()]
            kind = {"dtype": example.dtype, "device": example.device}
            if sharing[key] == 1:
                inputs.append(torch.empty_strided(shape, stride, **kind))
                continue
            if key not in bases:
                bases[key] = torch.empty(number(extents[key]), **kind)
            offset = number(_torch.size_expr(example.storage_offset()))
            inputs.append(bases[key].as_strided(shape, stride, offset))
    return inputs


def _storage(example: torch.Tensor) -> int:
    return int(example.untyped_storage()._cdata)


def _extent(example: torch.Tensor) -> sympy.Expr:
    """Elements from the start of the storage to the end of the tensor."""
    steps = zip(example.shape, example.stride(), strict=True)
    reach = [(_torch.size_expr(size) - 1) * _torch.size_expr(step) for size, step in steps]
    return sum(reach, _torch.size_expr(example.storage_offset()) + 1)
