"""`pw.compile`: traced once, called without guards, under a contract."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import gc
import math
import pickle
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_backend as pw
from tests.helpers import (
    CAPTURE_SIZES,
    SPLIT_OPS,
    Decoder,
    assigned_state,
    fresh,
    new_data,
    new_parameters,
    out_attn,
    rows,
    same,
)
from tests.runtime_helpers import fallbacks, num_replays, of_rows, quiet, toy

OPTIONS: dict[str, Any] = {
    "compiler": "eager",
    "graph_impl": "emulated",
    "splitting_ops": list(SPLIT_OPS),
    "cudagraph_capture_sizes": list(CAPTURE_SIZES),
}


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def compile(target: Any, **options: Any) -> Any:
    """`pw.compile` without Inductor, graphs emulated."""
    return pw.compile(target, **OPTIONS | options)


def warmed(target: Any, **options: Any) -> Any:
    """Compiled, warmed up, sealed."""
    compiled = compile(target, **options)
    compiled.warmup(of_rows())
    return compiled


@contextlib.contextmanager
def traces(count: int) -> Iterator[None]:
    """Assert: so many graphs are traced inside."""
    before = pw.compilation_counter.num_graphs_seen
    yield
    assert pw.compilation_counter.num_graphs_seen - before == count


# One trace, any number of tokens


@pytest.mark.parametrize("first", [1, 0, 7, 40])
@pytest.mark.parametrize("target", [toy, Decoder()], ids=["function", "module"])
def test_one_trace_serves_every_count_whatever_came_first(target: Any, first: int) -> None:
    compiled = compile(target)
    with quiet(), traces(1):
        for n in (first, 0, 1, 2, 5, 16, 17, 1, 100):
            same(compiled(rows(n)), target(rows(n)), f"{n} tokens")


def test_warmed_up_calls_come_from_graphs() -> None:
    model = Decoder()
    compiled = warmed(model)
    for n in (1, 2, 4, 7, 16):
        same(compiled(rows(n)), model(rows(n)), f"{n} tokens")
    report = compiled.report()
    assert num_replays(report) == 5
    assert not fallbacks(report)
    assert report.is_sealed
    assert report.guards_kept == ""


def test_nothing_of_dynamo_runs_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = warmed(Decoder())

    def refuse(*args: object) -> None:
        raise AssertionError("Dynamo was asked")

    monkeypatch.setattr(compiled, "traced", refuse)
    compiled(rows(5))


# How it is called


class Signature(nn.Module):
    """Positional, default, keyword-only, and whatever else."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *more: Tensor,
        factor: float = 3.0,
        flag: bool = False,
        **named: Tensor,
    ) -> dict[str, Any]:
        x = out_attn(x * self.scale, x, x) * factor
        if bias is not None:
            x = x + bias
        for y in (*more, *named.values()):
            x = x - y
        return {"x": x, "flag": flag, "count": x.shape[0], "pair": (x, None)}


@pytest.mark.parametrize(
    "arguments",
    [
        lambda n: ((rows(n),), {}),
        lambda n: ((), {"x": rows(n)}),
        lambda n: ((rows(n), rows(n, seed=1)), {"flag": True}),
        lambda n: ((rows(n),), {"bias": rows(n, seed=1), "factor": 0.5}),
        lambda n: ((rows(n), None, rows(n, seed=2), rows(n, seed=3)), {}),
        lambda n: ((rows(n),), {"other": rows(n, seed=2), "factor": 1.0}),
    ],
    ids=["plain", "keyword", "positional", "keywords", "star", "double_star"],
)
def test_arguments_of_every_kind(arguments: Any) -> None:
    model = Signature()
    compiled = compile(model)
    for n in (4, 3, 1, 8, 5, 4, 3):
        (args, kwargs), (same_args, same_kwargs) = arguments(n), arguments(n)
        same(compiled(*args, **kwargs), model(*same_args, **same_kwargs), f"{n}")


def test_positional_and_by_keyword_is_one_trace() -> None:
    model = Signature()
    compiled = compile(model)
    with traces(1):
        same(compiled(rows(4), rows(4)), model(rows(4), rows(4)), "positional")
        same(compiled(bias=rows(3), x=rows(3)), model(rows(3), rows(3)), "by keyword")


def test_names_that_generated_code_uses_itself() -> None:
    def model(args_: Tensor, n0: Tensor, state_: Tensor, c1_: float = 2.0) -> Tensor:
        return out_attn(args_, n0, state_) * c1_

    compiled = compile(model)
    for n in (4, 3):
        given = [rows(n, seed=seed) for seed in range(3)]
        same(compiled(*given), model(*given), f"{n}")


@dataclasses.dataclass
class Batch:
    ids: Tensor
    scale: float
    extra: list[Tensor]


