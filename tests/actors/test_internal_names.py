"""Internal topics and groups: no command of a client can change them (Fault 15)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cli_process
import msgspec
import pytest
from family import RunningBroker, encode_batch
from msgspec import inspect
from patience import patient

from cometmq import Admin, Consumer, PendingTransaction, PopConsumer, Producer
from cometmq.actors.runtime.access import ANYBODY, FAMILY, Doorman
from cometmq.actors.scheduling.revival import GROUP as REVIVE
from cometmq.actors.scheduling.revival import REVIVE_PREFIX
from cometmq.actors.tables.transactions import GROUP as TRANSACTIONS
from cometmq.protocol import names
from cometmq.protocol.commands import (
    COMMANDS,
    EVERY,
    Audience,
    AwaitChecks,
    CloneOffsets,
    Command,
    CommitOffsets,
    CreateTopic,
    CreateTopics,
    DeleteGroup,
    DeleteTopic,
    DescribeGroup,
    EnsureTopic,
    FetchOffsets,
    GetLine,
    GroupDescription,
    GroupOffsets,
    JoinGroup,
    Need,
    On,
    PopMessages,
    PullMessages,
    PullResult,
    PutGroup,
    QueueKey,
    QueueOffset,
    QueueReset,
    ResetOffsets,
    Right,
    Section,
    SendMessages,
    SendResult,
    Subscription,
    TopicInfo,
    TopicsCreated,
)
from cometmq.protocol.derived import DERIVED_TOPIC
from cometmq.protocol.errors import NameIllegal
from cometmq.protocol.ledger import LEDGER_TOPIC
from cometmq.protocol.names import DELAY_TOPIC, HALF_TOPIC, OP_TOPIC, TIMER_TOPIC
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.os.processes import boot_id

WAIT_S = patient(60)
OUTSIDE = Audience.CLIENT, Audience.ADMINISTRATOR
GROUPS = (TRANSACTIONS, REVIVE, "CID_RMQ_SYS_X", "TOOLS_CONSUMER", "CID_ONSAPI_PULL", "SELF_TEST_C")
TOPICS = (
    DELAY_TOPIC, HALF_TOPIC, OP_TOPIC, TIMER_TOPIC, LEDGER_TOPIC, DERIVED_TOPIC,
    f"{REVIVE_PREFIX}DefaultCluster", f"%RETRY%{TRANSACTIONS}", f"%DLQ%{REVIVE}",
    f"%RETRY%{REVIVE}+t", "%RETRY%TOOLS_CONSUMER", "%RETRY%TOOLS_CONSUMER+t",
)  # fmt: skip
OF_USERS = (
    "t", "%RETRY%g", "%DLQ%g", "%RETRY%g+t", "%RETRY%TOOLS_CONSUMERS", "RMQ_SYS_TRACE_TOPIC",
    "DefaultCluster_REPLY_TOPIC", "CID_RMQ_SYS_TRANS", "RMQ_SYS_X", "rmq_sy",
)  # fmt: skip


def sample(kind: inspect.Type, path: str, field: str, name: str) -> Any:
    """Return a value of that type, with the name in the given field and "x" in all others."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(
                *(sample(each.type, f"{path}.{each.name}".lstrip("."), field, name)
                  for each in fields)
            )  # fmt: skip
        case inspect.ListType(item_type=item):
            plain = sample(item, path, "", name)
            return [plain, sample(item, path, field, name), plain]
        case inspect.DictType():
            return {}
        case inspect.StrType():
            return name if path == field else "x"
        case inspect.BoolType():
            return False
    return 0


def cases() -> Iterator[tuple[type[Command], Need]]:
    for kind in COMMANDS:
        if kind.access.audience in OUTSIDE:
            for need in kind.access.needs:
                named = need.on in (On.TOPIC, On.GROUP) and need.field != EVERY
                if named and not need.itemwise:
                    yield kind, need


def is_refused(need: Need, name: str) -> bool:
    """Return whether a need implies that this name is refused."""
    if need.right is Right.DESCRIBE:
        return False
    if need.on is On.GROUP:
        return name in GROUPS
    if need.right is Right.READ:
        return name in (LEDGER_TOPIC, DERIVED_TOPIC)
    return name in TOPICS


@pytest.mark.parametrize(
    ("kind", "need"), [*cases()], ids=lambda each: getattr(each, "__name__", None) or each.field
)
def test_every_command_by_its_declaration(kind: type[Command], need: Need) -> None:
    doorman = Doorman("an actor", [kind])
    for name in (*GROUPS, *TOPICS, *OF_USERS):
        command = sample(inspect.type_info(kind), "", need.field, name)
        doorman.admit(command, FAMILY)  # the broker's own processes are admitted
        others = [
            each for each in kind.access.needs
            if each.field == need.field and each.on is need.on
        ]  # fmt: skip
        if any(is_refused(each, name) for each in others):
            with pytest.raises(NameIllegal, match="is the broker's own"):
                doorman.admit(command, ANYBODY)
        else:
            doorman.admit(command, ANYBODY)


