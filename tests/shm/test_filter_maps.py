"""Filter maps: what is read by them is what is read without, whatever lies in queues and maps."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import reference

from cometmq.protocol.errors import DiskFull
from cometmq.shm.derived import filter_maps
from cometmq.shm.derived.filter_maps import (
    BLOCKS_A_FILE,
    QueueMap,
    identity_of,
    map_folder,
    read_block,
    read_filters,
    remove_maps,
    write_filters,
)
from cometmq.shm.kernel import _kernel
from cometmq.shm.kernel._kernel import FilterBlock, FilterMap, LogView
from cometmq.shm.kernel.layout import FILTER_BLOCK, FILTER_BLOCK_ENTRIES, FILTER_BLOCK_SIZE
from cometmq.shm.live.control import ControlFile, Counter
from cometmq.shm.os.files import FILTER_MAPS_DIR, FILTERS_FILE
from cometmq.shm.reading import filter_maps as read_maps
from cometmq.shm.reading.filter_maps import BLOCKS_MAX, MAPS_MAX, WORTH_COUNT, FilterMaps
from cometmq.shm.reading.selection import Selection, selection_of

SEGMENT = 1 << 22
UNIT = 20
LONG_NS = 10**12
IDENTITY = identity_of("run", 1, "t", 3, "a = 1")
MUCH = 1 << 40
FILLER = reference.encode_entry(0, 0x7FFFFFFF, 0)


class Stretch(NamedTuple):
    """Entries of queue 3 of the topic `t`, and the log that they lead into."""

    log: LogView
    memory: bytearray
    units: bytes
    first: int  # queue offset
    count: int
    log_max: int

    def gather(
        self, begin: int, end: int, wanted: Selection, map: FilterMap | None, **how: Any
    ) -> Any:
        codes = None if wanted.tags is None else tuple(map_codes(wanted))
        return _kernel.gather(
            self.log, self.units, self.first, begin, end, how.get("log_min", 0), self.log_max, b"t",
            3, how.get("limits", (MUCH,) * 8), codes, how.get("skip_removed", False),
            how.get("check_crc", True), wanted.filter, map,
        )  # fmt: skip

    def deliver(
        self, begin: int, end: int, wanted: Selection, map: FilterMap | None, **how: Any
    ) -> Any:
        codes = None if wanted.tags is None else tuple(map_codes(wanted))
        count, size, scanned = how.get("limits", (MUCH,) * 3)[:3]
        reason, messages, *rest = _kernel.deliver(
            self.log, self.units, self.first, begin, end, how.get("log_min", 0), self.log_max, b"t",
            3, count, size, scanned, codes, wanted.tags, wanted.filter, map,
        )  # fmt: skip
        return reason, [(each.queue_offset, each.body) for each in messages], *rest

    def block(self, wanted: Selection, number: int, end: int | None = None) -> FilterBlock:
        """A block that was filled up to a queue offset."""
        end = self.first + self.count if end is None else end
        block = FilterBlock(IDENTITY, number)
        block.pass_over(max(self.first, block.next_offset))
        whole = selection_of("*", wanted.expression).filter
        assert whole is not None
        at = block.fill(
            self.log, self.units, self.first, end, 0, self.log_max, b"t", 3, whole, LONG_NS
        )
        assert at == -1
        assert block.next_offset == min(end, block.end)
        return block


def map_codes(wanted: Selection) -> list[int]:
    return [_kernel.java_hash(tag) for tag in wanted.tags or ()]


def stretch(
    chance: random.Random, first: int, count: int, *, odd: float = 0.1, body_max: int = 60
) -> Stretch:
    """Messages with properties by chance; so many places by chance have none, or a damaged one."""
    memory = bytearray(SEGMENT)
    units = bytearray()
    at = 0
    for offset in range(first, first + count):
        kind = (
            chance.choice(["filler", "damaged", "wrong", "another"])
            if chance.random() < odd
            else ""
        )
        if kind == "filler":
            units += FILLER
            continue
        properties = {
            name: chance.choice(["1", "2", "x", ""]) for name in "abc" if chance.random() < 0.7
        }
        tag = chance.choice(["red", "blue", None])
        if tag:
            properties["TAGS"] = tag
        record = reference.encode_record(
            topic="t", queue_id=4 if kind == "another" else 3, queue_offset=offset,
            physical_offset=at, body=bytes(chance.randrange(body_max)),
            properties=reference.encode_properties(properties),
        )  # fmt: skip
        if kind == "damaged":
            record = (
                bytes([record[0] ^ 1]) + record[1:]
                if chance.random() < 0.5
                else record[:4] + b"\1" + record[5:]
            )
        memory[at : at + len(record)] = record
        place = SEGMENT + 7 if kind == "wrong" else at
        units += reference.encode_entry(place, len(record), _kernel.java_hash(tag) if tag else 0)
        at += len(record)
    log = LogView(SEGMENT)
    log.set(0, memory)
    return Stretch(log, memory, bytes(units), first, count, at)


def expression(chance: random.Random, depth: int = 2) -> str:
    if depth and chance.random() < 0.6:
        word = chance.choice(["AND", "OR"])
        return f"({expression(chance, depth - 1)} {word} {expression(chance, depth - 1)})"
    name = chance.choice("abcd")
    return chance.choice([
        f"{name} = '1'", f"{name} > 1", f"{name} IS NULL", f"{name} IN ('x', '2')", f"{name} <> a",
        f"NOT ({name} = 2)", f"{name} BETWEEN 1 AND 2", f"{name} CONTAINS 'x'", f"{name} = TRUE",
        "TAGS = 'red'", "TRUE", "FALSE", "NULL",
    ])  # fmt: skip


def map_of(*blocks: FilterBlock) -> FilterMap:
    found = FilterMap(IDENTITY)
    for block in blocks:
        assert found.take(
            block.number, block.sealed()
        ) == block.next_offset % FILTER_BLOCK_ENTRIES or (block.next_offset == block.end)
    return found


# --- what is read by a map ---


def test_whatever_is_read_is_the_same_with_a_map() -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    passed_over = 0
    for _ in range(60):
        border = FILTER_BLOCK_ENTRIES * chance.choice([0, 1, 2, 1000])
        first = max(0, border - chance.choice([0, 1, 63, 100]))
        queue = stretch(chance, first, count := chance.choice([1, 2, 64, 200, 300]))
        wanted = selection_of(chance.choice(["*", "red", "red || blue"]), expression(chance))
        number = first // FILTER_BLOCK_ENTRIES
        until = chance.choice([first, first + count, chance.randrange(first, first + count + 1)])
        blocks = [queue.block(wanted, number, until)]
        if until > blocks[0].end:
            blocks.append(queue.block(wanted, number + 1, until))
        known = map_of(*(chance.sample(blocks, chance.randrange(1, len(blocks) + 1))))
        for _ in range(20):
            begin = chance.randrange(first, first + count + 1)
            end = chance.randrange(begin, first + count + 1)
            how = {
                "limits": tuple(chance.choice([1, 2, 7, 500, MUCH]) for _ in range(8)),
                "skip_removed": chance.random() < 0.3, "check_crc": chance.random() < 0.7,
            }  # fmt: skip
            without = queue.gather(begin, end, wanted, None, **how)
            assert queue.gather(begin, end, wanted, known, **how) == without, seed
            plain = queue.deliver(begin, end, wanted, None, **how)
            assert queue.deliver(begin, end, wanted, known, **how) == plain, seed
            passed_over += without[2] < end - begin
    assert passed_over > 100


def test_a_message_whose_bit_is_0_is_not_looked_at() -> None:
    """Else it would be found damaged; without its bit it is."""
    queue = stretch(random.Random(1), 0, 100, odd=0)
    wanted = selection_of("*", "a = '1'")
    known = map_of(queue.block(wanted, 0))
    before = queue.gather(0, 100, wanted, known)
    assert 0 < before[2] < 100
    queue.memory[:] = bytes(SEGMENT)
    assert queue.gather(0, 100, wanted, None)[7] is not None
    damaged = queue.gather(0, 100, wanted, known)[7]
    assert damaged is not None
    assert len(damaged) == before[2]


def test_records_that_have_gone_are_passed_over_as_with_a_tag() -> None:
    queue = stretch(random.Random(2), 0, 100, odd=0)
    wanted = selection_of("*", "a = '1'")
    half = int.from_bytes(queue.units[50 * UNIT : 50 * UNIT + 8], "big")
    known = map_of(queue.block(wanted, 0))
    with_map = queue.gather(0, 100, wanted, known, log_min=half)
    without = queue.gather(0, 100, wanted, None, log_min=half)
    assert with_map[:4] == without[:4]
    assert with_map[4] < without[4] == 50


def test_tags_with_a_quote_and_tags_of_the_same_hash() -> None:
    """Aa and BB have one hash: today's answer has both, and whoever asked drops the other one."""
    assert _kernel.java_hash("Aa") == _kernel.java_hash("BB")
    wanted = selection_of("Aa || o'clock", "a = '1' OR b = '2'")
    assert wanted.expression == "TAGS IN ('Aa', 'o''clock') AND (a = '1' OR b = '2')"
    judge = selection_of("*", wanted.expression).filter
    assert judge is not None
    for tag, holds in (("Aa", True), ("o'clock", True), ("BB", False), ("", False)):
        text = {"a": "1"} | ({"TAGS": tag} if tag else {})
        assert judge.matches(reference.encode_properties(text)) is holds
    twice = b"TAGS\x01BB\x02a\x011\x02TAGS\x01Aa\x02"  # the last one counts, for the entry as well
    assert judge.matches(twice)


