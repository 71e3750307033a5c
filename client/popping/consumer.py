"""The pop consumer: the public methods of consuming without queues."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Final, Self

from cometmq.client.arguments import check, checked
from cometmq.client.forked import Forked
from cometmq.client.handling.interruption import Interruption, run_uninterrupted
from cometmq.client.handling.options import Handler, Handling, Middleware
from cometmq.client.handling.outcomes import AFTER_S_MAX, DEAD, Verdict
from cometmq.client.handling.work import describe
from cometmq.client.popping.asking import Asking
from cometmq.client.popping.broker import (
    PopBroker,
    Wanted,
    by_broker,
    by_take,
    look_up,
    may_help,
    raise_first,
    taken_of,
)
from cometmq.client.popping.call import PopCall
from cometmq.client.popping.run import PopRun
from cometmq.client.presence import unique_name
from cometmq.client.routes import MASTER, Routes, broker_routes
from cometmq.client.unclosed import Unclosed
from cometmq.protocol.commands import (
    GIVEN_BACK_MAX,
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN,
    POP_COUNT_MAX,
    BrokerEndpoints,
    GivenBack,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    ClientClosed,
    CometError,
    NotReachable,
    TopicNotExist,
)
from cometmq.protocol.names import check_readable_topic, check_usable_group
from cometmq.protocol.positions import named
from cometmq.protocol.tags import ALL_TAGS, check_expression
from cometmq.protocol.wire.uninterrupted import (
    call_uninterrupted,
    uninterrupted_class,
)
from cometmq.shm.kernel.codec import Message
from cometmq.shm.reading.selection import selection_of

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
WAIT_S: Final = 5.0  # of one question to a broker
LOOK_S: Final = 0.2
SHARED_WAIT_S: Final = 0.2  # the same where several brokers are asked in turn


@uninterrupted_class(besides=("poll", "run"))
class PopConsumer:
    """Takes messages of a topic one by one, whoever else does: a group without queues.

        with PopConsumer("127.0.0.1:9876", "resize", "images", invisible_s=120) as consumer:
            for message in consumer.poll(10, timeout_s=5):
                work(message.body)
                consumer.ack(message)

    There may be more consumers in the group than the topic has queues, and no message holds up
    another. What a consumer has popped is invisible to the others for `invisible_s`. Until then it
    is acknowledged, or extended, or given back; else it comes again, to anyone, with one attempt
    more (`message.reconsume_times`), and in the end goes to the dead letters (%DLQ%group). There
    is no order, unless the group is `orderly`: then nobody gets anything of a queue while some of
    what was taken of it, at most 32 messages, is neither acknowledged nor visible again.

    All of that survives a kill of any process: it lies in the broker, not here. Messages come
    at least once. One thread polls; the other methods are for any.

    Args:
        name_server: "host:port", a ZeroMQ address, or several (a list, or separated by ";").
        group: must have no members that share queues (Consumer).
        topic: whose messages it takes; those of its own that come again, too.
        tags, sql: as of Consumer; what is left out is acknowledged for the whole group.
        orderly: each queue in its order. All consumers of a group do it in the same way.
        invisible_s: from 0.1 s to 12 h.
        start: where a new group begins: "earliest", or "latest", behind all messages that were sent
            before the constructor returned. Queues added to the topic later are read from their
            first message.
        max_reconsume_times: how often a message may come again; None: as the group's configuration
            says (16). Of those that nobody acknowledges in time, always that.
        timeout_s: how long `ack` and the others try. `poll` waits for its own time, and says that
            nobody is there when that has lasted for this one.
        wait_for_broker: seconds to wait for a broker that is not there yet.

    Raises NameIllegal, NotReachable, TopicNotExist, SubscriptionIllegal, FilterIllegal.
    """

    @checked
    def __init__(
        self,
        name_server: str | Iterable[str],
        group: str,
        topic: str,
        tags: str = ALL_TAGS,
        *,
        sql: str = "",
        orderly: bool = False,
        invisible_s: float = 60.0,
        start: str = "earliest",
        max_reconsume_times: int | None = None,
        timeout_s: float = 10.0,
        wait_for_broker: float = 0,
    ) -> None:
        check_usable_group(group)
        check_readable_topic(topic)
        check_expression(tags)
        selection_of(tags, sql)
        first = named(start)
        if first is None:
            raise ArgumentIllegal(f"start={start!r}: 'earliest' or 'latest'")
        if max_reconsume_times is not None and not 0 <= max_reconsume_times <= 0x7FFFFFFF:
            raise ArgumentIllegal(f"max_reconsume_times={max_reconsume_times}: 0 or more")
        self._wanted = Wanted(
            group, topic, tags, sql, _milliseconds(invisible_s), first == named("latest"),
            unique_name(), self._is_async, orderly,
        )  # fmt: skip
        self._times_max = -1 if max_reconsume_times is None else max_reconsume_times
        self._timeout_s = timeout_s
        self._routes = Routes(name_server)
        self._brokers: dict[str, PopBroker] = {}
        self._turn = 0
        self._trouble: tuple[float, CometError] | None = None  # since when nobody answers, and why
        self._closed = False
        self._asking = Asking()
        self._process = os.getpid()
        self._running: PopRun | None = None
        try:
            if wait_for_broker:
                self._routes.wait_for_broker(wait_for_broker)
            for broker in self._find_brokers():
                if self._wanted.from_latest:
                    broker.begin()
        except BaseException:
            self._routes.close()
            raise
        self._unclosed = Unclosed(self, f"the pop consumer of group {group}", self._routes.close)

    _is_async = False  # messages reply by a coroutine

    @property
    def group(self) -> str:
        """The group's name."""
        return self._wanted.group

    # --- popping ---

    def poll(self, max_messages: int = 32, timeout_s: float = POLL_S) -> list[Message]:
        """At most so many messages; none if none has come in time.

        While the broker is away, or another master is elected, that is none as well. Raises
        NotReachable or NotConfirmed when that has lasted for `timeout_s` of the consumer, and what
        brokers refuse: GroupInUse, NoPermission, SubscriptionsDiffer, FiltersOff. Raises
        ClientClosed if the consumer is closed; a `close` during a poll makes it return no messages.
        """
        call = PopCall()
        return call_uninterrupted(
            partial(self._poll, max_messages, timeout_s, call),
            abandon=call.stop,
            undo=partial(try_release, self),
        )

    def _poll(self, max_messages: int, timeout_s: float, call: PopCall) -> list[Message]:
        self._check_open()
        check("max_messages", max_messages, int)
        check("timeout_s", timeout_s, float)
        if not 0 < max_messages <= POP_COUNT_MAX:
            raise ArgumentIllegal(f"max_messages={max_messages}: 1 to {POP_COUNT_MAX}")
        deadline = time.monotonic() + timeout_s
        with self._asking:
            while not self._closed and not call.is_cancelled:
                found = self._poll_in_turn(max_messages, deadline, call)
                if found and self._closed and self._running is None:
                    try_release(self, found)  # the caller could not acknowledge them any more
                    break
                if found:
                    return found
                if time.monotonic() >= deadline:
                    self._check_heard()
                    break
        return []

    def _poll_in_turn(self, count: int, deadline: float, call: PopCall) -> list[Message]:
        """Ask each broker once."""
        try:
            brokers = self._find_brokers()
        except NotReachable as error:
            self._missed(error)
            call.pause(min(LOOK_S, deadline - time.monotonic()))
            look_up(self._routes, self._wanted.topic)
            return []
        self._turn += 1
        asked = 0
        for step in range(len(brokers)):
            broker = brokers[(self._turn + step) % len(brokers)]
            now = time.monotonic()
            if now < broker.again_at:
                continue
            asked += 1
            most = WAIT_S if len(brokers) == 1 else SHARED_WAIT_S
            try:
                messages = broker.pop(count, min(most, max(0.0, deadline - now)), call)
            except CometError as error:
                if not may_help(error):
                    raise
                broker.put_off(error)
                self._missed(error)
                continue
            self._trouble = None
            if messages:
                return messages
        if not asked:
            wake = min(broker.again_at for broker in brokers)
            call.pause(min(wake, deadline) - time.monotonic())
        return []

    def _missed(self, error: CometError) -> None:
        since = time.monotonic() if self._trouble is None else self._trouble[0]
        self._trouble = since, error

    def _check_heard(self) -> None:
        """Raise what is wrong if nobody has answered for too long."""
        if self._trouble is not None:
            since, error = self._trouble
            if time.monotonic() >= since + self._timeout_s:
                raise error

    def _find_brokers(self) -> list[PopBroker]:
        """Those that serve the topic now."""
        topic = self._wanted.topic
        route = self._routes.topic(topic)
        names = []
        for each in broker_routes(route):
            name = each.endpoints.broker
            if each.endpoints.broker_id != MASTER:
                continue  # a slave gives out nothing
            names.append(name)
            if name not in self._brokers:
                self._brokers[name] = PopBroker(
                    self._routes, self._wanted, partial(self._endpoints, name), self._timeout_s
                )
        if not names:
            raise NotReachable(f"no broker that is a master serves topic {topic}")
        return [self._brokers[name] for name in names]

    def _endpoints(self, broker: str) -> BrokerEndpoints:
        for each in broker_routes(self._routes.topic(self._wanted.topic)):
            if each.endpoints.broker == broker:
                return each.endpoints
        raise TopicNotExist(f"broker {broker} does not serve topic {self._wanted.topic} any more")

    # --- what becomes of them ---

    def ack(self, *messages: Message) -> None:
        """These are done with. Returns once the brokers keep that as safely as a commit.

        Raises HandleUnknown when the time of one of them was over, and it has gone back: it comes
        again. The others are acknowledged. NotConfirmed, NotReachable: nobody knows, and it may be
        said again.
        """
        self._check_open()
        self._tell(messages, lambda broker, some: broker.ack(by_take(some).items()))

    def release(self, *messages: Message) -> None:
        """Release messages that no handler has begun with, such as polled ones at the end of a
        program. They are available to any consumer at once, and no attempt is counted.

        With `orderly`, the messages taken behind a released one are released with it.

        A broker that is older than this client takes a message back too, but counts an attempt;
        the log says so once. Raises the errors of `ack`.
        """
        self._check_open()
        self._release(messages)

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            Forked("PopConsumer").acquire()
        if self._closed and self._running is None:
            raise ClientClosed("the consumer is closed: open another one")

    def _tell(
        self,
        messages: Iterable[Message],
        tell: Callable[[PopBroker, Sequence[Message]], Iterable[int]],
    ) -> None:
        """Send each broker its messages. Raises the first error."""
        codes: set[int] = set()
        missed: CometError | None = None
        with self._asking:
            for broker, some in by_broker(messages).items():
                try:
                    codes.update(tell(broker, some))
                except CometError as error:  # the other brokers have no part in that
                    missed = missed or error
        if missed is not None:
            raise missed
        raise_first(codes, f"group {self.group}")

    def nack(self, message: Message, after: timedelta | float | None = None) -> None:
        """It could not be handled: have it come again, with one attempt more, `after` so long (a
        timedelta, or seconds); None: later each time, 10 s, 30 s, 1 min ... 2 h.

        In order it comes again where it is, and its queue waits for it, for 1 s without `after`, 12
        h at most. What was taken behind it comes again as well, behind it: it is nobody's now.

        Raises what `ack` raises, MessageNotFound when it has expired.
        """
        if isinstance(after, timedelta):
            after = after.total_seconds()
        check("after", after, float | None)
        if after is not None and not 0 <= after <= AFTER_S_MAX:
            raise ArgumentIllegal(f"after={after!r}: a timedelta, or seconds from 0 on")
        verdict = Verdict() if after is None else Verdict(after_ms=round(after * 1000))
        self._give_back(message, verdict)

    def reject(self, message: Message) -> None:
        """Nobody can handle it: it goes to the dead letters at once. In order, what was taken
        behind it comes again then. Raises what `nack` raises."""
        self._give_back(message, DEAD)

    def _give_back(self, message: Message, verdict: Verdict) -> None:
        for _, error in self._give_back_all([(message, verdict)]):
            raise error

    def _give_back_all(
        self, given: Sequence[tuple[Message, Verdict]]
    ) -> list[tuple[Message, CometError]]:
        """Give messages back; return those that are not given back, with the reasons."""
        self._check_open()
        by_broker: dict[PopBroker, list[tuple[Message, Verdict]]] = {}
        for message, verdict in given:
            by_broker.setdefault(taken_of(message).broker, []).append((message, verdict))
        failed: list[tuple[Message, CometError]] = []
        with self._asking:
            for broker, some in by_broker.items():
                for at in range(0, len(some), GIVEN_BACK_MAX):
                    failed += self._give_back_some(broker, some[at : at + GIVEN_BACK_MAX])
        return failed

    def _give_back_some(
        self, broker: PopBroker, given: list[tuple[Message, Verdict]]
    ) -> list[tuple[Message, CometError]]:
        command = [
            GivenBack(
                message.stored_topic, message.queue_id, message.queue_offset,
                message.physical_offset, verdict.delay_level, verdict.after_ms,
                taken_of(message).popped.handle,
            )
            for message, verdict in given
        ]  # fmt: skip
        failed: list[tuple[Message, CometError]] = []
        try:
            codes = broker.give_back(command, self._times_max)
        except CometError as error:  # the other brokers have no part in that
            return [(message, error) for message, _ in given]
        for (message, _), code in zip(given, codes, strict=True):
            try:
                raise_first([code], describe(message))
            except CometError as error:
                failed.append((message, error))
        return failed

    def extend(self, message: Message, invisible_s: float) -> None:
        """Have it for so long from now on; and what was popped beside it, its neighbours in the
        queue. Raises what `ack` raises."""
        self._check_open()
        taken = taken_of(message)
        with self._asking:
            codes = taken.broker.extend(taken, _milliseconds(invisible_s))
        raise_first(codes, describe(message))

    def _release(self, messages: Iterable[Message]) -> None:
        self._tell(messages, PopBroker.release)

    # --- handlers ---

    def run(
        self,
        handler: Handler,
        *,
        concurrency: int = 20,
        middleware: Iterable[Middleware] = (),
        stuck_s: float = 60.0,
        end_timeout_s: float = 30.0,
    ) -> None:
        """Call `handler` with each message, in so many threads, until `close` or Ctrl-C.

        What it returns for is acknowledged, many at a time. An exception is a failed delivery:
        the message comes again, later each time; `Retry(after=...)` and `Reject()` say more. What
        takes longer than `invisible_s` comes again meanwhile. SystemExit and KeyboardInterrupt in
        a handler are failed deliveries as well; then the run ends, and raises them.

        Messages that no thread has begun when it ends are released: they are available to any
        consumer at once, and no attempt is counted. So are messages that have waited for a thread
        for half of `invisible_s`.

        In order, each queue's messages go to one thread at a time. What fails comes again first,
        after 1 s or as `Retry(after=...)` says, and until then nothing of its queue.

        Args:
            middleware: each takes a handler and gives back another that calls it. The first is the
                outermost.
            stuck_s: a handler that takes so long is named in the log with its message; again when
                it has taken twice as long.
            end_timeout_s: how long the end waits for what runs.

        While the broker is away it waits. Raises ArgumentIllegal, and what brokers refuse `poll`.
        """
        handling = Handling.of(
            {
                "concurrency": concurrency,
                "middleware": middleware,
                "stuck_s": stuck_s,
                "end_timeout_s": end_timeout_s,
            }
        )
        wrapped = handling.wrapped(handler, is_async=False)
        run_uninterrupted(partial(self._run, handling, wrapped))

    def _run(self, handling: Handling, handler: Handler, interruption: Interruption) -> None:
        self._check_open()
        if self._running is not None:
            raise ArgumentIllegal("run() is at work already")
        run = self._running = PopRun(Inside(self), handling, orderly=self._wanted.orderly)
        interruption.watch(run)
        try:
            run.work(handler)
        finally:
            self._running = None

    # --- the end ---

    def close(self) -> None:
        """Wait for active handlers of `run`, release messages that it has not begun, disconnect.

        Polled messages that are neither acknowledged nor released are redelivered after
        `invisible_s`. If a handler of `run` calls this, it does not wait; the rest is done when
        `run` ends.
        """
        if self._closed:
            return
        if os.getpid() != self._process:
            Forked("PopConsumer").acquire()
        run = self._running
        if run is not None:
            run.interrupt()  # first: another handler's close() returns at once when it is closed
        self._closed = True
        self._unclosed.is_closed()
        self._stop_waiting()
        if run is not None and not run.end(self._routes.close):
            return
        self._asking.wait(self._timeout_s)  # a poll of another thread may have messages to release
        self._routes.close()

    def _stop_waiting(self) -> None:
        """Whoever polls hears that nothing comes."""
        for broker in list(self._brokers.values()):
            broker.stop()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Inside:
    """The inside, for a run."""

    def __init__(self, consumer: PopConsumer) -> None:
        self._consumer = consumer
        self.poll = consumer.poll
        self.ack = consumer.ack
        self.give_back = consumer._give_back_all
        self.release = consumer._release

    @property
    def is_closed(self) -> bool:
        return self._consumer._closed

    def release_lost(self) -> None:
        """Release messages that lost answers may hold."""
        for broker in list(self._consumer._brokers.values()):
            broker.release_lost()


def try_release(consumer: PopConsumer, messages: Sequence[Message]) -> None:
    """Release messages; if a broker does not answer, they are redelivered after `invisible_s`."""
    try:
        consumer._release(messages)
    except CometError as error:
        log.debug("not all of %d messages could be released: %s", len(messages), error)


def _milliseconds(invisible_s: float) -> int:
    found = round(invisible_s * 1000) if math.isfinite(invisible_s) else -1
    if not INVISIBLE_MS_MIN <= found <= INVISIBLE_MS_MAX:
        raise ArgumentIllegal(
            f"invisible for {invisible_s} s: {INVISIBLE_MS_MIN / 1000:g} to "
            f"{INVISIBLE_MS_MAX // 1000}"
        )
    return found
