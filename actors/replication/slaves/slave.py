"""One slave at its connection: RocketMQ's frames, and what its reports are worth.

    slave -> master   8 bytes, again and again: where its log ends; the first says where to begin
    master -> slave   8 bytes of physical offset, 4 bytes of size, so many bytes of the log

The rules are RocketMQ's (DefaultHAConnection), but for one: there any number is believed. Here a
report never tells of more than was sent, and never of less than the one before.
"""

from __future__ import annotations

import socket
import struct
import time
from itertools import pairwise
from typing import Final

from cometmq.actors.replication.slaves.pace import Pace
from cometmq.actors.replication.slaves.pieces import LogPieces

HEADER: Final = struct.Struct(">qi")
REPORT_BYTES: Final = 8
READ_BYTES: Final = 65_536  # of reports at a time
TURN_BYTES: Final = 8 << 20  # sent to one slave before others have their turn


class SlaveLost(Exception):
    """The connection is to be closed. `is_fault`: the slave did what no slave does."""

    def __init__(self, text: str, *, is_fault: bool = False) -> None:
        super().__init__(text)
        self.is_fault = is_fault


class Slave:
    """A slave that has connected. Offsets are physical; one thread uses it.

    Args:
        connection: does not block.
        address: for people.
        pace: how fast it is sent the log; None: as fast as it takes it.
    """

    def __init__(
        self, connection: socket.socket, address: str, host: str, pace: Pace | None = None
    ) -> None:
        self.connection = connection
        self._pace = pace
        self.address, self.host = address, host
        self.since_ms = int(time.time() * 1000)
        self.heard_at = self.sent_at = time.monotonic()
        self.first: int | None = None  # what it has reported first
        self.reported = 0  # what it has reported last
        self.begin = 0  # where it is sent the log from
        self.sent = 0  # the end of what it was sent, of whole frames or not
        self.wants_room = False  # its socket is full, or its turn was over
        self.rests = False  # for its pace: somebody sends more, later
        self._rest = b""  # of a report
        self._header = b""  # what is not sent of it
        self._frame_end = 0  # above `sent` within a frame
        self._cut_until = 0  # the end of the record that the last frame was cut in

    @property
    def has_begun(self) -> bool:
        return self.first is not None

    @property
    def acknowledged(self) -> int:
        """What it vouches for: 0 before it has acknowledged anything that this connection sent."""
        return self.reported if self.reported > self.begin else 0

    @property
    def needs(self) -> int:
        """From where on the log is needed for it, also when it comes again."""
        return max(self.reported, self.begin)

    def start(self, first: int, begin: int, cut_until: int) -> None:
        """It has said where its log ends, and is sent ours from there on."""
        self.first = self.reported = first
        self.begin = self.sent = self._frame_end = begin
        self._cut_until = cut_until

    # --- reports ---

    def read(self) -> list[int]:
        """The reports that have come. Raises SlaveLost."""
        try:
            data = self.connection.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise SlaveLost(f"the connection broke: {error.strerror}") from None
        if not data:
            raise SlaveLost("it has closed the connection")
        data = self._rest + data
        whole = len(data) // REPORT_BYTES
        self._rest = data[whole * REPORT_BYTES :]
        if whole:
            self.heard_at = time.monotonic()
        return list(struct.unpack_from(f">{whole}q", data))

    def take(self, reports: list[int]) -> None:
        """Later ones than the first. Raises SlaveLost where they cannot be a slave's."""
        if not reports:
            return
        for before, after in pairwise([self.reported, *reports]):
            if after < before:
                raise SlaveLost(
                    f"it reports {after}, after {before}: a slave's log does not get shorter",
                    is_fault=True,
                )
        if reports[-1] > self.sent:
            raise SlaveLost(
                f"it acknowledges {reports[-1]}, and was sent the log up to {self.sent}",
                is_fault=True,
            )
        self.reported = reports[-1]

    # --- frames ---

    def send(self, pieces: LogPieces, limit: int) -> float:
        """As much as its socket takes of the log below `limit`, and no more than its turn and its
        pace have; for how many seconds it is sent nothing more. 0: that is not for its pace.

        Raises SlaveLost, FileNotFoundError.
        """
        try:
            self.wants_room = self._send_turn(pieces, limit)
        except BlockingIOError:
            self.wants_room = True
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SlaveLost(f"the connection broke: {error.strerror or error}") from None
        if self._pace is None or self.wants_room or self._has_all(limit):
            return 0.0
        return self._pace.rest_s()

    def _has_all(self, limit: int) -> bool:
        return not self._header and self.sent >= max(self._frame_end, limit)

    def _send_turn(self, pieces: LogPieces, limit: int) -> bool:
        """Whether its turn is over, and it could have more at once."""
        turn = TURN_BYTES
        while not self._has_all(limit):
            most = turn if self._pace is None else min(turn, self._pace.left())
            if most <= 0:
                return turn <= 0
            count = self._send_some(pieces, limit, most)
            turn -= count
            if self._pace is not None:
                self._pace.took(count)
        return False

    def _send_some(self, pieces: LogPieces, limit: int, most: int) -> int:
        if not self._header and self.sent == self._frame_end:
            self._frame_end, self._cut_until = pieces.end_of(self.sent, limit, self._cut_until)
            self._header = HEADER.pack(self.sent, self._frame_end - self.sent)
        if self._header:
            count = self.connection.send(self._header, socket.MSG_MORE)
            self._header = self._header[count:]
            return count
        end = min(self._frame_end, self.sent + most)
        count = pieces.send(self.connection.fileno(), self.sent, end)
        self.sent += count
        self.sent_at = time.monotonic()
        return count

    def send_heartbeat(self) -> None:
        """A frame of nothing, so that it knows that its master is there. Raises SlaveLost."""
        if self._header or self.sent < self._frame_end:
            return
        header = HEADER.pack(self.sent, 0)
        self.sent_at = time.monotonic()
        try:
            self._header = header[self.connection.send(header) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise SlaveLost(f"the connection broke: {error.strerror}") from None
