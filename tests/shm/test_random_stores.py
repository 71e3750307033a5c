"""Random messages through every way of appending, read again by the independent decoder."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import reference
import strategies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cometmq.shm.kernel.codec import Message, decode
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.log.recovery import find_end

SEGMENT_BYTES = 16_384
MAX_MESSAGE_BYTES = 6_000
STORE_HOST = (reference.NO_HOST[0], 10911)

RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Batch:
    """Messages of one queue, appended in one call."""

    messages: list[strategies.Message]


def small_messages(
    topic: st.SearchStrategy[str] | None = None,
) -> st.SearchStrategy[strategies.Message]:
    return strategies.messages(topic, body=strategies.bodies(MAX_MESSAGE_BYTES))


def batches() -> st.SearchStrategy[Batch]:
    """Of small bodies, so that all fit into one segment."""
    element = strategies.messages(body=strategies.bodies(400))
    return st.lists(element, min_size=1, max_size=8).map(Batch)


def open_log(store: Path, *, crc: bool = False, at: int = 0) -> CommitLog:
    (store / "commitlog").mkdir(exist_ok=True)
    return CommitLog(
        store,
        segment_bytes=SEGMENT_BYTES,
        physical_offset=at,
        store_host=reference.encode_host(STORE_HOST),
        max_message_bytes=MAX_MESSAGE_BYTES,
        crc_property=crc,
    )


class Expected:
    """The log as it must be, built by the reference's encoder."""

    def __init__(self, *, crc: bool) -> None:
        self.content = bytearray()
        self.records: list[bytes] = []
        self._crc = crc

    def encode(
        self, message: strategies.Message, at: int, queue_offset: int, topic: str, queue_id: int
    ) -> bytes:
        arguments = message.record_arguments() | {"store_host": STORE_HOST}
        # A time of 0 means now; the tests that compare bytes do not ask for that.
        return reference.encode_record(
            **(arguments | {"topic": topic, "queue_id": queue_id}),
            queue_offset=queue_offset,
            physical_offset=at,
            append_crc=self._crc,
        )

    def put(self, records: Callable[[int], list[bytes]]) -> int:
        """Records that stand together, behind a blank where they do not fit; their place."""
        size = sum(map(len, records(0)))
        left = SEGMENT_BYTES - len(self.content) % SEGMENT_BYTES
        if size + reference.BLANK_BYTES > left:
            self.content += reference.encode_blank(left).ljust(left, b"\0")
        at = len(self.content)
        for record in records(at):
            self.content += record
            self.records.append(record)
        return at


