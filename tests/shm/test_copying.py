"""LogCopy: a master's frames become a log, or are refused, wherever they are cut."""

from __future__ import annotations

import mmap
import os
import random
import select
import socket
import struct
import threading
from collections.abc import Iterable, Iterator

import pytest
import reference

from cometmq.shm.kernel import codec, live, store
from cometmq.shm.kernel.live import OwnedCell, QueueCursor
from cometmq.shm.kernel.store import (
    COPY_CLOSED,
    COPY_FRAME,
    COPY_GAP,
    COPY_MORE,
    COPY_RECORD,
    COPY_ROOM,
    LogAppender,
    LogCopy,
    unset_bytes,
)

SEGMENT_BYTES = 1_000
RECORD_MAX = 600
FRAME = struct.Struct(">qi")


def record(at: int, body: bytes = b"b" * 40, **fields: int) -> bytes:
    return reference.encode_record(
        topic="orders", body=body, physical_offset=at, store_timestamp=7, **fields
    )


def log_bytes(segments: int = 3, *, segment_bytes: int = SEGMENT_BYTES, begin: int = 0) -> bytes:
    """Records, and a blank at the end of each segment; what RocketMQ leaves behind one's head may
    be anything, and is copied as well."""
    made = bytearray()
    chance = random.Random(3)
    number = 0
    while len(made) < segments * segment_bytes:
        left = segment_bytes - len(made) % segment_bytes
        each = record(begin + len(made), bytes([number % 256]) * (number * 7 % 90),
                      queue_offset=number)  # fmt: skip
        if len(each) + 8 > left:
            made += reference.encode_blank(left) + chance.randbytes(left - 8)
        else:
            made += each
            number += 1
    return bytes(made)


def frame(at: int, body: bytes) -> bytes:
    return FRAME.pack(at, len(body)) + body


