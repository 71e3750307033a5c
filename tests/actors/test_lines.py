"""Lines: a client and the commitlog actor of one machine, without ZeroMQ between."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from inside import channel_of, commitlog_of, commits_by_line, has_line
from patience import patient
from waiting import until

from cometmq import Broker, Consumer
from cometmq.actors.runtime.access import Doorman
from cometmq.actors.runtime.listeners import local
from cometmq.actors.runtime.listeners.connections import ConnectionLimits
from cometmq.actors.runtime.listeners.local import LINES_MAX, LocalListener
from cometmq.protocol import frames
from cometmq.protocol.commands import (
    Done,
    GetLine,
    LineAddress,
    Ping,
    Pong,
    Section,
    SendMessages,
    SendResult,
)
from cometmq.protocol.errors import BadRequest, NotConfirmed, NotLocal
from cometmq.protocol.wire.line import Line, abstract
from cometmq.protocol.wire.stream import StreamReader, StreamWriter, pack_lengths
from cometmq.shm.os.processes import boot_id
from cometmq.testing import OwnBroker

WAIT_S = patient(60)


def read_all(broker: Broker, topic: str, count: int) -> list[bytes]:
    found: list[bytes] = []
    with broker.consumer(f"g-{topic}", topic, start="earliest") as consumer:
        while len(found) < count:
            messages = consumer.poll(4096, WAIT_S)
            assert messages, f"{len(found)} of {count} messages came"
            found += [message.body for message in messages]
            consumer.ack(messages)
    return found


# --- what is chosen -------------------------------------------------------------------------------


def test_a_producer_here_has_a_line_and_one_that_does_not_want_it_has_none(
    broker: Broker, topic: str
) -> None:
    with broker.producer() as auto, broker.producer(transport="zmq") as far:
        for producer in (auto, far):
            producer.send(topic, b"first")  # the line is asked for with it
        until(lambda: auto.send(topic, b"more") and has_line(auto))
        assert not has_line(far)
    with broker.producer(transport="local") as near:
        near.send(topic, b"local")
        assert has_line(near)


def test_a_consumer_here_has_one_to_the_coordinator(broker: Broker, topic: str) -> None:
    with broker.producer() as producer:
        producer.send(topic, b"x")
    with (
        broker.consumer(f"near-{topic}", topic, start="earliest") as near,
        broker.consumer(f"far-{topic}", topic, start="earliest", transport="zmq") as far,
    ):
        for consumer in (near, far):
            messages = consumer.poll(1, WAIT_S)
            consumer.ack(messages)
            consumer.commit()
        assert commits_by_line(near)
        assert not commits_by_line(far)
    with broker.consumer(f"near-{topic}", topic, start="earliest") as again:
        assert again.poll(1, 0.2) == []


def test_it_is_insisted_on_in_vain(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cometmq.client.routes.boot_id", lambda: "another machine's")
    near = broker.producer(transport="local")
    with near, pytest.raises(NotLocal, match="another machine"):
        near.send(topic, b"x")
    with broker.producer() as auto:
        assert auto.send(topic, b"x").queue_offset >= 0
        assert not has_line(auto)
    with pytest.raises(ValueError, match="transport='mapped'"):
        broker.producer(transport="mapped")


def test_another_user_is_not_let_in(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who says that he is another sends through ZeroMQ."""
    monkeypatch.setattr("os.getuid", lambda: 4_242)
    with broker.producer() as producer:
        for _ in range(3):
            producer.send(topic, b"x")
        assert not has_line(producer)


# --- the same as through ZeroMQ -------------------------------------------------------------------


def test_small_and_large_keep_their_order(broker: Broker, topic: str) -> None:
    """Also batches that fill more than the socket takes at once."""
    rng = random.Random(1)
    bodies = [rng.randbytes(rng.choice((1, 100, 70_000, 300_000))) for _ in range(200)]
    with broker.producer(transport="local") as producer:
        for start in range(0, len(bodies), 5):
            for body in bodies[start : start + 4]:
                producer.send_async(topic, body, queue_id=0)
            producer.send(topic, bodies[start + 4], queue_id=0)
        producer.flush()
    assert read_all(broker, topic, len(bodies)) == bodies


def test_threads_share_a_line(broker: Broker, topic: str) -> None:
    def send(number: int) -> None:
        for step in range(200):
            assert producer.send(topic, b"%d %d" % (number, step), queue_id=number % 2)

    with broker.producer(transport="local", timeout_s=WAIT_S) as producer:
        threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert has_line(producer)
    found = read_all(broker, topic, 1_600)
    for number in range(8):
        own = [body for body in found if body.startswith(b"%d " % number)]
        assert own == [b"%d %d" % (number, step) for step in range(200)]


