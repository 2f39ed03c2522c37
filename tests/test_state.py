"""Replaced state is noticed, however it was replaced, with watched dictionaries and without."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import piecewise_backend as pw
from piecewise_backend import dict_watch
from piecewise_backend.dict_watch import DictWatch, dict_watcher
from piecewise_backend.state import ModelState


class Model(nn.Module):
    """State of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2))
        self.caches = [torch.zeros(2), torch.zeros(2)]
        self.named = {"k": torch.zeros(2)}
        self.plain = torch.zeros(2)


NAMES = {
    0: "L['self']._modules['layer']._parameters['weight']",
    1: "L['self']._buffers['table']",
    2: "L['self'].caches[1]",
    3: "L['self'].named['k']",
    4: "L['self'].plain",
}


def new_parameter(model: Model) -> None:
    model.layer.weight = nn.Parameter(torch.zeros(2, 2))


def direct_parameter(model: Model) -> None:
    model.layer._parameters["weight"] = nn.Parameter(torch.zeros(2, 2))


def new_layer(model: Model) -> None:
    model.layer = nn.Linear(2, 2)


def new_buffer(model: Model) -> None:
    model.table = torch.zeros(2)


def moved(model: Model) -> None:
    is_double = model.table.dtype is torch.float64
    model.to(
        torch.float32 if is_double else torch.float64
    )  # a parameter stays the object that it is, a buffer does not


def new_element(model: Model) -> None:
    model.caches[1] = torch.ones(2)


def new_list(model: Model) -> None:
    model.caches = [torch.ones(2), torch.ones(2)]


def shorter_list(model: Model) -> None:
    model.caches.pop()
    model.caches = [*model.caches, torch.ones(2)]


def new_item(model: Model) -> None:
    model.named["k"] = torch.ones(2)


def new_plain(model: Model) -> None:
    model.plain = torch.ones(2)


REPLACEMENTS = [
    new_parameter, direct_parameter, new_layer, new_buffer, moved, new_element, new_list,
    shorter_list, new_item, new_plain,
]  # fmt: skip


@pytest.fixture(params=["watched", "looked at"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "watched" and sys.version_info < (3, 12):
        pytest.skip("Python 3.11 does not tell of changed dictionaries")
    if request.param == "looked at":
        monkeypatch.setattr("piecewise_backend.state.dict_watcher", lambda: None)


def state_of(model: Model) -> ModelState:
    return ModelState(NAMES, {"L": {"self": model}}, {})


def now(model: Model) -> list[Any]:
    return [model.layer.weight, model.table, model.caches[1], model.named["k"], model.plain]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_whatever_replaces_a_tensor_is_noticed(replace: Any) -> None:
    model = Model()
    state = state_of(model)
    for _ in range(2):
        assert not state.was_replaced()
        replace(model)
        assert state.was_replaced()
        assert state.was_replaced(), "until it is fetched"
        state.fetch()
        assert all(a is b for a, b in zip(state.values.values(), now(model), strict=True))


@pytest.mark.usefixtures("_way")
def test_other_changes_are_not_replacements() -> None:
    model = Model()
    state = state_of(model)
    model.other = torch.ones(2)
    model.caches.append(torch.ones(2))
    model.layer.weight.data.mul_(2)
    model.named["v"] = torch.ones(2)
    model.eval()
    assert not state.was_replaced()


@pytest.mark.usefixtures("_way")
def test_state_that_is_gone() -> None:
    model = Model()
    state = state_of(model)
    del model.named["k"]
    for _ in range(2):
        assert state.was_replaced()
        with pytest.raises(
            pw.ContractError, match=r"named\['k'\] was read by the trace and is gone"
        ):
            state.fetch()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="dictionaries are watched since 3.12")
def test_watches_end() -> None:
    watcher = dict_watcher()
    assert watcher is not None
    before = dict(dict_watch._flags)
    dictionary: dict[str, int] = {}
    first, second = (DictWatch([dictionary], watcher) for _ in range(2))
    dictionary["a"] = 1
    assert first.flag == second.flag == [True]
    first.flag[0] = second.flag[0] = False
    del first
    dictionary["a"] = 2
    assert second.flag == [True]
    del second
    dictionary["a"] = 3
    assert dict_watch._flags == before


@pytest.mark.usefixtures("_way")
def test_state_does_not_keep_the_model_from_going() -> None:
    model = Model()
    model.state = state_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
