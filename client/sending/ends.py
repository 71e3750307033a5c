"""Ends of transactions on their way to a broker, and its word for each of them.

Those of several threads share a command: while one is on its way, the next gathers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from cometmq.client.routes import MASTER, Routes
from cometmq.protocol.commands import (
    ENDS_MAX,
    EndTransactions,
    TransactionEnd,
    TransactionsEnded,
)
from cometmq.protocol.errors import CometError, NotConfirmed, NotReachable, from_code
from cometmq.protocol.retry import pause_after
from cometmq.protocol.wire.channel import Channel, Pending

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

ATTEMPT_S: Final = 3.0  # for an answer; then it is asked again
ROUTE_S: Final = 0.5
COMMAND_PARTS: Final = 1_024  # messages in a command; then no further end


class Ending:
    """An end that waits for the broker's word: None, or an error.

    Args:
        topic: by which the broker's address is found.
    """

    __slots__ = ("attempts", "broker", "deadline", "end", "future", "leads", "topic", "word")

    def __init__(self, broker: str, topic: str, end: TransactionEnd, timeout_s: float) -> None:
        self.broker = broker
        self.topic = topic
        self.end = end
        self.deadline = time.monotonic() + timeout_s
        self.attempts = 0
        self.word: Future[CometError | None]  # of the attempt that is being made, while it waits
        self.future: asyncio.Future[None]  # of a task that waits for it
        self.leads = False  # it is its caller who sends the next command

    def awaited_in(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return what a task of that loop waits for."""
        self.future = loop.create_future()
        return self.future

    def tell(self, word: CometError | None) -> None:
        """The first word counts: an end that was given up and sent again may get two."""
        with suppress(InvalidStateError):
            if not self.word.done():
                self.word.set_result(word)


def pause_until(deadline: float, attempts: int, error: CometError) -> float | None:
    """After how long an end is tried again; None: not any more."""
    if not error.retriable or time.monotonic() >= deadline:
        return None
    return pause_after(attempts, error)


def told(error: CometError, transaction_id: str, commit: bool) -> CometError:
    """What its caller is told."""
    if not isinstance(error, (NotConfirmed, NotReachable)):
        return error
    what = "committed" if commit else "rolled back"
    return NotConfirmed(
        f"nobody says that transaction {transaction_id} is {what} ({error}); where it is not, the "
        "broker asks the checker of a producer of this name"
    )


class Ends:
    """Of one group. Threads may share it.

    Args:
        group: of producers.
    """

    def __init__(self, group: str, routes: Routes) -> None:
        self.group = group
        self._routes = routes
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Ending]] = {}  # by broker
        self._busy: set[str] = set()  # brokers that a command is on its way to
        self._used: dict[str, str] = {}  # where the last command to each broker went

    # --- threads ---

    def end(self, ending: Ending) -> None:
        """Try until the broker has said what became of it; raises why it is not so."""
        while True:
            error = self._attempt(ending)
            if error is None:
                return
            wait_s = pause_until(ending.deadline, ending.attempts, error)
            if wait_s is None:
                raise told(error, ending.end.transaction_id, ending.end.commit)
            time.sleep(wait_s)
            self.find_anew(ending.broker, ending.topic)

    def _attempt(self, ending: Ending) -> CometError | None:
        ending.attempts += 1
        if not self._put(ending):
            try:
                word = ending.word.result(ATTEMPT_S + ROUTE_S)
            except TimeoutError:
                word = None
                if not self._withdraw(ending):
                    return NotConfirmed(f"no answer within {ATTEMPT_S + ROUTE_S:g} s")
            if not ending.leads:
                return word
        batch = self._take(ending.broker)
        words: list[CometError | None] = [NotConfirmed("whoever asked was interrupted")]
        words *= len(batch)
        try:
            command = EndTransactions.of(self.group, [each.end for each in batch])
            pending, channel = self.send(ending.broker, ending.topic, command)
            if not channel.wait(pending, ATTEMPT_S):
                raise channel.give_up(pending, "EndTransactions", ATTEMPT_S)
            errors = words_of(pending, len(batch))
            words = [errors.get(index) for index in range(len(batch))]
        except CometError as error:
            words = [error] * len(batch)
        finally:  # whatever happens here, the others have to go on
            for each, word in zip(batch, words, strict=True):
                if each is not ending:
                    each.tell(word)
            self._hand_on(ending.broker)
        return words[batch.index(ending)]

    def _withdraw(self, ending: Ending) -> bool:
        """It waits no longer; True: it was its turn just now, so that it has to go on."""
        with self._lock:
            if ending.leads:
                return True
            if ending in self._waiting.get(ending.broker, ()):
                self._waiting[ending.broker].remove(ending)
            return False

    def _hand_on(self, broker: str) -> None:
        """Whoever waits longest sends the next command."""
        with self._lock:
            waiting = self._waiting[broker]
            if not waiting:
                self._busy.discard(broker)
                return
            first = waiting[0]
            first.leads = True
        first.tell(None)

    def _put(self, ending: Ending) -> bool:
        """Have it wait for the next command to its broker; True: the caller is to send that."""
        with self._lock:
            self._waiting.setdefault(ending.broker, deque()).append(ending)
            ending.leads = ending.broker not in self._busy
            if ending.leads:
                self._busy.add(ending.broker)
            else:
                ending.word = Future()
            return ending.leads

    def _take(self, broker: str) -> list[Ending]:
        """What the next command holds; the caller's own, which leads, among it."""
        with self._lock:
            return take_some(self._waiting[broker])

    # --- both ---

    def send(
        self,
        broker: str,
        topic: str,
        command: EndTransactions,
        on_done: Callable[[Pending], None] | None = None,
    ) -> tuple[Pending, Channel]:
        """Where the messages go by now: a producer that has given up an end may never ask by itself
        whether the broker has moved, but its next messages do."""
        endpoint = self._used[broker] = self._find(broker, topic)
        channel = self._routes.commitlog(endpoint, f"broker {broker}")
        return channel.request(command, on_done=on_done), channel

    def _find(self, broker: str, topic: str) -> str:
        for each in self._routes.topic(topic, ROUTE_S).brokers:
            if (each.endpoints.broker, each.endpoints.broker_id) == (broker, MASTER):
                return each.endpoints.commitlog
        raise NotReachable(f"no broker {broker} serves topic {topic} now")

    def find_anew(self, broker: str, topic: str) -> None:
        """The broker may have moved."""
        try:
            self._routes.refresh(topic, ROUTE_S)
            endpoint = self._find(broker, topic)
        except CometError as error:
            log.debug("still on the old route: %s", error)
            return
        old = self._used.get(broker)
        if old is not None and old != endpoint:
            self._routes.retire(old)


def take_some(waiting: deque[Ending]) -> list[Ending]:
    """Remove and return the ends that the next command holds: the first, and as many as fit."""
    taken = [waiting.popleft()]
    parts = len(taken[0].end.parts)
    while waiting and len(taken) < ENDS_MAX and parts < COMMAND_PARTS:
        taken.append(waiting.popleft())
        parts += len(taken[-1].end.parts)
    return taken


def words_of(pending: Pending, count: int) -> dict[int, CometError]:
    """What was said of each end that is not so. Raises the answered error."""
    answer, _ = pending.result()
    if not isinstance(answer, TransactionsEnded) or len(answer.codes) != count:
        raise NotConfirmed(f"the broker answered {type(answer).__name__} to {count} ends")
    if not any(answer.codes):
        return {}
    both = zip(answer.codes, answer.texts, strict=True)
    return {index: from_code(code, text) for index, (code, text) in enumerate(both) if code}
