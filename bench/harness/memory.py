"""Memory as it is on a machine that has run for a while: full of the pages of files.

Many a virtual machine gives memory that is free back to its host, and gets it again ten times more
slowly than the kernel finds room among pages of files. A bench that deletes a store after every
run always meets the slow way; a broker that has filled the memory with its log never does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import psutil

LEFT_FREE: Final = 1 << 30
_PIECE: Final = 16 << 20


def fill(folder: Path) -> None:
    """Read files of holes until almost no memory is free. They take no room on the disk, their
    pages are clean, and the system drops them as soon as memory is wanted."""
    wanted = _free() - LEFT_FREE
    if wanted <= 0:
        return
    path = folder / f"holes-{time.monotonic_ns()}"
    buffer = bytearray(_PIECE)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, wanted)
        at = 0
        while at < wanted and _free() > LEFT_FREE:
            at += os.preadv(descriptor, [buffer], at)
    finally:
        os.close(descriptor)


def _free() -> int:
    return int(psutil.virtual_memory().free)
