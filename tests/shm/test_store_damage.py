"""Damage to a store that was closed in order: what the next start makes of it.

Nothing that was acknowledged is forgotten because of a flipped bit in a queue, no queue offset is
given out twice, and no damaged byte ends a broker or leads out of the store.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import reference
from click.testing import CliRunner
from family import RunningBroker

from cometmq.cli.store import store as store_command
from cometmq.shm.derived.consume_queue import UNIT, queue_folder
from cometmq.shm.kernel import codec
from cometmq.shm.live.queue_table import queues_before, write_before
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name
from cometmq.shm.reading.column_reader import ClosedPositions, ColumnReader
from cometmq.shm.reading.positions import file_sizes
from cometmq.shm.reading.store_reader import GetStatus, ReadLimits, StoreReader
from cometmq.shm.tools.repair import recover_store
from cometmq.shm.tools.verify import verify_store

pytestmark = pytest.mark.timeout(120)

COUNT = 6
QUEUES = [("t", 0), ("u", 0), ("v", 3)]
SEGMENT_BYTES = 4096
HOSTILE_NAMES = [b"\0\0", b"a\0", b"/a", "..", "a/", "\u00e9"]


def body_of(topic: str, index: int) -> bytes:
    return b"%s %d".ljust(300, b".") % (topic.encode(), index)


def write(store: Path) -> list[reference.Record]:
    """Three queues, one after the other: "t" has had nothing for the longest time."""
    return reference.write_store(
        store,
        [
            {"topic": topic, "queue_id": queue_id, "body": body_of(topic, index)}
            | {"store_timestamp": 1_000 + index}
            for topic, queue_id in QUEUES
            for index in range(COUNT)
        ],
        segment_size=SEGMENT_BYTES,
    )


def bodies(store: Path, topic: str, queue_id: int) -> dict[int, bytes]:
    """What is in a queue, by queue offset."""
    reader = StoreReader.open_closed(store, ReadLimits(skip_removed=False))
    found = reader.get_message(topic, queue_id, 0)
    reader.close()
    return {m.queue_offset: m.body for m in codec.decode(found.payload or b"")}


def next_offset(store: Path, topic: str, queue_id: int) -> int:
    reader = StoreReader.open_closed(store)
    status = reader.get_message(topic, queue_id, 1 << 40)
    reader.close()
    assert status.status is GetStatus.OFFSET_OVERFLOW_BADLY
    return status.max_queue_offset


def patch(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def flip(path: Path, at: int, bit: int) -> None:
    byte = path.read_bytes()[at + bit // 8]
    patch(path, at + bit // 8, bytes([byte ^ 0x80 >> bit % 8]))


def queue_file(store: Path, queue: tuple[str, int]) -> Path:
    return queue_folder(store, *queue) / segment_name(0)


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("queue", QUEUES)
def test_a_flipped_bit_in_the_last_entry(
    queue: tuple[str, int], known: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever it is: all messages are there, the queue goes on behind them, and it is said.

    known: the store was ours, which leaves behind how far each queue came.
    """
    write(tmp_path / "whole")
    right = {index: body_of(queue[0], index) for index in range(COUNT)}
    for bit in range(96):
        store = tmp_path / str(bit)
        shutil.copytree(tmp_path / "whole", store)
        if known:
            write_before(store, dict.fromkeys(QUEUES, COUNT))
        flip(queue_file(store, queue), UNIT * (COUNT - 1), bit)
        caplog.clear()
        recover_store(store, SEGMENT_BYTES, 2000)
        assert bodies(store, *queue) == right, bit
        assert next_offset(store, *queue) == COUNT, bit
        assert f"queue {queue[1]} of {queue[0]}: entry {COUNT - 1} " in caplog.text or (
            f"queue {queue[1]} of {queue[0]}: its entries end at" in caplog.text
        )
        assert verify_store(store).findings == []
        shutil.rmtree(store)


def test_a_healthy_store_is_not_built_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    write_before(tmp_path, dict.fromkeys(QUEUES, COUNT))
    assert not recover_store(tmp_path, SEGMENT_BYTES, 2000).queues.rebuilt
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


