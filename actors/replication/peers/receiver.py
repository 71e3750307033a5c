"""What one replica says: messages out of the connection that it has come by.

    frame bytes (u32), content bytes (u32), frame, content           big-endian

Content follows behind a Bytes or a Books frame alone, so many bytes as that says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from cometmq.actors.replication.core.frames import FRAME_BYTES_MAX
from cometmq.actors.replication.peers.tls import ConnectionLost, TlsConnection
from cometmq.shm.kernel.store import unset_bytes

HEAD: Final = struct.Struct(">II")
MESSAGES_AT_ONCE: Final = 64
BYTES_AT_ONCE: Final = 4 << 20
RECEIVE_BYTES: Final = 128 << 10  # of what is encrypted

# A frame, and what is behind it.
Take = Callable[[bytes, memoryview], None]


class PeerReceiver:
    """Of one connection.

    Args:
        name: whose it is.
        content_bytes_max: behind a frame. What says to be larger ends the connection, before there
            is memory for it.
        take: is called with each message; the memory of the content is the message's own.
    """

    def __init__(
        self, connection: TlsConnection, name: str, content_bytes_max: int, take: Take
    ) -> None:
        self.connection = connection
        self.name = name
        self._content_bytes_max = content_bytes_max
        self._take = take
        self._memory = memoryview(bytearray(RECEIVE_BYTES))
        self._rest = b""  # the beginning of a message, up to the end of its frame
        self._frame = b""
        self._content = memoryview(b"")
        self._missing = memoryview(b"")  # of the content, which has come in part
        self._taken_count = self._taken_bytes = 0

    def receive(self) -> bool:
        """Take some of what has come; whether there is more. Raises ConnectionLost."""
        connection, may_come = self.connection, True
        self._taken_count = self._taken_bytes = 0
        while self._taken_count < MESSAGES_AT_ONCE and self._taken_bytes < BYTES_AT_ONCE:
            if connection.holds_some:
                self._decrypt()
            elif may_come:
                may_come = connection.fill(self._memory)
            else:
                return False
        return True

    def close(self) -> None:
        self.connection.close()

    def _decrypt(self) -> None:
        if not self._missing:
            plain = self.connection.read()
            self._cut_up(self._rest + plain if self._rest else plain)
            return
        self._missing = self._missing[self.connection.read_into(self._missing) :]
        if not self._missing:
            frame, content = self._frame, self._content
            self._frame, self._content = b"", memoryview(b"")  # they are not ours any more
            self._hand_over(frame, content)

    def _cut_up(self, plain: bytes) -> None:
        """Whole messages, and the beginning of another one."""
        at, end = 0, len(plain)
        while end - at >= HEAD.size:
            frame_bytes, content_bytes = HEAD.unpack_from(plain, at)
            self._check(frame_bytes, content_bytes)
            behind = at + HEAD.size + frame_bytes
            if behind > end:
                break
            frame = plain[at + HEAD.size : behind]
            at = behind + content_bytes
            if at > end:
                self._begin_content(frame, content_bytes, plain[behind:])
                at = end
            else:
                self._hand_over(frame, memoryview(plain)[behind:at])
        self._rest = plain[at:]

    def _check(self, frame_bytes: int, content_bytes: int) -> None:
        if frame_bytes > FRAME_BYTES_MAX or content_bytes > self._content_bytes_max:
            raise ConnectionLost(
                f"a frame of {frame_bytes} bytes with {content_bytes} behind it, at most "
                f"{FRAME_BYTES_MAX} with {self._content_bytes_max}",
                is_fault=True,
            )

    def _begin_content(self, frame: bytes, size: int, begin: bytes) -> None:
        self._frame, self._content = frame, memoryview(unset_bytes(size))
        self._content[: len(begin)] = begin
        self._missing = self._content[len(begin) :]

    def _hand_over(self, frame: bytes, content: memoryview) -> None:
        self._taken_count += 1
        self._taken_bytes += len(content)
        self._take(frame, content)
