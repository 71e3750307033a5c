"""When what a queue-less group has out is given back, and when again if that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cometmq.actors.coordination import popped_out
from cometmq.actors.coordination.popped_out import AGAIN_S, LOOK_S, SOON_S, PoppedOut, now_ms
from cometmq.actors.runtime.clock_steps import STEP_MS, ClockSteps
from cometmq.actors.tables.popped import PopBook
from cometmq.protocol.commands import GivenBack
from cometmq.protocol.errors import MessageIllegal, MessageTooLarge, NotConfirmed, OffsetIllegal
from cometmq.protocol.ledger import MessagesPopped

KEY = ("g", "t", 0)
HANDLE = 7


class Hosted:
    """A PoppedOut, and around it nothing but the book of what is out."""

    def __init__(self, steps: ClockSteps | None = None) -> None:
        self.book = PopBook({})
        books = SimpleNamespace(
            popped=self.book,
            change=self._change,
            send=lambda: None,
            offsets=SimpleNamespace(get=lambda *_: -1),
        )
        actor = SimpleNamespace(after=self._after)
        retries = SimpleNamespace(give_back=self._give_back)
        self.wait_s = LOOK_S
        self.out: Any = PoppedOut(actor, books, retries, steps)  # type: ignore[arg-type]

    def _change(self, change: Any) -> None:
        if type(change) in PopBook.kinds:
            self.book.apply(change)

    def _after(self, wait_s: float, _call: Callable[[], None]) -> Any:
        self.wait_s = wait_s
        return SimpleNamespace(cancel=lambda: None)

    def _give_back(self, command: Any, settled: Callable[[list[int]], None]) -> None:
        raise NotImplementedError


class Returning(Hosted):
    """Messages are out, and their time is over; `outcomes` says what giving them back comes to."""

    def __init__(self, *outcomes: list[int], count: int = 1) -> None:
        super().__init__()
        self.outcomes = list(outcomes)
        self.book.apply(MessagesPopped(*KEY, 0, count, HANDLE, now_ms()))
        self.wait_s = 0.0
        self.out.find()

    def _give_back(self, _command: Any, settled: Callable[[list[int]], None]) -> None:
        settled(self.outcomes.pop(0))

    def turn(self) -> float:
        """How long it waits until it tries again."""
        threading.Event().wait(self.wait_s)
        before = len(self.outcomes)
        while len(self.outcomes) == before:  # a clock may be a little behind
            self.out._return_due()
        return self.wait_s


def test_what_its_owner_gives_back_is_not_given_back_by_its_time() -> None:
    """Also where the broker cannot store a copy for its owner, and its time came meanwhile."""
    mine = GivenBack(*KEY[1:], 0, 0, handle=HANDLE)
    returning = Returning([0])
    assert returning.out.claim(KEY[0], mine)
    assert not returning.out.claim(KEY[0], mine)
    assert not returning.out.claim(KEY[0], msgspec.structs.replace(mine, handle=HANDLE + 1))
    assert not returning.out.claim("other", mine)
    for offset in (-1, 1):
        assert not returning.out.claim(KEY[0], msgspec.structs.replace(mine, queue_offset=offset))
    returning.out._return_due()
    assert returning.outcomes == [[0]]
    returning.out.settle(KEY[0], mine, is_stored=False)
    returning.turn()
    assert returning.outcomes == []
    assert not returning.out.claim(KEY[0], mine)
    assert returning.book.count == 0


def test_neighbours_of_what_its_owner_gives_back_come_in_time() -> None:
    mine = GivenBack(*KEY[1:], 1, 0, handle=HANDLE)
    returning = Returning([0, 0], count=3)
    assert returning.out.claim(KEY[0], mine)
    returning.turn()
    queue = returning.book.get(*KEY)
    assert queue is not None
    assert queue.left_of(0, 3) == [(1, 2)]
    returning.out._return_due()
    returning.out.settle(KEY[0], mine, is_stored=True)
    assert (returning.book.count, queue.floor) == (0, 3)
    assert not returning.out._claimed


def test_who_is_away_is_asked_again_soon() -> None:
    """The broker was ending when a message's time was over: it came 5 s after the next start."""
    returning = Returning([NotConfirmed.code], [], [NotConfirmed.code], [0])
    assert returning.turn() <= SOON_S
    assert returning.turn() <= 2 * SOON_S + 0.1
    assert returning.turn() < AGAIN_S
    returning.turn()
    queue = returning.book.get(*KEY)
    assert queue is not None
    assert queue.floor == 1
    assert not queue.out


