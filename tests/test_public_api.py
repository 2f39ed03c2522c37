"""What `import piecewise_backend` promises."""

from __future__ import annotations

import inspect

import pytest

import piecewise_backend as pw
from piecewise_backend import errors

PROMISED = [
    "BatchDescriptor", "CUDAGraphMode", "CaptureError", "Config", "ConfigError", "ContractError",
    "PassError", "PiecewiseError", "SplitError", "compilation_counter", "default_capture_sizes",
    "register_splitting_op", "report", "seal", "split_graph", "warmup",
]  # fmt: skip


def test_exported_names_are_sorted_and_exist() -> None:
    assert list(pw.__all__) == sorted(pw.__all__)
    assert all(hasattr(pw, name) for name in pw.__all__)


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_exported(name: str) -> None:
    assert name in pw.__all__


def test_nothing_public_is_left_out() -> None:
    public = {
        name
        for name, value in vars(pw).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(pw.__all__)


@pytest.mark.parametrize("name", pw.__all__)
def test_every_name_has_a_docstring(name: str) -> None:
    value = getattr(pw, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
        members = (
            {
                key: member
                for key, member in vars(value).items()
                if inspect.isfunction(member) and not key.startswith("_")
            }
            if inspect.isclass(value)
            else {}
        )
        assert [key for key, member in members.items() if not member.__doc__] == []


def test_errors_are_one_tree() -> None:
    tree = {name: kind for name, kind in vars(errors).items() if name.endswith("Error")}
    assert set(tree) == {
        "PiecewiseError", "ConfigError", "SplitError", "ContractError", "CaptureError", "PassError",
    }  # fmt: skip
    leaves = set(tree.values()) - {pw.PiecewiseError}
    assert all(kind.__bases__ == (pw.PiecewiseError,) for kind in leaves)
    assert issubclass(pw.PiecewiseError, Exception)
    drawn = {line.split()[1] for line in (errors.__doc__ or "").splitlines() if " +- " in line}
    assert drawn == {kind.__name__ for kind in leaves}


@pytest.mark.parametrize("kind", ["ConfigError", "SplitError", "ContractError", "CaptureError"])
def test_errors_take_a_message(kind: str) -> None:
    with pytest.raises(pw.PiecewiseError, match="what happened"):
        raise getattr(pw, kind)("what happened")
