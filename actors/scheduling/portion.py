"""What becomes of a record that the log never takes: alone it hinders no other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.tables.delays import destination
from cometmq.actors.tables.lean import DELIVERED
from cometmq.protocol.errors import CometError, MessageNotFound
from cometmq.shm.kernel.codec import Message, RecordTooLarge
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

SAID_MAX: Final = 65_536
KNOWN_MAX: Final = 65_536


class Portion:
    """How many messages the next write has.

    A write is stored whole or not at all. Where the log refuses one for good, since a message of it
    can be no record, fewer are tried, until that one is alone, and then more again.

    Args:
        most: messages of a write.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = most

    def refused(self, tried: int) -> bool:
        """A write of so many was; whether it was of one alone."""
        self.count = max(1, tried // 2)
        return tried <= 1

    def stored(self) -> None:
        self.count = min(self._most, 2 * self.count)


class Targets:
    """The queues that what waits is meant for, by the keys that the kernel gives them."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[str, int] | None] = {}

    def of(self, key: bytes) -> tuple[str, int] | None:
        """Of b"topic\\x01queue id"; None: there can be no such queue."""
        if key not in self._known:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            topic, _, queue = key.decode(errors="replace").partition("\1")
            try:
                self._known[key] = destination({"REAL_TOPIC": topic, "REAL_QID": queue})
            except CometError:  # it is said of each message
                self._known[key] = None
        return self._known[key]


class SetAside:
    """Messages that are never delivered: they stay where they are, as long as the log is kept.

    Each is said once, with its place and why, and counted; and only then passed over: whoever dies
    in between says it again.
    """

    def __init__(self, store: StoreReader) -> None:
        self.count = 0  # by this process
        self._store = store
        self._said: set[int] = set()  # physical offsets

    def message(self, message: Message, why: object) -> None:
        properties = message.properties
        self._say(
            message.physical_offset,
            f"message {message.queue_offset} of {message.stored_topic}, queue {message.queue_id}, "
            f"at physical offset {message.physical_offset} ({message.offset_msg_id}), meant for "
            f"{properties.get('REAL_TOPIC')!r:.300}, queue {properties.get('REAL_QID')!r:.40}, "
            f"keys {message.keys!r:.300}",
            why,
        )

    def place(self, physical_offset: int, why: object) -> None:
        """The record there."""
        try:
            self.message(self._store.record_at(physical_offset), why)
        except MessageNotFound:
            self._say(physical_offset, f"the record at physical offset {physical_offset}", why)

    def _say(self, physical_offset: int, what: str, why: object) -> None:
        if physical_offset in self._said:
            return  # what was tried with it was refused, and is tried again
        if len(self._said) >= SAID_MAX:
            self._said.clear()
        self._said.add(physical_offset)
        self.count += 1
        log.error("%s, is never delivered: %s", what, why)

    def add_copy(
        self, records: InnerRecords, message: Message, properties: Mapping[str, str]
    ) -> bool:
        """Add a copy of what has waited, for the queue that it is meant for; False if there can be
        none. Raises BatchFull."""
        try:
            queue = records.queue(*destination(properties))
            records.add_copy(queue, message, DELIVERED)
        except (CometError, RecordTooLarge) as error:
            self.message(message, error)
            return False
        return True
