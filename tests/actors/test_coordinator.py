"""The coordinator, through its socket, with a commitlog process and name servers beside it."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pykka
import pytest
import zmq
from coordinator_child import (
    ANYWHERE,
    INSIDE,
    Child,
    FakeCommitlog,
    Settings,
    address_of,
    coordinator,
    endpoints_at,
    ledger_of,
    running,
)
from patience import patient

from cometmq.actors.coordination.coordinator import CoordinatorActor
from cometmq.actors.coordination.files import MemberTable
from cometmq.actors.coordination.members import SUBSCRIPTIONS_MAX
from cometmq.actors.coordination.namesrv import NameServerActor
from cometmq.actors.runtime import service
from cometmq.actors.runtime.access import FAMILY
from cometmq.actors.runtime.gate import Gate
from cometmq.actors.runtime.inbox import Drained
from cometmq.actors.runtime.request import Payload, Request
from cometmq.actors.tables import group_pages
from cometmq.actors.tables.group_settings import settings_of
from cometmq.protocol.commands import (
    ChangeMode,
    Command,
    CommitOffsets,
    CreateTopic,
    DeleteTopic,
    DescribeGroup,
    Done,
    EndpointsChanged,
    EnsureTopic,
    Failed,
    FetchOffsets,
    Finish,
    GetRoute,
    GetStatistics,
    GroupDescription,
    GroupInfo,
    GroupList,
    GroupOffsets,
    GroupQueue,
    GroupShare,
    JoinGroup,
    LeaveGroup,
    ListGroups,
    ListTopics,
    Ping,
    Pong,
    QueueKey,
    QueueOffset,
    SendMessages,
    Statistics,
    Subscription,
    TopicInfo,
    TopicList,
    TopicRoute,
)
from cometmq.protocol.configs import SubscriptionGroupConfig
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    DiskFull,
    GroupNotExist,
    NameIllegal,
    NotConfirmed,
    NotOwner,
    OffsetIllegal,
    ServiceNotAvailable,
    ShuttingDown,
    SubscriptionIllegal,
    SystemBusy,
    TopicNotExist,
    UnknownCommand,
)
from cometmq.protocol.integers import INT64_MAX
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.protocol.wire.remote import RemoteRef
from cometmq.shm.live.control import Service
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.tables import ConsumerOffsetTable, TopicTable

DEAD = "tcp://127.0.0.1:1"


@pytest.fixture
def line(tmp_path: Path) -> Iterator[RemoteRef]:
    with coordinator(tmp_path) as line:
        yield line


def topics_at(line: RemoteRef) -> dict[str, TopicInfo]:
    answer = line.ask(ListTopics())
    assert isinstance(answer, TopicList)
    return {info.topic: info for info in answer.topics}


def offset_at(line: RemoteRef, topic: str = "t", queue_id: int = 0, group: str = "g") -> int:
    answer = line.ask(FetchOffsets(group, [QueueKey(topic, queue_id)]))
    assert isinstance(answer, GroupOffsets)
    return answer.offsets[0].queue_offset


def commit(
    line: RemoteRef, queue_offset: int, queue_id: int = 0, *, member: str = "", topic: str = "t"
) -> None:
    offsets = [QueueOffset(topic, queue_id, queue_offset)]
    assert line.ask(CommitOffsets("g", offsets, member)) == Done()


def join(line: RemoteRef, member: str = "m", **fields: Any) -> GroupShare:
    answer = line.ask(JoinGroup("g", member, [Subscription("t")], **fields))
    assert isinstance(answer, GroupShare)
    return answer


def epochs(share: GroupShare) -> dict[int, int]:
    return {key.queue_id: epoch for key, epoch in zip(share.queues, share.epochs, strict=True)}


def queue_ids(share: GroupShare) -> list[int]:
    return [entry.queue_id for entry in share.queues]


def offsets_in(store: Path) -> dict[str, dict[int, int]]:
    """As the file has them."""
    table = ConfigFile(store / "config" / "consumerOffset.json", ConsumerOffsetTable).load()
    return {} if table is None else table.offset_table


@contextmanager
def served(store: Path) -> Iterator[tuple[RemoteRef, Any]]:
    """A coordinator, and the commitlog process beside it, to be told what to refuse."""
    commitlog = FakeCommitlog.start()
    with running(commitlog):
        actor = CoordinatorActor.start(
            Settings(),
            store,
            commitlog_endpoint=address_of(commitlog),
            ledger_log=ledger_of(address_of(commitlog)),
            name_server_endpoints=[],
            bind=INSIDE,
        )
        with running(actor) as line:
            line.ask(EndpointsChanged(endpoints_at(address_of(actor))))
            yield line, commitlog.proxy()


class Answers:
    """Asks without waiting, over a line of its own."""

    def __init__(self, endpoint: str) -> None:
        self.channel = Channel(endpoint)
        self._answers: queue.Queue[Command | None] = queue.Queue()

    def ask(self, command: Command) -> Pending:
        return self.channel.request(command, on_done=lambda p: self._answers.put(p.answer))

    def next(self) -> Command | None:
        return self._answers.get(timeout=patient(60))

    @property
    def empty(self) -> bool:
        return self._answers.empty()


@contextmanager
def answers(line: RemoteRef) -> Iterator[Answers]:
    asked = Answers(line._channel.endpoint)
    try:
        yield asked
    finally:
        asked.channel.close()


# --- topics ---


def test_a_topic_is_created_with_the_defaults(line: RemoteRef, tmp_path: Path) -> None:
    route = line.ask(EnsureTopic("t"))
    assert isinstance(route, TopicRoute)
    assert [broker.info for broker in route.brokers] == [TopicInfo("t", 8, 8, 6)]
    assert route.brokers[0].endpoints.broker == "b"
    assert line.ask(EnsureTopic("t")) == route
    assert line.ask(Finish()) == Done()
    written = ConfigFile(tmp_path / "config" / "topics.json", TopicTable).load()
    assert written is not None
    assert set(written.topic_config_table) == {"t", "TBW102"}


def test_the_commitlog_process_hears_of_a_topic_before_the_client_does(tmp_path: Path) -> None:
    with running(commitlog := FakeCommitlog.start()):
        actor = CoordinatorActor.start(
            Settings(),
            tmp_path,
            commitlog_endpoint=address_of(commitlog),
            ledger_log=ledger_of(address_of(commitlog)),
            name_server_endpoints=[],
            bind=INSIDE,
        )
        with running(actor) as line:
            line.ask(EndpointsChanged(endpoints_at(address_of(actor))))
            line.ask(EnsureTopic("t"))
            told = commitlog.proxy().told.get()
            assert {info.topic for info in told[-1]} == {"t", "TBW102"}


def test_without_automatic_creation_an_unknown_topic_is_refused(tmp_path: Path) -> None:
    with coordinator(tmp_path, Settings(auto_create_topic_enable=True)):
        pass
    with coordinator(tmp_path, Settings(auto_create_topic_enable=False)) as line:
        assert topics_at(line) == {}  # not even TBW102 is left
        for topic in ("t", "TBW102"):
            with pytest.raises(TopicNotExist, match="autoCreateTopicEnable is off"):
                line.ask(EnsureTopic(topic))
        assert isinstance(line.ask(CreateTopic(TopicInfo("t"))), TopicRoute)
        assert isinstance(line.ask(EnsureTopic("t")), TopicRoute)


def test_the_template_topic_follows_the_settings(tmp_path: Path) -> None:
    with coordinator(tmp_path, Settings(default_topic_queue_nums=3)) as line:
        assert topics_at(line) == {"TBW102": TopicInfo("TBW102", 3, 3, 7)}
    with coordinator(tmp_path, Settings(default_topic_queue_nums=5)) as line:
        assert topics_at(line) == {"TBW102": TopicInfo("TBW102", 5, 5, 7)}


def test_create_change_and_delete_a_topic(line: RemoteRef) -> None:
    line.ask(CreateTopic(TopicInfo("t", 2, 2, 6)))
    route = line.ask(CreateTopic(TopicInfo("t", 4, 4, 4), ChangeMode.UPDATE))
    assert isinstance(route, TopicRoute)
    assert route.brokers[0].info == topics_at(line)["t"] == TopicInfo("t", 4, 4, 4)
    commit(line, 7)
    assert line.ask(DeleteTopic("t")) == Done()
    assert "t" not in topics_at(line)
    with pytest.raises(TopicNotExist):
        line.ask(DeleteTopic("t"))
    line.ask(CreateTopic(TopicInfo("t")))
    assert offset_at(line) == -1  # the new topic knows nothing of the old one


def test_a_changed_topic_keeps_what_only_rocketmq_knows(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "topics.json").write_text(
        '{"dataVersion":{"counter":7,"stateVersion":0,"timestamp":1},"topicConfigTable":{"t":{'
        '"attributes":{"message.type":"FIFO"},"order":true,"perm":6,"readQueueNums":1,'
        '"topicFilterType":"SINGLE_TAG","topicName":"t","topicSysFlag":0,"writeQueueNums":1}}}'
    )
    with coordinator(tmp_path) as line:
        line.ask(CreateTopic(TopicInfo("t", 2, 2, 6), ChangeMode.UPDATE))
        assert line.ask(Finish()) == Done()
    written = ConfigFile(config / "topics.json", TopicTable).load()
    assert written is not None
    topic = written.topic_config_table["t"]
    assert (topic.attributes, topic.order) == ({"message.type": "FIFO"}, True)
    assert (topic.read_queue_nums, topic.write_queue_nums) == (2, 2)
    assert written.data_version.counter == 9  # TBW102, and t


@pytest.mark.parametrize("name", ["", "../x", "a b", "t/0", "x" * 128, "SELF_TEST_TOPIC", "\x00"])
def test_bad_topic_names_are_refused(line: RemoteRef, name: str) -> None:
    for command in (EnsureTopic(name), CreateTopic(TopicInfo(name)), DeleteTopic(name)):
        with pytest.raises(NameIllegal):
            line.ask(command)
    assert set(topics_at(line)) == {"TBW102"}


@pytest.mark.parametrize(
    "info",
    [
        TopicInfo("t", 0, 1),
        TopicInfo("t", 1, -1),
        TopicInfo("t", 5000, 1),
        TopicInfo("t", 1, 1, 8),
        TopicInfo("t", 1, 1, -1),
    ],
)
def test_bad_topics_are_refused(line: RemoteRef, info: TopicInfo) -> None:
    with pytest.raises(BadRequest):
        line.ask(CreateTopic(info))


def test_the_template_topic_is_not_a_clients(line: RemoteRef) -> None:
    with pytest.raises(NameIllegal):
        line.ask(DeleteTopic("TBW102"))
    with pytest.raises(NameIllegal):
        line.ask(CreateTopic(TopicInfo("TBW102")))


def test_a_topic_that_cannot_be_kept_does_not_exist(tmp_path: Path) -> None:
    """Where the log takes nothing the file is written, and where that fails nothing has changed."""
    with served(tmp_path) as (line, commitlog):
        line.ask(EnsureTopic("old"))
        commitlog.refusal = DiskFull("full")
        blocked = tmp_path / "config" / "topics.json.tmp"
        blocked.mkdir(parents=True)
        with pytest.raises(ServiceNotAvailable, match=r"topics\.json.* cannot be written"):
            line.ask(EnsureTopic("t"))
        with pytest.raises(ServiceNotAvailable, match=r"topics\.json.* cannot be written"):
            line.ask(DeleteTopic("old"))
        assert set(topics_at(line)) == {"TBW102", "old"}
        blocked.rmdir()
        assert isinstance(line.ask(EnsureTopic("t")), TopicRoute)
        written = ConfigFile(tmp_path / "config" / "topics.json", TopicTable).load()
        assert written is not None
        assert set(written.topic_config_table) == {"TBW102", "old", "t"}


def test_what_is_not_kept_yet_is_told_to_nobody(tmp_path: Path) -> None:
    with served(tmp_path) as (line, commitlog), answers(line) as asked:
        line.ask(CreateTopic(TopicInfo("old", 2, 2)))
        told = commitlog.pages.get()[-1]
        commitlog.silent = True
        for command in (
            EnsureTopic("t"),
            DeleteTopic("old"),
            CommitOffsets("g", [QueueOffset("TBW102", 0, 5)]),
            JoinGroup("g", "m", [Subscription("t")]),
        ):
            asked.ask(command)
            assert topics_at(line)["old"] == TopicInfo("old", 2, 2)
            assert "t" not in topics_at(line)
        assert asked.empty
        assert commitlog.pages.get()[-1] == told
        commitlog.silent = False  # it is asked again
        answered = [type(asked.next()) for _ in range(4)]
        assert sorted(kind.__name__ for kind in answered) == [
            "Done", "Done", "GroupShare", "TopicRoute"
        ]  # fmt: skip
        assert set(topics_at(line)) == {"TBW102", "t"}


# --- what is told to the others ---


def test_an_unconfirmed_topic_names_the_process(tmp_path: Path) -> None:
    with coordinator(tmp_path, refuse=True, confirm_timeout_s=0.3) as line:
        with pytest.raises(
            NotConfirmed, match=r"the commitlog process has not confirmed.*not today"
        ):
            line.ask(EnsureTopic("t"))
        with pytest.raises(ServiceNotAvailable, match="the commitlog process"):
            line.ask(EnsureTopic("t"), timeout=patient(10))
        assert isinstance(line.ask(Ping()), Pong)


def test_a_name_server_that_is_away_is_named(tmp_path: Path) -> None:
    with (
        coordinator(tmp_path, name_servers=[DEAD], confirm_timeout_s=0.3) as line,
        pytest.raises(NotConfirmed, match=f"the name server {DEAD} has not confirmed"),
    ):
        line.ask(EnsureTopic("t"))


def test_a_route_is_at_the_name_server_before_the_client_has_it(tmp_path: Path) -> None:
    with running(server := NameServerActor.start(bind=[(ANYWHERE, False)])) as names:
        with coordinator(tmp_path, name_servers=[address_of(server)]) as line:
            route = line.ask(EnsureTopic("t"))
            assert names.ask(GetRoute("t")) == route
            line.ask(DeleteTopic("t"))
            with pytest.raises(TopicNotExist):
                names.ask(GetRoute("t"))
            assert line.ask(Finish()) == Done()
        with pytest.raises(TopicNotExist, match="no broker has registered"):
            names.ask(GetRoute("TBW102"))  # it unregistered


def test_one_name_server_of_two_is_enough(tmp_path: Path) -> None:
    with (
        running(server := NameServerActor.start(bind=[(ANYWHERE, False)])) as names,
        coordinator(tmp_path, name_servers=[DEAD, address_of(server)], confirm_timeout_s=1) as line,
    ):
        assert isinstance(line.ask(EnsureTopic("t")), TopicRoute)
        assert isinstance(names.ask(GetRoute("t")), TopicRoute)


class Inside(Request):
    """As by the family's own socket."""

    __slots__ = ("answered",)

    def __init__(self, command: Command) -> None:
        super().__init__(command, (), FAMILY)
        self.answered: queue.Queue[Command] = queue.Queue()

    def reply(self, answer: Command, payload: Payload = ()) -> None:
        self.answered.put(answer)

    @property
    def sender(self) -> bytes:
        return b"inside"


