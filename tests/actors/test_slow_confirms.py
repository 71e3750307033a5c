"""A group that confirms slowly: records that it stored without an answer are not stored again."""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from family import encode_batch, read_queue
from patience import patient
from scripted_ha import ALL, Replica
from waiting import until

from cometmq.actors.tables.retries import retry_topic
from cometmq.client import Admin, Consumer, Message, Producer, Reject, Retry
from cometmq.client.receiving.membership import Membership
from cometmq.protocol.commands import (
    CommitOffsets,
    GiveBackMessages,
    GivenBack,
    MessagesGivenBack,
    PopMessages,
    PoppedMessages,
    PutGroup,
    QueueOffset,
    Section,
    SendMessages,
    SendResult,
)
from cometmq.protocol.errors import NotConfirmed
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.ledger_log import LedgerLog
from cometmq.shm.reading.store_reader import StoreReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_S = patient(90)
COUNT = 20
REFUSALS = 3  # unconfirmed attempts before the one that is confirmed


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    """Run the master of a group, with messages in a topic."""
    settings = {"slaveTimeout": 200, "messageDelayLevel": "1s 1s 1s 1s 1s"}
    with Replica(tmp_path / "store", settings) as replica:
        replica.run(1)
        replica.create_topic("t", 1)
        yield replica


def freeze(replica: Replica) -> None:
    """Stop confirmations."""
    replica.tell(confirm=replica.counter(Counter.REPLICATED))


def thaw(replica: Replica) -> None:
    replica.tell(confirm=ALL)


def bodies(replica: Replica, topic: str, at_least: int) -> Tally[bytes]:
    """Count the bodies in a topic, once it has so many and the records written so far are in their
    queues: a last message that is sent now is dispatched."""
    found = read_queue(replica.reader, topic, 0, at_least)
    end = replica.send("t", 0, [b"the last"])[0].queue_offset
    read_queue(replica.reader, "t", 0, end + 1)
    return Tally(each.body for each in read_queue(replica.reader, topic, 0, len(found)))


def once(count: int = COUNT) -> Tally[bytes]:
    return Tally(b"%d" % number for number in range(count))


def again_until_kept(give_back: Callable[[], Sequence[int]], replica: Replica) -> None:
    """Retry like a client; the first attempts are not confirmed."""
    freeze(replica)
    for _ in range(REFUSALS):
        try:
            codes = give_back()
        except NotConfirmed:
            continue
        assert {*codes} == {NotConfirmed.code}, codes
    thaw(replica)
    deadline = time.monotonic() + WAIT_S
    codes = [-1]
    while any(codes):
        assert time.monotonic() < deadline, codes
        with suppress(NotConfirmed):
            codes = list(give_back())


def ask_back(replica: Replica, group: str, messages: list[GivenBack], most: int = -1) -> list[int]:
    command = GiveBackMessages(group, messages, most)
    answer = replica.coordinator.ask(command, timeout_s=WAIT_S)[0]
    assert isinstance(answer, MessagesGivenBack)
    return answer.codes


@pytest.mark.parametrize("level", [0, -1], ids=["retry", "dead letter"])
def test_a_copy_is_stored_once(replica: Replica, level: int) -> None:
    """Fault 16: one copy of each pulled message, also if a retry groups them in other commands."""
    replica.send("t", 0, [b"%d" % number for number in range(COUNT)])
    stored = read_queue(replica.reader, "t", 0, COUNT)
    given = [GivenBack("t", 0, each.queue_offset, each.physical_offset, level) for each in stored]
    rounds = 0

    def give_back() -> list[int]:
        nonlocal rounds
        rounds += 1
        middle = rounds % COUNT
        return ask_back(replica, "g", given[middle:]) + ask_back(replica, "g", given[:middle])

    again_until_kept(give_back, replica)
    topic = "%DLQ%g" if level < 0 else "%RETRY%g"
    assert bodies(replica, topic, COUNT) == once()


def test_a_message_that_comes_back_later_is_another_attempt(replica: Replica) -> None:
    """Fault 16: an attempt ends with its confirmation. A message that is given back later, as by a
    member that went back in its queue, is stored again."""
    replica.send("t", 0, [b"0"])
    (stored,) = read_queue(replica.reader, "t", 0, 1)
    given = [GivenBack("t", 0, 0, stored.physical_offset)]
    again_until_kept(lambda: ask_back(replica, "g", given), replica)
    assert ask_back(replica, "g", given) == [0]
    assert bodies(replica, "%RETRY%g", 2) == {b"0": 2}


