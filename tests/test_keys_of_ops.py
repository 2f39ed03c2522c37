"""Ops that a pass names are part of its key, in whatever way it names them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import piecewise_backend as pw
from piecewise_backend.passes import PassList, as_pass
from piecewise_backend.passes.keys import content_key, key_of, op_content

OP = """\
import torch
from torch import Tensor
HANDLE = None
def helper(x): return {helper}
def kernel(x: Tensor) -> Tensor:
    return {kernel}
def fake(x): return {fake}
made = torch.library.custom_op("pwopkeys::op", kernel, mutates_args=())
made.register_fake(fake)
"""
AS_FIRST = {"kernel": "helper(x) * 2", "helper": "x + 1", "fake": "torch.empty_like(x)"}
CHANGES = {
    "kernel": {"kernel": "helper(x) * 3"},
    "what the kernel calls": {"helper": "x + 2"},
    "fake": {"fake": "torch.empty_like(x, dtype=torch.float16)"},
}
FORMS = {
    "body": "def p(graph): return torch.ops.pwopkeys.op.default",
    "packet in body": "def p(graph): return torch.ops.pwopkeys.op",
    "ops": "ops = torch.ops\ndef p(graph): return ops.pwopkeys.op.default",
    "other name": "from torch import ops as o\ndef p(graph): return o.pwopkeys.op.default",
    "namespace": "ns = torch.ops.pwopkeys\ndef p(graph): return ns.op.default",
    "packet": "packet = torch.ops.pwopkeys.op\ndef p(graph): return packet.default",
    "overload": "target = torch.ops.pwopkeys.op.default\ndef p(graph): return target",
    "in a table": "table = {'a': [torch.ops.pwopkeys.op]}\ndef p(graph): return table",
    "in a set": "table = {torch.ops.pwopkeys.op}\ndef p(graph): return table",
    "imported inside": "def p(graph):\n from torch import ops as o\n return o.pwopkeys.op",
    "variable": "def p(graph):\n o = torch.ops.pwopkeys\n return o.op.default",
    "nested": "def p(graph):\n ns = torch.ops.pwopkeys\n def f(): return ns.op\n return f()",
    "lambda": "p = lambda graph: (lambda: torch.ops.pwopkeys.op.default)()",
    "default": "def p(graph, op=torch.ops.pwopkeys.op): return op",
    "by a text": "def p(graph): return getattr(torch.ops.pwopkeys, 'op')",
    "helper": "def find(): return torch.ops.pwopkeys\ndef p(graph): return find().op.default",
    "closure of a namespace": """
def closing(ns): return lambda graph: ns.op.default
p = closing(torch.ops.pwopkeys)""",
    "closure of an overload": """
def closing(op): return lambda graph: op
p = closing(torch.ops.pwopkeys.op.default)""",
    "attribute of an object": """
class Pass:
    def __init__(self): self.ns = torch.ops.pwopkeys
    def __call__(self, graph): return self.ns.op.default
