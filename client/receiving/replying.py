"""Replying: what a consumer answers to a request goes to the broker that the request lies at."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from cometmq.client.arguments import check
from cometmq.client.origins import Elsewhere, find, register
from cometmq.client.routes import MASTER, Routes
from cometmq.protocol.commands import BrokerEndpoints, GetLine, SendReply
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    MessageIllegal,
    NotConfirmed,
    NotMaster,
    NotReachable,
)
from cometmq.protocol.names import check_properties
from cometmq.protocol.replies import (
    CORRELATION_ID,
    KEPT_PROPERTIES,
    MSG_TYPE,
    REPLY,
    REPLY_TO_CLIENT,
    TTL,
    encode_properties,
    reply_topic,
)
from cometmq.protocol.retry import pause_s
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.protocol.wire.uninterrupted import uninterrupted
from cometmq.shm.kernel.codec import Message
from cometmq.shm.os.processes import boot_id

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 10.0  # as long as RocketMQ's broker waits for the requester
CONNECT_S: Final = 1.0  # then the broker's address is looked up again
ROUTE_S: Final = 0.5  # time limit of the name server
MOVED: Final = (NotMaster, NotConfirmed, NotReachable)  # the broker may have another master

Body = bytes | bytearray | memoryview


class Replier:
    """Of one consumer; `is_async`: of an asyncio one. Threads may share it."""

    def __init__(self, routes: Routes, *, has_lines: bool) -> None:
        self.is_async = False
        self._routes = routes
        self._line_request = GetLine(boot_id(), is_stream=True) if has_lines else None

    def source(self, endpoints: Callable[[], BrokerEndpoints]) -> Source:
        """For messages that lie at that broker."""
        return Source(self, endpoints)

    def master_of(self, known: BrokerEndpoints) -> BrokerEndpoints:
        """Return this broker's master by the name server; `known` if it does not answer."""
        try:
            brokers = self._routes.brokers(ROUTE_S)
        except CometError as error:
            log.debug("cannot list brokers: %s", error)
            brokers = []
        masters = [each for each in brokers if each.broker_id == MASTER]
        return next((each for each in masters if each.broker == known.broker), known)

    def channel(self, endpoints: BrokerEndpoints) -> Channel:
        name = f"broker {endpoints.broker}"
        return self._routes.channel(endpoints.commitlog, name, self._line_request)


def _in_one_piece(body: Body) -> Body:
    """Return a body as bytes of which the length counts. Raises ArgumentIllegal."""
    if not isinstance(body, memoryview):
        return body
    try:
        return body.cast("B")
    except TypeError as error:
        raise ArgumentIllegal(f"a memoryview as a body must be contiguous: {error}") from None


def _source(name: str) -> Source | Elsewhere:
    """Rebuild the origin of a pickled message."""
    return find(name, Source) or Elsewhere(_source, name)


class Source:
    """Where messages come from; `Message.reply` asks it."""

    __slots__ = ("__weakref__", "_endpoints", "_name", "_replier")

    def __init__(self, replier: Replier, endpoints: Callable[[], BrokerEndpoints]) -> None:
        self._replier = replier
        self._endpoints = endpoints
        self._name = register(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _source, (self._name,)

    def reply(
        self,
        message: Message,
        body: Body,
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Coroutine[Any, Any, None] | None:
        """See `Message.reply`."""
        if timeout_s.__class__ is not float or timeout_s != timeout_s:
            check("timeout_s", timeout_s, float)
        body = _in_one_piece(body)
        command = self._command(message, body, properties)
        if self._replier.is_async:
            return self._reply_async(command, body, timeout_s)
        self._reply(command, body, timeout_s)
        return None

    def _command(
        self, message: Message, body: Body, properties: Mapping[str, str] | None
    ) -> SendReply:
        given = message.properties
        if CORRELATION_ID not in given or REPLY_TO_CLIENT not in given:
            raise ArgumentIllegal(
                f"{message.topic}/{message.queue_id} offset {message.queue_offset} is no request: "
                "nobody waits for a reply to it"
            )
        if not isinstance(body, Body):
            raise ArgumentIllegal(f"a body is bytes-like, not {type(body).__name__}: encode it")
        if not len(body):
            raise MessageIllegal("a reply needs a body of at least one byte")
        correlation_id, requester = given[CORRELATION_ID], given[REPLY_TO_CLIENT]
        all_of_them = {
            MSG_TYPE: REPLY,
            CORRELATION_ID: correlation_id,
            REPLY_TO_CLIENT: requester,
            TTL: given.get(TTL, ""),
        }
        if properties is not None:
            all_of_them = {**_checked(properties), **all_of_them}
            try:
                encode_properties(all_of_them)
            except ValueError as error:
                raise MessageIllegal(str(error)) from None
        topic = reply_topic(self._endpoints().cluster)
        return SendReply(topic, requester, correlation_id, all_of_them)

    @uninterrupted
    def _reply(self, command: SendReply, body: Body, timeout_s: float) -> None:
        attempts = _Attempts(timeout_s)
        endpoints = self._endpoints()
        while True:
            try:
                channel = self._replier.channel(endpoints)
                channel.ask(command, [body], timeout_s=attempts.left_s(), connect_s=CONNECT_S)
            except CometError as error:
                time.sleep(attempts.pause_after(error))
                if isinstance(error, MOVED):
                    endpoints = self._replier.master_of(self._endpoints())
            else:
                return

    async def _reply_async(self, command: SendReply, body: Body, timeout_s: float) -> None:
        attempts = _Attempts(timeout_s)
        endpoints = self._endpoints()
        while True:
            try:
                channel = self._replier.channel(endpoints)
                await _ask(channel, command, body, attempts.left_s())
            except CometError as error:
                await asyncio.sleep(attempts.pause_after(error))
                if isinstance(error, MOVED):
                    known = self._endpoints()
                    endpoints = await asyncio.to_thread(self._replier.master_of, known)
            else:
                return


def _checked(properties: Mapping[str, str]) -> Mapping[str, str]:
    """What a user adds to a reply. Raises ArgumentIllegal, MessageIllegal."""
    check("properties", properties, Mapping[str, str] | None)
    check_properties(properties)
    kept = sorted(KEPT_PROPERTIES.intersection(properties))
    if kept:
        raise MessageIllegal(f"property {', '.join(kept)}: a reply sets it itself")
    return properties


class _Attempts:
    """How often, and for how long."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._failures = 0

    def left_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def pause_after(self, error: CometError) -> float:
        """Until the next attempt; raises the error if there is none."""
        self._failures += 1
        pause = pause_s(self._failures)
        if not error.retriable or time.monotonic() + pause >= self._deadline:
            raise error
        return pause


async def _ask(channel: Channel, command: SendReply, body: Body, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    heard: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not heard.done():
            heard.set_result(None)

    def on_done(_pending: Pending) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(wake)

    pending = channel.request(
        command, [body], on_done=on_done, timeout_s=timeout_s, connect_s=CONNECT_S
    )
    try:
        await heard
    except asyncio.CancelledError:
        channel.forget(pending)
        raise
    pending.result()
