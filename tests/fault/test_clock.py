"""A broker whose wall clock is stepped by a day, in either direction."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from family import RunningBroker, encode_batch
from fault.points import POINTS, Points
from old_segments import MIB, write_segments
from patience import exactly, patient
from preloaded import library
from waiting import until

from cometmq import PendingTransaction, PopConsumer, Producer
from cometmq.protocol.commands import (
    DeleteSegments,
    GiveBackMessages,
    GivenBack,
    MessagesGivenBack,
    Section,
    SectionResult,
    SendMessages,
    SendResult,
)
from cometmq.shm.derived.timer_files import read_check, write_check
from cometmq.shm.live.control import Counter
from cometmq.shm.os.files import segment_name

SOURCE: Final = Path(__file__).with_name("clock.c")
S_NS: Final = 1_000_000_000
DAY_NS: Final = 86_400 * S_NS
INVISIBLE_S: Final = exactly(5.0)
LATE_S: Final = patient(20.0)  # of a busy machine; far less than a day


class WallClock:
    """Of the processes that have `environ`."""

    def __init__(self, place: Path) -> None:
        state = place / "clock.state"
        state.write_bytes(bytes(8))
        with state.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)
        self.environ = {"LD_PRELOAD": str(library(SOURCE)), "CLOCK_STATE": str(state)}

    def set_ahead(self, ns: int) -> None:
        self._memory[:] = struct.pack("=q", ns)


def up_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


DELAY_S: Final = 6.0  # long enough to send all of it, to step the clock, and to begin again
SETTINGS: Final = {
    "messageDelayLevel": "1h 6s",
    "transactionTimeOut": 6_000,
    "transactionCheckInterval": 50,
}


class Waiting:
    """What waits at a broker, from when to when it was sent, and when it came."""

    def __init__(self) -> None:
        self.sent: dict[bytes, tuple[float, float]] = {}
        self.came: dict[bytes, float] = {}

    @contextmanager
    def sending(self, body: bytes) -> Iterator[bytes]:
        began = up_s()
        yield body
        self.sent[body] = began, up_s()

    def note(self, bodies: Iterable[bytes]) -> None:
        for body in bodies:
            self.came.setdefault(body, up_s())

    def check(self, pending: PendingTransaction) -> bool:
        """The checker: it came when its producer is asked."""
        self.note([pending.body])
        return True

    def send(self, broker: RunningBroker, producer: Producer, when: str) -> None:
        """One of each kind."""
        with self.sending(f"level {when}".encode()) as body:
            producer.send("later", body, queue_id=0, delay_level=2)
        with self.sending(f"after {when}".encode()) as body:
            producer.send("later", body, queue_id=0, deliver_after=DELAY_S)
        with self.sending(f"retry {when}".encode()) as body:
            at = producer.send("failed", body, queue_id=0).queue_offset
            (message,) = broker.read_queue("failed", 0, at + 1)[at:]
            given = GivenBack("failed", 0, at, message.physical_offset, delay_level=2)
            answer = broker.ask("coordinator", GiveBackMessages("g", [given]), LATE_S)
            assert answer == MessagesGivenBack([0])
        with self.sending(f"check {when}".encode()) as body:
            transaction = producer.transaction("later", body, queue_id=0).__enter__()
            producer._transactions.open.discard(transaction.id)  # as if its process had died

    def watch(self, broker: RunningBroker) -> None:
        """Until all of it has come, or is much too late."""
        pause = threading.Event()
        while not self.came.keys() >= self.sent.keys():
            for topic in ("later", "%RETRY%g"):
                self.note(each.body for each in broker.read_queue(topic, 0))
            missing = self.sent.keys() - self.came.keys()
            assert all(up_s() < self.sent[each][1] + DELAY_S + LATE_S for each in missing), missing
            pause.wait(0.01)

    def judge(self) -> None:
        for body, (began, ended) in self.sent.items():
            waited = self.came[body] - began, self.came[body] - ended
            assert waited[0] >= DELAY_S, f"{body!r} is early, {waited}"
            assert waited[1] <= DELAY_S + LATE_S, f"{body!r} is late, {waited}"


@pytest.mark.slow
@pytest.mark.parametrize(("steps_ns", "then"), [
    ([DAY_NS], "nothing"), ([-DAY_NS], "nothing"), ([3 * S_NS], "kill"), ([-30 * S_NS], "kill"),
    ([DAY_NS], "restart"), ([-DAY_NS], "restart"), ([DAY_NS, -DAY_NS], "kill"),
    ([-DAY_NS, DAY_NS], "kill"), ([DAY_NS, -2 * DAY_NS], "restart"), ([S_NS // 2], "nothing"),
])  # fmt: skip
def test_delays_are_as_long_as_they_were_to_be(
    tmp_path: Path, steps_ns: list[int], then: str
) -> None:
    """Levels, timers, retries and checks, of before a step and of after it; whatever dies then."""
    clock, waiting, store = WallClock(tmp_path), Waiting(), tmp_path / "store"
    again = {"environ": clock.environ}
    with RunningBroker(store, SETTINGS, **again) as broker:
        for topic in ("later", "failed", "%RETRY%g"):
            broker.create_topic(topic, 1)
        with Producer(broker.ready.name_server, name="shop", checker=waiting.check) as producer:
            waiting.send(broker, producer, "before")
            for number in range(len(steps_ns)):
                clock.set_ahead(sum(steps_ns[: number + 1]))
                waiting.send(broker, producer, f"behind step {number}")
            if then == "kill":
                broker.kill("scheduler")
            if then != "restart":
                waiting.watch(broker)
    if then == "restart":
        with (
            RunningBroker(store, SETTINGS, **again) as broker,
            Producer(broker.ready.name_server, name="shop", checker=waiting.check),
        ):
            waiting.watch(broker)
    waiting.judge()


@pytest.mark.slow
def test_a_time_of_day_goes_by_the_clock_as_it_is(tmp_path: Path) -> None:
    """In both directions."""
    clock = WallClock(tmp_path)
    with (
        RunningBroker(tmp_path / "store", environ=clock.environ) as broker,
        Producer(broker.ready.name_server) as producer,
    ):
        began = up_s()
        soon = datetime.now(UTC) + timedelta(seconds=2)
        producer.send("set", b"soon", queue_id=0, deliver_at=soon)
        clock.set_ahead(-4 * S_NS)
        broker.read_queue("set", 0, 1)
        assert up_s() >= began + 6
        tomorrow = datetime.now(UTC) + timedelta(hours=20)
        producer.send("set", b"tomorrow", queue_id=0, deliver_at=tomorrow)
        clock.set_ahead(DAY_NS)
        messages = broker.read_queue("set", 0, 2)
    assert [each.body for each in messages] == [b"soon", b"tomorrow"]
    for each in messages:
        assert each.store_timestamp_ms >= int(each.properties["TIMER_DELIVER_MS"])


@pytest.mark.slow
@pytest.mark.parametrize("then", ["nothing", "kill"])
def test_what_is_recalled_is_found_behind_a_step(tmp_path: Path, then: str) -> None:
    """By a receipt that says when it was due by the clock before."""
    clock = WallClock(tmp_path)
    with (
        RunningBroker(tmp_path / "store", environ=clock.environ) as broker,
        Producer(broker.ready.name_server) as producer,
    ):
        names = [b"recalled before", b"recalled behind", b"not recalled"]
        receipts = [producer.send("r", each, queue_id=0, deliver_after=20) for each in names]
        producer.recall(receipts[0])
        clock.set_ahead(-DAY_NS)
        producer.recall(receipts[1])
        if then == "kill":
            broker.kill("scheduler")
        # Well behind: what was moved and is due in the same ms comes behind what was not.
        producer.send("r", b"last", queue_id=0, deliver_after=22)
        found = broker.read_queue("r", 0, 2)
    assert [each.body for each in found] == [b"not recalled", b"last"]


@pytest.mark.slow
def test_a_window_of_keys_ends_no_earlier(tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    with (
        RunningBroker(tmp_path / "store", environ=clock.environ) as broker,
        Producer(broker.ready.name_server, dedup="keys", dedup_window=3_600) as producer,
    ):
        first = producer.send("keyed", b"one", keys="k", queue_id=0)
        clock.set_ahead(DAY_NS)
        again = producer.send("keyed", b"two", keys="k", queue_id=0)
    assert (first.duplicate, again.duplicate) == (False, True)


@pytest.mark.slow
def test_a_step_makes_no_segment_older(tmp_path: Path) -> None:
    """What is kept for 3 days stays when the clock is set forward by 4, but for what was old."""
    clock = WallClock(tmp_path)
    with RunningBroker(tmp_path / "store", environ=clock.environ) as broker:
        broker.create_topic("t", 1)
        write_segments(broker, 3)
        old = time.time() - 10 * 86_400
        os.utime(broker.store / "commitlog" / segment_name(0), times=(old, old))
        clock.set_ahead(4 * DAY_NS)

        def is_cleaned() -> bool:
            broker.ask("coordinator", DeleteSegments())
            return broker.counter(Counter.MIN_OFFSET) > 0

        until(is_cleaned)
        assert broker.counter(Counter.MIN_OFFSET) == MIB


@pytest.mark.slow
@pytest.mark.parametrize("step_ns", [DAY_NS, -DAY_NS], ids=["forward", "backward"])
def test_popped_messages_stay_invisible_for_as_long_as_they_were_to(
    tmp_path: Path, step_ns: int
) -> None:
    clock = WallClock(tmp_path)
    with RunningBroker(tmp_path / "store", environ=clock.environ) as broker:
        server = broker.ready.name_server
        with Producer(server) as producer:
            before = producer.send("t", b"job", queue_id=0).store_timestamp_ms
        with PopConsumer(server, "g", "t", invisible_s=INVISIBLE_S) as consumer:
            began = up_s()
            (message,) = consumer.poll(timeout_s=patient(30))
            popped = up_s()
            assert (message.body, message.reconsume_times) == (b"job", 0)
            clock.set_ahead(step_ns)
            (again,) = consumer.poll(timeout_s=INVISIBLE_S + LATE_S)
            came = up_s()
            assert (again.body, again.reconsume_times) == (b"job", 1)
            assert began + INVISIBLE_S <= came <= popped + INVISIBLE_S + LATE_S
            consumer.ack(again)
        broker.until_logged(f"the clock was stepped by {step_ns / 1e9:+.1f} s")
        with Producer(server) as producer:  # the shim has stepped the log's clock as well
            after = producer.send("t", b"more", queue_id=0).store_timestamp_ms
    step_ms = step_ns // 1_000_000
    assert after - before >= step_ms
    assert (after > before) is (step_ms > 0)


@pytest.mark.slow
@pytest.mark.parametrize("step_ns", [DAY_NS, -DAY_NS], ids=["forward", "backward"])
def test_a_repeat_is_found_over_a_step(tmp_path: Path, step_ns: int) -> None:
    """By its time, where its producer does not know what else is in the queue."""
    clock = WallClock(tmp_path)
    batch = encode_batch([b"a", b"b"])
    with RunningBroker(tmp_path / "store", environ=clock.environ) as broker:
        broker.create_topic("t", 1)

        def send(number: int, **kinds: Any) -> SectionResult:
            section = Section("t", 0, 2, number=number, **kinds)
            command = SendMessages([section], time.time_ns() // 1_000_000, sender=77)
            answer = broker.commitlog.ask(command, [batch])[0]
            assert isinstance(answer, SendResult)
            return answer.results[0]

        first = send(1)
        clock.set_ahead(step_ns)
        assert send(2, fence=True, repeats_ms=1_000) == first
        assert [each.body for each in broker.read_queue("t", 0)] == [b"a", b"b"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_scheduler_is_killed_as_the_clock_has_been_set_back(
    tmp_path: Path, moment: str
) -> None:
    """Around the write that says so: what is sent then comes in time, and once."""
    store = tmp_path / "store"
    with RunningBroker(store, {}) as broker, Producer(broker.ready.name_server) as producer:
        producer.send("back", b"first", queue_id=0, deliver_after=0.1)
        broker.read_queue("back", 0, 1)
    check = read_check(store)
    assert check is not None
    now_ms = time.time_ns() // 1_000_000
    write_check(store, check._replace(read_ms=now_ms + DAY_NS // 1_000_000), now_ms)
    with Points(tmp_path / "points") as points:
        points.arm(POINTS[f"timers.write.{moment}"])
        dies = RunningBroker(
            store, {}, wait=False, module=points.MODULE, environ=points.environ
        )  # of it, if it is not ready yet
        try:
            assert points.wait_hit(LATE_S) is not None
        finally:
            dies.kill_all()
    later = read_check(store)
    assert later is not None
    assert later.read_ms < now_ms + 60_000  # not tomorrow's
    bodies = [b"%d" % number for number in range(10)]
    with RunningBroker(store, {}) as broker, Producer(broker.ready.name_server) as producer:
        for body in bodies:
            producer.send("back", body, queue_id=0, deliver_after=0.5)
        broker.kill("scheduler")
        found = broker.read_queue("back", 0, 11)
    assert sorted(each.body for each in found) == sorted([b"first", *bodies])
    for each in found:
        assert each.store_timestamp_ms >= int(each.properties["TIMER_DELIVER_MS"])
