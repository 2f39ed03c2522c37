"""What makes another key, and what does not."""

from __future__ import annotations

import importlib.util
import json
import linecache
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from piecewise_backend.cache_entry import Key
from piecewise_backend.cache_key import Uncacheable, piece_key
from piecewise_backend.cache_misses import explain
from piecewise_backend.canonical import Instance
from piecewise_backend.passes.keys import content_key
from tests.helpers import Decoder, rows
from tests.test_canonical import ALMOST_ALIKE, instances

OPS = torch.ops.pwtest
PROJECT = Path(__file__).parents[1]


def key(function: Any, *, options: dict[str, object] | None = None, size: int = 5) -> Key:
    """The key of the first piece."""
    torch._dynamo.reset()
    found = _key(instances(function, rows(size))[0], size, options or {})
    assert not isinstance(found, Uncacheable), found
    return found


def _key(instance: Instance, size: int, options: dict[str, object]) -> Key | Uncacheable:
    distinct = instance.distinct
    return piece_key(distinct, (size, *[0] * len(distinct.structure.hoisted)), options, {})


def test_a_key_is_json_and_the_same_in_another_trace() -> None:
    first = key(Decoder(2))
    assert json.loads(json.dumps(first)) == first
    assert explain(first, key(Decoder(2))) == ()


@pytest.mark.parametrize("what", ALMOST_ALIKE)
def test_pieces_that_differ_have_other_keys(what: str) -> None:
    one, other = ALMOST_ALIKE[what]
    differences = explain(key(one), key(other))
    assert differences
    assert {line.partition(".")[0] for line in differences} <= {"piece", "called"}


def test_a_constant_that_no_source_names_makes_another_key() -> None:
    def scaled(factor: float) -> Callable[[Tensor], Tensor]:
        settings = types.SimpleNamespace(factor=factor)
        return lambda x: x * settings.factor

    assert explain(key(scaled(7.0)), key(scaled(7.0))) == ()
    (line,) = explain(key(scaled(7.0)), key(scaled(9.0)))
    assert line.startswith("piece.constants.0: ")
    assert float.hex(7.0) in line
    assert float.hex(9.0) in line


def test_the_sizes_of_compilation_are_part_of_it() -> None:
    assert explain(key(torch.sin, size=5), key(torch.sin, size=6)) == ("sizes.0: 5 -> 6",)


def _default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def _deterministic() -> None:
    torch.use_deterministic_algorithms(True)


def _matmul_precision() -> None:
    torch.set_float32_matmul_precision("high")


def _threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


def _inductor() -> None:
    inductor_config.epilogue_fusion = False


@pytest.fixture
def _restored() -> Iterator[None]:
    threads, fusion = torch.get_num_threads(), inductor_config.epilogue_fusion
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads)
    inductor_config.epilogue_fusion = fusion


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_default_dtype, "switches.default dtype: 'torch.float32' -> 'torch.float64'"),
        (_deterministic, "switches.deterministic.0: False -> True"),
        (_matmul_precision, "switches.matmul.0: 'highest' -> 'high'"),
        (_threads, "machine.threads: "),
        (_inductor, "options.inductor.epilogue_fusion: True -> False"),
    ],
)
def test_a_setting_of_the_process_makes_another_key(change: Any, named: str) -> None:
    (instance, *_) = instances(lambda x: x.sin(), rows(5))
    before = _key(instance, 5, {})
    change()
    assert any(line.startswith(named) for line in explain(before, _key(instance, 5, {})))


def test_an_inductor_option_makes_another_key() -> None:
    one, other = (key(torch.sin, options={"max_autotune": on}) for on in (False, True))
    assert explain(one, other) == ("options.inductor.max_autotune: False -> True",)


@pytest.fixture
def library() -> Iterator[Callable[..., Any]]:
    """Defines an op of the same name again and again, from source text as generated code is."""
    libraries: list[torch.library.Library] = []

    def define(kernel: str, fake: str = "torch.empty_like(x)", helper: str = "x") -> Any:
        while libraries:
            libraries.pop()._destroy()
        scope: dict[str, Any] = {"torch": torch, "__name__": "generated"}
        source = f"def helper(x):\n return {helper}\ndef kernel(x):\n return {kernel}\n"
        exec(compile(f"{source}def fake(x):\n return {fake}\n", "<string>", "exec"), scope)
        annotations = {"x": Tensor, "return": Tensor}
        scope["kernel"].__annotations__ = annotations
        made = torch.library.custom_op("pwkeys::op", scope["kernel"], mutates_args=())
        made.register_fake(scope["fake"])
        libraries.append(made._lib)
        return lambda x: torch.ops.pwkeys.op(x) + 1

    yield define
    while libraries:
        libraries.pop()._destroy()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kernel": "helper(x) * 3"}, "any device"),
        ({"kernel": "helper(x) * 2", "helper": "x + 0"}, "any device"),
        ({"kernel": "helper(x) * 2", "fake": "x.new_empty(x.shape)"}, "fake"),
    ],
    ids=["its body", "what its body calls", "its fake"],
)
def test_code_of_an_op_makes_another_key(library: Any, change: Any, named: str) -> None:
    original = {"kernel": "helper(x) * 2"}
    before = key(library(**original))
    assert explain(before, key(library(**original))) == ()
    (line,) = explain(before, key(library(**change)))
    assert line.startswith(f"called.pwkeys.op.default.{named}: ")


