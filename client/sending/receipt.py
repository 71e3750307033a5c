"""Batches and receipts: what a producer knows of the messages it has sent."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, overload

import msgspec

from cometmq.client.sending.outgoing import Outgoing, Target
from cometmq.client.sending.settled import Settled, copy_at, index_of
from cometmq.protocol.commands import TIMED, Copy, SectionResult
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    NotConfirmed,
    again,
)
from cometmq.protocol.timed import Handle
from cometmq.protocol.wire.uninterrupted import call_uninterrupted
from cometmq.shm.kernel import codec

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

SEND_OK: Final = "SEND_OK"
FLUSH_DISK_TIMEOUT: Final = "FLUSH_DISK_TIMEOUT"
FLUSH_SLAVE_TIMEOUT: Final = "FLUSH_SLAVE_TIMEOUT"
SLAVE_NOT_AVAILABLE: Final = "SLAVE_NOT_AVAILABLE"
SMALL_BYTES: Final = 4096  # a body that may as well stay
# What an answer's code says of a message that is stored, by RocketMQ's names.
STATUSES: Final = {
    0: SEND_OK,
    10: FLUSH_DISK_TIMEOUT,
    11: SLAVE_NOT_AVAILABLE,
    12: FLUSH_SLAVE_TIMEOUT,
}
STORED_CODES: Final = frozenset(STATUSES)


class Batch:
    """Messages for one queue that travel, are stored and are answered together.

    Open, it has an encoder and takes messages. Closed, it has its bytes, and keeps them, and so
    the ids of its messages, until it is settled: by an answer, or by an error.
    """

    __slots__ = (
        "_event",
        "after",
        "attempts",
        "body",
        "broker",
        "count",
        "deadline",
        "delay_level",
        "done",
        "due",
        "encoder",
        "error",
        "fence",
        "first_id",
        "free",
        "generation",
        "lane",
        "limit",
        "loop",
        "number",
        "on_settled",
        "parts",
        "producer_group",
        "queue_id",
        "remembered",
        "repeats_ms",
        "result",
        "since",
        "store_host",
        "store_timestamp_ms",
        "sys_flag",
        "targets",
        "topic",
        "unconfirmed",
        "wait",
        "waiters",
        "window_ms",
    )

    def __init__(
        self,
        topic: str,
        encoder: codec.BatchEncoder | None,
        *,
        wait: bool,
        delay_level: int = 0,
        sys_flag: int | None = 0,
        producer_group: str = "",
        window_ms: int = 0,
    ) -> None:
        self.topic = topic
        self.encoder = encoder
        self.wait = wait
        self.delay_level = delay_level
        self.producer_group = producer_group  # they are half messages of its transactions
        self.window_ms = window_ms  # messages whose keys are there are not stored; 0: all are
        self.sys_flag = sys_flag or 0  # of all its messages: how their bodies are compressed
        self.free = False  # any queue of the topic will do
        self.lane: Any = None  # else: the Lane that it is meant for; lanes know batches
        # Otherwise the target of each message, by which another queue is chosen if this one is
        # refused; None: there is no other choice.
        self.targets: list[Target] | None = None
        self.generation = 0  # of the queues that its queue was chosen from; see TopicLanes
        # By message: the batch that has it now, and its index there. None: this one.
        self.parts: list[tuple[Batch, int]] | None = None
        self.due = 0.0  # when it must leave at the latest; time.monotonic()
        self.since = 0.0  # when it was closed, before its first attempt
        self.deadline = 0.0  # when its time is up
        self.limit = math.inf  # when whoever waits for it goes, should nobody have settled it
        self.attempts = 0
        self.number = 0  # of the last attempt; see Lane
        self.fence = False  # earlier attempts of that queue are not to be stored any more
        self.unconfirmed = False  # an attempt was never answered: it may be stored
        self.repeats_ms = -1  # all of its time, where an attempt may be stored: it is looked for,
        self.after = -1  # from there on, if that is known
        self.remembered = False  # flush() has to raise its error
        self.body = b""
        self.count = 0
        self.first_id = ""  # in place of the bytes, once it is settled and that is enough
        self.broker = ""
        self.queue_id = -1
        self.done = False
        self.result: SectionResult | None = None
        self.store_timestamp_ms = 0
        self.store_host = ""
        self.error: CometError | None = None
        self.on_settled: list[Callable[[Batch], None]] = []
        self.waiters: list[Any] | None = None  # tasks, of that loop; for them
        self.loop: asyncio.AbstractEventLoop | None = None
        self._event: threading.Event | None = None

    @property
    def waits(self) -> bool:
        """Whether its messages are stored elsewhere than in the queue that they are meant for."""
        return bool(self.delay_level or self.producer_group)

    def takes(self, message: Outgoing) -> bool:
        """Whether a message like this one may share the batch."""
        return (
            self.wait is message.wait
            and self.delay_level == message.delay_level
            and self.sys_flag == message.sys_flag
            and self.producer_group == message.producer_group
        )

    @property
    def may_go_elsewhere(self) -> bool:
        """Any queue will do, and it is in none; else it could be stored here and there. What is
        stored once by its key belongs to one broker."""
        return self.free and not self.unconfirmed and not self.window_ms

    def settle(
        self,
        result: SectionResult | None,
        error: CometError | None,
        store_timestamp_ms: int = 0,
        store_host: str = "",
    ) -> None:
        self.result, self.error = result, error
        self._let_go_of_body()
        self.store_timestamp_ms, self.store_host = store_timestamp_ms, store_host
        self._finish()

    def _finish(self) -> None:
        self.targets = None
        self.done = True
        if self._event is not None:
            self._event.set()
        actions, self.on_settled = self.on_settled, []  # they know who knows this batch
        for action in actions:
            try:
                action(self)
            except Exception:  # the others, and other batches, are waited for too
                log.exception("what was to be done with an answer of topic %s failed", self.topic)

    def queue_is_refused(self) -> None:
        """Note that the broker refused the queue. It has stored no earlier attempt and will store
        none, and the refused attempt does not count."""
        self.attempts -= 1
        self.unconfirmed = False
        self.repeats_ms = self.after = -1

    def divide(self, groups: Sequence[Sequence[int]]) -> list[Batch]:
        """Return a batch for each group of its messages. This batch is settled once all parts are,
        and each message has the outcome of its part."""
        assert self.targets is not None, "it was meant for queues"
        self.parts = [(self, index) for index in range(self.count)]
        answers = itertools.count(1)

        def settled(_part: Batch) -> None:
            if next(answers) == len(groups):  # atomic, whichever threads settle the parts
                self._let_go_of_body()
                self._finish()

        found = []
        for group in groups:
            part = Batch(
                self.topic,
                None,
                wait=self.wait,
                delay_level=self.delay_level,
                sys_flag=self.sys_flag,
                producer_group=self.producer_group,
                window_ms=self.window_ms,
            )
            members = set(group)
            others = [index for index in range(self.count) if index not in members]
            part.body, part.count = codec.batch_without(self.body, others), len(group)
            part.targets = [self.targets[index] for index in group]
            part.generation, part.remembered = self.generation, self.remembered
            part.since, part.deadline, part.limit = self.since, self.deadline, self.limit
            part.on_settled.append(settled)
            for place, index in enumerate(group):
                self.parts[index] = part, place
            found.append(part)
        return found

    def where(self, index: int) -> tuple[Batch, int]:
        """Return the batch that now has a message, and its index there. For settled batches."""
        return self.parts[index] if self.parts is not None else (self, index)

    def error_of(self, index: int) -> CometError | None:
        """Return the error of a message, or None. For settled batches."""
        return self.where(index)[0].error

    def _let_go_of_body(self) -> None:
        """Keep only the first id, if the others follow from it: memory that is held is not reused.

        Ids end in a clock and a counter. When the last one is `count - 1` after the first, nothing
        else can stand between.
        """
        if self.delay_level == TIMED:
            return  # each may have a time of its own
        if self.count > 1 or len(self.body) > SMALL_BYTES:
            first = codec.unique_id(self.body, 0)
            if _id_after(first, self.count - 1) == codec.unique_id(self.body, self.count - 1):
                self.first_id = first
                self.body = b""

    def id_of(self, index: int) -> str:
        """The UNIQ_KEY of a message of a closed batch."""
        first = self.first_id
        return _id_after(first, index) if first else codec.unique_id(self.body, index)

    def wait_settled(self) -> None:
        """Sleep until it is stored or has failed: at most linger and timeout together.

        Raises NotConfirmed when nobody has settled it by then.
        """
        if not self.done:
            call_uninterrupted(self._wait_settled)

    def _wait_settled(self) -> None:
        event = self._event
        if event is None:
            event = self._event = threading.Event()
        while not self.done:  # else settled in between
            left_s = self.limit - time.monotonic()
            if left_s <= 0:
                raise self.overdue()
            event.wait(min(left_s, threading.TIMEOUT_MAX))

    def overdue(self) -> NotConfirmed:
        return NotConfirmed(
            f"nobody says what became of a batch for topic {self.topic}, although its time is up; "
            "it may be stored"
        )

    def answer(self) -> SectionResult:
        """Where it was stored; waits for it, raises its error."""
        if not self.done:
            self.wait_settled()
        if self.error is not None:
            raise again(self.error)
        assert self.result is not None
        return self.result

    def copy_of(self, index: int) -> Copy | None:
        """Where the first message with that one's key lies, if it was not stored itself."""
        copies = self.answer().copies
        return copy_at(copies, index) if copies else None

    def msg_id_of(self, index: int) -> str:
        """Return the id of the stored message: this one, or an earlier one with its key."""
        if self.window_ms:
            self.wait_settled()
            part, place = self.where(index)
            copy = part.copy_of(place)
            if copy is not None:
                return copy.msg_id
        if self.encoder is not None:
            self.wait_settled()
        return self.id_of(index)

    def due_ms_of(self, index: int) -> int | None:
        """Return the delivery time of a message; None: sent without a time, or not known."""
        answer = self.answer()
        if self.delay_level != TIMED:
            return None
        first, second = (codec.element_due_ms(self.body, index, now) for now in (0, 1))
        if first != second and not answer.timed_ms:
            return None
        return codec.element_due_ms(self.body, index, answer.timed_ms)

    def settled(self) -> list[Settled]:
        """Return the answer as values for receipts, in the order of messages. Waits for it."""
        self.wait_settled()
        every = range(self.count)
        if self.parts is not None:
            return [Receipt(self, index).alone() for index in every]
        if self.error is not None:
            ids = tuple(map(self.id_of, every))
            return [Settled(self.topic, ids, error=again(self.error))]
        due = tuple(map(self.due_ms_of, every)) if self.delay_level == TIMED else ()
        ids = tuple(map(self.msg_id_of, every))
        found = Settled(
            self.topic, ids, self.broker, self.queue_id, self.store_timestamp_ms, self.result,
            due=due,
        )  # fmt: skip
        return [found]


