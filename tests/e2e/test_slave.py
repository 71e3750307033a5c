"""A slave that follows a scripted master, which serves the log that a broker has written."""

from __future__ import annotations

import random
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import reference
from family import RunningBroker, Sent, pull
from fault.disk import need, small_disk
from patience import patient
from scripted_master import (
    Connection,
    Log,
    ScriptedMaster,
    log_of,
    serve,
    slave_settings,
)

from cometmq.client.sending.producer import Producer
from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import (
    CommitOffsets,
    CreateTopic,
    DescribeGroup,
    DiskState,
    FetchOffsets,
    GetRoute,
    GroupDescription,
    GroupOffsets,
    ListTopics,
    PullMessages,
    PullStatus,
    QueueKey,
    QueueOffset,
    TopicInfo,
    TopicList,
    TopicRoute,
)
from cometmq.protocol.errors import ConfigError, NotMaster, StoreError
from cometmq.protocol.perm import WRITE
from cometmq.shm.live.control import Counter
from cometmq.shm.tools.verify import verify_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEGMENT_BYTES = 300_007  # of the master's log and its copies: no multiple of anything
SHAPE = {"mappedFileSizeCommitLog": SEGMENT_BYTES, "maxMessageSize": 64 << 10}
GROUP = "readers"
KEY = QueueKey("orders", 2)
LATER_S = 45  # a delayed message waits for so long: longer than it takes to copy the log


@dataclass
class Master:
    """What a broker has written, and has acknowledged."""

    store: Path
    log: Log
    sent: list[Sent]
    later_at: datetime  # when the messages on `later` are due


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Master:
    store = tmp_path_factory.mktemp("master") / "master"
    chance = random.Random(5)
    sent: list[Sent] = []
    with RunningBroker(store, {"brokerName": "copied", **SHAPE}) as broker:
        broker.create_topic("orders", 4)
        for number in range(160):
            bodies = [chance.randbytes(chance.randrange(1, 3_000)) for _ in range(20)]
            sent += broker.send("orders", number % 4, bodies, tags="a", keys=f"key{number}")
        broker.coordinator.ask(CommitOffsets(GROUP, [QueueOffset("orders", 2, 123)]))
        later_at = datetime.now(UTC) + timedelta(seconds=LATER_S)
        with Producer(broker.ready.name_server) as producer:
            producer.send("later", b"a delayed one", delay_level=5)  # a minute
            producer.send("later", b"a timed one", deliver_at=later_at)
        end = broker.counter(Counter.WROTE)
    return Master(store, log_of(store, end, SEGMENT_BYTES), sent, later_at)


def slave_of(address: str, **more: Any) -> dict[str, Any]:
    return {**slave_settings(address), **SHAPE, **more}


