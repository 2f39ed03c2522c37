"""Ops that passes put in place of several: one kernel each, nothing written to memory in between.

Importing this package defines them, as ``torch.ops.piecewise.<name>``. All are functional: fresh
outputs, no argument written. On CUDA each is one Triton launch, on a CPU it is ``reference``.

``rms_norm``      RMSNorm and quantisation, with or without a residual add
``silu_mul``      the product of a gated MLP and quantisation
``qk_norm_rope``  norms of query and key heads and their rotary embedding
``one_row``       a linear layer of one token, with a norm in front, an activation or a sum behind
"""

from piecewise_backend.passes.ops import (  # noqa: F401  # each defines its ops
    one_row,
    qk_norm_rope,
    rms_norm,
    silu_mul,
)
