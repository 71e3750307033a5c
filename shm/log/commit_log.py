"""The CommitLog as its single writer sees it."""

from __future__ import annotations

import encodings.utf_16_be  # noqa: F401  the kernel counts a topic by it: once for all forks
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from cometmq.protocol.errors import MessageIllegal, MessageTooLarge
from cometmq.shm.kernel.codec import BatchIllegal, FileMap, RecordTooLarge
from cometmq.shm.kernel.layout import BLANK
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import Gate, InnerBatch, LogAppender
from cometmq.shm.log.segment_maps import SegmentMaps
from cometmq.shm.os.files import (
    COMMITLOG_DIR,
    STAGING_DIR,
    Pages,
    create_segment,
    segment_name,
)

PARTS_AHEAD = 2  # segments behind the one in use that a batch may go on in: those that are ready
T = TypeVar("T")
LEFT_MAX = 2  # full segments that stay mapped with a writer that never calls `tidy`


class CommitLog:
    """Appends records, one segment after the other. Has one user, the holder of the put lock.

    Its threads may append at once: each record is laid down in one step. What needs more than one,
    to roll over first of all, is done inside `gate`.

    Args:
        pages: how they come, if they are not in memory.
        ready: called with a physical offset up to which file space is needed; returns up to where
            it is there, with the files. Nothing is stored beyond. Raises DiskFull or
            ServiceNotAvailable when it cannot be had. The default makes whole segments itself, in
            the writer's own time: good for tools and tests.
    """

    def __init__(
        self,
        store: Path,
        *,
        segment_bytes: int,
        physical_offset: int,
        store_host: bytes,
        max_message_bytes: int,
        crc_property: bool = False,
        pages: Pages = Pages.AROUND,
        ready: Callable[[int], int] | None = None,
    ) -> None:
        self.folder = store / COMMITLOG_DIR
        self.segment_bytes = segment_bytes
        self._staging = store / STAGING_DIR
        self._ready = ready or self._make_segment
        self.appender = LogAppender(store_host, max_message_bytes, crc_property)
        self._maps = SegmentMaps(self.folder, segment_bytes, pages)
        self._left: list[FileMap] = []  # mappings of segments that are full
        self._memory: FileMap | None = None
        self._physical_offset = physical_offset
        self.gate = Gate()
        # The kernel's own methods, for those who append one message a call.
        self._append = self.appender.append

    @property
    def physical_offset(self) -> int:
        """The first byte that is not written."""
        return self._physical_offset if self._memory is None else self.appender.physical_offset

    @property
    def last_store_timestamp(self) -> int:
        return self.appender.last_store_timestamp

    @property
    def segment(self) -> tuple[FileMap, int] | None:
        """The mapped segment and its start."""
        return None if self._memory is None else (self._memory, self.appender.segment_start)

    def append(
        self,
        queue: QueueCursor,
        body: bytes | bytearray | memoryview,
        properties: bytes = b"",
        *,
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp_ms: int = 0,
        born_host: bytes | None = None,
        store_timestamp_ms: int = 0,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
    ) -> int:
        """Append one message; the physical offset of its record. Times of 0 mean now."""
        try:
            if self._memory is None:
                self.open_segment()
            at = self._append(
                queue, body, properties, flag, sys_flag, born_timestamp_ms, born_host,
                store_timestamp_ms, reconsume_times, prepared_transaction_offset,
            )  # fmt: skip
            if at < 0:
                at = self._append_after_roll(partial(
                    self._append, queue, body, properties, flag, sys_flag, born_timestamp_ms,
                    born_host, store_timestamp_ms, reconsume_times, prepared_transaction_offset,
                ))  # fmt: skip
        except (RecordTooLarge, BatchIllegal) as error:
            raise refusal(error) from None
        return at

    def _append_after_roll(self, append: Callable[[], int]) -> int:
        """There was no room; but another thread may have made some, or taken it again."""
        with self.gate:
            while (at := append()) < 0:
                self._make_room()
        return at

    def _make_room(self) -> None:
        """For what the appender has just not taken: file space here, or the next segment."""
        need = self.appender.wanted
        if need <= self.appender.remaining:
            self.appender.reserve_to(self._ready(self.appender.physical_offset + need))
        else:
            self._roll(need)

    def make_room(self) -> None:
        """For a LogCopy that has come to the end of its file space, or of its segment: `ready` may
        raise."""
        if self._memory is None:
            self.open_segment()
        else:
            self._make_room()

    def append_all(self, queue: QueueCursor, bodies: list[bytes], properties: bytes = b"") -> int:
        """Append messages that differ in their bodies only, all or none; the first queue offset."""
        if self._memory is None:
            self.open_segment()
        try:
            self.appender.check_all(queue, bodies, properties)
        except (RecordTooLarge, BatchIllegal) as error:
            raise refusal(error) from None
        return self._append_after_roll(partial(self.appender.append_all, queue, bodies, properties))

    def append_many(
        self, queue: QueueCursor, bodies: list[bytes], properties: bytes = b""
    ) -> Sequence[int]:
        """Append bodies as messages of one queue, with the same properties; their queue offsets."""
        first = queue.next_offset
        done = 0
        try:
            if self._memory is None:
                self.open_segment()
            while (done := self.appender.append_many(queue, bodies, done, properties)) < len(
                bodies
            ):
                self._make_room()
        except RecordTooLarge as error:
            raise refusal(error) from None
        return range(first, first + len(bodies))

    def append_batch(
        self,
        queue: QueueCursor,
        batch: bytes | memoryview,
        count: int,
        *,
        sys_flag: int = 0,
        born_timestamp_ms: int = 0,
        born_host: bytes | None = None,
        store_timestamp_ms: int = 0,
        reconsume_times: int = 0,
    ) -> int:
        """Append a client batch, all or nothing; the physical offset of its first record.

        One that no segment holds goes on in the next ones, as far as they are made ahead.
        """
        arguments = (
            queue, batch, count, sys_flag, born_timestamp_ms, born_host, store_timestamp_ms,
            reconsume_times,
        )  # fmt: skip
        try:
            if self._memory is None:
                self.open_segment()
            at = self.appender.append_batch(*arguments)
            if at < 0:
                at = self._append_after_roll(partial(self.appender.append_batch, *arguments))
        except RecordTooLarge as error:
            if error.args[0] != "batch":
                raise refusal(error) from None
            with self.gate:
                at = self._append_in_parts(error, *arguments)
        except BatchIllegal as error:
            raise refusal(error) from None
        return at

    def _append_in_parts(
        self, error: RecordTooLarge, queue: QueueCursor, batch: bytes | memoryview, count: int,
        sys_flag: int, born_timestamp_ms: int, born_host: bytes | None, *more: int,
    ) -> int:  # fmt: skip
        """Each segment gets what it has room for. They are there before anything is appended, and
        nothing is published in between: a writer that is killed leaves nothing of it."""
        host = self.appender.store_host if born_host is None else born_host
        left, room = memoryview(batch), self.appender.remaining
        parts: list[tuple[int, memoryview]] = []
        while left:
            elements, end = self.appender.count_fitting(queue, left, len(host), room)
            parts.append((elements, left[:end]))
            left, room = left[end:], self.segment_bytes
        if len(parts) > 1 + PARTS_AHEAD:
            raise refusal(
                RecordTooLarge(
                    "batch", error.args[1], PARTS_AHEAD * (self.segment_bytes - BLANK.size)
                )
            )
        last_bytes = self.appender.check_batch(queue, parts[-1][1], parts[-1][0], len(host))
        start = self.appender.segment_start
        for number in range(len(parts) - 1):
            reserved_to = self._ready(start + (number + 1) * self.segment_bytes)
            if not number:
                self.appender.reserve_to(reserved_to)
        need = last_bytes + BLANK.size
        self._ready(start + (len(parts) - 1) * self.segment_bytes + need)
        places = []
        for number, (elements, part) in enumerate(parts):
            if number:
                self._roll(need if number == len(parts) - 1 else self.segment_bytes)
            if elements:
                at = self.appender.append_batch(
                    queue, part, elements, sys_flag, born_timestamp_ms, born_host, *more
                )
                places.append((self.appender.batch_queue_offset, at))
        self.appender.batch_queue_offset, first = places[0]
        return first

    def append_inner(
        self,
        queues: list[QueueCursor],
        payload: bytes | memoryview,
        count: int,
        *,
        store_timestamp_ms: int = 0,
        size_max: int = sys.maxsize,
    ) -> bytes:
        """Append records of actors, all or none; see InnerBatch for the payload and the result.

        Args:
            size_max: bytes of all of them, in the log.

        Raises MessageIllegal; MessageTooLarge also for more than that, or than a segment holds.
        """
        batch = self.checked(lambda appender: InnerBatch(appender, queues, payload, count))
        if batch.size > size_max:
            raise refusal(RecordTooLarge("batch", batch.size, size_max))
        return self.append_checked(partial(batch.append, store_timestamp_ms))

    def checked(self, make: Callable[[LogAppender], T]) -> T:
        """A batch that this makes of the log, checked against it: a WaitingBatch, an EndsBatch. Its
        `append` is for `append_checked`.

        Raises MessageIllegal; MessageTooLarge also where a segment does not hold all of it.
        """
        try:
            if self._memory is None:
                self.open_segment()
            return make(self.appender)
        except (RecordTooLarge, BatchIllegal) as error:
            raise refusal(error) from None

    def append_checked(self, append: Callable[[], T | None]) -> T:
        """What this method of a checked batch says once there is room for all of it."""
        found = append()
        if found is None:
            with self.gate:
                while (found := append()) is None:
                    self._make_room()
        return found

    def check_batch(
        self,
        queue: QueueCursor,
        batch: bytes | memoryview,
        count: int,
        born_host: bytes,
        *,
        beside: int = 0,
    ) -> None:
        """Raises what appending its messages would raise, each with so many bytes of others beside
        it in one segment."""
        if self._memory is None:
            self.open_segment()
        room = self.segment_bytes - beside
        try:
            size = self.appender.check_batch(queue, batch, count, len(born_host))
            left = memoryview(batch)
            while size > room - BLANK.size and left:
                elements, end = self.appender.count_fitting(queue, left, len(born_host), room)
                if not elements:
                    raise RecordTooLarge("record", size, room - BLANK.size)
                left = left[end:]
        except (RecordTooLarge, BatchIllegal) as error:
            raise refusal(error) from None

    def publish(self) -> None:
        """Whatever was laid down may be seen. Sleepers go on sleeping until `wake`."""
        if self._memory is not None:
            self.appender.publish()

    def sync(self) -> int:
        """Make what was published durable here and now; see LogAppender.sync."""
        return self.appender.sync()

    def wake(self) -> None:
        """Ring for everyone who sleeps on what was published."""
        self.appender.wake()

    def open_segment(self) -> None:
        """Map the segment that the next record goes to."""
        start = self._physical_offset // self.segment_bytes * self.segment_bytes
        least = min(self._physical_offset + BLANK.size, start + self.segment_bytes)
        reserved_to = self._ready(least)
        memory = self._maps.map(start)
        self.appender.attach(memory, start, self._physical_offset, reserved_to)
        self._memory = memory
        self.tidy()

    def tidy(self) -> None:
        """Have the next segment mapped, and unmapped what a roll has left behind.

        For the moments when nobody waits: it wakes a thread.
        """
        with self.gate:
            while self._left:
                self._maps.let_go(self._left.pop())
        self._maps.map_ahead(self.appender.segment_start + self.segment_bytes)

    def _roll(self, need: int) -> None:
        """Close the segment with a blank and go on in the next, where so many bytes are needed.

        The next segment is there before the blank is written: when it cannot be had, nothing has
        happened yet. Normally it is mapped as well, and this makes no system call that may block.
        """
        start = self.appender.segment_start + self.segment_bytes
        reserved_to = self._ready(start + need)
        memory = self._maps.map(start)
        self.appender.roll(memory, start, reserved_to)
        old, self._memory = self._memory, memory
        if old is not None:
            self._left.append(old)
        if len(self._left) > LEFT_MAX:
            self.tidy()

    def _make_segment(self, end: int) -> int:
        start = (end - 1) // self.segment_bytes * self.segment_bytes
        if not (self.folder / segment_name(start)).exists():
            create_segment(
                self.folder,
                start,
                self.segment_bytes,
                self._staging,
                reserve_bytes=self.segment_bytes,
            )
        return start + self.segment_bytes

    def close(self) -> None:
        self._physical_offset = self.physical_offset
        self.appender.detach()
        if self._memory is not None:
            self._left.append(self._memory)
            self._memory = None
        for memory in self._left:
            memory.let_go()
        self._left.clear()
        self._maps.close()


def refusal(error: Exception) -> MessageIllegal:
    """What a producer is told of a message that the kernel would not take."""
    if isinstance(error, RecordTooLarge):
        return MessageTooLarge(str(error))
    return MessageIllegal(str(error))
