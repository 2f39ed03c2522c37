"""`torch.compile(module, backend="piecewise")`: guards until it is sealed, none afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_backend as pw
from piecewise_backend.batch import FallbackReason
from tests.helpers import (
    CAPTURE_SIZES,
    SPLIT_OPS,
    Decoder,
    assigned_state,
    compile,
    mark_dynamic,
    new_data,
    new_parameters,
    rows,
    same,
)
from tests.runtime_helpers import fallbacks, num_replays, of_rows, quiet, toy


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def sealed(model: nn.Module, **options: Any) -> Any:
    """Compiled, warmed up, sealed, and called once, which is the last call with guards."""
    compiled = compile(model, **options)
    pw.warmup(compiled, of_rows())
    compiled(rows(4))
    return compiled


def asks_dynamo(compiled: Any) -> bool:
    """Does a call go through the function that `torch.compile` made?"""
    asked = []
    function = compiled.forward
    while (inner := getattr(function, "_piecewise_guarded", None)) is not None:
        asked.append(inner)
        function = inner
    return not asked


def test_a_sealed_module_is_called_without_guards() -> None:
    model = Decoder()
    compiled = sealed(model)
    assert not asks_dynamo(compiled)
    assert pw.report(compiled).guards_kept == ""
    for n in (1, 2, 7, 16):
        same(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    assert not fallbacks(pw.report(compiled))
    assert num_replays(pw.report(compiled)) == 5
    with quiet():
        for n in (0, 17):
            same(compiled(rows(n)), model(rows(n)), f"{n} tokens")


def test_the_contract_holds_then() -> None:
    compiled = sealed(Decoder())
    for x, message in (
        (rows(4).double(), "expected a torch.float32"),
        (rows(4, 3), r"x.shape\[1\]: expected 4, got 3"),
        (None, "got None"),
    ):
        with pytest.raises(pw.ContractError, match=message):
            compiled(x)


def test_an_unsealed_module_keeps_guards_and_may_be_traced_again() -> None:
    model = Decoder()
    compiled = compile(model)
    pw.warmup(compiled, of_rows(), seal=False)
    same(compiled(rows(3)), model(rows(3)), "before")
    assert asks_dynamo(compiled)
    assert "until sealed" in pw.report(compiled).guards_kept
    same(compiled(rows(3)[None]), model(rows(3)[None]), "another rank")
    assert len(pw.report(compiled).graphs) == 2
    pw.seal(compiled)
    assert pw.report(compiled).guards_kept == "2 traces"
    same(compiled(rows(3)), model(rows(3)), "sealed")


def test_warming_up_again_brings_guards_back_until_it_is_done() -> None:
    model = Decoder()
    compiled = sealed(model)
    pw.warmup(compiled, of_rows(), seal=False)
    assert asks_dynamo(compiled)
    pw.seal(compiled)
    compiled(rows(4))
    assert not asks_dynamo(compiled)
    same(compiled(rows(3)), model(rows(3)), "sealed again")


def test_two_instances_that_share_a_trace() -> None:
    first, second = Decoder(seed=0), Decoder(seed=1)
    compiled = [sealed(first), sealed(second)]
    for n in (5, 3, 8):
        for model, each in zip((first, second), compiled, strict=True):
            same(each(rows(n)), model(rows(n)), f"{n}")
    assert not any(map(asks_dynamo, compiled))


def test_replaced_weights_are_noticed() -> None:
    model = Decoder()
    compiled = sealed(model)
    for layer in model.out:
        layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)
    with quiet():
        same(compiled(rows(4)), model(rows(4)), "replaced")
    pw.rebind(compiled)
    same(compiled(rows(4)), model(rows(4)), "accepted")


@pytest.mark.parametrize("replace", [new_data, new_parameters, assigned_state])
def test_replaced_weights_are_given_up(replace: Any) -> None:
    """With all that was captured for them; the warning has the line of the user's call."""
    model = Decoder()
    compiled = sealed(model)
    old = [weakref.ref(p) for p in model.parameters()]
    replace(model)
    with pytest.warns(RuntimeWarning, match="moved since capture") as warned:
        same(compiled(rows(4)), model(rows(4)), "replaced")
    assert {warning.filename for warning in warned} == {__file__}
    assert fallbacks(pw.report(compiled)) == {FallbackReason.MOVED_INPUT: 1}
    if replace is not new_data:
        gc.collect()
        assert not any(ref() is not None for ref in old)


