"""What passes for rounding, and what does not: no false alarm, nothing hidden by a huge value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from piecewise_backend.nearness import is_near

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def masked(x: Tensor) -> Tensor:
    x[:, ::3] = -3e4
    return x


def with_outlier(x: Tensor) -> Tensor:
    x[:, -1] *= 2e4
    return x


def with_huge_row(x: Tensor) -> Tensor:
    x[3] *= 1e4
    return x


HUGE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "mask": masked,
    "outlier": with_outlier,
    "row": with_huge_row,
    "scalars that tell how many": lambda x: torch.cat([x, x.new_full((len(x), 1), 6e4)], 1),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", HUGE)
def test_one_wrong_value(kind: str, dtype: torch.dtype) -> None:
    right = HUGE[kind](numbers(8, 256)).to(dtype)
    assert is_near(right, right)
    for row, column in ((0, 1), (7, 100), (2, 4)):
        wrong = right.clone()
        wrong[row, column] += 50 if kind != "none" else 4
        assert not is_near(wrong, right), f"{row}, {column}"
        assert not is_near(right, wrong), f"{row}, {column}"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", HUGE)
def test_another_row(kind: str, dtype: torch.dtype) -> None:
    right = HUGE[kind](numbers(8, 256)).to(dtype)
    wrong = right.clone()
    wrong[1] = right[0]
    assert not is_near(wrong, right)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 64, 300])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rounding_is_near(dtype: torch.dtype, width: int) -> None:
    """A few layers of products, added up in another order, in the precision of the dtype."""
    for seed in range(10):
        x, weights = numbers(8, width, seed=seed), numbers(4, width, width, seed=1000 + seed)
        results = []
        for order in (torch.arange(width), torch.arange(width).flip(0)):
            y = x.to(dtype)
            for weight in weights / width**0.5:
                parts = [y[:, i, None] * weight.to(dtype)[None, i] for i in order.split(8)]
                y = sum((part.sum(1).to(dtype) for part in parts), torch.zeros_like(y)) + y
            results.append(y)
        assert is_near(*results), f"{seed}"


def softmax(x: Tensor) -> Tensor:
    return (x * 4).softmax(-1)


def exponential(x: Tensor) -> Tensor:
    return (x * 2).exp()


def one_hot(x: Tensor) -> Tensor:
    return (x == x.amax(-1, keepdim=True)).to(x.dtype)


@pytest.mark.parametrize("width", [2, 8, 256, 2000])
@pytest.mark.parametrize(
    "function",
    [
        softmax, exponential, one_hot, torch.relu, torch.nn.functional.gelu, masked,
        with_huge_row, with_outlier, lambda x: x.pow(3), lambda x: x * 0,
        lambda x: x.log_softmax(-1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", FLOATS)
def test_rounding_of_values_of_many_magnitudes(
    dtype: torch.dtype, function: Callable[[Tensor], Tensor], width: int
) -> None:
    """The inputs differ as rounded ones do; functions may magnify that."""
    eps = torch.finfo(dtype).eps / 2
    for seed in range(6):
        x = numbers(8, width, seed=seed)
        other = x * (1 + eps * numbers(8, width, seed=100 + seed).sign())
        a, b = function(x.clone()), function(other)
        if function is one_hot:
            b = a
        a, b = (y.clamp(-3e4, 3e4).to(dtype) for y in (a, b))
        assert is_near(a, b), f"{seed}"


def test_what_is_not_finite() -> None:
    right = numbers(4, 64).float()
    right[0, 3], right[1, 4], right[2, 5] = float("inf"), float("-inf"), float("nan")
    assert is_near(right.clone(), right)
    for row, column in ((0, 3), (1, 4), (2, 5)):
        wrong = right.clone()
        wrong[row, column] = 1.0
        assert not is_near(wrong, right)
        assert not is_near(right, wrong)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_and_bools_are_equal_or_not(dtype: torch.dtype) -> None:
    right = (numbers(4, 8) > 0).to(dtype)
    wrong = right.clone()
    wrong[2, 3] = 1 - int(right[2, 3])
    assert is_near(right.clone(), right)
    assert not is_near(wrong, right)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 4), (4, 0), (3, 1)])
def test_small_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    right = torch.ones(shape, dtype=dtype)
    assert is_near(right.clone(), right)
    if right.numel():
        assert not is_near(torch.zeros(shape, dtype=dtype), right)


def test_complex_numbers() -> None:
    right = torch.complex(numbers(4, 8), numbers(4, 8, seed=1)).to(torch.complex64)
    assert is_near(right.conj().conj(), right)
    assert not is_near(right.conj(), right)
