"""Passes: the ordered list, cache keys, running, what is caught, and both stages."""

from __future__ import annotations

import collections
import functools
import importlib
import logging
import math
import operator
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import piecewise_backend as pw
from piecewise_backend.config import Config
from piecewise_backend.passes import PassList, as_pass, passes_for
from piecewise_backend.passes.keys import key_of
from tests.helpers import agrees_with_eager, compile, out_attn, rows, same
from tests.runtime_helpers import toy

aten = torch.ops.aten


@torch.library.custom_op("pwtest::gate", mutates_args=[])
def gate(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y in one kernel, as a library would have it."""
    return F.silu(x) * y


@gate.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pwtest::attn_double", mutates_args=["out"])
def attn_double(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """`pwtest::attn` with what comes after it: writes 2 * (q + k + v)."""
    out.copy_(2 * (q + k + v))


@attn_double.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    return None


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def two_tensors() -> tuple[Tensor, Tensor]:
    return torch.empty(3, 4), torch.empty(3, 4)


def gate_rewrite(**fields: Any) -> pw.Rewrite:
    return pw.Rewrite(
        name="fuse_gate",
        pattern=lambda x, y: F.silu(x) * y,
        replacement=lambda x, y: torch.ops.pwtest.gate(x, y),
        example_inputs=two_tensors,
        **fields,
    )


def traced(function: Any, *args: Tensor) -> fx.GraphModule:
    """The graph of aten ops, sizes symbolic, decomposed as Inductor does."""
    table = torch._inductor.decomposition.select_decomp_table()
    return make_fx(function, decomposition_table=table, tracing_mode="symbolic")(*args)


def run(item: Any, gm: fx.GraphModule, *, validate: bool = False, **fields: Any) -> pw.PassRecord:
    (record,) = PassList([as_pass(item, **fields)], validate=validate).run(gm.graph, "piece 7")
    gm.recompile()
    return record


def does_nothing(graph: fx.Graph) -> None:
    """A pass."""


def names(**options: Any) -> list[str]:
    config = Config.from_options(options)
    return [item.name for item in passes_for(config.passes, dict(config.pass_config))]


# --- the ordered list


def test_the_order_of_this_packages_passes() -> None:
    assert names() == ["eliminate_noops", "read_before_write"]


def test_a_pass_goes_before_the_last_unless_it_says_otherwise() -> None:
    pw.register_pass(does_nothing, name="a")
    pw.register_pass(does_nothing, name="b")
    pw.register_pass(does_nothing, name="c", before="a")
    pw.register_pass(does_nothing, name="d", after="a")
    pw.register_pass(does_nothing, name="first", before="eliminate_noops")
    pw.register_pass(does_nothing, name="last", after="read_before_write")
    assert names() == [
        "first", "eliminate_noops", "c", "a", "d", "b", "read_before_write", "last",
    ]  # fmt: skip


def test_functions_objects_rewrites_and_decorators() -> None:
    class Counts:
        def __call__(self, graph: fx.Graph) -> int:
            return len(graph.nodes)

    rewrite, counts = gate_rewrite(), Counts()
    assert pw.register_pass(rewrite) is rewrite
    assert pw.register_pass(counts) is counts

    @pw.register_pass
    def bare(graph: fx.Graph) -> None: ...

    @pw.register_pass(name="called", after="bare")
    def other(graph: fx.Graph) -> None: ...

    assert callable(bare)
    assert names()[1:-1] == ["fuse_gate", "Counts", "bare", "called"]


def test_registering_a_name_again_replaces_the_pass_in_its_place() -> None:
    for name in ("a", "b", "a"):
        pw.register_pass(lambda graph: 0, name=name)
    assert names()[1:-1] == ["a", "b"]
    pw.register_pass(does_nothing, name="a", after="b")
    assert names()[1:-1] == ["b", "a"]


@pytest.mark.parametrize(
    ("item", "fields", "message"),
    [
        (3, {}, "3 is no pass; give a function"),
        (dict, {}, "is no pass"),
        (lambda graph: 0, {}, "a pass is named '<lambda>'; pass name="),
        (does_nothing, {"name": "a b"}, "is named 'a b'"),
        (does_nothing, {"name": "../up"}, "is named"),
        (does_nothing, {"stage": "graf"}, r"stage 'graf'; use one of \('graph', 'piece'\)"),
        (does_nothing, {"min_matches": -1}, "min_matches=-1"),
        (does_nothing, {"min_matches": True}, "min_matches=True"),
        (does_nothing, {"before": "eliminate_noop"}, "did you mean 'eliminate_noops'"),
        (does_nothing, {"after": "zzz"}, r"after= .* names pass 'zzz'.* there are \["),
        (does_nothing, {"before": "eliminate_noops", "after": "eliminate_noops"}, "one of them"),
        (does_nothing, {"name": "eliminate_noops"}, "is one of this package's"),
        (math.sin, {}, r"depends on|pass 'sin'"),
    ],
)
def test_wrong_registrations_are_refused(item: Any, fields: Any, message: str) -> None:
    if item is math.sin:
        item, fields = functools.partial(map, iter(())), {"name": "sin"}
    before = names()
    with pytest.raises(pw.ConfigError, match=message):
        pw.register_pass(item, **fields)
    assert names() == before


def test_a_pattern_and_its_replacement_take_the_same() -> None:
    with pytest.raises(pw.ConfigError, match=r"takes \['x'\] and the replacement \['y'\]"):
        pw.register_pass(pw.Rewrite(name="r", pattern=lambda x: x, replacement=lambda y: y))
    same_name = {"pattern": lambda x: x, "replacement": lambda x: x}
    with pytest.raises(pw.ConfigError, match=r"scalars has \['eps'\]"):
        pw.register_pass(pw.Rewrite(name="r", scalars={"eps": 0.1}, **same_name))


def test_pass_config_switches_by_name() -> None:
    pw.register_pass(does_nothing, name="a")
    pw.register_pass(does_nothing, name="b", enabled=False)
    assert names(pass_config={"a": False, "b": True})[1:-1] == ["b"]
    assert names()[1:-1] == ["a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pass_config": {"eliminate_noop": True}}, "did you mean 'eliminate_noops'"),
        ({"pass_config": {"eliminate_noops": 1}}, "give a mapping such as"),
        ({"pass_config": ["eliminate_noops"]}, "give a mapping such as"),
        ({"passes": does_nothing}, "give a list of passes"),
        ({"passes": [3]}, "3 is no pass"),
        ({"passes": [does_nothing] * 2}, "several passes named 'does_nothing'; give each a name="),
        ({"validate_passes": "yes"}, "validate_passes='yes'"),
        (
            {"inductor_compile_config": {"post_grad_custom_post_pass": does_nothing}},
            "register it with pw.register_pass",
        ),
        (
            {"inductor_compile_config": {"joint_custom_pre_pass": does_nothing}},
            "register it with pw.register_pass",
        ),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(pw.ConfigError, match=message):
        Config.from_options(options)


def test_pass_config_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWISE_PASS_CONFIG", "eliminate_noops=off")
    assert names() == ["read_before_write"]
    monkeypatch.setenv("PIECEWISE_PASS_CONFIG", "eliminate_noops")
    with pytest.raises(pw.ConfigError, match="write name=on or name=off"):
        Config.from_options()


def test_passes_of_one_model_alone() -> None:
    assert names(passes=[does_nothing]) == ["eliminate_noops", "does_nothing", "read_before_write"]
    assert names(passes=[does_nothing], pass_config={"does_nothing": False}) == names()


# --- keys


EPSILON = 1e-6


def key(function: Any, **fields: Any) -> str:
    return key_of(as_pass(function, name="p", **fields))


def closing_over(value: Any) -> Any:
    return lambda graph: value


def test_keys_tell_closures_apart() -> None:
    values: list[Any] = [
        1, 1.0, True, None, "a", b"a", (1, 2), [1, 2], {"a": 1}, {1, 2}, torch.float16,
        torch.ones(2), torch.zeros(2), torch.ones(2).half(), closing_over(3), closing_over(4),
        functools.partial(operator.add, 1), functools.partial(operator.add, 2), aten.add.Tensor,
        aten.add, math.nan,
    ]  # fmt: skip
    keys = [key(closing_over(value)) for value in values]
    assert len(set(keys)) == len(values)
    assert keys == [key(closing_over(value)) for value in values]


def test_two_lambdas_of_one_line_differ() -> None:
    one, two = (lambda graph: 1), (lambda graph: 2)
    assert key(one) != key(two)
    assert key(one) == key(lambda graph: 1)


def test_keys_see_defaults_globals_and_functions_that_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uses(graph: Any) -> float:
        return EPSILON + helper()

    def default(graph: Any, factor: int = 2) -> int:
        return factor

    before = key(uses)
    monkeypatch.setitem(globals(), "EPSILON", 1e-5)
    after = key(uses)
    assert before != after
    monkeypatch.setitem(globals(), "helper", lambda: 1)
    assert key(uses) not in (before, after)
    first = key(default)
    default.__defaults__ = (3,)
    assert key(default) != first


def helper() -> int:
    return 0


class Scales:
    """A pass with a state."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, graph: fx.Graph) -> float:
        return self.factor


class Named(Scales):
    """A pass that says itself what it is."""

    def uuid(self) -> str:
        return "named"


def test_keys_of_objects() -> None:
    assert key(Scales(1.0)) == key(Scales(1.0)) != key(Scales(2.0))
    assert key(Named(1.0)) == key(Named(2.0)) != key(Scales(1.0))


def test_what_has_no_content_needs_an_explicit_key() -> None:
    generator = iter([1])
    with pytest.raises(pw.ConfigError, match=r"'p' depends on <list_iterator .* pass key="):
        key(closing_over(generator))
    assert key(closing_over(generator), key="v1") != key(closing_over(generator), key="v2")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pattern": lambda *a: a[0] + a[1], "replacement": lambda *a: a[0]}, "each parameter a"),
        ({"replacement": lambda x, **k: x}, r"the replacement takes \(x, \*\*k\); give each"),
        ({"pattern": 3}, "pattern=3; give a function"),
        ({"enabled": "yes"}, "enabled='yes'; give True or False"),
        ({"key": 3}, "key=3; give a text"),
    ],
)
def test_fields_of_rewrites_are_checked(fields: dict[str, Any], message: str) -> None:
    functions = {"pattern": lambda x: x.sin(), "replacement": lambda x: x.cos()}
    with pytest.raises(pw.ConfigError, match=message):
        as_pass(pw.Rewrite(**{"name": "r", **functions, **fields}))


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Factor:
    """A pass that depends on a property."""

    @property
    def factor(self) -> int:
        """The number."""
        return 2

    def __call__(self, graph: fx.Graph) -> int:
        """Depends on it."""
        return self.factor


