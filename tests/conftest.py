"""Every test starts with nothing traced, and leaves no registration behind."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch._inductor.utils import fresh_cache

from piecewise_backend import registry
from piecewise_backend.passes import order


def pytest_sessionstart() -> None:
    """One line in place of a hundred failures: the backend's name is an entry point."""
    if "piecewise" not in torch._dynamo.list_backends(exclude_tags=()):
        pytest.exit("this package is not installed here: pip install -e .", returncode=4)


@pytest.fixture(autouse=True)
def _nothing_carried_over() -> Iterator[None]:
    """No code of an earlier test, and the splitting ops and passes that were registered before."""
    torch._dynamo.reset()
    # Every capture collects garbage. What lives by now is none, and looking through it each time
    # takes longer than the tests: torch makes a million objects, and each test leaves some more.
    gc.collect()
    gc.freeze()
    registered = dict(registry._registered)
    passes = list(order._ordered)
    try:
        yield
    finally:
        registry._registered.clear()
        registry._registered.update(registered)
        order._ordered[:] = passes


@pytest.fixture
def inductor_cache() -> Iterator[None]:
    """For tests that compile with Inductor: no kernel of an earlier run."""
    with fresh_cache():
        yield
