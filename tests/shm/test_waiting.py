"""Batches of clients that wait elsewhere than in the queue that they are meant for, natively."""

from __future__ import annotations

import random
import struct

import pytest
import reference

from cometmq.protocol.names import TIMER_TOPIC
from cometmq.shm.kernel.codec import BatchIllegal, RecordTooLarge, decode, element_due_ms
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import InnerEncoder, LogAppender, WaitingBatch

SEED = 20_261_125
HOST = bytes([10, 0, 0, 2, 0, 0, 42, 159])
HOST_6 = bytes(range(1, 21))
LATEST = 10**15 - 1
MORE = b"REAL_TOPIC\x01orders\x02REAL_QID\x013\x02"
UNSAID = "one of TIMER_DELIVER_MS and TIMER_DELAY_MS is wanted"


def element(properties: bytes, body: bytes = b"x", flag: int = 0) -> bytes:
    size = 20 + len(body) + 2 + len(properties)
    head = struct.pack(">iiiii", size, 0, 0, flag, len(body))
    return head + body + struct.pack(">h", len(properties)) + properties


class Log:
    """One segment, all of it zero behind what is written."""

    def __init__(self, size: int = 1 << 20, *, crc: bool = False, at: int = 0) -> None:
        self.memory = memoryview(bytearray(size))
        self.appender = LogAppender(HOST, 4 << 20, crc)
        self.appender.attach(self.memory, 0, at)
        self.queue = QueueCursor(TIMER_TOPIC, 0, 7)

    def waiting(
        self, batch: bytes, count: int = 1, more: bytes = MORE, now: int = 1_000, **other: object
    ) -> WaitingBatch:
        return WaitingBatch(
            self.appender, self.queue, batch, count, more, now=now, latest=LATEST, **other
        )

    def is_untouched(self) -> bool:
        return (
            not any(self.memory)
            and self.queue.next_offset == 7
            and (self.appender.physical_offset, self.appender.count) == (0, 0)
        )


