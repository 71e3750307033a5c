"""What a connection may have in flight is bounded, and so are connections."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from family import RunningBroker
from patience import patient
from waiting import until
from zmtp import RawClient, frame

from cometmq.actors.runtime.listeners.connections import ConnectionLimits
from cometmq.actors.runtime.listeners.zeromq import ZeroMQListener
from cometmq.actors.runtime.meters import values_of
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.cli.stat import Watcher
from cometmq.protocol import frames
from cometmq.protocol.commands import (
    Command,
    Done,
    GetQueueRange,
    ListTopics,
    Ping,
    PullMessages,
)
from cometmq.protocol.wire.channel import Channel
from cometmq.protocol.wire.liveness import HEARTBEAT_MS

WAIT_S = patient(30)
MIB = 1 << 20
GROWTH_MAX = 300 * MIB
PORTS = ("commitlog", "reader-0", "coordinator", "namesrv")


def anonymous_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * resource.getpagesize()


class Growth:
    """How much memory a process takes more than at the beginning of the block."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._before = anonymous_bytes(pid)
        self.most = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, anonymous_bytes(self._pid) - self._before)

    def __enter__(self) -> Growth:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path / "store") as running:
        yield running


def endpoint_of(broker: RunningBroker, role: str) -> str:
    ends = broker.endpoints
    ports = {"commitlog": ends.commitlog, "coordinator": ends.coordinator}
    ports |= {"reader-0": ends.readers[0], "namesrv": broker.ready.name_server}
    return ports[role]


@pytest.mark.parametrize("role", PORTS)
@pytest.mark.slow
def test_a_message_without_end(broker: RunningBroker, role: str) -> None:
    """Its connection is ended, with a line in the log; whoever else is there is served."""
    part = frame(bytes(MIB), more=True)
    pid = broker.pids()[role]
    with (
        RawClient(endpoint_of(broker, role)) as attacker,
        Channel(endpoint_of(broker, role)) as other,
        Growth(pid) as growth,
    ):
        other.ask(Ping(), timeout_s=WAIT_S)

        def flood() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    attacker.socket.sendall(part)

        attack = threading.Thread(target=flood)
        attack.start()
        while attack.is_alive():
            other.ask(Ping(), timeout_s=WAIT_S)
        attack.join()
        other.ask(Ping(), timeout_s=WAIT_S)
    print(f"{role}: grew by {growth.most / MIB:.0f} MiB")
    assert growth.most < GROWTH_MAX
    assert broker.statistics(role)["connections_ended"] == 1
    lines = [line for line in broker.log.splitlines() if "maxConnectionInFlightBytes" in line]
    assert len(lines) == 1
    assert f"127.0.0.1:{attacker.port}" in lines[0]
    assert broker.pids()[role] == pid


@pytest.mark.slow
@pytest.mark.alone  # it measures the reader
def test_answers_that_nobody_receives(broker: RunningBroker) -> None:
    """A thousand pulls of 4 MiB each by a client that reads nothing, and then reads after all."""
    broker.create_topic("large", 1)
    for _ in range(24):
        broker.send("large", 0, [b"x" * 200_000])
    count = 1_000
    pull = PullMessages("large", 0, 0, 10_000, 4 * MIB)
    with (
        RawClient(broker.endpoints.readers[0]) as attacker,
        Growth(broker.pids()["reader-0"]) as growth,
    ):
        for number in range(count):
            attacker.send([frames.pack(number + 1, pull)])
        with Channel(broker.endpoints.readers[0]) as other:
            until(lambda: broker.statistics("reader-0")["pulls_without_room"] > 0)
            for _ in range(20):
                other.ask(GetQueueRange("large", 0), timeout_s=WAIT_S)
        answered = set()
        while len(answered) < count:
            flags, head = attacker.receive_frame()
            answered.add(frames.request_id_of(head))
            while flags & 1:
                flags, _ = attacker.receive_frame()
    print(f"grew by {growth.most / MIB:.0f} MiB")
    assert growth.most < GROWTH_MAX
    assert broker.statistics("reader-0")["connections_ended"] == 0


# --- single actors --------------------------------------------------------------------------------


class Door(ServiceActor):
    role = "door"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def on_list_topics(self, _command: ListTopics, _request: Request) -> Command:
        assert self.may_go_on.wait(WAIT_S)
        return Done()

    def counts(self) -> dict[str, Any]:
        return values_of(self.inbox.statistics())


@contextlib.contextmanager
def door(**limits: int) -> Iterator[Door]:
    bind = [("tcp://127.0.0.1:*", False)]
    reference = Door.start(bind=bind, limits=ConnectionLimits(**limits))
    actor = reference._actor_weakref()
    assert isinstance(actor, Door)
    try:
        yield actor
    finally:
        actor.may_go_on.set()
        reference.stop()


def send_for_ever(client: RawClient) -> None:
    while True:
        client.send([bytes(MIB)])


def test_whole_messages_that_nobody_takes_up() -> None:
    """An actor that is kept from its socket, and a client that goes on sending."""
    with door(in_flight_bytes=32 * MIB) as actor, RawClient(actor.addresses[0]) as attacker:
        actor.may_go_on.clear()
        with Channel(actor.addresses[0]) as other:
            waits = other.request(ListTopics())
            with pytest.raises(ConnectionError):
                send_for_ever(attacker)
            actor.may_go_on.set()
            assert other.wait(waits, WAIT_S)
            waits.result()
        assert actor.counts()["connections_ended"] == 1


