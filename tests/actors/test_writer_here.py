"""Broker(..., writer="here"): a service that holds the put lock and appends by itself."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import reference
import writer_child
from family import MARK, RUN, SMALL, RunningBroker, encode_batch, left_behind, read_queue
from paths import KIT
from patience import patient
from still import stopped
from waiting import still_there

from cometmq import Broker, errors
from cometmq.actors.launch.addresses import address_of
from cometmq.protocol.commands import (
    ChangeMode,
    CloseStage,
    Command,
    CommitStages,
    CreateTopic,
    DiskState,
    GetStatistics,
    Section,
    StageMessages,
    Statistics,
    TopicInfo,
)
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import Message
from cometmq.shm.kernel.store import Appender
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter
from cometmq.shm.os.locks import check_not_in_use

WAIT_S = patient(30)
SYNC = {"flushDiskType": "SYNC_FLUSH"}
CHILD_MARK = f"{RUN}/child"


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is left behind of a run is found, and ended."""
    monkeypatch.setenv(MARK, f"{RUN}/here")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextlib.contextmanager
def service(store: Path, settings: dict[str, object] | None = None) -> Iterator[Broker]:
    with Broker(store, settings={**SMALL, **(settings or {})}, writer="here") as broker:
        yield broker


def ask(broker: Broker, role: str, command: Command) -> Command:
    """Over the family's own line, so that internal commands are taken too."""
    with Channel(address_of(broker._ready.token, role), role) as line:
        return line.ask(command, timeout_s=WAIT_S)[0]


def pids(broker: Broker) -> dict[str, int]:
    values = ask_statistics(broker)
    return {key[4:]: int(pid) for key, pid in values.items() if key.startswith("pid.")}


def ask_statistics(broker: Broker, role: str = "broker") -> dict[str, Any]:
    answer = ask(broker, role, GetStatistics())
    assert isinstance(answer, Statistics)
    return answer.values


def consume(broker: Broker, topic: str, count: int) -> dict[int, list[Message]]:
    """So many messages, by queue."""
    found: dict[int, list[Message]] = defaultdict(list)
    deadline = time.monotonic() + WAIT_S
    with broker.consumer("readers", topic, start="earliest") as consumer:
        while sum(map(len, found.values())) < count:
            assert time.monotonic() < deadline, {key: len(each) for key, each in found.items()}
            for message in consumer.poll(timeout_s=1):
                found[message.queue_id].append(message)
                consumer.ack(message)
    return found


def assert_whole(broker: Broker, topic: str, bodies: dict[tuple[int, int], bytes]) -> None:
    """Consumers get what was acknowledged where it was said to be, and no queue has a hole."""
    found = consume(broker, topic, len(bodies))
    for messages in found.values():
        assert [message.queue_offset for message in messages] == list(range(len(messages)))
    got = {
        (queue_id, message.queue_offset): message.body
        for queue_id, messages in found.items()
        for message in messages
    }
    assert got == bodies


def append_often(appender: Appender, body: bytes, **options: Any) -> None:
    for _ in range(200):
        appender.append(body, **options)


