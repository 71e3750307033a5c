"""Takes in order, where time and the scheduler are made: when a queue is free, and what becomes of
what fails too often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cometmq.actors.coordination import popped_out
from cometmq.actors.coordination.ordered_pops import OrderedPops
from cometmq.actors.coordination.popped_out import LOOK_S, PoppedOut
from cometmq.actors.coordination.pops import Pops
from cometmq.actors.runtime.clock_steps import ClockSteps
from cometmq.actors.tables.offsets import OffsetBook
from cometmq.actors.tables.popped import PopBook
from cometmq.actors.tables.takes import TakeBook
from cometmq.protocol.commands import (
    GiveBackMessages,
    GivenBack,
    PopAck,
    PopExtension,
    PopMessages,
    Popped,
)
from cometmq.protocol.configs import SubscriptionGroupConfig
from cometmq.protocol.errors import HandleUnknown, MessageNotFound, MessageTooLarge, NotConfirmed
from cometmq.protocol.ledger import MessagesPopped, OffsetSet, PopsForgotten
from cometmq.shm.live.queue_table import QueueRange

KEY = ("g", "t", 0)
HOUR_MS = 3_600_000
UNKNOWN = HandleUnknown.code


class Hosted:
    """One queue, 100 messages, and a clock that goes when it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gone_ms, self.set_by_ms = 0, 0
        monkeypatch.setattr(popped_out, "now_ms", lambda: self.ahead() + self.gone_ms)
        self.takes, self.popped, self.offsets = TakeBook({}), PopBook({}), OffsetBook({})
        self.config = SubscriptionGroupConfig(group_name="g", consume_message_orderly=True)
        self.alarms: list[tuple[float, Callable[[], None]]] = []  # when, by gone_ms
        self.freed: list[float] = []
        self.letters: list[tuple[int, int]] = []  # queue offset, how often it was handed out
        self.codes: list[list[int]] = []  # of the scheduler's answers; [0] by default
        self.there = QueueRange(0, 100)
        books = SimpleNamespace(
            popped=self.popped,
            takes=self.takes,
            offsets=self.offsets,
            groups=SimpleNamespace(configs={"g": self.config}),
            change=self.change,
            send=lambda: None,
            forget_pops=lambda _group: self.change(PopsForgotten(*KEY)),
        )
        actor: Any = SimpleNamespace(after=self._after)
        retries: Any = SimpleNamespace(give_back=self._give_back)
        self.out: Any = PoppedOut(actor, books, retries, ClockSteps(self.ahead))  # type: ignore[arg-type]
        self.pops: Any = OrderedPops(actor, books, self.out, retries, self._freed)  # type: ignore[arg-type]

    def ahead(self) -> int:
        return 1_700_000_000_000 + self.set_by_ms

    def change(self, change: Any) -> None:
        for book in (self.takes, self.popped, self.offsets):
            if type(change) in book.kinds:
                book.apply(change)

    def _after(self, wait_s: float, call: Callable[[], None]) -> Any:
        alarm = self.gone_ms + wait_s * 1000, call
        self.alarms.append(alarm)
        return SimpleNamespace(cancel=lambda: self.alarms.remove(alarm))

    def _freed(self, _group: str, _topic: str) -> None:
        self.freed.append(self.gone_ms)

    def _give_back(
        self,
        command: GiveBackMessages,
        settled: Callable[[Sequence[int]], None],
        handed_out: Sequence[int],
    ) -> None:
        (letter,) = command.messages
        assert letter.delay_level == -1
        codes = self.codes.pop(0) if self.codes else [0]
        if codes == [0]:
            self.letters.append((letter.queue_offset, handed_out[0]))
        settled(codes)

    def pop(self, count: int = 3, invisible_ms: int = 10_000, attempt: str = "") -> list[Popped]:
        command = PopMessages("g", "t", count, invisible_ms, orderly=True, attempt=attempt)
        found: list[Popped] = self.pops.pop(command, [(KEY, self.there)])
        return found

    def run(self, ms: int) -> None:
        """So long nothing happens but alarms."""
        end = self.gone_ms + ms
        while due := [alarm for alarm in self.alarms if alarm[0] <= end]:
            alarm = min(due, key=lambda each: each[0])
            self.alarms.remove(alarm)
            self.gone_ms = max(self.gone_ms, round(alarm[0]))
            alarm[1]()
        self.gone_ms = end

    def ack(self, popped: Popped, first: int, count: int = 1) -> int:
        code: int = self.pops.ack(KEY, PopAck("t", 0, popped.handle, first, count))
        return code

    def back(self, popped: Popped, offset: int, after_ms: int = -1, most: int = 16) -> int | None:
        given = GivenBack("t", 0, offset, 0, after_ms=after_ms, handle=popped.handle)
        code: int | None = self.pops.give_back("g", given, most)
        return code

    @property
    def committed(self) -> int:
        return self.offsets.get(*KEY)


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Hosted:
    return Hosted(monkeypatch)


