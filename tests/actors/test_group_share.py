"""Sharing a group's queues: AVG, and the hand-over in two steps."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from patience import exactly

from cometmq.actors.tables.allocation import allocate_average
from cometmq.actors.tables.group_share import ConsumerGroup
from cometmq.protocol.commands import QueueKey, Subscription
from cometmq.protocol.errors import SubscriptionIllegal
from cometmq.protocol.tags import parse_tags

TIMEOUT_S = exactly(10.0)
TOPICS = ("t1", "t2")
MEMBERS = ("a", "b", "c")


def group_of(counts: dict[str, int]) -> ConsumerGroup:
    return ConsumerGroup("g", counts, session_timeout_s=TIMEOUT_S)


def queues(topic: str, *ids: int) -> list[QueueKey]:
    return [QueueKey(topic, queue_id) for queue_id in ids]


def join(
    group: ConsumerGroup,
    member: str,
    owned: list[QueueKey] | None = None,
    *,
    version: int = -1,
    now: float = 0,
    tags: str = "*",
    topics: tuple[str, ...] = ("t",),
) -> list[QueueKey]:
    group.join(member, dict.fromkeys(topics, tags), owned or [], version=version, now=now)
    return group.share_of(member).queues


# --- AVG ---


@pytest.mark.parametrize(
    ("count", "members", "shares"),
    [
        (8, "a", "aaaaaaaa"),
        (8, "ba", "aaaabbbb"),
        (8, "cab", "aaabbbcc"),
        (2, "abc", "ab"),
        (0, "ab", ""),
        (5, "", ""),
    ],
)
def test_average_is_rocketmqs(count: int, members: str, shares: str) -> None:
    assert allocate_average(count, members) == dict(enumerate(shares))


@given(st.integers(0, 40), st.sets(st.text(min_size=1), max_size=12))
def test_average_is_fair(count: int, members: set[str]) -> None:
    shares = allocate_average(count, sorted(members))
    assert list(shares) == list(range(count if members else 0))
    sizes = [list(shares.values()).count(member) for member in members]
    assert not sizes or max(sizes) - min(sizes) <= 1


# --- tags ---


@pytest.mark.parametrize("expression", ["*", "", " * "])
def test_all_tags(expression: str) -> None:
    assert parse_tags(expression) is None


def test_tags_are_trimmed_and_empty_ones_dropped() -> None:
    assert parse_tags(" a ||b|| ||c d") == frozenset({"a", "b", "c d"})


@pytest.mark.parametrize("expression", ["||", "a|b", "a || *", "a\x01", "a|||b"])
def test_tags_refused(expression: str) -> None:
    with pytest.raises(SubscriptionIllegal):
        parse_tags(expression)


def test_differing_tags_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    group = group_of({"t": 2})
    with caplog.at_level(logging.WARNING):
        join(group, "a", tags="x || y")
        join(group, "b", tags="y||x")  # the same
        assert not caplog.records
        join(group, "c", tags="x")
        join(group, "d", tags="z")
    (record,) = caplog.records
    assert "member c subscribes to 'x' of t, others to 'x||y'; a message" in record.getMessage()


# --- the hand-over ---


def test_a_single_member_owns_everything_at_once() -> None:
    group = group_of({"t": 3})
    assert join(group, "a") == queues("t", 0, 1, 2)


def test_a_queue_moves_when_its_owner_has_let_go() -> None:
    group = group_of({"t": 4})
    join(group, "a")
    before = group.version_of("a")
    assert join(group, "b") == []
    assert group.version_of("a") > before
    assert group.share_of("a").queues == queues("t", 0, 1)
    assert group.owner_of(QueueKey("t", 2)) == "a"  # still: it may be working on it
    # It has seen the share, and has let go of one of the two.
    join(group, "a", queues("t", 0, 1, 3), version=group.version_of("a"))
    assert group.share_of("b").queues == queues("t", 2)
    join(group, "a", queues("t", 0, 1), version=group.version_of("a"))
    assert group.share_of("b").queues == queues("t", 2, 3)


def test_who_has_not_seen_the_new_share_has_not_let_go() -> None:
    group = group_of({"t": 2})
    join(group, "a")
    old = group.version_of("a")
    join(group, "b")
    join(group, "a", [], version=old)  # sent before it was told of any queue to give up
    assert group.owner_of(QueueKey("t", 1)) == "a"
    assert group.share_of("b").queues == []


def test_the_queues_of_who_leaves_are_free_at_once() -> None:
    group = group_of({"t": 2})
    join(group, "a")
    join(group, "b")
    assert group.leave("a")
    assert group.share_of("b").queues == queues("t", 0, 1)
    assert group.share_of("a").queues == []
    assert not group.leave("a")


def test_who_is_silent_is_removed() -> None:
    group = group_of({"t": 2})
    join(group, "a", now=0)
    join(group, "b", now=5)
    assert group.expire(9.9) == []
    assert group.expire(10) == ["a"]
    assert group.share_of("b").queues == queues("t", 0, 1)


def test_each_topic_is_shared_among_those_who_subscribe_to_it() -> None:
    group = group_of({"t": 2, "u": 2})
    join(group, "a", topics=("t",))
    join(group, "b", topics=("u",))
    assert group.share_of("a").queues == queues("t", 0, 1)
    assert group.share_of("b").queues == queues("u", 0, 1)
    assert group.subscriptions() == [Subscription("t"), Subscription("u")]


def test_a_topic_that_shrinks_and_grows() -> None:
    counts = {"t": 2}
    group = group_of(counts)
    join(group, "a")
    counts["t"] = 1
    group.topics_changed()
    assert group.share_of("a").queues == queues("t", 0)
    join(group, "b")  # sorted behind a: the queue that comes back will be its own
    counts["t"] = 2
    group.topics_changed()
    assert group.share_of("b").queues == []  # a has not let go
    join(group, "a", queues("t", 0), version=group.version_of("a"))
    assert group.share_of("b").queues == queues("t", 1)


def test_a_heartbeat_changes_nothing() -> None:
    group = group_of({"t": 2})
    mine = join(group, "a")
    version = group.version
    assert join(group, "a", mine, version=version, now=3) == mine
    assert group.version == version


def test_only_those_concerned_are_told() -> None:
    group = group_of({"t": 1, "u": 2})
    join(group, "a", topics=("t",))
    join(group, "b", topics=("u",))
    join(group, "c", topics=("u",))
    version = group.version_of("a")
    join(group, "b", queues("u", 0), version=group.version_of("b"), topics=("u",))
    assert group.share_of("c").queues == queues("u", 1)
    assert group.version_of("a") == version


def test_a_group_goes_on_from_its_record() -> None:
    group = group_of({"t": 4})
    join(group, "a")
    join(group, "b")
    later = ConsumerGroup(
        "g", {"t": 4}, session_timeout_s=TIMEOUT_S, record=group.record(), now=100
    )
    assert later.share_of("a").queues == queues("t", 0, 1)
    assert later.owner_of(QueueKey("t", 3)) == "a"
    assert later.share_of("b").queues == []
    assert later.version_of("a") > group.version
    assert later.expire(109) == []
    assert later.expire(110) == ["a", "b"]


def test_what_a_member_works_on_is_its_own_if_nobody_remembers() -> None:
    group = group_of({"t": 4})
    join(group, "b", queues("t", 0, 3), version=77)
    assert group.share_of("b").queues == queues("t", 0, 1, 2, 3)
    join(group, "a", queues("t", 0), version=77)
    assert group.owner_of(QueueKey("t", 0)) == "b"


class Worker:
    """A member as it ought to be: it stops work on what it has lost, some time later."""

    def __init__(self) -> None:
        self.version = -1
        self.working: set[QueueKey] = set()
        self.stopping: set[QueueKey] = set()  # still in `working`
        self.inbox: list[tuple[int, set[QueueKey]]] = []  # answers on their way
        self.seen_at = 0.0


class SharingMachine(RuleBasedStateMachine):
    """Members come, go, fall silent, and let go of queues when they like; topics change."""

    @initialize(counts=st.tuples(st.integers(1, 5), st.integers(0, 5)))
    def begin(self, counts: tuple[int, int]) -> None:
        self.now = 0.0
        self.counts = dict(zip(TOPICS, counts, strict=True))
        self.group = group_of(self.counts)
        self.workers: dict[str, Worker] = {}
        self.wanted: dict[str, tuple[str, ...]] = {}

    @rule(member=st.sampled_from(MEMBERS), topics=st.sets(st.sampled_from(TOPICS), min_size=1))
    def subscribe(self, member: str, topics: set[str]) -> None:
        self.workers.setdefault(member, Worker())
        self.wanted[member] = tuple(sorted(topics))
        self.ask(member)

    @rule(member=st.sampled_from(MEMBERS))
    def ask(self, member: str) -> None:
        """JoinGroup; the answer is under way."""
        worker = self.workers.get(member)
        if worker is None:
            return
        worker.seen_at = self.now
        self.group.join(
            member,
            dict.fromkeys(self.wanted[member], "*"),
            worker.working,
            version=worker.version,
            now=self.now,
        )
        share = self.group.share_of(member)
        worker.inbox.append((share.version, set(share.queues)))

    @rule(member=st.sampled_from(MEMBERS))
    def hear(self, member: str) -> None:
        """The member reads an answer. Before its next JoinGroup it has begun what is new."""
        worker = self.workers.get(member)
        if worker is None or not worker.inbox:
            return
        version, share = worker.inbox.pop(0)
        if version >= worker.version:
            worker.version = version
            worker.stopping = worker.working - share
            worker.working |= share

    @rule(member=st.sampled_from(MEMBERS))
    def stop_work(self, member: str) -> None:
        worker = self.workers.get(member)
        if worker is not None:
            worker.working -= worker.stopping
            worker.stopping = set()

    @rule(member=st.sampled_from(MEMBERS))
    def leave(self, member: str) -> None:
        if self.workers.pop(member, None) is not None:
            self.group.leave(member)

    @rule(member=st.sampled_from(MEMBERS))
    def die(self, member: str) -> None:
        """Its work ends, but the group does not know."""
        self.workers.pop(member, None)

    @rule(seconds=st.integers(0, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        for member in list(self.workers):
            if self.now - self.workers[member].seen_at >= TIMEOUT_S:
                del self.workers[member]  # a member that hears nothing stops by itself
        self.group.expire(self.now)

    @rule(topic=st.sampled_from(TOPICS), count=st.integers(0, 5))
    def change_topic(self, topic: str, count: int) -> None:
        self.counts[topic] = count
        self.group.topics_changed()

    @rule()
    def coordinator_is_killed(self) -> None:
        self.group = ConsumerGroup(
            "g",
            self.counts,
            session_timeout_s=TIMEOUT_S,
            record=self.group.record(),
            now=self.now,
        )

    @invariant()
    def nobody_works_on_another_ones_queue(self) -> None:
        if not hasattr(self, "group"):
            return
        at_work = Counter(queue for worker in self.workers.values() for queue in worker.working)
        assert not at_work or max(at_work.values()) == 1, at_work
        for member, worker in self.workers.items():
            for queue in worker.working:
                assert self.group.owner_of(queue) == member, (member, queue)

    @invariant()
    def nobody_who_left_owns_anything(self) -> None:
        if hasattr(self, "group"):
            owners = {owner for of in self.group.record().owners.values() for owner in of.values()}
            assert owners <= set(self.group.members)

    def teardown(self) -> None:
        """Things settle: the dead expire, and the living ask until nothing changes."""
        if not hasattr(self, "group"):
            return
        self.now += TIMEOUT_S
        for _ in range(5):
            for member, worker in self.workers.items():
                self.ask(member)
                worker.inbox = worker.inbox[-1:]
                self.hear(member)
                self.stop_work(member)
                self.ask(member)
                self.nobody_works_on_another_ones_queue()
            self.group.expire(self.now)
        self.everything_is_shared()

    def everything_is_shared(self) -> None:
        for topic in TOPICS:
            members = [member for member in self.workers if topic in self.wanted[member]]
            shares = {
                member: {q for q in self.group.share_of(member).queues if q.topic == topic}
                for member in self.workers
            }
            everything = [queue for share in shares.values() for queue in share]
            assert len(everything) == len(set(everything))
            assert len(everything) == (self.counts[topic] if members else 0)
            sizes = [len(shares[member]) for member in members]
            assert not sizes or max(sizes) - min(sizes) <= 1
            for member, share in shares.items():
                assert share <= self.workers[member].working


SharingMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestSharing = pytest.mark.slow(SharingMachine.TestCase)
