"""What becomes of a message whose send has raised: it is not stored behind anybody's back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from client_fakes import fake_broker
from inside import channel_of, commitlog_of, has_line
from patience import patient
from ports import free_ports
from still import stopped

from cometmq import Broker, Producer
from cometmq.client.routes import boot_id
from cometmq.protocol.commands import GetLine, Ping, TopicInfo
from cometmq.protocol.errors import NotConfirmed, NotReachable, Overtaken
from cometmq.protocol.wire.channel import Channel

WAIT_S = patient(60)
LARGE = 100_000  # bytes: more than is read at once


@contextlib.contextmanager
def hasty(producer: Producer, timeout_s: float) -> Iterator[None]:
    """What is sent in here is given up after that time; all else has what a busy machine needs."""
    policy = producer._sender.delivery.policy
    before = policy.timeout_s, policy.timeout_most_s
    policy.timeout_s = policy.timeout_most_s = timeout_s
    try:
        yield
    finally:
        policy.timeout_s, policy.timeout_most_s = before


def send_in_vain(producer: Producer, body: bytes, topic: str = "T") -> None:
    """Until it is noticed that nobody is there."""
    deadline = time.monotonic() + WAIT_S
    while True:
        assert time.monotonic() < deadline
        try:
            producer.send(topic, body, queue_id=0).wait()
        except NotConfirmed:  # it went to a connection that had ended already
            continue
        except NotReachable as error:
            assert "not sent, and will not be" in str(error)  # noqa: PT017
            return
        raise AssertionError("it is stored")


# --- never handed over ----------------------------------------------------------------------------


def test_what_nobody_listened_for_is_not_sent_later() -> None:
    port = free_ports()
    with Channel(f"tcp://127.0.0.1:{port}", "nobody") as channel:
        for number in range(3):
            with pytest.raises(NotReachable, match=r"Ping was not sent"):
                channel.ask(Ping(), [b"early %d" % number], timeout_s=0.1)
        server = zmq.Context.instance().socket(zmq.ROUTER)
        try:
            server.bind(f"tcp://127.0.0.1:{port}")
            channel.request(Ping(), [b"late"], on_done=lambda _: None)
            assert server.poll(WAIT_S * 1000)
            assert server.recv_multipart()[2] == b"late"
        finally:
            server.close(linger=0)


def test_who_is_connected_to_a_process_that_does_not_run_has_handed_over_nothing() -> None:
    """The system takes connections for a process that is stopped; that is no peer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with (
            Channel(f"tcp://127.0.0.1:{listener.getsockname()[1]}") as channel,
            pytest.raises(NotReachable),
        ):
            channel.ask(Ping(), timeout_s=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("linger_ms", [0, 1])
def test_sends_that_failed_while_no_broker_was_there_are_not_stored_by_the_next(
    linger_ms: float,
) -> None:
    with contextlib.ExitStack() as later:
        with fake_broker() as first:
            producer = Producer(first.address, linger_ms=linger_ms, timeout_s=WAIT_S)
            producer.send("t", b"before", queue_id=0).wait()
        with hasty(producer, 0.5):
            for number in range(3):
                send_in_vain(producer, b"early %d" % number, "t")
        second = later.enter_context(fake_broker(first.address))
        second.broker.topics["t"] = TopicInfo("t", 4, 4)
        for number in range(3):
            producer.send("t", b"late %d" % number, queue_id=0).wait()
        assert second.broker.bodies("t", 0) == [b"late 0", b"late 1", b"late 2"]
        with contextlib.suppress(NotReachable, NotConfirmed):  # the first one, again
            producer.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_nothing_of_it_is_in_the_store_of_a_broker_that_comes_back(
    tmp_path: Path, transport: str
) -> None:
    port = free_ports()
    settings = {"logLevel": "ERROR"}
    with Broker(tmp_path / "store", port=port, settings=settings):
        producer = Producer(f"127.0.0.1:{port}", timeout_s=WAIT_S, transport=transport)
        producer.send("T", b"before", queue_id=0)
        if transport == "auto":
            until_line(producer)
    with hasty(producer, 0.5):
        for size in (10, LARGE, 10):
            send_in_vain(producer, b"early" + bytes(size))
    with Broker(tmp_path / "store", port=port, settings=settings) as broker, producer:
        sent = producer.send("T", b"late", queue_id=0)
        found = bodies_of(broker, sent.queue_offset + 1)
    assert [body[:4] for body in found if body[:4] == b"earl"] == []
    assert found[-1] == b"late"


def shut_line(producer: Producer) -> None:
    line = channel_of(producer)._shortcut.line
    assert line is not None
    line.shut()


def until_line(producer: Producer, topic: str = "T") -> None:
    for _ in range(1_000):
        producer.send(topic, b"?", queue_id=0).wait()
        if has_line(producer):
            return
    raise AssertionError("no line")


def bodies_of(broker: Broker, count: int, topic: str = "T") -> list[bytes]:
    found: list[bytes] = []
    with broker.consumer(f"g-{topic}", topic, start="earliest") as consumer:
        while len(found) < count:
            messages = consumer.poll(4096, WAIT_S)
            assert messages, f"{len(found)} of {count} messages came"
            found += [message.body for message in messages]
    return found


# --- handed over ----------------------------------------------------------------------------------


class Relay:
    """Stands before a broker's port. What comes by a connection is passed on, or kept for later."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.passes = threading.Event()  # cleared: what clients say is kept
        self.passes.set()
        self.has_kept = threading.Semaphore(0)
        self._clients: list[socket.socket] = []
        self._passing: list[threading.Thread] = []  # one for each of them
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments)
        thread.start()
        self._threads.append(thread)
        return thread

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._clients.append(client)
                self._passing.append(self._start(self._pass_on, client, self.passes))

    def _pass_on(self, client: socket.socket, gate: threading.Event) -> None:
        """What the client says; it may be gone when that arrives."""
        with client, socket.create_connection(self._target) as server:
            down = self._start(self._answer, server, client)
            with contextlib.suppress(OSError):
                while data := client.recv(1 << 20):
                    if not gate.is_set():
                        self.has_kept.release()
                    gate.wait()
                    server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            down.join()

    @staticmethod
    def _answer(server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                with contextlib.suppress(OSError):
                    client.sendall(data)

    def cut(self) -> Callable[[], None]:
        """Clients lose their connections; what they had said still arrives, once that is called,
        and has come when it returns: the broker has read it to its end."""
        kept, self.passes = self.passes, threading.Event()
        self.passes.set()
        passing, self._passing = self._passing, []
        self._hang_up()

        def arrive() -> None:
            kept.set()
            for thread in passing:
                thread.join(WAIT_S)
                assert not thread.is_alive()

        return arrive

    def _hang_up(self) -> None:
        clients, self._clients = self._clients, []
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.passes.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._hang_up()
        for thread in self._threads:
            thread.join(WAIT_S)


@contextlib.contextmanager
def relayed(topic: str, producer: Producer) -> Iterator[Relay]:
    """Between the producer and the commitlog process; lines are not concerned."""
    producer.send(topic, b"begin", queue_id=0).wait()  # nobody asks for a channel beside us now
    endpoint = producer._sender.delivery.topics[topic].lanes[0].endpoint
    producer._sender.routes.retire(endpoint)
    relay = Relay(endpoint)
    request = (
        None if producer._sender.routes._transport == "zmq" else GetLine(boot_id(), is_stream=True)
    )
    producer._sender.routes._channels[endpoint] = Channel(
        relay.address, "relay", line_request=request
    )
    producer.send(topic, b"through", queue_id=0).wait()
    try:
        yield relay
    finally:
        relay.close()


def test_what_was_given_up_is_not_stored_behind_what_went_another_way(
    broker: Broker, topic: str
) -> None:
    """One goes through ZeroMQ, as its local connection has ended, and is held up; the next one has
    a local connection again."""
    with (
        broker.producer(timeout_s=WAIT_S, transport="auto") as producer,
        relayed(topic, producer) as relay,
    ):
        until_line(producer, topic)
        relay.passes.clear()
        shut_line(producer)
        given_up = None
        with hasty(producer, 1):
            while not isinstance(given_up, NotConfirmed):  # but not even handed over
                with pytest.raises((NotConfirmed, NotReachable)) as raised:
                    producer.send(topic, b"large" + bytes(LARGE), queue_id=0)
                given_up = raised.value
        assert "may be stored, also later, until" in str(given_up)
        assert relay.has_kept.acquire(timeout=WAIT_S)
        commitlog = broker.actor("commitlog")
        answer = commitlog.ask(GetLine(boot_id(), is_stream=True))
        commitlog.stop()
        channel_of(producer)._shortcut.use(answer)
        producer.send(topic, b"small", queue_id=0)
        assert has_line(producer)
        relay.passes.set()
        shut_line(producer)
        last = producer.send(topic, b"last" + bytes(LARGE), queue_id=0)  # behind it, the same way
        found = bodies_of(broker, last.queue_offset + 1, topic)
    assert [body[:5] for body in found[-2:]] == [b"small", b"last\0"]
    assert not any(body.startswith(b"large") for body in found)


@pytest.mark.parametrize("linger_ms", [0, 1])
@pytest.mark.slow
def test_what_is_sent_again_is_not_stored_once_more_behind_others(
    broker: Broker, topic: str, linger_ms: float
) -> None:
    """The connection is lost for the producer, and what it had said arrives late."""
    with (
        broker.producer(timeout_s=WAIT_S, transport="zmq", linger_ms=linger_ms) as producer,
        relayed(topic, producer) as relay,
    ):
        relay.passes.clear()
        first = producer.send_async(topic, b"first", queue_id=0)
        assert relay.has_kept.acquire(timeout=WAIT_S)
        arrive = relay.cut()
        first.result(WAIT_S)
        producer.send(topic, b"second", queue_id=0).wait()
        arrive()
        with broker.producer(transport="zmq", timeout_s=WAIT_S) as other:
            # The broker takes what a connection holds in turn; many turns later it has come.
            for _ in range(200):
                last = other.send(topic, b"later", queue_id=0)
        found = bodies_of(broker, last.queue_offset + 1, topic)
    assert [body for body in found if body in (b"first", b"second")] == [b"first", b"second"]


@pytest.mark.slow
@pytest.mark.parametrize("linger_ms", [0, 1])
def test_order_within_a_queue_after_the_writer_stood_still(
    broker: Broker, topic: str, linger_ms: float
) -> None:
    """Large and small go into a process that is stopped, and time out one by one."""
    sent = [b"%03d" % number + bytes(LARGE if number % 3 == 0 else 0) for number in range(6)]
    commitlog: psutil.Process = commitlog_of(broker)
    with broker.producer(timeout_s=WAIT_S, transport="auto", linger_ms=linger_ms) as producer:
        until_line(producer, topic)
        with stopped(commitlog.pid), hasty(producer, 0.8):
            for body in sent:
                with pytest.raises((NotConfirmed, NotReachable)):
                    producer.send(topic, body, queue_id=0).wait()
        with contextlib.suppress(NotConfirmed, NotReachable):  # of those before
            producer.flush()
        last = producer.send(topic, b"last" + bytes(LARGE), queue_id=0).wait()
        producer.send(topic, b"last", queue_id=0).wait()
        found = bodies_of(broker, last.queue_offset + 2, topic)
    stored = [body for body in found if body in sent]
    assert stored == sorted(stored)
    assert len(stored) == len(set(stored))
    assert [body[:4] for body in found[-2:]] == [b"last", b"last"]


def test_overtaken_is_a_refusal_that_may_be_tried_again() -> None:
    assert Overtaken.retriable
