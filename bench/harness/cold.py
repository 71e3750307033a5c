"""A store that is read from the disk: dropped from the page cache while its system is stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cometmq.bench import control
from cometmq.bench.systems import Durability, System

RAW_READS: Final = 2


def restart_cold(
    system: System, folder: Path, durability: Durability, raw: list[float], scratch: Path
) -> None:
    """Stop, drop the store from the page cache, read it bare for the record, drop it, start.

    It is read twice, and the better one counts: what was read once may be in a host's memory.
    """
    system.stop()
    program = control.build(scratch)
    rates = []
    for _ in range(RAW_READS):
        forget(folder)
        rates.append(control.read_bytes_per_s(program, folder))
    raw.append(max(rates))
    forget(folder)
    system.start(folder, durability)


def forget(folder: Path) -> None:
    """Write all files below it out, and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
