"""The ledger with a whole broker around it: what was committed is there, whatever has ended."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from family import SMALL, RunningBroker
from patience import patient
from still import stopped
from waiting import until

from cometmq.protocol.commands import (
    CommitOffsets,
    DeletedSegments,
    DeleteSegments,
    DeleteTopic,
    DescribeGroup,
    FetchOffsets,
    GetMessageAt,
    GetStatistics,
    GroupDescription,
    GroupOffsets,
    GroupShare,
    JoinGroup,
    ListQueues,
    ListTopics,
    Ping,
    PullMessages,
    QueueKey,
    QueueList,
    QueueOffset,
    Statistics,
    Subscription,
    TopicList,
)
from cometmq.protocol.configs import TopicConfig
from cometmq.protocol.errors import MessageNotFound, NameIllegal, StoreDamaged, StoreError
from cometmq.protocol.ledger import LEDGER_TOPIC
from cometmq.shm.derived.consume_queue import QueueFiles
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.resuming import committed_offsets
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.json_text import dumps
from cometmq.shm.state.ledger_mark import LEDGER_FILE, read_mark
from cometmq.shm.state.tables import ConsumerOffsetTable, SubscriptionGroupTable, TopicTable

SLOW_SNAPSHOTS = {"flushConsumerOffsetInterval": 3_600_000}


def commit(broker: RunningBroker, *offsets: int, group: str = "g") -> None:
    """One for each queue of the topic."""
    wanted = [QueueOffset("orders", queue_id, offset) for queue_id, offset in enumerate(offsets)]
    broker.coordinator.ask(CommitOffsets(group, wanted), timeout_s=patient(30))


def committed(broker: RunningBroker, queues: int = 2, group: str = "g") -> list[int]:
    keys = [QueueKey("orders", queue_id) for queue_id in range(queues)]
    answer, _ = broker.coordinator.ask(FetchOffsets(group, keys), timeout_s=patient(30))
    assert isinstance(answer, GroupOffsets)
    return [each.queue_offset for each in answer.offsets]


def offsets_file(store: Path) -> ConfigFile[ConsumerOffsetTable]:
    return ConfigFile(store / "config" / "consumerOffset.json", ConsumerOffsetTable)


def in_file(store: Path) -> dict[str, dict[int, int]]:
    table = offsets_file(store).load()
    return {} if table is None else table.offset_table


def statistics(broker: RunningBroker) -> dict[str, Any]:
    answer, _ = broker.coordinator.ask(GetStatistics())
    assert isinstance(answer, Statistics)
    return answer.values


def send(broker: RunningBroker, count: int = 20, bodies: Iterable[bytes] = (b"x",)) -> None:
    for queue_id in range(2):
        broker.send("orders", queue_id, list(bodies) * count)


@pytest.mark.slow
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_commits_survive_the_kill_of_everything(flush: str, tmp_path: Path) -> None:
    """Again and again, without a snapshot in between: each start goes on where the last one was."""
    store, settings = tmp_path / "store", {**SLOW_SNAPSHOTS, "flushDiskType": flush}
    for turn in range(1, 4):
        with RunningBroker(store, settings) as broker:
            if turn == 1:
                broker.create_topic("orders", 2)
                send(broker)
            else:
                assert committed(broker) == [turn - 1, 2 * turn - 2]
            commit(broker, turn, 2 * turn)
            broker.kill_all()
        assert in_file(store) == {}
    with RunningBroker(store, settings) as broker:
        assert committed(broker) == [3, 6]
    assert in_file(store) == {"orders@g": {0: 3, 1: 6}}
    with RunningBroker(store, settings) as broker:
        assert committed(broker) == [3, 6]
        assert statistics(broker)["ledger_entries"] == 0


@pytest.mark.slow
def test_topics_groups_and_members_survive_the_kill_of_everything(tmp_path: Path) -> None:
    """No file has them; and the files that an orderly end leaves are RocketMQ's."""
    store = tmp_path / "store"
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        broker.create_topic("orders", 2)
        broker.create_topic("gone", 1)
        broker.coordinator.ask(DeleteTopic("gone"))
        first = join(broker, "a")
        broker.kill_all()
    assert not list((store / "config").glob("*"))
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        assert {"orders"} <= topics(broker) <= {"orders", "TBW102"}
        assert join(broker, "b").queues == []  # they are a's
        share = join(broker, "a", owned=first.queues, version=first.version)
        assert share.queues == first.queues[:1]
        assert share.epochs == first.epochs[:1]
        described, _ = broker.coordinator.ask(DescribeGroup("g"))
        assert isinstance(described, GroupDescription)
        assert (described.members, len(described.queues)) == (["a", "b"], 2)
        broker.kill_all()
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        assert join(broker, "b").queues == []
    for name, kind in (("topics", TopicTable), ("subscriptionGroup", SubscriptionGroupTable)):
        path = store / "config" / f"{name}.json"
        table = ConfigFile[Any](path, kind).load()
        assert path.read_text() == dumps(table)
        assert table.data_version.counter > 0
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        assert join(broker, "b").queues == []
        assert statistics(broker)["ledger_entries"] <= 1


