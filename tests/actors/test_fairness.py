"""An actor that has work of its own hears its sockets and its timers all the same.

Each role is pinged while it is under its heaviest load, and so is, in turns, one that has nothing
to do: what the machine itself is late by, both are late by.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fairness_child
import psutil
import pytest
from family import MARK, RUN, RunningBroker, encode_batch, left_behind
from patience import patient
from waiting import still_there

from cometmq.actors.launch.addresses import address_of
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol.commands import (
    Command,
    CommitOffsets,
    CreateTopic,
    DeleteSegments,
    DescribeQueues,
    EnsureTopic,
    FetchOffsets,
    GetRoute,
    GetStatistics,
    JoinGroup,
    ListTopics,
    Ping,
    PullMessages,
    QueueKey,
    QueueOffset,
    Section,
    SendMessages,
    Statistics,
    Subscription,
    TopicInfo,
)
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel

WAIT_S = patient(30)
PINGS = 100
LATE_MAX_S = 0.1
ROUNDS = 4  # of pings, until one shows it
IDLE = "broker"  # the supervisor: a ping of it shows what the machine itself is late by


class Busy(ServiceActor):
    """Has always something to do, as it finds out when it has done something."""

    role = "busy"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = 0
        self.ticks = 0
        self.rang = 0

    def on_start(self) -> None:
        self.every(0.01, self._tick)
        self._work()

    def _work(self) -> None:
        self.steps += 1
        self.call_soon(self._work)

    def _tick(self) -> None:
        self.ticks += 1

    def on_doorbell(self) -> None:
        self.rang += 1


@contextlib.contextmanager
def running(kind: type[ServiceActor]) -> Iterator[Any]:
    reference = kind.start(bind=[("tcp://127.0.0.1:*", False)])
    actor = reference._actor_weakref()
    assert isinstance(actor, kind)
    try:
        yield actor
    finally:
        reference.stop()


def test_who_posts_work_to_himself_hears_his_socket_and_his_timers() -> None:
    with running(Busy) as busy, Channel(busy.addresses[0]) as line:
        for _ in range(20):
            before = busy.steps, busy.ticks
            line.ask(Ping(), timeout_s=WAIT_S)
            assert busy.steps > before[0]
        seen, deadline = busy.ticks, time.monotonic() + WAIT_S
        while busy.ticks < seen + 5:
            assert time.monotonic() < deadline, "its timer does not run"
            time.sleep(0.01)


class Gated(ServiceActor):
    """Goes on with one command each time that it is let."""

    role = "gated"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Semaphore(0)
        self.passed = 0

    def on_list_topics(self, _command: ListTopics, _request: Request) -> Command:
        self.gate.acquire()
        self.passed += 1
        return Ping()


@pytest.mark.parametrize("comes", ["with them", "behind them"])
def test_the_family_does_not_wait_behind_all_that_clients_have_sent(
    comes: str, tmp_path: Path
) -> None:
    """200 commands are drained at once: who is of the family is heard between them.

    Args:
        comes: when the family asks: before most of them are drained, if all goes as usual.
    """
    inside = f"ipc://{tmp_path}/inside"
    reference = Gated.start(bind=[(inside, True), ("tcp://127.0.0.1:*", False)])
    actor = reference._actor_weakref()
    assert isinstance(actor, Gated)
    try:
        with Channel(actor.addresses[1]) as client, Channel(inside) as family:
            family.ask(Ping(), timeout_s=WAIT_S)
            asked = [client.request(ListTopics()) for _ in range(200)]
            if comes == "behind them":
                actor.gate.release()
                assert client.wait(asked[0], WAIT_S)
            let, deadline = actor.passed, time.monotonic() + WAIT_S
            heard = family.request(Ping())
            while not family.wait(heard, 0.05, keep=True):
                assert time.monotonic() < deadline
                if actor.passed == let:
                    let += 1
                    actor.gate.release()
            assert let < len(asked) / 2, "it waited for all of them"
            actor.gate.release(len(asked))
            assert all(client.wait(pending, WAIT_S) for pending in asked)
    finally:
        actor.gate.release(200)
        reference.stop()


# --- a whole broker -------------------------------------------------------------------------------


@dataclass
class Pings:
    """How long answers took, in seconds."""

    loaded: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    def in_time(self, role: str) -> bool:
        late, control = p99(self.loaded), p99(self.idle)
        print(
            f"{role}: p50 {p50(self.loaded) * 1000:.1f} p99 {late * 1000:.1f} ms; "
            f"idle: p50 {p50(self.idle) * 1000:.1f} p99 {control * 1000:.1f} ms"
        )
        return late < LATE_MAX_S + control


class Delays:
    """How long a process's threads have wanted to run, and the machine had no processor for them:
    what a ping was late by for that reason nobody can help."""

    def __init__(self, token: str, role: str) -> None:
        with Channel(address_of(token, IDLE), IDLE) as line:
            answer, _ = line.ask(GetStatistics(), timeout_s=WAIT_S)
        assert isinstance(answer, Statistics)
        self._tasks = Path(f"/proc/{answer.values[f'pid.{role}']}/task")

    def seconds(self) -> float:
        total = 0
        for task in self._tasks.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends
                total += int((task / "schedstat").read_text().split()[1])
        return total / 1e9


def p50(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]


def p99(times: Sequence[float]) -> float:
    return sorted(times)[len(times) * 99 // 100 - 1]


def ping(token: str, role: str, is_still_loaded: Callable[[], bool], count: int = PINGS) -> Pings:
    """Ping a role that is under load, and one that is not, in turns."""
    found = Pings()
    delays = Delays(token, role)
    with (
        Channel(address_of(token, role), role) as loaded,
        Channel(address_of(token, IDLE), IDLE) as idle,
    ):
        for line in (loaded, idle):
            line.ask(Ping(), timeout_s=WAIT_S)
        for _ in range(count):
            for line, times in ((loaded, found.loaded), (idle, found.idle)):
                delayed_s, began = delays.seconds(), time.monotonic()
                line.ask(Ping(), timeout_s=WAIT_S)
                took_s = time.monotonic() - began
                if line is loaded:
                    took_s = max(0.0, took_s - (delays.seconds() - delayed_s))
                times.append(took_s)
            assert is_still_loaded(), "the load has ended"
            time.sleep(0.002)
    return found


def check_heard(token: str, role: str, is_still_loaded: Callable[[], bool]) -> None:
    """A role under load is heard in time. Who is not heard by its shape is not in any round; what
    the disk or another process did to one round is not done to all."""
    assert any(ping(token, role, is_still_loaded).in_time(role) for _ in range(ROUNDS)), role


class Background:
    """Threads that each ask again and again; over at the end of the block."""

    def __init__(self, *steps: Callable[[], Callable[[int], object]]) -> None:
        """Each makes, in its thread, what is then called with 0, 1, 2 ..."""
        self._over = threading.Event()
        self.failed: list[BaseException] = []
        self.rounds = 0
        self._threads = [threading.Thread(target=self._run, args=(step,)) for step in steps]

    def _run(self, make: Callable[[], Callable[[int], object]]) -> None:
        try:
            step = make()
            for number in itertools.count():
                if self._over.is_set():
                    return
                step(number)
                self.rounds += 1
        except BaseException as error:
            self.failed.append(error)

    def goes_on(self) -> bool:
        return not self.failed

    def __enter__(self) -> Background:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        if self.failed:
            raise self.failed[0]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextlib.contextmanager
def busy_service(store: Path) -> Iterator[tuple[str, Callable[[], bool]]]:
    """A service that appends without a pause; the family's token, and whether it lives."""
    child = subprocess.Popen(
        [sys.executable, fairness_child.__file__, str(store)],
        stdout=subprocess.PIPE,
        text=True,
        env=fairness_child.environment({MARK: f"{RUN}/service"}),
    )
    assert child.stdout is not None
    try:
        token = child.stdout.readline().strip()
        assert token, "the service did not start"
        yield token, lambda: child.poll() is None
    finally:
        family = left_behind(f"{RUN}/service")  # it has more to finish than is worth waiting for
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        child.wait(WAIT_S)
        child.stdout.close()
        assert not still_there([process.pid for process in family], WAIT_S)


