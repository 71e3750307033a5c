"""What an inbox waits for: descriptors, and sockets of ZeroMQ, by one epoll."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import zmq

AT_ONCE: Final = 256
_EVENTS: Final = int(zmq.EVENTS)  # plain numbers: pyzmq's enumerations take their time
_IN: Final = int(zmq.POLLIN)


class Sources:
    """Has one user. `remove` comes before a source is closed: a fork may hold it open.

    The descriptor of a socket of ZeroMQ tells what has come since the socket was last read, sent by
    or asked. Each of these takes the sign, and may leave a message. So before a sleep every socket
    has to be asked whether it holds something, but for one that was asked after all else; that
    costs a call of the system each, and `zmq_poll` does it twice.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._by_fd: dict[int, Any] = {}
        self._asked: list[zmq.Socket[bytes]] = []  # before each sleep
        self._sure: set[zmq.Socket[bytes]] = set()
        self._touched: set[zmq.Socket[bytes]] = set()  # of these, those to be asked once
        # Called with a descriptor and a time in s (below 0: for ever): returns when the descriptor
        # can be read, or the time is over. For who has something else to do while this sleeps.
        self.sleep: Callable[[int, float], None] | None = None

    def add(self, source: Any, *, sure: bool = False) -> None:
        """
        Args:
            sure: a socket of ZeroMQ that, once `wait` has named it, is read until it says that it
                is empty; after anything else that is done with it `touched` is called.
        """
        descriptor = source.fileno() if isinstance(source, zmq.Socket) else source
        self._by_fd[descriptor] = source
        self._epoll.register(descriptor, select.EPOLLIN)
        if descriptor is source:
            return
        if sure:
            self._sure.add(source)
            self._touched.add(source)  # what has come before may have left no sign
        else:
            self._asked.append(source)

    def remove(self, source: Any) -> None:
        """Nothing, where it is not there."""
        for descriptor, known in list(self._by_fd.items()):
            if known == source:
                del self._by_fd[descriptor]
                with suppress(OSError):  # it was closed, against the rule
                    self._epoll.unregister(descriptor)
        self._asked = [each for each in self._asked if each != source]
        self._sure.discard(source)
        self._touched.discard(source)

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._by_fd.values()))

    def touched(self, socket: zmq.Socket[bytes]) -> None:
        """Something was sent by it, or it may not be empty. Nothing, once it was removed."""
        if socket in self._sure:
            self._touched.add(socket)

    def wait(self, timeout_s: float | None) -> list[Any]:
        """Those that can be read; sleeps until there is one, for so long at most (None: for ever).
        A socket of ZeroMQ may have been named in vain."""
        found: list[Any] = []
        if self._asked or self._touched:
            found += filter(_holds, (*self._asked, *self._touched))
            self._touched.clear()
        timeout_s = 0 if found else timeout_s
        if self.sleep is not None:
            self.sleep(self._epoll.fileno(), -1 if timeout_s is None else timeout_s)
            timeout_s = 0
        for descriptor, _ in self._epoll.poll(timeout_s, AT_ONCE):
            source = self._by_fd.get(descriptor)
            if source is not None and source not in found:
                found.append(source)
        return found

    def close(self) -> None:
        self._epoll.close()


def _holds(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(_EVENTS)) & _IN)