# --- blocks ---


def test_no_flipped_bit_of_a_block_is_believed() -> None:
    queue = stretch(random.Random(3), 5, 300)
    block = queue.block(selection_of("*", "a = '1'"), 0).sealed()
    assert len(block) == FILTER_BLOCK_SIZE
    known = FilterMap(IDENTITY)
    assert known.take(0, block) == 305
    flipped = bytearray(block)
    for at in range(FILTER_BLOCK_SIZE):
        for bit in range(8):
            flipped[at] ^= 1 << bit
            assert known.take(0, bytes(flipped)) == 0, (at, bit)
            assert known.told(0) == len(known) == 0
            flipped[at] ^= 1 << bit
    assert known.take(0, bytes(flipped)) == 305


@pytest.mark.parametrize(
    "size", [0, 1, FILTER_BLOCK.size, FILTER_BLOCK_SIZE - 1, FILTER_BLOCK_SIZE + 1]
)
def test_a_block_of_another_size_is_none(size: int) -> None:
    whole = FilterBlock(IDENTITY, 0).sealed() + b"\0"
    assert FilterMap(IDENTITY).take(0, whole[:size]) == 0


def test_a_block_of_another_place_or_map_is_none() -> None:
    block = FilterBlock(IDENTITY, 7)
    block.pass_over(MUCH)
    assert FilterMap(IDENTITY).take(7, block.sealed()) == FILTER_BLOCK_ENTRIES
    assert FilterMap(IDENTITY).take(6, block.sealed()) == 0
    names: list[Any] = ["run", 1, "t", 3, "a = 1"]
    for at, other in enumerate(["RUN", 2, "u", 4, "a = 2"]):
        identity = identity_of(*names[:at], other, *names[at + 1 :])
        assert FilterMap(identity).take(7, block.sealed()) == 0