def test_a_refusal_comes_by_the_line(broker: Broker, topic: str) -> None:
    with broker.producer(transport="local") as producer:
        producer.send(topic, b"x")
        command = SendMessages([Section(topic, 0, 1)], 0, "")
        answer, _ = channel_of(producer).ask(command, [b"one", b"too many"])
        assert isinstance(answer, SendResult)
        assert "1 sections, 2 payload frames" in answer.results[0].text


# --- the end of one side --------------------------------------------------------------------------


@pytest.mark.parametrize("linger_ms", [0, 1])
@pytest.mark.slow
def test_a_killed_writer_loses_nothing_acknowledged(
    cometmq_own_broker: OwnBroker, linger_ms: float
) -> None:
    broker, topic = cometmq_own_broker.broker, cometmq_own_broker.topic()
    acknowledged = []
    with broker.producer(transport="local", linger_ms=linger_ms, timeout_s=WAIT_S) as producer:
        for number in range(600):
            if number % 200 == 100:
                commitlog_of(broker).send_signal(signal.SIGKILL)
            receipt = producer.send(topic, b"%d" % number, queue_id=0)
            if number % 10 == 0:
                assert receipt.queue_offset >= 0  # waits for it
            acknowledged.append(b"%d" % number)
        producer.flush()
        until(lambda: producer.send(topic, b"end", queue_id=0) and has_line(producer))
    with broker.consumer(f"g-{topic}", topic, start="earliest") as consumer:
        found: list[bytes] = []
        while b"end" not in found:
            messages = consumer.poll(4096, WAIT_S)
            assert messages
            found += [message.body for message in messages]
            consumer.ack(messages)
    assert list(dict.fromkeys(found))[:-1] == acknowledged


def test_a_line_that_ended_meanwhile_costs_nothing(broker: Broker, topic: str) -> None:
    """What it cannot have taken goes through ZeroMQ, without an error and without a second try."""
    with broker.producer(transport="local", retry_max=0) as producer:
        producer.send(topic, b"0", queue_id=0)
        line = channel_of(producer)._shortcut.line
        assert line is not None
        line.shut()
        assert producer.send(topic, b"1", queue_id=0).queue_offset == 1
        until(lambda: producer.send(topic, b"2", queue_id=0) and has_line(producer))


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">I", frames.FRAME_MAX + 1),
        struct.pack(">I", 0xFFFFFFFF) + b"x" * 100,
        (struct.pack(">I", 0x80000000 | frames.FRAME_MAX) + bytes(frames.FRAME_MAX)) * 9,
    ],
    ids=["frame", "first frame", "message"],
)
@pytest.mark.slow
def test_a_message_that_is_too_large_ends_the_line_and_nothing_else(
    broker: Broker, topic: str, sent: bytes
) -> None:
    with line_to(broker) as line, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        line.sendall(sent)
        assert line.recv(100) == b""
    with broker.producer(transport="local") as producer:
        producer.send(topic, b"x")


def test_a_head_that_is_no_command_is_answered(broker: Broker) -> None:
    head = frames.HEAD.pack(1, 77) + b"\xc1"
    with line_to(broker) as line:
        line.sendall(b"".join(pack_lengths(head, ())))
        reader = StreamReader(line)
        while not (messages := reader.messages(1)):
            assert reader.fill(0)
    request_id, failed = frames.unpack(messages[0][0])
    assert request_id == 77
    with pytest.raises(BadRequest, match="not a command"):
        frames.raise_if_failed(failed)


def test_a_client_that_knows_packets_is_sent_to_zeromq(broker: Broker) -> None:
    """Released clients ask without `is_stream`, and take a refusal as: there is none."""
    commitlog = broker.actor("commitlog")
    try:
        with pytest.raises(NotLocal, match="older"):
            commitlog.ask(GetLine(boot_id()))
    finally:
        commitlog.stop()


