"""What was read is checked anew in each run of the broker, whichever run a check or a pull has
met (Fault 4)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from patience import patient

from cometmq.client.receiving.buffer import NO_RUN, Chunk, Queue
from cometmq.client.receiving.owned import OwnedQueues
from cometmq.client.receiving.pulling import Puller
from cometmq.client.receiving.replicas import Replicas
from cometmq.protocol.commands import BrokerEndpoints, PullResult, PullStatus, QueueOffset
from cometmq.protocol.errors import CometError, ShuttingDown

ENDS = BrokerEndpoints("c", "b", 0, "", ["tcp://reader"], "tcp://coordinator")
TOLD = [-1]  # what is committed: not known


class Reads:
    """One queue, its puller, and the pulls that wait for an answer."""

    def __init__(self) -> None:
        self.sent: list[Callable[[Any], None]] = []
        self.doubts: list[str] = []
        lock: Any = threading.Lock()
        self.puller = Puller(
            lock,
            pull_bytes=1_000,
            prefetch_bytes=1_000,
            prefetch_count=10,
            on_trouble=lambda: None,
            on_doubt=self.doubts.append,
        )
        channel = Mock(descriptors=lambda: (), look_in_s=None)
        channel.request.side_effect = self._request
        self.puller._channels[ENDS.readers[0]] = channel
        self.owned = OwnedQueues(lock, self.puller.note)
        self.owned.subscribe("t", "*", "")
        self.owned.take_on("b", Replicas([ENDS]), [QueueOffset("t", 0, 5)])
        (self.queue,) = self.owned.find("t", 0)
        self.puller.begin()

    def _request(self, _command: object, on_done: Callable[[Any], None], **_: object) -> Mock:
        self.sent.append(on_done)
        return Mock(handed_over=True)

    def answer(self, result: PullResult | CometError) -> None:
        pending = Mock()
        if isinstance(result, CometError):
            pending.result.side_effect = result
        else:
            pending.result.return_value = result, ()
        self.sent.pop(0)(pending)
        self.puller.take_in()

    def fail(self) -> None:
        """The pull fails, and the next one is due: it waits until the doubt is settled."""
        self.answer(ShuttingDown("the broker is shutting down"))
        self.puller._check(time.monotonic() + patient(60))
        assert self.queue.doubtful
        assert not self.sent
        assert self.doubts

    def settle(self) -> None:
        """Some run of the broker has what was read."""
        self.owned.trust(self.owned.doubts_of("b"), TOLD)
        self.puller.begin()


def looked_to(end: int, run: int) -> PullResult:
    return PullResult(PullStatus.NO_MATCHED_MESSAGE, end, 0, end, run=run)


@pytest.fixture
def reads() -> Iterator[Reads]:
    found = Reads()
    yield found
    found.puller.close()


def test_pull_answered_by_the_next_run_after_a_check_is_checked_again(reads: Reads) -> None:
    """The check has asked the run that ends, and the pull waited for a connection meanwhile."""
    reads.answer(looked_to(10, run=1))
    reads.fail()
    reads.settle()
    reads.answer(looked_to(20, run=2))
    assert reads.queue.doubtful
    assert reads.queue.next_offset == 10
    assert not reads.sent
    reads.settle()
    reads.answer(looked_to(20, run=2))
    assert not reads.queue.doubtful
    assert reads.queue.next_offset == 20


def test_check_before_the_first_answer_is_repeated_after_it(reads: Reads) -> None:
    """No run is known yet, so that none can be another one."""
    reads.fail()
    reads.settle()
    reads.answer(looked_to(20, run=2))
    assert reads.queue.doubtful
    assert reads.queue.next_offset == 5
    reads.settle()
    reads.answer(looked_to(20, run=2))
    assert not reads.queue.doubtful
    assert reads.queue.next_offset == 20


def test_same_run_after_a_failure_is_checked_once(reads: Reads) -> None:
    reads.answer(looked_to(10, run=1))
    reads.fail()
    reads.settle()
    reads.answer(looked_to(20, run=1))
    assert not reads.queue.doubtful
    assert reads.queue.next_offset == 20


def test_older_broker_names_no_run(reads: Reads) -> None:
    reads.fail()
    reads.settle()
    reads.answer(looked_to(20, run=NO_RUN))
    assert not reads.queue.doubtful
    assert reads.queue.next_offset == 20


def test_queue_that_waits_to_be_tried_again_is_pulled_once(reads: Reads) -> None:
    """Settled before its pause is over; two pulls at once bring its messages twice."""
    reads.answer(ShuttingDown("the broker is shutting down"))
    reads.settle()
    assert len(reads.sent) == 1
    reads.puller._check(time.monotonic() + patient(10))
    assert len(reads.sent) == 1


def test_check_of_an_earlier_doubt_does_not_settle_a_later_one(reads: Reads) -> None:
    reads.answer(looked_to(10, run=1))
    reads.fail()
    asked = reads.owned.doubts_of("b")
    reads.queue.doubt()
    reads.owned.trust(asked, TOLD)
    assert reads.queue.doubtful
    reads.settle()
    assert not reads.queue.doubtful


def test_move_leaves_a_doubt_to_its_check(reads: Reads) -> None:
    reads.fail()
    reads.owned.move([reads.queue], [7])
    reads.puller.begin()
    assert not reads.sent
    reads.settle()
    assert len(reads.sent) == 1
    assert reads.queue.next_offset == 7


def test_last_message_read_is_the_one_farthest_in_the_queue() -> None:
    """Chunks are decoded in any order when their queue becomes doubtful."""
    queue = Queue(Replicas([ENDS]), "b", "t", 0, "*", 0)
    for first in (10, 0):
        messages: Any = [
            Mock(queue_offset=each, physical_offset=100 * each, store_timestamp_ms=each)
            for each in range(first, first + 10)
        ]
        chunk = Chunk(queue, first, first + 10, None, 10, messages)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cometmq.client.receiving.buffer.set_source", Mock())
            chunk.arrange()
    assert queue.seen is not None
    assert queue.seen.queue_offset == 19
