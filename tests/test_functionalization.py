"""Ops that write their arguments run on the arguments, not on copies, wherever that is safe.

`post_grad` gives the graph that Inductor generates code from: ops that write stand in it as they
are, and every copy that is made for one is a `clone`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.compile_fx as compile_fx
from torch import Tensor, fx
from torch._inductor.utils import run_and_get_code

import piecewise_backend as pw
from piecewise_backend import _torch
from piecewise_backend.passes import PassList, passes_for
from tests.helpers import compile, rows, same

ops = torch.ops.pwtest
aten = torch.ops.aten


@torch.library.custom_op("pwtest::increment", mutates_args=["x"])
def increment(x: Tensor) -> None:
    """Writes its only argument: x + 1."""
    x.add_(1)


@torch.library.custom_op("pwtest::write_two", mutates_args=["a", "b"])
def write_two(a: Tensor, b: Tensor, factor: float) -> None:
    """Writes two arguments: a * factor and b + factor."""
    a.mul_(factor)
    b.add_(factor)


torch.library.define("pwtest::with_out", "(Tensor x, *, Tensor(a!) out) -> ()")


@torch.library.impl("pwtest::with_out", "CompositeExplicitAutograd")
def _with_out(x: Tensor, *, out: Tensor) -> None:
    out.copy_(x * 3)


@torch.library.register_fake("pwtest::with_out")
def _(x: Tensor, *, out: Tensor) -> None:
    return None


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class _Seen(Exception):
    pass


def post_grad(function: Callable[..., Any], *args: Tensor, ours: bool = True) -> fx.Graph:
    """What Inductor generates code from; no code is generated."""
    graphs: list[fx.Graph] = []
    original = compile_fx.post_grad_passes

    def look(gm: fx.GraphModule, *rest: Any, **kwargs: Any) -> None:
        original(gm, *rest, **kwargs)
        graphs.append(gm.graph)
        raise _Seen

    passes = PassList(passes_for() if ours else (), validate=True)
    last = _torch.GraphPass(lambda graph: passes.run(graph, "a test") and None, passes.key())

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        patches = {"post_grad_custom_post_pass": last, "fx_graph_cache": False}
        return compile_fx.compile_fx(gm, inputs, config_patches=patches)

    torch._dynamo.reset()
    for arg in args:
        torch._dynamo.maybe_mark_dynamic(arg, 0)
    with mock.patch.object(compile_fx, "post_grad_passes", look), contextlib.suppress(Exception):
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    (graph,) = graphs
    return graph


def copies(graph: fx.Graph) -> int:
    """Tensors copied for an op that writes; copying one to itself costs nothing."""
    assert not any("auto_functionalized" in str(node.target) for node in graph.nodes)
    clones = graph.find_nodes(op="call_function", target=aten.clone.default)
    back = graph.find_nodes(op="call_function", target=aten.copy_.default)
    return len(clones) + sum(node.args[0] is not node.args[1] for node in back)


def one_and_a_return(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    return ops.both(x.sin(), out) + out


def two_written(x: Tensor) -> Tensor:
    a, b = x.sin(), x.cos()
    ops.write_two(a, b, 2.0)
    return a + b


def a_slice(x: Tensor) -> Tensor:
    a = x.sin()
    ops.increment(a[:, :2])
    return a * 2


def two_slices_of_one(x: Tensor) -> Tensor:
    a = x.sin()
    ops.write_two(a[:, :2], a[:, 2:], 3.0)
    return a


def a_view(x: Tensor) -> Tensor:
    a = x.sin()
    ops.increment(a.view(-1, 2, 2).transpose(1, 2))
    return a * 2


def an_out_keyword(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    ops.with_out(x.sin(), out=out)
    return out * 2


def out_twice(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    ops.with_out(x.sin(), out=out)
    y = out * 2
    ops.with_out(y, out=out)
    return out + y


def an_input(x: Tensor) -> Tensor:
    ops.increment(x)
    return x * 2


def a_slice_of_an_input(x: Tensor) -> Tensor:
    ops.increment(x[:, :2])
    return x * 2


def parts_of_a_projection(x: Tensor) -> Tensor:
    """Rotary embedding: q and k are written where they lie in qkv."""
    q, k, v = (x @ torch.ones(4, 12)).split(4, -1)
    ops.write_two(q.view(-1, 2, 2), k.view(-1, 2, 2), 2.0)
    return q + k + v


BY_INDUCTOR = [
    one_and_a_return, two_written, a_slice, two_slices_of_one, a_view, an_out_keyword, an_input,
    a_slice_of_an_input, parts_of_a_projection,
]  # fmt: skip


def read_then_written(x: Tensor) -> Tensor:
    a = x.sin()
    y = a * 2
    ops.increment(a)
    return y + a


def written_twice(x: Tensor) -> Tensor:
    a = x.sin()
    ops.increment(a)
    y = a * 2
    ops.increment(a)
    return y + a


def product_read_then_written(x: Tensor) -> Tensor:
    a = x @ x.t()
    y = a.relu()
    ops.increment(a)
    return y - a


def input_read_then_written(x: Tensor) -> Tensor:
    y = x * 2
    ops.increment(x)
    return y + x


def slice_of_an_input_read_then_written(x: Tensor) -> Tensor:
    y = x[:, 1:2].exp()
    ops.increment(x[:, :2])
    return y + x


def two_read_then_written(x: Tensor) -> Tensor:
    a, b = x.sin(), x.cos()
    y, z = a * 2, b / 3
    ops.write_two(a, b, 2.0)
    return (a + y) * (b + z)


BY_US = [
    read_then_written, written_twice, product_read_then_written, input_read_then_written,
    slice_of_an_input_read_then_written, two_read_then_written,
]  # fmt: skip


@pytest.mark.parametrize("function", BY_INDUCTOR)
def test_what_inductor_does_by_itself(function: Any) -> None:
    """It is not rebuilt here; this tells when a version of torch no longer does it."""
    assert copies(post_grad(function, rows(6), ours=False)) == 0
    assert copies(post_grad(function, rows(6))) == 0


@pytest.mark.parametrize("function", BY_US)
def test_what_reading_before_writing_adds(function: Any) -> None:
    assert copies(post_grad(function, rows(6), ours=False)) > 0
    assert copies(post_grad(function, rows(6))) == 0


def both_values_at_once(x: Tensor) -> Tensor:
    a = x.sin()
    old = a.clone()
    ops.increment(a)
    return old * a


def an_input_that_is_not_the_programs_to_write(x: Tensor) -> Tensor:
    mine = x.clone()
    ops.increment(mine)
    return mine * 2


def later_reader_needs_the_new_value_too(x: Tensor) -> Tensor:
    a = x.sin()
    old = a.clone()
    ops.increment(a)
    return (old + a.sum()).cos()


@pytest.mark.parametrize(
    "function",
    [
        both_values_at_once,
        an_input_that_is_not_the_programs_to_write,
        later_reader_needs_the_new_value_too,
    ],
)
def test_a_copy_where_the_old_value_is_needed(function: Any) -> None:
    assert copies(post_grad(function, rows(6))) == 1


def test_what_would_be_larger_than_the_copy_is_not_kept() -> None:
    def model(x: Tensor) -> Tensor:
        a = x.sin()
        y = a.double() * 2
        ops.increment(a)
        return y + a

    def narrow(x: Tensor) -> Tensor:
        a = x.sin()
        y = a.half() * 2
        ops.increment(a)
        return y + a

    assert copies(post_grad(model, rows(6))) == 1
    assert copies(post_grad(narrow, rows(6))) == 0


def test_random_numbers_are_drawn_in_the_order_of_the_program() -> None:
    """A read that draws numbers stays where it is, and so does the copy."""

    def model(x: Tensor) -> Tensor:
        a = x.sin()
        y = torch.ops.aten.bernoulli(a.abs())
        ops.increment(a)
        return y + a

    def drawn(graph: fx.Graph) -> list[int]:
        names = [_torch.target_name(node) for node in graph.nodes]
        return [i for i, name in enumerate(names) if "rand" in name or "bernoulli" in name]

    assert drawn(post_grad(model, rows(6)))


def test_other_nodes_stay_where_they_are() -> None:
    """Without an op that writes nothing moves."""
    plain = post_grad(lambda x: (x.sin() + 1) * x.cos(), rows(6), ours=False)
    ours = post_grad(lambda x: (x.sin() + 1) * x.cos(), rows(6))
    assert [n.target for n in plain.nodes] == [n.target for n in ours.nodes]


def read_between_two_writes(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    ops.with_out(x.sin(), out=out)
    y = out * 3
    ops.with_out(x.cos(), out=out)
    return y + out


def slices_written_one_by_one(x: Tensor) -> Tensor:
    a = x.sin()
    ops.increment(a[:, :2])
    y = a * 2
    ops.increment(a[:, 2:])
    return y + a


def written_from_what_it_held(x: Tensor) -> Tensor:
    """Stock Inductor gets this one wrong on all versions: it reads `out` after the write."""
    return out_twice(x)


ON_VALUES = [
    case for case in (*BY_INDUCTOR, *BY_US) if "input" not in case.__name__
]  # fmt: skip
ON_VALUES += [
    both_values_at_once, later_reader_needs_the_new_value_too, read_between_two_writes,
    slices_written_one_by_one, written_from_what_it_held,
]  # fmt: skip


def every_case(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    before = cache[:, :1] * 2
    ops.increment(cache)
    between = cache[:, 1:2] * 3
    ops.increment(cache[:, :3])
    # Different inputs, so that no two cases share what they write.
    given = [x + 0.25 * index for index in range(len(ON_VALUES))]
    cases = [case(one) for case, one in zip(ON_VALUES, given, strict=True)]
    return (*cases, before + cache, between * cache)


@pytest.mark.usefixtures("inductor_cache")
def test_numbers_and_generated_code() -> None:
    """Through the backend: equal to eager, also what was written, and copies where they must be."""
    given, cache = rows(6), rows(6, seed=2)
    wanted, wanted_cache = given.clone(), cache.clone()
    options = {"compiler": "inductor", "cudagraph_mode": "none", "splitting_ops": []}
    compiled = compile(every_case, **options)
    for tensor in (given, cache):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    result, codes = run_and_get_code(compiled, given, cache)
    same(result, every_case(wanted, wanted_cache), "outputs")
    same((given, cache), (wanted, wanted_cache), "inputs afterwards")
    (record,) = [r for r in pw.report(compiled).graphs[0].passes["piece 0"] if "read" in r.name]
    assert record.matches >= 6
    code = "\n".join(codes)
    assert code.count("torch.ops.pwtest.increment.default(") >= 10
    assert "copy_" not in code, "no input is copied back"


@pytest.mark.usefixtures("inductor_cache")
@pytest.mark.parametrize("switches", [{}, {"eliminate_noops": False, "read_before_write": False}])
def test_reads_keep_what_they_read(switches: Any) -> None:
    """With the passes and without: the order of reads and writes is the program's."""
    compiled = compile(out_twice, compiler="inductor", cudagraph_mode="none", pass_config=switches)
    same(compiled(rows(4)), out_twice(rows(4)), "out_twice")
