"""How far a store reaches, for who reads it: as a running broker tells, or as its files show."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import StoreNotOurs
from cometmq.shm.derived.consume_queue import QueueFiles, list_queues
from cometmq.shm.kernel.live import ReadCell
from cometmq.shm.live.control import IN_GROUP, ControlFile, Counter
from cometmq.shm.live.queue_table import QueueRange, QueueTable
from cometmq.shm.log.recovery import find_end
from cometmq.shm.os.files import COMMITLOG_DIR, list_segments


class Positions(Protocol):
    """How far a store reaches."""

    def log_range(self) -> tuple[int, int]:
        """(first byte, one past the last byte) of whole records."""

    def queue_range(self, topic: str, queue_id: int) -> QueueRange | None:
        """None for a queue that does not exist."""


class LivePositions:
    """Of a running broker, from its control file and queue table.

    The log of a replica of a group may have to be cut to what is confirmed, so nothing is read
    beyond. What is dispatched was confirmed, also where a new run has not been told so yet.
    """

    def __init__(self, control: ControlFile, table: QueueTable) -> None:
        self._min = control.read(Counter.MIN_OFFSET)
        self._wrote = control.read(Counter.WROTE)
        self._confirmed: tuple[ReadCell, ...] = ()
        if control.meta.get(IN_GROUP):
            self._confirmed = tuple(map(control.read, (Counter.REPLICATED, Counter.DISPATCHED)))
        self.queue_range = table.range_of

    def log_range(self) -> tuple[int, int]:
        end = self._wrote.value
        if self._confirmed:
            end = min(end, max(cell.value for cell in self._confirmed))
        return self._min.value, end


class ScannedPositions:
    """Of a store that nobody writes to, found as RocketMQ finds them after an orderly end.

    Args:
        real_minimum: a queue that begins above 0 begins with its first message. RocketMQ counts
            the fillers before it.
    """

    def __init__(
        self, store: Path, segment_bytes: int, queue_segment_bytes: int, *, real_minimum: bool
    ) -> None:
        starts = list_segments(store / COMMITLOG_DIR, segment_bytes)
        self._log_min = starts[0] if starts else 0
        self._log_max = find_end(store, segment_bytes, clean=True).physical_offset
        self._queues: dict[tuple[str, int], QueueRange] = {}
        for topic, queue_id in list_queues(store):
            files = QueueFiles(store, topic, queue_id, queue_segment_bytes)
            end = files.find_end().next_index
            self._queues[topic, queue_id] = QueueRange(
                files.first_index_from(self._log_min, end, skip_fillers=real_minimum), end
            )

    def log_range(self) -> tuple[int, int]:
        return self._log_min, self._log_max

    def queue_range(self, topic: str, queue_id: int) -> QueueRange | None:
        return self._queues.get((topic, queue_id))

    def queues(self) -> Iterator[tuple[str, int]]:
        return iter(self._queues)


def file_sizes(store: Path) -> tuple[int, int]:
    """(CommitLog segment, ConsumeQueue segment) sizes of a store: those that most files have, or
    the default ones where there are none, as in a store that never had a message. Raises
    StoreNotOurs."""
    log = store / COMMITLOG_DIR
    if not log.is_dir():
        raise StoreNotOurs(f"{store}: no {COMMITLOG_DIR}/ in it, so it is no store")
    sizes = []
    for folder in (log, store / "consumequeue"):
        files = (path.stat() for path in sorted(folder.rglob("*")) if path.is_file())
        counted = Counts(file.st_size for file in files if file.st_size)
        sizes.append(max(counted, key=counted.__getitem__, default=0))
    if not sizes[0] and any(log.iterdir()):
        raise StoreNotOurs(f"{store}: no segment in {COMMITLOG_DIR}/")
    return (
        sizes[0] or BrokerSettings.mapped_file_size_commit_log_bytes,
        sizes[1] or BrokerSettings.mapped_file_size_consume_queue_bytes,
    )
