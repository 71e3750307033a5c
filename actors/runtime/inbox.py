"""The mailbox of an actor: sockets, doorbell, timers, and what comes from its own process.

It waits for everything an actor can be woken by and hands each on as a message. Whatever the
sockets hold is drained in one go and handed over as one `Drained`, so that a hot actor can work
through a group of commands at once. What the doorman (access.py) refuses no actor ever sees.

An actor may post work to itself without end. So between two looks at its sockets and timers it is
handed no more than what was there at the first: whoever asks is heard after one step of its work.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from pykka._envelope import Envelope

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.access import Doorman
from cometmq.actors.runtime.listeners.connections import ConnectionLimits
from cometmq.actors.runtime.listeners.listener import Listener
from cometmq.actors.runtime.listeners.local import LocalListener
from cometmq.actors.runtime.listeners.zeromq import ZeroMQListener
from cometmq.actors.runtime.request import Request
from cometmq.actors.runtime.sources import Sources

_NOBODY_IS_ADMITTED: Final = Doorman("an inbox", ())


class Drained:
    """What the sockets held: the requests, oldest first."""

    __slots__ = ("requests",)

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests


class DoorbellRang:
    """A counter this process waits for has moved (or a sleeper was woken for nothing)."""


class TimerDue:
    """The inbox's time has come."""


class Readable:
    """A socket or descriptor that the actor registered has something to read."""

    __slots__ = ("source",)

    def __init__(self, source: Any) -> None:
        self.source = source


class Call:
    """Something to do in the actor's thread: how a result comes home from another thread."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action


class SocketInbox:
    """A pykka inbox that sleeps in epoll."""

    def __init__(self) -> None:
        self._local: deque[Envelope[Any]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.doorman = _NOBODY_IS_ADMITTED  # the actor sets its own
        self._listeners: dict[Any, Listener] = {}  # by source
        self.lines: LocalListener | None = None  # one of them
        self._limits: ConnectionLimits | None = None  # of clients
        self._others: dict[Any, object] = {}
        self._sources = Sources()
        self._sources.add(self._wake)
        self._turn = 0  # messages to hand out before the sockets are looked at again
        self._rest: list[Request] = []  # of a drain; until they are done clients have to wait
        self.wake_at: float | None = None  # time.monotonic() of the next TimerDue
        self.heard_all_at = time.monotonic()  # then nothing was left waiting in a ROUTER
        self._left_some = False

    # --- what it listens to; called in the actor's thread or before it starts ---

    def bind(self, endpoint: str, *, internal: bool, limits: ConnectionLimits | None = None) -> str:
        """Open a ROUTER there; the address as it became (a port of 0 is chosen).

        Args:
            limits: of a TCP port of clients, if not the defaults.
        """
        limits = limits or ConnectionLimits()
        if not internal:
            self._limits = limits
        listener = ZeroMQListener(
            endpoint, self.doorman, self._sources.touched, is_internal=internal, limits=limits
        )
        self._listeners[listener.socket] = listener
        self._sources.add(listener.socket, sure=True)
        return listener.address

    def listen_for_lines(self, name: str) -> None:
        """Also take clients of this machine who come to that address; see listeners/local.py."""
        self.lines = LocalListener(name, self.doorman, self._limits)
        self._listeners[self.lines.source] = self.lines
        self._sources.add(self.lines.source)

    def listen_to_doorbell(self, fd: int) -> None:
        self._others[fd] = DoorbellRang()
        self._sources.add(fd)

    def listen_to(self, source: Any) -> None:
        """A socket or a descriptor; `on_readable` is called when it can be read, and sometimes when
        a socket of ZeroMQ cannot.
        """
        self._others[source] = Readable(source)
        self._sources.add(source)

    def sleep_in(self, sleep: Callable[[int, float], None] | None) -> None:
        """How it sleeps from now on, see Sources; None: as others do."""
        self._sources.sleep = sleep

    def is_listening_to(self, source: Any) -> bool:
        return source in self._others

    def forget(self, source: Any) -> None:
        self._others.pop(source, None)
        self._sources.remove(source)

    def close(self) -> None:
        for source in self._sources:
            if source != self._wake:
                self._sources.remove(source)
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        self.lines = None

    def __del__(self) -> None:
        self._sources.close()
        os.close(self._wake)  # not before: somebody may still put something in

    # --- pykka's interface ---

    def put(self, envelope: Envelope[Any]) -> None:
        self._local.append(envelope)
        os.eventfd_write(self._wake, 1)

    def empty(self) -> bool:
        return not self._local

    def get(self) -> Envelope[Any]:
        """The next message; sleeps until there is one."""
        while not self._turn:
            self._look()
        self._turn -= 1
        return self._local.popleft()

    # --- looking around ---

    def hold_back(self, requests: list[Request]) -> None:
        """Hand these over again after a look at everything but clients, who have to wait."""
        self._rest += requests

    def take_rest(self) -> list[Request]:
        rest, self._rest = self._rest, []
        return rest

    def _look(self) -> None:
        """At what has come; sleeps while there is nothing to be done."""
        requests: list[Request] = []
        of_clients: list[Request] = []
        self._left_some = clients_wait = bool(self._rest)
        for source in self._due(self._sources.wait(self._sleep_s())):
            listener = self._listeners.get(source)
            if listener is None:
                self._take(source)
            elif listener.is_internal:
                self._drain(listener, requests)
            elif clients_wait:
                listener.put_off()
            else:
                self._drain(listener, of_clients)
        requests += (
            of_clients  # behind the family, which would wait with them if they are held back
        )
        if not self._left_some:
            self.heard_all_at = time.monotonic()
        if self._rest:
            requests = self._not_ahead_of_their_own(requests)
        if requests:
            self._local.append(Envelope(Drained(requests)))
        if self._rest:
            self._local.append(Envelope(Drained(self.take_rest())))
        if self.wake_at is not None and time.monotonic() >= self.wake_at:
            self.wake_at = None
            self._local.append(Envelope(TimerDue()))
        self._turn = len(self._local)

    def _not_ahead_of_their_own(self, requests: list[Request]) -> list[Request]:
        """Those of others; whoever waits with a request waits with later ones behind it."""
        waiting = {request.sender for request in self._rest}
        others: list[Request] = []
        for request in requests:
            (self._rest if request.sender in waiting else others).append(request)
        return others

    def _sleep_s(self) -> float | None:
        if self._local or self._rest:
            return 0
        times = [self.wake_at, *(each.drain_at for each in self._listeners.values())]
        wake_at = min((at for at in times if at is not None), default=None)
        return None if wake_at is None else max(0.0, wake_at - time.monotonic())

    def _due(self, sources: list[Any]) -> list[Any]:
        """Return these, and those of listeners whose time has come."""
        for source, listener in self._listeners.items():
            drain_at = listener.drain_at
            if drain_at is not None and drain_at <= time.monotonic() and source not in sources:
                sources.append(source)
        return sources

    def _drain(self, listener: Listener, requests: list[Request]) -> None:
        requests += listener.drain()
        self._left_some = self._left_some or listener.left_some

    def _take(self, source: Any) -> None:
        if source == self._wake:
            os.eventfd_read(self._wake)
            return
        other = self._others[source]
        if isinstance(other, DoorbellRang):
            os.eventfd_read(source)
        self._local.append(Envelope(other))

    def statistics(self) -> meters.Figures:
        """Of the connections of clients."""
        found: meters.Figures = {}
        for listener in self._listeners.values():
            found |= listener.statistics()
        return found
