"""consumerFilter.json: what groups register of their SQL92 filters, how long it lives, its text."""

from __future__ import annotations

from pathlib import Path

import golden
import pytest
from family import RunningBroker
from patience import patient
from shared_data import data_path
from waiting import until

from cometmq import Consumer
from cometmq.actors.coordination.files import FiltersFile
from cometmq.actors.tables.filters import (
    DROPPED_AFTER_MS,
    UNHEARD_MS,
    FilterBook,
)
from cometmq.client import Admin
from cometmq.protocol.ledger import (
    Change,
    FilterDropped,
    FilterPut,
    GroupRemoved,
    Place,
    decode_entry,
    entry_of,
    pack_change,
)
from cometmq.protocol.tags import expression_of, joined
from cometmq.shm.state.bloom import bit_positions
from cometmq.shm.state.fastjson import decode, loads
from cometmq.shm.state.json_text import dumps
from cometmq.shm.state.tables import ConsumerFilterTable

SQL = "code >= 500"
NOW = 1_800_000_000_000
SETTINGS = {"flushConsumerOffsetInterval": 200, "consumerSessionTimeout": 3_000}


def wanting(**sql: str) -> dict[str, str]:
    return {topic: joined("*", text) for topic, text in sql.items()} | {"plain": "a || b"}


def made(book: FilterBook, changes: list[Change]) -> list[Change]:
    for change in changes:
        book.apply(change)
    return changes


def test_a_filter_is_registered_dies_and_comes_back() -> None:
    book = FilterBook({})
    first = FilterPut("g", "t", SQL, NOW, NOW, 0)
    assert made(book, list(book.differences("g", wanting(t=SQL), NOW))) == [first]
    assert not list(book.differences("g", wanting(t=SQL), NOW + 1))
    died = FilterPut("g", "t", SQL, NOW, NOW, NOW + 5)
    assert made(book, list(book.differences("g", wanting(), NOW + 5))) == [died]
    assert not list(book.differences("g", {}, NOW + 6))
    again = FilterPut("g", "t", SQL, NOW + 9, NOW, 0)
    assert made(book, list(book.differences("g", wanting(t=SQL), NOW + 9))) == [again]
    other = FilterPut("g", "t", "code = 1", NOW + 20, NOW + 20, 0)
    assert made(book, list(book.differences("g", wanting(t="code = 1"), NOW + 20))) == [other]


def test_one_that_is_dead_for_a_day_is_dropped() -> None:
    book = FilterBook({})
    made(book, list(book.differences("g", wanting(t=SQL, u=SQL), NOW)))
    made(book, list(book.differences("g", wanting(u=SQL), NOW + 1)))
    assert not book.forgotten(NOW + DROPPED_AFTER_MS)
    assert book.forgotten(NOW + 1 + DROPPED_AFTER_MS) == [FilterDropped("g", "t")]
    made(book, book.forgotten(NOW + 1 + DROPPED_AFTER_MS))
    assert book.by_topic().keys() == {"u"}
    made(book, [GroupRemoved("g")])
    assert not book.by_topic()


def test_after_a_start_groups_without_members_have_none_that_lives() -> None:
    book = FilterBook({})
    for group, born in (("old", NOW - 10 * UNHEARD_MS), ("new", NOW - 1), ("here", NOW)):
        made(book, list(book.differences(group, wanting(t=SQL), born)))
    assert made(book, list(book.unheard({"here"}, NOW))) == [
        FilterPut("old", "t", SQL, NOW - 10 * UNHEARD_MS, NOW - 10 * UNHEARD_MS, NOW - UNHEARD_MS),
        FilterPut("new", "t", SQL, NOW - 1, NOW - 1, NOW - 1),  # not before it was born
    ]
    assert not list(book.unheard({"here"}, NOW))


def test_what_is_taken_back() -> None:
    book = FilterBook({})
    made(book, list(book.differences("g", wanting(t=SQL), NOW)))
    before = book.by_topic()
    undoing = [
        book.apply(change)
        for change in (
            FilterPut("g", "t", "x = 1", 1, 1, 0), FilterPut("g", "u", "y = 1", 1, 1, 0),
            FilterDropped("g", "t"), FilterDropped("g", "t"), GroupRemoved("g"), GroupRemoved("g"),
            FilterPut("h", "t", "z = 1", 1, 1, 0),
        )
    ]  # fmt: skip
    changes = book.changes
    for undo in reversed(undoing):
        book.undo(undo)
    assert book.by_topic() == before
    assert book.changes > changes


