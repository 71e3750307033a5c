"""The commitlog process of a replica: it takes the log from the `ha` process of its own broker."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import group_member
import pytest
from family import RunningBroker, Sent
from group_member import Feed, replica_settings
from patience import patient
from scripted_master import Log, log_of
from waiting import until

from cometmq import Producer
from cometmq.actors.replication.group.log_view import GroupLog
from cometmq.actors.replication.slaves.master_connection import ask_where_it_begins
from cometmq.protocol.commands import CreateTopic, FetchOffsets, QueueKey, TopicInfo
from cometmq.protocol.errors import NotMaster, StoreDamaged
from cometmq.protocol.wire.line import abstract
from cometmq.shm.kernel.layout import HA_FRAME
from cometmq.shm.live.control import Counter
from cometmq.shm.log.cutting import begin_log_at
from cometmq.shm.log.last_run import life_of
from cometmq.shm.state.damage import DAMAGED_FILE, REPLACE_IT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
needs_life = pytest.mark.skipif(
    life_of(Path(__file__).parent) is None, reason="this kernel has no unique mount ids"
)

SEGMENT = 300_007  # no multiple of anything
SHAPE = {"mappedFileSizeCommitLog": SEGMENT, "maxMessageSize": 64 << 10}
KILLS = 4  # more in a row, and the supervisor gives up
SEED = random.randrange(1 << 32)


@dataclass
class Master:
    store: Path
    log: Log
    sent: list[Sent]

    def frames(self, begin: int, bytes_max: int) -> Iterator[tuple[int, bytes]]:
        """As a master of a group cuts its log."""
        view = GroupLog(self.store, SEGMENT)
        while begin < self.log.end:
            end = view.whole_records(begin, self.log.end, bytes_max)
            yield begin, bytes(view.read(begin, end))
            begin = end
        view.close()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Master:
    store = tmp_path_factory.mktemp("master") / "master"
    chance = random.Random(5)
    sent: list[Sent] = []
    with RunningBroker(store, {"brokerName": "copied", **SHAPE}) as broker:
        broker.create_topic("orders", 4)
        for number in range(80):
            bodies = [chance.randbytes(chance.randrange(1, 3_000)) for _ in range(15)]
            sent += broker.send("orders", number % 4, bodies)
        end = broker.counter(Counter.WROTE)
    return Master(store, log_of(store, end, SEGMENT), sent)


def replica(
    store: Path, *, raw: bool = False, unconfirmed: bool = False, **more: object
) -> RunningBroker:
    environ = {group_member.RAW: "1"} if raw else {}
    environ |= {group_member.UNCONFIRMED: "1"} if unconfirmed else {}
    settings = replica_settings(**SHAPE, **more)
    return RunningBroker(store, settings, module=group_member.MODULE, environ=environ)


def assert_same(store: Path, log: Log) -> None:
    assert log_of(store, log.end, SEGMENT).content == log.content


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("bytes_max", [1_000, 64_000, 1 << 26])
def test_it_lays_down_what_comes(
    flush: str, bytes_max: int, master: Master, tmp_path: Path
) -> None:
    with replica(tmp_path / "copy", flushDiskType=flush) as broker, Feed(broker) as feed:
        for offset, content in master.frames(0, bytes_max):
            feed.lay_down(offset, content)
        assert broker.counter(Counter.WROTE) == master.log.end
        broker.assert_stored(master.sent)
        assert_same(tmp_path / "copy", master.log)
        told = broker.statistics("commitlog")
        assert told["master"] == f"unix:@cometmq-{broker.ready.token}-log"
        assert told["master_trouble"] == ""
        for ask in (
            lambda: broker.send("orders", 0, [b"x"]),
            lambda: broker.coordinator.ask(CreateTopic(TopicInfo("new", 1, 1))),
            # What it knows may be older than what its master has told: progress would go back.
            lambda: broker.coordinator.ask(FetchOffsets("readers", [QueueKey("orders", 0)])),
        ):
            with pytest.raises(NotMaster, match="this replica of group copied is not its master"):
                ask()


def test_the_commitlog_process_is_killed_at_any_time(master: Master, tmp_path: Path) -> None:
    """The frame under way comes again, from where its successor's log ends."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    with replica(tmp_path / "copy", flushDiskType="SYNC_FLUSH") as broker, Feed(broker) as feed:
        for number, (offset, content) in enumerate(master.frames(0, SEGMENT)):
            if number % 2:  # some of it is in the socket, and nobody has read it
                os.kill(broker.pids()["commitlog"], signal.SIGSTOP)
            feed.hand_in(offset, content)
            if number < KILLS:
                threading.Event().wait(chance.uniform(0, 0.002))
                broker.kill("commitlog")
            else:
                os.kill(broker.pids()["commitlog"], signal.SIGCONT)
            assert feed.wait() == offset + len(content)
        broker.assert_stored(master.sent)
        assert_same(tmp_path / "copy", master.log)


def test_what_is_in_its_queues_was_confirmed(tmp_path: Path) -> None:
    """Also at a start at which nobody has said yet how far that is: a record beyond what is taken
    for confirmed would be taken for damage, and the replica would never start again."""
    with RunningBroker(tmp_path / "master", {"brokerName": "copied", **SHAPE}) as broker:
        broker.create_topic("orders", 4)
        broker.send("orders", 0, [b"before the first mark"])
        with Producer(broker.ready.name_server, producer_id="billing") as producer:
            for number in range(20):
                producer.send("orders", b"%d" % number)
        end = broker.counter(Counter.WROTE)
    log = log_of(tmp_path / "master", end, SEGMENT)
    with replica(tmp_path / "copy") as broker, Feed(broker) as feed:
        for offset, content in Master(tmp_path / "master", log, []).frames(0, 100_000):
            feed.lay_down(offset, content)
        until(lambda: broker.counter(Counter.DISPATCHED) == end, says="it is not dispatched")
    with replica(tmp_path / "copy", unconfirmed=True) as broker:
        assert broker.counter(Counter.REPLICATED) == 0
        assert broker.counter(Counter.DISPATCHED) == end
    assert not (tmp_path / "copy" / DAMAGED_FILE).exists()


