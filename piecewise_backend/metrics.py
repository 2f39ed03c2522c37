"""What serving looked like: how many steps ran from which graphs, and why the others did not.

In:  the statistics of one or several traces.
Out: `Metrics`, a snapshot: `str()` for people, `as_dict()` for programs, `prometheus_text()`.
Knows nothing of models, graphs or tensors.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from piecewise_backend.batch import CUDAGraphMode, FallbackReason
from piecewise_backend.errors import ConfigError
from piecewise_backend.statistics import Statistics, Tally

_EXECUTION_MODES = {CUDAGraphMode.FULL: "cuda_graph", CUDAGraphMode.PIECEWISE: "piecewise"}
_EAGER = "eager"
_USER_LABELS = ("model_revision", "attention_backend")


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """The steps that one capture size served in one mode."""

    mode: CUDAGraphMode
    """FULL or PIECEWISE."""
    size: int
    """The capture size; 0 for a graph of static shapes."""
    num_replays: int
    """Steps served."""
    num_tokens: int
    """Real tokens of all these steps."""
    num_padded_tokens: int
    """Rows of all these steps that were padding."""

    @property
    def execution_mode(self) -> str:
        """`cuda_graph` if the whole step is one graph, `piecewise` otherwise."""
        return _EXECUTION_MODES[self.mode]

    @property
    def padding_waste(self) -> float:
        """Padding per row of these steps; 0.0 if there were no rows."""
        return _ratio(self.num_padded_tokens, self.num_padded_tokens + self.num_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Metrics:
    """All steps of a model up to one moment; made by `Metrics.of`."""

    buckets: tuple[Bucket, ...]
    """What served steps, sorted by the name of the mode, then by size."""
    fallbacks: Mapping[FallbackReason, int]
    """Steps that ran without graphs, by reason, most frequent first."""
    labels: Mapping[str, str]
    """The user's `model_revision` and `attention_backend`, as far as given."""

    @classmethod
    def of(cls, statistics: Iterable[Statistics], labels: Mapping[str, str] | None = None) -> Self:
        """The sum of several statistics. It does not follow later steps.

        Args:
            statistics: those of each trace of the model.
            labels: `model_revision` and `attention_backend`, for Prometheus.

        Returns:
            A snapshot.

        Raises:
            ConfigError: a label has another name, or its value is not text.
        """
        _check_labels(labels or {})
        tallies: list[Tally] = []
        fallbacks: Counter[FallbackReason] = Counter()
        for each in statistics:
            tallies += each.tallies
            # A copy, because the model may be serving in another thread while this one iterates.
            fallbacks.update(dict(each.fallbacks))
        by_count = sorted(fallbacks.items(), key=lambda item: (-item[1], item[0].name))
        return cls(_buckets(tallies), dict(by_count), dict(labels or {}))

    @property
    def num_replays(self) -> int:
        """Steps served from graphs."""
        return sum(bucket.num_replays for bucket in self.buckets)

    @property
    def num_steps(self) -> int:
        """All steps, from graphs and without."""
        return self.num_replays + sum(self.fallbacks.values())

    @property
    def hit_rate(self) -> float:
        """Share of steps served from graphs; 0.0 before the first step."""
        return _ratio(self.num_replays, self.num_steps)

    @property
    def fallback_rate(self) -> float:
        """Share of steps served without graphs; 0.0 before the first step."""
        return _ratio(self.num_steps - self.num_replays, self.num_steps)

    @property
    def padding_waste(self) -> float:
        """Padding per row of the steps served from graphs; 0.0 if there were no rows."""
        num_padded_tokens = sum(bucket.num_padded_tokens for bucket in self.buckets)
        num_tokens = sum(bucket.num_tokens for bucket in self.buckets)
        return _ratio(num_padded_tokens, num_padded_tokens + num_tokens)

    def as_dict(self) -> dict[str, Any]:
        """The snapshot in plain types, ready for JSON.

        Returns:
            Totals and rates by name; `buckets` as a list; `fallbacks` by reason, in lower case.
        """
        return {
            "labels": dict(self.labels),
            "num_steps": self.num_steps,
            "num_replays": self.num_replays,
            "hit_rate": self.hit_rate,
            "fallback_rate": self.fallback_rate,
            "padding_waste": self.padding_waste,
            "buckets": [
                {
                    "execution_mode": bucket.execution_mode,
                    "bucket": bucket.size,
                    "num_replays": bucket.num_replays,
                    "num_tokens": bucket.num_tokens,
                    "num_padded_tokens": bucket.num_padded_tokens,
                    "padding_waste": bucket.padding_waste,
                }
                for bucket in self.buckets
            ],
            "fallbacks": {reason.name.lower(): n for reason, n in self.fallbacks.items()},
        }

    def __str__(self) -> str:
        rows = [
            ("execution mode", "bucket", "steps", "share", "real tokens", "padding waste", "reason")
        ]
        for b in self.buckets:
            counts = (self._share(b.num_replays), str(b.num_tokens), _percent(b.padding_waste))
            rows.append(
                (b.execution_mode, str(b.size or "static"), str(b.num_replays), *counts, "")
            )
        for reason, n in self.fallbacks.items():
            rows.append((_EAGER, "-", str(n), self._share(n), "-", "-", reason.value))
        num_tokens = str(sum(bucket.num_tokens for bucket in self.buckets))
        totals = (self._share(self.num_steps), num_tokens, _percent(self.padding_waste))
        rows.append(("total", "", str(self.num_steps), *totals, ""))
        rates = f"hit rate {_percent(self.hit_rate)}, fallback rate {_percent(self.fallback_rate)}"
        labels = [f"{name}: {value}" for name, value in self.labels.items()]
        return "\n".join([*labels, _table(rows), rates])

    def _share(self, num_steps: int) -> str:
        return _percent(_ratio(num_steps, self.num_steps))


