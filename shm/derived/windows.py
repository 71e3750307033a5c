"""Windows: the queue segments that the dispatcher writes into, as far as they have file space."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from pathlib import Path
from typing import Final

from cometmq.shm.derived.consume_queue import UNIT, QueueFiles
from cometmq.shm.kernel.codec import FileMap
from cometmq.shm.kernel.store import Dispatcher
from cometmq.shm.os.files import STAGING_DIR, create_segment, map_segment, maps_are_many, reserve

RESERVE_FIRST_BYTES: Final = 4096
RESERVE_STEP_MAX: Final = 262_144


class WindowCache:
    """Writable mappings of the queue segments in use, the least recently needed closed first.

    As many as this process may have. Queues in turns that are more than that cost a mapping for
    every message, which is hundreds of times a message's own work.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._open: OrderedDict[int, tuple[FileMap, int, int]] = OrderedDict()

    def make_room(self, slot: int, files: QueueFiles, index: int, store: Path) -> None:
        """Attach the window that holds `index`, with file space for it and some to come."""
        start = index // files.per_segment * files.segment_bytes
        memory, opened_start, reserved = self._open.pop(slot, (None, -1, 0))
        if memory is not None and opened_start != start:
            self._dispatcher.detach(slot)
            memory.let_go()
            memory = None
        if memory is None:
            self._let_go_of_oldest()
            memory, reserved = self._map(files, start, store), 0
        position = (index + 1) * UNIT - start
        while reserved < position:
            reserved = min(files.segment_bytes, max(RESERVE_FIRST_BYTES, 2 * reserved, position))
            reserved = min(reserved, position + RESERVE_STEP_MAX)
        self._reserve(files.path(start), reserved)
        self._open[slot] = memory, start, reserved
        self._dispatcher.attach(slot, memory, start // UNIT, start // UNIT + reserved // UNIT)

    def _let_go_of_oldest(self) -> None:
        while self._open and maps_are_many():
            slot, (memory, _, _) = self._open.popitem(last=False)
            self._dispatcher.detach(slot)
            memory.let_go()

    def _map(self, files: QueueFiles, start: int, store: Path) -> FileMap:
        path = files.path(start)
        if not path.exists() or not path.stat().st_size:  # a RocketMQ that was killed left it empty
            create_segment(
                files.folder, start, files.segment_bytes, store / STAGING_DIR, reserve_bytes=0
            )
        memory = map_segment(path, files.segment_bytes, writable=True)
        # Or the first store into a queue's page reads on around it: 1.6 ms in place of 10 us.
        memory.advise(mmap.MADV_RANDOM)
        return memory

    def _reserve(self, path: Path, count: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            reserve(descriptor, 0, count, path)
        finally:
            os.close(descriptor)

    def window(self, slot: int) -> FileMap:
        return self._open[slot][0]

    def close(self) -> None:
        for slot, (memory, _, _) in self._open.items():
            self._dispatcher.detach(slot)
            memory.let_go()
        self._open.clear()