@pytest.mark.slow
def test_a_flipped_bit_in_the_middle_cuts_nothing_off(tmp_path: Path) -> None:
    """Where the next start searches by halves: no entry behind it is lost."""
    write(tmp_path / "whole")
    for index in range(COUNT - 1):
        for bit in (0, 1, 20, 40, 50, 52, 54, 56, 64, 90):
            store = tmp_path / f"{index}-{bit}"
            shutil.copytree(tmp_path / "whole", store)
            flip(queue_file(store, ("t", 0)), UNIT * index, bit)
            recover_store(store, SEGMENT_BYTES, 2000)
            found = bodies(store, "t", 0)
            wanted = {i: body_of("t", i) for i in range(COUNT)}
            assert found.items() <= wanted.items()
            assert found.keys() | {index} == wanted.keys(), bit
            assert next_offset(store, "t", 0) == COUNT
            shutil.rmtree(store)


def test_a_queue_whose_messages_have_expired_keeps_its_place(tmp_path: Path) -> None:
    """Its last entry is damaged, and the log holds none of its messages any more."""
    stored = write(tmp_path)
    assert max(record.lies_at for record in stored if record.topic == "t") < SEGMENT_BYTES
    assert stored[-1].lies_at > SEGMENT_BYTES
    (tmp_path / COMMITLOG_DIR / segment_name(0)).unlink()
    patch(queue_file(tmp_path, ("t", 0)), UNIT * (COUNT - 1), b"\x80")
    recover_store(tmp_path, SEGMENT_BYTES, 2000)
    assert next_offset(tmp_path, "t", 0) == COUNT
    assert bodies(tmp_path, "t", 0) == {}


def test_a_damaged_last_record_keeps_its_queue_offset(tmp_path: Path) -> None:
    """The log is cut in front of it; another message does not get its queue offset."""
    last = write(tmp_path)[-1]
    start = last.lies_at // SEGMENT_BYTES * SEGMENT_BYTES
    flip(tmp_path / COMMITLOG_DIR / segment_name(start), last.lies_at - start + 90, 3)
    recover_store(tmp_path, SEGMENT_BYTES, 2000)
    assert next_offset(tmp_path, *QUEUES[-1]) == COUNT
    assert len(bodies(tmp_path, *QUEUES[-1])) == COUNT - 1
    assert next_offset(tmp_path, *QUEUES[0]) == COUNT


def test_ends_that_cannot_be_are_not_believed(tmp_path: Path) -> None:
    write(tmp_path)
    write_before(tmp_path, {("t", 0): 1 << 61, ("u", 0): COUNT + 2_000_000, ("../x", 0): 3})
    recover_store(tmp_path, SEGMENT_BYTES, 2000)
    assert next_offset(tmp_path, "t", 0) == next_offset(tmp_path, "u", 0) == COUNT
    assert not (tmp_path / "consumequeue" / "../x").exists()
    assert set(queues_before(tmp_path)) == set(QUEUES)


@pytest.mark.slow
@pytest.mark.parametrize("bit", [0, 12, 64])
def test_a_broker_gives_no_queue_offset_out_twice(bit: int, tmp_path: Path) -> None:
    """Sign bits, and a place behind the log's end: the message is there, the next one follows."""
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("t", 1)
        broker.create_topic("u", 1)
        broker.send("t", 0, [b"%d" % number for number in range(4)])
        broker.send("u", 0, [b"later"])
        broker.read_queue("u", 0, 1)
    flip(queue_file(tmp_path / "store", ("t", 0)), 3 * UNIT, bit)
    with RunningBroker(tmp_path / "store") as broker:
        broker.send("t", 0, [b"next"])
        found = [(m.queue_offset, m.body) for m in broker.read_queue("t", 0, 5)]
        assert found == [(0, b"0"), (1, b"1"), (2, b"2"), (3, b"3"), (4, b"next")]
        broker.until_logged("queue 0 of t: ")


# --- names ---


def rename(store: Path, record: reference.Record, name: bytes | str) -> None:
    """Put other bytes where the record's topic stands."""
    raw = name if isinstance(name, bytes) else name.encode()
    start = record.lies_at // SEGMENT_BYTES * SEGMENT_BYTES
    at = record.raw.rindex(record.topic.encode()) + record.lies_at - start
    assert len(raw) == len(record.topic)
    patch(store / COMMITLOG_DIR / segment_name(start), at, raw)


