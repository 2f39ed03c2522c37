"""`piecewise cache list | explain | clear`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from piecewise_backend.artifact_store import ArtifactStore
from piecewise_backend.cache_entry import KEY, Record, name_of
from piecewise_backend.cache_misses import why_missed
from piecewise_backend.command_line import main
from piecewise_backend.config import Config
from piecewise_backend.errors import ConfigError
from tests.store_process import recipe

PROJECT = Path(__file__).parents[1]


def key(version: str, *nodes: str) -> dict[str, Any]:
    return {
        "piece": {"nodes": list(nodes)},
        "sizes": [8],
        "torch": {"version": version},
        "machine": {"device": "some GPU"},
    }


FIRST, OTHER_GRAPH, OTHER_TORCH = key("2.13", "a", "b"), key("2.13", "c"), key("2.14", "a", "b")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache with three entries, made in this order."""
    store = ArtifactStore(tmp_path)
    for age, one in enumerate([FIRST, OTHER_GRAPH, OTHER_TORCH]):
        store.fetch(one, *recipe(bytes(2000)))
        for file in (tmp_path / name_of(one)).iterdir():
            os.utime(file, (1000 + age, 1000 + age))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> tuple[int, list[str]]:
    status = main(["cache", *arguments, "--dir", str(root)])
    return status, capsys.readouterr().out.splitlines()


def test_list_shows_size_age_and_what_was_compiled(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = run(capsys, root, "list")
    assert status == 0
    (line,) = [line for line in lines if line.startswith(name_of(FIRST))]
    assert "2 nodes at sizes [8], some GPU, torch 2.13" in line
    assert "KiB" in line
    assert "d ago, used" in line
    assert lines[-1].startswith("3 entries, ")


def test_list_shows_what_is_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / name_of(FIRST) / KEY).write_text("{")
    _, lines = run(capsys, root, "list")
    (line,) = [line for line in lines if line.startswith(name_of(FIRST))]
    assert "key.json: no JSON" in line


