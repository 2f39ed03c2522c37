"""Time contenders against each other, and keep what was found.

In:  functions to call, rows and bars.
Out: `Timing` of each function; `results/<question>.json`, rewritten after every row.
Knows nothing of models or backends.

Note [Step time]
A decode step is bound by the launches on the CPU or by the kernels on the GPU, whichever is
slower. So a sample is the wall time of many back-to-back steps and one synchronisation, divided
by the steps. Contenders take turns, each sample after the other's, in an order that rotates:
noise of the machine hits all alike, and a ratio is the median over turns of two samples of the
same turn.
"""

import dataclasses
import datetime
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"

Row = dict[str, Any]

_NUM_WARMUPS = 5
_STEPS_PER_SAMPLE = (3, 2000)


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one contender, in milliseconds a step. See Note [Step time]."""

    samples: tuple[float, ...]
    submits: tuple[float, ...]
    """The part of each sample until the last step was submitted: the CPU's share."""
    num_steps: int
    """Steps in a sample."""

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    def over(self, other: "Timing") -> float:
        """How many times as long as `other`, turn by turn."""
        pairs = zip(self.samples, other.samples, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def as_row(self) -> Row:
        """What results say of it."""
        ordered = sorted(self.samples)
        return {
            "median_ms": round(self.median, 5),
            "mean_ms": round(statistics.fmean(ordered), 5),
            "min_ms": round(ordered[0], 5),
            "p99_ms": round(ordered[math.ceil(0.99 * len(ordered)) - 1], 5),
            "submit_ms": round(statistics.median(self.submits), 5),
            "num_steps": self.num_steps,
            "num_samples": len(ordered),
        }


def time_steps(
    contenders: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    num_samples: int,
    seconds_per_sample: float,
) -> dict[str, Timing]:
    """Time all contenders in turns. See Note [Step time]."""
    num_steps = {}
    for name, step in contenders.items():
        with _named(name):
            num_steps[name] = _steps_for(seconds_per_sample, step, device)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    order = list(contenders)
    with _collector_off():
        for _ in range(num_samples):
            for name in order:
                with _named(name):
                    taken[name].append(_sample(contenders[name], num_steps[name], device))
            order = [*order[1:], order[0]]
    return {
        name: Timing(tuple(s for s, _ in pairs), tuple(s for _, s in pairs), num_steps[name])
        for name, pairs in taken.items()
    }


@contextmanager
def _named(contender: str) -> Iterator[None]:
    """An error on the device shows when it is waited for: say whose turn it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while timing {contender!r}")
        raise


def _steps_for(seconds: float, step: Callable[[], object], device: torch.device) -> int:
    for _ in range(_NUM_WARMUPS):
        step()
    estimate = _sample(step, _STEPS_PER_SAMPLE[0], device)[0] / 1e3
    least, most = _STEPS_PER_SAMPLE
    return min(max(int(seconds / estimate), least), most)


def _sample(
    step: Callable[[], object], num_steps: int, device: torch.device
) -> tuple[float, float]:
    synchronize(device)
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    submitted = time.perf_counter()
    synchronize(device)
    ended = time.perf_counter()
    return (ended - started) * 1e3 / num_steps, (submitted - started) * 1e3 / num_steps


@contextmanager
def _collector_off() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was submitted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second, read and written together, of copying a buffer of `num_bytes`."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timings = time_steps(
        {"copy": lambda: target.copy_(source)}, device, num_samples=7, seconds_per_sample=0.02
    )
    return 2 * num_bytes / (min(timings["copy"].samples) / 1e3)


def read_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of adding up a buffer of `num_bytes`."""
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    timings = time_steps({"sum": source.sum}, device, num_samples=7, seconds_per_sample=0.02)
    return num_bytes / (min(timings["sum"].samples) / 1e3)


class Results:
    """One question's rows and bars; the file is complete after every change."""

    def __init__(self, question: str, device: torch.device, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.bars: list[Row] = []
        self._head = {
            "benchmark": question,
            "device": device_name(device),
            "torch": torch.__version__,
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, *rows: Row) -> None:
        """Keep rows."""
        self.rows.extend(rows)
        self._write()

    def bar(self, name: str, value: float, limit: float) -> None:
        """Keep a bar: it holds if `value` is at most `limit`."""
        ok = value <= limit
        self.bars.append({"name": name, "value": round(value, 4), "limit": limit, "ok": ok})
        say(f"  bar {'kept' if ok else 'MISSED'}: {name}: {value:.4g}, at most {limit:g}")
        self._write()

    def summary(self) -> str:
        """One line to quote."""
        kept = sum(bar["ok"] for bar in self.bars)
        head = self._head
        return (
            f"{head['benchmark']}: {kept} of {len(self.bars)} bars kept, commit "
            f"{head['commit'][:12]}, torch {head['torch']}, {head['device']}; {self.path}"
        )

    def _write(self) -> None:
        text = json.dumps({**self._head, "rows": self.rows, "bars": self.bars}, indent=1)
        self.path.write_text(text + "\n")


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"


def commit() -> str:
    """What BENCH_COMMIT says (the tree may be a copy of another checkout), else git's HEAD."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    git = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def say(text: str) -> None:
    """Print, and have it seen at once."""
    print(text, flush=True)


def print_table(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """The columns of some rows; the first is left-aligned, a skipped row says why."""
    texts = [list(columns)]
    for row in rows:
        if "skipped" in row:
            texts.append([str(row[columns[0]]), f"skipped: {row['skipped']}"])
        else:
            texts.append([_cell(row.get(column, "")) for column in columns])
    full = [line for line in texts if len(line) == len(columns)]
    widths = [max(len(line[i]) for line in full) for i in range(len(columns))]
    widths[0] = max(len(line[0]) for line in texts)
    for first, *rest in texts:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=False)]
        say("  " + "  ".join([first.ljust(widths[0]), *(cells if len(rest) > 1 else rest)]))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
