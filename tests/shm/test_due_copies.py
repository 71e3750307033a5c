"""Copies of what has waited in a delay level, and of what was given back: as plain Python makes
them, of records in which anything may stand."""

from __future__ import annotations

import random

import pytest
import reference

from cometmq.actors.tables.delays import Now, destination
from cometmq.protocol.errors import CometError
from cometmq.protocol.uptime import AHEAD_MS, Uptime, uptime_of
from cometmq.shm.kernel.codec import Message, RecordDamaged, decode
from cometmq.shm.kernel.store import (
    DELAYS_AHEAD,
    DELAYS_DONE,
    DELAYS_EARLY,
    DELAYS_NEW_QUEUE,
    DELAYS_ODD,
    InnerEncoder,
    again_properties,
    fill_due,
)

SEED = 20_261_127
DELAY_MS = 5_000
NOW = Now(10**12, Uptime("0123abcd", 60_000))
CLOCK = int(NOW.up.clock, 16)
PLACES = (
    b"REAL_TOPIC\1t\2REAL_QID\0010\2", b"REAL_QID\0017\2a\1b\2REAL_TOPIC\1u\2",
    b"REAL_TOPIC\1x\2REAL_TOPIC\1t\2REAL_QID\0011\2REAL_QID\0010\2",
)  # fmt: skip
NOWHERE = (b"REAL_TOPIC\1t\2", b"REAL_QID\0010\2", b"", b"REAL_TOPIC\1/\2REAL_QID\0010\2",
           b"REAL_TOPIC\1t\2REAL_QID\001-1\2", b"REAL_TOPIC\1t\1u\2REAL_QID\0010\2")  # fmt: skip


def up_property(chance: random.Random, waited_ms: int) -> bytes:
    """Of a record that waits for so long; it may say it, by this clock, another one, or none."""
    up = NOW.up.ms - waited_ms
    return chance.choice(
        [
            b"",
            Uptime(NOW.up.clock, up).as_property(),
            Uptime(NOW.up.clock, up, up).as_property(),
            Uptime("ffffffff", 1).as_property(),
            b"COMETMQ_UP\1xx\2",
            b"COMETMQ_UP\10123abcd-00000000000x\2",
        ]
    )


def waiting(chance: random.Random, offset: int, waited_ms: int, place: bytes) -> bytes:
    user = b"".join(
        chance.choice([b"a\1b\2", b"KEYS\1k\2", b"\1x\2", b"\2", b"y\1\2", b"z\2", b"DELAY\0012\2"])
        for _ in range(chance.randrange(4))
    )
    parts = [user, place, up_property(chance, waited_ms)]
    chance.shuffle(parts)
    return reference.encode_record(
        topic="SCHEDULE_TOPIC_XXXX",
        body=chance.randbytes(chance.choice([0, 1, 100])),
        properties=b"".join(parts),
        queue_id=1,
        queue_offset=offset,
        physical_offset=offset,
        store_timestamp=NOW.wall_ms - waited_ms,
        reconsume_times=chance.randrange(3),
        sys_flag=chance.choice([0, 1]),
        append_crc=chance.random() < 0.3,
    )


def copied(payload: bytes) -> tuple[bytes, int, str]:
    """By plain Python: the copies, of how many records, and why no more of them."""
    encoder, queues = InnerEncoder(), dict[tuple[str, int], int]()
    for count, message in enumerate(decode(payload)):
        waited = NOW.waited_ms(message.store_timestamp_ms, uptime_of(message.properties))
        if waited < DELAY_MS:
            return encoder.take(), count, "early" if waited >= 0 else "ahead"
        try:
            queue = destination(message.properties)
        except CometError:
            return encoder.take(), count, "odd"
        encoder.add_stored(queues.setdefault(queue, len(queues)), message.record)
    return encoder.take(), len(decode(payload)), "done"


def filled(payload: bytes, encoder: InnerEncoder | None = None) -> tuple[bytes, int, str]:
    """By the kernel."""
    encoder = encoder or InnerEncoder()
    keys, queues = dict[bytes, int](), dict[tuple[str, int], int]()
    reason, at, offset, detail = DELAYS_NEW_QUEUE, 0, 0, None
    while reason == DELAYS_NEW_QUEUE:
        reason, at, offset, detail = fill_due(
            encoder, payload, at, keys, DELAY_MS, NOW.wall_ms, CLOCK, NOW.up.ms
        )
        if reason == DELAYS_NEW_QUEUE:
            topic, _, queue = detail.decode().partition("\1")
            try:
                place = destination({"REAL_TOPIC": topic, "REAL_QID": queue})
                keys[detail] = queues.setdefault(place, len(queues))
            except CometError:
                keys[detail] = -1
    name = {DELAYS_DONE: "done", DELAYS_EARLY: "early", DELAYS_AHEAD: "ahead", DELAYS_ODD: "odd"}
    if offset < 0:
        assert at == len(payload)
        offset = len(decode(payload))
    else:
        assert decode(memoryview(payload)[at:])[0].queue_offset == offset
    return encoder.take(), offset, name[reason]


