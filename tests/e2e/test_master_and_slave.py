"""A master and its slave: what was acknowledged outlives the master, and is read meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from family import RunningBroker
from patience import patient
from ports import free_ports

from cometmq.actors.coordination.namesrv import NameServerActor
from cometmq.client import Consumer, Message, Producer
from cometmq.client.sending.receipt import SLAVE_NOT_AVAILABLE
from cometmq.protocol.errors import CometError
from cometmq.shm.live.control import Counter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_S = patient(90)


@contextmanager
def name_server() -> Iterator[str]:
    server = NameServerActor.start(bind=[("tcp://127.0.0.1:*", False)])
    try:
        yield server.proxy().addresses.get()[0]
    finally:
        server.stop()


class Pair:
    """A master and its slave, which both register with one name server."""

    def __init__(self, folder: Path, names: str, stack: ExitStack, role: str) -> None:
        self.names = names
        self._stack = stack
        self._folder = folder
        self._port = free_ports(1)
        self.shared = {"brokerName": "pair", "namesrvAddr": names}
        self.master = self.start("master", brokerRole=role, haListenPort=self._port)
        self.slave = self.start(
            "slave",
            brokerRole="SLAVE",
            brokerId=1,
            haMasterAddress=f"127.0.0.1:{self._port}",
            haSendHeartbeatInterval=500,
        )

    def start(self, name: str, **settings: Any) -> RunningBroker:
        broker = RunningBroker(self._folder / name, self.shared | settings)
        self._stack.callback(broker.close)
        return broker

    def wait_copied(self) -> None:
        end = self.master.counter(Counter.WROTE)
        until(lambda: self.slave.counter(Counter.WROTE) >= end, "the slave is behind")


@pytest.fixture(params=["ASYNC_MASTER", "SYNC_MASTER"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with ExitStack() as stack, name_server() as names:
        yield Pair(tmp_path, names, stack, request.param)


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def send(pair: Pair, numbers: range) -> None:
    with Producer(pair.names, timeout_s=patient(30)) as producer:
        for number in numbers:
            producer.send("orders", str(number).encode(), ordering_key=str(number)).wait()


def take(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        found += consumer.poll(count - len(found), timeout_s=1)
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
    return found


def bodies(messages: list[Message]) -> list[int]:
    return sorted(int(message.body) for message in messages)


def connected(pair: Pair) -> bool:
    return bool(pair.master.statistics("ha")["slaves_in_sync"])


def test_the_slave_is_read_and_then_is_the_master(pair: Pair) -> None:
    until(lambda: connected(pair), "the slave does not come")
    send(pair, range(200))
    options: dict[str, Any] = {"transport": "zmq", "auto_commit_ms": 50}
    with Consumer(pair.names, "g", "orders", **options, prefetch_count=10) as consumer:
        first = take(consumer, 50)
        consumer.ack(first)
        consumer.commit()
        pair.wait_copied()
        pair.master.kill_all()
        # Whoever has its queues goes on with the slave, and commits when there is a master.
        rest = take(consumer, 150)
        assert bodies(first + rest) == list(range(200))
        consumer.ack(rest)
        with pytest.raises(CometError):
            consumer.commit()
        with Consumer(pair.names, None, transport="zmq") as alone:
            alone.assign("orders")
            assert bodies(take(alone, 200)) == list(range(200))
        assert pair.slave.close() == 0
        pair.slave = pair.start("slave", brokerRole="ASYNC_MASTER", brokerId=0)
        send(pair, range(200, 250))
        assert bodies(take(consumer, 50)) == list(range(200, 250))
    with Consumer(pair.names, "g", "orders", transport="zmq") as again:
        assert not [each for each in again.poll(timeout_s=1) if int(each.body) < 200]


def test_who_waits_for_a_slave_is_told_that_there_is_none(tmp_path: Path) -> None:
    with ExitStack() as stack, name_server() as names:
        pair = Pair(tmp_path, names, stack, "SYNC_MASTER")
        until(lambda: connected(pair), "the slave does not come")
        send(pair, range(20))
        end = pair.master.counter(Counter.WROTE)
        assert pair.slave.counter(Counter.WROTE) >= end  # it was acknowledged: the slave has it
        pair.slave.kill_all()
        until(lambda: not connected(pair), "the slave is still there")
        with Producer(names, timeout_s=patient(30)) as producer:
            receipt = producer.send("orders", b"alone").wait()
        assert receipt.status == SLAVE_NOT_AVAILABLE
        pair.slave = pair.start("slave", **pair.slave.settings)
        until(lambda: connected(pair), "the slave does not come back")
        send(pair, range(20, 40))
        pair.wait_copied()
