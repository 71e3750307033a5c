"""A second reading of the store formats, in plain Python, to judge the real one by.

Written from the format's description alone: it imports nothing of CometMQ, so that one mistake
cannot hide in both. It is slow and clear. Source of the numbers: RocketMQ's MessageDecoder,
MessageExtEncoder, CommitLog, ConsumeQueue and StoreCheckpoint. All integers are big-endian.

    for unit in (walk := walk_log(store_dir)): ...   # Record or Blank; then walk.stop says why
    walk_queue(store_dir, "orders", 0)               # entries of one queue
    check_store(store_dir) == []                     # nothing contradicts anything
    write_store(store_dir, messages)                 # a small store, from the encoder below
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import pairwise
from pathlib import Path
from typing import Any

Host = tuple[IPv4Address | IPv6Address, int]
Buffer = bytes | bytearray | memoryview | mmap.mmap

MAGIC_V1 = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB
MAGIC_BLANK = 0xCBD43194
BLANK_BYTES = 8
CHECKPOINT_BYTES = 4096

COMPRESSED = 0x1
TRANSACTION_MASK = 0xC
BORN_HOST_V6 = 0x10
STORE_HOST_V6 = 0x20
COMPRESSION_MASK = 0x700
QUEUED_TRANSACTIONS = (0x0, 0x8)  # none and commit; prepared (4) and rollback (12) have no entry

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
_MINUTE_MS = 60_000
DELAYS_MS = (  # of the delay levels 1 to 18
    *(1_000, 5_000, 10_000, 30_000),
    *(minutes * _MINUTE_MS for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)),
)

NO_HOST: Host = (IPv4Address(0), 0)
CRC_NAME = b"__CRC32#"
CRC_PROPERTY_BYTES = 20

_HEAD = struct.Struct(">iIiiiqqiq")
_HEAD_NAMES = (
    *("total_size", "magic", "body_crc", "queue_id", "flag"),
    *("queue_offset", "physical_offset", "sys_flag", "born_timestamp"),
)
_ENTRY = struct.Struct(">qiq")
_FILLER = (0, 0x7FFFFFFF, 0)


# --- records ------------------------------------------------------------------------------------


class Reason(Enum):
    """Why bytes are not a record, or why a walk through the log ended."""

    END_OF_DATA = "eight zero bytes where a record would begin"
    END_OF_SEGMENTS = "no further segment"
    GAP = "the next segment does not begin where this one ends"
    BLANK = "the blank at a segment's end"
    TOO_SHORT = "fewer bytes than a size and a magic number need"
    BAD_SIZE = "the size exceeds what is left"
    BAD_MAGIC = "unknown magic number"
    BAD_BODY_CRC = "the body does not have the stored CRC"
    BAD_LENGTH = "the lengths inside do not add up to the size"


class BadRecord(ValueError):
    """There is no whole record at this place of the buffer; `reason` says what is wrong."""

    def __init__(self, reason: Reason, at: int, detail: str = "") -> None:
        super().__init__(f"at {at}: {reason.value}{detail and ': '}{detail}")
        self.reason = reason
        self.at = at


class BadStore(ValueError):
    """The files cannot be a store, whatever is in them: sizes or names are impossible."""


@dataclass(frozen=True)
class Blank:
    """The rest of a segment, too short for the record that came next."""

    lies_at: int  # physical offset of its first byte
    total_size: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record, every field as stored, in the order of the layout."""

    total_size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int  # what the record says; `lies_at` is the truth
    sys_flag: int
    born_timestamp: int
    born_host: Host
    store_timestamp: int
    store_host: Host
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes  # as stored; see `body_decompressed`
    topic: str
    properties_raw: bytes
    lies_at: int  # where it was found
    raw: bytes  # the whole record

    @cached_property
    def properties(self) -> dict[str, str]:
        return decode_properties(self.properties_raw)

    @property
    def msg_id(self) -> str:
        """RocketMQ's offset message id: where the record says that it is stored."""
        place = encode_host(self.store_host) + struct.pack(">q", self.physical_offset)
        return place.hex().upper()

    @property
    def body_crc_ok(self) -> bool:
        return self.body_crc == crc31(self.body)

    @property
    def property_crc_ok(self) -> bool | None:
        """Does the appended CRC property hold for the record? None = it has none."""
        tail = self.raw[-CRC_PROPERTY_BYTES:]
        if not self.properties_raw.endswith(tail) or not tail.startswith(CRC_NAME + b"\x01"):
            return None
        return tail == crc_property(self.raw[:-CRC_PROPERTY_BYTES])

    @cached_property
    def body_decompressed(self) -> bytes | None:
        """What the producer sent. None = not compressed, or not in the way that sysFlag says."""
        return decompress(self.body, self.sys_flag) if self.sys_flag & COMPRESSED else None

    @property
    def queued(self) -> bool:
        """Does a ConsumeQueue get an entry for it?"""
        return self.sys_flag & TRANSACTION_MASK in QUEUED_TRANSACTIONS


