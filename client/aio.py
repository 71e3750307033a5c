"""The asyncio twins of Producer and Consumer, without a thread between.

Messages are read from the sockets in the event loop's own thread: it watches their descriptors.
What its tasks send is in `sending/in_loop.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, Unpack

from cometmq.client.arguments import check
from cometmq.client.consumer import POLL_S, Consumer
from cometmq.client.handling.async_run import AsyncQueueRun, AsyncRun
from cometmq.client.handling.options import Handler, Handling, RunOptions
from cometmq.client.options import (
    ConsumerOptions,
    OnewayOptions,
    ProducerOptions,
    SendOptions,
    TransactionOptions,
)
from cometmq.client.questions import Position
from cometmq.client.receiving.owned import QueueId
from cometmq.client.receiving.stream import Stream
from cometmq.client.sending.in_loop import LoopSends
from cometmq.client.sending.loop_transaction import (
    AsyncTransaction,
    LoopChecker,
    LoopTransactions,
)
from cometmq.client.sending.outgoing import Body, Keys, Outgoing, Target, compose, recalling
from cometmq.client.sending.producer import Producer
from cometmq.client.sending.receipt import Receipt, Receipts
from cometmq.client.sending.requests import Reply
from cometmq.protocol.errors import CometError
from cometmq.protocol.retry import SOON_S
from cometmq.protocol.tags import ALL_TAGS
from cometmq.protocol.timed import Handle
from cometmq.shm.kernel.codec import Message

YIELD_COUNT: Final = 256  # messages of a loop between two turns of the event loop


class AsyncProducer:
    """`Producer` for asyncio: same arguments, same names, same guarantees.

        async with AsyncProducer("127.0.0.1:9876", linger_ms=2) as producer:
            receipts = await asyncio.gather(*(producer.send("t", body) for body in bodies))

    `send` waits for the answer also with `linger_ms`: messages of tasks that send at the same time
    share batches. A task that is cancelled no longer waits; its message is sent all the same.
    To be used in one event loop.
    """

    def __init__(
        self,
        name_server: str | Iterable[str] = "tcp://127.0.0.1:9876",
        **options: Unpack[ProducerOptions],
    ) -> None:
        self._wait_s = options.pop("wait_for_broker", 0)
        check("wait_for_broker", self._wait_s, float)
        checker = options.get("checker")
        self._loop = LoopChecker(checker)
        if inspect.iscoroutinefunction(checker):
            options["checker"] = self._loop.check
        self._producer = _BeginsLater(name_server, **options)
        self._begun = options.get("producer_id") is None and not self._wait_s
        self._sender = self._producer._sender
        self._running: dict[str, asyncio.Task[None]] = {}
        self._sends = LoopSends(self._sender)
        self._transactions = LoopTransactions(self._producer._transactions, self._send)

    async def send(
        self,
        topic: str,
        body: Body,
        *,
        tags: str | None = None,
        keys: Keys = None,
        properties: Mapping[str, str] | None = None,
        ordering_key: str | None = None,
        queue_id: int | None = None,
        flag: int = 0,
        delay_level: int = 0,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | float | None = None,
        wait: bool = True,
    ) -> Receipt:
        """See `Producer.send`. The receipt is confirmed."""
        target, message = compose(
            topic, body, tags, keys, properties, ordering_key, queue_id, flag, wait, delay_level,
            deliver_at, deliver_after,
        )  # fmt: skip
        return await self._send(target, message)

    async def send_async(
        self,
        topic: str,
        body: Body,
        *,
        tags: str | None = None,
        keys: Keys = None,
        properties: Mapping[str, str] | None = None,
        ordering_key: str | None = None,
        queue_id: int | None = None,
        flag: int = 0,
        delay_level: int = 0,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | float | None = None,
        wait: bool = True,
    ) -> asyncio.Future[Receipt]:
        """Send without waiting for the answer: the future gets it.

        Waits only for room (`max_in_flight_bytes`) and for the route of a new topic.
        """
        target, message = compose(
            topic, body, tags, keys, properties, ordering_key, queue_id, flag, wait, delay_level,
            deliver_at, deliver_after,
        )  # fmt: skip
        return await self._start(target, message)

    async def send_many(
        self, topic: str, bodies: Sequence[Body], **options: Unpack[SendOptions]
    ) -> Receipts:
        """See `Producer.send_many`. Runs in a thread of its own; encoding is native anyway."""
        await self._begin()
        return await asyncio.to_thread(self._producer.send_many, topic, bodies, **options)

    async def send_oneway(self, topic: str, body: Body, **options: Unpack[OnewayOptions]) -> None:
        """See `Producer.send_oneway`."""
        await self._prepare(Target(topic, None, options.get("queue_id")))
        self._producer.send_oneway(topic, body, **options)

    def transaction(
        self, topic: str, body: Body, **options: Unpack[TransactionOptions]
    ) -> AsyncTransaction:
        """See `Producer.transaction`; for `async with`."""
        return AsyncTransaction(self._transactions, topic, body, options)

    async def recall(self, message: Receipt | str) -> Receipt:
        """See `Producer.recall`."""
        check("message", message, Receipt | str)
        handle = message.recall_handle if isinstance(message, Receipt) else message
        return await self._send(*recalling(Handle.parse(handle)))

    async def request(
        self,
        topic: str,
        body: Body,
        *,
        timeout_s: float = 3.0,
        **options: Unpack[TransactionOptions],
    ) -> Reply:
        """See `Producer.request`. A task that is cancelled waits no longer."""
        requests = self._producer._requests
        return await requests.ask_in_loop(topic, body, timeout_s, options, self._prepare_request)

    @property
    def late_replies(self) -> int:
        """See `Producer.late_replies`."""
        return self._producer.late_replies

    @property
    def connected(self) -> bool:
        """See `Producer.connected`."""
        return self._producer.connected

    async def wait_for_broker(self, timeout_s: float) -> None:
        """See `Producer.wait_for_broker`."""
        await asyncio.to_thread(self._producer.wait_for_broker, timeout_s)

    async def flush(self) -> None:
        """Send what lingers and wait for all answers. Errors went to those who sent."""
        await asyncio.to_thread(self._producer.flush)

    async def close(self) -> None:
        """Flush and close all connections. May be called twice."""
        await asyncio.to_thread(self._producer.close)

    async def __aenter__(self) -> Self:
        self._sender.check_open()
        try:
            await self._begin()
        except BaseException:
            await asyncio.shield(self.close())
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.shield(self.close())

    async def _begin(self) -> None:
        self._loop.begin()
        if not self._begun:
            await self._elsewhere("broker", self._producer.begin, self._wait_s)
            self._begun = True

    async def _prepare(self, target: Target) -> None:
        """Do in threads everything that could block: fetch the route of a topic that is unknown, or
        whose known route lacks the queue, and wait for room for one more batch."""
        await self._begin()
        sender = self._sender
        if sender.known(target) is None:
            what = f"learn {target.topic} {target.queue_id} {target.broker}"
            await self._elsewhere(what, sender.learn, target)
        while not sender.has_room:
            await self._elsewhere("room", sender.wait_for_room)

    async def _prepare_request(self, target: Target, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        await self._prepare(target)
        topic = target.topic
        requests = self._producer._requests
        while not requests.is_open(topic):
            left_s = deadline - time.monotonic()
            try:
                await self._elsewhere(f"replies {topic}", requests.open, topic, left_s)
            except CometError as error:  # the call that began it may have had less time
                if not error.retriable or time.monotonic() + SOON_S >= deadline:
                    raise

    async def _elsewhere(self, what: str, call: Callable[..., object], *arguments: Any) -> None:
        """Run it in a thread, once for all who want it now; they go on in the order they came."""
        task = self._running.get(what)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = asyncio.create_task(_in_thread(call, *arguments))
            self._running[what] = task
            task.add_done_callback(lambda _: self._running.pop(what, None))
        await asyncio.shield(task)  # whoever is cancelled leaves it to the others

    def _send(self, target: Target, message: Outgoing) -> Awaitable[Receipt]:
        """Return what is awaited for its receipt."""
        lanes = self._sends.known(target, message) if self._begun else None
        if lanes is None:
            return self._prepare_and_send(target, message)
        return self._sends.send(target, message, lanes)

    async def _prepare_and_send(self, target: Target, message: Outgoing) -> Receipt:
        return await (await self._start(target, message))

    async def _start(self, target: Target, message: Outgoing) -> asyncio.Future[Receipt]:
        if self._sends.is_long(message):
            await asyncio.to_thread(self._sender.prepare, message)  # other tasks go on meanwhile
        lanes = self._sends.known(target, message) if self._begun else None
        if lanes is None:
            await self._prepare(target)
        return self._sends.send(target, message, lanes)


class _BeginsLater(Producer):
    """It asks nobody before it is told to: an event loop is not held up."""

    def _begin(self, wait_s: float) -> None: ...

    def begin(self, wait_s: float) -> None:
        super()._begin(wait_s)


async def _in_thread(call: Callable[..., object], *arguments: Any) -> None:
    await asyncio.to_thread(call, *arguments)


class AsyncConsumer:
    """`Consumer` for asyncio: same arguments, same names, same guarantees.

        async with AsyncConsumer("127.0.0.1:9876", "billing", "orders") as consumer:
            async for message in consumer:
                await work(message.body)
                consumer.ack(message)

    It connects in `async with`, or with the first call. `ack` and `assignment` never wait and are
    plain. One task polls or iterates. A poll that is cancelled has taken nothing. To be used in one
    event loop, which must be able to watch descriptors (`add_reader`).
    """

    def __init__(
        self,
        name_server: str | Iterable[str],
        group: str | None,
        topic: str | None = None,
        tags: str = ALL_TAGS,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        sql = options.pop("sql", "")
        self._wait_s = options.pop("wait_for_broker", 0)
        check("wait_for_broker", self._wait_s, float)
        self._consumer = Consumer(name_server, group, **options)
        self._consumer._receiver.replier.is_async = True
        self._stream = self._consumer._receiver.stream
        self._first = None if topic is None else (topic, tags, sql)
        self._running: AsyncRun | None = None

    async def subscribe(self, topic: str, tags: str = ALL_TAGS, sql: str = "") -> None:
        """See `Consumer.subscribe`."""
        await self._wait()
        await asyncio.to_thread(self._consumer.subscribe, topic, tags, sql)

    async def unsubscribe(self, topic: str) -> None:
        """See `Consumer.unsubscribe`."""
        self._consumer.unsubscribe(topic)

    async def assign(
        self,
        queues: str | Mapping[QueueId, int] | Iterable[QueueId],
        tags: str = ALL_TAGS,
        sql: str = "",
    ) -> None:
        """See `Consumer.assign`."""
        await self._begin()
        await asyncio.to_thread(self._consumer.assign, queues, tags, sql)

    def pause(self, queues: Iterable[QueueId]) -> None:
        """See `Consumer.pause`."""
        self._consumer.pause(queues)

    def resume(self, queues: Iterable[QueueId]) -> None:
        """See `Consumer.resume`."""
        self._consumer.resume(queues)

    def position(self, queue: QueueId) -> int:
        """See `Consumer.position`."""
        return self._consumer.position(queue)

    @property
    def assignment(self) -> list[tuple[str, str, int]]:
        """The queues this member owns now: (broker, topic, queue id)."""
        return self._consumer.assignment

    @property
    def connected(self) -> bool:
        """See `Consumer.connected`."""
        return self._consumer.connected

    @property
    def group(self) -> str | None:
        """Whose progress it is; None: nobody's."""
        return self._consumer.group

    @property
    def member(self) -> str:
        """This consumer's name in the group."""
        return self._consumer.member

    async def wait_for_broker(self, timeout_s: float) -> None:
        """See `Consumer.wait_for_broker`."""
        await asyncio.to_thread(self._consumer.wait_for_broker, timeout_s)

    async def poll(self, max_count: int = 1024, timeout_s: float | None = POLL_S) -> list[Message]:
        """See `Consumer.poll`."""
        await self._begin()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            messages = self._consumer.poll(max_count, 0)
            left_s = 3600.0 if deadline is None else deadline - time.monotonic()
            if messages or left_s <= 0 or self._stream.closed:
                return messages
            await _readable(self._stream, left_s)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages one by one, for ever; ends after `close`."""
        self._consumer._receiver.check_open()
        await self._begin()
        while not self._stream.closed:
            for count, message in enumerate(self._stream.each(0), 1):
                yield message
                if count % YIELD_COUNT == 0:
                    await asyncio.sleep(0)  # let other tasks run
            if not self._stream.closed:
                await _readable(self._stream, POLL_S)

    async def run(self, handler: Handler, **options: Unpack[RunOptions]) -> None:
        """See `Consumer.run`. The handler is `async def`; `concurrency` counts tasks.

        `close` lets handlers finish; those that take longer than `end_timeout_s` are cancelled. If
        the task that is in here is cancelled, all handlers are cancelled at once: what they finish
        nevertheless is acknowledged, the rest is delivered again, to whoever polls next, and does
        not count as an attempt. One that goes on in spite of that is left after `end_timeout_s`.
        """
        check("handler", handler, Callable)
        handling = Handling.of(options)
        wrapped = handling.wrapped(handler, is_async=True)
        await self._begin()
        receiver = self._consumer._receiver
        receiver.check_open()
        if self._running is not None:
            raise RuntimeError("the consumer runs already")
        receiver.member.subscribe_retries()
        running = self._running = AsyncQueueRun(
            receiver, handling, partial(_readable, self._stream)
        )
        try:
            closes = await running.work(wrapped)
        finally:
            self._running = None
        if closes:
            await self.close()

    def ack(self, messages: Message | Iterable[Message]) -> None:
        """See `Consumer.ack`."""
        self._consumer.ack(messages)

    async def commit(self) -> None:
        """See `Consumer.commit`."""
        await asyncio.to_thread(self._consumer.commit)

    async def seek(
        self, position: Position, topic: str | None = None, queue_id: int | None = None
    ) -> None:
        """See `Consumer.seek`."""
        await self._begin()
        await asyncio.to_thread(self._consumer.seek, position, topic, queue_id)

    async def seek_to_time(
        self, at: datetime | int, topic: str | None = None, queue_id: int | None = None
    ) -> None:
        """See `Consumer.seek_to_time`."""
        await self._begin()
        await asyncio.to_thread(self._consumer.seek_to_time, at, topic, queue_id)

    async def close(self) -> None:
        """See `Consumer.close`. A poll or loop that waits ends; a handler in `run` may call it."""
        if self._running is not None and not await self._running.end():
            return
        await asyncio.to_thread(self._consumer.close)

    async def __aenter__(self) -> Self:
        self._consumer._receiver.check_open()
        await self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.shield(self.close())

    async def _begin(self) -> None:
        await self._wait()
        if self._first is not None:
            first, self._first = self._first, None
            await self.subscribe(*first)

    async def _wait(self) -> None:
        wait_s, self._wait_s = self._wait_s, 0.0
        if wait_s:
            await asyncio.to_thread(self._consumer.wait_for_broker, wait_s)


async def _readable(stream: Stream, timeout_s: float) -> None:
    """Sleep until there is something to do for it."""
    descriptors, due_s = stream.descriptors()
    if not descriptors:
        await asyncio.sleep(0)
        return
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    for descriptor in descriptors:
        loop.add_reader(descriptor, wake)
    timer = loop.call_later(min(timeout_s, due_s), wake)
    try:
        await woken
    finally:
        timer.cancel()
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