def test_what_is_taken_up_is_not_in_flight() -> None:
    """A client that sends for long, and is answered for long, is never ended."""
    with door(in_flight_bytes=32 * MIB) as actor, Channel(actor.addresses[0]) as line:
        body = bytes(4 * MIB)
        for _ in range(100):
            line.ask(Ping(), [body, b"", b"x" * 255, b"y" * 256], timeout_s=WAIT_S)
        (known,) = next(
            each.door
            for each in actor.inbox._listeners.values()
            if isinstance(each, ZeroMQListener) and each.door
        )._known.values()
        # Less what had come before the connection was first looked at; more by the handshake.
        assert known.traffic.handed > (400 - 32) * MIB
        assert -32 * MIB < known.waiting() < 4096
        until(lambda: known.unsent() <= 0)
        assert actor.counts()["connections_ended"] == 0


def test_who_says_nothing_is_sent_away() -> None:
    with door(handshake_ms=300) as actor:
        silent = [RawClient(actor.addresses[0], handshake=False) for _ in range(30)]
        with Channel(actor.addresses[0]) as line:
            line.ask(Ping(), timeout_s=WAIT_S)
            assert all(client.has_ended() for client in silent)
            until(lambda: actor.counts()["handshakes_failed"] == 30)
            line.ask(Ping(), timeout_s=WAIT_S)
        for client in silent:
            client.close()


def test_no_more_connections_than_are_allowed() -> None:
    with door(connections=10) as actor:
        first = [RawClient(actor.addresses[0]) for _ in range(10)]
        until(lambda: actor.counts()["connections"] == 10)
        more = [RawClient(actor.addresses[0], handshake=False) for _ in range(5)]
        assert all(client.has_ended() for client in more)
        until(lambda: actor.counts()["connections_refused"] == 5)
        for client in first:
            client.send([frames.pack(1, Ping())])
            assert frames.request_id_of(client.receive_frame()[1]) == 1
        first.pop().close()
        until(lambda: actor.counts()["connections"] == 9)
        with Channel(actor.addresses[0]) as line:
            line.ask(Ping(), timeout_s=WAIT_S)
        for client in (*first, *more):
            client.close()


@contextlib.contextmanager
def showing_alive(clients: Sequence[RawClient]) -> Iterator[None]:
    """Answer heartbeats of the clients that there are, all the while."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(HEARTBEAT_MS / 1000):
            for client in list(clients):
                client.show_alive()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.alone  # beside others its steps take longer than a silent connection is kept
def test_thousands_of_connections(broker: RunningBroker) -> None:
    """3,000 connections: none is lost, and one more is served as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(3_000, hard - 1_000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 500), hard))
    try:
        many: list[RawClient] = []
        with showing_alive(many):  # it takes longer than a silent client is kept
            for _ in range(count):
                many.append(RawClient(broker.endpoints.readers[0]))
            until(lambda: broker.statistics("reader-0")["connections"] >= count)
            with Channel(broker.endpoints.readers[0]) as line:
                line.ask(Ping(), timeout_s=WAIT_S)
            for client in many:
                client.send([frames.pack(7, Ping())])
            for client in many:
                assert frames.request_id_of(client.receive_frame()[1]) == 7
        for client in many:
            client.close()
        until(lambda: broker.statistics("reader-0")["connections"] <= 2)
        assert broker.statistics("reader-0")["connections_refused"] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.alone  # it measures the reader
def test_a_process_without_descriptors(broker: RunningBroker) -> None:
    """It says so once, does not spin, and serves who is there; then it takes connections again."""
    process = psutil.Process(broker.pids()["reader-0"])
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    endpoint = broker.endpoints.readers[0]
    with Channel(endpoint) as line:
        line.ask(Ping(), timeout_s=WAIT_S)
        until(lambda: broker.statistics("reader-0")["connections"] > 0)  # it is taken in
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds(), before[1]))
        clients = [RawClient(endpoint, handshake=False) for _ in range(50)]
        began, used = time.monotonic(), sum(process.cpu_times()[:2])
        for _ in range(20):
            line.ask(Ping(), timeout_s=WAIT_S)
            time.sleep(0.1)
        seconds = time.monotonic() - began
        share = (sum(process.cpu_times()[:2]) - used) / seconds
        print(f"{share * 100:.0f} % of a core")
        assert share < 0.25
        assert all(client.has_ended() for client in clients)
        line.ask(Ping(), timeout_s=WAIT_S)
        for client in clients:
            client.close()
        process.rlimit(psutil.RLIMIT_NOFILE, before)
        statistics = broker.statistics("reader-0")
        assert statistics["connections_refused"] == 50
        said = [text for text in broker.log.splitlines() if "no connection can be taken in" in text]
        refused = [text for text in broker.log.splitlines() if "a connection is refused" in text]
        assert len(said) + len(refused) >= 1
        with Channel(endpoint) as another:
            another.ask(Ping(), timeout_s=WAIT_S)


def test_stat_shows_what_reached_a_limit(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store", {"maxConnections": 1}) as broker:
        endpoint = broker.endpoints.commitlog
        with RawClient(endpoint), RawClient(endpoint, handshake=False) as refused:
            assert refused.has_ended()
            watcher = Watcher(broker.store)
            try:
                found = watcher.look().as_record(None)["connections"]
            finally:
                watcher.close()
        assert set(found) == {"commitlog", "reader-0", "coordinator", "namesrv"}
        assert found["commitlog"]["connections"] == 1
        assert found["commitlog"]["connections_refused"] == 1