@pytest.mark.parametrize("count", [-1, FILTER_BLOCK_ENTRIES + 1])
def test_a_count_that_cannot_be_is_not_believed(count: int) -> None:
    block = bytearray(FilterBlock(IDENTITY, 0).sealed())
    at = FILTER_BLOCK.at["count"]
    block[at : at + 4] = count.to_bytes(4, "big", signed=True)
    at = FILTER_BLOCK.at["crc"]
    block[at : at + 4] = _kernel.crc32(bytes(block[at + 4 :])).to_bytes(4, "big")
    assert FilterMap(IDENTITY).take(0, bytes(block)) == 0


@pytest.mark.parametrize("number", [-1, 1 << 60, (1 << 63) - 1])
def test_a_block_that_no_queue_has(number: int) -> None:
    with pytest.raises(ValueError, match="block"):
        FilterBlock(IDENTITY, number)
    with pytest.raises(ValueError, match="identity"):
        FilterBlock(b"short", 0)
    with pytest.raises(ValueError, match="identity"):
        FilterMap(b"short")


def test_bits_stand_where_they_are_to() -> None:
    """By an independent look: 0 where a whole record is not wanted, 1 everywhere else."""
    chance = random.Random(4)
    first = FILTER_BLOCK_ENTRIES - 10
    queue = stretch(chance, first, 200)
    wanted = selection_of("*", "a = '1' OR b IS NULL")
    assert wanted.filter is not None
    for number, begin in ((0, first), (1, FILTER_BLOCK_ENTRIES)):
        raw = queue.block(wanted, number).sealed()
        bits = int.from_bytes(raw[FILTER_BLOCK.size :], "little")
        for offset in range(begin, min(first + 200, (number + 1) * FILTER_BLOCK_ENTRIES)):
            unit = queue.units[(offset - first) * UNIT :]
            at, size = int.from_bytes(unit[:8], "big"), int.from_bytes(unit[8:12], "big")
            try:
                record = reference.decode_record(queue.memory, at)
                holds = len(record.raw) == size and (record.queue_id, record.queue_offset) == (
                    3,
                    offset,
                )
                holds = holds and record.physical_offset == at
                surely = holds and not wanted.filter.matches(record.properties_raw)
            except (reference.BadRecord, AttributeError):
                surely = False
            assert (bits >> (offset - number * FILTER_BLOCK_ENTRIES) & 1) == (not surely), offset


