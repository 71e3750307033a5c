"""Filter maps of a whole broker: who has them made, what is drained by them, what befalls them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
from family import RunningBroker
from transacting import until

from cometmq import Admin, Consumer, Producer
from cometmq.protocol.commands import JoinGroup, Subscription
from cometmq.shm.derived.filter_maps import (
    identity_of,
    map_folder,
    read_block,
    read_filters,
)
from cometmq.shm.kernel._kernel import FilterMap
from cometmq.shm.kernel.layout import FILTER_BLOCK_ENTRIES
from cometmq.shm.live.control import Counter
from cometmq.shm.os.files import FILTER_MAPS_DIR, FILTERS_FILE
from cometmq.shm.reading.selection import selection_of

pytestmark = pytest.mark.timeout(180)
QUEUES = 3
TOPIC = "calls"
# Several segments; the log and queues begin later at times.
SETTINGS = {"mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 20 * 1_000}
Bodies = dict[bytes, dict[str, str]]


class Traffic:
    """Messages by chance, no two alike, and which of them an expression wants."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.seed = random.randrange(1 << 32)
        self.chance = random.Random(self.seed)
        self.sent: Bodies = {}

    def send(self, producer: Producer, count: int, topic: str = TOPIC) -> None:
        for _ in range(count):
            number = next(self._numbers)
            body = b"%d " % number + bytes(self.chance.choice([0, 10, 300, 3000]))
            properties = {
                name: self.chance.choice(["1", "2", "x"])
                for name in "abc"
                if self.chance.random() < 0.8
            }
            tag = self.chance.choice(["red", "blue", "green"])
            queue_id = self.chance.randrange(QUEUES)
            producer.send(topic, body, tags=tag, properties=properties, queue_id=queue_id)
            self.sent[body] = properties | {"TAGS": tag}
        producer.flush()

    def wanted(self, tags: str, sql: str) -> set[bytes]:
        chosen, filter, _ = selection_of(tags, sql)
        assert filter is not None
        return {
            body
            for body, properties in self.sent.items()
            if (chosen is None or properties["TAGS"] in chosen)
            and filter.matches("".join(f"{k}\1{v}\2" for k, v in properties.items()).encode())
        }


def drain(
    broker: RunningBroker,
    group: str,
    tags: str,
    sql: str,
    wanted: Collection[bytes],
    transport: str = "auto",
) -> list[bytes]:
    """What comes, until all of that is there, and for a moment more."""
    missing = set(wanted)
    found: list[bytes] = []
    deadline = time.monotonic() + 60
    with Consumer(
        broker.ready.name_server, group, TOPIC, tags, sql=sql, transport=transport
    ) as consumer:
        while missing:
            assert time.monotonic() < deadline, f"{len(missing)} of {len(wanted)} did not come"
            messages = consumer.poll(256, 1)
            consumer.ack(messages)
            found += [message.body for message in messages]
            missing.difference_update(found)
        found += [message.body for message in consumer.poll(256, 0.2)]
    return found


def register(broker: RunningBroker, group: str, tags: str, sql: str) -> None:
    """As a member does that joins."""
    join = JoinGroup(group, "m", [Subscription(TOPIC, tags, sql)])
    broker.coordinator.ask(join, timeout_s=30)


def maps_of(broker: RunningBroker) -> tuple[str, int]:
    with broker.control() as control:
        return str(control.meta["nonce"]), control.read(Counter.FILTER_MAPS).value


def told(broker: RunningBroker, expression: str, queue_id: int, number: int = 0) -> int:
    """Of so many messages a block tells."""
    run, maps = maps_of(broker)
    block = read_block(map_folder(broker.store, TOPIC, expression), queue_id, number)
    identity = identity_of(run, maps, TOPIC, queue_id, expression)
    return FilterMap(identity).take(number, block)


def ends(broker: RunningBroker) -> dict[int, int]:
    return {each: len(broker.read_queue(TOPIC, each)) for each in range(QUEUES)}


