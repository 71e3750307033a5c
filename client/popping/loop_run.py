"""A run of an AsyncPopConsumer: a task for each message, or, in order, for each take."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from cometmq.client.handling.failures import FailureLog
from cometmq.client.handling.options import Handler, Handling
from cometmq.client.handling.outcomes import Verdict, failure_in, verdict_of
from cometmq.client.handling.stuck import Watch
from cometmq.client.handling.work import Seat, describe
from cometmq.client.popping.broker import may_help, taken_of
from cometmq.client.popping.ordered_run import take_count, takes_of
from cometmq.client.popping.run import POLL_S, Popping
from cometmq.protocol.errors import CometError
from cometmq.shm.kernel._kernel import Message

log = logging.getLogger(__name__)

ACK_S: Final = 0.01  # that an acknowledgement waits for others
GIVE_BACK_S: Final = 5.0  # for what cancelled handlers had

_T = TypeVar("_T")

InThread = Callable[..., Coroutine[Any, Any, Any]]


class LoopRun:
    """Used in one event loop.

    Args:
        in_thread: has a call made in a thread.
        poll: the consumer's, in a thread; a cancelled one releases its messages.
        handler: with its middleware.
        failures: the log's.
    """

    def __init__(
        self,
        consumer: Popping,
        in_thread: InThread,
        poll: Callable[[int, float], Coroutine[Any, Any, list[Message]]],
        handler: Handler,
        handling: Handling,
        failures: FailureLog,
        *,
        in_order: bool,
    ) -> None:
        self.over = asyncio.Event()
        self.tasks: dict[asyncio.Task[object], Seat] = {}  # what each is at work with
        self._consumer = consumer
        self._in_thread = in_thread
        self._poll_in_thread = poll
        self._handler = handler
        self._concurrency = handling.concurrency
        self._end_timeout_s = handling.end_timeout_s
        self._watch = Watch(handling.stuck_s)
        self._failures = failures
        self._turn = self._turn_in_order if in_order else self._turn_freely
        self._ends = False  # nothing more is begun
        self._cancels = False  # its handlers
        self._raised: BaseException | None = None  # by a handler: it wants the process to end
        self._done: list[Message] = []  # not acknowledged yet
        self._acking: asyncio.Task[None] | None = None
        self._takes: deque[list[Message]] = deque()  # orderly: takes that wait for a task
        self._unbegun: list[Message] = []
        self._unit_s = 0.01  # that a message took lately

    def end(self) -> None:
        """Begin nothing more."""
        self._ends = True

    async def work(self) -> None:
        """Until `end`. Raises what a handler raised that wants the process to end."""
        try:
            while not self._ends:
                self._watch.look(self.tasks.values())
                await self._release_late()
                if len(self.tasks) < self._concurrency:
                    await self._turn()
                else:
                    await asyncio.wait(
                        self.tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                    )
        except asyncio.CancelledError:
            self._cancel()
            raise
        finally:
            self._ends = True
            await self._finish()
        if self._raised is not None:
            raise self._raised

    # --- what is handled ---

    async def _poll(self, count: int) -> list[Message]:
        try:
            found = await self._poll_in_thread(count, POLL_S)
        except CometError as error:
            if not may_help(error):
                raise
            return []  # nobody has been there for long: a run waits until somebody is
        return found

    async def _turn_freely(self) -> None:
        """Pop as many as there are free tasks."""
        for message in await self._poll(self._concurrency - len(self.tasks)):
            if self._ends:
                self._unbegun.append(message)
            else:
                self._begin(self._handle, message, [message])

    async def _turn_in_order(self) -> None:
        """Pop for a task that has nothing to do: what waits here keeps a queue from others."""
        if not self._takes:
            self._takes.extend(takes_of(await self._poll(take_count(self._unit_s))))
        elif not self._ends:
            take = self._takes.popleft()
            self._begin(self._handle_take, take, take)

    def _begin(
        self, work: Callable[[_T], Coroutine[Any, Any, object]], unit: _T, take: list[Message]
    ) -> None:
        has_begun = False

        async def begin() -> None:
            nonlocal has_begun
            has_begun = True
            await work(unit)

        def is_over(task: asyncio.Task[object]) -> None:
            del self.tasks[task]
            if not has_begun:  # cancelled before the handler began
                self._unbegun.extend(take)

        task: asyncio.Task[object] = asyncio.create_task(begin())
        seat = self.tasks[task] = Seat()
        seat.unit, seat.since = take[0], time.monotonic()
        task.add_done_callback(is_over)

    async def _handle_take(self, messages: list[Message]) -> None:
        """Up to the first that fails: what comes behind it is not this consumer's any more."""
        task = asyncio.current_task()
        assert task is not None
        for at, message in enumerate(messages):
            began = time.monotonic()
            if self._ends or began >= taken_of(message).until:
                self._unbegun.extend(messages[at:])
                return
            seat = self.tasks[task]
            seat.unit, seat.since = message, began
            if not await self._handle(message):
                return
            self._unit_s += (time.monotonic() - began - self._unit_s) / 16

    async def _handle(self, message: Message) -> bool:
        """Whether it is done with."""
        try:
            failure = failure_in(await self._handler(message))
        except asyncio.CancelledError as error:
            if self._cancels:
                await self._give_back(message, Verdict(after_ms=0))
                raise
            failure = error  # something of the handler's own was cancelled
        except BaseException as error:
            failure = error
        if failure is not None:
            await self._failed(message, failure)
            return False
        self._done.append(message)
        if self._acking is None or self._acking.done():
            self._acking = asyncio.create_task(self._acknowledge())
        return True

    # --- what becomes of it ---

    async def _acknowledge(self) -> None:
        await asyncio.sleep(ACK_S)
        while self._done:
            messages, self._done = self._done, []
            try:
                await self._in_thread(partial(self._consumer.ack, *messages))
            except CometError as error:
                log.warning("some of %d are not acknowledged: %s", len(messages), error)

    async def _failed(self, message: Message, error: BaseException) -> None:
        verdict = verdict_of(error)
        self._failures.failed(message, error)
        await self._give_back(message, verdict)
        if not isinstance(error, Exception | asyncio.CancelledError):
            self._ends, self._raised = True, self._raised or error
            await self._in_thread(self._consumer.stop_waiting)

    async def _give_back(self, message: Message, verdict: Verdict) -> None:
        try:
            await self._in_thread(self._consumer.give_back, message, verdict)
        except CometError as refusal:
            log.warning("%s is not given back, and comes by itself: %s", describe(message), refusal)

    # --- the end ---

    def _cancel(self) -> None:
        self._cancels = True
        for task in self.tasks:
            task.cancel()

    async def _finish(self) -> None:
        """Wait for active handlers and acknowledge their messages; release those not begun."""
        try:
            if self.tasks:
                await asyncio.wait(self.tasks, timeout=self._end_timeout_s)
        finally:
            late = dict(self.tasks)
            for seat in late.values():
                log.warning("%s is left: its handler is cancelled", describe(seat.unit))
            self._cancel()
        if late:
            await asyncio.wait(late, timeout=GIVE_BACK_S)
        if self._acking is not None:
            await self._acking
        self._unbegun.extend(message for take in self._takes for message in take)
        self._takes.clear()
        await self._in_thread(self._release, self._unbegun)
        await self._in_thread(self._consumer.release_lost)
        self._failures.end()

    async def _release_late(self) -> None:
        """Release messages that have waited too long for a task: if their invisibility timeout
        expired unhandled, it would count as an attempt."""
        now = time.monotonic()
        while self._takes and taken_of(self._takes[0][0]).late <= now:
            self._unbegun.extend(self._takes.popleft())
        if self._unbegun:
            late, self._unbegun = self._unbegun, []
            await self._in_thread(self._release, late)

    def _release(self, unbegun: list[Message]) -> None:
        if unbegun:
            try:
                self._consumer.release(unbegun)
            except CometError as error:
                log.debug("some of %d messages are not released: %s", len(unbegun), error)