def test_a_new_topic_and_new_endpoints_in_one_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service asks for a topic by the family's socket, while the supervisor tells of a process
    that was started again: nothing is told that is not saved."""
    broken = threading.Event()
    monkeypatch.setattr(CoordinatorActor, "on_broken_invariant", lambda _self: broken.set())
    with (
        running(server := NameServerActor.start(bind=INSIDE)),
        coordinator(tmp_path, name_servers=[address_of(server)]) as line,
    ):
        (actor,) = pykka.ActorRegistry.get_by_class(CoordinatorActor)
        endpoints = endpoints_at(line._channel.endpoint)
        said = [Inside(EnsureTopic("new")), Inside(EndpointsChanged(endpoints))]
        actor.tell(Drained(list(said)))
        assert isinstance(said[0].answered.get(timeout=patient(60)), TopicRoute)
        assert said[1].answered.get(timeout=patient(60)) == Done()
        assert "new" in topics_at(line)
    assert not broken.is_set()


def test_only_the_family_may_say_where_the_processes_listen(tmp_path: Path) -> None:
    with coordinator(tmp_path) as line:
        assert line.ask(Finish()) == Done()  # TBW102 is there
    actor = CoordinatorActor.start(
        Settings(),
        tmp_path,
        commitlog_endpoint=DEAD,
        ledger_log=ledger_of(DEAD),
        name_server_endpoints=[],
        confirm_timeout_s=0.2,
        bind=[(ANYWHERE, False)],
    )
    with running(actor) as line:
        for command in (EndpointsChanged(endpoints_at(DEAD)), Finish()):
            with pytest.raises(UnknownCommand, match="not taken from outside"):
                line.ask(command)
        with pytest.raises(ServiceNotAvailable, match="not known yet where"):
            line.ask(EnsureTopic("TBW102"))


# --- offsets ---


def test_offsets_are_kept_in_rocketmqs_format(line: RemoteRef, tmp_path: Path) -> None:
    line.ask(EnsureTopic("t"))
    assert offset_at(line) == -1
    commit(line, 5)
    commit(line, 7, queue_id=1)
    assert (offset_at(line), offset_at(line, queue_id=1)) == (5, 7)
    assert line.ask(Finish()) == Done()
    text = (tmp_path / "config" / "consumerOffset.json").read_text()
    assert text == (
        '{\n\t"dataVersion":{\n\t\t"counter":0,\n\t\t"stateVersion":0,\n\t\t"timestamp":0\n\t},\n'
        '\t"groupTopicMap":{\n\t\t"g":["t"]\n\t},\n'
        '\t"offsetTable":{\n\t\t"t@g":{0:5,1:7\n\t\t}\n\t}\n}'
    )
    groups = (tmp_path / "config" / "subscriptionGroup.json").read_text()
    assert '\t"subscriptionGroupTable":{\n\t\t"g":{\n\t\t\t"attributes":{},\n' in groups


def test_a_late_commit_does_not_move_offsets_back(
    line: RemoteRef, caplog: pytest.LogCaptureFixture
) -> None:
    line.ask(EnsureTopic("t"))
    join(line)
    commit(line, 10, member="m")
    commit(line, 4, member="m")
    assert offset_at(line) == 10
    with caplog.at_level(logging.WARNING):
        line.ask(CommitOffsets("g", [QueueOffset("t", 0, 4)], "m", seek=True))
    assert offset_at(line) == 4
    assert "queue 0 of t goes back from 10 to 4, as m wants" in caplog.text


def test_an_administrator_moves_offsets_of_owned_queues_only_by_force(
    line: RemoteRef, caplog: pytest.LogCaptureFixture
) -> None:
    line.ask(CreateTopic(TopicInfo("t", 2, 2)))
    commit(line, 12)  # nobody owns it yet
    mine = epochs(join(line))
    line.ask(CommitOffsets("g", [QueueOffset("t", 0, 20, mine[0])], "m"))
    with pytest.raises(NotOwner, match="queue 0 of t belongs to m: end the members of group g, or"):
        commit(line, 4)
    assert offset_at(line) == 20
    with caplog.at_level(logging.WARNING):
        line.ask(CommitOffsets("g", [QueueOffset("t", 0, 4)], force=True))
    assert "queue 0 of t goes back from 20 to 4, as an administrator wants" in caplog.text
    for seek in (False, True):
        with pytest.raises(NotOwner, match="has changed hands"):
            line.ask(CommitOffsets("g", [QueueOffset("t", 0, 21, mine[0])], "m", seek=seek))
    assert offset_at(line) == 4
    # The other queue is not concerned; and the owner is told of the new epoch.
    line.ask(CommitOffsets("g", [QueueOffset("t", 1, 21, mine[1])], "m"))
    renewed = epochs(join(line, owned=[QueueKey("t", 0)], version=0))
    assert renewed[0] > mine[0]
    assert renewed[1] == mine[1]
    line.ask(CommitOffsets("g", [QueueOffset("t", 0, 5, renewed[0])], "m"))
    assert offset_at(line) == 5


def test_a_commit_by_an_epoch_that_has_ended_is_refused_whole(tmp_path: Path) -> None:
    with coordinator(tmp_path, Settings(consumer_session_timeout_ms=300)) as line:
        line.ask(CreateTopic(TopicInfo("t", 2, 2)))
        before = epochs(join(line, "a"))
        with answers(line) as asked:  # b waits for what a, who says nothing any more, has
            share = join(line, "b")
            while not share.queues:
                asked.ask(JoinGroup("g", "b", [Subscription("t")], [], share.version, 1_000))
                answer = asked.next()
                assert isinstance(answer, GroupShare)
                share = answer
        line.ask(LeaveGroup("g", "b"))
        owned = [QueueKey("t", 0), QueueKey("t", 1)]
        after = epochs(join(line, "a", owned=owned, version=before[0]))
        assert min(after.values()) > max(before.values())
        old = [QueueOffset("t", 1, 9, after[1]), QueueOffset("t", 0, 9, before[0])]
        with pytest.raises(NotOwner, match="queue 0 of t has changed hands since a took it on"):
            line.ask(CommitOffsets("g", old, "a"))
        assert offset_at(line, queue_id=1) == -1


def test_commits_of_a_non_owner_are_refused_whole(line: RemoteRef) -> None:
    line.ask(CreateTopic(TopicInfo("t", 2, 2)))
    with pytest.raises(NotOwner, match="m is not a member"):
        commit(line, 1, member="m")
    join(line, "a")
    join(line, "b")  # waits for a to let go of queue 1
    both = [QueueOffset("t", 0, 3), QueueOffset("t", 1, 3)]
    with pytest.raises(NotOwner, match="belongs to a, not to b"):
        line.ask(CommitOffsets("g", both, "b"))
    share = join(line, "a")
    commit(line, 3, queue_id=1, member="a")  # the last word on what it gives up
    join(line, "a", owned=share.queues, version=share.version)
    with pytest.raises(NotOwner, match="queue 1 of t belongs to b"):
        line.ask(CommitOffsets("g", both, "a"))
    assert (offset_at(line, queue_id=0), offset_at(line, queue_id=1)) == (-1, 3)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (QueueOffset("t", 8, 1), OffsetIllegal),
        (QueueOffset("t", -1, 1), OffsetIllegal),
        (QueueOffset("t", 0, -1), OffsetIllegal),
        (QueueOffset("t", 0, 1 << 63), BadRequest),
        (QueueOffset("../x", 0, 1), TopicNotExist),
    ],
)
def test_bad_offsets_are_refused(
    line: RemoteRef, entry: QueueOffset, error: type[Exception]
) -> None:
    line.ask(EnsureTopic("t"))
    with pytest.raises(error):
        line.ask(CommitOffsets("g", [QueueOffset("t", 0, 1), entry]))
    assert offset_at(line) == -1


def test_what_the_log_refuses_is_taken_back(tmp_path: Path) -> None:
    """Also what came behind it, which was judged by it."""
    with served(tmp_path) as (line, commitlog):
        line.ask(EnsureTopic("t"))
        join(line)
        commit(line, 5, member="m")
        commitlog.refusal = SystemBusy("not now")
        with answers(line) as asked:
            for queue_offset in (8, 7):
                asked.ask(CommitOffsets("g", [QueueOffset("t", 0, queue_offset)], "m"))
            refused = [asked.next(), asked.next()]
        assert refused == [Failed(SystemBusy.code, "not now")] * 2
        assert offset_at(line) == 5
        commitlog.refusal = None
        commit(line, 6, member="m")
        assert offset_at(line) == 6
        assert line.ask(Finish()) == Done()
    assert offsets_in(tmp_path) == {"t@g": {0: 6}}


@pytest.mark.parametrize("reason", [DiskFull("full"), ShuttingDown("it ends")])
def test_what_the_log_has_no_room_for_is_kept_in_the_file(
    reason: CometError, tmp_path: Path
) -> None:
    """So groups go on where nothing can be sent any more, and consumers may end after the log."""
    with served(tmp_path) as (line, commitlog):
        line.ask(EnsureTopic("t"))
        commit(line, 5)
        commitlog.refusal = reason
        commit(line, 6)
        assert offsets_in(tmp_path) == {"t@g": {0: 6}}
        blocked = tmp_path / "config" / "consumerOffset.json.tmp"
        blocked.mkdir()
        with pytest.raises(ServiceNotAvailable, match=r"consumerOffset\.json cannot be written"):
            commit(line, 7)
        assert offset_at(line) == 6
        blocked.rmdir()
        commit(line, 7)
        commitlog.refusal = None
        commit(line, 8)
        assert offset_at(line) == 8


def test_many_commits_share_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one drain: each is answered, and the last value stands."""
    monkeypatch.setattr(service, "SLICE_S", 60.0)  # however busy the machine is
    settings = Settings(flush_consumer_offset_interval_ms=3_600_000)
    with coordinator(tmp_path, settings) as line:
        line.ask(EnsureTopic("t"))
        (actor,) = pykka.ActorRegistry.get_by_class(CoordinatorActor)
        before = entries_at(line)
        said = [Inside(CommitOffsets("g", [QueueOffset("t", 0, at)])) for at in range(1, 501)]
        actor.tell(Drained(list(said)))
        assert [each.answered.get(timeout=patient(60)) for each in said] == [Done()] * 500
        assert entries_at(line) == before + 1
        assert line.ask(Finish()) == Done()
    written = ConfigFile(tmp_path / "config" / "consumerOffset.json", ConsumerOffsetTable).load()
    assert written is not None
    assert written.offset_table == {"t@g": {0: 500}}
    assert written.data_version.counter == 1


