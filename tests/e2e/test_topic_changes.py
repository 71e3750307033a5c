"""Creating, changing, and what is unread: nothing that is stored is hidden from anybody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import json_of, run
from family import RunningBroker
from patience import patient

from cometmq import Broker, errors
from cometmq.client import Admin, Consumer
from cometmq.protocol.commands import ChangeMode, CreateTopic, TopicInfo


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("changes") / "store") as running:
        yield running


@pytest.fixture
def admin(broker: Broker) -> Iterator[Admin]:
    with Admin(broker.name_server) as running:
        yield running


def fill(broker: Broker, topic: str, queues: int, each: int = 10) -> None:
    with broker.producer() as producer:
        for queue_id in range(queues):
            for number in range(each):
                producer.send(topic, b"%d" % number, queue_id=queue_id)


def consume(broker: Broker, group: str, topic: str, count: int) -> None:
    with Consumer(broker.name_server, group, topic) as consumer:
        while count > 0:
            messages = consumer.poll(100, timeout_s=patient(30))
            consumer.ack(messages)
            count -= len(messages)
        consumer.commit()


def test_creating_what_exists_with_other_settings_is_an_error(admin: Admin) -> None:
    admin.create_topic("exists", 16)
    admin.create_topic("exists", 16)
    with pytest.raises(errors.TopicExists, match="read queues 16, not 8, write queues 16, not 8"):
        admin.create_topic("exists")
    with pytest.raises(errors.TopicExists, match="perm 6, not 4"):
        admin.create_topic("exists", 16, perm=4)
    assert admin.describe_topic("exists").read_queues == 16


def test_fewer_queues_do_not_hide_what_is_unread(broker: Broker, admin: Admin) -> None:
    admin.create_topic("fewer", 16)
    fill(broker, "fewer", 16)
    with pytest.raises(errors.MessagesUnread, match=r"80 messages .* as no group reads it"):
        admin.update_topic("fewer", 8)
    assert admin.describe_topic("fewer").read_queues == 16
    consume(broker, "reads-fewer", "fewer", 160)
    with Consumer(broker.name_server, "slower", "fewer") as slower:
        assert slower.poll(1, timeout_s=patient(30))
        with pytest.raises(errors.MessagesUnread, match="not read by slower"):
            admin.update_topic("fewer", 8)
    consume(broker, "slower", "fewer", 160)
    admin.update_topic("fewer", 8)
    found = admin.describe_topic("fewer")
    assert (found.read_queues, found.write_queues, found.message_count) == (8, 8, 160)
    assert [queue.hidden for queue in found.queues] == [False] * 8 + [True] * 8
    assert admin.queue_range("fewer", 12) == range(10)


def test_what_was_hidden_by_force_is_shown(broker: Broker, admin: Admin) -> None:
    admin.create_topic("forced", 4)
    fill(broker, "forced", 4)
    with Consumer(broker.name_server, "forced-group", "forced") as consumer:
        consumer.ack(consumer.poll(1, timeout_s=patient(30)))
        consumer.commit()
    admin.update_topic("forced", 1, force=True)
    assert admin.describe_topic("forced").message_count == 40
    listed = {each.topic: each.message_count for each in admin.describe_topics()}
    assert listed["forced"] == 40
    report = admin.describe_group("forced-group")
    assert {queue.queue_id for queue in report.queues} == {0, 1, 2, 3}
    assert report.lag == 39


def test_what_is_not_given_stays(admin: Admin) -> None:
    admin.create_topic("partly", 4)
    admin.update_topic("partly", perm=4)
    admin.update_topic("partly", write_queues=2)
    found = admin.describe_topic("partly")
    assert (found.read_queues, found.write_queues) == (4, 2)
    with pytest.raises(errors.TopicExists, match="perm 4, not 6"):
        admin.create_topic("partly", read_queues=4, write_queues=2)
    with pytest.raises(errors.TopicNotExist):
        admin.update_topic("is-not-there", 4)


def test_unread_is_unread_where_a_group_never_committed(broker: Broker, admin: Admin) -> None:
    admin.create_topic("partial", 4)
    fill(broker, "partial", 4)
    admin.reset_offsets("never", "partial", 10, queue_id=0)  # its one commit; it has no members
    report = admin.describe_group("never")
    assert {each.queue_id: (each.queue_offset, each.lag) for each in report.queues} == {
        0: (10, 0), 1: (-1, 10), 2: (-1, 10), 3: (-1, 10),
    }  # fmt: skip
    server = ["--name-server", broker.name_server]
    groups = {row["group"]: row for row in json_of("group", "list", *server)}
    assert groups["never"]["lag"] == 30
    assert json_of("group", "describe", "never", *server)["lag"] == 30


def test_unread_is_unread_after_consumers_that_never_committed(
    broker: Broker, admin: Admin
) -> None:
    admin.create_topic("uncommitted", 2)
    with Consumer(broker.name_server, "looked-only", "uncommitted") as consumer:
        consumer.poll(1, timeout_s=0.1)
    fill(broker, "uncommitted", 2)
    assert admin.describe_group("looked-only").lag == 20


@pytest.mark.slow
def test_the_command_line(broker: Broker, tmp_path: Path) -> None:
    server = ["--name-server", broker.name_server]
    assert run("topic", "create", "by-hand", "--queues", "4", *server).returncode == 0
    assert run("topic", "create", "by-hand", "--queues", "4", *server).returncode == 0
    again = run("topic", "create", "by-hand", *server)
    assert again.returncode != 0
    assert "read queues 4, not 8" in again.stderr.decode()
    fill(broker, "by-hand", 4, each=1)
    refused = run("topic", "update", "by-hand", "--queues", "2", *server)
    assert refused.returncode != 0
    assert "would hide 2 messages in queues 2, 3" in refused.stderr.decode()
    assert run("topic", "update", "by-hand", "--queues", "2", "--force", *server).returncode == 0
    rows = json_of("topic", "list", *server)
    assert {row["topic"]: row["messages"] for row in rows}["by-hand"] == 4
    names = tmp_path / "names"
    names.write_text("".join(f"many-{number}\n" for number in range(3_000)))
    done = run("topic", "create", "--from", str(names), "--queues", "1", *server)
    assert done.returncode == 0, done.stderr
    rows = json_of("topic", "list", *server)
    assert sum(row["topic"].startswith("many-") for row in rows) == 3_000


def test_a_queue_that_the_topic_has_no_more_takes_nothing(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("t", 4)
        broker.send("t", 3, [b"x"])
        two, four = TopicInfo("t", 2, 2), TopicInfo("t", 4, 4)
        broker.coordinator.ask(CreateTopic(two, ChangeMode.FORCE), timeout_s=patient(30))
        with pytest.raises(errors.MessageIllegal, match="which has 2 queues"):
            broker.send("t", 3, [b"no"])
        broker.coordinator.ask(CreateTopic(four, ChangeMode.UPDATE), timeout_s=patient(30))
        broker.send("t", 3, [b"y"])
        assert [message.body for message in broker.read_queue("t", 3, 2)] == [b"x", b"y"]