def shown(popped: Sequence[Popped]) -> list[tuple[int, int, list[int]]]:
    return [(each.queue_offset, each.count, each.counts) for each in popped]


def test_a_queue_is_free_when_its_time_is_over_or_all_is_done(hosted: Hosted) -> None:
    (first,) = hosted.pop()
    assert shown([first]) == [(0, 3, [])]
    hosted.run(9_999)
    assert not hosted.freed
    assert hosted.pop() == []
    hosted.run(1)
    assert hosted.freed == [10_000]
    (again,) = hosted.pop()
    assert shown([again]) == [(0, 3, [1, 1, 1])]
    assert hosted.ack(first, 0) == UNKNOWN
    assert hosted.ack(again, 0, 3) == 0
    assert hosted.freed == [10_000, 10_000]
    assert hosted.committed == 3
    hosted.run(HOUR_MS)
    assert len(hosted.freed) == 2
    assert not len(hosted.takes)


def test_what_is_extended_is_free_later_and_what_is_given_back_sooner(hosted: Hosted) -> None:
    (first,) = hosted.pop(invisible_ms=1_000)
    until = hosted.out.now_ms() + 5_000
    assert hosted.pops.extend(KEY, PopExtension("t", 0, first.handle, 5_000), until) == 0
    hosted.run(4_999)
    assert not hosted.freed
    assert hosted.back(first, 0, 200) == 0
    hosted.run(199)
    assert not hosted.freed
    hosted.run(1)
    assert hosted.freed == [5_199]


def test_no_entry_of_the_heap_lives_for_ever(hosted: Hosted) -> None:
    """Each take has one, until its time is over; a busy queue has no more."""
    for _ in range(30):
        (taken,) = hosted.pop(1, 1_000)
        hosted.ack(taken, taken.queue_offset)
        hosted.run(100)
    assert len(hosted.out._due) <= 11
    hosted.run(1_000)
    assert not hosted.out._due


@pytest.mark.parametrize("step_ms", [-24 * HOUR_MS, -2_000, 2_000, 24 * HOUR_MS])
def test_a_step_of_the_clock(step_ms: int, hosted: Hosted) -> None:
    hosted.pop(invisible_ms=20_000)
    hosted.run(5_000)
    hosted.set_by_ms += step_ms
    hosted.run(14_999)
    assert hosted.pop() == []
    hosted.run(2)
    assert [round(each / 1000) for each in hosted.freed] == [20]
    (taken,) = hosted.pop()
    hosted.back(taken, 0, 30_000)
    hosted.set_by_ms -= step_ms
    hosted.run(29_900)
    assert hosted.pop() == []
    hosted.run(LOOK_S * 1000)
    assert len(hosted.freed) == 2


def test_the_first_dies_and_those_behind_it_have_their_turn(hosted: Hosted) -> None:
    for _ in range(17):
        assert len(hosted.pop(invisible_ms=1_000)) == 1
        hosted.run(1_000)
    assert hosted.letters == [(0, 16)]
    assert hosted.committed == 1
    (rest,) = hosted.pop(invisible_ms=1_000)
    assert shown([rest]) == [(1, 2, [16, 16])]
    hosted.run(1_000)
    assert hosted.letters == [(0, 16), (1, 16)]
    (last,) = hosted.pop()
    assert shown([last]) == [(2, 1, [16])]
    assert hosted.ack(last, 2) == 0
    assert hosted.committed == 3


