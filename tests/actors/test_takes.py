"""The book of what groups have out that take messages in order, and the file that it stands in."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import golden
import msgspec
import pytest

from cometmq.actors.coordination.order_file import OrderFile, order_info_of, take_of
from cometmq.actors.tables.takes import TakeBook
from cometmq.protocol.integers import INT64_MAX
from cometmq.protocol.ledger import (
    Change,
    GroupRemoved,
    OffsetsForgotten,
    Place,
    PopsForgotten,
    QueueTaken,
    decode_entry,
    entry_of,
    pack_change,
)
from cometmq.protocol.takes import Take
from cometmq.shm.state.tables import OrderInfo

KEY = ("g", "t", 0)
UNTIL = 1_700_000_060_000


def a_take(count: int = 4, first: int = 10) -> Take:
    left = tuple((offset, 0) for offset in range(first, first + count))
    end = first + count
    return Take(7, "a", UNTIL - 60_000, UNTIL, left, end, end)


def random_take(chance: random.Random) -> Take:
    """As it is after some words."""
    take = a_take(chance.randint(1, 32), chance.choice([0, 5, 2**40]))
    for _ in range(chance.randint(0, 8)):
        offset = chance.choice(take.left)[0]
        what = chance.random()
        if what < 0.4:
            left = take.without(offset, offset + 1)
            take = left if left.left else take
        elif what < 0.6 and take.count_of(offset) is not None:
            take = take.given_back(offset, chance.randint(1, 2 * UNTIL))
        elif what < 0.7:
            take = take.released(offset)
        elif what < 0.8:
            take = take.cut(offset) if take.count_of(offset) is not None else take
        else:
            count = chance.randint(1, 32)
            take = take.taken_again(count, chance.randint(1, 99), "b", UNTIL, UNTIL + 1)
    return take


def seeded() -> random.Random:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


# --- one take ---


def test_what_is_out() -> None:
    take = a_take()
    assert (take.next_offset, take.free_ms, take.held_end) == (10, UNTIL, 14)
    take = take.without(11, 12)
    back = take.given_back(12, UNTIL + 5)
    assert (back.free_ms, back.held_end) == (UNTIL + 5, 12)
    assert back.out() == [(10, 0)]
    assert back.count_of(12) is back.count_of(13) is back.count_of(11) is None
    alone = back.without(10, 11)
    assert (alone.free_ms, alone.next_offset) == (UNTIL + 5, 12)
    sooner = take.given_back(12, 5).without(10, 11)
    assert sooner.free_ms == 5
    again = back.taken_again(9, 8, "b", 1, 2)
    assert again.left == ((10, 1), (12, 1), (13, 0))
    assert (again.out_end, again.back_ms) == (14, 0)
    assert again.taken_again(1, 9, "c", 1, 2).out() == [(10, 2)]
    assert take.released(10).out() == []
    assert take.released(10).free_ms == 0
    assert take.released(10).taken_again(9, 8, "b", 1, 2).left == take.left
    assert take.without(0, 99).next_offset == 14


# --- the book ---


@pytest.mark.parametrize("round_", range(10))
def test_changes(round_: int) -> None:
    """Made, taken back, and made again on top of later ones."""
    chance = seeded()
    keys = [("g", "t", queue) for queue in range(3)]
    changes: list[Change] = []
    for _ in range(60):
        key = chance.choice(keys)
        take = random_take(chance)
        if chance.random() < 0.2:
            take = take.without(0, INT64_MAX)
        changes.append(PopsForgotten(*key) if chance.random() < 0.1 else QueueTaken(*key, take))
    book, undos = TakeBook({}), []
    tables = [dict(book.items())]
    for change in changes:
        undos.append(book.apply(change))
        tables.append(dict(book.items()))
    for back in range(len(changes)):
        book.undo(undos[-1 - back])
        assert dict(book.items()) == tables[-2 - back]
    resumed = TakeBook({})
    until = chance.randrange(len(changes) + 1)
    for change in [*changes[:until], *changes[chance.randint(0, until) :]]:
        resumed.apply(change)
    assert dict(resumed.items()) == tables[-1]


def test_an_entry_of_the_ledger() -> None:
    chance = seeded()
    changes = [QueueTaken(*KEY, random_take(chance)) for _ in range(20)]
    place, found, unknown = decode_entry(entry_of(Place(1, 2), list(map(pack_change, changes))))
    assert (place, found, unknown) == (Place(1, 2), changes, 0)


def test_it_is_forgotten() -> None:
    for change in (OffsetsForgotten("t"), GroupRemoved("g"), PopsForgotten(*KEY)):
        book = TakeBook({})
        book.apply(QueueTaken(*KEY, a_take()))
        book.apply(QueueTaken("h", "u", 0, a_take()))
        undo = book.apply(change)
        assert [key for key, _ in book.items()] == [("h", "u", 0)]
        book.undo(undo)
        assert book.get(KEY) == a_take()
        assert not book.apply(PopsForgotten("x", "y", 0))


# --- consumerOrderInfo.json ---


def written(folder: Path, takes: dict[Any, Take]) -> OrderFile:
    file = OrderFile(folder)
    for key, take in takes.items():
        file.book.apply(QueueTaken(*key, take))
    file.file.store_text("".join(file.pieces()), durable=False)
    return file


def test_it_is_written_and_read(tmp_path: Path) -> None:
    chance = seeded()
    takes = {
        (f"g{number % 2}", f"t{number % 3}", number): random_take(chance) for number in range(40)
    }
    written(tmp_path, takes)
    assert dict(OrderFile(tmp_path).book.items()) == takes
    assert "".join(OrderFile(tmp_path / "none").pieces()) == '{\n\t"table":{}\n}'


@pytest.mark.parametrize("name", ["pop", "pop-killed"])
def test_rocketmqs_own(name: str, tmp_path: Path) -> None:
    """What a RocketMQ broker left, and again as that writes it, but for what is ours."""
    store = golden.unpack(name, tmp_path, golden.BROKERS)
    file = OrderFile(store / "config")
    takes = dict(file.book.items())
    first, second = (takes["PopFifoGroup", "PopFifo", queue] for queue in (0, 1))
    assert first.left == ((2, 0), (3, 0), (4, 0))
    assert second.left == ((3, 0), (4, 0), (5, 0), (6, 0))
    assert (first.attempt, first.handle, first.until_ms - first.popped_ms) == (
        "attempt-1",
        0,
        20_000,
    )
    assert len(takes) == 2
    theirs = (store / "config" / "consumerOrderInfo.json").read_text()
    assert of_queue_1("".join(file.pieces())) == of_queue_1(theirs)


def of_queue_1(text: str) -> list[str]:
    """Without what is ours, and the ms between two looks at the clock."""
    lines = text[text.index(",1:{") :].splitlines()
    return [line for line in lines if line.strip().split(":")[0] not in ('"h"', '"oe"', '"l"')]


def test_what_rocketmq_takes_it_for() -> None:
    """Its rule of what is committed when all of these are acknowledged: behind the last that is
    listed. So the last one is, if it is done with."""
    info = order_info_of(a_take().without(13, 14).without(11, 12))
    assert (info.o, info.cm) == ([10, 2, 3], 0b100)
    info = order_info_of(a_take().without(11, 12).given_back(12, 99))
    assert (info.o, info.cm, info.oc, info.ot) == ([10, 2, 3], 0, {12: 1}, {12: 99, 13: 0})
    assert order_info_of(msgspec.structs.replace(a_take(), attempt="")).a is None


@pytest.mark.parametrize("info", [
    OrderInfo(),
    OrderInfo(o=[-1]),
    OrderInfo(o=[5, 0]),
    OrderInfo(o=[5, 3, 2]),
    OrderInfo(o=[5, -1]),
    OrderInfo(o=[INT64_MAX]),
    OrderInfo(o=[5, INT64_MAX]),
    OrderInfo(o=list(range(65))),
])  # fmt: skip
def test_what_makes_no_sense(info: OrderInfo) -> None:
    assert take_of(info) is None


def test_odd_numbers() -> None:
    odd = OrderInfo(
        cm=-(2**63), i=-5, o=[3, *range(1, 64)], oc={3: -7, 4: 2**31 - 1}, pop_time=-9,
        ot={5: -1, 6: 8},
    )  # fmt: skip
    take = take_of(odd)
    assert take is not None
    assert take.left[:3] == ((3, 0), (4, 2**30), (5, 0))
    assert len(take.left) == 63
    assert (take.until_ms, take.popped_ms) == (8, 0)
    most = take_of(OrderInfo(o=[1], i=INT64_MAX, pop_time=INT64_MAX, handle=5, out_end=-3))
    assert most is not None
    assert most.until_ms == INT64_MAX
    pack_change(QueueTaken(*KEY, most))


def test_a_damaged_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for content in ("{", '{"table":5}', '{"table":{"t@g":{0:{"o":["x"]}}}}'):
        (tmp_path / "consumerOrderInfo.json").write_text(content)
        assert not len(OrderFile(tmp_path).book)
        assert "comes again" in caplog.text
        caplog.clear()
    (tmp_path / "consumerOrderInfo.json").write_text(
        '{"table":{"t@g":{0:{"o":[1,-1]},1:{"o":[4]}}}}'
    )
    assert [key for key, _ in OrderFile(tmp_path).book.items()] == [("g", "t", 1)]
    assert "queue 0 of t@g makes no sense" in caplog.text


def test_a_queue_that_has_lost_its_end(tmp_path: Path) -> None:
    file = written(tmp_path, {KEY: a_take(), ("g", "t", 1): a_take()})
    assert not file.put_back({("t", 0): 14, ("t", 1): 14})
    assert file.put_back({("t", 0): 13, ("t", 1): 14})
    assert [key for key, _ in file.book.items()] == [("g", "t", 1)]
