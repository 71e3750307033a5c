"""Memory of this machine: how much is available."""

from __future__ import annotations

from pathlib import Path


def memory_of(what: str, meminfo: Path = Path("/proc/meminfo")) -> int:
    """This machine's MemTotal or MemAvailable in bytes; 0 where it does not tell."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:")), 0)


def memory_has_room(wanted_bytes: int) -> bool:
    """Whether twice as much is available: whoever fills the pages needs memory, too."""
    return memory_of("MemAvailable") >= 2 * wanted_bytes