def until_calculated(broker: RunningBroker, *expressions: str, ends: Mapping[int, int]) -> None:
    for expression, (queue_id, end) in itertools.product(expressions, ends.items()):
        until(
            f"queue {queue_id} has its map",
            lambda e=expression, q=queue_id, n=end: told(broker, e, q) == n,
        )


def send(broker: RunningBroker, traffic: Traffic, count: int) -> None:
    with Producer(broker.ready.name_server, linger_ms=2) as producer:
        traffic.send(producer, count)


@contextlib.contextmanager
def running(tmp_path: Path, **settings: object) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path / "store", SETTINGS | settings) as broker:
        broker.create_topic(TOPIC, QUEUES)
        yield broker


def expression(chance: random.Random) -> str:
    parts = [
        "a = '1'", "a > 1", "b IS NULL", "c IN ('x', '2')", "a <> b", "TAGS = 'red'", "NOT (c = 2)",
    ]  # fmt: skip
    return f"{chance.choice(parts)} {chance.choice(['AND', 'OR'])} {chance.choice(parts)}"


# --- drains ---


def test_what_is_drained_by_maps_is_what_is_wanted(tmp_path: Path) -> None:
    traffic = Traffic()
    chance = traffic.chance
    with running(tmp_path) as broker:
        send(broker, traffic, 3_000)
        choices = [("*", "a = '1'"), ("red || blue", "c > 1"), ("*", expression(chance)),
                   ("green", expression(chance))]  # fmt: skip
        expressions = []
        for number, (tags, sql) in enumerate(choices):
            register(broker, f"first-{number}", tags, sql)
            expressions.append(selection_of(tags, sql).expression)
        until_calculated(broker, *expressions, ends=ends(broker))
        for number, (tags, sql) in enumerate(choices):
            wanted = traffic.wanted(tags, sql)
            for transport in ("mapped", "zmq"):
                group = f"drains-{transport}-{number}"
                found = drain(broker, group, tags, sql, wanted, transport)
                assert sorted(found) == sorted(wanted), (traffic.seed, tags, sql, transport)
        assert broker.statistics("dispatcher")["filters"] == len(set(expressions))


def test_a_record_that_its_map_does_not_want_is_not_looked_at(tmp_path: Path) -> None:
    """Its property is overwritten in the log, so that whoever looked would want it."""
    with running(tmp_path) as broker:
        with Producer(broker.ready.name_server, linger_ms=2) as producer:
            for number in range(200):
                producer.send(
                    TOPIC, b"%d" % number, queue_id=0, properties={"mark": "no" if number else "ok"}
                )
            producer.flush()
        register(broker, "g", "*", "mark = 'ok'")
        until_calculated(broker, "mark = 'ok'", ends={0: 200})
        for segment in sorted((broker.store / "commitlog").iterdir()):
            content = segment.read_bytes()
            with segment.open("r+b") as file:
                file.write(content.replace(b"mark\1no", b"mark\1ok"))
        for transport in ("mapped", "zmq"):
            assert drain(broker, f"g-{transport}", "*", "mark = 'ok'", [b"0"], transport) == [b"0"]
            every = [b"%d" % number for number in range(200)]
            found = drain(broker, f"h-{transport}", "*", "mark IN ('ok')", every, transport)
            assert sorted(found) == sorted(every), "without a map it is"


