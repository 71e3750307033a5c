"""Connections whose other end disappears without notice (Fault 18)."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from client_fakes import FakeBroker, Handle
from family import RunningBroker
from patience import patient
from silent_proxy import SilentProxy
from zmtp import RawClient

from cometmq import Consumer, Producer
from cometmq.protocol.wire import liveness

pytestmark = pytest.mark.slow

WITHIN_S = patient(90)  # TCP itself gives up after 15 minutes


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    """Broker and clients of this process, which find a loss in a third of the usual time."""
    monkeypatch.setattr(liveness, "HEARTBEAT_MS", liveness.HEARTBEAT_MS // 3)
    monkeypatch.setattr(liveness, "SILENCE_MS", liveness.SILENCE_MS // 3)
    handle = Handle(FakeBroker.start())
    yield handle
    handle.stop()


@pytest.fixture
def proxy(broker: Handle) -> Iterator[SilentProxy]:
    """Proxy between the broker and all clients."""
    proxy = SilentProxy(broker.broker.address)
    broker.broker.address = proxy.address
    yield proxy
    proxy.close()


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_producer_connects_again_after_a_silent_loss(
    broker: Handle, proxy: SilentProxy, linger_ms: float
) -> None:
    with Producer(
        proxy.address, linger_ms=linger_ms, timeout_s=WITHIN_S, transport="zmq"
    ) as producer:
        assert producer.send("t", b"1").queue_offset == 0
        assert proxy.go_silent()
        assert producer.send("t", b"2", queue_id=0).queue_offset >= 0
    bodies = [body for queue_id in range(4) for body in broker.broker.bodies("t", queue_id)]
    assert sorted(bodies) == [b"1", b"2"]


def test_consumer_connects_again_after_a_silent_loss(broker: Handle, proxy: SilentProxy) -> None:
    with (
        Producer(broker.address, timeout_s=WITHIN_S, transport="zmq") as producer,
        Consumer(proxy.address, "g", "t", transport="zmq") as consumer,
    ):
        producer.send("t", b"1")
        assert [each.body for each in consumer.poll(timeout_s=WITHIN_S)] == [b"1"]
        assert proxy.go_silent()
        producer.send("t", b"2")
        assert [each.body for each in consumer.poll(timeout_s=WITHIN_S)] == [b"2"]
        consumer.ack([])
        consumer.commit()


def test_broker_ends_connections_of_vanished_clients(broker: Handle, proxy: SilentProxy) -> None:
    """Broker and clients both close their ends of all silent connections."""
    with Producer(proxy.address, transport="zmq") as producer:
        producer.send("t", b"1")
        assert proxy.go_silent()
        proxy.wait_for_ends()
    with RawClient(broker.address, timeout_s=WITHIN_S) as client:  # answers no heartbeat
        assert client.has_ended()


def test_broker_that_stands_still_for_seconds_loses_no_connection(tmp_path: Path) -> None:
    with (
        RunningBroker(tmp_path / "store") as broker,
        Producer(broker.ready.name_server, timeout_s=WITHIN_S, transport="zmq") as producer,
    ):
        producer.send("t", b"before")
        before = broker.statistics("commitlog")["connections"]
        pid = broker.pids()["commitlog"]
        os.kill(pid, signal.SIGSTOP)
        try:
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            still_s = liveness.SILENCE_MS / 3_000
            future = producer.send_async("t", b"meanwhile")
            with pytest.raises(TimeoutError):
                future.result(still_s)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert future.result(WITHIN_S).queue_offset >= 0
        assert broker.statistics("commitlog")["connections"] <= before + 1


def test_plain_connections_are_watched() -> None:
    """Connections of RocketMQ's HA protocol have keep-alive and a limit for unconfirmed data."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as made:
        liveness.watch_plain(made)
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        found = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert found == liveness.UNCONFIRMED_MS
