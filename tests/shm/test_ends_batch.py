"""Ends of transactions that one native write lays down: the log gets what it would get of the same
ends one by one."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import reference

from cometmq.actors.tables.transactions import END_LETTERS, OP_HEAD, Halves, Outcome, op_of
from cometmq.actors.writer.half_writes import HalfWrite, Named, half_of
from cometmq.protocol.derived import DERIVED_TOPIC
from cometmq.protocol.names import HALF_TOPIC, OP_TOPIC
from cometmq.shm.kernel.codec import RecordTooLarge, decode
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import EndsBatch, HalfEnds, InnerBatch, LogAppender

SEED = 20_261_126
HOST = bytes([10, 0, 0, 2, 0, 0, 42, 159])
AT_MS = 1_700_000_000_000
BASE = 100  # the queue offset of the first half message
START = 1 << 20  # of the segment that they lie in
ENDS = Outcome.ROLLED_BACK, Outcome.COMMITTED


class Half(NamedTuple):
    transaction: str
    topic: str
    commit: bool
    queue_offset: int
    physical_offset: int


def properties_of(chance: random.Random, number: int, topic: str) -> bytes:
    """As clients and brokers may have left them, in any order."""
    wanted = {
        "UNIQ_KEY": f"U{number}", "PGROUP": "shop", "REAL_TOPIC": topic, "TRAN_MSG": "true",
        "REAL_QID": str(chance.randrange(3)),
    }  # fmt: skip
    if chance.random() < 0.8:
        wanted["COMETMQ_UP"] = f"{chance.getrandbits(32):08x}-{chance.randrange(10**12):012d}"
    if chance.random() < 0.5:
        wanted["__transactionId__"] = f"T{number}"
    if chance.random() < 0.5:
        wanted["KEYS"] = "k" * chance.randrange(1, 40)
    pairs = [f"{name}\1{value}" for name, value in wanted.items()]
    chance.shuffle(pairs)
    if chance.random() < 0.3:
        pairs.insert(0, "PGROUP\1another")  # of two the last counts
    end = chance.choice(["", "\2", "\2__CRC32#\0010123456789\2"])
    return ("\2".join(pairs) + end).encode()


def halves(chance: random.Random, count: int) -> tuple[bytes, list[Half]]:
    """A segment, and what is named in it."""
    segment, found = b"", []
    for number in range(count):
        topic = chance.choice(["orders", "t", "x" * 100])
        properties = properties_of(chance, number, topic)
        named = dict(pair.split("\1") for pair in properties.decode().split("\2") if pair)
        found.append(
            Half(named.get("__transactionId__", f"U{number}"), topic, chance.random() < 0.7,
                 BASE + number, START + len(segment))
        )  # fmt: skip
        segment += reference.encode_record(
            topic=HALF_TOPIC, body=chance.randbytes(chance.randrange(1, 300)),
            properties=properties, queue_offset=BASE + number, sys_flag=chance.choice([0, 1]),
            physical_offset=START + len(segment), born_timestamp=AT_MS - number,
        )  # fmt: skip
    return segment, found


def ends_of(found: list[Half], **other: Any) -> HalfEnds:
    topics = sorted({each.topic for each in found})
    columns: dict[str, Any] = {
        "group": "shop",
        "transactions": [each.transaction for each in found],
        "commits": [each.commit for each in found],
        "counts": [1] * len(found),
        "topics": topics,
        "topic_of": [topics.index(each.topic) for each in found],
        "queue_offsets": [each.queue_offset for each in found],
        "physical_offsets": [each.physical_offset for each in found],
    } | other
    return HalfEnds(*columns.values())


class Log:
    def __init__(self, *, crc: bool = False, size: int = 1 << 20) -> None:
        self.segment = bytearray(size)
        self.appender = LogAppender(HOST, 4 << 20, crc)
        self.appender.attach(self.segment, 0, 0)
        self.queues: dict[tuple[str, int], QueueCursor] = {}

    def queue(self, topic: str, queue_id: int) -> QueueCursor:
        key = topic, queue_id
        return self.queues.setdefault(key, QueueCursor(topic, queue_id, len(self.queues)))

    @property
    def next_offsets(self) -> dict[tuple[str, int], int]:
        return {key: queue.next_offset for key, queue in self.queues.items()}

    def append_whole(self, ends: HalfEnds) -> tuple[int, int] | None:
        mark, op = self.queue(DERIVED_TOPIC, 0), self.queue(OP_TOPIC, 0)
        queues = [self.queue(*key) for key in ends.queues]
        batch = EndsBatch(self.appender, ends, queues, mark, b"mark", op, OP_HEAD, END_LETTERS)
        before = self.appender.physical_offset
        places = batch.append(AT_MS)
        laid = self.appender.physical_offset - before
        assert laid == (0 if places is None else batch.size)
        return places

    def append_one_by_one(self, segment: bytes, found: list[Half]) -> tuple[int, int]:
        """As it is done where a command has ends of several kinds."""
        self.queue(DERIVED_TOPIC, 0), self.queue(OP_TOPIC, 0)
        writing = HalfWrite(1 << 22, 32_767)
        writing.records.encoder.add(writing.records.queue(DERIVED_TOPIC, 0), b"mark")
        for index, each in enumerate(found):
            at = each.physical_offset - START
            (message,) = decode(segment[at : at + int.from_bytes(segment[at : at + 4])])
            number = each.queue_offset
            half = half_of(Named(message, number, number, Outcome.PENDING))
            writing.add([half], ENDS[each.commit], index)
        records = writing.records
        records.encoder.add(records.queue(OP_TOPIC, 0), *op_of(list(writing.ended.items())))
        cursors = [self.queue(key.topic, key.queue_id) for key in records.queues]
        command, payload = records.take()
        places = InnerBatch(self.appender, cursors, payload[0], command.count).append(AT_MS)
        assert places is not None
        found_places = memoryview(places).cast("q")
        return found_places[1], found_places[-2]


def pick(ends: HalfEnds, segment: bytes, **other: Any) -> bool:
    given: dict[str, Any] = {
        "start": START, "limit": len(segment), "outcomes": bytearray(), "base": BASE,
        "bytes_max": 1 << 22,
    }  # fmt: skip
    return ends.pick(segment, *(given | other).values())


@pytest.mark.parametrize("crc", [False, True])
def test_the_log_gets_what_it_would_get_one_by_one(crc: bool) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    whole, single = Log(crc=crc), Log(crc=crc)
    for count in (1, 2, 64, 300, 3):
        segment, found = halves(chance, count)
        chance.shuffle(found)
        ends = ends_of(found)
        assert pick(ends, segment)
        assert (ends.count, ends.committed) == (count, sum(each.commit for each in found))
        places = whole.append_whole(ends)
        assert places == single.append_one_by_one(segment, found)
        assert whole.segment == single.segment
        assert whole.next_offsets == single.next_offsets
        assert whole.appender.count == single.appender.count


def test_what_has_ended_is_noted() -> None:
    chance = random.Random(SEED)
    segment, found = halves(chance, 40)
    ends = ends_of(found[1:])
    assert pick(ends, segment)
    assert ends.last == BASE + 39
    one, other = Halves(BASE), Halves(BASE)
    one.take_ends(ends)
    other.take([(each.queue_offset, ENDS[each.commit]) for each in found[1:]])
    assert one.known == other.known
    assert (one.low, one.find(BASE), one.span) == (BASE, Outcome.PENDING, 40)
    far = bytearray()
    ends.note(far, 0, 10, ENDS)  # too far from the first that is remembered
    assert not far


def test_what_is_not_as_most_are_is_not_picked() -> None:
    segment, found = halves(random.Random(SEED), 5)
    ended = bytearray(5)
    ended[3] = Outcome.COMMITTED
    for other in (
        {"outcomes": ended}, {"base": BASE + 1}, {"limit": len(segment) - 1}, {"start": START + 1},
        {"start": -1}, {"bytes_max": len(segment) - 1}, {"limit": 0},
    ):  # fmt: skip
        assert not pick(ends_of(found), segment, **other), other
        assert not pick(ends := ends_of(found), segment, **other)
        assert ends.count == 0
    assert pick(ends_of(found), segment, bytes_max=len(segment), outcomes=bytearray(5))
    assert pick(ends_of(found[:1]), segment, bytes_max=1)  # alone
    assert not pick(ends_of([*found, found[2]]), segment)  # one of them twice
    assert not pick(ends_of([]), segment)
    assert not pick(ends_of(found, counts=[2, 0, 1, 1, 1]), segment)
    assert not pick(ends_of(found, group="sho"), segment)
    none = found[0]._replace(physical_offset=(1 << 63) - 1)
    assert not pick(ends_of([none]), segment)


def test_where_there_is_no_room() -> None:
    segment, found = halves(random.Random(SEED), 64)
    ends = ends_of(found)
    assert pick(ends, segment)
    with pytest.raises(RecordTooLarge):
        Log(size=4_096).append_whole(ends)
    log = Log(size=1 << 16)
    laid = 0
    while log.append_whole(ends) is not None:
        laid += 1
    assert laid
    assert log.appender.wanted > log.appender.remaining  # the segment is closed, and the next taken
    with pytest.raises(ValueError, match="queues"):
        EndsBatch(log.appender, ends, [], log.queue("a", 0), b"mark", log.queue("b", 0), b"", b"rc")


def test_properties_that_are_as_large_as_can_be() -> None:
    """A checksum more, and the log does not take the copy."""
    head = b"UNIQ_KEY\1U\2PGROUP\1shop\2REAL_TOPIC\1t\2REAL_QID\0010\2K\1"
    half = Half("U", "t", True, BASE, START)
    for more, taken in ((0, True), (1, False)):
        segment = reference.encode_record(
            topic=HALF_TOPIC, body=b"b", properties=head.ljust(32_767 - 21 + more, b"x") + b"\2",
            queue_offset=BASE, physical_offset=START,
        )  # fmt: skip
        ends = ends_of([half])
        assert pick(ends, segment)
        log = Log(crc=True)
        if taken:
            assert log.append_whole(ends)
        else:
            with pytest.raises(RecordTooLarge):
                log.append_whole(ends)


def test_spoilt_records_are_passed_over_or_copied() -> None:
    """Whatever lies in the segment; a checksum covers the body alone."""
    chance = random.Random(SEED)
    segment, found = halves(chance, 3)
    laid = 0
    for _ in range(3_000):
        spoilt = bytearray(segment)
        for _ in range(chance.randrange(1, 4)):
            spoilt[chance.randrange(len(spoilt))] = chance.choice([0, 1, 2, 127, 255])
        ends = ends_of(found)
        if pick(ends, bytes(spoilt)):
            laid += Log(size=1 << 14).append_whole(ends) is not None
    assert laid
