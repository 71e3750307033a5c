"""The book of members and the book of groups: what their changes come to, and taking them back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.actors.coordination.files import MemberTable
from cometmq.actors.tables.group_share import GroupRecord
from cometmq.actors.tables.groups import GroupBook
from cometmq.actors.tables.members import MemberBook
from cometmq.protocol.configs import SubscriptionGroupConfig
from cometmq.protocol.ledger import (
    Change,
    GroupPut,
    GroupRemoved,
    Place,
    TopicAsked,
    TopicRemoved,
    decode_entry,
    entry_of,
    pack_change,
)
from cometmq.shm.state.fastjson import decode
from cometmq.shm.state.json_text import dumps
from cometmq.shm.state.tables import DataVersion, SubscriptionGroupTable
from cometmq.shm.state.tables_text import groups_pieces, member_pieces

MEMBERS = ("a", "b", "c")
TOPICS = ("t", "u")
records = st.builds(
    GroupRecord,
    version=st.integers(1, 9),
    members=st.dictionaries(
        st.sampled_from(MEMBERS), st.dictionaries(st.sampled_from(TOPICS), st.sampled_from("*x"))
    ),
    owners=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            TOPICS,
            st.dictionaries(st.integers(0, 3), st.sampled_from(MEMBERS), min_size=1),
        ),
    ),
)


def with_epochs(record: GroupRecord) -> GroupRecord:
    epochs = {
        topic: dict.fromkeys(owners, record.version) for topic, owners in record.owners.items()
    }
    return msgspec.structs.replace(record, epochs=epochs)


def through_the_ledger(changes: list[Change]) -> list[Change]:
    """As another process has them."""
    body = entry_of(Place(1, 1), [pack_change(change) for change in changes])
    place, found, unknown = decode_entry(body)
    assert (place, unknown) == (Place(1, 1), 0)
    return found


def state_of(book: MemberBook) -> Any:
    subscribed = {name: set(topics) for name, topics in book.subscribed.items() if topics}
    return dict(book.records()), subscribed


@given(st.lists(records, min_size=1, max_size=6))
def test_a_group_is_what_its_differences_come_to(steps: list[GroupRecord]) -> None:
    book, again = MemberBook({}, {}, 0), MemberBook({}, {}, 0)
    for record in map(with_epochs, steps):
        before = state_of(book)
        undos = [book.apply(change) for change in book.differences("g", record)]
        for undo in reversed(undos):
            book.undo(undo)
        assert state_of(book) == before
        changes = list(book.differences("g", record))
        for change in through_the_ledger(changes):
            book.apply(change)
            again.apply(change)
        assert list(book.differences("g", record)) == []
        assert state_of(again) == state_of(book)
        if record.members:
            assert dict(book.records()) == {"g": record}
        for change in changes:  # made once more, as on top of a snapshot
            again.apply(change)
        assert state_of(again) == state_of(book)
        assert again.highest == book.highest >= record.version


def test_topics_that_were_asked_for_go_with_the_topic() -> None:
    book = MemberBook({}, {}, 0)
    for group in ("g", "h"):
        assert book.apply(TopicAsked(group, "t"))
        assert not book.apply(TopicAsked(group, "t"))
    book.apply(TopicAsked("g", "u"))
    before = state_of(book)
    undo = book.apply(TopicRemoved("t"))
    assert state_of(book)[1] == {"g": {"u"}}
    assert book.asking_for("t") == set()
    book.undo(undo)
    assert state_of(book) == before
    assert book.asking_for("t") == {"g", "h"}


def test_nothing_is_left_of_a_group_that_goes() -> None:
    record = with_epochs(GroupRecord(version=7, members={"m": {"t": "*"}}, owners={"t": {0: "m"}}))
    book = MemberBook({"g": record, "h": record}, {"g": {"t"}, "h": {"t"}}, 9)
    before = state_of(book)
    undo = book.apply(GroupRemoved("g"))
    assert state_of(book) == ({"h": record}, {"h": {"t"}})
    assert book.asking_for("t") == {"h"}
    assert book.highest == 9  # epochs of before are never given again
    book.undo(undo)
    assert state_of(book) == before
    book.undo(book.apply(GroupRemoved("unknown")))
    assert state_of(book) == before


def test_groups_come_and_go() -> None:
    book = GroupBook({}, 100)
    first = SubscriptionGroupConfig(group_name="g")
    second = SubscriptionGroupConfig(group_name="g", retry_max_times=3, attributes={"k": "v"})
    undos = []
    for change in through_the_ledger([GroupPut(first), GroupPut(second), GroupRemoved("g")]):
        undos.append(book.apply(change))
    assert (book.configs, book.changes) == ({}, 3)
    book.undo(undos.pop())
    assert book.configs == {"g": second}
    book.undo(undos.pop())
    assert book.configs == {"g": first}
    assert not book.apply(TopicRemoved("t"))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_texts_are_what_the_tables_have(count: int) -> None:
    table = SubscriptionGroupTable(
        data_version=DataVersion(0, 7, 1), forbidden_table={"g": {"t": 1}}
    )
    groups = {f"g{n}": SubscriptionGroupConfig(group_name=f"g{n}") for n in range(count)}
    text = "".join(groups_pieces(table, groups.items()))
    table.subscription_group_table = groups
    assert text == dumps(table)
    members = MemberTable(
        groups={
            f"g{n}": GroupRecord(
                version=n, members={"m": {"t": "*"}}, owners={"t": {0: "m"}}, epochs={"t": {0: n}}
            )
            for n in range(count)
        },
        subscribed={f"g{n}": ["t", "u"] for n in range(count)},
        highest=count,
    )
    pieces = member_pieces(count, members.groups.items(), members.subscribed.items())
    assert decode("".join(pieces), MemberTable) == members
