"""What a consumer's worker has got, and what it has not yet checked.

A client that hands out messages is not to be charged for what the harness does with them. Python's
collector would look at every message that is held, again and again, and memory that is taken from
the system while the clock runs costs more than most messages do: so what is held is kept from the
collector, and the memory for it is there before, and stays. All clients in Python have it so.
"""

from __future__ import annotations

import ctypes
import gc
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

from cometmq.bench.extra import load
from cometmq.bench.open_loop import clock_ns
from cometmq.bench.stamps import Verifier

HELD_BYTES_MAX: Final = 256 << 20  # unchecked messages, before the clock is stopped to check them
INLINE_COUNT: Final = 256  # that are checked together while the clock runs: 0.2 ms
TOGETHER: Final = 8192  # that are checked together while it does not
OBJECT_BYTES: Final = 256  # of a message beside its body, roughly
BLOCK_BYTES: Final = 512  # the largest that Python's own allocator gives
ARENA_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 1 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_MMAP_BYTES: Final = 32 << 20  # the largest that it takes

Pairs = Iterable[tuple[Any, bytes | memoryview]]


class Source(Protocol):
    def split(self, messages: Sequence[Any]) -> Pairs: ...


def held_max(size: int) -> int:
    """So many messages with bodies of this size are held at once."""
    return max(1, HELD_BYTES_MAX // (size + 128))


class Reading:
    """See the module.

    Throughput runs check behind the clock, in groups of at most 256 MiB, for which it is stopped;
    `inline` checks while it runs, as a service would look at its messages.

    Args:
        skip: sequences of the warm-up, which have no latencies.
        expect: messages; memory is made ready for them, at most for a group.
    """

    def __init__(
        self, source: Source, verifier: Verifier, *, size: int, inline: bool, skip: int,
        expect: int,
    ) -> None:  # fmt: skip
        self.verifier = verifier
        self.latencies: array[int] = array("q")
        self.received = self.first_ns = self.last_ns = 0
        self.paused_ns = self.last_paused_ns = 0  # the clock stood so long; before the last message
        self._split, self._inline, self._skip = source.split, inline, skip
        self._held: list[tuple[int, Sequence[Any]]] = []
        self._held_max = INLINE_COUNT if inline else held_max(size)
        self._held_count = 0
        if not inline:
            make_ready(min(expect, self._held_max), size)

    def take(self, messages: Sequence[Any], now: int) -> None:
        self.first_ns = self.first_ns or now
        self.last_ns, self.last_paused_ns = now, self.paused_ns
        self.received += len(messages)
        self._held.append((now, messages))
        self._held_count += len(messages)
        if not self._inline:
            gc.freeze()
        if self._held_count >= self._held_max:
            began = clock_ns()
            self.check()
            self.paused_ns += 0 if self._inline else clock_ns() - began

    def check(self) -> None:
        for queue, nows, bodies in self._by_queue():
            self._note(nows, self.verifier.add_all(queue, bodies))

    def _by_queue(self) -> Iterator[tuple[Any, array[int], list[bytes | memoryview]]]:
        """(queue, when each came, bodies); nothing is held any more."""
        found: dict[Any, tuple[array[int], list[bytes | memoryview]]] = {}
        held, self._held, count = self._held[::-1], [], 0
        while held:
            now, messages = held.pop()
            count += len(messages)
            for queue, body in self._split(messages):
                nows, bodies = found.get(queue) or found.setdefault(queue, (array("q"), []))
                nows.append(now)
                bodies.append(body)
            if count >= TOGETHER or not held:
                yield from ((queue, *both) for queue, both in found.items())
                found, count = {}, 0
        self._held_count = 0

    def _note(self, nows: array[int], found: Any) -> None:
        """`found`: (intended_ns, sequence) of each body, (0, 0) of what is no body."""
        numpy = load("numpy")
        intended, sequences = found
        timed = (intended != 0) & (sequences >= self._skip)
        if timed.any():
            latencies = numpy.asarray(nows, numpy.int64) - intended.astype(numpy.int64)
            self.latencies.frombytes(latencies[timed].tobytes())


def make_ready(count: int, size: int) -> None:
    """Have memory for so many messages, and keep what this process has once had.

    The C library's is kept by its settings, and that of Python's allocator by a few small objects
    that stay in it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # the GNU library
        libc.mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    pieces = [b"1" * PIECE_BYTES for _ in range(count * (size + 128) // PIECE_BYTES)]
    blocks = [bytes(BLOCK_BYTES - 64) for _ in range(count * OBJECT_BYTES // BLOCK_BYTES)]
    _anchors.extend(blocks[:: ARENA_BYTES // BLOCK_BYTES // 4])
    del pieces, blocks


_anchors: list[bytes] = []