class Copying:
    """A copy in memory; file space comes in pieces, the next segment when it is asked for."""

    def __init__(self, *, begin: int = 0, segment_bytes: int = SEGMENT_BYTES, step: int = 0):
        self.segment_bytes = segment_bytes
        self.step = step or segment_bytes
        self.segments = {begin: bytearray(segment_bytes)}
        self.begin = begin
        self.log = LogAppender(bytes(8), 1 << 20)
        self.log.attach(self.segments[begin], begin, begin, begin)
        self.queues: dict[tuple[str, int], QueueCursor] = {}
        self.copy = LogCopy(self.log, RECORD_MAX, self._cursor_of)

    def _cursor_of(self, topic: str, queue_id: int) -> QueueCursor:
        assert (topic, queue_id) not in self.queues, "asked once"
        self.queues[topic, queue_id] = QueueCursor(topic, queue_id)
        return self.queues[topic, queue_id]

    def take(self) -> int:
        while (why := self.copy.take()) == COPY_ROOM:
            self._make_room()
        return why

    def _make_room(self) -> None:
        log = self.log
        if log.remaining:
            end = log.segment_start + self.segment_bytes
            least = log.physical_offset + log.wanted
            assert least <= end
            log.reserve_to(min(end, max(least, least // self.step * self.step + self.step)))
            return
        start = log.segment_start + self.segment_bytes
        self.segments[start] = bytearray(self.segment_bytes)
        log.roll(self.segments[start], start, start)

    def feed(self, stream: bytes) -> int:
        """All of it; why it stopped."""
        while stream:
            count = self.copy.feed(stream)
            assert count
            stream = stream[count:]
            if (why := self.take()) != COPY_MORE:
                return why
        return COPY_MORE

    def content(self) -> bytes:
        """What is laid down; behind it there is nothing."""
        end = self.log.physical_offset
        whole = b"".join(bytes(self.segments[start]) for start in sorted(self.segments))
        return whole[: end - self.begin]

    def assert_clean(self) -> None:
        """Once forgotten, no byte of what was not whole stays."""
        self.copy.forget()
        whole = b"".join(bytes(self.segments[start]) for start in sorted(self.segments))
        assert not any(whole[self.log.physical_offset - self.begin :])


def whole_records(log: bytes) -> set[int]:
    """The offsets at which a log may end: behind a record, or a blank with its tail."""
    ends, at = {0}, 0
    while at + 8 <= len(log):
        size, magic = struct.unpack_from(">iI", log, at)
        at += size
        if at > len(log):
            break
        ends.add(at)
        assert magic
    return ends


LOG = log_bytes()


def test_one_frame_for_each_segment() -> None:
    copying = Copying()
    for start in range(0, len(LOG), SEGMENT_BYTES):
        assert copying.feed(frame(start, LOG[start : start + SEGMENT_BYTES])) == COPY_MORE
    assert copying.content() == LOG
    assert copying.copy.frames == 3
    cursor = copying.queues["orders", 0]
    records = [each for each in reference_records(LOG)]
    assert cursor.next_offset == len(records)
    assert copying.log.count == len(records)
    assert copying.log.last_store_timestamp == 7


def reference_records(log: bytes) -> list[codec.Message]:
    found = []
    for start in range(0, len(log), SEGMENT_BYTES):
        end = codec.scan(log, 0, start, start + SEGMENT_BYTES)[0]
        found += codec.decode(log[start:end])
    return found


def test_frames_cut_at_every_byte() -> None:
    """And received in two pieces at every byte: nothing but whole records is ever laid down."""
    ends = whole_records(LOG)
    for cut in range(1, len(LOG)):
        copying = Copying(step=64)
        start = cut // SEGMENT_BYTES * SEGMENT_BYTES
        for begin in range(0, start, SEGMENT_BYTES):
            copying.feed(frame(begin, LOG[begin : begin + SEGMENT_BYTES]))
        if cut > start:
            assert copying.feed(frame(start, LOG[start:cut])) == COPY_MORE
        end = copying.log.physical_offset
        assert end == max(each for each in ends if each <= cut), cut
        assert copying.content() == LOG[:end]
        assert copying.copy.end == cut
        if cut - end >= 8:  # a power cut would leave nothing that looks like a record
            at = end % SEGMENT_BYTES
            assert not any(copying.segments[end - at][at : at + 8])
        assert copying.feed(frame(cut, LOG[cut : start + SEGMENT_BYTES])) == COPY_MORE
        assert copying.content() == LOG[: start + SEGMENT_BYTES]


def test_a_stream_in_pieces_of_any_size() -> None:
    stream = b"".join(
        frame(at, LOG[at : at + 100]) + frame(at + 100, b"") for at in range(0, len(LOG), 100)
    )
    for size in [1, 2, 3, 11, 12, 13, 111, 112, 113, 999, len(stream)]:
        copying = Copying(step=16)
        for at in range(0, len(stream), size):
            assert copying.feed(stream[at : at + size]) == COPY_MORE
        assert copying.content() == LOG, size


def test_a_lost_connection_leaves_nothing_of_what_was_not_whole() -> None:
    for cut in range(0, 2 * SEGMENT_BYTES, 7):
        copying = Copying()
        start = cut // SEGMENT_BYTES * SEGMENT_BYTES
        for begin in range(0, start, SEGMENT_BYTES):
            copying.feed(frame(begin, LOG[begin : begin + SEGMENT_BYTES]))
        copying.feed(frame(start, LOG[start : start + SEGMENT_BYTES])[: cut - start + 5])
        copying.assert_clean()
        end = copying.log.physical_offset
        assert copying.copy.end == end
        rest = LOG[end : end // SEGMENT_BYTES * SEGMENT_BYTES + SEGMENT_BYTES]
        assert copying.feed(frame(end, rest)) == COPY_MORE
        assert copying.content() == LOG[: end + len(rest)]


@pytest.mark.parametrize("wrong", [-1, 1, -SEGMENT_BYTES, 2**62, -(2**63), 0x7FFFFFFFFFFFFFFF])
def test_a_frame_that_is_not_at_the_end(wrong: int) -> None:
    copying = Copying()
    first = len(record(0, b""))
    copying.feed(frame(0, LOG[:first]))
    at = wrong if abs(wrong) > 10_000 else first + wrong
    assert copying.feed(frame(at, LOG[first:200])) == COPY_GAP
    assert copying.copy.frame_offset == at
    assert copying.content() == LOG[:first]
    copying.assert_clean()


@pytest.mark.parametrize("size", [-1, -(2**31), 2**31 - 1, store.COPY_FRAME_MAX + 1])
def test_a_frame_of_an_impossible_size(size: int) -> None:
    copying = Copying()
    assert copying.feed(FRAME.pack(0, size) + LOG[:500]) == COPY_FRAME
    assert copying.copy.frame_bytes == size
    assert copying.content() == b""


def flipped(content: bytes, at: int, bit: int = 0x40) -> bytes:
    return content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]


def refusals() -> Iterable[tuple[str, bytes]]:
    good = record(0)
    yield "no record magic: 0xdaa320e7", flipped(good, 7)
    yield "wrong body CRC", flipped(good, len(good) - 40)
    yield "impossible size", struct.pack(">i", 90) + good[4:]
    yield "impossible size", struct.pack(">i", RECORD_MAX + 1) + good[4:]
    yield "impossible size", struct.pack(">i", -5) + good[4:]
    yield "impossible size", struct.pack(">i", 2**31 - 1) + good[4:]
    yield "stored position is not its place: it says 64", record(64)
    yield "its topic, queue id or queue offset", record(0, queue_id=-1)
    yield "fields and size disagree", struct.pack(">i", len(good) + 1) + good[4:] + b"x"
    yield "a blank of 12 bytes where 1000 are left", reference.encode_blank(12) + bytes(20)
    yield "a blank of -1 bytes", struct.pack(">iI", -1, 0xCBD43194) + bytes(20)
    yield "no record magic: 0x00000000", bytes(100)


@pytest.mark.parametrize(("told", "body"), list(refusals()))
def test_what_is_no_record_is_refused(told: str, body: bytes) -> None:
    copying = Copying()
    assert copying.feed(frame(0, body)) == COPY_RECORD
    assert copying.copy.why.startswith(told), copying.copy.why
    assert copying.content() == b""
    copying.assert_clean()
    assert copying.feed(frame(0, LOG[:SEGMENT_BYTES])) == COPY_MORE
    assert copying.content() == LOG[:SEGMENT_BYTES]


def test_no_room_is_left_that_no_blank_fits_into() -> None:
    """RocketMQ leaves 8 bytes at least. A record may fill its segment."""
    for left in range(12):
        copying = Copying(segment_bytes=len(record(0)) + left)
        why = copying.feed(frame(0, record(0)))
        assert why == (COPY_RECORD if 0 < left < 8 else COPY_MORE), left
        if left == 0:
            assert copying.feed(frame(len(record(0)), record(len(record(0))))) == COPY_MORE
            assert len(copying.segments) == 2


def test_a_copy_that_begins_in_the_middle() -> None:
    begin = 7 * SEGMENT_BYTES
    log = log_bytes(begin=begin)
    copying = Copying(begin=begin)
    for at in range(0, len(log), SEGMENT_BYTES):
        assert copying.feed(frame(begin + at, log[at : at + SEGMENT_BYTES])) == COPY_MORE
    assert copying.content() == log


def test_prepared_messages_take_no_place_in_a_queue() -> None:
    copying = Copying()
    copying.feed(frame(0, record(0, sys_flag=4, queue_offset=900)))
    assert not copying.queues
    assert copying.log.count == 1


def test_nothing_can_be_laid_down_without_a_segment() -> None:
    log = LogAppender(bytes(8), 1 << 20)
    copy = LogCopy(log, RECORD_MAX, lambda *_: None)
    assert copy.take() == COPY_MORE
    assert copy.feed(frame(0, LOG[:100])) == 112
    assert copy.take() == COPY_ROOM
    segment = bytearray(SEGMENT_BYTES)
    log.attach(segment, 0, 0)
    assert copy.take() == COPY_MORE
    assert copy.end == 100


def test_it_takes_what_a_socket_holds() -> None:
    here, there = socket.socketpair()
    with here, there:
        copying = Copying()
        assert copying.copy.receive(here.fileno()) == -1
        there.sendall(frame(0, LOG[:SEGMENT_BYTES]))
        assert copying.copy.receive(here.fileno()) == 12 + SEGMENT_BYTES
        assert copying.take() == COPY_MORE
        assert copying.content() == LOG[:SEGMENT_BYTES]
        there.close()
        assert copying.copy.receive(here.fileno()) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        copying.copy.receive(here.fileno())


# --- while its process sleeps ---------------------------------------------------------------------


class Sleeping(Copying):
    """One that publishes: its `follow` runs here, and the test is the other end."""

    def __init__(self) -> None:
        super().__init__()
        memory = mmap.mmap(-1, 4 * live.COUNTER_BYTES)
        self.doorbell = os.eventfd(0, os.EFD_NONBLOCK)
        self.wrote, *more = (
            OwnedCell(memory, number * live.COUNTER_BYTES, [self.doorbell]) for number in range(4)
        )
        self.log.publishes(self.wrote, more[0], more[1], more[2], 1 << 20, lambda: None)
        self.asleep = live.SleepCell(memory, 0, 0)
        self.here, self.there = socket.socketpair()
        self.other = os.eventfd(0, os.EFD_NONBLOCK)

    def follow(self, timeout_s: float = -1) -> int:
        """Room is made, as its actor would."""
        while (why := self.copy.follow(self.here.fileno(), self.other, timeout_s)) == COPY_ROOM:
            if (why := self.take()) != COPY_MORE:
                return why
            self.log.publish()
            self.log.wake()
        return why

    def close(self) -> None:
        for each in (self.here, self.there):
            each.close()
        for descriptor in (self.other, self.doorbell):
            os.close(descriptor)


@pytest.fixture
def sleeping() -> Iterator[Sleeping]:
    made = Sleeping()
    yield made
    made.close()


def test_what_comes_in_its_sleep_is_laid_down_and_told(sleeping: Sleeping) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    def send() -> None:
        """However it is cut."""
        stream = b"".join(frame(at, LOG[at : at + 700]) for at in range(0, len(LOG), 700))
        while stream:
            count = chance.randrange(1, 900)
            sleeping.there.sendall(stream[:count])
            stream = stream[count:]
        os.eventfd_write(sleeping.other, 1)

    thread = threading.Thread(target=send)
    thread.start()
    assert sleeping.follow() == COPY_MORE
    thread.join()
    assert sleeping.follow(0) == COPY_MORE  # what came just before
    assert sleeping.content() == LOG
    assert sleeping.wrote.value == len(LOG)


def test_who_sleeps_on_the_log_is_rung(sleeping: Sleeping) -> None:
    sleeping.asleep.arm()
    sleeping.there.sendall(frame(0, LOG[:SEGMENT_BYTES]))
    assert sleeping.follow(0) == COPY_MORE
    assert select.select([sleeping.doorbell], [], [], 0)[0]


def test_its_time_comes_however_much_there_is_to_take(sleeping: Sleeping) -> None:
    assert sleeping.follow(0) == COPY_MORE
    assert sleeping.follow(0.01) == COPY_MORE
    ended = threading.Event()

    def send() -> None:
        empty = frame(0, b"") * 1_000
        while not ended.is_set():
            try:
                sleeping.there.send(empty)
            except OSError:
                return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        assert sleeping.follow(0.05) == COPY_MORE
    finally:
        ended.set()
        sleeping.here.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_what_ends_its_sleep(sleeping: Sleeping) -> None:
    sleeping.there.sendall(frame(5, b"12345"))
    assert sleeping.follow() == COPY_GAP
    assert sleeping.take() == COPY_GAP  # it is the same until it is forgotten
    sleeping.copy.forget()
    sleeping.there.sendall(frame(0, b"\xff" * 100))
    assert sleeping.follow() == COPY_RECORD
    assert sleeping.take() == COPY_RECORD
    sleeping.copy.forget()
    assert sleeping.wrote.value == 0
    sleeping.there.sendall(frame(0, LOG[:SEGMENT_BYTES])[:-1])
    sleeping.there.close()
    assert sleeping.follow() == COPY_CLOSED
    assert 0 < sleeping.wrote.value < SEGMENT_BYTES
    sleeping.here.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        sleeping.copy.follow(1 << 20, sleeping.other, -1)


def test_only_who_publishes_can_follow() -> None:
    with pytest.raises(ValueError, match="publishes nothing"):
        Copying().copy.follow(0, 0, 0)


def test_memory_has_a_bound() -> None:
    copying = Copying()
    room = store.COPY_STREAM_BYTES
    assert copying.copy.feed(bytes(room + 5)) == room
    assert copying.copy.feed(b"x") == 0
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"more")
        assert copying.copy.receive(here.fileno()) == -1


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_memory_that_is_not_cleared_is_all_ones_own(size: int) -> None:
    one, other = unset_bytes(size), unset_bytes(size)
    one[:], other[:] = b"1" * size, b"2" * size
    assert one == b"1" * size


def test_memory_of_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        unset_bytes(-1)
