"""Timers: how far they are delivered, and what a timer may say. Pure: no I/O."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Set
from typing import Final

import msgspec

from cometmq.protocol.errors import StoreDamaged

RECALL_MARGIN_MS: Final = 100  # so long before a message is due, it is as good as delivered
WINDOW_MS: Final = 172_800_000  # RocketMQ timerRollWindowSlot, in seconds
BACK_MS: Final = 2_000  # a clock that goes back by less is waited for
PASSED_MAX: Final = 8
PLACE_MAX: Final = (1 << 63) - 1


Move = tuple[int, int, int, int]


class TimersState(msgspec.Struct, frozen=True, array_like=True):
    """What is delivered: of the records before the queue offset `frontier`, those that are due
    before `at_due`, or then and not behind the physical offset `at_place`; of those behind, none.

    `passed` has (due, place, end): when the clock was set back, that much was delivered of what
    lies before that end.

    `aheads` has by how many ms the wall clock is ahead of the clock of that number, which nobody
    sets, and was before; the last one counts. `moves` has (end, clock, ahead, until): what lies
    before that end and was due earlier, where the wall clock is so far ahead, was stored anew with
    its new time; by its own it would be due by `until`. `moving`: the last of them goes on.
    """

    at_due: int = 0
    at_place: int = -1
    frontier: int = 0
    passed: list[tuple[int, int, int]] = []
    clock: int = -1
    aheads: list[int] = []
    moves: list[Move] = []
    moving: bool = False

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, note: bytes) -> TimersState:
        """Raises StoreDamaged."""
        try:
            return msgspec.msgpack.decode(note, type=cls)
        except msgspec.DecodeError as error:
            raise StoreDamaged(
                f"the log does not tell how far timers are delivered: {error}"
            ) from None

    def joined(self, read_ms: int, queue_offset: int) -> TimersState:
        """With what RocketMQ's timercheck says, if that is of later."""
        if read_ms <= self.at_due:
            return self
        passed = [each for each in self.passed if each[0] > read_ms]
        return msgspec.structs.replace(
            self,
            at_due=read_ms,
            at_place=PLACE_MAX,
            frontier=max(self.frontier, queue_offset),
            passed=passed,
        )


def window_ms(reserved_hours: int) -> int:
    """What waits longer is stored anew meanwhile, well before the log is deleted where it lies."""
    return min(WINDOW_MS, reserved_hours * 3_600_000 // 2)


def rolled(raw_properties: bytes) -> bytes:
    """The properties of a record that is stored anew; they count how often."""
    kept = [
        each
        for each in raw_properties.split(b"\2")
        if each and not each.startswith((b"TIMER_ROLL_TIMES\1", b"__CRC32#\1"))
    ]
    times = next(
        (
            each.partition(b"\1")[2]
            for each in raw_properties.split(b"\2")
            if each.startswith(b"TIMER_ROLL_TIMES\1")
        ),
        b"0",
    )
    count = int(times) + 1 if times.isdigit() and len(times) < 10 else 1
    return b"\2".join([*kept, b"TIMER_ROLL_TIMES\1%d" % count]) + b"\2"


def retimed(raw_properties: bytes, due_ms: int) -> bytes:
    """The properties of a record that is stored anew with another time."""
    old = (b"TIMER_DELIVER_MS\1", b"TIMER_OUT_MS\1")
    kept = [each for each in rolled(raw_properties).split(b"\2") if not each.startswith(old)]
    due_ms = max(due_ms, 1)
    new = b"TIMER_DELIVER_MS\1%d\2TIMER_OUT_MS\1%d\2" % (due_ms, (due_ms - 1) // 1000 * 1000)
    return b"\2".join(kept) + new


def recalled_key(properties: Mapping[str, str]) -> bytes:
    """What a record recalls: a unique key, or topic+unique key; b"": nothing."""
    return properties.get("TIMER_DEL_UNIQKEY", "").encode()


def is_recalled(properties: Mapping[str, str], keys: Set[bytes]) -> bool:
    """Whether a record that waits is meant by one of them."""
    if not keys:
        return False
    key, topic = properties.get("UNIQ_KEY", ""), properties.get("REAL_TOPIC", "")
    return key.encode() in keys or f"{topic}+{key}".encode() in keys


class Recalls:
    """Keys of what is not to be delivered, each until a second has passed."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self._until: list[tuple[int, bytes]] = []  # a heap

    def add(self, key: bytes, until: int) -> None:
        if key and key not in self.keys:
            self.keys.add(key)
            heapq.heappush(self._until, (until, key))

    def forget(self, second: int) -> None:
        """What is due from that second on goes on."""
        while self._until and self._until[0][0] < second:
            self.keys.discard(heapq.heappop(self._until)[1])
