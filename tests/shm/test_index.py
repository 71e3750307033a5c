"""Index files: what RocketMQ wrote is read, what we write is what RocketMQ would have written."""

from __future__ import annotations

import itertools
import mmap
import struct
import time
from pathlib import Path
from typing import Any

import golden
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from cometmq.shm.derived.index_file import (
    IndexFiles,
    IndexHeader,
    IndexReader,
    IndexShape,
    delete_expired,
    list_index_files,
    next_name,
    read_header,
)
from cometmq.shm.derived.index_recovery import LogScan, recover_index
from cometmq.shm.kernel.layout import INDEX_ENTRY, INDEX_HEADER
from cometmq.shm.kernel.store import INDEX_BAD, INDEX_BLANK, index_hash, index_is_whole
from cometmq.shm.log.recovery import recover_log
from cometmq.shm.os.files import map_segment


def shape_of(meta: dict[str, Any]) -> IndexShape:
    return IndexShape(meta["settings"]["maxHashSlotNum"], meta["settings"]["maxIndexNum"])


def assert_answers(reader: IndexReader, meta: dict[str, Any]) -> None:
    queries = meta["queries"]["queryMessage"]
    assert len(queries) > 200
    for query in queries:
        found = reader.query(
            query["topic"], query["key"], query["maxNum"], query["begin"], query["end"]
        )
        assert found == query["physicalOffsets"], query
    assert not reader.damaged


def build(
    store: Path, meta: dict[str, Any], log_end: int, *, step: int = 1000, begin: int = 0
) -> None:
    """Index the store's log, a few records a call."""
    segment_bytes = meta["settings"]["mappedFileSizeCommitLog"]
    files = IndexFiles(store, shape_of(meta))
    files.open_newest()
    at = begin
    while at < log_end:
        start = at // segment_bytes * segment_bytes
        path = store / "commitlog" / f"{start:020d}"
        with map_segment(path, segment_bytes, writable=False) as memory:
            end = min(log_end, start + segment_bytes)
            at, reason = files.index(memory, start, at, end, step)
        if reason == INDEX_BLANK:
            at = start + segment_bytes
        assert reason != INDEX_BAD
    files.close()


def entries(path: Path, shape: IndexShape) -> list[tuple[int, int]]:
    """(keyHash, physical offset) of every entry."""
    raw = path.read_bytes()
    header = IndexHeader.of(raw)
    found = [
        INDEX_ENTRY.unpack(raw, shape.entries_at + number * INDEX_ENTRY.size)
        for number in range(1, header.index_count)
    ]
    return [(entry["key_hash"], entry["physical_offset"]) for entry in found]


# --- RocketMQ's own files -------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.CLEAN)
def test_golden_files_answer_as_rocketmq_did(name: str, tmp_path: Path) -> None:
    meta = golden.meta(name)
    store = golden.unpack(name, tmp_path)
    reader = IndexReader(store, shape_of(meta))
    assert_answers(reader, meta)
    reader.close()


@pytest.mark.parametrize("name", golden.ALL)
def test_golden_headers(name: str, tmp_path: Path) -> None:
    meta = golden.meta(name)
    store = golden.unpack(name, tmp_path)
    assert list_index_files(store) == [file["file"] for file in meta["onDisk"]["index"]]
    for file in meta["onDisk"]["index"]:
        path = store / "index" / file["file"]
        assert read_header(path) == tuple(list(file.values())[1:])
        with map_segment(path, shape_of(meta).file_bytes, writable=False) as memory:
            slots, count = shape_of(meta).slots, shape_of(meta).entries
            assert index_is_whole(memory, slots, count)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        (name, step)
        for name in golden.CLEAN
        for step in (1, 7, 100_000)
        if (name, step) != ("loghub-clean", 1)  # 16,000 calls
    ],
)
def test_built_by_us_from_the_golden_logs(name: str, step: int, tmp_path: Path) -> None:
    """Byte for byte: the names alone differ, which are the time of creation."""
    meta = golden.meta(name)
    theirs = golden.unpack(name, tmp_path)
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "commitlog").symlink_to(theirs / "commitlog")
    build(ours, meta, meta["opened"]["maxPhyOffset"], step=step)
    names = list_index_files(ours)
    assert len(names) == len(list_index_files(theirs))
    for our_name, their_name in zip(names, list_index_files(theirs), strict=True):
        our, their = ours / "index" / our_name, theirs / "index" / their_name
        assert our.read_bytes() == their.read_bytes(), their_name
    reader = IndexReader(ours, shape_of(meta))
    assert_answers(reader, meta)
    reader.close()


