"""Records of the broker's own actors: with every field, where they may come from, and when they are
answered."""

from __future__ import annotations

import struct
import tarfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import reference
from family import RunningBroker
from shared_data import data_path

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.protocol.commands import AppendRecords, Cover, QueueKey, RecordsAppended
from cometmq.protocol.errors import (
    ArgumentIllegal,
    BadRequest,
    MessageIllegal,
    MessageTooLarge,
    UnknownCommand,
)
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import BatchFull, RecordDamaged, RecordTooLarge
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import InnerEncoder
from cometmq.shm.log.commit_log import CommitLog

# Stores of a RocketMQ 5.3.3 broker whose actors wrote all kinds of records.
BROKERS = ("retry-dlq", "transactions", "delay-levels", "timer", "pop", "orderly")
BROKERS_FOLDER = "rocketmq-brokers"
SEGMENT = 1 << 20


def log_of(store: Path, at: int = 0, *, host: bytes = bytes(8), crc: bool = False) -> CommitLog:
    (store / "commitlog").mkdir(parents=True, exist_ok=True)
    return CommitLog(
        store, segment_bytes=SEGMENT, physical_offset=at, store_host=host,
        max_message_bytes=65536, crc_property=crc,
    )  # fmt: skip


def laid_down(store: Path) -> list[reference.Record]:
    return list(reference.records(store))


def unpack(name: str, to: Path) -> Path:
    with tarfile.open(data_path(BROKERS_FOLDER, f"{name}.tar.gz")) as archive:
        archive.extractall(to, filter="data")
    (store,) = [path.parent for path in to.rglob("commitlog") if path.is_dir()]
    return store


def groups(records: list[reference.Record]) -> Iterator[list[reference.Record]]:
    """What may have been stored at once: side by side, at the same millisecond."""
    group = records[:1]
    for before, record in pairwise(records):
        if (
            record.store_timestamp != before.store_timestamp
            or record.lies_at != before.lies_at + before.total_size
        ):
            yield group
            group = []
        group.append(record)
    yield group


@pytest.mark.parametrize("name", BROKERS)
@pytest.mark.slow
def test_the_bytes_are_those_of_rocketmq(name: str, tmp_path: Path) -> None:
    records = laid_down(unpack(name, tmp_path / "theirs"))
    assert records
    sizes = []
    for number, group in enumerate(groups(records)):
        assert append_like(tmp_path / f"{number}", group) == b"".join(each.raw for each in group)
        sizes.append(len(group))
    if name == "retry-dlq":
        assert any(each.reconsume_times for each in records)
        assert max(sizes) > 1


def append_like(store: Path, group: list[reference.Record]) -> bytes:
    """The same records by ours at the same place: what lies there then."""
    at = group[0].lies_at
    segment_bytes = at + sum(each.total_size for each in group) + 8
    (store / "commitlog").mkdir(parents=True)
    log = CommitLog(
        store, segment_bytes=segment_bytes, physical_offset=at, store_host=bytes(8),
        max_message_bytes=1 << 22,
    )  # fmt: skip
    encoder = InnerEncoder()
    queues: dict[tuple[str, int], QueueCursor] = {}
    for record in group:
        key = record.topic, record.queue_id
        if key not in queues:
            queues[key] = QueueCursor(*key, record.queue_offset)
        encoder.add(
            list(queues).index(key), record.body, record.properties_raw, flag=record.flag,
            sys_flag=record.sys_flag, born_timestamp=record.born_timestamp,
            born_host=reference.encode_host(record.born_host),
            store_host=reference.encode_host(record.store_host),
            reconsume_times=record.reconsume_times,
            prepared_offset=record.prepared_transaction_offset,
        )  # fmt: skip
    places = log.append_inner(
        list(queues.values()), encoder.take(), len(group),
        store_timestamp_ms=group[0].store_timestamp,
    )  # fmt: skip
    assert list(struct.iter_unpack("=qq", places)) == [
        (each.queue_offset, each.physical_offset) for each in group
    ]
    log.close()
    (file,) = (store / "commitlog").iterdir()
    return file.read_bytes()[at : at + sum(each.total_size for each in group)]


