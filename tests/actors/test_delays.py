"""Delay levels and retries of a running broker: due in time, once, as RocketMQ leaves them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden
import pytest
import reference
from family import RunningBroker, encode_batch
from patience import patient
from receiving import take_and_ack
from shared_data import data_path

from cometmq.actors.tables.delays import destination, level_for
from cometmq.actors.tables.retries import Retry, bare_properties, retry_of, retry_tail
from cometmq.client import Consumer, Producer
from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import (
    GiveBackMessages,
    GivenBack,
    MessagesGivenBack,
    Section,
    SendMessages,
    SendResult,
    StoreRetries,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    ConfigError,
    MessageIllegal,
    MessageNotFound,
    MessageTooLarge,
    NameIllegal,
    OffsetIllegal,
)
from cometmq.protocol.names import DELAY_TOPIC
from cometmq.protocol.uptime import NAME, Uptime
from cometmq.shm.kernel.codec import Message, decode
from cometmq.shm.kernel.store import again_properties
from cometmq.shm.reading.store_reader import StoreReader
from cometmq.shm.state.fastjson import loads

LEVELS = "1s 2s 1s 1s 1s 4s"
LEVELS_MS = (1000, 2000, 1000, 1000, 1000, 4000)
WAIT_S = patient(60)
SETS = ("delay-levels", "delay-levels-killed", "retry-dlq", "retry-dlq-killed")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    settings = {"messageDelayLevel": LEVELS}
    with RunningBroker(tmp_path_factory.mktemp("delays") / "store", settings) as running:
        yield running


def name_server(broker: RunningBroker) -> str:
    return broker.ready.name_server


UP = Uptime("0123abcd", 5_000)


def lines(count: int) -> list[bytes]:
    return data_path("loghub", "Linux.log").read_bytes().splitlines()[:count]


def give_back(broker: RunningBroker, group: str, *messages: GivenBack, most: int = -1) -> list[int]:
    answer = broker.ask("coordinator", GiveBackMessages(group, list(messages), most), WAIT_S)
    assert isinstance(answer, MessagesGivenBack)
    return answer.codes


def back(message: Message, **how: int) -> GivenBack:
    return GivenBack(
        message.topic, message.queue_id, message.queue_offset, message.physical_offset, **how
    )


# --- rules ---


def test_which_level_waits_long_enough() -> None:
    assert [level_for(ms, LEVELS_MS) for ms in (0, 1000, 1001, 2001, 9999)] == [1, 1, 2, 6, 6]


@pytest.mark.parametrize(
    "real",
    [
        {}, {"REAL_TOPIC": "t"}, {"REAL_TOPIC": "t", "REAL_QID": "-1"},
        {"REAL_TOPIC": "t", "REAL_QID": "65536"}, {"REAL_TOPIC": "t", "REAL_QID": "²"},
        {"REAL_TOPIC": "../t", "REAL_QID": "0"}, {"REAL_TOPIC": DELAY_TOPIC, "REAL_QID": "0"},
    ],
)  # fmt: skip
def test_where_nothing_is_delivered_to(real: dict[str, str]) -> None:
    with pytest.raises((NameIllegal, MessageIllegal)):
        destination(real)


def test_what_becomes_of_what_is_given_back() -> None:
    entry = GivenBack("t", 0, 0, 0)
    plain = StoreRetries("g", [], 3, 1)
    assert retry_of(plain, entry, 0, LEVELS_MS) == Retry("%RETRY%g", 3)
    assert retry_of(plain, entry, 2, LEVELS_MS) == Retry("%RETRY%g", 5)
    assert retry_of(plain, entry, 3, LEVELS_MS) == Retry("%DLQ%g", 0, True)
    many = StoreRetries("g", [], 99, 1)
    assert retry_of(many, entry, 50, LEVELS_MS) == Retry("%RETRY%g", 6)
    chosen = GivenBack("t", 0, 0, 0, delay_level=99)
    assert retry_of(plain, chosen, 0, LEVELS_MS) == Retry("%RETRY%g", 6)
    assert retry_of(plain, GivenBack("t", 0, 0, 0, -1), 0, LEVELS_MS) == Retry("%DLQ%g", 0, True)
    now = StoreRetries("g", [], 3, 1, at_once=True)
    assert retry_of(now, entry, 2, LEVELS_MS) == Retry("%RETRY%g_t", 0)
    for topic, kept in {
        "t": "%RETRY%g_t", "%RETRY%g+t": "%RETRY%g_t", "%RETRY%g_t": "%RETRY%g_t",
        "%RETRY%g": "%RETRY%g", "%RETRY%gg": "%RETRY%g_%RETRY%gg", "%DLQ%g": "%RETRY%g_%DLQ%g",
        "t" * 127: "%RETRY%g_" + "t" * 127, "%RETRY%" + "x" * 248: "%RETRY%g",
    }.items():  # fmt: skip
        popped = GivenBack(topic, 0, 0, 0, handle=7)
        assert retry_of(plain, popped, 0, LEVELS_MS) == Retry(kept, 3)
    assert retry_of(now, entry, 3, LEVELS_MS) == Retry("%DLQ%g", 0, True)
    later = GivenBack("t", 0, 0, 0, after_ms=1500)
    assert retry_of(plain, later, 0, LEVELS_MS) == Retry("%RETRY%g", 2)
    growing = StoreRetries("g", [], 99, 1, 500, 4, 3000)
    waits = [retry_of(growing, entry, times, LEVELS_MS).level for times in (0, 1, 2, 90)]
    assert waits == [1, 2, 6, 6]


def test_a_copy_keeps_what_the_first_one_had() -> None:
    first = copied(b"a\1b\2DELAY\0019\2x\2\1y\2", b"t", Retry("%RETRY%g", 3), 1)
    pairs = dict(pair.split(b"\1") for pair in first.split(b"\2")[:-1])
    assert pairs == {
        b"a": b"b", b"RETRY_TOPIC": b"t", b"ORIGIN_MESSAGE_ID": b"0" * 32, b"WAIT": b"false",
        b"DELAY": b"3", b"REAL_TOPIC": b"%RETRY%g", b"REAL_QID": b"1",
        b"COMETMQ_UP": b"0123abcd-000000005000",
    }  # fmt: skip
    first += b"__CRC32#\x010123456789\2"  # of its record
    dead = copied(first, b"%RETRY%g", Retry("%DLQ%g", 0, True), 0, place=7)
    pairs = dict(pair.split(b"\1") for pair in dead.split(b"\2")[:-1])
    assert pairs == {
        b"a": b"b", b"RETRY_TOPIC": b"t", b"ORIGIN_MESSAGE_ID": b"0" * 32, b"WAIT": b"false",
        b"DELAY": b"0", b"REAL_TOPIC": b"%RETRY%g", b"REAL_QID": b"1",
    }  # fmt: skip


def copied(raw: bytes, topic: bytes, retry: Retry, queue_id: int, place: int = 0) -> bytes:
    """The properties of a copy of a message with these."""
    record = reference.encode_record(topic="t", properties=raw, physical_offset=place)
    tail = retry_tail(retry, queue_id, UP)
    return again_properties(decode(record)[0], topic, tail, retry.level > 0)


def test_a_copy_without_room() -> None:
    assert bare_properties(b"a\1b\2", b"t", 99) == b"RETRY_TOPIC\1t\2a\1b\2"
    for raw in (b"RETRY_TOPIC\1u\2a\1b\2", b"a\1b\2RETRY_TOPIC\1u\2"):
        assert bare_properties(raw, b"t", 99) == raw
    assert bare_properties(b"a\1b\2", b"t", 17) == b"a\1b\2"


@pytest.mark.parametrize("levels", ["", "1", "1x", "-1s", "1s  ²s", "9999999999s", "s"])
def test_levels_that_are_none(levels: str) -> None:
    with pytest.raises(ConfigError, match="messageDelayLevel"):
        BrokerSettings.from_keys({"messageDelayLevel": levels})


# --- delays ---


def test_messages_come_when_they_are_due(broker: RunningBroker) -> None:
    """By every way of sending, in the order of a queue, never early, beside others."""
    bodies = lines(300)
    with (
        Producer(name_server(broker)) as producer,
        Producer(name_server(broker), linger_ms=5) as lingering,
        Consumer(name_server(broker), "due", "due") as consumer,
    ):
        producer.send_many("due", bodies[:100], queue_id=0, tags="many", delay_level=1)
        for body in bodies[100:200]:
            lingering.send("due", body, queue_id=1, tags="linger", delay_level=2)
        futures = [
            producer.send_async("due", body, queue_id=2, tags="async", delay_level=1)
            for body in bodies[200:]
        ]
        producer.send("due", b"now", queue_id=0)
        lingering.flush()
        assert all(future.result(WAIT_S) for future in futures)
        found = take_and_ack(consumer, 301)
    assert found[0].body == b"now"
    for queue_id, wait_ms in ((0, 1000), (1, 2000), (2, 1000)):
        of_queue = [each for each in found if each.queue_id == queue_id and each.body != b"now"]
        assert [m.body for m in of_queue] == bodies[100 * queue_id : 100 * queue_id + 100]
        for each in of_queue:
            assert each.store_timestamp_ms >= each.born_timestamp_ms + wait_ms
            assert each.properties["REAL_TOPIC"] == "due"
            assert NAME not in each.properties  # since when it waited is nobody's business
            assert each.tags in ("many", "linger", "async")


def test_the_first_of_a_level_are_many(tmp_path: Path) -> None:
    """The level's queue is in the table before any of them is dispatched to it."""
    count = 60_000
    sizes = {"mappedFileSizeCommitLog": 64 << 20, "mappedFileSizeConsumeQueue": 6_000_000}
    settings = sizes | {"messageDelayLevel": LEVELS}
    with (
        RunningBroker(tmp_path / "store", settings) as broker,
        Producer(name_server(broker)) as producer,
        Consumer(name_server(broker), "first", "first") as consumer,
    ):
        bodies = [b"%d" % number for number in range(count)]
        producer.send_many("first", bodies, queue_id=0, delay_level=1)
        assert [each.body for each in take_and_ack(consumer, count)] == bodies