HELD: Any = None


def holds(graph: fx.Graph) -> Any:
    """Depends on a global."""
    return HELD, torch.ops.aten, gate


@pytest.mark.parametrize(
    "make",
    [
        lambda n: {"scale": n, "lock": threading.Lock(), "log": logging.getLogger("a")},
        lambda n: [[n], threading.RLock(), math],
        lambda n: np.array([n, 2.0]),
        lambda n: collections.deque([n]),
        lambda n: re.compile("a" * n),
        lambda n: Slotted(n),
        lambda n: [n].index,
    ],
)
def test_keys_see_inside_of_globals(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for number in (1, 1, 2):
        monkeypatch.setitem(globals(), "HELD", make(number))
        keys.append(key(holds))
    assert keys[0] == keys[1] != keys[2]


def test_a_global_without_content_needs_an_explicit_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "HELD", {"rows": iter([1])})
    with pytest.raises(pw.ConfigError, match=r"'p' depends on <list_iterator .* pass key="):
        key(holds)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
    ids=["sparse", "meta", "conjugate"],
)
def test_tensors_without_bytes_need_an_explicit_key(tensor: Tensor) -> None:
    with pytest.raises(pw.ConfigError, match=r"depends on a tensor, .* pass key="):
        key(closing_over(tensor))


