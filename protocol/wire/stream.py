"""Messages on a stream: a Unix socket between a client and an actor of the same machine.

A message is its frames (frames.py), each behind its length: 4 bytes, big endian, of which the
highest bit says that another frame of the message follows. Both sides read and write alike.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from cometmq.protocol.errors import BadRequest
from cometmq.protocol.frames import FRAME_MAX, MESSAGE_MAX, Frame, Part

NO_WAIT: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # a plain number is quicker
READ_BYTES: Final = 65_536  # of one system call, while no larger frame is under way
LARGE_READ_BYTES: Final = 4 * READ_BYTES
VIEW_BYTES: Final = 16_384  # from here on a received frame is not copied
JOIN_BYTES: Final = 65_536  # up to here the frames of a message are copied into one buffer
BUFFERS_AT_ONCE: Final = 64
FRAME_COST: Final = 64  # bytes of memory that a frame takes beside its content

_MORE: Final = 1 << 31
_LENGTH: Final = struct.Struct(">I")
_length_at: Final = _LENGTH.unpack_from
_length: Final = _LENGTH.pack

Payload = Sequence[bytes | bytearray | memoryview]
Message = tuple[bytes, Sequence[Frame]]  # head, payload


def pack_lengths(head: bytes, payload: Payload) -> list[bytes | bytearray | memoryview]:
    """Return the buffers that make up a message on a stream. Raises TypeError for a memoryview that
    does not lie in one piece."""
    if not payload:
        return [_length(len(head)), head]
    buffers: list[bytes | bytearray | memoryview] = [_length(len(head) | _MORE), head]
    for frame in payload:
        if type(frame) is memoryview:
            frame = frame.cast("B")  # its length counts items, which may be larger than a byte
        buffers += (_length(len(frame) | _MORE), frame)
    buffers[-2] = _length(len(buffers[-1]))
    return buffers


class StreamReader:
    """Received bytes, and the messages in them.

    Memory grows with what was received, not with what a length announces.

    Args:
        message_max: bytes of a message in memory.
    """

    __slots__ = ("_at", "_message_max", "_needed", "_parts", "_rest", "_size", "_socket")

    def __init__(self, connection: socket.socket, message_max: int = MESSAGE_MAX) -> None:
        self._socket = connection
        self._message_max = message_max
        self._rest: bytes | bytearray = b""  # received; taken up to `_at`
        self._at = 0
        self._needed = 0  # bytes behind `_at` without which no further frame is complete
        self._parts: list[bytes | memoryview] = []  # frames of a message that is incomplete
        self._size = 0  # of these, in memory

    @property
    def has_more(self) -> bool:
        """Whether `messages` may return some without another `fill`."""
        return len(self._rest) - self._at >= max(self._needed, _LENGTH.size)

    def fill(self, flags: int = NO_WAIT) -> bool:
        """Read once; False if nothing has come. Raises EOFError at the end of the stream."""
        missing = self._needed - len(self._rest) + self._at
        try:
            found = self._socket.recv(
                READ_BYTES if missing <= READ_BYTES else min(missing, LARGE_READ_BYTES), flags
            )
        except BlockingIOError:
            return False
        if not found:
            raise EOFError
        if self._at == len(self._rest):
            self._rest = found
        else:
            if self._at or type(self._rest) is bytes:
                # Frames that were returned may be views of the old one.
                self._rest = bytearray(memoryview(self._rest)[self._at :])
            self._rest += found
        if self._at:
            self._at = 0
        return True

    def messages(self, count_max: int) -> list[Message]:
        """Return the next complete messages. Raises BadRequest, after the messages before it, for
        one that is too large."""
        found: list[Message] = []
        data, at, end = self._rest, self._at, len(self._rest)
        if end - at < self._needed:
            return found
        self._needed = 0
        while len(found) < count_max:
            start = at + 4
            if start > end:
                self._needed = 4
                break
            (length,) = _length_at(data, at)
            size = length & ~_MORE
            if size > FRAME_MAX or self._size + size + FRAME_COST > self._message_max:
                if found:
                    break  # the next call raises
                raise BadRequest(
                    f"a frame of {size} bytes, at most {FRAME_MAX}, in a message of "
                    f"{self._size + size + FRAME_COST}, at most {self._message_max}"
                )
            if start + size > end:
                self._needed = 4 + size
                break
            at = start + size
            if length < _MORE and not self._parts:
                found.append((bytes(data[start:at]), ()))
                continue
            large = size >= VIEW_BYTES and self._parts
            self._parts.append(memoryview(data)[start:at] if large else bytes(data[start:at]))
            self._size += size + FRAME_COST
            if length < _MORE:
                head, *payload = self._parts
                found.append((bytes(head), [Part(memoryview(each)) for each in payload]))
                self._parts, self._size = [], 0
        self._at = at
        return found


class StreamWriter:
    """Sends messages and never waits: what the other side does not take yet is kept here."""

    __slots__ = ("_socket", "_unsent", "_unsent_bytes")

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0

    @property
    def unsent_bytes(self) -> int:
        """Memory of what is kept; 0: all is sent."""
        return self._unsent_bytes + FRAME_COST * len(self._unsent)

    def send(self, head: bytes, payload: Payload = ()) -> None:
        """Raises OSError if the connection has ended: the other side never gets all of this."""
        buffers = pack_lengths(head, payload)
        if not payload or sum(map(len, buffers)) <= JOIN_BYTES:
            self.send_bytes(b"".join(buffers))
            return
        for each in buffers:
            self._keep(each)
        self.flush()

    def send_bytes(self, data: bytes) -> None:
        """Send whole messages, in the form that they have on a stream. Raises OSError."""
        sent = 0
        if not self._unsent:
            try:
                sent = self._socket.send(data, NO_WAIT)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return
        self._keep(memoryview(data)[sent:])

    def _keep(self, data: bytes | bytearray | memoryview) -> None:
        if len(data):
            self._unsent.append(memoryview(data).cast("B"))
            self._unsent_bytes += len(data)

    def flush(self) -> bool:
        """Send as much as the other side takes; whether it took something. Raises OSError."""
        before = self._unsent_bytes
        while self._unsent:
            try:
                sent = self._socket.sendmsg(islice(self._unsent, BUFFERS_AT_ONCE), (), NO_WAIT)
            except BlockingIOError:
                break
            self._unsent_bytes -= sent
            while sent:
                first = self._unsent.popleft()
                if sent < len(first):
                    self._unsent.appendleft(first[sent:])
                    break
                sent -= len(first)
        return self._unsent_bytes < before

    def drop(self) -> None:
        """Forget what is unsent: the connection has ended."""
        self._unsent.clear()
        self._unsent_bytes = 0
