"""Groups by an administrator, with a real broker and members that read meanwhile."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from patience import patient
from receiving import take
from shared_data import data_path
from waiting import until

from cometmq.broker import Broker
from cometmq.client import Admin
from cometmq.client.administration.descriptions import (
    GroupQueueDescription,
    OffsetMove,
    SubscriptionDifference,
)
from cometmq.protocol import errors
from cometmq.testing import Sandbox

pytestmark = pytest.mark.timeout(300)

MEMBERS = 8
LINES = 2_000
WAIT_S = patient(60)


@pytest.fixture
def admin(cometmq: Sandbox) -> Admin:
    return cometmq.admin


@pytest.fixture
def topic(broker: Broker, cometmq: Sandbox) -> str:
    """As many queues as members, with lines of a real log."""
    name = cometmq.topic("moves", MEMBERS)
    with data_path("loghub", "HDFS.log").open("rb") as log, broker.producer() as producer:
        lines = [line.rstrip() for line in islice(log, LINES)]
        for queue_id in range(MEMBERS):
            producer.send_many(name, lines[queue_id::MEMBERS], queue_id=queue_id)
    return name


def joined(admin: Admin, group: str) -> int:
    """None is there before the first one has joined."""
    try:
        return len(admin.describe_group(group).members)
    except errors.GroupNotExist:
        return 0


class Reading:
    """A member in a thread of its own: what it was handed, and when."""

    def __init__(self, broker: Broker, group: str, topic: str, pause_s: float) -> None:
        self.handed: list[tuple[float, int, int]] = []  # when, queue, offset
        self._pause_s = pause_s
        self._consumer = broker.consumer(group, topic, auto_commit_ms=10)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            messages = self._consumer.poll(20, 0.05)
            now = time.monotonic()
            self.handed += [(now, each.queue_id, each.queue_offset) for each in messages]
            self._consumer.ack(messages)
            self._stopped.wait(self._pause_s)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(WAIT_S)
        self._consumer.close()


@pytest.fixture
def members(broker: Broker, topic: str, admin: Admin) -> Iterator[list[Reading]]:
    """A group of the topic's name, each of its members with a queue."""
    found = [Reading(broker, topic, topic, 0.02) for _ in range(MEMBERS)]
    try:
        until(lambda: len({each.member for each in queues(admin, topic)}) == MEMBERS)
        yield found
    finally:
        for each in found:
            each.stop()


def queues(admin: Admin, group: str) -> list[GroupQueueDescription]:
    try:
        return [each for each in admin.describe_group(group).queues if each.member]
    except errors.GroupNotExist:
        return []


def handed(members: list[Reading]) -> list[tuple[float, int, int]]:
    """By all of them, in order of time."""
    return sorted(each for reading in members for each in list(reading.handed))


def first_after(members: list[Reading], since: float, place: int) -> dict[int, float]:
    """Queue -> how long after that time a member was handed what lies there."""
    found: dict[int, float] = {}
    for at, queue_id, offset in handed(members):
        if at >= since and offset == place:
            found.setdefault(queue_id, at - since)
    return found


def has_come(members: list[Reading], since: float, place: int) -> bool:
    return len(first_after(members, since, place)) == MEMBERS