_NUMBERS = {code: struct.Struct(">" + code) for code in "bhiq"}
_address = lru_cache(ip_address)  # of a few, in many records


class _Fields:
    """Takes fields off a record, one after the other; never reads over the record's end."""

    def __init__(self, buffer: Buffer, record_at: int, total_size: int) -> None:
        self._buffer, self._record_at = buffer, record_at
        self._at, self._end = record_at, record_at + total_size

    def _pass(self, size: int) -> int:
        """Where so many bytes begin."""
        begin = self._at
        if not 0 <= size <= self._end - begin:
            detail = f"{size} bytes wanted, {self._end - begin} left"
            raise BadRecord(Reason.BAD_LENGTH, self._record_at, detail)
        self._at += size
        return begin

    def take(self, size: int) -> bytes:
        begin = self._pass(size)
        return bytes(self._buffer[begin : self._at])

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack_from(self._buffer, self._pass(layout.size))

    def number(self, code: str) -> int:
        layout = _NUMBERS[code]
        return int(layout.unpack_from(self._buffer, self._pass(layout.size))[0])

    def host(self, is_v6: int) -> Host:
        return _address(self.take(16 if is_v6 else 4)), self.number("i")

    def finish(self) -> None:
        if self._at != self._end:
            detail = f"{self._end - self._at} bytes left over"
            raise BadRecord(Reason.BAD_LENGTH, self._record_at, detail)


def decode_record(
    buffer: Buffer, at: int = 0, *, lies_at: int | None = None, check_crc: bool = True
) -> Record:
    """The record that begins at `at`. BadRecord if there is none, or no whole one.

    lies_at: the physical offset of that place, where the buffer does not begin at 0.
    check_crc: refuse a body that does not have the stored CRC; else see `Record.body_crc_ok`.
    """
    total_size, magic = _size_and_magic(buffer, at)
    if magic == MAGIC_BLANK:
        raise BadRecord(Reason.BLANK, at)
    fields = _Fields(buffer, at, total_size)
    head = _decode_head(fields)
    record = Record(
        **head,
        **_decode_rest(fields, magic, head["sys_flag"]),
        lies_at=at if lies_at is None else lies_at,
        raw=bytes(buffer[at : at + total_size]),
    )
    if check_crc and not record.body_crc_ok:
        detail = f"{crc31(record.body)}, stored is {record.body_crc}"
        raise BadRecord(Reason.BAD_BODY_CRC, at, detail)
    fields.finish()
    return record


def _size_and_magic(buffer: Buffer, at: int) -> tuple[int, int]:
    left = len(buffer) - at
    if left < BLANK_BYTES:
        raise BadRecord(Reason.TOO_SHORT, at, f"{left} left")
    total_size, magic = struct.unpack_from(">iI", buffer, at)
    if total_size == 0 and magic == 0:
        raise BadRecord(Reason.END_OF_DATA, at)
    if total_size > left:
        raise BadRecord(Reason.BAD_SIZE, at, f"{total_size}, {left} left")
    if magic not in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK):
        raise BadRecord(Reason.BAD_MAGIC, at, f"{magic:08x}")
    return total_size, magic


