"""What a start of the timers believes of their files, which may be older or newer than the log."""

from __future__ import annotations

from cometmq.protocol.errors import MessageNotFound
from cometmq.protocol.names import TIMER_TOPIC
from cometmq.shm.derived.timer_files import TimerCheck
from cometmq.shm.kernel.codec import decode
from cometmq.shm.kernel.store import TimerWheel
from cometmq.shm.reading.store_reader import StoreReader


def believed_up_to(store: StoreReader, frontier: int, bytes_max: int) -> int:
    """The physical offset at which the timer log ends for a start. It has no unit for what was
    overdue when it was read; behind the frontier that may be undelivered, so it is read again.
    """
    first = store.get_message(TIMER_TOPIC, 0, frontier, 1, max_bytes=bytes_max)
    if first.payload is None:
        return store.positions.log_range()[1]
    (message,) = decode(first.payload)
    return message.physical_offset


def read_up_to(
    store: StoreReader, wheel: TimerWheel, check: TimerCheck | None, frontier: int
) -> int | None:
    """The queue offset behind what is in the timer log; None: nobody knows."""
    after = 0
    if wheel.last_place >= 0:
        try:
            record = store.record_at(wheel.last_place)
        except MessageNotFound:
            if wheel.last_place >= store.positions.log_range()[0]:
                return None
        else:
            if record.topic != TIMER_TOPIC or record.queue_offset >= frontier:
                return None
            after = record.queue_offset + 1
    if check is not None and wheel.end >= check.log_end:
        return min(max(after, check.queue_offset), frontier)
    return after


def claimed_check(there: TimerCheck | None, wheel: TimerWheel, seen: int) -> TimerCheck:
    """Return the timercheck to write before any unit is put into the wheel, with our limit for
    RocketMQ's reading of the topic. With no file, or with one written by RocketMQ, a RocketMQ that
    opens the store after a kill would put units into its wheel that are there already.

    The position of deliveries stays as it was: those are on the disk.
    """
    if there is None or there.log_end > wheel.end:  # or the timer log was rebuilt
        return TimerCheck(0 if there is None else there.read_ms, 0, 0)
    return there._replace(queue_offset=min(there.queue_offset, seen))