def test_explain_names_what_differs_from_the_nearest_entry(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = run(capsys, root, "explain")
    assert status == 0
    assert lines[0].startswith(name_of(OTHER_TORCH))
    assert name_of(FIRST) in lines[1]
    assert lines[2:] == ["  torch.version: '2.13' -> '2.14'"]


def trace(function: str, reads: dict[str, Any], fit: list[str]) -> dict[str, Any]:
    """The key of a stored trace."""
    x = [["Tensor", "torch.float32", "cpu", [None, 4], "contiguous", [False, False]], {}]
    parameters = {"x": x, "n": "int 3", "pair": ["tuple", x, "NoneType None"]}
    return {
        "trace": {"function": f"{function} {'c0de' * 8}", "parameters": parameters},
        "answers": {"reads": reads, "fit": fit},
        "torch": {"version": "2.13"},
        "machine": {"device": "some GPU"},
    }


WEIGHT = "L['self']._modules['layers']._modules['0']._parameters['weight']"
READS = {
    "G['__builtins_dict___2']['iter'] BUILTIN_MATCH": "builtins.iter",
    "G['__import_shop_dot_helpers'].SCALE CONSTANT_MATCH": "float 0x1.8p+1",
    "L['self'].act EQUALS_MATCH": "str 'silu'",
    "L['self'].act CONSTANT_MATCH": "str 'silu'",
    "L['self'].order CONSTANT_MATCH": ["tuple", "int 1", "int 2"],
    "L['self'] TYPE_MATCH": [f"shop.Model {'a' * 32}", "act"],
    f"{WEIGHT} TENSOR_MATCH": ["Parameter", "torch.float16", "cuda:0", [4], [2], [True, False]],
}
FIT = ["L['x'].size()[0]: s77", f"{WEIGHT}: (4,) (1,)"]
OTHER_READS: list[tuple[dict[str, Any], list[str], str]] = [
    (
        {"L['self'].act EQUALS_MATCH": "str 'none'", "L['self'].act CONSTANT_MATCH": "str 'none'"},
        [],
        "reads self.act: 'silu' -> 'none'",
    ),
    (
        {"G['__import_shop_dot_helpers'].SCALE CONSTANT_MATCH": "float 0x1.0p-2"},
        [],
        "reads shop.helpers.SCALE: 3.0 -> 0.25",
    ),
    (
        {"L['self'] TYPE_MATCH": [f"shop.Model {'b' * 32}", "act"]},
        [],
        "reads self.class: shop.Model (code aaaaaaaa) -> shop.Model (code bbbbbbbb)",
    ),
    (
        {"L['self'] TYPE_MATCH": [f"shop.Model {'a' * 32}", "act", "factor"]},
        [],
        "reads self.has factor: (absent) -> True",
    ),
    (
        {f"{WEIGHT} TENSOR_MATCH": [*READS[f"{WEIGHT} TENSOR_MATCH"][:-1], [False, False]]},
        [],
        "reads self.layers[0].weight: float16 [4] Parameter on cuda:0 strides [2] with gradient -> "
        "float16 [4] Parameter on cuda:0 strides [2]",
    ),
    ({}, ["s77 <= 6", *FIT], "assumes s77 <= 6: (absent) -> True"),
    (
        {"L['self'].order CONSTANT_MATCH": ["tuple", "int 2", "int 1"]},
        [],
        "answers.reads.L['self'].order CONSTANT_MATCH.1: 'int 1' -> 'int 2'",
    ),
]


@pytest.mark.parametrize(("reads", "fit", "line"), OTHER_READS)
def test_explain_names_what_a_trace_read_as_the_program_does(
    tmp_path: Path,
    reads: dict[str, Any],
    fit: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = trace("shop.Model.forward", READS | reads, fit or FIT)
    others = [trace("shop.Model.forward", READS, FIT), trace("shop.Other.forward", READS, FIT)]
    store = ArtifactStore(tmp_path)
    for age, one in enumerate([*others, wanted]):
        store.fetch(one, *recipe(bytes(20)))
        for file in (tmp_path / name_of(one)).iterdir():
            os.utime(file, (1000 + age, 1000 + age))
    _, lines = run(capsys, tmp_path, "explain")
    call = "shop.Model.forward(n: 3, pair: [float32 [*, 4], None], x: float32 [*, 4])"
    assert lines[0] == f"{name_of(wanted)}  trace of {call}, some GPU, torch 2.13"
    assert name_of(others[0]) in lines[1]
    assert lines[2] == f"  {line}"
    assert run(capsys, tmp_path, "explain", name_of(others[1]))[1][1:] == [
        "nothing was there that could have served"
    ]


@pytest.mark.parametrize(
    ("group", "name", "one", "other"),
    [
        ("reads", "L['self'].t DICT_KEYS_MATCH", ["dict", "a", "b", ["tuple", "c"], "d", "e"], "f"),
        ("reads", "L['self'].t EQUALS_MATCH", ["tuple", "1", "2", ["tuple", "3"], "4", "5"], "6"),
        ("ops", "ns::op", [[f"ns::op.{n}() -> Tensor", 8 * "c0de"] for n in range(6)], "none"),
    ],
)
def test_six_things_are_no_tensor(group: str, name: str, one: list[Any], other: str) -> None:
    keys = [trace("shop.Model.forward", {}, FIT) for _ in range(2)]
    for key, last in zip(keys, (one[-1], other), strict=True):
        key["answers"].setdefault(group, {})[name] = [*one[:-1], last]
    found = why_missed(keys[0], {"there": Record(keys[1], {}, "no digest")})
    assert "is most like there" in found[0]
    assert ("self.t" if group == "reads" else name) in "".join(found[1:])


def test_explain_of_a_damaged_entry(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = name_of(FIRST)
    (root / name / KEY).write_text("{")
    status, lines = run(capsys, root, "explain", name[:8])
    assert status == 0
    assert lines[0].startswith(f"{name}  ")
    assert "no JSON" in lines[0]


def test_what_was_one_object_is_told() -> None:
    one = trace("shop.Model.forward", READS, FIT)
    other = trace("shop.Model.forward", READS | {"G['KIND'] SEEN": "shop.Kind"}, FIT)
    other["answers"]["same"] = [["L['self']._modules['act']", "G['KIND']"]]
    there = {"there": Record(one, {}, "no digest")}
    assert why_missed(other, there)[1:] == ("  that KIND is self.act: (absent) -> True",)
    other["answers"] |= {"same": [], "apart": [["L['self'].names item 0", 1]]}
    text = "  that self.names item 0 is not the equal one: (absent) -> 1"
    assert why_missed(other, there)[1:] == (text,)


def test_what_a_trace_read_in_consequence_is_no_reason() -> None:
    """Nor are the names that Dynamo numbers."""
    reads = {name.replace("___2", "___4"): value for name, value in READS.items()}
    reads |= {"L['self'].act EQUALS_MATCH": "str 'none'", "L['self'].limit EQUALS_MATCH": "int 3"}
    there = trace("shop.Model.forward", {"L['self'].act EQUALS_MATCH": "str 'silu'"}, FIT)
    there["answers"]["reads"] |= {"G['__builtins_dict___2']['iter'] BUILTIN_MATCH": "builtins.iter"}
    found = why_missed(
        trace("shop.Model.forward", reads, FIT), {"there": Record(there, {}, "no digest")}
    )
    assert found[1:] == ("  reads self.act: 'silu' -> 'none'",)


def test_explain_of_the_first_entry_and_of_none(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = run(capsys, root, "explain", name_of(FIRST)[:8])
    assert (status, lines[1]) == (
        0,
        "nothing was there that could have served",
    )
    text = f"no entry in {root} starts with 'no-such-name'; `piecewise cache list` shows all"
    assert run(capsys, root, "explain", "no-such-name") == (1, [text])


def test_a_file_that_is_a_link_to_itself(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = root / name_of(FIRST) / "key.json"
    key.unlink()
    key.symlink_to(key)
    status, lines = run(capsys, root, "list")
    assert status == 0
    assert "key.json" in next(line for line in lines if line.startswith(name_of(FIRST)))
    assert run(capsys, root, "explain")[0] == 0
    assert run(capsys, root, "clear")[0] == 0
    assert not key.parent.exists()


def test_clear_empties_the_cache(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, (line,) = run(capsys, root, "clear")
    assert status == 0
    assert line.startswith("removed 3 entries, ")
    assert run(capsys, root, "list") == (1, [f"nothing in {root}"])
    assert run(capsys, root, "clear") == (1, [f"nothing in {root}"])


@pytest.mark.parametrize("arguments", [[], ["cache"], ["cache", "lists"]])
def test_wrong_arguments_are_explained(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: piecewise" in capsys.readouterr().err


def test_the_directory_comes_from_the_option_or_the_users_cache(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIECEWISE_CACHE_DIR", str(root))
    assert main(["cache", "list"]) == 0
    monkeypatch.setenv("PIECEWISE_CACHE_DIR", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "xdg"))
    assert main(["cache", "list"]) == 1
    assert f"nothing in {root / 'xdg' / 'piecewise_backend'}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["list", "explain"])
def test_the_directory_may_stand_before_the_command_and_the_last_one_counts(
    root: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "--dir", str(root), command]) == 0
    assert main(["cache", "--dir", str(tmp_path / "none"), command, "--dir", str(root)]) == 0
    assert main(["cache", "--dir", str(root), command, "--dir", str(tmp_path / "none")]) == 1
    assert f"nothing in {tmp_path / 'none'}" in capsys.readouterr().out


def test_the_directory_is_given_as_cache_dir_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "xdg"))
    monkeypatch.setenv("HOME", str(root / "home"))
    monkeypatch.setenv("PIECEWISE_CACHE_DIR", str(root))
    for given, place in (("default", "xdg/piecewise_backend"), ("~/mine", "home/mine")):
        assert main(["cache", "list", "--dir", given]) == 1
        assert capsys.readouterr().out == f"nothing in {root / place}\n"


@pytest.mark.parametrize("value", ["off", ""])
def test_what_is_no_directory_is_explained(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cache", "--dir", value, "list"])
    assert f"--dir: {value!r} is no directory; give a path, or 'default'" in capsys.readouterr().err


def test_a_home_that_nobody_has_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cache", "--dir", "~no_such_user/x", "list"])
    assert "--dir='~no_such_user/x': Could not determine home" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="give an absolute path"):
        Config.from_options({"cache_dir": "~no_such_user/x"})


@pytest.mark.parametrize(
    ("value", "xdg", "expected"),
    [
        (None, "/x", None),
        ("off", "/x", None),
        ("default", "/x", Path("/x/piecewise_backend")),
        ("default", "relative", Path("/home/of/user/.cache/piecewise_backend")),
        ("default", None, Path("/home/of/user/.cache/piecewise_backend")),
        ("~/mine", None, Path("/home/of/user/mine")),
        (Path("/there"), None, Path("/there")),
    ],
)
def test_what_cache_dir_may_be(
    monkeypatch: pytest.MonkeyPatch, value: Any, xdg: str | None, expected: Path | None
) -> None:
    monkeypatch.setenv("HOME", "/home/of/user")
    if xdg is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert Config.from_options({"cache_dir": value}).cache_dir == expected


@pytest.mark.parametrize(
    ("value", "num_bytes"), [(1, 1), (2**40, 2**40), ("4GiB", 2**32), ("1.5 MiB", 3 * 2**19)]
)
def test_what_max_cache_size_may_be(
    monkeypatch: pytest.MonkeyPatch, value: Any, num_bytes: int
) -> None:
    assert Config.from_options({"max_cache_size": value}).max_cache_size == num_bytes
    monkeypatch.setenv("PIECEWISE_MAX_CACHE_SIZE", str(value))
    assert Config.from_options().max_cache_size == num_bytes
    assert Config.from_options({"max_cache_size": 7}).max_cache_size == 7


@pytest.mark.parametrize("value", [0, -1, True, None, 0.5, "0.5", "4 GB", "much", "", [4]])
def test_what_max_cache_size_may_not_be(value: Any) -> None:
    expected = rf"max_cache_size={re.escape(repr(value))}; give bytes.* '4GiB'"
    with pytest.raises(ConfigError, match=expected):
        Config.from_options({"max_cache_size": value})


@pytest.mark.parametrize("value", [3, True, "", ["/there"]])
def test_what_cache_dir_may_not_be(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"cache_dir=.*give a path, 'default', or 'off'"):
        Config.from_options({"cache_dir": value})


def test_the_command_is_installed_and_runs_as_a_module(root: Path) -> None:
    scripts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"piecewise": f"{main.__module__}:{main.__name__}"}
    command = [sys.executable, "-m", "piecewise_backend", "cache", "list", "--dir", str(root)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 entries" in done.stdout