def test_prepared_ones_take_no_queue_offset(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    queue = QueueCursor("orders", 3, 7)
    encoder = InnerEncoder()
    for sys_flag in (0x4, 0x8, 0xC, 0x0):
        encoder.add(0, b"body", sys_flag=sys_flag, prepared_offset=99, flag=5)
    places = log.append_inner([queue], encoder.take(), 4)
    log.close()
    assert [place[0] for place in struct.iter_unpack("=qq", places)] == [0, 7, 0, 8]
    assert [(each.sys_flag, each.queue_offset, each.flag) for each in laid_down(tmp_path)] == [
        (0x4, 0, 5), (0x8, 7, 5), (0xC, 0, 5), (0x0, 8, 5),
    ]  # fmt: skip


def test_a_copy_of_what_is_stored(tmp_path: Path) -> None:
    """As retry and timers make it: another queue and properties, everything else as it was."""
    first, again = tmp_path / "first", tmp_path / "again"
    log = log_of(first, host=bytes([10, 0, 0, 1, 0, 0, 42, 159]), crc=True)
    log.append(
        QueueCursor("orders", 0), b"body" * 9, b"KEYS\x01k", flag=3, sys_flag=0x100,
        born_timestamp_ms=12345, born_host=bytes(range(20)), reconsume_times=2,
        prepared_transaction_offset=77,
    )  # fmt: skip
    log.close()
    (stored,) = laid_down(first)
    for crc in (False, True):
        encoder = InnerEncoder()
        encoder.add_stored(0, stored.raw)
        encoder.add_stored(1, stored.raw, b"A\x01b\x02", reconsume_times=3, prepared_offset=1)
        store = again / str(crc)
        log = log_of(store, crc=crc)
        log.append_inner(
            [QueueCursor("%RETRY%g", 0), QueueCursor("SCHEDULE_TOPIC_XXXX", 3)], encoder.take(), 2
        )
        log.close()
        copy, other = laid_down(store)
        for each in (copy, other):
            assert (each.flag, each.sys_flag, each.born_timestamp, each.body, each.born_host) == (
                3, stored.sys_flag, 12345, stored.body, stored.born_host,
            )  # fmt: skip
            assert each.property_crc_ok is (True if crc else None)
        assert (copy.reconsume_times, copy.prepared_transaction_offset) == (2, 77)
        assert (other.reconsume_times, other.prepared_transaction_offset) == (3, 1)
        assert copy.properties.get("KEYS") == "k"
        assert other.properties.get("A") == "b"
        assert (copy.topic, other.topic, other.queue_id) == ("%RETRY%g", "SCHEDULE_TOPIC_XXXX", 3)
    damaged = bytearray(stored.raw)
    damaged[100] ^= 1
    with pytest.raises(RecordDamaged):
        InnerEncoder().add_stored(0, damaged)
    with pytest.raises(RecordDamaged):
        InnerEncoder().add_stored(0, b"")


def test_what_does_not_fit_goes_to_the_next_segment_whole(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    queue = QueueCursor("orders", 0)
    while log.physical_offset < SEGMENT - 80_000:
        log.append(queue, bytes(30_000))
    encoder = InnerEncoder()
    assert encoder.add_many(0, [bytes(30_000)] * 3) == 3
    places = log.append_inner([queue], encoder.take(), 3)
    assert next(struct.iter_unpack("=qq", places))[1] == SEGMENT
    log.close()
    records = laid_down(tmp_path)
    assert [each.queue_offset for each in records] == list(range(len(records)))


def test_what_no_payload_can_be(tmp_path: Path) -> None:
    """Whatever the bytes are: an error, and nothing is stored."""
    log = log_of(tmp_path)
    queue = QueueCursor("orders", 0)
    encoder = InnerEncoder()
    encoder.add_many(0, [b"one", b"two"])
    whole = encoder.take()
    for count in (0, 1, 3, -1):
        with pytest.raises(MessageIllegal):
            log.append_inner([queue], whole, count)
    with pytest.raises(MessageIllegal):
        log.append_inner([], whole, 2)
    for size in range(len(whole)):
        with pytest.raises(MessageIllegal):
            log.append_inner([queue], whole[:size], 2)
    for at in range(44):  # of the head of the first
        for value in (0x01, 0x7F, 0x80, 0xFF):
            torn = bytearray(whole)
            torn[at] = value
            before = log.physical_offset, queue.next_offset
            try:
                log.append_inner([queue], torn, 2)
            except MessageIllegal:
                assert (log.physical_offset, queue.next_offset) == before
    encoder.add_many(0, [bytes(60_000)] * 20)
    with pytest.raises(MessageTooLarge):
        log.append_inner([queue], encoder.take(), 20)
    before = log.physical_offset
    with pytest.raises(MessageTooLarge, match="at most 100"):
        log.append_inner([queue], whole, 2, size_max=100)
    assert log.physical_offset == before
    log.close()
    laid_down(tmp_path)  # every byte of it is a record's


def test_an_encoder_that_is_full() -> None:
    encoder = InnerEncoder(size_max=1000)
    assert encoder.add_many(0, [bytes(300)] * 5) == 2
    with pytest.raises(BatchFull):
        encoder.add(0, bytes(300))
    assert (encoder.count, encoder.size) == (2, len(encoder.take()))
    assert encoder.add(0, bytes(5000)) == 0  # alone it may
    with pytest.raises(RecordTooLarge):
        encoder.add(0, b"", bytes(40_000))
    with pytest.raises(ValueError, match="host of 5 bytes"):
        encoder.add(0, b"", born_host=b"12345")


# --- through the family ---


@pytest.fixture(scope="module", params=["ASYNC_FLUSH", "SYNC_FLUSH"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningBroker]:
    store = tmp_path_factory.mktemp("inner") / "store"
    with RunningBroker(store, {"flushDiskType": request.param}) as running:
        yield running


def some(count: int = 3, topic: str = "%RETRY%billing") -> InnerRecords:
    records = InnerRecords()
    for number in range(count):
        records.encoder.add(
            records.queue(topic, number % 2), b"%d" % number, b"DELAY\x013\x02",
            reconsume_times=number,
        )  # fmt: skip
    return records


@pytest.mark.parametrize("cover", [Cover.POLICY, Cover.WRITTEN, Cover.FLUSHED])
def test_stored_and_read(broker: RunningBroker, cover: int) -> None:
    topic = f"SCHEDULE{cover + 1}"
    with Channel(broker.address("commitlog")) as channel:
        answer, frames = channel.ask(*some(5, topic).take(cover))
    assert isinstance(answer, RecordsAppended)
    assert (answer.code, answer.text) == (0, "")
    assert 0 <= time.time() * 1000 - answer.store_timestamp_ms < 60_000
    places = list(struct.iter_unpack("=qq", frames[0].buffer))
    assert [offset for offset, _ in places] == [0, 0, 1, 1, 2]
    for queue_id in (0, 1):
        messages = broker.read_queue(topic, queue_id, at_least=2)
        assert [each.body for each in messages] == [b"%d" % n for n in range(queue_id, 5, 2)]
        assert [each.physical_offset for each in messages] == [at for _, at in places[queue_id::2]]
        assert [each.reconsume_times for each in messages] == list(range(queue_id, 5, 2))


def test_a_client_may_not(broker: RunningBroker) -> None:
    with pytest.raises(UnknownCommand):
        broker.commitlog.ask(*some().take())


def test_what_is_refused(broker: RunningBroker) -> None:
    with Channel(broker.address("commitlog")) as channel:
        with pytest.raises(ArgumentIllegal, match="cover"):
            channel.ask(*some().take(Cover.REPLICATED))
        with pytest.raises(BadRequest, match="frames"):
            channel.ask(AppendRecords([QueueKey("a", 0)], 1))
        for topic in ("../../etc", "", "a" * 300):
            with pytest.raises(MessageIllegal):
                channel.ask(*some(1, topic).take())
        with pytest.raises(MessageIllegal, match="announced"):
            channel.ask(AppendRecords([QueueKey("a", 0)], 1), [b""])
