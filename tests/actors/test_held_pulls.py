"""Held pulls are found by their queue and by their time, however many there are."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from family import RunningBroker
from hypothesis import given
from hypothesis import strategies as st
from patience import patient

from cometmq.actors.reading.held_pulls import HeldPull, HeldPulls
from cometmq.actors.runtime.held import NEVER
from cometmq.client import Admin, Producer
from cometmq.protocol.commands import (
    DescribeQueues,
    GetStatistics,
    PullMessages,
    PullResult,
    PullStatus,
    QueueKey,
    QueueRanges,
    Statistics,
)
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.shm.kernel.live import COUNTER_BYTES, STRIPES, OwnedCell, QueueCursor
from cometmq.shm.live.queue_table import SLOTS_MAX, QueueRange, QueueTable

pytestmark = pytest.mark.timeout(120)


class Writers:
    """A queue table, and who writes it: dispatcher and commitlog process."""

    def __init__(self) -> None:
        self.table, self._count = QueueTable.private()
        memory = mmap.mmap(-1, STRIPES * COUNTER_BYTES)
        self.stripes = [OwnedCell(memory, COUNTER_BYTES * i) for i in range(STRIPES)]
        self.ends = self.table.tell(self.stripes, -1)
        self.cursors: dict[tuple[str, int], QueueCursor] = {}

    def put(self, topic: str, queue_id: int, end: int) -> None:
        key = topic, queue_id
        slot = self._slot(key)
        self.cursors[key].next_offset = end
        self.ends.place(self.cursors[key], slot)  # which tells

    def _slot(self, key: tuple[str, int]) -> int:
        if key not in self.cursors:
            slot = len(self.cursors)
            self.table.fill_slot(slot, *key, QueueRange(0, 0))
            self._count.advance(slot + 1)
            self.cursors[key] = QueueCursor(*key)
            return slot
        return self.cursors[key].slot

    def held_pulls(self) -> HeldPulls:
        actor: Any = Mock()
        return HeldPulls(actor, self.table, self.stripes, Mock())


def held_at(topic: str, queue_id: int, queue_offset: int) -> HeldPull:
    command = PullMessages(topic, queue_id, queue_offset)
    request: Any = Mock(sender=b"one")
    return HeldPull(request, command, queue_offset, NEVER)


def test_only_queues_with_news_are_named() -> None:
    writers = Writers()
    pulls = writers.held_pulls()
    for queue_id in range(10_000):
        writers.put("t", queue_id, 5)
        pulls.add(held_at("t", queue_id, 5))
    assert pulls.with_news(100) == []
    writers.put("t", 4_711, 6)
    writers.put("t", 9_999, 8)
    first, second = pulls.with_news(1), pulls.with_news(1)
    assert sorted(first + second) == [("t", 4_711), ("t", 9_999)]
    assert pulls.with_news(1) == []  # each is named once
    (held,) = pulls.of(("t", 4_711))
    pulls.release(held)
    pulls.looked(("t", 4_711))
    assert pulls.is_behind(("t", 9_999))
    pulls.looked(("t", 9_999))  # and was not answered
    assert pulls.with_news(100) == [("t", 9_999)]
    assert len(pulls) == 9_999


def test_a_queue_that_begins_to_exist() -> None:
    writers = Writers()
    pulls = writers.held_pulls()
    pulls.add(held_at("new", 0, 0))
    writers.put("other", 0, 9)
    assert pulls.with_news(10) == []
    writers.put("new", 0, 1)
    assert pulls.with_news(10) == [("new", 0)]


def test_several_pulls_of_one_queue() -> None:
    """The one that has seen the least decides."""
    writers = Writers()
    writers.put("t", 0, 7)
    pulls = writers.held_pulls()
    ahead, behind = held_at("t", 0, 9), held_at("t", 0, 7)
    pulls.add(ahead)
    pulls.add(behind)
    writers.put("t", 0, 8)
    assert pulls.with_news(10) == [("t", 0)]
    behind.queue_offset = 8  # looked through: not its tag
    pulls.looked(("t", 0))
    assert pulls.with_news(10) == []
    pulls.release(behind)
    writers.put("t", 0, 9)
    pulls.looked(("t", 0))
    assert pulls.with_news(10) == []
    writers.put("t", 0, 10)
    assert pulls.with_news(10) == [("t", 0)]


@given(st.lists(st.tuples(st.sampled_from("asdrn"), st.integers(0, 99), st.integers(0, 4))))
def test_news_are_what_they_would_be_one_by_one(steps: list[tuple[str, int, int]]) -> None:
    """a: appended; s: set; d: discard; n: news, of two queues at most."""
    writers = Writers()
    watch = writers.table.watch(writers.stripes)
    ends, model, named = dict[int, int](), dict[int, int](), set[int]()
    for key in range(100):
        writers.put("t", key, 0)
        ends[key] = 0
    for what, key, value in steps:
        if what == "a" and value > ends[key]:
            writers.put("t", key, value)
            ends[key] = value
        elif what == "s":
            watch.set(key, key, value)
            model[key] = value
            named.discard(key)
        elif what == "d":
            watch.discard(key)
            model.pop(key, None)
            named.discard(key)
        elif what == "n":
            expected = {k for k, seen in model.items() if ends[k] > seen} - named
            found = watch.news(2)
            assert set(found) <= expected
            assert len(found) == len(set(found)) == min(2, len(expected))
            named.update(found)
        assert len(watch) == len(model)
        assert set(watch.stripes()) == {key % STRIPES for key in model}
    rest = {k for k, seen in model.items() if ends[k] > seen} - named
    assert set(watch.news(100)) == rest


def test_a_key_has_one_slot() -> None:
    writers = Writers()
    watch = writers.table.watch(writers.stripes)
    watch.set("key", 1, 0)
    for slot in (2, 1 + STRIPES, SLOTS_MAX, -1):
        with pytest.raises(ValueError, match="slot"):
            watch.set("key", slot, 0)
    with pytest.raises(ValueError, match="slot"):
        watch.end(SLOTS_MAX)


# --- a running reader -----------------------------------------------------------------------------

QUEUES = 512  # many more than there are stripes


@contextmanager
def reader_of(broker: RunningBroker) -> Iterator[Channel]:
    with Admin(broker.address("namesrv")) as admin:
        (endpoints,) = admin.brokers()
    with Channel(endpoints.readers[0], "the reader") as channel:
        yield channel


def held_count(channel: Channel) -> int:
    answer, _ = channel.ask(GetStatistics(), timeout_s=patient(30))
    assert isinstance(answer, Statistics)
    return int(answer.values["held_pulls"])


def pull_all(channel: Channel, ends: dict[int, int], suspend_ms: int) -> dict[int, Pending]:
    return {
        queue_id: channel.request(PullMessages("many", queue_id, end, suspend_ms=suspend_ms))
        for queue_id, end in ends.items()
    }


def ends_of(channel: Channel, count: int) -> dict[int, int]:
    """Where the queues end, once so many messages are counted."""
    keys = [QueueKey("many", queue_id) for queue_id in range(QUEUES)]
    deadline = time.monotonic() + patient(60)
    while True:
        answer, _ = channel.ask(DescribeQueues(keys), timeout_s=patient(30))
        assert isinstance(answer, QueueRanges)
        ends = [reach.max_queue_offset for reach in answer.ranges]
        if sum(ends) == count:
            return dict(enumerate(ends))
        assert time.monotonic() < deadline, f"{sum(ends)} of {count} messages are dispatched"


def result_of(channel: Channel, pending: Pending) -> PullResult:
    assert channel.wait(pending, patient(30))
    answer, _ = pending.result()
    assert isinstance(answer, PullResult)
    return answer


@pytest.mark.slow
def test_of_many_held_pulls_those_are_answered_whose_queue_gets_something(tmp_path: Path) -> None:
    """Queues that exist already, and queues that do not yet."""
    with RunningBroker(tmp_path / "store") as broker:
        name_server = broker.address("namesrv")
        with Admin(name_server) as admin:
            admin.create_topic("many", queues=QUEUES)
        with Producer(name_server) as producer, reader_of(broker) as channel:
            for queue_id in range(0, QUEUES, 2):
                producer.send("many", b"before", queue_id=queue_id)
            ends = ends_of(channel, QUEUES // 2)
            pending = pull_all(channel, ends, 60_000)
            assert held_count(channel) == QUEUES
            for number, queue_id in enumerate((0, 1, 99, 100, QUEUES - 1), 1):
                producer.send("many", b"now", queue_id=queue_id)
                found = result_of(channel, pending[queue_id])
                assert (found.status, found.count) == (PullStatus.FOUND, 1)
                ends[queue_id] += 1
                assert held_count(channel) == QUEUES - number
            for each in pull_all(channel, ends, 200).values():  # beside those that go on waiting
                assert result_of(channel, each).status == PullStatus.NO_NEW_MESSAGE
            assert held_count(channel) == QUEUES - 5