def test_keys_see_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Factor())
    monkeypatch.setattr(Factor, "factor", property(lambda self: 3))
    assert key(Factor()) != before


@pytest.mark.parametrize(
    "name", ["by_path", "imported_inside", "value_imported_inside", "relative_inside"]
)
def test_keys_see_modules_of_the_same_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"keyed_{name}"
    (tmp_path / package / "sub").mkdir(parents=True)
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "sub" / "__init__.py").touch()
    (tmp_path / package / "sub" / "config.py").write_text("SCALE = 2.0")
    (tmp_path / package / "passes.py").write_text(f"""\
import {package}.sub.config
def by_path(graph): return {package}.sub.config.SCALE
def imported_inside(graph):
    from {package}.sub import config as c
    return c.SCALE
def value_imported_inside(graph):
    from {package}.sub.config import SCALE
    return SCALE
def relative_inside(graph):
    def inner():
        from .sub import config
        return config.SCALE
    return inner()
""")
    monkeypatch.syspath_prepend(tmp_path)
    made = getattr(importlib.import_module(f"{package}.passes"), name)
    before = key(made)
    monkeypatch.setattr(importlib.import_module(f"{package}.sub.config"), "SCALE", 3.0)
    assert key(made) != before


def test_the_key_of_a_list_depends_on_order_and_members() -> None:
    a, b = as_pass(does_nothing, name="a"), as_pass(does_nothing, name="b")
    keys = {PassList(members).key() for members in ([], [a], [b], [a, b], [b, a])}
    assert len(keys) == 5


