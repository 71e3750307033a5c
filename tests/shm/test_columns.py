"""The kernel's Arrow columns against an independent decoder, and against rubbish."""

from __future__ import annotations

import itertools
import struct
import zlib
from pathlib import Path
from typing import Any

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_scan import scan_log

from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import decode
from cometmq.shm.kernel.columns import (
    COLUMN_NAMES,
    COLUMNS_DAMAGED,
    COLUMNS_DONE,
    COLUMNS_FULL,
    Columns,
    QueueSpans,
)
from cometmq.shm.reading import column_reader
from cometmq.shm.reading.column_reader import ColumnReader, log_end
from cometmq.shm.reading.positions import file_sizes

I32, I64 = struct.Struct("<i"), struct.Struct("<q")
NUMBERS = {"queue_id": "i", "queue_offset": "q", "store_ts": "q", "born_ts": "q",
           "reconsume_times": "i", "physical_offset": "q", "store_size": "i", "body_crc": "i",
           "flag": "i", "sys_flag": "i", "prepared_txn_offset": "q"}  # fmt: skip
RAW = {"body", "properties_raw", "body_raw"}


def rows_of(columns: Columns, names: tuple[str, ...] = COLUMN_NAMES) -> list[dict[str, Any]]:
    """What was collected, by nothing but Arrow's layout: no pyarrow."""
    count, found = columns.take()
    by_name = {}
    for name, (nulls, buffers) in zip(names, found, strict=True):
        views = [bytes(memoryview(buffer)) for buffer in buffers]
        if name in NUMBERS:
            by_name[name] = list(struct.unpack(f"<{count}{NUMBERS[name]}", views[0]))
        elif name == "properties":
            _, offsets, name_offsets, names_text, value_offsets, values_text = views
            pairs = list(zip(
                texts(name_offsets, names_text), texts(value_offsets, values_text), strict=True
            ))  # fmt: skip
            edges = numbers(offsets)
            by_name[name] = [pairs[low:high] for low, high in itertools.pairwise(edges)]
        else:
            valid = [bool(views[0][row // 8] >> row % 8 & 1) for row in range(count)]
            assert valid.count(False) == nulls
            values: list[Any] = raws(views[1], views[2])
            if name not in RAW:
                values = [value.decode() for value in values]
            by_name[name] = [v if ok else None for v, ok in zip(values, valid, strict=True)]
        assert len(by_name[name]) == count
    return [dict(zip(by_name, row, strict=True)) for row in zip(*by_name.values(), strict=True)]


def numbers(view: bytes) -> list[int]:
    return [value for (value,) in I32.iter_unpack(view)]


def raws(offsets: bytes, data: bytes) -> list[bytes]:
    edges = numbers(offsets)
    assert edges[0] == 0
    assert edges[-1] == len(data)
    return [data[low:high] for low, high in itertools.pairwise(edges)]


def texts(offsets: bytes, data: bytes) -> list[str]:
    return [raw.decode() for raw in raws(offsets, data)]


def expected(record: bytes) -> dict[str, Any]:
    """By the message that a consumer would see."""
    (one,) = decode(record, None, False)
    properties = one.properties
    return {
        "topic": one.topic, "broker": "b", "queue_id": one.queue_id,
        "queue_offset": one.queue_offset, "store_ts": one.store_timestamp_ms * 1000,
        "born_ts": one.born_timestamp_ms * 1000, "keys": properties.get("KEYS"),
        "tags": properties.get("TAGS"), "unique_key": properties.get("UNIQ_KEY"),
        "body": one.stored_body, "properties": properties,
        "reconsume_times": one.reconsume_times, "physical_offset": one.physical_offset,
        "store_size": one.size, "body_crc": one.body_crc, "flag": one.flag,
        "sys_flag": one.sys_flag, "born_host": one.born_host, "store_host": one.store_host,
        "prepared_txn_offset": one.prepared_transaction_offset,
        "properties_raw": one.raw_properties, "body_raw": one.stored_body,
        "msg_id": one.offset_msg_id,
    }  # fmt: skip


def record(
    body: bytes = b"body", properties: bytes = b"", topic: bytes = b"t", queue_id: int = 0,
    queue_offset: int = 0, physical_offset: int = 0, sys_flag: int = 0, born_ms: int = 1,
    store_ms: int = 2, crc: int | None = None,
) -> bytes:  # fmt: skip
    """One record, written here by store-format.md."""
    crc = zlib.crc32(body) & 0x7FFFFFFF if crc is None else crc
    hosts = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
    tail = struct.pack(">iqi", 3, 4, len(body)) + body + bytes([len(topic)]) + topic
    tail += struct.pack(">h", len(properties)) + properties
    head = struct.pack(
        ">Iiiiqqiq", 0xDAA320A7, crc, queue_id, 5, queue_offset, physical_offset, sys_flag, born_ms
    )
    rest = head + hosts + struct.pack(">q", store_ms) + hosts + tail
    return struct.pack(">i", len(rest) + 4) + rest


def scan_all(log: bytes, columns: Columns) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    at = 0
    while True:
        reason, at = columns.scan(log, 0, at, len(log))
        if reason == COLUMNS_DONE:
            return found + rows_of(columns)
        assert reason == COLUMNS_FULL
        found += rows_of(columns)


@pytest.mark.parametrize("name", golden.CLEAN)
def test_golden_stores(name: str, tmp_path: Path) -> None:
    store = golden.unpack(name, tmp_path)
    reader = ColumnReader.up_to(store, log_end(store))
    columns = Columns(COLUMN_NAMES, "b", decompress=False, rows_max=100)
    at, end = reader.positions.log_range()
    found: list[dict[str, Any]] = []
    while at < end:
        reason, at = reader.scan_columns(columns, at, end)
        assert reason in (COLUMNS_FULL, COLUMNS_DONE)
        found += rows_of(columns)
    wanted = [expected(message.record) for message in scan_log(reader)]
    assert [row | {"properties": dict(row["properties"])} for row in found] == wanted
    reader.close()


PIECES = st.lists(
    st.sampled_from(
        [b"KEYS\x01a b\x02", b"TAGS\x01t\x02", b"UNIQ_KEY\x01u\x02", b"TAGS\x01\x02", b"\x01v\x02",
         b"n\x01v\x01w\x02", b"x\x02", b"\x02", b"TAGS\x01last", b"n\x01\xff\xc3\x28\x02",
         b"\xe2\x82\x01\xf0\x9f\x98\x80\x02", b"\xed\xa0\x80\x01\xf4\x90\x80\x80\x02"]
    ),
    max_size=6,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=40), PIECES | st.lists(st.binary(max_size=30)))))
