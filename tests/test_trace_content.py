"""What things are, for a trace that another process may use: all that the trace went by."""

from __future__ import annotations

import abc
import argparse
import collections.abc
import enum
import functools
import math
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from torch import nn

from piecewise_backend import _torch
from piecewise_backend.passes.keys import NoContentError
from piecewise_backend.sources import parsed, text_of
from piecewise_backend.trace_code import code_digest
from piecewise_backend.trace_content import Content, tensor
from piecewise_backend.trace_functions import asks_names, compares_identities, functions_not_seen


def outline(value: object) -> Any:
    return Content().outline(value)


def value(thing: object) -> Any:
    return Content().value(thing)


def test_a_loop_over_a_set_is_unrolled_in_its_order() -> None:
    one, other = {0, 8}, {8, 0}  # of one hash modulo the size of the table
    assert one == other
    assert list(one) != list(other)
    assert value(one) != value(other)
    assert outline(frozenset([0, 8])) != outline(frozenset([8, 0]))


@pytest.mark.parametrize(
    ("source", "has_order"),
    [
        ("for x in {{{}}}: print(x)", True),
        ("y = {{{}, 3}}", True),
        ("y = x in {{{}}}", False),
        ("y = x not in {{{}}}", False),
        ("y = lambda x: x in {{{}}}", False),
        ("y = lambda: [x for x in {{{}}}]", True),
    ],
)
def test_constant_sets_in_code(source: str, has_order: bool) -> None:
    """Of most of them code asks only what is in them, in whatever order."""
    one, other = (compile(source.format(items), "", "exec") for items in ("0, 8", "8, 0"))
    assert (code_digest(one) != code_digest(other)) is has_order


@pytest.mark.parametrize(
    ("source", "compares"),
    [
        ("x is y", True),
        ("x is not y", True),
        ("x is y.dtype", True),
        ("x is 'text'", True),
        ("operator.is_(x, y)", True),
        ("x is None", False),
        ("x is not None and x is not True and x is not ...", False),
        ("x == y", False),
    ],
)
def test_code_that_compares_by_is(source: str, compares: bool) -> None:
    with warnings.catch_warnings(action="ignore"):  # of "is" with a literal
        code = compile(source, "program.py", "eval")
        library = compile(source, torch.__file__, "eval")
    assert compares_identities([code]) is compares
    assert not compares_identities([library])


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("x.storage_offset()", "where a tensor begins"),
        ("x._base is None", "a view of"),
        ("x.__hash__()", "a hash"),
        ("hash(x)", "what hash"),
        ("x.hash", "not found by its name"),
    ],
)
def test_code_that_asks_for_what_dynamo_does_not_guard(source: str, asked: str) -> None:
    code = compile(f"lambda x: {source}", "program.py", "eval").co_consts[0]
    with pytest.raises(NoContentError, match=asked):
        list(functions_not_seen(Content(), [code]))


class Plain:
    pass


@pytest.mark.parametrize("kind", [Plain, SimpleNamespace, argparse.Namespace, nn.Module])
def test_a_loop_over_attributes_is_unrolled_in_their_order(kind: Any) -> None:
    one, other = kind(), kind()
    one.a, one.b = 1, 2
    other.b, other.a = 2, 1
    assert outline(one) != outline(other)


def test_methods_of_builtins_are_not_guarded() -> None:
    one, other = Plain(), Plain()
    one.f, other.f = torch.Tensor.add, torch.Tensor.mul  # type: ignore[attr-defined]
    assert outline(one) != outline(other)
    one.f, other.f = torch.sin, torch.cos  # type: ignore[attr-defined]
    assert outline(one) != outline(other)


def test_attributes_of_functions() -> None:
    def function() -> None:
        pass

    before = value(function)
    function.scale = 2  # type: ignore[attr-defined]
    assert value(function) != before


def test_what_can_be_looked_for_in_a_module_of_the_program() -> None:
    module = types.ModuleType("shop.helpers")
    before = value(module)
    module.scale = 2  # type: ignore[attr-defined]
    with_scale = value(module)
    assert with_scale != before
    module.__import_torch = module.submodule = torch  # type: ignore[attr-defined]
    assert value(module) == with_scale
    assert value(torch) == "module torch"


@pytest.fixture
def gelu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A class of torch's, with a method of the program's."""
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: x * 2)
    yield nn.GELU
    monkeypatch.undo()


def test_a_patched_class_of_torch(gelu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(gelu):  # type: ignore[misc]
        pass

    def kinds() -> list[str]:
        return [Content().kind(cls) for cls in (gelu, Own)]

    patched = kinds()
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: x * 3)
    others = kinds()
    monkeypatch.undo()
    for one, other, unpatched in zip(patched, others, kinds(), strict=True):
        assert len({one, other, unpatched}) == 3
    assert Content().kind(nn.GELU).startswith("torch.nn.modules.activation.GELU")


class Called:
    def __call__(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    "other",
    [
        *(nn.Identity.forward, nn.ReLU.forward, nn.GELU.extra_repr, Called()),
        *(staticmethod(torch.relu), torch.ops.aten.relu.default, functools.partial(torch.mul, 3)),
        *(functools.partialmethod(torch.mul, 3), staticmethod(nn.functional.relu)),
    ],
)
def test_a_class_of_torch_with_a_method_of_another(
    other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = value(nn.GELU)
    monkeypatch.setattr(nn.GELU, "forward", other)
    assert value(nn.GELU) != before


PRINTS_CLASSES = """\
import torch
from torch import nn
from piecewise_backend.trace_content import Content
def classes():
    return [Content().kind(cls) for cls in (nn.Linear, nn.Module, nn.ModuleList, torch.Tensor)]
