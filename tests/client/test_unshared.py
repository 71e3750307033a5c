"""Consumers that share their queues with nobody: assigned, without a group, and broadcasting."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from client_children import broadcast_until_killed
from family import RunningBroker
from patience import patient
from ports import free_ports
from receiving import take
from waiting import until

from cometmq import Admin, AsyncConsumer, Broker, Consumer, Message
from cometmq.client.receiving import kept, unshared
from cometmq.client.receiving.kept import own_address, parse_offsets
from cometmq.errors import ArgumentIllegal, NotOwner, OffsetIllegal, StoreDamaged, StoreLocked
from cometmq.testing import Sandbox

WAIT_S = patient(60)
TRANSPORTS = ["mapped", "zmq"]
numbers = itertools.count()

# As RocketMQ 5.3.3 writes it: RemotingSerializable.toJson(OffsetSerializeWrapper, pretty).
OFFSETS_JSON = """{
\t"offsetTable":{{
\t\t\t"brokerName":"%s",
\t\t\t"queueId":0,
\t\t\t"topic":"%s"
\t\t}:3,{
\t\t\t"brokerName":"%s",
\t\t\t"queueId":1,
\t\t\t"topic":"%s"
\t\t}:2
\t}
}"""


@pytest.fixture
def topic(cometmq: Sandbox) -> str:
    """A new one of two queues: three messages in the first, two in the second."""
    name = cometmq.topic("unshared", queues=2)
    fill(cometmq.broker, name, 0, 3)
    fill(cometmq.broker, name, 1, 2)
    return name


def fill(broker: Any, topic: str, queue_id: int, count: int, first: int = 0) -> None:
    bodies = [f"{queue_id}:{at}".encode() for at in range(first, first + count)]
    with broker.producer() as producer:
        producer.send_many(topic, bodies, queue_id=queue_id)


def bodies(messages: list[Message]) -> list[str]:
    return sorted(message.body.decode() for message in messages)


ALL = ["0:0", "0:1", "0:2", "1:0", "1:1"]


# --- without a group ------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_everyone_without_a_group_reads_everything(
    broker: Broker, topic: str, transport: str
) -> None:
    with (
        broker.consumer(None, topic, transport=transport) as one,
        broker.consumer(None, topic, transport=transport) as other,
        Admin(broker.name_server) as admin,
    ):
        groups = {each.group for each in admin.groups()}
        for consumer in (one, other):
            assert consumer.assignment == [(broker.name, topic, 0), (broker.name, topic, 1)]
            messages = take(consumer, 5)
            assert bodies(messages) == ALL
            consumer.ack(messages)
            with pytest.raises(ArgumentIllegal):
                consumer.commit()
        assert one.group is None
        assert {each.group for each in admin.groups()} == groups
        until(lambda: one.connected)


def test_queues_that_a_topic_gets_later_are_read_from_their_beginning(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unshared, "REFRESH_S", 0.05)
    with broker.consumer(None, topic, start="latest") as consumer, Admin(broker.name_server) as a:
        a.update_topic(topic, queues=3)
        fill(broker, topic, 2, 2)
        assert bodies(take(consumer, 2)) == ["2:0", "2:1"]
        assert len(consumer.assignment) == 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_assigned_queues_and_offsets(broker: Broker, topic: str, transport: str) -> None:
    first, second = (broker.name, topic, 0), (broker.name, topic, 1)
    with broker.consumer(None, transport=transport) as consumer:
        consumer.assign({first: 1})
        assert bodies(take(consumer, 2)) == ["0:1", "0:2"]
        assert consumer.position(first) == 3
        with pytest.raises(NotOwner):
            consumer.position(second)
        consumer.assign([second])  # in place of the other
        assert consumer.assignment == [second]
        assert bodies(take(consumer, 2)) == ["1:0", "1:1"]
        consumer.assign(topic)
        assert bodies(take(consumer, 3)) == ["0:0", "0:1", "0:2"]  # the second goes on
        assert [consumer.position(first), consumer.position(second)] == [3, 2]
        consumer.assign([])
        assert consumer.assignment == []


def test_selections_of_assigned_queues(broker: Broker, topic: str) -> None:
    with broker.producer() as producer:
        for number in range(4):
            tag, properties = ("even", "odd")[number % 2], {"n": str(number)}
            producer.send(topic, b"%d" % number, queue_id=0, tags=tag, properties=properties)
    with broker.consumer(None) as consumer:
        consumer.assign(topic, "even || odd", "n >= 1")
        assert bodies(take(consumer, 3)) == ["1", "2", "3"]
        consumer.assign({(broker.name, topic, 0): 0}, "even")
        assert bodies(take(consumer, 2)) == ["0", "2"]


def test_part_of_a_chunk_is_a_position_as_well(broker: Broker, topic: str) -> None:
    queue = (broker.name, topic, 0)
    with broker.consumer(None) as consumer:
        consumer.assign([queue])
        assert len(consumer.poll(1, WAIT_S)) == 1
        assert consumer.position(queue) == 1
        at = consumer.position(queue)
    with broker.consumer(None) as consumer:
        consumer.assign({queue: at})
        assert bodies(take(consumer, 2)) == ["0:1", "0:2"]


def test_seek(broker: Broker, topic: str) -> None:
    with broker.consumer(None, topic) as consumer:
        [middle] = [each for each in take(consumer, 5) if each.body == b"0:1"]
        consumer.seek("earliest")
        assert bodies(take(consumer, 5)) == ALL
        consumer.seek(1, topic, 0)
        assert bodies(take(consumer, 2)) == ["0:1", "0:2"]
        consumer.seek(datetime.fromtimestamp(middle.store_timestamp_ms / 1000 + 3600, UTC))
        assert consumer.position((broker.name, topic, 0)) == 3
        for wrong in (4, 1 << 40):
            with pytest.raises(OffsetIllegal, match="has 0 to 3"):
                consumer.seek(wrong, topic, 0)
        with pytest.raises(NotOwner):
            consumer.seek(0, topic, 7)


def test_an_assigned_offset_that_is_not_there_goes_to_the_end(
    broker: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    with broker.consumer(None) as consumer, caplog.at_level(logging.WARNING):
        consumer.assign({(broker.name, topic, 0): 1_000})
        until(lambda: not consumer.poll(timeout_s=0) and "is outside [0, 3]" in caplog.text)
        fill(broker, topic, 0, 1, first=3)
        assert bodies(take(consumer, 1)) == ["0:3"]


def test_wrong_arguments(broker: Broker, topic: str) -> None:
    name = broker.name
    with broker.consumer(None) as consumer:
        for wrong in (
            [(name, topic, 2)], [("nobody", topic, 0)], [(name, topic, -1)], [(name, topic)],
            [(name, 7, 0)], [5], {(name, topic, 0): -1}, {(name, topic, 0): "end"}, 7,
            [(name, "/", 0)],
        ):  # fmt: skip
            with pytest.raises(Exception) as caught:  # noqa: PT011
                consumer.assign(wrong)  # type: ignore[arg-type]
            assert type(caught.value).__name__ in ("ArgumentIllegal", "NameIllegal"), wrong
        assert consumer.assignment == []
        consumer.assign([(name, topic, 0)])
        with pytest.raises(ArgumentIllegal, match="either subscribes"):
            consumer.subscribe(topic)
    with (
        broker.consumer("g-member", topic) as consumer,
        pytest.raises(ArgumentIllegal, match="either subscribes"),
    ):
        consumer.assign([(name, topic, 0)])
    for options in ({"broadcast": True}, {"broadcast": True, "member": "a/b"}):
        with pytest.raises(ArgumentIllegal):
            Consumer(broker.name_server, None if len(options) == 1 else "g", **options)  # type: ignore[arg-type]


# --- with a group that is not joined --------------------------------------------------------------


def test_a_group_keeps_what_is_committed(broker: Broker, topic: str) -> None:
    group, queue = f"g-{topic}", (broker.name, topic, 0)
    for start, expected in ((0, 3), (2, 1)):
        with broker.consumer(group, auto_commit_ms=3_600_000) as consumer:
            consumer.assign([queue])
            messages = take(consumer, expected)
            assert messages[0].queue_offset == start
            if not start:
                consumer.ack(messages[:2])
                consumer.commit()
    with Admin(broker.name_server) as admin:
        assert not admin.describe_group(group).members
    with broker.consumer(group, topic) as member:
        until(lambda: len(member.assignment) == 2)
        with broker.consumer(group) as consumer:
            consumer.assign([queue])
            consumer.ack(take(consumer, 1))
            with pytest.raises(NotOwner):
                consumer.commit()


@pytest.mark.parametrize("transport", ["mapped", pytest.param("zmq", marks=pytest.mark.slow)])
def test_a_broker_that_comes_back(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed and started again: reading goes on, with a commit that had to wait for it."""
    monkeypatch.setattr(unshared, "ASK_S", 0.3)
    monkeypatch.setattr(kept, "ASK_S", 0.3)
    monkeypatch.setattr(unshared, "REFRESH_S", 0.3)
    store, settings = tmp_path / "store", {"port": free_ports(8)}
    with RunningBroker(store, settings) as running:
        running.create_topic("back", 1)
        running.send("back", 0, [b"one", b"two"])
        consumer = Consumer(running.ready.name_server, "g", transport=transport)
        consumer.assign("back")
        messages = take(consumer, 2)
        assert [each.body for each in messages] == [b"one", b"two"]
        running.kill_all()
        running.wait_gone()
    consumer.ack(messages)
    until(lambda: not consumer.poll(timeout_s=0) and not consumer.connected)
    with RunningBroker(store, settings) as running:
        running.send("back", 0, [b"three"])
        assert [each.body for each in take(consumer, 1)] == [b"three"]
        until(lambda: consumer.connected)
        consumer.close()
        with Admin(running.ready.name_server) as admin:
            assert admin.committed("g", "back") == {(running.endpoints.broker, 0): 2}