def entries_at(line: RemoteRef) -> int:
    """Of the ledger."""
    statistics = line.ask(GetStatistics())
    assert isinstance(statistics, Statistics)
    return int(statistics.values["ledger_entries"])


def test_offsets_are_there_after_an_orderly_end(tmp_path: Path) -> None:
    with coordinator(tmp_path) as line:
        line.ask(EnsureTopic("t"))
        commit(line, 5)
        assert line.ask(Finish()) == Done()
    with coordinator(tmp_path) as line:
        assert offset_at(line) == 5


# --- groups ---


def test_a_member_owns_all_queues(line: RemoteRef) -> None:
    line.ask(CreateTopic(TopicInfo("t", 3, 3)))
    share = join(line)
    assert queue_ids(share) == [0, 1, 2]
    assert (share.members, share.session_timeout_ms) == (1, 30_000)


def test_a_held_join_is_answered_when_something_changes(line: RemoteRef) -> None:
    line.ask(CreateTopic(TopicInfo("t", 4, 4)))
    share = join(line, "a")
    with answers(line) as asked:
        held = JoinGroup(
            "g", "a", [Subscription("t")], share.queues, version=share.version, wait_ms=9_000
        )
        asked.ask(held)
        join(line, "b")
        answer = asked.next()
        assert isinstance(answer, GroupShare)
        assert (queue_ids(answer), answer.members) == ([0, 1], 2)
        asked.ask(JoinGroup("g", "a", [Subscription("t")], answer.queues, answer.version, 9_000))
        assert queue_ids(join(line, "b")) == [2, 3]
        line.ask(LeaveGroup("g", "b"))
        answer = asked.next()
        assert isinstance(answer, GroupShare)
        assert queue_ids(answer) == [0, 1, 2, 3]
        asked.ask(JoinGroup("g", "a", [Subscription("t")], answer.queues, answer.version, 9_000))
        line.ask(CreateTopic(TopicInfo("t", 6, 6), ChangeMode.UPDATE))
        answer = asked.next()
        assert isinstance(answer, GroupShare)
        assert queue_ids(answer) == [0, 1, 2, 3, 4, 5]


