"""Throws bytes at the native kernel; run in a process of its own, for a crash kills it. No tests.

Each input is written to a file before it is used, so that whoever finds this process dead knows
what killed it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import sys
from array import array
from pathlib import Path

import reference

from cometmq.protocol.filters import compile_filter
from cometmq.shm.kernel import codec, store
from cometmq.shm.kernel.codec import BatchEncoder, LogView, decode, gather, scan, unique_id
from cometmq.shm.kernel.columns import (
    ARCHIVE_NAMES,
    COLUMN_NAMES,
    RECORD_FIELDS,
    WALK_WINDOW,
    Columns,
    LogWalk,
    QueueSpans,
    put_records,
)
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import LogAppender

FILTER = codec.Filter(*compile_filter("TAGS = 'a' OR b > 1 OR KEYS IS NULL"))
SEGMENT_BYTES = 65_536
WAITS = b"REAL_TOPIC\1t\2REAL_QID\0010\2COMETMQ_UP\00100000007-000000000009\2"
PROT_NONE = 0
# What a caller is told of bytes that are none of ours.
TYPED = (
    codec.RecordDamaged,
    codec.BatchIllegal,
    codec.RecordTooLarge,
    ValueError,
    IndexError,
    OverflowError,  # a number that does not fit the field
)


class Guarded:
    """Memory that ends at a page nobody may touch: one byte read or written too far kills us."""

    def __init__(self, count_max: int) -> None:
        self._bytes = -(-count_max // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self._bytes + mmap.PAGESIZE)
        anchor = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(anchor + self._bytes)
        assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE) == 0

    def put(self, content: bytes) -> memoryview:
        """The content, at the very end; good until the next call."""
        view = memoryview(self._memory)[self._bytes - len(content) : self._bytes]
        view[:] = content
        return view


CONTENT = Guarded(1 << 20)
SEGMENT = Guarded(SEGMENT_BYTES)
UNITS = Guarded(1 << 16)


def real_records(chance: random.Random) -> bytes:
    made = bytearray()
    for index in range(chance.randrange(1, 6)):
        made += reference.encode_record(
            topic="t" * chance.choice([1, 127, 128, 200]),
            body=chance.randbytes(chance.choice([0, 1, 63, 64, 65, 300])),
            properties=b"TAGS\x01a\x02KEYS\x01k\x02"[: chance.randrange(20)]
            + chance.choice([b"", b"", b"\x02" + WAITS[: chance.randrange(len(WAITS) + 1)]]),
            queue_offset=chance.choice([index] * 20 + [2**63 - 1, -1, 2**62]),
            physical_offset=len(made),
            store_timestamp=chance.choice([1] * 10 + [2**63 - 1, -(2**63)]),
            sys_flag=chance.choice([0, 0, 1, 0x101, 0x301, 0x701]),
            append_crc=chance.random() < 0.3,
        )
    return bytes(made)


def real_batch(chance: random.Random) -> tuple[bytes, int]:
    encoder = BatchEncoder(unique_keys=chance.random() < 0.5)
    for _ in range(chance.randrange(1, 6)):
        encoder.add(chance.randbytes(chance.randrange(80)), tags="a", keys="k")
    count = encoder.count
    return encoder.take(), count


def mutated(chance: random.Random, content: bytes) -> bytes:
    """The bytes with some of them wrong: bits, lengths, the end, a piece twice."""
    if chance.random() < 0.1:
        return content
    made = bytearray(content)
    for _ in range(chance.randrange(1, 5)):
        if not made:
            return chance.randbytes(chance.randrange(200))
        at = chance.randrange(len(made))
        match chance.randrange(5):
            case 0:
                made[at] ^= 1 << chance.randrange(8)
            case 1:
                number = chance.choice([0, 1, -1, 2**31 - 1, -(2**31), 127, 128, 32767, 32768])
                made[at : at + 4] = (number & 0xFFFFFFFF).to_bytes(4, "big")
            case 2:
                del made[at:]
            case 3:
                made[at:at] = made[at : at + chance.randrange(40)]
            case 4:
                made[at : at + 8] = chance.randbytes(8)
    return bytes(made)


def look_at(message: codec.Message) -> None:
    """Everything that a consumer may ask of it."""
    for name in (
        "topic", "queue_id", "queue_offset", "physical_offset", "stored_body", "tags", "keys",
        "properties", "raw_properties", "msg_id", "offset_msg_id", "flag", "sys_flag",
        "born_timestamp_ms", "store_timestamp_ms", "born_host", "store_host", "reconsume_times",
        "prepared_transaction_offset", "body_crc", "size", "magic", "record",
    ):  # fmt: skip
        getattr(message, name)
    repr(message)
    try:
        _ = message.body
    except ValueError:
        return


def try_decode(chance: random.Random, content: memoryview) -> None:
    tags = chance.choice([None, ["a"], ["a", "b"], []])
    for message in decode(content, tags, chance.random() < 0.5):
        look_at(message)


def try_scan(chance: random.Random, content: memoryview) -> None:
    start = chance.choice([0, SEGMENT_BYTES, -1, 2**62])
    end = start + chance.choice([len(content), len(content) + 1, 0, -1])
    scan(content, start, start, end, chance.random() < 0.5, chance.random() < 0.5)


def try_frames(chance: random.Random, content: memoryview) -> None:
    """Where records end, and where the body lies of one of a topic."""
    begin, end = sorted(chance.choice([0, len(content), hostile_number(chance)]) for _ in range(2))
    most, topic = hostile_number(chance), chance.choice([b"t", b""])
    codec.whole_records(content, 0, begin, end, most)
    reached, body, size = codec.records_before(content, 0, begin, end, most, topic)
    assert begin <= reached <= end
    assert body == -1 or body + size <= len(content)


def try_unique_id(chance: random.Random, content: memoryview) -> None:
    unique_id(content, chance.choice([0, 1, 5, -1, 2**40]))


def try_append_batch(chance: random.Random, content: memoryview, count: int) -> None:
    segment = SEGMENT.put(bytes(chance.choice([512, 4096, SEGMENT_BYTES])))
    appender = LogAppender(bytes(8), chance.choice([10, 400, 1 << 20]), chance.random() < 0.3)
    room = chance.choice([0, 1, 8, len(segment) // 2, len(segment)])
    appender.attach(segment, 0, len(segment) - room)
    queue = QueueCursor("t" * chance.choice([1, 127, 200]), 0, chance.choice([0, 2**62]))
    count = chance.choice([count, count, count, 0, -1, 2**40])
    before, at = bytes(segment), queue.next_offset
    place = -1
    try:
        place = appender.append_batch(queue, content, count)
    finally:
        if place < 0:
            assert bytes(segment) == before, "refused, and something was written"
            assert queue.next_offset == at
    if place >= 0:
        read = decode(bytes(segment[place : appender.physical_offset]))
        assert len(read) == count, (len(read), count)


def try_gather(chance: random.Random, content: bytes) -> None:
    log = LogView(SEGMENT_BYTES)
    # At the segment's end, where a record that says too much would leave it.
    start = SEGMENT_BYTES - len(content)
    log.set(0, SEGMENT.put(bytes(start) + content))
    units = bytearray()
    at = 0
    for _ in range(chance.randrange(1, 12)):
        size = int.from_bytes(content[at : at + 4], "big") & 0x7FFFFFFF
        units += reference.encode_entry(start + at, size, chance.choice([97, 0, -1]))
        at += min(size, 1_000)
    hostile = UNITS.put(mutated(chance, bytes(units)))
    low, high = chance.choice([0, 5, -3]), chance.choice([len(hostile) // 20, 1_000, -1, 3])
    limit = chance.choice([0, 1, 32, 2**62, -1])
    gather(
        log, hostile, 0, low, high, chance.choice([0, 100, -(2**62)]),
        chance.choice([start + len(content) // 2, SEGMENT_BYTES, 2**62, 0]), b"t", 0,
        (limit, limit, chance.choice([1, 800, 2**62, -1]), 2**40, limit, limit, limit, limit),
        chance.choice([None, (97,), (97, 0), ()]), chance.random() < 0.5,
        filter=chance.choice([None, FILTER]),
    )  # fmt: skip


def hostile_number(chance: random.Random) -> int:
    edges = [0, 1, -1, 2**31 - 1, 2**40, 2**62, -(2**62), 2**63 - 1, -(2**63), SEGMENT_BYTES]
    return chance.choice([chance.randrange(1 << 16), *edges])


def hostile_entries(chance: random.Random, content: bytes) -> tuple[LogView, memoryview]:
    """A log that ends with that content, and entries that more or less point into it."""
    log = LogView(SEGMENT_BYTES)
    start = SEGMENT_BYTES - len(content)
    log.set(0, SEGMENT.put(bytes(start) + content))
    units, at = bytearray(), 0
    for _ in range(chance.randrange(1, 12)):
        size = int.from_bytes(content[at : at + 4], "big") & 0x7FFFFFFF
        phys = start + at
        if chance.random() < 0.2:
            phys, size = hostile_number(chance), hostile_number(chance) & 0x7FFFFFFF
        units += (phys & (1 << 64) - 1).to_bytes(8, "big") + size.to_bytes(4, "big") + bytes(8)
        at += min(size, 1_000)
    return log, UNITS.put(mutated(chance, bytes(units)))


def stretch(chance: random.Random, count: int) -> tuple[int, int, int]:
    """First index, begin and end; most often such that there is something to do."""
    if chance.random() < 0.7:
        first = chance.choice([0, 0, 5, 2**62])
        return first, first, first + count
    return tuple(hostile_number(chance) for _ in range(3))  # type: ignore[return-value]


def log_range(chance: random.Random) -> tuple[int, int]:
    if chance.random() < 0.7:
        return 0, SEGMENT_BYTES
    return hostile_number(chance), hostile_number(chance)


def try_deliver(chance: random.Random, content: bytes) -> None:
    log, units = hostile_entries(chance, content)
    limits = (chance.choice([1, 32, 2**62, -1]) for _ in range(3))
    found = codec.deliver(
        log, units, *stretch(chance, len(units) // 20), *log_range(chance), b"t", 0, *limits,
        *chance.choice([(None, None), ((0, 97), ["a"])]), chance.choice([None, FILTER]),
    )  # fmt: skip
    for message in found[1]:
        look_at(message)


def try_columns(chance: random.Random, content: bytes) -> None:
    names = chance.choice([COLUMN_NAMES, COLUMN_NAMES + ARCHIVE_NAMES])
    columns = Columns(
        names, "b", rows_max=chance.choice([1, 100]), check_crc=chance.random() < 0.5,
        null_body=chance.random() < 0.3, tags=chance.choice([None, ["a"]]),
        begin_ms=hostile_number(chance), end_ms=hostile_number(chance),
    )  # fmt: skip
    match chance.randrange(3):
        case 0:
            log, units = hostile_entries(chance, content)
            place = stretch(chance, len(units) // 20)
            columns.gather(log, units, *place, *log_range(chance), b"t", 0)
        case 1:
            wanted = QueueSpans() if chance.random() < 0.5 else None
            if wanted is not None:
                wanted.add("t", 0, hostile_number(chance), hostile_number(chance))
            start = chance.choice([0, 2**62, hostile_number(chance)])
            columns.scan(CONTENT.put(content), start, start, start + len(content), wanted)
        case 2:
            end = chance.choice([3, hostile_number(chance)])
            columns.decode_run(CONTENT.put(content), 0, b"t", 0, 0, end, chance.random() < 0.5)
    columns.take()


def try_spans(chance: random.Random, content: bytes) -> None:
    spans = QueueSpans()
    start = chance.choice([0, 2**62, hostile_number(chance)])
    match chance.randrange(4):
        case 0:
            spans.survey(CONTENT.put(content), start, start, start + len(content))
            spans.items()
        case 1:
            _, units = hostile_entries(chance, content)
            numbers = [hostile_number(chance) for _ in range(4)]
            codec.unit_marks(units, *stretch(chance, len(units) // 20), *numbers, 3)
        case 2:
            _, units = hostile_entries(chance, content)
            _, begin, end = stretch(chance, len(units) // 20)
            for look in (codec.units_end, codec.last_real, codec.fillers_end):
                look(units, begin, end)
            codec.units_below(units, begin, end, hostile_number(chance))
            codec.units_before(units, end, hostile_number(chance))
        case 3:
            numbers = [hostile_number(chance) for _ in range(2)]
            codec.stored_at(CONTENT.put(content), start, start, len(content), b"t", 0, 0)
            size = numbers[1] & 0x7FFFFFFF
            codec.stored_at(CONTENT.put(content), start, numbers[0], size, b"t", 0, 0)


def try_tail(chance: random.Random, content: bytes) -> None:
    log = LogView(SEGMENT_BYTES)
    start = SEGMENT_BYTES - len(content)
    log.set(0, SEGMENT.put(bytes(start) + content))
    begin = chance.choice([start, start, hostile_number(chance)])
    end = chance.choice([SEGMENT_BYTES, hostile_number(chance)])
    tail = codec.Tail(log)
    tail.restart(begin)
    for _ in range(2):
        tail.scan(end)
        numbers = [chance.choice([0, hostile_number(chance)]) for _ in range(3)]
        for queue_id in range(2):
            found = tail.view("t", queue_id, *numbers)
            assert len(found.units) <= 20 * max(0, found.end - found.first)


def try_walk(chance: random.Random, content: bytes) -> None:
    walk = LogWalk(lambda record: hostile_number(chance), 3)
    start = chance.choice([0, 2**62, hostile_number(chance)])
    view = CONTENT.put(content)
    if chance.random() < 0.5:
        walk.group(view, start, start, start + len(content))
        for lane in range(len(walk)):
            walk.fill(Columns(("body",), "b"), lane, 0, view)
        walk.lanes()
        return
    units = UNITS.put(chance.randbytes(20 * 8))
    at, reason = start, WALK_WINDOW
    for _ in range(12):
        at, reason, lane, _ = walk.audit(view, start, at, start + len(content))
        if reason != WALK_WINDOW:
            break
        walk.attach(lane, units, *stretch(chance, 8)[1:])
    walk.lanes()


def try_index(chance: random.Random, content: bytes) -> None:
    slots, entries = chance.choice([1, 3, 16]), chance.choice([2, 5, 40])
    file = bytearray(40 + 4 * slots + 20 * entries)
    if chance.random() < 0.5:
        for at in range(0, 40, 8):
            file[at : at + 8] = (hostile_number(chance) & (1 << 64) - 1).to_bytes(8, "big")
        for at in range(40, len(file)):
            file[at] = chance.choice([0, 0, 1, 255, chance.randrange(256)])
    memory = UNITS.put(bytes(file))
    indexer = store.Indexer()
    try:
        indexer.attach(memory, slots, entries, entries, chance.random() < 0.5)
        start = chance.choice([0, 2**62, hostile_number(chance)])
        indexer.index(CONTENT.put(content), start, start, start + len(content), 100)
    finally:
        indexer.detach()
        times = hostile_number(chance), hostile_number(chance)
        store.index_is_whole(memory, slots, entries)
        store.index_chain(
            memory, slots, entries, chance.randrange(1 << 31), *times, chance.choice([1, 64]),
            chance.choice([-1, 1, entries]), chance.random() < 0.5,
        )  # fmt: skip


def try_put_records(chance: random.Random, content: bytes) -> None:
    """Records out of columns: real ones, with buffers that lie."""
    columns = Columns(COLUMN_NAMES + ARCHIVE_NAMES, "b", check_crc=False)
    columns.scan(content, 0, 0, len(content))
    rows, taken = columns.take()
    by_name = dict(zip(COLUMN_NAMES + ARCHIVE_NAMES, taken, strict=True))
    given = []
    for name in RECORD_FIELDS:
        buffers = [bytes(memoryview(buffer).cast("B")) for buffer in by_name[name][1]]
        if chance.random() < 0.1:
            which = chance.randrange(len(buffers))
            buffers[which] = mutated(chance, buffers[which])
        valid, offsets, data = buffers if len(buffers) == 3 else (None, None, buffers[0])
        given.append((chance.choice([0] * 20 + [1]), valid, offsets, data))
    start = chance.choice([0, 0, 0, hostile_number(chance)])
    put_records(SEGMENT.put(bytes(4096)), start, rows, given)


def try_copy(chance: random.Random, content: bytes) -> None:
    """Frames of a master, whole or not, in a segment that may be too small for what they bring."""
    size = chance.choice([len(content), len(content) + 8, 91, 512, SEGMENT_BYTES])
    segment = SEGMENT.put(bytes(min(size, SEGMENT_BYTES)))
    start = chance.choice([0, 0, 2**62, hostile_number(chance)])
    log = LogAppender(bytes(8), 1 << 20)
    log.attach(segment, start, start, chance.choice([-1, start]))
    copy = store.LogCopy(log, chance.choice([91, 400, 1 << 20]), QueueCursor)
    stream, at = bytearray(), 0
    while at < len(content):
        count = chance.choice([1, 7, 8, 90, 400, len(content)])
        body = content[at : at + count]
        stream += (start + at & (1 << 64) - 1).to_bytes(8, "big") + len(body).to_bytes(4, "big")
        stream += body
        at += len(body)
    hostile = bytes(stream) if chance.random() < 0.7 else mutated(chance, bytes(stream))
    for begin in range(0, len(hostile), piece := chance.choice([1, 11, 100, 1 << 20])):
        copy.feed(CONTENT.put(hostile[begin : begin + piece]))
        while (why := copy.take()) == store.COPY_ROOM and log.remaining >= log.wanted > 0:
            log.reserve_to(log.physical_offset + log.wanted)
        if why != store.COPY_MORE:
            break
    end = log.physical_offset - start
    copy.forget()
    reached, _, _, _, _ = scan(segment, start, start, start + end)
    blank = int.from_bytes(segment[reached - start :][:4], "big")
    assert reached == start + end or reached + blank == start + end == start + len(segment)
    if hostile == stream:
        assert bytes(segment[:end]) == content[:end], "what is laid down is what was sent"
    assert not any(segment[end:]), "something stays behind it"


def try_due(chance: random.Random, content: bytes) -> None:
    """Of a delay level, with queues that are known, are none, or come as they are met."""
    encoder = store.InnerEncoder(size_max=chance.choice([1, 500, 1 << 20]))
    queues: dict[bytes, int] = {}
    view, at = CONTENT.put(content), chance.choice([0, 0, 1, len(content), -1])
    delay = chance.choice([0, 5, 1 << 40])
    while True:
        reason, at, _, detail = store.fill_due(
            encoder, view, at, queues, delay, 10**12, 7, chance.choice([0, 10**9])
        )
        assert 0 <= at <= len(content)
        if reason != store.DELAYS_NEW_QUEUE:
            break
        queues[detail] = chance.choice([len(queues), -1])
    for message in decode(content):
        store.again_properties(message, b"t", b"WAIT\1false\2", chance.random() < 0.5)


BY_CONTENT = (
    try_copy, try_due, try_deliver, try_columns, try_spans, try_tail, try_walk, try_index,
    try_put_records,
)  # fmt: skip


def try_dispatch(chance: random.Random, content: memoryview) -> None:
    published = bytearray(64)
    kernel = store.Dispatcher(array("q", [1_000, 5_000]))
    kernel.add_queue("t", 0, chance.choice([0, 3]), published, 0)
    units = UNITS.put(bytes(20 * 8))
    kernel.attach(0, units, 0, 8)
    begin = chance.choice([0, 1, len(content)])
    kernel.dispatch(content, 0, begin, chance.choice([len(content), len(content) + 1, 0]))


def try_half(chance: random.Random, view: memoryview) -> None:
    end = chance.choice([len(view), len(view) + 1, 1 << 62, hostile_number(chance)])
    at = chance.choice([0, 0, 1, len(view), hostile_number(chance)])
    ends = store.HalfEnds("g", [""], [True], [1], ["t"], [0], [chance.choice([0, 1])], [at])
    start = chance.choice([0, 0, 1, at, hostile_number(chance)])
    if ends.pick(view, start, end, bytearray(2), 0, 1 << 20):
        outcomes = bytearray()
        ends.note(outcomes, chance.choice([0, 1, 1 << 62]), 1 << 10, (1, 2))
    codec.delayed_code(view, array("q", [1] * chance.randrange(3)))


def main(seed: int, count: int, note: Path) -> None:
    chance = random.Random(seed)
    for number in range(count):
        kind = chance.randrange(6 + len(BY_CONTENT))
        batch, batch_count = real_batch(chance)
        content = mutated(chance, batch if kind in (2, 3) else real_records(chance))
        note.write_text(f"seed {seed}, number {number}, kind {kind}: {content.hex()}\n")
        view = CONTENT.put(content)
        try:
            match kind:
                case 0:
                    with contextlib.suppress(codec.RecordDamaged):
                        try_half(random.Random(number), view)
                    try_decode(chance, view)
                case 1:
                    chance.choice([try_scan, try_frames])(chance, view)
                case 2:
                    try_unique_id(chance, view)
                case 3:
                    try_append_batch(chance, view, batch_count)
                case 4:
                    try_gather(chance, content)
                case 5:
                    try_dispatch(chance, view)
                case _:
                    BY_CONTENT[kind - 6](chance, content)
        except TYPED:
            continue
    print("survived")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
