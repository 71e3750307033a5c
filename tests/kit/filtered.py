"""A topic of messages by chance, what filters want of it, how that is drained. No tests here."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from family import RunningBroker
from transacting import until

from cometmq import Consumer, Producer
from cometmq.protocol.commands import JoinGroup, Subscription
from cometmq.shm.derived.filter_maps import identity_of, map_folder, read_block
from cometmq.shm.kernel._kernel import FilterMap
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.selection import selection_of

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
def running(
    tmp_path: Path,
    settings: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    module: str = "cometmq.actors.launch.embedded",
) -> Iterator[RunningBroker]:
    keys = SETTINGS | dict(settings or {})
    with RunningBroker(tmp_path / "store", keys, environ=environ, module=module) as broker:
        broker.create_topic(TOPIC, QUEUES)
        yield broker


def expression(chance: random.Random) -> str:
    parts = [
        "a = '1'", "a > 1", "b IS NULL", "c IN ('x', '2')", "a <> b", "TAGS = 'red'", "NOT (c = 2)",
    ]  # fmt: skip
    return f"{chance.choice(parts)} {chance.choice(['AND', 'OR'])} {chance.choice(parts)}"
