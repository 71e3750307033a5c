"""No client and no actor stores a message in a queue that its topic does not have (Fault 3)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from coordinator_child import (
    INSIDE,
    FakeCommitlog,
    Settings,
    address_of,
    endpoints_at,
    ledger_of,
    running,
)
from family import RunningBroker, encode_batch
from patience import patient
from waiting import until

from cometmq import Admin, Consumer, Message, PopConsumer, Producer, Reject, Retry, errors
from cometmq.actors.coordination.coordinator import CoordinatorActor
from cometmq.protocol.commands import (
    ChangeMode,
    CloseStage,
    CommitStages,
    CreateTopic,
    EndpointsChanged,
    EndTransactions,
    EnsureTopic,
    GiveBackMessages,
    GivenBack,
    ListTopics,
    MessagesGivenBack,
    Section,
    StageMessages,
    TopicInfo,
    TopicList,
    TransactionEnd,
    TransactionsEnded,
)
from cometmq.shm.live.queue_table import QueueRange

WAIT_S = patient(60)
SETTINGS = {"messageDelayLevel": "1s 1s 1s 1s"}
MANY = 48


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("queues") / "store", SETTINGS) as found:
        yield found


@pytest.fixture
def admin(broker: RunningBroker) -> Iterator[Admin]:
    with Admin(server(broker)) as found:
        yield found


def server(broker: RunningBroker) -> str:
    return broker.ready.name_server


def stored(broker: RunningBroker, topic: str) -> list[Message]:
    """Return all messages in the topic, from all queues."""
    with Admin(server(broker)) as admin:
        found = [each.queue_id for each in admin.describe_topic(topic).queues]
    return [message for each in found for message in broker.read_queue(topic, each)]


def check_queues(broker: RunningBroker, topic: str, queues: int, count: int) -> None:
    """Wait for `count` messages; all must be in the first `queues` queues."""
    until(lambda: len(stored(broker, topic)) >= count, says=f"{count} messages in {topic}")
    assert len(stored(broker, topic)) == count
    assert {message.queue_id for message in stored(broker, topic)} <= set(range(queues))


@contextmanager
def handling(
    consumer: Consumer | PopConsumer, handler: Callable[[Message], object]
) -> Iterator[None]:
    thread = threading.Thread(target=consumer.run, args=(handler,))
    thread.start()
    try:
        yield
    finally:
        consumer.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


# --- retries ---


@pytest.mark.parametrize("pops", [False, True])
@pytest.mark.parametrize("again", [1, 3])
def test_retries_come_after_more_retry_queues(
    broker: RunningBroker, admin: Admin, pops: bool, again: int
) -> None:
    """All retries are redelivered; 36 to 41 of 48 were not, even after the setting was 1 again."""
    topic = group = f"more-{pops}-{again}"
    admin.create_topic(topic, 1)
    attempts: Counter[bytes] = Counter()
    done: set[bytes] = set()

    def handler(message: Message) -> None:
        attempts[message.body] += 1
        if message.body != b"first" and attempts[message.body] <= again:
            raise Retry(after=1)
        if message.body == b"first" and attempts[message.body] == 1:
            raise Retry(after=1)
        done.add(message.body)

    kind = PopConsumer if pops else Consumer
    with (
        Producer(server(broker)) as producer,
        handling(kind(server(broker), group, topic), handler),
    ):
        producer.send(topic, b"first")
        until(lambda: b"first" in done, says="its retry topic is there")
        admin.update_group(group, {"retryQueueNums": 4})
        bodies = [b"%d" % number for number in range(MANY)]
        producer.send_many(topic, bodies)
        until(lambda: len(done) == MANY + 1, says="all came again")
        admin.update_group(group, {"retryQueueNums": 1})
        producer.send(topic, b"last")
        until(lambda: b"last" in done, says="with one again")
    until(lambda: admin.describe_group(group).lag == 0, says="no lag is left")
    retry_topic = f"%RETRY%{group}_{topic}" if pops else f"%RETRY%{group}"
    queues = admin.describe_topic(retry_topic).read_queues
    assert queues == 4
    assert {message.queue_id for message in stored(broker, retry_topic)} <= set(range(queues))


def test_a_retry_waits_while_its_topic_gets_fewer_queues(
    broker: RunningBroker, admin: Admin
) -> None:
    topic = group = "fewer"
    admin.create_topic(topic, 1)
    admin.create_group(group, {"retryQueueNums": 8})
    broker.coordinator.ask(EnsureTopic(f"%RETRY%{group}"), timeout_s=WAIT_S)
    assert admin.describe_topic(f"%RETRY%{group}").read_queues == 8
    with Producer(server(broker)) as producer:
        receipts = producer.send_many(topic, [b"%d" % number for number in range(MANY)])
    placed = broker.read_queue(topic, 0, len(receipts))
    given = [
        GivenBack(topic, 0, message.queue_offset, message.physical_offset, 2) for message in placed
    ]
    answer, _ = broker.coordinator.ask(GiveBackMessages(group, given), timeout_s=WAIT_S)
    assert isinstance(answer, MessagesGivenBack)
    assert not any(answer.codes)
    admin.update_topic(f"%RETRY%{group}", 2)
    check_queues(broker, f"%RETRY%{group}", 2, MANY)


def test_dead_letters(broker: RunningBroker, admin: Admin) -> None:
    """Dead letters are stored in the first queue, which every topic has."""
    topic = group = "dead"
    admin.create_topic(topic, 1)

    def handler(message: Message) -> None:
        raise Reject

    with Producer(server(broker)) as producer:
        producer.send(topic, b"x")
        with handling(Consumer(server(broker), group, topic), handler):
            until(lambda: f"%DLQ%{group}" in admin.topics(), says="it is dead")
            check_queues(broker, f"%DLQ%{group}", 1, 1)


# --- delayed messages ---


@pytest.mark.parametrize("way", ["update", "delete", "made anew"])
@pytest.mark.parametrize("kind", ["level", "timer"])
def test_what_waits_while_its_topic_gets_fewer_queues(
    broker: RunningBroker, admin: Admin, kind: str, way: str
) -> None:
    topic = f"waits-{kind}-{way.replace(' ', '-')}"
    admin.create_topic(topic, 8)
    options = {"delay_level": 1} if kind == "level" else {"deliver_after": 1.5}
    with Producer(server(broker)) as producer:
        for queue_id in range(8):
            producer.send(topic, b"%d" % queue_id, queue_id=queue_id, **options)
    if way == "update":
        admin.update_topic(topic, 3)
    else:
        admin.delete_topic(topic)
        if way == "made anew":
            admin.create_topic(topic, 3)
    until(lambda: delivered(broker, topic) == 8, says="all are delivered")
    if way == "delete":
        admin.create_topic(topic, 1)
    queues = 1 if way == "delete" else 3
    check_queues(broker, topic, queues, 8)
    with Consumer(server(broker), f"reads-{topic}", topic) as consumer:
        bodies: set[bytes] = set()

        def has_all() -> bool:
            bodies.update(message.body for message in consumer.poll(100, timeout_s=1))
            return len(bodies) == 8

        until(has_all, says="a group has all")


def delivered(broker: RunningBroker, topic: str) -> int:
    """Return the number of messages in the topic's queues, also if the topic does not exist."""
    return sum(len(broker.read_queue(topic, queue_id)) for queue_id in range(8))


