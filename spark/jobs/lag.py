"""What consumer groups are behind: messages, bytes, time. Asks the brokers; needs no Spark."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from cometmq.client import Admin
from cometmq.client.administration.groups import refusal_of
from cometmq.protocol.errors import CometError
from cometmq.spark.catalog import COUNT_MAX, RemoteBrokers
from cometmq.spark.jobs import plots
from cometmq.spark.offsets import Queue
from cometmq.spark.options import ReadOptions

SAMPLES_MAX: Final = 2_000  # that a plot shows, the latest


class GroupLag(msgspec.Struct, frozen=True):
    """A group in one queue. None: not known, which is not the same as 0.

    A queue in which the group has never committed is unread from its first message on.
    """

    ts_ms: int
    group: str
    topic: str
    broker: str
    queue_id: int
    committed: int | None  # None: never
    max_offset: int
    lag_messages: int  # those that have expired are not counted: nobody can read them
    expired_messages: int
    lag_bytes: int
    lag_ms: int | None  # age of the first message that was not read
    rate_in: float | None  # messages a second since the sample before
    rate_out: float | None
    eta_s: float | None  # until nothing is left, at these rates
    state: str  # ok, stalled, never (committed there, and something is unread), ahead, expired


class LagSampler:
    """Sample the lag of groups; from the second sample on with rates.

    Args:
        groups: names of the groups; empty for all that the brokers know.
        retries: retries of one request.

    `refused` has the groups that the last sample lacks, with their errors.
    """

    def __init__(self, name_server: str, groups: Sequence[str] = (), *, retries: int = 2) -> None:
        self._admin = Admin(name_server)
        self._brokers = RemoteBrokers(ReadOptions(namesrv=name_server, retries=retries))
        self._groups = tuple(groups)
        self._before: dict[tuple[str, Queue], GroupLag] = {}
        self._was_there: set[str] = set()
        self.refused: dict[str, CometError] = {}

    def sample(self) -> list[GroupLag]:
        """Return one row per group and queue.

        Raises NotReachable; GroupNotExist and other errors of a group that the caller named, if no
        earlier sample has it.
        """
        names = self._groups or tuple(each.group for each in self._admin.groups())
        self.refused = {}
        rows = []
        for group in names:
            try:
                rows += self._rows(group)
            except CometError as error:
                if group in self._groups and group not in self._was_there:
                    raise
                self.refused[group] = refusal_of(error)
            else:
                self._was_there.add(group)
        return rows

    def _rows(self, group: str) -> list[GroupLag]:
        described = self._admin.describe_group(group)
        queues = [Queue(each.broker, each.topic, each.queue_id) for each in described.queues]
        ranges = self._brokers.ranges(queues)
        offsets = self._brokers.committed(group, queues)
        rows = [self._row(group, queue, offsets[queue], ranges[queue]) for queue in queues]
        self._before |= {(group, queue): row for queue, row in zip(queues, rows, strict=True)}
        return rows

    def _row(self, group: str, queue: Queue, committed: int, limits: tuple[int, int]) -> GroupLag:
        low, high = limits
        before = self._before.get((group, queue))
        now = int(time.time() * 1000)
        begin = min(max(committed, low), high)
        lag = high - begin
        size, age = 0, 0  # type: int, int | None
        if lag:
            _, size = self._brokers.parts(queue, begin, high, COUNT_MAX)
            stored = self._brokers.store_time(queue, begin)
            age = None if stored is None else max(0, now - stored)
        rates = _rates(before, now, committed, high)
        return GroupLag(
            ts_ms=now,
            group=group,
            topic=queue.topic,
            broker=queue.broker,
            queue_id=queue.queue_id,
            max_offset=high,
            committed=committed if committed >= 0 else None,
            lag_messages=lag,
            expired_messages=max(0, low - committed) if committed >= 0 else 0,
            lag_bytes=size,
            lag_ms=age,
            rate_in=rates[0],
            rate_out=rates[1],
            eta_s=_eta(lag, *rates),
            state=_state(committed, low, high, lag, before),
        )

    def close(self) -> None:
        self._brokers.close()
        self._admin.close()


def lag(name_server: str, groups: Sequence[str] = ()) -> list[GroupLag]:
    """One sample."""
    sampler = LagSampler(name_server, groups)
    try:
        return sampler.sample()
    finally:
        sampler.close()


def _rates(
    before: GroupLag | None, now: int, committed: int, high: int
) -> tuple[float | None, float | None]:
    if before is None or before.committed is None or committed < 0 or now <= before.ts_ms:
        return None, None
    seconds = (now - before.ts_ms) / 1000
    return (high - before.max_offset) / seconds, (committed - before.committed) / seconds


def _eta(lag: int, rate_in: float | None, rate_out: float | None) -> float | None:
    if not lag:
        return 0.0
    if rate_in is None or rate_out is None or rate_out <= rate_in:
        return None
    return lag / (rate_out - rate_in)


def _state(committed: int, low: int, high: int, lag: int, before: GroupLag | None) -> str:
    if committed < 0:
        return "never" if lag else "ok"
    if committed > high:
        return "ahead"
    if committed < low:
        return "expired"
    stands = before is not None and before.committed == committed and bool(before.lag_messages)
    return "stalled" if lag and stands else "ok"


# --- a plot ---


def write_plot(samples: Sequence[Sequence[GroupLag]], path: Path) -> None:
    """A page of its own: for each group and topic a line of what was unread at each sample."""
    times: list[int] = []
    unread: dict[tuple[str, str], dict[int, int]] = {}  # group, topic -> sample -> messages
    for number, rows in enumerate(samples):
        times.append(max((row.ts_ms for row in rows), default=times[-1] if times else 0))
        for row in rows:
            of_topic = unread.setdefault((row.group, row.topic), Counter())
            of_topic[number] += row.lag_messages
    shown = [_plot(f"{group}: {topic}", times, found) for (group, topic), found in unread.items()]
    last = sum(found.get(len(times) - 1, 0) for found in unread.values())
    summary = f"{last:,} messages are unread at the last of {len(times):,} samples"
    plots.write_page(path, "What groups are behind", summary, shown)


def _plot(name: str, times: Sequence[int], unread: dict[int, int]) -> str:
    numbers = sorted(unread)
    most = max(unread.values())
    first, last = times[0], times[-1]
    points = [
        (
            plots.WIDTH * (times[number] - first) / max(1, last - first),
            unread[number] / max(1, most),
            f"{_clock(times[number])}: {unread[number]:,} messages",
        )
        for number in numbers
    ]
    note = f"{unread[numbers[-1]]:,} messages are unread, at most {most:,}"
    return plots.drawing(name, note, plots.line(points), _clock(first), _clock(last))


def _clock(ms: int) -> str:
    """In the zone of whoever runs the command."""
    return datetime.fromtimestamp(ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")
