"""What is sent to followers: which bytes are checked, and when again."""

from __future__ import annotations

import zlib
from typing import Any
from unittest.mock import Mock

import pytest

from cometmq.actors.replication.core.actions import Ship
from cometmq.actors.replication.core.frames import Bytes
from cometmq.actors.replication.deeds import RECENT_FRAMES, Deeds
from cometmq.protocol.errors import StoreDamaged


class FakeLog:
    """Bytes that are damaged once the test says so: then they do not come through a check."""

    def __init__(self) -> None:
        self.content = bytearray(range(200))
        self.is_damaged = False
        self.checks = 0

    def read(self, offset: int, end: int, *, was_read: bool = False) -> memoryview:
        if not was_read:
            self.checks += 1
            if self.is_damaged:
                raise StoreDamaged("a record does not hold")
        return memoryview(bytes(self.content))[offset:end]

    def damage(self) -> None:
        self.is_damaged = True
        self.content[5] ^= 1


class Rig:
    def __init__(self) -> None:
        self.log = FakeLog()
        self.sent: list[tuple[str, Bytes, bytes]] = []
        peers = Mock()
        peers.send = lambda to, frame, content: self.sent.append((to, frame, bytes(content)))
        others: Any = {
            name: Mock()
            for name in (
                "books", "log_line", "engine", "room", "runs", "said", "on_laid_down", "on_stop"
            )
        }  # fmt: skip
        log: Any = self.log
        self.deeds = Deeds("orders", peers=peers, log_view=log, **others)

    def ship(self, to: str, offset: int = 0, length: int = 100) -> tuple[str, Bytes, bytes]:
        assert self.deeds.do(Ship(to, 3, 7, offset, length, 0))
        return self.sent[-1]


def test_a_frame_is_checked_once_for_all_followers() -> None:
    rig = Rig()
    for to in ("n1", "n2"):
        name, frame, content = rig.ship(to)
        assert (name, frame.offset, frame.length) == (to, 0, 100)
        assert frame.crc == zlib.crc32(content)
    assert rig.log.checks == 1
    rig.ship("n1", 100, 50)
    rig.ship("n2", 100, 60)  # another one, though it begins there as well
    assert rig.log.checks == 3


def test_what_is_damaged_since_has_another_crc_and_is_found_when_asked_for_again() -> None:
    rig = Rig()
    rig.ship("n1")
    rig.log.damage()
    _, frame, content = rig.ship("n2")
    assert frame.crc != zlib.crc32(content)  # so n2 refuses it, and begins a new session
    with pytest.raises(StoreDamaged):
        rig.ship("n2")


def test_what_is_not_recent_is_checked_again() -> None:
    rig = Rig()
    for length in range(1, RECENT_FRAMES + 2):
        rig.ship("n1", length=length)
    checks = rig.log.checks
    rig.ship("n2", length=RECENT_FRAMES + 1)
    assert rig.log.checks == checks
    rig.ship("n2", length=1)
    assert rig.log.checks == checks + 1
