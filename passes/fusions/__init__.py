"""Fusions: norms, activations and rotations that end in an op of this package instead.

`spellings` how models write the parts · `comparing` a traced spelling against a graph · `parts`
what is read off a graph · `places` parts put together, preconditions · `one_row` the same for
linear layers of one row · `fusing` the change · `fusion` all of it as a function over a graph.
Knows nothing of which of them run: `order` does.
"""

from __future__ import annotations

import functools

import torch

import piecewise_backend.passes.ops  # noqa: F401  # defines them
from piecewise_backend.passes.fusions import one_row
from piecewise_backend.passes.fusions.fusion import Fusion, check_spelling
from piecewise_backend.passes.fusions.places import norm_quant, qk_norm_rope, silu_mul_quant

_ops = torch.ops.piecewise
_norm, _add = (functools.partial(norm_quant, is_add=is_add) for is_add in (False, True))

# A sum of its own is the better place for a norm, so it is looked for first.
FUSIONS: dict[str, Fusion] = {
    "fuse_add_rms_norm_static_quant": Fusion(
        _ops.add_rms_norm_static_quant.default, functools.partial(_add, kind="static")
    ),
    "fuse_add_rms_norm_dynamic_quant": Fusion(
        _ops.add_rms_norm_dynamic_quant.default, functools.partial(_add, kind="dynamic")
    ),
    "fuse_add_rms_norm_group_quant": Fusion(
        _ops.add_rms_norm_group_quant.default, functools.partial(_add, kind="group")
    ),
    "fuse_rms_norm_static_quant": Fusion(
        _ops.rms_norm_static_quant.default, functools.partial(_norm, kind="static")
    ),
    "fuse_rms_norm_dynamic_quant": Fusion(
        _ops.rms_norm_dynamic_quant.default, functools.partial(_norm, kind="dynamic")
    ),
    "fuse_rms_norm_group_quant": Fusion(
        _ops.rms_norm_group_quant.default, functools.partial(_norm, kind="group")
    ),
    "fuse_silu_mul_static_quant": Fusion(
        _ops.silu_mul_static_quant.default, functools.partial(silu_mul_quant, kind="static")
    ),
    "fuse_silu_mul_dynamic_quant": Fusion(
        _ops.silu_mul_dynamic_quant.default, functools.partial(silu_mul_quant, kind="dynamic")
    ),
    "fuse_silu_mul_group_quant": Fusion(
        _ops.silu_mul_group_quant.default, functools.partial(silu_mul_quant, kind="group")
    ),
    "fuse_qk_norm_rope": Fusion(_ops.qk_norm_rope.default, qk_norm_rope),
}

# What takes more together is looked for first.
ONE_ROW: dict[str, Fusion] = {
    "fuse_one_row_gated": Fusion(_ops.one_row_gated.default, one_row.gated),
    "fuse_one_row_add": Fusion(_ops.one_row_linear.default, one_row.sum_with_linear),
    "fuse_one_row_linear": Fusion(_ops.one_row_linear.default, one_row.linear),
}

__all__ = ["FUSIONS", "ONE_ROW", "Fusion", "check_spelling"]
