"""The producer: the public methods of sending. What happens behind them is in `sender`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Final, Self, Unpack

from cometmq.client.arguments import check, checked
from cometmq.client.options import TransactionOptions
from cometmq.client.sending.accumulator import Batching
from cometmq.client.sending.callbacks import Callback, Callbacks, Sent
from cometmq.client.sending.compressing import compression
from cometmq.client.sending.identity import Identity
from cometmq.client.sending.outgoing import Body, Keys, compose, recalling
from cometmq.client.sending.pending import Checker
from cometmq.client.sending.receipt import Batch, Receipt, Receipts
from cometmq.client.sending.requests import Reply, Requests
from cometmq.client.sending.sender import Sender
from cometmq.client.sending.transaction import Transaction, Transactions
from cometmq.client.unclosed import Unclosed
from cometmq.protocol.errors import ArgumentIllegal, CometError
from cometmq.protocol.timed import Handle
from cometmq.protocol.wire.uninterrupted import uninterrupted_class
from cometmq.shm.kernel import codec

log = logging.getLogger(__name__)

WINDOW_S_MAX: Final = 7 * 24 * 3_600
KEYED_COUNT_MAX: Final = 2_048  # messages of a batch, with dedup


@uninterrupted_class()
class Producer:
    """Sends messages to topics. Threads may share it; processes may not.

        with Producer("127.0.0.1:9876") as producer:
            receipt = producer.send("orders", b"paid", tags="eu", keys="o-42")

    With `linger_ms` 0, `send` returns when the broker has stored the message. With more, `send`
    returns at once, messages gather into batches, and a receipt waits for its batch's answer when
    it is looked at: some hundred thousand messages a second instead of some thousand.

    **Order.** Messages that one thread sends to one queue (same `ordering_key`, same `queue_id`)
    are stored in the order of the calls: a queue gets one batch at a time, and a batch that must be
    sent again is not overtaken. Without key or queue, messages are spread over the queues, in
    turn, and have no order among each other. Those for later have none among the others.

    **Added and removed queues.** When a topic has fewer queues than the producer knows, the broker
    refuses the others. The producer then fetches the route and chooses again: any queue for
    messages without key or queue, and for those with an `ordering_key` the queue of the key by the
    new number, in the order in which they were sent. Stored messages stay in their queues. A
    `queue_id` is refused only after the route has been fetched: with ArgumentIllegal, or with
    QueueNotExist (a MessageIllegal) if the queue was removed while the message was in flight.

    **Once.** When the connection breaks or an answer is lost, the batch is sent again to the same
    queue, and the broker looks there for what it has stored of it already: no message stands in a
    queue twice, also after kills of the broker. You may see a message twice that you send twice:
    after NotConfirmed, say.

    **What may be lost.** Nothing that was acknowledged. A message whose `send` raised NotConfirmed
    may be stored or not. Messages in open batches are lost when the process dies.

    **When it blocks.** `send` for its answer (`linger_ms` 0), or while `max_in_flight_bytes` are
    unanswered; everywhere on the first message to a topic, to ask the name server.

    Errors (all are CometError): MessageTooLarge (size), NameIllegal (name), DiskFull (disk),
    NotConfirmed or NotReachable (time), ShuttingDown (shutdown), TopicNotExist, NoPermission,
    SystemBusy; TypeError for a body that is not bytes-like. Those with `retriable` were tried again
    until the time was up.

    Args:
        name_server: "host:port", a ZeroMQ address, or several (a list, or separated by ";").
        linger_ms: how long a message may wait to share a batch. 0 = sends at once.
        batch_bytes: a batch leaves when the next message would take it over this.
        batch_count: a batch leaves when it has so many messages.
        timeout_s: from the moment a batch leaves, retries included, until its error. None: 3 s, or
            15 s if a topic's brokers have replicas, which is enough for a fail-over; the
            environment variable COMETMQ_CLIENT_TIMEOUT (seconds) replaces both.
        retry_max: further attempts for a batch; None = as many as fit into `timeout_s`.
        max_in_flight_bytes: sent and unanswered; with more, sending waits. Open batches come extra.
        max_message_bytes: a larger body is refused at once. The broker has a limit of its own.
        compress: "zlib", "lz4" or "zstd": bodies travel and lie compressed, as RocketMQ's do, and
            every consumer unfolds them. LZ4 and ZSTD are extras (`pip install 'cometmq[lz4]'`);
            without, CodecMissing. None: as they are, which is fastest on a fast network and disk.
        compress_over: bodies of so many bytes and more, unless that makes them no smaller. Messages
            that are compressed and others do not share a batch.
        compress_level: from 1 (fast) to 9 (zlib), 12 (lz4) or 22 (zstd); None = 5, 1 or 3.
        transport: "auto": what fits into 64 KiB goes to a broker on this machine by a Unix socket,
            if it runs as the same user, and all else through ZeroMQ. "local": a broker of which
            that cannot be had is an error, NotLocal. "zmq": ZeroMQ for all.
        wait_for_broker: seconds to wait, here, for a broker that is not there yet; then
            NotReachable. 0: nobody is asked before the first message.
        name: of a group of producers that do the same; transactions want one.
        checker: says of a PendingTransaction of that name whether it is to be committed (True) or
            rolled back (False); None: it is not decided yet. The broker asks it, by any live
            producer of the name, when the end of a transaction is missing. It is called by a
            thread of its own.
        producer_id: of this producer alone, and of the process that takes its place: once this
            returns, brokers store nothing more of an older producer with the same one, which gets
            ProducerFenced. All brokers that the name server knows are asked for that, here, within
            `timeout_s` (NotReachable if none answers); one that is away is asked before it stores
            anything. 1 to 120 of %|a-zA-Z0-9_-.
        dedup: "keys": a message is not stored if a broker's topic had one with the same `keys`
            within `dedup_window`, in whichever queue and whoever sent it; its receipt is that of
            the first one, and says `duplicate`. Each message has one key. None: all are stored.
        dedup_window: a timedelta or seconds, a millisecond to 7 days; it counts from when the first
            one was stored.
    """

    @checked
    def __init__(
        self,
        name_server: str | Iterable[str] = "tcp://127.0.0.1:9876",
        *,
        linger_ms: float = 0,
        batch_bytes: int = 262_144,
        batch_count: int = 16_384,
        timeout_s: float | None = None,
        retry_max: int | None = None,
        max_in_flight_bytes: int = 32 * 1_048_576,
        max_message_bytes: int = 4 * 1_048_576,
        compress: str | None = None,
        compress_over: int = 4_096,
        compress_level: int | None = None,
        transport: str = "auto",
        wait_for_broker: float = 0,
        name: str | None = None,
        checker: Checker | None = None,
        producer_id: str | None = None,
        dedup: str | None = None,
        dedup_window: timedelta | float = 600.0,
    ) -> None:
        if timeout_s is not None and timeout_s <= 0:
            raise ArgumentIllegal(f"timeout_s={timeout_s}: above 0")
        if linger_ms < 0:
            raise ArgumentIllegal(f"linger_ms={linger_ms}: 0 or more")
        for argument, value in (
            ("batch_bytes", batch_bytes),
            ("batch_count", batch_count),
            ("max_in_flight_bytes", max_in_flight_bytes),
            ("max_message_bytes", max_message_bytes),
        ):
            if value < 1:
                raise ArgumentIllegal(f"{argument}={value}: at least 1")
        window_ms = _window_ms(dedup, dedup_window)
        if window_ms:
            batch_count = min(batch_count, KEYED_COUNT_MAX)
        self._sender = Sender(
            name_server,
            transport=transport,
            batching=Batching(batch_bytes, batch_count, linger_ms / 1000, window_ms),
            timeout_s=timeout_s,
            attempts_max=None if retry_max is None else retry_max + 1,
            max_in_flight_bytes=max_in_flight_bytes,
            max_message_bytes=max_message_bytes,
            compression=compression(compress, compress_over, compress_level),
            identity=Identity(producer_id),
        )
        self._callbacks = callbacks = Callbacks()
        self._transactions = Transactions(name, checker, self._sender, self._sender.timeout_s)
        self._requests = Requests(self._sender)
        self._close = close = partial(
            _close, self._requests, self._transactions, self._sender, callbacks
        )
        self._unclosed = Unclosed(self, "a producer", close)
        if self._sender.may_be_quick and type(self).send is Producer.send:
            # What most calls do, in one native one.
            quick = self._sender.delivery.accumulator.quick
            self.send = codec.QuickSend(*quick, Receipt, self.send).send  # type: ignore[method-assign]
        try:
            self._begin(wait_for_broker)
        except BaseException:
            self.close()
            raise

    def _begin(self, wait_s: float) -> None:
        """What asks brokers before the first message."""
        if wait_s:
            self.wait_for_broker(wait_s)
        self._sender.begin()

    # --- whom it sends to ---

    @property
    def connected(self) -> bool:
        """Whether every broker that it sends to has answered last time; False before the first
        answer. One that stays away is told of in the log as well, and so is that it is back.
        Nothing is asked for this: it changes with what is sent."""
        return self._sender.delivery.connected

    def wait_for_broker(self, timeout_s: float) -> None:
        """Sleep until the name server knows a broker. Raises NotReachable after that time."""
        self._sender.check_open()
        self._sender.routes.wait_for_broker(timeout_s)

    # --- sending ---

    def send(
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
        """Send one message.

        Args:
            topic: created with the broker's defaults if it is new and the broker allows that.
            body: bytes-like, not empty.
            tags: the one tag that consumers may select by.
            keys: words to find the message by later: one text with keys separated by spaces, or
                several texts without spaces, each of which is one key.
            properties: text by name. Empty values are omitted: RocketMQ's format has none.
            ordering_key: messages of one key go to one queue, by RocketMQ's hash of the key.
            queue_id: that queue; of several brokers the first by name that has it.
            flag: a number of 32 bits, carried through.
            delay_level: how long it waits before it can be consumed, by the broker's
                `messageDelayLevel`: 1 is 1 s, 2 is 5 s, 3 is 10 s, ... 18 is 2 h; above that the
                last one; 0: not at all. The receipt tells where it waits.
            deliver_at: when it is delivered, to the millisecond: an aware datetime, as far ahead as
                you like. What has passed is delivered at once. See `recall`.
            deliver_after: the same from now on, by the broker's clock: a timedelta or seconds.
            wait: False = do not wait for disk or slaves, even if the broker is set to.

        Returns:
            The receipt: confirmed with `linger_ms` 0, else waiting to be.

        Raises:
            See the class. With `linger_ms` only what can be told without the broker.
        """
        target, message = compose(
            topic, body, tags, keys, properties, ordering_key, queue_id, flag, wait, delay_level,
            deliver_at, deliver_after,
        )  # fmt: skip
        if not self._sender.lingers:
            return self._sender.send_now(target, message)
        return Receipt(*self._sender.gather(target, message, remember=True))

    def send_many(
        self,
        topic: str,
        bodies: Sequence[Body],
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
    ) -> Receipts:
        """Send many messages alike and wait until all are stored.

        Without key or queue the batches, not the messages, are spread over the queues.

        Returns:
            The receipts, in the order of the bodies; each is made when you look at it.

        Raises:
            The first error, when all batches have been answered. A note in it says how many
            messages are stored; which ones they are is not told.
        """
        target, message = compose(
            topic, b"", tags, keys, properties, ordering_key, queue_id, flag, wait, delay_level,
            deliver_at, deliver_after,
        )  # fmt: skip
        self._sender.check_open()
        return self._sender.send_all(target, message, bodies)

    def send_async(
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
        callback: Callback | None = None,
    ) -> Future[Receipt]:
        """Send without waiting; the future gets the receipt, or the error. Arguments as of `send`.

        `callback(receipt, error)` is called as well, with one of them None. It, and what is added
        to the future, is called by one thread of the producer's: a slow callback delays the others,
        and nothing else. The future cannot be cancelled. It waits here only as `send` with
        `linger_ms` does.
        """
        future = Sent(self._callbacks, callback)

        def watch(batch: Batch, index: int) -> None:
            receipt = Receipt(batch, index)
            batch.on_settled.append(lambda _: future.settle(receipt))

        target, message = compose(
            topic, body, tags, keys, properties, ordering_key, queue_id, flag, wait, delay_level,
            deliver_at, deliver_after,
        )  # fmt: skip
        self._sender.gather(target, message, watch)
        return future

    def send_oneway(
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
    ) -> None:
        """Send and forget: the broker does not answer, nothing is tried again.

        The message is lost without a word when the broker is away, busy or full. Sent at once, it
        may overtake messages that linger. Raises only what can be told without the broker.
        """
        target, message = compose(
            topic, body, tags, keys, properties, ordering_key, queue_id, flag, False, delay_level,
            deliver_at, deliver_after,
        )  # fmt: skip
        self._sender.send_oneway(target, message)

    def recall(self, message: Receipt | str) -> Receipt:
        """Take back a message that was sent with a time: it is not delivered.

        Args:
            message: its receipt, or the receipt's `recall_handle`.

        Returns:
            The receipt of what is stored for that.

        Raises:
            TooLate when it is delivered, or about to be; ArgumentIllegal when it had no time.
        """
        check("message", message, Receipt | str)
        handle = message.recall_handle if isinstance(message, Receipt) else message
        return self._sender.send_now(*recalling(Handle.parse(handle)))

    # --- transactions ---

    def transaction(
        self, topic: str, body: Body, **options: Unpack[TransactionOptions]
    ) -> Transaction:
        """Messages that are seen if a block of yours comes to a good end, and otherwise never.

            with producer.transaction("orders", body, keys="o-42") as tx:
                tx.send("invoices", other)  # as many as there are, first
                db.execute("insert into done values (?)", (tx.id,))
                db.commit()  # last

        At the block's begin the message is stored, where nobody sees it. The block's end commits:
        all its messages are stored where they are meant for, or, after an exception, none. When
        this process dies in between, the broker asks the checker of a producer of the same name.
        docs/transactions.md has a whole example.

        Args:
            topic, body, options: of the first message, as of `send`; there is no `delay_level`.

        Raises:
            ArgumentIllegal from a producer without a name. At the block's begin what `send` raises.
            At its end NotConfirmed when the broker does not say that it is committed, and will ask
            the checker; TransactionFinished when it has ended otherwise meanwhile, because a
            checker said so or nobody was there.
        """
        self._sender.check_open()
        return Transaction(self._transactions, topic, body, options)

    # --- requests ---

    def request(
        self,
        topic: str,
        body: Body,
        *,
        timeout_s: float = 3.0,
        **options: Unpack[TransactionOptions],
    ) -> Reply:
        """Send a message, and wait for what its consumer replies (`Message.reply`).

            answer = producer.request("prices", b"apples", timeout_s=2).body

        The message is stored as any other; of several groups that consume it the first reply
        counts. The reply is not fetched later: when this process ends, or the time is up, it is
        lost. docs/request-reply.md has a whole example.

        Args:
            topic, body, options: as of `send`; there is no time to deliver it at.
            timeout_s: for all of it, from now on. A consumer that starts later finds the request.

        Raises:
            RequestTimeout when no reply has come in time; before, what `send` raises.
        """
        return self._requests.ask(topic, body, timeout_s, options)

    @property
    def late_replies(self) -> int:
        """How many replies came when nobody waited for them any more; they were dropped."""
        return self._requests.late

    # --- the end ---

    def flush(self) -> None:
        """Send what lingers and wait for all answers.

        Raises the first error of a lingering `send` since the last flush. At most `timeout_s`.
        """
        self._sender.flush()

    def close(self) -> None:
        """Flush and close all connections; raises what `flush` raises. May be called twice."""
        self._unclosed.is_closed()
        self._close()

    def __enter__(self) -> Self:
        self._sender.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except CometError as late:  # the first exception is the one to be seen
            log.warning("messages were not confirmed when the producer closed: %s", late)


def _window_ms(dedup: str | None, window: timedelta | float) -> int:
    """0: messages are not looked for by their keys. Raises ArgumentIllegal."""
    if dedup not in (None, "keys"):
        raise ArgumentIllegal(f"dedup={dedup!r:.80}: 'keys', or None")
    seconds = window.total_seconds() if isinstance(window, timedelta) else window
    if not 0.001 <= seconds <= WINDOW_S_MAX:
        raise ArgumentIllegal(
            f"dedup_window={window!r:.80}: 0.001 s to {WINDOW_S_MAX} s, which are 7 days"
        )
    return round(seconds * 1000) if dedup else 0


def _close(
    requests: Requests, transactions: Transactions, sender: Sender, callbacks: Callbacks
) -> None:
    """What a producer has open; without the producer, which may be gone."""
    requests.close()
    transactions.close()
    sender.close(callbacks.close)
