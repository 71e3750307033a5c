"""Ends of an event loop's transactions.

What its tasks end in one turn, or while a command is on its way, shares the next command, for which
neither a task nor a future is made.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from cometmq.client.sending.attempts import typed
from cometmq.client.sending.ends import ATTEMPT_S, Ending, Ends, words_of
from cometmq.protocol.commands import TransactionEnd
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel
from cometmq.protocol.wire.pending import Pending

_retries: Final[set[asyncio.Task[None]]] = set()  # the loop itself does not keep them


class LoopEnding(Ending):
    """An end that a task waits for. Where the task is cancelled the end is sent all the same.

    Args:
        is_over: called once nothing more is tried.
    """

    __slots__ = ("_ends", "_is_over", "done")

    def __init__(
        self,
        broker: str,
        topic: str,
        end: TransactionEnd,
        timeout_s: float,
        ends: LoopEnds,
        is_over: Callable[[], None],
    ) -> None:
        super().__init__(broker, topic, end, timeout_s)
        self._ends = ends
        self._is_over = is_over
        self.done: asyncio.Future[None] = ends.loop.create_future()

    def tell(self, word: CometError | None) -> None:
        """What became of an attempt."""
        wait_s = None if word is None else self.pause_s(word)
        if wait_s is not None:
            task = self._ends.loop.create_task(self._ends.try_again(self, wait_s))
            _retries.add(task)
            task.add_done_callback(_retries.discard)
            return
        self._is_over()
        if self.done.done():  # cancelled
            return
        if word is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(self.told(word))


class LoopEnds:
    """Of one producer. Used in its event loop alone."""

    def __init__(self, ends: Ends, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ends = ends

    def send(self, ending: LoopEnding) -> None:
        """It is told what became of it."""
        ending.attempts += 1
        if self._ends.put(ending):
            self.loop.call_soon(self._send, ending.broker)

    async def try_again(self, ending: LoopEnding, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await asyncio.to_thread(self._ends.find_anew, ending)
        self.send(ending)

    def _send(self, broker: str) -> None:
        _Command(self, broker, self._ends.take(broker)).send(self._ends)

    def is_through(self, broker: str) -> None:
        """A command was answered, or given up."""
        if self._ends.rest(broker):
            self._send(broker)


class _Command:
    """One that is on its way."""

    def __init__(self, ends: LoopEnds, broker: str, batch: Sequence[Ending]) -> None:
        self._ends = ends
        self._broker = broker
        self._batch = batch
        self._alarm: asyncio.TimerHandle | None = None
        self._is_over = False

    def send(self, ends: Ends) -> None:
        try:
            pending, channel = ends.send(self._batch, self._come_home)
        except Exception as error:
            self._tell_all(typed(error))
            return
        self._alarm = self._ends.loop.call_later(ATTEMPT_S, self._late, pending, channel)

    def _come_home(self, pending: Pending) -> None:
        """In the thread that hears the answer."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._ends.loop.call_soon_threadsafe(self._heard, pending)

    def _heard(self, pending: Pending) -> None:
        if self._is_over:
            return
        assert self._alarm is not None, "it is set in the turn that sends"
        self._alarm.cancel()
        try:
            words = words_of(pending, len(self._batch))
        except CometError as error:
            self._tell_all(error)
        else:
            self._tell(words)

    def _late(self, pending: Pending, channel: Channel) -> None:
        self._tell_all(channel.give_up(pending, "EndTransactions", ATTEMPT_S))

    def _tell_all(self, error: CometError) -> None:
        self._tell([error] * len(self._batch))

    def _tell(self, words: Sequence[CometError | None]) -> None:
        self._is_over = True
        for ending, word in zip(self._batch, words, strict=True):
            ending.tell(word)
        self._ends.is_through(self._broker)