def test_filling_goes_on_where_a_segment_had_to_be_mapped_and_when_time_is_over() -> None:
    queue = stretch(random.Random(5), 0, 200, odd=0)
    wanted = selection_of("*", "a = '1'")
    assert wanted.filter is not None
    empty = LogView(SEGMENT)
    block = FilterBlock(IDENTITY, 0)
    rest = (0, queue.log_max, b"t", 3, wanted.filter)
    assert block.fill(empty, queue.units, 0, 200, *rest, LONG_NS) == 0
    assert block.next_offset == 0
    steps = 0
    while block.next_offset < 200:
        before = block.next_offset
        assert block.fill(queue.log, queue.units, 0, 200, *rest, 0) == -1
        assert block.next_offset > before
        steps += 1
    assert 1 < steps < 20
    assert block.sealed() == queue.block(wanted, 0).sealed()
    with pytest.raises(ValueError, match="not in the segment"):
        block.fill(queue.log, queue.units, 0, 201, *rest, 0)


# --- files ---


def test_a_queue_map_over_the_borders_of_blocks_and_files(tmp_path: Path) -> None:
    folder = map_folder(tmp_path, "t", "a = 1")
    border = BLOCKS_A_FILE * FILTER_BLOCK_ENTRIES
    map = QueueMap(folder, 3, IDENTITY, border - 5)
    map.block.pass_over(border - 1)
    map.keep()
    known = FilterMap(IDENTITY)
    last = BLOCKS_A_FILE - 1
    assert known.take(last, read_block(folder, 3, last)) == FILTER_BLOCK_ENTRIES - 1
    assert map.next_offset == border - 1
    map.block.pass_over(border)
    map.keep()
    assert known.take(last, read_block(folder, 3, last)) == FILTER_BLOCK_ENTRIES
    assert map.next_offset == border
    assert map.is_kept
    map.block.pass_over(border + 1)
    assert not map.is_kept
    map.keep()
    assert known.take(last + 1, read_block(folder, 3, last + 1)) == 1
    assert sorted(os.listdir(folder)) == ["3.0", f"3.{BLOCKS_A_FILE}"]
    assert map.blocks == 2
    map.follow_queue(border - 1)
    assert map.next_offset == border + 1
    assert sorted(os.listdir(folder)) == ["3.0", f"3.{BLOCKS_A_FILE}"]
    map.follow_queue(border)
    assert os.listdir(folder) == [f"3.{BLOCKS_A_FILE}"]
    assert map.blocks == 1
    map.follow_queue(5 * border + 7)
    assert map.next_offset == 5 * border + 7
    assert map.is_kept
    assert os.listdir(folder) == []
    assert read_block(folder, 3, last) == b""


def test_where_the_disk_is_full_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    map = QueueMap(map_folder(tmp_path, "t", "a = 1"), 0, IDENTITY, 0)
    map.block.pass_over(1)
    monkeypatch.setattr(filter_maps, "ROOM_BYTES", 1 << 62)
    with pytest.raises(DiskFull, match="MiB left"):
        map.keep()
    assert not map.is_kept
    monkeypatch.undo()
    map.keep()
    assert map.is_kept
    remove_maps(tmp_path)
    assert not (tmp_path / FILTER_MAPS_DIR).exists()
    remove_maps(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"t": "a"}', b'{"t": [1]}', b"\xff", None])
def test_filters_that_cannot_be_read_are_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / FILTERS_FILE).write_bytes(content)
    assert read_filters(tmp_path) == {}


def test_filters_are_read_as_they_were_written(tmp_path: Path) -> None:
    filters = {"t": ["a = 'ä'", "b > 1"], "u": []}
    write_filters(tmp_path, {})
    write_filters(tmp_path, filters)
    assert read_filters(tmp_path) == filters
    assert os.listdir(tmp_path) == [FILTERS_FILE]


# --- maps as readers have them ---