def test_any_properties(messages: list[tuple[bytes, list[bytes]]]) -> None:
    """Text that is none, names twice, names and values that are empty."""
    log = b""
    for body, pieces in messages:
        log += record(body, b"".join(pieces), physical_offset=len(log))
    found = scan_all(log, Columns(COLUMN_NAMES, "b", decompress=False, rows_max=3))
    for row, one in zip(found, decode(log), strict=True):
        wanted = expected(one.record)
        raw = one.raw_properties
        # Two names may be different bytes and the same text; the kernel keeps both.
        assert dict(row["properties"]) == wanted["properties"], raw
        assert row | {"properties": None} == wanted | {"properties": None}


def test_many_properties() -> None:
    """More than are compared one by one; the last of a name counts."""
    pairs = [(f"n{number % 3000}", f"v{number}") for number in range(3500)]
    raw = "".join(f"{name}\x01{value}\x02" for name, value in pairs)[:32_700].encode()
    raw = raw[: raw.rindex(b"\x02") + 1]
    log = record(b"", raw)
    (row,) = scan_all(log, Columns(COLUMN_NAMES, "b"))
    (one,) = decode(log)
    assert dict(row["properties"]) == one.properties
    assert len(row["properties"]) == len(one.properties)


def test_batches_end_in_time() -> None:
    """One record is always taken; none is taken that would go over the limit."""
    log = b""
    for number, size in enumerate((10, 5000, 10, 10, 10, 900)):
        log += record(b"x" * size, queue_offset=number, physical_offset=len(log))
    columns = Columns(("queue_offset",), "b", bytes_max=1000)
    at, batches = 0, []
    while at < len(log):
        _, at = columns.scan(log, 0, at, len(log))
        batches.append([row["queue_offset"] for row in rows_of(columns, ("queue_offset",))])
    assert batches == [[0], [1], [2, 3, 4], [5]]