# --- running


def test_a_rewrite_counts_and_says_which_ops_changed() -> None:
    gm = traced(lambda x, y: F.silu(x + 1) * (y * 2), *two_tensors())
    record = run(gate_rewrite(), gm, validate=True)
    assert record.matches == 1
    assert record.op_changes["pwtest.gate.default"] == 1
    assert record.op_changes["aten.exp.default"] == -1
    assert record.milliseconds is not None
    assert str(record).startswith("fuse_gate: 1 matches, ")
    x, y = rows(3), rows(3, seed=1)
    same(gm(x, y), F.silu(x + 1) * (y * 2), "rewritten")


@pytest.mark.parametrize(
    ("function", "matches"),
    [
        (lambda x, y: F.silu(x) * y, 1),
        (lambda x, y: F.silu(F.silu(x) * y) * y, 2),
        (lambda x, y: ((s := F.silu(x)) * y, s), 0),  # the middle is used elsewhere
        (lambda x, y: F.sigmoid(x) * y, 0),
    ],
)
def test_what_a_rewrite_matches(function: Any, matches: int) -> None:
    gm = traced(function, *two_tensors())
    assert run(gate_rewrite(), gm).matches == matches
    x, y = rows(3), rows(3, seed=1)
    same(gm(x, y), function(x, y), "rewritten")


def test_preconditions_see_what_the_parameters_stand_for() -> None:
    seen: list[Any] = []

    def requires(x: Tensor, y: Tensor) -> bool:
        seen.append((x.dtype, y.dtype, x.dim()))
        return x.dtype == y.dtype

    rewrite = gate_rewrite(requires=requires)
    x, y = two_tensors()
    assert run(rewrite, traced(lambda x, y: F.silu(x) * y, x, y.double())).matches == 0
    assert run(rewrite, traced(lambda x, y: F.silu(x) * y, x, y)).matches == 1
    assert seen == [(torch.float32, torch.float64, 2), (torch.float32, torch.float32, 2)]


def test_scalars_match_any_number() -> None:
    rewrite = pw.Rewrite(
        name="scaled",
        pattern=lambda x, eps: torch.rsqrt(x + eps),
        replacement=lambda x, eps: torch.ops.pwtest.scaled(x, eps),
        example_inputs=lambda: (torch.empty(3, 4),),
        scalars={"eps": 0.0123},
        requires=lambda x, eps: x.dtype == torch.float32 and eps < 1e-3,
    )
    gm = traced(
        lambda x: torch.rsqrt(torch.rsqrt(torch.rsqrt(x + 1e-6) + 1e-5) + 1), torch.empty(3, 4)
    )
    assert run(rewrite, gm).matches == 2
    constants = [node.args[1] for node in gm.graph.nodes if "scaled" in str(node.target)]
    assert constants == [1e-6, 1e-5]


def test_a_scalar_may_be_one_in_the_example() -> None:
    rewrite = pw.Rewrite(
        name="scaled",
        pattern=lambda x, factor: torch.rsqrt(x * factor),
        replacement=lambda x, factor: torch.ops.pwtest.scaled(x, factor),
        example_inputs=lambda: (torch.empty(3, 4),),
        scalars={"factor": 1.0},
    )
    gm = traced(lambda x: torch.rsqrt(torch.rsqrt(x * 0.5)), torch.empty(3, 4))
    assert run(rewrite, gm).matches == 1
    constants = [node.args[1] for node in gm.graph.nodes if "scaled" in str(node.target)]
    assert constants == [0.5]


@pytest.mark.usefixtures("inductor_cache")
def test_a_pattern_may_have_what_inductor_leaves_out() -> None:
    """Since torch 2.14 a factor of 1 is gone from the graphs that passes see."""
    rewrite = pw.Rewrite(
        name="fuse_gate",
        pattern=lambda x, y: torch.tanh(x) * (1.0 / y),
        replacement=lambda x, y: torch.ops.pwtest.gate(x, y),
        example_inputs=two_tensors,
        min_matches=1,
    )
    compiled = compile(
        lambda x: torch.tanh(x) * (1.0 / (x + 1)), compiler="inductor", passes=[rewrite]
    )
    compiled(rows(4))
    (record,) = [
        r for r in pw.report(compiled).graphs[0].passes["piece 0"] if r.name == "fuse_gate"
    ]
    assert record.matches == 1


