"""What is said of a message that a reader does not hand out, since it does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cometmq.shm.derived.consume_queue import queue_folder
from cometmq.shm.kernel import codec
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name

_BAD_CRC: Final = codec.REASONS.index("wrong body CRC")


def told(
    store: Path,
    segment_bytes: int,
    topic: str,
    queue_id: int,
    queue_offset: int,
    physical_offset: int,
    reason: int,
) -> str:
    """
    Args:
        store: as people call it.
        physical_offset: that the queue's entry points at.
        reason: an index of the kernel's REASONS.
    """
    why = codec.REASONS[reason]
    if reason == _BAD_CRC:
        file = segment_name(physical_offset // segment_bytes * segment_bytes)
        return (
            f"{store / COMMITLOG_DIR / file}: the record at physical offset {physical_offset} is "
            f"damaged and is not delivered: it is message {queue_offset} of queue {queue_id} of "
            f"{topic}, and has the {why}"
        )
    return (
        f"{queue_folder(store, topic, queue_id)}: entry {queue_offset} points at physical offset "
        f"{physical_offset}, and nothing is delivered for it: {why}; if the log is whole, "
        "`cometmq store repair` mends the queue"
    )
