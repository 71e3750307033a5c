"""Timers that were overdue when they were stored, before others that wait: the scheduler dies when
those are in the wheel and its log, and the overdue ones are not delivered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

import psutil
import pytest
from family import RunningBroker
from fault.points import POINTS, Points
from fault.test_clock import S_NS, WallClock
from patience import patient
from still import stop
from waiting import until

from cometmq import Producer
from cometmq.actors.scheduling.timers import AGAIN_MAX, READ_COUNT, READS_MAX
from cometmq.actors.tables.timers import TimersState
from cometmq.client.sending.receipt import Receipt
from cometmq.protocol.commands import DerivedPosition, GetDerived
from cometmq.protocol.names import TIMER_TOPIC
from cometmq.shm.kernel.layout import TIMER_UNIT
from cometmq.shm.live.control import CONTROL_FILE, Counter

HIT_S: Final = patient(60.0)
HOUR: Final = timedelta(hours=1)
# No timercheck in between: it would say how far the wheel had come
SETTINGS: Final = {"mappedFileSizeCommitLog": 1 << 20, "flushDelayOffsetInterval": 3_600_000}
LARGE: Final = bytes(20_000)  # a dozen of them are a read of 256 KiB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass
class Sending:
    """What is sent to queue 0 of one topic, and what is to come of it."""

    broker: RunningBroker
    producer: Producer
    wanted: list[bytes] = field(default_factory=list)
    page_end: int = 0
    places: list[int] = field(
        default_factory=list
    )  # physical offsets: the page in the topic of timers

    def send(self, name: bytes, at: datetime, is_wanted: bool = True) -> Receipt:
        body = name + LARGE
        if is_wanted:
            self.wanted.append(body)
        return self.producer.send("late", body, queue_id=0, deliver_at=at)

    def send_page(self, kinds: str, overdue: datetime, to_recall: Sequence[Receipt]) -> None:
        """o: overdue; f: due in an hour and more; r: recalls what is due before that."""
        recalls = iter(to_recall)
        for number, kind in enumerate(kinds):
            if kind == "r":
                self.producer.recall(next(recalls))
            elif kind == "o":
                self.send(b"overdue %d" % number, overdue)
            else:
                self.send(b"future %d" % number, datetime.now(UTC) + 2 * HOUR)

    def begin(self, count: int) -> list[Receipt]:
        """Something is delivered, and something waits that is going to be recalled."""
        self.send(b"first", datetime.now(UTC))
        self.broker.read_queue("late", 0, 1)
        waits = datetime.now(UTC) + HOUR
        return [self.send(b"recalled", waits, False) for _ in range(count)]

    def let_the_wheel_turn(self) -> datetime:
        """A time that the wheel has passed, and that the log says nothing of."""
        (first,) = self.broker.read_queue("late", 0, 1)
        passed = datetime.fromtimestamp(first.store_timestamp_ms / 1000, UTC) + timedelta(seconds=1)
        until(lambda: datetime.now(UTC) > passed + timedelta(seconds=1), says="that is over")
        before = self.broker.statistics("scheduler")["timers_pending"]
        self.send(b"future", datetime.now(UTC) + 2 * HOUR)
        until(
            lambda: self.broker.statistics("scheduler")["timers_pending"] > before,
            says="it is in the wheel",
        )
        for _ in range(3):  # between two answers it makes a step
            self.broker.statistics("scheduler")
        return passed

    @contextmanager
    def at_once(self, count: int) -> Iterator[None]:
        """The scheduler sees so many records when all of them are dispatched."""
        scheduler = psutil.Process(self.broker.pids()["scheduler"])
        begin = len(self.broker.read_queue(TIMER_TOPIC, 0))
        stop(scheduler.pid)
        yield
        page = self.broker.read_queue(TIMER_TOPIC, 0, begin + count)[begin:]
        self.places = [each.physical_offset for each in page]
        self.page_end = self.places[-1] + len(page[-1].record)
        dispatched = partial(self.broker.counter, Counter.DISPATCHED)  # readers are ahead of it
        until(lambda: dispatched() > self.places[-1], says="that is dispatched")
        scheduler.resume()

    def check(self, broker: RunningBroker, clock: WallClock) -> None:
        """All comes, once, when the clock has come to its time."""
        overdue = [each for each in self.wanted if not each.startswith(b"future")]
        early = [each.body for each in broker.read_queue("late", 0, len(overdue))]
        assert sorted(early) == sorted(overdue)
        clock.set_ahead(3 * 3_600 * S_NS)
        found = [each.body for each in broker.read_queue("late", 0, len(self.wanted))]
        assert sorted(found) == sorted(self.wanted)


def placed(store: Path) -> set[int]:
    """The physical offsets that the timer log has."""
    (segment,) = (store / "timerlog").iterdir()
    content = segment.read_bytes()
    found: set[int] = set()
    for at in range(0, len(content), TIMER_UNIT.size):
        unit = TIMER_UNIT.unpack(content[at : at + TIMER_UNIT.size])
        if unit["size"] != TIMER_UNIT.size:
            return found
        found.add(unit["physical_offset"])
    return found


def zero_behind(store: Path, end: int) -> None:
    """The log ends there."""
    for segment in (store / "commitlog").iterdir():
        begin, size = int(segment.name), segment.stat().st_size
        at = min(max(end - begin, 0), size)
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(bytes(size - at))


SEVERAL: Final = "fof" * 14  # reads, with a write each


#: Each pair of ends meets both points, both states, one write and several, and recalls.
FIRST_ENDS: Final = ("scheduler", "all, cold")
OTHER_ENDS: Final = ("all", "power")
CASES: Final = [
    ("timers.write.before", 1, "of", "behind", FIRST_ENDS),
    ("timers.write.before", 1, "of", "before", OTHER_ENDS),
    ("timers.write.before", 1, "rof", "behind", OTHER_ENDS),
    ("timers.write.before", 1, "orf", "before", FIRST_ENDS),
    ("timers.write.before", 2, SEVERAL, "behind", FIRST_ENDS),
    ("timers.write.before", 3, SEVERAL, "before", OTHER_ENDS),
    ("timers.write.after", 1, "rof", "before", FIRST_ENDS),
    ("timers.write.after", 2, SEVERAL, "behind", OTHER_ENDS),
]


@pytest.mark.parametrize(
    ("point", "nth", "kinds", "state", "dies"),
    [(*case, end) for *case, ends in CASES for end in ends],
)
def test_what_is_overdue_is_delivered_once(
    point: str, nth: int, kinds: str, state: str, dies: str, tmp_path: Path
) -> None:
    """Also what is due behind what the log says, and before what the wheel has come to."""
    clock, store = WallClock(tmp_path), tmp_path / "store"
    settings = SETTINGS | {"flushDiskType": "SYNC_FLUSH" if dies == "power" else "ASYNC_FLUSH"}
    with Points(tmp_path / "points") as points:
        broker = RunningBroker(
            store,
            SETTINGS,
            module=points.MODULE,
            environ=points.environ | clock.environ,
        )
        with broker, Producer(broker.ready.name_server) as producer:
            sending = Sending(broker, producer)
            to_recall = sending.begin(kinds.count("r"))
            overdue = datetime.now(UTC) - HOUR
            if state == "before":
                overdue = sending.let_the_wheel_turn()
            pid = broker.pids()["scheduler"]
            with sending.at_once(len(kinds)):
                sending.send_page(kinds, overdue, to_recall)
                points.arm(POINTS[point], nth)
                if dies != "scheduler":  # nobody is to begin in its place
                    stop(broker.pid)
            assert points.wait_hit(HIT_S) == pid
            if dies == "scheduler":
                broker.wait_serves("scheduler", not_pid=pid)
                sending.check(broker, clock)
                return
            broker.kill_all()
    units = placed(store)
    assert sending.places[kinds.index("f")] in units
    assert not [
        place
        for kind, place in zip(kinds, sending.places, strict=True)
        if kind == "o" and place in units
    ]
    if dies in {"all, cold", "power"}:
        (store / CONTROL_FILE).unlink()
    if dies == "power":  # deliveries are not awaited on the disk, and the timer log may be there
        zero_behind(store, sending.page_end)
    with RunningBroker(store, settings, environ=clock.environ) as broker:
        sending.check(broker, clock)


def test_a_start_reads_a_part_again(tmp_path: Path) -> None:
    """Also where nothing was delivered for long: the log is told now and then."""
    settings = {"mappedFileSizeCommitLog": 64 << 20, "flushDelayOffsetInterval": 3_600_000}
    count = AGAIN_MAX + 2 * READ_COUNT * READS_MAX
    with (
        RunningBroker(tmp_path / "store", settings) as broker,
        Producer(broker.ready.name_server) as producer,
    ):

        def frontier() -> int:
            answer = broker.ask("commitlog", GetDerived("timers"))
            assert isinstance(answer, DerivedPosition)
            return TimersState.unpack(answer.note).frontier if answer.is_known else 0

        sent = 0
        while sent < count:
            bodies = [b"x"] * min(1_000, count - sent)
            sent += len(producer.send_many("many", bodies, queue_id=0, deliver_after=7_200))
        until(lambda: frontier() > AGAIN_MAX, says="the log is told")
        broker.kill("scheduler")
        until(
            lambda: broker.statistics("scheduler")["timers_pending"] == count,
            says="all are in the wheel",
        )