def _decode_head(fields: _Fields) -> dict[str, Any]:
    return dict(zip(_HEAD_NAMES, fields.unpack(_HEAD), strict=True))


def _decode_rest(fields: _Fields, magic: int, sys_flag: int) -> dict[str, Any]:
    """What follows the born timestamp. The keys stand in the order of the layout."""
    return {
        "born_host": fields.host(sys_flag & BORN_HOST_V6),
        "store_timestamp": fields.number("q"),
        "store_host": fields.host(sys_flag & STORE_HOST_V6),
        "reconsume_times": fields.number("i"),
        "prepared_transaction_offset": fields.number("q"),
        "body": fields.take(fields.number("i")),
        "topic": fields.take(fields.number("b" if magic == MAGIC_V1 else "h")).decode(
            "utf-8", "replace"
        ),
        "properties_raw": fields.take(fields.number("h")),
    }


def decode_properties(raw: bytes) -> dict[str, str]:
    """Entries `name 01 value 02`; an empty name or value is dropped, the last of a name wins."""
    properties = {}
    for entry in raw.decode("utf-8", "replace").split("\x02"):
        name, _, value = entry.partition("\x01")
        if name and value:
            properties[name] = value
    return properties


def decompress(body: bytes, sys_flag: int) -> bytes | None:
    """The body by the compression type in `sys_flag`; None if it is not of that type."""
    kind = (sys_flag & COMPRESSION_MASK) >> 8
    if kind not in (0, 3):  # 1 and 2, LZ4 and ZSTD, need packages that the tests do without
        raise NotImplementedError(f"compression type {kind}")
    try:
        return zlib.decompress(body)
    except zlib.error:
        return None


def crc31(data: Buffer) -> int:
    """CRC-32 as java.util.zip has it, without the sign bit."""
    return zlib.crc32(data) & 0x7FFFFFFF


def crc_property(record_before: bytes) -> bytes:
    """The 20 bytes that close a record with the CRC property; digits least significant first."""
    return CRC_NAME + b"\x01" + str(crc31(record_before))[::-1].ljust(10, "0").encode() + b"\x02"


@lru_cache(1_000)  # of a few tags, in many records
def java_hash(text: str) -> int:
    """Java's String.hashCode: UTF-16 code units, signed 32 bit."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for (unit,) in struct.iter_unpack(">H", units):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def tags_code(record: Record) -> int:
    """The third field of the record's queue entry. Delayed messages have their due time there."""
    delay = record.properties.get("DELAY", "")
    if record.topic == SCHEDULE_TOPIC and delay.isdecimal() and (level := int(delay)) > 0:
        return record.store_timestamp + DELAYS_MS[min(level, len(DELAYS_MS)) - 1]
    return java_hash(record.properties.get("TAGS", ""))


# --- segments and the log -----------------------------------------------------------------------


