"""Beside a broker of RocketMQ with its own Java client, in turns: commits, retries, handlers, pops;
handlers beside NATS and Redis, too.

Canonical load: ASYNC_FLUSH on both sides, topics of 8 queues, backlogs of 128-byte bodies that are
there before the clock starts, one client process, 20 handlers at a time, each given one message.
All brokers run all the time. RocketMQ's client is in each turn a new JVM, which first does the
same with fewer messages while no clock runs; its settings are in `cometmq.bench.peers.rocketmq`.
What counts is the ratio of the medians. CPU time is that of the client and of all server processes;
on a machine with other work it says more than rates, where many threads have a larger share of the
processors than few.

- Commits: 64 transactions in flight, of 100 bytes, whose local part does nothing. Theirs are 64
  threads with one TransactionMQProducer, until the last call has returned. It does not wait until
  the broker has answered a commit, ours does; that all are in their topic is seen afterwards.
- Retries: each message fails once, and comes again by the schedule after a second, which is the
  shortest delay of both. From the first message's first handler to the last one's second one, less
  that second. The retry topic of RocketMQ's group is there before: to the first member of a new
  group it is known only after up to 20 s.
- Handlers that do nothing, from the first one's call to the last one's. RocketMQ's are a listener
  of DefaultMQPushConsumer with 20 threads. redis-py reads by XREADGROUP, up to 500 of each stream,
  and acknowledges what has come together by XACK, in one pipeline. nats-py fetches 500 from a pull
  consumer, or has a callback of a push consumer; it acknowledges each message, and waits for no
  answer. Those two call the handler in the thread that reads, which costs less than 20 threads or
  tasks would; what they are set to is in `cometmq.bench.peers`.
- Pops: the same in a group without queues, where each message is acknowledged by itself. RocketMQ
  has a push consumer of a group whose mode at the broker is POP: an acknowledgement is a request
  of its own, whose answer the client does not wait for.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import jvm
import pytest
from benchmarks import Report
from interop import peers
from loads import BODY, DELAY_S, by_pops, by_tasks, by_threads, commit_all, fail_each_once
from patience import patient

from cometmq import Broker
from cometmq.bench.crew import Crew, cpu_seconds
from cometmq.bench.systems import Durability, System
from cometmq.bench.worker import Job

pytestmark = [pytest.mark.slow, pytest.mark.jvm, pytest.mark.timeout(3_600)]

QUEUES: Final = 8
IN_FLIGHT: Final = 64
ROUNDS: Final = 5  # of --full
FEW: Final = 640  # messages of RocketMQ in the small form
WITHOUT_A_WORD_S: Final = patient(60.0)  # a worker reports its progress each second
_groups = (f"turn-{number}" for number in itertools.count())


class Turn(NamedTuple):
    rate: float  # messages/s
    cpu_us: float  # a message, of client and servers


def median(turns: Iterable[Turn]) -> Turn:
    return Turn(*map(statistics.median, zip(*turns, strict=True)))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """The first delay levels are a second, as the first one of RocketMQ is."""
    settings = {"messageDelayLevel": "1s 1s 1s 1s"}
    with Broker(tmp_path_factory.mktemp("ours") / "store", settings=settings) as running:
        yield running


class Theirs:
    """A broker of another maker, and what a client of its own does there."""

    def __init__(self, system: System, folder: Path) -> None:
        self._system, self._folder = system, folder
        self._backlogs: set[str] = set()

    def handle(self, count: int, **options: Any) -> Turn:
        """Handlers of a client in Python, in a new group.

        Args:
            options: of the client.
        """
        topic, servers = self._topic("handlers", count), self._system.processes()
        before = cpu_seconds(servers)
        done = self._work(
            self._system.clients[0], role="handle", topics=[topic], queues=QUEUES,
            group=next(_groups), expect=count, options={"ack": True, **options},
        )  # fmt: skip
        assert done["messages"] == count
        cpu_s = done["cpu_s"] + cpu_seconds(servers) - before
        return Turn(count / done["seconds"], cpu_s / count * 1e6)

    def turn(self, mode: str, count: int, warm_up: int, fixed_s: float = 0.0) -> Turn:
        """RocketMQ's, in a new group.

        Args:
            mode: of RocketSemantics.
            warm_up: as many come before those that are measured.
            fixed_s: is taken off the time.
        """
        group, topics = next(_groups), [self._topic(mode, each) for each in (warm_up, count)]
        if mode == "retries":
            for topic in topics:
                # RocketSemantics has a group for each topic.
                self._system.create(f"%RETRY%{group}-of-{topic}", 1)
        size = len(BODY) if mode == "transactions" else 128
        done = self._work(
            "semantics", role="semantics", mode=mode, topics=topics, group=group, messages=count,
            size=size, in_flight=IN_FLIGHT, warmup=warm_up,
            options={"servers": self._system.processes()},
        )  # fmt: skip
        assert done["messages"] == count
        return Turn(count / (done["seconds"] - fixed_s), done["cpu_s"] / count * 1e6)

    def _topic(self, mode: str, count: int) -> str:
        """One of so many messages; for transactions an empty one."""
        topic = "committed" if mode == "transactions" else f"backlog-{count}"
        if topic not in self._backlogs:
            self._backlogs.add(topic)
            self._system.create(topic, QUEUES)
            if mode != "transactions" and count:
                sent = self._work(
                    self._system.clients[0], role="produce", mode="batch", topics=[topic],
                    queues=QUEUES, messages=count, options={"spread": True},
                )  # fmt: skip
                assert (sent["acked"], sent["failed"]) == (count, 0)
        return topic

    def _work(self, client: str, **given: Any) -> dict[str, Any]:
        with Crew(self._folder) as crew:
            job = Job(endpoint=self._system.endpoint(), **given)
            worker = crew.start(self._system.command(client), job)
            worker.wait_ready()
            worker.go()
            return worker.result(WITHOUT_A_WORD_S)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, full: bool) -> Iterator[Theirs]:
    system: Any = peers.require("rocketmq")
    with pytest.MonkeyPatch.context() as patch:
        if not full:  # JVMs that are not here to be fast
            patch.setenv("JAVA_TOOL_OPTIONS", " ".join(jvm.QUICK))
            system.settings.update(peers.ROCKETMQ_IN_SHORT)
        with serving(system, tmp_path_factory) as theirs:
            yield theirs


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theirs]:
    with serving(peers.require("nats"), tmp_path_factory) as theirs:
        yield theirs


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theirs]:
    with serving(peers.require("redis"), tmp_path_factory) as theirs:
        yield theirs


@contextmanager
def serving(system: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theirs]:
    folder = tmp_path_factory.mktemp(system.name)
    try:
        system.start(folder / "broker", Durability.PAGE_CACHE)
        yield Theirs(system, folder)
    finally:
        system.end()


def backlog(broker: Broker, topic: str, count: int) -> None:
    bodies = [random.Random(number).randbytes(128) for number in range(1_000)]
    with broker.producer() as producer:
        producer.send_many(topic, bodies * (count // 1_000))


def ours(broker: Broker, count: int, rate: Callable[[], float]) -> Callable[[], Turn]:
    """Turns of work with so many messages. The client is this process."""

    def cpu_s() -> float:
        return time.process_time() + cpu_seconds([broker.pid])

    def turn() -> Turn:
        before = cpu_s()
        return Turn(rate(), (cpu_s() - before) / count * 1e6)

    return turn


def medians(full: bool, *sides: Callable[[], Turn]) -> list[Turn]:
    """Of each side's turns: a round is every side once."""
    rounds = [[turn() for turn in sides] for _ in range(ROUNDS if full else 1)]
    return list(map(median, zip(*rounds, strict=True)))