def test_it_covers_what_there_is() -> None:
    """The declared needs are not empty: otherwise the test above would check nothing."""
    found = {(kind.__name__, need.on) for kind, need in cases() if need.right is not Right.DESCRIBE}
    assert {
        ("CommitOffsets", On.GROUP), ("ResetOffsets", On.GROUP), ("CloneOffsets", On.GROUP),
        ("PutGroup", On.GROUP), ("DeleteGroup", On.GROUP), ("JoinGroup", On.GROUP),
        ("LeaveGroup", On.GROUP), ("PopMessages", On.GROUP), ("AckPopped", On.GROUP),
        ("ChangeInvisible", On.GROUP), ("StopPopping", On.GROUP), ("GiveBackMessages", On.GROUP),
        ("EndTransactions", On.GROUP), ("AwaitChecks", On.GROUP), ("StageMessages", On.GROUP),
        ("StageMessages", On.TOPIC), ("SendReply", On.TOPIC),
        ("CreateTopic", On.TOPIC), ("DeleteTopic", On.TOPIC),
        ("EnsureTopic", On.TOPIC), ("EndTransactions", On.TOPIC), ("PullMessages", On.TOPIC),
    } <= found  # fmt: skip
    itemwise = {
        kind.__name__ for kind in COMMANDS if any(each.itemwise for each in kind.access.needs)
    }
    assert itemwise == {"SendMessages", "CreateTopics"}  # whose handlers are tested below


@pytest.mark.parametrize("name", OF_USERS)
def test_names_of_users(name: str) -> None:
    assert not names.is_internal_topic(name)


# --- a broker ---


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    store: Path = tmp_path_factory.mktemp("own") / "store"
    settings = {"transactionTimeOut": 1_000, "transactionCheckInterval": 1_000}
    with RunningBroker(store, settings) as found:
        found.create_topic("t", 2)
        yield found


def server(broker: RunningBroker) -> str:
    return broker.ready.name_server


def committed(broker: RunningBroker, topic: str) -> int:
    """Return the offset that the broker's transaction group has committed."""
    command = FetchOffsets(TRANSACTIONS, [QueueKey(topic, 0)])
    with Channel(broker.endpoints.coordinator) as channel:
        answer, _ = channel.ask(command, timeout_s=WAIT_S)
    assert isinstance(answer, GroupOffsets)
    return answer.offsets[0].queue_offset


def sent(commitlog: Channel, *sections: Section) -> list[int]:
    """Send the sections and return the code of each."""
    batches = [encode_batch([b"x"]) for _ in sections]
    answer, _ = commitlog.ask(SendMessages([*sections], 0), batches, timeout_s=WAIT_S)
    assert isinstance(answer, SendResult)
    return [each.code for each in answer.results]


def refused_text(ask: Callable[[], object]) -> str:
    with pytest.raises(NameIllegal, match="is the broker's own") as caught:
        ask()
    return str(caught.value)


def test_pending_transactions_are_asked_for_whatever_clients_commit(broker: RunningBroker) -> None:
    """A reset of the transaction group is refused; it used to lose pending transactions."""
    pending = threading.Event()
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def checker(found: PendingTransaction) -> bool | None:
        if not pending.is_set():
            return None
        asked.put(found.properties["id"])
        return True

    with Producer(server(broker), name="shop", checker=checker) as producer, \
            Admin(server(broker)) as admin:  # fmt: skip
        transaction = producer.transaction("t", b"one", properties={"id": "one"})
        transaction.__enter__()
        producer._transactions.open.clear()  # as if this process had died
        for topic in (HALF_TOPIC, OP_TOPIC):
            before = committed(broker, topic)
            assert "CID_RMQ_SYS_TRANS is the broker's own" in refused_text(
                lambda: admin.reset_offsets(TRANSACTIONS, topic, "latest")  # noqa: B023
            )
            refused_text(lambda: admin.shift_offsets(TRANSACTIONS, topic, 1))  # noqa: B023
            commit = CommitOffsets(TRANSACTIONS, [QueueOffset(topic, 0, 9)], force=True)
            with Channel(broker.endpoints.coordinator) as channel:
                refused_text(lambda: channel.ask(commit, timeout_s=WAIT_S))  # noqa: B023
            assert committed(broker, topic) == before
        with Channel(broker.endpoints.coordinator) as channel:
            reset = QueueReset(HALF_TOPIC, 0, 1)
            for command in (
                ResetOffsets(TRANSACTIONS, [reset]), CloneOffsets("g", TRANSACTIONS, [HALF_TOPIC]),
                DeleteGroup(TRANSACTIONS, force=True), PutGroup(REVIVE),
                JoinGroup(TRANSACTIONS, "m", [Subscription("t")]),
                PopMessages(TRANSACTIONS, "t"), AwaitChecks(TRANSACTIONS, 0),
            ):  # fmt: skip
                refused_text(lambda: channel.ask(command, timeout_s=WAIT_S))  # noqa: B023
        refused_text(lambda: admin.delete_group(TRANSACTIONS, force=True))
        refused_text(lambda: admin.update_group(TRANSACTIONS, {"consumeEnable": False}))
        refused_text(lambda: admin.create_group(REVIVE))
        refused_text(lambda: admin.clone_offsets("g", TRANSACTIONS, ["t"]))
        pending.set()
        assert asked.get(timeout=WAIT_S) == "one"


