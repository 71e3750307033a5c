"""The rules of shm/kernel/records.pxd, where people meet them.

A queue's entry that points at something else never serves another message, and the names that a
record may have are those that a client may use.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
from family import RunningBroker
from patience import patient

from cometmq import Consumer, Message
from cometmq.protocol.errors import MessageIllegal, NameIllegal
from cometmq.protocol.names import UNKEPT_PROPERTIES, check_topic
from cometmq.shm.derived.consume_queue import UNIT, queue_folder
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.columns import COLUMNS_DONE, Columns
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.live.control import Counter
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.os.files import segment_name
from cometmq.shm.reading.column_reader import ColumnReader
from cometmq.shm.reading.mapped_reader import MappedReader
from cometmq.shm.reading.positions import ScannedPositions, file_sizes
from cometmq.shm.reading.selection import Selection
from cometmq.shm.reading.store_reader import ReadLimits, StoreReader

pytestmark = pytest.mark.timeout(120)

COUNT = 12  # messages of each queue
FLIPPED = 5  # the entry that is damaged
OTHERS = [index for index in range(COUNT) if index != FLIPPED]
WAIT_S = patient(30)


def message_of(topic: str, queue_id: int, index: int, size: int) -> dict[str, object]:
    """Its record has exactly so many bytes: at powers of two one flipped bit is another record."""
    body = f"{topic}/{queue_id}/{index}|".encode()
    return {
        "topic": topic,
        "queue_id": queue_id,
        "properties": b"TAGS\x01a\x02",
        "store_timestamp": 1_000 + index,
        "body": body.ljust(size - 91 - len(topic) - len(b"TAGS\x01a\x02"), b"."),
    }


def write(store: Path, size: int) -> None:
    """Two queues of one topic and one of another, their messages in turns."""
    queues = [("t", 0), ("t", 1), ("u", 0)]
    reference.write_store(
        store, [message_of(*queue, index, size) for index in range(COUNT) for queue in queues]
    )


def flip(store: Path, bit: int, *, index: int = FLIPPED, queue: tuple[str, int] = ("t", 0)) -> None:
    with (queue_folder(store, *queue) / segment_name(0)).open("r+b") as file:
        file.seek(index * UNIT + bit // 8)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x80 >> bit % 8]))


def by_pull(store: Path) -> dict[int, bytes]:
    """As a reader process has it."""
    segment_bytes, queue_segment_bytes = file_sizes(store)
    reader = StoreReader(
        store, segment_bytes=segment_bytes, queue_segment_bytes=queue_segment_bytes,
        positions=Known(store), limits=ReadLimits(skip_removed=False),
    )  # fmt: skip
    found, offset = {}, 0
    while offset < COUNT:
        result = reader.get_message("t", 0, offset)
        for message in codec.decode(result.payload or b""):
            found[message.queue_offset] = message.body
        assert result.next_queue_offset > offset
        offset = result.next_queue_offset
    reader.close()
    return found


def by_mapping(store: Path) -> dict[int, bytes]:
    """As a consumer on the broker's machine has it."""
    segment_bytes, queue_segment_bytes = file_sizes(store)
    reader = MappedReader(
        store, str(store), segment_bytes=segment_bytes, queue_segment_bytes=queue_segment_bytes,
        positions=Known(store),
    )  # fmt: skip
    found, offset = {}, 0
    while offset < COUNT:
        answer = reader.messages("t", 0, offset, 32, 1 << 20, Selection(None, None))
        found.update({message.queue_offset: message.body for message in answer.messages})
        assert answer.next_queue_offset > offset
        offset = answer.next_queue_offset
    reader.close()
    return found


def by_columns(store: Path) -> dict[int, bytes]:
    """As a task of Spark has it."""
    reader = ColumnReader.at(store, Known(store))
    columns = Columns(("queue_offset", "body"), "b")
    at = 0
    while at < COUNT:
        reason, at = reader.gather_columns(columns, "t", 0, at, COUNT)
        if reason != COLUMNS_DONE:
            at += 1
    rows, ((_, (offsets,)), (_, (_, places, data))) = columns.take()
    numbers = memoryview(offsets).cast("B").cast("q")
    ends = memoryview(places).cast("B").cast("i")
    bodies = bytes(data)
    found = {numbers[row]: bodies[ends[row] : ends[row + 1]] for row in range(rows)}
    reader.close()
    return found


