"""The socket by which the `ha` process of a group hands the commitlog process its master's log.

The other end is a FollowerActor's MasterConnection. Both speak RocketMQ's plain replication: the
follower sends where its log ends (i64, big-endian) and receives frames (`HA_FRAME`).

One frame at a time is under way: what it holds is laid down once `wrote` has come to its end. Where
the commitlog process is started anew meanwhile, the rest of the frame is sent again.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import Callable
from typing import Final

from cometmq.actors.replication.slaves.master_connection import REPORT, UNIX
from cometmq.protocol.errors import StoreDamaged
from cometmq.protocol.wire.line import abstract, peer_uid
from cometmq.shm.kernel.layout import HA_FRAME
from cometmq.shm.kernel.live import SleepCell, wait_until
from cometmq.shm.kernel.store import COPY_FRAME_MAX

log = logging.getLogger(__name__)

SEND_BUFFER_BYTES: Final = 4 << 20  # as much of it as the system allows
READ_BYTES: Final = 4_096
# A little is laid down sooner than this process would come back from its inbox: it is waited for.
# Beyond that time the doorbell tells.
LITTLE_BYTES: Final = 64 << 10
LITTLE_S: Final = 0.002


class _Frame:
    """What is to be laid down, and what of it the socket has not taken yet."""

    def __init__(self, offset: int, content: memoryview) -> None:
        self.offset = offset
        self.end = offset + len(content)
        self._content = content
        self._head = self._rest = memoryview(b"")

    def begin(self, at: int) -> None:
        """Send it from that offset on; at its end: nothing."""
        self._rest = self._content[at - self.offset :]
        head = HA_FRAME.pack_in_order(at, len(self._rest)) if self._rest else b""
        self._head = memoryview(head)

    @property
    def size(self) -> int:
        return self.end - self.offset

    @property
    def is_sent(self) -> bool:
        return not (self._head or self._rest)

    def send(self, connection: socket.socket) -> None:
        """As much as the socket takes. Raises OSError."""
        while not self.is_sent:
            try:
                count = connection.sendmsg((self._head, self._rest), (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            of_head = min(count, len(self._head))
            self._head = self._head[of_head:]
            self._rest = self._rest[count - of_head :]


class LogFeed:
    """Has one user, whose thread it is called in: `on_readable` whenever `fileno` can be read,
    `look` whenever that actor's doorbell rings.

    Args:
        address: unix:@name, see `Family.log_source`.
        wrote: the counter, for the doorbell of this process; and for its wait.
        on_laid_down: is called with the end of a frame that is in the log by now, and was not when
            `lay_down` returned.

    Raises OSError where somebody else listens there.
    """

    def __init__(self, address: str, wrote: SleepCell, on_laid_down: Callable[[int], None]) -> None:
        self._wrote = wrote
        self._on_laid_down = on_laid_down
        self._frame: _Frame | None = None
        self._connection: socket.socket | None = None
        self._has_begun = False  # it has said where its log ends
        self._report = b""  # of the first report, as far as it has come
        self._wants_room = False  # the socket has not taken all of the frame
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._epoll = select.epoll()
        try:
            self._listener.bind(abstract(address.removeprefix(UNIX)))
            self._listener.listen()
        except OSError:
            self.close()
            raise
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def end(self) -> int:
        """Of the log: all below is written."""
        return self._wrote.value

    @property
    def is_idle(self) -> bool:
        """Whether a frame may be handed over."""
        return self._frame is None

    @property
    def is_ready(self) -> bool:
        """Whether there is somebody who would lay it down now."""
        return self._has_begun and self._frame is None

    # --- what is to be laid down ---

    def lay_down(self, offset: int, content: memoryview) -> bool:
        """Whole records, which follow on the log's end; whether they are laid down. If not, the
        memory is looked at until they are, or another run begins."""
        assert self._frame is None, "one frame at a time"
        assert 0 < len(content) <= COPY_FRAME_MAX, len(content)
        self._frame = _Frame(offset, content)
        if self._has_begun:
            self._frame.begin(offset)
            self._send()
        return self._is_soon_done()

    def _is_soon_done(self) -> bool:
        """Whether the frame is laid down by now, which is waited for where it is little."""
        frame = self._frame
        assert frame is not None
        is_little = self._has_begun and frame.is_sent and frame.size <= LITTLE_BYTES
        if not is_little or not wait_until(self._wrote, frame.end, LITTLE_S):
            self._wrote.arm()
            if self._wrote.value < frame.end:
                return False
            self._wrote.disarm()
        self._frame = None
        return True

    def begin_run(self, wrote: SleepCell) -> None:
        """Another commitlog process comes, and counts in another control file. What is under way is
        not wanted any more."""
        self._frame, self._wrote = None, wrote
        self._hang_up()

    def look(self) -> None:
        """Whether the frame is laid down."""
        while (frame := self._frame) is not None:
            if self._wrote.value < frame.end:
                self._wrote.arm()
                if self._wrote.value < frame.end:
                    return
                self._wrote.disarm()
            self._frame = None
            self._on_laid_down(frame.end)

    def _send(self) -> None:
        if self._frame is None or self._connection is None or not self._has_begun:
            return
        try:
            self._frame.send(self._connection)
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        if self._wants_room == self._frame.is_sent:
            self._wants_room = not self._frame.is_sent
            out = select.EPOLLOUT if self._wants_room else 0
            self._epoll.modify(self._connection, select.EPOLLIN | out)

    # --- the other end ---

    def on_readable(self) -> None:
        """Raises StoreDamaged where the log ends elsewhere than where a frame begins, or inside."""
        for descriptor, events in self._epoll.poll(0):
            if descriptor == self._listener.fileno():
                self._accept()
            elif self._connection is not None and descriptor == self._connection.fileno():
                if events & ~select.EPOLLOUT:
                    self._read()
                self._send()
        self.look()

    def _accept(self) -> None:
        """A later one takes the place of the one before: there is one commitlog process."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has gone already
        if peer_uid(connection) != os.getuid():
            log.error("user %d came for the log, and was sent away", peer_uid(connection))
            connection.close()
            return
        self._hang_up()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._connection, self._wants_room = connection, False
        self._epoll.register(connection, select.EPOLLIN)

    def _read(self) -> None:
        """Reports; but for the first one `wrote` tells all that they do."""
        assert self._connection is not None
        try:
            content = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        if not content:
            self._lose("it has closed the connection")
        elif not self._has_begun:
            self._report += content
            if len(self._report) >= REPORT.size:
                self._begin(REPORT.unpack_from(self._report)[0])

    def _begin(self, end: int) -> None:
        """Its log ends there: it has all of the frame, some, or nothing."""
        self._has_begun, self._report = True, b""
        log.info("the commitlog process takes the log from %d on", end)
        frame = self._frame
        if frame is None:
            return
        if not frame.offset <= end <= frame.end:
            raise StoreDamaged(
                f"the commitlog process says that the log ends at {end}: what is to be laid down "
                f"lies from {frame.offset} to {frame.end}"
            )
        frame.begin(end)

    def _lose(self, why: str) -> None:
        log.info("the commitlog process takes nothing more: %s", why)
        self._hang_up()

    def _hang_up(self) -> None:
        self._has_begun, self._report = False, b""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        self._frame = None
        self._hang_up()
        self._listener.close()
        self._epoll.close()
