"""The actor's end of local connections: clients of this machine, without ZeroMQ between.

See protocol/wire/line.py. A client that sends much gets its turn and no more. One that reads
slowly has answers kept for it; over a limit its requests wait, and it is disconnected if it goes
on like that.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from cometmq.actors.runtime.access import Doorman, Principal
from cometmq.actors.runtime.listeners.connections import ConnectionLimits
from cometmq.actors.runtime.listeners.listener import (
    DRAIN_COUNT,
    FramedRequest,
    Listener,
    request_from,
)
from cometmq.actors.runtime.request import Frames, Payload, Request
from cometmq.protocol import frames
from cometmq.protocol.commands import Command
from cometmq.protocol.errors import BadRequest
from cometmq.protocol.wire.line import abstract, peer_uid
from cometmq.protocol.wire.stream import Message, StreamReader, StreamWriter

log = logging.getLogger(__name__)

LINES_MAX: Final = 1_024
BACKLOG: Final = 64
UNSENT_MAX: Final = 8 * 1_048_576  # bytes kept for a client that reads slowly; then it has to wait
STALLED_S: Final = 10.0  # for so long a client that has to wait may read nothing

_IN: Final = select.EPOLLIN
_BOTH: Final = select.EPOLLIN | select.EPOLLOUT


class Caller:
    """One client's connection.

    Args:
        stalled: callers that have to wait, and since when, by time.monotonic(): shared by all.
    """

    __slots__ = (
        "_epoll", "_events", "_limits", "_reader", "_stalled", "_turn", "_writer", "name",
        "principal", "sender", "socket",
    )  # fmt: skip

    def __init__(
        self,
        line: socket.socket,
        number: int,
        principal: Principal,
        epoll: select.epoll,
        limits: ConnectionLimits,
        stalled: dict[Caller, float],
    ) -> None:
        self.socket = line
        self.name = f"local connection {number}"
        self.sender = b"\0" + self.name.encode()  # no client can give itself such a name by ZeroMQ
        self.principal = principal
        self._reader = StreamReader(line, min(frames.MESSAGE_MAX, limits.in_flight_bytes))
        self._turn = 0  # in which it was last read from
        self._writer = StreamWriter(line)
        self._epoll = epoll
        self._limits = limits
        self._stalled = stalled
        self._events = _IN
        epoll.register(line, _IN)

    def receive(self, turn: int, count_max: int) -> Sequence[Message]:
        """Return the next messages; read once a turn. Raises OSError, EOFError, BadRequest."""
        messages = self._reader.messages(count_max)
        if messages or self._turn == turn:
            return messages
        self._turn = turn
        return self._reader.messages(count_max) if self._reader.fill() else ()

    @property
    def has_more(self) -> bool:
        """Whether `receive` may return some without reading."""
        return self._reader.has_more

    def send(self, head: bytes, payload: Payload) -> None:
        try:
            self._writer.send(head, payload)
        except OSError as error:
            self._not_sent(error)
        self._watch()

    def send_done(self, request_ids: Iterable[int]) -> None:
        """Answer Done to these requests."""
        try:
            self._writer.send_bytes(b"".join(map(frames.done_on_stream, request_ids)))
        except OSError as error:
            self._not_sent(error)
        self._watch()

    def flush(self) -> None:
        """Send what is kept, as far as the client reads it."""
        try:
            if self._writer.flush():
                self._stalled.pop(self, None)
        except OSError as error:
            self._not_sent(error)
        self._watch()

    @property
    def has_room(self) -> bool:
        """Whether it reads its answers: else its requests wait."""
        return self._writer.unsent_bytes <= min(UNSENT_MAX, self._limits.in_flight_bytes // 2)

    def _watch(self) -> None:
        unsent = self._writer.unsent_bytes
        if (not unsent and self._events == _IN) or self.socket.fileno() < 0:
            return
        if unsent > self._limits.in_flight_bytes:
            log.error(
                "%s is disconnected: %d bytes of answers are kept for it, at most %d may be "
                "(maxConnectionInFlightBytes)",
                self.name, unsent, self._limits.in_flight_bytes,
            )  # fmt: skip
            self.hang_up()
            unsent = 0
        if self.has_room:
            self._stalled.pop(self, None)
            events = _BOTH if unsent else _IN
        else:
            self._stalled.setdefault(self, time.monotonic())
            events = select.EPOLLOUT
        if events != self._events:
            self._events = events
            self._epoll.modify(self.socket, events)

    def _not_sent(self, error: OSError) -> None:
        log.debug("%s: answer not sent: %s", self.name, error)
        self.hang_up()

    def hang_up(self) -> None:
        """Both sides find the end of it; whoever reads here then lets it go."""
        self._writer.drop()
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone already


class LineRequest(FramedRequest):
    __slots__ = ("_caller",)

    def __init__(
        self, caller: Caller, request_id: int, command: Command, payload: Frames
    ) -> None:  # fmt: skip
        super().__init__(request_id, command, payload, caller.principal)
        self._caller = caller

    def _send(self, head: bytes, payload: Payload) -> None:
        self._caller.send(head, payload)

    def done(self) -> None:
        self._caller.send_done((self.request_id,))

    def done_with(self, others: Sequence[Request]) -> None:
        """Send all answers with one system call."""
        requests = (self, *others)
        self._caller.send_done(each.request_id for each in requests if type(each) is LineRequest)

    @property
    def sender(self) -> bytes:
        return self._caller.sender

    def has_room(self) -> bool:
        return self._caller.has_room


class LocalListener(Listener):
    """Takes connections of the broker's own user, and of root; hands out what comes by them.

    Args:
        name: of the address, in the abstract namespace.
    """

    def __init__(
        self, name: str, doorman: Doorman, limits: ConnectionLimits | None = None
    ) -> None:  # fmt: skip
        self.name = name
        self._doorman = doorman
        self._limits = limits or ConnectionLimits()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(abstract(name))
        listener.listen(BACKLOG)
        self._listener: socket.socket | None = listener
        self._numbers = itertools.count(1)
        self._callers: dict[int, Caller] = {}
        self._last = -1  # the descriptor of the line that had the last turn
        self._turn = 0
        self._stalled: dict[Caller, float] = {}
        self._behind: set[int] = set()  # descriptors of those that were read from, and have more
        # One descriptor for all of them: who waits for it need not look at every line.
        self._epoll = select.epoll()
        self._epoll.register(listener, _IN)

    @property
    def source(self) -> int:
        return self._epoll.fileno()

    @property
    def is_open(self) -> bool:
        """Whether one more would be taken."""
        return self._listener is not None and len(self._callers) < LINES_MAX

    @property
    def drain_at(self) -> float | None:
        """At once for messages that were read and not returned; later for a client that stalls."""
        if any(self._callers[fd].has_room for fd in self._behind):
            return 0.0
        return min(self._stalled.values()) + STALLED_S if self._stalled else None

    def drain(self, count_max: int = DRAIN_COUNT) -> list[Request]:
        """Return received requests, an equal share from each line while it has more. Accept new
        lines and close ended ones. Each is read from once.

        If `count_max` is reached before every line had its turn, the next call resumes behind the
        last one that had.
        """
        requests: list[Request] = []
        self._turn += 1
        ready = self._ready()
        while ready and count_max > 0:
            share = max(1, count_max // len(ready))
            more: list[Caller] = []
            for caller in ready:
                if count_max <= 0:
                    break
                wanted = min(share, count_max)
                taken = self._read(caller, requests, wanted)
                self._last = caller.socket.fileno()
                if taken is None:
                    self._forget(caller)
                    continue
                count_max -= taken
                if taken == wanted:
                    more.append(caller)
            ready = more
        self.left_some = count_max <= 0 or self.drain_at == 0  # maybe
        return requests

    def _ready(self) -> list[Caller]:
        """Return the callers with input, in the order of their turns. Send what is kept."""
        events = dict(self._epoll.poll(0))
        descriptors = sorted({*events, *self._behind})
        first = bisect_right(descriptors, self._last)
        found: list[Caller] = []
        for descriptor in descriptors[first:] + descriptors[:first]:
            caller = self._callers.get(descriptor)
            if caller is None:
                self._accept()
                continue
            event = events.get(descriptor, 0)
            if event & select.EPOLLOUT:
                caller.flush()
            if caller.has_room and (event & ~select.EPOLLOUT or descriptor in self._behind):
                found.append(caller)
            elif event & (select.EPOLLHUP | select.EPOLLERR):
                self._forget(caller)  # what it asks for it does not read
        self._hang_up_on_stalled()
        return found

    def _hang_up_on_stalled(self) -> None:
        last = time.monotonic() - STALLED_S
        for caller, since in list(self._stalled.items()):
            if since <= last:
                log.warning(
                    "%s is disconnected: it has not read its answers for %g s",
                    caller.name, STALLED_S,
                )  # fmt: skip
                self._forget(caller)

    def close(self) -> None:
        for caller in list(self._callers.values()):
            self._forget(caller)
        self._stop_listening()
        self._epoll.close()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            # Closed alone it is still heard of while a fork of the service has it.
            self._epoll.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            line, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # whoever came has gone again
        except OSError as error:
            # Else whoever connects would wait in vain; so he is refused, and goes by ZeroMQ.
            log.warning("no more lines are taken: %s", error)
            self._stop_listening()
            return
        uid = peer_uid(line)
        if uid not in (0, os.getuid()) or not self.is_open:
            line.close()
            return
        principal = Principal(f"uid {uid}")
        self._callers[line.fileno()] = Caller(
            line, next(self._numbers), principal, self._epoll, self._limits, self._stalled
        )

    def _read(self, caller: Caller, requests: list[Request], count_max: int) -> int | None:
        """How many messages; None when it has ended, or speaks another language."""
        descriptor = caller.socket.fileno()
        try:
            messages = caller.receive(self._turn, count_max)
        except (OSError, EOFError):
            return None
        except BadRequest as error:
            log.warning("%s: %s", caller.name, error)
            return None
        if caller.has_more:
            self._behind.add(descriptor)
        else:
            self._behind.discard(descriptor)
        make = partial(LineRequest, caller)
        for head, payload in messages:
            request = request_from(make, head, payload, self._doorman, caller.principal)
            if request is not None:
                requests.append(request)
        return len(messages)

    def _forget(self, caller: Caller) -> None:
        descriptor = caller.socket.fileno()
        del self._callers[descriptor]
        self._behind.discard(descriptor)
        self._stalled.pop(caller, None)
        self._epoll.unregister(descriptor)
        caller.hang_up()  # a fork of the service may have it open; what is kept is dropped
        caller.socket.close()
