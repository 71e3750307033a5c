"""Commits of consumer offsets beside a large table: how many a second, how long one takes, and how
long a start with them takes.

Small with the tests; with --full 1,000,000 offsets (10,000 groups in 100 queues). Clients are
processes of their own that keep some commits under way; single ones have one offset a command.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import zmq
from benchmarks import Report
from patience import patient

from cometmq import Broker
from cometmq.client import Admin
from cometmq.protocol import frames
from cometmq.protocol.commands import (
    CommitOffsets,
    Done,
    GetLine,
    GetRoute,
    GroupShare,
    JoinGroup,
    LineAddress,
    QueueOffset,
    Subscription,
    TopicRoute,
)
from cometmq.protocol.configs import SubscriptionGroupConfig
from cometmq.protocol.wire.channel import Channel
from cometmq.protocol.wire.line import abstract
from cometmq.protocol.wire.stream import StreamReader, pack_lengths
from cometmq.shm.os.processes import boot_id
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.tables import ConsumerOffsetTable, SubscriptionGroupTable

QUEUES = 100
CLIENTS = 4
UNDER_WAY = 128  # by each client; a line holds some 270 answers that nobody has read, ...
LARGE_UNDER_WAY = 16  # ... and some 200 KB of commits
INTERVAL_MS = 5_000
SECONDS = 3
FIRST = 10_000_000  # offset of a load; the next one begins so much higher
MEMBER_GROUPS = 1_000  # a connection has no more members
MEMBER = "worker-1"
DONE = frames.pack(1, Done())[9:]  # behind the request id


def group_name(number: int) -> str:
    return f"group-{number:05d}"


@dataclass(frozen=True)
class Load:
    """What the clients commit.

    Args:
        by: the endpoint, or the name of the coordinator's lines.
        groups: as many that they commit for, in turns.
        offsets: in a commit.
        members: each group has a member, which owns the queues.
    """

    endpoint: str
    by: str
    groups: int
    seconds: float
    first: int  # offset
    offsets: int = 1
    members: bool = False


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_commits(tmp_path: Path, full: bool, report: Report) -> None:
    groups = 10_000 if full else 48
    seconds = 3 * SECONDS if full else 0.2
    store = tmp_path / "store"
    settings = {
        "flushConsumerOffsetInterval": INTERVAL_MS if full else 200,
        "consumerSessionTimeout": 600_000,  # members say nothing while their commits are made
    }
    lay_down(store, groups)
    began = time.perf_counter()
    with Broker(store, settings=settings) as broker:
        report(f"start with {groups * QUEUES} offsets", time.perf_counter() - began, "s")
        endpoint = coordinator_of(broker.name_server)
        line = line_of(endpoint)
        wait_ms = latencies_ms(endpoint, groups, seconds)
        report_latencies("one commit at a time", wait_ms, report)
        first = FIRST
        for what, by, count, some, members in (
            ("single commits", line, 1, groups, False),
            ("single commits by ZeroMQ", endpoint, 1, groups, False),
            (f"offsets, {QUEUES} in a commit", line, QUEUES, groups, False),
            ("single commits of members", line, 1, min(groups, MEMBER_GROUPS), True),
        ):
            measure(broker, Load(endpoint, by, some, seconds, first, count, members), what, report)
            first += FIRST
    began = time.perf_counter()
    with Broker(store, settings=settings):
        report("start after them", time.perf_counter() - began, "s")


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_a_commit_costs_the_same_beside_many(tmp_path: Path, full: bool, report: Report) -> None:
    """With a hundred times as many groups, and as many queues in each; in turns."""
    counts = (100, 10_000) if full else (12, 48)
    used: dict[int, list[float]] = {groups: [] for groups in counts}
    for groups in counts:
        lay_down(tmp_path / str(groups), groups)
    for turn in range(5 if full else 1):
        for groups in counts:
            with Broker(tmp_path / str(groups)) as broker:
                endpoint = coordinator_of(broker.name_server)
                line = line_of(endpoint)
                load = Load(endpoint, line, groups, SECONDS if full else 0.1, FIRST * (turn + 1))
                used[groups].append(measure(broker, load, "", None)["cmq-coordinator"])
    few, many = (statistics.median(used[groups]) for groups in counts)
    report(f"a commit beside {counts[0] * QUEUES} offsets", few, "us")
    report(f"a commit beside {counts[1] * QUEUES} offsets", many, "us")
    report("of these against those", many / few, "times")


def lay_down(store: Path, groups: int) -> None:
    """A store with as many groups, each of which is somewhere in each queue of a topic."""
    with Broker(store) as broker, Admin(broker.name_server) as admin:
        admin.create_topic("orders", QUEUES)
    table = ConsumerOffsetTable(
        offset_table={
            f"orders@{group_name(number)}": dict.fromkeys(range(QUEUES), 0)
            for number in range(groups)
        }
    )
    file = ConfigFile(store / "config" / "consumerOffset.json", ConsumerOffsetTable)
    file.store(table, durable=True)
    known = SubscriptionGroupTable(
        subscription_group_table={
            group_name(number): SubscriptionGroupConfig(group_name=group_name(number))
            for number in range(groups)
        }
    )
    ConfigFile(store / "config" / "subscriptionGroup.json", SubscriptionGroupTable).store(
        known, durable=True
    )


def measure(broker: Broker, load: Load, what: str, report: Report | None) -> dict[str, float]:
    """Processor time of each process for an offset, in microseconds."""
    clients = Clients(load)
    before = used_s(broker)
    count, rate = clients.run()
    used = {name: (used - before[name]) / count * 1e6 for name, used in used_s(broker).items()}
    if report is not None:
        report(what, rate, "1/s")
        for name, each in used.items():
            if each > 0.01 * 1e6 / rate:
                report(f"  of which {name}", each, "us each")
    return used


def coordinator_of(name_server: str) -> str:
    with Channel(name_server, "the name server") as channel:
        answer, _ = channel.ask(GetRoute("orders"), timeout_s=patient(10))
    assert isinstance(answer, TopicRoute)
    return answer.brokers[0].endpoints.coordinator


def line_of(endpoint: str) -> str:
    """Where the coordinator's lines are, as a client of this machine is told."""
    with Channel(endpoint, "the coordinator") as channel:
        answer, _ = channel.ask(GetLine(boot_id(), is_stream=True), timeout_s=patient(10))
    assert isinstance(answer, LineAddress)
    return answer.name


