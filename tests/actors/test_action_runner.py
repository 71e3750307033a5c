"""What is sent to followers: which bytes are checked, and when again."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from cometmq.actors.replication.core.actions import (
    Action,
    Send,
    Ship,
    StartOver,
    StepDown,
    Truncate,
)
from cometmq.actors.replication.core.frames import Beat, Bytes, Welcome
from cometmq.actors.replication.group.action_runner import RECENT_FRAMES, ActionRunner
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

    def begins_at(self) -> int:
        return 0

    def forget_from(self, offset: int) -> None:
        """It holds on to nothing."""

    def damage(self) -> None:
        self.is_damaged = True
        self.content[5] ^= 1


class Rig:
    def __init__(self) -> None:
        self.log = FakeLog()
        self.sent: list[tuple[str, Any, bytes]] = []
        peers = Mock()
        peers.send = lambda to, frame, content=b"": self.sent.append((to, frame, bytes(content)))
        others: Any = {
            name: Mock()
            for name in (
                "books", "log_line", "engine", "room", "runs", "said", "on_laid_down", "on_stop"
            )
        }  # fmt: skip
        self.books, self.on_stop = others["books"], others["on_stop"]
        log: Any = self.log
        self.log_end = 0  # nobody is behind it
        self.soon: list[Callable[[], object]] = []
        self.deeds = ActionRunner(
            "orders", peers=peers, log_view=log, log_end=lambda: self.log_end,
            call_soon=self.soon.append, **others,
        )  # fmt: skip

    def turn(self) -> list[tuple[str, int]]:
        """One of the actor, and what it has sent to whom: the offset that it names."""
        before, soon = len(self.sent), self.soon[:]
        self.soon.clear()
        for action in soon:
            action()
        return [(to, frame.offset) for to, frame, _ in self.sent[before:]]

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


# --- who is behind ---


def beat(to: str, offset: int) -> Send:
    return Send(to, Beat("orders", 3, 7, offset, 0, 1))


def test_what_is_new_goes_before_what_one_lacks_who_is_behind() -> None:
    rig = Rig()
    rig.log_end = 150
    for offset in (0, 30, 60):
        assert rig.deeds.do(Ship("n1", 3, 7, offset, 30, 0))
    assert not rig.sent
    rig.ship("n2", 100, 50)
    assert [to for to, _, _ in rig.sent] == ["n2"]
    assert rig.turn() == [("n1", 0)]  # and others are heard before the next
    rig.ship("n2", 100, 50)
    assert rig.turn() == [("n1", 30)]
    assert rig.turn() == [("n1", 60)]
    assert not rig.turn()


def test_nothing_overtakes_what_waits_for_the_same_replica() -> None:
    """A Beat that came before the bytes that it tells of would be taken for a gap."""
    rig = Rig()
    rig.log_end = 150
    rig.deeds.do(Ship("n1", 3, 7, 0, 100, 0))
    rig.deeds.do(beat("n1", 100))
    rig.deeds.do(Ship("n1", 3, 7, 100, 50, 0))  # the last one: it would go at once
    rig.deeds.do(beat("n2", 7))
    assert [(to, frame.offset) for to, frame, _ in rig.sent] == [("n2", 7)]
    assert [rig.turn() for _ in range(4)] == [[("n1", 0)], [("n1", 100)], [("n1", 100)], []]
    rig.deeds.do(beat("n1", 150))
    assert rig.sent[-1][0] == "n1"


def test_those_who_are_behind_take_turns() -> None:
    rig = Rig()
    rig.log_end = 150
    for offset in (0, 20):
        for to in ("n1", "n2"):
            rig.deeds.do(Ship(to, 3, 7, offset, 20, 0))
    assert [rig.turn() for _ in range(4)] == [
        [("n1", 0)], [("n2", 0)], [("n1", 20)], [("n2", 20)],
    ]  # fmt: skip


def test_what_waits_is_lost_with_its_session() -> None:
    """A follower that was started anew is not sent what the one before lacked."""
    rig = Rig()
    rig.log_end = 150
    for offset in (0, 20):
        for to in ("n1", "n2"):
            rig.deeds.do(Ship(to, 3, 7, offset, 20, 0))
    rig.deeds.do(Send("n1", Welcome("orders", 3, 8, (), 0, 150)))
    assert [to for to, _, _ in rig.sent] == ["n1"]
    rig.deeds.do(Ship("n1", 3, 8, 40, 20, 0))
    assert [rig.turn() for _ in range(4)] == [[("n2", 0)], [("n1", 40)], [("n2", 20)], []]


@pytest.mark.parametrize("action", [StepDown(3), Truncate(10), StartOver(10)])
def test_what_waits_is_lost_with_the_mastership_and_with_the_log(action: Action) -> None:
    rig = Rig()
    rig.log_end = 150
    rig.deeds.do(Ship("n1", 3, 7, 0, 20, 0))
    rig.books.are_needed.return_value = False
    rig.deeds.do(action)
    assert not rig.turn()
    rig.deeds.do(Ship("n1", 4, 8, 0, 20, 0))  # of a later one
    assert rig.turn() == [("n1", 0)]


def test_damage_that_is_met_later_ends_the_process_as_well() -> None:
    rig = Rig()
    rig.log_end = 150
    rig.deeds.do(Ship("n1", 3, 7, 0, 20, 0))
    rig.log.damage()
    rig.turn()
    assert not rig.sent
    rig.on_stop.assert_called_once_with("a record does not hold")


def test_what_was_deleted_meanwhile_is_lost() -> None:
    rig = Rig()
    rig.log_end = 150
    rig.deeds.do(Ship("n1", 3, 7, 0, 20, 0))
    rig.deeds.do(Ship("n1", 3, 7, 20, 20, 0))
    read = rig.log.read
    rig.log.read = Mock(side_effect=FileNotFoundError)  # type: ignore[method-assign]
    assert not rig.turn()
    rig.log.read = read  # type: ignore[method-assign]
    assert rig.turn() == [("n1", 20)]
    rig.on_stop.assert_not_called()


def test_all_of_it_goes_at_the_end() -> None:
    rig = Rig()
    rig.log_end = 150
    for offset in (0, 30, 60):
        rig.deeds.do(Ship("n1", 3, 7, offset, 30, 0))
    rig.deeds.backlog.finish()
    assert [frame.offset for _, frame, _ in rig.sent] == [0, 30, 60]
    assert not rig.turn()


def test_any_course_keeps_the_order_of_each_replica() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    rig, said = Rig(), list[tuple[str, int]]()
    for number in range(2_000):
        to = chance.choice(("n1", "n2"))
        rig.log_end = chance.choice((0, 1_000))
        said.append((to, number))
        if chance.random() < 0.3:
            rig.deeds.do(beat(to, number))
        else:
            rig.deeds.do(Ship(to, 3, 7, number, 1, 0))
        if chance.random() < 0.5:
            rig.turn()
    rig.deeds.backlog.finish()
    for to in ("n1", "n2"):
        heard = [frame.offset for name, frame, _ in rig.sent if name == to]
        assert heard == [number for name, number in said if name == to]