def test_a_broker_that_knows_packets_is_asked_by_zeromq(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A released broker leaves `is_stream` out of its answer."""
    with broker.producer() as producer:
        producer.send(topic, b"x")
        shortcut = channel_of(producer)._shortcut
        with pytest.raises(NotLocal, match="older"):
            shortcut.use(LineAddress("some-name", os.getuid()))


def line_to(broker: Broker) -> socket.socket:
    """A raw one."""
    commitlog = broker.actor("commitlog")
    answer = commitlog.ask(GetLine(boot_id(), is_stream=True))
    commitlog.stop()
    assert isinstance(answer, LineAddress)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(WAIT_S)
    line.connect(abstract(answer.name))
    return line


# --- the two ends by themselves -------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[LocalListener]:
    name = f"cometmq-test-{os.getpid()}-{random.randrange(1 << 32)}"
    listener = LocalListener(name, Doorman("me", [Ping]))
    yield listener
    listener.close()


def test_what_was_sent_before_the_end_is_received(listener: LocalListener) -> None:
    """Also when the other side ends with packets of ours that it has not read."""
    line = Line(listener.name, os.getuid())
    listener.drain(10)
    line.send(frames.pack(1, Ping()))
    (request,) = listener.drain(10)
    request.reply(Pong("me", 1, "1"))
    line.send(frames.pack(2, Ping()))
    listener.close()
    messages = line.receive(WAIT_S)
    assert messages
    assert frames.unpack(messages[0][0])[0] == 1
    with pytest.raises(EOFError):
        line.receive(WAIT_S)


def test_one_line_does_not_hold_up_the_others(listener: LocalListener) -> None:
    """Of each so many are taken at a time; what was left is there the next time."""
    line = Line(listener.name, os.getuid())
    listener.drain(10)
    for number in range(25):
        line.send(frames.pack(number, Ping()))
    counts = [len(listener.drain(10)) for _ in range(3)]
    assert counts == [10, 10, 5]


def numbers_by_line(found: list[Any]) -> dict[bytes, list[int]]:
    by_line: dict[bytes, list[int]] = {}
    for each in found:
        by_line.setdefault(each.sender, []).append(each.request_id)
    return by_line


def connected(listener: LocalListener, count: int) -> list[Line]:
    found = [Line(listener.name, os.getuid()) for _ in range(count)]
    while len(listener._callers) < count:
        listener.drain(1)
    return found


def send_pings(line: Line, count: int) -> None:
    for number in range(count):
        line.send(frames.pack(number, Ping()))


def test_a_busy_line_leaves_their_turns_to_the_others(listener: LocalListener) -> None:
    """Fault 30: a line with more input than fits into a turn gets no more than its share while
    other lines have input; each line keeps its order."""
    busy, *others = connected(listener, 4)
    send_pings(busy, 100)
    for line in others:
        send_pings(line, 5)
    taken = numbers_by_line(listener.drain(32))
    assert sorted(map(len, taken.values())) == [5, 5, 5, 17]  # it gets what they leave
    assert all(numbers == sorted(numbers) for numbers in taken.values())
    rest = numbers_by_line(listener.drain(256))
    assert list(map(len, rest.values())) == [83]


def test_every_line_has_its_turn(listener: LocalListener) -> None:
    """Fault 30: also with more lines than one call of `drain` reads commands."""
    for line in (connections := connected(listener, 7)):
        send_pings(line, 50)
    turns: Counter[bytes] = Counter()
    for _ in range(14):
        found = listener.drain(2)
        assert len(found) == 2
        turns.update(each.sender for each in found)
    assert set(turns.values()) == {4}
    assert len(turns) == len(connections)


def test_no_more_lines_than_it_can_bear(
    listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LINES_MAX > 2
    monkeypatch.setattr("cometmq.actors.runtime.listeners.local.LINES_MAX", 2)
    found = [Line(listener.name, os.getuid()) for _ in range(3)]
    while listener.is_open:
        listener.drain(10)
    listener.drain(10)
    with pytest.raises(EOFError):
        found[2].receive(WAIT_S)
    del found[0]
    while not listener.is_open:
        listener.drain(10)


def test_a_fork_of_the_service_keeps_the_listener(listener: LocalListener) -> None:
    """What no longer listens is not heard of, although a fork still has its descriptor."""
    assert listener._listener is not None
    forked = os.dup(listener._listener.fileno())
    try:
        listener._stop_listening()
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as client:
            client.connect(abstract(listener.name))  # the fork's is still there
            assert listener.drain(10) == []
    finally:
        os.close(forked)


def test_who_came_and_went_changes_nothing(
    listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listener._listener is not None

    class Gone:
        close = listener._listener.close

        def accept(self) -> None:
            raise BlockingIOError

    with monkeypatch.context() as patch:
        patch.setattr(listener, "_listener", Gone())
        first = Line(listener.name, os.getuid())
        listener.drain(10)
    listener.drain(10)
    first.send(frames.pack(1, Ping()))
    assert len(listener.drain(10)) == 1


def test_without_descriptors_nobody_connects_in_vain(listener: LocalListener) -> None:
    line = Line(listener.name, os.getuid())
    assert listener._listener is not None

    class Full:
        close = listener._listener.close
        fileno = listener._listener.fileno

        def accept(self) -> None:
            raise OSError(24, "Too many open files")

    listener._listener = Full()  # type: ignore[assignment]
    listener.drain(10)
    assert not listener.is_open
    with pytest.raises(EOFError):
        line.receive(WAIT_S)
    with pytest.raises(NotLocal):
        Line(listener.name, os.getuid())


def test_a_line_that_never_answered_is_not_asked_for_again(broker: Broker, topic: str) -> None:
    """As when another name space has somebody else behind that name."""
    with broker.producer(transport="local", timeout_s=WAIT_S) as producer:
        producer.send(topic, b"x")
        channel = channel_of(producer)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        assert channel._shortcut.line is not None
        stranger = Line.__new__(Line)
        stranger.__dict__.update(
            channel._shortcut.line.__dict__, _socket=ours, answered=False,
            _reader=StreamReader(ours), _writer=StreamWriter(ours),
        )  # fmt: skip
        channel._shortcut.line = stranger
        pending = channel.request(Ping())
        theirs.close()
        assert channel.wait(pending, WAIT_S)
        with pytest.raises(NotConfirmed, match="was lost"):
            pending.result()
        assert producer.send(topic, b"y").queue_offset >= 0
        assert channel._shortcut.line is None
        assert channel._shortcut.command is None
        ours.close()


def test_a_line_without_a_descriptor_to_wait_by_ends(
    listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raised out of a request that stayed registered, whose batch then was settled twice."""
    line = Line(listener.name, os.getuid())
    line.send(frames.pack(1, Ping()), [bytes(4 << 20)])

    def refused() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(select, "epoll", refused)
    assert line.unsent_fd is None
    line.flush()
    with pytest.raises(EOFError):
        line.receive(WAIT_S)


def read_slowly(listener: LocalListener, line: Line, pings: int) -> int:
    """Send so many, which are answered with 64 KiB each; how many were taken up."""
    for number in range(pings):
        line.send(frames.pack(number, Ping()))
    taken = 0
    while found := listener.drain(10):
        for request in found:
            request.reply(Done(), [bytes(65_536)])
        taken += len(found)
    return taken


def answers_of(line: Line) -> int:
    """How many come until the other side ends it."""
    count = 0
    with contextlib.suppress(EOFError):
        while True:
            found = line.receive(WAIT_S)
            assert found is not None, "nobody has ended it"
            count += len(found)
    return count


def test_a_client_that_reads_slowly_has_its_requests_wait(
    listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers are kept up to a limit; then others go on, and it does when it reads."""
    monkeypatch.setattr(local, "UNSENT_MAX", 1_048_576)
    (slow, other) = connected(listener, 2)
    taken = read_slowly(listener, slow, 200)
    assert 10 < taken < 50
    send_pings(other, 3)
    assert [each.request_id for each in listener.drain(10)] == [0, 1, 2]
    assert listener.drain_at is not None
    answers = 0
    while answers < 200:
        answers += len(slow.receive(0) or ())
        for request in listener.drain(10):
            request.reply(Done(), [bytes(65_536)])
    assert listener.drain_at is None


def test_a_client_that_reads_nothing_is_hung_up_on(
    listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "UNSENT_MAX", 1_048_576)
    (silent,) = connected(listener, 1)
    taken = read_slowly(listener, silent, 200)
    drain_at = listener.drain_at
    assert drain_at is not None
    assert drain_at <= time.monotonic() + local.STALLED_S
    monkeypatch.setattr(local, "STALLED_S", 0.0)
    listener.drain(10)
    assert answers_of(silent) < taken
    assert listener.drain_at is None


def test_answers_kept_for_a_client_are_bounded(
    listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of requests that were taken up before it had to wait."""
    monkeypatch.setattr(listener, "_limits", ConnectionLimits(in_flight_bytes=1_048_576))
    (silent,) = connected(listener, 1)
    send_pings(silent, 100)
    found = listener.drain(100)
    for request in found:
        request.reply(Done(), [bytes(65_536)])
    assert answers_of(silent) < 100
    assert listener.drain(10) == []
    found[0].done()  # it is gone; nothing happens


def test_half_a_message_holds_up_nobody(listener: LocalListener) -> None:
    halting, other = connected(listener, 2)
    message = b"".join(pack_lengths(frames.pack(7, Ping()), [bytes(100_000)]))
    halting._socket.sendall(message[:70_000])
    send_pings(other, 2)
    assert [each.request_id for each in listener.drain(10)] == [0, 1]
    assert listener.drain(10) == []
    assert listener.drain_at is None
    halting._socket.sendall(message[70_000:])
    (request,) = listener.drain(10)
    assert (request.request_id, len(request.payload[0])) == (7, 100_000)


def test_a_consumer_reads_what_came_by_a_line(broker: Broker, topic: str) -> None:
    with broker.producer(transport="local") as producer, Consumer(
        broker.name_server, f"g-{topic}", topic, start="earliest", transport="zmq"
    ) as consumer:  # fmt: skip
        receipt = producer.send(topic, b"body", tags="a", keys="k")
        (message,) = consumer.poll(1, WAIT_S)
        assert (message.body, message.tags, message.keys) == (b"body", "a", "k")
        assert message.msg_id == receipt.msg_id
        assert message.born_host.startswith("127.0.0.1:")