def report_latencies(what: str, wait_ms: list[float], report: Report) -> None:
    wait_ms.sort()
    for share in (0.5, 0.99, 0.999):
        report(f"{what}, p{100 * share:g}", wait_ms[int(share * len(wait_ms))], "ms")


def used_s(broker: Broker) -> dict[str, float]:
    """Processor time of the broker's processes."""
    children = psutil.Process(broker.pid).children(recursive=True)
    return {child.name(): sum(child.cpu_times()[:2]) for child in children}


def command(
    groups: int,
    number: int,
    offset: int,
    offsets: int = 1,
    client: int = 0,
    epochs: dict[str, list[int]] | None = None,
) -> CommitOffsets:
    """Every commit moves something on, and each client has groups of its own.

    Args:
        epochs: of the members' queues, by group; None: there are no members.
    """
    group = group_name((number * 7919 * CLIENTS + client) % groups)
    first = number % QUEUES if offsets == 1 else 0
    queues = range(first, first + offsets)
    if epochs is None:
        return CommitOffsets(group, [QueueOffset("orders", each, offset) for each in queues])
    owned = epochs[group]
    wanted = [QueueOffset("orders", each, offset, owned[each]) for each in queues]
    return CommitOffsets(group, wanted, MEMBER)


def join(endpoint: str, groups: Iterable[str]) -> dict[str, list[int]]:
    """Be a member of each, and own all queues: group -> their epochs."""
    epochs = {}
    with Channel(endpoint, "the coordinator") as channel:
        for group in groups:
            command = JoinGroup(group, MEMBER, [Subscription("orders", "*")], [], -1, 0)
            share, _ = channel.ask(command, timeout_s=patient(60))
            assert isinstance(share, GroupShare)
            assert len(share.queues) == QUEUES
            epochs[group] = share.epochs  # in the order of the queues
    return epochs