# --- pauses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, "g-pause"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pause_and_resume(broker: Broker, topic: str, group: str | None, transport: str) -> None:
    """Nothing of a paused queue, not even of what waits here; then all of it, once, in order."""
    first, second = (broker.name, topic, 0), (broker.name, topic, 1)
    if group:
        group = f"{group}{next(numbers)}"
    with broker.consumer(group, topic, transport=transport) as consumer:
        until(lambda: len(consumer.assignment) == 2)
        seen = []
        for message in consumer:
            seen.append(message)
            if message.queue_id == 0:
                consumer.pause([first])  # in the middle of a chunk
                break
        fill(broker, topic, 0, 5, first=3)
        fill(broker, topic, 1, 2, first=2)
        for message in consumer:
            seen.append(message)
            if message.body == b"1:3":
                break
        assert [each.body for each in seen if each.queue_id == 0] == [b"0:0"]
        assert consumer.position(first) == 1
        assert consumer.poll(timeout_s=0.05) == []
        with pytest.raises(NotOwner):
            consumer.pause([second, (broker.name, topic, 9)])
        consumer.resume([first, first])
        rest = take(consumer, 7)
        assert [each.body.decode() for each in rest] == [f"0:{at}" for at in range(1, 8)]
        consumer.ack(seen + rest)
        assert consumer.position(first) == 8
    if group:
        with Admin(broker.name_server) as admin:
            assert admin.describe_group(group).lag == 0