def test_members_go_on_at_the_new_place(
    admin: Admin, topic: str, members: list[Reading], record_property: Callable[[str, object], None]
) -> None:
    """Back, forth and back, while all of them read and commit."""
    per_queue = LINES // MEMBERS
    until(lambda: min(admin.committed(topic, topic).values()) > per_queue // 4)
    took = []
    for to, place in (("earliest", 0), (7, 7), ("earliest", 0)):
        since = time.monotonic()
        if to == "earliest":
            admin.reset_offsets(topic, topic, to)
        else:
            for queue_id in range(MEMBERS):
                admin.reset_offsets(topic, topic, to, queue_id)
        until(partial(has_come, members, since, place))
        took.append(max(first_after(members, since, place).values()))
    record_property("reset_s", took)
    print("all members at the new place after", [f"{each:.3f} s" for each in took])
    # Nothing that was read before undoes it: each is handed all from there on, and in order.
    until(lambda: set(admin.committed(topic, topic).values()) == {per_queue})
    offsets = defaultdict(list)
    for _, queue_id, offset in handed(members):
        offsets[queue_id].append(offset)
    for each in offsets.values():
        last = len(each) - 1 - each[::-1].index(0)
        assert each[last:] == list(range(per_queue))


def test_a_reset_forward_passes_over_what_is_left(
    admin: Admin, broker: Broker, topic: str, members: list[Reading]
) -> None:
    end = LINES // MEMBERS
    admin.reset_offsets(topic, topic, "earliest")
    moved = admin.reset_offsets(topic, topic, "latest")
    assert set(moved.values()) == set(admin.committed(topic, topic).values()) == {end}
    with broker.producer() as producer:
        for queue_id in range(MEMBERS):
            producer.send(topic, b"new", queue_id=queue_id)
    until(lambda: len(first_after(members, 0, end)) == MEMBERS)
    until(lambda: set(admin.committed(topic, topic).values()) == {end + 1})
    for reading in members:
        reading.stop()
    last = {queue_id: offset for _, queue_id, offset in handed(members)}
    assert set(last.values()) == {end}  # what was read before did not come afterwards
    assert set(admin.committed(topic, topic).values()) == {end + 1}


def test_shifts_and_clamps(admin: Admin, broker: Broker, topic: str) -> None:
    with pytest.raises(errors.OffsetIllegal, match="nothing to shift from"):
        admin.shift_offsets("shifted", topic, -5)
    admin.reset_offsets("shifted", topic, "latest")
    end = LINES // MEMBERS
    moved = admin.shift_offsets("shifted", topic, -5)
    assert moved[0] == OffsetMove(broker.name, topic, 0, end, end - 5, end - 5)
    assert admin.describe_group("shifted").lag == 5 * MEMBERS
    (move,) = admin.shift_offsets("shifted", topic, 9, 3)
    assert (move.wanted, move.queue_offset) == (end + 4, end)
    with pytest.raises(errors.OffsetIllegal, match=rf"{end + 1}: queue 3 of .* has 0 to {end}"):
        admin.reset_offsets("shifted", topic, end + 1, 3)
    assert admin.reset_offsets("shifted", topic, end + 1, 3, clamp=True) == {(broker.name, 3): end}


def test_a_clone_reads_on_where_the_group_is(admin: Admin, broker: Broker, topic: str) -> None:
    end = LINES // MEMBERS
    admin.reset_offsets("first", topic, "latest")
    admin.shift_offsets("first", topic, -3)
    assert admin.clone_offsets("first", "second", ["another"]) == 0
    assert admin.clone_offsets("first", "second") == MEMBERS
    with broker.consumer("second", topic) as consumer:
        got = take(consumer, 3 * MEMBERS)
        assert {each.queue_offset for each in got} == {end - 3, end - 2, end - 1}
        with pytest.raises(errors.GroupInUse, match="group second has members"):
            admin.clone_offsets("first", "second")
    with pytest.raises(errors.GroupNotExist):
        admin.clone_offsets("nobody", "second")


def test_a_group_that_may_not_consume_and_may_again(
    admin: Admin, broker: Broker, topic: str
) -> None:
    admin.create_group("quiet", {"retryMaxTimes": 3})
    with pytest.raises(errors.GroupExists, match="retryMaxTimes 3, not 16"):
        admin.create_group("quiet")
    with broker.consumer("quiet", topic) as consumer:
        consumer.ack(take(consumer, 10))
        admin.update_group("quiet", {"consumeEnable": False})

        def refused() -> bool:
            try:
                consumer.poll(1, 0.01)
            except errors.NoPermission as error:
                return "group quiet may not consume" in str(error)
            return False

        until(refused)
        consumer.commit()  # what was done counts
        settings = admin.describe_group("quiet").settings
        assert (settings["consumeEnable"], settings["retryMaxTimes"]) == (False, 3)
        admin.update_group("quiet", {"consumeEnable": True})
        until(lambda: not refused())
        take(consumer, 1)
    with pytest.raises(errors.BadRequest, match="is retryMaxTimes meant"):
        admin.update_group("quiet", {"retryMaxTime": 3})
    with pytest.raises(errors.ArgumentIllegal):
        admin.update_group("quiet", {"retryMaxTimes": object()})


def test_differing_tags(admin: Admin, broker: Broker, topic: str) -> None:
    with (
        broker.consumer("differing", topic, tags="a", member="one"),
        broker.consumer("differing", topic, tags="a", member="two"),
        broker.consumer("differing", topic, tags="b", member="three"),
    ):
        until(lambda: joined(admin, "differing") == 3)
        report = admin.describe_group("differing")
        assert report.differences == [SubscriptionDifference("three", topic, "b", "a")]
        admin.update_group("differing", {"sameSubscriptions": True})
        assert admin.describe_group("differing").settings["sameSubscriptions"]
        with (
            broker.consumer("differing", topic, tags="c", member="four") as consumer,
            pytest.raises(errors.SubscriptionsDiffer, match=r"'c' of .*, others to 'a'"),
        ):
            consumer.poll(1, WAIT_S)


def test_a_deleted_group_begins_anew(admin: Admin, broker: Broker, topic: str) -> None:
    with broker.consumer("deleted", topic) as consumer:
        consumer.ack(take(consumer, LINES))
        consumer.commit()
        with pytest.raises(errors.GroupInUse, match="group deleted has members"):
            admin.delete_group("deleted")
        admin.delete_group("deleted", force=True)
        first = take(consumer, 1)  # the member goes on, from the start
        assert first[0].queue_offset == 0
    admin.delete_group("deleted")
    assert "deleted" not in [each.group for each in admin.groups()]
    with pytest.raises(errors.GroupNotExist):
        admin.delete_group("deleted")


def test_settings_outlive_the_broker(tmp_path: Path) -> None:
    settings = {"consumeTimeoutMinute": 3, "attributes": {"a": "b"}, "sameSubscriptions": True}
    for again in (False, True):
        with (
            Broker(tmp_path / "store", profile="test") as broker,
            Admin(broker.name_server) as admin,
        ):
            if not again:
                admin.create_group("kept", settings)
                admin.create_group("gone")
                admin.delete_group("gone")
            assert admin.describe_group("kept").settings.items() >= settings.items()
            assert [each.group for each in admin.groups()] == ["kept"]
