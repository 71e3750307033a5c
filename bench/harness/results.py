"""Measured lines, their medians, and the ratios against each peer."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from cometmq.bench.extra import BenchError
from cometmq.bench.systems import OWN

CONTROL: Final = "control"
SAME_RATE: Final = 0.01
FORMAT: Final = 1  # of results.json

# What a metric is, and whether less of it is better. Every line has the first three if they apply.
LOWER: Final = frozenset(
    {"p50_us", "p90_us", "p99_us", "p99.9_us", "p99.99_us", "max_us", "ready_s", "first_ack_s",
     "cpu_s_per_million", "drift_percent"}
)  # fmt: skip
UNITS: Final = {
    "messages_per_s": "messages/s",
    "deliveries_per_s": "deliveries/s",
    "mb_per_s": "MB/s",
    "cpu_s_per_million": "CPU s per million",
}


class Line(msgspec.Struct, kw_only=True, frozen=True):
    """One run of one case on one system.

    Args:
        case: what is measured, in words; the same for all systems.
        key: the metric that ratios are taken of.
        settings: what was not the default.
        hlogs: of latencies, by kind; paths within the bundle.
        faults: why it does not count.
        quiet: whether other processes used less than 5 % of a core.
    """

    workload: str
    case: str
    system: str
    client: str
    durability: str
    round: int
    size: int
    key: str
    values: dict[str, float]
    client_version: str = ""
    system_version: str = ""
    settings: dict[str, Any] = {}
    hlogs: dict[str, list[str]] = {}
    faults: list[str] = []
    others: float = 0.0  # cores busy with something else
    stolen: float = 0.0
    notes: list[str] = []
    beside: str = ""  # of a control: the workload whose round it belongs to

    @property
    def quiet(self) -> bool:
        return self.others <= 0.05


class Results(msgspec.Struct, kw_only=True):
    """A bundle's results.json."""

    machine: dict[str, Any]
    run: dict[str, Any]  # commit, command, times
    versions: dict[str, str]
    lines: list[Line]
    omb: list[dict[str, Any]] = []
    missing: dict[str, str] = {}  # systems that were asked for and could not run
    format: int = FORMAT

    @property
    def faults(self) -> list[str]:
        return [
            f"{line.system}, {line.workload}, {line.case}, round {line.round}: {fault}"
            for line in self.lines
            for fault in line.faults
        ]


def load_results(path: Path) -> Results:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise BenchError(f"{path}: not a results.json: {error}") from None
    if found.format != FORMAT:
        raise BenchError(f"{path}: format {found.format}, and this is for format {FORMAT}")
    return found


class Spread(NamedTuple):
    """Median, and the ends."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))


class Group(NamedTuple):
    """What was measured alike: the rounds of one case on one system."""

    workload: str
    case: str
    size: int
    system: str
    client: str
    durability: str
    lines: list[Line]

    @property
    def good(self) -> list[Line]:
        return [line for line in self.lines if not line.faults]

    def spread(self, metric: str) -> Spread | None:
        values = [line.values[metric] for line in self.good if metric in line.values]
        return Spread.of(values) if values else None

    @property
    def key(self) -> str:
        return self.lines[0].key


def grouped(lines: Iterable[Line]) -> list[Group]:
    """In the order of their first line."""
    found: dict[tuple[str, str, int, str, str, str], list[Line]] = {}
    for line in lines:
        alike = (line.workload, line.case, line.size, line.system, line.client, line.durability)
        found.setdefault(alike, []).append(line)
    return [Group(*alike, lines=members) for alike, members in found.items()]


def ratio(ours: Group, theirs: Group, metric: str = "") -> float | None:
    """How many times better ours is: above 1 we win, whatever the metric is.

    None where there is nothing to compare: latencies at different rates, above all.
    """
    metric = metric or ours.key
    asked = ours.spread("asked_per_s"), theirs.spread("asked_per_s")
    if asked[0] and asked[1] and abs(asked[0].median / asked[1].median - 1) > SAME_RATE:
        return None
    mine, other = ours.spread(metric), theirs.spread(metric)
    if mine is None or other is None or not mine.median or not other.median:
        return None
    return other.median / mine.median if metric in LOWER else mine.median / other.median


def rows(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """A row for each group: the key metric with its spread, the cost, and the ratio to ours."""
    groups = grouped(lines)
    ours = {(each.workload, each.case, each.size, each.client): each for each in groups
            if each.system == OWN}  # fmt: skip
    return [_row(group, ours) for group in groups]


def _row(group: Group, ours: dict[tuple[str, str, int, str], Group]) -> dict[str, Any]:
    spread = group.spread(group.key)
    own = ours.get((group.workload, group.case, group.size, "embedded")) or ours.get(
        (group.workload, group.case, group.size, "python")
    )
    times = None if own is None or group.system == OWN else ratio(own, group)
    cpu = group.spread("cpu_s_per_million")
    return {
        "workload": group.workload,
        "case": group.case,
        "size": group.size,
        "system": group.system,
        "client": group.client,
        "durability": group.durability,
        "metric": UNITS.get(group.key, group.key.replace("_", " ")),
        "median": None if spread is None else rounded(spread.median),
        "min": None if spread is None else rounded(spread.low),
        "max": None if spread is None else rounded(spread.high),
        "rounds": len(group.good),
        "cometmq_is": None if times is None else f"{times:.2f}x",
        "cpu_s_per_million": None if cpu is None else rounded(cpu.median),
        "remarks": "; ".join(_remarks(group)),
    }


def _remarks(group: Group) -> list[str]:
    found = []
    failed = len(group.lines) - len(group.good)
    if failed:
        found.append(f"{failed} of {len(group.lines)} rounds FAILED")
    noisy = sum(not line.quiet for line in group.lines)
    if noisy:
        found.append(f"{noisy} of {len(group.lines)} rounds on a busy machine")
    settings = {f"{key}={value}" for line in group.lines for key, value in line.settings.items()}
    return [
        *found,
        *sorted(settings),
        *sorted({note for line in group.lines for note in line.notes}),
    ]


def rounded(value: float) -> float | int:
    """Four digits are more than there is to know."""
    if value >= 1000:
        return round(round(value), 4 - len(str(int(value))))
    return float(f"{value:.4g}")
