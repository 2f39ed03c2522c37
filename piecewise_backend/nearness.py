"""Are two results equal but for rounding?

In:  two tensors of one shape and dtype.
Out: yes or no.
Knows nothing of where they come from.

Note [Huge values]
Rounding is relative to what was added up, and nobody knows what that was: a small number may be
the difference of large ones. So the tolerance is relative to the largest value, of a row where
rows are independent. But a mask of -1e9 or an activation a thousand times the others tells
nothing about these, and would hide any error in them. What is over a hundred times the middle
magnitude of its row, zeros left out, is huge, and the others are compared among themselves, less
strictly, as some rounding of the huge ones may have reached them. Magnitudes of one kind never
spread as far (67 standard deviations), so most results have no huge values. A row much larger than
most others counts as little for those.
"""

from __future__ import annotations

import torch

# Relative to the largest magnitude; a layout or scale that is wrong is far above.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
_HALF_TOLERANCE = 0.1
_HUGE = 100.0
_BESIDE_HUGE = 5.0
"""Tolerance beside huge values, in tolerances."""


def is_near(a: torch.Tensor, c: torch.Tensor) -> bool:
    """Equal but for rounding, row by row; what is not finite is equal, as are integers."""
    if not (a.is_floating_point() or a.is_complex()):
        return a.equal(c)
    return bool(near(a, c, by_row=True).item())


def near(a: torch.Tensor, c: torch.Tensor, *, by_row: bool = False) -> torch.Tensor:
    """The same, without waiting for the device.

    Args:
        by_row: relative to the largest values of a row, see Note [Huge values]; not of all.
    """
    if a.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=a.device)
    if a.is_complex():
        a, c = torch.view_as_real(a.resolve_conj()), torch.view_as_real(c.resolve_conj())
    tolerance = _TOLERANCE.get(a.dtype, _HALF_TOLERANCE)
    a, c = a.double(), c.double()
    is_finite = a.isfinite() & c.isfinite()
    are_alike = (is_finite | (a == c) | (a.isnan() & c.isnan())).all()
    a, c = a.where(is_finite, 0.0), c.where(is_finite, 0.0)
    scale = _scale_by_row(c.abs()) if by_row and c.dim() > 0 else c.abs().max().clamp(min=1e-6)
    return are_alike & ((a - c).abs() <= tolerance * scale).all()


def _scale_by_row(magnitudes: torch.Tensor) -> torch.Tensor:
    """What the error of each element is relative to: a tenth of that of all rows, at least."""
    largest = magnitudes.amax(-1, keepdim=True)
    usual = _largest_usual(magnitudes)
    of_all = _largest_usual(usual.flatten()).clamp(min=1e-5)
    strictness = torch.where(largest > usual, _BESIDE_HUGE, 1.0)
    of_usual = strictness * torch.maximum(usual, of_all / 10)
    return torch.where(magnitudes > usual, torch.maximum(largest, of_usual), of_usual)


def _largest_usual(magnitudes: torch.Tensor) -> torch.Tensor:
    """The largest along the last dimension that is not huge."""
    num_zeros = (magnitudes == 0).sum(-1, keepdim=True)
    size = magnitudes.size(-1)
    middle = magnitudes.sort(-1).values.gather(-1, ((num_zeros + size) // 2).clamp(max=size - 1))
    limit = torch.where(middle > 0, _HUGE * middle, torch.inf)  # nothing is in a row of zeros
    return magnitudes.where(magnitudes <= limit, 0.0).amax(-1, keepdim=True)