def test_levels_beyond_the_table(broker: RunningBroker) -> None:
    with Producer(name_server(broker)) as producer:
        receipt = producer.send("beyond", b"x", delay_level=1_000)
        for level in (-1, 1 << 31, True, "1"):
            with pytest.raises(ArgumentIllegal, match="delay_level"):
                producer.send("beyond", b"x", delay_level=level)  # type: ignore[arg-type]
    (message,) = broker.read_queue(DELAY_TOPIC, len(LEVELS_MS) - 1, 1)[-1:]
    assert (message.queue_offset, message.properties["DELAY"]) == (receipt.queue_offset, "6")


def test_batches_that_are_none(broker: RunningBroker) -> None:
    """A delayed batch is looked at as closely as one that is not."""
    broker.create_topic("odd")
    whole = encode_batch([b"y", b"z"])
    for payload, count in ((whole, 3), (whole[:-1], 2), (b"", 0), (whole, 1)):
        section = Section("odd", 0, count, delay_level=1)
        answer = broker.commitlog.ask(SendMessages([section], 0), [payload], timeout_s=WAIT_S)[0]
        assert isinstance(answer, SendResult)
        assert answer.results[0].code == MessageIllegal.code, (count, answer)
    section = Section("odd", 0, 1, delay_level=1)
    timer = encode_batch([b"y"], properties={"TIMER_DELAY_MS": "5"})
    answer = broker.commitlog.ask(SendMessages([section], 0), [timer], timeout_s=WAIT_S)[0]
    assert isinstance(answer, SendResult)
    assert "TIMER_DELAY_MS" in answer.results[0].text


