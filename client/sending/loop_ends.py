"""Ends of an event loop's transactions.

What its tasks end while a command is on its way shares the next command.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol

from cometmq.client.sending.attempts import typed
from cometmq.client.sending.ends import ATTEMPT_S, COMMAND_PARTS, Ends, pause_until, told, words_of
from cometmq.client.sending.in_loop import call_home
from cometmq.client.sending.overdue import Overdue
from cometmq.protocol.commands import EndTransactions
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel
from cometmq.protocol.wire.pending import Pending
from cometmq.shm.kernel._kernel import TaskTransaction, are_over, end_columns

_retries: Final[set[asyncio.Task[None]]] = set()  # the loop itself does not keep them


class Shared(Protocol):
    """What the transactions of a producer share, as far as their ends need it."""

    loop: asyncio.AbstractEventLoop
    ending: dict[str, list[TaskTransaction]]

    def go_on(self, some: list[TaskTransaction]) -> None: ...
    def fail(self, some: list[TaskTransaction], error: Exception) -> None: ...


class LoopEnds:
    """Of one producer. Used in its event loop alone."""

    def __init__(self, ends: Ends, shared: Shared) -> None:
        self.ends = ends
        self.shared = shared
        self._busy: set[str] = set()  # brokers that a command is on its way to
        self.overdue = Overdue(_Command.late)

    def forget(self) -> None:
        """There is another loop: nobody hears what was asked in the last one."""
        self._busy.clear()

    def send(self) -> None:
        """What waits for brokers that nothing is on its way to."""
        for broker in [*self.shared.ending]:
            if broker not in self._busy:
                self._send(broker)

    def _send(self, broker: str) -> None:
        waiting = self.shared.ending
        some = waiting.pop(broker)
        count, columns = end_columns(some, COMMAND_PARTS)
        if count < len(some):
            waiting[broker] = some[count:]
            some = some[:count]
        self._busy.add(broker)
        _Command(self, broker, some).send(EndTransactions(self.ends.group, *columns))

    def is_through(self, broker: str) -> None:
        """A command was answered, or given up."""
        self._busy.discard(broker)
        if broker in self.shared.ending:
            self._send(broker)

    def failed(self, transaction: TaskTransaction, error: CometError) -> None:
        """An attempt has."""
        wait_s = pause_until(transaction._deadline, transaction._attempts, error)
        if wait_s is not None:
            task = self.shared.loop.create_task(self._try_again(transaction, wait_s))
            _retries.add(task)
            task.add_done_callback(_retries.discard)
            return
        are_over([transaction])
        own = told(error, transaction._id, bool(transaction._ended))
        self.shared.fail([transaction], own)

    async def _try_again(self, transaction: TaskTransaction, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        topic = transaction._parts[0].topic
        await asyncio.to_thread(self.ends.find_anew, transaction._broker, topic)
        transaction._end_again()


class _Command:
    """One that is on its way."""

    def __init__(self, ends: LoopEnds, broker: str, transactions: list[TaskTransaction]) -> None:
        self._ends = ends
        self._broker = broker
        self._transactions = transactions
        self._loop = ends.shared.loop
        self._asked: tuple[Pending, Channel] | None = None
        self._is_over = False
        self.limit = time.monotonic() + ATTEMPT_S

    def send(self, command: EndTransactions) -> None:
        try:
            ends, topic = self._ends.ends, command.topics[0]
            self._asked = ends.send(self._broker, topic, command, self._come_home)
        except Exception as error:
            self._fail(typed(error))
            return
        self._ends.overdue.add(self._loop, self)

    def _come_home(self, pending: Pending) -> None:
        """In the thread that hears the answer."""
        call_home(self._loop, self._heard, pending)

    def _heard(self, pending: Pending) -> None:
        if self._is_over:
            return
        self._ends.overdue.discard(self)
        try:
            errors = words_of(pending, len(self._transactions))
        except CometError as error:
            self._fail(error)
        else:
            self._tell(errors)

    def late(self) -> None:
        assert self._asked is not None, "it was sent"
        pending, channel = self._asked
        self._fail(channel.give_up(pending, "EndTransactions", ATTEMPT_S))

    def _fail(self, error: CometError) -> None:
        self._tell(dict.fromkeys(range(len(self._transactions)), error))

    def _tell(self, errors: dict[int, CometError]) -> None:
        """What came of each: an error, or nothing."""
        self._is_over = True
        self._ends.is_through(self._broker)  # it has the next while tasks go on
        some = self._transactions
        if errors:
            some = [each for index, each in enumerate(some) if index not in errors]
        are_over(some)
        for index, error in errors.items():
            self._ends.failed(self._transactions[index], error)
        self._ends.shared.go_on(some)