def test_a_held_join_is_answered_in_time(line: RemoteRef) -> None:
    line.ask(EnsureTopic("t"))
    share = join(line)
    assert join(line, version=share.version, owned=share.queues, wait_ms=50) == share


def test_one_join_is_held_for_a_member(line: RemoteRef) -> None:
    line.ask(EnsureTopic("t"))
    share = join(line)
    held = JoinGroup("g", "m", [Subscription("t")], share.queues, share.version, 9_000)
    with answers(line) as asked:
        asked.ask(held)
        asked.ask(held)
        assert asked.next() == share
        statistics = line.ask(GetStatistics())
        assert isinstance(statistics, Statistics)
        assert statistics.values["held_joins"] == 1
        assert asked.empty
        line.ask(LeaveGroup("g", "m"))
        answer = asked.next()
        assert isinstance(answer, GroupShare)
        assert answer.queues == []


def test_a_silent_member_loses_its_queues(tmp_path: Path) -> None:
    with coordinator(tmp_path, Settings(consumer_session_timeout_ms=300)) as line:
        line.ask(CreateTopic(TopicInfo("t", 2, 2)))
        join(line, "a")
        share = join(line, "b")
        while queue_ids(share) != [0, 1]:  # b stays in touch
            share = join(line, "b", owned=share.queues, version=share.version, wait_ms=100)
        with pytest.raises(NotOwner):
            commit(line, 1, member="a")


