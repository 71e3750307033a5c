"""Sleeping on descriptors by `poll`."""

from __future__ import annotations

import select
from collections.abc import Iterable


def polled(descriptors: Iterable[int]) -> select.poll:
    """Return a poll object for `wait_readable`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return poll


def wait_readable(poll: select.poll, timeout_s: float | None) -> list[int]:
    """Return the readable descriptors; sleep until there is one. Call it without a lock."""
    return [fd for fd, _ in poll.poll(None if timeout_s is None else poll_ms(timeout_s))]


def poll_ms(timeout_s: float) -> int:
    """Return whole milliseconds: at least 1, or 0 if the time is over."""
    return max(1, int(timeout_s * 1000)) if timeout_s > 0 else 0
