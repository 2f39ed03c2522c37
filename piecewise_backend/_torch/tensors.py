"""Compare tensors with those of a trace in C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch._subclasses.fake_tensor import FakeTensor


def is_plain_fake(tensor: torch.Tensor) -> bool:
    """A fake tensor that its dtype, device, sizes and strides describe."""
    is_plain = type(tensor) is FakeTensor and tensor.layout is torch.strided
    return is_plain and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


class TensorCheck:
    """Are tensors like the ones before: class, dtype, device, sizes, autocast, gradients needed?

    What Dynamo's own guards call: one call, where Python asks each tensor several things. It
    refuses more than has to be (tensors made in inference mode, one tensor given twice), so
    whoever it refuses is to be looked at again. Ends when torch has a public check.
    """

    def __init__(self, sizes: Sequence[Sequence[int | None]]) -> None:
        """For tensors of these sizes, None where any is right."""
        # Lists of lists, whatever torch's annotations say.
        self._sizes: Any = [list(dims) for dims in sizes]
        self._strides: Any = [[None] * len(dims) for dims in sizes]
        self.passes: Callable[..., bool] = _refuses
        """Takes the tensors, or whatever was given in their place."""

    def expect(self, *tensors: torch.Tensor) -> None:
        """From now on, tensors like these pass, in modes of autocast and gradients like now's."""
        sizes, strides = self._sizes, self._strides
        self.passes = TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check


def _refuses(*given: Any) -> bool:
    return False
