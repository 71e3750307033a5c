"""What fails in an actor is logged and answered once, and the actor and all others go on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from family import SMALL, RunningBroker, encode_batch
from patience import patient

from cometmq import Broker
from cometmq.actors.launch.addresses import address_of
from cometmq.actors.runtime.disk_actor import DiskActor
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol import frames
from cometmq.protocol.commands import (
    Command,
    CreateTopic,
    ListTopics,
    Ping,
    Pong,
    Section,
    SendMessages,
    SendResult,
    TopicInfo,
)
from cometmq.protocol.errors import CometError, MessageIllegal
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.log.commit_log import CommitLog

WAIT_S = patient(60)


class Fragile(ServiceActor):
    """Fails at everything, a few times."""

    role = "fragile"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: dict[str, int] = {}
        self.doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.read_end, self.write_end = os.pipe()
        self.happened = threading.Condition()

    def on_start(self) -> None:
        self.inbox.listen_to_doorbell(self.doorbell)
        self.inbox.listen_to(self.read_end)
        self.every(0.01, lambda: self.fail("timer", 3))

    def fail(self, what: str, times: int) -> None:
        with self.happened:
            self.calls[what] = self.calls.get(what, 0) + 1
            self.happened.notify_all()
            if self.calls[what] <= times:
                raise ValueError(f"{what} number {self.calls[what]}")

    def on_doorbell(self) -> None:
        self.fail("doorbell", 1)

    def on_readable(self, source: Any) -> None:
        self.fail("reading", 1)
        os.read(source, 1)

    def on_list_topics(self, _command: ListTopics, _request: Request) -> Command:
        self.fail("command", 1)
        return Ping()

    def wait_for(self, what: str, count: int) -> None:
        with self.happened:
            assert self.happened.wait_for(lambda: self.calls.get(what, 0) >= count, WAIT_S), what


class FragileDisk(DiskActor, Fragile):
    role = "fragile disk"


@pytest.fixture(params=[Fragile, FragileDisk])
def fragile(request: pytest.FixtureRequest) -> Iterator[Fragile]:
    reference = request.param.start(bind=[("tcp://127.0.0.1:*", False)])
    actor = reference._actor_weakref()
    assert isinstance(actor, Fragile)
    yield actor
    reference.stop()
    for descriptor in (actor.doorbell, actor.read_end, actor.write_end):
        os.close(descriptor)


def test_an_actor_outlives_what_fails(fragile: Fragile, caplog: pytest.LogCaptureFixture) -> None:
    """Timers, calls, doorbell, descriptors, commands: each is tried again, and said once."""
    with Channel(fragile.addresses[0]) as line:
        os.eventfd_write(fragile.doorbell, 1)
        os.write(fragile.write_end, b"x")
        fragile.call_soon(lambda: fragile.fail("call", 1))
        with pytest.raises(CometError, match="ValueError: command number 1"):
            line.ask(ListTopics(), timeout_s=WAIT_S)
        line.ask(ListTopics(), timeout_s=WAIT_S)
        for what, count in (("timer", 5), ("doorbell", 2), ("reading", 2), ("call", 1)):
            fragile.wait_for(what, count)
        line.ask(Ping(), timeout_s=WAIT_S)
    logged = [record for record in caplog.records if record.exc_info]
    texts = [str(record.exc_info[1]) for record in logged if record.exc_info]
    wanted = ["timer number 1", "timer number 2", "timer number 3"]
    wanted += ["doorbell number 1", "reading number 1", "call number 1", "command number 1"]
    assert sorted(texts) == sorted(wanted)
    assert not [record for record in caplog.records if record.levelno >= logging.CRITICAL]


def test_a_broken_invariant_ends_it(fragile: Fragile) -> None:
    broken = threading.Event()
    fragile.on_broken_invariant = broken.set  # type: ignore[method-assign]

    def breaks() -> None:
        raise AssertionError("broken")

    fragile.call_soon(breaks)
    assert broken.wait(WAIT_S)


def test_a_message_that_cannot_be_taken_is_answered(
    fragile: Fragile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails in the inbox, before there is a request."""
    unpack, failed = frames.unpack, threading.Event()

    def unpack_badly(head: bytes | memoryview) -> tuple[int, Command]:
        number, command = unpack(head)
        if isinstance(command, ListTopics) and not failed.is_set():
            failed.set()
            raise KeyError("unforeseen")
        return number, command

    monkeypatch.setattr(frames, "unpack", unpack_badly)
    with Channel(fragile.addresses[0]) as line:
        with pytest.raises(CometError, match="KeyError: 'unforeseen'"):
            line.ask(ListTopics(), timeout_s=WAIT_S)
        line.ask(Ping(), timeout_s=WAIT_S)
    assert [record for record in caplog.records if record.exc_info]


