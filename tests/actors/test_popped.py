"""The book of what queue-less groups have popped, against plain sets of offsets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cometmq.actors.coordination.files import PoppedFile
from cometmq.actors.tables.popped import PopBook, PoppedQueue, table_of
from cometmq.protocol.ledger import (
    Change,
    GroupRemoved,
    MessagesPopped,
    OffsetsForgotten,
    PopExtended,
    PopsAcked,
    PopsForgotten,
    PopsReleased,
)

PLACE = ("g", "t", 0)


class Model:
    """One queue: who has each offset, and which are done with."""

    def __init__(self) -> None:
        self.top = 0
        self.acked: set[int] = set()
        self.free: set[int] = set()
        self.has: dict[int, set[int]] = {}  # by handle: popped and not released offsets

    def check(self, queue: PoppedQueue | None) -> None:
        if queue is None:
            assert not self.top
            return
        floor = next(at for at in range(self.top + 1) if at not in self.acked)
        assert (queue.floor, queue.top) == (floor, self.top)
        done = {at for first, end in queue.acked for at in range(first, end)}
        assert done == {at for at in self.acked if at > floor}
        assert queue.acked == sorted(queue.acked)
        for one, other in zip(queue.acked, queue.acked[1:], strict=False):
            assert one[1] < other[0]
        out = {each: at - self.acked for each, at in self.has.items() if at - self.acked}
        assert set(queue.out) == set(out)
        for handle, each in out.items():
            found = queue.left_under(handle, 0, queue.top)
            assert {at for a, b in found for at in range(a, b)} == each
        assert {at for a, b in queue.free for at in range(a, b)} == self.free
        for first, end in queue.free:
            assert queue.is_free(first, end)
            assert not queue.is_free(first, end + 1)
            assert not queue.is_free(first - 1, end)


def table(book: PopBook) -> list[Any]:
    return [[*row[:6], sorted(row[6]), *row[7:]] for row in table_of(book)]


def some_changes(chance: random.Random, model: Model, count: int) -> list[Change]:
    """As a coordinator makes them; the model is what they come to."""
    changes: list[Change] = []
    for _ in range(count):
        kind = chance.random()
        if kind < 0.3 or not model.has:
            end, handle = model.top + chance.randint(1, 9), len(model.has) + 1
            changes.append(MessagesPopped(*PLACE, model.top, end, handle, 1_000))
            model.has[handle] = set(range(model.top, end))
            model.top = end
        elif kind < 0.45 and model.free:
            first = end = chance.choice(sorted(model.free))
            while (end in model.free and chance.random() < 0.8) or end == first:
                end += 1
            handle = len(model.has) + 1
            changes.append(MessagesPopped(*PLACE, first, end, handle, 1_000))
            model.has[handle] = set(range(first, end))
            model.free -= model.has[handle]
        elif kind < 0.6:
            handle = chance.choice(list(model.has))
            first, end = sorted(chance.choices(range(model.top + 1), k=2))
            changes.append(PopsReleased(*PLACE, handle, first, end))
            gone = model.has[handle] & set(range(first, end)) - model.acked
            model.has[handle] -= gone
            model.free |= gone
        elif kind < 0.9:
            handle = chance.choice(list(model.has))
            has = sorted(model.has[handle])
            if not has:
                continue
            first = end = chance.choice(has)
            while end in model.has[handle] and chance.random() < 0.8:
                end += 1
            changes.append(PopsAcked(*PLACE, handle, first, end))
            model.acked.update(range(first, end))
        else:
            changes.append(PopExtended(*PLACE, chance.choice(list(model.has)), 2_000))
    return changes


@pytest.mark.parametrize("round_", range(20))
def test_changes(round_: int) -> None:
    """Made, taken back to any place, made again; and once more on top of a snapshot."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    model, book, undos = Model(), PopBook({}), []
    tables = [table(book)]
    changes = some_changes(chance, model, 120)
    for change in changes:
        undos.append(book.apply(change))
        tables.append(table(book))
    model.check(book.get(*PLACE))
    for back in range(chance.randint(1, len(changes))):
        book.undo(undos[-1 - back])
        assert table(book) == tables[len(changes) - back - 1]
        assert book.count == sum(len(queue.out) for _, queue in book.items())
    resumed = PopBook({})
    until = chance.randrange(len(changes) + 1)
    for change in changes[:until]:
        resumed.apply(change)
    # A snapshot may have more than the place says that the ledger goes on at.
    for change in changes[chance.randint(0, until) :]:
        resumed.apply(change)
    model.check(resumed.get(*PLACE))


def test_releases_survive_a_snapshot(tmp_path: Path) -> None:
    """Fault 7. A table from a release without releases of messages can be read, too."""
    file = PoppedFile(tmp_path)
    book = file.book
    book.apply(MessagesPopped(*PLACE, 0, 9, 7, 1, "asked"))
    book.apply(PopsReleased(*PLACE, 7, 2, 5))
    book.apply(MessagesPopped(*PLACE, 3, 4, 8, 1))
    file.file.path.write_text("".join(file.pieces()))
    again = PoppedFile(tmp_path).book
    assert table(again) == table(book)
    assert [each.queue_offset for each in again.out_of("g", "asked")] == [0, 5]
    file.file.path.write_text('{"queues":[["g","t",0,1,9,[[4,5]],[[7,1,9,1000]]]]}')
    queue = PoppedFile(tmp_path).book.get(*PLACE)
    assert queue is not None
    assert queue.left_under(7, 0, 9) == [(1, 4), (5, 9)]


def test_it_is_forgotten() -> None:
    for change in (OffsetsForgotten("t"), GroupRemoved("g"), PopsForgotten(*PLACE)):
        book = PopBook({})
        book.apply(MessagesPopped(*PLACE, 0, 5, 7, 1))
        book.apply(MessagesPopped("h", "u", 0, 0, 5, 8, 1))
        undo = book.apply(change)
        assert book.get(*PLACE) is None
        assert book.count == 1
        book.undo(undo)
        queue = book.get(*PLACE)
        assert queue is not None
        assert queue.out[7].end == 5
        assert book.count == 2
        assert book.apply(PopsForgotten("x", "y", 0)) == []


def test_a_queue_that_has_lost_its_end() -> None:
    book = PopBook({})
    book.apply(MessagesPopped(*PLACE, 0, 5, 7, 1))
    assert book.beyond({("t", 0): 5}) == []
    assert book.beyond({("t", 0): 4}) == [PLACE]
    assert book.beyond({}) == [PLACE]
