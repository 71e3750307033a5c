"""Derived writes at the desk: records and the deriver's new position, laid down in one piece.

See protocol/derived.py for what they are, actors/tables/derivers.py for which of them counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeVar

from cometmq.actors.tables.derivers import Derivers
from cometmq.protocol.commands import Derivation, QueueKey
from cometmq.protocol.derived import (
    DERIVED_QUEUE,
    DERIVED_TOPIC,
    Forgotten,
    Known,
    Mark,
    Snapshot,
    pack_mark,
)
from cometmq.protocol.errors import CometError
from cometmq.shm.kernel.store import InnerEncoder
from cometmq.shm.reading.derived_log import StoredMark

log = logging.getLogger(__name__)

SNAPSHOT_MARKS: Final = 1_024  # after so many marks the positions are written down anew
SNAPSHOT_LOOK_S: Final = 1.0  # how soon, where the log has come to another segment
T = TypeVar("T")
NOTHING: Final = (1 << 63) - 1  # behind every log: no mark is needed
_QUEUE: Final = QueueKey(DERIVED_TOPIC, DERIVED_QUEUE)

# Lays down records of these queues from a payload, all or none; the places of each.
Append = Callable[[Sequence[QueueKey], bytes, int], bytes]


class DerivedWrites:
    """What the holder of the put lock does for derivers. Whatever is laid down here is published
    by the caller.

    Positions are in the log alone: a snapshot of all of them, and the marks behind it. The cleaner
    keeps the log from that snapshot on, once it is on the disk; a new one is laid down in each
    segment, so that nobody's position holds the log up.

    Args:
        append: lays down inner records; all of a call lies in one segment.
        segment_start: of the segment that the log has come to.
        flushed: below which physical offset the log is on the disk.
        tell_needed: tells the cleaner from which physical offset on marks are needed.
    """

    def __init__(
        self,
        book: Derivers,
        append: Append,
        *,
        segment_start: Callable[[], int],
        flushed: Callable[[], int],
        tell_needed: Callable[[int], None],
    ) -> None:
        self.book = book
        self.writes = 0  # of this process
        self._append = append
        self._segment_start = segment_start
        self._flushed = flushed
        self._tell_needed = tell_needed
        self._needed_from: int | None = None  # as the cleaner knows it from this process
        self._last_at = -1  # physical offset of the last snapshot, or of the first mark of all
        self._marks = 0  # behind it
        self._could_not = ""  # why there is no new snapshot, as it was said last

    def load(self, marks: Iterable[StoredMark]) -> None:
        """Go on from what the log has, before anything is written."""
        for stored in marks:
            if not self.book.take(stored.mark, stored.at_ms):
                log.error("the mark at physical offset %d does not follow on the one before: of "
                          "%s marks are missing", stored.physical_offset, stored.mark)  # fmt: skip
            self._note(stored.mark, stored.physical_offset)
        self.tell_cleaner()

    # --- writing ---

    def write(
        self, what: Derivation, queues: Sequence[QueueKey], payload: bytes | memoryview, count: int
    ) -> bytes | None:
        """Lay down a mark and the records behind it, all or nothing; the records' places.

        None: they are there already. Raises OffsetIllegal, and what appending raises.
        """
        append = partial(self._append_behind, queues=queues, payload=payload, count=count)
        return self.write_behind(what, count, append)

    def write_behind(
        self, what: Derivation, count: int, append: Callable[[bytes], tuple[int, T]]
    ) -> T | None:
        """`write` for a caller that lays down the records by itself.

        Args:
            append: lays down a mark with that body, and the records behind it, all or nothing; the
                mark's physical offset, and what is to be known of the records.
        """
        if not self.book.is_new(what.deriver, what.before, what.after):
            return None
        self.book.check_room(what.deriver, what.note)
        mark = Mark(what.deriver, what.before, what.after, count, what.note)
        places = self._lay(mark, append)
        self.writes += 1
        if self.is_snapshot_due:
            self.keep()
        return places

    def forget(self, deriver: str) -> None:
        """Its writes may be made again from then on."""
        if self.book.find(deriver) is not None:
            self._lay(Forgotten(deriver), self._append_behind)

    def find(self, deriver: str) -> Known | None:
        return self.book.find(deriver)

    # --- snapshots ---

    @property
    def is_snapshot_due(self) -> bool:
        """Whether the positions are to be written down anew: the log has come to another segment,
        or many marks lie behind the last snapshot."""
        if not len(self.book) and not self._marks:
            return False
        return self._marks >= SNAPSHOT_MARKS or self._last_at < self._segment_start()

    def keep(self) -> bool:
        """Write down all positions; False if it cannot be done now, and is to be tried again."""
        try:
            self._lay(self.book.snapshot(), self._append_behind)
        except CometError as error:
            if str(error) != self._could_not:
                log.warning("the positions of derivers are not written down anew: %s", error)
            self._could_not = str(error)
            return False
        self._could_not = ""
        return True

    def tell_cleaner(self) -> None:
        """To be called every now and then: a snapshot counts once no power cut can take it."""
        if self._last_at < 0 or (not len(self.book) and not self._marks):
            self._tell_from(NOTHING)
        elif self._last_at < self._flushed():
            self._tell_from(self._last_at)

    def _lay(
        self, mark: Mark | Snapshot | Forgotten, append: Callable[[bytes], tuple[int, T]]
    ) -> T:
        at, found = append(pack_mark(mark))
        self.book.take(mark, int(time.time() * 1000))
        self._note(mark, at)
        if self._needed_from == NOTHING:  # before anybody can see the mark, and rely on it
            self._tell_from(at)
        return found

    def _append_behind(
        self,
        mark: bytes,
        queues: Sequence[QueueKey] = (),
        payload: bytes | memoryview = b"",
        count: int = 0,
    ) -> tuple[int, bytes]:
        encoder = InnerEncoder()
        encoder.add(len(queues), mark)
        whole = b"".join((encoder.take(), payload))
        places = self._append([*queues, _QUEUE], whole, count + 1)
        return memoryview(places)[8:16].cast("q")[0], places[16:]

    def _note(self, mark: Mark | Snapshot | Forgotten, at: int) -> None:
        self._marks += 1
        if isinstance(mark, Snapshot) or self._last_at < 0:
            self._last_at = at
            self._marks = 0 if isinstance(mark, Snapshot) else 1

    def _tell_from(self, physical_offset: int) -> None:
        if physical_offset != self._needed_from:
            self._needed_from = physical_offset
            self._tell_needed(physical_offset)