def test_tensors_in_containers_and_objects() -> None:
    def model(batch: Batch, table: dict[str, Tensor]) -> Tensor:
        x = out_attn(batch.ids * batch.scale, table["k"], batch.extra[0])
        return x + batch.extra[1]

    def inputs(n: int, scale: float = 2.0) -> tuple[Batch, dict[str, Tensor]]:
        extra = [rows(n, seed=1), rows(n, seed=2)]
        return Batch(rows(n), scale, extra), {"k": rows(n, seed=3)}

    compiled = compile(model)
    for n in (4, 3, 8, 1, 3):
        same(compiled(*inputs(n)), model(*inputs(n)), f"{n}")
    with pytest.raises(pw.ContractError, match=r"batch\.scale: expected 2\.0"):
        compiled(*inputs(4, scale=2.5))
    batch, table = inputs(4)
    with pytest.raises(pw.ContractError, match=r"batch\.extra: expected a list of length 2"):
        compiled(dataclasses.replace(batch, extra=batch.extra * 2), table)
    with pytest.raises(pw.ContractError, match=r"table: expected a dict with the keys \['k'\]"):
        compiled(batch, {"q": rows(4)})


def test_decorated_function_and_class() -> None:
    @pw.compile(**OPTIONS)
    def function(x: Tensor) -> Tensor:
        return toy(x)

    @pw.compile(**OPTIONS)
    class Model(Decoder):
        """A model."""

    first, second = Model(seed=0), Model(seed=1)
    for n in (4, 3, 1, 9):
        same(function(rows(n)), toy(rows(n)), "function")
        same(first(rows(n)), first.forward(rows(n)), "first")
        same(second(rows(n)), second.forward(rows(n)), "second")
    assert Model.__name__ == "Model"
    assert isinstance(first, Decoder)
    pw.warmup(first, of_rows())
    assert pw.report(first).is_sealed
    assert not pw.report(second).is_sealed


def test_a_compiled_class_inside_of_a_larger_model() -> None:
    @pw.compile(**OPTIONS)
    class Inner(Decoder):
        pass

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * 2) + 1

    model = Outer()
    compiled = compile(model)
    with traces(1):
        for n in (4, 3):
            same(compiled(rows(n)), model.inner.forward(rows(n) * 2) + 1, f"{n}")


def test_dimensions_by_name() -> None:
    def model(x: Tensor, table: Tensor) -> Tensor:
        return out_attn(x, x, x).T @ x + table[0]

    compiled = compile(model, dynamic_dims={"x": 0})
    table = rows(6)
    with quiet():  # it sums over tokens
        for n in (4, 3, 8, 1):
            same(compiled(rows(n), table), model(rows(n), table), f"{n}")
    with pytest.raises(pw.ContractError, match=r"table\.shape\[0\]: expected 6, got 5"):
        compiled(rows(4), rows(5))


def test_annotations_name_the_dimensions() -> None:
    def model(x: Tensor, table) -> Tensor:  # type: ignore[no-untyped-def]
        return out_attn(x, x, x) + table.sum(0)

    compiled = compile(model)
    for n in (4, 3):
        same(compiled(rows(n), rows(6)), model(rows(n), rows(6)), f"{n}")
    with pytest.raises(pw.ContractError, match=r"dynamic_dims=\{'table': 0\}"):
        compiled(rows(4), rows(5))


# The contract


def branching(x: Tensor, y: Tensor | None = None, n: int = 2, name: str = "a") -> Tensor:
    x = out_attn(x, x, x) * n
    return x if y is None else x + y


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: ((x.double(), y), {}), r"x: expected a torch.float32 tensor .*float64"),
        (lambda x, y: ((x, None), {}), r"y: expected a torch.float32 tensor .* got None"),
        (lambda x, y: ((x[:, :3], y), {}), r"x.shape\[1\]: expected 4, got 3"),
        (lambda x, y: ((x[:, 0], y), {}), r"x: expected .* rank 2 .* shape \(4,\)"),
        (lambda x, y: ((x, y[:3]), {}), r"[xy].shape\[0\]: expected [xy].shape\[0\], got [34]"),
        (lambda x, y: ((x, y, 3), {}), r"n: expected 2, which is part of the compiled code, got 3"),
        (lambda x, y: ((x, y, 2.0), {}), r"n: expected 2, .* got 2.0"),
        (lambda x, y: ((x, y), {"name": "b"}), r"name: expected 'a', .* got 'b'"),
        (lambda x, y: ((x, y, 2, None), {}), r"name: expected 'a', .* got None"),
        (lambda x, y: ((torch.empty(4, 4, device="meta"), y), {}), r"x: expected .* got .* meta"),
        (lambda x, y: ((x, "y"), {}), r"y: expected .* got 'y'"),
    ],
)
def test_a_call_that_breaks_the_contract(change: Any, message: str) -> None:
    compiled = compile(branching)
    x, y = rows(4), rows(4, seed=1)
    for _ in range(3):
        same(compiled(x, y), branching(x, y), "before")
    args, kwargs = change(x, y)
    with pytest.raises(pw.ContractError, match=message):
        compiled(*args, **kwargs)
    same(compiled(x, y), branching(x, y), "after")


def test_none_that_becomes_a_tensor() -> None:
    compiled = compile(branching)
    compiled(rows(4))
    with pytest.raises(pw.ContractError, match=r"y: expected None, got a torch.float32 tensor"):
        compiled(rows(4), rows(4))


def test_wrong_number_of_arguments_is_a_type_error_as_in_eager() -> None:
    compiled = compile(branching)
    compiled(rows(4))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        compiled()
    with pytest.raises(TypeError, match="unexpected keyword"):
        compiled(rows(4), z=1)


