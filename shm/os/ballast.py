"""Room on the disk for a start, kept while there is some.

A disk that is full to its last block has no room for the few small files that a start makes. As
reading takes no room, a broker that has kept some starts all the same, serves what it has, and
refuses what is sent until there is room again. The log does not take this room either: offsets can
be committed when nothing more can be stored.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import DiskFull
from cometmq.shm.os.files import reserve

log = logging.getLogger(__name__)

BALLAST_FILE: Final = "cometmq.ballast"
# The control file, `abort`, folders, and config/ written once more.
BASE_BYTES: Final = 4 * 1_048_576
QUEUE_BYTES: Final = 1_024  # its slot in the queue table, and in the one before


def free_bytes(folder: Path) -> int:
    """Of its disk, for whoever may not use root's reserve; very many where it has no size."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else 1 << 62


def take_ballast(store: Path, queues: int, *, leave_bytes: int = 0) -> None:
    """Take as much room as the next start will need, if there is so much.

    Args:
        queues: how many there are.
        leave_bytes: do not take the last of the disk: this run needs it.
    """
    path = store / BALLAST_FILE
    wanted = BASE_BYTES + queues * QUEUE_BYTES
    try:
        if leave_bytes and free_bytes(store) < wanted + leave_bytes:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < wanted:
                reserve(descriptor, 0, wanted, path)
        finally:
            os.close(descriptor)
    except (DiskFull, OSError) as error:
        log.debug("no room is kept for a start on a full disk: %s", error)


def drop_ballast(store: Path) -> None:
    """Before a start makes its files: give back what was kept, where that is needed."""
    path = store / BALLAST_FILE
    if free_bytes(store) >= 2 * BASE_BYTES:
        return
    try:
        path.unlink()
    except FileNotFoundError:
        log.warning("%s: the disk is full, and no room was kept for a start", store)
    else:
        log.warning("%s: the disk is full: starting in the room that was kept for that", store)