class Maps:
    """A store with the map of queue 3 of `t`, of `a = 1`."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.control = ControlFile.create(store / "cometmq.control", {"nonce": "run"})
        self.counter = self.control.own(Counter.FILTER_MAPS)
        self.counter.advance(1)
        self.folder = map_folder(store, "t", "a = 1")
        self.map = QueueMap(self.folder, 3, IDENTITY, 0)
        self.readers = FilterMaps(store, self.control)

    def told(self, begin: int, end: int, expression: str = "a = 1") -> list[int]:
        found, until = self.readers.of("t", 3, expression, begin, end)
        assert found is not None
        self.until = until
        first, last = begin // FILTER_BLOCK_ENTRIES, (end - 1) // FILTER_BLOCK_ENTRIES
        return [found.told(number) for number in range(first, last + 1)]

    def fill(self, end: int) -> None:
        while self.map.next_offset < end:
            self.map.block.pass_over(end)
            self.map.keep()


@pytest.fixture
def maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maps:
    monkeypatch.setattr(read_maps, "AGAIN_S", 0.0)
    return Maps(tmp_path)


def test_blocks_are_read_as_they_are_wanted(maps: Maps) -> None:
    assert maps.told(5, 1000) == [0]
    assert maps.until == 5
    maps.fill(1000)
    assert maps.told(5, 1000) == [1000]
    assert maps.until == 1000
    assert maps.told(5, 1001) == [1000]
    assert maps.until == 1000
    maps.fill(2 * FILTER_BLOCK_ENTRIES + 5)
    assert maps.told(0, 1000) == [1000], "it tells enough"
    assert maps.told(0, 1001) == [FILTER_BLOCK_ENTRIES]
    end = 2 * FILTER_BLOCK_ENTRIES + 100
    assert maps.told(end - WORTH_COUNT + 1, end) == [0], "so few are not worth a look"
    assert maps.until == end - WORTH_COUNT + 1
    assert maps.told(end - WORTH_COUNT, end) == [5]
    border = 2 * FILTER_BLOCK_ENTRIES
    assert maps.told(border - 100, border + 100) == [FILTER_BLOCK_ENTRIES, 5]
    assert maps.until == border + 5
    many = (BLOCKS_MAX + 5) * FILTER_BLOCK_ENTRIES
    maps.fill(many)
    assert maps.told(0, many) == [FILTER_BLOCK_ENTRIES] * BLOCKS_MAX + [0] * 5
    assert maps.until == BLOCKS_MAX * FILTER_BLOCK_ENTRIES
    assert maps.told(many - 1000, many) == [FILTER_BLOCK_ENTRIES]
    for begin in range(0, many - FILTER_BLOCK_ENTRIES, 20_000):
        end = begin + 2 * FILTER_BLOCK_ENTRIES
        told = maps.told(begin, min(end, many))
        assert set(told) == {FILTER_BLOCK_ENTRIES}, "those that are looked at stay"
        found, _ = maps.readers.of("t", 3, "a = 1", 0, 0)
        assert found is not None
        assert len(found) <= BLOCKS_MAX


def test_a_block_that_did_not_tell_enough_is_left_alone_for_a_moment(
    maps: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_maps, "AGAIN_S", 3600.0)
    assert maps.told(0, 1000) == [0]
    maps.fill(1000)
    assert maps.told(0, 1000) == [0]


def test_other_maps_and_no_maps(maps: Maps) -> None:
    maps.fill(1000)
    assert maps.told(0, 1000) == [1000]
    assert maps.told(0, 1000, "a = 2") == [0]
    assert maps.readers.of("t", 3, "", 0, 1000) == (None, 0)
    maps.counter.advance(2)
    assert maps.told(0, 1000) == [0], "those of before are not believed any more"
    maps.counter.reset(0)
    assert maps.readers.of("t", 3, "a = 1", 0, 1000) == (None, 0)


def test_blocks_put_under_the_name_of_another_map(maps: Maps) -> None:
    maps.fill(1000)
    shutil.copytree(maps.folder, map_folder(maps.store, "t", "a = 2"))
    assert maps.told(0, 1000, "a = 2") == [0]


def test_what_is_no_file_is_no_map(maps: Maps) -> None:
    maps.folder.mkdir(parents=True)
    (maps.folder / "3.0").mkdir()
    assert maps.told(0, 1000) == [0]
    (maps.folder / "3.0").rmdir()
    os.mkfifo(maps.folder / "3.0")
    assert maps.told(0, 1000) == [0]
    (maps.folder / "3.0").unlink()
    (maps.folder / "3.0").symlink_to("/dev/zero")
    assert maps.told(0, 1000) == [0]


def test_maps_in_memory_are_bounded(maps: Maps) -> None:
    for number in range(MAPS_MAX + 10):
        assert maps.readers.of("t", number, "a = 1", 0, 1000)[0] is not None
    assert len(maps.readers._held) == MAPS_MAX
