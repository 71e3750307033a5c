"""Waits for a condition, the end of a process, or input of a descriptor. No tests here."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from patience import patient

LOOK_S = 0.01
Found = TypeVar("Found")


def until(
    holds: Callable[[], Found],
    timeout_s: float = patient(90),
    says: Callable[[], object] | str = "",
) -> Found:
    """Poll a condition for which no event exists, and return what it found; `says` describes the
    condition, or the state after a time-out."""
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline, says if isinstance(says, str) else says()
        time.sleep(LOOK_S)
    return found


def has_ended(pid: int, deadline: float) -> bool:
    """Wait for the end of any process. Its parent may take a second more to notice it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(0, deadline - time.monotonic()) * 1000))
    finally:
        os.close(descriptor)


def is_readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()  # select() knows the first 1024 descriptors only
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def still_there(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Those that have not ended after the time. One that nobody has buried yet has ended."""
    deadline = time.monotonic() + timeout_s
    left = []
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if not is_readable(descriptor, max(0.0, deadline - time.monotonic())):
            left.append(pid)
        os.close(descriptor)
    return left