def test_a_dead_letter_that_cannot_be_stored_is_tried_again(hosted: Hosted) -> None:
    """And keeps its queue until it is, or the group goes on elsewhere."""
    hosted.pops._books.groups.configs["g"] = SubscriptionGroupConfig(
        group_name="g", retry_max_times=0, consume_message_orderly=True
    )
    hosted.codes = [[], [NotConfirmed.code], [0], [MessageNotFound.code]]
    hosted.pop(1, 1_000)
    hosted.run(1_000)
    assert hosted.letters == []
    assert hosted.pop() == []
    hosted.run(10_000)
    assert hosted.letters == [(0, 0)]
    assert len(hosted.pop(1, 1_000)) == 1
    hosted.run(1_000)
    assert hosted.committed == 2  # it has expired
    hosted.codes = [[]]
    hosted.pop(1, 1_000)
    hosted.run(1_000)
    hosted.change(OffsetSet(*KEY, 50))
    hosted.change(PopsForgotten(*KEY))
    hosted.codes = [[]]
    hosted.run(10_000)
    assert shown(hosted.pop()) == [(50, 3, [])]


def test_a_dead_letter_that_can_be_none_leaves_the_queue_to_those_behind(
    hosted: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    hosted.pops._books.groups.configs["g"] = SubscriptionGroupConfig(
        group_name="g", retry_max_times=0, consume_message_orderly=True
    )
    hosted.codes = [[MessageTooLarge.code]]
    hosted.pop(1, 1_000)
    hosted.run(1_000)
    assert (hosted.letters, hosted.committed, hosted.out.aside) == ([], 1, 1)
    assert "group g: t/0 offset 0 comes to nobody any more" in caplog.text
    assert shown(hosted.pop(1, 1_000)) == [(1, 1, [])]


def test_a_letter_of_its_owner(hosted: Hosted) -> None:
    (first,) = hosted.pop(invisible_ms=1_000)
    mine = GivenBack("t", 0, 1, 0, delay_level=-1, handle=first.handle)
    assert hosted.pops.give_back("g", mine, 16) is None
    assert hosted.pops.give_back("g", mine, 16) == UNKNOWN
    assert hosted.ack(first, 1) == hosted.ack(first, 2) == UNKNOWN
    more = PopExtension("t", 0, first.handle, 5_000)
    assert hosted.pops.extend(KEY, more, hosted.out.now_ms() + 5_000) == 0  # the first one is his
    assert hosted.ack(first, 0) == 0
    assert hosted.pops.extend(KEY, more, hosted.out.now_ms() + 5_000) == UNKNOWN
    hosted.run(6_000)
    assert hosted.pop() == []  # until that is known
    hosted.pops.settle("g", mine, is_stored=False)
    hosted.run(1)
    (again,) = hosted.pop()
    assert shown([again]) == [(1, 2, [1, 0])]
    dead = GivenBack("t", 0, 1, 0, delay_level=-1, handle=again.handle)
    assert hosted.pops.give_back("g", dead, 16) is None
    assert hosted.pops.handed_out("g", dead) == 1
    hosted.pops.settle("g", dead, is_stored=True)
    assert shown(hosted.pop()) == [(2, 1, [])]


def test_two_letters_of_one_queue(hosted: Hosted) -> None:
    """One whose time is over, and one that its late owner rejects meanwhile."""
    hosted.pops._books.groups.configs["g"] = SubscriptionGroupConfig(
        group_name="g", retry_max_times=0, consume_message_orderly=True
    )
    hosted.codes = [[]]
    (taken,) = hosted.pop(invisible_ms=1_000)
    hosted.run(1_000)
    mine = GivenBack("t", 0, 1, 0, delay_level=-1, handle=taken.handle)
    assert hosted.pops.give_back("g", mine, 16) is None
    hosted.run(60_000)
    assert hosted.letters == [(0, 0)]
    assert hosted.pop() == []
    hosted.pops.settle("g", mine, is_stored=True)
    assert hosted.committed == 2
    assert shown(hosted.pop()) == [(2, 1, [])]


def test_one_queue_of_before_costs_another_nothing(hosted: Hosted) -> None:
    hosted.there = QueueRange(0, 100)
    other = ("g", "t", 1)
    command = PopMessages("g", "t", 3, 10_000, orderly=True)
    assert len(hosted.pops.pop(command, [(other, hosted.there)])) == 1
    hosted.change(MessagesPopped(*KEY, 0, 2, 9, 1))
    queue = hosted.popped.get(*KEY)
    assert queue is not None
    queue.out.clear()
    assert len(hosted.pop()) == 1
    assert hosted.pops.pop(command, [(other, hosted.there)]) == []


def test_the_offset_is_set_by_somebody_else(hosted: Hosted) -> None:
    """Also where nobody tells: forward it is done with, back or beyond it is another place."""
    (first,) = hosted.pop()
    hosted.change(OffsetSet(*KEY, 2))
    assert hosted.pop() == []
    assert hosted.ack(first, 0) == hosted.ack(first, 2) == 0
    assert hosted.committed == 3
    (second,) = hosted.pop()
    hosted.change(OffsetSet(*KEY, 1))
    assert hosted.ack(second, 3) == UNKNOWN
    (third,) = hosted.pop()
    assert shown([third]) == [(1, 3, [])]
    hosted.change(OffsetSet(*KEY, 60))
    assert shown(hosted.pop()) == [(60, 3, [])]


def test_what_has_expired(hosted: Hosted) -> None:
    (first,) = hosted.pop(invisible_ms=1_000)
    hosted.there = QueueRange(2, 100)
    hosted.run(1_000)
    assert shown(hosted.pop(invisible_ms=1_000)) == [(2, 1, [1])]
    hosted.there = QueueRange(40, 42)
    hosted.run(1_000)
    assert shown(hosted.pop()) == [(40, 2, [])]
    assert hosted.ack(first, 2) == UNKNOWN or hosted.committed == 40
    hosted.there = QueueRange(90, 90)
    hosted.run(10_000)
    assert hosted.pop() == []


def test_what_was_popped_in_no_order_keeps_its_queue(hosted: Hosted) -> None:
    """In a store of before the setting had a meaning."""
    hosted.change(MessagesPopped(*KEY, 0, 2, 9, hosted.out.now_ms() + 1_000))
    assert hosted.pop() == []
    queue = hosted.popped.get(*KEY)
    assert queue is not None
    queue.out.clear()
    hosted.change(OffsetSet(*KEY, 2))
    assert shown(hosted.pop()) == [(2, 3, [])]
    assert hosted.popped.get(*KEY) is None


def test_the_same_question_again(hosted: Hosted) -> None:
    (first,) = hosted.pop(attempt="a")
    assert hosted.pop(attempt="b") == []
    hosted.run(9_000)
    (again,) = hosted.pop(attempt="a")
    assert (shown([again]), again.handle) == (shown([first]), first.handle)
    hosted.run(9_999)  # it is invisible from now on
    assert hosted.pop(attempt="b") == []
    hosted.run(1)
    assert shown(hosted.pop(attempt="b")) == [(0, 3, [1, 1, 1])]


def test_nobody_is_told_where_nobody_waits() -> None:
    """What was free while each consumer found messages at once was noted for ever."""
    soon: list[object] = []
    actor: Any = SimpleNamespace(call_soon=soon.append)
    books: Any = SimpleNamespace(popped=PopBook({}), takes=TakeBook({}), retry_topics=None)
    members: Any = SimpleNamespace(gate=None)
    pops: Any = Pops(actor, books, members, Any, SimpleNamespace(), lambda _topic: {})  # type: ignore[arg-type]
    for topic in ("t", "%RETRY%g"):
        pops._freed("g", topic)
    assert not pops._to_look
    assert not soon