def test_what_is_due_is_copied_as_plain_python_does_it() -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    seen = set()
    for _ in range(3_000):
        payload = b"".join(
            waiting(
                chance,
                offset,
                chance.choice([DELAY_MS, 2 * DELAY_MS, 86_400_000] * 9 + [0, 4_999, -1, -900_000]),
                chance.choice(PLACES * 9 + NOWHERE),
            )
            for offset in range(chance.randrange(8))
        )
        found = filled(payload)
        if found != copied(payload):
            # A clock of this boot that is a little ahead: since the record's time was rounded up.
            each = decode(payload)[found[1]]
            up = uptime_of(each.properties)
            assert (found[2], copied(payload)[2]) == ("early", "ahead")
            assert found[:2] == copied(payload)[:2]
            assert up is not None
            assert 0 < up.ms - NOW.up.ms <= AHEAD_MS
        seen.add(found[2])
    assert seen == {"done", "early", "ahead", "odd"}


def test_by_the_clock_of_this_boot_or_by_the_wall_clock() -> None:
    def reason(up: Uptime | None, stored_ms: int) -> tuple[int, object]:
        record = reference.encode_record(
            topic="SCHEDULE_TOPIC_XXXX",
            properties=PLACES[0] + (up.as_property() if up else b""),
            store_timestamp=stored_ms,
        )
        place = {b"t\x010": 0}
        found = fill_due(InnerEncoder(), record, 0, place, DELAY_MS, NOW.wall_ms, CLOCK, NOW.up.ms)
        return found[0], found[3]

    own = NOW.up.clock
    assert reason(Uptime(own, 55_000), 2**63 - 1) == (DELAYS_DONE, None)
    assert reason(Uptime(own, 55_001), -(2**63)) == (DELAYS_EARLY, 1)
    assert reason(Uptime(own, 60_000 + AHEAD_MS), 0) == (DELAYS_EARLY, DELAY_MS)
    for up in (None, Uptime("ffffffff", 55_000), Uptime(own, 60_001 + AHEAD_MS)):
        assert reason(up, NOW.wall_ms - DELAY_MS) == (DELAYS_DONE, None)
        assert reason(up, NOW.wall_ms - DELAY_MS + 1) == (DELAYS_EARLY, 1)
        assert reason(up, NOW.wall_ms) == (DELAYS_EARLY, DELAY_MS)
        assert reason(up, NOW.wall_ms + 1) == (DELAYS_AHEAD, None)
        assert reason(up, 2**63 - 1) == (DELAYS_AHEAD, None)
        assert reason(up, -(2**63)) == (DELAYS_DONE, None)


def test_without_room_it_goes_on_there() -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    payload = b"".join(waiting(chance, offset, 2 * DELAY_MS, PLACES[0]) for offset in range(9))
    copies, count, why = filled(payload)
    assert (count, why) == (9, "done")
    encoder = InnerEncoder(size_max=len(copies) // 2)
    first, reached, why = filled(payload, encoder)
    assert 0 < reached < 9
    assert why == "done"
    assert copies.startswith(first)
    rest = payload[sum(each.size for each in decode(payload)[:reached]) :]
    assert first + filled(rest)[0] == copies


def test_what_can_be_no_copy_is_the_caller_s() -> None:
    record = reference.encode_record(topic="t", properties=PLACES[0] + b"a\1" + b"x" * 99 + b"\2")
    encoder = InnerEncoder(properties_max=99)
    found = fill_due(encoder, record, 0, {b"t\x010": 0}, 0, NOW.wall_ms, CLOCK, NOW.up.ms)
    assert (found, encoder.count) == ((DELAYS_ODD, 0, 0, None), 0)


def test_bytes_that_are_no_records() -> None:
    record = reference.encode_record(topic="t", body=b"body", properties=PLACES[0])
    for payload in (record[:-1], b"\0" * 20, record + b"x", record.replace(b"body", b"bodx")):
        with pytest.raises(RecordDamaged):
            filled(payload)
    for begin in (-1, len(record) + 1):
        with pytest.raises(ValueError, match="byte"):
            fill_due(InnerEncoder(), record, begin, {}, 0, 0, 0, 0)


# --- what was given back ---

NEW = {b"WAIT", b"DELAY", b"COMETMQ_UP", b"__CRC32#"}
NAMES = (*NEW, b"REAL_TOPIC", b"REAL_QID", b"RETRY_TOPIC", b"ORIGIN_MESSAGE_ID", b"a", b"WAIU",
         b"DELAYS", b"REAL_QIDS", b"b" * 10)  # fmt: skip


def again(message: Message, topic: bytes, tail: bytes, waits: bool) -> list[bytes]:
    """By plain Python, pair by pair."""
    new = NEW | {b"REAL_TOPIC", b"REAL_QID"} if waits else NEW
    kept, names = [], set()
    for entry in message.raw_properties.split(b"\2"):
        name, _, value = entry.partition(b"\1")
        if name and value and name not in new:
            kept.append(entry)
            names.add(name)
    if b"RETRY_TOPIC" not in names:
        kept.append(b"RETRY_TOPIC\1" + topic)
    if b"ORIGIN_MESSAGE_ID" not in names:
        kept.append(b"ORIGIN_MESSAGE_ID\1" + message.offset_msg_id.encode())
    return [*kept, tail]


def test_what_comes_again_keeps_what_a_copy_does_not_have_anew() -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    for _ in range(5_000):
        entries = [
            chance.choice(NAMES) + chance.choice([b"\1v", b"\1v\1w", b"\1", b""])
            for _ in range(chance.randrange(6))
        ]
        raw = b"\2".join(entries) + chance.choice([b"", b"\2", b"\2\2"])
        (message,) = decode(reference.encode_record(topic="t", properties=raw, physical_offset=7))
        waits = chance.random() < 0.5
        made = again_properties(message, b"sent", b"tail", waits)
        assert made.split(b"\2") == again(message, b"sent", b"tail", waits), raw
