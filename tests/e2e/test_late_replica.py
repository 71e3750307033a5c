"""A slave whose store is begun when its master's log does not begin at 0 any more: with a copy of
the master's books it comes to the same as the master, and is as good a master later."""

from __future__ import annotations

import re
import shutil
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from family import RunningBroker, Sent, pull
from inside import wait_dispatched
from old_segments import FAST, MIB, log_begins, make_old, write_segments
from ports import free_ports
from scripted_master import Log, ScriptedMaster, log_of, slave_settings
from waiting import until

from cometmq.actors.replication.group.state_copy import STORE_FILES, Fate, lay_books, pack_books
from cometmq.protocol.commands import (
    CommitOffsets,
    CreateTopic,
    DeleteSegments,
    DeleteTopic,
    FetchOffsets,
    GroupOffsets,
    JoinGroup,
    LeaveGroup,
    PlaceHold,
    PopMessages,
    PullMessages,
    PullStatus,
    PutGroup,
    QueueKey,
    QueueOffset,
    Subscription,
    TopicInfo,
)
from cometmq.protocol.ledger import LEDGER_QUEUE, LEDGER_TOPIC
from cometmq.shm.derived.consume_queue import QueueFiles
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.resuming import committed_offsets
from cometmq.shm.state.fastjson import decode
from cometmq.shm.state.laid_books import needs_books
from cometmq.shm.state.ledger_mark import read_mark
from cometmq.shm.tools.verify import verify_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BEGIN = 2 * MIB  # of the master's log, after its cleaner was at work
SHAPE: dict[str, Any] = {"brokerName": "late", "consumerSessionTimeout": 600_000}
NEVER_MS = 3_600_000
FAR = 1 << 50
COPIES = 40


class Master:
    """One whose log begins later, and whose books change all the time."""

    def __init__(self, store: Path) -> None:
        self.port = free_ports()
        self.broker = RunningBroker(store, {**FAST, **SHAPE, "haListenPort": self.port})
        self.changes = 0
        self.broker.create_topic("t", 4)

    def change(self) -> None:
        """Every book."""
        self.changes += 1
        number, ask = self.changes, self.broker.coordinator.ask
        ask(CreateTopic(TopicInfo(f"topic-{number}", 2, 2)))
        ask(PutGroup(f"group-{number}", {"retryMaxTimes": str(number)}))
        ask(CommitOffsets("readers", [QueueOffset("t", 0, number)]))
        ask(CommitOffsets("readers", [QueueOffset("t", 1 + number % 3, number)]))
        ask(JoinGroup("sql", f"m{number}", [Subscription("t", "*", f"a > {number}")]))
        ask(PlaceHold(f"hold-{number % 3}", FAR + number))
        ask(PopMessages("poppers", "t", 1, 600_000))
        ask(PopMessages("pickers", "t", 1, 600_000, orderly=True, attempt=str(number)))
        if number > 1:
            ask(DeleteTopic(f"topic-{number - 1}"))
            ask(LeaveGroup("sql", f"m{number - 1}"))

    def lose_its_beginning(self) -> list[Sent]:
        sent = write_segments(self.broker, 3)
        make_old(self.broker, 2)
        self.broker.ask("coordinator", DeleteSegments())
        log_begins(self.broker, BEGIN)
        for queue_id in (1, 2, 3):  # as many as groups have read
            sent += self.broker.send("t", queue_id, [b"x"] * 20)
        return [each for each in sent if each.physical_offset >= BEGIN]

    def packed_after_a_snapshot(self) -> bytes:
        """With every change that was made so far in it."""
        wanted = self.changes
        key = "t@readers"

        def is_there() -> bytes | None:
            packed = pack_books(self.broker.store)
            content = rows_of(packed)["consumerOffset.json"][1]
            kind: Any = STORE_FILES["config/consumerOffset.json"].kind
            there = decode(content, kind).offset_table.get(key, {}).get(0) == wanted
            return packed if there else None

        found: bytes = until(is_there)
        return found