def test_skip_guards_from_the_first_call_on() -> None:
    model = Decoder()
    compiled = compile(model, skip_guards=True, capture_after=0)
    compiled(mark_dynamic([rows(4)])[0])
    compiled(rows(4))
    assert not asks_dynamo(compiled)
    for n in (3, 4, 8, 2):
        same(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    with pytest.raises(pw.ContractError, match=r"expected a torch.float32"):
        compiled(rows(4).double())


def test_module_compile_in_place() -> None:
    model, expected = Decoder(), Decoder()
    model.compile(
        backend="piecewise",
        fullgraph=True,
        options={
            "compiler": "eager",
            "graph_impl": "emulated",
            "splitting_ops": list(SPLIT_OPS),
            "cudagraph_capture_sizes": list(CAPTURE_SIZES),
        },
    )
    pw.warmup(model, of_rows())
    for n in (4, 3, 8):
        same(model(rows(n)), expected(rows(n)), f"{n} tokens")
    assert pw.report(model).guards_kept == ""
    assert num_replays(pw.report(model)) == 3
    with pytest.raises(pw.ContractError, match=r"expected a torch.float32"):
        model(rows(4).double())
    pw.warmup(model, of_rows(), seal=False)
    same(model(rows(3)), expected(rows(3)), "unsealed")


def test_what_keeps_its_guards_says_why() -> None:
    function = compile(toy)
    pw.warmup(function, of_rows())
    assert "pw.compile" in pw.report(function).guards_kept
    same(function(rows(3)), toy(rows(3)), "a function")

    hooked = Decoder()
    calls = []
    hooked.register_forward_hook(lambda *_: calls.append(1))
    compiled = compile(hooked)
    pw.warmup(compiled, of_rows(), verify=False)  # Dynamo compiles anew for each length of a list
    calls.clear()
    compiled(rows(3))
    assert calls == [1]
    assert pw.report(compiled).guards_kept == "Decoder has forward hooks"

    checked = compile(Decoder(), check_guards=True)
    pw.warmup(checked, of_rows())
    assert pw.report(checked).guards_kept == "check_guards"


def test_a_module_that_assigns_attributes_keeps_its_guards() -> None:
    class Model(Decoder):
        last: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last + 1

    model, expected = Model(), Model()
    compiled = compile(model)
    pw.warmup(compiled, of_rows())
    assert "assigns" in pw.report(compiled).guards_kept
    for n in (4, 3):
        same(compiled(rows(n)), expected(rows(n)), f"{n}")
        same(model.last, expected.last, f"{n}, the attribute")


def test_an_attribute_that_changes_after_sealing() -> None:
    model = Decoder()
    model.factor = 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.inner.factor

    compiled = sealed(Model())
    compiled(rows(3))
    model.factor = 3
    with pytest.raises(pw.ContractError, match="factor was 2 when the model was traced"):
        compiled(rows(3))


@pytest.mark.parametrize("calls", [0, 2])
def test_a_sealed_module_inside_of_a_larger_one(calls: int) -> None:
    model = Decoder()
    inner = compile(model)
    pw.warmup(inner, of_rows())
    for _ in range(calls):
        inner(rows(4))
    outer = torch.compile(lambda x: inner(x) + 1, backend="eager", fullgraph=True)
    for n in (4, 3):
        same(outer(rows(n)), model(rows(n)) + 1, f"{n}")
    same(inner(rows(4)), model(rows(4)), "by itself")


def test_stance_force_eager() -> None:
    model = Decoder()
    compiled = sealed(model)
    before = num_replays(pw.report(compiled))
    with torch.compiler.set_stance("force_eager"):
        same(compiled(rows(4)), model(rows(4)), "eager")
    assert num_replays(pw.report(compiled)) == before


def test_dynamo_reset_brings_guards_back() -> None:
    compiled = sealed(Decoder())
    torch._dynamo.reset()
    assert asks_dynamo(compiled)
    with pytest.raises(pw.ContractError, match="sealed"):
        compiled(rows(4))
    pw.warmup(compiled, of_rows())
    compiled(rows(4))
    assert not asks_dynamo(compiled)


def test_nothing_stays_behind() -> None:
    model = Decoder()
    compiled = sealed(model)
    compiled(rows(4))
    gone = [weakref.ref(model), weakref.ref(compiled)]
    del model, compiled
    gc.collect()
    assert [each() for each in gone] == [None, None]