def test_a_function_that_does_not_count_counts_one_if_it_changed_something() -> None:
    def double_inputs(graph: fx.Graph) -> None:
        for node in list(graph.find_nodes(op="call_function", target=aten.sin.default)):
            node.target = aten.cos.default

    gm = traced(lambda x: x.sin(), torch.ones(3))
    assert run(double_inputs, gm).matches == 1
    assert run(double_inputs, gm).matches == 0


def test_dumps_are_numbered_and_say_what_changed() -> None:
    files: dict[str, str] = {}
    passes = PassList([as_pass(does_nothing), gate_rewrite()])
    gm = traced(lambda x, y: F.silu(x) * y, *two_tensors())
    passes.run(gm.graph, "piece 7", files.__setitem__)
    assert list(files) == ["00_before.py", "01_does_nothing.py", "02_fuse_gate.py"]
    assert "the same ops as before" in files["01_does_nothing.py"]
    assert "# piece 7, after fuse_gate: 1 matches" in files["02_fuse_gate.py"]
    assert "\n#   +1 pwtest.gate.default\n" in files["02_fuse_gate.py"]
    assert "aten.exp" in files["00_before.py"]
    for text in files.values():
        exec(text, {})


def test_min_matches() -> None:
    passes = PassList([gate_rewrite(min_matches=2)])
    record = pw.PassRecord("fuse_gate", 1, 0.0)
    passes.require_matches({"piece 0": [record], "piece 1": [record]})
    with pytest.raises(pw.PassError, match=r"'fuse_gate' matched 1 times.*min_matches=2.*'piece 1"):
        passes.require_matches({"piece 1": [record]})


# --- what is caught


def first(graph: fx.Graph, target: Any) -> fx.Node:
    return next(iter(graph.find_nodes(op="call_function", target=target)))


def throws(graph: fx.Graph) -> None:
    raise ZeroDivisionError("oops")


def leaves_a_dead_reference(graph: fx.Graph) -> None:
    sin = first(graph, aten.sin.default)
    users = list(sin.users)
    sin.users.clear()
    graph.erase_node(sin)
    assert users


def makes_a_cycle(graph: fx.Graph) -> None:
    first(graph, aten.sin.default).args = (first(graph, aten.cos.default),)


def returns_more(graph: fx.Graph) -> None:
    output = graph.output_node()
    output.args = ((*output.args[0], first(graph, aten.sin.default)),)  # type: ignore[misc]


def returns_another_dtype(graph: fx.Graph) -> None:
    cos = first(graph, aten.cos.default)
    with graph.inserting_after(cos):
        half = graph.call_function(torch.ops.prims.convert_element_type.default, (cos, torch.half))
    graph.output_node().args = ((half,),)


def calls_wrongly(graph: fx.Graph) -> None:
    cos = first(graph, aten.cos.default)
    with graph.inserting_after(cos):
        made = graph.call_function(aten.view.default, (cos, [7, 7]))
    graph.output_node().args = ((made,),)


def calls_a_method(graph: fx.Graph) -> None:
    cos = first(graph, aten.cos.default)
    with graph.inserting_after(cos):
        made = graph.call_method("relu", (cos,))
    graph.output_node().args = ((made,),)


def calls_torch(graph: fx.Graph) -> None:
    first(graph, aten.cos.default).target = torch.cos


def calls_a_function(graph: fx.Graph) -> None:
    first(graph, aten.cos.default).target = F.silu


def calls_a_packet(graph: fx.Graph) -> None:
    first(graph, aten.cos.default).target = aten.cos


def returns_fewer_columns(graph: fx.Graph) -> None:
    cos = first(graph, aten.cos.default)
    with graph.inserting_after(cos):
        part = graph.call_function(aten.slice.Tensor, (cos, 1, 0, 2))
    graph.output_node().args = ((part,),)


def returns_twice_the_rows(graph: fx.Graph) -> None:
    cos = first(graph, aten.cos.default)
    with graph.inserting_after(cos):
        twice = graph.call_function(aten.repeat.default, (cos, [2, 1]))
    graph.output_node().args = ((twice,),)


def adds_an_input(graph: fx.Graph) -> None:
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("more")