def latencies_ms(endpoint: str, groups: int, seconds: float) -> list[float]:
    """Of one after the other, also while snapshots are written."""
    waits = []
    until = time.monotonic() + seconds
    number = 1
    with Channel(
        endpoint, "the coordinator", line_request=GetLine(boot_id(), is_stream=True)
    ) as channel:
        channel.open_line(10)
        while time.monotonic() < until:
            began = time.perf_counter()
            channel.ask(command(groups, number, number), timeout_s=patient(10))
            waits.append((time.perf_counter() - began) * 1000)
            number += 1
            time.sleep(0.0005)  # the pace
    return waits


class Clients:
    """Processes that are ready to commit."""

    def __init__(self, load: Load) -> None:
        fork = multiprocessing.get_context("spawn")
        self._pipes, self._children = [], []
        for number in range(CLIENTS):
            here, there = fork.Pipe()
            child = fork.Process(target=run_client, args=(load, number, there))
            child.start()
            self._pipes.append(here)
            self._children.append(child)
        for pipe in self._pipes:
            pipe.recv()

    def run(self) -> tuple[int, float]:
        """(offsets, offsets a second) of all of them together."""
        for pipe in self._pipes:
            pipe.send("begin")
        results = [pipe.recv() for pipe in self._pipes]
        for child in self._children:
            child.join()
        return sum(count for count, _ in results), sum(count / took for count, took in results)


def run_client(load: Load, client: int, pipe: Connection) -> None:
    """Keep UNDER_WAY commits under way; the commands are made before."""
    epochs = None
    if load.members:
        mine = [group_name(number) for number in range(client, load.groups, CLIENTS)]
        epochs = join(load.endpoint, mine)
    count = int(load.seconds * (100_000 if load.offsets == 1 else 4_000))
    heads = [
        frames.pack(n, command(load.groups, n, load.first + n, load.offsets, client, epochs))
        for n in range(1, count)
    ]
    way: DealerWay | LineWay
    if load.by == load.endpoint:
        way = DealerWay(load.by)
    else:
        way = LineWay(load.by)
        heads = [b"".join(pack_lengths(head, ())) for head in heads]
    pipe.send("ready")
    pipe.recv()
    under_way = UNDER_WAY if load.offsets == 1 else LARGE_UNDER_WAY
    answered, took_s = keep_under_way(way, heads, under_way, load.seconds)
    pipe.send((answered * load.offsets, took_s))


class DealerWay:
    """By ZeroMQ."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(endpoint)

    def send(self, heads: list[bytes]) -> None:
        for head in heads:
            self._socket.send(head)

    def receive(self) -> list[bytes]:
        """At least one answer."""
        answers = [self._socket.recv()]
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            answers.append(self._socket.recv(zmq.NOBLOCK))
        return answers


class LineWay:
    """By a local connection, as many with a call of the system as there are."""

    def __init__(self, name: str) -> None:
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.connect(abstract(name))
        self._reader = StreamReader(self._line)

    def send(self, messages: list[bytes]) -> None:
        self._line.sendall(b"".join(messages))

    def receive(self) -> list[bytes]:
        """At least one answer."""
        while True:
            self._reader.fill(0)
            answers = [head for head, _ in self._reader.messages(sys.maxsize)]
            if answers:
                return answers


def keep_under_way(
    way: DealerWay | LineWay, heads: list[bytes], under_way: int, seconds: float
) -> tuple[int, float]:
    sent = answered = 0
    began = time.monotonic()
    while True:
        if time.monotonic() - began < seconds:
            first = sent % (len(heads) - under_way)
            more = heads[first : first + under_way - (sent - answered)]
            way.send(more)
            sent += len(more)
        if sent == answered:
            return answered, time.monotonic() - began
        for answer in way.receive():
            assert answer[9:] == DONE, frames.unpack(answer)
            answered += 1
