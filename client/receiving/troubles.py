"""Pulls that fail: when each queue is tried again, and what the log says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from cometmq.client.receiving.buffer import Queue
from cometmq.protocol.retry import pause_s

log = logging.getLogger(__name__)

COMPLAIN_AFTER: Final = 5  # pulls that failed one after the other


class Troubles:
    """Queues whose last pull failed. Used in the polling thread; another one may move a queue
    meanwhile (`Queue.discard`), which then stands here for nothing.

    Args:
        is_steady: whether a broker is there: what fails of one that is away is not worth a line.
    """

    def __init__(self, is_steady: Callable[[str], bool]) -> None:
        self._is_steady = is_steady
        self._waiting: dict[Queue, None] = {}  # to be tried again, if `retry_at` still says so
        self._complained: set[str] = set()  # brokers of which the log says that pulls fail

    def tried(self, queue: Queue) -> None:
        """It is read now, whatever it waited for: another pull beside that would bring its
        messages twice."""
        queue.retry_at = 0.0
        self._waiting.pop(queue, None)

    # --- pulls that failed ---

    def failed(self, queue: Queue, text: str) -> None:
        """Try again later."""
        queue.pulling = False
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
