"""Sleeping on descriptors, as `poll` wants to be told of them."""

from __future__ import annotations

import select
from collections.abc import Iterable


def polled(descriptors: Iterable[int]) -> select.poll:
    """What `wait_readable` takes."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return poll


def wait_readable(poll: select.poll, timeout_s: float | None) -> list[int]:
    """Sleep until something can be read. Without the channel's lock: others may send meanwhile."""
    return [fd for fd, _ in poll.poll(None if timeout_s is None else poll_ms(timeout_s))]


def poll_ms(timeout_s: float) -> int:
    """Whole milliseconds, at least one unless it is over."""
    return max(1, int(timeout_s * 1000)) if timeout_s > 0 else 0
