"""Send once: what a producer repeats is stored once, whatever became of the attempts before."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from family import RunningBroker, encode_batch
from patience import patient
from still import stopped

from cometmq.protocol.commands import TIMED, Section, SectionResult, SendMessages, SendResult
from cometmq.protocol.errors import MessageIllegal, Overtaken, SystemBusy
from cometmq.protocol.names import DELAY_TOPIC
from cometmq.protocol.wire.pending import Pending
from cometmq.shm.kernel.codec import BatchEncoder, element_start, unique_id

_topics = (f"t{number}" for number in itertools.count())
AN_HOUR_MS = 3_600_000
WAIT_S = patient(60)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("repeats") / "store") as running:
        yield running


@pytest.fixture
def topic(broker: RunningBroker) -> str:
    name = next(_topics)
    broker.create_topic(name, 1)
    return name


class Sender:
    """A producer's attempts, by hand."""

    def __init__(self, broker: RunningBroker, topic: str) -> None:
        self.broker = broker
        self.topic = topic
        self.number = 0

    def request(self, batch: bytes, count: int, **kinds: Any) -> Pending:
        self.number = kinds.pop("number", self.number + 1)
        section = Section(self.topic, 0, count, number=self.number, **kinds)
        command = SendMessages([section], int(time.time() * 1000), sender=77)
        return self.broker.commitlog.request(command, [batch])

    def send(self, batch: bytes, count: int, **kinds: Any) -> SectionResult:
        pending = self.request(batch, count, **kinds)
        assert self.broker.commitlog.wait(pending, patient(60))
        return result_of(pending)

    def repeat(self, batch: bytes, count: int, **kinds: Any) -> SectionResult:
        kinds = {"fence": True, "repeats_ms": AN_HOUR_MS} | kinds
        return self.send(batch, count, **kinds)

    def bodies(self) -> list[bytes]:
        return [message.body for message in self.broker.read_queue(self.topic, 0)]


def result_of(pending: Pending) -> SectionResult:
    answer, _ = pending.result()
    assert isinstance(answer, SendResult)
    return answer.results[0]


def encoded(*bodies: bytes) -> bytes:
    return encode_batch(list(bodies))


def test_what_is_there_is_not_stored_again(broker: RunningBroker, topic: str) -> None:
    sender = Sender(broker, topic)
    sender.send(encoded(b"before"), 1)
    batch = encoded(b"a", b"b", b"c")
    first = sender.send(batch, 3)
    sender.send(encoded(b"behind"), 1)
    again = sender.repeat(batch, 3)
    assert again == first
    assert (again.code, again.queue_offset, again.head) == (0, 1, 0)
    assert sender.bodies() == [b"before", b"a", b"b", b"c", b"behind"]
    found = broker.statistics("commitlog")["repeats_found"]
    assert sender.repeat(batch, 3) == first
    assert broker.statistics("commitlog")["repeats_found"] == found + 1


def test_what_never_came_is_stored(broker: RunningBroker, topic: str) -> None:
    sender = Sender(broker, topic)
    sender.send(encoded(b"before"), 1)
    assert sender.repeat(encoded(b"a", b"b"), 2).queue_offset == 1
    assert sender.bodies() == [b"before", b"a", b"b"]


def test_what_comes_later_is_refused(broker: RunningBroker, topic: str) -> None:
    """The first attempt lay in a connection, and overtakes nothing any more."""
    sender = Sender(broker, topic)
    batch = encoded(b"a")
    assert sender.repeat(batch, 1, number=2).queue_offset == 0
    assert sender.send(batch, 1, number=1).code == Overtaken.code
    assert sender.bodies() == [b"a"]


@pytest.mark.parametrize("stored", [1, 2, 3, 4])
def test_a_batch_of_which_a_killed_broker_has_stored_a_part(
    broker: RunningBroker, topic: str, stored: int
) -> None:
    sender = Sender(broker, topic)
    batch = encoded(*(b"%d" % number for number in range(5)))
    assert sender.send(batch[: element_start(batch, stored)], stored).queue_offset == 0
    sender.send(encoded(b"another's"), 1)
    answer = sender.repeat(batch, 5)
    assert (answer.code, answer.queue_offset, answer.head) == (0, 0, stored)
    assert answer.rest_queue_offset == stored + 1
    own = [b"%d" % number for number in range(5)]
    assert sender.bodies() == [*own[:stored], b"another's", *own[stored:]]
    assert sender.repeat(batch[element_start(batch, stored) :], 5 - stored).head == 0


