"""Verification of stores against a plain model of it, and what only the native one looks at."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference

from cometmq.shm.derived.consume_queue import UNIT, list_queues, queue_folder
from cometmq.shm.derived.index_file import IndexFiles, IndexShape, find_shape, read_header
from cometmq.shm.derived.queue_check import StoreFiles
from cometmq.shm.kernel.layout import CONSUME_QUEUE_UNIT, INDEX_ENTRY
from cometmq.shm.log.recovery import find_end
from cometmq.shm.os.files import COMMITLOG_DIR, INDEX_DIR, map_segment, segment_name
from cometmq.shm.tools.verify import Finding, store_files, verify_store, whole_records

SEGMENT_BYTES = 4096
COUNT = 20
QUEUES = [("t", 0), ("t", 1), ("u", 0)]
SHAPE = IndexShape(slots=64, entries=512)


def write(store: Path) -> None:
    """Three queues in turns, several segments, tags and keys."""
    reference.write_store(
        store,
        [
            {"topic": topic, "queue_id": queue_id, "body": b"%d" % index * 40}
            | {"store_timestamp": 1_000 + index}
            | {"properties": b"TAGS\1tag%d\2KEYS\1k%d shared\2" % (index % 3, index)}
            for index in range(COUNT)
            for topic, queue_id in QUEUES
        ],
        segment_size=SEGMENT_BYTES,
    )


def write_index(store: Path) -> Path:
    """Of everything; the file."""
    files = store_files(store)
    index = IndexFiles(store, SHAPE)
    (store / INDEX_DIR).mkdir(exist_ok=True)
    for start in files.log_starts():
        with files.map_log(start) as memory:
            index.index(memory, start, start, start + files.segment_bytes, 1 << 30)
    index.close()
    (path,) = (store / INDEX_DIR).iterdir()
    return path


def queue_file(store: Path, topic: str, queue_id: int) -> Path:
    return queue_folder(store, topic, queue_id) / segment_name(0)


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 0x80 >> bit % 8]))


# --- the model ------------------------------------------------------------------------------------


def model(store: Path) -> Iterator[Finding]:
    """Record by record, as slowly as it is said: which entries are not those of the records."""
    files = store_files(store)
    end = find_end(store, files.segment_bytes, clean=True, whole_log=True).physical_offset
    log_min = files.log_starts()[0]
    after: dict[tuple[str, int], int] = {}
    no_file: set[Path] = set()
    for message in whole_records(files, log_min, end):
        if not message.is_queued:
            continue
        key, index = (message.topic, message.queue_id), message.queue_offset
        after[key] = max(after.get(key, 0), index + 1)
        queue = files.queue(*key)
        path, at = queue.path(index * UNIT // 2000 * 2000), index * UNIT % 2000
        expected = f"physical offset {message.physical_offset}, {message.size} bytes"
        if not path.exists() or path.stat().st_size != files.queue_segment_bytes:
            if path not in no_file:
                yield Finding("missing", str(path), at, expected, "no such file")
            no_file.add(path)
            continue
        unit = CONSUME_QUEUE_UNIT.unpack(path.read_bytes(), at)
        has = f"physical offset {unit['physical_offset']}, {unit['size']} bytes"
        if has != expected:
            yield Finding("entry", str(path), at, expected, has)
    yield from model_extra(files, after, log_min)


def model_extra(
    files: StoreFiles, after: dict[tuple[str, int], int], log_min: int
) -> Iterator[Finding]:
    for key in list_queues(files.store):
        queue = files.queue(*key)
        end = queue.find_end().next_index
        index = after.get(key, end)
        unit = queue.entry(index) if end > index else None
        if unit is not None and unit["physical_offset"] >= log_min:
            actual = f"{end - index} more, to physical offset {unit['physical_offset']}"
            expected = f"no entry behind {index - 1}"
            yield Finding("extra", str(queue.path(0)), index * UNIT, expected, actual)


@pytest.mark.slow
def test_whatever_the_model_finds_is_found_in_the_same_words(tmp_path: Path) -> None:
    """A byte or two of log or queues changed, or a file gone, by the seed."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    whole, store = tmp_path / "whole", tmp_path / "store"
    write(whole)
    files = sorted(path.relative_to(whole) for path in whole.rglob("0*") if path.is_file())
    found_something = 0
    for _ in range(150):
        shutil.copytree(whole, store)
        for name in rng.choices(files, k=rng.randint(1, 3)):
            used = 3600 if name.parts[0] == COMMITLOG_DIR else (COUNT + 1) * UNIT
            path = store / name
            if rng.random() < 0.05 and name.parts[0] != COMMITLOG_DIR:
                path.unlink(missing_ok=True)
            elif path.exists():
                flip(path, rng.randrange(8 * used))
        wanted = list(model(store))
        found = verify_store(store).findings
        assert [each for each in wanted if each not in found] == []
        found_something += bool(wanted)
        shutil.rmtree(store)
    assert found_something > 30


def test_every_bit_of_an_entry_is_looked_at(tmp_path: Path) -> None:
    write(tmp_path)
    path = queue_file(tmp_path, "t", 1)
    for bit in range(8 * UNIT):
        flip(path, 7 * 8 * UNIT + bit)
        (finding,) = verify_store(tmp_path).findings
        assert (finding.kind, finding.file, finding.offset) == ("entry", str(path), 7 * UNIT)
        assert ("tagsCode" in finding.actual) == (bit >= 96)
        flip(path, 7 * 8 * UNIT + bit)
    assert verify_store(tmp_path).findings == []


