"""The CommitLog as its single writer sees it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cometmq.protocol.errors import MessageIllegal, MessageTooLarge
from cometmq.shm._kernel import (
    BatchIllegal,
    Gate,
    LogAppender,
    QueueCursor,
    RecordTooLarge,
)
from cometmq.shm.files import (
    COMMITLOG_DIR,
    STAGING_DIR,
    create_segment,
    segment_name,
)
from cometmq.shm.segment_maps import SegmentMaps

LEFT_MAX = 2  # full segments that stay mapped with a writer that never calls `tidy`


class CommitLog:
    """Appends records, one segment after the other. Has one user, the holder of the put lock.

    Its threads may append at once: each record is laid down in one step. What needs more than one,
    to roll over first of all, is done inside `gate`.

    Args:
        small_pages: for SYNC_FLUSH, see SegmentMaps.
        ready: called with a segment's start before it is mapped; returns when the file is there.
            Raises DiskFull or ServiceNotAvailable when it cannot be had. The default makes it
            itself, in the writer's own time: good for tools and tests.
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
        small_pages: bool = False,
        ready: Callable[[int], None] | None = None,
    ) -> None:
        self.folder = store / COMMITLOG_DIR
        self.segment_bytes = segment_bytes
        self._staging = store / STAGING_DIR
        self._ready = ready or self._make_segment
        self.appender = LogAppender(store_host, max_message_bytes, crc_property)
        self._maps = SegmentMaps(self.folder, segment_bytes, small_pages=small_pages)
        self._left: list[mmap.mmap] = []  # mappings of segments that are full
        self._memory: mmap.mmap | None = None
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
    def segment(self) -> tuple[mmap.mmap, int] | None:
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
                self._roll()
        return at

    def append_all(self, queue: QueueCursor, bodies: list[bytes], properties: bytes = b"") -> int:
        """Append messages that differ in their bodies only, all or none; the first queue offset."""
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
                self._roll()
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
        """Append a client batch, all or nothing; the physical offset of its first record."""
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
        except (RecordTooLarge, BatchIllegal) as error:
            raise refusal(error) from None
        return at

    def check_batch(
        self, queue: QueueCursor, batch: bytes | memoryview, count: int, born_host: bytes
    ) -> None:
        """Raises what `append_batch` would raise of it; a segment has to be open."""
        try:
            self.appender.check_batch(queue, batch, count, len(born_host))
        except (RecordTooLarge, BatchIllegal) as error:
            raise refusal(error) from None

    def publish(self) -> None:
        """Whatever was laid down may be seen. Sleepers go on sleeping until `wake`."""
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
        self._ready(start)
        memory = self._maps.map(start)
        self.appender.attach(memory, start, self._physical_offset)
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

    def _roll(self) -> None:
        """Close the segment with a blank and go on in the next.

        The next segment is there before the blank is written: when it cannot be had, nothing has
        happened yet. Normally it is mapped as well, and this makes no system call that may block.
        """
        start = self.appender.segment_start + self.segment_bytes
        self._ready(start)
        memory = self._maps.map(start)
        self.appender.roll(memory, start)
        old, self._memory = self._memory, memory
        if old is not None:
            self._left.append(old)
        if len(self._left) > LEFT_MAX:
            self.tidy()

    def _make_segment(self, start: int) -> None:
        if not (self.folder / segment_name(start)).exists():
            create_segment(
                self.folder,
                start,
                self.segment_bytes,
                self._staging,
                reserve_bytes=self.segment_bytes,
            )

    def close(self) -> None:
        self._physical_offset = self.physical_offset
        self.appender.detach()
        if self._memory is not None:
            self._left.append(self._memory)
            self._memory = None
        for memory in self._left:
            memory.close()
        self._left.clear()
        self._maps.close()


def refusal(error: Exception) -> MessageIllegal:
    """What a producer is told of a message that the kernel would not take."""
    if isinstance(error, RecordTooLarge):
        what, size, limit = error.args
        return MessageTooLarge(f"{what} of {size} bytes, at most {limit}")
    return MessageIllegal(str(error))