def assert_same(store: Path, log: Log, end: int | None = None) -> None:
    """The copy has the master's bytes, and nothing behind them."""
    end = log.end if end is None else end
    copied = log_of(store, end, log.segment_bytes)
    assert copied.begin == log.begin
    assert copied.content == log.bytes_of(log.begin, end)


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = patient(60)) -> None:
    """For what only another process knows, which tells nobody."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.02)


def state_of(broker: RunningBroker) -> str:
    return str(broker.statistics("commitlog")["master_state"])


# --- what a slave has and says ---


def test_it_copies_serves_and_answers(master: Master, tmp_path: Path) -> None:
    with (
        ScriptedMaster(master.log) as source,
        RunningBroker(tmp_path / "slave", slave_of(source.address)) as slave,
    ):
        source.wait_acknowledged(source.end)
        assert_same(tmp_path / "slave", master.log)
        slave.assert_stored(master.sent)

        told = slave.coordinator.ask(ListTopics())[0]
        assert isinstance(told, TopicList)
        assert "orders" in {info.topic for info in told.topics}

        def committed() -> int:
            offsets = slave.coordinator.ask(FetchOffsets(GROUP, [KEY]))[0]
            assert isinstance(offsets, GroupOffsets)
            return offsets.offsets[0].queue_offset

        wait_until(lambda: committed() == 123, "its coordinator follows the ledger")
        group = slave.coordinator.ask(DescribeGroup(GROUP))[0]
        assert isinstance(group, GroupDescription)

        assert slave.endpoints.broker_id == 1
        with slave.channel(slave.ready.name_server) as names:
            route = names.ask(GetRoute("orders"))[0]
        assert isinstance(route, TopicRoute)
        assert not route.brokers[0].info.perm & WRITE

        for ask in (
            lambda: slave.send("orders", 0, [b"x"]),
            lambda: slave.coordinator.ask(CreateTopic(TopicInfo("new", 1, 1))),
            lambda: slave.coordinator.ask(CommitOffsets(GROUP, [QueueOffset("orders", 2, 5)])),
        ):
            with pytest.raises(NotMaster, match=source.address):
                ask()
        assert "scheduler" not in slave.pids()
        told_of = slave.statistics("commitlog")
        assert told_of["master_state"] == "caught up"
        assert told_of["acknowledged"] == told_of["wrote"] == source.end
        assert told_of["behind_ms"] == 0
    assert_same(tmp_path / "slave", master.log)
    assert reference.check_store(tmp_path / "slave", SEGMENT_BYTES) == []


def test_a_pull_that_is_held_gets_what_comes(master: Master, tmp_path: Path) -> None:
    """A reader sleeps on the queue's stripe, which the copy moves; also for a new queue."""
    chance = random.Random(1)
    size = len(master.log.content)
    cuts = sorted(chance.sample(range(size), 6))
    known = Log(b"", segment_bytes=SEGMENT_BYTES)
    with (
        ScriptedMaster(known) as source,
        RunningBroker(tmp_path / "slave", slave_of(source.address)) as slave,
    ):
        next_offset = 0
        for cut in [*cuts, size]:
            source.grow(Log(master.log.content[:cut], segment_bytes=SEGMENT_BYTES))
            source.wait_acknowledged(slave.counter(Counter.WROTE))
            wanted = sum(
                each.topic == "orders"
                and each.queue_id == 1
                and each.physical_offset + 70_000 < cut
                for each in master.sent
            )
            while next_offset < wanted:
                command = PullMessages("orders", 1, next_offset, 10_000, 1 << 20, 20_000)
                answer, _ = pull(slave.reader, command)
                assert answer.status == PullStatus.FOUND
                next_offset = answer.next_queue_offset
        assert next_offset