def test_one_tensor_for_two_parameters() -> None:
    """Dynamo makes one input of the two: another call must do so again."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        return out_attn(x, y, y) + y

    compiled = compile(model)
    x = rows(4)
    same(compiled(x, x), model(x, x), "one")
    with pytest.raises(pw.ContractError, match="y: expected the very tensor"):
        compiled(x, rows(4, seed=1))
    apart = compile(model)
    same(apart(x, rows(4)), model(x, x), "two")
    same(apart(x, x), model(x, x), "one after two")


def test_a_branch_on_the_token_count_is_remembered() -> None:
    def model(x: Tensor) -> Tensor:
        if x.size(0) > 10:
            return out_attn(x, x, x)
        return out_attn(x, x, x) + 1

    compiled = compile(model)
    same(compiled(rows(4)), model(rows(4)), "4")
    same(compiled(rows(10)), model(rows(10)), "10")
    with pytest.raises(pw.ContractError, match=r"x\.size\(0\) > 10|if x.size\(0\) > 10"):
        compiled(rows(11))


@pytest.mark.parametrize("is_warm", [False, True])
def test_inputs_with_gaps_and_other_strides(is_warm: bool) -> None:
    compiled = warmed(toy) if is_warm else compile(toy)
    compiled(rows(4))
    for x in (rows(8)[::2], rows(4, 8)[:, ::2], rows(4).T.contiguous().T, rows(1).expand(5, 4)):
        same(compiled(x), toy(x.contiguous()), str(x.stride()))


def test_training_mode() -> None:
    model = Decoder().eval()
    compiled = warmed(model)
    model.train()
    with pytest.raises(pw.ContractError, match=r"self.training: expected False, got True"):
        compiled(rows(4))
    model.eval()
    same(compiled(rows(4)), model(rows(4)), "back")


def test_gradients() -> None:
    model = Decoder()
    compiled = warmed(model)
    x = rows(4).requires_grad_()
    with torch.enable_grad(), pytest.raises(pw.ContractError, match="gradients"):
        compiled(x)
    compiled(x)


def test_tensors_made_in_inference_mode_and_not_in_turn() -> None:
    compiled = warmed(toy)
    for call in range(3):
        with torch.inference_mode():
            same(compiled(rows(5, seed=call)), toy(rows(5, seed=call)), "inference mode")
        same(compiled(rows(5, seed=call)), toy(rows(5, seed=call)), "no_grad")
    assert num_replays(compiled.report()) == 6


def test_one_tensor_given_twice() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return out_attn(x, x, x) + y

    compiled = compile(model)
    compiled.warmup(lambda d: (rows(d.num_tokens), rows(d.num_tokens, seed=1)))
    x = rows(4, seed=2)
    same(compiled(x, x), model(x, x), "twice")
    same(compiled(x, rows(4)), model(x, rows(4)), "two tensors")
    with pytest.raises(pw.ContractError, match=r"y: expected a torch.float32"):
        compiled(x, x.double())


def test_the_frame_of_a_call_does_not_grow_with_the_model() -> None:
    """Python makes room for every local variable, and Dynamo's code has one per parameter."""
    sizes = [warmed(Decoder(num_layers=n)).entry.call.__func__.__code__.co_nlocals for n in (1, 8)]
    assert sizes[0] == sizes[1]


def test_autocast_is_not_what_was_traced() -> None:
    compiled = warmed(Decoder())
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(pw.ContractError, match="autocast"),
    ):
        compiled(rows(4))


def test_checked_guards_name_the_line() -> None:
    class Model(Decoder):
        factor = 2

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor  # the line

    model = Model()
    compiled = compile(model, check_guards=True)
    for n in (4, 3, 1):
        same(compiled(rows(n)), model(rows(n)), "2")
    model.factor = 3
    with pytest.raises(pw.ContractError, match=r"violates a guard .*factor"):
        compiled(rows(4))
    del model.factor
    same(compiled(rows(4)), model(rows(4)), "2 again")


# State


