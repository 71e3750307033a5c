"""What damage was found in the store of a replica, kept for its next start and for who looks.

A start does not read all of the log, so what a reader has met once could be served, or be elected,
after the next one. The file says what was found, and a replica with it does not start.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import DiskFull, StoreDamaged
from cometmq.shm.os.durable import replace_file

log = logging.getLogger(__name__)

DAMAGED_FILE: Final = "cometmq.damaged"
TEXT_BYTES_MAX: Final = 4_096
REPLACE_IT: Final = "replace this store by an empty one; the group has what is missing"


def note_damage(store: Path, why: str) -> None:
    """Keep it, durably; of several that is enough which was found first. On a full disk or a broken
    one that is not possible, and logged."""
    path = store / DAMAGED_FILE
    if path.exists():
        return
    try:
        replace_file(path, f"{why}\n".encode()[:TEXT_BYTES_MAX])
    except (DiskFull, OSError) as error:
        log.error("that the store is damaged could not be noted: %s", error)


def noted_damage(store: Path) -> str:
    """ "" if none was found."""
    with contextlib.suppress(OSError), (store / DAMAGED_FILE).open("rb") as file:
        return file.read(TEXT_BYTES_MAX).decode(errors="replace").strip() or DAMAGED_FILE
    return ""


def check_not_damaged(store: Path) -> None:
    """Raises StoreDamaged for what was noted."""
    if why := noted_damage(store):
        raise StoreDamaged(
            f"{why}. Found before, and noted in {store / DAMAGED_FILE}: {REPLACE_IT}. If that disk "
            "was read wrongly, and `cometmq store verify` finds all whole, remove the file"
        )
