"""Filter maps as readers have them: looked up before a record is (shm/derived/filter_maps.py)."""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from typing import Final

from cometmq.shm.derived.filter_maps import identity_of, map_folder, read_block
from cometmq.shm.kernel._kernel import FilterMap
from cometmq.shm.kernel.layout import FILTER_BLOCK_ENTRIES
from cometmq.shm.live.control import ControlFile, Counter

MAPS_MAX: Final = 256  # in memory, of a queue and expression each
BLOCKS_MAX: Final = 8  # of each; more than one answer looks through
WORTH_COUNT: Final = 64  # messages: for fewer no block is read
AGAIN_S: Final = 0.1  # a block that did not tell enough is read again after that


class _Held:
    """A map as far as it was read."""

    def __init__(self, folder: Path, queue_id: int, identity: bytes) -> None:
        self.map = FilterMap(identity)
        self._folder = folder
        self._queue_id = queue_id
        self._again_at = 0.0
        self._taken: set[int] = set()  # blocks

    def reach(self, begin: int, end: int) -> int:
        """Take what there is about these queue offsets; up to which of them it tells all."""
        first, last = begin // FILTER_BLOCK_ENTRIES, (end - 1) // FILTER_BLOCK_ENTRIES
        for number in range(first, min(last + 1, first + BLOCKS_MAX)):
            wanted = min(FILTER_BLOCK_ENTRIES, end - number * FILTER_BLOCK_ENTRIES)
            told = self.map.told(number)
            if told < wanted and time.monotonic() >= self._again_at:
                self._make_room(first)
                told = self._take(number, wanted)
            begin = max(begin, number * FILTER_BLOCK_ENTRIES + told)
            if told < wanted:
                break
        return min(begin, end)

    def _make_room(self, first: int) -> None:
        """For the blocks from there on: those that are not looked at now go."""
        if len(self._taken) >= BLOCKS_MAX:
            for number in self._taken - {*range(first, first + BLOCKS_MAX)}:
                self.map.take(number, b"")
                self._taken.discard(number)

    def _take(self, number: int, wanted: int) -> int:
        self._taken.add(number)
        told = self.map.take(number, read_block(self._folder, self._queue_id, number))
        if told < wanted:
            self._again_at = time.monotonic() + AGAIN_S
        return told


class FilterMaps:
    """The maps of a running broker. One thread uses it.

    Args:
        store: its folder.
    """

    def __init__(self, store: Path, control: ControlFile) -> None:
        self._store = store
        self._run = str(control.meta.get("nonce", ""))
        self._maps = control.read(Counter.FILTER_MAPS)
        self._known = 0  # the maps that are held
        self._held: OrderedDict[tuple[str, int, str], _Held] = OrderedDict()

    def of(
        self, topic: str, queue_id: int, expression: str, begin: int, end: int
    ) -> tuple[FilterMap | None, int]:
        """What is known of these queue offsets, and up to which of them that is all.

        Args:
            expression: as it is registered; empty: there is no filter.
        """
        maps = self._maps.value
        if not maps or not expression:
            return None, begin
        if maps != self._known:
            self._held.clear()
            self._known = maps
        key = topic, queue_id, expression
        held = self._held.get(key)
        if held is None:
            if len(self._held) >= MAPS_MAX:
                self._held.popitem(last=False)
            folder = map_folder(self._store, topic, expression)
            identity = identity_of(self._run, maps, topic, queue_id, expression)
            held = self._held[key] = _Held(folder, queue_id, identity)
        else:
            self._held.move_to_end(key)
        return held.map, held.reach(begin, end) if end - begin >= WORTH_COUNT else begin
