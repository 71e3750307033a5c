"""One run of a pop consumer in order: a take of a queue goes to one thread, a message at a time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from itertools import groupby
from typing import Final

from cometmq.client.handling.work import Seat
from cometmq.client.popping.broker import may_help, taken_of
from cometmq.client.popping.run import AHEAD_S, POLL_S, PopRun, drained, first_of
from cometmq.protocol.errors import CometError
from cometmq.protocol.takes import TAKE_MAX
from cometmq.shm.kernel._kernel import Message

log = logging.getLogger(__name__)

TELL_S: Final = 0.1  # that an acknowledgement waits for others of its take


class OrderedRun(PopRun):
    """Run that handles each queue in order. A failed message ends its take: this consumer no
    longer has the messages behind it."""

    def _turn(self) -> None:
        """Pop for a thread that has nothing to do: what waits here keeps a queue from others."""
        self._release_late()
        with self._changed:
            self._changed.wait_for(
                lambda: self._ends or (not self._todo and self._working < len(self._threads)),
                self._late_in_s(),
            )
            if self._ends or self._todo or self._working >= len(self._threads):
                return
            count = take_count(self._unit_s)
        try:
            found = self._consumer.poll(count, POLL_S)
        except CometError as error:
            if not may_help(error):
                raise
            return  # nobody has been there for long: a run waits until somebody is
        with self._changed:
            self._todo.extend(found)
            self._changed.notify_all()

    def _take(self) -> deque[Message]:
        with self._changed:
            self._changed.wait_for(lambda: self._todo or self._ends)
            if self._ends:
                return deque()
            self._working += 1
            take = deque(takes_of(self._todo)[0])
            for _ in take:
                self._todo.popleft()
            return take

    def _work_through(self, seat: Seat, messages: deque[Message], done: list[Message]) -> None:
        told_at = time.monotonic()
        while not self._ends and (message := first_of(messages)) is not None:
            now = time.monotonic()
            if now >= taken_of(message).until:  # another consumer may have them by now
                self._release([message, *drained(messages)])
                break
            if now - told_at > TELL_S:
                told_at = now
                with self._changed:
                    self._done.extend(done)
                    self._changed.notify_all()
                done.clear()
            if not self._handle(seat, message):
                messages.clear()  # this consumer no longer has them
                break
            done.append(message)


def take_count(unit_s: float) -> int:
    """How many messages of a queue are taken at a time, if one takes so long."""
    return max(1, min(TAKE_MAX, int(AHEAD_S / max(unit_s, 1e-6))))


def takes_of(messages: Iterable[Message]) -> list[list[Message]]:
    """By take; those of a take are neighbours here."""
    takes = groupby(messages, key=lambda message: taken_of(message).popped.handle)
    return [list(take) for _, take in takes]
