"""Throws bytes at the native kernel; run in a process of its own, for a crash kills it. No tests.

Each input is written to a file before it is used, so that whoever finds this process dead knows
what killed it.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from pathlib import Path

import reference

from cometmq.shm import _kernel
from cometmq.shm._kernel import (
    BatchEncoder,
    LogAppender,
    LogView,
    QueueCursor,
    decode,
    gather,
    scan,
    unique_id,
)

SEGMENT_BYTES = 65_536
PROT_NONE = 0
# What a caller is told of bytes that are none of ours.
TYPED = (
    _kernel.RecordDamaged,
    _kernel.BatchIllegal,
    _kernel.RecordTooLarge,
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
            properties=b"TAGS\x01a\x02KEYS\x01k\x02"[: chance.randrange(20)],
            queue_offset=index,
            physical_offset=len(made),
            store_timestamp=1,
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


def look_at(message: _kernel.Message) -> None:
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
        chance.choice([start + len(content) // 2, SEGMENT_BYTES, 2**62, 0]),
        (limit, limit, chance.choice([1, 800, 2**62, -1]), 2**40, limit, limit, limit, limit),
        chance.choice([None, (97,), (97, 0), ()]), chance.random() < 0.5,
    )  # fmt: skip


def try_dispatch(chance: random.Random, content: memoryview) -> None:
    published = bytearray(64)
    kernel = _kernel.Dispatcher()
    kernel.add_queue("t", 0, chance.choice([0, 3]), published, 0)
    units = UNITS.put(bytes(20 * 8))
    kernel.attach(0, units, 0, 8)
    begin = chance.choice([0, 1, len(content)])
    kernel.dispatch(content, 0, begin, chance.choice([len(content), len(content) + 1, 0]))


def main(seed: int, count: int, note: Path) -> None:
    chance = random.Random(seed)
    for number in range(count):
        kind = chance.randrange(6)
        batch, batch_count = real_batch(chance)
        content = mutated(chance, batch if kind in (2, 3) else real_records(chance))
        note.write_text(f"seed {seed}, number {number}, kind {kind}: {content.hex()}\n")
        view = CONTENT.put(content)
        try:
            match kind:
                case 0:
                    try_decode(chance, view)
                case 1:
                    try_scan(chance, view)
                case 2:
                    try_unique_id(chance, view)
                case 3:
                    try_append_batch(chance, view, batch_count)
                case 4:
                    try_gather(chance, content)
                case 5:
                    try_dispatch(chance, view)
        except TYPED:
            continue
    print("survived")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