# --- retries ---


def test_retries_until_it_is_dead(broker: RunningBroker) -> None:
    body = lines(1)[0]
    with (
        Producer(name_server(broker)) as producer,
        Consumer(name_server(broker), "unlucky", "failing") as consumer,
        Consumer(name_server(broker), "coroner", "%DLQ%unlucky") as coroner,
    ):
        producer.send("failing", body, keys="k", tags="t", properties={"a": "b"})
        consumer.subscribe("%RETRY%unlucky")
        message = first = take_and_ack(consumer, 1)[0]
        for times in range(2):
            assert message.reconsume_times == times
            assert give_back(broker, "unlucky", back(message), most=2) == [0]
            message = take_and_ack(consumer, 1)[0]
            assert message.topic == "%RETRY%unlucky"
            assert message.properties["RETRY_TOPIC"] == "failing"
            assert message.properties["ORIGIN_MESSAGE_ID"] == first.offset_msg_id
        assert give_back(broker, "unlucky", back(message), most=2) == [0]
        dead = take_and_ack(coroner, 1)[0]
    assert (dead.body, dead.keys, dead.tags, dead.properties["a"]) == (body, "k", "t", "b")
    assert (dead.reconsume_times, dead.msg_id) == (3, first.msg_id)


def test_what_cannot_be_given_back(broker: RunningBroker) -> None:
    """Nobody is believed what he says of a message; each entry has its own answer."""
    with (
        Producer(name_server(broker)) as producer,
        Consumer(name_server(broker), "liar", "lies") as consumer,
    ):
        producer.send_many("lies", lines(3), queue_id=0)
        messages = take_and_ack(consumer, 3)
    wrong = GivenBack("lies", 0, 1, messages[1].physical_offset + 1)
    gone = GivenBack("lies", 0, 99, 0), GivenBack("nowhere", 0, 0, 0), GivenBack("lies", -5, 0, 0)
    last = back(messages[2], delay_level=-1)
    codes = give_back(broker, "liar", back(messages[0], delay_level=-1), wrong, *gone, last, last)
    missing = MessageNotFound.code
    assert codes == [0, OffsetIllegal.code, missing, missing, missing, 0, 0]
    dead = broker.read_queue("%DLQ%liar", 0, 3)
    assert [m.body for m in dead] == [messages[0].body, messages[2].body, messages[2].body]
    for topic in ("../x", "", "a b"):
        with pytest.raises(NameIllegal):
            give_back(broker, "liar", GivenBack(topic, 0, 0, 0))
    with pytest.raises(ArgumentIllegal, match="4097"):
        give_back(broker, "liar", *[wrong] * 4097)
    with pytest.raises(NameIllegal):
        give_back(broker, "no group", wrong)


