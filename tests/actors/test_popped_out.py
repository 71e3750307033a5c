"""When what a queue-less group has out is given back, and when again if that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cometmq.actors.books.popped import PopBook
from cometmq.actors.coordination.popped_out import AGAIN_S, SOON_S, PoppedOut, now_ms
from cometmq.protocol.errors import MessageTooLarge, NotConfirmed, OffsetIllegal
from cometmq.protocol.ledger import MessagesPopped

KEY = ("g", "t", 0)
HANDLE = 7


class Returning:
    """One message is out, and its time is over; `outcomes` says what giving it back comes to."""

    def __init__(self, *outcomes: list[int]) -> None:
        self.outcomes = list(outcomes)
        self.book = PopBook({})
        books = SimpleNamespace(
            popped=self.book,
            change=self._change,
            send=lambda: None,
            offsets=SimpleNamespace(get=lambda *_: -1),
        )
        actor = SimpleNamespace(after=self._after)
        retries = SimpleNamespace(give_back=self._give_back)
        books.change(MessagesPopped(*KEY, 0, 1, HANDLE, now_ms()))
        self.out: Any = PoppedOut(actor, books, retries)  # type: ignore[arg-type]
        self.wait_s = 0.0
        self.out.find()

    def _change(self, change: Any) -> None:
        if type(change) in PopBook.kinds:
            self.book.apply(change)

    def _after(self, wait_s: float, _call: Callable[[], None]) -> Any:
        self.wait_s = wait_s
        return SimpleNamespace(cancel=lambda: None)

    def _give_back(self, _command: Any, settled: Callable[[list[int]], None]) -> None:
        settled(self.outcomes.pop(0))

    def turn(self) -> float:
        """How long it waits until it tries again."""
        threading.Event().wait(self.wait_s)
        before = len(self.outcomes)
        while len(self.outcomes) == before:  # a clock may be a little behind
            self.out._return_due()
        return self.wait_s


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
    for code in (MessageTooLarge.code, OffsetIllegal.code):
        returning = Returning([code])
        assert AGAIN_S - 1 < returning.turn() <= AGAIN_S


def test_it_waits_no_longer_however_long_it_fails() -> None:
    returning = Returning([])
    returning.out._failing_since = time.monotonic() - 3_600
    assert returning.turn() <= AGAIN_S