def test_seek_and_end_while_it_is_paused(broker: Broker, topic: str) -> None:
    first = (broker.name, topic, 0)
    with broker.consumer(None) as consumer:
        consumer.assign([first])
        assert len(take(consumer, 3)) == 3
        consumer.pause([first])
        consumer.seek("earliest")
        assert consumer.poll(timeout_s=0.05) == []
        assert consumer.position(first) == 0
        consumer.resume([first])
        assert bodies(take(consumer, 3)) == ["0:0", "0:1", "0:2"]
        consumer.pause([first])


def test_pauses_from_another_thread_lose_and_repeat_nothing(broker: Broker, topic: str) -> None:
    """A thousand pauses while another thread reads."""
    import threading

    first = (broker.name, topic, 0)
    fill(broker, topic, 0, 20_000, first=3)
    over = threading.Event()
    with broker.consumer(None, pull_bytes=20_000, prefetch_bytes=100_000) as consumer:
        consumer.assign([first])

        def pauses() -> None:
            while not over.is_set():
                consumer.pause([first])
                consumer.resume([first])

        thread = threading.Thread(target=pauses)
        thread.start()
        try:
            found = []
            while len(found) < 20_003:
                messages = consumer.poll(50, WAIT_S)
                assert messages, len(found)
                found += messages
        finally:
            over.set()
            thread.join()
        assert [each.queue_offset for each in found] == list(range(20_003))
        assert consumer.poll(timeout_s=0) == []


# --- broadcasting ---------------------------------------------------------------------------------


