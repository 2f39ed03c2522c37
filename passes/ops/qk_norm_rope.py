"""RMSNorm of every query and key head, then rotary embedding: one op.

In:  ``q`` ``[.., Hq, D]`` and ``k`` ``[.., Hkv, D]``, which may be views of one projection
     ``[.., (Hq + 2 * Hkv) * D]``; a norm's weight ``[D]`` for each; ``cos`` and ``sin``
     ``[.., D // 2]`` of each token's position.
Out: both, normalised and rotated, fresh and contiguous. Values need nothing, so they are not taken.
Knows nothing of graphs or patterns.

``qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps) -> (q, k)``

``rope(rms_norm(q, q_weight, eps), cos, sin)``, and likewise ``k``: the first half of a head is
rotated with the second, ``(a * cos - b * sin, b * cos + a * sin)``, in float32 and rounded once.
What is rounded before: Note [Rounding] in ``reference``. A model that keeps cosines of both halves,
``[.., D]`` with equal halves, passes ``cos[.., : D // 2]``.

Dtypes: ``q`` and ``k`` float16, bfloat16 or float32, weights the same, ``cos`` and ``sin`` float32
or the same. Any leading dimensions, equal in all of ``q``, ``k``, ``cos``, ``sin``. Tokens may be
strided; heads that are not packed ``[Hq, D]`` within a token are copied.
Errors: ``ValueError`` for other dtypes, shapes that do not fit, an odd ``D``.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from piecewise_backend.passes.ops import checks, reference
from piecewise_backend.passes.ops.define import Runner, define, needs_triton

Pair = tuple[Tensor, Tensor]


def _check(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> None:
    head_dim = checks.row_of(q)
    checks.values(q, head_dim, is_reduced=True)
    if head_dim % 2:
        raise ValueError(f"heads of {head_dim} have no halves to rotate; pass an even head size")
    if q.dim() < 2 or q.shape[:-2] != k.shape[:-2] or k.size(-1) != head_dim or q.dtype != k.dtype:
        raise ValueError(
            f"q is {q.dtype} {tuple(q.shape)} and k is {k.dtype} {tuple(k.shape)}; pass "
            "[.., q heads, D] and [.., k heads, D] of the same tokens and dtype"
        )
    checks.same_device("k", k, q)
    checks.weight("q_weight", q_weight, q, head_dim)
    checks.weight("k_weight", k_weight, q, head_dim)
    expected = (*q.shape[:-2], head_dim // 2)
    for name, given in (("cos", cos), ("sin", sin)):
        if given.shape != expected or given.dtype not in (torch.float32, q.dtype):
            raise ValueError(
                f"{name} is {given.dtype} {tuple(given.shape)}; pass float32 or {q.dtype}, one row "
                f"of D // 2 for each token: {expected}"
            )
        checks.same_device(name, given, q)


def _on_cpu(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> Pair:
    _check(q, k, q_weight, k_weight, cos, sin)
    return reference.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps)


def _on_cuda(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> Pair:
    _check(q, k, q_weight, k_weight, cos, sin)
    return _kernel()(q, k, q_weight, k_weight, cos, sin, eps)


def _fake(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> Pair:
    _check(q, k, q_weight, k_weight, cos, sin)
    return q.new_empty(q.shape), k.new_empty(k.shape)


@functools.cache
def _kernel() -> Callable[..., Pair]:
    """The Triton kernel; the CPU needs no Triton, so it is imported at the first call on CUDA."""
    try:
        from piecewise_backend.passes.ops.kernels.qk_norm_rope import (  # noqa: PLC0415
            qk_norm_rope,
        )
    except ImportError as error:
        raise needs_triton(error) from error
    return qk_norm_rope


def _as_given(run: Runner, *args: object) -> object:
    return run(*args)


define(
    "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, "
    "float eps) -> (Tensor, Tensor)",
    _as_given,
    cpu=_on_cpu,
    cuda=_on_cuda,
    fake=_fake,
)