def test_what_a_member_may_ask_for(line: RemoteRef) -> None:
    def refused(error: type[Exception], group: str, member: str, *subscribed: Subscription) -> None:
        with pytest.raises(error):
            line.ask(JoinGroup(group, member, list(subscribed)))

    refused(NameIllegal, "../g", "m", Subscription("t"))
    refused(NameIllegal, "g", "m", Subscription("../t"))
    refused(BadRequest, "g", "", Subscription("t"))
    refused(BadRequest, "g", "m\n", Subscription("t"))
    refused(SubscriptionIllegal, "g", "m")
    refused(SubscriptionIllegal, "g", "m", Subscription("t", "||"))
    refused(SubscriptionIllegal, "g", "m", Subscription("t", "a"), Subscription("t", "b"))
    many = [Subscription(f"t{number}") for number in range(SUBSCRIPTIONS_MAX + 1)]
    refused(SubscriptionIllegal, "g", "m", *many)
    assert line.ask(ListGroups()) == GroupList([])
    line.ask(JoinGroup("g", "m", many[1:]))


def test_without_automatic_creation_an_unknown_group_is_refused(tmp_path: Path) -> None:
    with coordinator(tmp_path, Settings(auto_create_subscription_group=False)) as line:
        for command in (
            JoinGroup("g", "m", [Subscription("t")]),
            CommitOffsets("g", []),
            DescribeGroup("g"),
        ):
            with pytest.raises(GroupNotExist):
                line.ask(command)


