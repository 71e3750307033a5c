"""Who may commit: the epochs of ownership. Members stop without notice and go on much later."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from patience import exactly

from cometmq.actors.tables.group_share import ConsumerGroup, GroupRecord
from cometmq.protocol.commands import QueueKey
from cometmq.protocol.errors import NotOwner

TIMEOUT_S = exactly(10.0)
TOPIC = "t"
MEMBERS = ("a", "b", "c")
Q0 = QueueKey(TOPIC, 0)


def group_of(queue_count: int) -> ConsumerGroup:
    return ConsumerGroup("g", {TOPIC: queue_count}, session_timeout_s=TIMEOUT_S)


def join(
    group: ConsumerGroup,
    member: str,
    owned: list[QueueKey] | None = None,
    *,
    version: int = -1,
    now: float = 0,
) -> dict[QueueKey, int]:
    """The member's share: queue -> epoch."""
    group.join(member, {TOPIC: "*"}, owned or [], version=version, now=now)
    share = group.share_of(member)
    return dict(zip(share.queues, share.epochs, strict=True))


def may_commit(group: ConsumerGroup, member: str, queue: QueueKey, epoch: int) -> bool:
    try:
        group.check_commit(member, queue, epoch)
    except NotOwner:
        return False
    return True


def test_a_queue_that_went_and_came_back_has_another_epoch() -> None:
    group = group_of(1)
    before = join(group, "a")[Q0]
    group.expire(TIMEOUT_S)
    assert join(group, "b", now=11)[Q0] > before
    group.leave("b")
    after = join(group, "a", [Q0], version=1, now=12)[Q0]  # it never noticed
    assert not may_commit(group, "a", Q0, before)
    assert may_commit(group, "a", Q0, after)


def test_a_client_that_knows_of_no_epochs_is_checked_by_membership() -> None:
    group = group_of(1)
    join(group, "a")
    assert may_commit(group, "a", Q0, 0)
    assert not may_commit(group, "b", Q0, 0)


def test_an_owner_that_is_to_give_a_queue_up_may_commit_until_it_has() -> None:
    group = group_of(2)
    mine = join(group, "a")
    join(group, "b")
    given_up = QueueKey(TOPIC, 1)
    assert may_commit(group, "a", given_up, mine[given_up])
    join(group, "a", [Q0], version=group.version_of("a"))
    assert not may_commit(group, "a", given_up, mine[given_up])


def test_a_heartbeat_keeps_the_epoch() -> None:
    group = group_of(2)
    mine = join(group, "a")
    assert join(group, "a", list(mine), version=group.version_of("a"), now=3) == mine


def test_who_begins_anew_under_the_same_name_fences_the_one_before_off() -> None:
    group = group_of(1)
    before = join(group, "a")[Q0]
    after = join(group, "a")[Q0]
    assert not may_commit(group, "a", Q0, before)
    assert may_commit(group, "a", Q0, after)


def test_a_renewed_ownership_is_told_to_its_owner() -> None:
    group = group_of(2)
    mine = join(group, "a")
    seen = group.version_of("a")
    assert group.renew([Q0])
    assert group.version_of("a") > seen
    share = group.share_of("a")
    renewed = dict(zip(share.queues, share.epochs, strict=True))
    assert renewed[Q0] > mine[Q0]
    assert renewed[QueueKey(TOPIC, 1)] == mine[QueueKey(TOPIC, 1)]
    assert not group.renew([QueueKey("other", 0)])


def test_epochs_outlive_the_coordinator() -> None:
    group = group_of(2)
    mine = join(group, "a")
    counts = {TOPIC: 2}
    later = ConsumerGroup("g", counts, session_timeout_s=TIMEOUT_S, record=group.record())
    assert dict(zip(later.share_of("a").queues, later.share_of("a").epochs, strict=True)) == mine


def test_a_record_from_before_there_were_epochs() -> None:
    record = GroupRecord(version=7, members={"a": {TOPIC: "*"}}, owners={TOPIC: {0: "a"}})
    group = ConsumerGroup("g", {TOPIC: 1}, session_timeout_s=TIMEOUT_S, record=record)
    assert may_commit(group, "a", Q0, 0)
    assert group.share_of("a").epochs[0] > 7
    assert may_commit(group, "a", Q0, group.share_of("a").epochs[0])


class Process:
    """A member that may be stopped for any time; what it was told it goes on with."""

    def __init__(self) -> None:
        self.version = -1
        self.owned: dict[QueueKey, int] = {}