def join(broker: RunningBroker, member: str, **fields: Any) -> GroupShare:
    asked = JoinGroup("g", member, [Subscription("orders")], **fields)
    answer, _ = broker.coordinator.ask(asked, timeout_s=patient(10))
    assert isinstance(answer, GroupShare)
    return answer


def topics(broker: RunningBroker) -> set[str]:
    answer, _ = broker.coordinator.ask(ListTopics())
    assert isinstance(answer, TopicList)
    return {info.topic for info in answer.topics}


def test_a_store_that_nobody_serves_tells_what_the_ledger_has(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        broker.create_topic("orders", 2)
        send(broker)
        commit(broker, 5, 6)
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        commit(broker, 7)
        commit(broker, 1, 2, group="new")
        until(lambda: broker.counter(Counter.DISPATCHED) == broker.counter(Counter.WROTE))
        broker.kill_all()
    before = (store / LEDGER_FILE).read_bytes()
    assert committed_offsets(store) == {"orders@g": {0: 7, 1: 6}, "orders@new": {0: 1, 1: 2}}
    assert in_file(store) == {"orders@g": {0: 5, 1: 6}}
    assert (store / LEDGER_FILE).read_bytes() == before


def test_each_file_goes_on_from_its_own_place(tmp_path: Path) -> None:
    """A snapshot writes the files of books that have changed; and what somebody else has written
    counts, beside files that are ours."""
    store, settings = tmp_path / "store", {"flushConsumerOffsetInterval": 100}
    with RunningBroker(store, settings) as broker:
        broker.create_topic("orders", 2)
        send(broker)
        commit(broker, 5, 6)
        until(lambda: _is_marked_up_to(store, statistics(broker)["ledger_entries"]))
        path = store / "config" / "topics.json"
        before = path.stat().st_ino
        commit(broker, 7, 8)
        until(lambda: _is_marked_up_to(store, statistics(broker)["ledger_entries"]))
        assert path.stat().st_ino == before
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        broker.create_topic("new", 1)
        commit(broker, 9, 9)
        broker.kill_all()
    file = ConfigFile(path, TopicTable)
    table = file.load()
    assert table is not None
    assert "new" not in table.topic_config_table
    table.topic_config_table["theirs"] = TopicConfig(topic_name="theirs")
    file.store(table, durable=True)
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        assert {"orders", "theirs"} <= topics(broker) <= {"orders", "theirs", "TBW102"}
        assert committed(broker) == [9, 9]


def test_the_ledger_goes_on_while_its_processes_come_and_go(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store", SLOW_SNAPSHOTS) as broker:
        broker.create_topic("orders", 2)
        send(broker)
        for offset, role in enumerate(["coordinator", "commitlog", "dispatcher", "coordinator"], 1):
            commit(broker, offset, offset)
            broker.kill(role)
            assert committed(broker) == [offset, offset]
            commit(broker, offset)
        broker.kill_all()
    with RunningBroker(tmp_path / "store", SLOW_SNAPSHOTS) as broker:
        assert committed(broker) == [4, 4]


def test_nobody_is_told_of_what_is_not_in_the_log_yet(tmp_path: Path) -> None:
    """A question that waits for one commit is answered without the next one, which has not been
    kept when it is asked."""
    with RunningBroker(tmp_path / "store", SLOW_SNAPSHOTS) as broker:
        broker.create_topic("orders", 1)
        broker.send("orders", 0, [b"x"] * 20)
        commit(broker, 1)
        keys = [QueueKey("orders", 0)]
        with stopped(broker.pids()["commitlog"]):
            for offset in (7, 9):
                broker.coordinator.request(CommitOffsets("g", [QueueOffset("orders", 0, offset)]))
                broker.ask("coordinator", Ping())  # so that it has taken that one by itself
                if offset == 7:
                    asked = broker.coordinator.request(FetchOffsets("g", keys))
        assert broker.coordinator.wait(asked, timeout_s=patient(30))
        assert isinstance(asked.answer, GroupOffsets)
        assert [each.queue_offset for each in asked.answer.offsets] == [7]
        assert committed(broker, 1) == [9]


def test_a_snapshot_is_written_while_the_broker_runs(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store, {"flushConsumerOffsetInterval": 100}) as broker:
        broker.create_topic("orders", 2)
        send(broker)
        commit(broker, 5, 6)
        until(lambda: in_file(store) == {"orders@g": {0: 5, 1: 6}})
        # Then it is quiet: nothing is written again, and nothing of the ledger is needed.
        until(lambda: _is_marked_up_to(store, statistics(broker)["ledger_entries"]))
        written = _times(store)
        time.sleep(0.5)
        assert _times(store) == written
        broker.kill_all()
    with RunningBroker(store, {"flushConsumerOffsetInterval": 100}) as broker:
        assert committed(broker) == [5, 6]


def _times(store: Path) -> list[int]:
    """When each of RocketMQ's files was written."""
    names = ("topics.json", "subscriptionGroup.json", "consumerOffset.json")
    return [(store / "config" / name).stat().st_mtime_ns for name in names]


def _is_marked_up_to(store: Path, position: int) -> bool:
    """Every file, those that did not change as well: nothing of the ledger is needed."""
    marked = read_mark(store).files.values()
    return [each.position for file in marked for each in file.contents] == [position] * 8


def test_what_somebody_else_has_written_counts(tmp_path: Path) -> None:
    """A RocketMQ that had the store open has moved offsets; it knows nothing of our ledger."""
    store = tmp_path / "store"
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        broker.create_topic("orders", 2)
        send(broker)
        commit(broker, 9, 9)
        broker.kill_all()
    theirs = ConsumerOffsetTable(offset_table={"orders@g": {0: 4}})
    offsets_file(store).store(theirs, durable=True)
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        assert committed(broker) == [4, -1]
        broker.until_logged("was written by somebody else")
        commit(broker, 5)
        broker.kill_all()
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        assert committed(broker) == [5, -1]


def test_a_store_from_before_there_was_a_ledger(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store) as broker:
        broker.create_topic("orders", 2)
        send(broker)
    offsets_file(store).store(
        ConsumerOffsetTable(offset_table={"orders@old": {0: 7, 1: 8}}), durable=True
    )
    (store / LEDGER_FILE).unlink()
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        assert committed(broker, group="old") == [7, 8]
        commit(broker, 9, group="old")
        broker.kill_all()
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        assert committed(broker, group="old") == [9, 8]


def test_a_log_that_is_gone_takes_nothing_along(tmp_path: Path) -> None:
    """Nor does its ledger hide what a new one says."""
    store = tmp_path / "store"
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        broker.create_topic("orders", 2)
        send(broker)
        for offset in range(1, 10):
            commit(broker, offset)
    shutil.rmtree(store / "consumequeue")
    for segment in (store / "commitlog").iterdir():  # a start without a segment is refused
        segment.write_bytes(bytes(segment.stat().st_size))
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        assert committed(broker) == [9, -1]
        send(broker)
        commit(broker, 10)
        broker.kill_all()
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        assert committed(broker) == [10, -1]


def test_a_damaged_mark_refuses_the_start(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store) as broker:
        broker.create_topic("orders", 2)
    (store / LEDGER_FILE).write_bytes(b"{")
    with pytest.raises((StoreDamaged, StoreError), match=r"cometmq\.ledger.*remove it"):
        RunningBroker(store).close()
    assert not (store / "abort").exists()


def test_a_deleted_topic_takes_its_offsets_along(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        broker.create_topic("orders", 2)
        send(broker)
        commit(broker, 5, 6)
        broker.coordinator.ask(DeleteTopic("orders"))
        broker.create_topic("orders", 2)
        assert committed(broker) == [-1, -1]
        commit(broker, 1)
        broker.kill_all()
    with RunningBroker(store, SLOW_SNAPSHOTS) as broker:
        assert committed(broker) == [1, -1]


def test_clients_neither_see_nor_read_nor_write_it(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("orders", 2)
        send(broker)
        commit(broker, 5, 6)
        reader = broker.reader
        queues = tmp_path / "store" / "consumequeue"
        until(lambda: (queues / LEDGER_TOPIC).is_dir())
        listed, _ = reader.ask(ListQueues())
        assert isinstance(listed, QueueList)
        assert {each.topic for each in listed.queues} == {"orders"}
        with pytest.raises(NameIllegal, match="the broker's own"):
            reader.ask(PullMessages(LEDGER_TOPIC, 0, 0, 32, 1 << 20))
        entry = QueueFiles(
            tmp_path / "store", LEDGER_TOPIC, 0, SMALL["mappedFileSizeConsumeQueue"]
        ).entry(0)
        assert entry is not None
        with pytest.raises(MessageNotFound):
            reader.ask(GetMessageAt(entry["physical_offset"]))
        with pytest.raises(NameIllegal, match="the broker's own"):
            broker.create_topic(LEDGER_TOPIC, 1)
        with pytest.raises(Exception, match="the broker's own"):
            broker.send(LEDGER_TOPIC, 0, [b"mine"])


def test_the_cleaner_keeps_what_a_start_may_need(tmp_path: Path) -> None:
    store, settings = tmp_path / "store", {**SLOW_SNAPSHOTS, "flushDiskType": "SYNC_FLUSH"}
    with RunningBroker(store, settings) as broker:
        broker.create_topic("orders", 2)
    with RunningBroker(store, settings) as broker:
        send(broker, 4, [bytes(200_000)])
        commit(broker, 3, 4)
        send(broker, 10, [bytes(200_000)])
        for path in (store / "commitlog").iterdir():
            os.utime(path, (0, 0))  # they have expired
        held = delete_segments(broker)
        assert held.segments  # what lies before it goes
        assert delete_segments(broker).segments == []
        broker.kill_all()
    with RunningBroker(store, settings) as broker:
        assert committed(broker) == [3, 4]


def delete_segments(broker: RunningBroker) -> DeletedSegments:
    answer, _ = broker.coordinator.ask(DeleteSegments(), timeout_s=patient(30))
    assert isinstance(answer, DeletedSegments)
    return answer