def assert_log_is(store: Path, expected: Expected) -> None:
    """Byte for byte, by the reference's walk, and by our own decoder and recovery."""
    walk = reference.walk_log(store)
    found = [unit.raw for unit in walk if isinstance(unit, reference.Record)]
    assert found == expected.records
    assert walk.stop is not None
    assert walk.stop.physical_offset in (
        len(expected.content),
        -(-len(expected.content) // SEGMENT_BYTES) * SEGMENT_BYTES,
    )
    files = reference.segment_files(store / "commitlog")
    content = b"".join(path.read_bytes() for path in files)
    assert content == bytes(expected.content).ljust(len(content), b"\0")
    for clean in (True, False):
        assert find_end(store, SEGMENT_BYTES, clean=clean).physical_offset == len(expected.content)
    assert [message.record for message in decode(b"".join(expected.records))] == expected.records


def stamped(message: strategies.Message) -> tuple[int, int]:
    """Born and store time, never 0: that would mean now."""
    return message.born_timestamp or 1, message.store_timestamp or 1


@pytest.mark.slow
@RANDOM
@given(messages=st.lists(small_messages(), max_size=30), crc=st.booleans())
def test_append(messages: list[strategies.Message], crc: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        log, expected = open_log(store, crc=crc), Expected(crc=crc)
        queues: dict[tuple[str, int], QueueCursor] = {}
        for message in messages:
            born, stored = stamped(message)
            key = message.topic, message.queue_id
            queue = queues.setdefault(key, QueueCursor(*key))
            at = log.append(
                queue,
                message.body,
                message.properties_text,
                flag=message.flag,
                born_timestamp_ms=born,
                born_host=reference.encode_host(message.born_host),
                store_timestamp_ms=stored,
                reconsume_times=message.reconsume_times,
            )
            place = expected.put(record_of(expected, message, queue, born, stored))
            assert at == place
        assert log.physical_offset == len(expected.content)
        log.close()
        if messages:
            assert_log_is(store, expected)


def record_of(
    expected: Expected, message: strategies.Message, queue: QueueCursor, born: int, stored: int
) -> Callable[[int], list[bytes]]:
    changed = strategies.Message(
        **{**vars(message), "born_timestamp": born, "store_timestamp": stored}
    )
    before = queue.next_offset - 1
    return lambda at: [expected.encode(changed, at, before, queue.topic, queue.queue_id)]


@pytest.mark.slow
@settings(RANDOM, max_examples=25)  # each of up to ten batches
@given(groups=st.lists(batches(), max_size=10), crc=st.booleans())
def test_append_batch(groups: list[Batch], crc: bool) -> None:
    """One queue, born host and time a batch; flags, bodies and properties an element."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        log, expected = open_log(store, crc=crc), Expected(crc=crc)
        queues: dict[tuple[str, int], QueueCursor] = {}
        for group in groups:
            first = group.messages[0]
            born, stored = stamped(first)
            key = first.topic, first.queue_id
            queue = queues.setdefault(key, QueueCursor(*key))
            at = log.append_batch(
                queue,
                b"".join(map(element, group.messages)),
                len(group.messages),
                born_timestamp_ms=born,
                born_host=reference.encode_host(first.born_host),
                store_timestamp_ms=stored,
                reconsume_times=first.reconsume_times,
            )
            common = {name: getattr(first, name) for name in ("topic", "queue_id", "born_host")} | {
                "born_timestamp": born,
                "store_timestamp": stored,
                "reconsume_times": first.reconsume_times,
            }
            changed = [strategies.Message(**{**vars(one), **common}) for one in group.messages]
            assert at == expected.put(batch_of(expected, changed, queue))
        log.close()
        if groups:
            assert_log_is(store, expected)


def element(message: strategies.Message) -> bytes:
    """RocketMQ's batch layout, MessageDecoder.encodeMessage."""
    properties = message.properties_text
    size = 22 + len(message.body) + len(properties)
    head = struct.pack(">iiiii", size, 0, 0, message.flag, len(message.body))
    return head + message.body + struct.pack(">h", len(properties)) + properties


def batch_of(
    expected: Expected, messages: list[strategies.Message], queue: QueueCursor
) -> Callable[[int], list[bytes]]:
    before = queue.next_offset - len(messages)

    def records(at: int) -> list[bytes]:
        made = []
        for index, message in enumerate(messages):
            made.append(expected.encode(message, at, before + index, queue.topic, queue.queue_id))
            at += len(made[-1])
        return made

    return records


@RANDOM
@given(
    calls=st.lists(
        st.tuples(
            st.lists(strategies.bodies(MAX_MESSAGE_BYTES), max_size=20),
            strategies.topics(),
            strategies.user_properties(),
        ),
        max_size=6,
    )
)
def test_append_many(calls: list[tuple[list[bytes], str, dict[str, str]]]) -> None:
    """Each body its own message; time and born host are the broker's own."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        log = open_log(store)
        queues: dict[str, QueueCursor] = {}
        wanted: list[tuple[str, int, bytes, dict[str, str]]] = []
        for bodies, topic, properties in calls:
            queue = queues.setdefault(topic, QueueCursor(topic, 3))
            first = queue.next_offset
            offsets = log.append_many(queue, bodies, reference.encode_properties(properties))
            assert list(offsets) == list(range(first, first + len(bodies)))
            wanted += [
                (topic, first + index, body, properties) for index, body in enumerate(bodies)
            ]
        log.close()
        walk = reference.walk_log(store)
        found = [unit for unit in walk if isinstance(unit, reference.Record)]
        assert [(one.topic, one.queue_offset, one.body, one.properties) for one in found] == wanted
        times = [one.store_timestamp for one in found]
        assert times == sorted(times)
        for one in found:
            assert one.raw == reference.encode_again(one)
            assert one.physical_offset == one.lies_at
            assert (one.queue_id, one.born_host, one.store_host) == (3, STORE_HOST, STORE_HOST)
            assert one.born_timestamp == one.store_timestamp


@RANDOM
@given(message=small_messages(), crc=st.booleans())
def test_every_field_as_a_consumer_sees_it(message: strategies.Message, crc: bool) -> None:
    record = reference.encode_record(**message.record_arguments(), append_crc=crc)
    (seen,) = decode(record)
    assert isinstance(seen, Message)
    truth = reference.decode_record(record)
    assert seen.record == record
    assert (seen.topic, seen.queue_id, seen.body, seen.flag) == (
        message.topic, message.queue_id, message.body, message.flag,
    )  # fmt: skip
    assert seen.properties == truth.properties
    assert seen.tags == truth.properties.get("TAGS")
    assert seen.keys == truth.properties.get("KEYS")
    assert seen.raw_properties == truth.properties_raw
    assert seen.offset_msg_id == truth.msg_id
    assert seen.born_timestamp_ms == message.born_timestamp
    assert seen.store_timestamp_ms == message.store_timestamp
    assert seen.reconsume_times == message.reconsume_times
    assert seen.body_crc == truth.body_crc
    assert (seen.size, seen.magic) == (truth.total_size, truth.magic)
