"""For how long a level has a message wait, whatever becomes of the wall clock."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import reference

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.scheduling.delays import DelayLevel
from cometmq.actors.scheduling.portion import SetAside
from cometmq.actors.tables.delays import Now
from cometmq.protocol.errors import MessageIllegal
from cometmq.protocol.names import DELAY_TOPIC
from cometmq.protocol.uptime import Uptime
from cometmq.shm.kernel.codec import decode
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import LogAppender

NONE: Any = None
DELAY_MS = 5_000
SEED = 20_261_125


class Level:
    """One whose queue has so many messages."""

    def __init__(self) -> None:
        self.end = 0
        reach = SimpleNamespace(queue_range=lambda *_: SimpleNamespace(max_queue_offset=self.end))
        settings = SimpleNamespace(
            delay_levels_ms=(1, DELAY_MS),
            mapped_file_size_commit_log_bytes=1 << 20,
            enabled_append_prop_crc=False,
        )
        store: Any = SimpleNamespace(positions=reach)
        family: Any = SimpleNamespace(settings=settings)
        self.level = DelayLevel(family, NONE, store, 2, SetAside(store))

    def wait_ms(self, offset: int, stored_ms: int, up: Uptime | None, now: Now) -> int:
        """How long a record waits; 0: it is due."""
        record = reference.encode_record(
            topic=DELAY_TOPIC,
            properties=b"REAL_TOPIC\1t\2REAL_QID\0010\2" + (up.as_property() if up else b""),
            queue_offset=offset,
            store_timestamp=stored_ms,
        )
        copies = self.level._copies(record, offset + 1, now)
        count = copies.records.encoder.count
        assert (copies.after - offset, copies.wait_ms > 0) == (count, count == 0)
        return copies.wait_ms


def test_by_a_clock_that_nobody_sets() -> None:
    """The wall clock is stepped again and again; store times stand still when it goes back."""
    print("seed", SEED)
    chance = random.Random(SEED)
    level = Level()
    wall_ms = store_ms = 10**12
    stored: list[tuple[int, int]] = []  # store time, up
    for up_ms in range(1_000, 60_000, 500):
        wall_ms += 500 + chance.choice([0, 0, 0, 86_400_000, -86_400_000, 700, -700])
        store_ms = max(store_ms, wall_ms)
        stored.append((store_ms, up_ms))
        now = Now(wall_ms, Uptime("0123abcd", up_ms))
        for offset, (store_time, up) in enumerate(stored):
            waits = level.wait_ms(offset, store_time, Uptime("0123abcd", up), now)
            assert waits == max(0, up + DELAY_MS - up_ms)


def test_of_another_boot_the_wall_clock_counts() -> None:
    level = Level()
    now = Now(10**12, Uptime("0123abcd", 50_000))
    for up in (None, Uptime("ffffffff", 49_999), Uptime("0123abcd", 60_000)):
        assert level.wait_ms(0, 10**12 - 4_000, up, now) == 1_000
        assert level.wait_ms(0, 10**12 - 86_400_000, up, now) == 0


def test_what_is_stored_tomorrow_waits_its_delay_from_now_on() -> None:
    """And all that lie there with it, at once: those of the next boot stand behind them."""
    level = Level()
    level.end = 2
    tomorrow = 10**12 + 86_400_000

    def wait_ms(offset: int, up_ms: int) -> int:
        now = Now(10**12, Uptime("0123abcd", up_ms))
        return level.wait_ms(offset, tomorrow + offset, None, now)

    assert [wait_ms(0, 50_000), wait_ms(1, 54_000)] == [DELAY_MS, 1_000]
    assert [wait_ms(0, 55_000), wait_ms(1, 55_000)] == [0, 0]
    level.end = 4  # more of them, seen later
    assert [wait_ms(2, 56_000), wait_ms(3, 57_000), wait_ms(3, 61_000)] == [DELAY_MS, 4_000, 0]


def test_one_that_no_record_of_ours_can_hold_hinders_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """RocketMQ can be told to take frames of more than 16 MiB."""
    memory = memoryview(bytearray(1 << 25))
    log, queue = LogAppender(bytes(8), 1 << 25), QueueCursor(DELAY_TOPIC, 1)
    log.attach(memory, 0, 0)
    for body in (b"before", bytes(1 << 24), b"behind"):
        log.append(queue, body, b"REAL_TOPIC\1t\2REAL_QID\0010\2")
    aside, records = SetAside(NONE), InnerRecords()
    for message in decode(memory[: log.physical_offset]):
        aside.add_copy(records, message, message.properties)
    assert (records.encoder.count, aside.count) == (2, 1)
    assert f"message 1 of {DELAY_TOPIC}, queue 1, at physical offset " in caplog.text
    assert "is never delivered: record of" in caplog.text


def test_one_that_the_log_refuses_is_set_aside_also_in_front_of_a_gap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    level = Level()
    place = b"REAL_TOPIC\1t\2REAL_QID\0010\2"
    waiting = [
        reference.encode_record(topic=DELAY_TOPIC, properties=place, queue_offset=offset, body=body)
        for offset, body in ((0, b"a"), (1, b"refused"), (7, b"b"), (8, b"c"))
    ]
    stored: list[bytes] = []

    def get_message(_topic: str, _queue: int, offset: int, most: int, **_: int) -> SimpleNamespace:
        records = [each for each in waiting if decode(each)[0].queue_offset >= offset][:most]
        after = decode(records[-1])[0].queue_offset + 1 if records else 9
        if records and after == 2:
            after = 7  # what lay between is gone
        return SimpleNamespace(payload=b"".join(records) or None, next_queue_offset=after)

    def write(records: InnerRecords, _after: object, **_: object) -> None:
        payload = records.encoder.take()
        if b"refused" in payload:
            raise MessageIllegal("no log takes it")
        stored.append(payload)

    delays: Any = level.level
    delays.offset = 0
    delays._store.get_message = get_message
    delays._deriver = SimpleNamespace(
        write=write, position=lambda: SimpleNamespace(number=delays.begin)
    )
    seen = [0]
    for _ in range(20):
        if delays.deliver() is None:
            break
        delays.begin = seen[-1] if delays.offset is None else delays.offset
        seen.append(delays.begin)
    assert delays.offset == 9
    assert [any(body in each for each in stored) for body in (b"a", b"b", b"c")] == [True] * 3
    assert "message 1 of " in caplog.text
    assert caplog.text.count("is never delivered") == 1