def test_what_cannot_be_given_back_is_not_tried_all_the_time() -> None:
    for code in (MessageIllegal.code, OffsetIllegal.code):
        returning = Returning([code])
        assert AGAIN_S - 1 < returning.turn() <= AGAIN_S


def test_what_no_copy_can_be_stored_of_is_out_no_more(caplog: pytest.LogCaptureFixture) -> None:
    returning = Returning([0, MessageTooLarge.code, 0], count=3)
    returning.turn()
    queue = returning.book.get(*KEY)
    assert queue is not None
    assert (returning.book.count, queue.floor, returning.out.aside) == (0, 3, 1)
    assert "group g: t/0 offset 1 comes to nobody any more" in caplog.text


def test_it_waits_no_longer_however_long_it_fails() -> None:
    returning = Returning([])
    returning.out._failing_since = time.monotonic() - 3_600
    assert returning.turn() <= AGAIN_S


DAY_MS = 86_400_000


class Clock:
    """A wall clock that is set, and how many ms have gone by."""

    def __init__(self) -> None:
        self.gone_ms, self.set_by_ms = 0, 0

    def ahead(self) -> int:
        return 1_700_000_000_000 + self.set_by_ms

    def now_ms(self) -> int:
        return self.ahead() + self.gone_ms


class Lent(Hosted):
    """Messages that are out until a time, by a clock that is stepped."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(popped_out, "now_ms", clock.now_ms)
        super().__init__(ClockSteps(clock.ahead))
        self.clock = clock
        self.returned: dict[int, int] = {}  # queue offset -> when, in ms of the run

    def _give_back(self, command: Any, settled: Callable[[list[int]], None]) -> None:
        for each in command.messages:
            assert each.queue_offset not in self.returned
            self.returned[each.queue_offset] = self.clock.gone_ms
        settled([0] * len(command.messages))

    def pop(self, offset: int, invisible_ms: int) -> None:
        until = self.out.now_ms() + invisible_ms
        self.book.apply(MessagesPopped(*KEY, offset, offset + 1, HANDLE + offset, until))
        self.out.push(until, KEY, HANDLE + offset)

    def run(self, ms: int) -> None:
        """So long nothing happens but what the alarm, which no clock has to do with, brings."""
        end = self.clock.gone_ms + ms
        while self.clock.gone_ms + round(self.wait_s * 1000) <= end:
            self.clock.gone_ms += round(self.wait_s * 1000)
            self.wait_s = LOOK_S
            self.out._return_due()
        self.wait_s -= (end - self.clock.gone_ms) / 1000
        self.clock.gone_ms = end


@pytest.mark.parametrize("steps", [
    [DAY_MS], [-DAY_MS], [DAY_MS, DAY_MS], [DAY_MS, -DAY_MS], [-DAY_MS, 7], [STEP_MS + 1],
    [-STEP_MS - 1], [],
])  # fmt: skip
def test_a_step_of_the_clock_neither_ends_nor_prolongs_what_is_out(
    steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    lent = Lent(clock, monkeypatch)
    lent.pop(0, 30_000)
    lent.pop(1, 200_000)
    for step in steps:
        clock.set_by_ms += step
        lent.run(5_000)
    lent.pop(2, 40_000)  # by the new clock
    popped_at = clock.gone_ms
    small = sum(each for each in steps if abs(each) <= STEP_MS)
    lent.run(300_000)
    assert sorted(lent.returned) == [0, 1, 2]
    due = {0: 30_000, 1: 200_000, 2: popped_at + 40_000}
    assert all(abs(lent.returned[i] - due[i]) <= abs(small) for i in due), (lent.returned, due)


def test_a_message_popped_just_after_a_step_counts_by_the_new_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    lent = Lent(clock, monkeypatch)
    lent.pop(0, 30_000)
    clock.set_by_ms += DAY_MS
    lent.pop(1, 10_000)  # the first look after the step
    lent.run(60_000)
    assert lent.returned == {1: 10_000, 0: 30_000}
