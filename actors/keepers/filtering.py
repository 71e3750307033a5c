"""Filter maps: from records to bits, the dispatcher's third task (shm/derived/filter_maps.py)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.guard import explained
from cometmq.protocol.errors import CometError, FilterIllegal
from cometmq.shm.derived.filter_maps import (
    QueueMap,
    identity_of,
    map_folder,
    read_filters,
    remove_maps,
)
from cometmq.shm.kernel._kernel import Filter
from cometmq.shm.kernel.layout import FILTER_BLOCK_ENTRIES, FILTER_BLOCK_SIZE
from cometmq.shm.live.control import Counter
from cometmq.shm.live.queue_table import QueueTable
from cometmq.shm.os.files import remove_folder
from cometmq.shm.reading.judging import JudgingReader
from cometmq.shm.reading.positions import LivePositions
from cometmq.shm.reading.selection import filter_of

log = logging.getLogger(__name__)

STEP_S: Final = 0.0005  # then the dispatcher looks at the log again
PASS_S: Final = 0.1  # between two looks at all queues; what came meanwhile is judged together
PASS_SHARE: Final = 20  # of the time, such a look may take one part
RETRY_S: Final = 1
BYTES_MAX: Final = 128 * 1_048_576  # of all maps: a bit for each of a billion messages
QUEUES_MAX: Final = 4_096  # maps; each has a block in memory


class _Expression:
    """An expression of a topic, with the maps of its queues."""

    def __init__(self, store: Path, topic: str, text: str, filter: Filter) -> None:
        self.topic = topic
        self.text = text
        self.filter = filter
        self.folder = map_folder(store, topic, text)
        self.queues: dict[int, QueueMap] = {}


class Filtering:
    """Calculates the maps of the filters that are registered, behind `dispatched`.

    Writes, alone: cometmq.filtermaps/, the counter `filter_maps`. What is there belongs to this
    process: the next one begins anew, with another number of the maps, also in the same run.
    A map is of use for what somebody has not read yet, and whoever reads what has no bit evaluates
    the filter: so nobody waits for this, it takes turns of half a millisecond while the dispatcher
    has caught up, and what goes wrong ends the maps and nothing else.
    """

    def __init__(self, family: Family, table: QueueTable) -> None:
        settings = family.settings
        self.enabled = settings.enable_calc_filter_bit_map and settings.enable_property_filter
        self._store = family.store
        self._run = str(family.control.meta["nonce"])
        self._table = table
        self._told = family.control.sleep_on(Counter.FILTERS, family.doorbell)
        self._maps = family.control.own(Counter.FILTER_MAPS)
        self._loaded = 0  # of `filters`
        self._expressions: dict[tuple[str, str], _Expression] = {}
        self._work: deque[tuple[_Expression, QueueMap, int]] = deque()  # up to which queue offset
        self._looked_at = 0  # `dispatched` as of the last look at all queues
        self._next_look = 0.0
        self._judged = 0
        self._refused = False  # the disk was full when it was last tried
        self._reader = JudgingReader(
            family.store,
            segment_bytes=settings.mapped_file_size_commit_log_bytes,
            queue_segment_bytes=settings.mapped_file_size_consume_queue_bytes,
            positions=LivePositions(family.control, table),
        )
        with suppress(OSError):  # of an earlier process; nobody believes them now
            remove_maps(self._store)

    # --- for the dispatcher ---

    def arm(self) -> None:
        """Have the doorbell rung when other filters are registered."""
        self._told.arm()

    @property
    def is_told(self) -> bool:
        """Whether the coordinator has registered others."""
        return self.enabled and self._told.value != self._loaded

    def due_in_s(self, dispatched: int) -> float | None:
        """When there is something to do; None: once more is dispatched, or others registered."""
        if not self._expressions or (not self._work and dispatched == self._looked_at):
            return None
        return 0.0 if self._work else max(0.0, self._next_look - time.monotonic())

    def step(self, dispatched: int) -> bool:
        """Work for a moment. False if there is nothing to do now."""
        if not self.is_told and self.due_in_s(dispatched) != 0.0:
            return False
        try:
            self._step(dispatched)
        except (CometError, OSError) as error:
            if not self._refused:
                log.error("maps of filters have to wait: %s", error)
            self._refused = True
            self._work.clear()
            self._looked_at = -1
            self._next_look = time.monotonic() + RETRY_S
        except Exception as caught:
            explained(caught, "the maps of filters end here; filters are evaluated instead")
            self.begin_anew()
            self.enabled = False
        else:
            self._refused = False
        return True

    def follow_log_min(self) -> None:
        """The log begins later now."""
        self._reader.let_go_of_deleted()

    def begin_anew(self) -> None:
        """The queues are built anew: what was known of their offsets may be no more."""
        if self._maps.value:
            self._maps.advance(self._maps.value + 1)
        self._expressions.clear()
        self._work.clear()
        self._loaded = 0
        with suppress(OSError):
            remove_maps(self._store)

    def settle(self) -> None:
        self._reader.close()

    def statistics(self) -> dict[str, int | float | str]:
        if not self.enabled:
            return {"filter_maps": "off"}
        return {"filters": len(self._expressions), "filter_judged": self._judged}

    # --- what is registered ---

    def _load(self) -> None:
        self._loaded = self._told.value  # first: what is written after that is read again
        wanted = read_filters(self._store)
        keys = {(topic, text) for topic, texts in wanted.items() for text in texts}
        if keys and not self._expressions:
            self._maps.advance(self._maps.value + 1)
        gone = [key for key in self._expressions if key not in keys]
        for key in gone:
            with suppress(OSError):  # what is left there is believed by nobody
                remove_folder(self._expressions.pop(key).folder)
        self._work = deque(each for each in self._work if (each[0].topic, each[0].text) in keys)
        for topic, text in keys - self._expressions.keys():
            try:
                filter = filter_of(text)
            except FilterIllegal:  # of somebody else's consumerFilter.json
                continue
            if filter is not None:
                self._expressions[topic, text] = _Expression(self._store, topic, text, filter)
        self._looked_at, self._next_look = -1, 0.0

    # --- work ---

    def _step(self, dispatched: int) -> None:
        if self.is_told:
            self._load()
        elif self._work:
            self._judge(*self._work[0])
        else:
            self._look(dispatched)

    def _judge(self, expression: _Expression, map: QueueMap, end: int) -> None:
        """A piece of a queue; then it is the next one's turn."""
        before = map.next_offset
        self._reader.judge(
            map.block, expression.topic, map.queue_id, end, expression.filter, STEP_S
        )
        self._judged += map.next_offset - before
        reached = map.next_offset >= end
        if reached or map.next_offset == map.block.end:
            map.keep()
        if reached:
            self._work.popleft()
        else:
            self._work.rotate(-1)

    def _look(self, dispatched: int) -> None:
        """At all queues that are filtered: which have messages that were not judged?"""
        began = time.monotonic()
        self._looked_at = dispatched
        room = BYTES_MAX // FILTER_BLOCK_SIZE - sum(map.blocks for map in self._all_maps())
        for expression in self._expressions.values():
            for queue_id, (low, high) in self._table.ranges_of(expression.topic).items():
                map = expression.queues.get(queue_id)
                if map is None:
                    map = self._new_map(expression, queue_id, low)
                    if map is None:
                        continue
                    room -= 1
                map.follow_queue(low)
                end = min(high, map.block.end + max(0, room) * FILTER_BLOCK_ENTRIES)
                if map.next_offset < end or not map.is_kept:
                    self._work.append((expression, map, end))
                    room -= max(0, end - map.block.end) // FILTER_BLOCK_ENTRIES + 1
        now = time.monotonic()
        self._next_look = now + max(PASS_S, PASS_SHARE * (now - began))

    def _all_maps(self) -> Iterator[QueueMap]:
        for expression in self._expressions.values():
            yield from expression.queues.values()

    def _new_map(self, expression: _Expression, queue_id: int, begin: int) -> QueueMap | None:
        if sum(len(each.queues) for each in self._expressions.values()) >= QUEUES_MAX:
            return None
        identity = identity_of(
            self._run, self._maps.value, expression.topic, queue_id, expression.text
        )
        map = QueueMap(expression.folder, queue_id, identity, begin)
        expression.queues[queue_id] = map
        return map