def prometheus_text(metrics: Metrics) -> str:
    """A snapshot in the text format that Prometheus scrapes.

    Args:
        metrics: the snapshot; its labels are put on every line, `""` where not given.

    Returns:
        Counters of steps, tokens and padded tokens, and gauges of both rates.

    Raises:
        ConfigError: `prometheus_client` is not installed.
    """
    try:  # an optional dependency, of those who scrape only
        from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415
        from prometheus_client import core as families  # noqa: PLC0415
        from prometheus_client.registry import Collector  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "prometheus_text needs prometheus_client, which is not installed; "
            "pip install prometheus-client"
        ) from error

    class Snapshot(Collector):
        def collect(self) -> Iterator[families.Metric]:
            for family in _families(metrics):
                kind: type[families.CounterMetricFamily | families.GaugeMetricFamily]
                kind = families.GaugeMetricFamily
                if family.is_counter:
                    kind = families.CounterMetricFamily
                made = kind(family.name, family.meaning, labels=family.label_names)
                for label_values, value in family.samples:
                    made.add_metric(label_values, value)
                yield made

    registry = CollectorRegistry()
    registry.register(Snapshot())
    return generate_latest(registry).decode()


@dataclasses.dataclass(frozen=True, slots=True)
class _Family:
    """One metric of Prometheus, with its samples."""

    name: str
    meaning: str
    label_names: tuple[str, ...]
    samples: Sequence[tuple[tuple[str, ...], float]]
    is_counter: bool = True


def _families(metrics: Metrics) -> Iterator[_Family]:
    user = tuple(metrics.labels.get(name, "") for name in _USER_LABELS)
    buckets = [((b.execution_mode, str(b.size)), b) for b in metrics.buckets]
    steps = [((*key, "", *user), b.num_replays) for key, b in buckets]
    # Reasons that never occurred too: a series that starts at 1 hides its first step from rate().
    steps += [
        ((_EAGER, "", reason.name.lower(), *user), metrics.fallbacks.get(reason, 0))
        for reason in FallbackReason
    ]
    names = ("execution_mode", "bucket")
    step_names = (*names, "fallback_reason", *_USER_LABELS)
    yield _Family("piecewise_steps_total", "Steps, from graphs and without.", step_names, steps)
    tokens = [((*key, *user), b.num_tokens) for key, b in buckets]
    meaning = "Real tokens of steps from graphs."
    yield _Family("piecewise_tokens_total", meaning, (*names, *_USER_LABELS), tokens)
    padded = [((*key, *user), b.num_padded_tokens) for key, b in buckets]
    meaning = "Rows of padding in steps from graphs."
    yield _Family("piecewise_padded_tokens_total", meaning, (*names, *_USER_LABELS), padded)
    rates = {
        "piecewise_hit_rate": ("Share of steps from graphs.", metrics.hit_rate),
        "piecewise_fallback_rate": ("Share of steps without graphs.", metrics.fallback_rate),
    }
    for name, (meaning, value) in rates.items():
        yield _Family(name, meaning, _USER_LABELS, [(user, value)], is_counter=False)


def _check_labels(labels: Mapping[str, str]) -> None:
    for name, value in labels.items():
        if name not in _USER_LABELS:
            raise ConfigError(
                f"labels has {name!r}; the labels are 'model_revision' and 'attention_backend'"
            )
        if not isinstance(value, str):
            raise ConfigError(f"label {name!r} is {value!r}; give a string")


def _buckets(tallies: Iterable[Tally]) -> tuple[Bucket, ...]:
    """Tallies that served steps, those of one mode and size summed."""
    buckets: dict[tuple[CUDAGraphMode, int], Bucket] = {}
    for tally in tallies:
        mode, size, num_tokens = tally.mode, tally.size, tally.num_tokens
        num_padded_tokens = size - num_tokens if size else 0
        # Read once: a step of another thread may add to it between two reads.
        if num_replays := tally.num_replays:
            so_far = buckets.get((mode, size), Bucket(mode, size, 0, 0, 0))
            buckets[mode, size] = Bucket(
                mode,
                size,
                so_far.num_replays + num_replays,
                so_far.num_tokens + num_replays * num_tokens,
                so_far.num_padded_tokens + num_replays * num_padded_tokens,
            )
    return tuple(sorted(buckets.values(), key=lambda bucket: (bucket.mode.name, bucket.size)))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells as text: numbers to the right, the first and the last cell to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in [rows[0], tuple("-" * width for width in widths), *rows[1:]]:
        numbers = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)][1:-1]
        lines.append("  ".join([row[0].ljust(widths[0]), *numbers, row[-1]]).rstrip())
    return "\n".join(lines)