# --- against a model ------------------------------------------------------------------------------


def test_the_hash_that_has_no_absolute() -> None:
    topic, key = find_min_hash()
    assert reference.java_hash(f"{topic}#{key}") == -(2**31)
    assert index_hash(topic, key) == 0
    assert index_hash("TopicA", "U1") == 1903241331
    assert index_hash("TopicA", "k1") == 1903240649


def find_min_hash() -> tuple[str, str]:
    """A key of topic `t` whose hash is -2**31: some letters, and three characters worked out."""
    for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=2):
        head = "".join(letters) + "aa"
        left = (2**31 - reference.java_hash(f"t#{head}") * 31**3) % 2**32
        first = left // 31**2 - 2
        second = (left - first * 31**2) // 31 - 3
        if 0x21 <= first < 0xD000:
            return "t", head + chr(first) + chr(second) + chr(left - first * 31**2 - second * 31)
    raise AssertionError("none found")


# "Aa" and "BB" have one hash; the last word has the hash -2**31 in topic `t`.
WORDS = ["Aa", "BB", "AaAa", "BBBB", "k", "schlüssel", "标签😀", "x" * 40, find_min_hash()[1]]
TOPICS = ["t", "other", "TopicA"]


class Model:
    """RocketMQ's rules, with lists in the place of chains."""

    def __init__(self, entries: int) -> None:
        self.room = entries - 1
        self.files: list[list[tuple[int, int, int]]] = []  # (hash, physical offset, store time)

    def put(self, topic: str, keys: list[str], physical_offset: int, stored_ms: int) -> None:
        for key in keys:
            if not self.files or len(self.files[-1]) == self.room:
                self.files.append([])
            key_hash = abs(reference.java_hash(f"{topic}#{key}"))
            key_hash = 0 if key_hash == 2**31 else key_hash
            self.files[-1].append((key_hash, physical_offset, stored_ms))

    def newest(self, topic: str, key: str) -> list[int]:
        wanted = index_hash(topic, key)
        return [at for file in reversed(self.files) for h, at, _ in reversed(file) if h == wanted]


def record(topic: str, unique: str, keys: str, at: int, stored_ms: int, transaction: int) -> bytes:
    properties = "".join(
        f"{name}\1{value}\2" for name, value in (("KEYS", keys), ("UNIQ_KEY", unique)) if value
    ).encode()
    raw = topic.encode()
    size = 91 + len(raw) + len(properties)
    head = struct.pack(">iIiiiqqiq", size, 0xDAA320A7, 0, 0, 0, 0, at, transaction << 2, stored_ms)
    hosts = bytes(8) + struct.pack(">q", stored_ms) + bytes(8)
    tail = struct.pack(">iqi", 0, 0, 0) + bytes([len(raw)]) + raw
    return head + hosts + tail + struct.pack(">h", len(properties)) + properties


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(TOPICS),
        st.sampled_from(["", *WORDS]),
        st.lists(st.sampled_from(["", *WORDS]), max_size=5).map(" ".join),
        st.integers(0, 5_000),
        st.sampled_from([0, 0, 0, 1, 2, 3]),
    ),
    max_size=60,
)


