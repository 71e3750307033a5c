"""The pop consumer for asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, Unpack

from cometmq.client.handling.options import Handler, Handling, Middleware
from cometmq.client.options import PopOptions
from cometmq.client.popping.call import PopCall
from cometmq.client.popping.consumer import POLL_S, Inside, PopConsumer, try_release
from cometmq.client.popping.run import AsyncPopRun
from cometmq.protocol.errors import ArgumentIllegal, ClientClosed
from cometmq.protocol.tags import ALL_TAGS
from cometmq.protocol.wire.patched import check_not_patched
from cometmq.shm.kernel.codec import Message

log = logging.getLogger(__name__)

THREADS: Final = 8  # one waits for messages, the others say what becomes of them


class _Inner(PopConsumer):
    _is_async = True


class AsyncPopConsumer:
    """`PopConsumer` for asyncio: same arguments, same names, same guarantees.

        async with AsyncPopConsumer("127.0.0.1:9876", "resize", "images") as consumer:
            await consumer.run(resize, concurrency=50)

    It connects in `async with`, and asks brokers in threads of its own. Cancelling a `poll` also
    ends it in its thread. Messages that it still receives are released: they are available to any
    consumer at once, and no attempt is counted.
    """

    def __init__(
        self,
        name_server: str | Iterable[str],
        group: str,
        topic: str,
        tags: str = ALL_TAGS,
        **options: Unpack[PopOptions],
    ) -> None:
        check_not_patched("a client of CometMQ")
        self._arguments = (name_server, group, topic, tags)
        self._options = options
        self._made: PopConsumer | None = None
        self._closed = False
        self._running: AsyncPopRun | None = None
        self._threads = ThreadPoolExecutor(THREADS, "cometmq pop")
        self._enders = ThreadPoolExecutor(THREADS, "cometmq pop end")  # of cancelled polls

    @property
    def _consumer(self) -> PopConsumer:
        if self._made is None:
            if self._closed:
                raise ClientClosed("the consumer is closed: open another one")
            raise ArgumentIllegal("use it in `async with`: it connects there")
        self._made._check_open()
        return self._made

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Not in one of the event loop's threads: other consumers may wait for messages in all."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    @property
    def group(self) -> str:
        """The group's name."""
        return self._arguments[1]

    async def poll(self, max_messages: int = 32, timeout_s: float = POLL_S) -> list[Message]:
        """See `PopConsumer.poll`."""
        return await self._poll(max_messages, timeout_s)

    async def _poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        consumer, call = self._consumer, PopCall()
        found = self._threads.submit(consumer._poll, max_messages, timeout_s, call)
        try:
            return await asyncio.wrap_future(found)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # the pool is closed, which ends the poll as well
                self._enders.submit(_end_poll, consumer, call, found)
            raise

    async def ack(self, *messages: Message) -> None:
        """See `PopConsumer.ack`."""
        await self._in_thread(self._consumer.ack, *messages)

    async def release(self, *messages: Message) -> None:
        """Release messages as `PopConsumer.release` does."""
        await self._in_thread(self._consumer.release, *messages)

    async def nack(self, message: Message, after: timedelta | float | None = None) -> None:
        """See `PopConsumer.nack`."""
        await self._in_thread(self._consumer.nack, message, after)

    async def reject(self, message: Message) -> None:
        """See `PopConsumer.reject`."""
        await self._in_thread(self._consumer.reject, message)

    async def extend(self, message: Message, invisible_s: float) -> None:
        """See `PopConsumer.extend`."""
        await self._in_thread(self._consumer.extend, message, invisible_s)

    async def run(
        self,
        handler: Handler,
        *,
        concurrency: int = 20,
        middleware: Iterable[Middleware] = (),
        stuck_s: float = 60.0,
        end_timeout_s: float = 30.0,
    ) -> None:
        """See `PopConsumer.run`: `handler` is awaited in so many tasks, until `close`.

        `close` lets handlers finish; those that take longer than `end_timeout_s` are cancelled. If
        the task that is in here is cancelled, all handlers are cancelled at once. What a cancelled
        one had is given back, and comes again at once, with one attempt more.
        """
        handling = Handling.of(
            {
                "concurrency": concurrency,
                "middleware": middleware,
                "stuck_s": stuck_s,
                "end_timeout_s": end_timeout_s,
            }
        )
        wrapped = handling.wrapped(handler, is_async=True)
        if self._running is not None:
            raise ArgumentIllegal("run() is at work already")
        consumer = self._consumer
        orderly = self._options.get("orderly", False)
        run = self._running = AsyncPopRun(
            Inside(consumer), self._poll, self._in_thread, handling, orderly=orderly
        )
        if self._closed:
            run.cease()
        try:
            closes = await run.work(wrapped)
        finally:
            self._running = None
        if closes:
            await self._close_made()

    async def close(self) -> None:
        """See `PopConsumer.close`. In a handler it returns at once; `run` ends when all have."""
        self._closed = True
        if self._made is None or self._made._closed:
            return
        run = self._running
        if run is not None:
            run.cease()
        await self._in_thread(self._made._stop_waiting)
        if run is not None and not await run.end():
            return
        await self._close_made()

    async def _close_made(self) -> None:
        if self._made is not None and not self._made._closed:
            await self._in_thread(self._end, self._made)
            self._threads.shutdown(wait=False)

    def _end(self, made: PopConsumer) -> None:
        self._enders.shutdown()  # they may have messages to release
        made.close()

    async def __aenter__(self) -> Self:
        if self._closed:
            raise ClientClosed("the consumer is closed: open another one")
        if self._made is None:
            self._made = await self._in_thread(lambda: _Inner(*self._arguments, **self._options))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        finally:  # also where it is cancelled in between, or the loop comes to its end
            if self._made is not None and not self._made._closed:
                self._threads.submit(self._end, self._made)
            self._threads.shutdown(wait=False)


def _end_poll(consumer: PopConsumer, call: PopCall, found: Future[list[Message]]) -> None:
    """End a poll whose task was cancelled, and release the messages that it still receives."""
    if found.cancel():
        return  # no thread had begun the poll
    call.cancel(found)
    if found.exception() is None:
        try_release(consumer, found.result())