@pytest.mark.parametrize("killed", [True, False])
def test_a_broker_that_has_ended_goes_on(killed: bool, master: Master, tmp_path: Path) -> None:
    frames = list(master.frames(0, 100_000))
    half = len(frames) // 2
    with replica(tmp_path / "copy") as broker, Feed(broker) as feed:
        for offset, content in frames[:half]:
            feed.lay_down(offset, content)
        if killed:
            broker.kill_all()
    with replica(tmp_path / "copy") as broker, Feed(broker) as feed:
        assert "all are rebuilt" not in broker.log
        assert broker.counter(Counter.WROTE) == frames[half][0]
        for offset, content in frames[half:]:
            feed.lay_down(offset, content)
        broker.assert_stored(master.sent)
        assert_same(tmp_path / "copy", master.log)


def test_a_log_that_was_begun_later_than_at_0(master: Master, tmp_path: Path) -> None:
    """Empty, it begins there however often the broker is started."""
    store = tmp_path / "copy"
    store.mkdir()
    begin_log_at(store, SEGMENT, SEGMENT)
    with replica(store) as broker:
        broker.kill_all()
    with replica(store) as broker, Feed(broker) as feed:
        for counter in (Counter.WROTE, Counter.DISPATCHED, Counter.MIN_OFFSET):
            assert broker.counter(counter) == SEGMENT
        for offset, content in master.frames(SEGMENT, 64_000):
            feed.lay_down(offset, content)
    copied = log_of(store, master.log.end, SEGMENT)
    assert copied.begin == SEGMENT
    assert copied.content == master.log.bytes_of(SEGMENT, master.log.end)


@needs_life
def test_a_store_that_lacks_what_it_had_is_not_started(master: Master, tmp_path: Path) -> None:
    """By the counters of the run that was killed; and nothing of it is changed."""
    store = tmp_path / "copy"
    (offset, content), *_ = master.frames(0, 100_000)
    with replica(store) as broker, Feed(broker) as feed:
        feed.lay_down(offset, content)
        broker.kill_all()
    with (store / "commitlog" / f"{0:020d}").open("r+b") as segment:
        segment.seek(len(content) - 100)
        segment.write(bytes(100))
        segment.seek(0)
        before = segment.read()
    with pytest.raises(StoreDamaged, match=REPLACE_IT):
        replica(store)
    assert (store / "commitlog" / f"{0:020d}").read_bytes() == before


def test_what_is_no_record_is_refused_and_in_the_end_it_stops(
    master: Master, tmp_path: Path
) -> None:
    (offset, content), (after, more), *_ = master.frames(0, 100_000)
    damaged = bytearray(more)
    damaged[100] ^= 1
    with replica(tmp_path / "copy") as broker, Feed(broker) as feed:
        feed.lay_down(offset, content)
        feed.hand_in(after, damaged)
        until(
            lambda: broker.statistics("commitlog")["master_state"] == "stopped",
            says=lambda: broker.log,
        )
        assert broker.log.count(f"what the ha process sends for {after} is refused") == 3
        assert REPLACE_IT in broker.log
        assert broker.counter(Counter.WROTE) == after


def test_a_frame_that_does_not_follow_is_a_fault_of_the_ha_process(
    master: Master, tmp_path: Path
) -> None:
    (_, content), (after, more), *_ = master.frames(0, 100_000)
    with replica(tmp_path / "copy") as broker, Feed(broker) as feed:
        feed.hand_in(after, more)
        with pytest.raises(StoreDamaged, match=f"the log ends at 0: .* lies from {after} to"):
            feed.wait()
        feed.lay_down(0, content)
        feed.lay_down(after, more)


@pytest.mark.parametrize(
    "frame",
    [
        HA_FRAME.pack(physical_offset=700, size=0),
        HA_FRAME.pack(physical_offset=0, size=(1 << 26) + 1),
        HA_FRAME.pack(physical_offset=0, size=-1),
    ],
)
def test_what_no_ha_process_would_send(frame: bytes, tmp_path: Path) -> None:
    """A gap, and sizes that no frame has: asked for again in milliseconds, three times."""
    with replica(tmp_path / "copy", raw=True) as broker, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(abstract(f"cometmq-{broker.ready.token}-log"))
        listener.listen()
        listener.settimeout(patient(60))
        for _ in range(3):
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(8, socket.MSG_WAITALL) == bytes(8)
                connection.sendall(frame)
                assert connection.recv(8) == b""
        until(
            lambda: broker.statistics("commitlog")["master_state"] == "stopped",
            says=lambda: broker.log,
        )
        assert REPLACE_IT in broker.log


def test_asking_by_a_socket_of_this_machine(tmp_path: Path) -> None:
    name = f"cometmq-test-{random.randrange(1 << 62)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(abstract(name))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(8, socket.MSG_WAITALL)
                connection.sendall(HA_FRAME.pack(physical_offset=3_000, size=0))

        thread = threading.Thread(target=answer)
        thread.start()
        found = ask_where_it_begins(f"unix:@{name}", gone=threading.Event(), say=print)
        thread.join()
    assert found == 3_000