# With fixed examples: a record that fills one file and goes on in the next with a word of the same
# hash is put into the next one twice where it comes again. Readers name each message once.
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    messages=MESSAGES,
    slots=st.integers(1, 7),
    room=st.integers(2, 40),
    step=st.integers(1, 9),
    restart=st.integers(0, 60),
)
def test_against_a_model(
    messages: list[tuple[str, str, str, int, int]],
    slots: int,
    room: int,
    step: int,
    restart: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Few slots, small files, a new writer in the middle: every key is found, newest first."""
    store = tmp_path_factory.mktemp("model")
    shape, model, log = IndexShape(slots, room), Model(room), bytearray()
    stored_ms = 1_700_000_000_000
    for topic, unique, keys, later_ms, transaction in messages:
        stored_ms += later_ms
        if transaction != 3:
            words = ([unique] if unique else []) + [word for word in keys.split(" ") if word]
            model.put(topic, words, len(log), stored_ms)
        log += record(topic, unique, keys, len(log), stored_ms, transaction)
    index_all(store, shape, log, step, restart)
    assert_like_model(store, shape, model)


def index_all(store: Path, shape: IndexShape, log: bytearray, step: int, restart: int) -> None:
    files = IndexFiles(store, shape)
    at = calls = 0
    while at < len(log):
        at, _ = files.index(as_map(log), 0, at, len(log), step)
        calls += 1
        if calls == restart:  # its place is lost: the last record comes again
            files.close()
            files = IndexFiles(store, shape)
            files.open_newest()
            at = 0
    files.close()


def as_map(log: bytearray) -> mmap.mmap:
    return log  # type: ignore[return-value]  # the kernel takes any buffer


def assert_like_model(store: Path, shape: IndexShape, model: Model) -> None:
    names = list_index_files(store)
    assert len(names) == len(model.files)
    reader = IndexReader(store, shape)
    for topic, key in itertools.product(TOPICS, WORDS):
        assert list(dict.fromkeys(reader.offsets(topic, key))) == list(
            dict.fromkeys(model.newest(topic, key))
        )
    for name, put in zip(names, model.files, strict=True):
        path = store / "index" / name
        assert entries(path, shape) == [(h, at) for h, at, _ in put]
        header = read_header(path)
        assert header is not None
        assert (header.begin_physical_offset, header.end_physical_offset) == (put[0][1], put[-1][1])
        assert (header.begin_timestamp, header.end_timestamp) == (put[0][2], put[-1][2])
        with map_segment(path, shape.file_bytes, writable=False) as memory:
            assert index_is_whole(memory, shape.slots, shape.entries)
    assert not reader.damaged
    reader.close()


@pytest.mark.parametrize("exact", [False, True])
def test_times(exact: bool, tmp_path: Path) -> None:
    """RocketMQ misses what its whole seconds cut off; `exact` misses nothing."""
    log = bytearray()
    base = 1_700_000_000_000
    times = [base + later for later in (0, 900, 1_100, 5_999, 6_000, 61_500)]
    offsets = []
    for stored_ms in times:
        offsets.append(len(log))
        log += record("t", "", "k", len(log), stored_ms, 0)
    shape = IndexShape(3, 4)  # three entries a file: the second begins with the first's end
    index_all(tmp_path, shape, log, 100, 0)
    reader = IndexReader(tmp_path, shape)
    for begin, end in itertools.product(times, times):
        found = set(reader.offsets("t", "k", begin, end, exact=exact))
        wanted = {
            at for at, stored_ms in zip(offsets, times, strict=True) if begin <= stored_ms <= end
        }
        if exact:
            assert found >= wanted, (begin - base, end - base)
    assert set(reader.offsets("t", "k", base + 1_100, exact=False)) == set(offsets[3:])
    reader.close()


# --- names ----------------------------------------------------------------------------------------


def test_names_are_local_time_and_ascend() -> None:
    now = time.mktime((2026, 11, 21, 1, 12, 16, 0, 0, -1)) + 0.0101
    assert next_name("", now) == "20261121011216010"
    assert next_name("20261121011216010", now) == "20261121011216011"
    assert next_name("20261231235959999", now) == "20261231235960000"  # the clock went back


def test_foreign_names_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    for name in ("2", "10", "notes", "1.tmp"):
        (tmp_path / "index" / name).touch()
    assert list_index_files(tmp_path) == ["10", "2"]
    assert read_header(tmp_path / "index" / "2") is None


def test_expired_files_go_but_never_the_newest(tmp_path: Path) -> None:
    meta = golden.meta("loghub-abort")
    store = golden.unpack("loghub-abort", tmp_path)
    names = list_index_files(store)
    ends = [file["endPhyOffset"] for file in meta["onDisk"]["index"]]
    assert delete_expired(store, ends[1]) == 1
    assert delete_expired(store, ends[1] + 1) == 1
    assert delete_expired(store, 1 << 40) == 1
    assert list_index_files(store) == names[3:]


# --- recovery -------------------------------------------------------------------------------------


class Recovery:
    """The golden store loghub-clean, and what recovery makes of what is done to it."""

    def __init__(self, tmp_path: Path, name: str = "loghub-clean") -> None:
        self.meta = golden.meta(name)
        self.store = golden.unpack(name, tmp_path)
        self.shape = shape_of(self.meta)
        self.log_end = self.meta["opened"]["maxPhyOffset"]
        self.names = list_index_files(self.store)

    def path(self, number: int) -> Path:
        return self.store / "index" / self.names[number]

    def edit(self, number: int, at: int, raw: bytes) -> None:
        with self.path(number).open("r+b") as file:
            file.seek(at)
            file.write(raw)

    def recover(self, *, clean: bool = True, log_min: int = 0) -> int:
        scan = LogScan(self.store, self.meta["settings"]["mappedFileSizeCommitLog"])
        return recover_index(
            self.store, self.shape, scan, log_min=log_min, log_end=self.log_end, clean=clean
        )

    @property
    def kept(self) -> int:
        left = list_index_files(self.store)
        assert left == self.names[: len(left)]
        return len(left)


@pytest.fixture
def recovery(tmp_path: Path) -> Recovery:
    return Recovery(tmp_path)


@pytest.mark.parametrize("clean", [True, False])
def test_whole_files_are_kept(clean: bool, recovery: Recovery) -> None:
    """Also the one that the checkpoint does not cover, where RocketMQ deletes it."""
    assert recovery.recover(clean=clean) == 5360151
    assert recovery.kept == 2


def test_a_missing_file_is_noticed(recovery: Recovery) -> None:
    recovery.path(0).unlink()
    assert recovery.recover() == 0
    assert list_index_files(recovery.store) == []


def test_no_files(recovery: Recovery) -> None:
    for number in (0, 1):
        recovery.path(number).unlink()
    assert recovery.recover() == 0


def test_a_missing_newest_file(recovery: Recovery) -> None:
    recovery.path(1).unlink()
    assert recovery.recover() == 3475840
    assert recovery.kept == 1


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("index_count", -1, 1),
        ("index_count", 20_001, 1),
        ("end_physical_offset", 1 << 50, 1),
        ("end_physical_offset", 5360150, 1),  # inside a record
        ("begin_physical_offset", -1, 1),
        ("begin_physical_offset", 1 << 50, 1),
        ("begin_physical_offset", 3_500_001, 1),
    ],
)
def test_a_bad_header(field: str, value: int, kept: int, recovery: Recovery) -> None:
    size = 4 if field == "index_count" else 8
    recovery.edit(1, INDEX_HEADER.at[field], value.to_bytes(size, "big", signed=True))
    assert recovery.recover() == 3475840
    assert recovery.kept == kept


@pytest.mark.parametrize("size", [0, 39, 420_039, 420_041])
def test_a_file_of_another_size(size: int, recovery: Recovery) -> None:
    with recovery.path(0).open("r+b") as file:
        file.truncate(size)
    assert recovery.recover() == 0
    assert list_index_files(recovery.store) == []


@pytest.mark.parametrize("field", ["previous", "key_hash", "physical_offset"])
def test_after_a_bad_end_every_chain_is_looked_at(field: str, recovery: Recovery) -> None:
    at = recovery.shape.entries_at + 5_000 * INDEX_ENTRY.size + INDEX_ENTRY.at[field]
    recovery.edit(1, at, b"\0\0\0\1")
    assert recovery.recover(clean=False) == 3475840
    assert recovery.kept == 1


def test_a_slot_that_was_not_written(recovery: Recovery) -> None:
    recovery.edit(1, INDEX_HEADER.size, bytes(4 * recovery.shape.slots))
    assert recovery.recover(clean=False) == 3475840


def test_an_unused_file_goes(recovery: Recovery) -> None:
    path = recovery.store / "index" / "20261121011221999"
    path.write_bytes(bytes(recovery.shape.file_bytes))
    assert recovery.recover() == 5360151
    assert recovery.kept == 2


def test_a_log_that_begins_later(recovery: Recovery) -> None:
    assert recovery.recover(log_min=1 << 20) == 5360151
    assert recovery.kept == 2


def test_a_file_beyond_the_log(recovery: Recovery) -> None:
    """Records were cut, and others will lie there."""
    recovery.log_end = 4 << 20
    assert recovery.recover() == 3475840
    assert recovery.kept == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", golden.ABORT + golden.DAMAGED)
def test_golden_stores_after_a_bad_end(name: str, tmp_path: Path) -> None:
    """What RocketMQ's recovery still found is found, and what it did not index again as well."""
    recovery = Recovery(tmp_path, name)
    segment_bytes = recovery.meta["settings"]["mappedFileSizeCommitLog"]
    recovery.log_end = recover_log(recovery.store, segment_bytes, clean=False).physical_offset
    begin = recovery.recover(clean=False)
    build(recovery.store, recovery.meta, recovery.log_end, begin=begin)
    rows = [row for row in golden.listing(name) if "foundAt" not in row]
    reader = IndexReader(recovery.store, recovery.shape)
    for query in recovery.meta["queries"]["queryMessage"]:
        found = set(reader.offsets(query["topic"], query["key"], exact=True))
        assert found >= {at for at in query["physicalOffsets"] if at < recovery.log_end}, query
        for row in rows:
            words = (row["properties"].get("KEYS") or "").split(" ")
            if row["topic"] == query["topic"] and query["key"] in words:
                assert row["physicalOffset"] in found, (query, row)
    reader.close()


@pytest.mark.parametrize("value", [7, 6, 0x7FFFFFFF, -5])
def test_a_chain_that_leads_nowhere_ends(value: int, tmp_path: Path) -> None:
    """Loops to itself, to a newer entry, or out of the file: no answer takes for ever."""
    log = bytearray()
    for _ in range(6):
        log += record("t", "", "k", len(log), 1_700_000_000_000, 0)
    shape = IndexShape(3, 100)
    index_all(tmp_path, shape, log, 100, 0)
    (name,) = list_index_files(tmp_path)
    at = shape.entries_at + 4 * INDEX_ENTRY.size + INDEX_ENTRY.at["previous"]
    with (tmp_path / "index" / name).open("r+b") as file:
        file.seek(at)
        file.write(value.to_bytes(4, "big", signed=True))
    reader = IndexReader(tmp_path, shape)
    assert len(list(reader.offsets("t", "k"))) == 3
    assert reader.damaged == {name}
    with map_segment(tmp_path / "index" / name, shape.file_bytes, writable=False) as memory:
        assert not index_is_whole(memory, shape.slots, shape.entries)
    reader.close()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 8059), st.binary(min_size=1, max_size=8)), min_size=1, max_size=20
    )
)
def test_damage_never_hangs(
    edits: list[tuple[int, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("damage")
    found = Recovery(tmp_path, "special")
    for at, raw in edits:
        found.edit(1, min(at, found.shape.file_bytes - len(raw)), raw)
    reader = IndexReader(found.store, found.shape)
    for query in found.meta["queries"]["queryMessage"][:100]:
        reader.query(query["topic"], query["key"], 64, query["begin"], query["end"])
    reader.close()
    begin = found.recover(clean=False)
    assert begin in (1317450, 1346501)
    files = IndexFiles(found.store, found.shape)
    files.open_newest()
    files.close()