def test_a_backlog_over_the_border_of_two_blocks(tmp_path: Path) -> None:
    count = FILTER_BLOCK_ENTRIES + 1
    near = {*range(5), *range(FILTER_BLOCK_ENTRIES - 2, count)}
    with running(tmp_path, mappedFileSizeCommitLog=64 << 20) as broker:
        with Producer(broker.ready.name_server, linger_ms=5) as producer:
            for number in range(count):
                here = {"at": "near" if number in near else "far"}
                producer.send(TOPIC, b"%d" % number, queue_id=0, properties=here)
            producer.flush()
        register(broker, "g", "*", "at = 'near'")
        until("the second block", lambda: told(broker, "at = 'near'", 0, 1) == 1)
        assert told(broker, "at = 'near'", 0, 0) == FILTER_BLOCK_ENTRIES
        for transport in ("mapped", "zmq"):
            wanted = [b"%d" % number for number in sorted(near)]
            assert drain(broker, transport, "*", "at = 'near'", wanted, transport) == wanted


# --- who has maps made ---


def test_maps_come_and_go_with_filters_and_topics(tmp_path: Path) -> None:
    traffic = Traffic()
    with running(tmp_path, flushConsumerOffsetInterval=200) as broker:
        send(broker, traffic, 300)
        assert maps_of(broker)[1] == 0
        assert not (broker.store / FILTER_MAPS_DIR).exists(), "nobody has a filter"
        register(broker, "one", "*", "a = '1'")
        register(broker, "two", "red", "a = '1'")
        joined = "TAGS IN ('red') AND (a = '1')"
        until_calculated(broker, "a = '1'", joined, ends=ends(broker))
        assert read_filters(broker.store) == {TOPIC: ["a = '1'", joined]}
        with Admin(broker.ready.name_server) as admin:
            broker.coordinator.ask(JoinGroup("one", "m", [Subscription(TOPIC, "*", "b = '2'")]))
            until_calculated(broker, "b = '2'", ends=ends(broker))
            until("what nobody registers goes", lambda: len(folders(broker)) == 2)
            before = broker.read_queue(TOPIC, 0)
            admin.delete_topic(TOPIC)
            until("so do those of a topic", lambda: folders(broker) == [])
            broker.create_topic(TOPIC, QUEUES)
            until_calculated(broker, "b = '2'", ends=ends(broker))
        send(broker, traffic, 300)
        after = broker.read_queue(TOPIC, 0)
        assert [each.queue_offset for each in after] == list(range(len(after))), (
            "no place is given twice"
        )
        assert [each.body for each in after[: len(before)]] == [each.body for each in before]
        until_calculated(broker, "b = '2'", ends=ends(broker))
        wanted = traffic.wanted("*", "b = '2'")
        for transport in ("mapped", "zmq"):
            found = drain(broker, f"drains-{transport}", "*", "b = '2'", wanted, transport)
            assert sorted(found) == sorted(wanted), traffic.seed


def folders(broker: RunningBroker) -> list[str]:
    root = broker.store / FILTER_MAPS_DIR
    return sorted(os.listdir(root)) if root.exists() else []


def test_no_maps_where_they_are_off(tmp_path: Path) -> None:
    traffic = Traffic()
    with running(tmp_path, enableCalcFilterBitMap=False) as broker:
        send(broker, traffic, 300)
        wanted = traffic.wanted("*", "a = '1'")
        assert sorted(drain(broker, "g", "*", "a = '1'", wanted)) == sorted(wanted)
        until("the dispatcher could know", lambda: (broker.store / FILTERS_FILE).exists())
        assert broker.statistics("dispatcher")["filter_maps"] == "off"
        assert maps_of(broker)[1] == 0


def test_an_orderly_end_leaves_no_maps(tmp_path: Path) -> None:
    traffic = Traffic()
    with running(tmp_path) as broker:
        send(broker, traffic, 300)
        register(broker, "g", "*", "a = '1'")
        until_calculated(broker, "a = '1'", ends=ends(broker))
        store = broker.store
        assert broker.close() == 0
    assert not (store / FILTER_MAPS_DIR).exists()
    assert not (store / FILTERS_FILE).exists()


# --- what befalls them ---


