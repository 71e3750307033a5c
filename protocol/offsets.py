"""Consumer offsets as a table, and what the ledger's changes do to it.

The table is that of consumerOffset.json: `topic@group` -> queue id -> offset of the next message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cometmq.protocol.ledger import Change, GroupRemoved, OffsetSet, OffsetsForgotten

OffsetTable = dict[str, dict[int, int]]
Undo = Sequence[tuple[str, int, int | None]]  # key, queue id, what stood there


def change_offsets(table: OffsetTable, change: Change, keys: Iterable[str] | None = None) -> Undo:
    """Make the change in the table; what takes it back, empty if it is no change of offsets.

    Args:
        keys: of the topic or group that goes, where they are known.
    """
    if isinstance(change, OffsetSet):
        key, queue_id = f"{change.topic}@{change.group}", change.queue_id
        return ((key, queue_id, set_offset(table, key, queue_id, change.queue_offset)),)
    if isinstance(change, OffsetsForgotten | GroupRemoved):
        if keys is None:
            keys = [key for key in table if _is_of(key, change)]
        return [
            (key, queue_id, set_offset(table, key, queue_id, None))
            for key in keys
            for queue_id in list(table[key])
        ]
    return ()


def _is_of(key: str, change: OffsetsForgotten | GroupRemoved) -> bool:
    topic, _, group = key.partition("@")
    return topic == change.topic if isinstance(change, OffsetsForgotten) else group == change.group


def set_offset(table: OffsetTable, key: str, queue_id: int, queue_offset: int | None) -> int | None:
    """Set or, with None, remove; what stood there. A key without offsets is not there."""
    offsets = table.get(key)
    if offsets is None:
        if queue_offset is not None:
            table[key] = {queue_id: queue_offset}
        return None
    before = offsets.get(queue_id)
    if queue_offset is not None:
        offsets[queue_id] = queue_offset
    elif before is not None:
        del offsets[queue_id]
        if not offsets:
            del table[key]
    return before