def offset_of(broker: RunningBroker, queue_id: int) -> int:
    answer = broker.coordinator.ask(FetchOffsets("readers", [QueueKey("t", queue_id)]))[0]
    assert isinstance(answer, GroupOffsets)
    return answer.offsets[0].queue_offset


def whole_ledger(slave: RunningBroker) -> int:
    """The queue offset behind it, once the slave's coordinator has come there; else 0."""
    if slave.counter(Counter.DISPATCHED) != slave.counter(Counter.WROTE):
        return 0  # the queue may still grow
    end = QueueFiles(slave.store, LEDGER_TOPIC, LEDGER_QUEUE, 2_000).find_end().next_index
    position = slave.statistics("coordinator")["ledger_position"]
    return int(position) if position == end else 0


def assert_there(broker: RunningBroker, sent: list[Sent]) -> None:
    for each in (sent[0], sent[-1]):
        command = PullMessages("t", each.queue_id, each.queue_offset, 1, 1 << 20, 20_000)
        answer, messages = pull(broker.reader, command)
        assert answer.status == PullStatus.FOUND
        assert messages[0].body == each.body


def rows_of(packed: bytes) -> dict[str, list[Any]]:
    return {row[0]: row for row in msgspec.msgpack.decode(packed[:-4])[2]}


def mixed(older: bytes, newer: bytes, *names: str) -> bytes:
    """The newer copy, with some files as the older one has them."""
    version, log_begin, _ = msgspec.msgpack.decode(newer[:-4])
    rows = rows_of(newer) | {name: rows_of(older)[name] for name in names}
    body = msgspec.msgpack.encode([version, log_begin, list(rows.values())])
    return body + zlib.crc32(body).to_bytes(4, "big")


def books_of(store: Path) -> dict[str, Any]:
    """All that a broker which has ended has left of its books, but how often they were written."""
    found: dict[str, Any] = {}
    for name, file in STORE_FILES.items():
        if file.fate is Fate.COPIED and file.kind is not None:
            path = store / name
            text = path.read_bytes() if path.exists() else b"{}"
            book = msgspec.to_builtins(decode(text, file.kind))
            book.pop("dataVersion", None)
            found[name] = book
    return found


def undecided(store: Path) -> set[str]:
    """What is in a store and may be needed elsewhere or not: nobody has said."""
    there = {path.name for path in store.iterdir()} - {"config"}
    there |= {f"config/{path.name}" for path in (store / "config").iterdir()}
    names = {name: re.sub(r"(\.bak|\.tmp)+$", "", name) for name in there}
    return {name for name, plain in names.items() if not {name, plain} & STORE_FILES.keys()}


def but_for_versions(books: dict[str, Any]) -> dict[str, Any]:
    """A new master gives members new versions and epochs."""
    groups = books["config/consumerMembers.json"]["groups"]
    members = {name: record["members"] for name, record in groups.items()}
    return books | {"config/consumerMembers.json": members}


