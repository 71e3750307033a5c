"""Giving back: what was not consumed goes to the broker, which delivers it again later.

A thread of its own asks, so that nobody who hands messages out waits for a broker. Until the broker
has said that it keeps the copy, a message is not acknowledged. In broadcasting nothing is given
back: what one member cannot do is nobody else's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from cometmq.client.handling.outcomes import Verdict
from cometmq.client.handling.work import Strand, Track
from cometmq.client.receiving.member import Member
from cometmq.protocol.commands import GivenBack
from cometmq.protocol.errors import CometError, NotConfirmed
from cometmq.protocol.retry import pause_s
from cometmq.protocol.wire.steady import Steady
from cometmq.shm.kernel.codec import Message

log = logging.getLogger(__name__)

ASK_S: Final = 10.0
ASK_COUNT: Final = 1_024  # messages in one command
CLOSE_S: Final = 5.0


class Failure(NamedTuple):
    """A failed delivery."""

    track: Track
    messages: list[Message]
    verdict: Verdict
    strand: Strand | None = None  # that waits for the outcome


class Outcome(NamedTuple):
    """Which of a failure's messages the broker has now, and which it has not."""

    failure: Failure
    kept: list[Message]
    left: list[Message]


Settled = Callable[[list[Outcome]], None]


class Drops:
    """In place of `Returns`, in broadcasting: a failed delivery is done with, at once.

    RocketMQ ConsumeMessageConcurrentlyService.processConsumeResult: "BROADCASTING, the message
    consume failed, drop it".
    """

    def __init__(self, settled: Settled) -> None:
        self._settled = settled

    def put(self, failure: Failure) -> None:
        self._settled([Outcome(failure, failure.messages, [])])

    def wait(self, _timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


class Returns:
    """Threads may share it.

    Args:
        settled: told what has become of failures. Called in the thread.
    """

    def __init__(self, member: Member, max_reconsume_times: int | None, settled: Settled) -> None:
        self._member = member
        self._max_reconsume_times = -1 if max_reconsume_times is None else max_reconsume_times
        self._settled = settled
        self._changed = threading.Condition()
        self._waiting: deque[Failure] = deque()
        self._asking = False
        self._closed = False
        self._told = False  # that it does not work
        self._thread = Steady(f"cometmq returns {member.group}", self._turn)

    def put(self, failure: Failure) -> None:
        with self._changed:
            self._waiting.append(failure)
            self._changed.notify_all()
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is nothing to give back; False if there still is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_idle, max(0.0, timeout_s))

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._asking

    def close(self) -> None:
        """What was not given back yet is not, and so is not acknowledged."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    # --- the thread ---

    def _turn(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return False
            failures = self._take()
            self._asking = True
        try:
            self._give_back(failures)
        finally:
            with self._changed:
                self._asking = False
                self._changed.notify_all()
        return True

    def _take(self) -> list[Failure]:
        """The next ones that go to one broker, as many as one command may name."""
        taken = [self._waiting.popleft()]
        count = len(taken[0].messages)
        while self._waiting:
            failure = self._waiting[0]
            count += len(failure.messages)
            if count > ASK_COUNT or failure.track.queue.broker != taken[0].track.queue.broker:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _give_back(self, failures: list[Failure]) -> None:
        broker = failures[0].track.queue.broker
        given = [_given(each, message) for each in failures for message in each.messages]
        codes: list[int] = []
        for begin in range(0, len(given), ASK_COUNT):
            codes += self._ask(broker, given[begin : begin + ASK_COUNT])
        outcomes = []
        answers = iter(codes)
        for failure in failures:
            kept: list[Message] = []
            left: list[Message] = []
            for message in failure.messages:
                (left if next(answers) else kept).append(message)
            outcomes.append(Outcome(failure, kept, left))
        self._settled(outcomes)

    def _ask(self, broker: str, given: list[GivenBack]) -> list[int]:
        try:
            codes = self._ask_until_known(broker, given)
        except CometError as error:
            codes = [error.code or -1] * len(given)
            self._tell(str(error), given[0])
        else:
            refused = [(each, code) for each, code in zip(given, codes, strict=True) if code]
            if refused:
                self._tell(f"error {refused[0][1]} of the broker", refused[0][0])
            else:
                self._told = False
        return codes

    def _ask_until_known(self, broker: str, given: list[GivenBack]) -> list[int]:
        """Give messages back and return the code of each. While a stored copy is not confirmed, ask
        again until ASK_S has passed: a message retried here at once would be delivered a second
        time by that copy. Raises the error of the first request."""
        deadline = time.monotonic() + ASK_S
        codes = self._member.give_back(broker, given, self._max_reconsume_times, ASK_S)
        failures = 0
        while unsure := [at for at, code in enumerate(codes) if code == NotConfirmed.code]:
            failures += 1
            if time.monotonic() >= deadline or self._is_closed_within(pause_s(failures)):
                break
            some = [given[at] for at in unsure]
            try:
                again = self._member.give_back(broker, some, self._max_reconsume_times, ASK_S)
            except CometError as error:
                log.debug("group %s: repeated request failed: %s", self._member.group, error)
                continue
            for at, code in zip(unsure, again, strict=True):
                codes[at] = code
        return codes

    def _is_closed_within(self, wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, wait_s)

    def _tell(self, why: str, first: GivenBack) -> None:
        level = logging.DEBUG if self._told else logging.WARNING
        self._told = True
        log.log(
            level,
            "group %s: %s/%d offset %d cannot be given back (%s); it is tried again here",
            self._member.group,
            first.topic,
            first.queue_id,
            first.queue_offset,
            why,
        )


def _given(failure: Failure, message: Message) -> GivenBack:
    return GivenBack(
        message.stored_topic,
        message.queue_id,
        message.queue_offset,
        message.physical_offset,
        failure.verdict.delay_level,
        failure.verdict.after_ms,
    )
