"""Descriptors that one actor waits for, each with what is to be done once it can be used."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

EVENTS_AT_ONCE: Final = 64

OnEvents = Callable[[int], object]


class Poller:
    """An epoll. It can be waited for like anything that can be read (`fileno`)."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._on_events: dict[int, OnEvents] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, fd: int, on_events: OnEvents, events: int = select.EPOLLIN) -> None:
        """
        Args:
            on_events: is called by `serve`, with what has happened.
        """
        self._epoll.register(fd, events)
        self._on_events[fd] = on_events

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        """Before it is closed; nothing, where it is not there."""
        if self._on_events.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def serve(self) -> None:
        """See to what has happened, without waiting for anything."""
        for fd, events in self._epoll.poll(0, EVENTS_AT_ONCE):
            on_events = self._on_events.get(fd)
            if on_events is not None:  # else one before it has had it removed
                on_events(events)

    def close(self) -> None:
        self._on_events.clear()
        self._epoll.close()


class Arrivals:
    """What other threads bring to the one that waits for `fd`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._come: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False

    def bring(self, action: Callable[[], object]) -> bool:
        """Have it called in that thread; False: that will not happen any more."""
        with self._lock:
            if self._is_closed:
                return False
            self._come.append(action)
            os.eventfd_write(self.fd, 1)
            return True

    def take(self) -> None:
        """Call what has come."""
        os.eventfd_read(self.fd)
        while self._come:
            self._come.popleft()()

    def close(self) -> None:
        """What has come is called, though: it may have something to let go of."""
        with self._lock:
            self._is_closed = True
            os.close(self.fd)
        while self._come:
            self._come.popleft()()
