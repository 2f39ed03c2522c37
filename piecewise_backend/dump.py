"""Write what the backend made, as files that a person can read and Python can import.

In:  a split graph, and the sources of plans.
Out: `<dump_dir>/graph_<n>/computation_graph.py`, `plan_*.py`, `transformed_code.py`, and
     `passes/<piece>/<nn>_<pass>.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import CodeType

from piecewise_backend.batch import CUDAGraphMode
from piecewise_backend.canonical import Instance
from piecewise_backend.decompiled import decompiled
from piecewise_backend.errors import ConfigError
from piecewise_backend.render import render_split_graph
from piecewise_backend.steps import SplitGraph

_HEADER = (
    "# Written by piecewise_backend. Names r0, r1, ...: rows of static buffers; k0, ...: bound.\n"
)


class GraphDump:
    """Files of one graph. Without a directory nothing is written, and nobody has to ask."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = None if directory is None else _unused(directory)

    def write_graph(self, split: SplitGraph, instances: tuple[Instance, ...]) -> None:
        """Write `computation_graph.py`."""
        if self.directory is not None:
            self._write("computation_graph.py", render_split_graph(split, instances))

    def write_transformed(self, code: CodeType) -> None:
        """Write what Dynamo made of the user's function."""
        if self.directory is not None:
            self._write("transformed_code.py", decompiled(code))

    def write(self, name: str, source: str) -> None:
        """Write the source of a plan."""
        if self.directory is not None:
            self._write(name, _HEADER + source)

    def write_captured(self, mode: CUDAGraphMode, size: int, source: str) -> None:
        """Write the plan of a captured size; 0 stands for a graph of static shapes."""
        kind = "" if mode is CUDAGraphMode.PIECEWISE else "full_"
        self.write(f"plan_{kind}{size or 'static'}.py", source)

    def pass_writer(self, name: str) -> Callable[[str, str], None] | None:
        """Who writes what passes do to the graph of this name; another folder in each call."""
        if self.directory is None:
            return None
        taken = itertools.count(2)
        folder = f"passes/{name}"
        while (self.directory / folder).exists():
            folder = f"passes/{name}_version_{next(taken)}"
        return lambda file, text: self._write(f"{folder}/{file}", text)

    def _write(self, name: str, text: str) -> None:
        assert self.directory is not None
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _unused(directory: Path) -> Path:
    """A folder that no earlier graph took, in this process or another."""
    for number in itertools.count():
        candidate = directory / f"graph_{number}"
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"dump_dir={str(directory)!r} cannot be written ({error.strerror}); give a "
                "directory that can be made, or None"
            ) from None
        return candidate
    raise AssertionError("count() does not end")
