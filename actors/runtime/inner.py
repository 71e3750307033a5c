"""Inner records: what an actor of this broker has the commitlog process store, field by field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cometmq.actors.tables.lean import lean
from cometmq.protocol.commands import AppendRecords, Cover, Derivation, QueueKey
from cometmq.shm.kernel.codec import Message, RecordTooLarge
from cometmq.shm.kernel.layout import CRC_PROPERTY_BYTES, PROPERTIES_MAX_BYTES
from cometmq.shm.kernel.store import InnerEncoder


class LogSettings(Protocol):
    """What it needs of the broker's settings."""

    @property
    def enabled_append_prop_crc(self) -> bool: ...


def properties_max(settings: LogSettings) -> int:
    """Bytes of properties that the log takes of a record, beside the checksum that it may add."""
    own = CRC_PROPERTY_BYTES + 1 if settings.enabled_append_prop_crc else 0
    return PROPERTIES_MAX_BYTES - own


class InnerRecords:
    """Gathers records for any queues, and makes one AppendRecords of them.

    `encoder` takes the records; `queue` numbers their queues for it:

        records = InnerRecords()
        records.encoder.add(records.queue("%RETRY%billing", 0), body, properties, reconsume_times=2)
        answer, places = channel.ask(*records.take())

    Args:
        size_max: bytes in one command; the encoder raises BatchFull when one more would not fit.
        properties_max: bytes of a record's properties.
    """

    def __init__(
        self, *, size_max: int = 4_194_304, properties_max: int = PROPERTIES_MAX_BYTES
    ) -> None:
        self.encoder = InnerEncoder(size_max=size_max, properties_max=properties_max)
        self._properties_max = properties_max
        self._queues: dict[tuple[str, int], int] = {}

    def queue(self, topic: str, queue_id: int) -> int:
        """The number of that queue in this batch."""
        return self._queues.setdefault((topic, queue_id), len(self._queues))

    @property
    def queues(self) -> list[QueueKey]:
        return [QueueKey(*key) for key in self._queues]

    def add_copy(
        self,
        queue: int,
        message: Message,
        spare: Sequence[bytes],
        properties: bytes | None = None,
        **fields: int,
    ) -> None:
        """Add a copy of a record of the log; see the encoder's `add_stored`.

        Args:
            spare: what it goes without, as far as there is no room for it; see books/lean.py.
            properties: other than the record's; so are the fields.

        Raises RecordTooLarge where that is not enough; RecordDamaged.
        """
        add = self.encoder.add_stored
        try:
            add(queue, message.record, properties, **fields)
        except RecordTooLarge:
            given = message.raw_properties if properties is None else properties
            add(queue, message.record, lean(given, spare, self._properties_max), **fields)

    def take(
        self, cover: int = Cover.POLICY, derived: Derivation | None = None
    ) -> tuple[AppendRecords, Sequence[bytes]]:
        """The command and its payload; this is empty again."""
        command = AppendRecords(self.queues, self.encoder.count, cover, derived)
        self._queues.clear()
        return command, [self.encoder.take()]
