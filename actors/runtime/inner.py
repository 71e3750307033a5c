"""Inner records: what an actor of this broker has the commitlog process store, field by field."""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.protocol.commands import AppendRecords, Cover, Derivation, QueueKey
from cometmq.shm.kernel._kernel import InnerEncoder


class InnerRecords:
    """Gathers records for any queues, and makes one AppendRecords of them.

    `encoder` takes the records; `queue` numbers their queues for it:

        records = InnerRecords()
        records.encoder.add(records.queue("%RETRY%billing", 0), body, properties, reconsume_times=2)
        answer, places = channel.ask(*records.take())

    Args:
        size_max: bytes in one command; the encoder raises BatchFull when one more would not fit.
    """

    def __init__(self, *, size_max: int = 4_194_304) -> None:
        self.encoder = InnerEncoder(size_max=size_max)
        self._queues: dict[tuple[str, int], int] = {}

    def queue(self, topic: str, queue_id: int) -> int:
        """The number of that queue in this batch."""
        return self._queues.setdefault((topic, queue_id), len(self._queues))

    @property
    def queues(self) -> list[QueueKey]:
        return [QueueKey(*key) for key in self._queues]

    def take(
        self, cover: int = Cover.POLICY, derived: Derivation | None = None
    ) -> tuple[AppendRecords, Sequence[bytes]]:
        """The command and its payload; this is empty again."""
        command = AppendRecords(self.queues, self.encoder.count, cover, derived)
        self._queues.clear()
        return command, [self.encoder.take()]
