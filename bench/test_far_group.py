"""A group of three replicas that are far from each other and from its producer, beside a broker
that is as far away: how many round trips a message takes, one in flight.

Each replica is in a network namespace, and each frame between two of them takes 5 ms: beside that,
what three replicas on one machine cost each other is little. A broker alone answers after one round
trip, a group after two at least: a follower has the message before the producer hears of it.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from benchmarks import Report
from far_network import FarNetwork
from fault import network
from fault.group_replica import Replica
from fault.network import HOST, NetworkTrouble
from patience import patient
from ports import free_ports

from cometmq import Producer
from cometmq.actors.coordination.namesrv import NameServerActor
from cometmq.protocol.errors import CometError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES: Final = ("n0", "n1", "n2")
ALONE: Final = "alone"
DELAY_S: Final = 0.005
GROUP: Final = "far"
BODY: Final = b"x" * 128
MOST_ROUND_TRIPS: Final = 2.5
READY_S: Final = patient(120.0)


@pytest.fixture(scope="module")
def far() -> Iterator[FarNetwork]:
    try:
        if found := network.trouble():
            raise NetworkTrouble(found)
        made = FarNetwork((*NAMES, ALONE), DELAY_S)
    except NetworkTrouble as trouble:
        pytest.skip(f"machines that are far from each other: {trouble}")
    with made:
        yield made


def keys_of(far: FarNetwork, name: str, name_server: str, flush: str) -> dict[str, object]:
    return {
        "bindAddress": far.address(name),
        "brokerName": name if name == ALONE else GROUP,
        "namesrvAddr": name_server,
        "flushDiskType": flush,
        "mappedFileSizeCommitLog": 64 << 20,
    }


@contextmanager
def name_server(far: FarNetwork) -> Iterator[str]:
    at = f"{far.address(HOST)}:{free_ports()}"
    server = NameServerActor.start(bind=[(f"tcp://{at}", False)])
    try:
        yield at
    finally:
        server.stop()


@contextmanager
def started(far: FarNetwork, folder: Path, keys: dict[str, dict[str, object]]) -> Iterator[None]:
    """Brokers, each on the machine of its name."""
    with ExitStack() as stack:
        for name, own in keys.items():
            replica = Replica(name, folder, own, "", str(far.path(name)))
            replica.start()
            stack.callback(replica.kill)
        yield


@pytest.fixture(scope="module", params=["ASYNC_FLUSH", "SYNC_FLUSH"])
def pair(
    request: pytest.FixtureRequest, far: FarNetwork, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, str]]:
    """How they flush, and the name servers of a broker alone and of a group."""
    flush, folder = request.param, tmp_path_factory.mktemp("far")
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(32) + "\n")
    secret.chmod(0o600)
    peers = ";".join(f"{name}-{far.address(name)}:{free_ports()}" for name in NAMES)
    with name_server(far) as alone, name_server(far) as group:
        keys = {ALONE: keys_of(far, ALONE, alone, flush)}
        for name in NAMES:
            keys[name] = {
                **keys_of(far, name, group, flush),
                "enableDLegerCommitLog": True,
                "dLegerGroup": GROUP,
                "dLegerPeers": peers,
                "dLegerSelfId": name,
                "groupEngine": f"sqlite:{folder / 'engine'}",
                "groupSecretFile": str(secret),
            }
        with started(far, folder, keys):
            yield flush, alone, group


def producer_of(stack: ExitStack, at: str) -> Producer:
    """Once a message has been acknowledged there."""
    producer = stack.enter_context(Producer(at, timeout_s=patient(60)))
    deadline = time.monotonic() + READY_S
    while True:
        try:
            producer.send("far", BODY)
        except CometError:
            assert time.monotonic() < deadline, "nobody serves"
        else:
            return producer


@contextmanager
def echoing(far: FarNetwork) -> Iterator[Callable[[], object]]:
    """A byte there and back: the round trip."""

    def echo() -> None:
        with listener, listener.accept()[0] as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while found := line.recv(1):
                line.sendall(found)

    at = (far.address(ALONE), 0)
    listener = far.within(ALONE, partial(socket.create_server, at))
    thread = threading.Thread(target=echo)
    thread.start()
    with socket.create_connection(listener.getsockname()) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def there_and_back() -> None:
            line.sendall(b"x")
            assert line.recv(1) == b"x"

        yield there_and_back
    thread.join()


def test_one_in_flight(
    pair: tuple[str, str, str], far: FarNetwork, full: bool, report: Report
) -> None:
    flush, alone, group = pair
    count, rounds = (100, 5) if full else (3, 1)
    took: dict[str, list[float]] = {"a round trip": [], "alone": [], "group": []}
    with ExitStack() as stack:
        calls: dict[str, Callable[[], object]] = {
            "a round trip": stack.enter_context(echoing(far)),
            "alone": partial(producer_of(stack, alone).send, "far", BODY),
            "group": partial(producer_of(stack, group).send, "far", BODY),
        }
        for _ in range(rounds):
            for what, call in calls.items():
                for _ in range(count):
                    began = time.perf_counter()
                    call()
                    took[what].append(time.perf_counter() - began)
    median = {what: statistics.median(each) for what, each in took.items()}
    for what, seconds in median.items():
        report(f"{flush}: {what}", seconds * 1e3, "ms")
    trips = median["group"] / median["a round trip"]
    report(f"{flush}: group", trips, "round trips")
    if full:
        assert trips <= MOST_ROUND_TRIPS