def test_list_and_describe_groups(line: RemoteRef) -> None:
    line.ask(CreateTopic(TopicInfo("t", 2, 2)))
    line.ask(CreateTopic(TopicInfo("old", 2, 2)))
    join(line)
    commit(line, 5, member="m")
    commit(line, 6, topic="old")
    assert line.ask(ListGroups()) == GroupList([GroupInfo("g", ["m"], ["old", "t"])])
    assert line.ask(DescribeGroup("g")) == GroupDescription(
        "g",
        ["m"],
        [Subscription("t", "*")],
        [
            GroupQueue("old", 0, 6, ""),
            GroupQueue("old", 1, -1, ""),
            GroupQueue("t", 0, 5, "m"),
            GroupQueue("t", 1, -1, "m"),
        ],
        entries=6,
        settings=settings_of(SubscriptionGroupConfig(group_name="g")),
    )
    with pytest.raises(GroupNotExist):
        line.ask(DescribeGroup("nobody"))


def test_members_that_were_away_for_long_are_forgotten(tmp_path: Path) -> None:
    with coordinator(tmp_path) as line:
        line.ask(EnsureTopic("t"))
        join(line, "a")
        assert line.ask(Finish()) == Done()
    os.utime(tmp_path / "config" / "consumerMembers.json", (1, 1))
    with coordinator(tmp_path) as line:
        assert queue_ids(join(line, "b")) == list(range(8))


@pytest.mark.parametrize("others_s", [0.2, 600.0])
def test_a_master_waits_for_members_of_one_before_it(tmp_path: Path, others_s: float) -> None:
    """Whom an operator has replaced: it may go on telling them that queues are theirs."""
    for_ever: Any = SimpleNamespace(value=INT64_MAX)
    is_open: Any = SimpleNamespace(value=Service.OPEN)
    gate = Gate(is_open, for_ever, "group", 2, others_s)
    settings = Settings(consumer_session_timeout_ms=300)
    with coordinator(tmp_path, settings, gate=gate) as line:
        line.ask(EnsureTopic("t"))
        join(line, "a")
        assert line.ask(Finish()) == Done()
    os.utime(tmp_path / "config" / "consumerMembers.json", (1, 1))
    with coordinator(tmp_path, settings, gate=gate) as line:
        began = time.monotonic()
        share = join(line, "b")
        assert queue_ids(share) == []
        while others_s < 1 and queue_ids(share) != list(range(8)):
            share = join(line, "b", owned=share.queues, version=share.version, wait_ms=100)
        assert others_s > 1 or time.monotonic() - began >= others_s


def test_a_damaged_list_of_members_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "consumerMembers.json").write_text('{"groups":{"g":')
    with coordinator(tmp_path) as line:
        line.ask(EnsureTopic("t"))
        assert queue_ids(join(line, "a")) == list(range(8))


# --- killed ---


def test_kill_right_after_the_answer(tmp_path: Path) -> None:
    """What was answered is there: topic, group, offset, and who owns which queue."""
    with running(commitlog := FakeCommitlog.start()):
        child = Child(tmp_path, address_of(commitlog))
        child.line.ask(CreateTopic(TopicInfo("t", 2, 2)))
        joined = join(child.line, "a")
        for queue_offset in range(1, 50):
            commit(child.line, queue_offset, member="a")
        child.kill()

        child = Child(tmp_path, address_of(commitlog))
        assert offset_at(child.line) == 49
        assert topics_at(child.line)["t"] == TopicInfo("t", 2, 2)
        # A newcomer is first at the new coordinator, while a still works on its queues.
        assert queue_ids(join(child.line, "b")) == []
        commit(child.line, 50, member="a")
        share = join(child.line, "a", owned=joined.queues, version=joined.version)
        assert queue_ids(share) == [0]
        join(child.line, "a", owned=share.queues, version=share.version)
        assert queue_ids(join(child.line, "b")) == [1]
        child.kill()


