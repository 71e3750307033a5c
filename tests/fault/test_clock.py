"""A broker whose wall clock is stepped by a day, in either direction."""

from __future__ import annotations

import mmap
import struct
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import pytest
from family import RunningBroker, encode_batch
from fault.points import POINTS, Points

from cometmq import PopConsumer, Producer
from cometmq.protocol.commands import Section, SectionResult, SendMessages, SendResult
from cometmq.shm.derived.timer_files import read_check, write_check

SOURCE: Final = Path(__file__).with_name("clock.c")
DAY_NS: Final = 86_400_000_000_000
INVISIBLE_S: Final = 5.0
LATE_S: Final = 20.0  # this machine may be busy; a day is not to be mistaken for that


class WallClock:
    """Of the processes that have `environ`."""

    def __init__(self, place: Path) -> None:
        library = place / "clock.so"
        command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        state = place / "clock.state"
        state.write_bytes(bytes(8))
        with state.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)
        self.environ = {"LD_PRELOAD": str(library), "CLOCK_STATE": str(state)}

    def set_ahead(self, ns: int) -> None:
        self._memory[:] = struct.pack("=q", ns)


def up_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.slow
@pytest.mark.parametrize("step_ns", [DAY_NS, -DAY_NS], ids=["forward", "backward"])
def test_popped_messages_stay_invisible_for_as_long_as_they_were_to(
    tmp_path: Path, step_ns: int
) -> None:
    clock = WallClock(tmp_path)
    with RunningBroker(tmp_path / "store", environ=clock.environ, program=True) as broker:
        server = broker.ready.name_server
        with Producer(server) as producer:
            before = producer.send("t", b"job", queue_id=0).store_timestamp_ms
        with PopConsumer(server, "g", "t", invisible_s=INVISIBLE_S) as consumer:
            began = up_s()
            (message,) = consumer.poll(timeout_s=30)
            popped = up_s()
            assert (message.body, message.reconsume_times) == (b"job", 0)
            clock.set_ahead(step_ns)
            (again,) = consumer.poll(timeout_s=INVISIBLE_S + LATE_S)
            came = up_s()
            assert (again.body, again.reconsume_times) == (b"job", 1)
            assert began + INVISIBLE_S <= came <= popped + INVISIBLE_S + LATE_S
            consumer.ack(again)
        assert f"the clock was stepped by {step_ns / 1e9:+.1f} s" in broker.log
        with Producer(server) as producer:  # the shim has stepped the log's clock as well
            after = producer.send("t", b"more", queue_id=0).store_timestamp_ms
    assert after - before >= (86_400_000 if step_ns > 0 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("step_ns", [DAY_NS, -DAY_NS], ids=["forward", "backward"])
def test_a_repeat_is_found_over_a_step(tmp_path: Path, step_ns: int) -> None:
    """By its time, where its producer does not know what else is in the queue."""
    clock = WallClock(tmp_path)
    batch = encode_batch([b"a", b"b"])
    with RunningBroker(tmp_path / "store", environ=clock.environ, program=True) as broker:
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