def test_the_master_is_away_and_comes_back(master: Master, tmp_path: Path) -> None:
    """Reads are served meanwhile; the slave asks for what follows on its end."""
    half = len(master.log.content) // 2
    with ScriptedMaster(Log(master.log.content[:half], segment_bytes=SEGMENT_BYTES)) as source:
        port = source.port
        slave = RunningBroker(tmp_path / "slave", slave_of(source.address))
        with slave:
            whole = half - 70_000  # a record may be cut
            source.wait_acknowledged(whole)
            end = slave.counter(Counter.WROTE)
            source.close()
            wait_until(lambda: state_of(slave) == "waiting", "it has not noticed")
            slave.assert_stored([each for each in master.sent if each.physical_offset < whole // 2])
            with ScriptedMaster(master.log, port=port) as again:
                again.wait_acknowledged(again.end)
                assert again.requests[0] == end
                assert_same(tmp_path / "slave", master.log)


def test_a_log_that_begins_later(master: Master, tmp_path: Path) -> None:
    """An empty slave begins where its master does; and again, as long as it is empty."""
    begin = 2 * SEGMENT_BYTES
    late = Log(master.log.bytes_of(begin, master.log.end), begin=begin, segment_bytes=SEGMENT_BYTES)
    nothing = Log(b"", begin=begin - SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
    store = tmp_path / "slave"
    for end in ("orderly", "killed"):
        with (
            ScriptedMaster(nothing) as source,
            RunningBroker(store, slave_of(source.address)) as slave,
        ):
            source.wait_for(lambda source=source: len(source.requests) > 1)
            assert slave.counter(Counter.WROTE) == nothing.begin
            if end == "killed":
                slave.kill_all()
    with ScriptedMaster(late) as source:
        # A folder that has the master's config knows what changed before.
        for name in ("config", "cometmq.ledger"):
            copied = master.store / name
            (shutil.copytree if copied.is_dir() else shutil.copy)(
                copied, store / name, **({"dirs_exist_ok": True} if copied.is_dir() else {})
            )
        with RunningBroker(store, slave_of(source.address)) as slave:
            source.wait_acknowledged(source.end)
            assert_same(store, late)
            assert slave.counter(Counter.MIN_OFFSET) == begin
            kept = [each for each in master.sent if each.physical_offset >= begin + SEGMENT_BYTES]
            first = min(each.queue_offset for each in kept if each.queue_id == 0)
            command = PullMessages("orders", 0, first, 10, 1 << 20, 20_000)
            answer, messages = pull(slave.reader, command)
            assert answer.status == PullStatus.FOUND
            assert messages[0].queue_offset == first
            for role in ("commitlog", "dispatcher", "coordinator"):
                slave.kill(role)
            assert pull(slave.reader, command)[1][0].queue_offset == first
            offsets = slave.coordinator.ask(FetchOffsets(GROUP, [KEY]))[0]
            assert offsets.offsets[0].queue_offset == 123
        with RunningBroker(store, slave_of(source.address)) as slave:
            assert_same(store, late)
            assert pull(slave.reader, command)[1][0].queue_offset == first


def test_an_empty_slave_waits_for_its_master(tmp_path: Path, master: Master) -> None:
    with ScriptedMaster(master.log) as source:
        port = source.port
    slave = RunningBroker(tmp_path / "slave", slave_of(f"127.0.0.1:{port}"), wait=False)
    wait_until(lambda: "waiting for master" in slave.log, slave.log)
    with ScriptedMaster(master.log, port=port) as source:
        slave.wait_ready()
        with slave:
            source.wait_acknowledged(source.end)


# --- what is refused ---


def test_what_comes_wrong_is_asked_for_again(master: Master, tmp_path: Path) -> None:
    """Connections that cut, repeat, jump, lie or fall silent: in the end the copy is whole."""
    log = master.log
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    def repeat(connection: Connection, at: int, body: bytes) -> None:
        connection.send(at, body)
        connection.send(at, body)

    def jump(connection: Connection, at: int, body: bytes) -> None:
        connection.send(at, body)
        connection.send(at + len(body) + 1, body)

    def flip(connection: Connection, at: int, body: bytes) -> None:
        where = chance.randrange(len(body))
        wrong = body[:where] + bytes([body[where] ^ 0x10]) + body[where + 1 :]
        connection.send(at, wrong if is_noticed(at, body, wrong) else body)

    def cut(connection: Connection, at: int, body: bytes) -> None:
        whole = struct.pack(">qi", at, len(body)) + body
        connection.send_raw(whole[: chance.randrange(len(whole))])

    def oversize(connection: Connection, at: int, _body: bytes) -> None:
        connection.send_raw(struct.pack(">qi", at, 2**31 - 1))

    def is_noticed(_at: int, body: bytes, wrong: bytes) -> bool:
        """What no CRC covers (a property, a store time) is the master's to say."""
        return body[:8] != wrong[:8]

    faults = [repeat, jump, cut, oversize, flip, cut]
    done: list[str] = []

    def script(connection: Connection) -> None:
        if len(source.requests) <= 1:  # it only asks where the log begins
            connection.send(0, b"")
            return
        if not faults:
            serve(connection)
            return
        at = connection.requested
        for _ in range(chance.randrange(1, 5)):
            body = log.bytes_of(at, min(at + 9_000, (at // SEGMENT_BYTES + 1) * SEGMENT_BYTES))
            connection.send(at, body)
            at += len(body)
        fault = faults.pop(0)
        done.append(fault.__name__)
        end = min(at + 9_000, (at // SEGMENT_BYTES + 1) * SEGMENT_BYTES)
        fault(connection, at, log.bytes_of(at, end))
        if fault in (repeat, jump, oversize, flip):
            connection.read_until_closed()

    with (
        ScriptedMaster(log, script) as source,
        RunningBroker(
            tmp_path / "slave", slave_of(source.address, haHousekeepingInterval=2_000)
        ) as slave,
    ):
        source.wait_acknowledged(source.end, 120)
        assert len(done) == 6
        assert_same(tmp_path / "slave", log)
        slave.assert_stored(master.sent)


def test_a_master_that_falls_silent(master: Master, tmp_path: Path) -> None:
    def script(connection: Connection) -> None:
        if len(source.requests) <= 1:
            connection.send(0, b"")
        elif len(source.requests) == 2:
            connection.read_until_closed()
        else:
            serve(connection)

    with (
        ScriptedMaster(master.log, script) as source,
        RunningBroker(
            tmp_path / "slave", slave_of(source.address, haHousekeepingInterval=500)
        ) as slave,
    ):
        source.wait_acknowledged(source.end)
        slave.until_logged("has been silent for")


def first_record_at(log: Log, not_before: int) -> int:
    """Where a record begins."""
    at = 0
    while at < not_before or at % SEGMENT_BYTES == 0:
        size, _ = struct.unpack(">iI", log.bytes_of(at, at + 8))
        at += size
    return at


def test_a_log_that_is_no_beginning_of_the_masters(master: Master, tmp_path: Path) -> None:
    """Its first new record does not fit, however often: the slave stops, and serves what it has."""
    at = first_record_at(master.log, 500_000)
    content = bytearray(master.log.content)
    content[at + 28 : at + 36] = struct.pack(">q", at + 64)  # its physical offset
    other = Log(bytes(content), segment_bytes=SEGMENT_BYTES)
    with (
        ScriptedMaster(other) as source,
        RunningBroker(tmp_path / "slave", slave_of(source.address)) as slave,
    ):
        wait_until(lambda: state_of(slave) == "stopped", slave.log)
        slave.until_logged(f"stored position is not its place: it says {at + 64}")
        slave.until_logged("move the store away")
        assert source.requests.count(at) == 2  # the first connection had come so far by itself
        assert slave.counter(Counter.WROTE) == at
        assert_same(tmp_path / "slave", master.log, at)
        slave.assert_stored([each for each in master.sent if each.physical_offset < at - 100_000])


def test_a_master_that_has_less(master: Master, tmp_path: Path) -> None:
    """It was set up anew, or has lost what it had: nothing of this copy is cut."""
    with ScriptedMaster(master.log) as source:
        port = source.port
        slave = RunningBroker(tmp_path / "slave", slave_of(source.address))
        source.wait_acknowledged(source.end)

    def from_its_end(connection: Connection) -> None:
        connection.send(SEGMENT_BYTES, b"")
        connection.read_until_closed()

    with slave, ScriptedMaster(master.log, from_its_end, port=port):
        wait_until(lambda: state_of(slave) == "stopped", slave.log)
        slave.until_logged(f"its log ends at {SEGMENT_BYTES}, and this one at {master.log.end}")
        slave.assert_stored(master.sent)
        assert_same(tmp_path / "slave", master.log)


def test_a_segment_size_that_is_not_the_masters(master: Master, tmp_path: Path) -> None:
    settings = slave_of("127.0.0.1:1", mappedFileSizeCommitLog=SEGMENT_BYTES + 1)
    with ScriptedMaster(master.log) as source:
        settings["haMasterAddress"] = source.address
        with RunningBroker(tmp_path / "slave", settings) as slave:
            wait_until(lambda: state_of(slave) == "stopped", slave.log)
            slave.until_logged("is mappedFileSizeCommitLog the master's?")
    later = Log(b"", begin=SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
    with ScriptedMaster(later) as source:
        settings["haMasterAddress"] = source.address
        with pytest.raises(StoreError, match="is mappedFileSizeCommitLog the master's"):
            RunningBroker(tmp_path / "other", settings)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"brokerId": 0}, "brokerId = 0: must be larger with brokerRole = SLAVE"),
        ({"brokerName": ""}, "brokerName: must be the master's"),
        ({"haMasterAddress": ""}, "haMasterAddress: must be the master's host:port"),
        ({"haMasterAddress": "host"}, "haMasterAddress = host: must be host:port"),
        ({"haMasterAddress": "host:0"}, "must be host:port"),
        ({"haMasterAddress": "host:65536"}, "must be host:port"),
        ({"brokerRole": "ASYNC_MASTER"}, "brokerId = 1: must be 0"),
        ({"haHousekeepingInterval": 200}, "must be below haHousekeepingInterval = 200"),
    ],
)
def test_settings_that_make_no_slave(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        BrokerSettings.from_keys({**slave_settings("host:1"), **changed})
    assert told in str(raised.value)


@pytest.mark.parametrize("address", ["host:1", "10.0.0.1:65535", "[::1]:10912"])
def test_addresses_of_masters(address: str) -> None:
    assert BrokerSettings.from_keys(slave_settings(address)).ha_master_address == address


# --- kills, and a full disk ---


@pytest.fixture
def growing(master: Master) -> Iterator[tuple[ScriptedMaster, threading.Event]]:
    """A master whose log grows by some KiB at a time, until all of it is there."""
    whole = threading.Event()
    with ScriptedMaster(Log(b"", segment_bytes=SEGMENT_BYTES), batch_bytes=5_003) as source:
        chance = random.Random(9)

        def grow() -> None:
            size = 0
            while size < len(master.log.content) and not source.closed.is_set():
                size += chance.randrange(1, 9_000)
                source.grow(Log(master.log.content[:size], segment_bytes=SEGMENT_BYTES))
                threading.Event().wait(0.01)
            whole.set()

        thread = threading.Thread(target=grow)
        thread.start()
        yield source, whole
        source.closed.set()
        thread.join()


@pytest.mark.parametrize("sync", [False, True])
def test_kills_of_each_process_under_load(
    master: Master,
    growing: tuple[ScriptedMaster, threading.Event],
    tmp_path: Path,
    sync: bool,
) -> None:
    """What was acknowledged is there after each; in the end the copy is the master's log."""
    source, whole = growing
    flush = "SYNC_FLUSH" if sync else "ASYNC_FLUSH"
    settings = slave_of(source.address, flushDiskType=flush)
    roles = ["commitlog", "dispatcher", "coordinator", "flush", "allocator", "reader-0", "cleaner"]
    slave = RunningBroker(tmp_path / "slave", settings)
    try:
        for role in [*roles, "all", "commitlog"]:
            acknowledged = max(source.reports)
            if role == "all":
                slave.kill_all()
                slave = RunningBroker(tmp_path / "slave", settings)
            else:
                slave.kill(role)
            assert slave.counter(Counter.WROTE) >= acknowledged
            assert_same(tmp_path / "slave", master.log, acknowledged)
        assert whole.wait(patient(120))
        source.wait_acknowledged(master.log.end)
        assert_same(tmp_path / "slave", master.log)
        slave.assert_stored(master.sent)
        offsets = slave.coordinator.ask(FetchOffsets(GROUP, [KEY]))[0]
        assert isinstance(offsets, GroupOffsets)
        wait_until(
            lambda: (
                slave.coordinator.ask(FetchOffsets(GROUP, [KEY]))[0].offsets[0].queue_offset == 123
            ),
            "the ledger is not replayed",
        )
    finally:
        slave.close()
    assert_same(tmp_path / "slave", master.log)


def test_under_sync_flush_only_what_is_on_the_disk_is_acknowledged(
    master: Master, tmp_path: Path
) -> None:
    """Each report is below `flushed`, which is read after it."""
    settings = slave_of("", flushDiskType="SYNC_FLUSH")
    with ScriptedMaster(master.log, batch_bytes=2_000) as source:
        settings["haMasterAddress"] = source.address
        with RunningBroker(tmp_path / "slave", settings) as slave:
            while (reported := max(source.reports, default=0)) < source.end:
                assert slave.counter(Counter.FLUSHED) >= reported
            assert_same(tmp_path / "slave", master.log)


def test_it_stops_taking_while_the_disk_is_too_full(master: Master, tmp_path: Path) -> None:
    half = len(master.log.content) // 2
    with (
        ScriptedMaster(Log(master.log.content[:half], segment_bytes=SEGMENT_BYTES)) as source,
        RunningBroker(tmp_path / "slave", slave_of(source.address)) as slave,
    ):
        source.wait_acknowledged(half - 70_000)
        end = slave.counter(Counter.WROTE)
        slave.ask("commitlog", DiskState(False, "the disk is 91.0 % full"))
        source.grow(master.log)
        wait_until(lambda: state_of(slave) == "no room", slave.log)
        reports = len(source.reports)
        source.wait_for(lambda: len(source.reports) > reports + 3)  # it says that it lives
        assert slave.counter(Counter.WROTE) == end
        slave.ask("commitlog", DiskState(True))
        source.wait_acknowledged(source.end)
        assert_same(tmp_path / "slave", master.log)


def test_a_disk_that_is_full_to_its_last_block(master: Master, tmp_path: Path) -> None:
    need("ext4", "a full disk of a slave")
    size = 48 << 20
    with small_disk(tmp_path, size) as disk:
        store = disk.folder / "slave"
        filler = disk.folder / "filler"
        half = len(master.log.content) // 2
        settings = {"diskSpaceWarningLevelRatio": 99, "diskSpaceCleanForciblyRatio": 98}
        with (
            ScriptedMaster(Log(master.log.content[:half], segment_bytes=SEGMENT_BYTES)) as source,
            RunningBroker(
                store, slave_of(source.address, **settings), log_path=tmp_path / "slave.log"
            ) as slave,
        ):
            source.wait_acknowledged(half - 70_000)
            with pytest.raises(OSError, match="No space left"):
                fill(filler)
            source.grow(master.log)
            wait_until(lambda: state_of(slave) == "no room", slave.log, patient(120))
            slave.assert_stored([e for e in master.sent if e.physical_offset < half // 2])
            filler.unlink()
            source.wait_acknowledged(source.end, 120)
            assert_same(store, master.log)


def fill(filler: Path) -> None:
    """Take what room there is. Raises OSError."""
    with filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


# --- a slave becomes a master ---


def promote(store: Path, **more: Any) -> RunningBroker:
    return RunningBroker(store, {"brokerName": "copied", **SHAPE, **more})


@pytest.mark.parametrize("killed", [False, True])
def test_a_slave_becomes_a_master(master: Master, tmp_path: Path, killed: bool) -> None:
    """With everything that it has acknowledged: messages, topics, offsets, and what is yet due."""
    store = tmp_path / "slave"
    with ScriptedMaster(master.log) as source:
        slave = RunningBroker(store, slave_of(source.address))
        source.wait_acknowledged(source.end)
        source.close()
        if killed:
            slave.kill_all()
        else:
            slave.close()
    with promote(store) as broker:
        broker.assert_stored(master.sent)
        offsets = broker.coordinator.ask(FetchOffsets(GROUP, [KEY]))[0]
        assert isinstance(offsets, GroupOffsets)
        assert offsets.offsets[0].queue_offset == 123
        sent = broker.send("orders", 0, [b"of the new master"])
        broker.assert_stored([*master.sent, *sent])
        due: list[bytes] = []
        deadline, pause = time.monotonic() + patient(120), threading.Event()
        while len(due) < 2 and time.monotonic() < deadline:
            pause.wait(0.05)
            due = [
                message.body
                for queue_id in range(8)
                for message in broker.read_queue("later", queue_id)
            ]
        assert sorted(due) == [b"a delayed one", b"a timed one"]
        broker.coordinator.ask(CommitOffsets(GROUP, [QueueOffset("orders", 2, 200)]))
    with promote(store) as broker:
        broker.until_logged("orderly end")
        broker.assert_stored([*master.sent, *sent])
    assert not (store / "cometmq.slave").exists()
    assert not verify_store(store).findings
