"""Whoever appends wakes whoever sleeps on the queue, and nobody is left asleep by a kill."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patience import patient
from still import stopped

from cometmq import Broker, Consumer, Message
from cometmq.actors.launch.addresses import address_of
from cometmq.client.receiving import pulling
from cometmq.client.receiving.buffer import Queue
from cometmq.client.receiving.local_broker import MappedShare
from cometmq.client.receiving.replicas import Replicas
from cometmq.protocol.commands import BrokerEndpoints, GetStatistics, Statistics
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.live import STRIPES, Bell, QueueCursor, QueueEnds, Sleeper, WakeWords
from cometmq.shm.kernel.store import LogAppender
from cometmq.shm.live.control import (
    CONTROL_FILE,
    SLEEPERS_FILE,
    STRIPES_FROM,
    ControlFile,
    Counter,
    open_sleepers,
)
from cometmq.shm.live.queue_table import ENDS_AT, QUEUES_FILE, QueueRange, QueueTable
from cometmq.shm.reading import local

pytestmark = pytest.mark.timeout(120)

WAIT_S = patient(30)
SLOT = 7
WORD = STRIPES_FROM + SLOT % STRIPES  # that sleepers on the queue of that slot sleep on


class Store:
    """The shared words of a store with one queue, as its broker has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control = ControlFile.create(folder / CONTROL_FILE, {})
        count = self.control.own(Counter.QUEUES)
        QueueTable.create(folder / QUEUES_FILE, count)
        self.table = QueueTable.open(folder / QUEUES_FILE, count, writable=True)
        for slot in range(SLOT + 1):
            self.table.fill_slot(slot, "t", slot, QueueRange(0, 0))
            count.advance(slot + 1)
        self.cursor = QueueCursor("t", SLOT)

    @property
    def words(self) -> WakeWords:
        assert self.control.wake_words is not None
        return self.control.wake_words

    def writer(self) -> QueueEnds:
        return self.table.tell(self.control.own_stripes(), -1)

    def tell(self, end: int) -> None:
        """As the commitlog process does, when it has appended."""
        self.cursor.next_offset = end
        self.writer().place(self.cursor, SLOT)

    def until_slept_on(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.words.is_slept_on(WORD):
            assert time.monotonic() < deadline, "nobody sleeps"
            time.sleep(0.001)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def sleep_on_queue(folder: Path, line: Connection) -> None:
    """As a consumer does: say which ends of the queue were seen, one after the other."""
    control = ControlFile.open(folder / CONTROL_FILE, writable=False)
    control.wake_words = open_sleepers(folder / SLEEPERS_FILE)
    stripes = control.read_stripes()
    table = QueueTable.open(folder / QUEUES_FILE, control.read(Counter.QUEUES))
    watch = table.watch(stripes)
    sleeper = Sleeper([stripes[SLOT % STRIPES]], Bell())
    watch.set("queue", SLOT, 0)
    while True:
        sleeper.look()
        if watch.news(1):
            line.send(watch.end(SLOT))
            watch.set("queue", SLOT, watch.end(SLOT))
        else:
            sleeper.sleep(3600)


@pytest.fixture
def sleeper(store: Store) -> Iterator[tuple[multiprocessing.Process, Connection]]:
    line, theirs = multiprocessing.Pipe()
    context: Any = multiprocessing.get_context("fork")
    child = context.Process(target=sleep_on_queue, args=(store.folder, theirs), daemon=True)
    child.start()
    store.until_slept_on()
    yield child, line
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    child.join(WAIT_S)


Child = tuple[multiprocessing.Process, Connection]


def seen_by(sleeper: Child) -> int:
    assert sleeper[1].poll(WAIT_S), "it sleeps on"
    return int(sleeper[1].recv())


def test_a_sleeper_that_is_killed_costs_one_wake_up(store: Store, sleeper: Child) -> None:
    child, _ = sleeper
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(WAIT_S)
    assert store.words.is_slept_on(WORD)  # as it left it
    store.tell(1)
    assert not store.words.is_slept_on(WORD)
    store.tell(2)
    assert not store.words.is_slept_on(WORD)


def test_a_sleeper_that_is_stopped_misses_nothing(store: Store, sleeper: Child) -> None:
    assert sleeper[0].pid is not None
    with stopped(sleeper[0].pid):
        store.tell(1)
        store.tell(2)
    assert seen_by(sleeper) == 2
    store.until_slept_on()
    store.tell(3)
    assert seen_by(sleeper) == 3


def test_what_is_appended_between_publish_and_wake_is_told_of_by_the_next(store: Store) -> None:
    """Groups of several queues, each appended to at any moment of the group before it."""
    own = store.control.own
    log = LogAppender(bytes(8), 1024)
    log.publishes(
        own(Counter.WROTE), own(Counter.WROTE_TIMESTAMP), own(Counter.MESSAGES),
        own(Counter.STEPS), 1 << 22, lambda: None,
    )  # fmt: skip
    log.attach(mmap.mmap(-1, 1 << 20), 0, 0)
    own(Counter.ALLOCATED).reset(1 << 20)
    ends = store.writer()
    log.tells(ends)
    queues = [QueueCursor("t", slot) for slot in range(SLOT + 1)]
    for slot, queue in enumerate(queues):
        ends.place(queue, slot)
    stripes, watch = store.control.read_stripes(), store.table.watch(store.control.read_stripes())

    def told() -> list[int]:
        return [watch.end(slot) for slot in range(SLOT + 1)]

    def arm(*slots: int) -> None:
        for slot in slots:
            own_words[4 * (STRIPES_FROM + slot)] |= 1

    def asleep() -> set[int]:
        return {slot for slot in range(SLOT + 1) if store.words.is_slept_on(STRIPES_FROM + slot)}

    with (store.folder / SLEEPERS_FILE).open("r+b") as file:
        own_words = mmap.mmap(file.fileno(), 4096)
    arm(*range(SLOT + 1))
    for slot in (0, 1):
        log.append(queues[slot], b"x")
    assert told() == [0] * 8, "nothing is told before it is published"
    log.publish()
    assert told() == [1, 1, 0, 0, 0, 0, 0, 0]
    for slot in (2, 3, 0):
        log.append(queues[slot], b"x")
    log.wake()  # of those that were published
    assert asleep() == {2, 3, 4, 5, 6, 7}
    assert told() == [1, 1, 0, 0, 0, 0, 0, 0]
    arm(0)
    log.append(queues[4], b"x")
    log.publish()
    assert told() == [2, 1, 1, 1, 1, 0, 0, 0]
    log.publish()
    log.wake()
    assert asleep() == {5, 6, 7}
    log.wake()
    log.append(queues[5], b"x")
    log.publish()
    log.wake()
    assert asleep() == {6, 7}
    assert told() == [2, 1, 1, 1, 1, 1, 0, 0]
    assert [stripes[slot].value for slot in range(3)] == [3, 2, 2], "counted once each"


def poke(store: Store, *, end: int | None = None, stripe: bool = False, even: bool = False) -> None:
    """What a writer has done that was killed before its next line."""
    if end is not None:
        at = ENDS_AT + 8 * SLOT
        store.table.memory[at : at + 8] = struct.pack("<Q", end)
    if stripe:
        cell = store.control.own_stripes()[SLOT % STRIPES]
        cell.publish(cell.value + 1)
    if even:
        with (store.folder / SLEEPERS_FILE).open("r+b") as file:
            words = mmap.mmap(file.fileno(), 4096)
            (word,) = struct.unpack_from("<I", words, 4 * WORD)
            struct.pack_into("<I", words, 4 * WORD, word + 1)


@pytest.mark.parametrize("told_first", [False, True])
@pytest.mark.parametrize("done", ["nothing", "end", "stripe", "even"])
def test_a_writer_that_is_killed_leaves_nobody_asleep(
    store: Store, sleeper: Child, done: str, *, told_first: bool
) -> None:
    """Killed at each line: the next writer tells, and the supervisor has everybody look again; in
    either order."""
    poke(
        store,
        end=None if done == "nothing" else 1,
        stripe=done in ("stripe", "even"),
        even=done == "even",
    )
    assert not sleeper[1].poll(0.05)  # nobody has woken it
    successor = QueueCursor("t", SLOT, 1)
    if told_first:
        store.writer().place(successor, SLOT)
        store.words.wake_everybody()
    else:
        store.words.wake_everybody()
        store.writer().place(successor, SLOT)
    assert seen_by(sleeper) == 1
    store.until_slept_on()
    store.tell(2)
    assert seen_by(sleeper) == 2


def test_the_words_begin_anew_with_each_run(store: Store) -> None:
    poke(store, even=True)
    again = ControlFile.create(store.folder / CONTROL_FILE, {})
    assert (store.folder / SLEEPERS_FILE).read_bytes() == bytes(4096)
    assert again.wake_words is not None
    assert not again.wake_words.is_slept_on(WORD)


# --- many queues ---


def share_of(store: Store, count: int) -> MappedShare:
    for slot in range(SLOT + 1, count):
        store.table.fill_slot(slot, "t", slot, QueueRange(0, 0))
    counter = store.control.own(Counter.QUEUES)
    counter.reset(max(counter.value, count))
    mapped: Any = SimpleNamespace(control=store.control, table=store.table, cover=Counter.WROTE)
    share = MappedShare(mapped)
    nowhere = Replicas([BrokerEndpoints("c", "b", 0, "", [], "")])
    for slot in range(count):
        share.add(Queue(nowhere, "b", "t", slot, "*", 0))
    while (queue := share.next_ready()) is not None:
        share.looked(queue, moved=False, stuck=lambda: False)
    return share


def seconds_per_poll(store: Store, share: MappedShare) -> tuple[float, float]:
    """Of a look in vain, and of one that finds a message; the best of many."""
    writer, vain, found = store.writer(), [], []
    store.cursor.next_offset = 0
    for _ in range(300):
        began = time.perf_counter()
        assert share.next_ready() is None
        vain.append(time.perf_counter() - began)
        store.cursor.next_offset += 1
        writer.place(store.cursor, SLOT)
        began = time.perf_counter()
        queue = share.next_ready()
        assert queue is not None
        queue.next_offset += 1
        share.looked(queue, moved=True, stuck=lambda: False)
        found.append(time.perf_counter() - began)
    return min(vain), min(found)


def test_a_poll_costs_as_much_with_20_000_queues(tmp_path: Path) -> None:
    figures = {}
    for count in (100, 20_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        store = Store(folder)
        figures[count] = seconds_per_poll(store, share_of(store, count))
    (vain, found), (many_vain, many_found) = figures[100], figures[20_000]
    print(
        f"in vain {vain * 1e6:.1f} and {many_vain * 1e6:.1f} us, with a message {found * 1e6:.1f}"
    )
    print(f"and {many_found * 1e6:.1f} us, of 100 and of 20,000 queues")
    assert many_vain < 3 * vain + 5e-6
    assert many_found < 3 * found + 20e-6  # one stripe is looked through


# --- with a broker ---


def take(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        found += consumer.poll(1024, 1)
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
    return found


def dispatcher_of(broker: Broker) -> int:
    token = broker._ready.token  # type: ignore[union-attr]
    with Channel(address_of(token, "broker"), "broker") as line:
        answer, _ = line.ask(GetStatistics(), timeout_s=WAIT_S)
    assert isinstance(answer, Statistics)
    return int(answer.values["pid.dispatcher"])


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("way", ["mapped", "zmq"])
@pytest.mark.slow
def test_a_services_messages_do_not_wait_for_the_dispatcher(
    tmp_path: Path, way: str, flush: str
) -> None:
    """Of the thread that appends, of the slow way, and of a producer beside them."""
    settings = {"flushDiskType": flush}
    with (
        Broker(tmp_path / "store", settings=settings, writer="here") as broker,
        broker.producer() as producer,
        broker.consumer("g", "t", transport=way) as consumer,
    ):
        appender = broker.appender("t", 0)
        appender.append(b"first")
        assert [m.body for m in take(consumer, 1)] == [b"first"]
        with stopped(dispatcher_of(broker)):
            for number in range(20):
                appender.append(b"%d" % number)
                assert [m.body for m in take(consumer, 1)] == [b"%d" % number]
            appender.append_many([b"x", b"y"])
            producer.send("t", b"z", queue_id=0)
            assert [m.body for m in take(consumer, 3)] == [b"x", b"y", b"z"]


def test_who_cannot_say_that_it_sleeps_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a member of `storeGroup`, whose rights end at reading."""
    monkeypatch.setattr(pulling, "CHECK_S", 60.0)  # else a lost wake-up is noticed every second

    def read_only(path: Path) -> WakeWords:
        with path.open("rb") as file:
            return WakeWords(mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ))

    with Broker(tmp_path / "store") as broker, broker.producer() as producer:
        monkeypatch.setattr(local, "open_sleepers", read_only)
        with broker.consumer("g", "t", transport="mapped") as consumer:
            for number in range(50):
                producer.send("t", b"%d" % number, queue_id=number % 2)
                assert [m.body for m in consumer.poll(10, patient(20))] == [b"%d" % number]
        words = open_sleepers(tmp_path / "store" / SLEEPERS_FILE)
        assert words.writable
        assert words.silent
