"""What is in a body, so that every message can be told from all others and checked.

    0   u64  intended send time, ns of CLOCK_MONOTONIC; 0 in throughput runs
    8   u64  sequence of its producer: 0, 1, ...
   16   u32  producer
   20   u32  seed of the run
   24   u32  CRC-32 of the body from byte 32 on
   28   u32  CRC-32 of the first 28 bytes
   32        half random bytes, half zeros, from a pool of bodies made from the seed

Little-endian. The pool has 1,000 bodies, 100 above 16 KiB, as OpenMessaging Benchmark has it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, cycle, islice
from operator import add
from struct import Struct, pack_into
from typing import Any, Final
from zlib import crc32

from cometmq.bench.extra import load

STAMP: Final = Struct("<QQIIII")
STAMP_BYTES: Final = STAMP.size
_FIRST: Final = Struct("<QQIII")
_CHECKED: Final = _FIRST.size  # bytes that the second CRC covers
POOL: Final = 1_000
POOL_OF_LARGE: Final = 100
LARGE_BYTES: Final = 16_384
GROUP_BYTES: Final = 1 << 30  # bodies that are made at once
_OBJECT_BYTES: Final = 41  # of a bytes object in a list, beside its content
_TOGETHER: Final = 8192  # stamps that are made in one go: they stay in the cache

assert STAMP_BYTES == 32


class Stamper:
    """Makes the bodies of one producer.

    Args:
        size: of a body; at least 32 bytes.
        share: of the bytes behind the stamp that are random; the rest are zeros.
        payload: these bytes behind the stamp instead, cut or repeated.
    """

    def __init__(
        self, size: int, producer: int, seed: int, *, share: float = 0.5, pool: int = 0,
        payload: bytes = b"",
    ) -> None:  # fmt: skip
        if size < STAMP_BYTES:
            raise ValueError(f"size {size}: a body has at least {STAMP_BYTES} bytes")
        self.size, self.producer, self.seed = size, producer, seed
        count = pool or (POOL_OF_LARGE if size > LARGE_BYTES else POOL)
        rests = _rests(size - STAMP_BYTES, seed, share, count, payload)
        self._rests = [(crc32(rest), rest) for rest in rests]

    def body(self, sequence: int, intended_ns: int = 0) -> bytes:
        crc, rest = self._rests[sequence % len(self._rests)]
        first = _FIRST.pack(intended_ns, sequence, self.producer, self.seed, crc)
        return first + crc32(first).to_bytes(4, "little") + rest

    def bodies(self, start: int, stop: int) -> list[bytes]:
        """As `body`, for throughput runs."""
        return list(self._joined(start, self.stamps(start, stop)))

    def stream(
        self, total: int, ready: int, intended_ns: Callable[[int, int], Any]
    ) -> Iterator[bytes]:
        """All bodies, each put together when it is asked for. The first `ready` stamps are made
        now, and the others so many at a time.

        Args:
            intended_ns: the times of the messages from one number to another.
        """

        def stamps(start: int) -> list[bytes]:
            stop = min(total, start + ready)
            return self.stamps(start, stop, intended_ns(start, stop))

        first = stamps(0)
        others = (self._joined(start, stamps(start)) for start in range(ready, total, ready))
        return chain(self._joined(0, first), chain.from_iterable(others))

    def _joined(self, start: int, stamps: list[bytes]) -> Iterator[bytes]:
        rests = [rest for _, rest in self._rests]
        return map(
            add,
            chain.from_iterable(chain.from_iterable(map(_STAMP.iter_unpack, stamps))),
            islice(cycle(rests), start % len(rests), None),
        )

    def stamps(self, start: int, stop: int, intended_ns: Any = None) -> list[bytes]:
        """The first 32 bytes of these bodies, one behind the other in a few pieces."""
        numpy = load("numpy")
        crcs = numpy.array([crc for crc, _ in self._rests], numpy.uint32)
        pieces = []
        for begin in range(start, stop, _TOGETHER):
            end = min(stop, begin + _TOGETHER)
            rows = numpy.zeros(end - begin, _ROW)
            if intended_ns is not None:
                rows["intended"] = intended_ns[begin - start : end - start]
            rows["sequence"] = numpy.arange(begin, end)
            rows["producer"], rows["seed"] = self.producer, self.seed
            rows["rest"] = crcs[rows["sequence"] % len(crcs)]
            rows["first"] = _first_crcs(rows)
            pieces.append(rows.tobytes())
        return pieces

    @property
    def group_count(self) -> int:
        """So many bodies are held at once in a throughput run."""
        return max(1, GROUP_BYTES // (self.size + _OBJECT_BYTES))


def _rests(size: int, seed: int, share: float, count: int, payload: bytes) -> list[bytes]:
    if payload:
        return [(payload * (size // len(payload) + 1))[:size]]
    source = random.Random(seed)
    filled = round(size * share)
    return [source.randbytes(filled) + bytes(size - filled) for _ in range(count)]


# --- many at once ---------------------------------------------------------------------------------

_FEW: Final = 100  # bodies that are checked sooner one by one
_STAMP: Final = Struct(f"{STAMP_BYTES}s")
_ROW: Final = [("intended", "<u8"), ("sequence", "<u8"), ("producer", "<u4"), ("seed", "<u4"),
               ("rest", "<u4"), ("first", "<u4")]  # fmt: skip


@cache
def _tables() -> list[Any]:
    """What each pair of bytes adds to the CRC of 28 zeros, by their place and value."""
    numpy = load("numpy")
    zeros = bytes(_CHECKED)
    of_zeros = crc32(zeros)
    single = [
        numpy.array(
            [
                crc32(zeros[:at] + bytes([value]) + zeros[at + 1 :]) ^ of_zeros
                for value in range(256)
            ],
            numpy.uint32,
        )
        for at in range(_CHECKED)
    ]
    return [(single[at + 1][:, None] ^ single[at][None, :]).ravel() for at in range(0, _CHECKED, 2)]


def _first_crcs(rows: Any) -> Any:
    """CRC-32 of the first 28 bytes of each row. A CRC is linear, so that bytes count by their
    place: 14 look-ups for many rows take less time than one call of zlib for each."""
    numpy = load("numpy")
    pairs = rows.view("<u2").reshape(len(rows), -1)
    crcs = numpy.full(len(rows), crc32(bytes(_CHECKED)), numpy.uint32)
    for column, table in enumerate(_tables()):
        crcs ^= table[pairs[:, column]]
    return crcs


class Verifier:
    """Counts what a consumer gets, and what is wrong with it.

    `add` takes messages of one queue in the order of their coming. A sequence that was seen before
    is a duplicate; one below its predecessor of the same producer and queue is out of order.

    Args:
        seed: of the run; a message of another run is counted as `foreign`.
        again: if not 0, one producer sends so many bodies again and again, to one queue: whatever
            is not the next one is out of order.
    """

    def __init__(self, seed: int, *, again: int = 0) -> None:
        self.seed = seed
        self._again, self._next = again, 0
        self.received = self.distinct = self.duplicates = 0
        self.out_of_order = self.bad_crc = self.foreign = 0
        self._seen: dict[int, bytearray] = {}  # by producer: a byte for each sequence
        self._last: dict[tuple[int, Any], int] = {}
        _tables()  # now, and not while a clock runs

    def add(self, queue: Any, body: bytes | memoryview) -> tuple[int, int, int] | None:
        """(intended_ns, producer, sequence) of a body that is whole and of this run."""
        self.received += 1
        if len(body) < STAMP_BYTES:
            self.bad_crc += 1
            return None
        intended_ns, sequence, producer, seed, crc, first_crc = STAMP.unpack_from(body)
        view = memoryview(body)
        if crc32(view[:_CHECKED]) != first_crc or crc32(view[STAMP_BYTES:]) != crc:
            self.bad_crc += 1
            return None
        if seed != self.seed:
            self.foreign += 1
            return None
        self._count(producer, sequence, queue)
        return intended_ns, producer, sequence

    def add_all(self, queue: Any, bodies: Sequence[bytes | memoryview]) -> tuple[Any, Any]:
        """As `add`: arrays of intended_ns and sequence, both 0 for what is no body of this run.

        What is as it should be is counted at once; where anything is not, one by one.
        """
        numpy = load("numpy")
        heads = b"".join([body[:STAMP_BYTES] for body in bodies])
        if len(bodies) >= _FEW and len(heads) == len(bodies) * STAMP_BYTES:
            rows = numpy.frombuffer(heads, _ROW)
            crcs = numpy.array([crc32(body[STAMP_BYTES:]) for body in bodies], numpy.uint32)
            if self._are_whole(rows, crcs) and self._are_new(rows, queue):
                self.received += len(bodies)
                self.distinct += len(bodies)
                return rows["intended"], rows["sequence"]
        found = [self.add(queue, body) or (0, 0, 0) for body in bodies]
        columns = numpy.array(found, numpy.uint64).reshape(-1, 3)
        return columns[:, 0], columns[:, 2]

    def _are_whole(self, rows: Any, rests: Any) -> bool:
        good = (rows["first"] == _first_crcs(rows)) & (rows["rest"] == rests)
        return bool((good & (rows["seed"] == self.seed)).all())

    def _are_new(self, rows: Any, queue: Any) -> bool:
        """Whether each sequence is above the one before; then they are noted as seen."""
        numpy = load("numpy")
        if self._again:
            expected = (self._next + numpy.arange(len(rows))) % self._again
            if (rows["sequence"] != expected).any():
                return False
            self._next = (self._next + len(rows)) % self._again
            return True
        producers = [
            (int(each), rows["sequence"][rows["producer"] == each])
            for each in numpy.unique(rows["producer"])
        ]
        if not all(self._rises(producer, queue, found) for producer, found in producers):
            return False
        for producer, found in producers:
            numpy.frombuffer(self._seen_of(producer), numpy.uint8)[found] = 1
            self._last[producer, queue] = int(found[-1])
        return True

    def _rises(self, producer: int, queue: Any, found: Any) -> bool:
        if found[0] <= self._last.get((producer, queue), -1) or (found[1:] <= found[:-1]).any():
            return False
        numpy = load("numpy")
        seen = self._seen_of(producer, int(found[-1]))
        return not numpy.frombuffer(seen, numpy.uint8)[found].any()

    def _seen_of(self, producer: int, sequence: int = 0) -> bytearray:
        """With room for this sequence."""
        seen = self._seen.get(producer)
        if seen is None:
            seen = self._seen[producer] = bytearray(1 << 16)
        if sequence >= len(seen):
            seen.extend(bytes(max(len(seen), sequence + 1 - len(seen))))
        return seen

    def _count(self, producer: int, sequence: int, queue: Any) -> None:
        if self._again:
            self.distinct += 1
            self.out_of_order += sequence != self._next
            self._next = (sequence + 1) % self._again
            return
        seen = self._seen_of(producer, sequence)
        if seen[sequence]:
            self.duplicates += 1
            return
        seen[sequence] = 1
        self.distinct += 1
        last = self._last.get((producer, queue), -1)
        if sequence < last:
            self.out_of_order += 1
        else:
            self._last[producer, queue] = sequence

    def result(self, expect: int) -> dict[str, int]:
        """The fields of a worker's result. `expect`: distinct messages that were acknowledged."""
        return {
            "received": self.received,
            "distinct": self.distinct,
            "duplicates": self.duplicates,
            "out_of_order": self.out_of_order,
            "bad_crc": self.bad_crc + self.foreign,
            "lost": max(0, expect - self.distinct),
        }


def damaged(body: bytes) -> bytes:
    """The body with one bit turned, for tests of the check."""
    copy = bytearray(body)
    pack_into("B", copy, len(copy) - 1, copy[-1] ^ 1)
    return bytes(copy)