def test_a_run_gives_back_once(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 16: one copy of each message for which a handler raises Retry or Reject."""
    refused = 0
    kept: set[int] = set()  # queue offsets
    give_back = Membership.give_back

    def counted(self: Membership, messages: list[GivenBack], *more: Any) -> list[int]:
        nonlocal refused
        try:
            codes = give_back(self, messages, *more)
        except NotConfirmed:
            refused += 1
            raise
        refused += any(codes)
        kept.update(
            each.queue_offset for each, code in zip(messages, codes, strict=True) if not code
        )
        return codes

    monkeypatch.setattr(Membership, "give_back", counted)
    send(replica, [b"retried", b"rejected", *once()])
    frozen, done = threading.Event(), threading.Event()
    again: set[bytes] = set()
    here: Tally[bytes] = Tally()

    def handle(message: Message) -> None:
        if message.stored_topic == "t":
            here[message.body] += 1
        else:
            again.add(message.body)
            if message.body == b"retried":  # its topics exist
                freeze(replica)
                frozen.set()
            if len(again) == 1 + COUNT // 2:
                done.set()
            return
        if message.body in (b"retried", b"rejected"):
            raise Retry if message.body == b"retried" else Reject
        assert frozen.wait(WAIT_S)
        raise Reject if int(message.body) % 2 else Retry

    with Consumer(replica.ready.name_server, "g", "t") as consumer:
        thread = threading.Thread(target=consumer.run, args=(handle,), kwargs={"concurrency": 64})
        thread.start()
        assert frozen.wait(WAIT_S)
        until(lambda: refused >= 1)
        thaw(replica)
        assert done.wait(WAIT_S)
        until(lambda: len(kept) == 2 + COUNT)
        consumer.close()
        thread.join()
    assert set(here.values()) == {
        1
    }  # a copy that may be stored is requested again before its message counts as done
    dead = bodies(replica, "%DLQ%g", 1 + COUNT // 2)
    assert dead == {b"rejected": 1} | {b"%d" % number: 1 for number in range(1, COUNT, 2)}
    assert bodies(replica, "%RETRY%g", 1 + COUNT // 2) == {b"retried": 1} | {
        b"%d" % number: 1 for number in range(0, COUNT, 2)
    }


def send(replica: Replica, all_bodies: Sequence[bytes]) -> None:
    with Producer(replica.ready.name_server, timeout_s=WAIT_S) as producer:
        for body in all_bodies:
            producer.send("t", body).wait()


@pytest.mark.parametrize("level", [0, -1], ids=["retry", "dead letter"])
def test_what_was_popped_is_given_back_once(replica: Replica, level: int) -> None:
    """Fault 16: one copy, given back by the consumer or by the invisibility timeout."""
    replica.send("t", 0, [b"%d" % number for number in range(COUNT)])
    command = PopMessages("g", "t", COUNT, 5_000, WAIT_S * 1_000)
    popped: list[GivenBack] = []
    deadline = time.monotonic() + WAIT_S
    while len(popped) < COUNT:
        assert time.monotonic() < deadline
        answer = replica.coordinator.ask(command, timeout_s=WAIT_S)[0]
        assert isinstance(answer, PoppedMessages)
        for each in answer.popped:
            found = read_queue(replica.reader, "t", 0, each.queue_offset + each.count)
            popped += [
                GivenBack("t", 0, at, found[at].physical_offset, level, handle=each.handle)
                for at in range(each.queue_offset, each.queue_offset + each.count)
            ]
    freeze(replica)
    for _ in range(REFUSALS):
        with suppress(NotConfirmed):
            assert {*ask_back(replica, "g", popped)} == {NotConfirmed.code}
    thaw(replica)  # no more commands: their invisibility ends
    retry = retry_topic("g", popped[0], popped=True)
    assert bodies(replica, "%DLQ%g" if level < 0 else retry, COUNT) == once()


def test_what_is_rejected_in_order_is_a_dead_letter_once(replica: Replica) -> None:
    """Fault 16: one dead letter, although the next attempt has a new handle from a new pop. An
    attempt that is not confirmed may count all the same, so the group's offset tells the end."""
    replica.send("t", 0, [b"0"])
    (stored,) = read_queue(replica.reader, "t", 0, 1)
    handles: list[int] = []
    with Admin(replica.ready.name_server) as admin:

        def is_done() -> bool:
            offsets = {(each.topic, each.queue_offset) for each in admin.describe_group("g").queues}
            return ("t", 1) in offsets

        def reject() -> bool:
            command = PopMessages("g", "t", 1, 500, 1_000, orderly=True)
            with suppress(NotConfirmed):
                answer = replica.coordinator.ask(command, timeout_s=WAIT_S)[0]
                assert isinstance(answer, PoppedMessages)
                for popped in answer.popped:
                    if not handles:
                        freeze(replica)
                    handles.append(popped.handle)
                    given = GivenBack("t", 0, 0, stored.physical_offset, -1, handle=popped.handle)
                    ask_back(replica, "g", [given])
            if handles:
                replica.until_logged("1 messages are not given back")
            thaw(replica)
            return is_done()

        until(reject)
    assert len({*handles}) == len(handles) > 1
    assert bodies(replica, "%DLQ%g", 1) == {b"0": 1}


def test_a_section_that_waits_for_nothing_is_not_late(replica: Replica) -> None:
    """Fault 30: a section without acks has its own code, beside one that waits for acks."""
    sections = [Section("t", 0, 1, wait=wait) for wait in (True, False, True)]
    command = SendMessages(sections, int(time.time() * 1000))
    freeze(replica)
    answer, _ = replica.commitlog.ask(command, [encode_batch([b"x"])] * 3, timeout_s=WAIT_S)
    thaw(replica)
    assert isinstance(answer, SendResult)
    late = NotConfirmed.code
    assert [each.code for each in answer.results] == [late, 0, late]
    assert [bool(each.text) for each in answer.results] == [True, False, True]
    assert [each.queue_offset for each in answer.results] == [0, 1, 2]


def test_a_reply_is_stored_once(replica: Replica) -> None:
    """Fault 16: one reply, although its replier receives NotConfirmed and sends it again."""
    names = replica.ready.name_server
    warm = Consumer(names, None, transport="zmq")
    with (
        warm,
        Producer(names, timeout_s=WAIT_S) as producer,
        ThreadPoolExecutor() as pool,
    ):
        warm.assign("t")
        for number in range(2):
            asked = pool.submit(producer.request, "t", b"%d" % number, timeout_s=WAIT_S)
            (message,) = poll(warm)
            if number:
                freeze(replica)
                with pytest.raises(NotConfirmed):
                    message.reply(b"1", timeout_s=1)
                thaw(replica)
            message.reply(b"%d" % number, timeout_s=WAIT_S)
            assert asked.result().body == b"%d" % number
    assert bodies(replica, "DefaultCluster_REPLY_TOPIC", 2) == once(2)


def poll(consumer: Consumer) -> list[Message]:
    deadline = time.monotonic() + WAIT_S
    while not (found := consumer.poll(1, timeout_s=1)):
        assert time.monotonic() < deadline
    return found


def test_an_entry_of_the_ledger_is_stored_once(replica: Replica) -> None:
    """Fault 16: one record, rather than one for each attempt of which only the first counts."""
    ask = replica.coordinator.ask
    ask(PutGroup("g"), timeout_s=WAIT_S)
    freeze(replica)
    pending = replica.coordinator.request(CommitOffsets("g", [QueueOffset("t", 0, 7)], force=True))
    with pytest.raises(NotConfirmed):
        ask(CommitOffsets("g", [QueueOffset("t", 0, 8)], force=True), timeout_s=WAIT_S)
    thaw(replica)
    deadline = time.monotonic() + WAIT_S
    while True:
        assert time.monotonic() < deadline
        try:
            ask(CommitOffsets("g", [QueueOffset("t", 0, 9)], force=True), timeout_s=WAIT_S)
            break
        except NotConfirmed:
            continue
    assert replica.coordinator.wait(pending, WAIT_S)
    end = replica.send("t", 0, [b"the last"])[0].queue_offset
    read_queue(replica.reader, "t", 0, end + 1)
    replica.close()
    with closing(StoreReader.open_closed(replica.store)) as reader:
        entries = [body for _, body in LedgerLog(reader).entries(0)]
    assert len(entries) > 3
    assert len({*entries}) == len(entries)
