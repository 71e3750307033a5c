"""The log as the core of a replica looks at it, and as it is sent to other replicas: whole records.

A replica's log ends, and may be cut, only where a frame ended that another one has sent. So a frame
never ends inside a derived write (protocol/derived.py): half of one would be applied as if it were
all.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, NoReturn

from cometmq.actors.replication.core.frames import Mark
from cometmq.protocol import derived
from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.kernel.codec import REASONS, FileMap, crc32, records_before, scan, whole_records
from cometmq.shm.log.references import LogMaps
from cometmq.shm.os.files import COMMITLOG_DIR, list_segments, segment_name
from cometmq.shm.state.damage import note_damage

REMEMBERED_MAX: Final = 256  # more than two followers ask for in one handshake

_TOPIC: Final = derived.DERIVED_TOPIC.encode()
_BLANK: Final = REASONS.index("end of segment")


class GroupLog:
    """Reads the log of a replica, in one thread; the core's LogView.

    The blank that closes a segment is a record. So a log that ends where a segment does has the
    blank as its last one, or the record that fills the segment to its end: whichever the bytes are.

    Segments stay mapped, and the cleaner sees them used, until `keep` is called without them.

    Raises StoreDamaged where a record does not hold, and FileNotFoundError once the segment is
    deleted, unless it says something else.
    """

    def __init__(self, store: Path, segment_bytes: int) -> None:
        self._store = store
        self._folder = store / COMMITLOG_DIR
        self._segment_bytes = segment_bytes
        self._maps = LogMaps(store, segment_bytes)
        self._whole = (0, 0, 0, 0)  # what `whole_records` was asked last, and its answer
        self._marks: dict[int, Mark] = {}  # what `last_record` has found, by the end

    def begins_at(self) -> int:
        """The physical offset at which the first segment begins; 0 for a log without any."""
        return min(list_segments(self._folder, self._segment_bytes), default=0)

    def start_of(self, offset: int) -> int:
        """Where the segment begins that has the offset."""
        return offset - offset % self._segment_bytes

    # --- what the core asks ---

    def last_record(self, end: int) -> Mark | None:
        """The last whole record before `end`. None: it is not kept, or no record ends there.

        Walks over the heads of the records before it in its segment, once: that may take longer
        than a follower waits for its master before it begins anew, and asks for the same.
        """
        found = self._marks.get(end) or self._find_last(end)
        if found is not None:
            if len(self._marks) >= REMEMBERED_MAX:
                self._marks.clear()
            self._marks[end] = found
        return found

    def _find_last(self, end: int) -> Mark | None:
        if end <= 0:
            return None
        start = self.start_of(end - 1)
        try:
            memory = self._maps.map(start)
        except FileNotFoundError:
            return None
        begin = self._last_begin(memory, start, end)
        if begin is None:
            return None
        with memoryview(memory)[begin - start : end - start] as record:
            return Mark(end, begin, crc32(record))

    def _last_begin(self, memory: FileMap, start: int, end: int) -> int | None:
        reached, _, _, last, _ = scan(memory, start, start, end, False)
        if reached == end:
            self._check(memory, start, last, end)
            return last
        stop = start + self._segment_bytes
        _, why, count, _, _ = scan(memory, start, reached, stop, False, True, 1)
        if why == _BLANK and whole_records(memory, start, reached, stop, 1) == stop:
            return reached if end == stop else None
        if not count:
            self._refuse(reached, REASONS[why])
        return None  # the end lies inside of that record

    def whole_records(self, offset: int, end: int, bytes_max: int) -> int:
        """The end of the last record that ends within `bytes_max`; of the first one, if it is
        larger. At most `end`, and in the same segment; never inside a derived write: before it, or
        behind all of it, if it is the first.

        Args:
            offset: where a record begins, below `end`.
            end: of what is published.
        """
        if self._whole[:3] != (offset, end, bytes_max):  # else it goes to another follower
            self._whole = (offset, end, bytes_max, self._find_whole(offset, end, bytes_max))
        return self._whole[3]

    def _find_whole(self, offset: int, end: int, bytes_max: int) -> int:
        start = self.start_of(offset)
        stop = min(end, start + self._segment_bytes)
        memory = self._maps.map(start)
        limit, at = offset + bytes_max, offset
        while True:
            reached, body, size = records_before(memory, start, at, stop, limit - at, _TOPIC)
            if reached > limit and at > offset:  # the one behind a derived write is larger
                return at
            if body < 0:
                if reached == offset:
                    self._refuse(offset, f"no record that ends at or before {end} begins there")
                return reached
            at = self._behind_write(memory, start, reached, stop, body, size)
            if reached > offset and (at > limit or at < 0):
                return reached
            if at < 0:
                self._refuse(offset, f"of the derived write there not all lies before {stop}")
            if at >= min(limit, stop):
                return at

    def _behind_write(
        self, memory: FileMap, start: int, begin: int, stop: int, body: int, size: int
    ) -> int:
        """Where a derived write ends whose mark begins there; -1: it is not whole."""
        behind_mark = whole_records(memory, start, begin, stop, 1)
        try:
            mark = derived.read_mark(memory[body : body + size])
        except StoreDamaged as error:
            self._refuse(begin, str(error))
        if not isinstance(mark, derived.Mark) or not mark.count:
            return behind_mark
        behind, _, count, _, _ = scan(memory, start, behind_mark, stop, False, True, mark.count)
        return behind if count == mark.count else -1

    # --- what is sent ---

    def read(self, offset: int, end: int, *, was_read: bool = False) -> memoryview:
        """The bytes of whole records in one segment, checked, bodies with their CRC.

        The memory stays mapped for as long as the view lives, but what it holds may be exchanged
        once its segment is let go of.

        Args:
            was_read: they were checked a moment ago.
        """
        start = self.start_of(offset)
        memory = self._maps.map(start)
        if not was_read:
            self._check(memory, start, offset, end)
        return memoryview(memory)[offset - start : end - start]

    def _check(self, memory: FileMap, start: int, begin: int, end: int) -> None:
        """That [begin, end) of a segment has whole records and nothing else."""
        reached, why, _, _, _ = scan(memory, start, begin, end, True)
        is_closed = why == _BLANK and whole_records(memory, start, reached, end, 1) == end
        if reached != end and not is_closed:
            self._refuse(reached, REASONS[why])

    def _refuse(self, at: int, why: str) -> NoReturn:
        path = self._folder / segment_name(self.start_of(at))
        text = f"{path}: damaged at physical offset {at}: {why}"
        note_damage(self._store, text)
        raise StoreDamaged(text)

    # --- segments ---

    def keep(self, offsets: Iterable[int]) -> None:
        """Let go of all segments but those that have one of these offsets; of one that somebody
        still looks at the next time."""
        starts = {self.start_of(offset) for offset in offsets}
        for start in self._maps.oldest(len(self._maps)):
            if start not in starts:
                self._maps.let_go_if_unseen(start)

    def forget_from(self, offset: int) -> None:
        """The log was cut there, or begun anew: files of the same names may be others now."""
        self._whole = (0, 0, 0, 0)
        self._marks = {end: mark for end, mark in self._marks.items() if end <= offset}
        for start in self._maps.oldest(len(self._maps)):
            if start >= offset:
                self._maps.drop(start)

    def close(self) -> None:
        self.forget_from(0)
        self._maps.close()
