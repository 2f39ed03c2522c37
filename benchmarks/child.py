"""Run a part of a benchmark in a process of its own, where pools and caches are empty.

In:  a module's name and arguments; the module prints one line with `report_to_parent`.
Out: the dictionary of that line.
Knows nothing of what is measured.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import REPOSITORY, say

_MARK = "BENCHMARK-RESULT "


def run_child(
    module: str, args: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float
) -> dict[str, Any]:
    """Run `python -m module args`; a failure is a dictionary with its reason under "skipped"."""
    command = [sys.executable, "-m", module, *args]
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, env={**os.environ, **(env or {})}, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"skipped": f"took longer than {timeout:g} s"}
    lines = done.stdout.splitlines()
    for line in reversed(lines):
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))  # type: ignore[no-any-return]
    say("\n".join(lines[-30:]))
    return {"skipped": f"exit status {done.returncode}: {lines[-1] if lines else 'no output'}"}


def report_to_parent(found: Mapping[str, Any]) -> None:
    """Hand a result to the process that runs this one."""
    say(_MARK + json.dumps(found))
