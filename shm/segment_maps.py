"""The writer's mappings: made before and let go after it needs them, in a thread beside it.

To unmap a segment of 1 GiB takes 24 ms, and to open a file may wait for the disk. A writer that
goes on in the next segment does neither.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cometmq.shm.files import map_segment, segment_name

_FIXED_NOTHING: Final = 0x10 | 0x20 | 0x02 | 0x4000  # MAP_FIXED, ANONYMOUS, PRIVATE, NORESERVE
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


class SegmentMaps:
    """Maps segments of a folder for writing. Has one user, the log's writer.

    Args:
        small_pages: have pages that are not in memory read in one by one, and not in large
            folios, which SYNC_FLUSH would have to write as a whole.
    """

    def __init__(self, folder: Path, segment_bytes: int, *, small_pages: bool) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._small_pages = small_pages
        self._ahead: dict[int, mmap.mmap] = {}  # segment start -> mapping
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def map(self, start: int) -> mmap.mmap:
        """The mapping of a segment that is ready: the one made ahead, or one made now."""
        memory = self._ahead.pop(start, None)
        if memory is not None:
            return memory
        memory = map_segment(self._folder / segment_name(start), self._segment_bytes, writable=True)
        if self._small_pages:
            memory.madvise(mmap.MADV_RANDOM)
        return memory

    def map_ahead(self, start: int) -> None:
        """Map a segment soon, if it is there; it may not be ready yet."""
        if start not in self._ahead:
            self._order(lambda: self._map_ahead(start))

    def _map_ahead(self, start: int) -> None:
        for passed in [s for s in list(self._ahead) if s < start]:
            self._ahead.pop(passed).close()  # the writer was faster
        try:
            memory = self.map(start)
            self._ahead[start] = memory
        except OSError:
            return  # the writer maps it itself, or learns why it cannot

    def let_go(self, memory: mmap.mmap) -> None:
        """Unmap soon. Nobody may use it any more."""
        self._order(lambda: unmap(memory))

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
            memory.close()
        self._ahead.clear()


def unmap(memory: mmap.mmap) -> None:
    """As memory.close(), which keeps the interpreter's lock; here others run on meanwhile.

    First the pages go, then nothing is mapped over what is left, which is quickly closed.
    """
    size = len(memory)
    anchor = (ctypes.c_char * size).from_buffer(memory)
    address, count = ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size)
    del anchor  # or the mapping could not be closed
    _libc.madvise(address, count, mmap.MADV_DONTNEED)
    no_file, at = ctypes.c_int(-1), ctypes.c_long(0)
    _libc.mmap(address, count, ctypes.c_int(0), ctypes.c_int(_FIXED_NOTHING), no_file, at)
    memory.close()
