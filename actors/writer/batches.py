"""Batches of clients: each section of a command is stored whole, or refused with a reason."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Final

import msgspec

from cometmq.actors.runtime.guard import explained
from cometmq.actors.runtime.service import Payload, Request
from cometmq.actors.runtime.uptime import stored_now
from cometmq.actors.tables.fences import Fences
from cometmq.actors.tables.timers import RECALL_MARGIN_MS
from cometmq.actors.writer.cursors import Cursors
from cometmq.actors.writer.keyed import Keyed, answered, rest_of
from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import (
    TIMED,
    Command,
    QueueKey,
    Section,
    SectionResult,
    SendMessages,
    SendResult,
)
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    MessageIllegal,
    NoPermission,
    NotConfirmed,
    Overtaken,
    QueueNotExist,
    TooLate,
)
from cometmq.protocol.names import DELAY_TOPIC, HALF_TOPIC, TIMER_TOPIC, check_usable_group
from cometmq.protocol.timed import LATEST_MS
from cometmq.protocol.uptime import MS_DIGITS
from cometmq.shm.kernel.codec import element_start
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import WaitingBatch
from cometmq.shm.log.commit_log import CommitLog


class Stored(msgspec.Struct, frozen=True):
    """What came of one command of a group."""

    answer: Command
    cover: int = 0  # what it waits for, see Cover
    payload: Payload = ()


class Earlier(msgspec.Struct, frozen=True):
    """What there is of a batch that its producer sends again."""

    messages: int  # so many of its first ones
    queue_offset: int = -1
    physical_offset: int = -1
    timed_ms: int = 0  # time from which the delays of these count; 0: unknown


Found = Mapping[int, Earlier | CometError]  # by the index of a section; see Repeats
NOTHING_FOUND: Final[Found] = {}


class Batches:
    """Stores what clients send. Part of the desk.

    Args:
        check_admitted: raises why nothing is stored now.
        cover: that the answers wait for.
        check_producer: raises why a sender with a name stores nothing.
        keyed: tells what is there by its key.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        commit_log: CommitLog,
        cursors: Cursors,
        *,
        check_admitted: Callable[[], None],
        cover: int,
        check_producer: Callable[[SendMessages], None],
        keyed: Keyed,
    ) -> None:
        self._log = commit_log
        self._cursors = cursors
        self._check_admitted = check_admitted
        self._cover = cover
        self._check_producer = check_producer
        self._keyed = keyed
        self._keyed_count = 0  # messages of the command that is being stored
        self._store_host = settings.advertised_address
        self._delay_levels_ms = settings.delay_levels_ms
        self._fences = Fences()

    def store(self, request: Request, command: SendMessages, found: Found) -> Stored:
        """Append the sections of one command, but for what is `found` to be there."""
        results = []
        wait = False
        self._keyed_count = 0
        if len(command.sections) != len(request.payload):
            error = BadRequest(
                f"{len(command.sections)} sections, {len(request.payload)} payload frames"
            )
            results = [SectionResult(error.code, text=str(error)) for _ in command.sections]
        else:
            for index, section in enumerate(command.sections):
                batch = request.payload[index].buffer
                result = self._append_guarded(section, batch, command, found.get(index))
                wait = wait or (section.wait and result.code == 0)
                results.append(result)
        answer = SendResult(results, self._log.last_store_timestamp, self._store_host)
        return Stored(answer, self._cover if wait else 0)

    def _append_guarded(
        self,
        section: Section,
        batch: memoryview,
        command: SendMessages,
        found: Earlier | CometError | None,
    ) -> SectionResult:
        """Store one section, or say why not. A section has no part in what another one fails of:
        the kernel checks a batch before it writes, and counts it in one step when it is written.
        """
        try:
            if found is None:
                return self._append(section, batch, command)
            return self._append_rest(section, batch, command, found)
        except Exception as caught:
            what = "a batch for queue %d of %s failed"
            error = explained(caught, what, section.queue_id, section.topic)
            return SectionResult(error.code, text=str(error))

    def _append(
        self, section: Section, batch: memoryview, command: SendMessages, timed_ms: int = 0
    ) -> SectionResult:
        """Append a section's batch, unless its sender is fenced.

        Args:
            timed_ms: time from which delays count; 0: from now.
        """
        if section.fence or self._fences:
            self._fences.let_pass(command.sender, section)
        if command.producer_id:
            self._check_producer(command)
        self._check_admitted()
        queue = self._cursors.writable(section.topic, section.queue_id)
        if section.window_ms:
            return self._append_keyed(queue, section, batch, command)
        if section.producer_group:
            return self._append_half(section, batch, command)
        if section.delay_level > 0 or section.delay_level == TIMED:
            return self._append_waiting(section, batch, command, timed_ms)
        return self._append_batch(queue, section, batch, command)

    def _append_batch(
        self, queue: QueueCursor, section: Section, batch: bytes | memoryview, command: SendMessages
    ) -> SectionResult:
        at = self._log.append_batch(
            queue,
            batch,
            section.count,
            sys_flag=section.sys_flag,
            born_timestamp_ms=command.born_timestamp_ms,
            born_host=host_bytes(command.born_host),
        )
        return SectionResult(0, self._log.appender.batch_queue_offset, at)

    def _append_keyed(
        self, queue: QueueCursor, section: Section, batch: memoryview, command: SendMessages
    ) -> SectionResult:
        """Store the messages whose keys the topic does not have. No other thread comes between."""
        self._keyed_count += max(section.count, 0)
        self._keyed.check(section, self._keyed_count)
        with self._log.gate:
            found, inside = self._keyed.stored(section, batch, self._log.physical_offset)
            if not found and not inside:
                return self._append_batch(queue, section, batch, command)
            left_out = sorted({*found, *inside})
            stored = SectionResult(0)
            if len(left_out) < section.count:
                stored = self._append_batch(queue, *rest_of(batch, left_out, section), command)
        return answered(section, batch, found, inside, stored)

    def _append_rest(
        self,
        section: Section,
        batch: memoryview,
        command: SendMessages,
        found: Earlier | CometError,
    ) -> SectionResult:
        """Store what an earlier attempt has not."""
        if isinstance(found, CometError):
            raise found
        if not found.messages:
            return self._append(section, batch, command)
        head = SectionResult(0, found.queue_offset, found.physical_offset, timed_ms=found.timed_ms)
        if found.messages == section.count:
            return head
        rest = msgspec.structs.replace(section, count=section.count - found.messages)
        try:
            start = element_start(batch, found.messages)
            stored = self._append(rest, batch[start:], command, found.timed_ms)
        except (QueueNotExist, NoPermission) as error:  # must not be retried as a whole
            raise NotConfirmed(
                f"the first {found.messages} of {section.count} messages are stored, and the "
                f"rest are not: {error}"
            ) from None
        return msgspec.structs.replace(
            head,
            head=found.messages,
            rest_queue_offset=stored.queue_offset,
            timed_ms=found.timed_ms or stored.timed_ms,  # the messages found may have no delays
        )

    def place_of(self, section: Section) -> QueueKey:
        """The queue of the log that its messages go to."""
        if section.producer_group:
            return QueueKey(HALF_TOPIC, 0)
        if section.delay_level > 0:
            return QueueKey(DELAY_TOPIC, self._level_of(section) - 1)
        if section.delay_level == TIMED:
            return QueueKey(TIMER_TOPIC, 0)
        return QueueKey(section.topic, section.queue_id)

    def _level_of(self, section: Section) -> int:
        return min(section.delay_level, len(self._delay_levels_ms))

    def fence_off(self, command: SendMessages) -> None:
        """No earlier attempt of these sections is stored from now on."""
        for section in command.sections:
            with suppress(Overtaken):  # said when it is stored
                self._fences.let_pass(command.sender, section)

    def _append_half(
        self, section: Section, batch: memoryview, command: SendMessages
    ) -> SectionResult:
        """Store it with the half messages, with the queue that it is meant for as properties."""
        check_usable_group(section.producer_group)
        if section.delay_level:
            raise MessageIllegal(
                f"delay level {section.delay_level} for a message of a transaction: it would be "
                "delivered when it is committed"
            )
        more = f"{_real(section)}TRAN_MSG\1true\2PGROUP\1{section.producer_group}\2".encode()
        more += stored_now().as_property()
        waiting = self._waiting(section, batch, command, more, half=True)
        at = self._log.append_checked(waiting.append)
        queue_offset = self._log.appender.batch_queue_offset
        return SectionResult(0, queue_offset, at, physical_offsets=waiting.places)

    def _append_waiting(
        self, section: Section, batch: memoryview, command: SendMessages, timed_ms: int
    ) -> SectionResult:
        """Store it where RocketMQ has what waits, with the queue that it is meant for as
        properties: in the queue of its delay level, or in the topic of timers, where each element
        says when it is due. The scheduler process copies it from there."""
        more, now = _real(section).encode(), -1
        if section.delay_level == TIMED:
            # Delays count from this time, by either clock.
            now = timed_ms or int(time.time() * 1000)
        else:
            more += b"DELAY\1%d\2" % self._level_of(section)
        more += stored_now().as_property()
        waiting = self._waiting(section, batch, command, more, now_ms=now)
        if 0 <= waiting.earliest < now + RECALL_MARGIN_MS:
            raise TooLate(f"the message was due at {waiting.earliest} ms, and it is {now}")
        at = self._log.append_checked(waiting.append)
        queue_offset = self._log.appender.batch_queue_offset
        return SectionResult(0, queue_offset, at, timed_ms=max(now, 0))

    def _waiting(
        self,
        section: Section,
        batch: memoryview,
        command: SendMessages,
        more: bytes,
        *,
        now_ms: int = -1,
        half: bool = False,
    ) -> WaitingBatch:
        """For the queue in which it waits.

        Args:
            more: properties of all; the last one says since when.
            now_ms: that this is, where each says itself when it is due.
        """
        place = self.place_of(section)
        queue = self._cursors.of(place.topic, place.queue_id)
        return self._log.checked(
            lambda appender: WaitingBatch(
                appender, queue, batch, section.count, more, now=now_ms, latest=LATEST_MS,
                sys_flag=section.sys_flag, born_timestamp=command.born_timestamp_ms,
                born_host=host_bytes(command.born_host),
                up_at=-1 if now_ms >= 0 else len(more) - 1 - MS_DIGITS, half=half,
            )
        )  # fmt: skip


def _real(section: Section) -> str:
    """The queue that its messages are meant for, as properties."""
    return f"REAL_TOPIC\1{section.topic}\2REAL_QID\1{section.queue_id}\2"


@lru_cache(maxsize=4096)
def host_bytes(host: str) -> bytes:
    """RocketMQ's form of "ip:port", IPv6 in brackets; an unknown host is 0.0.0.0:0."""
    if not host:
        return bytes(8)
    address, _, port = host.rpartition(":")
    try:
        return ipaddress.ip_address(address.strip("[]")).packed + int(port).to_bytes(4, "big")
    except (ValueError, OverflowError):
        raise BadRequest(f"{host[:80]!r} is not an address and a port") from None
