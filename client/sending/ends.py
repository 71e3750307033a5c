"""Ends of transactions on their way to a broker, and its word for each of them.

Those of several threads share a command: while one is on its way, the next gathers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Final

from cometmq.client.routes import MASTER, Routes
from cometmq.protocol.commands import (
    ENDS_MAX,
    EndTransactions,
    TransactionEnd,
    TransactionsEnded,
)
from cometmq.protocol.errors import CometError, NotConfirmed, NotReachable, from_code
from cometmq.protocol.retry import pause_s
from cometmq.protocol.wire.channel import Channel, Pending

log = logging.getLogger(__name__)

ATTEMPT_S: Final = 3.0  # for an answer; then it is asked again
ROUTE_S: Final = 0.5
COMMAND_PARTS: Final = 1_024  # messages in a command; then no further end
LINE_ENDS: Final = 64  # in a command that goes by a line: the longest answer fits into a packet


Word = Future[CometError | None] | asyncio.Future[CometError | None]


class Ending:
    """An end that waits for the broker's word: None, or an error.

    Args:
        topic: by which the broker's address is found.
    """

    __slots__ = ("attempts", "broker", "deadline", "end", "leads", "topic", "word")

    def __init__(self, broker: str, topic: str, end: TransactionEnd, timeout_s: float) -> None:
        self.broker = broker
        self.topic = topic
        self.end = end
        self.deadline = time.monotonic() + timeout_s
        self.attempts = 0
        self.word: Word  # of the attempt that is being made
        self.leads = False  # it is its caller who sends the next command

    def begin(self, word: Word) -> None:
        """One more attempt."""
        self.word = word
        self.leads = False
        self.attempts += 1

    def pause_s(self, error: CometError) -> float | None:
        """After how long it is tried again; None: not any more."""
        if not error.retriable or time.monotonic() >= self.deadline:
            return None
        return pause_s(self.attempts)

    def tell(self, word: CometError | None) -> None:
        """The first word counts: an end that was given up and sent again may get two."""
        with suppress(InvalidStateError):
            if not self.word.done():
                self.word.set_result(word)

    def told(self, error: CometError) -> CometError:
        """What its caller is told."""
        if not isinstance(error, (NotConfirmed, NotReachable)):
            return error
        what = "committed" if self.end.commit else "rolled back"
        return NotConfirmed(
            f"nobody says that transaction {self.end.transaction_id} is {what} ({error}); where it "
            "is not, the broker asks the checker of a producer of this name"
        )


class Ends:
    """Of one group. Threads may share it.

    Args:
        group: of producers.
    """

    def __init__(self, group: str, routes: Routes) -> None:
        self._group = group
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
            wait_s = ending.pause_s(error)
            if wait_s is None:
                raise ending.told(error)
            time.sleep(wait_s)
            self.find_anew(ending)

    def _attempt(self, ending: Ending) -> CometError | None:
        own: Future[CometError | None] = Future()
        ending.begin(own)
        if not self.put(ending):
            try:
                word = own.result(ATTEMPT_S + ROUTE_S)
            except TimeoutError:
                word = None
                if not self._withdraw(ending):
                    return NotConfirmed(f"no answer within {ATTEMPT_S + ROUTE_S:g} s")
            if not ending.leads:
                return word
        batch = self.take(ending.broker)
        words: list[CometError | None] = [NotConfirmed("whoever asked was interrupted")]
        words *= len(batch)
        try:
            pending, channel = self.send(batch, None)
            if not channel.wait(pending, ATTEMPT_S):
                raise channel.give_up(pending, "EndTransactions", ATTEMPT_S)
            words = words_of(pending, len(batch))
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

    # --- both ---

    def put(self, ending: Ending) -> bool:
        """Have it wait for the next command to its broker; True: the caller is to send that."""
        with self._lock:
            self._waiting.setdefault(ending.broker, deque()).append(ending)
            if ending.broker in self._busy:
                return False
            self._busy.add(ending.broker)
            return True

    def take(self, broker: str) -> list[Ending]:
        """What the next command holds; the caller's own, which leads, among it."""
        with self._lock:
            waiting = self._waiting[broker]
            parts = sum([len(each.end.parts) for each in waiting])
            if parts <= COMMAND_PARTS and len(waiting) <= ENDS_MAX:
                taken = [*waiting]
                waiting.clear()
                return taken
            taken = [waiting.popleft()]
            parts = len(taken[0].end.parts)
            while waiting and len(taken) < ENDS_MAX and parts < COMMAND_PARTS:
                taken.append(waiting.popleft())
                parts += len(taken[-1].end.parts)
            return taken

    def rest(self, broker: str) -> bool:
        """Whether more waits; if not, nothing is on its way any more."""
        with self._lock:
            if not self._waiting[broker]:
                self._busy.discard(broker)
                return False
            return True

    def send(
        self, batch: Sequence[Ending], on_done: Callable[[Pending], None] | None
    ) -> tuple[Pending, Channel]:
        """Where the messages go by now: a producer that has given up an end may never ask by itself
        whether the broker has moved, but its next messages do."""
        first = batch[0]
        endpoint = self._used[first.broker] = self._find(first.broker, first.topic)
        channel = self._routes.commitlog(endpoint, f"broker {first.broker}")
        command = EndTransactions.of(self._group, [each.end for each in batch])
        by_line = len(batch) <= LINE_ENDS
        return channel.request(command, on_done=on_done, by_line=by_line), channel

    def _find(self, broker: str, topic: str) -> str:
        for each in self._routes.topic(topic, ROUTE_S).brokers:
            if (each.endpoints.broker, each.endpoints.broker_id) == (broker, MASTER):
                return each.endpoints.commitlog
        raise NotReachable(f"no broker {broker} serves topic {topic} now")

    def find_anew(self, ending: Ending) -> None:
        """Its broker may have moved."""
        try:
            self._routes.refresh(ending.topic, ROUTE_S)
            endpoint = self._find(ending.broker, ending.topic)
        except CometError as error:
            log.debug("still on the old route: %s", error)
            return
        old = self._used.get(ending.broker)
        if old is not None and old != endpoint:
            self._routes.retire(old)


def words_of(pending: Pending, count: int) -> list[CometError | None]:
    """What became of each end. Raises the answered error."""
    answer, _ = pending.result()
    if not isinstance(answer, TransactionsEnded) or len(answer.codes) != count:
        raise NotConfirmed(f"the broker answered {type(answer).__name__} to {count} ends")
    return [
        from_code(code, text) if code else None
        for code, text in zip(answer.codes, answer.texts, strict=True)
    ]
