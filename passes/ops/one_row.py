"""A linear layer of one token, with what stands around it: two ops.

In:  ``x`` ``[.., K]`` of one row; a weight ``[N, K]`` as ``F.linear`` has it; perhaps the weight
     ``[K]`` of a norm in front, perhaps what is added behind.
Out: ``[.., N]``.
Knows nothing of graphs or patterns.

``one_row_linear(x, weight, addend=None, norm_weight=None, eps=0.0)``
    ``F.linear(y, weight) + addend``; the addend is a bias or a residual, ``N`` values.
``one_row_gated(x, weight, up=None, norm_weight=None, eps=0.0)``
    ``silu(F.linear(y, weight)) * F.linear(y, up)``. Without ``up``, gate and up are the halves of
    the rows of ``weight``.

``y`` is ``x``, or ``rms_norm(x, norm_weight, eps)``. What is rounded where: Note [Rounding] in
``reference``; products and the addend are summed in float32.

A product of one row is bound by reading the weight, which no matrix kernel is made for: on an H200
the vendor's library takes 6.0 us for 2048 x 2048 where this takes 3.4, and 57.0 us for 28672 x 4096
where this takes 53.8 with a norm and an activation (benchmarks/one_row.py).

Dtypes: float16 or bfloat16, all the same. Errors: ``ValueError`` for another dtype, more or fewer
rows than one, a weight, addend or norm that does not fit, ``K`` over 32768.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from piecewise_backend.passes.ops import checks, reference
from piecewise_backend.passes.ops.define import Runner, define, needs_triton

DTYPES = (torch.float16, torch.bfloat16)
MAX_COLUMNS = 32768
"""Most columns: one program keeps the row in registers."""


@functools.cache
def runs_on(device: torch.device) -> bool:
    """The kernel serves this device: an NVIDIA GPU that has bfloat16, and Triton."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    return has_bfloat16 and importlib.util.find_spec("triton") is not None


def _check(
    x: Tensor, weight: Tensor, up: Tensor | None, addend: Tensor | None, norm_weight: Tensor | None
) -> None:
    num_columns = checks.row_of(x)
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}; the op takes float16 or bfloat16: convert x with .to")
    if x.numel() != num_columns or not 0 < num_columns <= MAX_COLUMNS:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; the op takes one row of 1 to {MAX_COLUMNS} columns: "
            "call F.linear"
        )
    checks.matrix("weight", weight, x, num_columns)
    if up is not None:
        checks.matrix("up", up, x, num_columns)
        if up.size(0) != weight.size(0):
            raise ValueError(
                f"weight has {weight.size(0)} rows and up {up.size(0)}; they are multiplied row "
                "by row and must be as many"
            )
    if norm_weight is not None:
        checks.weight("norm_weight", norm_weight, x, num_columns)
    if addend is not None:
        if addend.dtype != x.dtype or not addend.shape[-1:].numel() == addend.numel() == len(
            weight
        ):
            raise ValueError(
                f"addend is {addend.dtype} {tuple(addend.shape)}; pass one value of {x.dtype} for "
                f"each of the {weight.size(0)} rows of weight"
            )
        checks.same_device("addend", addend, x)


def _check_gated(x: Tensor, weight: Tensor, up: Tensor | None, norm_weight: Tensor | None) -> int:
    """Number of values of the output."""
    _check(x, weight, up, None, norm_weight)
    if up is None and weight.size(0) % 2:
        raise ValueError(
            f"weight has {weight.size(0)} rows, which are not two halves; pass the rows of gate, "
            "then those of up"
        )
    return weight.size(0) // (2 if up is None else 1)


def _on_cpu(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    addend: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> Tensor:
    y = x if norm_weight is None else reference.rms_norm(x, norm_weight, eps)
    if up is None:
        return reference.linear(y, weight, addend)
    return reference.gated_linear(y, weight, up)


def _on_cuda(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    addend: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> Tensor:
    return _kernel()(x, weight, up, addend, norm_weight, eps)


def _fake(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    addend: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.size(0)))


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    """The Triton kernel; the CPU needs no Triton, so it is imported at the first call on CUDA."""
    try:
        from piecewise_backend.passes.ops.kernels.one_row import one_row  # noqa: PLC0415
    except ImportError as error:
        raise needs_triton(error) from error
    return one_row


def _linear(
    run: Runner,
    x: Tensor,
    weight: Tensor,
    addend: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> object:
    _check(x, weight, None, addend, norm_weight)
    return run(x, weight, None, addend, norm_weight, eps)


def _gated(
    run: Runner,
    x: Tensor,
    weight: Tensor,
    up: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> object:
    num_values = _check_gated(x, weight, up, norm_weight)
    if up is None:
        weight, up = weight[:num_values], weight[num_values:]
    return run(x, weight, up, None, norm_weight, eps)


_define = functools.partial(define, cpu=_on_cpu, cuda=_on_cuda, fake=_fake)
_NORM = "Tensor? norm_weight=None, float eps=0.0"

_define(f"one_row_linear(Tensor x, Tensor weight, Tensor? addend=None, {_NORM}) -> Tensor", _linear)
_define(f"one_row_gated(Tensor x, Tensor weight, Tensor? up=None, {_NORM}) -> Tensor", _gated)
