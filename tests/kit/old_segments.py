"""A broker whose segments are old: for tests of what is deleted, and what is not."""

from __future__ import annotations

import os
import time
from typing import Any

from family import RunningBroker, Sent
from patience import patient
from waiting import until

from cometmq.shm.live.control import Counter
from cometmq.shm.os.files import list_segments, segment_name

WAIT_S = patient(60)
MIB = 1 << 20
ALL_HOURS = ";".join(f"{hour:02d}" for hour in range(24))
OLD_S = 73 * 3600
FAST: dict[str, Any] = {
    "flushConsumerOffsetInterval": 100,  # what the ledger has is soon in its files, and may go
    "cleanResourceInterval": 20,
    "deleteCommitLogFilesInterval": 5,
    "deleteConsumeQueueFilesInterval": 5,
    "flushIntervalCommitLog": 20,
    "flushCommitLogLeastPages": 0,
    "fileReservedTime": 72,
    "deleteFileBatchMax": 100,
}


def write_segments(broker: RunningBroker, count: int, **kinds: Any) -> list[Sent]:
    """Messages until the log's tail lies in a segment with so many before it, all of it flushed."""
    sent: list[Sent] = []
    while broker.counter(Counter.WROTE) <= count * MIB:
        place = broker.counter(Counter.WROTE)
        bodies = [b"%d %d " % (place, number) + b"x" * 100_000 for number in range(4)]
        sent += broker.send("t", 0, bodies, **kinds)
    wrote = broker.counter(Counter.WROTE)
    for counter in (Counter.FLUSHED, Counter.DISPATCHED):
        until(lambda counter=counter: broker.counter(counter) >= wrote)
    return sent


def make_old(broker: RunningBroker, count: int, first: int = 0) -> None:
    old = time.time() - OLD_S
    for number in range(first, first + count):
        os.utime(broker.store / "commitlog" / segment_name(number * MIB), times=(old, old))


def log_begins(broker: RunningBroker, at: int) -> None:
    until(lambda: broker.counter(Counter.MIN_OFFSET) == at, says=lambda: broker.log)
    until(lambda: list_segments(broker.store / "commitlog", MIB)[0] == at)