BROKEN = [
    (throws, "pass 'throws' failed in piece 7: ZeroDivisionError: oops"),
    (leaves_a_dead_reference, "node 'cos' reads 'sin', which is not in the graph"),
    (makes_a_cycle, r"depend on themselves: '(sin|cos)' -> '(sin|cos)'"),
    (returns_more, "returns 2 values and returned 1"),
    (returns_another_dtype, r"output 0 \(node 'convert.*float16.* was a torch.float32"),
    (calls_wrongly, "node 'view.*' cannot be computed from its inputs"),
    (calls_a_method, r"node 'relu.*' calls the method 'relu', .* call an overload of an op"),
    (calls_torch, r"node 'cos' calls the function 'cos', .* call an overload of an op"),
    (calls_a_function, "node 'cos' calls the function 'silu', which Inductor does not compile"),
    (calls_a_packet, r"node 'cos' calls the function 'aten.cos', .* torch.ops.aten.relu.default"),
    (returns_fewer_columns, r"output 0 \(node 'slice.*\) has sizes \(s\d+, 2\) and had"),
    (returns_twice_the_rows, r"output 0 \(node 'repeat.*\) has sizes \(2\*s\d+, .* and had"),
    (adds_an_input, r"takes \('more', .*and took"),
]


@pytest.mark.parametrize(("function", "message"), BROKEN)
def test_a_broken_graph_names_the_pass_the_place_and_the_node(function: Any, message: str) -> None:
    gm = traced(lambda x: (x.sin().cos(),), torch.ones(3, 4))
    with pytest.raises(pw.PassError, match=message) as caught:
        run(function, gm)
    assert f"'{function.__name__}'" in str(caught.value)
    assert "piece 7" in str(caught.value)
    assert "pass_config={" in str(caught.value)


def test_sizes_are_computed_with_functions_of_numbers() -> None:
    def divides_sizes(graph: fx.Graph) -> None:
        cos = first(graph, aten.cos.default)
        with graph.inserting_after(cos):
            size = graph.call_function(aten.sym_size.int, (cos, 0))
            with graph.inserting_after(size):
                half = graph.call_function(operator.floordiv, (size, 2))
            with graph.inserting_after(half):
                number = graph.call_function(torch.sym_float, (half,))
            with graph.inserting_after(number):
                made = graph.call_function(aten.mul.Scalar, (cos, number))
        graph.output_node().args = ((made,),)

    gm = traced(lambda x: (x.sin().cos(),), torch.ones(3, 4))
    run(divides_sizes, gm)
    same(gm(rows(5)), (rows(5).sin().cos() * 2,), "half of five")


def test_wrong_values_are_found_when_every_node_is_computed_anew() -> None:
    def lies(graph: fx.Graph) -> None:
        """Another dtype in the middle, the recorded value left as it was."""
        sin = first(graph, aten.sin.default)
        cos = first(graph, aten.cos.default)
        with graph.inserting_after(sin):
            half = graph.call_function(torch.ops.prims.convert_element_type.default)
            half.args = (sin, torch.half)
        half.meta["val"] = sin.meta["val"]
        cos.replace_input_with(sin, half)

    run(lies, traced(lambda x: (x.sin().cos(),), torch.ones(3, 4)))
    gm = traced(lambda x: (x.sin().cos(),), torch.ones(3, 4))
    with pytest.raises(pw.PassError, match=r"node 'convert_.*' computes torch.float16"):
        run(lies, gm, validate=True)


def test_calls_of_subgraphs_are_not_computed_anew(tmp_path: Path) -> None:
    def chosen(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,))

    compiled = compile(chosen, compiler="inductor", cudagraph_mode="none", dump_dir=tmp_path)
    same(compiled(rows(3)), chosen(rows(3)), "with dumps, which validate")
    (dump,) = tmp_path.glob("graph_0/passes/piece_0/00_before.py")
    assert "higher_order.cond" in dump.read_text(), "of the piece, not of one of its branches"


@pytest.mark.parametrize("result", [fx.Graph(), -1, "2", 1.0], ids=["graph", "-1", "2", "1.0"])
def test_a_pass_that_returns_no_count(result: Any) -> None:
    gm = traced(lambda x: (x.sin().cos(),), torch.ones(3, 4))
    with pytest.raises(pw.PassError, match=r"it returned \w+ .*return how often"):
        run(pw.passes.as_pass(lambda graph: result, name="counts"), gm)