def timed(*messages: tuple[bytes, str, int]) -> bytes:
    encoder = BatchEncoder(size_max=1 << 16, count_max=10)
    for body, name, value in messages:
        encoder.add(body, None, None, {name: str(value)}, 0)
    return encoder.take()


@pytest.mark.parametrize("stored", [1, 2, 3])
def test_a_repeat_tells_what_its_delays_count_from(
    broker: RunningBroker, topic: str, stored: int
) -> None:
    """Fault 38: `recall_handle` works after a lost answer; it raised ArgumentIllegal."""
    sender = Sender(broker, topic)
    at_ms = int(time.time() * 1000) + 3_600_000
    batch = timed(
        (b"exact", "TIMER_DELIVER_MS", at_ms),
        (b"a", "TIMER_DELAY_MS", 3_600_000),
        (b"b", "TIMER_DELAY_MS", 7_200_000),
    )
    head = batch if stored == 3 else batch[: element_start(batch, stored)]
    first = sender.send(head, stored, delay_level=TIMED)
    again = sender.repeat(batch, 3, delay_level=TIMED)
    assert (again.code, again.head) == (0, 0 if stored == 3 else stored)
    if stored > 1:
        assert again.timed_ms == first.timed_ms > 0
    assert sender.repeat(batch, 3, delay_level=TIMED).timed_ms == again.timed_ms


@pytest.mark.parametrize("who", ["commitlog", "dispatcher", "all"])
def test_after_a_kill(tmp_path: Path, who: str) -> None:
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("t", 1)
        sender = Sender(broker, "t")
        first = sender.send(batch := encoded(b"a", b"b"), 2)
        if who == "all":
            broker.kill_all()
        else:
            broker.kill(who)
            assert sender.repeat(batch, 2) == first
            assert sender.bodies() == [b"a", b"b"]
    if who == "all":
        with RunningBroker(tmp_path / "store") as broker:
            sender.broker = broker
            assert sender.repeat(batch, 2) == first
            assert sender.bodies() == [b"a", b"b"]


def test_while_the_dispatcher_stands_still(broker: RunningBroker, topic: str) -> None:
    """A repeat waits for it, and nobody else for the repeat."""
    sender = Sender(broker, topic)
    batch = encoded(b"a")
    with stopped(broker.pids()["dispatcher"]):
        first = sender.send(batch, 1)
        again = sender.request(batch, 1, fence=True, repeats_ms=0)
        newer = sender.request(batch, 1, fence=True, repeats_ms=0)
        assert sender.send(encoded(b"b"), 1).code == 0
        assert not again.done
    for pending in (again, newer):
        assert broker.commitlog.wait(pending, patient(60))
        assert result_of(pending) == first
    assert sender.bodies() == [b"a", b"b"]


@pytest.mark.slow
def test_a_dispatcher_that_does_not_come_back(broker: RunningBroker, topic: str) -> None:
    """The producer is told to come again, before it asks itself whether anybody is there."""
    sender = Sender(broker, topic)
    with stopped(broker.pids()["dispatcher"]):
        assert sender.send(encoded(b"a"), 1).code == 0
        answer = sender.repeat(encoded(b"b"), 1)
    assert answer.code == SystemBusy.code
    assert "the dispatcher is behind" in answer.text
    assert sender.repeat(encoded(b"b"), 1).queue_offset == 1


def test_what_waits_for_its_time(broker: RunningBroker, topic: str) -> None:
    sender = Sender(broker, topic)
    batch = encoded(b"a", b"b")
    level = 18
    first = sender.send(batch, 2, delay_level=level)
    assert sender.repeat(batch, 2, delay_level=level) == first
    waiting = broker.read_queue(DELAY_TOPIC, level - 1)
    own = [each.body for each in waiting if each.properties["REAL_TOPIC"] == topic]
    assert own == [b"a", b"b"]


