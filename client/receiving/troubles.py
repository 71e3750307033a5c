"""Pulls that fail, or are not answered: when each queue is tried again, and what the log says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import takewhile
from typing import Final

from cometmq.client.receiving.buffer import Queue
from cometmq.protocol.retry import pause_s

log = logging.getLogger(__name__)

COMPLAIN_AFTER: Final = 5  # pulls that failed one after the other


class Troubles:
    """Queues with a pull on its way, and those whose last one failed. Used in the polling thread;
    another one may move a queue meanwhile (`Queue.discard`), which then stands here for nothing.

    Args:
        is_steady: whether a broker is there: what fails of one that is away is not worth a line.
    """

    def __init__(self, is_steady: Callable[[str], bool]) -> None:
        self._is_steady = is_steady
        self._asked: dict[Queue, None] = {}  # in the order in which their pulls were sent
        self._waiting: dict[Queue, None] = {}  # to be tried again, if `retry_at` still says so
        self._complained: set[str] = set()  # brokers of which the log says that pulls fail

    # --- answers that do not come ---

    def tried(self, queue: Queue) -> None:
        """It is read now, whatever it waited for: another pull beside that would bring its
        messages twice."""
        queue.retry_at = 0.0
        self._waiting.pop(queue, None)

    def asked(self, queue: Queue) -> None:
        queue.pulling = True
        queue.pull_sent_at = time.monotonic()
        self._asked.pop(queue, None)
        self._asked[queue] = None

    def answered(self, queue: Queue) -> None:
        queue.pulling = False
        self._asked.pop(queue, None)

    def take_late(self, sent_before: float) -> list[Queue]:
        """Those whose pull was sent before that time and is not answered."""
        sent = self._sent(sent_before)
        for queue in sent:
            del self._asked[queue]
        return [queue for queue in sent if queue.pulling]

    def take_unsent(self, asked_before: float) -> list[Queue]:
        """Those whose pull has waited since that time for a connection."""
        sent = [queue for queue in self._sent(asked_before) if queue.is_unsent]
        for queue in sent:
            del self._asked[queue]
        return [queue for queue in sent if queue.pulling]

    def _sent(self, before: float) -> list[Queue]:
        return list(takewhile(lambda queue: queue.pull_sent_at < before, self._asked))

    # --- pulls that failed ---

    def failed(self, queue: Queue, text: str) -> None:
        """Try again later."""
        self.answered(queue)
        queue.failures += 1
        if self._complains(queue):
            self._complained.add(queue.broker)
            log.warning("%s: %s; trying again", queue, text)
        else:
            log.debug("%s: %s; trying again", queue, text)
        self.retry_later(queue)

    def _complains(self, queue: Queue) -> bool:
        """Whether it is time to say that a broker that is there cannot be read; once for each."""
        return (
            queue.failures >= COMPLAIN_AFTER
            and queue.broker not in self._complained
            and self._is_steady(queue.broker)
        )

    def works_again(self, queue: Queue) -> None:
        queue.failures = 0
        if queue.broker in self._complained:
            self._complained.discard(queue.broker)
            log.info("%s: it can be read again", queue)

    def retry_later(self, queue: Queue) -> None:
        queue.retry_at = time.monotonic() + pause_s(queue.failures)
        self._waiting[queue] = None

    def forget(self, queue: Queue) -> None:
        """It is read no longer."""
        self._asked.pop(queue, None)
        self._waiting.pop(queue, None)

    def take_due(self, now: float) -> list[Queue]:
        """Those whose pause is over; they wait no longer."""
        due = []
        for queue in list(self._waiting):
            if queue.retry_at <= now:
                del self._waiting[queue]
                if queue.retry_at:  # else it was moved meanwhile
                    queue.retry_at = 0.0
                    due.append(queue)
        return due

    def next_at(self, at_most: float) -> float:
        """When the next pause is over: time.monotonic()."""
        return min([at_most, *(queue.retry_at for queue in self._waiting)])