def test_who_still_looks_keeps_his_batch() -> None:
    log = record(b"first") + record(b"second", physical_offset=len(record(b"first")))
    columns = Columns(("body",), "b", rows_max=1)
    columns.scan(log, 0, 0, len(log))
    _, ((_, kept),) = columns.take()
    views = [memoryview(buffer) for buffer in kept]
    columns.scan(log, 0, len(record(b"first")), len(log))
    _, ((_, second),) = columns.take()
    assert bytes(views[2]) == b"first"
    assert bytes(memoryview(second[2])) == b"second"
    del views
    columns.scan(log, 0, 0, len(log))
    _, ((_, third),) = columns.take()
    assert third[2] is kept[2]  # nobody looks any more: the same memory again


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_rubbish_is_damage(data: st.DataObject) -> None:
    """Any bytes flipped anywhere: rows that are right, or a place that is named; never a crash."""
    log = b""
    for number in range(3):
        properties = b"TAGS\x01a\x02"
        log += record(b"b%d" % number, properties, queue_offset=number, physical_offset=len(log))
    raw = bytearray(log)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    columns = Columns(COLUMN_NAMES, "b")
    reason, reached = columns.scan(bytes(raw), 0, 0, len(raw))
    assert 0 <= reached <= len(raw)
    if reason == COLUMNS_DAMAGED:
        assert columns.damage[0] in codec.REASONS
        assert columns.damage[2] == reached
    rows_of(columns)
    index = position = 0
    while position < len(raw):
        try:
            why, position, index = columns.decode_run(bytes(raw), position, b"t", 0, index, 3)
        except codec.RecordDamaged:
            break
        if why in (COLUMNS_DONE, COLUMNS_DAMAGED):
            break
        index += 1
    rows_of(columns)


def test_a_body_that_cannot_be_unfolded_is_damage() -> None:
    """The flags say ZLIB, the body is none: one of the reasons, and what the codec says of it."""
    log = record(b"body", queue_offset=7, sys_flag=1)
    columns = Columns(("body",), "b")
    assert columns.scan(log, 0, 0, len(log)) == (COLUMNS_DAMAGED, 0)
    reason, queue_offset, physical_offset, *crcs, details = columns.damage
    assert reason == "its body cannot be unfolded"
    assert reason in codec.REASONS
    assert (queue_offset, physical_offset, crcs) == (7, 0, [-1, -1])
    assert "ZLIB" in details


def test_damage_says_both_crcs() -> None:
    log = record(b"body", queue_offset=7, crc=17)
    columns = Columns(("body",), "b")
    assert columns.scan(log, 0, 0, len(log)) == (COLUMNS_DAMAGED, 0)
    crc = zlib.crc32(b"body") & 0x7FFFFFFF
    assert columns.damage == ("wrong body CRC", 7, 0, 17, crc, "")
    nulled = Columns(("body", "queue_offset"), "b", null_body=True)
    assert nulled.scan(log, 0, 0, len(log))[0] == COLUMNS_DONE
    assert rows_of(nulled, ("body", "queue_offset")) == [{"body": None, "queue_offset": 7}]
    assert nulled.nulled == 1


