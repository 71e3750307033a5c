"""Requests: messages that somebody replies to, and the replies' way home.

At each broker that requests go to, one command of the requester's is held by the commitlog process;
replies answer it, and the next one says that they have come. Whoever asked is told in the thread
that receives them. Replies come the way that requests go: by a line, where there is one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from cometmq.client.arguments import check
from cometmq.client.routes import MASTER, Routes
from cometmq.client.sending.outgoing import Body, Outgoing, Target, compose
from cometmq.client.sending.receipt import Batch
from cometmq.client.sending.sender import Sender
from cometmq.protocol.commands import (
    AwaitReplies,
    BrokerEndpoints,
    Command,
    EnsureTopic,
    LeaveReplies,
    Replies,
    TopicRoute,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    ClientClosed,
    ClosedUnconfirmed,
    CometError,
    MessageIllegal,
    NotMaster,
    RequestTimeout,
    again,
)
from cometmq.protocol.frames import Frame
from cometmq.protocol.replies import (
    ARRIVE_TIME,
    CLUSTER,
    CORRELATION_ID,
    KEPT_PROPERTIES,
    PUSH_REPLY_TIME,
    REPLY_TO_CLIENT,
    TTL,
    reply_topic,
    requester_of,
)
from cometmq.protocol.retry import SOON_S, pause_s
from cometmq.protocol.wire.channel import Pending
from cometmq.protocol.wire.long_poll import LongPoll
from cometmq.shm.os.processes import own_process

if TYPE_CHECKING:
    from cometmq.client.options import TransactionOptions

log = logging.getLogger(__name__)

WAIT_MS: Final = 10_000
LATE_S: Final = 3.0  # for an answer: the broker soon forgets a requester that does not ask again
ASK_S: Final = 3.0
ROUTE_S: Final = 0.5  # time limit of the name server
LEAVE_S: Final = 1.0
SECRET_BYTES: Final = 24
ID_BYTES: Final = 16  # of the system's random numbers: nobody guesses a correlation id
TIMEOUT_S_MAX: Final = 86_400.0


class Reply(msgspec.Struct, frozen=True):
    """What a handler replied."""

    body: bytes
    properties: dict[str, str]  # RocketMQ's own as well

    @property
    def correlation_id(self) -> str:
        """Of the request that it answers."""
        return self.properties.get(CORRELATION_ID, "")


Settle = Callable[[Reply | None, CometError | None], None]


class _Waiter:
    """A thread that waits for one reply. A Future costs three times as much."""

    __slots__ = ("_is_settled", "error", "reply")

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.error: CometError | None = None
        self._is_settled = threading.Lock()
        self._is_settled.acquire()

    def settle(self, reply: Reply | None, error: CometError | None) -> None:
        """Once, from any thread."""
        self.reply, self.error = reply, error
        self._is_settled.release()

    def wait(self, timeout_s: float) -> bool:
        """Whether it was settled within the time."""
        return self._is_settled.acquire(timeout=max(0.0, timeout_s))


class Asking(msgspec.Struct, gc=False):
    """A request that waits for its reply."""

    correlation_id: str
    target: Target
    message: Outgoing
    timeout_s: float
    settle: Settle
    is_stored: bool = False

    def too_late(self) -> RequestTimeout:
        stored = "it is stored" if self.is_stored else "nobody has confirmed that it is stored"
        return RequestTimeout(
            f"no reply to request {self.correlation_id} in {self.target.topic} within "
            f"{self.timeout_s:g} s; {stored}"
        )


class _Post:
    """Source of replies: the master of one broker."""

    __slots__ = ("broker", "endpoint", "mailbox", "poll", "received", "topic")

    def __init__(self, master: BrokerEndpoints) -> None:
        self.broker = master.broker
        self.endpoint = master.commitlog
        self.topic = reply_topic(master.cluster)
        self.mailbox = 0
        self.received = 0
        self.poll = LongPoll()

    @property
    def name(self) -> str:
        return f"broker {self.broker}"


class Requests:
    """Of one producer. Threads may share it."""

    def __init__(self, sender: Sender) -> None:
        self.late = 0  # replies that nobody waited for any more
        self._sender = sender
        self._routes: Routes = sender.routes
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._name = requester_of(self._secret)
        self._process = own_process()
        self._asked: dict[str, Asking] = {}  # by correlation id
        self._opened: dict[str, object] = {}  # topic -> the route for which everything is open
        self._posts: dict[str, _Post] = {}  # by broker name
        self._lock = threading.Lock()  # guards which posts there are
        self._closed = False

    # --- asking ---

    def compose(
        self, topic: str, body: Body, timeout_s: float, options: TransactionOptions, settle: Settle
    ) -> Asking:
        """Raises what `send` raises of its arguments."""
        if timeout_s.__class__ is not float:
            check("timeout_s", timeout_s, float)
        if not 0 < timeout_s <= TIMEOUT_S_MAX:
            raise ArgumentIllegal(f"timeout_s={timeout_s}: above 0, at most {TIMEOUT_S_MAX:g}")
        target, message = compose(
            topic,
            body,
            options.get("tags"),
            options.get("keys"),
            options.get("properties"),
            options.get("ordering_key"),
            options.get("queue_id"),
            options.get("flag", 0),
            True,
        )
        given = message.properties or {}
        kept = sorted(KEPT_PROPERTIES.intersection(given))
        if kept:
            raise MessageIllegal(f"property {', '.join(kept)}: a request sets it itself")
        correlation_id = os.urandom(ID_BYTES).hex()
        message.properties = {
            **given,
            CORRELATION_ID: correlation_id,
            REPLY_TO_CLIENT: self._name,
            TTL: str(max(1, round(timeout_s * 1000))),
        }
        return Asking(correlation_id, target, message, timeout_s, settle)

    def ask(self, topic: str, body: Body, timeout_s: float, options: TransactionOptions) -> Reply:
        """See `Producer.request`."""
        waiter = _Waiter()
        deadline = time.monotonic() + timeout_s if isinstance(timeout_s, int | float) else 0.0
        asking = self.compose(topic, body, timeout_s, options, waiter.settle)
        if not self.is_open(topic):
            self.open(topic, deadline - time.monotonic())
        self.begin(asking)
        try:
            if not waiter.wait(deadline - time.monotonic()):
                raise asking.too_late()
        finally:
            self.forget(asking)
        if waiter.reply is None:
            assert waiter.error is not None
            raise again(waiter.error)
        return waiter.reply

    def begin(self, asking: Asking) -> None:
        """Send it. Its `settle` is called once, by the thread that hears of it; or never, once
        `forget` was called. The topic is open."""
        route = self._routes.topic(asking.target.topic)
        assert asking.message.properties is not None
        asking.message.properties[CLUSTER] = route.brokers[0].endpoints.cluster
        self._asked[asking.correlation_id] = asking
        try:
            self._sender.gather(asking.target, asking.message, partial(self._watch, asking))
        except BaseException:
            self.forget(asking)
            raise

    def forget(self, asking: Asking) -> None:
        """Nobody waits for it any more."""
        self._asked.pop(asking.correlation_id, None)

    def _watch(self, asking: Asking, batch: Batch, index: int) -> None:
        def sent(batch: Batch) -> None:
            error = batch.error_of(index)
            if error is None:
                asking.is_stored = True
            elif self._asked.pop(asking.correlation_id, None) is not None:
                asking.settle(None, error)

        batch.on_settled.append(sent)

    async def ask_in_loop(
        self,
        topic: str,
        body: Body,
        timeout_s: float,
        options: TransactionOptions,
        prepare: Callable[[Target, float], Awaitable[None]],
    ) -> Reply:
        """See `AsyncProducer.request`.

        Args:
            prepare: does for a target what could block, within that many seconds.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()

        def resolve(reply: Reply | None, error: CometError | None) -> None:
            if future.done():
                return  # cancelled
            if reply is not None:
                future.set_result(reply)
            elif error is not None:
                future.set_exception(again(error))

        def settle(reply: Reply | None, error: CometError | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(resolve, reply, error)

        asking = self.compose(topic, body, timeout_s, options, settle)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await prepare(asking.target, timeout_s)
                self.begin(asking)
                return await future
        except TimeoutError:
            if not limit.expired():
                raise
            raise asking.too_late() from None
        finally:
            self.forget(asking)

    # --- where replies come from ---

    def is_open(self, topic: str) -> bool:
        """Whether replies to requests of that topic would be heard; costs no time."""
        route = self._routes.known(topic)
        return route is not None and self._opened.get(topic) is route

    def open(self, topic: str, timeout_s: float) -> None:
        """Wait for replies at the masters of all brokers of that topic.

        A broker that cannot be reached, or is no longer the master, is tried again until the time
        is over: its group may be electing. Raises the last error.
        """
        deadline = time.monotonic() + timeout_s
        failures = 0
        while True:
            try:
                self._open(topic, deadline)
            except CometError as error:
                failures += 1
                pause = pause_s(failures, most_s=SOON_S)
                if not error.retriable or time.monotonic() + pause >= deadline:
                    raise
                time.sleep(pause)
                with suppress(CometError):
                    self._routes.refresh(topic, ROUTE_S)
            else:
                return

    def _open(self, topic: str, deadline: float) -> None:
        self._sender.learn(Target(topic, None, None))
        route = self._routes.topic(topic)
        masters = [each.endpoints for each in route.brokers if each.endpoints.broker_id == MASTER]
        if not masters:
            raise NotMaster(f"topic {topic}: no master is known now that could deliver replies")
        refusal: CometError | None = None
        for master in masters:
            with self._lock:
                if self._closed:
                    raise ClientClosed("the producer is closed: open another one")
                post = self._posts.get(master.broker)
            if post is not None and post.endpoint == master.commitlog:
                continue
            try:
                self._open_at(master, min(ASK_S, max(0.1, deadline - time.monotonic())))
            except CometError as error:
                refusal = error
        if refusal is not None:
            raise refusal
        self._opened[topic] = route

    def _open_at(self, master: BrokerEndpoints, timeout_s: float) -> None:
        """Wait for replies at this master from now on, instead of at the broker's previous one.
        Raises the master's errors."""
        post = _Post(master)
        self._routes.ask(master.coordinator, EnsureTopic(post.topic), TopicRoute, timeout_s)
        self._routes.commitlog(post.endpoint, post.name)
        answer = self._routes.ask(post.endpoint, self._poll_of(post, 0), Replies, timeout_s)
        post.mailbox = answer.mailbox
        with self._lock:
            before = self._posts.get(post.broker)
            if self._closed or (before is not None and before.endpoint == post.endpoint):
                return  # another thread was first
            self._posts[post.broker] = post
        self._poll(post)

    def _poll_of(self, post: _Post, wait_ms: int) -> Command:
        return AwaitReplies(
            post.topic, self._secret, self._process, post.mailbox, post.received, wait_ms
        )

    def _is_over(self, post: _Post) -> bool:
        """Return whether the producer no longer waits for replies there."""
        return self._closed or self._posts.get(post.broker) is not post

    def _poll(self, post: _Post) -> None:
        if self._is_over(post):
            return
        try:
            channel = self._routes.commitlog(post.endpoint, post.name)
            post.poll.ask(
                channel,
                self._poll_of(post, WAIT_MS),
                WAIT_MS / 1000,
                partial(self._heard, post),
                late_s=LATE_S,
            )
        except CometError as error:
            self._again(post, error)

    def _heard(self, post: _Post, pending: Pending) -> None:
        """In the channel's thread."""
        try:
            answer, payload = pending.result()
            if not isinstance(answer, Replies) or len(payload) != len(answer.replies):
                raise CometError(f"AwaitReplies was answered by {type(answer).__name__}")
        except CometError as error:
            self._again(post, error)
            return
        post.poll.answered()
        if answer.mailbox != post.mailbox:
            post.mailbox, post.received = answer.mailbox, 0
        news = self._take(post, answer, payload)
        for asking, reply in news[:1]:  # whoever waits alone wants nothing else
            asking.settle(reply, None)
        self._poll(post)  # the others' replies wait for it
        for asking, reply in news[1:]:
            asking.settle(reply, None)

    def _take(
        self, post: _Post, answer: Replies, payload: Sequence[Frame]
    ) -> list[tuple[Asking, Reply]]:
        """What is news of it."""
        news: list[tuple[Asking, Reply]] = []
        arrived = str(time.time_ns() // 1_000_000)
        for number, (head, frame) in enumerate(
            zip(answer.replies, payload, strict=True), answer.first
        ):
            if number <= post.received:
                continue  # it came again
            post.received = number
            asking = self._asked.pop(head.correlation_id, None)
            if asking is None:
                self.late += 1
                log.debug("a reply to %.255s came too late", head.correlation_id)
                continue
            properties = {
                **head.properties,
                CORRELATION_ID: head.correlation_id,
                PUSH_REPLY_TIME: str(head.pushed_ms),
                ARRIVE_TIME: arrived,
            }
            news.append((asking, Reply(bytes(frame.buffer), properties)))
        return news

    def _again(self, post: _Post, error: CometError) -> None:
        """Wait for replies again after a pause, at the broker's master of that time."""
        if self._is_over(post):
            return
        pause = post.poll.failed(most_s=SOON_S)
        log.debug("no replies from %s: %s", post.endpoint, error)
        timer = threading.Timer(pause, self._look_for_master, (post,))
        timer.daemon = True
        timer.start()

    def _look_for_master(self, post: _Post) -> None:
        """Find the broker's master and wait for replies there. Runs in a thread of its own."""
        if self._is_over(post):
            return
        try:
            brokers = self._routes.brokers(ROUTE_S)
        except CometError as error:
            log.debug("cannot list brokers: %s", error)
            brokers = []
        masters = [each for each in brokers if each.broker_id == MASTER]
        master = next((each for each in masters if each.broker == post.broker), None)
        if master is not None and master.commitlog != post.endpoint:
            try:
                self._open_at(master, ASK_S)
            except CometError as error:
                self._again(post, error)
            return
        if master is None and post.poll.failures > 1 and post.broker not in self._serving():
            with self._lock:
                if self._posts.get(post.broker) is post:
                    del self._posts[post.broker]
            return
        self._poll(post)

    def _serving(self) -> set[str]:
        """Return the brokers that serve any topic with requests."""
        routes = [self._routes.known(topic) for topic in list(self._opened)]
        return {each.endpoints.broker for route in routes if route for each in route.brokers}

    # --- the end ---

    def close(self) -> None:
        """Who waits for a reply hears that none comes; coordinators, that nobody waits."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            posts = list(self._posts.values())
        while self._asked:
            try:
                _, asking = self._asked.popitem()
            except KeyError:
                break
            text = f"the producer was closed before a reply to request {asking.correlation_id} came"
            asking.settle(None, ClosedUnconfirmed(text))
        for post in posts:
            try:
                self._routes.ask(
                    post.endpoint, LeaveReplies(post.topic, self._secret), Command, LEAVE_S
                )
            except CometError as error:
                log.debug("leaving %s: %s", post.endpoint, error)