def tell(report: Report, what: str, own: Turn, rival: Turn) -> None:
    tell_all(report, what, {"ours": own}, {"RocketMQ": rival})


def tell_all(
    report: Report, what: str, own: Mapping[str, Turn], rivals: Mapping[str, Turn]
) -> None:
    """By who it is."""
    every = {**own, **rivals}
    for name, turn in every.items():
        report(f"{what}: {name}", turn.rate / 1e3, "k/s")
    for name, turn in own.items():
        for rival in rivals:
            report(f"{what}: {name} / {rival}", turn.rate / rivals[rival].rate, "times")
    for name, turn in every.items():
        report(f"{what}: {name}", turn.cpu_us, "us of CPU")


def test_transactions(broker: Broker, theirs: Theirs, full: bool, report: Report) -> None:
    each = 1_600 if full else 10
    own_count = IN_FLIGHT * each

    async def commit() -> float:
        async with broker.async_producer(name="bench") as producer:
            await commit_all(
                producer, "committed", IN_FLIGHT, 1
            )  # theirs is connected by then, too
            began = time.perf_counter()
            await commit_all(producer, "committed", IN_FLIGHT, each)
            return own_count / (time.perf_counter() - began)

    def rate() -> float:
        return asyncio.run(commit())

    count, warm_up = (50_000, 20_000) if full else (FEW, 0)
    own, rival = medians(
        full,
        ours(broker, own_count, rate),
        lambda: theirs.turn("transactions", count, warm_up),
    )
    tell(report, "commits, 64 in flight", own, rival)
    if full:
        assert own.rate >= max(30_000, 10 * rival.rate)