def random_properties(chance: random.Random) -> list[tuple[bytes, bytes]]:
    """Some of an application, and the time: of several of one name the last one counts."""
    names = [b"UNIQ_KEY", b"TAGS", b"T", b"TIMER", b"TIMER_DELIVER_MSS", b"REAL_TOPIC", b"DELAYED"]
    found = [
        (chance.choice(names), b"v" * chance.randint(0, 40)) for _ in range(chance.randint(0, 6))
    ]
    name = chance.choice([b"TIMER_DELIVER_MS", b"TIMER_DELAY_MS"])
    for _ in range(chance.choice([1, 1, 1, 2])):
        value = chance.randrange(10 ** chance.randint(1, 14))
        found.append((name, b"%0*d" % (chance.choice([1, 15]), value)))
    found.insert(chance.randint(0, len(found)), (name, chance.choice([b"", b"7"])))
    rest = found[-1:]
    chance.shuffle(found)
    return found + rest  # a number is the last one


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("host", [HOST, HOST_6], ids=["IPv4", "IPv6"])
@pytest.mark.slow
def test_each_record_says_when_it_is_due(crc: bool, host: bytes) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    for _ in range(60):
        log = Log(crc=crc)
        now = chance.randrange(10 ** chance.randint(1, 14))
        given = [random_properties(chance) for _ in range(chance.randint(1, 12))]
        texts = [b"\2".join(name + b"\1" + value for name, value in each) for each in given]
        texts = [text + chance.choice([b"", b"\2"]) for text in texts]
        bodies = [chance.randbytes(chance.randint(0, 200)) for _ in given]
        elements = [element(*each, 5) for each in zip(texts, bodies, strict=True)]
        batch = b"".join(elements)
        waiting = log.waiting(
            batch, len(given), now=now, sys_flag=1, born_timestamp=4, born_host=host
        )
        assert log.is_untouched()
        assert (waiting.count, waiting.earliest) == (len(given), -1)
        assert waiting.append(77) == 0
        assert log.appender.physical_offset == waiting.size
        assert log.appender.batch_queue_offset == 7
        assert (log.queue.next_offset, log.appender.count) == (7 + len(given), len(given))
        found = decode(log.memory[: waiting.size])
        for index, (message, wanted) in enumerate(zip(found, given, strict=True)):
            own = reference.decode_properties(texts[index])
            due = int(own.get("TIMER_DELIVER_MS", -1))
            if due < 0:
                due = now + int(own["TIMER_DELAY_MS"])
            assert element_due_ms(batch, index, now) == due
            timed = {"TIMER_OUT_MS": str(max(due - 1, 0) // 1000 * 1000)}
            if "TIMER_DELIVER_MS" not in own:
                timed["TIMER_DELIVER_MS"] = str(due)
            real = {"REAL_TOPIC": "orders", "REAL_QID": "3"}
            raw = message.raw_properties
            stored = reference.decode_properties(raw)
            assert stored.pop("__CRC32#", None) is None or crc
            assert stored == own | real | timed, (own, wanted)
            assert raw.count(b"TIMER_OUT_MS\1") == 1
            assert (message.stored_topic, message.queue_id) == (TIMER_TOPIC, 0)
            assert (message.queue_offset, message.flag) == (7 + index, 5)
            assert message.stored_body == bodies[index]
            assert (message.born_timestamp_ms, message.store_timestamp_ms) == (4, 77)
            record = reference.decode_record(message.record, 0)
            assert record.sys_flag & 1
            assert record.property_crc_ok is (True if crc else None)


def test_a_level_is_a_property_of_all() -> None:
    log = Log()
    batch = element(b"TAGS\1a") + element(b"")
    waiting = log.waiting(batch, 2, MORE + b"DELAY\x013\x02", now=-1)
    assert waiting.append() == 0
    first, second = decode(log.memory[: waiting.size])
    assert first.raw_properties == b"TAGS\1a\2" + MORE + b"DELAY\x013\x02"
    assert second.raw_properties == MORE + b"DELAY\x013\x02"
    for name in (b"DELAY", b"TIMER_DELAY_MS", b"TIMER_DELIVER_MS", b"TRAN_MSG"):
        with pytest.raises(BatchIllegal, match="with the property alone"):
            log.waiting(batch + element(name + b"\x011\2"), 3, now=-1)


def test_the_earliest_that_recalls_another_is_told() -> None:
    log = Log()
    recall = [b"TIMER_DEL_UNIQKEY\1t+U\2TIMER_DELIVER_MS\1%d\2" % due for due in (900, 700, 800)]
    batch = b"".join(map(element, [b"TIMER_DELIVER_MS\0015\2", *recall]))
    assert log.waiting(batch, 4).earliest == 700
    assert log.waiting(element(b"TIMER_DEL_UNIQKEY\1\2TIMER_DELIVER_MS\0015\2")).earliest == -1


@pytest.mark.parametrize(
    ("properties", "says"),
    [
        (b"", UNSAID),
        (b"TIMER_DELAY_MS\1\2", UNSAID),
        (b"TIMER_DELAY_MS\1-1\2", UNSAID),
        (b"TIMER_DELAY_MS\0011\2TIMER_DELIVER_MS\0011\2", UNSAID),
        (b"TIMER_DELAY_MS\0011\2TIMER_DELAY_MS\1x\2", UNSAID),
        (b"TIMER_DELAY_MS\1999999999999999\2", UNSAID),  # beyond the latest, with `now`
        (b"TIMER_DELIVER_MS\0011000000000000000\2", UNSAID),  # 16 digits
        (b"TIMER_DELAY_MS\0011\2DELAY\0011\2", "DELAY contradicts"),
        (b"TIMER_DELAY_SEC\0011\2TIMER_DELAY_MS\0011\2", "TIMER_DELAY_SEC contradicts"),
        (b"TRAN_MSG\1true\2TIMER_DELAY_MS\0011\2", "TRAN_MSG contradicts"),
    ],
)
def test_what_cannot_wait_is_refused_whole(properties: bytes, says: str) -> None:
    log = Log()
    good = element(b"TIMER_DELIVER_MS\1999999999999999\2")
    with pytest.raises(BatchIllegal, match=f"element 1: .*{says}"):
        log.waiting(good + element(properties), 2)
    assert log.is_untouched()


def test_what_could_never_be_copied_does_not_wait() -> None:
    """An inner record has a frame of 16 MiB, whatever maxMessageSize says."""
    log = Log(1 << 26)
    log.appender = LogAppender(HOST, 1 << 25)
    log.appender.attach(log.memory, 0, 0)
    encoder, properties = InnerEncoder(), b"TIMER_DELAY_MS\0011\2"
    for size in range((1 << 24) - 1_000, 1 << 24, 50):
        body = bytes(size)
        try:
            log.waiting(element(properties, body))
        except RecordTooLarge:
            break
        encoder.add(0, body, properties + MORE, born_host=bytes(20), store_host=bytes(20))
        encoder.take()
    else:
        pytest.fail("all of them wait")


def test_what_is_no_batch_is_refused() -> None:
    log = Log()
    one = element(b"TIMER_DELAY_MS\0011\2")
    batch = 3 * one
    for end in range(len(batch)):
        with pytest.raises(BatchIllegal):
            log.waiting(batch[:end], 3)
    for count in (-(2**62), -1, 0, 1, 2, 4, 2**31, 2**62):
        with pytest.raises(BatchIllegal):
            log.waiting(batch, count)
    for at in range(0, 20, 4):  # sizes and lengths
        for value in (-(2**31), -1, 2**31 - 1):
            damaged = bytearray(batch)
            struct.pack_into(">i", damaged, at, value)
            if at in (4, 8, 12):  # magic, CRC, flag: nobody looks at these
                log.waiting(bytes(damaged), 3)
                continue
            with pytest.raises(BatchIllegal):
                log.waiting(bytes(damaged), 3)
    with pytest.raises(BatchIllegal, match="part of a transaction"):
        log.waiting(batch, 3, sys_flag=4)
    for more in (b"", b"A\1b", b"A\1" + 1024 * b"b" + b"\2"):
        with pytest.raises(ValueError, match="of properties"):
            log.waiting(batch, 3, more)
    with pytest.raises(ValueError, match="host of 7 bytes"):
        log.waiting(batch, 3, born_host=bytes(7))
    assert log.is_untouched()


@pytest.mark.parametrize("crc", [False, True])
def test_the_limit_of_properties(crc: bool) -> None:
    """With those that it gets, and the CRC."""
    log = Log(crc=crc)
    due = b"TIMER_DELIVER_MS\0015000\2"
    more = len(MORE) + len(b"TIMER_OUT_MS\0014000\2") + (20 if crc else 0)
    for over in (0, 1):
        padding = 32_767 - more - len(due) - 3 + over
        batch = element(b"P\1" + b"p" * padding + b"\2" + due)
        if over:
            with pytest.raises(RecordTooLarge, match=r"properties of 327(68|88) bytes, at most"):
                log.waiting(batch)
        else:
            waiting = log.waiting(batch)
            assert waiting.append() == 0
            assert log.appender.physical_offset == waiting.size
            assert len(decode(log.memory[: waiting.size])) == 1


def test_room_in_the_segment() -> None:
    """All of it, with the blank behind, or nothing."""
    batch = 3 * element(b"TIMER_DELAY_MS\0011\2", b"body")
    size = Log().waiting(batch, 3).size
    for left in (size + 7, size + 8):
        log = Log(4096, at=4096 - left)
        waiting = log.waiting(batch, 3)
        if left < size + 8:
            assert waiting.append() is None
            assert log.appender.wanted == size + 8
            assert not any(log.memory)
            assert log.queue.next_offset == 7
            log.appender.roll(memoryview(bytearray(4096)), 4096)
            assert waiting.append() == 4096
        else:
            assert waiting.append() == 4096 - left
    for segment in (size + 511, size + 512):
        log = Log(segment)
        if segment < size + 512:  # as much may a record have more of under another topic
            with pytest.raises(RecordTooLarge):
                log.waiting(batch, 3)
        else:
            assert log.waiting(batch, 3).append() == 0
    log = Log()
    waiting = log.waiting(batch, 3)
    log.appender.detach()
    with pytest.raises(ValueError, match="no segment"):
        waiting.append()


@pytest.mark.parametrize("own", [b"UNIQ_KEY\1id\2", b"UNIQ_KEY\1id", b"__transactionId__\1tx\2"])
def test_a_half_names_its_transaction(own: bytes) -> None:
    """By its own word, or by its id, from which the first of a transaction has its name."""
    log = Log()
    batch = element(own) * 2
    waiting = log.waiting(batch, 2, MORE, -1, half=True)
    assert waiting.places == []
    first = waiting.append(5_000)
    found = decode(log.memory[: log.appender.physical_offset])
    assert waiting.places == [each.physical_offset for each in found]
    assert waiting.places[0] == first
    for each in found:
        assert each.raw_properties.startswith(own.rstrip(b"\2") + b"\2" + MORE)
        assert each.properties["__transactionId__"] == ("tx" if b"tx" in own else "id")
        assert each.raw_properties.count(b"__transactionId__") == 1
    assert waiting.size == log.appender.physical_offset


def test_a_half_without_a_name_is_none() -> None:
    log = Log()
    with pytest.raises(BatchIllegal, match="has no UNIQ_KEY"):
        log.waiting(element(b"a\1b\2"), 1, MORE, -1, half=True)
    assert log.is_untouched()
