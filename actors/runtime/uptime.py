"""The clock that nobody sets, of this boot of this machine. See protocol/uptime.py."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

from cometmq.protocol.uptime import CLOCK_DIGITS, Uptime

# A container may have CLOCK_BOOTTIME begin elsewhere (a time namespace): that is another clock.
_SOURCES: Final = ("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets")


@lru_cache(maxsize=1)
def clock_name() -> str:
    """Of this boot."""
    digest = hashlib.sha256()
    for source in _SOURCES:
        with suppress(OSError):
            digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:CLOCK_DIGITS]


def now_up() -> Uptime:
    """Not later than now."""
    return Uptime(clock_name(), time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000)


def stored_now() -> Uptime:
    """For a record that is stored now: not before now, so that it is never early."""
    return Uptime(clock_name(), -(-time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000))