def test_state_written_in_place_is_seen() -> None:
    class Model(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(1)
            return super().forward(x) + self.total

    model, expected = Model(), Model()
    compiled = warmed(model)
    model.total.zero_()
    for n in (4, 3, 8, 2):
        same(compiled(rows(n)), expected(rows(n)), f"{n}")
        same(model.total, expected.total, "the buffer")
    model.out[0].weight.mul_(2)
    expected.out[0].weight.mul_(2)
    same(compiled(rows(4)), expected(rows(4)), "a parameter")


def another_layer(model: nn.Module) -> None:
    model.out[1] = nn.Linear(4, 4).requires_grad_(False)


def direct_write(model: nn.Module) -> None:
    model.out[0]._parameters["bias"] = nn.Parameter(torch.ones(4), requires_grad=False)


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize(
    "replace", [new_data, new_parameters, assigned_state, another_layer, direct_write]
)
def test_replaced_weights_are_noticed_and_accepted(replace: Any, is_sealed: bool) -> None:
    model = Decoder()
    old = [p.detach() for p in model.parameters()]  # alive, so that nothing is freed
    compiled = compile(model)
    compiled.warmup(of_rows(), seal=is_sealed)
    same(compiled(rows(5)), model(rows(5)), "before")
    replace(model)
    with quiet():
        same(compiled(rows(5)), model(rows(5)), "replaced")
    assert sum(compiled.report().graphs[0].fallbacks.values()) == 1
    report = compiled.rebind()
    assert report.is_sealed is is_sealed
    before = num_replays(compiled.report())
    same(compiled(rows(5)), model(rows(5)), "accepted")
    assert num_replays(compiled.report()) == before + 1
    assert old


def test_replaced_cache_that_only_a_split_op_sees() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.caches = [torch.ones(4), torch.ones(4)]

        def forward(self, x: Tensor) -> Tensor:
            return fresh(x * 2, x, self.caches[0]) + fresh(x, x, self.caches[1])

    model = Model()
    compiled = warmed(model)
    for caches in ([rows(1)[0], rows(1)[0]], [torch.zeros(4), torch.ones(4)]):
        model.caches = caches
        same(compiled(rows(4)), model(rows(4)), "another list")
        model.caches[1] = torch.full((4,), 7.0)
        same(compiled(rows(4)), model(rows(4)), "another element")


def test_state_that_is_another_tensor_in_every_call() -> None:
    """A step's metadata in an object that the model holds, as engines do it."""

    class Context:
        ids: Tensor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.context = Context()

        def forward(self, x: Tensor) -> Tensor:
            return fresh(x * 2, x, self.context.ids) + self.context.ids

    model = Model()
    compiled = compile(model)
    with quiet():
        for call in range(12):
            n = (4, 3, 8)[call % 3]
            model.context.ids = rows(n, seed=call)
            torch._dynamo.maybe_mark_dynamic(model.context.ids, 0)
            same(compiled(rows(n)), model(rows(n)), f"call {call}")


def test_globals_and_closures_are_state() -> None:
    table = rows(4, seed=5)

    def model(x: Tensor) -> Tensor:
        return out_attn(x, x, x) + table[0] + GLOBAL[0]

    compiled = compile(model)
    same(compiled(rows(4)), model(rows(4)), "before")
    table = rows(4, seed=6)
    with quiet():
        same(compiled(rows(3)), model(rows(3)), "another closure variable")
        GLOBAL[0] = torch.ones(4)
        same(compiled(rows(3)), model(rows(3)), "another element")


GLOBAL = [torch.zeros(4)]


def test_assigned_attributes_are_refused_with_their_code() -> None:
    class Model(Decoder):
        state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.state = x
            return x

    compiled = compile(Model())
    with pytest.raises(pw.ContractError, match=r"assigns .*state.*\n(.*\n)*.*state"):
        compiled(rows(4))


def test_updating_a_dictionary_at_the_trace_is_no_assignment() -> None:
    """The source engine looks for the name `update`."""

    class Model(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            settings = {"factor": 1}
            settings.update(factor=3)
            return super().forward(x) * settings["factor"]

    model = Model()
    compiled = warmed(model)
    same(compiled(rows(4)), model(rows(4)), "updated")


class Counting(Decoder):
    """Keeps count in something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": 0}
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return super().forward(x) * self.counts["calls"]


class Logging(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1)
        return Decoder.forward(self, x) * len(self.log)


@pytest.mark.parametrize("kind", [Counting, Logging])
def test_a_model_that_changes_what_its_trace_depends_on(kind: Any) -> None:
    """A constant of the trace would be stored and used in every call."""
    compiled = compile(kind())
    for _ in range(3):
        with pytest.raises(pw.ContractError, match=r"changes what its own trace.*forward"):
            compiled(rows(4))


def test_a_closure_that_counts() -> None:
    calls = 0

    def model(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return out_attn(x, x, x) * calls

    with pytest.raises(pw.ContractError, match="changes what its own trace depends on"):
        compile(model)(rows(4))


def test_results_may_be_collected_in_a_list_of_the_caller() -> None:
    """A dictionary of the caller that gets tensors of the call is filled anew each time."""

    def model(x: Tensor, found: dict[str, Tensor]) -> Tensor:
        found["hidden"] = out_attn(x, x, x)
        return found["hidden"] + 1

    compiled = compile(model)
    for n in (4, 3):
        found: dict[str, Tensor] = {}
        expected: dict[str, Tensor] = {}
        same(compiled(rows(n), found), model(rows(n), expected), f"{n}")
        same(found, expected, f"{n}, the dictionary")


class Tied(nn.Module):
    """One tensor, one layer, one object under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).requires_grad_(False)
        self.second = nn.Linear(4, 4).requires_grad_(False)
        self.second.weight = self.first.weight
        self.again = self.first
        nothing = torch.zeros(4)
        self.caches = [nothing, nothing]

    def forward(self, x: Tensor) -> Tensor:
        x = fresh(x, x, self.caches[0]) + fresh(x, x, self.caches[1])
        return self.again(self.second(self.first(x)))


def untied(model: Tied) -> None:
    model.second.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)


def real_cache(model: Tied) -> None:
    model.caches[1] = torch.ones(4)


def another_layer_for_one_name(model: Tied) -> None:
    model.again = nn.Linear(4, 4).requires_grad_(False)


