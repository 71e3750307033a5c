"""Check points of RocketMQ's POP: what its broker had given out, and what came back. Pure: no I/O.

A broker notes what it gives out (`ck`) and each acknowledgement (`ack`, `bAck`) as records of its
revive topic; they come there when the time is over, an acknowledgement up to a second after its
check point. What no acknowledgement names was not consumed.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

ACKS_MAX: Final = 100_000  # that no check point has been seen of
MESSAGES_MAX: Final = 1_024  # of a check point; RocketMQ's have at most 32
CHECK_POINT: Final = "ck"
ACKS: Final = ("ack", "bAck")

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Key = tuple[str, int, int, str, int]  # topic, queue id, start offset, group, pop time


class _CheckPoint(msgspec.Struct, frozen=True):
    t: str
    q: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    so: _Number  # start offset
    c: str  # group
    pt: _Number  # pop time, ms
    it: _Number  # invisible for, ms
    n: Annotated[int, msgspec.Meta(ge=0, le=MESSAGES_MAX)] = 0
    d: list[_Number] = []  # the messages' distances from the start offset
    bm: int = 0  # a bit for each that is acknowledged


class _Ack(msgspec.Struct, frozen=True):
    t: str
    q: _Number
    so: _Number
    c: str
    pt: _Number
    ao: _Number = 0
    aol: list[_Number] | None = None


_decode_check_point: Final = msgspec.json.Decoder(_CheckPoint).decode
_decode_ack: Final = msgspec.json.Decoder(_Ack).decode


class CheckPoint:
    """One that is not settled. `place`: its offset in its revive queue."""

    def __init__(self, place: int, found: _CheckPoint) -> None:
        self.place = place
        self.topic, self.queue_id, self.group = found.t, found.q, found.c
        self.due_ms = found.pt + found.it
        distances = found.d[: found.n] or list(range(found.n))
        self.left = {
            found.so + distance for bit, distance in enumerate(distances) if not found.bm >> bit & 1
        }


class ReviveQueue:
    """A revive queue, read from `position` on."""

    def __init__(self, position: int) -> None:
        self.position = position
        self._open: dict[Key, CheckPoint] = {}
        self._acked: dict[Key, set[int]] = {}  # of check points that have not come

    @property
    def done(self) -> int:
        """One past the last record that nothing is left of to be done."""
        return min((each.place for each in self._open.values()), default=self.position)

    def take(self, place: int, kind: str | None, body: bytes) -> bool:
        """The record there. False: it is none that is known, or damaged."""
        self.position = place + 1
        try:
            if kind == CHECK_POINT:
                self._take_check_point(place, _decode_check_point(body))
            elif kind in ACKS:
                self._take_ack(_decode_ack(body))
            else:
                return False
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return True

    def _take_check_point(self, place: int, found: _CheckPoint) -> None:
        key = (found.t, found.q, found.so, found.c, found.pt)
        point = CheckPoint(place, found)
        point.left -= self._acked.pop(key, set())
        if point.left:
            self._open[key] = point

    def _take_ack(self, found: _Ack) -> None:
        key = (found.t, found.q, found.so, found.c, found.pt)
        offsets = {found.ao} if found.aol is None else set(found.aol)
        point = self._open.get(key)
        if point is None:
            if len(self._acked) < ACKS_MAX:
                self._acked.setdefault(key, set()).update(offsets)
            return
        point.left -= offsets
        if not point.left:
            del self._open[key]

    def due(self, now_ms: int) -> list[CheckPoint]:
        """Those whose time was over by then."""
        return [each for each in self._open.values() if each.due_ms <= now_ms]

    def settle(self, point: CheckPoint) -> None:
        """What is left of it comes again, or is gone."""
        self._open = {key: each for key, each in self._open.items() if each is not point}