class OwnershipMachine(RuleBasedStateMachine):
    """Everything that anybody was ever told is tried as a commit after every step."""

    @initialize(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.now = 0.0
        self.counts = {TOPIC: count}
        self.group = ConsumerGroup("g", self.counts, session_timeout_s=TIMEOUT_S)
        self.processes = {member: Process() for member in MEMBERS}
        self.told: set[tuple[str, QueueKey, int]] = set()
        self.highest: dict[QueueKey, int] = {}
        self.owner_by_epoch: dict[tuple[QueueKey, int], str] = {}

    def hear(self, member: str) -> None:
        """The answer arrives: a queue with another epoch is taken on anew."""
        share = self.group.share_of(member)
        process = self.processes[member]
        process.version = share.version
        process.owned = dict(zip(share.queues, share.epochs, strict=True))
        self.told.update((member, queue, epoch) for queue, epoch in process.owned.items())

    @rule(member=st.sampled_from(MEMBERS), heard=st.booleans())
    def join(self, member: str, heard: bool) -> None:
        process = self.processes[member]
        self.group.join(member, {TOPIC: "*"}, process.owned, version=process.version, now=self.now)
        if heard:
            self.hear(member)

    @rule(member=st.sampled_from(MEMBERS))
    def restart(self, member: str) -> None:
        """A new process of the same name; what the old one was told may still be on its way."""
        self.processes[member] = Process()

    @rule(member=st.sampled_from(MEMBERS))
    def leave(self, member: str) -> None:
        self.group.leave(member)
        self.processes[member] = Process()

    @rule(seconds=st.integers(0, 11))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.group.expire(self.now)

    @rule(count=st.integers(0, 4))
    def change_topic(self, count: int) -> None:
        self.counts[TOPIC] = count
        self.group.topics_changed()

    @rule(queue_id=st.integers(0, 3))
    def administrator_moves_an_offset(self, queue_id: int) -> None:
        owned = bool(self.group.owner_of(QueueKey(TOPIC, queue_id)))
        assert self.group.renew([QueueKey(TOPIC, queue_id)]) == owned

    @rule(remembers=st.booleans())
    def coordinator_is_killed(self, remembers: bool) -> None:
        """Without its record it begins above whatever was given out: see the coordinator."""
        self.group = ConsumerGroup(
            "g",
            self.counts,
            session_timeout_s=TIMEOUT_S,
            record=self.group.record() if remembers else None,
            first_version=0 if remembers else self.group.version,
            now=self.now,
        )

    @invariant()
    def one_member_at_a_time_may_commit(self) -> None:
        if not hasattr(self, "group"):
            return
        allowed: dict[QueueKey, set[tuple[str, int]]] = {}
        for member, queue, epoch in self.told:
            if may_commit(self.group, member, queue, epoch):
                allowed.setdefault(queue, set()).add((member, epoch))
        for queue, pairs in allowed.items():
            assert len(pairs) == 1, (queue, pairs)
            assert {member for member, _ in pairs} == {self.group.owner_of(queue)}

    @invariant()
    def no_epoch_goes_back_or_is_given_twice(self) -> None:
        if not hasattr(self, "group"):
            return
        record = self.group.record()
        assert record.owners.keys() == record.epochs.keys()
        for topic, owners in record.owners.items():
            assert owners.keys() == record.epochs[topic].keys()
            for queue_id, owner in owners.items():
                queue, epoch = QueueKey(topic, queue_id), record.epochs[topic][queue_id]
                assert epoch >= self.highest.get(queue, 1), (queue, epoch)
                assert self.owner_by_epoch.setdefault((queue, epoch), owner) == owner
                assert epoch <= self.group.version
                self.highest[queue] = epoch

    @invariant()
    def who_is_told_something_may_act_on_it(self) -> None:
        if not hasattr(self, "group"):
            return
        for member in self.group.members:
            share = self.group.share_of(member)
            for queue, epoch in zip(share.queues, share.epochs, strict=True):
                assert may_commit(self.group, member, queue, epoch)


OwnershipMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None
)
TestOwnership = pytest.mark.slow(OwnershipMachine.TestCase)


def test_nobody_commits_what_nobody_owns() -> None:
    group = group_of(1)
    with pytest.raises(NotOwner, match="nobody"):
        group.check_commit("a", Q0, 1)