KERNELS = """
import torch, triton, triton.language as tl
@triton.jit
def inner(x):
    return x * 2.0
@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, inner(tl.load(x + at, at < n)), at < n)
def launch(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    if x.is_cuda:
        kernel[(1,)](x, out, x.numel(), BLOCK=64)
    return out
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Makes a module of this source. Triton wants it to be a file."""

    def made(source: str) -> Any:
        path = tmp_path / "pwkernels.py"
        path.write_text(source)
        linecache.checkcache(str(path))
        module = types.ModuleType("pwkernels")
        monkeypatch.setitem(sys.modules, "pwkernels", module)
        exec(compile(source, str(path), "exec"), vars(module))
        return module

    return made


CHANGES = {
    "what it calls": ("x * 2.0", "x * 3.0"),
    "its body": ("at < n)), at < n", "at < n)), at <= n"),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("change", [*CHANGES.values(), ("BLOCK=64", "BLOCK=32")])
def test_the_source_of_a_triton_kernel_that_an_op_launches_makes_another_key(
    kernels: Callable[[str], Any], change: tuple[str, str]
) -> None:
    def key_with(source: str) -> Key:
        launch = kernels(source).launch
        op = torch.library.custom_op("pwkeys::launch", launch, mutates_args=())
        op.register_fake(torch.empty_like)
        try:
            return key(lambda x: op(x) + 1)
        finally:
            op._lib._destroy()

    before = key_with(KERNELS)
    assert explain(before, key_with(KERNELS)) == ()
    (line,) = explain(before, key_with(KERNELS.replace(*change)))
    assert line.startswith("called.pwkeys.launch.default.any device: ")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_source_of_a_triton_kernel_is_its_content(
    kernels: Callable[[str], Any], change: tuple[str, str]
) -> None:
    """What a key has of kernels that the model launches; tracing one needs a GPU."""
    before, same, other = [
        content_key((kernels(source).kernel, {"BLOCK": 64}))
        for source in (KERNELS, KERNELS, KERNELS.replace(*change))
    ]
    assert before == same
    assert before != other


def test_an_environment_variable_counts_if_the_trace_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * float(os.environ["PWTEST_SCALE"])

    keys = []
    for scale, home in (("2.0", "/here"), ("2.0", "/there"), ("3.0", "/there")):
        monkeypatch.setenv("PWTEST_SCALE", scale)
        monkeypatch.setenv("HOME", home)
        keys.append(key(scaled))
    assert explain(keys[0], keys[1]) == ()
    (line,) = explain(keys[1], keys[2])
    assert line.startswith("piece.constants.0: ")


def test_code_of_an_op_whose_constants_were_hoisted_counts() -> None:
    def layers(x: Tensor) -> Tensor:
        for layer in ("1", "2", "3"):
            x = OPS.fresh(x, x, x)
            x = OPS.named(x, layer)
        return x

    first, *_ = [i for i in instances(layers) if i.distinct.structure.hoisted]
    found = _key(first, 5, {})
    assert isinstance(found, dict)
    assert set(found["called"]) == {"pwtest.named.default"}
    assert set(found["called"]["pwtest.named.default"]) == {"schema", "tags", "any device", "fake"}


def test_what_has_no_name_or_no_visible_code_has_no_key() -> None:
    lib = torch.library.Library("pwhidden", "DEF")
    lib.define("composite(Tensor x) -> Tensor")
    lib.impl("composite", lambda x: x.sin() + 1, "CompositeImplicitAutograd")
    (instance,) = instances(lambda x: torch.ops.pwhidden.composite(x))
    found = _key(instance, 5, {})
    assert isinstance(found, Uncacheable)
    assert "pwhidden.composite" in found.reason
    lib._destroy()


def _in_process(path: Path, cwd: Path, home: Path) -> Any:
    code = (
        "import json; from tests.test_cache_key import key; from tests.helpers import Decoder"
        "\nprint(json.dumps(key(Decoder(2))))"
    )
    environment = os.environ | {"PYTHONPATH": str(path), "HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(home / "inductor")
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_another_checkout_home_and_working_directory_have_the_same_key(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("piecewise_backend", "passes", "tests"):
        subprocess.run(["cp", "-r", "-P", PROJECT / name, copy / name], check=True)
    here = _in_process(PROJECT, tmp_path, tmp_path)
    (tmp_path / "home").mkdir()
    there = _in_process(copy, copy, tmp_path / "home")
    assert explain(here, there) == ()
    assert str(tmp_path) not in json.dumps(there)


class OwnPass(CustomGraphPass):
    """Of a program, for all that Inductor compiles."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Nothing: it is never run here."""

    def uuid(self) -> bytes:
        return self.name.encode()


@pytest.mark.parametrize(
    "option",
    ["post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_post_pass"],
)
def test_passes_that_a_program_gives_inductor_count(option: str) -> None:
    def model(x: Tensor) -> Tensor:
        return x.sin() + 2

    found = [key(model)]
    for name in ("one", "other"):
        with inductor_config.patch({option: OwnPass(name)}):
            found.append(key(model))
            assert key(model) == found[-1]
    plain, one, other = found
    assert plain != one != other != plain
    assert key(model, options={option: OwnPass("one")}) == one