def test_damaged_maps_hide_nothing(tmp_path: Path) -> None:
    traffic = Traffic()
    with running(tmp_path) as broker:
        send(broker, traffic, 1_000)
        register(broker, "g", "*", "a = '1'")
        until_calculated(broker, "a = '1'", ends=ends(broker))
        wanted = traffic.wanted("*", "a = '1'")
        files = sorted(map_folder(broker.store, TOPIC, "a = '1'").iterdir())
        assert len(files) == QUEUES
        whole = [file.read_bytes() for file in files]
        for number in range(16):
            for file, content in zip(files, whole, strict=True):
                file.write_bytes(damaged(traffic.chance, content))
            transport = ("mapped", "zmq")[number % 2]
            found = drain(broker, f"g-{number}", "*", "a = '1'", wanted, transport)
            assert sorted(found) == sorted(wanted), traffic.seed


def damaged(chance: random.Random, content: bytes) -> bytes:
    at = chance.randrange(len(content))
    match chance.randrange(4):
        case 0:
            return (
                content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
            )
        case 1:
            return content[:at]
        case 2:
            return (content[:at] + bytes(512) + content[at + 512 :])[: len(content)]
        case _:
            return bytes(len(content))  # all messages surely unwanted


def test_maps_of_the_run_before_are_not_believed(tmp_path: Path) -> None:
    """They say of queue 0 what is true of queue 0, and are put back once the broker has begun anew;
    to see that nobody looks, all of them say that nothing is wanted."""
    traffic = Traffic()
    with running(tmp_path) as broker:
        send(broker, traffic, 600)
        register(broker, "g", "*", "mark = 'never'")
        until_calculated(broker, "mark = 'never'", ends=ends(broker))
        folder = map_folder(broker.store, TOPIC, "mark = 'never'")
        shutil.copytree(folder, tmp_path / "old")
        store = broker.store
        broker.kill_all()
    with RunningBroker(store, SETTINGS) as broker:
        wanted = traffic.wanted("*", "a = '1'")
        register(broker, "g", "*", "a = '1'")
        until_calculated(broker, "a = '1'", ends=ends(broker))
        for number, name in enumerate(os.listdir(tmp_path / "old")):
            assert (tmp_path / "old" / name).stat().st_size
            shutil.copy(tmp_path / "old" / name, map_folder(store, TOPIC, "a = '1'") / name)
            transport = ("mapped", "zmq")[number % 2]
            found = drain(broker, f"g-{number}", "*", "a = '1'", wanted, transport)
            assert sorted(found) == sorted(wanted), traffic.seed


@pytest.mark.slow
def test_the_dispatcher_dies_and_filters_change_under_load(tmp_path: Path) -> None:
    """Consumers with filters of their own begin, come to the end of what was sent, and go, while
    messages come and the dispatcher is killed."""
    traffic = Traffic()
    chance = traffic.chance
    with running(tmp_path) as broker:
        send(broker, traffic, 2_000)
        for number in range(12):
            tags = chance.choice(["*", "red", "red || green"])
            sql = expression(chance)
            register(broker, f"g-{number % 3}", tags, sql)
            if chance.random() < 0.5:
                until_calculated(broker, selection_of(tags, sql).expression, ends=ends(broker))
            pid = broker.pids()["dispatcher"] if number % 3 == 1 else 0
            if pid:
                broker.end(pid)
            sender = threading.Thread(target=send, args=(broker, more := Traffic(), 500))
            sender.start()
            try:
                wanted = traffic.wanted(tags, sql)
                transport = chance.choice(["mapped", "zmq"])
                found = drain(broker, f"d-{number}", tags, sql, wanted, transport)
            finally:
                sender.join()
            assert wanted <= set(found), (traffic.seed, tags, sql, transport)
            traffic.sent |= more.sent
            if pid:
                broker.wait_serves("dispatcher", not_pid=pid)
            wanted = traffic.wanted(tags, sql)
            found = drain(broker, f"e-{number}", tags, sql, wanted, transport)
            assert sorted(found) == sorted(wanted), (traffic.seed, tags, sql, transport)
