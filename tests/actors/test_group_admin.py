"""Groups by command: settings, deletion, resets and clones of offsets, how many there may be."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coordinator_child import Settings, coordinator
from patience import patient

from cometmq.actors.coordination import membership
from cometmq.actors.tables.group_settings import changed, settings_of
from cometmq.protocol.commands import (
    ChangeMode,
    CloneOffsets,
    CommitOffsets,
    CreateTopic,
    DeleteGroup,
    DescribeGroup,
    Done,
    FetchOffsets,
    Finish,
    GroupDescription,
    GroupOffsets,
    GroupShare,
    JoinGroup,
    LeaveGroup,
    ListTopics,
    OffsetsCloned,
    OffsetsReset,
    PutGroup,
    QueueKey,
    QueueOffset,
    QueueReset,
    ResetOffsets,
    ResetQueue,
    Subscription,
    SubscriptionDifference,
    TopicInfo,
    TopicList,
)
from cometmq.protocol.configs import SubscriptionGroupConfig
from cometmq.protocol.errors import (
    BadRequest,
    GroupExists,
    GroupInUse,
    GroupNotExist,
    NameIllegal,
    NoPermission,
    NotOwner,
    OffsetIllegal,
    SubscriptionsDiffer,
    SystemBusy,
    TooManyGroups,
    TopicNotExist,
)
from cometmq.protocol.wire.remote import RemoteRef
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.tables import ConsumerOffsetTable, SubscriptionGroupTable

QUEUES = 4


@pytest.fixture
def line(tmp_path: Path) -> Iterator[RemoteRef]:
    with coordinator(tmp_path) as line:
        line.ask(CreateTopic(TopicInfo("t", QUEUES, QUEUES)))
        yield line


def put(line: RemoteRef, mode: int = ChangeMode.UPDATE, group: str = "g", **settings: str) -> None:
    assert line.ask(PutGroup(group, settings, mode)) == Done()


def described(line: RemoteRef, group: str = "g") -> GroupDescription:
    answer = line.ask(DescribeGroup(group))
    assert isinstance(answer, GroupDescription)
    return answer


def join(line: RemoteRef, member: str = "m", tags: str = "*", **fields: Any) -> dict[int, int]:
    """The epochs of its queues."""
    group = fields.pop("group", "g")
    answer = line.ask(JoinGroup(group, member, [Subscription("t", tags)], **fields))
    assert isinstance(answer, GroupShare)
    return {key.queue_id: epoch for key, epoch in zip(answer.queues, answer.epochs, strict=True)}


def commit(line: RemoteRef, place: int, epoch: int = 0, queue_id: int = 0, **fields: Any) -> None:
    offsets = [QueueOffset("t", queue_id, place, epoch)]
    group = fields.pop("group", "g")
    assert line.ask(CommitOffsets(group, offsets, **fields)) == Done()


def offsets(line: RemoteRef, group: str = "g") -> list[int]:
    answer = line.ask(FetchOffsets(group, [QueueKey("t", i) for i in range(QUEUES)]))
    assert isinstance(answer, GroupOffsets)
    return [each.queue_offset for each in answer.offsets]


def reset(line: RemoteRef, *queues: QueueReset, shift: bool = False) -> list[ResetQueue]:
    answer = line.ask(ResetOffsets("g", list(queues), shift))
    assert isinstance(answer, OffsetsReset)
    return answer.queues


# --- settings ---


def test_settings_are_kept_as_rocketmq_writes_them(tmp_path: Path) -> None:
    with coordinator(tmp_path) as line:
        put(line, ChangeMode.CREATE)
        put(line, ChangeMode.CREATE)  # the same
        put(
            line,
            consumeBroadcastEnable="false",
            consumeMessageOrderly="true",
            retryQueueNums="3",
            retryMaxTimes="0",
            consumeTimeoutMinute="7",
            notifyConsumerIdsChangedEnable="false",
            groupRetryPolicy='{"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": 10}}',
            attributes='{"a": "b"}',
        )
        put(line, sameSubscriptions="true")
        with pytest.raises(GroupExists, match=r"group g exists: .*retryMaxTimes 0, not 16"):
            put(line, ChangeMode.CREATE)
        found = described(line).settings
        assert (found["retryQueueNums"], found["sameSubscriptions"]) == ("3", "true")
        assert found["attributes"] == '{"a":"b"}'
        assert line.ask(Finish()) == Done()
    text = (tmp_path / "config/subscriptionGroup.json").read_text()
    assert '"retryMaxTimes":0,' in text
    file = ConfigFile(tmp_path / "config/subscriptionGroup.json", SubscriptionGroupTable)
    table = file.load()
    assert table is not None
    config = table.subscription_group_table["g"]
    assert config.attributes == {"a": "b", "cometmq.same.subscriptions": "true"}
    assert settings_of(config) == found
    with coordinator(tmp_path) as line:
        assert described(line).settings == found


@pytest.mark.parametrize(
    ("key", "text", "what"),
    [
        ("consumeEnabled", "true", "is consumeEnable meant"),
        ("xyz", "true", "there are consumeEnable, "),
        ("consumeEnable", "1", "Expected `bool`"),
        ("consumeEnable", "", "truncated"),
        ("retryQueueNums", "-1", "0 to 65535"),
        ("retryQueueNums", "2147483648", "<= 2147483647"),
        ("retryMaxTimes", "-1", "0 to 2147483647"),
        ("consumeTimeoutMinute", "0", "1 to "),
        ("groupRetryPolicy", '{"type": "SOMEHOW"}', "Invalid enum value"),
        ("groupRetryPolicy", '{"customizedRetryPolicy": {"next": []}}', "1 to 100 waits"),
        ("groupRetryPolicy", '{"exponentialRetryPolicy": {"initial": 9, "max": 8}}', "initial 9"),
        ("attributes", '{"a": 1}', "Expected `str`"),
        ("attributes", '{"": "x"}', "1 to 255 characters"),
        ("attributes", "[" * 100_000, "at most 65536"),
        ("attributes", "{" + ",".join(f'"{i}": ""' for i in range(101)) + "}", "at most 100"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    line: RemoteRef, key: str, text: str, what: str
) -> None:
    put(line, ChangeMode.CREATE, retryMaxTimes="5")
    before = described(line).settings
    with pytest.raises(BadRequest, match=what) as caught:
        put(line, **{"retryMaxTimes": "6", key: text})
    assert key in str(caught.value)
    assert described(line).settings == before


def test_a_group_that_is_not_there(line: RemoteRef) -> None:
    with pytest.raises(GroupNotExist):
        put(line, retryMaxTimes="1")
    with pytest.raises(GroupNotExist):
        line.ask(DeleteGroup("g"))
    with pytest.raises(GroupNotExist):
        line.ask(CloneOffsets("g", "h", ["t"]))
    with pytest.raises(BadRequest, match="mode 2"):
        put(line, ChangeMode.FORCE)
    with pytest.raises(NameIllegal, match="the broker's own"):
        line.ask(DeleteGroup("TOOLS_CONSUMER"))


def test_a_group_that_may_not_consume(line: RemoteRef) -> None:
    """Whoever waits for news hears it at once, and may commit what it has done."""
    mine, version = joined(line)
    put(line, consumeEnable="false")
    for wait_ms in (0, 5_000):
        with pytest.raises(NoPermission, match="group g may not consume: its consumeEnable"):
            join(line, version=version, wait_ms=wait_ms)
    commit(line, 3, mine[0], member="m")
    assert offsets(line)[0] == 3
    put(line, consumeEnable="true")
    assert join(line, owned=[QueueKey("t", i) for i in mine], version=version) == mine


def joined(line: RemoteRef) -> tuple[dict[int, int], int]:
    """A new member: the epochs of its queues, and the version of its share."""
    answer = line.ask(JoinGroup("g", "m", [Subscription("t")]))
    assert isinstance(answer, GroupShare)
    mine = dict(zip((key.queue_id for key in answer.queues), answer.epochs, strict=True))
    return mine, answer.version


# --- subscriptions that differ ---


def test_differences_are_named(line: RemoteRef, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        join(line, "a", "x || y")
        join(line, "b", "y||x")
        assert described(line).differences == []
        join(line, "c", "z")
        join(line, "c", "z", version=0)
    line.ask(JoinGroup("g", "d", [Subscription("u")]))
    found = described(line)
    assert found.difference_count == 5
    assert found.differences == [
        SubscriptionDifference("c", "t", "z", "x||y"),
        SubscriptionDifference("d", "t", "", "x||y"),
        *(SubscriptionDifference(member, "u", "", "*") for member in "abc"),
    ]
    (warning,) = [each.getMessage() for each in caplog.records if "others to" in each.getMessage()]
    assert "group g: member c subscribes to 'z' of t, others to 'x||y'" in warning


def test_a_long_expression_is_cut_where_it_is_shown(line: RemoteRef) -> None:
    for number in range(60):
        join(line, f"m{number}", f"{number}" + "x" * 20_000)
    found = line.ask(DescribeGroup("g", paged=True))
    assert isinstance(found, GroupDescription)
    assert (len(found.differences), found.difference_count) == (50, 59)
    assert {len(each.tags) for each in found.differences} == {200}


def test_a_group_may_refuse_differences(line: RemoteRef) -> None:
    join(line, "a", "x")
    join(line, "b", "y")
    put(line, sameSubscriptions="true")
    join(line, "a", "x")  # they are as they were
    join(line, "b", "y")
    for member, tags in (("c", "z"), ("a", "y||x")):
        with pytest.raises(
            SubscriptionsDiffer, match=f"member {member} subscribes to .* of t, oth"
        ):
            join(line, member, tags)
    assert described(line).members == ["a", "b"]
    line.ask(LeaveGroup("g", "b"))
    join(line, "c", " x ")
    line.ask(LeaveGroup("g", "c"))
    join(line, "a", "z")  # alone, it may change its mind
    with pytest.raises(SubscriptionsDiffer):
        join(line, "b", "x")
    line.ask(JoinGroup("g", "b", [Subscription("another")]))  # other topics are no difference
    put(line, sameSubscriptions="false")
    join(line, "b", "x")


# --- deletion ---


def test_a_group_is_deleted_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    with coordinator(tmp_path) as line:
        for topic in ("t", "%RETRY%g", "%DLQ%g", "%RETRY%other"):
            line.ask(CreateTopic(TopicInfo(topic, QUEUES, QUEUES)))
        mine = join(line)
        commit(line, 5, mine[0], member="m")
        commit(line, 7, group="other")
        with pytest.raises(GroupInUse, match="group g has members: m; nothing was changed"):
            line.ask(DeleteGroup("g"))
        assert offsets(line)[0] == 5
        line.ask(LeaveGroup("g", "m"))
        assert line.ask(DeleteGroup("g")) == Done()
        with pytest.raises(GroupNotExist):
            described(line)
        assert offsets(line) == [-1] * QUEUES
        topics = line.ask(ListTopics())
        assert isinstance(topics, TopicList)
        named = {each.topic for each in topics.topics}
        assert {"t", "%DLQ%g", "%RETRY%other"} <= named
        assert "%RETRY%g" not in named
        assert offsets(line, "other")[0] == 7
        assert line.ask(Finish()) == Done()
    table = ConfigFile(tmp_path / "config/consumerOffset.json", ConsumerOffsetTable).load()
    assert table is not None
    assert table.offset_table == {"t@other": {0: 7}}
    assert '"g"' not in (tmp_path / "config/subscriptionGroup.json").read_text()
    assert '"g"' not in (tmp_path / "config/consumerMembers.json").read_text()


def test_what_a_member_of_a_deleted_group_still_commits_is_refused(line: RemoteRef) -> None:
    """Also after it has joined a group of the same name, which never gives its epochs again."""
    line.ask(CreateTopic(TopicInfo("%RETRY%g", 1, 1)))
    before = join(line)
    assert line.ask(DeleteGroup("g", force=True, keep_retry_topic=True)) == Done()
    with pytest.raises(NotOwner):
        commit(line, 9, before[0], member="m")
    with pytest.raises(GroupNotExist):  # that has not made it again
        described(line)
    after = join(line, owned=[QueueKey("t", i) for i in before], version=1 << 60)
    assert min(after.values()) > max(before.values())
    with pytest.raises(NotOwner, match="has changed hands"):
        commit(line, 9, before[0], member="m")
    assert offsets(line) == [-1] * QUEUES
    topics = line.ask(ListTopics())
    assert isinstance(topics, TopicList)
    assert "%RETRY%g" in {each.topic for each in topics.topics}


# --- resets ---


def test_a_reset_fences_the_owners_off(line: RemoteRef) -> None:
    mine = join(line)
    commit(line, 20, mine[0], member="m")
    assert reset(line, QueueReset("t", 0, 4), QueueReset("t", 1, 9)) == [
        ResetQueue("t", 0, 20, 4, 4), ResetQueue("t", 1, -1, 9, 9),
    ]  # fmt: skip
    for queue_id in (0, 1):
        with pytest.raises(NotOwner, match="has changed hands"):
            commit(line, 21, mine[queue_id], queue_id, member="m", seek=True)
    commit(line, 3, mine[2], 2, member="m")  # the others are as they were
    assert offsets(line) == [4, 9, 3, -1]
    anew = join(line, owned=[QueueKey("t", i) for i in mine], version=0)
    commit(line, 5, anew[0], member="m")
    assert offsets(line)[0] == 5


def test_whoever_waits_for_news_hears_of_a_reset(line: RemoteRef) -> None:
    mine, version = joined(line)
    answered = threading.Event()
    owned = [QueueKey("t", queue_id) for queue_id in mine]
    held = line._channel.request(
        JoinGroup("g", "m", [Subscription("t")], owned, version, 9_000),
        on_done=lambda _: answered.set(),
    )
    reset(line, QueueReset("t", 0, 4))
    assert answered.wait(patient(60))
    answer, _ = held.result()
    assert isinstance(answer, GroupShare)
    assert answer.epochs[0] > mine[0]


def test_a_shift_ends_where_the_queue_does(line: RemoteRef) -> None:
    for queue_id, place in enumerate((50, 12, 98)):
        commit(line, place, queue_id=queue_id)
    back = [QueueReset("t", i, -20, 10, 100) for i in range(QUEUES)]
    assert reset(line, *back, shift=True) == [
        ResetQueue("t", 0, 50, 30, 30), ResetQueue("t", 1, 12, 0, 10),
        ResetQueue("t", 2, 98, 78, 78), ResetQueue("t", 3, -1, -1, -1),
    ]  # fmt: skip
    assert offsets(line) == [30, 10, 78, -1]
    reset(line, QueueReset("t", 0, 1 << 62, 10, 100), shift=True)
    assert offsets(line) == [100, 10, 78, -1]
    with pytest.raises(OffsetIllegal, match="nothing to shift from"):
        reset(line, QueueReset("t", 3, 5, 10, 100), shift=True)


def test_a_reset_that_is_refused_changes_nothing(line: RemoteRef) -> None:
    mine = join(line)
    commit(line, 20, mine[0], member="m")
    good = QueueReset("t", 0, 4)
    with pytest.raises(TopicNotExist):
        reset(line, good, QueueReset("nowhere", 0, 4))
    for bad in (QueueReset("t", QUEUES, 4), QueueReset("t", -1, 4), QueueReset("t", 1, -1)):
        with pytest.raises(OffsetIllegal):
            reset(line, good, bad)
    with pytest.raises(BadRequest, match="twice"):
        reset(line, good, good)
    with pytest.raises(BadRequest, match="names no queue"):
        reset(line)
    commit(line, 21, mine[0], member="m")
    assert offsets(line) == [21, -1, -1, -1]


# --- clones ---


def test_a_clone_is_where_the_group_is(line: RemoteRef) -> None:
    line.ask(CreateTopic(TopicInfo("%RETRY%g", 1, 1)))
    put(line, ChangeMode.CREATE, retryMaxTimes="3")
    commit(line, 5)
    commit(line, 8, queue_id=2)
    line.ask(CommitOffsets("g", [QueueOffset("%RETRY%g", 0, 1)]))
    commit(line, 1, queue_id=3, group="h")
    topics = ["t", "%RETRY%g", "unknown"]
    assert line.ask(CloneOffsets("g", "h", topics)) == OffsetsCloned(2)
    assert offsets(line, "h") == [5, -1, 8, 1]
    assert described(line, "h").settings["retryMaxTimes"] == "16"  # it was there
    assert line.ask(CloneOffsets("g", "new", topics)) == OffsetsCloned(2)
    assert described(line, "new").settings["retryMaxTimes"] == "3"
    with pytest.raises(BadRequest, match="to itself"):
        line.ask(CloneOffsets("g", "g", topics))


def test_a_clone_to_a_group_with_members(line: RemoteRef) -> None:
    commit(line, 5)
    mine = join(line, group="h")
    with pytest.raises(GroupInUse, match="group h has members: m;"):
        line.ask(CloneOffsets("g", "h", ["t"]))
    assert line.ask(CloneOffsets("g", "h", ["t"], force=True)) == OffsetsCloned(1)
    with pytest.raises(NotOwner, match="has changed hands"):
        commit(line, 9, mine[0], member="m", group="h")
    assert offsets(line, "h")[0] == 5


# --- how many ---


def test_a_group_and_a_connection_take_so_many_members(
    line: RemoteRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MEMBERS_MAX", 20)
    for number in range(20):
        join(line, f"m{number}")
    with pytest.raises(SystemBusy, match="group g has 20 members, and takes no more"):
        join(line, "m20")
    join(line, "m0")  # who is there may stay
    join(line, "m0", group="h")
    assert len(described(line).members) == 20


def test_a_client_cannot_fill_groups_with_members(tmp_path: Path) -> None:
    """One connection has its limit, over all groups; others are not concerned."""
    with coordinator(tmp_path) as line:
        line.ask(CreateTopic(TopicInfo("t", QUEUES, QUEUES)))
        for number in range(membership.MEMBERS_OF_SENDER_MAX):
            join(line, "m", group=f"g{number}")
        with pytest.raises(SystemBusy, match=r"its connection has 1000 members already"):
            join(line, "m", group="one-more")
        join(line, "m", group="g7")
        other = RemoteRef(line._channel.endpoint)
        try:
            join(other, "m", group="one-more")
            join(other, "m", group="g7")  # it comes by another connection now
        finally:
            other.stop()
        join(line, "m", group="two-more")
        line.ask(LeaveGroup("g8", "m"))
        join(line, "m", group="three-more")


def test_no_more_groups_than_max_groups(tmp_path: Path) -> None:
    with coordinator(tmp_path, Settings(max_groups=2)) as line:
        line.ask(CreateTopic(TopicInfo("t", QUEUES, QUEUES)))
        put(line, ChangeMode.CREATE, "a")
        join(line, group="b")
        for ask in (
            lambda: put(line, ChangeMode.CREATE, "c"),
            lambda: join(line, group="c"),
            lambda: commit(line, 1, group="c"),
            lambda: line.ask(CloneOffsets("a", "c", [])),
        ):
            with pytest.raises(TooManyGroups, match=r"group c is not created: .* maxGroups"):
                ask()
        join(line, "another", group="b")
        assert line.ask(DeleteGroup("a")) == Done()
        put(line, ChangeMode.CREATE, "c")


def test_a_config_of_rocketmq_keeps_what_is_not_ours() -> None:
    config = SubscriptionGroupConfig(group_name="g", broker_id=7, group_sys_flag=1)
    again = changed(config, {"retryMaxTimes": "4"})
    assert (again.broker_id, again.group_sys_flag, again.retry_max_times) == (7, 1, 4)
