"""`piecewise cache list | explain | clear`: look at the compilation cache, and empty it.

In:  arguments.
Out: text, and an exit status: 1 if there is nothing of the kind, 2 for wrong arguments.
Knows nothing of models.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from piecewise_backend import option_checks
from piecewise_backend.cache_contents import clear, entries
from piecewise_backend.cache_entry import Damaged, Record
from piecewise_backend.cache_misses import why_missed
from piecewise_backend.config import Config
from piecewise_backend.errors import ConfigError
from piecewise_backend.trace_words import call_of, is_of_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; `piecewise` calls it."""
    given = _parser().parse_args(arguments)
    root = given.dir or Config.from_options().cache_dir or option_checks.default_cache_dir()
    lines = list(_COMMANDS[given.command](root, given))
    print("\n".join(lines or [_nothing(root, given)]))
    return 0 if lines else 1


def _nothing(root: Path, given: argparse.Namespace) -> str:
    if (wanted := getattr(given, "entry", "")) and entries(root):
        return f"no entry in {root} starts with {wanted!r}; `piecewise cache list` shows all"
    return f"nothing in {root}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="piecewise")
    cache = parser.add_subparsers(required=True).add_parser("cache", help="the compilation cache")
    _add_directory(cache, default=None)
    commands = cache.add_subparsers(dest="command", required=True)
    for name, help_text in _HELP.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        _add_directory(command, default=argparse.SUPPRESS)  # or it would undo the one before
        if name == "explain":
            command.add_argument(
                "entry", nargs="?", default="", help="how its name starts; the newest if not given"
            )
    return parser


def _add_directory(parser: argparse.ArgumentParser, default: str | None) -> None:
    help_text = "the cache, as cache_dir= has it; if not given, PIECEWISE_CACHE_DIR or 'default'"
    parser.add_argument("--dir", type=_directory, default=default, help=help_text)


def _directory(text: str) -> Path:
    """What the option `cache_dir` makes of it, if that is a directory."""
    try:
        found = option_checks.cache_dir("--dir", text) if text else None
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no directory; give a path, or 'default'")
    return found


def _list(root: Path, given: argparse.Namespace) -> Iterator[str]:
    there, now = entries(root), time.time()
    for entry in there:
        ages = f"made {_ago(now - entry.made)}, used {_ago(now - entry.used)}"
        yield f"{entry.name}  {_size(entry.num_bytes):>9}  {ages}  {_summary(entry.record())}"
    if there:
        total = _size(sum(entry.num_bytes for entry in there))
        yield f"{len(there)} entries, {total} in {root}"


def _explain(root: Path, given: argparse.Namespace) -> Iterator[str]:
    """Why an entry had to be made: how it differs from the one most like it that was there."""
    found = {entry: entry.record() for entry in entries(root)}
    records = {entry: record for entry, record in found.items() if isinstance(record, Record)}
    wanted = [entry for entry in found if entry.name.startswith(given.entry)]
    readable = [entry for entry in wanted if entry in records]
    if not readable:
        yield from (f"{entry.name}  {_summary(found[entry])}" for entry in wanted)
        return
    entry = max(readable, key=lambda entry: entry.made)
    yield f"{entry.name}  {_summary(records[entry])}"
    earlier = {other.name: records[other] for other in records if other.made < entry.made}
    yield from why_missed(records[entry].key, earlier)


def _clear(root: Path, given: argparse.Namespace) -> Iterator[str]:
    removed = clear(root)
    if removed:
        total = _size(sum(entry.num_bytes for entry in removed))
        yield f"removed {len(removed)} entries, {total}, from {root}"


_COMMANDS = {"list": _list, "explain": _explain, "clear": _clear}
_HELP = {
    "list": "what the cache holds, last used first",
    "explain": "why a piece was compiled although something like it was there",
    "clear": "remove every entry that no process is working on",
}


def _summary(record: Record | Damaged | None) -> str:
    if not isinstance(record, Record):
        return str(record or "removed meanwhile")
    known: Any = {"piece": {}, "sizes": [], "torch": {}, "machine": {}} | dict(record.key)
    device, version = known["machine"].get("device"), known["torch"].get("version")
    if is_of_trace(known):
        what = "trace" if "answers" in known else "questions of traces"
        return f"{what} of {call_of(known)}, {device}, torch {version}"
    if "kernel choices of" in known:
        return f"what the kernels of artifact {known['kernel choices of'][:16]} chose when they ran"
    kind = "decision for " if "decision among" in known else ""
    nodes = len(known["piece"].get("nodes", ()))
    conditions = " and ".join(record.about.get("conditions", ()))
    where = f" where {conditions}" if conditions else ""
    return f"{kind}{nodes} nodes at sizes {known['sizes']}{where}, {device}, torch {version}"


def _ago(seconds: float) -> str:
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name} ago"
    return f"{max(seconds, 0):.0f} s ago"


def _size(num_bytes: int) -> str:
    for name, length in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= length:
            return f"{num_bytes / length:.1f} {name}"
    return f"{num_bytes} B"