# --- entries that no record has -------------------------------------------------------------------


def test_entries_of_a_queue_that_no_record_is_in(tmp_path: Path) -> None:
    write(tmp_path)
    shutil.copytree(queue_folder(tmp_path, "t", 0), queue_folder(tmp_path, "t", 9))
    findings = verify_store(tmp_path).findings
    assert len(findings) == COUNT
    assert {finding.kind for finding in findings} == {"entry"}
    assert findings[3].offset == 3 * UNIT
    assert findings[3].expected == "the message of queue offset 3"
    assert "none of this place in the queue" in findings[3].actual


def test_entries_that_lead_nowhere(tmp_path: Path) -> None:
    """Of a queue without records: behind the log, inside a record, in no segment."""
    write(tmp_path)
    path = queue_file(tmp_path, "x", 0)
    path.parent.mkdir(parents=True)
    units = b"".join(
        CONSUME_QUEUE_UNIT.pack(physical_offset=at, size=size, tags_code=0)
        for at, size in [(1 << 40, 200), (17, 200), (0, 0x7FFFFFFF), (1 << 62, 0x7FFFFFFE)]
    )
    path.write_bytes(units.ljust(2000, b"\0"))
    findings = verify_store(tmp_path).findings
    assert [finding.offset // UNIT for finding in findings] == [0, 1, 3]  # 2 is a filler
    assert "no record can lie there" in findings[0].actual


def test_what_points_into_damage_is_one_finding(tmp_path: Path) -> None:
    write(tmp_path)
    log = tmp_path / COMMITLOG_DIR / segment_name(0)
    write_index(tmp_path)
    flip(log, 8 * 500)
    assert [finding.kind for finding in verify_store(tmp_path).findings] == ["damaged"]


# --- index files ----------------------------------------------------------------------------------


def test_an_index_file_tells_its_shape(tmp_path: Path) -> None:
    write(tmp_path)
    path = write_index(tmp_path)
    header = read_header(path)
    assert header is not None
    assert header.index_count == 2 * COUNT * len(QUEUES) + 1
    with map_segment(path, SHAPE.file_bytes, writable=False) as memory:
        assert find_shape(memory, header) == SHAPE


def test_index_entries_are_followed(tmp_path: Path) -> None:
    """Chains that hold, and lead to records that have no such key."""
    write(tmp_path)
    path = write_index(tmp_path)
    assert verify_store(tmp_path).findings == []
    content = bytearray(path.read_bytes())
    wrong = [5, 6, 7]
    for number in wrong:  # the record before has its first byte elsewhere
        at = SHAPE.entries_at + INDEX_ENTRY.size * number + INDEX_ENTRY.at["physical_offset"]
        place = int.from_bytes(content[at : at + 8], "big")
        content[at : at + 8] = (place - (number - 4)).to_bytes(8, "big")
    for number in wrong[1:]:  # and offsets do not fall
        at = SHAPE.entries_at + INDEX_ENTRY.size * number + INDEX_ENTRY.at["physical_offset"]
        before = int.from_bytes(content[at - INDEX_ENTRY.size : at - INDEX_ENTRY.size + 8], "big")
        place = int.from_bytes(content[at : at + 8], "big")
        content[at : at + 8] = max(before, place).to_bytes(8, "big")
    path.write_bytes(content)
    findings = verify_store(tmp_path).findings
    assert [finding.offset for finding in findings] == [
        SHAPE.entries_at + INDEX_ENTRY.size * number for number in wrong
    ]
    assert {finding.kind for finding in findings} == {"index"}


def test_every_bit_of_an_index_entry_and_of_the_header(tmp_path: Path) -> None:
    """But for times, and the number of used slots, which nothing depends on."""
    write(tmp_path)
    path = write_index(tmp_path)
    free = set(range(16)) | set(range(32, 36))  # of the header
    entry = SHAPE.entries_at + INDEX_ENTRY.size * 9
    times = range(entry + INDEX_ENTRY.at["time_difference"], entry + INDEX_ENTRY.at["previous"])
    for at in (*range(40), *range(entry, entry + INDEX_ENTRY.size)):
        for bit in range(8):
            if at in free or (at in times and (at, bit) != (times[0], 0)):
                continue
            flip(path, 8 * at + bit)
            findings = verify_store(tmp_path).findings
            assert {finding.kind for finding in findings} == {"index"}, (at, bit)
            flip(path, 8 * at + bit)
    assert verify_store(tmp_path).findings == []


# --- long work ------------------------------------------------------------------------------------


def test_it_tells_how_far_it_is(tmp_path: Path) -> None:
    write(tmp_path)
    told: list[tuple[int, int]] = []
    verify_store(tmp_path, lambda done, total: told.append((done, total)))
    done = [each for each, _ in told]
    assert done == sorted(done)
    assert told[-1][0] == told[-1][1]
    assert len({total for _, total in told}) == 1
    assert len(told) > 4


def test_it_can_be_interrupted(tmp_path: Path) -> None:
    write(tmp_path)

    def interrupt(done: int, total: int) -> None:
        if 2 * done > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_store(tmp_path, interrupt)
    assert verify_store(tmp_path).findings == []