def test_a_record_too_large_for_the_log_hinders_no_other(tmp_path: Path) -> None:
    """Such a copy fits into no segment, and the log refuses all that come with it."""
    segment = 16_384
    settings = {
        "messageDelayLevel": LEVELS,
        "mappedFileSizeCommitLog": segment,
        "maxMessageSize": segment,
    }
    group = "g" * 100  # its name is in the copies
    with (
        RunningBroker(tmp_path / "store", settings) as broker,
        Producer(name_server(broker)) as producer,
        Consumer(name_server(broker), group, "t") as consumer,
    ):
        for number in range(3):
            body = b"x" * (segment - 220 if number == 1 else 10)
            producer.send("t", body, queue_id=0)
        messages = take_and_ack(consumer, 3)
        codes = give_back(broker, group, *[back(each, delay_level=-1) for each in messages])
        assert codes == [0, MessageTooLarge.code, 0]


# --- odd states ---


@pytest.mark.slow
def test_without_its_file_the_log_knows_how_far_it_has_come(tmp_path: Path) -> None:
    """delayOffset.json is for RocketMQ; damaged, it keeps nobody from starting."""
    store = tmp_path / "store"
    settings = {"messageDelayLevel": LEVELS}
    with RunningBroker(store, settings) as broker, Producer(name_server(broker)) as producer:
        producer.send("t", b"before", queue_id=0, delay_level=1)
        broker.read_queue("t", 0, 1)
    for path in (store / "config").glob("delayOffset.json*"):
        path.write_bytes(b"{ not json")
    with RunningBroker(store, settings) as broker, Producer(name_server(broker)) as producer:
        producer.send("t", b"after", queue_id=0, delay_level=1)
        assert [m.body for m in broker.read_queue("t", 0, 2)] == [b"before", b"after"]


def test_levels_that_the_table_has_no_longer(tmp_path: Path) -> None:
    """What waits there is delivered as at its last level."""
    store = tmp_path / "store"
    with (
        RunningBroker(store, {"messageDelayLevel": "1s 1h 1h"}) as broker,
        Producer(name_server(broker)) as producer,
    ):
        producer.send("t", b"x", queue_id=0, delay_level=3)
    with RunningBroker(store, {"messageDelayLevel": "1s"}) as broker:
        assert [m.body for m in broker.read_queue("t", 0, 1)] == [b"x"]


# --- what RocketMQ left behind ---