def segment_files(folder: Path, segment_size: int | None = None) -> list[Path]:
    """The segments of a log or a queue, in order. BadStore for a wrong name or size.

    segment_size: what each must have; None = whatever they all have. RocketMQ deletes an empty
    last file without a word, so here it is passed over.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    if files and files[-1].stat().st_size == 0:
        files.pop()
    for path in files:
        if len(path.name) != 20 or not path.name.isdecimal():
            raise BadStore(f"{path}: the name is not 20 digits")
        segment_size = segment_size or path.stat().st_size
        if path.stat().st_size != segment_size:
            raise BadStore(f"{path}: {path.stat().st_size} bytes instead of {segment_size}")
        if int(path.name) % segment_size:
            raise BadStore(f"{path}: the name is no multiple of {segment_size}")
    return files


@dataclass(frozen=True)
class Stop:
    """Why a walk ended, and the physical offset where it did: the end of the log."""

    reason: Reason
    physical_offset: int
    detail: str = ""


class LogWalk:
    """The records and blanks of a log, in order, until the first place where neither holds.

    `stop` is None until the iteration has come to its end.
    """

    def __init__(self, files: list[Path], check_crc: bool) -> None:
        self._files, self._check_crc = files, check_crc
        self.stop: Stop | None = None

    def __iter__(self) -> Iterator[Record | Blank]:
        self.stop = None
        end = int(self._files[0].name) if self._files else 0
        for path in self._files:
            if int(path.name) != end:
                self.stop = Stop(Reason.GAP, end, f"the next is {path.name}")
                return
            with path.open("rb") as file, _mapped(file.fileno()) as segment:
                yield from self._segment(segment, end)
            if self.stop:
                return
            end += path.stat().st_size
        self.stop = Stop(Reason.END_OF_SEGMENTS, end)

    def _segment(self, segment: mmap.mmap, start: int) -> Iterator[Record | Blank]:
        at = 0
        while at < len(segment):
            try:
                total_size, magic = _size_and_magic(segment, at)
                if magic == MAGIC_BLANK:
                    yield Blank(start + at, total_size)
                    return
                yield decode_record(segment, at, lies_at=start + at, check_crc=self._check_crc)
            except BadRecord as bad:
                self.stop = Stop(bad.reason, start + at, str(bad))
                return
            at += total_size


def _mapped(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def walk_log(
    store_dir: Path, segment_size: int | None = None, *, check_crc: bool = True
) -> LogWalk:
    """The CommitLog as recovery reads it: a record that does not hold is its end.

    check_crc: a body without its CRC ends the walk too; False reads on, as dispatch does.
    """
    return LogWalk(segment_files(store_dir / "commitlog", segment_size), check_crc)


def records(store_dir: Path, *, check_crc: bool = True) -> list[Record]:
    """The records of `walk_log`, without the blanks."""
    walk = walk_log(store_dir, check_crc=check_crc)
    return [unit for unit in walk if isinstance(unit, Record)]


def messages(store_dir: Path) -> list[Record]:
    """The records that are not the broker's own."""
    return [each for each in records(store_dir) if not each.topic.startswith("rmq_sys_COMETMQ_")]


# --- queues -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One entry of a ConsumeQueue."""

    index: int  # queue offset: its place in the queue
    physical_offset: int
    size: int
    tags_code: int

    @property
    def is_filler(self) -> bool:
        """Does it only fill the place before a queue that did not begin at 0?"""
        return (self.physical_offset, self.size, self.tags_code) == _FILLER


def walk_queue(store_dir: Path, topic: str, queue_id: int, *, fillers: bool = False) -> list[Entry]:
    """The entries up to the first that is not valid; `fillers` in front of them if asked for."""
    entries: list[Entry] = []
    for path in segment_files(store_dir / "consumequeue" / topic / str(queue_id)):
        for at, fields in enumerate(_ENTRY.iter_unpack(path.read_bytes()), _first_index(path)):
            entry = Entry(at, *fields)
            if entry.physical_offset < 0 or entry.size <= 0:
                return entries
            if entries and at != entries[-1].index + 1:
                return entries
            if fillers or not entry.is_filler:
                entries.append(entry)
    return entries


def _first_index(queue_segment: Path) -> int:
    return int(queue_segment.name) // _ENTRY.size


def queues(store_dir: Path) -> list[tuple[str, int]]:
    """Topic and queue id of every ConsumeQueue on disk; names that are no numbers do not count."""
    folders = (store_dir / "consumequeue").glob("*/*")
    return sorted(
        (folder.parent.name, int(folder.name))
        for folder in folders
        if folder.is_dir() and folder.name.isdecimal()
    )


# --- the whole store ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    physic_msg_timestamp: int
    logics_msg_timestamp: int
    index_msg_timestamp: int
    master_flushed_offset: int
    confirm_phy_offset: int


def read_checkpoint(store_dir: Path) -> Checkpoint:
    """The five words. BadStore for a wrong size, a negative word, or a tail that is not zero."""
    content = (store_dir / "checkpoint").read_bytes()
    if len(content) != CHECKPOINT_BYTES:
        raise BadStore(f"checkpoint: {len(content)} bytes instead of {CHECKPOINT_BYTES}")
    words = struct.unpack_from(">5q", content)
    if min(words) < 0:
        raise BadStore(f"checkpoint: a negative word in {words}")
    if any(content[40:]):
        raise BadStore("checkpoint: bytes behind the five words")
    return Checkpoint(*words)