def test_the_last_member_that_left_is_no_obstacle_after_a_restart(tmp_path: Path) -> None:
    """It is gone from the list that outlives the coordinator, though nobody is left to be told."""
    with running(commitlog := FakeCommitlog.start()):
        child = Child(tmp_path, address_of(commitlog))
        child.line.ask(CreateTopic(TopicInfo("t", 2, 2)))
        join(child.line, "a")
        child.line.ask(LeaveGroup("g", "a"))
        child.kill()

        child = Child(tmp_path, address_of(commitlog))
        assert queue_ids(join(child.line, "b")) == [0, 1]
        child.kill()


def test_a_kill_ends_no_epoch_and_repeats_none(tmp_path: Path) -> None:
    """Also where the list of members is lost: then the owner has to take the queues on anew."""
    with running(commitlog := FakeCommitlog.start()):
        child = Child(tmp_path, address_of(commitlog))
        child.line.ask(CreateTopic(TopicInfo("t", 2, 2)))
        before = epochs(join(child.line, "a"))
        child.kill()

        child = Child(tmp_path, address_of(commitlog))
        child.line.ask(CommitOffsets("g", [QueueOffset("t", 0, 7, before[0])], "a"))
        child.line.ask(CommitOffsets("g", [QueueOffset("t", 0, 2)], force=True))
        child.kill()  # right after the answer: the owner is fenced off all the same

        child = Child(tmp_path, address_of(commitlog))
        with pytest.raises(NotOwner, match="has changed hands"):
            child.line.ask(CommitOffsets("g", [QueueOffset("t", 0, 8, before[0])], "a"))
        assert offset_at(child.line) == 2
        child.kill()

        (tmp_path / "config").mkdir(exist_ok=True)
        (tmp_path / "config" / "consumerMembers.json").write_text("{}")  # somebody else's counts
        child = Child(tmp_path, address_of(commitlog))
        owned = [QueueKey("t", 0), QueueKey("t", 1)]
        after = epochs(join(child.line, "a", owned=owned, version=before[0]))
        assert min(after.values()) > max(before.values()) + 1
        with pytest.raises(NotOwner, match="has changed hands"):
            child.line.ask(CommitOffsets("g", [QueueOffset("t", 1, 8, before[1])], "a"))
        child.kill()


def test_epochs_stay_above_what_was_given_when_the_clock_goes_back(tmp_path: Path) -> None:
    highest = 1 << 60
    record = MemberTable(highest=highest)
    (tmp_path / "config").mkdir()
    ConfigFile(tmp_path / "config" / "consumerMembers.json", MemberTable).store(
        record, durable=False
    )
    with coordinator(tmp_path) as line:
        line.ask(EnsureTopic("t"))
        assert min(epochs(join(line)).values()) > highest


@pytest.mark.slow
def test_a_coordinator_that_was_stopped_does_not_blame_its_members(tmp_path: Path) -> None:
    """They could not be heard meanwhile; who has which queue stays as it was."""
    settings = Settings(consumer_session_timeout_ms=2_000)
    with running(commitlog := FakeCommitlog.start()):
        child = Child(tmp_path, address_of(commitlog), settings)
        child.line.ask(CreateTopic(TopicInfo("t", 4, 4)))
        first = join(child.line, "a")
        join(child.line, "b")
        told = join(child.line, "a", owned=first.queues, version=first.version)
        share = join(child.line, "a", owned=told.queues, version=told.version)
        shares = {"a": share, "b": join(child.line, "b")}
        assert [queue_ids(each) for each in shares.values()] == [[0, 1], [2, 3]]
        child.signal(signal.SIGSTOP)
        # As long as it is stopped nothing can come of it; the time itself is what is tested.
        time.sleep(2.5 * settings.consumer_session_timeout_ms / 1000)
        child.signal(signal.SIGCONT)
        for _ in range(3):  # looks for silent members: what is asked for comes after them
            time.sleep(0.25)
            report = child.line.ask(DescribeGroup("g"))
            assert isinstance(report, GroupDescription)
            assert report.members == ["a", "b"]
        for member, share in shares.items():
            assert join(child.line, member, owned=share.queues, version=share.version) == share
        child.kill()


def test_members_that_stay_silent_after_a_pause_are_forgotten(tmp_path: Path) -> None:
    settings = Settings(consumer_session_timeout_ms=400)
    with running(commitlog := FakeCommitlog.start()):
        child = Child(tmp_path, address_of(commitlog), settings)
        child.line.ask(CreateTopic(TopicInfo("t", 4, 4)))
        join(child.line, "a")
        child.signal(signal.SIGSTOP)
        child.signal(signal.SIGCONT)
        deadline = time.monotonic() + patient(60)
        while True:
            report = child.line.ask(DescribeGroup("g"))
            assert isinstance(report, GroupDescription)
            if not report.members:
                break
            assert time.monotonic() < deadline, "it is never forgotten"
        child.kill()


def test_progress_behind_the_end_is_put_back_group_by_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = ConsumerOffsetTable(
        offset_table={
            "t@far": dict.fromkeys(range(8), 100),
            "u@far": {0: 7},
            "t@near": dict.fromkeys(range(8), 5),
        }
    )
    (tmp_path / "config").mkdir()
    ConfigFile(tmp_path / "config" / "consumerOffset.json", ConsumerOffsetTable).store(
        table, durable=True
    )
    ends = {("t", queue_id): 90 for queue_id in range(8)}
    with running(commitlog := FakeCommitlog.start()):
        actor = CoordinatorActor.start(
            Settings(),
            tmp_path,
            commitlog_endpoint=address_of(commitlog),
            ledger_log=ledger_of(address_of(commitlog)),
            name_server_endpoints=[],
            queue_ends=lambda: ends,
            bind=INSIDE,
        )
        with running(actor) as line:
            assert [offset_at(line, "t", queue_id, "far") for queue_id in range(8)] == [90] * 8
            assert offset_at(line, "u", 0, "far") == 0
            assert offset_at(line, "t", 3, "near") == 5
    (said,) = [record.message for record in caplog.records if "put back" in record.message]
    assert said.startswith("group far: its progress was put back in 9 queues, whose last 87 mess")
    assert "queue 0 of t from 100 to 90" in said
    assert "4 more" in said