def test_an_inbox_that_fails_ends_the_actor(
    fragile: Fragile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing could be heard any more: the process ends, and is started again."""

    def look() -> None:
        raise ValueError("no sockets")

    monkeypatch.setattr(fragile.inbox, "_look", look)
    fragile.call_soon(lambda: None)
    assert fragile.ended.wait(WAIT_S)
    (record,) = [each for each in caplog.records if each.levelno == logging.CRITICAL]
    assert "dies of an exception" in record.getMessage()


def test_whole_drain_that_fails_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    """An actor that works on a group, as the writer does, fails outside of any single command."""

    class Group(ServiceActor):
        role = "group"
        times = 0

        def on_requests(self, requests: list[Request]) -> None:
            self.times += 1
            if self.times == 1:
                raise KeyError("group")
            super().on_requests(requests)

    reference = Group.start(bind=[("tcp://127.0.0.1:*", False)])
    actor = reference._actor_weakref()
    assert isinstance(actor, Group)
    try:
        with Channel(actor.addresses[0]) as line:
            with pytest.raises(CometError, match="KeyError: 'group'"):
                line.ask(Ping(), timeout_s=WAIT_S)
            answer, _ = line.ask(Ping(), timeout_s=WAIT_S)
            assert isinstance(answer, Pong)
    finally:
        reference.stop()


# --- the writer -----------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_topics_too_long_to_be_written(store: Path) -> None:
    """Six in a row ended the broker: every one is refused, and everything goes on."""
    topic = "%RETRY%" + "r" * 150
    with RunningBroker(store, {"autoMessageVersionOnTopicLen": False}) as broker:
        broker.create_topic("orders", 1)
        broker.create_topic(topic, 1)
        sent = broker.send("orders", 0, [b"before"])
        before = broker.pids()
        for _ in range(6):
            with pytest.raises(MessageIllegal, match="autoMessageVersionOnTopicLen"):
                broker.send(topic, 0, [b"never"])
        sent += broker.send("orders", 0, [b"after"])
        assert broker.pids() == before
        broker.assert_stored(sent)


@pytest.mark.slow
def test_queues_of_such_topics_do_not_keep_a_broker_from_starting(store: Path) -> None:
    topic = "%RETRY%" + "r" * 150
    with RunningBroker(store) as broker:
        broker.create_topic(topic, 1)
        broker.create_topic("orders", 1)
        sent = broker.send(topic, 0, [b"long"]) + broker.send("orders", 0, [b"short"])
    with RunningBroker(store, {"autoMessageVersionOnTopicLen": False}) as broker:
        with pytest.raises(MessageIllegal, match="autoMessageVersionOnTopicLen"):
            broker.send(topic, 0, [b"never"])
        sent += broker.send("orders", 0, [b"after"])
        broker.assert_stored(sent)
    with RunningBroker(store) as broker:
        sent += broker.send(topic, 0, [b"again"])
        broker.assert_stored(sent)


def test_a_section_that_fails_takes_no_other_with_it(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever one section fails of, at any place, the others of its command are stored, whole."""
    append_batch = CommitLog.append_batch

    def fails_at_times(self: CommitLog, queue: Any, batch: Any, count: int, **fields: Any) -> int:
        if b"before" in bytes(batch):
            raise ValueError("before")
        return append_batch(self, queue, batch, count, **fields)

    monkeypatch.setattr(CommitLog, "append_batch", fails_at_times)
    with Broker(store, settings=dict(SMALL), writer="here") as broker:
        with Channel(address_of(broker._ready.token, "coordinator")) as line:
            line.ask(CreateTopic(TopicInfo("orders", 4, 4)), timeout_s=WAIT_S)
        bodies = [b"one", b"before", b"two", b"three"]
        sections = [Section("orders", queue_id, 1) for queue_id in range(4)]
        with Channel(address_of(broker._ready.token, "commitlog")) as line:
            for number in range(3):
                answer, _ = line.ask(
                    SendMessages(sections, 0),
                    [encode_batch([body]) for body in bodies],
                    timeout_s=WAIT_S,
                )
                assert isinstance(answer, SendResult)
                codes = [result.code for result in answer.results]
                assert codes == [0, CometError.code, 0, 0], answer
                offsets = [result.queue_offset for result in answer.results]
                assert offsets == [number, -1, number, number]
                assert "ValueError: before" in answer.results[1].text