before = classes()
torch.compile(torch.sin, backend="eager")(torch.ones(2))
print(before == classes())
"""


def test_a_class_of_torch_is_the_same_after_dynamo_has_traced() -> None:
    """Which puts functions of its own into `nn.Module`."""
    done = subprocess.run([sys.executable, "-c", PRINTS_CLASSES], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_methods_of_tensors_may_be_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = value(torch.Tensor)
    monkeypatch.setattr(torch.Tensor, "relu", lambda self: self * 3)
    assert value(torch.Tensor) != before


@pytest.mark.parametrize("module", [torch, nn.functional, math])
def test_names_in_modules_of_torch_and_python(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def contents() -> list[Any]:
        return [Content(asks_names=asks).value(module) for asks in (False, True)]

    before = contents()
    monkeypatch.setattr(module, "part", types.ModuleType("torch.part"), raising=False)
    assert contents() == before
    for name, thing in [
        ("plugin", types.ModuleType("torch_plugin")),
        ("fancy", nn.functional.relu),
    ]:
        monkeypatch.setattr(module, name, thing, raising=False)
        found = contents()
        assert found[0] == before[0]
        assert found[1] != before[1]
        before = found


def test_names_of_ops() -> None:
    """Whether an op was used before does not count."""

    def content() -> Any:
        return Content(asks_names=True).value(torch.ops.pwtest_names)

    before = content()
    library = torch.library.Library("pwtest_names", "DEF")
    library.define("one(Tensor x) -> Tensor")
    found = content()
    assert found != before
    assert torch.ops.pwtest_names.one is not None
    assert content() == found
    library._destroy()


@pytest.mark.parametrize(
    ("source", "asks"),
    [("hasattr(x, 'y')", True), ("getattr(x, 'y', 1)", True), ("x.y", False)],
)
def test_code_that_asks_for_names(source: str, asks: bool) -> None:
    assert asks_names([compile(source, "program.py", "eval")]) is asks


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("__code__", nn.functional.tanhshrink.__code__),
        ("__defaults__", (True,)),
        ("__kwdefaults__", {"inplace": True}),
    ],
)
def test_functions_of_torch_that_are_others_inside(
    name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = value(nn.functional.softsign), value(nn.functional.silu)
    monkeypatch.setattr(nn.functional.softsign, name, other)
    monkeypatch.setattr(nn.functional.silu, name, other)
    after = value(nn.functional.softsign), value(nn.functional.silu)
    assert all(one != another for one, another in zip(before, after, strict=True))


def test_a_method_of_torch_with_the_code_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    before = value(nn.Softsign)
    monkeypatch.setattr(nn.Softsign.forward, "__code__", nn.Tanhshrink.forward.__code__)
    assert value(nn.Softsign) != before


def test_attributes_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked of an op before does not count."""

    def contents(op: Any) -> list[Any]:
        return [Content(asks_names=asks).value(op) for asks in (False, True)]

    packet = torch.ops.aten.hardswish
    before = contents(packet)
    for op in (packet, packet.default):
        without = contents(op)
        monkeypatch.setattr(op, "flag", 1, raising=False)
        assert contents(op)[0] == without[0]
        assert contents(op)[1] != without[1]
    monkeypatch.undo()
    assert contents(packet) == before


def test_attributes_of_functions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [value(nn.functional.silu)]
    for number in (1, 2):
        monkeypatch.setattr(nn.functional.silu, "flag", number, raising=False)
        found.append(value(nn.functional.silu))
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("shape", "one", "other"),
    [((1, 4), (4, 1), (7, 1)), ((0, 4), (4, 1), (1, 1)), ((2, 1), (1, 1), (1, 5))],
)
def test_strides_that_no_element_shows(shape: Any, one: Any, other: Any) -> None:
    tensors = [torch.empty_strided(shape, strides) for strides in (one, other)]
    assert all(each.is_contiguous() for each in tensors)
    assert tensor(tensors[0]) != tensor(tensors[1])
    assert tensor(tensors[0])[4] == "contiguous"


def test_sets_that_only_their_class_has() -> None:
    """A loop over one looks at it, and goes by its order; most code asks what is in it."""
    one, other = ({0, 8}, {8, 0})
    classes = [type("Own", (), {"NAMES": names, "__module__": "shop"}) for names in (one, other)]
    assert (value(classes[0]) == value(classes[1])) is _torch.LOOKS_AT_SETS
    assert value(classes[0]) != value(type("Own", (), {"NAMES": {0, 9}, "__module__": "shop"}))


