"""The log as a slave is sent it: in pieces that lie in one segment and end behind a whole record.

A slave's log then ends behind a whole record as well, wherever its connection breaks: it applies
whole frames. So where a slave says that its log ends, one of ours has to begin or to be cut, or it
is not a copy of ours. A record that is larger than a frame is cut every so many bytes from its
beginning, which a later connection finds again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

from cometmq.shm.kernel.codec import whole_records
from cometmq.shm.log.references import LogMaps
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name

log = logging.getLogger(__name__)


class LogPieces:
    """The segments that slaves are sent from, mapped and open; the cleaner sees that they are used.

    Args:
        piece_bytes: of one frame, at most.
        record_bytes: of the largest record.
    """

    def __init__(
        self, store: Path, segment_bytes: int, *, piece_bytes: int, record_bytes: int
    ) -> None:
        self._folder = store / COMMITLOG_DIR
        self._segment_bytes = segment_bytes
        self._piece_bytes = piece_bytes
        self._record_bytes = record_bytes
        self._maps = LogMaps(store, segment_bytes)
        self._files: dict[int, int] = {}  # descriptors, by where their segment begins
        self._damaged: set[int] = set()  # of those, where something is no record

    def start_of(self, offset: int) -> int:
        """Where the segment begins that has the offset."""
        return offset - offset % self._segment_bytes

    def end_of(self, begin: int, limit: int, cut_until: int) -> tuple[int, int]:
        """Where the piece ends that begins there, and the end of the record that it is cut in or 0.

        Args:
            limit: where the log ends that may be sent.
            cut_until: the end of the record that the last piece was cut in.

        Raises FileNotFoundError once the segment is deleted.
        """
        start = self.start_of(begin)
        stop = min(limit, start + self._segment_bytes)
        if begin < cut_until:
            return min(cut_until, begin + self._piece_bytes), cut_until
        end = whole_records(self._maps.map(start), start, begin, stop, self._piece_bytes)
        if end < 0:  # damage: it is passed on as it is, since a copy has what the log has
            self._tell_damage(start, begin)
            return min(stop, begin + self._piece_bytes), 0
        if end > begin + self._piece_bytes:
            return begin + self._piece_bytes, end
        return end, 0

    def _tell_damage(self, start: int, begin: int) -> None:
        if start not in self._damaged:
            self._damaged.add(start)
            log.error(
                "no record begins at %d: slaves are sent the bytes as they are to the end of "
                "segment %s; `cometmq store verify` says what is wrong", begin, segment_name(start),
            )  # fmt: skip

    def record_at(self, offset: int, limit: int) -> int | None:
        """Whether a log that ends there may be a copy of ours: 0 where a record begins; the end of
        the record that pieces are cut in there; None: no.

        Raises FileNotFoundError once the segment is deleted.
        """
        start = self.start_of(offset)
        if offset in (limit, start):
            return 0
        stop = min(limit, start + self._segment_bytes)
        memory = self._maps.map(start)
        if whole_records(memory, start, offset, stop, 1) >= 0:
            return 0
        most = self._record_bytes + self._piece_bytes
        for at in range(
            offset - self._piece_bytes, max(start, offset - most) - 1, -self._piece_bytes
        ):
            end = whole_records(memory, start, at, stop, 1)
            if end > offset:
                return end
        return None

    def send(self, descriptor: int, begin: int, end: int) -> int:
        """Have the system send [begin, end) of one segment; how much it took. Raises OSError."""
        start = self.start_of(begin)
        if start not in self._files:
            path = self._folder / segment_name(start)
            self._maps.map(start)  # so that it is in use before it is opened
            self._files[start] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        count = os.sendfile(descriptor, self._files[start], begin - start, end - begin)
        if not count:
            raise OSError(f"segment {segment_name(start)} ends before {begin}")
        return count

    def keep(self, starts: Collection[int]) -> None:
        """Let go of all segments but those."""
        for start in [start for start in self._files if start not in starts]:
            os.close(self._files.pop(start))
        for start in self._maps.oldest(len(self._maps)):
            if start not in starts:
                self._maps.let_go(start)
                self._damaged.discard(start)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        self._maps.close()
