"""Derived writes under faults, by a scheduled copy of a queue (kit/copier.py): each message is
copied once, unchanged, in order, and never early, whatever dies where."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
from copier import DUE, NAME, SOURCE, TARGET, Copier, Copiers, now_ms
from dying import DIED
from family import RunningBroker, encode_batch, read_queue
from fault.disk import Disk, need
from fault.points import POINTS, Point, Points
from patience import patient
from waiting import until

from cometmq.protocol.commands import (
    DerivedPosition,
    GetDerived,
    Section,
    SendMessages,
    SendResult,
)
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import Message
from cometmq.shm.live.control import CONTROL_FILE, Counter
from cometmq.shm.os.files import COMMITLOG_DIR, list_segments, segment_name
from cometmq.shm.tools.verify import verify_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEED = 20_261_122
SEGMENT = 128 << 10
SETTINGS = {
    "mappedFileSizeCommitLog": SEGMENT,
    "maxMessageSize": SEGMENT // 4,
    "flushIntervalCommitLog": 100,
    "flushCommitLogLeastPages": 0,
}
WAIT_S = patient(60)
POINTS_EACH = 2  # in one life of the broker, which takes no more deaths for bad luck
DELAY_MS = 15
DELAY_MAX_MS = 1_000


def schedule(broker: RunningBroker, count: int, delay_ms: int = DELAY_MS) -> None:
    """So many messages more, due a little later than they are sent."""
    for _ in range(count):
        due = now_ms() + delay_ms
        body = b"due %d " % due + b"x" * (due % 3_000)
        batch = encode_batch([body], properties={DUE: str(due)}, keys="k", tags="t")
        command = SendMessages([Section(SOURCE, 0, 1)], due - 7, "10.0.0.1:1234")
        answer, _ = broker.commitlog.ask(command, [batch], timeout_s=WAIT_S)
        assert isinstance(answer, SendResult)
        assert answer.results[0].code == 0, answer


def position(broker: RunningBroker) -> int:
    answer = broker.ask("commitlog", GetDerived(NAME), WAIT_S)
    assert isinstance(answer, DerivedPosition)
    return answer.position.number


def as_sent(message: Message) -> tuple[object, ...]:
    return (
        message.body, message.raw_properties, message.flag, message.sys_flag, message.born_host,
        message.born_timestamp_ms, message.reconsume_times,
    )  # fmt: skip


def check(broker: RunningBroker) -> list[Message]:
    """What is copied: once, in order, as it was, not early; and the position says how much."""
    before = position(broker)
    with Channel(broker.address("reader-0")) as reader:
        copies = read_queue(reader, TARGET, 0, before)
        sources = read_queue(reader, SOURCE, 0)
    assert before <= len(copies) <= position(broker)  # somebody may copy on meanwhile
    assert [as_sent(each) for each in copies] == [as_sent(each) for each in sources[: len(copies)]]
    assert [each.queue_offset for each in copies] == list(range(len(copies)))
    early = [each for each in copies if each.store_timestamp_ms < int(each.properties[DUE])]
    assert not early
    return sources


class Copying:
    """A thread that copies for as long as it is there, whatever becomes of the broker."""

    def __init__(self, broker: RunningBroker) -> None:
        self._addresses = broker.address("commitlog"), broker.address("reader-0")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with Channel(self._addresses[0]) as commitlog, Channel(self._addresses[1]) as reader:
            copying = Copier(commitlog, reader)
            while not self._over.is_set():
                try:
                    copied = copying.step()
                except CometError:
                    copied = 0
                if not copied:
                    self._over.wait(0.003)

    def __enter__(self) -> Copying:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()


def wait_copied(broker: RunningBroker, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while position(broker) < count:
        assert time.monotonic() < deadline, f"{position(broker)} of {count} are copied"
        pause.wait(0.01)


@pytest.fixture
def copiers() -> Iterator[Copiers]:
    found = Copiers()
    yield found
    found.close()


def test_the_copier_is_killed_at_every_line(copiers: Copiers, tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store", SETTINGS) as broker:
        broker.create_topic(SOURCE, 1)
        addresses = {"commitlog": broker.address("commitlog"), "reader": broker.address("reader-0")}
        schedule(broker, 9)
        sent, unpassed = 9, []
        lines = copiers.run(**addresses, until=sent, lines=True, patient=True)
        assert len(lines) > 40
        for file, number, _ in lines:
            delay_ms, status = DELAY_MS, 0
            while status != DIED and delay_ms < DELAY_MAX_MS:  # some lines wait for what is not due
                schedule(broker, 8, 0)
                schedule(broker, 1, delay_ms)
                sent, delay_ms = sent + 9, 2 * delay_ms
                status = copiers.run(**addresses, until=sent, die=[file, number, 1], patient=True)
            if status != DIED:
                unpassed.append((file, number))
        assert len(unpassed) <= 2, unpassed  # where something took too long once, and did not again
        assert copiers.run(**addresses, until=sent) == 0
        assert len(check(broker)) == sent == position(broker)
    assert not verify_store(tmp_path / "store").findings


@pytest.mark.parametrize("sync", [False, True])
def test_the_commitlog_process_is_killed_at_every_point(sync: bool, tmp_path: Path) -> None:
    """Half of them in either mode; `python -m tests.fault timed points` has them all in both."""
    names = ("derived.", "append.wrote", "takeover.zero", "roll.")
    points = [point for point in POINTS.values() if point.name.startswith(names)]
    points = [point for point in points if point.role == "commitlog"]
    chance = random.Random(SEED)
    chance.shuffle(points)
    points = points[sync::2]
    settings = {**SETTINGS, "flushDiskType": "SYNC_FLUSH" if sync else "ASYNC_FLUSH"}
    store = tmp_path / "store"
    with Points(tmp_path / "points") as hits:
        for at in range(0, len(points), POINTS_EACH):
            broker = RunningBroker(store, settings, module=Points.MODULE, environ=hits.environ)
            if not at:
                broker.create_topic(SOURCE, 1)
            with broker, Copying(broker):
                for point in points[at : at + POINTS_EACH]:
                    die_at(broker, hits, point, chance.randint(1, point.nth_max))
                    check(broker)
                wait_copied(broker, len(check(broker)))
                assert len(check(broker)) > at
    assert not verify_store(store).findings


def die_at(broker: RunningBroker, hits: Points, point: Point, nth: int) -> None:
    """With messages on their way all the time, until the process has come to that point."""
    pid = broker.pids()["commitlog"]
    hits.arm(point, nth)
    if point.when == "restart":
        broker.end(pid)
    deadline = time.monotonic() + WAIT_S
    while hits.wait_hit(0.02) is None:
        assert time.monotonic() < deadline, f"{point.name} was not passed"
        with contextlib.suppress(CometError):
            schedule(broker, 3)
    hits.disarm()
    broker.wait_serves("commitlog", not_pid=pid)


@pytest.mark.parametrize("sync", [False, True])
def test_the_whole_broker_is_killed(sync: bool, tmp_path: Path) -> None:
    """With its counters, and without them, as on another machine: then the log is searched."""
    chance = random.Random(SEED + 2 * sync)
    settings = {**SETTINGS, "flushDiskType": "SYNC_FLUSH" if sync else "ASYNC_FLUSH"}
    store = tmp_path / "store"
    for round_ in range(6):
        broker = RunningBroker(store, settings)
        if not round_:
            broker.create_topic(SOURCE, 1)
        check(broker)
        with Copying(broker):
            schedule(broker, chance.randint(20, 80), chance.choice([0, DELAY_MS]))
            broker.kill_all()
        if round_ % 2:
            (store / CONTROL_FILE).unlink()
    with RunningBroker(store, settings) as broker, Copying(broker):
        wait_copied(broker, len(check(broker)))
        assert len(check(broker)) > 100
    assert not verify_store(store).findings


@pytest.mark.parametrize("sync", [False, True])
def test_the_power_is_cut(sync: bool, tmp_path: Path) -> None:
    need("ext4", "power cuts of a deriver")
    chance = random.Random(SEED + sync)
    settings = {**SETTINGS, "flushDiskType": "SYNC_FLUSH" if sync else "ASYNC_FLUSH"}
    log, done = tmp_path / "broker.log", 0
    with Disk(tmp_path, "ext4") as disk:
        for _ in range(5):
            broker = RunningBroker(disk.folder / "store", settings, log_path=log)
            broker.create_topic(SOURCE, 1)  # a power cut may have taken it
            check(broker)
            before = position(broker)
            if sync:
                assert before >= done
            with Copying(broker):
                schedule(broker, chance.randint(20, 60), chance.choice([0, DELAY_MS]))
                wait_copied(broker, before + 1)
                done = known_to_be_copied(broker) if sync else 0
                disk.cut()
                broker.kill_all()
            disk.power_on()
        with RunningBroker(disk.folder / "store", settings, log_path=log) as broker:
            broker.create_topic(SOURCE, 1)
            check(broker)
            with Copying(broker):
                schedule(broker, 10)
                wait_copied(broker, len(check(broker)))
        assert not verify_store(disk.folder / "store").findings


def known_to_be_copied(broker: RunningBroker) -> int:
    """Under SYNC_FLUSH what readers show is on the disk."""
    with Channel(broker.address("reader-0")) as reader:
        return len(read_queue(reader, TARGET, 0))


def test_a_write_that_a_power_cut_has_torn(tmp_path: Path) -> None:
    """Somewhere in the last write: all of it is there after the next start, or nothing."""
    store = tmp_path / "store"
    with RunningBroker(store, SETTINGS) as broker:
        broker.create_topic(SOURCE, 1)
        for count in (4, 5):
            schedule(broker, count, 0)
            copy_all(broker, count)
        whole = check(broker)
        copies = broker.read_queue(TARGET, 0, 9)
        broker.kill_all()
    (start,) = list_segments(store / COMMITLOG_DIR, SEGMENT)[:1]
    path = store / COMMITLOG_DIR / segment_name(start)
    content = path.read_bytes()
    first, last = copies[4], copies[-1]
    end = last.physical_offset + last.size
    chance = random.Random(SEED)
    inside = [each.physical_offset for each in copies[4:]]
    cuts = [*inside, first.physical_offset - 1, last.physical_offset + 80, end]
    for at in [*cuts, *(chance.randint(inside[0], last.physical_offset + 80) for _ in range(3))]:
        (store / CONTROL_FILE).unlink(missing_ok=True)
        path.write_bytes(content[:at] + bytes(len(content) - at))
        with RunningBroker(store, SETTINGS) as again:
            assert position(again) == (9 if at == end else 4), at
            assert len(check(again)) == len(whole)
            copy_all(again, 0 if at == end else 5)
            check(again)
            again.kill_all()


def copy_all(broker: RunningBroker, count: int) -> None:
    """In one write, and so of one pull: that has either what is dispatched or what is not yet."""
    wrote = broker.counter(Counter.WROTE)
    until(lambda: broker.counter(Counter.DISPATCHED) >= wrote, says=lambda: broker.log)
    with Channel(broker.address("commitlog")) as line, Channel(broker.address("reader-0")) as other:
        assert Copier(line, other).step() == count
