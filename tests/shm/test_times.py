"""Times of messages, natively: what a sender says, what is due when; and half messages."""

from __future__ import annotations

import math
import random
from array import array
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest
import reference

from cometmq.protocol.errors import ArgumentIllegal
from cometmq.protocol.names import DELAY_TOPIC, HALF_TOPIC
from cometmq.protocol.timed import LATEST_MS
from cometmq.shm.kernel.codec import RecordDamaged, delayed_code, java_hash, timing
from cometmq.shm.kernel.store import HalfEnds, InnerEncoder

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MS = timedelta(milliseconds=1)
SEED = 20_261_125
ZONES = [timezone(timedelta(seconds=each)) for each in (0, 1, -1, 86_399, -86_399, 7_200)]


def exact_due_ms(at: datetime) -> int:
    return max(-((EPOCH - at) // MS), 0)


@pytest.mark.parametrize("zone", ZONES, ids=str)
def test_a_time_is_the_next_millisecond(zone: tzinfo) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    days = [(1, 1, 1), (1, 3, 1), (1969, 12, 31), (1970, 1, 1), (2000, 2, 29), (2100, 2, 28),
            (2400, 2, 29), (9999, 12, 31)]  # fmt: skip
    days += [(chance.randint(1, 9999), chance.randint(1, 12), chance.randint(1, 28))
             for _ in range(2_000)]  # fmt: skip
    for day in days:
        at = datetime(*day, chance.randrange(24), chance.randrange(60), chance.randrange(60),
                      chance.choice([0, 1, 999, 1_000, 999_999]), tzinfo=zone)  # fmt: skip
        due = exact_due_ms(at)
        if due > LATEST_MS:
            with pytest.raises(ArgumentIllegal, match="beyond the year 9999"):
                timing(at, None)
        else:
            assert timing(at, None) == ("TIMER_DELIVER_MS", str(due))


def test_a_delay_is_never_rounded_down() -> None:
    chance = random.Random(SEED)
    for _ in range(2_000):
        seconds = chance.random() * 10 ** chance.randint(-6, 9)
        delta = timedelta(chance.randint(-3, 99_999), chance.randrange(86_400),
                          chance.choice([0, 1, 999, 1_001, 999_999]))  # fmt: skip
        assert timing(None, seconds) == ("TIMER_DELAY_MS", str(math.ceil(seconds * 1000)))
        assert timing(None, delta)[1] == str(max(-(-delta // MS), 0))
    last = LATEST_MS // 1000
    assert [timing(None, each)[1] for each in (0, 7, -1, -(10**400), last)] == [
        "0", "7000", "0", "0", str(last * 1000)]  # fmt: skip
    with pytest.raises(ArgumentIllegal, match="beyond the year 9999"):
        timing(None, 10**5000)  # more digits than Python writes


@pytest.mark.parametrize(
    ("deliver_at", "deliver_after", "says"),
    [
        (None, LATEST_MS // 1000 + 1, "beyond the year 9999"),
        (None, 1e300, "beyond the year 9999"),
        (None, timedelta.max, "beyond the year 9999"),
        (None, float("nan"), "seconds are wanted"),
        (None, float("-inf"), "seconds are wanted"),
        (None, True, "a timedelta or seconds"),
        (None, "1", "a timedelta or seconds"),
        (datetime(2027, 1, 1), None, "no time zone"),
        (EPOCH.date(), None, "a datetime is wanted"),
        (EPOCH, 1, "both given"),
    ],
)
def test_times_that_are_none(deliver_at: datetime, deliver_after: float, says: str) -> None:
    with pytest.raises(ArgumentIllegal, match=says):
        timing(deliver_at, deliver_after)


@pytest.mark.parametrize(
    ("delay", "wait_ms"),
    [("1", 1_000), ("2", 5_000), ("3", 5_000), ("0002", 5_000), ("9" * 30, 5_000), ("0", None),
     ("", None), ("-1", None), ("1x", None), ("²", None)],
)  # fmt: skip
def test_when_a_delayed_message_is_due(delay: str, wait_ms: int | None) -> None:
    properties = f"TAGS\1a\2DELAY\1{delay}\2".encode()
    for stored_ms in (1_000, -(2**63), 2**63 - 1):
        record = reference.encode_record(
            topic=DELAY_TOPIC, body=b"x", properties=properties, store_timestamp=stored_ms
        )
        due = java_hash("a") if wait_ms is None else stored_ms + wait_ms
        due = (due + 2**63) % 2**64 - 2**63
        assert delayed_code(record, array("q", [1_000, 5_000])) == due
    assert delayed_code(record, array("q")) == java_hash("a")
    with pytest.raises(RecordDamaged):
        delayed_code(record[:-1], array("q", [1]))


# --- half messages ---


def half(**other: str) -> bytes:
    named = {"REAL_TOPIC": "orders", "REAL_QID": "3", "PGROUP": "shop", "UNIQ_KEY": "U"} | other
    properties = "".join(f"{name}\1{value}\2" for name, value in named.items())
    return reference.encode_record(
        topic=HALF_TOPIC, body=b"body", properties=properties.encode(), queue_offset=7,
        physical_offset=1_000, sys_flag=1,
    )  # fmt: skip


def found(record: bytes, **other: object) -> bool:
    """Whether an end of one finds its half message at byte `at`."""
    wanted: dict[str, object] = {
        "at": 0, "limit": len(record), "physical_offset": 1_000, "queue_offset": 7, "group": "shop",
        "transaction": "U", "topic": "orders", "outcomes": b"", "base": 0,
    }  # fmt: skip
    given: dict[str, Any] = wanted | other
    ends = HalfEnds(
        given["group"], [given["transaction"]], [True], [1], [given["topic"]], [0],
        [given["queue_offset"]], [given["physical_offset"]],
    )  # fmt: skip
    taken = ends.pick(
        record, given["physical_offset"] - given["at"], given["limit"],
        bytearray(given["outcomes"]), given["base"], 1 << 20,
    )  # fmt: skip
    assert ends.queues == ([("orders", 3)] if taken else [])
    return taken


def test_a_half_message_is_the_one_that_is_named() -> None:
    record = half()
    assert found(record)
    assert found(b"before" + record, at=6, limit=len(record) + 6)
    for wrong in (
        {"at": -1}, {"at": 1}, {"at": 1 << 61}, {"limit": len(record) - 1}, {"limit": 0},
        {"limit": 1 << 62, "at": 9}, {"physical_offset": 999}, {"physical_offset": -1},
        {"queue_offset": 8}, {"queue_offset": -1}, {"group": "sho"}, {"group": ""},
        {"transaction": "V"}, {"topic": "order"}, {"topic": "orders2"},
    ):  # fmt: skip
        assert not found(record, **wrong), wrong
    named = half(__transactionId__="T")
    assert not found(named)
    assert found(named, transaction="T")
    assert not found(half(TRAN_PREPARED_QUEUE_OFFSET="2"))  # a copy: somebody looks closer
    for queue in ("", "x", "-1", "9" * 30):
        assert not found(half(REAL_QID=queue))
    spoilt = bytearray(record)
    spoilt[record.index(b"body")] ^= 1
    assert not found(bytes(spoilt))
    plain = reference.encode_record(topic="orders", body=b"body", queue_offset=7,
                                    physical_offset=1_000)  # fmt: skip
    assert not found(plain)


def test_a_half_message_is_ended_once() -> None:
    record = half()
    for outcomes, base, pending in (
        (bytes(8), 0, True), (bytes(7) + b"\1", 0, False), (b"\1" * 7, 0, True), (b"\1", 7, False),
        (b"", 8, False), (b"", 7, True),
    ):  # fmt: skip
        assert found(record, outcomes=outcomes, base=base) is pending, (outcomes, base)


def test_columns_that_do_not_fit_together() -> None:
    columns = (["T"], [True], [1], ["orders"], [0], [7], [1_000])
    HalfEnds("shop", *columns)
    for place, wrong in (
        (0, []), (0, ["T", "U"]), (1, []), (2, []), (2, [0]), (2, [2]), (2, [-1]), (2, [1 << 40]),
        (3, []), (4, []), (4, [1]), (4, [-1]), (5, []), (5, [7, 8]), (6, []),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"transaction|messages|topic"):
            HalfEnds("shop", *columns[:place], wrong, *columns[place + 1 :])  # type: ignore[arg-type]


def test_records_that_are_taken_back() -> None:
    encoder = InnerEncoder()
    encoder.add(0, b"one")
    whole = encoder.size, encoder.count
    encoder.add(0, b"two")
    encoder.cut(*whole)
    assert (encoder.size, encoder.count) == whole
    for wrong in ((whole[0] + 1, 1), (whole[0], 2), (0, 1), (1, 0), (-1, -1)):
        with pytest.raises(ValueError, match="records of"):
            encoder.cut(*wrong)
    encoder.cut(0, 0)
    assert encoder.take() == b""