def _id_after(first: str, index: int) -> str:
    """The id that a process makes `index` ids later, in the same millisecond."""
    return f"{first[:-4]}{(int(first[-4:], 16) + index) & 0xFFFF:04X}"


class Receipt(msgspec.Struct, gc=False, eq=False):
    """The broker's word that a message is stored.

    With `linger_ms` you hold it before the broker has answered: every field but `topic` and
    `msg_id` then waits for the answer, and raises the error if there is one. It may keep the bytes
    of its batch alive; keep `msg_id` and `queue_offset` if you keep many for long.
    """

    _batch: Any
    _index: int

    def _where(self) -> tuple[Batch | Settled, int]:
        """Return the batch that has the message and its index there. Waits for the answer."""
        batch: Batch | Settled = self._batch
        batch.wait_settled()
        return batch.where(self._index)

    def answer(self) -> tuple[SectionResult, int]:
        """Return the answer of its batch and its index there. Waits for it, raises its error."""
        batch, index = self._where()
        return batch.answer(), index

    def _copy(self) -> Copy | None:
        batch, index = self._where()
        return batch.copy_of(index)

    @property
    def topic(self) -> str:
        """That it was sent to."""
        return str(self._batch.topic)

    @property
    def msg_id(self) -> str:
        """RocketMQ's UNIQ_KEY: made by the producer, the same in every copy of the message."""
        return str(self._batch.msg_id_of(self._index))

    @property
    def duplicate(self) -> bool:
        """Whether the topic had a message with that key already (`Producer(dedup="keys")`), so that
        this one was not stored: all else that is said here is of the first one. Waits for the
        answer."""
        return self._copy() is not None

    @property
    def queue_id(self) -> int:
        """The queue that it lies in; waits for the answer."""
        copy = self._copy()
        return self._where()[0].queue_id if copy is None else copy.queue_id

    @property
    def queue_offset(self) -> int:
        """Where the message stands in its queue."""
        batch, index = self._where()
        result = batch.answer()
        if result.copies:
            copy = batch.copy_of(index)
            if copy is not None:
                return copy.queue_offset
            index -= bisect_left(result.copies, index, key=index_of)
        if result.head and index >= result.head:
            return result.rest_queue_offset + index - result.head
        return result.queue_offset + index

    @property
    def broker(self) -> str:
        """The name of the broker that stored it."""
        batch, _ = self._where()
        batch.answer()
        return batch.broker

    @property
    def status(self) -> str:
        """SEND_OK; else it is stored, but FLUSH_DISK_TIMEOUT: the disk has not confirmed it in
        time; FLUSH_SLAVE_TIMEOUT: too few slaves have; SLAVE_NOT_AVAILABLE: there are too few to
        wait for."""
        return STATUSES.get(self.answer()[0].code, SEND_OK)

    @property
    def store_timestamp_ms(self) -> int:
        """The broker's clock when it stored the message."""
        copy = self._copy()
        if copy is not None and copy.store_timestamp_ms:
            return copy.store_timestamp_ms
        return self._where()[0].store_timestamp_ms

    @property
    def due_ms(self) -> int | None:
        """Delivery time, in ms since 1970. None: it was sent without a time, or with
        `deliver_after` to an older broker, which does not report the time after a lost answer."""
        batch, index = self._where()
        return batch.due_ms_of(index)

    @property
    def recall_handle(self) -> str:
        """What `Producer.recall` takes, to be kept: RocketMQ's text. Raises ArgumentIllegal for a
        message without a time."""
        due_ms = self.due_ms
        if due_ms is None:
            raise ArgumentIllegal(
                f"{self.msg_id} was sent without deliver_at or deliver_after, or its time is not "
                "known; Admin.scheduled lists what waits"
            )
        return str(Handle(self.topic, self.broker, due_ms, self.msg_id))

    @property
    def done(self) -> bool:
        """Whether the broker has answered, or the time is up. Never waits."""
        return bool(self._batch.done)

    def wait(self) -> Receipt:
        """Wait for the answer; raises the error if there is one."""
        self.answer()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a value, with the answer or its error. Waits for it."""
        return _receipt, (self.alone(),)

    def alone(self) -> Settled:
        """Return the answer to this message as a batch of its own. Waits for it."""
        batch, index = self._where()
        if batch.error is not None:
            return Settled(self.topic, (self._batch.id_of(self._index),), error=again(batch.error))
        answer, copy = batch.answer(), batch.copy_of(index)
        result = SectionResult(
            answer.code,
            self.queue_offset,
            text=answer.text,
            physical_offsets=answer.physical_offsets[index : index + 1],
            copies=[] if copy is None else [msgspec.structs.replace(copy, index=0)],
        )
        due_ms = self.due_ms
        return Settled(
            self.topic, (self.msg_id,), batch.broker, batch.queue_id, batch.store_timestamp_ms,
            result, due=() if due_ms is None else (due_ms,),
        )  # fmt: skip

    def __copy__(self) -> Receipt:
        return Receipt(self._batch, self._index)

    def __deepcopy__(self, _: object) -> Receipt:
        return Receipt(self._batch, self._index)

    def __repr__(self) -> str:
        batch: Batch | Settled = self._batch
        if not batch.done:
            return f"<Receipt {batch.topic} on its way>"
        error = batch.error_of(self._index)
        if error is not None:
            return f"<Receipt {batch.topic} failed: {error}>"
        return f"<Receipt {batch.topic}/{self.queue_id} @{self.queue_offset} {self.status}>"


def _receipt(batch: Settled) -> Receipt:
    """Rebuild a pickled receipt. Raises ArgumentIllegal for other values."""
    if type(batch) is not Settled or batch.count != 1:
        raise ArgumentIllegal("a receipt is of one message whose batch was answered")
    return Receipt(batch, 0)


class Receipts(Sequence[Receipt]):
    """The receipts of one `send_many`, in the order of the bodies; made when looked at."""

    __slots__ = ("_batches", "_count", "_starts")

    def __init__(self, batches: Sequence[Batch | Settled]) -> None:
        self._batches = batches
        self._starts: list[int] = []
        self._count = 0
        for batch in batches:
            self._starts.append(self._count)
            self._count += batch.count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Receipt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Receipt]: ...
    def __getitem__(self, index: int | slice) -> Receipt | list[Receipt]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._count))]
        if index < 0:
            index += self._count
        if not 0 <= index < self._count:
            raise IndexError(f"receipt {index} of {self._count}")
        place = bisect_right(self._starts, index) - 1
        return Receipt(self._batches[place], index - self._starts[place])

    def __iter__(self) -> Iterator[Receipt]:
        for batch in self._batches:
            for index in range(batch.count):
                yield Receipt(batch, index)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as values, with the answers or their errors. Waits for them."""
        return _receipts, ([each for batch in self._batches for each in batch.settled()],)

    def __copy__(self) -> Receipts:
        return Receipts(self._batches)

    def __deepcopy__(self, _: object) -> Receipts:
        return Receipts(self._batches)

    def __repr__(self) -> str:
        return f"<Receipts of {self._count} messages in {len(self._batches)} batches>"


def _receipts(batches: list[Settled]) -> Receipts:
    """Rebuild pickled receipts. Raises ArgumentIllegal for other values."""
    if not all(type(batch) is Settled for batch in batches):
        raise ArgumentIllegal("receipts are of batches that were answered")
    return Receipts(batches)
