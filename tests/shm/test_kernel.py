"""The native kernel against zlib, the specification's vectors and the independent decoder."""

from __future__ import annotations

import mmap
import random
import zlib

import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Message as Wanted
from strategies import messages, property_text

from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import BatchEncoder, BatchFull, decode
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import LogAppender

HOST = bytes([10, 0, 0, 2, 0, 0, 42, 159])

# store-format 15: the first record, and the same with the appended CRC property.
GOLDEN = bytes.fromhex(
    "00000084daa320a73610a6860000000100000007000000000000000500000000"
    "00001000000000000000018bcfe5687b0a000001000012340000018bcfe569c8"
    "0a00000200002a9f0000000000000000000000000000000568656c6c6f06546f"
    "70696341001e544147530154616741024b455953016b3102554e49515f4b4559"
    "01553102"
)
GOLDEN_CRC_PROPERTY = bytes.fromhex("5f5f43524333322301363439323335303139" + "3102")


def append_golden(crc_property: bool) -> bytes:
    memory = mmap.mmap(-1, 8192)
    appender = LogAppender(HOST, 4 << 20, crc_property)
    appender.attach(memory, 0, 4096)
    at = appender.append(
        QueueCursor("TopicA", 1, 5),
        b"hello",
        b"TAGS\x01TagA\x02KEYS\x01k1\x02UNIQ_KEY\x01U1\x02",
        7,
        0,
        1_700_000_000_123,
        bytes([10, 0, 0, 1, 0, 0, 0x12, 0x34]),
        1_700_000_000_456,
    )
    return memory[at : appender.physical_offset]


def test_the_specifications_record() -> None:
    assert append_golden(crc_property=False) == GOLDEN


def test_the_specifications_record_with_its_crc_property() -> None:
    record = append_golden(crc_property=True)
    assert len(record) == 152
    assert record[-20:] == GOLDEN_CRC_PROPERTY
    assert reference.decode_record(record, lies_at=4096).property_crc_ok


@pytest.mark.parametrize("count", [*range(200), 1000, 4096, 65_537])
def test_crc_is_zlibs(count: int) -> None:
    content = random.Random(count).randbytes(count)
    assert codec.crc32(content) == zlib.crc32(content)
    assert codec.crc32(content, 0x12345678) == zlib.crc32(content, 0x12345678)


@given(st.text())
def test_java_hash(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    assert codec.java_hash(text) == reference.java_hash(text)


@pytest.mark.slow
@settings(max_examples=300)
@given(messages())
def test_a_batch_comes_out_as_it_went_in(wanted: Wanted) -> None:
    """Encoded, appended and decoded again by the kernel; the record read by the other decoder."""
    encoder = BatchEncoder()
    keys = wanted.keys or None
    for _ in range(3):
        encoder.add(wanted.body, wanted.tags, keys, wanted.user_properties, wanted.flag)
    count, batch = encoder.count, encoder.take()
    memory = mmap.mmap(-1, 1 << 20)
    appender = LogAppender(HOST, 4 << 20)
    appender.attach(memory, 0, 0)
    appender.append_batch(QueueCursor(wanted.topic, wanted.queue_id, 40), batch, count)
    found = decode(memory[: appender.physical_offset])
    assert [message.queue_offset for message in found] == [40, 41, 42]
    assert len({message.msg_id for message in found}) == 3
    for index, message in enumerate(found):
        assert message.msg_id == codec.unique_id(batch, index)
        theirs = reference.decode_record(memory, message.physical_offset)
        assert message.record == theirs.raw
        assert (message.topic, message.queue_id, message.flag) == (
            wanted.topic,
            wanted.queue_id,
            wanted.flag,
        )
        assert message.body == theirs.body == wanted.body
        assert message.properties == theirs.properties
        assert message.tags == (wanted.tags or None)
        assert message.tags_code == reference.tags_code(theirs)


@given(st.binary(max_size=200))
def test_any_property_bytes_are_read_as_rocketmq_reads_them(raw: bytes) -> None:
    memory = mmap.mmap(-1, 4096)
    appender = LogAppender(HOST, 4 << 20)
    appender.attach(memory, 0, 0)
    appender.append(QueueCursor("t", 0), b"", raw)
    (message,) = decode(memory[: appender.physical_offset])
    expected = reference.decode_properties(raw)
    assert message.properties == expected
    assert message.tags == expected.get("TAGS")


@pytest.mark.parametrize("bad", ["a\x01b", "a\x02b"])
def test_property_text_that_would_break_the_list_is_refused(bad: str) -> None:
    encoder = BatchEncoder()
    for arguments in ({"tags": bad}, {"keys": bad}, {"properties": {"p": bad}}):
        with pytest.raises(ValueError, match="separate"):
            encoder.add(b"", **arguments)
    assert encoder.count == 0


@given(st.lists(property_text(), min_size=1, max_size=5))
def test_cached_property_text_is_the_given_one(tags: list[str]) -> None:
    encoder = BatchEncoder(unique_keys=False)
    for tag in tags:
        encoder.add(b"x", tag)
        encoder.add(b"x", tag)
    memory = mmap.mmap(-1, 1 << 16)
    appender = LogAppender(HOST, 4 << 20)
    appender.attach(memory, 0, 0)
    appender.append_batch(QueueCursor("t", 0), encoder.take(), 2 * len(tags))
    found = decode(memory[: appender.physical_offset])
    assert [message.tags for message in found] == [tag for tag in tags for _ in range(2)]


def test_a_full_batch_takes_no_more() -> None:
    encoder = BatchEncoder(size_max=1000, count_max=5)
    for _ in range(5):
        encoder.add(b"x" * 100)
    with pytest.raises(BatchFull):
        encoder.add(b"")
    assert encoder.add_many([b"y"] * 3, 1) == 1
    encoder.take()
    assert encoder.add(b"z" * 5000) == 0  # alone, a message of any size


def test_decode_filters_by_the_tag_itself() -> None:
    """`Aa` and `BB` have the same hash: only the text tells them apart."""
    encoder = BatchEncoder()
    for tag in ("Aa", "BB", None):
        encoder.add(b"x", tag)
    memory = mmap.mmap(-1, 4096)
    appender = LogAppender(HOST, 4 << 20)
    appender.attach(memory, 0, 0)
    appender.append_batch(QueueCursor("t", 0), encoder.take(), 3)
    records = memory[: appender.physical_offset]
    assert [message.tags for message in decode(records, ["Aa"])] == ["Aa"]
    assert len(decode(records)) == 3
    assert codec.runs(decode(records)) == [("t", 0, 0, 2, 3)]


def test_a_flipped_bit_in_a_body_is_noticed() -> None:
    for at in range(len(GOLDEN)):
        damaged = bytearray(GOLDEN)
        damaged[at] ^= 1
        try:
            (message,) = decode(bytes(damaged))
        except codec.RecordDamaged:
            continue
        # Fields outside the body carry no checksum, in RocketMQ's format as in ours.
        assert message.stored_body == b"hello"


def test_messages_are_not_the_collectors() -> None:
    """There may be a million; and a buffer that somebody looks into cannot be cleared."""
    assert not codec.Message.__flags__ & 1 << 14  # Py_TPFLAGS_HAVE_GC