def appends_fail(appender: Appender, error: type[BaseException]) -> BaseException:
    """Soon, and from then on."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            appender.append(b"too late?")
        except error as caught:
            with pytest.raises(error):
                appender.append_many([b"a", b"b"])
            return caught
        assert time.monotonic() < deadline


# --- what is stored -------------------------------------------------------------------------------


def test_what_is_stored(store: Path) -> None:
    with service(store) as broker:
        orders = broker.appender("orders", 1)
        assert (orders.topic, orders.queue_id) == ("orders", 1)
        assert orders.append(b"plain") == 0
        assert orders.append(b"paid", tags="eu", keys="o-42 o-43") == 1
        assert orders.append(b"paid", "eu", "o-42 o-43", {"colour": "rot"}) == 2
        assert orders.append(bytearray(b"array"), tags="eu") == 3
        assert orders.append(memoryview(b"a view")[2:], properties={"empty": ""}) == 4
        assert orders.append_many([b"one", b"two"], keys="k") == range(5, 7)
        assert orders.append_many([bytearray(b"three"), memoryview(b"four")]) == range(7, 9)
        assert orders.append_many([]) == range(9, 9)
        assert orders.append_many(body for body in (b"five", b"six")) == range(9, 11)
        found = consume(broker, "orders", 11)[1]
        message = found[2]
        assert (message.tags, message.keys, message.properties["colour"]) == (
            "eu", "o-42 o-43", "rot",
        )  # fmt: skip
        with broker.producer() as producer:
            assert producer.send("orders", b"by wire", queue_id=1).queue_offset == 11
        assert orders.append(b"after") == 12
    assert not (store / "abort").exists()
    assert reference.check_store(store) == []
    records = reference.messages(store)
    bodies = [record.body for record in records]
    assert bodies == [
        b"plain", b"paid", b"paid", b"array", b"view", b"one", b"two", b"three", b"four", b"five",
        b"six", b"by wire", b"after",
    ]  # fmt: skip
    last = records[-1]
    assert last.properties == {}
    assert last.born_timestamp == last.store_timestamp
    with RunningBroker(store) as again:
        assert [message.body for message in again.read_queue("orders", 1, 13)] == bodies


def test_what_is_refused(store: Path) -> None:
    with service(store, {"autoCreateTopicEnable": False}) as broker:
        with pytest.raises(errors.TopicNotExist):
            broker.appender("orders")
        ask(broker, "coordinator", CreateTopic(TopicInfo("orders", 2, 2)))
        with pytest.raises(errors.MessageIllegal, match="which has 2 queues"):
            broker.appender("orders", 2)
        with pytest.raises(errors.NameIllegal):
            broker.appender("a topic")
        orders = broker.appender("orders")
        too_large = bytes((256 << 10) + 1)
        for wrong, error in (
            (too_large, errors.MessageTooLarge), (b"", errors.MessageIllegal),
            ("text", TypeError), (5, TypeError), (None, TypeError),
        ):  # fmt: skip
            with pytest.raises(error):
                orders.append(wrong)  # type: ignore[arg-type]
            with pytest.raises(error):
                orders.append_many([b"good", wrong])  # type: ignore[list-item]
        with pytest.raises(errors.MessageTooLarge, match="batch of"):
            orders.append_many([bytes(256 << 10)] * 5)
        with pytest.raises(errors.MessageTooLarge, match="properties"):
            orders.append(b"body", properties={"large": "x" * 40_000})
        with pytest.raises(errors.MessageIllegal, match="TAGS"):
            orders.append(b"body", properties={"TAGS": "x"})
        with pytest.raises(errors.MessageIllegal, match="0x01"):
            orders.append(b"body", tags="a\x01b")
        assert orders.append(b"only this") == 0
        ask(
            broker, "coordinator", CreateTopic(TopicInfo("orders", 2, 2, perm=4), ChangeMode.UPDATE)
        )
        with pytest.raises(errors.NoPermission):
            orders.append(b"no")
        with pytest.raises(errors.NoPermission):
            broker.appender("orders", 1)
        ask(broker, "coordinator", CreateTopic(TopicInfo("orders", 2, 2), ChangeMode.UPDATE))
        assert orders.append(b"and this") == 1
        assert [message.body for message in consume(broker, "orders", 2)[0]] == [
            b"only this", b"and this",
        ]  # fmt: skip
    with service(store) as broker, pytest.raises(ValueError, match="here"):
        Broker(store, writer="there")  # type: ignore[arg-type]


def test_without_the_writer_there_is_no_appender(store: Path) -> None:
    with Broker(store, settings=SMALL) as broker, pytest.raises(ValueError, match="writer"):
        broker.appender("orders")


# --- many at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, SYNC], ids=["async", "sync"])
@pytest.mark.slow
def test_threads_and_producers_at_once(settings: dict[str, object], store: Path) -> None:
    """Over roll-overs: each one's order is kept, an offset is given once, nothing is lost."""
    rounds = 250 if settings else 900
    stored: dict[tuple[int, int], bytes] = {}
    failed: list[BaseException] = []

    def append(broker: Broker, thread: int) -> None:
        appenders = [broker.appender("t", queue_id) for queue_id in (0, 1)]
        for number in range(rounds):
            queue_id = number % 2
            body = b"%d %d " % (thread, number) + b"x" * (number % 700)
            stored[queue_id, appenders[queue_id].append(body)] = body
            if number % 50 == 0:
                bodies = [b"%d %d.%d" % (thread, number, each) for each in range(20)]
                for place, each in zip(
                    appenders[queue_id].append_many(bodies), bodies, strict=True
                ):
                    stored[queue_id, place] = each

    def send(broker: Broker, thread: int) -> None:
        with broker.producer(linger_ms=1) as producer:
            receipts = [
                (number % 2, producer.send("t", b"%d %d" % (thread, number), queue_id=number % 2))
                for number in range(rounds)
            ]
            producer.flush()
            for number, (queue_id, receipt) in enumerate(receipts):
                stored[queue_id, receipt.queue_offset] = b"%d %d" % (thread, number)

    def watched(work: Callable[[Broker, int], None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            failed.append(error)

    with service(store, settings) as broker:
        broker.appender("t")
        threads = [
            threading.Thread(target=watched, args=(send if number > 2 else append, broker, number))
            for number in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patient(100))
        assert not failed, failed
        extra = 3 * (rounds // 50) * 20
        assert len(stored) == 5 * rounds + extra
        assert_whole(broker, "t", stored)
        messages = ask_statistics(broker, "commitlog")["messages"]
    assert reference.check_store(store) == []
    assert messages == len(stored)
    order: dict[tuple[int, bytes], int] = defaultdict(lambda: -1)
    for record in reference.messages(store):
        thread, _, rest = record.body.partition(b" ")
        number = int(rest.split(b" ")[0].split(b".")[0])
        if b"." in rest:
            continue
        key = record.queue_id, thread
        assert number > order[key]
        order[key] = number


@pytest.mark.slow
def test_a_commit_of_stages_beside_appends(store: Path) -> None:
    """Nothing else comes between what one command commits."""
    staged = [b"staged %d " % number + b"s" * 3_000 for number in range(300)]
    over = threading.Event()

    def append(appender: Appender) -> None:
        while not over.is_set():
            appender.append(b"other " + b"o" * 500)

    with service(store) as broker:
        appender = broker.appender("t")
        thread = threading.Thread(target=append, args=(appender,))
        thread.start()
        with Channel(address_of(broker._ready.token, "commitlog"), "commitlog") as line:
            for first in range(0, len(staged), 20):
                command = StageMessages("sink", 1, "a", first // 20, [Section("t", 0, 20)], 1)
                line.ask(command, [encode_batch(staged[first : first + 20])], timeout_s=WAIT_S)
            line.ask(CloseStage("sink", 1, "a", len(staged) // 20), timeout_s=WAIT_S)
            line.ask(CommitStages("sink", 1, ["a"]), timeout_s=WAIT_S)
        at_commit = appender.append(b"after")
        over.set()
        thread.join()
    records = reference.messages(store)
    bodies = [record.body for record in records]
    begin = bodies.index(staged[0])
    assert bodies[begin : begin + len(staged)] == staged
    assert b"after" in bodies[begin + len(staged) :]
    assert at_commit >= len(staged)
    assert reference.check_store(store) == []


# --- SYNC_FLUSH -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_append_waits_for_the_disk(store: Path) -> None:
    settings = {**SYNC, "syncFlushTimeout": 3_000, "maxInFlightSendBytes": 400_000}
    with service(store, settings) as broker:
        control = ControlFile.open(store / CONTROL_FILE, writable=False)
        flushed, wrote = control.read(Counter.FLUSHED), control.read(Counter.WROTE)
        appender = broker.appender("t")
        for number in range(50):
            appender.append(b"%d" % number)
            assert flushed.value == wrote.value
        with stopped(pids(broker)["flush"]):
            assert appender.append(b"later", wait=False) == 50
            assert flushed.value < wrote.value
            with pytest.raises(errors.FlushDiskTimeout):
                appender.append(b"stored all the same")
            with pytest.raises(errors.FlushDiskTimeout):
                appender.wait(timeout_s=0.1)
            with pytest.raises(errors.SystemBusy, match="maxInFlightSendBytes"):
                append_often(appender, bytes(10_000), wait=False)
        appender.wait()
        assert flushed.value == wrote.value
        appender.append(b"goes on")
        count = ask_statistics(broker, "commitlog")["messages"]
        bodies = [message.body for message in consume(broker, "t", count)[0]]
        assert bodies[50:52] == [b"later", b"stored all the same"]


def test_many_threads_wait_for_the_same_disk(store: Path) -> None:
    """All are woken by one doorbell, and none is forgotten."""
    with service(store, SYNC) as broker:
        appender = broker.appender("t")
        took: list[float] = []

        def append() -> None:
            for _ in range(60):
                began = time.monotonic()
                appender.append(b"body")
                took.append(time.monotonic() - began)

        threads = [threading.Thread(target=append) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patient(100))
        assert len(took) == 24 * 60
        flushes = ask_statistics(broker, "flush")["flushes"]
        assert flushes < len(took)


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["flush", "dispatcher", "allocator", "coordinator", "reader-0"])
@pytest.mark.slow
def test_a_process_of_the_family_is_killed(role: str, store: Path) -> None:
    stored: dict[tuple[int, int], bytes] = {}
    with service(store) as broker:
        appender = broker.appender("t")
        old = pids(broker)[role]
        assert pids(broker)["commitlog"] == os.getpid()
        deadline = time.monotonic() + WAIT_S
        number = 0
        os.kill(old, signal.SIGKILL)
        while number < 4_000 or pids(broker)[role] in (0, old):
            assert time.monotonic() < deadline
            for _ in range(50):
                body = b"%d " % number + b"x" * 500
                stored[0, appender.append(body)] = body
                number += 1
        assert_whole(broker, "t", stored)
    assert reference.check_store(store) == []


def test_no_room_for_a_segment(store: Path) -> None:
    with service(store) as broker:
        appender = broker.appender("t")
        allocator = pids(broker)["allocator"]
        soft, hard = resource.prlimit(allocator, resource.RLIMIT_FSIZE)
        resource.prlimit(allocator, resource.RLIMIT_FSIZE, (1 << 19, hard))
        with pytest.raises(errors.DiskFull):
            append_often(appender, bytes(50_000))
        count = appender.queue.next_offset
        with pytest.raises(errors.DiskFull):
            appender.append_many([bytes(50_000)] * 10)
        resource.prlimit(allocator, resource.RLIMIT_FSIZE, (soft, hard))
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                place = appender.append(bytes(50_000))
                break
            except errors.DiskFull:
                assert time.monotonic() < deadline
        assert place == count
        assert appender.append(b"last") == count + 1
        consume(broker, "t", count + 2)
    assert reference.check_store(store) == []


@pytest.mark.slow
def test_a_full_disk_as_the_cleaner_sees_it(store: Path) -> None:
    with service(store) as broker:
        appender = broker.appender("t")
        appender.append(b"one")
        ask(broker, "commitlog", DiskState(False, "the disk is 91.0 % full"))
        with pytest.raises(errors.DiskFull, match=r"91\.0 % full"):
            appender.append(b"no")
        with pytest.raises(errors.DiskFull):
            appender.append_many([b"no"])
        ask(broker, "commitlog", DiskState(True))
        assert appender.append(b"two") == 1


@pytest.mark.parametrize("settings", [{}, SYNC], ids=["async", "sync"])
@pytest.mark.slow
def test_the_supervisor_is_killed(settings: dict[str, object], store: Path) -> None:
    """The service lives on, its appends raise; a broker opened after that has everything."""
    with service(store, settings) as broker:
        appender = broker.appender("t")
        bodies = [b"%d" % number for number in range(300)]
        for body in bodies:
            appender.append(body)
        os.kill(broker.pid, signal.SIGKILL)
        error = appends_fail(appender, errors.CometError)
        assert isinstance(error, errors.StoreError | errors.FlushDiskTimeout)
        with pytest.raises(errors.StoreError):
            broker.appender("other")
    with RunningBroker(store, settings) as again:
        found = again.read_queue("t", 0, len(bodies))
        assert [message.body for message in found][: len(bodies)] == bodies
    assert reference.check_store(store) == []


@pytest.mark.slow
def test_a_broker_that_gives_up(store: Path) -> None:
    with service(store) as broker:
        appender = broker.appender("t")
        appender.append(b"one")
        (zygote,) = psutil.Process(broker.pid).children()
        zygote.kill()
        appends_fail(appender, errors.StoreError)
    assert (store / "abort").exists()
    with RunningBroker(store) as again:
        assert again.read_queue("t", 0, 1)[0].body == b"one"


def test_a_broken_invariant_ends_the_broker_and_not_the_service(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(store) as broker:
        appender = broker.appender("t")
        appender.append(b"one")
        assert broker._guest is not None
        assert broker._guest.actor is not None

        def broken(_need: int) -> None:
            raise AssertionError("made up")

        monkeypatch.setattr(broker._guest.actor._log, "_roll", broken)
        with pytest.raises(errors.StoreError, match="made up"):
            append_often(appender, bytes(50_000))
        appends_fail(appender, errors.StoreError)
        assert broker._process.wait(WAIT_S) == 1
    monkeypatch.undo()
    with RunningBroker(store) as again:
        assert again.read_queue("t", 0, 1)[0].body == b"one"
    assert reference.check_store(store) == []


# --- forks, locks, ends ---------------------------------------------------------------------------


def test_a_fork_of_the_service_cannot_append(store: Path) -> None:
    with service(store) as broker:
        appender = broker.appender("t")
        assert appender.append(b"parent") == 0
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for call in (
                    lambda: appender.append(b"child"),
                    lambda: appender.append_many([b"child"]),
                    lambda: appender.wait(),
                    lambda: broker.appender("t"),
                ):
                    try:
                        call()
                    except errors.StoreLocked:
                        os.write(write, b".")
                broker.close()
                os.write(write, b"!")
            finally:
                os._exit(0)
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(read, 10) == b"....!"
        os.close(read)
        assert appender.append(b"parent still") == 1
        found = consume(broker, "t", 2)[0]
        assert [message.body for message in found] == [b"parent", b"parent still"]
    assert reference.check_store(store) == []


def test_the_lock_is_this_process_s(store: Path) -> None:
    """And stays it when somebody here asks for it."""
    with service(store) as broker:
        with pytest.raises(errors.StoreLocked, match="this process"):
            check_not_in_use(store)
        with pytest.raises(errors.StoreLocked):
            Broker(store, settings=SMALL, writer="here")
        text = "import sys; from pathlib import Path; from cometmq.shm.os.locks import StoreLock; "
        text += "StoreLock(Path(sys.argv[1]), 0)"
        done = subprocess.run(
            [sys.executable, "-c", text, store], capture_output=True, text=True, check=False
        )
        assert f"process {os.getpid()}" in done.stderr
        assert broker.appender("t").append(b"one") == 0
    check_not_in_use(store)


@pytest.mark.slow
def test_two_stores_in_one_service(tmp_path: Path) -> None:
    with service(tmp_path / "a") as first, service(tmp_path / "b") as second:
        appenders = [first.appender("t"), second.appender("t")]
        for number in range(2_000):
            for name, appender in zip((b"a", b"b"), appenders, strict=True):
                assert appender.append(name + bytes(500)) == number
        first.close()
        assert appenders[1].append(b"b") == 2_000
        with pytest.raises(errors.ShuttingDown):
            appenders[0].append(b"a")
    for name in ("a", "b"):
        assert reference.check_store(tmp_path / name) == []
        assert {record.body[:1] for record in reference.messages(tmp_path / name)} == {
            name.encode()
        }


@pytest.mark.parametrize("settings", [{}, SYNC], ids=["async", "sync"])
@pytest.mark.slow
def test_closed_while_it_appends(settings: dict[str, object], store: Path) -> None:
    stored: dict[int, int] = defaultdict(int)
    refused: list[BaseException] = []

    def append(appender: Appender, thread: int) -> None:
        try:
            while True:
                appender.append(b"%d %d" % (thread, stored[thread]))
                stored[thread] += 1
        except BaseException as error:
            refused.append(error)

    # Queues with files of 10,000 entries: it appends faster than files can be made.
    with service(store, {**settings, "mappedFileSizeConsumeQueue": 200_000}) as broker:
        threads = [
            threading.Thread(target=append, args=(broker.appender("t", thread), thread))
            for thread in range(3)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + WAIT_S
        while sum(stored.values()) < (300 if settings else 12_000):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    for thread in threads:
        thread.join(WAIT_S)
    assert [type(error) for error in refused] == [errors.ShuttingDown] * 3
    assert not (store / "abort").exists()
    assert reference.check_store(store) == []
    found: dict[int, list[bytes]] = defaultdict(list)
    for record in reference.messages(store):
        found[record.queue_id].append(record.body)
    for number, count in stored.items():
        assert found[number] == [b"%d %d" % (number, each) for each in range(count)]


@pytest.mark.slow
def test_nothing_stays_behind_in_the_service(tmp_path: Path) -> None:
    def opened() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with service(tmp_path / "first") as broker:  # and whatever is made once
        broker.appender("t").append(b"one")
    before = opened()
    for _ in range(2):
        with service(tmp_path / "store") as broker:
            broker.appender("t").append(b"one")
    deadline = time.monotonic() + WAIT_S
    while (now := opened())[0] > before[0] + 2 or now[1] > before[1]:  # ended in the background
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.01)


# --- kill -9 of the service -----------------------------------------------------------------------


def start_child(store: Path, settings: dict[str, object], what: str = "") -> Any:
    acked = store.parent / "acked"
    writer_child.make_acked(acked)
    return subprocess.Popen(
        [sys.executable, KIT / "writer_child.py", store,
         json.dumps({**SMALL, **settings}), acked, *([what] if what else [])],
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: CHILD_MARK},
    )  # fmt: skip


def wait_until_gone(family: Iterable[psutil.Process]) -> None:
    """With all that they hold: one that ends loses its mark before."""
    assert not still_there((process.pid for process in family), WAIT_S)


def wait_until_all_are_gone() -> None:
    deadline = time.monotonic() + WAIT_S
    while left := left_behind(CHILD_MARK):
        wait_until_gone(left)
        assert time.monotonic() < deadline, left


@pytest.mark.parametrize("whom", ["service", "service soon", "all"])
@pytest.mark.parametrize("settings", [{}, SYNC], ids=["async", "sync"])
@pytest.mark.slow
def test_the_service_is_killed(settings: dict[str, object], whom: str, store: Path) -> None:
    """Nothing whose append returned is lost, and nothing is there that was not appended."""
    child = start_child(store, settings)
    assert child.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + WAIT_S
    wanted = (60 if settings else 400) * (1 if "soon" in whom else 3)
    while min(own for own, _ in writer_child.read_acked(store.parent / "acked")) < wanted:
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.001)  # a file tells nobody that it has grown
    family = left_behind(CHILD_MARK)
    victims = family if whom == "all" else [psutil.Process(child.pid)]
    for process in victims:
        process.suspend()  # so that nobody sees another one's end
    for process in victims:
        process.kill()
    child.wait()
    child.stdout.close()
    wait_until_gone(family)
    wait_until_all_are_gone()
    assert (store / "abort").exists()
    acked = writer_child.read_acked(store.parent / "acked")
    with (
        service(store, settings) as here,
        Channel(address_of(here._ready.token, "reader-0"), "reader-0") as reader,
    ):
        for thread, (own, _) in enumerate(acked):
            found = [message.body for message in read_queue(reader, "kill", thread, own)]
            assert own <= len(found) <= own + 1
            assert found == [writer_child.body_of(thread, each) for each in range(len(found))]
        shared = read_queue(reader, "kill", writer_child.SHARED)
        assert [message.queue_offset for message in shared] == list(range(len(shared)))
        numbers: dict[int, list[int]] = defaultdict(list)
        for message in shared:
            thread, number = map(int, message.body.split(b" ")[:2])
            numbers[thread].append(number)
        for thread, (_, count) in enumerate(acked):
            assert numbers[thread] == list(range(len(numbers[thread])))
            assert count <= len(numbers[thread]) <= count + writer_child.MANY
        assert here.appender("kill", writer_child.SHARED).append(b"goes on") == len(shared)
    assert reference.check_store(store) == []


@pytest.mark.slow
def test_a_fork_that_outlives_the_service_keeps_no_broker(store: Path) -> None:
    child = start_child(store, {}, "fork")
    assert child.stdout.readline() == b"ready\n"
    fork = [
        process for process in psutil.Process(child.pid).children()
        if "writer_child.py" in " ".join(process.cmdline())
    ]  # fmt: skip
    assert len(fork) == 1
    family = left_behind(CHILD_MARK)
    child.kill()
    child.wait()
    wait_until_gone(process for process in family if process != fork[0])
    with service(store) as broker:  # although the fork lives
        assert broker.appender("kill").append(b"goes on") > 0
    fork[0].kill()
    child.stdout.close()
    wait_until_all_are_gone()
    assert reference.check_store(store) == []


def test_a_service_that_forgets_to_close(store: Path) -> None:
    child = start_child(store, {}, "forget")
    assert child.wait(WAIT_S) == 0
    child.stdout.close()
    wait_until_all_are_gone()
    assert not (store / "abort").exists()
    assert [record.body for record in reference.messages(store)] == [b"forgotten"]
    assert reference.check_store(store) == []


def test_ctrl_c_in_the_service(store: Path) -> None:
    child = start_child(store, {}, "interrupt")
    assert child.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + WAIT_S
    acked = store.parent / "acked"
    while writer_child.read_acked(acked)[0][0] < 1_000:
        assert time.monotonic() < deadline
        time.sleep(0.001)  # a file tells nobody that it has grown
    child.send_signal(signal.SIGINT)
    assert child.wait(WAIT_S) in (1, -signal.SIGINT, 130)
    child.stdout.close()
    wait_until_all_are_gone()
    assert not (store / "abort").exists()
    assert reference.check_store(store) == []
    own = [record for record in reference.messages(store) if record.queue_id == 0]
    assert len(own) >= writer_child.read_acked(acked)[0][0]
