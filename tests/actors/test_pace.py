"""In how many pieces a master's log goes to its followers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from cometmq.actors.replication.group.member import MemberActor
from cometmq.actors.replication.group.terms import UNDER_WAY_MAX, Pace, WholeFlushed


def test_one_alone_never_waits() -> None:
    pace = Pace()
    for end in range(100, 1_000, 100):
        assert pace.may_send(end - 100)
        pace.sent(end)
        assert pace.may_send(end - 100)  # another one beside it


def test_what_comes_meanwhile_goes_as_one() -> None:
    pace = Pace()
    pace.sent(100)
    pace.sent(200)
    assert not pace.may_send(99)
    assert pace.is_full
    assert pace.may_send(100)
    assert not pace.is_full
    pace.sent(1_000)
    assert not pace.may_send(199)
    assert pace.may_send(1_000)


def test_what_is_under_way_may_be_given_up() -> None:
    pace = Pace()
    for end in (100, 200):
        pace.sent(end)
    assert not pace.may_send(0)
    pace.forget()
    assert pace.may_send(0)
    assert not pace.is_full


def test_any_course() -> None:
    """Never more than that are under way, and never none while there is something to send."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    pace, wrote, sent, confirmed, ends = Pace(), 0, 0, 0, list[int]()
    for _ in range(20_000):
        wrote += chance.choice((0, 1, 50))
        if sent:
            confirmed = chance.randint(confirmed, sent)
        ends = [end for end in ends if end > confirmed]
        if wrote > sent and pace.may_send(confirmed):
            pace.sent(wrote)
            sent = wrote
            ends.append(wrote)
        assert len(ends) <= UNDER_WAY_MAX
        assert ends or sent == wrote


class Master:
    """A MemberActor of which only this is there: its pace, and what it tells the core. Followers
    hold all that they were sent; under SYNC_FLUSH what is flushed here is confirmed."""

    def __init__(self) -> None:
        cell = SimpleNamespace(value=0, arm=lambda: None)
        self.run: Any = SimpleNamespace(
            wrote_cell=cell, flushed=0, epoch=1, is_recovered=True, arm=lambda: None,
            confirm=lambda offset: None,
        )  # fmt: skip
        self.local = SimpleNamespace(end=0, flushed=0, confirm=0)
        self.told: list[tuple[str, int]] = []
        self.member: Any = MemberActor.__new__(MemberActor)
        self.member._runs = SimpleNamespace(now=self.run)
        self.member._core = SimpleNamespace(
            leads=1, local=self.local, appended="appended", flushed="flushed"
        )
        self.member._driver = SimpleNamespace(is_busy=False, event=self.event)
        self.member._pace, self.member._flushed = Pace(), WholeFlushed()

    def event(self, what: str, end: int) -> None:
        self.told.append((what, end))
        if what == "appended":
            self.local.end = end
        else:
            assert self.local.flushed < end <= self.local.end
            self.local.flushed = self.local.confirm = end

    def write(self, end: int) -> None:
        self.run.wrote_cell.value = end
        self.member._look()

    def flush(self) -> None:
        self.run.flushed = self.run.wrote_cell.value
        self.member._look()


def test_what_was_flushed_before_it_was_sent_is_told_at_once() -> None:
    """Nothing rings for it later."""
    master = Master()
    for end in (100, 200, 300, 400):
        master.write(end)
    assert master.told == [("appended", 100), ("appended", 200)]
    master.flush()
    assert master.told[2:] == [("flushed", 200), ("appended", 400), ("flushed", 400)]


def test_however_much_is_under_way_all_goes_at_last() -> None:
    master = Master()
    for end in (100, 200, 300):
        master.write(end)
    assert master.local.end == 200
    master.member._look_at_all()
    assert master.local.end == 300
