"""Derived writes: what counts, what is refused, what a start knows, and who sees the marks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from family import RunningBroker, encode_batch
from patience import patient

from cometmq.actors.runtime.deriver import Deriver
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.tables.derivers import Derivers
from cometmq.actors.writer.derived import NOTHING, SNAPSHOT_MARKS
from cometmq.protocol.commands import (
    AppendRecords,
    DeletedSegments,
    DeleteSegments,
    Derivation,
    DerivedPosition,
    DiskState,
    GetDerived,
    ListQueues,
    Position,
    PullMessages,
    QueueList,
    RecordsAppended,
)
from cometmq.protocol.derived import (
    DERIVED_TOPIC,
    DERIVER_MAX,
    Forgotten,
    Mark,
    Snapshot,
    pack_mark,
    read_mark,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    DiskFull,
    MessageTooLarge,
    NameIllegal,
    OffsetIllegal,
    StoreDamaged,
    SystemBusy,
    UnknownCommand,
)
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import BatchIllegal, find_last
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import InnerEncoder
from cometmq.shm.live.control import CONTROL_FILE, Counter
from cometmq.shm.log.commit_log import CommitLog

WAIT_S = patient(60)
SEGMENT = 64 << 10


# --- the rules ---


def mark(before: int, after: int, note: bytes | None = None, name: str = "d") -> Mark:
    return Mark(name, Position(0, before), Position(0, after), 1, note)


def test_which_writes_count() -> None:
    book = Derivers(10_000)
    assert book.is_new("d", Position(3, 7), Position(3, 8))  # nobody knows better
    assert book.take(mark(0, 5), 100)
    assert book.is_new("d", Position(0, 5), Position(1, 0))
    assert not book.is_new("d", Position(0, 0), Position(0, 5))
    assert not book.is_new("d", Position(0, 2), Position(0, 4))
    for before, after in ((4, 6), (0, 6), (6, 7)):
        with pytest.raises(OffsetIllegal, match=rf"from \(0, {before}\) .* come to \(0, 5\)"):
            book.is_new("d", Position(0, before), Position(0, after))
    for name, before, after in (("d", 5, 5), ("d", 6, 5), ("", 0, 1), ("x" * 251, 0, 1)):
        with pytest.raises(ArgumentIllegal):
            book.is_new(name, Position(0, before), Position(0, after))
    assert not book.take(mark(6, 9), 200)  # one is missing; it counts all the same
    found = book.find("d")
    assert found is not None
    assert (found.position, found.at_ms) == (Position(0, 9), 200)


def test_notes_snapshots_and_what_is_forgotten() -> None:
    book = Derivers(10_000)
    for each in (mark(0, 1, b"plan"), mark(1, 2), mark(0, 9, name="e")):
        book.take(each, 1)
    found = book.find("d")
    assert found is not None
    assert found.note == b"plan"
    again = Derivers(10_000)
    again.take(mark(0, 77, name="gone"), 1)
    again.take(book.snapshot(), 2)
    assert list(again) == list(book)
    assert again.bytes == book.bytes
    again.take(mark(2, 3, b""), 3)
    again.take(Forgotten("e"), 3)
    again.take(Forgotten("never"), 3)
    assert [(each.deriver, each.note) for each in again] == [("d", b"")]
    again.take(Forgotten("d"), 3)
    assert (len(again), again.bytes) == (0, 0)


def test_a_snapshot_stays_one_record() -> None:
    book = Derivers(1_000)
    with pytest.raises(MessageTooLarge, match="a note of 2000 bytes"):
        book.check_room("d", bytes(2_000))
    names = [f"d{number}" for number in range(20)]
    for name in names:
        try:
            book.check_room(name, None)
        except SystemBusy:
            break
        book.take(mark(0, 1, name=name), 1)
    assert 5 < len(book) < 20
    with pytest.raises(SystemBusy, match="forget one"):
        book.check_room("more", None)
    assert len(pack_mark(book.snapshot())) < 1_000 + 64
    book.check_room("d0", None)  # those that are known go on


def test_what_is_no_mark() -> None:
    for body in (b"", b"x", b"\x92\x01\x91\x09", b"\xc1", bytes(100), pack_mark(mark(0, 1))[:-3]):
        with pytest.raises(StoreDamaged, match=DERIVED_TOPIC):
            read_mark(body)
    for each in (mark(0, 1, b"n"), Forgotten("d"), Snapshot([])):
        assert read_mark(pack_mark(each)) == each


# --- the kernel's part ---


def test_a_batch_becomes_inner_records() -> None:
    batch = encode_batch([b"one", b"two" * 100, b"three"], tags="t")
    encoder = InnerEncoder()
    assert encoder.add_batch(0, batch, sys_flag=0x100, born_timestamp=5) == (len(batch), 3)
    small = InnerEncoder(size_max=200)
    at, count = small.add_batch(0, batch)
    assert (count, small.count) == (1, 1)
    small.take()
    second, count = small.add_batch(0, batch, at)
    assert count == 1  # alone it may be larger
    for size in set(range(1, len(batch))) - {at, second}:
        with pytest.raises(BatchIllegal, match="is none"):
            encoder.add_batch(0, batch[:size])
    with pytest.raises(ValueError, match="no byte"):
        encoder.add_batch(0, batch, len(batch) + 1)


def test_the_last_record_of_a_topic(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    log = CommitLog(
        tmp_path, segment_bytes=SEGMENT, physical_offset=0, store_host=bytes(8),
        max_message_bytes=4096,
    )  # fmt: skip
    places = [log.append(QueueCursor(topic, 0), b"x", store_timestamp_ms=1_000 + number)
              for number, topic in enumerate(["a", "b", "a", "c", "c"])]  # fmt: skip
    end = log.physical_offset
    log.close()
    content = (tmp_path / "commitlog" / f"{0:020d}").read_bytes()
    size = places[1] - places[0]
    assert find_last(content, 0, 0, end, b"a") == (end, places[2], size, 2, 1_001)
    assert find_last(content, 0, 0, end, b"c") == (end, places[4], size, 0, 1_003)
    assert find_last(content, 0, 0, end, b"none")[1:3] == (-1, 0)
    assert find_last(content, 0, 0, SEGMENT, b"b")[0] == end
    assert find_last(content, 0, places[1], places[1], b"b")[1] == -1
    for bad in ((-1, 5), (0, SEGMENT + 1), (9, 8)):
        with pytest.raises(ValueError, match="not inside"):
            find_last(content, 0, *bad, b"a")


# --- with a broker ---


@pytest.fixture(scope="module", params=["ASYNC_FLUSH", "SYNC_FLUSH"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningBroker]:
    store = tmp_path_factory.mktemp("derived") / "store"
    with RunningBroker(store, {"flushDiskType": request.param}) as running:
        yield running


@pytest.fixture
def line(broker: RunningBroker) -> Iterator[Channel]:
    with Channel(broker.address("commitlog")) as channel:
        yield channel


def derivation(name: str, before: int, after: int, note: bytes | None = None) -> Derivation:
    return Derivation(name, Position(0, before), Position(0, after), note)


def write(
    line: Channel, what: Derivation, bodies: list[bytes], topic: str = "derived"
) -> tuple[RecordsAppended, bytes]:
    records = InnerRecords()
    for body in bodies:
        records.encoder.add(records.queue(topic, 0), body)
    answer, frames = line.ask(*records.take(derived=what), timeout_s=WAIT_S)
    assert isinstance(answer, RecordsAppended)
    return answer, bytes(frames[0].buffer)


def known(line: Channel, name: str) -> DerivedPosition:
    answer, _ = line.ask(GetDerived(name), timeout_s=WAIT_S)
    assert isinstance(answer, DerivedPosition)
    return answer


def test_a_write_that_comes_again_is_stored_once(broker: RunningBroker, line: Channel) -> None:
    name, topic = f"d{os.urandom(4).hex()}", f"t{os.urandom(4).hex()}"
    assert known(line, name) == DerivedPosition(False, Position())
    first, places = write(line, derivation(name, 0, 2, b"why"), [b"one", b"two"], topic)
    assert (first.code, first.already, len(places)) == (0, False, 32)
    again, places = write(line, derivation(name, 0, 2, b"why"), [b"one", b"two"], topic)
    assert (again.code, again.already, places) == (0, True, b"")
    with pytest.raises(OffsetIllegal, match=r"come to \(0, 2\)"):
        write(line, derivation(name, 1, 3), [b"other"], topic)
    assert known(line, name) == DerivedPosition(True, Position(0, 2), b"why")
    empty, places = write(line, derivation(name, 2, 3), [], topic)
    assert (empty.already, places) == (False, b"")
    assert known(line, name) == DerivedPosition(True, Position(0, 3), b"why")
    assert [each.body for each in broker.read_queue(topic, 0, 2)] == [b"one", b"two"]


def test_what_is_refused(broker: RunningBroker, line: Channel) -> None:
    for what in (derivation("", 0, 1), derivation("x" * (DERIVER_MAX + 1), 0, 1),
                 derivation("d", 1, 1), derivation("d", 2, 1)):  # fmt: skip
        with pytest.raises(ArgumentIllegal):
            write(line, what, [b"x"])
    assert not known(line, "d").is_known
    for command in (GetDerived("d"), AppendRecords([], 0, 0, derivation("d", 0, 1))):
        with pytest.raises(UnknownCommand):
            broker.commitlog.ask(command, [b""])


def test_a_repeat_is_told_so_while_nothing_is_taken(broker: RunningBroker, line: Channel) -> None:
    """Or its sender would believe that it is not stored."""
    write(line, derivation("full", 0, 1), [b"x"])
    line.ask(DiskState(False, "the disk is full, for a test"))
    try:
        assert write(line, derivation("full", 0, 1), [b"x"])[0].already
        with pytest.raises(DiskFull):
            write(line, derivation("full", 1, 2), [b"x"])
    finally:
        line.ask(DiskState(True))
    assert known(line, "full").position == Position(0, 1)


def test_nobody_sees_the_marks(broker: RunningBroker, line: Channel) -> None:
    write(line, derivation("hidden", 0, 1), [b"x"], "seen")
    broker.read_queue("seen", 0, 1)
    answer, _ = broker.reader.ask(ListQueues(), timeout_s=WAIT_S)
    assert isinstance(answer, QueueList)
    topics = {queue.topic for queue in answer.queues}
    assert "seen" in topics
    assert DERIVED_TOPIC not in topics
    with pytest.raises(NameIllegal, match="the broker's own"):
        broker.reader.ask(PullMessages(DERIVED_TOPIC, 0, 0), timeout_s=WAIT_S)
    with pytest.raises(NameIllegal):
        broker.create_topic(DERIVED_TOPIC, 1)
    with pytest.raises(NameIllegal):
        broker.send(DERIVED_TOPIC, 0, [b"mine"])


def test_a_deriver_outlives_the_commitlog_process(broker: RunningBroker) -> None:
    with Channel(broker.address("commitlog")) as line:
        deriver = Deriver(line, "lives", Position(0, 10))
        for round_ in range(3):
            at = deriver.position()
            assert at == Position(0, 10 + round_)
            records = InnerRecords()
            records.encoder.add(records.queue("lives", 0), b"%d" % at.number)
            deriver.write(records, Position(0, at.number + 1), note=b"n%d" % round_)
            broker.kill("commitlog")
            deriver = Deriver(line, "lives")
            assert deriver.position() == Position(0, at.number + 1)
            assert deriver.note == b"n%d" % round_
    bodies = [each.body for each in broker.read_queue("lives", 0, 3)]
    assert bodies == [b"10", b"11", b"12"]


@pytest.mark.slow
def test_positions_outlive_restarts_and_old_segments(tmp_path: Path) -> None:
    """One writes once, and never again; the segment that it wrote to is deleted."""
    store = tmp_path / "store"
    settings = {"mappedFileSizeCommitLog": SEGMENT, "maxMessageSize": SEGMENT // 4,
                "flushIntervalCommitLog": 50, "flushCommitLogLeastPages": 0}  # fmt: skip
    with RunningBroker(store, settings) as broker:
        broker.create_topic("t", 1)
        assert broker.counter(Counter.MARKS_FROM) == NOTHING
        with Channel(broker.address("commitlog")) as line:
            write(line, derivation("once", 0, 7, b"note"), [b"x"])
        assert broker.counter(Counter.MARKS_FROM) < SEGMENT
        for _ in range(40):
            broker.send("t", 0, [bytes(12_000)])
        deadline = time.monotonic() + WAIT_S
        while broker.counter(Counter.MARKS_FROM) < 3 * SEGMENT:
            assert time.monotonic() < deadline, broker.counter(Counter.MARKS_FROM)
            broker.ask("commitlog", GetDerived("once"))
        long_ago = time.time() - 100 * 3600
        for path in sorted((store / "commitlog").iterdir())[:3]:
            os.utime(path, (long_ago, long_ago))
        gone: list[int] = []
        while not gone:  # the ledger's snapshots may still need them
            assert time.monotonic() < deadline, "no segment is deleted"
            answer = broker.ask("cleaner", DeleteSegments(), WAIT_S)
            assert isinstance(answer, DeletedSegments)
            gone = answer.segments
        assert gone[0] == 0
        broker.kill("commitlog")
        with Channel(broker.address("commitlog")) as line:
            assert known(line, "once") == DerivedPosition(True, Position(0, 7), b"note")
        broker.kill_all()
    (store / CONTROL_FILE).unlink()
    for _ in range(2):  # after a bad end, and after one in order
        with (
            RunningBroker(store, settings) as broker,
            Channel(broker.address("commitlog")) as line,
        ):
            assert known(line, "once") == DerivedPosition(True, Position(0, 7), b"note")
            assert write(line, derivation("once", 0, 7), [b"x"])[0].already


def test_a_start_reads_from_the_last_snapshot_on(tmp_path: Path) -> None:
    """However many marks there are."""
    store = tmp_path / "store"
    count = 2 * SNAPSHOT_MARKS + 100
    with RunningBroker(store) as broker:
        with Channel(broker.address("commitlog")) as line:
            marks = [derivation(f"d{at % 3}", at // 3, at // 3 + 1) for at in range(count)]
            for begin in range(0, count, 200):  # who does not read loses answers
                some = marks[begin : begin + 200]
                asked = [line.request(*InnerRecords().take(derived=each)) for each in some]
                for each in asked:
                    assert line.wait(each, WAIT_S)
                    each.result()
        broker.kill_all()
    bodies = [each.body for each in reference.records(store) if each.topic == DERIVED_TOPIC]
    snapshots = [at for at, body in enumerate(bodies) if isinstance(read_mark(body), Snapshot)]
    assert len(bodies) == count + len(snapshots)
    assert len(snapshots) == 2
    with RunningBroker(store) as broker, Channel(broker.address("commitlog")) as line:
        for number in range(3):
            assert known(line, f"d{number}").position.number == count // 3 + (number < count % 3)
        assert broker.statistics("commitlog")["derivers"] == 3
        assert not write(line, derivation("new", 0, 1), [])[0].already