def test_only_what_can_be_an_attempt_is_looked_at(broker: RunningBroker, topic: str) -> None:
    """So that a queue's history costs nothing."""
    sender = Sender(broker, topic)
    batch = encoded(b"a")
    sender.send(batch, 1)
    assert sender.repeat(batch, 1, after=0, repeats_ms=0).queue_offset == 0
    assert sender.repeat(batch, 1, after=77).queue_offset == 0  # of a topic of before: by time
    assert sender.repeat(batch, 1, after=1).queue_offset == 1


def test_sections_of_their_own(broker: RunningBroker, topic: str) -> None:
    """One repeat in a command holds up the others, and changes nothing for them."""
    sender = Sender(broker, topic)
    old = encoded(b"old")
    sender.send(old, 1)
    sections = [
        Section(topic, 0, 1),
        Section(topic, 0, 1, number=6, fence=True, repeats_ms=AN_HOUR_MS),
        Section("no such topic", 0, 1, number=1, fence=True, repeats_ms=AN_HOUR_MS),
    ]
    command = SendMessages(sections, 0, sender=77)
    answer, _ = broker.commitlog.ask(
        command, [encoded(b"new"), old, encoded(b"x")], timeout_s=patient(60)
    )
    assert isinstance(answer, SendResult)
    assert [each.queue_offset for each in answer.results] == [1, 0, -1]
    assert answer.results[2].code
    assert sender.bodies() == [b"old", b"new"]


@pytest.mark.parametrize(
    ("count", "cut", "repeats_ms", "code"),
    [
        (2, 0, 0, MessageIllegal.code),  # more than there are
        (-1, 0, 0, MessageIllegal.code),
        (0, 0, 0, MessageIllegal.code),
        (1, 1, 0, MessageIllegal.code),  # not whole
        (1, 0, (1 << 63) - 1, 0),
        (1, 0, -(1 << 63), 0),
    ],
)
def test_what_is_wrong_with_a_repeat(
    broker: RunningBroker, topic: str, count: int, cut: int, repeats_ms: int, code: int
) -> None:
    batch = encoded(b"a")
    answer = Sender(broker, topic).repeat(batch[: len(batch) - cut], count, repeats_ms=repeats_ms)
    assert answer.code == code, answer
    assert unique_id(batch, 0)
    assert len(broker.read_queue(topic, 0)) == (1 if code == 0 else 0)


def test_messages_without_ids_are_stored_again(broker: RunningBroker, topic: str) -> None:
    encoder = BatchEncoder(unique_keys=False)
    encoder.add(b"a")
    batch = encoder.take()
    sender = Sender(broker, topic)
    assert [sender.repeat(batch, 1).queue_offset for _ in range(2)] == [0, 1]


def test_repeats_are_stored_and_synced_together(tmp_path: Path) -> None:
    """Fault 30: one sync covers repeats of many producers, which all retry after a fail-over."""
    count = 60
    with RunningBroker(tmp_path / "store", {"flushDiskType": "SYNC_FLUSH"}) as broker:
        broker.create_topic("t", 1)
        pending: list[Pending] = []
        with stopped(broker.pids()["dispatcher"]):
            broker.send("t", 0, [b"before"])  # repeats wait until this is dispatched
            before = broker.statistics("commitlog")["syncs"]
            for number in range(count):
                section = Section("t", 0, 1, number=1, fence=True, repeats_ms=AN_HOUR_MS)
                command = SendMessages([section], int(time.time() * 1000), sender=100 + number)
                pending.append(broker.commitlog.request(command, [encoded(b"%d" % number)]))
            assert broker.statistics("commitlog")["syncs"] == before  # all are stored already
        results = []
        for each in pending:
            assert broker.commitlog.wait(each, WAIT_S)
            results.append(result_of(each))
        assert [each.code for each in results] == [0] * count
        assert sorted(each.queue_offset for each in results) == list(range(1, count + 1))
        assert broker.statistics("commitlog")["syncs"] - before <= count // 4
        bodies = [each.body for each in broker.read_queue("t", 0, count + 1)]
        assert bodies == [b"before", *(b"%d" % number for number in range(count))]