@pytest.mark.parametrize("is_near", [False, True])
def test_commits_of_internal_groups_are_refused(broker: RunningBroker, is_near: bool) -> None:
    """Also many of them in one poll batch, and by a local connection."""
    topic = HALF_TOPIC
    line = broker.endpoints.coordinator
    with Producer(server(broker), name="runs", checker=lambda _found: True) as producer:
        deadline = time.monotonic() + WAIT_S
        while committed(broker, topic) < 1:  # the broker itself commits for this group
            assert time.monotonic() < deadline
            with producer.transaction("t", b"one"):
                pass
    far = 1_000_000
    commit = CommitOffsets(TRANSACTIONS, [QueueOffset(topic, 0, far)])
    asks = GetLine(boot_id(), is_stream=True) if is_near else None
    with Channel(line, line_request=asks) as channel:
        if is_near:
            channel.open_line(WAIT_S)
        asked = [channel.request(commit) for _ in range(64)]
        for each in asked:
            assert channel.wait(each, WAIT_S)
            with pytest.raises(NameIllegal):
                each.result()
    assert committed(broker, topic) < far


@pytest.mark.parametrize("topic", TOPICS)
def test_topics_of_its_own(broker: RunningBroker, topic: str) -> None:
    ends = broker.endpoints
    section = Section(topic, 0, 1)
    with Channel(ends.coordinator) as coordinator, Channel(ends.commitlog) as commitlog:
        for command in (
            EnsureTopic(topic), CreateTopic(TopicInfo(topic)), CreateTopic(TopicInfo(topic), 2),
            DeleteTopic(topic),
        ):  # fmt: skip
            refused_text(lambda: coordinator.ask(command, timeout_s=WAIT_S))  # noqa: B023
        many = CreateTopics([TopicInfo("another"), TopicInfo(topic), TopicInfo("t", 2, 2)])
        created, _ = coordinator.ask(many, timeout_s=WAIT_S)
        assert isinstance(created, TopicsCreated)
        assert [(each.topic, each.code) for each in created.refused] == [(topic, NameIllegal.code)]
        assert sent(commitlog, section, Section("t", 0, 1)) == [NameIllegal.code, 0]
        assert sent(commitlog, Section(topic, 0, 1, delay_level=1)) == [NameIllegal.code]
        half = msgspec.structs.replace(section, producer_group="shop")
        assert sent(commitlog, half) == [NameIllegal.code]
    with Producer(server(broker)) as producer:
        refused_text(lambda: producer.send(topic, b"x"))


@pytest.mark.parametrize("group", GROUPS)
def test_groups_of_its_own(broker: RunningBroker, group: str) -> None:
    refused_text(lambda: Consumer(server(broker), group, "t"))
    refused_text(lambda: PopConsumer(server(broker), group, "t"))
    refused_text(lambda: Producer(server(broker), name=group, checker=lambda _found: True))
    with Channel(broker.endpoints.commitlog) as commitlog:
        section = msgspec.structs.replace(Section("t", 0, 1), producer_group=group)
        assert sent(commitlog, section, Section("t", 0, 1)) == [NameIllegal.code, 0]


def test_operators_see_them(broker: RunningBroker) -> None:
    """Internal topics that are not hidden can be read, and the progress of the broker in them."""
    with Producer(server(broker)) as producer:
        producer.send("t", b"later", deliver_after=3_600)
    ends = broker.endpoints
    with Channel(ends.coordinator) as channel:
        queues = [QueueKey(HALF_TOPIC, 0)]
        answer, _ = channel.ask(FetchOffsets(TRANSACTIONS, queues), timeout_s=WAIT_S)
        assert isinstance(answer, GroupOffsets)
        described, _ = channel.ask(DescribeGroup(TRANSACTIONS), timeout_s=WAIT_S)
        assert isinstance(described, GroupDescription)
    with Channel(ends.readers[0]) as channel:
        pulled, _ = channel.ask(PullMessages(TIMER_TOPIC, 0, 0), timeout_s=WAIT_S)
        assert isinstance(pulled, PullResult)
        assert pulled.max_queue_offset > 0
        for hidden in (LEDGER_TOPIC, DERIVED_TOPIC):
            refused_text(lambda: channel.ask(PullMessages(hidden, 0, 0)))  # noqa: B023


def test_the_command_line_says_so(broker: RunningBroker) -> None:
    words = ("group", "reset", TRANSACTIONS, "--topic", HALF_TOPIC, "--to", "latest")
    found = cli_process.run(*words, "--name-server", server(broker))
    assert found.returncode
    assert f"group {TRANSACTIONS} is the broker's own" in found.stderr.decode()