def check_store(store_dir: Path, segment_size: int | None = None) -> list[str]:
    """Everything in a store that contradicts the format or itself; empty if nothing does.

    Reads only. Index files are not looked at, nor BatchConsumeQueues and what belongs in them.
    Entries for records that the log no longer has, since it was cut at its beginning, are right.
    """
    findings = _check_state(store_dir)
    try:
        walk = walk_log(store_dir, segment_size, check_crc=False)
        units = list(walk)
    except BadStore as bad:
        return [*findings, str(bad)]
    assert walk.stop is not None
    stored = [unit for unit in units if isinstance(unit, Record)]
    findings += _check_records(stored)
    findings += _check_segments(store_dir, units)
    findings += _check_tail(store_dir, walk.stop)
    findings += _check_queues(store_dir, stored)
    return findings


def _check_state(store_dir: Path) -> list[str]:
    findings = []
    if (store_dir / "abort").exists():
        findings.append("abort: present, the store was not shut down")
    try:
        read_checkpoint(store_dir)
    except FileNotFoundError:
        findings.append("checkpoint: absent")
    except BadStore as bad:
        findings.append(str(bad))
    return findings


def _check_records(stored: list[Record]) -> Iterator[str]:
    for record in stored:
        where = f"record at {record.lies_at}"
        if not record.body_crc_ok:
            yield f"{where}: the body does not have the stored CRC"
        if record.property_crc_ok is False:
            yield f"{where}: the CRC property does not hold"
        if record.physical_offset != record.lies_at:
            yield f"{where}: says that it lies at {record.physical_offset}"


def _check_segments(store_dir: Path, units: list[Record | Blank]) -> Iterator[str]:
    """A segment ends with a blank, so no record may come closer to its end than 8 bytes."""
    files = segment_files(store_dir / "commitlog")
    size = files[0].stat().st_size if files else 0
    for before, after in pairwise(files):
        if int(before.name) + size != int(after.name):
            yield f"commitlog: a gap before {after.name}"
    for unit in units:
        left = size - unit.lies_at % size
        if isinstance(unit, Blank) and unit.total_size != left:
            yield f"blank at {unit.lies_at}: {unit.total_size} bytes instead of {left}"
        if isinstance(unit, Record) and left - unit.total_size < BLANK_BYTES:
            yield f"record at {unit.lies_at}: no place for a blank behind it"


def _check_tail(store_dir: Path, stop: Stop) -> Iterator[str]:
    """Behind the end of the log all is zero, or a later recovery could take it for records."""
    for path in segment_files(store_dir / "commitlog"):
        start = int(path.name)
        if start + path.stat().st_size <= stop.physical_offset:
            continue
        dirty = _first_not_zero(path, max(0, stop.physical_offset - start))
        if dirty is not None:
            yield (
                f"commitlog: bytes that are not zero at {start + dirty}, behind the end of the log "
                f"at {stop.physical_offset} ({stop.reason.name})"
            )


def _first_not_zero(path: Path, at: int) -> int | None:
    """Passes over holes, for a segment is mostly hole."""
    with path.open("rb", buffering=0) as file:
        while True:
            try:
                at = file.seek(at, os.SEEK_DATA)
            except OSError:  # ENXIO: no data behind this place
                return None
            chunk = file.read(1 << 20)
            if rest := chunk.lstrip(b"\0"):
                return at + len(chunk) - len(rest)
            at += len(chunk)


def _check_queues(store_dir: Path, stored: list[Record]) -> list[str]:
    findings = list(_check_queue_sizes(store_dir))
    by_offset = {record.lies_at: record for record in stored}
    log_start = min((int(path.name) for path in segment_files(store_dir / "commitlog")), default=0)
    seen: set[int] = set()
    for topic, queue_id in queues(store_dir):
        try:
            findings += _check_queue_files(store_dir, topic, queue_id)
            entries = walk_queue(store_dir, topic, queue_id)
        except BadStore as bad:
            findings.append(str(bad))
            continue
        for entry in entries:
            findings += _check_entry(f"{topic}/{queue_id}", entry, by_offset, log_start)
            seen.add(entry.physical_offset)
    for record in stored:
        if record.queued and record.lies_at not in seen and not _in_batch_queue(store_dir, record):
            findings.append(f"record at {record.lies_at}: no entry in a queue")
    return findings


