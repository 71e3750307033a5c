"""The table of what is aimed at: measured ratios against floor and aim."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from cometmq.bench.results import CONTROL, LOWER, Group, Results, grouped, ratio
from cometmq.bench.systems import OVER_ZEROMQ, OWN, SPINNING

AT_10K: Final = "at 10,000/s"
ANY: Final = float("inf")  # where a floor is not said in absolute figures
SEND, BATCHES, ONE = "one call a message", "batches", "one in flight"
APPEND: Final = "append, one call a message"
STORE: Final = "rocketmq_store"
NOT_PYTHON: Final = ("java", "redis-benchmark")  # the clients of all other kinds are


class Mark(NamedTuple):
    """One figure, with the floor that it must reach and the aim; `most`: it must stay below."""

    what: str
    value: float
    floor: float
    aim: float
    unit: str = "x"
    most: bool = False

    @property
    def verdict(self) -> str:
        if self._reaches(self.aim):
            return "aim"
        return "floor" if self._reaches(self.floor) else "missed"

    def _reaches(self, bound: float) -> bool:
        return self.value <= bound if self.most else self.value >= bound


class Figures:
    """The groups of a bundle, by what they are."""

    def __init__(self, results: Results) -> None:
        self.groups = grouped(results.lines)
        self.omb = results.omb

    def find(
        self, workload: str, case: str, *, system: str = OWN, client: str = "", size: int = 128
    ) -> list[Group]:
        return [
            each
            for each in self.groups
            if (each.workload, each.case, each.system) == (workload, case, system)
            and each.size == size
            and client in ("", each.client)
            and each.good
        ]

    def best(self, found: Iterable[Group], metric: str) -> Group | None:
        """The best of several clients or cases."""
        known = [(spread.median, each) for each in found if (spread := each.spread(metric))]
        if not known:
            return None
        chosen = (min if metric in LOWER else max)(known, key=lambda pair: pair[0])
        return chosen[1]

    def value(self, workload: str, case: str, metric: str, **more: Any) -> float | None:
        group = self.best(self.find(workload, case, **more), metric)
        spread = group.spread(metric) if group else None
        return spread.median if spread else None

    def control(self, beside: str, case: str, metric: str) -> float | None:
        """Of the controls that ran in the rounds of this workload."""
        found = [
            line.values[metric]
            for group in self.groups
            if (group.system, group.case) == (CONTROL, case)
            for line in group.good
            if line.beside == beside
        ]
        return statistics.median(found) if found else None

    def times(
        self, workload: str, case: str, metric: str, peers: Mapping[str, tuple[float, float]], *,
        their_cases: Sequence[str] = (), client: str = "", size: int = 128,
    ) -> list[Mark]:  # fmt: skip
        """Our ratio against each peer, with (floor, aim) by peer."""
        own = self.best(self.find(workload, case, size=size), metric)
        marks = []
        for peer, (floor, aim) in peers.items():
            found = [
                group
                for their_case in their_cases or (case,)
                for group in self.find(workload, their_case, system=peer, client=client, size=size)
            ]
            other = self.best(found, metric)
            times = ratio(own, other, metric) if own and other else None
            if times is not None and other is not None:
                what = f"{peer} ({other.client})"
                marks.append(Mark(f"against {what}", times, floor, aim))
        return marks

    def best_python_peer(
        self, workload: str, case: str, metric: str, floor: float, aim: float, *,
        their_case: str = "",
    ) -> list[Mark]:  # fmt: skip
        names = {each.system for each in self.groups} - {OWN, CONTROL}
        found = [
            group
            for name in names
            for group in self.find(workload, their_case or case, system=name)
            if group.client not in NOT_PYTHON
        ]
        other = self.best(found, metric)
        if other is None:
            return []
        marks = self.times(
            workload, case, metric, {other.system: (floor, aim)}, client=other.client,
            their_cases=(their_case or case,),
        )  # fmt: skip
        return [mark._replace(what=f"{mark.what}, the best Python peer") for mark in marks]

    def absolute(
        self, what: str, value: float | None, floor: float, aim: float, unit: str, *,
        most: bool = False,
    ) -> list[Mark]:  # fmt: skip
        return [] if value is None else [Mark(what, value, floor, aim, unit, most)]


class Row(NamedTuple):
    id: str
    what: str
    floor: str
    aim: str
    marks: Callable[[Figures], list[Mark]]


def _e1(figures: Figures) -> list[Mark]:
    tail = figures.value("embedded", f"{APPEND}, each one timed", "p99.99_us")
    return [
        *figures.times("embedded", APPEND, "messages_per_s", {STORE: (4, 10)}),
        *figures.absolute("p99.99", tail, 10, 10, "us", most=True),
    ]


def _e2(figures: Figures) -> list[Mark]:
    return figures.times(
        "embedded", "append_many(256)", "messages_per_s", {STORE: (15, 30)},
        their_cases=(APPEND,),
    )  # fmt: skip


def _e3(figures: Figures) -> list[Mark]:
    share = figures.value("beyond-memory", APPEND, "of_disk", size=1024)
    return [
        *figures.times("beyond-memory", APPEND, "messages_per_s", {STORE: (4, 7)}, size=1024),
        *figures.absolute("on the disk, of its bare write speed", share, 0, 0.8, "x"),
    ]


def _p1(figures: Figures) -> list[Mark]:
    ours = figures.value("produce", ONE, "p50_us")
    echo = figures.control("produce", "pyzmq echo, one in flight", "p50_us")
    times = ours / echo if ours and echo else None
    return [
        *figures.absolute("p50 against a bare pyzmq echo", times, 1.3, 1.2, "x", most=True),
        *figures.times("produce", ONE, "p50_us", {"rocketmq": (1, 1.4)}),
        *figures.absolute("p50", ours, ANY, 50, "us", most=True),
    ]


def _p2(figures: Figures) -> list[Mark]:
    peers = {"rocketmq": (6.0, 6.0), "kafka": (2.0, 2.0)}
    own = figures.value("produce", SEND, "messages_per_s")
    return [
        *figures.times("produce", SEND, "messages_per_s", peers),
        *figures.absolute("acknowledged", own, 1e6, 2e6, "/s"),
    ]


def _p3(figures: Figures) -> list[Mark]:
    peers = {"rocketmq": (12.0, 12.0), "kafka": (3.0, 3.0)}
    own = figures.value("produce", BATCHES, "messages_per_s")
    return [
        *figures.times("produce", BATCHES, "messages_per_s", peers, their_cases=(SEND, BATCHES)),
        *figures.absolute("acknowledged", own, 0, 4e6, "/s"),
    ]


def _l1(figures: Figures) -> list[Mark]:
    sleeping = figures.value("end-to-end", AT_10K, "p50_us")
    spinning = figures.value("end-to-end", f"{AT_10K}, {SPINNING}", "p50_us")
    return [
        *figures.times("end-to-end", AT_10K, "p50_us", {"rocketmq": (15, 15)}),
        *figures.absolute("p50, sleeping", sleeping, ANY, 30, "us", most=True),
        *figures.absolute("p50, spinning", spinning, ANY, 1, "us", most=True),
    ]


def _l2(figures: Figures) -> list[Mark]:
    return figures.best_python_peer(
        "end-to-end", f"{AT_10K}, {OVER_ZEROMQ}", "p50_us", 1, 1 / 0.6, their_case=AT_10K
    )


def _d1(figures: Figures) -> list[Mark]:
    return figures.best_python_peer("drain", "warm backlog", "messages_per_s", 10, 20)


def _d2(figures: Figures) -> list[Mark]:
    share = figures.value("drain", "cold backlog", "of_raw_read", size=1024)
    return figures.absolute("of a raw read of the same files", share, 0.8, 0.95, "x")


def _f1(figures: Figures) -> list[Mark]:
    own = figures.value("fan-out", "4 groups", "deliveries_per_s")
    return figures.absolute("deliveries", own, 4e6, 8e6, "/s")


def _s1(figures: Figures) -> list[Mark]:
    peers = {"rocketmq": (1.2, 1.35), "redis": (1.2, 1.35)}
    return [
        *figures.times("sync-flush", "1 in flight", "messages_per_s", peers),
        *figures.times(
            "sync-flush", "1 in flight, in process", "messages_per_s", {STORE: (1.2, 1.35)}
        ),
    ]


def _s2(figures: Figures) -> list[Mark]:
    peers = {"rocketmq": (4.0, 6.5), "redis": (4.0, 6.5)}
    return figures.times("sync-flush", "64 in flight", "messages_per_s", peers)


def _q1(figures: Figures) -> list[Mark]:
    one = figures.value("many-queues", "1 queue", "dispatched_per_s")
    many = figures.value("many-queues", "10,000 queues", "dispatched_per_s")
    share = many / one if many and one else None
    return [
        *figures.absolute("10,000 queues against one", share, 0.8, 0.9, "x"),
        *figures.times("many-queues", "10,000 queues", "dispatched_per_s", {STORE: (4, 10)}),
    ]


def _o1(figures: Figures) -> list[Mark]:
    marks = []
    for report in figures.omb:
        if report["driver"] != OWN or report.get("faults"):
            continue
        name = report["workload"]
        if name in ("1-topic-1-partition-100b", "1-topic-1-partition-1kb"):
            p999 = report["aggregatedEndToEndLatency999pct"]
            marks.append(Mark(f"{name}, end to end p99.9", p999, 2, 1, "ms", most=True))
        elif name == "max-rate-1-topic-1-partition-1p-1c-100b":
            rate = _mean(report["publishRate"])
            marks.append(Mark(f"{name}, published", rate, 1e6, 3e6, "/s"))
    return marks


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


ROWS: Final = (
    Row("E1", "embedded append, one call a message, 128 B", "4x RocketMQ's store",
        "10x; p99.99 at most 10 us", _e1),
    Row("E2", "append_many(256)", "15x", "30x", _e2),
    Row("E3", "embedded append, 1 KiB, beyond memory", "4x", "80 % of the disk's write speed", _e3),
    Row("P1", "produce, one in flight, p50", "1.3x a bare echo, below RocketMQ", "50 us", _p1),
    Row("P2", "send() with linger, acknowledged", "6x RocketMQ, 2x Kafka", "1 M/s; 2 M/s", _p2),
    Row("P3", "send_many", "12x RocketMQ, 3x Kafka", "4 M/s", _p3),
    Row("L1", "end to end at 10,000/s, mapped, p50", "15x below RocketMQ",
        "30 us sleeping, 1 us spinning", _l1),
    Row("L2", "end to end over ZeroMQ", "not above the best Python peer", "0.6x of it", _l2),
    Row("D1", "drain of a warm backlog", "10x the best Python peer", "20x", _d1),
    Row("D2", "drain of a cold backlog", "80 % of a raw read", "95 %", _d2),
    Row("F1", "fan-out to 4 groups", "4 M deliveries/s", "8 M", _f1),
    Row("S1", "sync flush, 1 in flight", "1.2x RocketMQ and Redis", "1.35x", _s1),
    Row("S2", "sync flush, 64 in flight", "4x RocketMQ and Redis", "6.5x", _s2),
    Row("Q1", "10,000 queues", "0.8x of one; 4x RocketMQ", "0.9x; 10x", _q1),
    Row("O1", "OMB at 50,000/s; at its maximum", "p99.9 2 ms; 1 M/s", "1 ms; 3 M/s", _o1),
)  # fmt: skip


def table(results: Results) -> list[dict[str, str]]:
    """A row for each figure; rows without any say so."""
    figures = Figures(results)
    rows = []
    for row in ROWS:
        marks = row.marks(figures)
        given = {"id": row.id, "what": row.what, "floor": row.floor, "aim": row.aim}
        for mark in marks:
            rows.append(
                given | {"measured": f"{mark.what}: {amount(mark)}", "reached": mark.verdict}
            )
        if not marks:
            rows.append(given | {"measured": "not measured", "reached": "-"})
    return rows


def amount(mark: Mark) -> str:
    if mark.unit == "/s":
        return f"{mark.value / 1e6:.2f} M/s" if mark.value >= 1e5 else f"{mark.value:,.0f}/s"
    return f"{mark.value:.2f}x" if mark.unit == "x" else f"{mark.value:,.1f} {mark.unit}"