def test_broadcasting(broker: Broker, topic: str, tmp_path: Path) -> None:
    """Every member gets everything; each goes on where it was, by a file as RocketMQ's."""
    for member in ("one", "other"):
        with broker.consumer("g-all", topic, broadcast=tmp_path, member=member) as consumer:
            messages = take(consumer, 5)
            assert bodies(messages) == ALL
            consumer.ack(messages)
        path = tmp_path / member / "g-all" / "offsets.json"
        name = broker.name
        assert path.read_text() == OFFSETS_JSON % (name, topic, name, topic)
    fill(broker, topic, 0, 1, first=3)
    with broker.consumer("g-all", topic, broadcast=tmp_path, member="one") as consumer:
        assert bodies(take(consumer, 1)) == ["0:3"]
        assert consumer.member == "one"
        with pytest.raises(StoreLocked, match="member="):
            broker.consumer("g-all", topic, broadcast=tmp_path, member="one")
    with Admin(broker.name_server) as admin:
        assert "g-all" not in {each.group for each in admin.groups()}


def test_the_default_name_and_folder_are_rocketmqs(
    broker: Broker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with broker.consumer("g-home", topic, broadcast=True, start="latest") as consumer:
        folder = tmp_path / ".rocketmq_offsets" / f"{own_address()}@DEFAULT" / "g-home"
        assert parse_offsets((folder / "offsets.json").read_bytes(), folder)  # before any message
        fill(broker, topic, 0, 1, first=3)
        assert bodies(take(consumer, 1)) == ["0:3"]
    with broker.consumer("g-home", topic, broadcast=True, start="latest") as consumer:
        assert bodies(take(consumer, 1)) == ["0:3"]  # it was not acknowledged


def test_a_file_of_rocketmqs_is_gone_on_with(broker: Broker, topic: str, tmp_path: Path) -> None:
    """Also the older one, of a writer that ended between two steps; never one that is damaged."""
    folder = tmp_path / "m" / "g"
    folder.mkdir(parents=True)
    text = (OFFSETS_JSON % (broker.name, topic, broker.name, topic)).replace("}:3", "}:2")
    (folder / "offsets.json.bak").write_text(text)
    (folder / "offsets.json").write_text("")
    with broker.consumer("g", topic, broadcast=tmp_path, member="m") as consumer:
        assert bodies(take(consumer, 1)) == ["0:2"]
    for damaged in (text[:-9], text + "}", text.replace("queueId", "q"), "{}", "\xff", "[" * 9999):
        (folder / "offsets.json").write_text(damaged, encoding="latin-1")
        with pytest.raises(StoreDamaged, match=r"offsets\.json"):
            broker.consumer("g", topic, broadcast=tmp_path, member="m")
    (folder / "offsets.json").write_text('{"offsetTable":{}}')
    with broker.consumer("g", topic, broadcast=tmp_path, member="m") as consumer:
        assert len(take(consumer, 5)) == 5


def test_kill_while_it_broadcasts(broker: Broker, topic: str, tmp_path: Path) -> None:
    """What a killed member had committed is not delivered again, and nothing is left out."""
    fill(broker, topic, 0, 500, first=3)
    context = multiprocessing.get_context("spawn")
    reads, writes = context.Pipe(duplex=False)
    child = context.Process(
        target=broadcast_until_killed, args=(broker.name_server, topic, str(tmp_path), writes)
    )
    child.start()
    committed = -1
    for _ in range(20):
        assert reads.poll(WAIT_S)
        committed = reads.recv()
    child.kill()
    child.join()
    while reads.poll(0):
        try:
            committed = reads.recv()
        except EOFError:
            break
    with broker.consumer("g", broadcast=tmp_path, member="child") as consumer:
        consumer.assign([(broker.name, topic, 0)])
        first = take(consumer, 1)[0].queue_offset
    assert committed <= first <= committed + 10


# --- asyncio --------------------------------------------------------------------------------------


def test_asyncio(broker: Broker, topic: str, tmp_path: Path) -> None:
    async def run() -> None:
        first = (broker.name, topic, 0)
        async with AsyncConsumer(broker.name_server, None) as consumer:
            await consumer.assign({first: 1})
            found: list[Message] = []
            while len(found) < 2:
                found += await consumer.poll(timeout_s=WAIT_S)
            assert consumer.position(first) == 3
            consumer.pause([first])
            await consumer.seek("earliest")
            assert await consumer.poll(timeout_s=0.05) == []
            consumer.resume([first])
            assert await consumer.poll(1, timeout_s=WAIT_S)
        options = {"broadcast": tmp_path, "member": "m"}
        async with AsyncConsumer(broker.name_server, "g", topic, **options) as consumer:  # type: ignore[arg-type]
            count = 0
            async for message in consumer:
                consumer.ack(message)
                count += 1
                if count == 5:
                    break

    asyncio.run(run())
    assert (tmp_path / "m" / "g" / "offsets.json").exists()
