"""SQL92 filters from outside: each transport, held pulls, tags beside them, who refuses them."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from patience import patient
from receiving import take_and_ack
from shared_data import data_path

from cometmq import Admin, AsyncConsumer, Broker, Consumer, Producer
from cometmq.protocol.commands import (
    BrokerEndpoints,
    BrokerList,
    JoinGroup,
    ListBrokers,
    PullMessages,
    Subscription,
)
from cometmq.protocol.errors import FilterIllegal, FiltersOff, SubscriptionIllegal
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import decode
from cometmq.shm.reading.selection import selection_of
from cometmq.shm.reading.store_reader import StoreReader

pytestmark = pytest.mark.timeout(120)
WAIT_S = patient(30)
SQL = "code >= 500 AND host IN ('a', 'b')"
COUNT = 400


@pytest.fixture(scope="module")
def broker(cometmq_broker: Broker) -> Broker:
    """Its topic `calls` has codes, hosts and tags by number; `numbers_of` says which match."""
    with cometmq_broker.producer() as producer:
        for number in range(COUNT):
            send(producer, "calls", number)
    return cometmq_broker


def send(producer: Producer, topic: str, number: int) -> None:
    properties = {"code": str(200 + 100 * (number % 5)), "host": "abc"[number % 3]}
    if number % 7 == 0:
        del properties["code"]
    tag = "even" if number % 2 == 0 else "odd"
    producer.send(topic, b"%d" % number, tags=tag, properties=properties)


def wanted(*, even: bool = False) -> list[int]:
    return [
        number
        for number in range(COUNT)
        if number % 7 and number % 5 >= 3 and number % 3 < 2 and not (even and number % 2)
    ]


def take(consumer: Consumer, count: int) -> list[int]:
    return sorted(int(message.body) for message in take_and_ack(consumer, count))


@pytest.mark.parametrize("transport", ["mapped", "zmq", "auto"])
def test_only_what_matches_comes(broker: Broker, transport: str) -> None:
    group = f"matches-{transport}"
    with broker.consumer(group, "calls", sql=SQL, transport=transport) as consumer:
        assert take(consumer, len(wanted())) == wanted()
        assert consumer.poll(10, 0.2) == []


@pytest.mark.parametrize("transport", ["mapped", "zmq"])
def test_tags_and_sql_together(broker: Broker, transport: str) -> None:
    group = f"both-{transport}"
    with broker.consumer(group, "calls", "even", sql=SQL, transport=transport) as consumer:
        assert take(consumer, len(wanted(even=True))) == wanted(even=True)


@pytest.mark.parametrize("transport", ["mapped", "zmq"])
def test_a_waiting_consumer_gets_what_matches_alone(broker: Broker, transport: str) -> None:
    topic = f"later-{transport}"
    with (
        broker.consumer(f"waits-{transport}", topic, sql=SQL, transport=transport) as consumer,
        broker.producer() as producer,
    ):
        for number in (0, 1, 2, 3, 4, 8, 9):
            send(producer, topic, number)
        assert take(consumer, 3) == [3, 4, 9]


def test_asyncio_and_another_subscription(broker: Broker) -> None:
    async def run() -> list[int]:
        found: list[int] = []
        async with AsyncConsumer(broker.name_server, "aio", "calls", sql=SQL) as consumer:
            while len(found) < len(wanted()):
                messages = await asyncio.wait_for(consumer.poll(1024, patient(5)), WAIT_S)
                found += [int(message.body) for message in messages]
            with pytest.raises(FilterIllegal, match="column 5"):
                await consumer.subscribe("calls", sql="a = = 3")
        return sorted(found)

    assert asyncio.run(run()) == wanted()
    with broker.consumer("changes", "calls", sql="code IS NULL") as consumer:
        assert take(consumer, 58) == list(range(0, COUNT, 7))
        consumer.subscribe("calls", "*", "code = 300")
        with broker.producer() as producer:
            send(producer, "calls-2", 1)
        consumer.subscribe("calls-2", "odd", "code = 300")
        assert take(consumer, 1) == [1]


def test_members_that_differ_are_named(broker: Broker) -> None:
    with (
        broker.consumer("differs", "calls", sql="code = 200", member="one") as one,
        broker.consumer("differs", "calls", sql="code = 300", member="two") as two,
    ):
        while not (one.assignment and two.assignment):
            one.poll(1, 0.05)
            two.poll(1, 0.05)
        with Admin(broker.name_server) as admin:
            found = admin.describe_group("differs")
    assert "where code = " in found.subscriptions["calls"]
    (difference,) = found.differences
    assert {difference.tags, difference.usual_tags} == {"* where code = 200", "* where code = 300"}


def test_progress_passes_what_does_not_match(broker: Broker) -> None:
    with broker.consumer("goes-on", "calls", sql=SQL) as consumer:
        take(consumer, len(wanted()))
    with broker.consumer("goes-on", "calls", sql=SQL) as consumer:
        assert consumer.poll(10, 0.5) == [], "what was acknowledged came again"


def test_a_wrong_expression_is_refused_everywhere(broker: Broker) -> None:
    with pytest.raises(FilterIllegal, match="line 1, column 3"):
        broker.consumer("wrong", "calls", sql="a ! 3")
    with pytest.raises(SubscriptionIllegal, match="sql="):
        broker.consumer("wrong", "calls", "code >= 500")
    endpoints = endpoints_of(broker)
    with Channel(endpoints.readers[0]) as reader, pytest.raises(FilterIllegal):
        reader.ask(PullMessages("calls", 0, 0, sql="a = " * 100_000), timeout_s=WAIT_S)
    join = JoinGroup("wrong", "m", [Subscription("calls", "*", "a >")])
    with Channel(endpoints.coordinator) as coordinator, pytest.raises(FilterIllegal):
        coordinator.ask(join, timeout_s=WAIT_S)


def test_a_broker_that_takes_none(tmp_path: Path) -> None:
    with Broker(tmp_path / "store", settings={"enablePropertyFilter": False}) as broker:
        endpoints = endpoints_of(broker)
        with Channel(endpoints.readers[0]) as reader, pytest.raises(FiltersOff):
            reader.ask(PullMessages("calls", 0, 0, sql="a = 1"), timeout_s=WAIT_S)
        join = JoinGroup("g", "m", [Subscription("calls", "*", "a = 1")])
        with Channel(endpoints.coordinator) as coordinator, pytest.raises(FiltersOff):
            coordinator.ask(join, timeout_s=WAIT_S)


def test_tail_where(broker: Broker) -> None:
    options = ("--name-server", broker.name_server, "--until-end", "-f", r"%s\n")
    tail = [sys.executable, "-m", "cometmq", "msg", "tail", "-t", "calls", *options]
    printed = subprocess.run(
        [*tail, "--tags", "even", "--where", SQL],
        capture_output=True,
        check=True,
        timeout=patient(60),
    )
    assert sorted(map(int, printed.stdout.split())) == wanted(even=True)
    refused = subprocess.run([*tail, "--where", "code >"], capture_output=True, timeout=patient(60))
    assert refused.returncode != 0
    assert b"column 6" in refused.stderr
    assert b"Traceback" not in refused.stderr


def test_a_group_that_rocketmq_filtered_for(tmp_path: Path) -> None:
    """From its last progress on a real broker delivered these, and no others."""
    folder = "rocketmq-brokers"
    with tarfile.open(data_path(folder, "groups.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    store = next(tmp_path.rglob("commitlog")).parent
    filters = json.loads((store / "config" / "consumerFilter.json").read_text())
    registered = filters["filterDataByTopic"]["SqlTopic"]["groupFilterData"]["GSqlTwo"]
    with gzip.open(data_path(folder, "groups.expected.json.gz")) as packed:
        delivered = json.load(packed)["restarts"]["late"]["deliveries"]["GSqlTwo"]["messages"]
    offsets = (store / "config" / "consumerOffset.json").read_text()
    group = re.search(r'"SqlTopic@GSqlTwo":\{([^}]*)\}', offsets)
    assert group is not None
    found = []
    reader = StoreReader.open_closed(store)
    selection = selection_of("*", registered["expression"])
    for queue_id, offset in re.findall(r"(\d+):(\d+)", group[1]):
        result = reader.get_message(
            "SqlTopic", int(queue_id), int(offset), 1000, filter=selection.filter
        )
        assert result.payload is not None
        found += [
            (int(queue_id), message.queue_offset, message.properties["gid"])
            for message in decode(result.payload)
        ]
    reader.close()
    assert sorted(found) == sorted(
        (each["queueId"], each["queueOffset"], each["gid"])
        for each in delivered
        if each["queueTopic"] == "SqlTopic"
    )


def endpoints_of(broker: Broker) -> BrokerEndpoints:
    with Channel(broker.name_server) as line:
        answer, _ = line.ask(ListBrokers(), timeout_s=WAIT_S)
    assert isinstance(answer, BrokerList)
    return answer.brokers[0]
