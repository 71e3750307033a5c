"""The consumer: the public methods of receiving. What happens behind them is in `receiver`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from cometmq.client.arguments import check, checked
from cometmq.client.handling.interruption import Interruption, run_uninterrupted
from cometmq.client.handling.options import Handler, Handling, Middleware
from cometmq.client.handling.run import QueueRun, Run
from cometmq.client.questions import Position
from cometmq.client.receiving.mapped import check_transport
from cometmq.client.receiving.member import Member
from cometmq.client.receiving.owned import QueueId
from cometmq.client.receiving.receiver import Receiver
from cometmq.client.receiving.unshared import Unshared
from cometmq.client.unclosed import Unclosed
from cometmq.protocol.errors import ArgumentIllegal
from cometmq.protocol.names import check_readable_topic, check_usable_group
from cometmq.protocol.positions import named
from cometmq.protocol.tags import ALL_TAGS, check_expression
from cometmq.protocol.wire.uninterrupted import (
    uninterrupted_class,
)
from cometmq.shm.kernel.codec import Message
from cometmq.shm.reading.selection import selection_of

POLL_S: Final = 1.0
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@uninterrupted_class(besides=("poll", "run"))
class Consumer:
    """Reads topics as a member of a group. One thread polls or iterates; the rest is for any.

        with Consumer("127.0.0.1:9876", "billing", "orders", tags="paid || refunded") as consumer:
            for message in consumer:
                work(message.body)
                consumer.ack(message)

    The members of a group share the queues of its topics; each group gets everything. All members
    of one group must subscribe to the same topics with the same tags and SQL92.

    **Progress.** A queue's progress is its smallest offset that is not acknowledged. It is
    committed every `auto_commit_ms`, when a queue goes to another member, and on `close`. After a
    restart the group goes on there. Without `ack` nothing is committed: the next start begins where
    this one began.

    **What may come twice.** Messages that were not acknowledged, or whose acknowledgement was not
    committed yet, when the process died or the queue went to another member. Before a queue goes to
    another member, messages that were already handed out may be acknowledged for up to a second;
    later than that is too late, and the other member gets them as well.

    **What may be left out.** A record that is damaged on the broker's disk: it is reported in the
    log with its place. Messages that expired before they were read: likewise.

    **When it blocks.** Creating it and `subscribe` ask the name server; `poll` and iteration wait
    for messages; `seek`, `commit` and `close` wait for the coordinator. `ack` never waits.

    Args:
        name_server: "host:port", a ZeroMQ address, or several (a list, or separated by ";").
        group: whose progress it is. None: nobody's; it reads all queues of what it subscribes to,
            or those that it is assigned, and shares them with nobody; no broker keeps anything.
        topic: what to subscribe to; None: `subscribe` says it later.
        tags: "*" for all, or tags joined by "||".
        sql: an SQL92 expression over the properties, "amount > 5 AND region IN ('eu', 'us')": only
            messages of which it is TRUE, and which have one of the tags. See docs/filters.md.
        start: where a group begins that has no progress in the topic: "earliest", "latest", a
            datetime, or milliseconds since 1970. "latest" and times are committed before this
            or `subscribe` returns (AsyncConsumer: before `async with` is entered, or its first call
            returns), so later messages are not missed. A group that has progress reads queues that
            are added to the topic from their first message.
        auto_commit_ms: how long an acknowledgement may stay uncommitted.
        pull_bytes: asked for in one answer of a reader.
        prefetch_bytes: records that wait here undecoded, all queues together. Each queue may
            exceed its share by one answer.
        prefetch_count: messages in one answer at most.
        member: this consumer's name in the group; the default is unique, and, for `broadcast`,
            this machine's address and DEFAULT, as RocketMQ's. Of two of a group that call
            themselves alike at one time, each gets what the other has.
        broadcast: True: it reads all queues of what it subscribes to, whoever else does. Its
            progress is in a file of its own, as RocketMQ's is, below ~/.rocketmq_offsets or the
            folder that is said here, written every 5 s and on `close`. Whoever has the same
            `member` and group there, one at a time, goes on with it. `run` has no retries then.
        transport: "auto": the store of a broker on this machine is mapped and read where it lies,
            if this process may; what cannot be mapped is asked for through ZeroMQ. "mapped" raises
            NotMapped instead, and also takes the store of another user, who could end this process
            by cutting his files. "zmq": never mapped. A disk that cannot be read ends a process
            that has it mapped (SIGBUS).
        spin_us: how long `poll` looks for messages of mapped queues before it sleeps. Takes a
            processor for that time, and saves the wake-up.
        wait_for_broker: seconds to wait for a broker that is not there yet; then, and with 0 at
            once, NotReachable.
        max_reconsume_times: how often `run` has a message delivered again before it goes to the
            dead letters (%DLQ%group); None: as the group's configuration says (16), and for ever
            with `orderly`.
    """

    @checked
    def __init__(
        self,
        name_server: str | Iterable[str],
        group: str | None,
        topic: str | None = None,
        tags: str = ALL_TAGS,
        *,
        sql: str = "",
        start: Position = "earliest",
        auto_commit_ms: int = 1_000,
        pull_bytes: int = 1_048_576,
        prefetch_bytes: int = 16 * 1_048_576,
        prefetch_count: int = 8_192,
        member: str | None = None,
        broadcast: bool | str | Path = False,
        transport: str = "auto",
        spin_us: float = 0,
        wait_for_broker: float = 0,
        max_reconsume_times: int | None = None,
    ) -> None:
        if group is not None:
            check_usable_group(group)
        check_transport(transport)
        if max_reconsume_times is not None and not 0 <= max_reconsume_times <= 0x7FFFFFFF:
            raise ArgumentIllegal(f"max_reconsume_times={max_reconsume_times}: 0 or more")
        if isinstance(start, str):
            word = named(start)
            if word is None:
                raise ArgumentIllegal(f"start={start!r}: 'earliest', 'latest' or a time")
            start = word
        self._receiver = Receiver(
            name_server,
            group,
            member=member,
            broadcast=broadcast,
            start=start,
            auto_commit_s=auto_commit_ms / 1000,
            pull_bytes=pull_bytes,
            prefetch_bytes=prefetch_bytes,
            prefetch_count=prefetch_count,
            transport=transport,
            spin_us=spin_us,
            max_reconsume_times=max_reconsume_times,
        )
        self._running: Run | None = None
        self._stream = self._receiver.stream
        what = f"the consumer {self._member.name} of group {group}"
        self._unclosed = Unclosed(self, what, self._receiver.close)
        try:
            if wait_for_broker:
                self.wait_for_broker(wait_for_broker)
            if topic is not None:
                self.subscribe(topic, tags, sql)
        except BaseException:
            self.close()
            raise

    @property
    def _member(self) -> Member | Unshared:
        return self._receiver.member

    @property
    def group(self) -> str | None:
        """Whose progress it is; None: nobody's."""
        return self._member.group

    @property
    def member(self) -> str:
        """This consumer's name in the group."""
        return self._member.name

    # --- what is read ---

    @checked
    def subscribe(self, topic: str, tags: str = ALL_TAGS, sql: str = "") -> None:
        """Read this topic too, or by other tags or SQL92 than before. A new topic is created.

        Raises NameIllegal, SubscriptionIllegal, FilterIllegal, NotReachable, TopicNotExist,
        NotMapped. A broker that takes no SQL92 refuses the member; its log has FiltersOff.
        """
        check_readable_topic(topic)
        check_expression(tags)
        selection_of(tags, sql)
        self._receiver.check_open()
        self._member.subscribe(topic, tags, sql)

    @checked
    def unsubscribe(self, topic: str) -> None:
        """Read this topic no longer; its progress is committed."""
        self._receiver.check_open()
        self._member.unsubscribe(topic)

    @checked
    def assign(
        self,
        queues: str | Mapping[QueueId, int] | Iterable[QueueId],
        tags: str = ALL_TAGS,
        sql: str = "",
    ) -> None:
        """Read these queues, all of them and no others, and share them with nobody.

        What was assigned before is committed and left. The group, if there is one, is not joined:
        it keeps what `commit` says, as long as no member owns the queue.

        Args:
            queues: a topic: all its queues, also those that it gets later. Queues as `assignment`
                has them, (broker, topic, queue id): they go on where the group is, or begin at
                `start`. With an offset for each: there; an offset that the queue does not have any
                more, or not yet, is moved to its begin or end, with a warning in the log.
            tags, sql: only these messages, as for `subscribe`.

        Raises:
            ArgumentIllegal: it has subscribed as a member of its group, or there is no such queue.
            TopicNotExist, NotReachable, SubscriptionIllegal, ...
        """
        check_expression(tags)
        selection_of(tags, sql)
        self._receiver.check_open()
        if isinstance(queues, str):
            check_readable_topic(queues)
            wanted: dict[QueueId, int | None] | str = queues
        else:
            wanted = _wanted(queues)
        self._receiver.without_sharing().assign(wanted, tags, sql)

    @property
    def assignment(self) -> list[tuple[str, str, int]]:
        """The queues this member owns now: (broker, topic, queue id)."""
        return self._receiver.owned.assignment()

    @checked
    def pause(self, queues: Iterable[QueueId]) -> None:
        """Hand out nothing of these queues until `resume`; they stay this consumer's.

        What waits here already goes out then. A queue that leaves, and comes back, is not paused.
        Raises NotOwner if one of them is not in `assignment`; then none is paused.
        """
        self._receiver.check_open()
        self._receiver.owned.set_paused(_wanted(queues), True)

    @checked
    def resume(self, queues: Iterable[QueueId]) -> None:
        """Go on with these queues. Raises NotOwner as `pause` does."""
        self._receiver.check_open()
        self._receiver.owned.set_paused(_wanted(queues), False)

    @checked
    def position(self, queue: QueueId) -> int:
        """The queue offset behind the last message that was handed out: where it goes on.

        Raises NotOwner if the queue is not in `assignment`.
        """
        self._receiver.check_open()
        [key] = _wanted([queue])
        return self._receiver.owned.position_of(key)

    # --- whom it is read from ---

    @property
    def connected(self) -> bool:
        """Whether every broker that it reads from has answered last time; False before the first
        answer. One that stays away is told of in the log as well, and so is that it is back."""
        return self._member.connected

    def wait_for_broker(self, timeout_s: float) -> None:
        """Sleep until the name server knows a broker. Raises NotReachable after that time."""
        self._receiver.check_open()
        self._receiver.routes.wait_for_broker(timeout_s)

    # --- messages ---

    def poll(self, max_count: int = 1024, timeout_s: float | None = POLL_S) -> list[Message]:
        """The next messages, at most `max_count`; waits until there is one.

        Args:
            max_count: the list may be shorter although more is there.
            timeout_s: then it is empty; 0 = do not wait, None = for ever.

        Raises:
            SubscriptionIllegal, NoPermission, ...: what makes going on pointless. A broker that is
            away is no error: it is waited for.
        """
        if max_count.__class__ is not int:
            check("max_count", max_count, int)
        kind = timeout_s.__class__
        if kind is not int and (kind is not float or timeout_s != timeout_s):
            check("timeout_s", timeout_s, float | None)
        self._receiver.check_open()
        return self._stream.poll(max_count, timeout_s)

    def __iter__(self) -> Iterator[Message]:
        """Messages one by one, for ever; ends after `close`.

        What a loop that is left early has not seen comes with the next poll or loop.
        """
        self._receiver.check_open()
        while not self._stream.closed:
            yield from self._stream.each(POLL_S)

    @checked
    def run(
        self,
        handler: Handler,
        *,
        concurrency: int = 20,
        batch: int = 1,
        ordered_by: Callable[[Message], Hashable] | None = None,
        orderly: bool = False,
        middleware: Iterable[Middleware] = (),
        consume_timeout_s: float = 900.0,
        suspend_s: float = 1.0,
        span: int = 2_000,
        stuck_s: float = 60.0,
        end_timeout_s: float = 30.0,
    ) -> None:
        """Call `handler` for each message, in threads, until `close` or Ctrl-C.

            consumer.run(lambda message: work(message.body), concurrency=20)

        When the handler returns, whatever it returns, the message is acknowledged. When it raises,
        that is logged once, and the broker delivers the message again later: after 10 s, 30 s,
        1 min ... 2 h; after 16 attempts more it goes to the dead letters, topic %DLQ%group. It may
        raise `Retry(after=...)` to say when, and `Reject()` for the dead letters at once. A message
        that comes again has its topic of before and its `reconsume_times`. As long as the broker
        cannot take it back it is tried again here every 5 s, and never acknowledged.

        Progress never passes a message that is not done. What was not acknowledged when this ends
        comes again. SystemExit and KeyboardInterrupt in a handler are failed deliveries as well;
        then the run ends, and raises them. It ends like this: no message more is begun, those at
        work may finish, for `end_timeout_s` at most. A second Ctrl-C does not wait.

        With `broadcast` nothing comes again, and there are no dead letters: as in RocketMQ, a
        message whose handler fails is logged and dropped, whatever it raises, `Retry` and `Reject`
        too, and so is one that takes longer than `consume_timeout_s`. Only with `orderly` it is
        tried again in place, as it is without `broadcast`, and what would go to the dead letters is
        dropped.

        Args:
            handler: is called in several threads at a time.
            concurrency: how many threads.
            batch: more than 1: the handler gets lists of so many at most, each of one queue, which
                are done or fail as a whole.
            ordered_by: messages for which it says the same are handled one after the other, in
                order of their queue, the others at the same time; None: this one has no order. One
                that fails comes again later; those behind it go on.
            orderly: a queue's messages are handled one after the other, queues at the same time.
                One that fails is tried again in place, and its queue waits: for ever, or until
                `max_reconsume_times` have sent it to the dead letters.
            middleware: each takes a handler and gives back another that calls it. The first is the
                outermost.
            consume_timeout_s: a message that is at work for longer is a failed delivery, and its
                handler's end counts no longer. Not with `orderly`.
            suspend_s: how long a queue waits after a failure; with `orderly`.
            span: how far a queue may be ahead of its first message that is not done.
            stuck_s: a handler that takes so long is named in the log with its message; again when
                it has taken twice as long.
            end_timeout_s: for what is at work at the end.

        Raises:
            ArgumentIllegal: it has no group, or queues that are assigned: nobody keeps retries.
            RuntimeError: another `run` is active, or the consumer is closed (ClientClosed).
            SubscriptionIllegal, NoPermission, ...: as `poll`.
        """
        handling = Handling(
            concurrency,
            batch,
            ordered_by,
            orderly,
            middleware,
            consume_timeout_s,
            suspend_s,
            span,
            stuck_s,
            end_timeout_s,
        )
        handling.check()
        wrapped = handling.wrapped(handler, is_async=False)
        run_uninterrupted(partial(self._run, handling, wrapped))

    def _run(self, handling: Handling, handler: Handler, interruption: Interruption) -> None:
        self._receiver.check_open()
        if self._running is not None:
            raise RuntimeError("the consumer runs already")
        self._member.subscribe_retries()
        running = self._running = QueueRun(self._receiver, handling)
        interruption.watch(running)
        try:
            running.work(handler)
        finally:
            self._running = None

    # --- progress ---

    def ack(self, messages: Message | Iterable[Message]) -> None:
        """Acknowledge messages, in any order. Never waits; they are committed in the background.

        A list as `poll` returned it costs next to nothing. Messages of queues that now belong to
        another member are ignored: that member receives them. Messages that this consumer did not
        receive since its last seek or reset, or has acknowledged, are ignored too. Raises
        ClientClosed.
        """
        self._receiver.check_open()
        if not isinstance(messages, (list, Message)):
            check("messages", messages, Message | Iterable[Message])
            messages = list(messages)
        try:
            self._receiver.owned.acknowledge(messages)
        except TypeError:
            check("messages", messages, Message | list[Message])  # which says what is none
            raise

    def commit(self) -> None:
        """Commit what is acknowledged, now. Raises NotConfirmed, ServiceNotAvailable, ...

        Assigned queues: NotOwner if a member of the group has one. Without a group:
        ArgumentIllegal; `position` is what you would keep.
        """
        self._receiver.check_open()
        self._member.commit()

    @checked
    def seek(
        self, position: Position, topic: str | None = None, queue_id: int | None = None
    ) -> None:
        """Go on elsewhere, forwards or back, in the queues this member owns.

        The new place is committed at once. Waits for the first assignment if there is none yet.

        Args:
            position: "earliest", "latest" (also called "begin" and "end"), a queue offset, or a
                datetime: the first message stored then or later.
            topic, queue_id: only there; None = everywhere. An offset needs both.

        Raises:
            NotOwner: a queue belongs to another member, or went to one in this moment. The others
                of several queues may have been moved.
            OffsetIllegal: the queue offset is outside of the queue.
            ArgumentIllegal: it does not read the topic.
        """
        if isinstance(position, int) and (topic is None or queue_id is None):
            raise ArgumentIllegal(
                "an offset belongs to one queue: say which, by topic and queue_id"
            )
        self._receiver.check_open()
        owned = self._receiver.owned
        if topic is not None and topic not in owned.topics and not owned.find(topic, None):
            raise ArgumentIllegal(f"this consumer does not read topic {topic}")
        self._member.seek(position, topic, queue_id)

    def seek_to_time(
        self, at: datetime | int, topic: str | None = None, queue_id: int | None = None
    ) -> None:
        """Go on with the first message stored then or later: `seek` to a datetime, or to so many
        milliseconds since 1970."""
        check("at", at, datetime | int)
        try:
            when = at if isinstance(at, datetime) else EPOCH + timedelta(milliseconds=at)
        except OverflowError:
            when = None
        if when is None or (isinstance(at, int) and at < 0):
            raise ArgumentIllegal(f"at={at!r:.100}: a datetime, or milliseconds since 1970")
        self.seek(when, topic, queue_id)

    # --- the end ---

    def close(self) -> None:
        """Commit acknowledged messages, leave the group, disconnect. May be called twice.

        A `poll` in another thread returns the messages that it has, and an iteration ends. `run`
        ends after its active handlers have returned; `close` waits for that unless a handler calls
        it.
        """
        self._unclosed.is_closed()
        running = self._running
        if running is None or running.end(self._receiver.close):
            self._receiver.close()

    def __enter__(self) -> Self:
        self._receiver.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _wanted(queues: Mapping[QueueId, int] | Iterable[QueueId]) -> dict[QueueId, int | None]:
    """Queues, each with the offset that was said. Raises ArgumentIllegal, NameIllegal."""
    found: dict[QueueId, int | None] = {}
    for each in queues:
        match each:
            case (str(), str(topic), int()) if len(each) == 3:
                check_readable_topic(topic)
            case _:
                raise ArgumentIllegal(f"a queue is (broker, topic, queue id), not {each!r:.80}")
        offset = queues[each] if isinstance(queues, Mapping) else None
        check("queue offset", offset, int | None)
        if offset is not None and offset < 0:
            raise ArgumentIllegal(f"queue offset {offset}: at least 0")
        found[each] = offset
    return found