# --- many groups, large groups ---


def test_groups_are_listed_in_pages(line: RemoteRef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_pages, "PAGE_BYTES", 300)
    for topic in ("t", "u", "v"):
        line.ask(CreateTopic(TopicInfo(topic, 5, 5)))
    for group in ("g", "h", "i"):
        for topic in ("t", "u", "v"):
            line.ask(CommitOffsets(group, [QueueOffset(topic, 2, 1)]))
    for member in "abcdefgh":
        line.ask(JoinGroup("h", member, [Subscription("u")]))
    with pytest.raises(BadRequest, match="3 groups do not fit"):
        line.ask(ListGroups())
    found: dict[str, tuple[list[str], list[str]]] = {}
    question, pages = ListGroups(paged=True), 0
    while True:
        answer = line.ask(question)
        assert isinstance(answer, GroupList)
        pages += 1
        for each in answer.groups:
            members, topics = found.setdefault(each.group, ([], []))
            members += each.members
            topics += each.topics
        if not answer.next_group:
            break
        question = ListGroups(answer.next_group, answer.next_entry, paged=True)
    assert pages > 2
    topics = ["t", "u", "v"]
    assert found == {"g": ([], topics), "h": (list("abcdefgh"), topics), "i": ([], topics)}


def test_a_group_is_described_in_pages(line: RemoteRef, monkeypatch: pytest.MonkeyPatch) -> None:
    for topic in ("t", "u"):
        line.ask(CreateTopic(TopicInfo(topic, 5, 5)))
        line.ask(CommitOffsets("g", [QueueOffset(topic, 2, 1)]))
    for member in "abc":
        line.ask(JoinGroup("g", member, [Subscription("t")]))
    whole = line.ask(DescribeGroup("g"))
    assert isinstance(whole, GroupDescription)
    monkeypatch.setattr(group_pages, "PAGE_BYTES", 100)
    with pytest.raises(BadRequest, match="14 members, subscriptions and queues of group g"):
        line.ask(DescribeGroup("g"))
    members: list[str] = []
    subscriptions: list[Subscription] = []
    queues: list[GroupQueue] = []
    at, pages = 0, 0
    while at or not pages:
        page = line.ask(DescribeGroup("g", at, paged=True))
        assert isinstance(page, GroupDescription)
        members += page.members
        subscriptions += page.subscriptions
        queues += page.queues
        at, pages = page.next_entry, pages + 1
    assert pages > 3
    assert (members, subscriptions, queues) == (whole.members, whole.subscriptions, whole.queues)


def test_an_answer_that_is_too_large_says_so(line: RemoteRef) -> None:
    """Whatever could not be read at the other side is an error there, and never silence."""
    line.ask(CreateTopic(TopicInfo("x" * 127, 4_096, 4_096)))
    for number in range(3):
        line.ask(CreateTopic(TopicInfo(f"{number}" * 127, 4_096, 4_096)))
    topics = [Subscription("x" * 127), *(Subscription(f"{n}" * 127) for n in range(3))]
    with pytest.raises(BadRequest, match=r"the answer to JoinGroup has .* bytes, at most 1048576"):
        line.ask(JoinGroup("g", "m", topics))
    assert isinstance(line.ask(Ping()), Pong)


# --- hostile input ---


def test_rubbish_does_not_stop_it(line: RemoteRef) -> None:
    socket: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(line._channel.endpoint)
        for frames in ([b""], [b"x" * 50], [b"\x01" + bytes(8) + b"\x92\x28\xc0"], [b"y"] * 99):
            socket.send_multipart(frames)
        for _ in range(4):
            assert socket.poll(patient(10_000))
            socket.recv_multipart()
    with pytest.raises(UnknownCommand):
        line.ask(SendMessages([], 0))
    assert isinstance(line.ask(Ping()), Pong)


def test_who_asks_and_goes_away_harms_nobody(line: RemoteRef) -> None:
    line.ask(EnsureTopic("t"))
    share = join(line)
    with answers(line) as asked:
        asked.ask(JoinGroup("g", "m", [Subscription("t")], share.queues, share.version, 9_000))
        asked.ask(Ping())
        assert isinstance(asked.next(), Pong)
    line.ask(CreateTopic(TopicInfo("t", 9, 9), ChangeMode.UPDATE))
    assert queue_ids(join(line)) == list(range(9))


def test_held_joins_hear_of_the_end(line: RemoteRef) -> None:
    line.ask(EnsureTopic("t"))
    share = join(line)
    with answers(line) as asked:
        asked.ask(JoinGroup("g", "m", [Subscription("t")], share.queues, share.version, 9_000))
        asked.ask(Finish())
        answer = asked.next()
        assert isinstance(answer, Failed)
        assert "stopping" in answer.text
        assert asked.next() == Done()


def test_who_waits_for_a_topic_hears_of_the_end(tmp_path: Path) -> None:
    with (
        coordinator(tmp_path, refuse=True, confirm_timeout_s=0.3) as line,
        answers(line) as asked,
    ):
        asked.ask(EnsureTopic("t"))
        asked.ask(Finish())
        answer = asked.next()
        assert isinstance(answer, Failed)
        assert "stopping" in answer.text
        assert asked.next() == Done()