def test_tags_beside_it() -> None:
    """RocketMQ knows one of both for a subscription."""
    assert expression_of(joined("*", SQL)) == SQL
    assert expression_of("a || b") == ""
    assert expression_of(joined("b || it's", "x = 1 OR y = 2")) == (
        "TAGS IN ('b', 'it''s') AND (x = 1 OR y = 2)"
    )


def test_the_entry_of_the_ledger() -> None:
    changes: list[Change] = [FilterPut("g", "t", SQL, 1, 2, 3), FilterDropped("g", "t")]
    entry = entry_of(Place(1, 2), [pack_change(each) for each in changes])
    assert decode_entry(entry) == (Place(1, 2), changes, 0)


# --- the file ---


def test_where_it_stands_in_the_bloom_filter() -> None:
    """As RocketMQ had it in three files."""
    assert bit_positions("g", "t") == (22, 87, 58)
    assert bit_positions("GSqlTwo", "SqlTopic") == (47, 39, 17)
    assert bit_positions("GSqlOne", "SqlTopic") == (99, 0, 13)


@pytest.mark.parametrize("folder", ["golden", "of a broker"])
def test_rocketmqs_file_keeps_its_bytes(folder: str, tmp_path: Path) -> None:
    if folder == "golden":
        content = data_path("rocketmq-stores", "config", "consumerFilter.json").read_bytes()
    else:
        store = golden.unpack("groups", tmp_path / "set", golden.BROKERS)
        content = (store / "config" / "consumerFilter.json").read_bytes()
    (tmp_path / "consumerFilter.json").write_bytes(content)
    file = FiltersFile(tmp_path)
    assert "".join(file.pieces()).encode() == content
    assert dumps(decode(content, ConsumerFilterTable)).encode() == content


def test_a_file_without_filters(tmp_path: Path) -> None:
    text = "".join(FiltersFile(tmp_path).pieces())
    assert text == dumps(ConsumerFilterTable())
    assert loads(text) == {"filterDataByTopic": {}}


def test_a_damaged_file_costs_only_what_it_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "consumerFilter.json").write_text('{"filterDataByTopic":{"t":7}}')
    assert not FiltersFile(tmp_path).book.by_topic()
    assert "start anew" in caplog.text


# --- a broker ---


def registered(store: Path) -> dict[str, tuple[str, bool]]:
    """By group: the filter for `t`, and whether it is dead."""
    path = store / "config" / "consumerFilter.json"
    table = decode(path.read_bytes(), ConsumerFilterTable) if path.exists() else None
    filters = table.filter_data_by_topic.get("t") if table else None
    if filters is None:
        return {}
    return {
        group: (each.expression, each.dead_time >= each.born_time)
        for group, each in filters.group_filter_data.items()
    }


@pytest.mark.slow
def test_members_register_it_and_it_outlives_a_kill(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store, {"flushConsumerOffsetInterval": 600_000}) as broker:
        broker.create_topic("t", 1)
        broker.send("t", 0, [b"x"], properties={"code": "500"})
        server = broker.ready.name_server
        with Consumer(server, "g", "t", sql=SQL) as consumer, Consumer(server, "h", "t"):
            assert [each.body for each in consumer.poll(timeout_s=patient(60))] == [b"x"]
            assert registered(store) == {}, "no snapshot yet: it is in the ledger alone"
            broker.kill_all()
    with RunningBroker(store, SETTINGS) as broker:
        until(lambda: registered(store) == {"g": (SQL, True)}, says="it is dead, as its member is")
        server = broker.ready.name_server
        with Consumer(server, "g", "t", sql=SQL) as consumer:
            consumer.poll(timeout_s=0)
            until(lambda: registered(store) == {"g": (SQL, False)}, says="it lives")
        until(lambda: registered(store) == {"g": (SQL, True)}, says="it is dead again")
        with Admin(server) as admin:
            admin.delete_group("g")
        until(lambda: registered(store) == {}, says="it is gone")


# --- what has maps made ---


def put(
    book: FilterBook, group: str, topic: str, text: str, born_ms: int, dead_ms: int = 0
) -> None:
    book.apply(FilterPut(group, topic, text, born_ms, born_ms, dead_ms))