@pytest.mark.parametrize("name", SETS)
@pytest.mark.slow
def test_a_store_of_rocketmq_goes_on(name: str, tmp_path: Path) -> None:
    """What waited is delivered as its own broker delivered it when it was started again."""
    store = golden.unpack(name, tmp_path, golden.BROKERS)
    theirs = golden.meta(name, golden.BROKERS)["settings"]
    keys = ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "maxMessageSize",
            "maxHashSlotNum", "maxIndexNum", "fileReservedTime", "messageDelayLevel")  # fmt: skip
    settings = {key: theirs[key] for key in keys if key in theirs}
    found = golden.expected(name)
    before = {queue: len(rows) for queue, rows in found["contentAtRestart"].items()}
    late = found["restarts"]["late"]
    with RunningBroker(store, settings) as broker:
        for queue, rows in late["stored"].items():
            if queue.startswith(DELAY_TOPIC):
                continue
            topic, _, queue_id = queue.rpartition("@")
            begin = before.get(queue, 0)
            stored = broker.read_queue(topic, int(queue_id), begin + len(rows))[begin:]
            assert len(stored) == len(rows), queue
            told = sorted(map(_told, rows), key=str)
            assert sorted(map(_seen, stored), key=str) == told, queue
    offsets = loads((store / "config" / "delayOffset.json").read_bytes())
    assert isinstance(offsets, dict)
    assert offsets["offsetTable"] == {
        int(level): offset for level, offset in late["configAtEnd"]["delayOffsets"].items()
    }


def _told(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["gid"], row["reconsumeTimes"], row["sysFlag"], row["flag"], row["bornTimestamp"],
        row["bodySha256"], sorted(row["properties"].items()),
    )  # fmt: skip


def _seen(message: Message) -> tuple[object, ...]:
    return (
        message.properties["gid"], message.reconsume_times, message.sys_flag, message.flag,
        message.born_timestamp_ms, hashlib.sha256(message.body).hexdigest()[:24],
        sorted(message.properties.items()),
    )  # fmt: skip


# --- faults ---


@pytest.mark.slow
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_once_whatever_is_killed(flush: str, tmp_path: Path) -> None:
    """Senders go on while the processes that have to do with it are killed, then all of them."""
    settings = {"messageDelayLevel": LEVELS, "flushDiskType": flush}
    store = tmp_path / "store"
    sent: set[bytes] = set()
    over = threading.Event()

    def send(broker: RunningBroker) -> None:
        with Producer(name_server(broker), timeout_s=patient(20)) as producer:
            number = 0
            while not over.is_set():
                body = b"%d %d" % (id(broker), number)
                try:
                    producer.send("once", body, queue_id=number % 4, delay_level=1 + number % 3)
                except CometError:
                    continue  # it may be stored
                sent.add(body)
                number += 1
                over.wait(0.002)

    with RunningBroker(store, settings) as broker:
        sender = threading.Thread(target=send, args=(broker,))
        sender.start()
        try:
            for role in ("scheduler", "commitlog", "dispatcher", "scheduler", "commitlog"):
                broker.kill(role)
        finally:
            over.set()
            sender.join()
        broker.kill_all()
    with RunningBroker(store, settings) as broker:
        counts = _wait_delivered(broker, sent)
    assert sent <= counts.keys()
    waited = [m.body for queue_id in range(6) for m in _closed(store, DELAY_TOPIC, queue_id)]
    assert counts == {body: waited.count(body) for body in counts}


def _wait_delivered(broker: RunningBroker, sent: set[bytes]) -> dict[bytes, int]:
    """How often each was delivered, once all were that wait."""
    wanted = sum(len(broker.read_queue(DELAY_TOPIC, queue_id)) for queue_id in range(3))
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while True:
        bodies = [m.body for queue_id in range(4) for m in broker.read_queue("once", queue_id)]
        if len(bodies) >= wanted:
            return {body: bodies.count(body) for body in set(bodies)}
        assert time.monotonic() < deadline, f"{len(bodies)} of {wanted} are delivered"
        pause.wait(0.2)


def _closed(store: Path, topic: str, queue_id: int) -> list[Message]:
    """All messages of a queue; an answer has 32 at most."""
    reader = StoreReader.open_closed(store)
    found: list[Message] = []
    while payload := reader.get_message(topic, queue_id, len(found)).payload:
        found += decode(payload)
    return found
