"""Retries: what consumers give back is stored once more, for later or as dead letters."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.inner import InnerRecords, properties_max
from cometmq.actors.runtime.service import Request
from cometmq.actors.runtime.uptime import stored_now
from cometmq.actors.scheduling.stored_once import StoredOnce
from cometmq.actors.tables.lean import AGAIN, DELIVERED, lean
from cometmq.actors.tables.retries import Retry, bare_properties, retry_of, retry_tail
from cometmq.protocol.commands import (
    UNKNOWN_PLACE,
    GivenBack,
    MessagesGivenBack,
    StoreRetries,
)
from cometmq.protocol.errors import (
    CometError,
    MessageIllegal,
    MessageNotFound,
    MessageTooLarge,
    NotConfirmed,
    OffsetIllegal,
)
from cometmq.protocol.names import DELAY_TOPIC, POP_RETRY_SIGNS, RETRY_PREFIX
from cometmq.protocol.uptime import Uptime
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import BatchFull, Message, RecordTooLarge, decode
from cometmq.shm.kernel.store import again_properties
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

STORE_TIMEOUT_S: Final = 3.0
READ_BYTES_MAX: Final = 1_048_576
RUN_MAX: Final = 256  # neighbours that are read at once


class Retries:
    """Stores copies of messages that were given back.

    Where they lie is looked up in the store: nothing of a message is taken from whoever names it.

    Args:
        dispatched: how far the dispatcher has come.
        await_dispatched: has `go_on` called when it has moved.
    """

    def __init__(
        self,
        family: Family,
        commitlog: Channel,
        store: StoreReader,
        dispatched: Callable[[], int],
        await_dispatched: Callable[[], object],
    ) -> None:
        self._dispatched = dispatched
        self._await_dispatched = await_dispatched
        self._wrote = family.control.read(Counter.WROTE)
        self._early: deque[tuple[StoreRetries, Request]] = deque()
        store_s = STORE_TIMEOUT_S + family.settings.slave_wait_s
        self._once = StoredOnce(commitlog, "retries", store_s)
        self._store = store
        self._levels_ms = family.settings.delay_levels_ms
        self._bytes_max = min(
            READ_BYTES_MAX, family.settings.mapped_file_size_commit_log_bytes // 4
        )
        self._properties_max = properties_max(family.settings)
        self._stored = 0  # copies, dead letters among them

    def on_store_retries(self, command: StoreRetries, request: Request) -> None:
        if self._is_early(command):
            self._early.append((command, request))
            self._await_dispatched()
        else:
            request.reply(MessagesGivenBack(self._store_all(command)))

    @property
    def waits(self) -> bool:
        """For the dispatcher."""
        return bool(self._early)

    def go_on(self) -> None:
        """The dispatcher has moved."""
        for _ in range(len(self._early)):
            command, request = self._early.popleft()
            if self._is_early(command):
                self._early.append((command, request))
                continue
            try:
                request.reply(MessagesGivenBack(self._store_all(command)))
            except CometError as error:
                request.fail(error)

    def _is_early(self, command: StoreRetries) -> bool:
        """Consumers are shown what is not dispatched yet, and here only the rest can be found."""
        last = max((each.physical_offset for each in command.messages), default=-1)
        return self._dispatched() <= last < self._wrote.value

    def _store_all(self, command: StoreRetries) -> list[int]:
        """The code of each."""
        storing = _Storing(
            command,
            [0] * len(command.messages),
            _Batch(self._bytes_max, self._properties_max),
            stored_now(),
        )
        try:
            repeated = self._stored_before(command)
        except CometError as error:  # earlier attempts may have been stored, so store nothing
            return [error.code] * len(command.messages)
        wanted = [index for index in range(len(command.messages)) if index not in repeated]
        for index, found in self._read(command.messages, wanted):
            if isinstance(found, CometError):
                storing.codes[index] = found.code
            else:
                self._take(storing, index, found)
        self._append(storing)
        if repeated:
            refusal = storing.refusal or self._once.confirm(list(repeated.values()))
            for index in repeated:
                storing.codes[index] = 0 if refusal is None else NotConfirmed.code
        return storing.codes

    def _stored_before(self, command: StoreRetries) -> dict[int, int]:
        """Return the messages of which an earlier attempt stored a copy without an answer: their
        indexes in the command, and the numbers of the attempts. Raises NotConfirmed,
        NotReachable."""
        there = self._once.stored(command.attempts)
        return {index: number for index, number in enumerate(command.attempts) if there[index]}

    def _take(self, storing: _Storing, index: int, message: Message) -> None:
        """Into the batch, which is stored first if it is full."""
        try:
            try:
                self._add(storing, index, message)
            except BatchFull:
                self._append(storing)
                self._add(storing, index, message)
        except RecordTooLarge as error:
            _say_never(message, error)
            storing.codes[index] = MessageTooLarge.code

    def _add(self, storing: _Storing, index: int, message: Message) -> None:
        command, batch = storing.command, storing.batch
        times = message.reconsume_times + (command.handed_out[index] if command.handed_out else 0)
        way = self._way(storing, index, times)
        if way is None:
            return  # such a group drops what it could not consume
        topic = storing.sent_to(message.topic)
        # A dead letter that was a retry goes on naming the retry topic's queue that it came by.
        properties = again_properties(message, topic, way.tail, way.queue[0] == DELAY_TOPIC)
        queue, most = way.queue, self._properties_max
        if len(properties) > most:
            properties = lean(properties, AGAIN, most)
        if len(properties) > most:
            bare = bare_properties(message.raw_properties, topic, most)
            queue, properties = way.at_once, lean(bare, DELIVERED, most)
        batch.records.encoder.add_stored(
            batch.records.queue(*queue),
            message.record,
            properties,
            reconsume_times=times + 1,
            sys_flag=message.sys_flag,
            prepared_offset=0,
        )
        batch.messages[index] = message

    def _way(self, storing: _Storing, index: int, times: int) -> _Way | None:
        """Of a message that was given back so often before; None: none."""
        command = storing.command
        entry = command.messages[index]
        topic = command.retry_topics[index] if command.retry_topics else ""
        queues = command.retry_queues
        queue_id = random.randrange(queues) if queues > 1 else 0
        key = times, entry.delay_level, entry.after_ms, topic, queue_id
        if key not in storing.ways:
            retry = retry_of(command, entry, times, self._levels_ms, topic)
            storing.ways[key] = (
                None if queues <= 0 and not retry.is_dead else _way(retry, queue_id, storing.now)
            )
        return storing.ways[key]

    def _append(self, storing: _Storing) -> None:
        """Have the batch stored, all or none of it, and note what became of it."""
        messages, records = storing.batch.take()
        if not messages:
            return
        error = storing.refusal or self._once.write(records, storing.attempts_of(messages))
        if isinstance(error, MessageIllegal) and len(messages) > 1:
            for index, message in messages.items():  # the others have no part in that
                self._take(storing, index, message)
                self._append(storing)
            return
        if error is None:
            self._stored += len(messages)
            return
        for index, message in messages.items():
            storing.codes[index] = error.code
            if isinstance(error, MessageIllegal):
                _say_never(message, error)
        if not isinstance(error, MessageIllegal):
            log.warning("%d messages are not given back: %s", len(messages), error)
            storing.refusal = error  # it would be the same for what follows, and take as long

    def statistics(self) -> meters.Figures:
        return {meters.GIVEN_BACK: self._stored}

    # --- the messages ---

    def _read(
        self, entries: Sequence[GivenBack], wanted: Sequence[int]
    ) -> Iterator[tuple[int, Message | CometError]]:
        """Read each wanted message at its stated offset; adjacent ones of a queue in one read."""
        places = [(each.topic, each.queue_id, each.queue_offset) for each in entries]
        order = sorted(wanted, key=places.__getitem__)
        at = 0
        while at < len(order):
            topic, queue_id, offset = places[order[at]]
            most = min(RUN_MAX, len(order) - at)
            run = 1
            while run < most and places[order[at + run]] == (topic, queue_id, offset + run):
                run += 1
            yield from self._read_run(entries, order[at : at + run])
            at += run

    def _read_run(
        self, entries: Sequence[GivenBack], indexes: Sequence[int]
    ) -> Iterator[tuple[int, Message | CometError]]:
        first, last = entries[indexes[0]], entries[indexes[-1]]
        found = {
            message.queue_offset: message
            for message in self._messages(first, last.queue_offset + 1)
        }
        for index in indexes:
            entry = entries[index]
            message = found.get(entry.queue_offset)
            if message is None:
                yield index, MessageNotFound("it is not in the store any more")
            elif entry.physical_offset not in (message.physical_offset, UNKNOWN_PLACE):
                yield index, OffsetIllegal("another message lies there")
            else:
                yield index, message

    def _messages(self, first: GivenBack, end: int) -> Iterator[Message]:
        """Of its queue, up to a queue offset; without those that are gone."""
        at = first.queue_offset
        while at < end:
            result = self._store.get_message(
                first.topic, first.queue_id, at, end - at, max_bytes=READ_BYTES_MAX
            )
            if result.payload is not None:
                yield from decode(result.payload)
            if result.next_queue_offset <= at:
                return
            at = result.next_queue_offset


def _say_never(message: Message, why: object) -> None:
    log.error("message %d of %s, queue %d, at physical offset %d (%s), keys %.300r, cannot be given"
              " back: %s", message.queue_offset, message.stored_topic, message.queue_id,
              message.physical_offset, message.offset_msg_id, message.keys, why)  # fmt: skip


class _Way(NamedTuple):
    """Of a copy: the queue that it is stored in, the one in which it comes again, and the
    properties that it has anew."""

    queue: tuple[str, int]
    at_once: tuple[str, int]
    tail: bytes


def _way(retry: Retry, queue_id: int, now: Uptime) -> _Way:
    at_once = retry.topic, 0 if retry.is_dead else queue_id
    queue = (DELAY_TOPIC, retry.level - 1) if retry.level else at_once
    return _Way(queue, at_once, retry_tail(retry, queue_id, now))


class _Batch:
    """Copies that are stored together.

    Args:
        bytes_max: of them.
        properties_max: of each.
    """

    def __init__(self, bytes_max: int, properties_max: int) -> None:
        self._sizes = bytes_max, properties_max
        self.records = InnerRecords(size_max=bytes_max, properties_max=properties_max)
        self.messages: dict[int, Message] = {}  # that they are copies of, by place in the command

    def take(self) -> tuple[dict[int, Message], InnerRecords]:
        """What is in it; it is empty then."""
        taken = self.messages, self.records
        size_max, properties_max = self._sizes
        self.messages = {}
        self.records = InnerRecords(size_max=size_max, properties_max=properties_max)
        return taken


class _Storing(msgspec.Struct):
    """A command that is being carried out."""

    command: StoreRetries
    codes: list[int]
    batch: _Batch
    now: Uptime  # what waits of it does so since then
    ways: dict[tuple[object, ...], _Way | None] = {}
    topics: dict[str, bytes] = {}
    refusal: CometError | None = None  # of the log, which takes nothing for now

    def attempts_of(self, messages: Iterable[int]) -> list[int]:
        """Return the attempt numbers of messages, which are given by their index in the command."""
        attempts = self.command.attempts
        return [attempts[index] for index in messages] if attempts else []

    def sent_to(self, topic: str) -> bytes:
        """Where a message was sent that lies in this topic; a retry topic of RocketMQ's POP names
        it, its messages do not."""
        if topic not in self.topics:
            retries = [f"{RETRY_PREFIX}{self.command.group}{sign}" for sign in POP_RETRY_SIGNS]
            prefix = next(filter(topic.startswith, retries), "")
            self.topics[topic] = topic.removeprefix(prefix).encode()
        return self.topics[topic]