def test_retries(broker: Broker, theirs: Theirs, full: bool, report: Report) -> None:
    failing = 300_000 if full else 2_000
    backlog(broker, "failing", failing)

    def rate() -> float:
        return fail_each_once(broker, next(_groups), "failing", failing, raises=False)

    count, warm_up = (40_000, 10_000) if full else (FEW, 0)
    own, rival = medians(
        full,
        ours(broker, failing, rate),
        lambda: theirs.turn("retries", count, warm_up, DELAY_S),
    )
    tell(report, "retries", own, rival)
    if full:
        assert own.rate >= max(50_000, 5 * rival.rate)


@pytest.fixture(scope="module")
def handled(broker: Broker, full: bool) -> int:
    """How many messages are in the topic of this name."""
    count = 400_000 if full else 10_000
    backlog(broker, "handled", count)
    return count


def test_handlers(
    broker: Broker,
    theirs: Theirs,
    nats: Theirs,
    redis: Theirs,
    handled: int,
    full: bool,
    report: Report,
) -> None:
    """As many messages on all sides, but for RocketMQ in the small form."""

    def threads() -> float:
        return by_threads(broker, next(_groups), "handled", handled)

    def tasks() -> float:
        return by_tasks(broker, next(_groups), "handled", handled)

    count, warm_up = (handled, 50_000) if full else (FEW, 0)
    of_threads, of_tasks, *others = medians(
        full,
        ours(broker, handled, threads),
        ours(broker, handled, tasks),
        lambda: theirs.turn("handlers", count, warm_up),
        lambda: nats.handle(handled),
        lambda: nats.handle(handled, pushed=True),
        lambda: redis.handle(handled),
    )
    rivals = dict(zip(("RocketMQ", "NATS", "NATS, pushed", "Redis"), others, strict=True))
    tell_all(report, "handlers", {"ours, threads": of_threads, "ours, tasks": of_tasks}, rivals)
    if full:
        assert of_threads.rate >= 400_000
        assert of_tasks.rate >= 250_000


def test_pops(broker: Broker, theirs: Theirs, handled: int, full: bool, report: Report) -> None:
    """The last: RocketMQ's broker looks at what was popped for another minute."""

    def rate() -> float:
        return by_pops(broker, next(_groups), "handled", handled)

    count, warm_up = (60_000, 20_000) if full else (FEW, 0)
    own, rival = medians(
        full,
        ours(broker, handled, rate),
        lambda: theirs.turn("pops", count, warm_up),
    )
    tell(report, "pops, each acknowledged", own, rival)
    if full:
        assert own.rate >= max(200_000, 3 * rival.rate)
