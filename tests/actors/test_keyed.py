"""dedup="keys": a message whose key the topic has had of late is answered, and not stored."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from family import RunningBroker, encode_batch
from inside import wait_indexed
from patience import patient

from cometmq import AsyncProducer, Broker, Producer
from cometmq.protocol.commands import Section, SectionResult, SendMessages, SendResult
from cometmq.protocol.errors import (
    ArgumentIllegal,
    MessageIllegal,
    MessageTooLarge,
    NoPermission,
    SystemBusy,
)
from cometmq.shm.kernel.codec import BatchEncoder, BatchIllegal, batch_keys, batch_without

SEED = 20_261_126
HOUR_MS = 3_600_000
WAIT_S = patient(60)
_topics = (f"k{number}" for number in itertools.count())


class Served(RunningBroker):
    """A broker, and what sends to it."""

    def producer(self, **options: Any) -> Producer:
        return Producer(self.ready.name_server, **{"dedup": "keys", **options})

    def plain(self) -> Producer:
        return Producer(self.ready.name_server)

    def by_hand(self, topic: str, batch: bytes, count: int, **fields: Any) -> SectionResult:
        section = Section(topic, 0, count, **{"window_ms": HOUR_MS, **fields})
        answer, _ = self.commitlog.ask(SendMessages([section], now_ms()), [batch])
        assert isinstance(answer, SendResult)
        return answer.results[0]

    def bodies(self, topic: str, queues: int = 4) -> list[bytes]:
        found = [self.read_queue(topic, queue_id) for queue_id in range(queues)]
        return sorted(message.body for queue in found for message in queue)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("keyed") / "store") as running:
        _ = running.endpoints
        yield running


@pytest.fixture
def topic(broker: Served) -> str:
    name = next(_topics)
    broker.create_topic(name, 4)
    return name


def now_ms() -> int:
    return int(time.time() * 1000)


def encoded(*keys: str, bodies: list[bytes] | None = None) -> bytes:
    encoder = BatchEncoder(size_max=1 << 20, count_max=1 << 16)
    for index, key in enumerate(keys):
        encoder.add(bodies[index] if bodies else b"body of %d" % index, None, key, None, 0)
    return encoder.take()


# --- what is stored, and what is answered ---------------------------------------------------------


def test_the_first_receipt_is_told_again(broker: Served, topic: str) -> None:
    with broker.producer() as first:
        stored = first.send(topic, b"one", keys="o-1", queue_id=2)
        assert not stored.duplicate
    with broker.producer() as second:  # as after a restart of its process
        again = second.send(topic, b"another body", keys="o-1", queue_id=3)
        assert again.duplicate
        assert again.status == "SEND_OK"
        assert (again.msg_id, again.queue_id, again.queue_offset) == (stored.msg_id, 2, 0)
        assert repr(again) == repr(stored) == f"<Receipt {topic}/2 @0 SEND_OK>"
        assert again.store_timestamp_ms == stored.store_timestamp_ms
        assert not second.send(topic, b"two", keys="o-2").duplicate
    assert broker.bodies(topic) == [b"one", b"two"]


@pytest.mark.parametrize("indexed", [False, True])
def test_whoever_has_stored_it(broker: Served, topic: str, indexed: bool) -> None:
    """Also producers without dedup, with several keys; found in the index, or ahead of it."""
    with broker.plain() as plain, broker.producer() as producer:
        first = plain.send(topic, b"one", keys=["a", "b", "cc"])
        if indexed:
            wait_indexed(broker)
        for key in ("a", "b", "cc"):
            again = producer.send(topic, b"x", keys=key)
            assert (again.duplicate, again.msg_id) == (True, first.msg_id)
        for key in ("c", "ab", "a|b"):
            assert not producer.send(topic, b"new", keys=key).duplicate
        assert not plain.send(topic, b"plain", keys="a").duplicate


def test_other_topics_are_others(broker: Served, topic: str) -> None:
    other = next(_topics)
    broker.create_topic(other, 1)
    with broker.producer() as producer:
        assert not producer.send(topic, b"x", keys="k").duplicate
        assert not producer.send(other, b"x", keys="k").duplicate
        assert producer.send(other, b"x", keys="k").duplicate


def test_a_message_s_id_is_no_key(broker: Served, topic: str) -> None:
    with broker.producer() as producer:
        first = producer.send(topic, b"x", keys="k")
        assert not producer.send(topic, b"x", keys=first.msg_id).duplicate


@pytest.mark.parametrize("indexed", [False, True])
def test_the_window_begins_with_the_first_one(broker: Served, topic: str, indexed: bool) -> None:
    with broker.producer(dedup_window=0.3) as short, broker.producer() as long:
        first = short.send(topic, b"first", keys="k")
        if indexed:
            wait_indexed(broker)
        while now_ms() <= first.store_timestamp_ms + 320:
            time.sleep(0.01)
        assert long.send(topic, b"x", keys="k").msg_id == first.msg_id
        long.send(topic, b"beside", keys="beside")  # so that the index file is no older
        if indexed:
            wait_indexed(broker)
        second = short.send(topic, b"second", keys="k")
        assert not second.duplicate
        assert long.send(topic, b"x", keys="k").msg_id == second.msg_id


@pytest.mark.parametrize("linger_ms", [0, 5])
def test_batches_with_copies_in_them(broker: Served, topic: str, linger_ms: int) -> None:
    with broker.producer() as producer:
        for number in (3, 7, 8):
            producer.send(topic, b"%d" % number, keys=f"n{number}", queue_id=1)
    keys = [0, 1, 3, 4, 4, 7, 8, 9, 0, 3]
    with broker.producer(linger_ms=linger_ms) as producer:
        if linger_ms:
            sent = [producer.send(topic, b"%d" % key, keys=f"n{key}", queue_id=0) for key in keys]
        else:
            futures = [
                producer.send_async(topic, b"%d" % key, keys=f"n{key}", queue_id=0) for key in keys
            ]
            sent = [each.result(WAIT_S) for each in futures]
        found = [each.duplicate for each in sent]
        assert found == [False, False, True, False, True, True, True, False, True, True]
        by_key: dict[int, set[tuple[str, int, int]]] = {}
        for key, each in zip(keys, sent, strict=True):
            place = each.msg_id, each.queue_id, each.queue_offset
            by_key.setdefault(key, set()).add(place)
        assert all(len(places) == 1 for places in by_key.values())
        messages = broker.read_queue(topic, 0)
        assert [(each.body, each.queue_offset) for each in messages] == [
            (b"0", 0), (b"1", 1), (b"4", 2), (b"9", 3),
        ]  # fmt: skip
        for key, each in zip(keys, sent, strict=True):
            if not each.duplicate:
                assert messages[each.queue_offset].body == b"%d" % key
                assert messages[each.queue_offset].msg_id == each.msg_id


def test_asyncio(broker: Served, topic: str) -> None:
    async def work() -> None:
        async with AsyncProducer(broker.ready.name_server, dedup="keys") as producer:
            sent = await asyncio.gather(
                *(producer.send(topic, b"%d" % (n % 50), keys=f"a{n % 50}") for n in range(500))
            )
            assert sum(not each.duplicate for each in sent) == 50

    asyncio.run(work())
    assert len(broker.bodies(topic)) == 50


def test_producers_that_send_the_same(broker: Served, topic: str) -> None:
    """Of all that several send at once each key is stored once."""

    def work(seed: int) -> None:
        keys = [f"s{number}" for number in range(300)]
        random.Random(seed).shuffle(keys)
        with broker.producer(linger_ms=1, transport="zmq" if seed % 2 else "auto") as producer:
            for key in keys:
                producer.send(topic, key.encode(), keys=key)

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert broker.bodies(topic) == sorted(b"s%d" % number for number in range(300))


def test_a_repeat_is_found_by_its_keys(broker: Served, topic: str) -> None:
    """Not as a batch: what its first attempt has stored of it need not lie together."""
    batch = encoded("r1", "r2", "r3", "r1")
    broker.by_hand(topic, encoded("r2"), 1)
    first = broker.by_hand(topic, batch, 4, number=1)
    assert [copy.index for copy in first.copies] == [1, 3]
    again = broker.by_hand(topic, batch, 4, number=2, fence=True, repeats_ms=3_000, window_ms=1)
    assert [copy.index for copy in again.copies] == [0, 1, 2, 3]
    assert [copy.queue_offset for copy in again.copies] == [1, 0, 2, 1]
    assert len(broker.bodies(topic)) == 3


@pytest.mark.parametrize("index_entries", [64, 1_000])
@pytest.mark.slow
def test_against_a_set(tmp_path: Path, index_entries: int) -> None:
    """Random keys, by producers with dedup and without, through many index files, segments and
    restarts: exactly what a set of keys says."""
    chance = random.Random(SEED + index_entries)
    settings = {
        "maxIndexNum": index_entries, "maxHashSlotNum": 16, "mappedFileSizeCommitLog": 64 << 10,
        "maxMessageSize": 16 << 10,
    }  # fmt: skip
    known: dict[str, tuple[int, int]] = {}
    store = tmp_path / "store"
    for _ in range(3):
        with Served(store, settings) as broker:
            if not known:
                broker.create_topic("set", 1)
            for step in range(150):
                keys = [f"k{chance.randrange(900)}" for _ in range(chance.choice([1, 1, 2, 7, 40]))]
                batch = encoded(*keys, bodies=[each.encode() for each in keys])
                if chance.random() < 0.2:
                    result = broker.by_hand("set", batch, len(keys), window_ms=0)
                    for number, key in enumerate(keys):
                        known[key] = (0, result.queue_offset + number)
                    continue
                expected: list[int] = []
                seen: set[str] = set()
                for number, key in enumerate(keys):
                    if key in known or key in seen:
                        expected.append(number)
                    seen.add(key)
                result = answered(broker, batch, len(keys))
                assert [copy.index for copy in result.copies] == expected, (step, keys)
                fresh = [key for number, key in enumerate(keys) if number not in expected]
                for number, key in enumerate(fresh):
                    known[key] = (0, result.queue_offset + number)
                for copy in result.copies:
                    assert copy.queue_offset == known[keys[copy.index]][1]
            if chance.random() < 0.5:
                broker.kill_all()


def answered(broker: Served, batch: bytes, count: int) -> SectionResult:
    """The index may be behind for a moment, after a start."""
    deadline = time.monotonic() + WAIT_S
    while (result := broker.by_hand("set", batch, count)).code == SystemBusy.code:
        assert time.monotonic() < deadline, result
        time.sleep(0.01)
    assert result.code == 0, result
    return result


def test_what_a_service_appends(tmp_path: Path) -> None:
    """Its own threads append beside the actor, which sees what they have laid down."""
    with Broker(tmp_path / "store", writer="here", profile="test") as broker:
        appender = broker.appender("t", 0)
        appended = [appender.append(b"a", keys=f"k{number}") for number in range(50)]
        over = threading.Event()

        def append_on() -> None:
            while not over.wait(0.001):
                for _ in range(20):
                    appender.append(b"others", keys="others")

        thread = threading.Thread(target=append_on)
        thread.start()
        try:
            with broker.producer(dedup="keys") as producer:
                for number, queue_offset in enumerate(appended):
                    receipt = producer.send("t", b"x", keys=f"k{number}")
                    assert (receipt.duplicate, receipt.queue_offset) == (True, queue_offset)
                    assert not producer.send("t", b"x", keys=f"new{number}").duplicate
                assert producer.send("t", b"x", keys="others").duplicate
        finally:
            over.set()
            thread.join()


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, -1, 7 * 86_400 + 1, float("nan"), timedelta(days=8)])
def test_windows_that_can_be_none(window: Any) -> None:
    with pytest.raises(ArgumentIllegal, match="dedup_window"):
        Producer("127.0.0.1:1", dedup="keys", dedup_window=window)


@pytest.mark.parametrize("window", [0.001, timedelta(days=7), 7 * 86_400])
def test_windows_at_the_edge(broker: Served, topic: str, window: Any) -> None:
    with broker.producer(dedup_window=window) as producer:
        producer.send(topic, b"x", keys="k")


def test_what_else_is_refused(broker: Served, topic: str) -> None:
    with pytest.raises(ArgumentIllegal, match="dedup"):
        broker.producer(dedup="bodies")
    with broker.producer(name="group") as producer:
        for keys in (None, "", "a b", ["a", "b"], "x" * 1_025, "ö" * 513):
            with pytest.raises(ArgumentIllegal, match="keys"):
                producer.send(topic, b"x", keys=keys)
        with pytest.raises(ArgumentIllegal, match="delayed"):
            producer.send(topic, b"x", keys="k", delay_level=1)
        with pytest.raises(ArgumentIllegal, match="send_many"):
            producer.send_many(topic, [b"x"], keys="k")
        with pytest.raises(ArgumentIllegal), producer.transaction(topic, b"x", keys="k"):
            pass
        for key in ("x" * 1_024, "ö" * 512, "#", "\x7f", "a|b"):
            assert not producer.send(topic, b"x", keys=key).duplicate
            assert producer.send(topic, b"x", keys=key).duplicate


def test_what_the_broker_refuses(broker: Served, topic: str) -> None:
    good = encoded("k")
    for fields, error in (
        ({"window_ms": -1}, ArgumentIllegal),
        ({"window_ms": 7 * 24 * HOUR_MS + 1}, ArgumentIllegal),
        ({"delay_level": 1}, MessageIllegal),
        ({"delay_level": -1}, MessageIllegal),
        ({"producer_group": "g"}, MessageIllegal),
        ({"count": 2}, MessageIllegal),
        ({"count": -1}, MessageIllegal),
    ):
        count = fields.pop("count", 1)
        assert broker.by_hand(topic, good, count, **fields).code == error.code, fields
    for batch, count in (
        (encode_batch([b"no key"]), 1), (encoded("a b"), 1), (encoded("x" * 1_025), 1),
        (encoded("k") + b"rubbish", 1), (encoded("k")[:-1], 1), (b"", 1), (encoded("\xff"), 2),
    ):  # fmt: skip
        assert broker.by_hand(topic, batch, count).code == MessageIllegal.code
    invalid = encoded("zz").replace(b"KEYS\1zz", b"KEYS\1\xff\xfe")
    assert broker.by_hand(topic, invalid, 1).code == MessageIllegal.code
    assert broker.bodies(topic) == []


def test_the_largest_command(broker: Served, topic: str) -> None:
    keys = [f"m{number}" for number in range(4_096)]
    batch = encoded(*keys)
    assert broker.by_hand(topic, batch, 4_096).code == 0
    again = broker.by_hand(topic, batch, 4_096)
    assert [copy.queue_offset for copy in again.copies] == list(range(4_096))
    more = encoded(*keys, "one more")
    assert broker.by_hand(topic, more, 4_097).code == MessageTooLarge.code
    assert len(broker.bodies(topic)) == 4_096


def test_without_an_index(tmp_path: Path) -> None:
    with Served(tmp_path / "store", {"messageIndexEnable": False}) as broker:
        broker.create_topic("t", 1)
        _ = broker.endpoints
        with broker.producer() as producer, pytest.raises(NoPermission, match="messageIndexEnable"):
            producer.send("t", b"x", keys="k")


# --- batches --------------------------------------------------------------------------------------


def test_batches_without_some() -> None:
    chance = random.Random(SEED)
    for _ in range(300):
        keys = [f"k{number}" for number in range(chance.randint(1, 30))]
        bodies = [chance.randbytes(chance.choice([1, 2, 100])) for _ in keys]
        batch = encoded(*keys, bodies=bodies)
        assert batch_keys(batch, len(keys)) == [key.encode() for key in keys]
        left_out = sorted(chance.sample(range(len(keys)), chance.randint(0, len(keys))))
        rest = batch_without(batch, left_out)
        kept = [key.encode() for number, key in enumerate(keys) if number not in left_out]
        assert batch_keys(rest, len(kept)) == kept
        if not left_out:
            assert rest == batch
        cut = batch[: chance.randrange(len(batch))]
        with pytest.raises(BatchIllegal):
            batch_keys(cut, len(keys))