def _check_queue_sizes(store_dir: Path) -> Iterator[str]:
    """All queues of a store have segments of one size; the usual one is taken to be right."""
    sizes = {
        path: path.stat().st_size for path in (store_dir / "consumequeue").glob("*/*/" + "?" * 20)
    }
    usual = Counter(sizes.values()).most_common(1)
    for path, size in sizes.items():
        if size != usual[0][0]:
            yield f"{path}: {size} bytes instead of {usual[0][0]}"


def _in_batch_queue(store_dir: Path, record: Record) -> bool:
    return (store_dir / "batchconsumequeue" / record.topic / str(record.queue_id)).is_dir()


def _check_queue_files(store_dir: Path, topic: str, queue_id: int) -> Iterator[str]:
    """Segments without a gap between them, and nothing behind the last entry."""
    files = segment_files(store_dir / "consumequeue" / topic / str(queue_id))
    name = f"queue {topic}/{queue_id}"
    if files and files[0].stat().st_size % _ENTRY.size:
        raise BadStore(f"{files[0]}: {files[0].stat().st_size} bytes is no multiple of 20")
    for before, after in pairwise(files):
        if int(before.name) + before.stat().st_size != int(after.name):
            yield f"{name}: a gap before {after.name}"
    entries = walk_queue(store_dir, topic, queue_id, fillers=True)
    first = _first_index(files[0]) if files else 0
    content = b"".join(path.read_bytes() for path in files)
    end = entries[-1].index + 1 if entries else first
    if content[(end - first) * _ENTRY.size :].strip(b"\0"):
        yield f"{name}: not dense, or bytes that are not zero, behind its last entry {end - 1}"
    fillers = [entry.is_filler for entry in entries]
    if fillers != sorted(fillers, reverse=True):
        yield f"{name}: a filler behind an entry"


def _check_entry(
    queue: str, entry: Entry, by_offset: Mapping[int, Record], log_start: int
) -> Iterator[str]:
    where = f"queue {queue}: entry {entry.index}"
    record = by_offset.get(entry.physical_offset)
    if record is None:
        if entry.physical_offset >= log_start:
            yield f"{where}: no record at {entry.physical_offset}"
        return
    if not record.queued:
        yield f"{where}: the record at {record.lies_at} is of a kind that has no entry"
    pairs = (
        ("queue", queue, f"{record.topic}/{record.queue_id}"),
        ("index", entry.index, record.queue_offset),
        ("size", entry.size, record.total_size),
        ("tags code", entry.tags_code, tags_code(record)),
    )
    for what, found, expected in pairs:
        if found != expected:
            yield f"{where}: {what} {found}, the record at {record.lies_at} has {expected}"


# --- the encoder --------------------------------------------------------------------------------


def encode_host(host: Host) -> bytes:
    address, port = host
    return address.packed + struct.pack(">i", port)


def encode_properties(properties: Mapping[str, str]) -> bytes:
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()


def encode_entry(physical_offset: int, size: int, code: int) -> bytes:
    return _ENTRY.pack(physical_offset, size, code)


def encode_blank(left: int) -> bytes:
    """What fills the `left` bytes of a segment: a header, and nothing else is written."""
    return struct.pack(">iI", left, MAGIC_BLANK)


