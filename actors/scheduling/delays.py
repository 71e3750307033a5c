"""Delay levels: messages wait in SCHEDULE_TOPIC_XXXX, and are copied to their topics when due.

A level is a queue of that topic. All in it wait equally long, so the first is due first. How long
one has waited says a clock that nobody sets: its record tells when it was stored (Uptime).
"""

from __future__ import annotations

import logging
import time
from typing import Final, NamedTuple

from cometmq.actors.runtime.deriver import Deriver
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.inner import InnerRecords, properties_max
from cometmq.actors.runtime.uptime import now_up
from cometmq.actors.scheduling.portion import Portion, SetAside, Targets
from cometmq.actors.tables.delays import Now, delay_ms
from cometmq.protocol.commands import Cover, Position
from cometmq.protocol.errors import MessageIllegal
from cometmq.protocol.names import DELAY_TOPIC
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import BatchFull, decode
from cometmq.shm.kernel.store import (
    DELAYS_AHEAD,
    DELAYS_DONE,
    DELAYS_EARLY,
    DELAYS_NEW_QUEUE,
    fill_due,
)
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

COUNT_MAX: Final = 512  # messages of one write
BYTES_MAX: Final = 1_048_576
WRITE_TIMEOUT_S: Final = 1.0  # then it is asked anew: the commitlog process may have begun again


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def read_clocks() -> Now:
    return Now(now_ms(), now_up())


class _Copies(NamedTuple):
    """Of what is due, up to a queue offset; how long what lies there waits."""

    records: InnerRecords
    after: int
    wait_ms: int = 0


class DelayLevel:
    """One level: how far it has been delivered, and when it goes on.

    A derived write has the copies and the queue offset behind them, both or neither. So whatever
    dies, each message is delivered once.

    Args:
        level: from 1.
        aside: takes what no log takes.
    """

    topic = DELAY_TOPIC

    def __init__(
        self,
        family: Family,
        commitlog: Channel,
        store: StoreReader,
        level: int,
        aside: SetAside,
    ) -> None:
        self.level = level
        self.name = f"delay level {level}"
        self.queue_id = level - 1
        self._delay_ms = delay_ms(level, family.settings.delay_levels_ms)
        self._there = (0, 0)  # what lies before that queue offset, was stored by that uptime
        self._bytes_max = min(BYTES_MAX, family.settings.mapped_file_size_commit_log_bytes // 4)
        self._properties_max = properties_max(family.settings)
        self._portion = Portion(COUNT_MAX)
        self._aside = aside
        self._targets = Targets()
        self._store = store
        self._deriver = Deriver(commitlog, f"delays.{level}", timeout_s=WRITE_TIMEOUT_S)
        # Queue offsets. RocketMQ may have come further than the log knows of: delayOffset.json.
        self.begin = 0
        self.offset: int | None = None  # of what comes next; None: the log has to be asked
        self.delivered = 0  # messages, by this process
        self.failures = 0  # in a row

    @property
    def seen(self) -> int:
        """Below that queue offset nothing waits, as far as is known."""
        return self.offset or self.begin

    def deliver(self) -> float | None:
        """Deliver what is due, as much as one write holds; in how many seconds it goes on, None:
        when something more is stored. Raises what appending raises."""
        offset = self._position()
        result = self._store.get_message(
            DELAY_TOPIC, self.queue_id, offset, self._portion.count, max_bytes=self._bytes_max
        )
        if result.payload is None:
            if result.next_queue_offset > offset:  # it has expired, or is damaged
                self._pass_over(offset, result.next_queue_offset)
                return 0.0
            return None
        copies = self._copies(result.payload, result.next_queue_offset, read_clocks())
        if copies.after == offset:
            return copies.wait_ms / 1000
        try:
            self._write(copies.records, copies.after)
        except MessageIllegal as error:  # one of them is, and hinders all
            tried = [m for m in decode(result.payload) if m.queue_offset < copies.after]
            if self._portion.refused(len(tried)):
                for each in tried:
                    self._aside.message(each, error)
                self._write(InnerRecords(), copies.after)
            return 0.0
        self._portion.stored()
        return copies.wait_ms / 1000

    def _copies(self, payload: bytes, end: int, now: Now) -> _Copies:
        """Of what is due among these records, which reach up to that queue offset."""
        records = InnerRecords(size_max=2 * self._bytes_max, properties_max=self._properties_max)
        queues: dict[bytes, int] = {}
        clock, up_ms, at = int(now.up.clock, 16), now.up.ms, 0
        while True:
            reason, at, offset, detail = fill_due(
                records.encoder, payload, at, queues, self._delay_ms, now.wall_ms, clock, up_ms
            )
            if reason == DELAYS_DONE:
                return _Copies(records, end if offset < 0 else offset)
            if reason == DELAYS_NEW_QUEUE:
                queue = self._targets.of(detail)
                queues[detail] = -1 if queue is None else records.queue(*queue)
                continue
            wait_ms = detail if reason == DELAYS_EARLY else 0
            if reason == DELAYS_AHEAD:
                wait_ms = self._delay_ms - self._seen_for_ms(offset, up_ms)
            if wait_ms > 0:
                return _Copies(records, offset, wait_ms)
            message = decode(memoryview(payload)[at:])[0]
            try:
                self._aside.add_copy(records, message, message.properties)
            except BatchFull:
                return _Copies(records, offset)
            at += message.size

    def _seen_for_ms(self, offset: int, up_ms: int) -> int:
        """What a clock stamped that is ahead of this one, in another boot, waits its delay from
        when it is seen here, and no longer: it hides all behind it."""
        if offset >= self._there[0]:
            reach = self._store.positions.queue_range(DELAY_TOPIC, self.queue_id)
            end = reach.max_queue_offset if reach else offset + 1
            self._there = max(end, offset + 1), up_ms
        return up_ms - self._there[1]

    def _pass_over(self, begin: int, end: int) -> None:
        log.warning("messages %d to %d of %s, queue %d, are gone: they are not delivered",
                    begin, end - 1, DELAY_TOPIC, self.queue_id)  # fmt: skip
        self._write(InnerRecords(), end)

    def _write(self, records: InnerRecords, after: int) -> None:
        count = records.encoder.count
        self.offset = None  # until it is known what has become of it
        self._deriver.write(records, Position(0, after), cover=Cover.WRITTEN)
        self.offset = after
        self.delivered += count

    def _position(self) -> int:
        if self.offset is None:
            self.offset = max(self._deriver.position().number, self.begin)
        return self.offset