p = Pass()""",
    "behind hundreds of names": "def p(graph):\n"
    + "".join(f" graph.name_{i}\n" for i in range(600))
    + " return torch.ops.pwopkeys.op.default",
}


@pytest.fixture
def define() -> Iterator[Callable[..., Any]]:
    """Defines an op anew, from source text as generated code is."""
    libraries: list[torch.library.Library] = []

    def run(source: str = OP, **changes: str) -> dict[str, Any]:
        while libraries:
            libraries.pop()._destroy()
        scope = executed(source.format(**AS_FIRST | changes), "generated")
        libraries.append(scope["made"]._lib if "made" in scope else scope["lib"])
        return scope

    yield run
    while libraries:
        libraries.pop()._destroy()


def executed(source: str, module: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"torch": torch, "__name__": module}
    exec(compile(source, "<string>", "exec", dont_inherit=True), scope)
    return scope


def key(form: str = FORMS["body"]) -> str:
    return key_of(as_pass(executed(form, "passes_of_a_user")["p"], name="p"))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_changed_code_of_an_op_makes_another_key(define: Any, form: str) -> None:
    define()
    before = key(form)
    define()
    assert key(form) == before
    keys = [before]
    for changes in CHANGES.values():
        define(**changes)
        keys.append(key(form))
    assert len(set(keys)) == len(keys)


def test_the_definition_of_an_op_counts_as_the_op(define: Any) -> None:
    keys = []
    for changes in ({}, {}, *CHANGES.values()):
        made = define(**changes)["made"]
        keys.append(content_key([lambda made=made: made]))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 1 + len(CHANGES)


def test_a_kernel_for_one_device_counts(define: Any) -> None:
    define()
    before = key()
    scope = define()
    scope["made"].register_kernel("cpu", scope["helper"])
    assert key() != before


IN_LIBRARY = """\
import torch
lib = torch.library.Library("pwopkeys", "FRAGMENT")
lib.define("op(Tensor x{more}) -> Tensor", tags=({tags}))
def fake(x, y=1): return {fake}
torch.library.register_fake("pwopkeys::op", fake, lib=lib)
"""


def test_schema_fake_and_tags_of_an_op_without_python_kernel_count(define: Any) -> None:
    keys = []
    for changes in (
        {},
        {},
        {"more": ", int y=1"},
        {"more": ", int y=2"},
        {"fake": "x.new_empty(3)"},
        {"tags": "torch.Tag.needs_fixed_stride_order,"},
        {"tags": "torch.Tag.flexible_layout,"},
    ):
        define(IN_LIBRARY, **{"more": "", "tags": ""} | changes)
        keys.append(key())
    assert keys[0] == keys[1]
    assert len(set(keys)) == 6


def test_the_key_of_a_list_sees_ops(define: Any) -> None:
    members = [as_pass(executed(FORMS["body"], "passes_of_a_user")["p"], name="p")]
    keys = []
    for changes in ({}, {}, CHANGES["fake"]):
        define(**changes)
        keys.append(PassList(members).key())
    assert keys[0] == keys[1] != keys[2]


def test_functions_of_a_rewrite_are_seen(define: Any) -> None:
    def pattern(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def replacement(x: torch.Tensor) -> Any:
        return torch.ops.pwopkeys.op.default(x)

    rewrite = pw.Rewrite(
        name="p",
        pattern=pattern,
        replacement=replacement,
        example_inputs=lambda: (torch.ones(4),),
    )
    keys = []
    for changes in ({}, {}, CHANGES["fake"]):
        define(**changes)
        keys.append(key_of(rewrite))
    assert keys[0] == keys[1] != keys[2]


def test_ops_that_an_op_names_count_and_may_name_it_back(define: Any) -> None:
    calls_itself = {"kernel": "torch.ops.pwopkeys.op(x)", "helper": "torch.ops.pwopkeys.inner(x)"}
    keys = []
    for factor in (2, 2, 3):
        scope = define(**calls_itself)

        def inner(x: torch.Tensor, factor: int = factor) -> Any:
            return torch.ops.pwopkeys.op(x) * factor

        scope["made"]._lib.define("inner(Tensor x) -> Tensor")
        torch.library.register_fake("pwopkeys::inner", inner, lib=scope["made"]._lib)
        keys.append(key("def p(graph): return torch.ops.pwopkeys.inner"))
    assert keys[0] == keys[1] != keys[2]


def test_other_ops_and_torchs_own_do_not_count(define: Any) -> None:
    forms = (
        "def p(graph): return torch.ops.aten.add.Tensor, torch.ops.prims.abs.default",
        "def p(graph): return torch.ops.pwopkeys.other",
        "def p(graph): return torch.ops.unknown.op",
        "def p(graph): return torch.ops.higher_order.cond",
    )
    before = [key(form) for form in forms]
    assert all("schema" not in text for text in before)
    define()
    assert [key(form) for form in forms] == before
    assert "schema" in key()


def test_an_op_that_does_not_exist_is_no_error_and_is_not_made() -> None:
    assert key("def p(graph): return torch.ops.pwnowhere.op.default")
    assert key("ns = torch.ops.pwempty\ndef p(graph): return ns.op.default")
    assert "pwnowhere" not in vars(torch.ops)


def test_an_op_without_content_is_named_and_needs_an_explicit_key(define: Any) -> None:
    define(kernel="x if HANDLE is None else x")["HANDLE"] = iter(())
    with pytest.raises(
        pw.ConfigError,
        match=r"depends on op pwopkeys\.op\.default, whose .* <tuple_iterator .* key=",
    ):
        key()
    function = executed(FORMS["body"], "passes_of_a_user")["p"]
    assert key_of(as_pass(function, name="p", key="v1"))


def test_a_graph_and_a_pass_see_the_same_of_an_op(define: Any) -> None:
    define()
    before = op_content(torch.ops.pwopkeys.op.default)
    assert set(before) == {"schema", "tags", "any device", "fake"}
    assert all(text in key() for text in (before["schema"], "any device", "fake"))


def test_a_key_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    table = "table = {torch.ops.pwopkeys.op, torch.ops.aten.add, torch.ops.aten.mul}\n"
    forms = [FORMS["body"], FORMS["attribute of an object"], f"{table}def p(graph): return table"]
    script.write_text(
        "from tests.test_keys_of_ops import AS_FIRST, OP, executed, key\n"
        "scope = executed(OP.format(**AS_FIRST), 'generated')\n"
        f"print([key(form) for form in {forms!r}])\n"
    )
    path = str(Path(__file__).parents[1])
    texts = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed}
        command = [sys.executable, str(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        texts.add(done.stdout.splitlines()[-1])
    (text,) = texts
    assert " at 0x" not in text
    assert "schema" in text
