"""Refuse arguments that an op cannot serve, naming the value and the fix.

In:  the arguments of an op, real or fake.
Out: nothing, or a ``ValueError``.
Knows nothing of kernels. Runs on every call, so what is fine is found fine in few comparisons.
"""

import torch
from torch import Tensor

MAX_ROW = 65536
"""Most columns of a row that is reduced: one program keeps it in registers (and spills some of it
from 32768 columns of float32 or 65536 of 16 bits on)."""

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


def values(x: Tensor, num_columns: int, *, is_reduced: bool) -> None:
    """The tensor that is normalised or activated; rows of ``num_columns`` after that."""
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"x is {x.dtype}; the op takes float16, bfloat16 or float32: convert x with .to(...)"
        )
    if num_columns == 0:
        raise ValueError(f"x of shape {tuple(x.shape)} has empty rows; give it columns")
    if is_reduced and num_columns > MAX_ROW:
        raise ValueError(
            f"rows of {num_columns} are over the limit of {MAX_ROW}; "
            "run the norm or activation and the quantisation as ops of their own"
        )


def row_of(x: Tensor) -> int:
    """Size of the last dimension."""
    if x.dim() == 0:
        raise ValueError("x has no dimension; the op works on rows: pass x.reshape(1, -1)")
    return x.size(-1)


def weight(name: str, given: Tensor, x: Tensor, size: int) -> None:
    """A norm's weight: one per column, of x's dtype.

    With another dtype plain torch would promote what comes out of the norm, which this op does not.
    """
    if given.dtype != x.dtype:
        raise ValueError(
            f"{name} is {given.dtype} and x is {x.dtype}; they must be the same: "
            f"convert the weight with .to({x.dtype})"
        )
    if given.dim() != 1 or given.size(0) != size:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}; rows have {size} columns: pass [{size}]"
        )
    same_device(name, given, x)


def matrix(name: str, given: Tensor, x: Tensor, num_columns: int) -> None:
    """A linear layer's weight, of x's dtype."""
    if given.dtype != x.dtype or given.dim() != 2 or given.size(1) != num_columns:
        raise ValueError(
            f"{name} is {given.dtype} {tuple(given.shape)} and x is {x.dtype} {tuple(x.shape)}; "
            f"pass a matrix of x's dtype with {num_columns} columns"
        )
    same_device(name, given, x)


def residual(given: Tensor, x: Tensor) -> None:
    """What is added to x."""
    if given.dtype != x.dtype or given.shape != x.shape:
        raise ValueError(
            f"residual is {given.dtype} {tuple(given.shape)} and x is {x.dtype} "
            f"{tuple(x.shape)}; pass a residual of x's dtype and shape"
        )
    same_device("residual", given, x)


def quant(scale: Tensor | None, group_size: int, x: Tensor, num_columns: int) -> None:
    """How to quantise: by ``scale`` if given, per group, or (``group_size`` 0) per row."""
    if scale is not None:
        if scale.dtype != torch.float32 or scale.numel() != 1:
            raise ValueError(
                f"scale is {scale.dtype} {tuple(scale.shape)}; pass one float32, for example "
                "torch.tensor(0.5, device=x.device)"
            )
        same_device("scale", scale, x)
    elif group_size and num_columns % group_size:
        raise ValueError(
            f"rows of {num_columns} do not divide into groups of group_size={group_size}; "
            "choose a group_size that divides them, or pad the rows"
        )


def group_size(given: int) -> int:
    """A group is a power of two, so that groups tile a block of columns."""
    if given < 1 or given & (given - 1):
        raise ValueError(
            f"group_size={given} is not a power of two; choose one, for example 64 or 128"
        )
    return given


def same_device(name: str, given: Tensor, x: Tensor) -> None:
    """All arguments live where x lives."""
    if given.device != x.device:
        raise ValueError(
            f"{name} is on {given.device} and x on {x.device}; move it with .to({str(x.device)!r})"
        )