def encode_record(
    *,
    topic: str,
    body: bytes = b"",
    properties: bytes = b"",
    queue_id: int = 0,
    flag: int = 0,
    queue_offset: int = 0,
    physical_offset: int = 0,
    sys_flag: int = 0,
    born_timestamp: int = 0,
    born_host: Host = NO_HOST,
    store_timestamp: int = 0,
    store_host: Host = NO_HOST,
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
    append_crc: bool = False,
) -> bytes:
    """One record, as the store appends it: it chooses the version and sets the IPv6 bits.

    properties: the encoded text, written as it is.
    append_crc: close it with the CRC property (`enabledAppendPropCRC`).
    """
    is_v2 = len(topic.encode("utf-16-be")) // 2 > 127
    sys_flag |= BORN_HOST_V6 if born_host[0].version == 6 else 0
    sys_flag |= STORE_HOST_V6 if store_host[0].version == 6 else 0
    name = topic.encode()
    if append_crc and properties and not properties.endswith(b"\x02"):
        properties += b"\x02"
    rest = (
        encode_host(born_host)
        + struct.pack(">q", store_timestamp)
        + encode_host(store_host)
        + struct.pack(">iqi", reconsume_times, prepared_transaction_offset, len(body))
        + body
        + struct.pack(">h" if is_v2 else ">b", len(name))
        + name
        + struct.pack(">h", len(properties) + append_crc * CRC_PROPERTY_BYTES)
        + properties
    )
    total_size = _HEAD.size + len(rest) + append_crc * CRC_PROPERTY_BYTES
    magic = MAGIC_V2 if is_v2 else MAGIC_V1
    words = (queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp)
    record = _HEAD.pack(total_size, magic, crc31(body), *words) + rest
    return record + crc_property(record) if append_crc else record


def encode_again(record: Record) -> bytes:
    """The record from its decoded fields and raw properties; equal to `record.raw` if it holds."""
    append_crc = record.property_crc_ok is not None
    properties = record.properties_raw[: -CRC_PROPERTY_BYTES if append_crc else None]
    return encode_record(
        topic=record.topic,
        body=record.body,
        properties=properties,
        queue_id=record.queue_id,
        flag=record.flag,
        queue_offset=record.queue_offset,
        physical_offset=record.physical_offset,
        sys_flag=record.sys_flag,
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        store_timestamp=record.store_timestamp,
        store_host=record.store_host,
        reconsume_times=record.reconsume_times,
        prepared_transaction_offset=record.prepared_transaction_offset,
        append_crc=append_crc,
    )


def write_store(
    store_dir: Path,
    messages: Iterable[Mapping[str, Any]],
    *,
    segment_size: int = 1 << 16,
    queue_segment_size: int = 2000,
) -> list[Record]:
    """A store, cleanly shut down, that holds `messages`; returns their records.

    messages: the arguments of `encode_record`; queue and physical offsets are given here.
    """
    log, contents, stored = bytearray(), dict[tuple[str, int], bytearray](), list[Record]()
    for message in messages:
        left = segment_size - len(log) % segment_size
        if len(encode_record(**message)) + BLANK_BYTES > left:
            log += encode_blank(left).ljust(left, b"\0")
        stored.append(_append_record(log, contents, message))
    _write_segments(store_dir / "commitlog", log, segment_size)
    for (topic, queue_id), content in contents.items():
        folder = store_dir / "consumequeue" / topic / str(queue_id)
        _write_segments(folder, content, queue_segment_size)
    times = [max((record.store_timestamp for record in stored), default=0)] * 2
    checkpoint = struct.pack(">2q", *times).ljust(CHECKPOINT_BYTES, b"\0")
    (store_dir / "checkpoint").write_bytes(checkpoint)
    return stored


def _append_record(
    log: bytearray, contents: dict[tuple[str, int], bytearray], message: Mapping[str, Any]
) -> Record:
    at = len(log)
    entries = contents.setdefault((message["topic"], message.get("queue_id", 0)), bytearray())
    queued = message.get("sys_flag", 0) & TRANSACTION_MASK in QUEUED_TRANSACTIONS
    queue_offset = len(entries) // _ENTRY.size if queued else 0
    log += encode_record(**message, queue_offset=queue_offset, physical_offset=at)
    record = decode_record(log, at)
    if queued:
        entries += encode_entry(at, record.total_size, tags_code(record))
    return record


def _write_segments(folder: Path, content: bytes | bytearray, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(content), size):
        (folder / f"{start:020d}").write_bytes(content[start : start + size].ljust(size, b"\0"))
