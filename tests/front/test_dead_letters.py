"""Dead letters for people: `cometmq group dlq`, and the methods of Admin behind it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import json_of, output_of, run
from family import RunningBroker
from patience import patient
from shared_data import data_path

from cometmq.client import Admin, Consumer, Message, Producer, dead_letters
from cometmq.client.sending.outgoing import PROPERTIES_BYTES_MAX, UNIQ_KEY_BYTES
from cometmq.protocol.commands import (
    GiveBackMessages,
    GivenBack,
    MessagesGivenBack,
    Section,
    SendMessages,
)
from cometmq.protocol.errors import (
    BodyIllegal,
    MessageIllegal,
    MessageNotFound,
    NoPermission,
    NotReachable,
)
from cometmq.shm.kernel.codec import BatchEncoder
from cometmq.shm.kernel.layout import SYS_COMPRESSED

VARIABLE = "COMETMQ_NAME_SERVER"
WAIT_S = patient(60)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("dlq") / "store") as running:
        yield running


def bury(broker: RunningBroker, group: str, topic: str, count: int) -> list[Message]:
    """Send log lines, and have the group give them up."""
    lines = data_path("loghub", "Zookeeper.log").read_bytes().splitlines()[:count]
    with Producer(broker.ready.name_server) as producer:
        for number, line in enumerate(lines):
            producer.send(topic, line, keys=f"k{number}", tags="t", properties={"own": "yes"})
    return give_up(broker, group, topic, count)


def give_up(broker: RunningBroker, group: str, topic: str, count: int) -> list[Message]:
    """Have the group take what there is, and give it all up."""
    found = take(broker, group, topic, count)
    given = [
        GivenBack(m.topic, m.queue_id, m.queue_offset, m.physical_offset, delay_level=-1)
        for m in found
    ]
    answer = broker.ask("coordinator", GiveBackMessages(group, given), WAIT_S)
    assert answer == MessagesGivenBack([0] * count)
    broker.read_queue(f"%DLQ%{group}", 0, count)
    deadline = time.monotonic() + WAIT_S
    with Admin(broker.ready.name_server) as admin:
        while not admin.dead_letters(group):  # until the name server has heard of their topic
            assert time.monotonic() < deadline
    return found


def take(broker: RunningBroker, group: str, topic: str, count: int) -> list[Message]:
    found: list[Message] = []
    with Consumer(broker.ready.name_server, group, topic) as consumer:
        while len(found) < count:
            messages = consumer.poll(timeout_s=WAIT_S)
            assert messages
            consumer.ack(messages)
            found += messages
    return found


def test_from_dead_to_sent_again(broker: RunningBroker, tmp_path: Path) -> None:
    at = {VARIABLE: broker.ready.name_server}
    sent = {m.msg_id: m for m in bury(broker, "unlucky", "orders", 5)}
    rows = json_of("group", "dlq", "list", "unlucky", **at)
    assert {row["msg_id"] for row in rows} == sent.keys()
    assert {(row["topic"], row["attempts"], row["tags"]) for row in rows} == {("orders", 1, "t")}
    first = rows[0]
    shown = json_of("group", "dlq", "show", "unlucky", first["msg_id"], **at)
    assert shown["body"].encode() == sent[first["msg_id"]].body
    file = tmp_path / "letters.jsonl"
    output_of("group", "dlq", "export", "unlucky", str(file), **at)
    exported = [json.loads(line) for line in file.read_text().splitlines()]
    assert {each["body"].encode() for each in exported} == {m.body for m in sent.values()}

    one = json_of("group", "dlq", "resend", "unlucky", first["msg_id"], "-t", "mended", **at)
    assert [(row["msg_id"], row["topic"], row["error"]) for row in one] == [
        (first["msg_id"], "mended", "")
    ]
    (again,) = take(broker, "mender", "mended", 1)
    assert (again.msg_id, again.body) == (one[0]["new_msg_id"], sent[first["msg_id"]].body)
    assert again.properties["DLQ_ORIGIN_MESSAGE_ID"] == first["msg_id"]
    assert (again.reconsume_times, again.tags, again.properties["own"]) == (0, "t", "yes")
    assert not {"RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "DELAY"} & again.properties.keys()

    assert len(json_of("group", "dlq", "resend", "unlucky", **at)) == 5
    back = take(broker, "unlucky", "orders", 5)
    assert {m.body for m in back} == {m.body for m in sent.values()}
    assert json_of("group", "dlq", "list", "unlucky", **at) == []
    assert json_of("group", "dlq", "resend", "unlucky", **at) == []


def test_purged(broker: RunningBroker) -> None:
    bury(broker, "purged", "waste", 3)
    with Admin(broker.ready.name_server) as admin:
        assert len(admin.dead_letters("purged", 2)) == 2
        with pytest.raises(MessageNotFound, match="no dead letter NONE"):
            admin.resend_dead_letters("purged", ["NONE"])
        assert admin.purge_dead_letters("purged") == 3
        assert admin.dead_letters("purged") == []
        assert admin.purge_dead_letters("purged") == 0


def test_one_that_cannot_be_read_is_told_of_and_stays(broker: RunningBroker) -> None:
    broker.create_topic("torn", 1)
    encoder = BatchEncoder(size_max=1 << 16, count_max=10)
    encoder.add(b"no frame at all", None, None, None, 0)
    section = Section("torn", 0, 1, SYS_COMPRESSED)
    broker.commitlog.ask(SendMessages([section], 0), [encoder.take()])
    broker.send("torn", 0, [b"plain"])
    torn, plain = give_up(broker, "unread", "torn", 2)
    with Admin(broker.ready.name_server) as admin:
        first, second = admin.resend_dead_letters("unread", topic="elsewhere")
        assert isinstance(first.error, BodyIllegal)
        assert (first.letter.message.stored_body, second.error) == (torn.stored_body, None)
        assert len(admin.dead_letters("unread")) == 2
    (again,) = take(broker, "reader", "elsewhere", 1)
    assert again.body == plain.body
    rows = json_of("group", "dlq", "list", "unread", **{VARIABLE: broker.ready.name_server})
    assert [row["bytes"] for row in rows] == [15, 5]


def test_a_group_without_any(broker: RunningBroker) -> None:
    at = {VARIABLE: broker.ready.name_server}
    for command in ("list", "resend", "purge", "export"):
        done = run("group", "dlq", command, "healthy", **at)  # its name is not quite right
        assert done.returncode == 1
        assert b"group healthy is unknown" in done.stderr
    assert run("group", "create", "healthy", **at).returncode == 0
    assert json_of("group", "dlq", "list", "healthy", **at) == []
    table = run("group", "dlq", "list", "healthy", **at).stdout
    assert table.split()[:3] == [b"msg_id", b"topic", b"attempts"]
    done = run("group", "dlq", "show", "healthy", "ID", **at)
    assert done.returncode != 0
    assert b"group healthy has no dead letter ID" in done.stderr


def bury_apart(
    broker: RunningBroker, group: str, topics: list[str], large: int = -1
) -> list[Message]:
    """Create dead letters, one per topic, in this order; one has properties of maximum size."""
    buried = []
    for number, topic in enumerate(topics):
        broker.create_topic(topic, 1)
        room = PROPERTIES_BYTES_MAX - UNIQ_KEY_BYTES - len("big\1\2")
        properties = {"big": "x" * room} if number == large else {"number": str(number)}
        with Producer(broker.ready.name_server) as producer:
            producer.send(topic, b"%d" % number, properties=properties)
        buried += give_up(broker, group, topic, 1)
        broker.read_queue(f"%DLQ%{group}", 0, number + 1)
    return buried


def test_one_without_room_for_its_origin_is_sent_without(broker: RunningBroker) -> None:
    """Fault 20: a letter without space for its origin is sent, without it, to a given topic; the
    call raised MessageTooLarge, and sent the letters before it again in each attempt."""
    buried = bury_apart(broker, "large", [f"large-{number}" for number in range(6)], 2)
    with Admin(broker.ready.name_server) as admin:
        resent = admin.resend_dead_letters("large")
        assert [type(each.error) for each in resent[:3]] == [type(None)] * 2 + [MessageIllegal]
        assert "does not say which topic it came from" in str(resent[2].error)
        assert len(admin.dead_letters("large")) == 4
        resent = admin.resend_dead_letters("large", topic="large-again")
        assert [each.error for each in resent] == [None] * 4
        assert admin.dead_letters("large") == []
        assert admin.resend_dead_letters("large", topic="large-again") == []
    again = {each.body: each for each in take(broker, "large-reader", "large-again", 4)}
    assert again.keys() == {each.body for each in buried[2:]}
    assert again[b"2"].properties["big"] == buried[2].properties["big"]
    assert {body for body, m in again.items() if "DLQ_ORIGIN_MESSAGE_ID" not in m.properties} == {
        b"2"
    }


@pytest.mark.parametrize("bad", [0, 3, 5])
def test_one_that_cannot_be_sent_keeps_no_others(broker: RunningBroker, bad: int) -> None:
    """Fault 20: each letter has a result; letters before the failed one are not sent again."""
    group = f"barred-{bad}"
    topics = [f"{group}-{number}" for number in range(6)]
    bury_apart(broker, group, topics)
    with Admin(broker.ready.name_server) as admin:
        admin.update_topic(topics[bad], perm=4)
        resent = admin.resend_dead_letters(group)
        assert [type(each.error) for each in resent] == [
            NoPermission if number == bad else type(None) for number in range(6)
        ]
        assert [each.topic for each in admin.dead_letters(group)] == topics[bad:]
        rows = json.loads(
            run("group", "dlq", "resend", group, "--output", "json",
                **{VARIABLE: broker.ready.name_server}).stdout
        )  # fmt: skip
        assert [row["topic"] for row in rows] == topics[bad:]
        assert [bool(row["error"]) for row in rows] == [True] + [False] * (5 - bad)
        admin.update_topic(topics[bad], perm=6)
        assert [each.error for each in admin.resend_dead_letters(group)] == [None] * (6 - bad)
        assert admin.dead_letters(group) == []


def test_what_was_sent_before_the_call_failed_is_noted(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 20: letters of earlier pages are not sent again if a later page cannot be read."""
    monkeypatch.setattr(dead_letters, "PAGE_COUNT", 2)
    bury_apart(broker, "paged", [f"paged-{number}" for number in range(5)])
    pages_of = Admin._pages

    def broken(*arguments: Any) -> Iterator[Any]:
        for number, page in enumerate(pages_of(*arguments)):
            if number == 2:
                raise NotReachable("gone")
            yield page

    with Admin(broker.ready.name_server) as admin:
        with monkeypatch.context() as patched:
            patched.setattr(Admin, "_pages", broken)
            with pytest.raises(NotReachable):
                admin.resend_dead_letters("paged")
        assert [each.topic for each in admin.dead_letters("paged")] == ["paged-4"]
