"""The actor's end of lines: clients of this machine, without ZeroMQ between.

See protocol/wire/line.py.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Final

from cometmq.actors.runtime.access import Doorman, Principal
from cometmq.actors.runtime.request import (
    Frames,
    Payload,
    Request,
    request_from,
)
from cometmq.protocol import frames
from cometmq.protocol.commands import Command
from cometmq.protocol.errors import BadRequest
from cometmq.protocol.wire.line import abstract, peer_uid
from cometmq.shm.kernel._kernel import (
    PACKETS_AT_ONCE,
    PacketReader,
    send_packets,
)

log = logging.getLogger(__name__)

LINES_MAX: Final = 1_024
BACKLOG: Final = 64


class Caller:
    """One client's line."""

    __slots__ = ("name", "principal", "socket")

    def __init__(self, line: socket.socket, number: int, principal: Principal) -> None:
        self.socket = line
        self.name = b"line %d" % number
        self.principal = principal

    def send(self, *packets: bytes) -> None:
        """A client that does not read is hung up on, and so knows that it was not answered."""
        try:
            send_packets(self.socket.fileno(), packets)
        except OSError as error:
            log.debug("%s: answer not sent: %s", self.name.decode(), error)
            self.hang_up()

    def hang_up(self) -> None:
        """Both sides find the end of it; whoever reads here then lets it go."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone already


class LineRequest(Request):
    __slots__ = ("_caller",)

    by_line = True

    def __init__(
        self, caller: Caller, request_id: int, command: Command, payload: Frames
    ) -> None:  # fmt: skip
        self.request_id = request_id  # as the class above does; there is one for each message
        self.command = command
        self.payload = payload
        self.principal = caller.principal
        self._caller = caller

    def _send(self, head: bytes, payload: Payload) -> None:
        packet = frames.join(head, payload)
        if packet is None:  # whoever asks by a line has to be answered there
            too_large = BadRequest(f"an answer of over {frames.PACKET_MAX} bytes")
            packet = frames.join(frames.pack(self.request_id, frames.failed(too_large)), ())
            assert packet is not None
        self._caller.send(packet)

    def done(self) -> None:
        self._caller.send(frames.done_packet(self.request_id))

    def done_with(self, others: Sequence[Request]) -> None:
        """Send all answers with one system call."""
        ids = [self.request_id, *(request.request_id for request in others)]
        self._caller.send(*map(frames.done_packet, ids))

    @property
    def sender(self) -> bytes:
        return self._caller.name


class LineListener:
    """Takes lines of the broker's own user, and of root; hands out what comes by them.

    Args:
        name: of the address, in the abstract namespace.
    """

    def __init__(self, name: str, doorman: Doorman) -> None:
        self.name = name
        self._doorman = doorman
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listener.bind(abstract(name))
        listener.listen(BACKLOG)
        self._listener: socket.socket | None = listener
        self._numbers = itertools.count(1)
        self._callers: dict[int, Caller] = {}
        self._last = -1  # the descriptor of the line that had the last turn
        self._reader = PacketReader(frames.PACKET_MAX + 1)
        # One descriptor for all of them: who waits for it need not look at every line.
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)

    @property
    def fd(self) -> int:
        """Can be read when something has come."""
        return self._epoll.fileno()

    @property
    def is_open(self) -> bool:
        """Whether one more would be taken."""
        return self._listener is not None and len(self._callers) < LINES_MAX

    def drain(self, count_max: int) -> list[Request]:
        """Return received requests, an equal share from each line while it has more. Accept new
        lines and close ended ones.

        If `count_max` is reached before every line had its turn, the next call resumes behind the
        last one that had.
        """
        requests: list[Request] = []
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
        return requests

    def _ready(self) -> list[Caller]:
        """Return the callers with input, in the order of their turns."""
        descriptors = sorted(descriptor for descriptor, _ in self._epoll.poll(0))
        first = bisect_right(descriptors, self._last)
        found: list[Caller] = []
        for descriptor in descriptors[first:] + descriptors[:first]:
            caller = self._callers.get(descriptor)
            if caller is None:
                self._accept()
            else:
                found.append(caller)
        return found

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
        self._callers[line.fileno()] = Caller(line, next(self._numbers), principal)
        self._epoll.register(line, select.EPOLLIN)

    def _read(self, caller: Caller, requests: list[Request], count_max: int) -> int | None:
        """How many packets; None when it has ended, or speaks another language."""
        descriptor, taken = caller.socket.fileno(), 0
        while (wanted := min(PACKETS_AT_ONCE, count_max - taken)) > 0:
            try:
                packets = self._reader.take(descriptor, wanted)
                self._sort(caller, packets, requests)
            except (OSError, EOFError):
                return None
            except BadRequest as error:
                log.warning("%s: %s", caller.name.decode(), error)
                return None
            taken += len(packets)
            if len(packets) < wanted:
                break
        return taken

    def _sort(self, caller: Caller, packets: list[bytes], requests: list[Request]) -> None:
        """Add the requests that they are. Raises EOFError, BadRequest."""
        make, doorman, principal = partial(LineRequest, caller), self._doorman, caller.principal
        for packet in packets:
            if not packet:
                raise EOFError
            head, payload = frames.split(packet)
            parts = [frames.Part(each) for each in payload] if payload else ()
            request = request_from(make, head, parts, doorman, principal)
            if request is not None:
                requests.append(request)

    def _forget(self, caller: Caller) -> None:
        del self._callers[caller.socket.fileno()]
        self._epoll.unregister(caller.socket)
        caller.socket.close()