@pytest.mark.parametrize("keeps_one", [False, True])
def test_a_transaction_is_committed_after_its_topic_got_fewer_queues(
    broker: RunningBroker, admin: Admin, keeps_one: bool
) -> None:
    topic = f"halves-{keeps_one}"
    admin.create_topic(topic, 8)
    ends = []
    with Producer(server(broker), name="shop") as producer:
        for queue_id in range(8):
            transaction = producer.transaction(topic, b"%d" % queue_id, queue_id=queue_id)
            transaction.__enter__()
            producer._transactions.open.clear()  # as if this process had died
            ends.append(TransactionEnd(transaction.id, True, transaction._parts))
    # All ends by one native call, or one by one.
    admin.update_topic(topic, 3)
    groups = [ends] if not keeps_one else [[each] for each in ends]
    for some in groups:
        answer, _ = broker.commitlog.ask(EndTransactions.of("shop", some), timeout_s=WAIT_S)
        assert isinstance(answer, TransactionsEnded)
        assert not any(answer.codes)
    check_queues(broker, topic, 3, 8)
    offsets = [(message.queue_id, message.queue_offset) for message in stored(broker, topic)]
    assert len(set(offsets)) == 8


def test_stages_are_committed_after_their_topic_got_fewer_queues(
    broker: RunningBroker, admin: Admin
) -> None:
    topic = "staged"
    admin.create_topic(topic, 8)
    line = broker.commitlog
    for queue_id in range(8):
        section = Section(topic, queue_id, 2)
        batch = encode_batch([b"a%d" % queue_id, b"b%d" % queue_id])
        line.ask(StageMessages("sink", 1, "s", queue_id, [section], 1), [batch], timeout_s=WAIT_S)
    line.ask(CloseStage("sink", 1, "s", 8), timeout_s=WAIT_S)
    admin.update_topic(topic, 3)
    for _ in range(2):  # the command may be repeated
        line.ask(CommitStages("sink", 1, ["s"]), timeout_s=WAIT_S)
    check_queues(broker, topic, 3, 16)


# --- fewer queues while messages arrive ---


def test_fewer_queues_are_taken_back_for_what_comes_meanwhile(tmp_path: Path) -> None:
    """A message that is stored between the check of the queues and their removal restores them."""
    known = {3: QueueRange(0, 0)}
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 2:
            known[3] = QueueRange(0, 1)

    commitlog = FakeCommitlog.start()
    with running(commitlog):
        actor = CoordinatorActor.start(
            Settings(),
            tmp_path,
            commitlog_endpoint=address_of(commitlog),
            ledger_log=ledger_of(address_of(commitlog)),
            name_server_endpoints=[],
            stored=lambda _topic: known,
            wait_dispatched=look,
            bind=INSIDE,
        )
        with running(actor) as line:
            line.ask(EndpointsChanged(endpoints_at(address_of(actor))))
            line.ask(CreateTopic(TopicInfo("t", 4, 4)))
            with pytest.raises(errors.MessagesUnread, match="1 messages in queues 3"):
                line.ask(CreateTopic(TopicInfo("t", 2, 2), ChangeMode.UPDATE))
            assert len(looks) == 2
            line.ask(EnsureTopic("t"))
            assert infos(line.ask(ListTopics()))["t"] == TopicInfo("t", 4, 4)
            known[3] = QueueRange(1, 1)  # the message has expired
            line.ask(CreateTopic(TopicInfo("t", 2, 2), ChangeMode.UPDATE))
            assert infos(line.ask(ListTopics()))["t"] == TopicInfo("t", 2, 2)


def infos(answer: object) -> dict[str, TopicInfo]:
    assert isinstance(answer, TopicList)
    return {each.topic: each for each in answer.topics}
