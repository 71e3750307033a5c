"""Which index files can be trusted after a start, and from where the log has to be indexed again.

RocketMQ deletes the files that its checkpoint does not cover and indexes again from the segment
where its recovery happens to begin; what is older stays unfindable. Here the files that remain must
follow each other without a gap, from the log's beginning on: everything from the first gap on is
deleted and built again from the log.
"""

from __future__ import annotations

import logging
import mmap
import struct
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import StoreNotOurs
from cometmq.shm.derived.index_file import (
    TIME_MAX,
    IndexHeader,
    IndexShape,
    list_index_files,
    read_header,
)
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.store import INDEX_BAD, INDEX_FOUND, first_keyed, index_is_whole
from cometmq.shm.log.references import LogMaps
from cometmq.shm.os.durable import keep_words
from cometmq.shm.os.files import INDEX_DIR, Checkpoint, map_segment

log = logging.getLogger(__name__)


class LogScan:
    """Looks for records that belong into the index."""

    def __init__(self, store: Path, segment_bytes: int) -> None:
        self._log = LogMaps(store, segment_bytes)
        self._segment_bytes = segment_bytes

    def close(self) -> None:
        self._log.close()

    def first_keyed(self, begin: int, end: int, above: int) -> int | None:
        """The first such record in [begin, end) that lies behind `above`, or None.

        Raises ValueError when no record begins at `begin`.
        """
        at = begin
        while at < end:
            start = at // self._segment_bytes * self._segment_bytes
            stop = min(end, start + self._segment_bytes)
            reached, reason = self._scan(start, at, stop, above)
            if reason == INDEX_FOUND:
                return reached
            if reason == INDEX_BAD:
                if reached == begin:
                    raise ValueError(f"no record begins at physical offset {reached}")
                at = self._behind_damage(start, reached, stop)
                continue
            at = start + self._segment_bytes
        return None

    def check_record(self, at: int) -> None:
        """Raises ValueError when no record begins there."""
        start = at // self._segment_bytes * self._segment_bytes
        end = start + self._segment_bytes
        if not codec.scan(self._log.only(start), start, at, end, False, True, 1)[2]:
            raise ValueError(f"no record begins at physical offset {at}")

    def _behind_damage(self, start: int, damaged: int, end: int) -> int:
        """Where the log goes on behind a record that is none."""
        found = codec.find_record(self._log.only(start), start, damaged + 1, end)
        return found if found >= 0 else end

    def _scan(self, start: int, begin: int, end: int, above: int) -> tuple[int, int]:
        return first_keyed(self._log.only(start), start, begin, end, above)


class IndexedMark:
    """How far the log has been indexed, over a restart: the file `cometmq.indexed`.

    The index files alone say it of logs with keys only; what has none would be read again. One
    write of 16 bytes: the physical offset, and the last record with keys below it. It counts while
    the newest index file ends with that record.
    """

    FILE: Final = "cometmq.indexed"
    _WORDS: Final = struct.Struct("<QQ")

    def __init__(self, store: Path) -> None:
        self._store = store
        self.written = 0  # physical offset

    def resume(self, begin: int, log_end: int) -> int:
        """Where indexing may go on: at `begin`, which is what the files say, or later."""
        try:
            raw = (self._store / self.FILE).read_bytes()
        except FileNotFoundError:
            return begin
        if len(raw) != self._WORDS.size:
            return begin
        indexed, newest = self._WORDS.unpack(raw)
        believed = newest == _newest_keyed(self._store) and begin <= indexed <= log_end
        return indexed if believed else begin

    def write(self, indexed: int, *, durable: bool = False) -> None:
        """Without room on the disk nothing is written: then there is more to read at a start.

        Args:
            durable: what the file said before may be wrong now.
        """
        self.written = indexed
        path = self._store / self.FILE
        words = self._WORDS.pack(indexed, _newest_keyed(self._store))
        try:
            keep_words(path, words, durable=durable)
        except OSError as error:
            log.warning("%s is not written: %s", path, error.strerror)


def _newest_keyed(store: Path) -> int:
    """The physical offset of the last record that has an entry, 0 without one."""
    for name in reversed(list_index_files(store)):
        header = read_header(store / INDEX_DIR / name)
        if header is not None and header.index_count > 1:
            return header.end_physical_offset
    return 0


def recover_index(
    store: Path, shape: IndexShape, scan: LogScan, *, log_min: int, log_end: int, clean: bool
) -> int:
    """Delete what cannot be trusted; the physical offset from where the log is to be indexed.

    Records that have their entries already may lie behind it: putting them again changes nothing.

    Args:
        clean: the last run ended in order. Else files newer than the checkpoint's
            indexMsgTimestamp are kept only if every slot and chain of theirs holds.
    """
    flushed_ms = TIME_MAX if clean else Checkpoint(store).words["index_msg_timestamp"]
    covered, above = log_min, log_min - 1
    names = list_index_files(store)
    for position, name in enumerate(names):
        path = store / INDEX_DIR / name
        header = read_header(path)
        trouble = _trouble_of(path, shape, header, log_end, flushed_ms)
        if trouble is None:
            assert header is not None
            if header.index_count <= 1:
                path.unlink()  # made, but never used
                continue
            trouble = _gap_before(scan, covered, above, header, log_min, log_end)
        if trouble is not None:
            _delete_from(store, names[position:], trouble)
            break
        assert header is not None
        above = max(above, header.end_physical_offset)
        covered = max(covered, header.end_physical_offset)
    return covered


def _trouble_of(
    path: Path, shape: IndexShape, header: IndexHeader | None, log_end: int, flushed_ms: int
) -> str | None:
    """What is wrong with a file in itself, or None."""
    size = path.stat().st_size
    if size != shape.file_bytes or header is None:
        return f"{size} bytes, index files here have {shape.file_bytes}"
    if not 0 <= header.index_count <= shape.entries:
        return f"entry {header.index_count} is the next of {shape.entries}"
    if header.index_count <= 1:
        return None
    if not 0 <= header.begin_physical_offset <= header.end_physical_offset:
        return f"begins at {header.begin_physical_offset}, ends at {header.end_physical_offset}"
    if header.end_physical_offset >= log_end:
        return f"reaches to {header.end_physical_offset}, the log to {log_end}"
    if header.end_timestamp > flushed_ms and not _is_whole(path, shape):
        return "was not on the disk when the broker ended, and is not whole"
    return None


def _is_whole(path: Path, shape: IndexShape) -> bool:
    with map_segment(path, shape.file_bytes, writable=False) as memory:
        memory.advise(mmap.MADV_SEQUENTIAL)
        return index_is_whole(memory, shape.slots, shape.entries)


def _gap_before(
    scan: LogScan, covered: int, above: int, header: IndexHeader, log_min: int, log_end: int
) -> str | None:
    """Whether records with keys lie between the files before and this one."""
    try:
        if header.end_physical_offset >= log_min:
            scan.check_record(header.end_physical_offset)
        until = min(header.begin_physical_offset, log_end)
        missing = scan.first_keyed(covered, until, above) if covered < until else None
    except (ValueError, FileNotFoundError, StoreNotOurs) as error:
        return str(error)
    return None if missing is None else f"records from {missing} on are in none before it"


def _delete_from(store: Path, names: list[str], trouble: str) -> None:
    log.warning(
        "index file %s: %s; it is built again from the log, and %d after it",
        names[0], trouble, len(names) - 1,
    )  # fmt: skip
    # The newest first: a kill in between leaves no gap behind.
    for name in reversed(names):
        (store / INDEX_DIR / name).unlink(missing_ok=True)