@pytest.mark.parametrize("flush_ms", [100, NEVER_MS])
@pytest.mark.parametrize("copy", ["whole", "of two moments"])
def test_a_slave_that_begins_late(copy: str, flush_ms: int, tmp_path: Path) -> None:
    """
    Args:
        copy: the files are of one moment, or of two.
        flush_ms: between two snapshots of the slave's coordinator, which is killed meanwhile.
    """
    store = tmp_path / "slave"
    store.mkdir()
    master = Master(tmp_path / "master")
    settings = {**SHAPE, "flushConsumerOffsetInterval": flush_ms}
    with master.broker as broker:
        master.change()
        sent = master.lose_its_beginning()
        master.change()
        older = master.packed_after_a_snapshot()
        master.change()
        content = master.packed_after_a_snapshot()
        if copy == "of two moments":
            content = mixed(older, content, "consumerOffset.json", "topics.json", "popped.json")
        assert needs_books(store, BEGIN)
        lay_books(store, content, BEGIN)
        assert not needs_books(store, BEGIN)
        # Its coordinator begins before anything of the log is there.
        with (
            ScriptedMaster(Log(b"", begin=BEGIN)) as nobody,
            RunningBroker(store, slave_settings(nobody.address, **settings)) as slave,
        ):
            assert slave.counter(Counter.MIN_OFFSET) == BEGIN
            assert slave.statistics("coordinator")["ledger_position"] == 0
            nobody.grow(log_of(master.broker.store, broker.counter(Counter.WROTE)))
            nobody.wait_acknowledged(nobody.end)
            position = until(lambda: whole_ledger(slave))
            until(lambda: offset_of(slave, 1) == 3)  # which the older copy does not know
            if flush_ms != NEVER_MS:
                until(lambda: read_mark(store).needed_from() == position)
            slave.kill("coordinator")
            assert offset_of(slave, 1) == 3
            until(lambda: slave.statistics("coordinator")["ledger_position"] == position)
            slave.kill_all()
            assert "not known" not in slave.log
            assert "somebody else" not in slave.log
        address = f"127.0.0.1:{master.port}"
        with RunningBroker(store, slave_settings(address, **settings)) as slave:
            assert_there(slave, sent)
            assert not undecided(store)
            assert not undecided(broker.store)
            until(lambda: broker.statistics("ha")["slaves_in_sync"])
            master.change()
            assert broker.close() == 0  # which gives slaves all of it
            assert slave.close() == 0
            assert "not known" not in slave.log
    books = books_of(tmp_path / "master")
    assert books_of(store) == books
    assert books["config/consumerOffset.json"]["offsetTable"]["t@readers"][0] == master.changes
    assert books["config/popped.json"]["queues"]
    assert books["config/consumerOrderInfo.json"]["table"]["t@pickers"]
    assert len(books["config/holds.json"]["holds"]) == 3

    promoted = {**FAST, **SHAPE, "brokerRole": "ASYNC_MASTER"}
    for number in (70, 80):
        with RunningBroker(store, promoted) as broker:
            ask = broker.coordinator.ask
            assert offset_of(broker, 0) == (master.changes if number == 70 else 70)
            assert_there(broker, sent)
            ask(CommitOffsets("readers", [QueueOffset("t", 0, number)]))
            ask(CreateTopic(TopicInfo(f"new-{number}", 1, 1)))
            assert not undecided(store)
            broker.close()
            assert "not known" not in broker.log
        after = books_of(store)
        after["config/topics.json"]["topicConfigTable"].pop("new-70")
        after["config/topics.json"]["topicConfigTable"].pop("new-80", None)
        assert after["config/consumerOffset.json"]["offsetTable"]["t@readers"][0] == number
        after["config/consumerOffset.json"]["offsetTable"]["t@readers"][0] = master.changes
        assert but_for_versions(after) == but_for_versions(books)
    assert not verify_store(store).findings


def test_copies_while_the_coordinator_writes_its_files(tmp_path: Path) -> None:
    """Each of them comes, with the log behind it, to what the group has at the end."""
    store, laid = tmp_path / "master", tmp_path / "laid"
    copies: dict[int, bytes] = {}
    ended = threading.Event()
    settings = {**SHAPE, "flushConsumerOffsetInterval": 1}
    with RunningBroker(store, settings) as broker:
        broker.create_topic("t", 8)

        def pack() -> None:
            while not ended.is_set():
                content = pack_books(store)
                position = rows_of(content)["consumerOffset.json"][2]
                copies.setdefault(position, content)  # one of each moment

        thread = threading.Thread(target=pack)
        thread.start()
        began, number = time.monotonic(), 0
        try:
            while len(copies) < COPIES or number < 300:
                assert thread.is_alive()
                assert time.monotonic() < began + 120
                number += 1
                offsets = [QueueOffset("t", queue_id, number) for queue_id in range(8)]
                broker.coordinator.ask(CommitOffsets(f"group-{number % 50}", offsets))
        finally:
            ended.set()
            thread.join()
        wait_dispatched(broker)  # an unclean store is read as far as its queues go
        broker.kill_all()
    shutil.copytree(store, laid)
    expected = committed_offsets(store)
    assert expected[f"t@group-{number % 50}"] == dict.fromkeys(range(8), number)
    for content in copies.values():
        lay_books(laid, content, 0)
        assert committed_offsets(laid) == expected