def write_named(store: Path) -> list[reference.Record]:
    return reference.write_store(
        store,
        [{"topic": topic, "body": b"%d" % index} for index in range(4) for topic in ("kk", "xx")],
        segment_size=SEGMENT_BYTES,
    )


@pytest.mark.parametrize("name", HOSTILE_NAMES)
@pytest.mark.parametrize("which", [1, 3, 7])
def test_a_topic_that_cannot_be_one_is_damage(
    name: bytes | str, which: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To a start, to `store verify`, and to what both have in common; all others are served."""
    store = tmp_path / "a" / "store"
    stored = write_named(store)
    rename(store, stored[which], name)
    outside = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(store_command, ["verify", str(store), "--output", "json"])
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert any(
        "its topic, queue id or queue offset cannot be one" in line["actual"]
        for line in found["findings"]
    ), found
    assert sorted(tmp_path.rglob("*")) == outside
    recovered = recover_store(store, SEGMENT_BYTES, 2000)
    if which != 7:  # the last one is cut off, as any other that does not hold
        assert [damage.physical_offset for damage in recovered.damages] == [stored[which].lies_at]
    assert bodies(store, "kk", 0) == {index: b"%d" % index for index in range(4)}
    others = {index: b"%d" % index for index in range(4) if 2 * index + 1 != which}
    assert bodies(store, "xx", 0) == others
    assert next_offset(store, "xx", 0) == 4
    assert {path.name for path in (store / "consumequeue").iterdir()} == {"kk", "xx"}
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"\0", b"/", b"."])
def test_a_broker_starts_beside_a_topic_that_cannot_be_one(name: bytes, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store) as broker:
        broker.create_topic("t", 1)
        broker.create_topic("u", 1)
        broker.send("u", 0, [b"lost"])
        broker.send("t", 0, [b"0", b"1"])
        (record,) = broker.read_queue("u", 0, 1)
        broker.read_queue("t", 0, 2)
    assert record.record[-len(record.raw_properties) - 3 :][:1] == b"u"
    at = record.physical_offset + record.size - len(record.raw_properties) - 3
    patch(store / COMMITLOG_DIR / segment_name(0), at, name)
    with RunningBroker(store) as broker:
        assert [m.body for m in broker.read_queue("t", 0, 2)] == [b"0", b"1"]
        broker.send("u", 0, [b"next"])
        found = [(m.queue_offset, m.body) for m in broker.read_queue("u", 0, 2)]
        assert found == [(1, b"next")]
        broker.until_logged("its topic, queue id or queue offset cannot be one")
        assert broker.close() == 0


# --- readers of a closed store ---


@pytest.mark.parametrize("physical_offset", [1 << 62, (1 << 63) - 1, 1 << 40])
def test_an_absurd_entry_does_not_keep_an_analytic_reader_busy(
    physical_offset: int, tmp_path: Path
) -> None:
    write(tmp_path)
    patch(queue_file(tmp_path, ("t", 0)), UNIT * (COUNT - 1), physical_offset.to_bytes(8, "big"))
    closed = ClosedPositions(tmp_path, *file_sizes(tmp_path))
    assert f"{queue_folder(tmp_path, 't', 0)}, {COUNT - 1}, is wrong" in closed.distrust
    assert closed.log_range()[1] < 1 << 20
    reader = ColumnReader.up_to(tmp_path, physical_offset)
    found = {
        (topic, queue): (begin, end)
        for topic, queue, begin, end in reader.survey(physical_offset).items()
    }
    assert found == dict.fromkeys(QUEUES, (0, COUNT))
    assert reader.after_damage(1 << 20, physical_offset) == physical_offset
    reader.close()


def test_times_are_not_looked_up_in_other_records(tmp_path: Path) -> None:
    """A search by time that meets a damaged entry goes by the one before it."""
    write(tmp_path)
    for bit in (1, *range(30, 64), *range(65, 96)):
        flip(queue_file(tmp_path, ("t", 0)), UNIT * 2, bit)
        reader = StoreReader.open_closed(tmp_path, ReadLimits(skip_removed=False))
        assert reader.offset_by_time("t", 0, 1_004) == 4, bit
        assert reader.offset_by_time("t", 0, 1_001) == 1, bit
        reader.close()
        flip(queue_file(tmp_path, ("t", 0)), UNIT * 2, bit)