def test_nodes_out_of_order_are_brought_in_order() -> None:
    def appends_late(graph: fx.Graph) -> None:
        sin, cos = first(graph, aten.sin.default), first(graph, aten.cos.default)
        with graph.inserting_after(cos):
            made = graph.call_function(aten.mul.Tensor, (sin, 2))
        cos.replace_input_with(sin, made)

    gm = traced(lambda x: (x.sin().cos(),), torch.ones(3, 4))
    run(appends_late, gm, validate=True)
    same(gm(rows(3)), ((rows(3).sin() * 2).cos(),), "sorted")
    assert all("val" in n.meta for n in gm.graph.nodes if n.op == "call_function")


# --- before the split


def attention_then_double(x: Tensor) -> Tensor:
    """The pattern spans a split op and the piece after it."""
    return out_attn(x + 1, x, x) * 2 - 1


def test_a_graph_pass_sees_across_a_cut() -> None:
    """Attention and what follows become one split op."""

    @pw.register_pass(stage="graph", min_matches=1)
    def fuse(graph: fx.Graph) -> int:
        count = 0
        for mul in graph.find_nodes(op="call_function", target=operator.mul):
            out, factor = mul.args
            writes = [n for n in out.users if n.target in (torch.ops.pwtest.attn,)]
            if writes and factor == 2:
                writes[0].target = torch.ops.pwtest.attn_double
                mul.replace_all_uses_with(out)
                graph.erase_node(mul)
                count += 1
        return count

    ops = ["pwtest::attn", "pwtest::attn_double"]
    report = agrees_with_eager(attention_then_double, lambda n: (rows(n),), splitting_ops=ops)
    (graph,) = report.graphs
    assert "split op pwtest::attn_double" in graph.table
    (record,) = graph.passes["the whole graph"]
    assert (record.name, record.matches) == ("fuse", 1)
    assert "fuse: 1 matches" in str(report)


def test_a_rewrite_before_the_split_matches_what_the_user_wrote() -> None:
    def model(x: Tensor) -> Tensor:
        x = F.silu(x) * (x + 1)
        return F.silu(out_attn(x, x, x)) * x

    rewrite = pw.Rewrite(
        name="whole",
        pattern=lambda x, y: F.silu(x) * y,
        replacement=lambda x, y: torch.ops.pwtest.gate(x, y),
        requires=lambda x, y: x.dtype == y.dtype == torch.float32,
        stage="graph",
        min_matches=2,
    )
    report = agrees_with_eager(model, lambda n: (rows(n),), passes=[rewrite])
    assert report.graphs[0].passes["the whole graph"][0].matches == 2


def set_item(y: Tensor) -> None:
    y[0] = 3.0


def gates_before(write: Any) -> Any:
    def model(x: Tensor) -> Tensor:
        y = x + 1
        made = F.silu(y) * x
        write(y)
        return made + y

    return model


