"""One record that the log refuses for good hinders no other: it stays where it is, and is said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from family import RunningBroker
from fault.points import POINTS, Points
from timer_world import World
from transacting import WAIT_S
from waiting import until

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.tables.lean import DELIVERED, WAITING, lean
from cometmq.client import Admin, Producer
from cometmq.protocol.commands import Cover
from cometmq.protocol.names import DELAY_TOPIC, TIMER_TOPIC
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.layout import PROPERTIES_MAX_BYTES

LEVELS = {"messageDelayLevel": "1s 6s"}
# What waits for such a topic came before the setting: no record of it can be laid down any more.
LONG_TOPIC = "%RETRY%" + "r" * 200
SHORT_TOPICS_ALONE = LEVELS | {"autoMessageVersionOnTopicLen": False}
WITH_CRC = LEVELS | {"enabledAppendPropCRC": True}


def now_ms() -> int:
    return int(time.time() * 1000)


def waiting(topic: str, due_ms: int, more: bytes = b"") -> bytes:
    """Properties of what waits, at a level or with a time."""
    text = (
        f"REAL_TOPIC\1{topic}\2REAL_QID\x010\2TIMER_OUT_MS\1{due_ms}\2DELAY\x012\2KEYS\1the key\2"
    )
    return text.encode() + more


def store_all(store: Path, settings: dict[str, Any], records: InnerRecords) -> None:
    """As a broker has it that was there before."""
    with (
        RunningBroker(store, settings) as broker,
        Channel(broker.address("commitlog")) as channel,
    ):
        channel.ask(*records.take(Cover.POLICY))


def set_aside(broker: RunningBroker) -> int:
    return int(broker.statistics("scheduler")["never_delivered"])


@pytest.mark.parametrize("due", ["later", "overdue"])
@pytest.mark.slow
def test_what_no_record_can_be_hinders_no_other(due: str, tmp_path: Path) -> None:
    """The first and another in the middle; overdue: when the timers are read."""
    store, records = tmp_path / "store", InnerRecords()
    due_ms = now_ms() + (6_000 if due == "later" else -3_600_000)
    add_all(records, due_ms)
    if due == "later":
        store_all(store, LEVELS, records)
    else:  # they are to be met with the new setting first
        with RunningBroker(store, SHORT_TOPICS_ALONE):
            pass
        with RunningBroker(store, SHORT_TOPICS_ALONE) as broker:
            with Channel(broker.address("commitlog")) as channel:
                channel.ask(*records.take(Cover.POLICY))
            check(broker)
        return
    with RunningBroker(store, SHORT_TOPICS_ALONE) as broker:
        check(broker)


def add_all(records: InnerRecords, due_ms: int) -> None:
    for number in range(40):
        topic = LONG_TOPIC if number in {0, 23} else "late"
        for waits_in, queue_id in ((DELAY_TOPIC, 1), (TIMER_TOPIC, 0)):
            queue = records.queue(waits_in, queue_id)
            records.encoder.add(queue, b"%d" % number, waiting(topic, due_ms))


def check(broker: RunningBroker, *, once: bool = True) -> None:
    wanted = sorted(b"%d" % number for number in range(40) if number not in {0, 23})
    late = broker.read_queue("late", 0, 2 * len(wanted))
    assert sorted(each.body for each in late) == sorted(2 * wanted)
    until(lambda: set_aside(broker) == 4 or not once, says="all are said")
    for topic, queue_id in ((DELAY_TOPIC, 1), (TIMER_TOPIC, 0)):
        for number in (0, 23):
            said = f"message {number} of {topic}, queue {queue_id}, at physical offset "
            line, *more = [each for each in broker.log.splitlines() if said in each]
            assert not more or not once
            assert LONG_TOPIC in line
            assert "'the key'" in line
            assert "autoMessageVersionOnTopicLen" in line
            still = broker.read_queue(topic, queue_id)[number]
            assert still.body == b"%d" % number  # where it was
            with Admin(broker.ready.name_server) as admin:
                assert still.offset_msg_id in line
                assert admin.get_message(still.offset_msg_id).body == still.body


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("levels.write.before", 1), ("levels.write.before", 7), ("levels.write.after", 1),
        ("timers.write.before", 1), ("timers.write.before", 7), ("timers.write.after", 1),
    ],
)  # fmt: skip
def test_the_scheduler_is_killed_around_its_writes(point: str, nth: int, tmp_path: Path) -> None:
    """Of the first one that is tried; of the one by which a message is passed over."""
    store, records = tmp_path / "store", InnerRecords()
    add_all(records, now_ms() + 8_000)
    store_all(store, LEVELS, records)
    with Points(tmp_path / "points") as points:
        broker = RunningBroker(
            store, SHORT_TOPICS_ALONE, module=Points.MODULE, environ=points.environ
        )
        with broker:
            pid = broker.pids()["scheduler"]
            points.arm(POINTS[point], nth)
            assert points.wait_hit(WAIT_S) == pid
            broker.wait_serves("scheduler", not_pid=pid)
            check(broker, once=False)


@pytest.mark.slow
def test_a_copy_goes_without_what_nobody_needs_where_there_is_no_room(tmp_path: Path) -> None:
    """Beside its own properties it has none for the checksum that records have by now."""
    store, records = tmp_path / "store", InnerRecords()
    due_ms = now_ms() + 6_000
    for number in range(4):
        properties = waiting("late", due_ms)
        if number == 1:
            filler = PROPERTIES_MAX_BYTES - len(properties) - 3
            properties += b"x\1" + b"y" * filler + b"\2"
        for topic, queue_id in ((DELAY_TOPIC, 1), (TIMER_TOPIC, 0)):
            records.encoder.add(records.queue(topic, queue_id), b"%d" % number, properties)
    store_all(store, LEVELS, records)
    with RunningBroker(store, WITH_CRC) as broker:
        late = broker.read_queue("late", 0, 8)
        assert sorted(each.body for each in late) == sorted([b"0", b"1", b"2", b"3"] * 2)
        for each in late:
            assert ("x" in each.properties) == (each.body == b"1")
            assert each.keys == "the key"
        assert not set_aside(broker)


def test_what_a_copy_goes_without() -> None:
    own = b"a\1b\2WAITS\1c\2WAIT\1true\2REAL_TOPIC\1t\2COMETMQ_UP\1x\2TIMER_ROLL_TIMES\0011\2"
    size = len(own)
    assert lean(own, DELIVERED, size) == own
    assert lean(own, WAITING, size - 1) == own.replace(b"TIMER_ROLL_TIMES\0011\2", b"")
    least = b"a\1b\2WAITS\1c\2REAL_TOPIC\1t\2"
    assert lean(own, WAITING, 1) == least
    assert lean(own, DELIVERED, 1) == b"a\1b\2WAITS\1c\2"


@pytest.mark.slow
def test_what_is_damaged_while_it_waits_is_not_delivered(tmp_path: Path) -> None:
    """Its copy would be whole, with a checksum of its own."""
    store = tmp_path / "store"
    with RunningBroker(store, LEVELS) as broker, Producer(broker.ready.name_server) as producer:
        for number in range(3):
            body = b"number %d" % number
            producer.send("late", body, queue_id=0, deliver_after=6, keys="the key")
        until(
            lambda: broker.statistics("scheduler")["timers_pending"] == 3, says="the wheel has them"
        )
        second = broker.read_queue(TIMER_TOPIC, 0, 3)[1]
        (segment,) = (store / "commitlog").glob("0*0")
        at = segment.read_bytes().index(b"number 1")
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(b"N")
        found = broker.read_queue("late", 0, 2)
        assert [each.body for each in found] == [b"number 0", b"number 2"]
        assert set_aside(broker) == 1
        broker.until_logged(f"the record at physical offset {second.physical_offset}, is never")


# --- the timers alone, and the scheduler dies around each write ---


def store_those(world: World, case: str, names: list[str]) -> None:
    if case == "overdue":
        world.send("first", 1_000)
        world.wait(5_000)
    for name in names:
        world.send(name, -3_000 if case == "overdue" else 20_000)
    if case == "moved":
        world.run()  # they are in the wheel
        world.ahead -= 60_000


@pytest.mark.parametrize("dies", ["", "before", "after"])
@pytest.mark.parametrize("case", ["due", "overdue", "moved"])
@pytest.mark.slow
def test_timers_go_on(
    case: str,
    dies: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the log refuses is set aside, all else comes once."""
    names = [f"message {number:02}" for number in range(20)]
    never = {names[0].encode(), names[7].encode(), names[8].encode(), names[19].encode()}
    for writes in range(200 if dies else 1):
        place = tmp_path / str(writes)
        (place / "config").mkdir(parents=True)
        world = World(place, monkeypatch)
        store_those(world, case, names)
        world.refused = never
        world.dies, world.writes_left = dies, writes
        caplog.clear()
        world.wait(25_000)
        came = {body: len(times) for body, times in world.came.items() if body != b"first"}
        assert came == dict.fromkeys({name.encode() for name in names} - never, 1), writes
        said = [each for each in caplog.messages if "is never delivered: as the test" in each]
        assert len(set(said)) == len(never), writes
        if not dies:
            assert len(said) == len(never) == world.aside.count
        elif world.dies:  # it was over before
            assert writes > 10
            return
    assert not dies
