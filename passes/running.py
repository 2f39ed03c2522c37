"""Run the passes of one stage over a graph, and keep account of them.

In:  passes in order, a graph, and where it comes from.
Out: the changed graph, a `PassRecord` for each pass, dumps.
Knows nothing of compilers: `PassList.run` is a function over a graph.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from torch import fx

from piecewise_backend import _torch
from piecewise_backend.errors import PassError
from piecewise_backend.passes.definition import Function, Pass
from piecewise_backend.passes.keys import digest, key_of
from piecewise_backend.passes.validation import BrokenGraphError, Interface, check

Write = Callable[[str, str], None]
"""Takes the name of a file and its text."""

_HEADER = "import torch\nfrom torch import device, inf, nan  # noqa: F401\n\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass did to one graph."""

    name: str
    matches: int
    milliseconds: float | None
    """None: the result was in a cache, and the pass did not run now."""
    op_changes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Ops that are more or fewer than before."""

    def __str__(self) -> str:
        spent = "cached" if self.milliseconds is None else f"{self.milliseconds:.1f} ms"
        return f"{self.name}: {self.matches} matches, {spent}"


class PassList:
    """The passes of one stage, in order."""

    def __init__(self, passes: Sequence[Pass], *, validate: bool = False) -> None:
        self.passes = tuple(passes)
        self._validate = validate
        self._matchers: dict[str, Function] = {}
        self._key: str | None = None

    def with_passes(self, passes: Sequence[Pass]) -> PassList:
        """Others, run in the same way."""
        return PassList(passes, validate=self._validate)

    def key(self) -> str:
        """A hash of everything that what the passes do depends on, when it is first asked for.

        It takes a tenth of a second, and is asked for with every version of every piece.

        Raises:
            ConfigError: see `key_of`.
        """
        if self._key is None:
            self._key = digest([_own_sources(), *map(key_of, self.passes)])
        return self._key

    def run(
        self, graph: fx.Graph, where: str, write: Write | None = None
    ) -> tuple[PassRecord, ...]:
        """Run every pass over `graph`, in place.

        Args:
            graph: an FX graph whose nodes have values.
            where: names the graph in errors.
            write: called with the graph as it comes, and as each pass leaves it.

        Raises:
            PassError: a pass failed, or left a broken graph.
        """
        if write is not None and self.passes:
            write("00_before.py", f"# {where}, before any pass\n{_HEADER}{_source(graph)}")
        records = []
        for number, item in enumerate(self.passes, start=1):
            record = self._run_one(item, graph, where)
            records.append(record)
            if write is not None:
                text = f"# {where}, after {record}\n{_change_lines(record)}{_HEADER}"
                write(f"{number:02d}_{item.name}.py", text + _source(graph))
        return tuple(records)

    def _run_one(self, item: Pass, graph: fx.Graph, where: str) -> PassRecord:
        interface = Interface.of(graph)
        before, text = _ops(graph), str(graph)
        started = time.perf_counter()
        try:
            matches = self._apply(item, graph)
            in_inductor = item.stage == "piece"
            check(graph, interface, for_inductor=in_inductor, recompute=self._validate)
        except PassError:
            raise
        except BrokenGraphError as error:
            raise PassError(
                f"pass {item.name!r} left a broken graph in {where}: {error}; correct it, or "
                f"switch it off with pass_config={{{item.name!r}: False}}"
            ) from error
        except Exception as error:
            raise PassError(
                f"pass {item.name!r} failed in {where}: {type(error).__name__}: {error}; correct "
                f"it, or switch it off with pass_config={{{item.name!r}: False}}"
            ) from error
        spent = 1000 * (time.perf_counter() - started)
        if matches is None:
            matches = int(str(graph) != text)
        after = _ops(graph)
        changes = {op: after[op] - before[op] for op in sorted(before | after)}
        changes = {op: change for op, change in changes.items() if change}
        return PassRecord(item.name, int(matches), spent, changes)

    def _apply(self, item: Pass, graph: fx.Graph) -> int | None:
        if item.name not in self._matchers:
            self._matchers[item.name] = item.matcher()
        matches = self._matchers[item.name](graph)
        if matches is not None and (not isinstance(matches, int) or matches < 0):
            raise TypeError(
                f"it returned {type(matches).__name__} {str(matches)[:80]!r}; change the graph "
                "that is given, and return how often that was done, or None"
            )
        return matches

    def require_matches(self, found: Mapping[str, Iterable[PassRecord]]) -> None:
        """Compare what was found in all graphs with what the passes demand.

        Args:
            found: the records of each graph, by a name for it.

        Raises:
            PassError: a pass has fewer than its `min_matches`.
        """
        for item in self.passes:
            counts = {
                where: sum(record.matches for record in records if record.name == item.name)
                for where, records in found.items()
            }
            if sum(counts.values()) < item.min_matches:
                raise PassError(
                    f"pass {item.name!r} matched {sum(counts.values())} times, but min_matches="
                    f"{item.min_matches} ({counts}); look at the graphs that it saw with dump_dir="
                )


def merged(runs: Sequence[tuple[PassRecord, ...]]) -> tuple[PassRecord, ...]:
    """The records of several graphs that were compiled as one, pass by pass."""
    records = []
    for of_pass in zip(*runs, strict=True):
        changes: Counter[str] = Counter()
        for record in of_pass:
            changes.update(record.op_changes)
        matches = sum(record.matches for record in of_pass)
        times = [r.milliseconds for r in of_pass if r.milliseconds is not None]
        spent = sum(times) if times else None
        records.append(PassRecord(of_pass[0].name, matches, spent, dict(changes)))
    return tuple(records)


def _ops(graph: fx.Graph) -> Counter[str]:
    called = (node for node in graph.nodes if node.op.startswith("call_"))
    return Counter(_torch.target_name(node) for node in called)


def _source(graph: fx.Graph) -> str:
    return graph.python_code("self", verbose=True).src.lstrip()


def _change_lines(record: PassRecord) -> str:
    changes = [f"#   {change:+d} {op}\n" for op, change in record.op_changes.items()]
    return "".join(changes) or "#   the same ops as before\n"


@functools.cache
def _own_sources() -> str:
    """Of this package what passes are made with, so that changing it changes every key."""
    folders = (Path(__file__).parent, Path(_torch.__file__).parent)
    return digest([path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))])