WRITES = {
    "a method": lambda y: y.zero_(),
    "an operator": lambda y: operator.iadd(y, 1),
    "an item": set_item,
    "a function": torch.relu_,
    "inplace=": lambda y: F.relu(y, inplace=True),
    "inplace by position": lambda y: F.relu(y, True),
    "out=": lambda y: torch.add(y, 1, out=y),
    "an aten op": lambda y: aten.mul_(y, 2),
    "a split op": lambda y: torch.ops.pwtest.attn_double(y, y, y, y),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_rewrite_before_the_split_does_not_move_reads_behind_writes(write: Any) -> None:
    report = agrees_with_eager(
        gates_before(write),
        lambda n: (rows(n),),
        passes=[gate_rewrite(stage="graph")],
        splitting_ops=["pwtest::attn_double"],
    )
    assert report.graphs[0].passes["the whole graph"][0].matches == 0


def test_writes_in_the_middle_of_a_match_hide_it_and_others_do_not() -> None:
    def model(x: Tensor) -> Tensor:
        y = x + 1
        before = F.silu(y) * x
        first = before.sum(-1, keepdim=True)
        act = F.silu(y)
        y.zero_()
        return act * x + first + y

    report = agrees_with_eager(model, lambda n: (rows(n),), passes=[gate_rewrite(stage="graph")])
    assert report.graphs[0].passes["the whole graph"][0].matches == 1


def test_a_graph_pass_leaves_dynamos_graph_alone() -> None:
    seen: list[fx.Graph] = []

    @pw.register_pass(stage="graph")
    def negate(graph: fx.Graph) -> None:
        seen.append(graph)
        for node in graph.find_nodes(op="call_function", target=operator.add):
            node.target = operator.sub

    def model(x: Tensor) -> Tensor:
        return out_attn(x + 1, x, x)

    compiled = compile(model)
    same(compiled(rows(4)), out_attn(rows(4) - 1, rows(4), rows(4)), "rewritten")
    assert len(seen) == 1


@pytest.mark.parametrize("function", [throws, returns_more])
def test_a_failing_graph_pass_reaches_the_caller(function: Any) -> None:
    def model(x: Tensor) -> Tensor:
        return out_attn(torch.ops.aten.sin.default(x), x, x)

    pw.register_pass(function, stage="graph")
    with pytest.raises(pw.PassError, match=f"'{function.__name__}' .* the whole graph"):
        compile(model)(rows(4))


def test_a_graph_pass_that_must_match() -> None:
    pw.register_pass(lambda graph: 0, name="never", stage="graph", min_matches=1)
    with pytest.raises(pw.PassError, match="'never' matched 0 times"):
        compile(toy)(rows(4))


def test_with_the_eager_compiler_pieces_stay_as_traced() -> None:
    pw.register_pass(throws, min_matches=1)
    compiled = compile(toy)
    same(compiled(rows(4)), toy(rows(4)), "eager")
    assert pw.report(compiled).graphs[0].passes == {}


def test_graph_passes_are_dumped(tmp_path: Path) -> None:
    pw.register_pass(does_nothing, stage="graph")
    compile(toy, dump_dir=tmp_path)(rows(4))
    folder = tmp_path / "graph_0" / "passes" / "graph"
    assert sorted(p.name for p in folder.iterdir()) == ["00_before.py", "01_does_nothing.py"]


# --- inside Inductor


def gated(x: Tensor) -> Tensor:
    x = F.silu(x + 1) * (x * 2)
    x = out_attn(x, x, x)
    return F.silu(x) * (x + 3)


@pytest.mark.usefixtures("inductor_cache")
def test_piece_passes_run_inside_inductor(tmp_path: Path) -> None:
    """Matches, times, dumps; and matches once more when Inductor has it all in its cache."""
    rewrite = gate_rewrite(min_matches=2)
    options = {"compiler": "inductor", "passes": [rewrite]}
    compiled = compile(gated, **options)
    same(compiled(rows(4)), gated(rows(4)), "compiled")
    records = pw.report(compiled).graphs[0].passes
    assert list(records) == ["piece 0", "piece 1"]
    assert [[r.name for r in of_piece] for of_piece in records.values()] == [
        ["eliminate_noops", "fuse_gate", "read_before_write"]
    ] * 2
    assert all(of_piece[1].matches == 1 for of_piece in records.values())
    assert all(r.milliseconds is not None for of_piece in records.values() for r in of_piece)

    torch._dynamo.reset()
    again = compile(gated, **options)
    same(again(rows(4)), gated(rows(4)), "from the cache")
    cached = pw.report(again).graphs[0].passes
    assert [p[1].matches for p in cached.values()] == [1, 1]
    assert "fuse_gate: 1 matches, cached (piece 0)" in str(pw.report(again))

    torch._dynamo.reset()
    dumped = compile(gated, **options, dump_dir=tmp_path)
    same(dumped(rows(4)), gated(rows(4)), "dumped")
    files = sorted(p.name for p in (tmp_path / "graph_0/passes/piece_0").iterdir())
    assert files == [
        "00_before.py", "01_eliminate_noops.py", "02_fuse_gate.py", "03_read_before_write.py",
    ]  # fmt: skip


def test_a_failing_piece_pass_reaches_the_caller() -> None:
    pw.register_pass(throws)
    with pytest.raises(pw.PassError, match="'throws' failed in piece 0: ZeroDivisionError: oops"):
        compile(gated, compiler="inductor")(rows(4))


@pytest.mark.usefixtures("inductor_cache")
def test_a_piece_pass_that_must_match() -> None:
    compiled = compile(lambda x: x + 1, compiler="inductor", passes=[gate_rewrite(min_matches=1)])
    with pytest.raises(pw.PassError, match="'fuse_gate' matched 0 times"):
        compiled(rows(4))


@pytest.mark.usefixtures("inductor_cache")
def test_patterns_without_noop_elimination_warn() -> None:
    options = {"passes": [gate_rewrite()], "pass_config": {"eliminate_noops": False}}
    with pytest.warns(RuntimeWarning, match=r"'eliminate_noops' off, but \['fuse_gate'\]"):
        compile(lambda x: x - 1, compiler="inductor", **options)(rows(4))