@pytest.mark.slow
@pytest.mark.alone
def test_beside_a_service_that_appends_without_a_pause(store: Path) -> None:
    roles = ("dispatcher", "commitlog", "flush", "allocator", "cleaner", "reader-0")
    with busy_service(store) as (token, is_still_loaded):
        for role in roles:
            check_heard(token, role, is_still_loaded)


@pytest.fixture
def broker(store: Path) -> Iterator[RunningBroker]:
    with RunningBroker(store, {"mappedFileSizeCommitLog": 16 << 20}) as running_broker:
        yield running_broker
        running_broker.kill_all()  # it has more to finish than is worth waiting for


def sender(broker: RunningBroker, topic: str, count: int, body: bytes) -> Any:
    """Batch after batch, eight under way."""

    def make() -> Callable[[int], object]:
        line = broker.channel(broker.endpoints.commitlog)
        batch = encode_batch([body] * count)
        command = SendMessages([Section(topic, 0, count)], 0)
        under_way = [line.request(command, [batch]) for _ in range(8)]

        def step(number: int) -> None:
            at = number % len(under_way)
            assert line.wait(under_way[at], WAIT_S)
            under_way[at] = line.request(command, [batch])

        return step

    return make


@pytest.mark.slow
@pytest.mark.alone
def test_the_writer_under_sends(broker: RunningBroker) -> None:
    broker.create_topic("busy", 1)
    sends = [sender(broker, "busy", 200, b"x" * 1000) for _ in range(3)]
    with Background(*sends) as load:
        for role in ("commitlog", "allocator", "flush", "dispatcher"):
            check_heard(broker.ready.token, role, load.goes_on)


