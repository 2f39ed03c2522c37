"""Every test on a GPU leaves torch as it should be: outside of any capture."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _random_numbers_go_on() -> Iterator[None]:
    """A generator that takes a capture for unfinished fails whatever test comes next."""
    yield
    if torch.cuda.is_initialized():
        assert torch.rand(8, device="cuda").isfinite().all()
