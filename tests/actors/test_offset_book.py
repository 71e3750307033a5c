"""The book of offsets, by itself: it is what its changes come to, and a snapshot shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cometmq.actors.tables.offsets import OffsetBook
from cometmq.protocol.ledger import (
    Change,
    Fold,
    GroupRemoved,
    OffsetSet,
    OffsetsForgotten,
    Place,
    decode_entry,
    entry_of,
    pack_change,
)
from cometmq.shm.state.fastjson import decode
from cometmq.shm.state.json_text import dumps
from cometmq.shm.state.tables import ConsumerOffsetTable, DataVersion
from cometmq.shm.state.tables_text import offsets_pieces

NAMES = st.sampled_from(["a", "b", "%RETRY%a", "ä"])
Table = dict[str, dict[int, int]]


def table_of(book: OffsetBook) -> Table:
    return {key: dict(book.queues(key)) for key in book.every_key()}


def text_of(book: OffsetBook) -> str:
    return "".join(
        offsets_pieces(
            DataVersion(),
            ((group, sorted(book.topics_of(group))) for group in book.group_names()),
            ((key, book.queues(key)) for key in book.every_key()),
        )
    )


class BookMachine(RuleBasedStateMachine):
    """A book that lives, its model, its ledger, and snapshots that are made while it goes on.

    `entries` is what the log has; it may have any of them twice, or late.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book = OffsetBook({})
        self.model: Table = {}
        self.entries: list[bytes] = []
        self.number = 0
        self.undo: list[tuple[Table, Callable[[], None]]] = []
        self.waiting: list[Change] = []
        self.snapshot = text_of(self.book)
        self.mark = (0, Place())
        self.making: tuple[tuple[int, Place], Any, list[str]] | None = None

    # --- changes, and what becomes of them ---

    def change(self, change: Change) -> None:
        before = {key: dict(offsets) for key, offsets in self.model.items()}
        undo = self.book.apply(change)
        self.undo.append((before, lambda: self.book.undo(undo)))
        self.waiting.append(change)

    @rule(group=NAMES, topic=NAMES, queue_id=st.integers(0, 2), offset=st.integers(0, 9))
    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        self.change(OffsetSet(group, topic, queue_id, offset))
        self.model.setdefault(f"{topic}@{group}", {})[queue_id] = offset

    @rule(topic=NAMES)
    def forget(self, topic: str) -> None:
        self.change(OffsetsForgotten(topic))
        for key in [key for key in self.model if key.partition("@")[0] == topic]:
            del self.model[key]

    @rule(group=NAMES)
    def remove_group(self, group: str) -> None:
        self.change(GroupRemoved(group))
        for key in [key for key in self.model if key.partition("@")[2] == group]:
            del self.model[key]

    @rule(twice=st.booleans())
    def append(self, twice: bool) -> None:
        """What waits becomes an entry."""
        self.number += 1
        body = entry_of(Place(1, self.number), [pack_change(each) for each in self.waiting])
        self.entries += [body] * (1 + twice)
        self.waiting.clear()
        self.undo.clear()

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def append_late(self, data: st.DataObject) -> None:
        """One that lay in a connection that is over."""
        self.entries.append(data.draw(st.sampled_from(self.entries)))

    @rule()
    def refuse(self) -> None:
        """What waits is taken back, and the snapshot that may have some of it is given up."""
        for before, undo in reversed(self.undo):
            undo()
            self.model = before
        self.undo.clear()
        self.waiting.clear()
        self.making = None

    # --- snapshots ---

    @precondition(lambda self: self.making is None)
    @rule()
    def begin_snapshot(self) -> None:
        book = self.book
        pieces = offsets_pieces(
            DataVersion(),
            ((group, sorted(book.topics_of(group))) for group in book.group_names()),
            ((key, book.queues(key)) for key in book.every_key()),
        )
        self.making = ((len(self.entries), Place(1, self.number)), pieces, [])

    @precondition(lambda self: self.making is not None)
    @rule(count=st.integers(1, 4))
    def go_on_with_snapshot(self, count: int) -> None:
        assert self.making is not None
        mark, pieces, texts = self.making
        for _ in range(count):
            piece = next(pieces, None)
            if piece is None:
                if not self.waiting:  # all that may be in it is in the log
                    self.snapshot, self.mark, self.making = "".join(texts), mark, None
                return
            texts.append(piece)

    # --- what holds ---

    @invariant()
    def is_what_its_changes_come_to(self) -> None:
        assert table_of(self.book) == self.model
        keys = [key.partition("@") for key in self.model]
        assert self.book.groups() == {group for _, _, group in keys}
        for topic, _, group in keys:
            assert topic in self.book.topics_of(group)
            assert group in self.book.groups_of(topic)
            assert set(self.book.queue_ids(group, topic)) == set(self.model[f"{topic}@{group}"])
        table = ConsumerOffsetTable(offset_table=self.model)
        assert decode(text_of(self.book), ConsumerOffsetTable) == table

    @invariant()
    def a_start_finds_what_was_confirmed(self) -> None:
        position, last = self.mark
        again = OffsetBook(decode(self.snapshot, ConsumerOffsetTable).offset_table)
        fold = Fold(last)
        for body in self.entries[position:]:
            place, changes, _ = decode_entry(body)
            for change in changes if fold.admit(place) else ():
                again.apply(change)
        confirmed = self.undo[0][0] if self.undo else self.model
        assert table_of(again) == confirmed


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_text_is_what_rocketmq_writes() -> None:
    table = ConsumerOffsetTable(
        data_version=DataVersion(0, 7, 1_700_000_000_000),
        offset_table={'t"@g': {0: 5, 1: 7}, "u@g": {3: 0}},
    )
    book = OffsetBook(msgspec.convert(table.offset_table, dict[str, dict[int, int]]))
    pieces = offsets_pieces(
        table.data_version,
        ((group, table.group_topic_map()[group]) for group in book.group_names()),
        ((key, book.queues(key)) for key in book.every_key()),
    )
    assert "".join(pieces) == dumps(table)
    empty = offsets_pieces(table.data_version, (), ())
    assert "".join(empty) == dumps(ConsumerOffsetTable(data_version=table.data_version))


def test_what_lies_behind_the_end_of_its_queue() -> None:
    book = OffsetBook({"t@g": {0: 5, 1: 7}, "u@g": {0: 1}})
    assert book.behind({("t", 0): 5, ("t", 1): 6}) == [("g", "t", 1, 7, 6), ("g", "u", 0, 1, 0)]


@pytest.mark.parametrize("queue_id", [-1, 0, 1_023, 1_024, 1 << 31])
def test_any_queue_id(queue_id: int) -> None:
    """RocketMQ's files may have any; those that topics have lie in an array."""
    book = OffsetBook({"t@g": {queue_id: 7, 5: 1}, "u@g": {queue_id: 3}})
    assert [book.get("g", "t", each) for each in (queue_id, 5, 4)] == [7, 1, -1]
    assert table_of(book) == {"t@g": {queue_id: 7, 5: 1}, "u@g": {queue_id: 3}}
    table = ConsumerOffsetTable(offset_table=table_of(book))
    assert decode(text_of(book), ConsumerOffsetTable) == table
    undo = book.apply(OffsetSet("h", "t", queue_id, 9))
    assert book.get("h", "t", queue_id) == 9
    book.undo(undo)
    assert "h" not in book.groups()
