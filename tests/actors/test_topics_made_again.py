"""A topic that was deleted and created again with fewer queues: messages in the removed queues
belong to no topic, and are no lag (Fault 29)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import json_of
from family import RunningBroker
from patience import patient

from cometmq import Admin, Consumer, PopConsumer, Producer, errors
from cometmq.actors.tables.topics import made_queues
from cometmq.protocol.configs import TopicConfig
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.tables import TopicTable

WAIT_S = patient(60)
EACH = 5


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    settings = {"defaultTopicQueueNums": 2}
    with RunningBroker(tmp_path_factory.mktemp("again") / "store", settings) as found:
        yield found


@pytest.fixture
def admin(broker: RunningBroker) -> Iterator[Admin]:
    with Admin(broker.ready.name_server) as found:
        yield found


def fill(broker: RunningBroker, topic: str, queues: int, first: int = 0) -> None:
    with Producer(broker.ready.name_server) as producer:
        for queue_id in range(first, queues):
            bodies = [b"%d %d" % (queue_id, number) for number in range(EACH)]
            producer.send_many(topic, bodies, queue_id=queue_id)


def consume(broker: RunningBroker, group: str, topic: str, count: int) -> set[bytes]:
    bodies: set[bytes] = set()
    with Consumer(broker.ready.name_server, group, topic) as consumer:
        while len(bodies) < count:
            messages = consumer.poll(100, WAIT_S)
            assert messages
            consumer.ack(messages)
            bodies.update(message.body for message in messages)
        consumer.commit()
    return bodies


def lag(broker: RunningBroker, group: str) -> int:
    with Admin(broker.ready.name_server) as admin:
        return admin.describe_group(group).lag


@pytest.mark.parametrize("way", ["create", "send", "update"])
def test_what_is_left_is_no_lag(broker: RunningBroker, admin: Admin, way: str) -> None:
    topic = group = f"again-{way}"
    admin.create_topic(topic, 8)
    fill(broker, topic, 8)
    consume(broker, group, topic, 8 * EACH)
    assert lag(broker, group) == 0
    admin.delete_topic(topic)
    if way != "send":
        admin.create_topic(topic, 2 if way == "create" else 1)
    if way == "update":
        admin.update_topic(topic, 2)
    with Producer(broker.ready.name_server) as producer:
        producer.send(topic, b"new", queue_id=0)
    consume(broker, group, topic, 2 * EACH + 1)  # messages left in its queues are its own
    assert lag(broker, group) == 0
    assert {each.queue_id for each in admin.describe_group(group).queues} == {0, 1}
    server = ("--name-server", broker.ready.name_server)
    rows = {row["group"]: row for row in json_of("group", "list", *server)}
    assert rows[group]["lag"] == 0


def test_after_a_restart(tmp_path: Path) -> None:
    """The deletion and the new creation of a topic are remembered across restarts."""
    with RunningBroker(tmp_path / "store") as broker, Admin(broker.ready.name_server) as admin:
        admin.create_topic("t", 4)
        fill(broker, "t", 4)
        consume(broker, "g", "t", 4 * EACH)
        admin.delete_topic("t")
    with RunningBroker(tmp_path / "store") as broker, Admin(broker.ready.name_server) as admin:
        admin.create_topic("t", 1)
        consume(broker, "g", "t", EACH)
        broker.kill("coordinator")
        assert lag(broker, "g") == 0
    with RunningBroker(tmp_path / "store") as broker:
        assert lag(broker, "g") == 0


def test_queues_that_it_has_had_since(broker: RunningBroker, admin: Admin) -> None:
    """Queues that the new topic gets belong to it; the error names their unread messages."""
    topic = group = "since"
    admin.create_topic(topic, 8)
    fill(broker, topic, 8)
    admin.delete_topic(topic)
    admin.create_topic(topic, 2)
    consume(broker, group, topic, 2 * EACH)
    assert lag(broker, group) == 0
    admin.update_topic(topic, 4)
    assert lag(broker, group) == 2 * EACH  # queues 2 and 3, which can be read now
    with pytest.raises(errors.MessagesUnread, match="10 messages in queues 2, 3"):
        admin.update_topic(topic, 2)
    admin.update_topic(topic, 2, force=True)
    assert lag(broker, group) == 2 * EACH
    admin.update_topic(topic, 4)
    consume(broker, group, topic, 2 * EACH)
    admin.update_topic(topic, 1)  # the eight queues do not prevent it
    assert lag(broker, group) == 0


def test_a_group_without_queues(broker: RunningBroker, admin: Admin) -> None:
    topic = group = "popped"
    admin.create_topic(topic, 4)
    fill(broker, topic, 4)
    admin.delete_topic(topic)
    admin.create_topic(topic, 1)
    bodies: set[bytes] = set()
    with PopConsumer(broker.ready.name_server, group, topic) as consumer:
        while len(bodies) < EACH:
            messages = consumer.poll(100, WAIT_S)
            consumer.ack(*messages)
            bodies.update(message.body for message in messages)
        assert consumer.poll(100, 1.0) == []
    assert bodies == {b"0 %d" % number for number in range(EACH)}
    assert lag(broker, group) == 0


def test_a_topic_that_was_never_deleted_has_no_mark(broker: RunningBroker, admin: Admin) -> None:
    admin.create_topic("plain", 4)
    admin.update_topic("plain", 8)
    path = broker.store / "config" / "topics.json"

    def config() -> TopicConfig | None:
        table = ConfigFile(path, TopicTable).load()
        return None if table is None else table.topic_config_table.get("plain")

    deadline = time.monotonic() + WAIT_S
    while (found := config()) is None or found.read_queue_nums != 8:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found.attributes == {}


@pytest.mark.parametrize("text", ["", "x", "-1", "1" * 9, "٣"])
def test_a_mark_that_is_none(text: str) -> None:
    """An illegal value in the file is ignored."""
    assert (
        made_queues(TopicConfig(topic_name="t", attributes={"cometmq.made.queues": text})) is None
    )
