"""The pop consumer for asyncio."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, Unpack

from cometmq.client.arguments import check
from cometmq.client.handling.failures import FailureLog
from cometmq.client.handling.options import CONCURRENCY_MAX
from cometmq.client.handling.outcomes import Verdict, check_handler, verdict_of
from cometmq.client.handling.work import describe
from cometmq.client.options import PopOptions
from cometmq.client.popping.broker import may_help, taken_of
from cometmq.client.popping.consumer import POLL_S, PopConsumer
from cometmq.client.popping.ordered_run import take_count, takes_of
from cometmq.protocol.errors import ArgumentIllegal, CometError
from cometmq.protocol.tags import ALL_TAGS
from cometmq.shm.kernel._kernel import Message

log = logging.getLogger(__name__)

AsyncHandler = Callable[[Message], Awaitable[object]]

ACK_S: Final = 0.01  # that an acknowledgement waits for others
GIVE_BACK_S: Final = 5.0  # for what cancelled handlers had


class _Inner(PopConsumer):
    _is_async = True


class AsyncPopConsumer:
    """`PopConsumer` for asyncio: same arguments, same names, same guarantees.

        async with AsyncPopConsumer("127.0.0.1:9876", "resize", "images") as consumer:
            await consumer.run(resize, concurrency=50)

    It connects in `async with`. Whatever asks a broker does so in a thread. What a cancelled
    `poll` has popped comes again when its time is over.
    """

    def __init__(
        self,
        name_server: str | Iterable[str],
        group: str,
        topic: str,
        tags: str = ALL_TAGS,
        **options: Unpack[PopOptions],
    ) -> None:
        self._arguments = (name_server, group, topic, tags)
        self._options = options
        self._made: PopConsumer | None = None
        self._closed = False
        self._over: asyncio.Event | None = None  # of a run
        self._failures = FailureLog(log)
        self._tasks: set[asyncio.Task[object]] = set()
        self._done: list[Message] = []  # not acknowledged yet
        self._acking: asyncio.Task[None] | None = None
        # In order: takes that wait for a task, one message of each that was not begun.
        self._takes: deque[list[Message]] = deque()
        self._unbegun: list[Message] = []
        self._unit_s = 0.01  # that a message took lately

    @property
    def _consumer(self) -> PopConsumer:
        if self._made is None:
            raise ArgumentIllegal("use it in `async with`: it connects there")
        return self._made

    @property
    def group(self) -> str:
        """The group's name."""
        return self._arguments[1]

    async def poll(self, max_messages: int = 32, timeout_s: float = POLL_S) -> list[Message]:
        """See `PopConsumer.poll`."""
        return await asyncio.to_thread(self._consumer.poll, max_messages, timeout_s)

    async def ack(self, *messages: Message) -> None:
        """See `PopConsumer.ack`."""
        await asyncio.to_thread(self._consumer.ack, *messages)

    async def nack(self, message: Message, after: timedelta | float | None = None) -> None:
        """See `PopConsumer.nack`."""
        await asyncio.to_thread(self._consumer.nack, message, after)

    async def reject(self, message: Message) -> None:
        """See `PopConsumer.reject`."""
        await asyncio.to_thread(self._consumer.reject, message)

    async def extend(self, message: Message, invisible_s: float) -> None:
        """See `PopConsumer.extend`."""
        await asyncio.to_thread(self._consumer.extend, message, invisible_s)

    async def run(
        self, handler: AsyncHandler, *, concurrency: int = 20, end_timeout_s: float = 30.0
    ) -> None:
        """See `PopConsumer.run`: `handler` is awaited in so many tasks, until `close`.

        `close` lets handlers finish; those that take longer than `end_timeout_s` are cancelled. If
        the task that is in here is cancelled, all handlers are cancelled at once. What a cancelled
        one had is given back, and comes again at once, with one attempt more.
        """
        check_handler(handler, is_async=True)
        check("concurrency", concurrency, int)
        check("end_timeout_s", end_timeout_s, float)
        if not 1 <= concurrency <= CONCURRENCY_MAX:
            raise ArgumentIllegal(f"concurrency={concurrency}: 1 to {CONCURRENCY_MAX}")
        if self._over is not None:
            raise ArgumentIllegal("run() is at work already")
        self._over = asyncio.Event()
        is_ordered = self._options.get("orderly", False)
        turn = self._turn_in_order if is_ordered else self._turn
        try:
            while not self._closed:
                await turn(handler, concurrency)
        except asyncio.CancelledError:
            self._cancel()
            raise
        finally:
            if self._tasks:
                _, late = await asyncio.wait(self._tasks, timeout=end_timeout_s)
                if late:
                    log.warning("%d handlers do not end, and are cancelled", len(late))
                    self._cancel()
                    await asyncio.wait(late, timeout=GIVE_BACK_S)
            if self._acking is not None:
                await self._acking
            await asyncio.to_thread(self._release)
            self._failures.end()
            over, self._over = self._over, None
            over.set()
            if self._closed:
                await asyncio.to_thread(self._consumer.close)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _turn(self, handler: AsyncHandler, concurrency: int) -> None:
        """Pop as many as there are free tasks."""
        if len(self._tasks) >= concurrency:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            return
        try:
            messages = await self.poll(concurrency - len(self._tasks))
        except CometError as error:
            if not may_help(error):
                raise
            return  # nobody has been there for long: a run waits until somebody is
        for message in messages:
            self._begin(self._handle(handler, message))

    def _begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _turn_in_order(self, handler: AsyncHandler, concurrency: int) -> None:
        """Pop for a task that has nothing to do: what waits here keeps a queue from others."""
        if len(self._tasks) >= concurrency:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            return
        if not self._takes:
            try:
                self._takes.extend(takes_of(await self.poll(take_count(self._unit_s))))
            except CometError as error:
                if not may_help(error):
                    raise
        elif not self._closed:
            self._begin(self._handle_take(handler, self._takes.popleft()))

    async def _handle_take(self, handler: AsyncHandler, messages: list[Message]) -> None:
        """Up to the first that fails: what comes behind it is not this consumer's any more."""
        for message in messages:
            began = time.monotonic()
            if self._closed:
                self._unbegun.append(message)
            if self._closed or began >= taken_of(message).until:
                return
            if not await self._handle(handler, message):
                return
            self._unit_s += (time.monotonic() - began - self._unit_s) / 16

    def _release(self) -> None:
        """What was not begun is free at once."""
        unbegun = [*self._unbegun, *(take[0] for take in self._takes)]
        self._unbegun.clear()
        self._takes.clear()
        for message in unbegun:
            try:
                self._consumer._release(message)
            except CometError as error:
                log.debug("%s is free when its time is over: %s", describe(message), error)

    async def _handle(self, handler: AsyncHandler, message: Message) -> bool:
        """Whether it is done with."""
        try:
            await handler(message)
        except asyncio.CancelledError:
            await self._give_back(message, Verdict(after_ms=0))
            raise
        except Exception as error:
            await self._failed(message, error)
            return False
        self._done.append(message)
        if self._acking is None or self._acking.done():
            self._acking = asyncio.create_task(self._acknowledge())
        return True

    async def _acknowledge(self) -> None:
        await asyncio.sleep(ACK_S)
        while self._done:
            messages, self._done = self._done, []
            try:
                await self.ack(*messages)
            except CometError as error:
                log.warning("some of %d are not acknowledged: %s", len(messages), error)

    async def _failed(self, message: Message, error: Exception) -> None:
        self._failures.failed(message, error)
        await self._give_back(message, verdict_of(error))

    async def _give_back(self, message: Message, verdict: Verdict) -> None:
        try:
            await asyncio.to_thread(self._consumer._give_back, message, verdict)
        except CometError as refusal:
            log.warning("%s is not given back, and comes by itself: %s", describe(message), refusal)

    async def close(self) -> None:
        """See `PopConsumer.close`. In a handler it returns at once; `run` ends when all have."""
        self._closed = True
        if self._made is None:
            return
        await asyncio.to_thread(self._made._stop_waiting)
        if self._over is not None:
            if asyncio.current_task() in self._tasks:
                return
            await self._over.wait()
        await asyncio.to_thread(self._made.close)

    async def __aenter__(self) -> Self:
        if self._made is None:
            self._made = await asyncio.to_thread(lambda: _Inner(*self._arguments, **self._options))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
