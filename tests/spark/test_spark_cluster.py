"""On a Spark standalone cluster: what is killed there loses no row and doubles none."""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import STEP_S, Cluster, Driver
from family import RunningBroker
from patience import patient
from waiting import is_readable

from cometmq.protocol.commands import GetStatistics, Statistics
from cometmq.protocol.wire.channel import Channel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUEUES = 4
COUNT = 3_000  # messages in each queue
BATCH = 4_000  # in a batch of a stream: two tasks


@pytest.fixture(scope="module")
def cluster(installed_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(installed_python, tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def driver(cluster: Cluster) -> Iterator[Driver]:
    """With two executors; the last test kills it."""
    with cluster.driver() as running:
        yield running


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    folder = tmp_path_factory.mktemp("broker")
    settings = {"brokerName": "broker-a", "mappedFileSizeCommitLog": 16 << 20}
    with RunningBroker(folder / "store", settings) as running:
        yield running
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def produced(broker: RunningBroker) -> Counter[bytes]:
    """What the topic `in` has: each message is another one."""
    broker.create_topic("in", QUEUES)
    bodies = [
        [b"%d %d " % (queue_id, number) + b"x" * 300 for number in range(COUNT)]
        for queue_id in range(QUEUES)
    ]
    for queue_id, each in enumerate(bodies):
        for at in range(0, COUNT, 500):
            broker.send("in", queue_id, each[at : at + 500], tags="t")
        broker.read_queue("in", queue_id, COUNT)
    return Counter(body for each in bodies for body in each)


@pytest.fixture
def out(broker: RunningBroker) -> str:
    name = f"out-{uuid.uuid4().hex[:8]}"
    broker.create_topic(name, QUEUES)
    return name


def arrived(broker: RunningBroker, topic: str) -> Counter[bytes]:
    """All that anyone can read of it, when all that was stored is in its queue."""
    for _ in range(200):
        queues = [broker.read_queue(topic, queue_id) for queue_id in range(QUEUES)]
        found = Counter(message.body for queue in queues for message in queue)
        if found.total() >= QUEUES * COUNT:
            break
    return found


def test_batches(driver: Driver, broker: RunningBroker, produced: Counter[bytes]) -> None:
    """By the files and by the readers; both executors read."""
    common = {"subscribe": "in", "maxMessagesPerPartition": COUNT, "isolation": "dispatched"}
    places = [{"store": str(broker.store)}, {"namesrv": broker.ready.name_server}]
    crc = sum(map(zlib.crc32, produced))
    driver.begin("read", sources=[common | place for place in places])
    for _ in places:
        found = driver.wait_for("read")
        assert sum(part["count"] for part in found) == produced.total()
        assert sum(part["crc"] for part in found) == crc
        assert len({part["executor"] for part in found}) == 2


class Copying:
    """A stream from `in` to another topic, each row once, by drivers one after the other."""

    def __init__(self, broker: RunningBroker, out: str, folder: Path) -> None:
        self.broker = broker
        self._pipe = folder / "held"
        self._held = -1
        address = broker.ready.name_server
        self.told: dict[str, Any] = {
            "source": {
                "namesrv": address, "subscribe": "in", "startingOffsets": "earliest",
                "isolation": "dispatched",
                "maxMessagesPerTrigger": BATCH, "maxMessagesPerPartition": BATCH // 2,
            },
            "sink": {"namesrv": address, "topic": out, "batchBytes": 20_000,
                     "maxInFlightBytes": 60_000},
            "checkpoint": str(folder / "checkpoint"),
            "hold": str(self._pipe), "hold_after": BATCH // 4,
        }  # fmt: skip

    def begin(self, driver: Driver) -> None:
        driver.begin("copy", **self.told)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """The next task that is in mid-write stands still there."""
        os.mkfifo(self._pipe)
        self._held = os.open(self._pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            yield
        finally:
            os.close(self._held)

    def wait_held(self) -> int:
        """Until it does; the pid of its executor."""
        assert is_readable(self._held, STEP_S), "no task has come so far"
        executor = int(os.read(self._held, 20))
        deadline = time.monotonic() + STEP_S
        with Channel(self.broker.address("commitlog")) as line:
            while time.monotonic() < deadline:
                answer, _ = line.ask(GetStatistics(), timeout_s=patient(30))
                assert isinstance(answer, Statistics)
                if answer.values["staged_bytes"]:
                    return executor
        raise AssertionError("the task has not written")


def test_an_executor_is_killed_and_then_the_driver(
    cluster: Cluster,
    driver: Driver,
    broker: RunningBroker,
    produced: Counter[bytes],
    out: str,
    tmp_path: Path,
) -> None:
    """Each in mid-write: another executor does the task once more, another driver goes on from the
    checkpoint."""
    copying = Copying(broker, out, tmp_path)
    with copying.holding():
        copying.begin(driver)
        query = driver.wait_for("started")
        victim = copying.wait_held()
        assert victim in [each.pid for each in cluster.executors()]
        os.kill(victim, signal.SIGKILL)
    with copying.holding():
        assert copying.wait_held() != victim
        driver.kill()
    with cluster.driver(cores=1) as another:
        copying.begin(another)
        assert another.wait_for("started") == query
        another.wait_for("done")
        assert another.end(STEP_S) == 0
    assert arrived(broker, out) == produced
