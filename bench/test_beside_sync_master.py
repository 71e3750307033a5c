"""SYNC_MASTER beside RocketMQ's, in turns: a message is acknowledged when a slave has it too.

Canonical load: ASYNC_FLUSH and one real slave on both sides, all on this machine, 128-byte bodies,
a topic of 8 queues, one producing client. RocketMQ has `inSyncReplicas=2`; with its default of 1
its SYNC_MASTER waits for nobody. Its client is DefaultMQProducer in each turn a new JVM, which
first sends as many messages as compile what they pass through.

- Lingering: one call a message, up to 5 ms together; RocketMQ's client sends each by itself with
  1,024 unanswered, the most that its worker here has.
- Batches: `send_many`; RocketMQ's `send(Collection)` of 256, 1,024 of them unanswered.
- One in flight: microseconds of each.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import jvm
import pytest
from benchmarks import Report
from interop import peers
from patience import patient

from cometmq import Broker, Producer
from cometmq.bench.crew import Crew
from cometmq.bench.extra import BenchError
from cometmq.bench.peers.rocketmq import RocketPair
from cometmq.bench.peers.server import free_ports
from cometmq.bench.systems import Durability
from cometmq.bench.worker import Job
from cometmq.protocol.errors import CometError

pytestmark = [pytest.mark.slow, pytest.mark.jvm, pytest.mark.timeout(1_800)]

TOPIC: Final = "replicated"
QUEUES: Final = 8
BODY: Final = random.Random(7).randbytes(128)
ROUNDS: Final = 5  # of --full
WITHOUT_A_WORD_S: Final = patient(60.0)  # a worker reports its progress each second
READY_S: Final = patient(90.0)

Rate = Callable[[str, int], float]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rate]:
    """Messages/s of one way to send so many."""
    folder, port = tmp_path_factory.mktemp("ours"), free_ports(1)
    master = {"brokerRole": "SYNC_MASTER", "haListenPort": port, "brokerName": "ours"}
    at = f"127.0.0.1:{port}"
    slave = {**master, "brokerRole": "SLAVE", "brokerId": 1, "haMasterAddress": at}
    del slave["haListenPort"]
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(folder / "master", settings=master))
        stack.enter_context(Broker(folder / "slave", settings=slave))
        lingering = stack.enter_context(broker.producer(linger_ms=5))
        producer = stack.enter_context(broker.producer())
        _until_the_slave_has_it(producer)

        def send(way: str, count: int) -> None:
            if way == "batch":
                producer.send_many(TOPIC, [BODY] * count)
            elif way == "one_in_flight":
                for _ in range(count):
                    producer.send(TOPIC, BODY)
            else:
                for _ in range(count):
                    lingering.send(TOPIC, BODY)
                lingering.flush()

        def rate(way: str, count: int) -> float:
            began = time.perf_counter()
            send(way, count)
            return count / (time.perf_counter() - began)

        yield rate


def _until_the_slave_has_it(producer: Producer) -> None:
    """Nothing tells a client that a slave is in sync but a message that is acknowledged."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            producer.send(TOPIC, BODY)
        except CometError:
            assert time.monotonic() < deadline, "no slave"
        else:
            return


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, full: bool) -> Iterator[Rate]:
    peers.require("rocketmq")
    system, folder = RocketPair(), tmp_path_factory.mktemp("theirs")

    def send(mode: str, count: int, warm_up: int) -> dict[str, Any]:
        with Crew(folder) as crew:
            job = Job(
                role="produce", mode=mode, endpoint=system.endpoint(), topics=[TOPIC],
                queues=QUEUES, messages=count, warmup=warm_up, options={"spread": True},
            )  # fmt: skip
            worker = crew.start(system.command("java"), job)
            worker.wait_ready()
            worker.go()
            done = worker.result(WITHOUT_A_WORD_S)
        if done["failed"]:
            raise BenchError(f"{done['failed']} of {count} were not acknowledged")
        assert done["acked"] == count
        return done

    def rate(way: str, count: int) -> float:
        return float(count / send(way, count, count // 2)["seconds"])

    with pytest.MonkeyPatch.context() as patch:
        if not full:  # JVMs that are not here to be fast
            patch.setenv("JAVA_TOOL_OPTIONS", " ".join(jvm.QUICK))
            system.settings.update(peers.ROCKETMQ_IN_SHORT)
        try:
            system.start(folder / "brokers", Durability.PAGE_CACHE)
            system.create(TOPIC, QUEUES)
            yield rate
        finally:
            system.end()


WAYS: Final = {  # how many messages of ours and of theirs: in --full, and else
    "async": ((500_000, 200_000), (5_000, 640)),
    "batch": ((1_000_000, 1_000_000), (20_000, 2_560)),
    "one_in_flight": ((2_000, 5_000), (50, 64)),
}


@pytest.mark.parametrize("way", WAYS)
def test_sync_master(way: str, ours: Rate, theirs: Rate, full: bool, report: Report) -> None:
    own_count, count = WAYS[way][0 if full else 1]
    ours(way, own_count)
    rounds = [(ours(way, own_count), theirs(way, count)) for _ in range(ROUNDS if full else 1)]
    own, rival = map(statistics.median, zip(*rounds, strict=True))
    if way == "one_in_flight":
        report(f"{way}: ours", 1e6 / own, "us")
        report(f"{way}: RocketMQ", 1e6 / rival, "us")
    else:
        report(f"{way}: ours", own / 1e3, "k/s")
        report(f"{way}: RocketMQ", rival / 1e3, "k/s")
    report(f"{way}: ratio", own / rival, "times")