def test_filters() -> None:
    log = b""
    for number, tag in enumerate((b"Aa", b"BB", b"Aa", b"c")):
        properties = b"TAGS\x01" + tag + b"\x02KEYS\x01k%d\x02" % number
        log += record(
            b"x", properties, queue_offset=number, physical_offset=len(log), store_ms=100 + number
        )
    log += record(b"x", physical_offset=len(log), store_ms=200, queue_offset=4)

    def offsets(**filters: Any) -> list[int]:
        columns = Columns(("queue_offset",), "b", **filters)
        columns.scan(log, 0, 0, len(log))
        return [row["queue_offset"] for row in rows_of(columns, ("queue_offset",))]

    assert offsets() == [0, 1, 2, 3, 4]
    assert offsets(tags=["Aa", "c"]) == [0, 2, 3]
    assert offsets(tags=[]) == []
    assert offsets(keys=["k3", "k0"]) == [0, 3]
    assert offsets(begin_ms=101, end_ms=103) == [1, 2]
    assert offsets(tags=["Aa"], begin_ms=101) == [2]


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.text("aZ0%|_-+", min_size=1, max_size=5), st.integers(0, 5)),
        st.tuples(st.integers(0, 9), st.integers(0, 9)),
        max_size=300,
    )
)
def test_queue_spans(spans: dict[tuple[str, int], tuple[int, int]]) -> None:
    """What was put in comes out, and is found by the records of a log."""
    found = QueueSpans()
    for (topic, queue_id), (begin, end) in spans.items():
        found.add(topic, queue_id, begin, end)
    assert len(found) == len(spans)
    assert {(t, q): (b, e) for t, q, b, e in found.items()} == spans
    log = b""
    for topic, queue_id in spans:
        log += record(
            b"", topic=topic.encode(), queue_id=queue_id, queue_offset=4, physical_offset=len(log)
        )
    names = ("topic", "queue_id")
    columns = Columns(names, "b")
    columns.scan(log, 0, 0, len(log), found)
    wanted = [key for key, (begin, end) in spans.items() if begin <= 4 < end]
    assert [(row["topic"], row["queue_id"]) for row in rows_of(columns, names)] == wanted
    seen = QueueSpans()
    assert seen.survey(log, 0, 0, len(log)) == (len(log), 0)
    assert {(t, q): (b, e) for t, q, b, e in seen.items()} == dict.fromkeys(spans, (4, 5))


def units(*entries: tuple[int, int]) -> bytes:
    return b"".join(struct.pack(">qiq", physical, size, 0) for physical, size in entries)


def test_parts_of_a_queue() -> None:
    sizes = [100, 100, 100, 500, 100, 0x7FFFFFFF, 100]
    raw = units(*[(0, size) for size in sizes])
    assert codec.unit_marks(raw, 0, 0, 7, 200, 99, 0, 0, 10) == ([2, 3, 4], 7, 1000, 200, 3)
    assert codec.unit_marks(raw, 0, 0, 7, 10_000, 3, 0, 0, 10)[0] == [3, 6]
    assert codec.unit_marks(raw, 0, 0, 7, 200, 99, 0, 0, 1)[:3] == ([2], 3, 300)
    assert codec.unit_marks(raw, 0, 1, 7, 200, 99, 150, 1, 10)[0] == [1, 3, 4]
    with pytest.raises(ValueError, match="not in the segment"):
        codec.unit_marks(raw, 0, 0, 8, 200, 99, 0, 0, 10)


def test_what_lies_below() -> None:
    raw = units((0, 100), (100, 50), (150, 10), (0, 0x7FFFFFFF))
    assert codec.units_below(raw, 0, 4, 1000) == 3  # a filler at the end says nothing
    assert codec.units_below(raw, 0, 3, 160) == 3
    assert codec.units_below(raw, 0, 3, 159) == 2
    assert codec.units_below(raw, 0, 3, 0) == 0
    with pytest.raises(ValueError, match="not in the segment"):
        codec.units_below(raw, 0, 5, 0)


def test_a_reader_looks_at_the_files_of_a_store_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 30: one examination of a store's many files, although each task has a reader."""
    store = golden.unpack(golden.CLEAN[0], tmp_path)
    end = log_end(store)
    looks = 0

    def counted(path: Path) -> tuple[int, int]:
        nonlocal looks
        looks += 1
        return file_sizes(path)

    monkeypatch.setattr(column_reader, "file_sizes", counted)
    reader = ColumnReader.up_to(store, end)
    assert looks == 1
    assert reader.positions.log_range()[1] == end
    reader.close()
