"""Which keys a topic has had of late: asked by the log's single writer, before it stores a message.

The index files tell of what the dispatcher has indexed; what lies behind that is looked at in the
log itself, once, also what is not published yet. So the answer is exact: it is what would be found
if everything was indexed at this moment. Nothing is kept for it but the keys of that stretch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import SystemBusy
from cometmq.shm.derived.index_file import (
    IndexHeader,
    IndexReader,
    IndexShape,
    list_index_files,
)
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import TAIL_STRANGE, FileMap, LogView, Message
from cometmq.shm.kernel.store import KeyTail, index_chain, index_hash, index_hits, record_bytes
from cometmq.shm.live.control import ControlFile, Counter
from cometmq.shm.log.references import LogMaps
from cometmq.shm.os.files import INDEX_DIR
from cometmq.shm.reading.selection import carries

BEHIND_MAX: Final = 16 << 20  # bytes of the log that may not be indexed yet
KEYS_MAX: Final = 262_144  # that are kept of them
KEPT_KEYS: Final = 16_384  # so many are not dropped, though they are indexed by now
CHAIN_STEP: Final = 64  # entries of a hash at a time
LOOKED_AT_MAX: Final = 4_096  # records that have another key of the same hash, for one key
MAPS_MAX: Final = 64  # segments
TRIES: Final = 4
NO_INODE: Final = (0, 0)  # of a file that is gone

Files = list[tuple[str, FileMap]]


class RecentKeys:
    """One thread uses it, the holder of the put lock.

    Clocks: a message is as old as its store time says. While the broker's clock is set back, what
    was stored before by the later time may be missed behind what is stored by the earlier one.
    """

    def __init__(
        self, store: Path, control: ControlFile, shape: IndexShape, segment_bytes: int
    ) -> None:
        self._store = store
        self._shape = shape
        self._segment_bytes = segment_bytes
        self._indexed = control.read(Counter.INDEXED)
        self._min = control.read(Counter.MIN_OFFSET)
        self._log = LogView(segment_bytes)
        self._maps = LogMaps(store, segment_bytes)
        self._tail = KeyTail(self._log)
        self._kept_at_restart = 0
        self._index = IndexReader(store, shape)
        self._known: Files = []
        self._newest = ""  # path of the last of them,
        self._inode = NO_INODE  # and device and inode that it had before it was mapped

    @property
    def damaged(self) -> set[str]:
        """Names of index files that must be built again; to be emptied by whoever has that done."""
        return self._index.damaged

    def find(self, topic: str, keys: list[bytes], end: int, since_ms: int) -> dict[int, Message]:
        """For the index of each key that a message of the topic has, the newest such message.

        Args:
            end: of the log, as far as it is laid down.
            since_ms: store time of the oldest message that counts.

        Raises SystemBusy when the index is too far behind, or is being built again.
        """
        name = topic.encode()
        for _ in range(TRIES):
            indexed = self._indexed.value  # first: all below it is in the files that are seen next
            self._follow(name, max(indexed, self._min.value), end)
            is_full = False
            found = self._in_tail(topic, name, keys, since_ms)
            for age, (file, memory) in enumerate(reversed(self._known)):
                header = IndexHeader.of(memory)
                if age == 0:
                    is_full = header.index_count >= self._shape.entries
                if header.index_count > 1 and since_ms <= header.end_timestamp:
                    self._in_file(topic, name, keys, since_ms, file, memory, found)
                if header.begin_timestamp < since_ms:
                    break
            # The files are those that there were at some time: whether they are it now is asked
            # once, behind the search, since it costs more than most searches.
            if self._indexed.value >= indexed and not self._is_stale(is_full):
                break
            self._know_files()
        else:
            raise SystemBusy("the index of messages by key is being built again: try again")
        if self._index.damaged:
            raise SystemBusy("an index file is damaged, and is built again: try again")
        return found

    # --- what is not indexed ---

    def _follow(self, topic: bytes, indexed: int, end: int) -> None:
        """See every record between the index and the log's end."""
        tail = self._tail
        many = tail.count > 2 * self._kept_at_restart + KEPT_KEYS
        is_new = not tail.watches(topic)
        if is_new:
            tail.watch(topic)
        if is_new or not tail.begin <= indexed < tail.reached or (many and indexed > tail.begin):
            tail.restart(min(indexed, end))
            self._kept_at_restart = 0
        if end - tail.reached > BEHIND_MAX:
            raise SystemBusy(
                f"the index is {end - indexed} bytes behind, at most {BEHIND_MAX} where messages "
                "are stored once by their keys: try again"
            )
        began_anew = tail.count == 0
        self._scan(end)
        if began_anew:
            self._kept_at_restart = tail.count
        if tail.count > KEYS_MAX:
            tail.restart(indexed)
            raise SystemBusy(f"more than {KEYS_MAX} keys are not indexed yet: try again")

    def _scan(self, end: int) -> None:
        tail = self._tail
        while reason := tail.scan(end):
            start = tail.reached // self._segment_bytes * self._segment_bytes
            memory = self._map(start)
            if memory is None:  # deleted just now
                tail.skip_to(start + self._segment_bytes)
            elif reason == TAIL_STRANGE:  # damage; the dispatcher passes over it as well
                stop = min(end, start + self._segment_bytes)
                found = codec.find_record(memory, start, tail.reached + 1, stop, 0)
                tail.skip_to(found if found >= 0 else stop)

    def _in_tail(
        self, topic: str, name: bytes, keys: list[bytes], since_ms: int
    ) -> dict[int, Message]:
        found: dict[int, Message] = {}
        for index, physical_offset in self._tail.find(name, keys):
            message = self._message(physical_offset, topic, keys[index], since_ms)
            if message is not None:
                found[index] = message
        return found

    # --- what is ---

    def _in_file(
        self,
        topic: str,
        name: bytes,
        keys: list[bytes],
        since_ms: int,
        file: str,
        memory: FileMap,
        found: dict[int, Message],
    ) -> None:
        shape = self._shape
        hits = index_hits(memory, shape.slots, shape.entries, name, keys, since_ms)
        for index in hits:
            if index in found:
                continue
            for count, offset in enumerate(
                self._chain(file, memory, topic, keys[index].decode("utf-8", "replace"), since_ms)
            ):
                message = self._message(offset, topic, keys[index], since_ms)
                if message is not None:
                    found[index] = message
                    break
                if count >= LOOKED_AT_MAX:
                    raise SystemBusy(
                        f"{count} records of other keys have the hash of key {keys[index]!r:.100} "
                        f"in topic {topic}: it cannot be told whether it is there"
                    )

    def _chain(
        self, file: str, memory: FileMap, topic: str, key: str, since_ms: int
    ) -> Iterator[int]:
        number = -1
        key_hash = index_hash(topic, key)
        while number:
            found, number, whole = index_chain(
                memory, self._shape.slots, self._shape.entries, key_hash, since_ms, (1 << 62),
                CHAIN_STEP, number, True,
            )  # fmt: skip
            yield from found
            if not whole:
                self._index.damaged.add(file)

    def _message(
        self, physical_offset: int, topic: str, key: bytes, since_ms: int
    ) -> Message | None:
        """The record there, if it has the key and is not too old; damaged ones have none."""
        start = physical_offset // self._segment_bytes * self._segment_bytes
        if physical_offset < self._min.value or self._map(start) is None:
            return None
        record = record_bytes(self._log, physical_offset)
        if record is None:
            return None
        try:
            (message,) = codec.decode(record)
        except (codec.RecordDamaged, ValueError):
            return None
        if message.store_timestamp_ms < since_ms:
            return None
        return message if carries(message, topic, key.decode("utf-8", "replace")) else None

    # --- files ---

    def _know_files(self) -> None:
        names = list_index_files(self._store)
        self._newest = str(self._store / INDEX_DIR / names[-1]) if names else ""
        self._inode = _inode(self._newest)
        self._known = list(self._index.files())
        if [name for name, _ in self._known[-1:]] != names[-1:]:
            self._inode = NO_INODE

    def _is_stale(self, is_full: bool) -> bool:
        """Whether there may be others. One more is made only when the newest is full; one in the
        place of another, when that is built again."""
        if not self._known:
            return bool(list_index_files(self._store))
        if is_full and list_index_files(self._store)[-1:] != [self._known[-1][0]]:
            return True
        inode = _inode(self._newest)
        return inode == NO_INODE or inode != self._inode

    # --- the log ---

    def _map(self, start: int) -> FileMap | None:
        memory = self._maps.mapped(start)
        if memory is None:
            if len(self._maps) >= MAPS_MAX:
                self._let_go(self._maps.oldest(MAPS_MAX // 2))
            try:
                memory = self._maps.map(start)
            except FileNotFoundError:
                return None
            self._log.set(start, memory)
        return memory

    def let_go_of_deleted(self) -> None:
        """Unmap what the store no longer has: its space comes back only then."""
        self._let_go(self._maps.below(self._min.value))

    def _let_go(self, starts: list[int]) -> None:
        for start in starts:
            self._log.drop(start)
            self._maps.let_go(start)

    def close(self) -> None:
        self._log.clear()
        self._maps.close()
        self._index.close()


def _inode(path: str) -> tuple[int, int]:
    """Device and inode."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return NO_INODE
    return found.st_dev, found.st_ino