class Known(ScannedPositions):
    """The queue's end is known from elsewhere, as it is while a broker runs."""

    def __init__(self, store: Path) -> None:
        super().__init__(store, *file_sizes(store), real_minimum=True)
        self._queues["t", 0] = self._queues["t", 0]._replace(
            min_queue_offset=0, max_queue_offset=COUNT
        )


@pytest.mark.parametrize("way", [by_pull, by_mapping, by_columns])
@pytest.mark.parametrize("size", [199, 256, 512])
@pytest.mark.slow
def test_a_flipped_bit_of_an_entry_serves_no_other_message(
    way: Callable[[Path], dict[int, bytes]],
    size: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each bit of physical offset and size in turn: the message is missing, and all others come."""
    write(tmp_path, size)
    right = {i: message_of("t", 0, i, size)["body"] for i in range(COUNT)}
    assert way(tmp_path) == right
    caplog.clear()
    for bit in range(96):
        flip(tmp_path, bit)
        assert way(tmp_path) == {index: right[index] for index in OTHERS}, bit
        if way is not by_columns:  # there the caller is told, and tells
            said = [record.getMessage() for record in caplog.records]
            assert len(said) == 1
            assert f"{queue_folder(tmp_path, 't', 0)}: entry {FLIPPED} points at" in said[0]
        caplog.clear()
        flip(tmp_path, bit)


@pytest.mark.parametrize("sys_flag", [reference.TRANSACTION_MASK, 4])
def test_an_entry_never_holds_for_a_transaction_that_is_none_yet(
    sys_flag: int, tmp_path: Path
) -> None:
    """A prepared message has queue offset 0, as the first message of its queue has."""
    messages = [message_of("t", 0, index, 256) for index in range(2)]
    prepared = reference.write_store(tmp_path, [{**messages[0], "sys_flag": sys_flag}, *messages])
    assert (prepared[0].lies_at, prepared[0].queue_offset) == (0, 0)
    with (queue_folder(tmp_path, "t", 0) / segment_name(0)).open("r+b") as file:
        file.write(reference.encode_entry(0, 256, 97))
    reader = StoreReader.open_closed(tmp_path)
    found = reader.get_message("t", 0, 0)
    assert [m.queue_offset for m in codec.decode(found.payload or b"")] == [1]
    reader.close()


def test_a_light_queue_holds_messages_of_other_topics(tmp_path: Path) -> None:
    """RocketMQ's multi-dispatch: the message names the queues, and its offset in each of them."""
    names = "%LMQ%a,%LMQ%b"
    messages = [
        {
            "topic": "parent",
            "body": b"%d" % index,
            "properties": f"INNER_MULTI_DISPATCH\x01{names}\x02"
            f"INNER_MULTI_QUEUE_OFFSET\x01{index},{index + 7}\x02".encode(),
        }
        for index in range(3)
    ]
    stored = reference.write_store(tmp_path, messages)
    entries = b"".join(reference.encode_entry(r.lies_at, r.total_size, 0) for r in stored)
    for name, first in (("%LMQ%a", 0), ("%LMQ%b", 7), ("%LMQ%c", 0)):
        folder = queue_folder(tmp_path, name, 0)
        folder.mkdir(parents=True)
        filled = reference.encode_entry(0, 0x7FFFFFFF, 0) * first + entries
        (folder / segment_name(0)).write_bytes(filled.ljust(2000, b"\0"))
    reader = StoreReader.open_closed(tmp_path, ReadLimits(skip_removed=False), real_minimum=True)
    for name, first, count in (("%LMQ%a", 0, 3), ("%LMQ%b", 7, 3), ("%LMQ%c", 0, 0)):
        found = reader.get_message(name, 0, first)
        bodies = [message.body for message in codec.decode(found.payload or b"")]
        assert bodies == [b"0", b"1", b"2"][:count], name
    reader.close()


# --- by a broker ---


def taken(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        messages = consumer.poll(64, 1)
        consumer.ack(messages)
        found += messages
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
    return found


@pytest.fixture(params=["mapped", "zmq"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_consumer_gets_each_message_once_or_not_at_all(transport: str, tmp_path: Path) -> None:
    """An entry that came to name its neighbour's record: one is missing, none comes twice."""
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("t", 1)
        broker.send("t", 0, [b"%d" % number for number in range(8)])
        records = broker.read_queue("t", 0, 8)
        assert len({record.size for record in records}) == 1
        deadline = time.monotonic() + WAIT_S
        while broker.counter(Counter.DISPATCHED) < broker.counter(Counter.WROTE):
            assert time.monotonic() < deadline
            os.sched_yield()
        path = queue_folder(broker.store, "t", 0) / segment_name(0)
        with path.open("r+b") as file:
            file.seek(4 * UNIT)
            file.write(records[3].physical_offset.to_bytes(8, "big"))
        with Consumer(broker.ready.name_server, "g", "t", transport=transport) as consumer:
            offsets = [message.queue_offset for message in taken(consumer, 7)]
            assert offsets == [0, 1, 2, 3, 5, 6, 7]
            assert consumer.poll(1, 0.1) == []


# --- names ---


@pytest.mark.parametrize("seed", [1, 2])
def test_the_kernel_has_the_clients_rule_of_topics(seed: int) -> None:
    """One character more, which RocketMQ's brokers themselves use, and no client may."""
    chance = random.Random(seed)
    letters = "aZ0%|_-+./\0\\ ~\u00e9\uffff"
    names = ["", ".", "..", "%RETRY%", "%DLQ%", "%RETRY", "a" * 127, "a" * 128]
    names += [f"%{kind}%".ljust(count, "a") for kind in ("RETRY", "DLQ") for count in (255, 256)]
    names += ["".join(chance.choices(letters, k=chance.randrange(1, 5))) for _ in range(2_000)]
    for name in names:
        try:
            check_topic(name.replace("+", "-"))
            legal = True
        except NameIllegal:
            legal = False
        assert codec.is_queue_name(name, 0) == legal, name
    assert not codec.is_queue_name("a", -1)
    assert not codec.is_queue_name("a", 1 << 31)


@pytest.mark.parametrize("name", sorted(UNKEPT_PROPERTIES))
def test_a_batch_that_asks_for_later(name: str, tmp_path: Path) -> None:
    """From whomever it comes: what the broker cannot do yet is refused, all of the batch."""
    (tmp_path / "commitlog").mkdir()
    log = CommitLog(
        tmp_path, segment_bytes=65536, physical_offset=0, store_host=bytes(8),
        max_message_bytes=4096,
    )  # fmt: skip
    queue = QueueCursor("orders", 0)
    taken = [b"", name.encode(), name.encode() + b"\x01", name.encode() + b"\x01\x02",
             b"X" + name.encode() + b"\x013\x02", name.encode() + b"S\x013\x02",
             b"KEYS\x01" + name.encode() + b"\x02"]  # fmt: skip
    for properties in taken:
        log.append_batch(queue, element(b"body", properties), 1)
    before = log.physical_offset, queue.next_offset
    for properties in (
        name.encode() + b"\x013", name.encode() + b"\x013\x02",
        b"TAGS\x01t\x02" + name.encode() + b"\x013\x02KEYS\x01k\x02",
    ):  # fmt: skip
        batch = element(b"first", b"") + element(b"second", properties)
        with pytest.raises(
            MessageIllegal, match=rf"element 1: property {name} = '3': {UNKEPT_PROPERTIES[name]}"
        ):
            log.append_batch(queue, batch, 2)
        with pytest.raises(MessageIllegal, match=name):
            log.check_batch(queue, batch, 2, bytes(8))
    assert (log.physical_offset, queue.next_offset) == before
    log.close()


def element(body: bytes, properties: bytes) -> bytes:
    head = struct.pack(">iiiii", 22 + len(body) + len(properties), 0, 0, 0, len(body))
    return head + body + struct.pack(">h", len(properties)) + properties
