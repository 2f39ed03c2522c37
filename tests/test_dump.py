"""What lies in the dump directory can be read by people and by Python."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import piecewise_backend as pw
from tests.helpers import Decoder, compile, rows
from tests.runtime_helpers import of_rows, toy


@pytest.fixture(autouse=True)
def _without_gradients() -> object:
    with torch.no_grad():
        yield


def names_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.py"))


def test_files_of_a_warmed_up_model(tmp_path: Path) -> None:
    pw.warmup(compile(Decoder(), dump_dir=tmp_path, cudagraph_capture_sizes=[2, 4]), of_rows())
    assert names_in(tmp_path) == [
        "graph_0/computation_graph.py",
        "graph_0/plan_2.py",
        "graph_0/plan_4.py",
        "graph_0/plan_dynamic.py",
        "graph_0/transformed_code.py",
    ]
    for path in tmp_path.rglob("*.py"):
        text = path.read_text()
        # depyf 0.20 knows no call of Python 3.13's that has no arguments.
        may_be_listed = path.name == "transformed_code.py" and sys.version_info >= (3, 13)
        is_listed = may_be_listed and "depyf could not decompile" in text
        assert ast.parse(text).body or is_listed, path.name


def test_computation_graph_has_table_shapes_and_steps(tmp_path: Path) -> None:
    pw.warmup(compile(toy, dump_dir=str(tmp_path)), of_rows())
    source = (tmp_path / "graph_0" / "computation_graph.py").read_text()
    tree = ast.parse(source)
    table = ast.get_docstring(tree)
    assert table is not None
    assert [line.split()[:2] for line in table.splitlines() if line[:1].isdigit()] == [
        ["0", "piece"],
        ["1", "split"],
        ["2", "piece"],
        ["3", "split"],
        ["4", "piece"],
    ]
    assert "float32[s77, 4]" in table
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert classes == ["Piece0", "Piece2", "Piece4"]
    (stitching,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert stitching.name == "computation_graph"
    assert "torch.ops.pwtest.attn(" in ast.unparse(stitching)
    assert "L['x']" in source
    assert "runtime_helpers.py" in source, "the line of the split op"


def test_plans_name_every_step(tmp_path: Path) -> None:
    pw.warmup(compile(toy, dump_dir=tmp_path, cudagraph_capture_sizes=[4]), of_rows())
    plan = (tmp_path / "graph_0" / "plan_4.py").read_text()
    code = compile_plan(plan)
    calls = [node.func for node in ast.walk(code) if isinstance(node, ast.Call)]
    called = [name.id.rstrip("0123456789") for name in calls if isinstance(name, ast.Name)]
    steps = [name for name in called if name in ("replay_", "op_")]
    assert steps == ["replay_", "op_", "replay_", "op_", "replay_"]
    dynamic = (tmp_path / "graph_0" / "plan_dynamic.py").read_text()
    assert "piece_0(" in ast.unparse(compile_plan(dynamic))


def compile_plan(source: str) -> ast.Module:
    tree = ast.parse(source)
    (plan,) = tree.body
    assert isinstance(plan, ast.FunctionDef)
    assert plan.name == "plan"
    return tree


def test_arguments_of_every_kind_are_valid_python(tmp_path: Path) -> None:
    """Lists, keywords, floats, none, types, sizes, tuples of results, outputs in containers."""

    @torch.library.custom_op("pwtest::many", mutates_args=["out"])
    def many(
        x: Tensor,
        parts: list[Tensor],
        sizes: list[int],
        out: Tensor,
        maybe: Tensor | None = None,
        *,
        scale: float = 1.0,
        name: str = "",
        dtype: torch.dtype = torch.float32,
        flag: bool = False,
    ) -> Tensor:
        out.copy_(x * scale)
        return x.to(dtype)

    @many.register_fake
    def _(x, parts, sizes, out, maybe=None, *, scale=1.0, name="", dtype=None, flag=False):  # type: ignore[no-untyped-def]
        return x.new_empty(x.shape, dtype=dtype)

    def model(x: Tensor) -> dict[str, object]:
        x = x + float("inf") * 0 if x.size(0) < 0 else x.clamp(max=float("inf"))
        out = torch.empty_like(x)
        y = torch.ops.pwtest.many(
            x, [x, x * 0], [x.size(0), 3], out,
            scale=float("inf"), name='a "quoted" name\n', dtype=torch.float64, flag=True,
        )  # fmt: skip
        a, b = torch.ops.pwtest.pair(out, out)
        return {"y": y, "rest": (a, [b]), "n": x.size(0) * 2, "none": None}

    ops = ["pwtest::many", "pwtest::pair"]
    compiled = compile(model, dump_dir=tmp_path, splitting_ops=ops, cudagraph_capture_sizes=[4])
    pw.warmup(compiled, of_rows())
    assert len(names_in(tmp_path)) == 4
    for path in tmp_path.rglob("*.py"):
        ast.parse(path.read_text())
    assert compiled(rows(3))["n"] == 6


def test_graphs_never_overwrite_one_another(tmp_path: Path) -> None:
    """Two traces of one model, another model, and another process that was there first."""
    (tmp_path / "graph_1").mkdir()
    (tmp_path / "graph_1" / "mine.txt").write_text("kept")
    compiled = compile(toy, dump_dir=tmp_path)
    compiled(rows(4))
    compiled(rows(4, width=8))
    compile(Decoder(), dump_dir=tmp_path)(rows(4))
    graphs = sorted(path.parent.name for path in tmp_path.rglob("computation_graph.py"))
    assert graphs == ["graph_0", "graph_2", "graph_3"]
    texts = {path.read_text() for path in tmp_path.rglob("computation_graph.py")}
    assert len(texts) == 3
    assert (tmp_path / "graph_1" / "mine.txt").read_text() == "kept"


def test_directory_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWISE_DUMP_DIR", str(tmp_path / "a" / "b"))
    compile(toy)(rows(4))
    assert (tmp_path / "a" / "b" / "graph_0" / "computation_graph.py").exists()


def test_nothing_is_written_without_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIECEWISE_DUMP_DIR", raising=False)
    pw.warmup(compile(toy), of_rows())
    assert names_in(tmp_path) == []


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(pw.ConfigError, match=r"dump_dir=.*file.* cannot be written"):
        compile(toy, dump_dir=tmp_path / "file")(rows(4))
