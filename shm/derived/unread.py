"""Messages that no consumer group has read, counted by ConsumeQueue."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cometmq.shm.derived.consume_queue import QueueFiles
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.tables import ConsumerOffsetTable


def read_to(offsets_file: Path) -> dict[tuple[str, int], int]:
    """The queue offset that the furthest group has committed, by queue; none where nobody has."""
    furthest: dict[tuple[str, int], int] = {}
    table = ConfigFile(offsets_file, ConsumerOffsetTable).load() or ConsumerOffsetTable()
    for key, offsets in table.offset_table.items():
        topic = key.partition("@")[0]
        for queue_id, queue_offset in offsets.items():
            known = furthest.get((topic, queue_id), 0)
            furthest[topic, queue_id] = max(known, queue_offset)
    return furthest


def count_unread(
    store: Path,
    segment_bytes: int,
    queues: Iterable[tuple[str, int, int]],
    begin: int,
    end: int,
    furthest: dict[tuple[str, int], int],
) -> dict[str, int]:
    """How many messages with records in [begin, end) of the log no group has read, by topic.

    Args:
        segment_bytes: of a ConsumeQueue segment.
        queues: topic, queue id, and the end of each queue.
        begin, end: physical offsets.
    """
    unread: dict[str, int] = {}
    for topic, queue_id, queue_end in queues:
        files = QueueFiles(store, topic, queue_id, segment_bytes)
        first_gone = files.first_index_from(begin, queue_end)
        first_kept = files.first_index_from(end, queue_end)
        count = first_kept - max(first_gone, furthest.get((topic, queue_id), 0))
        if count > 0:
            unread[topic] = unread.get(topic, 0) + count
    return unread