def asker(broker: RunningBroker, endpoint: str, command: Callable[[int], Command]) -> Any:
    """Question after question, 32 under way. What is refused is no matter."""

    def make() -> Callable[[int], object]:
        line = broker.channel(endpoint)
        under_way = [line.request(command(number)) for number in range(32)]

        def step(number: int) -> None:
            at = number % len(under_way)
            assert line.wait(under_way[at], WAIT_S)
            under_way[at] = line.request(command(number))

        return step

    return make


@pytest.mark.slow
@pytest.mark.alone
def test_the_reader_with_drains_and_held_pulls(broker: RunningBroker) -> None:
    """Large answers, filters that match nothing, and 2,000 pulls that every message wakes."""
    broker.create_topic("large", 1)
    broker.create_topic("news", 1)
    for _ in range(20):
        broker.send("large", 0, [b"x" * 60_000] * 16)
    reader = broker.endpoints.readers[0]
    waiting = broker.channel(reader)
    held = PullMessages("news", 0, 1 << 40, suspend_ms=60_000, tags="nothing")
    for number in range(2_000):
        waiting.request(PullMessages("news", 0, number, suspend_ms=60_000, tags=held.tags))
    large = asker(broker, reader, lambda _: PullMessages("large", 0, 0, 10_000, 4 << 20))
    queues = [QueueKey("large", 0)] * 1_000
    questions = asker(broker, reader, lambda _: DescribeQueues(queues))
    news = sender(broker, "news", 1, b"news")
    with Background(large, questions, news) as load:
        check_heard(broker.ready.token, "reader-0", load.goes_on)


@pytest.mark.slow
@pytest.mark.alone
def test_the_cleaner_that_deletes(broker: RunningBroker) -> None:
    broker.create_topic("busy", 1)
    coordinator = broker.endpoints.coordinator

    def deleter() -> Callable[[int], object]:
        line = broker.channel(coordinator)

        def step(_number: int) -> None:
            for segment in sorted((broker.store / "commitlog").iterdir())[:-3]:
                with contextlib.suppress(FileNotFoundError):
                    os.utime(segment, (0, 0))
            line.ask(DeleteSegments(), timeout_s=WAIT_S)

        return step

    with Background(sender(broker, "busy", 200, b"x" * 1000), deleter) as load:
        check_heard(broker.ready.token, "cleaner", load.goes_on)


@pytest.mark.slow
@pytest.mark.alone
def test_the_coordinator_and_the_name_server(broker: RunningBroker) -> None:
    """Heartbeats, commits and topics of many groups."""
    broker.create_topic("shared", 64)
    coordinator = broker.endpoints.coordinator
    keys = [QueueKey("shared", number) for number in range(64)]

    def commit(number: int) -> Command:
        offsets = [QueueOffset(key.topic, key.queue_id, number) for key in keys]
        return CommitOffsets(f"group-{number % 50}", offsets)

    def join(number: int) -> Command:
        subscriptions = [Subscription("shared")]
        return JoinGroup(f"group-{number % 50}", f"member-{number % 20}", subscriptions)

    def topics() -> Callable[[int], object]:
        line = broker.channel(coordinator)

        def step(number: int) -> None:
            with contextlib.suppress(CometError):
                line.ask(CreateTopic(TopicInfo(f"topic-{number % 100}", 4, 4)), timeout_s=WAIT_S)

        return step

    load = [
        asker(broker, coordinator, commit),
        asker(broker, coordinator, join),
        asker(broker, coordinator, lambda n: FetchOffsets(f"group-{n % 50}", keys)),
        asker(broker, coordinator, lambda _: EnsureTopic("shared")),
        asker(broker, broker.ready.name_server, lambda _: GetRoute("shared")),
        topics,
    ]
    with Background(*load) as running_load:
        for role in ("coordinator", "namesrv"):
            check_heard(broker.ready.token, role, running_load.goes_on)
