"""Queries of messages by key (RocketMQ QUERY_MESSAGE): the index files, and what lies behind."""

from __future__ import annotations

import logging
from typing import Final

from cometmq.actors.reading.pulls import BYTES_MAX
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.service import Request
from cometmq.protocol.commands import Command, QueryMessages, QueryResult, RebuildIndex
from cometmq.protocol.errors import MessageNotFound, NoPermission
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.derived.index_file import IndexReader
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.selection import carries
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

QUERY_COUNT_MAX: Final = 1024
QUERY_LOOKED_AT_MAX: Final = 65_536  # entries of one hash, for one query


class KeyQueries:
    """Finds messages by key and time, and tells the dispatcher of damaged index files."""

    def __init__(self, family: Family, store: StoreReader) -> None:
        self._enabled = family.settings.message_index_enable
        self._store = store
        self._index = IndexReader(family.store, family.index_shape)
        self._indexed = family.control.read(Counter.INDEXED)
        self._dispatcher = Channel(family.addresses["dispatcher"], "dispatcher")

    def on_query_messages(self, command: QueryMessages, request: Request) -> Command | None:
        if not self._enabled:
            raise NoPermission("messageIndexEnable is off: messages cannot be found by key")
        indexed = self._indexed.value  # before looking: what is said to be indexed was seen
        records, more_below = self._find(command)
        self._report_damage()
        end = self._store.positions.log_range()[1]
        answer = QueryResult(len(records), indexed, end, more_below)
        request.reply(answer, (b"".join(reversed(records)),) if records else ())
        return None

    def _find(self, command: QueryMessages) -> tuple[list[bytes], int]:
        """Records with the key, the newest first, as many as one answer may hold.

        And the physical offset below which older ones may be; 0 when these are all.
        """
        wanted = min(max(command.max_count, 1), QUERY_COUNT_MAX)
        found: dict[int, bytes] = {}
        total_bytes, below = 0, command.below
        offsets = self._index.offsets(
            command.topic, command.key, command.begin_ms, command.end_ms, exact=True, below=below
        )
        for looked_at, offset in enumerate(offsets):  # in the log's order, backwards
            if len(found) == wanted or looked_at == QUERY_LOOKED_AT_MAX:
                break
            record = None if offset in found else self._matching(offset, command)
            if record is not None:
                total_bytes += len(record)
                if found and total_bytes > BYTES_MAX:
                    break
                found[offset] = record
            below = min(below, offset)
        else:
            below = 0
        return [found[offset] for offset in sorted(found, reverse=True)], below

    def _matching(self, offset: int, command: QueryMessages) -> bytes | None:
        """The record, unless it is gone, has another key of the same hash, or another time."""
        try:
            message = self._store.record_at(offset)
        except MessageNotFound:
            return None
        if not command.begin_ms <= message.store_timestamp_ms <= command.end_ms:
            return None
        same = carries(message, command.topic, command.key, unique=command.unique)
        return message.record if same else None

    def _report_damage(self) -> None:
        """The dispatcher builds damaged index files again."""
        while self._index.damaged:
            name = self._index.damaged.pop()
            log.error("index file %s is damaged", name)
            self._dispatcher.tell(RebuildIndex(name))

    def settle(self) -> None:
        self._dispatcher.close()
