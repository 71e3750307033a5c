"""RocketMQ's index files: messages by key. Written by the dispatcher, read by the readers.

A file is a header, hash slots, and entries; each slot names the newest entry of its chain. A file
has its full size from the start, but file space is taken as it is needed: header and slots (20 MB
as RocketMQ has them) when the file is made, since keys fall anywhere into them; entries in steps.
So a disk that is full is an error before a store and never a SIGBUS, and an idle broker has no
index file: unlike RocketMQ's, ours makes one for the first key and not for the first message.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from cometmq.protocol.errors import DiskFull, StoreNotOurs
from cometmq.shm.kernel.codec import FileMap
from cometmq.shm.kernel.layout import INDEX_ENTRY, INDEX_HEADER
from cometmq.shm.kernel.store import (
    INDEX_FULL,
    INDEX_NEED_ROOM,
    Indexer,
    index_chain,
    index_hash,
    index_is_whole,
)
from cometmq.shm.os.durable import no_room_is_disk_full, sync_data_if_there, sync_folder
from cometmq.shm.os.files import INDEX_DIR, STAGING_DIR, map_segment, reserve

log = logging.getLogger(__name__)

TIME_MAX: Final = (1 << 63) - 1
OFFSET_MAX: Final = (1 << 63) - 1
QUERY_MAX: Final = 64  # RocketMQ maxMsgsNumBatch
RESERVE_STEP_BYTES: Final = 4 * 1_048_576
SHAPES_MAX: Final = 100_000  # places of a file where its last entry may be


class IndexShape(msgspec.Struct, frozen=True):
    """How many slots and entries a file has; a store keeps them for life."""

    slots: int = 5_000_000
    entries: int = 20_000_000  # entry 0 is never used

    @property
    def entries_at(self) -> int:
        return INDEX_HEADER.size + 4 * self.slots

    @property
    def file_bytes(self) -> int:
        return self.entries_at + INDEX_ENTRY.size * self.entries


class IndexHeader(NamedTuple):
    begin_timestamp: int
    end_timestamp: int
    begin_physical_offset: int
    end_physical_offset: int
    hash_slot_count: int
    index_count: int  # the next entry's number; below 2: the file is empty

    @classmethod
    def of(cls, memory: FileMap | bytes) -> IndexHeader:
        return cls(**INDEX_HEADER.unpack(memory))


def list_index_files(store: Path) -> list[str]:
    """Names, oldest first; what is no number is passed over, as RocketMQ does."""
    try:
        names = [entry.name for entry in os.scandir(store / INDEX_DIR) if entry.is_file()]
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name.isascii() and name.isdigit())


def read_header(path: Path) -> IndexHeader | None:
    """None for a file that is too short to have one, or is gone."""
    try:
        with path.open("rb") as file:
            raw = file.read(INDEX_HEADER.size)
    except FileNotFoundError:
        return None
    return IndexHeader.of(raw) if len(raw) == INDEX_HEADER.size else None


def find_shape(memory: FileMap, header: IndexHeader) -> IndexShape | None:
    """The shape in which a file's slots and chains hold: RocketMQ's, or another; the file does not
    say it. None: there is none, so that something is wrong with the file."""
    usual = IndexShape()
    if len(memory) == usual.file_bytes:
        whole = index_is_whole(memory, usual.slots, usual.entries)
        return usual if whole else None
    shapes = list(_possible_shapes(memory, header))
    # A file of few entries fits several shapes, if its last slot need not be written.
    for may_be_cut in (False, True):
        for shape in shapes:
            if index_is_whole(memory, shape.slots, shape.entries, may_be_cut):
                return shape
    return None


def _possible_shapes(memory: FileMap, header: IndexHeader) -> Iterator[IndexShape]:
    """Those in which the last entry is where the header says that the file ends."""
    last = INDEX_ENTRY.size * (header.index_count - 1) + INDEX_ENTRY.at["physical_offset"]
    place = struct.pack(">q", header.end_physical_offset)
    for hit in islice(re.finditer(b"(?=" + re.escape(place) + b")", memory), SHAPES_MAX):
        entries_at = hit.start() - last
        slots, odd = divmod(entries_at - INDEX_HEADER.size, 4)
        entries, rest = divmod(len(memory) - entries_at, INDEX_ENTRY.size)
        if slots >= 1 and entries >= header.index_count and not odd and not rest:
            yield IndexShape(slots, entries)


def next_name(after: str, now_s: float) -> str:
    """Local time to the millisecond, later than the newest file's name (RocketMQ)."""
    now_ms = int(now_s * 1000)
    text = time.strftime("%Y%m%d%H%M%S", time.localtime(now_ms // 1000)) + f"{now_ms % 1000:03d}"
    return str(max(int(text), int(after or 0) + 1))


class IndexFiles:
    """The writer's end: one file is open, a full one is followed by a new one.

    Has one user, the dispatcher process.
    """

    def __init__(self, store: Path, shape: IndexShape) -> None:
        self.folder = store / INDEX_DIR
        self.shape = shape
        self.full_count = 0  # files that were filled
        self._staging = store / STAGING_DIR
        self._kernel = Indexer()
        self._open: tuple[Path, FileMap] | None = None
        self._reserved = 0

    @property
    def end_physical_offset(self) -> int:
        """The last record that has an entry; -1 without one."""
        return self._kernel.end_physical_offset

    def open_newest(self) -> None:
        """Go on in the newest file. What it holds must have been checked. Raises DiskFull."""
        headers = [
            (self.folder / name, read_header(self.folder / name))
            for name in list_index_files(self.folder.parent)[-3:]
        ]
        while headers and (headers[-1][1] is None or headers[-1][1].index_count <= 1):
            headers.pop()[0].unlink()  # made, but never used
        if not headers:
            return
        path, header = headers[-1]
        before = headers[-2][1] if len(headers) > 1 else None
        split = before is not None and header is not None and (
            before.end_physical_offset == header.begin_physical_offset
        )  # fmt: skip
        memory = map_segment(path, self.shape.file_bytes, writable=True)
        self._attach(path, memory, split=split)

    def index(
        self, memory: FileMap, segment_start: int, begin: int, end: int, count_max: int
    ) -> tuple[int, int]:
        """Put the keys of at most `count_max` records: (reached, INDEX_DONE, _BLANK or _BAD).

        Also INDEX_ENOUGH. Raises DiskFull; nothing is lost or doubled by trying again.
        """
        while True:
            begin, reason = self._kernel.index(memory, segment_start, begin, end, count_max)
            if reason == INDEX_FULL:
                self._roll()
            elif reason == INDEX_NEED_ROOM:
                self._make_room()
            else:
                return begin, reason

    def _attach(self, path: Path, memory: FileMap, *, split: bool = False) -> None:
        count = max(1, IndexHeader.of(memory).index_count)
        self._open = path, memory
        self._reserved = 0
        self._reserve(count)
        self._kernel.attach(memory, self.shape.slots, self.shape.entries, self._limit, split)

    @property
    def _limit(self) -> int:
        entries = (self._reserved - self.shape.entries_at) // INDEX_ENTRY.size
        return min(self.shape.entries, entries)

    def _make_room(self) -> None:
        self._reserve(self._kernel.count + 1)
        self._kernel.set_limit(self._limit)

    def _reserve(self, entries: int) -> None:
        """File space for the first so many entries, and some to come."""
        assert self._open is not None
        path = self._open[0]
        wanted = self.shape.entries_at + INDEX_ENTRY.size * entries
        wanted = min(self.shape.file_bytes, max(wanted, self._reserved + RESERVE_STEP_BYTES))
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            has = max(self._reserved, os.fstat(descriptor).st_blocks * 512)
            check_room(path, wanted - has)
            reserve(descriptor, self._reserved, wanted - self._reserved, path)
        finally:
            os.close(descriptor)
        self._reserved = wanted

    def _roll(self) -> None:
        """A new file. It begins with the end of the one before, as RocketMQ's does (4.3)."""
        header = bytes(INDEX_HEADER.size)
        newest = self._open[0].name if self._open is not None else ""
        if self._kernel.count > 1:
            end, timestamp = self._kernel.end_physical_offset, self._kernel.end_timestamp
            header = INDEX_HEADER.pack(
                begin_timestamp=max(0, timestamp),
                end_timestamp=max(0, timestamp),
                begin_physical_offset=max(0, end),
                end_physical_offset=max(0, end),
                hash_slot_count=0,
                index_count=0,
            )
        path = self._create(next_name(newest, time.time()), header)
        memory = map_segment(path, self.shape.file_bytes, writable=True)
        filled = self._open is not None
        self.close()
        self._attach(path, memory)
        self.full_count += filled

    def _create(self, name: str, header: bytes) -> Path:
        """It appears under its name with file space for the slots, or not at all."""
        path = self.folder / name
        made = self._staging / f"{os.getpid()}-index-{name}"
        with no_room_is_disk_full(path):
            self._staging.mkdir(exist_ok=True)
            descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
            try:
                os.ftruncate(descriptor, self.shape.file_bytes)
                check_room(made, self.shape.entries_at)
                reserve(descriptor, 0, self.shape.entries_at, made)
                os.pwrite(descriptor, header, 0)
                self.folder.mkdir(exist_ok=True)
                os.rename(made, path)
            except BaseException:
                made.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        return path

    def close(self) -> None:
        self._kernel.detach()
        if self._open is not None:
            self._open[1].let_go()
            self._open = None


def check_room(path: Path, count: int) -> None:
    """Refuse before anything is taken: an attempt that fails would take others' room meanwhile.

    Raises DiskFull.
    """
    disk = os.statvfs(path)
    if disk.f_bavail * disk.f_frsize < count:
        raise DiskFull(f"{path}: no room for {count} bytes more on the disk")


# --- reading --------------------------------------------------------------------------------------


class IndexReader:
    """Finds physical offsets by key. One thread uses it; files are mapped as they are needed."""

    def __init__(self, store: Path, shape: IndexShape) -> None:
        self._store = store
        self._shape = shape
        self._maps: dict[str, FileMap] = {}
        self.damaged: set[str] = set()  # names of files that must be built again

    def offsets(
        self,
        topic: str,
        key: str,
        begin_ms: int = 0,
        end_ms: int = TIME_MAX,
        *,
        exact: bool = False,
        below: int = OFFSET_MAX,
    ) -> Iterator[int]:
        """Physical offsets below `below` of what may have that key, the newest first.

        Other keys with the same hash are among them, and an offset may come twice. Times are store
        times as RocketMQ's index has them, cut to whole seconds; with `exact` none is missed that
        lies in the range, and some that do not are among the answers.
        """
        key_hash = index_hash(topic, key)
        for name, memory in reversed(list(self.files())):
            header = IndexHeader.of(memory)
            if header.index_count <= 1 or header.begin_physical_offset >= below:
                continue
            if header.begin_timestamp <= end_ms and begin_ms <= header.end_timestamp:
                yield from self._chain(name, memory, key_hash, begin_ms, end_ms, exact, below)
            if header.begin_timestamp < begin_ms:
                return

    def _chain(
        self,
        name: str,
        memory: FileMap,
        key_hash: int,
        begin_ms: int,
        end_ms: int,
        exact: bool,
        below: int,
    ) -> Iterator[int]:
        number = -1
        while number:
            found, number, whole = index_chain(
                memory, self._shape.slots, self._shape.entries, key_hash, begin_ms, end_ms,
                QUERY_MAX, number, exact, below,
            )  # fmt: skip
            yield from found
            if not whole:
                self.damaged.add(name)

    def query(
        self, topic: str, key: str, max_count: int, begin_ms: int = 0, end_ms: int = TIME_MAX
    ) -> list[int]:
        """RocketMQ's answer: of the newest entries in range at most 64, ascending."""
        newest = islice(self.offsets(topic, key, begin_ms, end_ms), min(max_count, QUERY_MAX))
        return sorted(newest)

    def files(self) -> Iterator[tuple[str, FileMap]]:
        """The files there are now, oldest first, mapped."""
        names = list_index_files(self._store)
        for gone in self._maps.keys() - set(names):
            self._maps.pop(gone).let_go()
        for name in names:
            try:
                if name not in self._maps:
                    path = self._store / INDEX_DIR / name
                    self._maps[name] = map_segment(path, self._shape.file_bytes, writable=False)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except StoreNotOurs:
                self.damaged.add(name)
                continue
            yield name, self._maps[name]

    def close(self) -> None:
        for memory in self._maps.values():
            memory.let_go()
        self._maps.clear()


# --- what others do with the files ----------------------------------------------------------------


class IndexFlusher:
    """Makes index files durable; the flush process has it."""

    def __init__(self, store: Path, shape: IndexShape) -> None:
        self._store = store
        self._shape = shape
        self._flushed = ""  # the newest full file that is on the disk

    def flush_full(self) -> int:
        """Flush the full files that were not yet; the store time of the last entry in them, or 0.

        A full file is written no more, so what is flushed once stays so (RocketMQ: the checkpoint's
        indexMsgTimestamp).
        """
        timestamp = 0
        for name in list_index_files(self._store):
            header = read_header(self._store / INDEX_DIR / name)
            if name <= self._flushed or header is None:
                continue
            if header.index_count < self._shape.entries:
                break
            sync_data_if_there(self._store / INDEX_DIR / name)
            self._flushed, timestamp = name, header.end_timestamp
        return timestamp

    def flush_all(self) -> None:
        for name in list_index_files(self._store):
            if name > self._flushed:
                sync_data_if_there(self._store / INDEX_DIR / name)
        if (self._store / INDEX_DIR).is_dir():
            sync_folder(self._store / INDEX_DIR)


def delete_expired(store: Path, log_min: int) -> int:
    """Delete, from the oldest on, files whose last record is below the log; never the newest."""
    gone = 0
    for name in list_index_files(store)[:-1]:
        path = store / INDEX_DIR / name
        header = read_header(path)
        if header is None or header.end_physical_offset >= log_min:
            break
        path.unlink(missing_ok=True)
        gone += 1
    return gone