@pytest.mark.parametrize("part", [untied, real_cache, another_layer_for_one_name])
def test_what_was_one_object_and_is_two(part: Any) -> None:
    """The trace has it once: it cannot tell the two apart."""
    model = Tied()
    compiled = warmed(model)
    same(compiled(rows(4)), model(rows(4)), "before")
    part(model)
    for _ in range(2):
        with pytest.raises(pw.ContractError, match="were one object when the model was traced"):
            compiled(rows(4))


def test_both_names_may_be_replaced_alike() -> None:
    model = Tied()
    compiled = warmed(model)
    model.caches = [torch.ones(4)] * 2
    with quiet():
        same(compiled(rows(4)), model(rows(4)), "both")


@pytest.mark.parametrize("is_rebound", [False, True])
def test_state_that_changes_its_shape_or_dtype(is_rebound: bool) -> None:
    """What the trace took from them, such as a size to divide by, would not change."""

    class Model(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table.sum(0) / self.table.shape[0]

    model = Model()
    compiled = warmed(model)
    compiled(rows(4))
    for table in (torch.ones(8, 4), torch.ones(4, 4).double()):
        if is_rebound:
            model.table = table
        else:
            model.table.data = table
        with pytest.raises(pw.ContractError, match=r"table.* was a torch.float32 tensor of shape"):
            compiled(rows(4))


def test_hooks_that_come_later() -> None:
    model = Decoder()
    compiled = warmed(model)
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(pw.ContractError, match="no hooks on the compiled module"):
        compiled(rows(4))
    handle.remove()
    compiled(rows(4))


def test_overlapping_arguments_one_of_which_is_written() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return out_attn(x, y, x)

    compiled = compile(model, capture_after=0)
    with quiet():
        for call, n in enumerate((4, 4, 3, 3, 4)):
            given, expected = rows(n + 1, seed=call), rows(n + 1, seed=call)
            if call == 0:
                same(compiled(rows(4), rows(4)), model(rows(4), rows(4)), "apart")
            same(compiled(given[:n], given[1:]), model(expected[:n], expected[1:]), f"{call}")
            same(given, expected, f"{call}, the memory")


def test_a_shallow_copy_of_an_instance_of_a_compiled_class() -> None:
    @pw.compile(**OPTIONS)
    class Model(Decoder):
        pass

    model = Model()
    same(model(rows(4)), model.forward(rows(4)), "original")
    twin = copy.copy(model)
    twin._modules = dict(model._modules, out=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
    twin.requires_grad_(False)
    same(twin(rows(4)), twin.forward(rows(4)), "copy")
    same(model(rows(4)), model.forward(rows(4)), "original again")


def test_a_plain_attribute_that_changes() -> None:
    """Of the model, a layer, a global or a closure: it is part of the compiled code."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.least, self.pad = 2.0, 0.0, float("nan")
            self.drop = nn.Dropout(0.5)
            self.drop.eval()
            self.settings = {"bias": 1}

        def forward(self, x: Tensor) -> Tensor:
            x = self.drop(out_attn(x, x, x)) * self.factor + self.settings["bias"]
            x = x * (2 if self.pad != self.pad else 3) * math.copysign(1, self.least)
            return x * SCALE["value"]

    model = Model()
    compiled = warmed(model)
    model.factor = 2.0 + 0.0
    same(compiled(rows(4)), model(rows(4)), "the same value")

    def broken(message: str) -> None:
        for _ in range(2):
            with pytest.raises(pw.ContractError, match=message):
                compiled(rows(4))

    model.factor = 3.0
    broken(r"factor.* was 2\.0 when the model was traced")
    model.factor, model.least = 2.0, -0.0
    broken(r"least.* was 0\.0 .* now -0\.0")
    model.least, model.pad = 0.0, 1.0
    broken("pad.* was nan ")
    model.pad = -float("nan")
    same(compiled(rows(4)), model(rows(4)), "another nan")
    model.drop.train()
    broken("training.* was False")
    model.drop.eval()
    model.settings["bias"] = 2
    broken(r"\['bias'\] was 1")
    model.settings["bias"] = 1
    SCALE["value"] = 5
    try:
        broken(r"SCALE.* was 1 ")
    finally:
        SCALE["value"] = 1
    same(compiled(rows(4)), model(rows(4)), "all as it was")


SCALE = {"value": 1}


class Options:
    """An object that is no dataclass."""

    def __init__(self, mask: Tensor | None = None, scale: float = 2.0) -> None:
        self.mask = mask
        self.scale = scale
        self.step = 0  # which the model does not look at


def test_values_inside_of_an_object() -> None:
    def model(x: Tensor, options: Options) -> Tensor:
        x = out_attn(x, x, x) * options.scale
        return x if options.mask is None else x * options.mask

    compiled = compile(model)
    for n in (4, 3):
        options = Options()
        options.step = n
        same(compiled(rows(n), options), model(rows(n), options), f"{n}")
    with pytest.raises(pw.ContractError, match=r"options.scale: expected 2\.0.* got 3\.0"):
        compiled(rows(4), Options(scale=3.0))
    with pytest.raises(pw.ContractError, match=r"options.mask: expected None, got a torch"):
        compiled(rows(4), Options(mask=rows(4)))


def test_order_of_keywords() -> None:
    def model(x: Tensor, **named: Tensor) -> Tensor:
        a, b = named.values()
        return out_attn(x, a, a) / b

    compiled = compile(model)
    a, b = rows(4, seed=1), rows(4, seed=2)
    same(compiled(rows(4), a=a, b=b), model(rows(4), a=a, b=b), "as traced")
    with pytest.raises(
        pw.ContractError, match=r"named: expected a dict with the keys \['a', 'b'\]"
    ):
        compiled(rows(4), b=b, a=a)


def test_zero_has_a_sign() -> None:
    def model(x: Tensor, value: float) -> Tensor:
        return out_attn(x, x, x) + torch.full_like(x, value).reciprocal()

    compiled = compile(model)
    compiled(rows(4), 0.0)
    with pytest.raises(pw.ContractError, match=r"value: expected 0\.0.* got -0\.0"):
        compiled(rows(4), -0.0)


def test_keys_that_are_no_strings() -> None:
    with pytest.raises(pw.ContractError, match=r"d has the key <class 'int'>"):
        compile(lambda x, d: out_attn(x, x, x) * d[int])(rows(4), {int: rows(4)})


def test_a_dataclass_that_holds_itself() -> None:
    @dataclasses.dataclass
    class Node:
        x: Tensor
        next: Any = None
        later: Tensor = dataclasses.field(init=False)

    def model(node: Node) -> Tensor:
        return out_attn(node.x, node.x, node.x)

    compiled = compile(model)
    for n in (4, 3):
        node = Node(rows(n))
        node.next = node
        same(compiled(node), model(node), f"{n}")


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 2

    return wrapper


@pytest.mark.parametrize("decorate", [torch.no_grad(), decorated])
def test_a_decorated_forward(decorate: Any) -> None:
    class Model(Decoder):
        @decorate
        def forward(self, x: Tensor, *, bias: float = 1.0) -> Tensor:
            return super().forward(x) + bias

    model = Model()
    for compiled in (compile(model), compile(model, dynamic_dims={"x": 0})):
        for n in (4, 3, 1):
            same(compiled(rows(n)), model(rows(n)), f"{n}")
        with pytest.raises(pw.ContractError, match=r"bias: expected 1\.0"):
            compiled(rows(4), bias=2.0)


@pytest.mark.parametrize("decorate", [torch.no_grad(), decorated])
def test_a_decorated_function(decorate: Any) -> None:
    function = decorate(toy)
    compiled = compile(function)
    for n in (4, 3, 1):
        same(compiled(rows(n)), function(rows(n)), f"{n}")


def test_nothing_but_star_arguments() -> None:
    class Model(Decoder):
        def forward(self, *args: Tensor) -> Tensor:
            return super().forward(args[0])

    model = Model()
    compiled = compile(model)
    for n in (4, 3):
        same(compiled(rows(n)), model(rows(n)), f"{n}")


def test_compiled_in_compiled() -> None:
    model = Decoder()
    inner = warmed(model)
    for outer in (pw.compile, torch.compile):
        options = OPTIONS if outer is pw.compile else {"backend": "eager", "fullgraph": True}
        compiled = outer(lambda x: inner(x) + 1, **options)
        for n in (4, 3):
            same(compiled(rows(n)), model(rows(n)) + 1, f"{n}")
    assert compile(inner).original is model


def test_attributes_are_set_on_the_original() -> None:
    model = Decoder()
    compiled = compile(model)
    compiled.factor = 3
    compiled.out = model.qkv
    assert model.factor == 3
    assert model.out is model.qkv


def test_rebinding_while_another_thread_serves() -> None:
    model = Decoder()
    compiled = warmed(model)
    is_done = threading.Event()
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            with torch.no_grad(), quiet():
                while not is_done.is_set():
                    compiled(rows(3))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    with quiet():
        thread.start()
        for _ in range(4):
            for layer in model.out:
                layer.weight = nn.Parameter(-layer.weight, requires_grad=False)
            compiled.rebind()
    is_done.set()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert not errors
    same(compiled(rows(3)), model(rows(3)), "afterwards")


def test_a_stance_that_does_not_compile_now() -> None:
    model = Decoder()
    compiled = compile(model)
    with torch.compiler.set_stance("eager_on_recompile"):
        same(compiled(rows(4)), model(rows(4)), "eager")
    with traces(1):
        same(compiled(rows(4)), model(rows(4)), "compiled")


def test_classes_that_cannot_be_compiled() -> None:
    class NotCallable:
        pass

    with pytest.raises(pw.ConfigError, match="cannot be called"):
        pw.compile(NotCallable)

    @pw.compile(**OPTIONS)
    class Slots:
        __slots__ = ("factor",)

        def __call__(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(pw.ConfigError, match="has __slots__"):
        Slots()(rows(4))


def test_random_numbers_of_python() -> None:
    def model(x: Tensor) -> Tensor:
        return out_attn(x, x, x) * random.randint(1, 100)

    with pytest.raises(pw.ContractError, match="random number of Python's"):
        compile(model)(rows(4))


def test_attributes_of_other_objects_may_be_assigned() -> None:
    class Context:
        last: Tensor | None = None

    def model(x: Tensor, context: Context) -> Tensor:
        context.last = out_attn(x, x, x)
        return context.last * 2

    compiled = compile(model)
    for n in (4, 3, 4):
        context, expected = Context(), Context()
        same(compiled(rows(n), context), model(rows(n), expected), f"{n}")
        same(context.last, expected.last, f"{n}, the attribute")


# Instances, threads, copies


def test_many_instances_of_one_class_have_a_function_each() -> None:
    models = [Decoder(seed=seed) for seed in range(12)]
    compiled = [compile(model) for model in models]
    forward = Decoder.forward
    for n in (4, 3, 1, 4):
        for model, each in zip(models, compiled, strict=True):
            same(each(rows(n)), model(rows(n)), f"{n}")
    assert Decoder.forward is forward
    assert "forward" not in models[0].__dict__


def test_instances_with_other_shapes_are_traced_statically_all_the_same() -> None:
    """Dynamo would make a size dynamic that two instances of a class differ in."""
    for width in (4, 8, 16):
        model = Decoder(width=width)
        compiled = compile(model)
        compiled.warmup(of_rows(width))
        same(compiled(rows(3, width)), model(rows(3, width)), f"width {width}")
        assert not fallbacks(compiled.report())


def test_two_threads_at_the_first_call() -> None:
    model = Decoder()
    compiled = compile(model)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.no_grad(), quiet():
                for call in range(20):
                    x = rows(3 + call % 5, seed=seed)
                    same(compiled(x), model(x), f"{call}")
        except BaseException as error:
            errors.append(error)

    with traces(1):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


def test_a_copy_is_compiled_by_itself() -> None:
    model = Decoder()
    compiled = warmed(model)
    other = copy.deepcopy(compiled)
    new_data(other.original)
    same(other(rows(4)), other.original(rows(4)), "the copy")
    same(compiled(rows(4)), model(rows(4)), "the original")
    assert other.original is not model


def test_pickling_is_refused() -> None:
    with pytest.raises(pw.ContractError, match=r"pickle its \.original"):
        pickle.dumps(warmed(Decoder()))


def test_attributes_are_the_originals() -> None:
    model = Decoder()
    compiled = compile(model)
    assert compiled.out is model.out
    assert set(compiled.state_dict()) == set(model.state_dict())
    with pytest.raises(AttributeError, match="nonsense"):
        _ = compiled.nonsense


def test_deleting_it_gives_everything_back() -> None:
    hooks = len(torch._dynamo.convert_frame._bytecode_hooks)
    model = Decoder()
    compiled = warmed(model)
    compiled(rows(4))
    gone = [weakref.ref(model), weakref.ref(compiled.runtime), weakref.ref(compiled)]
    del model, compiled
    gc.collect()
    assert [each() for each in gone] == [None] * 3
    assert len(torch._dynamo.convert_frame._bytecode_hooks) == hooks


def test_deleting_an_instance_of_a_compiled_class() -> None:
    @pw.compile(**OPTIONS)
    class Model(Decoder):
        pass

    model = Model()
    model(rows(4))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_arguments_are_not_kept_between_calls() -> None:
    compiled = warmed(Decoder())
    x = rows(4)
    compiled(x)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_recursion() -> None:
    """A split op that calls the model that it is part of."""
    compiled: Any = None
    depth = 0

    @torch.library.custom_op("pwtest::recurse", mutates_args=[])
    def recurse(x: Tensor) -> Tensor:
        nonlocal depth
        if depth == 1:
            return x + 1
        depth += 1
        try:
            return compiled(x) + 1
        finally:
            depth -= 1

    @recurse.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def model(x: Tensor) -> Tensor:
        return torch.ops.pwtest.recurse(x * 2) * 3

    compiled = compile(model, splitting_ops=["pwtest::recurse"])
    with quiet():
        depth = 1
        compiled(rows(4))
        for n in (4, 3, 4):
            depth = 0
            same(compiled(rows(n)), ((rows(n) * 4 + 1) * 3 + 1) * 3, f"{n}")


# Dynamo's switches


def test_stance_force_eager() -> None:
    model = Decoder()
    compiled = warmed(model)
    before = num_replays(compiled.report())
    with torch.compiler.set_stance("force_eager"):
        same(compiled(rows(4).double().float()), model(rows(4)), "eager")
    assert num_replays(compiled.report()) == before
    compiled(rows(4))
    assert num_replays(compiled.report()) == before + 1


def test_graphs_serve_while_another_thread_compiles_something_else() -> None:
    compiled = warmed(Decoder())
    before = num_replays(compiled.report())
    is_compiling, may_end = threading.Event(), threading.Event()

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        is_compiling.set()
        assert may_end.wait(60)
        return gm.forward

    other = threading.Thread(target=torch.compile(torch.sin, backend=backend), args=(rows(2),))
    other.start()
    assert is_compiling.wait(60)
    compiled(rows(4))
    may_end.set()
    other.join()
    assert num_replays(compiled.report()) == before + 1


def test_an_export_looks_at_the_original() -> None:
    class Outer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return compiled(x) + 1

    compiled = pw.compile(torch.nn.Tanh(), compiler="eager", graph_impl="emulated")
    compiled(rows(4))
    exported = torch.export.export(Outer(), (rows(4),), strict=False)
    same(exported.module()(rows(4)), rows(4).tanh() + 1, "exported")
    assert "aten.tanh" in exported.graph_module.code


def test_dynamo_reset() -> None:
    model = Decoder()
    compiled = compile(model)
    compiled(rows(4))
    runtime = weakref.ref(compiled.runtime)
    torch._dynamo.reset()
    gc.collect()
    assert runtime() is None
    with traces(1):
        same(compiled(rows(4)), model(rows(4)), "traced again")
        same(compiled(rows(3)), model(rows(3)), "3")


def test_a_sealed_model_after_dynamo_reset() -> None:
    compiled = warmed(Decoder())
    torch._dynamo.reset()
    with pytest.raises(pw.ContractError, match="sealed"):
        compiled(rows(4))
    compiled.warmup(of_rows())
    compiled(rows(4))


def test_the_collector_is_paused_for_the_first_call_and_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    was_enabled: list[bool] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    def backend(*args: Any, **kwargs: Any) -> Any:
        was_enabled.append(gc.isenabled())
        return original(*args, **kwargs)

    original = pw.backend.make_runtime
    monkeypatch.setattr(pw.backend, "make_runtime", backend)
    fast = pw.compile(Watched(), compiler="eager")
    fast(torch.ones(3, 2))
    fast(torch.ones(4, 2))
    assert was_enabled == [False]
    assert gc.isenabled()

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("of something")

    monkeypatch.setattr(pw.backend, "make_runtime", broken)
    with pytest.raises(Exception, match="of something"):
        pw.compile(Watched(), compiler="eager")(torch.ones(3, 2))
    assert gc.isenabled()


def test_a_graph_break_is_an_error_with_its_place() -> None:
    def model(x: Tensor) -> Tensor:
        x = out_attn(x, x, x)
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(pw.ContractError, match=r"(?s)one graph.*test_guard_free.py"):
        compile(model)(rows(4))


def test_a_dimension_that_the_model_makes_static() -> None:
    def model(x: Tensor) -> Tensor:
        return out_attn(x, x, x) + torch.ones(4, 4)

    with pytest.raises(pw.ContractError, match="one graph"):
        compile(model, dynamic_dims={"x": 0})(rows(4))
    compiled = compile(model)
    compiled(rows(4))
    with pytest.raises(pw.ContractError, match=r"x\.shape\[0\]: expected 4, got 3"):
        compiled(rows(3))


def test_forward_hooks_of_the_outermost_module() -> None:
    model = Decoder()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(pw.ContractError, match="Decoder has forward hooks"):
        compile(model)(rows(4))

    @pw.compile(**OPTIONS)
    class Model(Decoder):
        pass

    instance = Model()
    instance.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(pw.ContractError, match="Model has forward pre hooks"):
        instance(rows(4))


def test_a_function_without_tensors() -> None:
    with pytest.raises(pw.ContractError, match="computes nothing"):
        compile(lambda x: 3)(rows(4))


# Levels


@pytest.mark.parametrize(
    ("level", "graphs", "replays"), [(0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 1, 3)]
)
def test_levels(level: int, graphs: int, replays: int) -> None:
    model = Decoder()
    compiled = compile(model, level=level, capture_after=0)
    with traces(graphs):
        for _ in range(4):
            same(compiled(rows(4)), model(rows(4)), f"level {level}")
    assert num_replays(compiled.report()) == replays


def test_mode_strings_are_heard() -> None:
    compiled = compile(toy, mode="max-autotune-no-cudagraphs")
    compiled(rows(4))
    config = compiled.runtime.config
    assert config.cudagraph_mode is pw.CUDAGraphMode.NONE
    assert dict(config.inductor_compile_config)["max_autotune"] is True
    with pytest.raises(pw.ConfigError, match="mode='fast'"):
        compile(toy, mode="fast")


def test_a_module_of_torchs_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False)
    compiled = compile(model)
    for n in (4, 3, 1):
        same(compiled(rows(n)), model(rows(n)), f"{n}")


# Bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": toy, "dynamic_dims": {"y": 0}}, pw.ConfigError, "no parameter.*x"),
        ({"target": toy, "dynamic_dims": {"x": "0"}}, pw.ConfigError, r"dynamic_dims\['x'\]"),
        ({"target": toy, "levle": 3}, pw.ConfigError, "did you mean 'level'"),
        ({"target": toy, "level": 4}, pw.ConfigError, "level=4"),
        ({"target": toy, "level": True}, pw.ConfigError, "level=True"),
        ({"target": torch.sin}, pw.ConfigError, "no module, function or method"),
        ({"target": 3}, pw.ConfigError, "int is no module"),
        ({"target": torch.compile(Decoder())}, pw.ConfigError, "pass the module that it was given"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    target = arguments.pop("target")
    with pytest.raises(error, match=message):
        pw.compile(target, **arguments)


def test_a_dimension_that_does_not_exist() -> None:
    with pytest.raises(pw.ContractError, match=r"dimension 2 of x, which has shape \(4, 4\)"):
        compile(toy, dynamic_dims={"x": 2})(rows(4))


# What Dynamo made of it


def test_transformed_code_is_dumped(tmp_path: Path) -> None:
    compiled = compile(Decoder(), dump_dir=tmp_path)
    compiled(rows(4))
    text = (tmp_path / "graph_0" / "transformed_code.py").read_text()
    assert "in place of Decoder.forward" in text
    assert "__compiled_fn" in text
    ast.parse(text)
