"""The writer's mappings: made before and let go after it needs them, in a thread beside it.

To unmap a segment of 1 GiB takes 24 ms, and to open a file may wait for the disk. A writer that
goes on in the next segment does neither. A mapping lives for as long as anybody is at work in it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from cometmq.shm.kernel.codec import FileMap
from cometmq.shm.os.files import Pages, map_log, segment_name


class SegmentMaps:
    """Maps segments of a folder for writing. Has one user, the log's writer.

    Args:
        pages: how they come, if they are not in memory.
    """

    def __init__(self, folder: Path, segment_bytes: int, pages: Pages) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._pages = pages
        self._ahead: dict[int, FileMap] = {}  # segment start -> mapping
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def map(self, start: int) -> FileMap:
        """The mapping of a segment that is ready: the one made ahead, or one made now."""
        memory = self._ahead.pop(start, None)
        if memory is not None:
            return memory
        path = self._folder / segment_name(start)
        return map_log(path, self._segment_bytes, self._pages)

    def map_ahead(self, start: int) -> None:
        """Map a segment soon, if it is there; it may not be ready yet."""
        if start not in self._ahead:
            self._order(lambda: self._map_ahead(start))

    def _map_ahead(self, start: int) -> None:
        for passed in [s for s in list(self._ahead) if s < start]:
            self._ahead.pop(passed).let_go()  # the writer was faster
        try:
            memory = self.map(start)
            self._ahead[start] = memory
        except OSError:
            return  # the writer maps it itself, or learns why it cannot

    def let_go(self, memory: FileMap) -> None:
        """Unmap soon; with the last that is still at work in it, a sync of another thread say."""
        self._order(memory.let_go)

    def _order(self, action: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="maps", daemon=True)
            self._thread.start()
        self._orders.put(action)

    def _run(self) -> None:
        while (action := self._orders.get()) is not None:
            action()

    def close(self) -> None:
        """Everything ordered is done, nothing stays mapped."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
            self._thread = None
        for memory in self._ahead.values():
            memory.let_go()
        self._ahead.clear()