def test_sets_inside_of_what_a_class_has() -> None:
    classes = [
        type("Own", (), {"GROUPS": {"a": ({0, 8},)}, "__module__": "shop"}),
        type("Own", (), {"GROUPS": {"a": ({8, 0},)}, "__module__": "shop"}),
    ]
    assert (value(classes[0]) == value(classes[1])) is _torch.LOOKS_AT_SETS


class DotDict(dict[str, Any]):
    __getattr__ = dict.__getitem__


def test_attributes_of_classes_that_answer_as_they_like() -> None:
    classes = [
        type("Own", (), {"options": DotDict(a=number), "__module__": "shop"}) for number in (1, 2)
    ]
    assert value(classes[0]) != value(classes[1])


def test_what_contains_itself() -> None:
    table: dict[str, Any] = {}

    def function(x: Any, table: Any = table) -> Any:
        return x

    table["own"] = function
    assert value(function) == value(function)
    registry: list[Any] = []
    registry.append(registry)
    with pytest.raises(NoContentError, match="contains itself"):
        value(registry)
    value(type("Own", (), {"registry": registry, "__module__": "shop"}))
    assert value([[1], [1]]) == value([[1], [1]])


def test_members_of_enums_whose_values_are_objects() -> None:
    def made(function: Any) -> Any:
        class Act(enum.Enum):
            OBJECT = Called()
            FUNCTION = functools.partial(function)

        return Act

    one, other = made(nn.functional.relu), made(nn.functional.relu)
    assert value(one.OBJECT) == value(other.OBJECT)


def test_what_isinstance_asks() -> None:
    class Base(abc.ABC):  # noqa: B024
        pass

    class Below(Base):
        pass

    found = [value(Base)]
    for registers, cls in [(Base, Plain), (Base, nn.SiLU), (Below, dict)]:
        registers.register(cls)
        found.append(value(Base))
    assert len(set(found)) == 4


def test_a_class_below_whose_class_is_the_programs() -> None:
    class Meta(abc.ABCMeta):
        pass

    class Base(abc.ABC):  # noqa: B024
        pass

    class Below(Base, metaclass=Meta):
        pass

    class Other(Base):
        pass

    assert Content()._metaclass(Base) == [Content().kind(Meta)]
    Other.register(Plain)
    assert len(Content()._metaclass(Base)) == 2
    assert Below is not Other

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return True

    class Asked(metaclass=Meta):
        pass

    with pytest.raises(NoContentError, match="whose metaclass says what is one"):
        value(Asked)


def test_what_isinstance_asks_classes_of_the_standard_library() -> None:
    class Table:
        pass

    before = value(collections.abc.MappingView)
    collections.abc.MappingView.register(Table)
    assert value(collections.abc.MappingView) != before


class Hooked(abc.ABC):  # noqa: B024
    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return True


@runtime_checkable
class Supports(Protocol):
    def scaled(self) -> int: ...


def test_a_class_that_says_itself_what_is_one() -> None:
    with pytest.raises(NoContentError, match="which itself says what is one"):
        value(Hooked)
    value(Supports)  # where the standard library says it


def test_what_is_called_as_torch_calls_its_own_is_not_torchs() -> None:
    @functools.wraps(nn.functional.silu)
    def silu(x: Any, inplace: bool = False) -> Any:
        return x * 2

    assert silu.__module__ == "torch.nn.functional"
    assert value(silu) != value(nn.functional.silu)
    assert value(silu).startswith("torch.nn.functional.silu ")


def test_names_of_builtins_that_a_module_has_for_something_else() -> None:
    source = "def outer(x):\n    return [max(y, 1) for y in x] + (lambda: min(x))()\n"
    found = []
    for others in ({}, {"max": 3}, {"min": 3}, {"sum": 3}):
        scope: dict[str, Any] = {"__name__": "shop.model", **others}
        exec(source, scope)
        found.append(value(scope["outer"]))
    plain, with_max, with_min, with_sum = found
    assert with_sum == plain
    assert len({plain, with_max, with_min}) == 3


class Kind(enum.Enum):
    ONE = "one"

    def __init__(self, name: str) -> None:
        self.factor = self._hidden = 2


@pytest.mark.parametrize("name", ["factor", "_hidden"])
def test_attributes_of_members_of_an_enum(name: str) -> None:
    before = value(Kind.ONE)
    setattr(Kind.ONE, name, 3)
    assert value(Kind.ONE) != before
    setattr(Kind.ONE, name, 2)
    assert value(Kind.ONE) == before


@pytest.mark.parametrize(
    "source",
    ["L['self']._modules['0'].weight", "G['a'][0][-1].b", "f(x).y['z']", "(a + b).c", "a + b.c"],
)
def test_sources_as_text(source: str) -> None:
    assert text_of(parsed(source)) == source
