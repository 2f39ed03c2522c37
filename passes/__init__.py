"""Rewriting passes over graphs: what they are, their order, how they run.

`definition` a pass is data · `order` the one ordered list · `running` runs it over a graph ·
`noops`, `fusions` and `functionalization` are passes, `ops` what fusions put in ·
`validation` finds out what a pass broke · `keys` what caches compare, of the `content` of code.
Knows nothing of the pipeline that the graphs come from.
"""

from piecewise_backend.passes.definition import Pass, Rewrite, Transform, as_pass
from piecewise_backend.passes.order import (
    extended,
    one_row_passes,
    passes_for,
    register_pass,
    register_spelling,
    warn_if_fusing_without_noops,
)
from piecewise_backend.passes.running import PassList, PassRecord, Write, merged

__all__ = [
    "Pass",
    "PassList",
    "PassRecord",
    "Rewrite",
    "Transform",
    "Write",
    "as_pass",
    "extended",
    "merged",
    "one_row_passes",
    "passes_for",
    "register_pass",
    "register_spelling",
    "warn_if_fusing_without_noops",
]
