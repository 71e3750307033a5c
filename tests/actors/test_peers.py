"""The lines between the replicas of a group: who is heard, what is taken, and what is dropped."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import select
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers_child
import psutil
import pytest
from certificates import Authority
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import patient
from ports import free_ports

from cometmq.actors.replication.core.frames import (
    FRAME_BYTES_MAX,
    AnyFrame,
    Beat,
    Bid,
    Bytes,
    encode_frame,
)
from cometmq.actors.replication.peers import acceptor as strangers
from cometmq.actors.replication.peers import sender as speaking
from cometmq.actors.replication.peers import tls
from cometmq.actors.replication.peers.certificate import contexts
from cometmq.actors.replication.peers.peers import Peers, content_bytes_max
from cometmq.actors.replication.peers.receiver import HEAD
from cometmq.actors.replication.peers.sender import WELCOME
from cometmq.actors.replication.peers.tls import ConnectionLost, TlsConnection
from cometmq.actors.runtime.event_log import EventLog
from cometmq.actors.runtime.meters import values_of
from cometmq.conf import BrokerSettings
from cometmq.protocol.derived import WRITE_BYTES_MAX
from cometmq.protocol.errors import ConfigError

WAIT_S = patient(60)
GROUP = peers_child.GROUP
SECRET = bytes(range(32))
MIB = 1 << 20
SEED = random.randrange(1 << 32)
NAMES = ("n0", "n1", "n2")

Heard = tuple[str, AnyFrame, bytes | None]


def beat(number: int = 0) -> Beat:
    return Beat(GROUP, 1, 2, 3, 4, number)


def records(content: bytes, offset: int = 0) -> tuple[Bytes, memoryview]:
    return Bytes(GROUP, 1, 2, offset, len(content), 0, 0), memoryview(content)


class Replica:
    """Peers, and what they have heard."""

    def __init__(self, name: str, *, group: str = GROUP, bind: str = "127.0.0.1:0", **more: Any):
        self.heard: list[Heard] = []
        self.name = name
        self.peers = Peers(
            group=group,
            own=name,
            secret=SECRET,
            bind=bind,
            on_frame=self._on_frame,
            said=EventLog(),
            **more,
        )

    def _on_frame(self, sender: str, frame: AnyFrame, content: memoryview | None) -> None:
        self.heard.append((sender, frame, None if content is None else bytes(content)))

    def fileno(self) -> int:
        return self.peers.fileno()

    def count(self, name: str) -> int:
        return int(values_of(self.peers.statistics())[name])


class Group:
    """Replicas of one thread, this one, and who else comes to them."""

    def __init__(self) -> None:
        self.replicas: list[Replica] = []
        self.callers: list[Caller] = []

    def add(self, name: str, **more: Any) -> Replica:
        self.replicas.append(Replica(name, **more))
        return self.replicas[-1]

    def connect(self) -> None:
        addresses = {each.name: each.peers.address for each in self.replicas}
        for each in self.replicas:
            each.peers.replace(addresses)

    def until(self, what: Callable[[], object]) -> None:
        """All of them listen until it is so."""
        deadline = time.monotonic() + WAIT_S
        while not what():
            assert time.monotonic() < deadline, "it did not come"
            poll = select.poll()
            for each in (*self.replicas, *self.callers):
                poll.register(each.fileno(), select.POLLIN)
            poll.poll(10)
            for each in self.replicas:
                each.peers.receive()
                each.peers.tend()
            for caller in self.callers[:]:
                caller.step()

    def tell(self, sender: Replica, to: str, frame: AnyFrame, content: Any = None) -> None:
        """Again until it is connected."""
        self.until(lambda: sender.peers.send(to, frame, content))

    def ask(self, asker: Replica, to: str, frame: AnyFrame) -> None:
        """One that says back what it hears; again until its answer is there."""
        self.until(lambda: asker.peers.send(to, frame) and (to, frame, None) in asker.heard)

    def call(self, replica: Replica, context: ssl.SSLContext) -> Caller:
        """Somebody comes to its port."""
        self.callers.append(Caller(replica.peers.address, context))
        return self.callers[-1]

    def call_as(self, name: str, replica: Replica) -> Caller:
        """As a replica of that name would, and it is let in."""
        caller = self.call(replica, contexts(SECRET, GROUP, name).client)
        self.until(lambda: caller.is_let_in)
        return caller

    def close(self) -> None:
        for each in self.replicas:
            each.peers.close()
        for caller in self.callers:
            caller.close()


@pytest.fixture
def group() -> Iterator[Group]:
    found = Group()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def three(group: Group) -> Group:
    for name in NAMES:
        group.add(name)
    group.connect()
    return group


class Caller:
    """Somebody who comes to a replica's port, with what certificate and whatever to say."""

    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        plain = connect(address)
        self._fd = plain.fileno()
        self.connection = TlsConnection(plain, context, is_server=False)
        self.said = b""
        self.why = ""  # it is over

    def fileno(self) -> int:
        return self._fd

    @property
    def is_let_in(self) -> bool:
        return self.said == WELCOME

    def step(self) -> None:
        try:
            self.connection.fill(memoryview(bytearray(4_096)))
            if self.connection.shake_hands():
                self.said += self.connection.read()
            self.connection.flush()
        except ConnectionLost as lost:
            self._end(str(lost))

    def send(self, frame: bytes, content: bytes = b"", *, says: int | None = None) -> None:
        """
        Args:
            says: how many bytes it says are behind it, where that is not true.
        """
        head = HEAD.pack(len(frame), len(content) if says is None else says)
        try:
            self.connection.write(head + frame + content)
        except ConnectionLost as lost:
            self._end(str(lost))

    def _end(self, why: str) -> None:
        self.why = why
        self._fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)  # readable, for `select`
        self.connection.close()

    def close(self) -> None:
        if self.why:
            os.close(self._fd)
        self.connection.close()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), WAIT_S)


# --- frames both ways ---


def test_each_of_three_hears_each_of_the_others(three: Group) -> None:
    for sender in three.replicas:
        for to in NAMES:
            if to != sender.name:
                three.tell(sender, to, Bid(GROUP, 1, 2, 3, NAMES.index(to)))
    three.until(lambda: all(len(each.heard) == 2 for each in three.replicas))
    for number, replica in enumerate(three.replicas):
        assert {sender for sender, _, _ in replica.heard} == {*NAMES} - {replica.name}
        assert {frame for _, frame, _ in replica.heard} == {Bid(GROUP, 1, 2, 3, number)}


@pytest.mark.parametrize("size", [0, 1, 255, 65_535, 65_536, MIB + 1, 8 * MIB, 16 * MIB])
def test_bytes_arrive_whole(three: Group, size: int) -> None:
    sender, taker, _ = three.replicas
    content = random.Random(SEED).randbytes(size)
    kept = bytearray(content)
    frame, _ = records(content)
    three.tell(sender, "n1", frame, memoryview(kept))
    kept[:] = bytes(size)  # as a segment that becomes another one
    three.tell(sender, "n1", beat(1))
    three.until(lambda: len(taker.heard) == 2)
    assert taker.heard == [("n0", frame, content), ("n0", beat(1), None)]


def test_the_largest_derived_write_arrives_whole(group: Group) -> None:
    """A member's lines take it, whatever its settings are; see test_staging.py for one."""
    limit = content_bytes_max(BrokerSettings(max_message_size=1))
    sender, taker = (group.add(name, content_bytes_max=limit) for name in ("n0", "n1"))
    group.connect()
    frame, content = records(random.Random(SEED).randbytes(WRITE_BYTES_MAX))
    group.tell(sender, "n1", frame, content)
    group.until(lambda: taker.heard)
    assert taker.heard == [("n0", frame, content)]


def test_what_cannot_be_said(three: Group) -> None:
    sender = three.replicas[0]
    frame, content = records(b"abc")
    for wrong in (
        (frame, None),
        (frame, content[:2]),
        (beat(), content),
        records(bytes(16 * MIB + 1)),
    ):
        with pytest.raises(ValueError, match="bytes behind it"):
            sender.peers.send("n1", *wrong)
    assert not sender.peers.send("n0", beat())  # oneself
    assert not sender.peers.send("n9", beat())
    assert sender.count("peers_dropped") == 2


# --- who is heard ---


def stranger_tests() -> dict[str, tuple[bytes, str, str, str]]:
    """Secret, group and name of who comes to n0, and the counter that tells of it."""
    return {
        "another secret": (bytes(32), GROUP, "n1", "peers_handshakes_failed"),
        "another group": (SECRET, "b", "n1", "peers_handshakes_failed"),
        "a name not in the record": (SECRET, GROUP, "n9", "peers_not_admitted"),
        "its own name": (SECRET, GROUP, "n0", "peers_not_admitted"),
    }


@pytest.mark.parametrize("who", list(stranger_tests()))
def test_strangers_are_not_heard(three: Group, who: str, caplog: pytest.LogCaptureFixture) -> None:
    *whose, counter = stranger_tests()[who]
    replica = three.replicas[0]
    with caplog.at_level(logging.WARNING):
        caller = three.call(replica, contexts(*whose).client)
        three.until(lambda: replica.count(counter) and caller.why)
    assert "port of replicas" in caplog.text or "not let in" in caplog.text
    assert not caller.said
    three.tell(three.replicas[1], "n0", beat(7))
    three.until(lambda: replica.heard)
    assert replica.heard == [("n1", beat(7), None)]


def unbelieving(context: ssl.SSLContext) -> ssl.SSLContext:
    """That takes any certificate for a good one."""
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def plain_client() -> ssl.SSLContext:
    return unbelieving(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


@pytest.mark.parametrize("who", ["nobody", "another secret", "another authority", "TLS 1.2"])
def test_who_believes_anybody_is_not_believed(three: Group, who: str, tmp_path: Path) -> None:
    """Each of them would get through if the server did not look."""
    replica = three.replicas[0]
    context = plain_client()
    if who == "another secret":
        context = unbelieving(contexts(bytes(32), GROUP, "n1").client)
    elif who == "another authority":
        pair = Authority(tmp_path / "other").issue("n1", subject="CN")
        context.load_cert_chain(pair.cert, pair.key)
    elif who == "TLS 1.2":
        context = unbelieving(contexts(SECRET, GROUP, "n1").client)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    caller = three.call(replica, context)
    three.until(lambda: replica.count("peers_handshakes_failed") and caller.why)
    assert not caller.said
    assert not replica.heard


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\nHost: n0\r\n\r\n",
        bytes(100),
        b"\xff" * 100,
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE",  # ZeroMQ
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",  # a ClientHello without anything
        b"\x16\x03\x01\x40\x00" + bytes(0x4000),
        b"\x17\x03\x03\x00\x10" + bytes(16),  # data before the handshake
        b"\x15\x03\x03\x00\x02\x02\x28",  # an alert
        b"\x80\x2e\x01\x00\x02" + bytes(44),  # SSL 2
        b"",
    ],
)
def test_rubbish_is_ended(three: Group, rubbish: bytes) -> None:
    replica = three.replicas[0]
    with connect(replica.peers.address) as client:
        client.setblocking(False)
        client.sendall(rubbish)
        client.shutdown(socket.SHUT_WR)
        three.until(lambda: has_ended(client))
    assert replica.count("peers_handshakes_failed") + replica.count("peers_connections_refused")
    three.tell(three.replicas[1], "n0", beat(7))
    three.until(lambda: replica.heard)
    assert replica.heard == [("n1", beat(7), None)]


def has_ended(client: socket.socket) -> bool:
    """The other side has hung up; what it has said by then is read."""
    try:
        while client.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_nobody_is_another_one(three: Group) -> None:
    """What it calls itself counts for nothing, the certificate does; and a later connection of a
    replica takes the place of the one before."""
    replica = three.replicas[0]
    caller = three.call_as("n1", replica)
    caller.send(encode_frame(beat(9)))
    three.until(lambda: replica.heard)
    assert replica.heard == [("n1", beat(9), None)]
    three.until(lambda: caller.why)  # n1 itself has come again
    three.tell(three.replicas[1], "n0", beat(10))
    three.until(lambda: len(replica.heard) == 2)


def test_who_listens_in_the_place_of_another_is_told_nothing(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """n1's address leads to n2: it does not have n1's name."""
    sender, other = group.add("n0"), group.add("n2")
    other.peers.replace({"n0": sender.peers.address})
    with caplog.at_level(logging.WARNING):
        sender.peers.replace({"n1": other.peers.address})
        group.until(lambda: "replica n2 has come to be there" in caplog.text)
    assert not sender.peers.send("n1", beat())
    assert not other.heard


def test_a_port_with_another_secret_is_told_nothing(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    sender = group.add("n0")
    server = contexts(bytes(32), GROUP, "n1").server
    with socket.create_server(("127.0.0.1", 0)) as listener, caplog.at_level(logging.WARNING):
        sender.peers.replace({"n1": f"127.0.0.1:{listener.getsockname()[1]}"})
        plain, _ = listener.accept()
        other = TlsConnection(plain, server, is_server=True)
        with pytest.raises(ConnectionLost):
            group.until(lambda: (other.fill(memoryview(bytearray(4_096))), other.shake_hands())[1])
        group.until(lambda: "its certificate is none of this group's" in caplog.text)
        other.close()
    assert not sender.peers.send("n1", beat())


# --- what is taken ---


def refused_messages() -> dict[str, tuple[bytes, bytes]]:
    frame, content = encode_frame(records(b"abc")[0]), b"abc"
    return {
        "no frame": (b"", b""),
        "rubbish": (b"\x93\x01\x02", b""),
        "an unknown kind": (b"\x94\x63\xa1g\x01\x02", b""),
        "a long frame that is none": (bytes(FRAME_BYTES_MAX), b""),
        "nothing behind it": (frame, b""),
        "less behind it": (frame, content[:2]),
        "more behind it": (frame, content + b"d"),
        "much more behind it": (frame, bytes(100_000)),
        "bytes behind a beat": (encode_frame(beat()), b"a"),
    }


@pytest.mark.parametrize("what", list(refused_messages()))
def test_a_message_that_is_none_is_refused(
    three: Group, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    replica = three.replicas[0]
    with caplog.at_level(logging.WARNING):
        caller = three.call_as("n1", replica)
        caller.send(*refused_messages()[what])
        caller.send(encode_frame(beat(1)))
        three.until(lambda: replica.heard)
    assert replica.heard == [("n1", beat(1), None)]
    assert replica.count("peers_refused") == 1
    assert "a message of replica n1 is refused" in caplog.text


FRAMES = st.sampled_from([encode_frame(beat(1)), encode_frame(records(b"abc")[0])])
MESSAGES = st.tuples(
    st.one_of(st.binary(max_size=300), FRAMES), st.one_of(st.binary(max_size=300), st.just(b"abc"))
)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[tuple[Group, Replica, Caller]]:
    group = Group()
    replica = group.add("n0")
    replica.peers.replace({"n1": f"127.0.0.1:{free_ports()}"})
    yield group, replica, group.call_as("n1", replica)
    group.close()


@given(messages=st.lists(MESSAGES, max_size=10), cuts=st.lists(st.integers(0, 5_000), max_size=10))
@settings(max_examples=100)
def test_whatever_comes_is_taken_or_refused(
    fuzzed: tuple[Group, Replica, Caller], messages: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    """However it is cut into records."""
    group, replica, caller = fuzzed
    replica.heard.clear()
    before = replica.count("peers_refused")
    whole = b"".join(
        HEAD.pack(len(frame), len(content)) + frame + content
        for frame, content in (*messages, (encode_frame(beat(77)), b""))
    )
    ends = [*sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    for begin, end in zip([0, *ends], ends, strict=False):
        caller.connection.write(whole[begin:end])
    group.until(lambda: replica.heard and replica.heard[-1][1] == beat(77))
    refused = replica.count("peers_refused") - before
    assert len(replica.heard) - 1 + refused == len(messages)
    for sender, frame, content in replica.heard:
        assert sender == "n1"
        assert (content is not None) == isinstance(frame, Bytes)
        assert content is None or len(content) == frame.length


@pytest.mark.parametrize("what", ["content", "frame", "both"])
def test_what_is_too_large_ends_its_connection(
    group: Group, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By its size alone, before any of it comes."""
    replica = group.add("n0", content_bytes_max=200_000)
    replica.peers.replace({"n1": f"127.0.0.1:{free_ports()}"})
    frame, content = records(bytes(200_000))
    caller = group.call_as("n1", replica)
    caller.send(encode_frame(frame), bytes(content))
    group.until(lambda: replica.heard)
    with caplog.at_level(logging.WARNING):
        head = {
            "content": HEAD.pack(10, 200_001),
            "frame": HEAD.pack(FRAME_BYTES_MAX + 1, 0),
            "both": b"\xff" * HEAD.size,
        }[what]
        caller.connection.write(head)
        group.until(lambda: caller.why)
    assert replica.count("peers_connections_ended") == 1
    assert "the connection by which replica n1 speaks is ended: a frame of" in caplog.text
    assert [frame.length for _, frame, _ in replica.heard if isinstance(frame, Bytes)] == [200_000]


class Relay:
    """Between somebody and a port: what goes through is counted, and may be changed."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.flip_in = -1  # so many bytes from now on, to the port; below 0: nowhere
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = connect(self._target)
                for one, other, is_forth in ((ours, theirs, True), (theirs, ours, False)):
                    ends = (one, other, is_forth)
                    self._threads.append(threading.Thread(target=self._copy, args=ends))
                    self._threads[-1].start()

    def _copy(self, one: socket.socket, other: socket.socket, is_forth: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(one.recv(65_536)):
                if is_forth and self.flip_in >= 0:
                    if self.flip_in < len(data):
                        data[self.flip_in] ^= 1
                    self.flip_in -= len(data)
                other.sendall(data)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        if not is_forth:
            one.close()
            other.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.mark.parametrize("at", [0, 1, 4, 5, 20, 100, 20_000])
def test_a_flipped_bit_ends_the_connection_and_nothing_of_it_is_heard(
    group: Group, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    sender, taker = group.add("n0"), group.add("n1")
    taker.peers.replace({"n0": sender.peers.address})
    with Relay(taker.peers.address) as relay, caplog.at_level(logging.WARNING):
        sender.peers.replace({"n1": relay.address})
        group.tell(sender, "n1", beat(1))
        group.until(lambda: taker.heard)
        relay.flip_in = at
        assert sender.peers.send("n1", *records(bytes(100_000)))
        group.until(lambda: not sender.count("peer.n1.connected"))
        assert taker.count("peers_connections_ended") == 1
        assert "replica n0 speaks is ended: it breaks TLS" in caplog.text
        group.tell(sender, "n1", beat(2))  # over another one
        group.until(lambda: len(taker.heard) == 2)
        sender.peers.close()
        group.replicas.remove(sender)
    assert [frame for _, frame, _ in taker.heard] == [beat(1), beat(2)]


@pytest.mark.parametrize("begins", [b"", HEAD.pack(10, 100_000) + bytes(50_000)])
def test_what_follows_the_end_of_tls_is_not_waited_for(group: Group, begins: bytes) -> None:
    """OpenSSL reads nothing behind an alert that says that this was all."""
    replica = group.add("n0")
    replica.peers.replace({"n1": f"127.0.0.1:{free_ports()}"})
    caller = group.call_as("n1", replica)
    caller.connection.write(begins)
    with pytest.raises(ssl.SSLWantReadError):
        caller.connection.tls.unwrap()
    with contextlib.suppress(ConnectionLost):
        caller.connection.shake_hands()  # sends what there is to be sent
    caller.connection._socket.sendall(bytes(1_000))
    group.until(lambda: caller.why)
    assert not replica.heard


def test_a_key_carries_so_much_and_no_more(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "KEY_BYTES_MAX", 100_000)
    sender, taker = group.add("n0"), group.add("n1")
    group.connect()
    for number in range(20):
        group.tell(sender, "n1", *records(bytes(50_000), number))
    group.until(lambda: len(taker.heard) == 20)
    assert sender.count("peers_dropped") >= 5


def test_some_at_a_time(three: Group) -> None:
    """Whoever listens hears its timers between."""
    sender, taker, _ = three.replicas
    # Who is let in later makes for more to be heard, too.
    three.until(lambda: all(each.count("peers_connected") == 2 for each in three.replicas))
    assert sender.peers.send("n1", beat(0))
    for number in range(1, 500):
        assert sender.peers.send("n1", beat(number))
    deadline = time.monotonic() + WAIT_S
    while len(taker.heard) < 500:
        assert time.monotonic() < deadline
        before = len(taker.heard)
        more = taker.peers.receive()
        taker.peers.tend()
        assert len(taker.heard) - before <= 64
        assert not more or len(taker.heard) - before == 64
    assert [frame for _, frame, _ in taker.heard] == [beat(number) for number in range(500)]


# --- lines that end ---


def test_a_replica_is_killed_and_comes_back(group: Group) -> None:
    replica = group.add("n0")
    where = f"127.0.0.1:{free_ports()}"
    replica.peers.replace({"n1": where})

    others = {"n0": replica.peers.address}
    with peers_child.running(SECRET, "n1", where, others):
        group.ask(replica, "n1", beat(1))
    group.until(lambda: not replica.peers.send("n1", beat(2)))
    for number in range(100, 110):  # nothing waits for it
        assert not replica.peers.send("n1", beat(number))
    group.until(lambda: not replica.count("peers_connected"))
    with peers_child.running(SECRET, "n1", where, others) as child:
        group.ask(replica, "n1", beat(3))
        assert not {*range(100, 110)} & {
            frame.number for _, frame, _ in replica.heard if isinstance(frame, Beat)
        }
        child.communicate(b"")
        assert child.returncode == 0


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, b"\xff" * 64, b""])
def test_another_service_has_had_the_port_for_a_while(group: Group, answer: bytes) -> None:
    replica = group.add("n0")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", free_ports()))
        other.listen()
        where = f"127.0.0.1:{other.getsockname()[1]}"
        replica.peers.replace({"n1": where})
        connection = other.accept()[0]
        with connection:
            connection.setblocking(False)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            group.until(lambda: has_ended(connection))
    group.add("n1", bind=where).peers.replace({"n0": replica.peers.address})
    group.until(lambda: replica.peers.send("n1", beat(1)))
    group.until(lambda: group.replicas[1].heard)


def test_a_port_that_never_answers_is_given_up(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And then tried again."""
    monkeypatch.setattr(speaking, "HANDSHAKE_S", 0.1)
    replica = group.add("n0")
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING):
        replica.peers.replace({"n1": f"127.0.0.1:{silent.getsockname()[1]}"})
        connection = silent.accept()[0]
        connection.setblocking(False)
        group.until(lambda: has_ended(connection))
        connection.close()
        group.until(lambda: select.select([silent], [], [], 0)[0])
    assert "it has not let us in" in caplog.text


def test_threads_that_cannot_be_had_are_tried_for_again(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    first, second = group.add("n0"), group.add("n1")
    second.peers.replace({"n0": first.peers.address})
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(speaking.threading, "Thread", Refused)
        first.peers.replace({"n1": second.peers.address})
    assert "can't start new thread" in caplog.text
    group.tell(first, "n1", beat(1))
    group.until(lambda: second.heard)


def test_who_comes_is_gone_to_at_once(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the time has come for the next attempt."""
    monkeypatch.setattr(speaking, "pause_s", lambda _failures: 600.0)
    first = group.add("n0")
    where = f"127.0.0.1:{free_ports()}"
    first.peers.replace({"n1": where})
    group.until(lambda: first.peers._speaking["n1"]._failures)
    second = group.add("n1", bind=where)
    second.peers.replace({"n0": first.peers.address})
    group.tell(first, "n1", beat(1))
    group.until(lambda: second.heard)


def test_a_replica_that_the_others_learn_of_later_is_let_in(group: Group) -> None:
    first, second = group.add("n0"), group.add("n1")
    second.peers.replace({"n0": first.peers.address})
    group.until(lambda: first.count("peers_not_admitted") > 1)  # it tries again by itself
    first.peers.replace({"n1": second.peers.address})
    group.tell(second, "n0", beat(1))
    group.until(lambda: first.heard)


def test_replicas_are_added_and_let_go(three: Group) -> None:
    first, second, third = three.replicas
    three.tell(third, "n0", beat(1))
    three.until(lambda: first.heard)
    first.peers.replace({"n0": first.peers.address, "n1": second.peers.address})
    first.heard.clear()
    assert not first.peers.send("n2", beat())
    # What n2 says is not heard any more; its connection is ended, and not let in again.
    third.peers.send("n0", beat(2))
    three.until(lambda: first.count("peers_not_admitted"))
    assert not third.peers.send("n0", beat(2))
    assert not first.heard
    three.tell(second, "n0", beat(3))
    three.until(lambda: first.heard)
    assert first.heard == [("n1", beat(3), None)]
    three.connect()
    three.tell(third, "n0", beat(4))
    three.tell(first, "n2", beat(5))
    three.until(lambda: len(first.heard) == 2 and third.heard)
    assert first.heard[1] == ("n2", beat(4), None)


def test_a_replica_that_has_moved_is_told_at_its_new_place(three: Group) -> None:
    first, second, third = three.replicas
    three.tell(first, "n1", beat(1))
    three.tell(first, "n2", beat(1))
    stays = first.peers._speaking["n2"]
    moved = Replica("n1")
    moved.peers.replace({"n0": first.peers.address})
    three.replicas.append(moved)
    first.peers.replace({"n1": moved.peers.address, "n2": third.peers.address})
    three.tell(first, "n1", beat(2))
    three.until(lambda: moved.heard and second.heard)
    assert moved.heard == [("n0", beat(2), None)]
    assert second.heard == [("n0", beat(1), None)]
    assert first.peers._speaking["n2"] is stays


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:port", "127.0.0.1:99999", "[::1:1"])
def test_an_address_of_the_record_that_is_none(
    group: Group, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = group.add("n0"), group.add("n1")
    second.peers.replace({"n0": first.peers.address})
    with caplog.at_level(logging.WARNING):
        first.peers.replace({"n2": address, "n1": second.peers.address})
        group.until(
            lambda: (
                first.peers.statistics() and f"no line to replica n2 at {address}:" in caplog.text
            )
        )
    assert not first.peers.send("n2", beat())
    group.tell(first, "n1", beat(1))
    group.until(lambda: second.heard)


# --- bounds ---


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("size", [None, 1_000, MIB])
@pytest.mark.slow
def test_a_full_queue_refuses_and_does_not_grow(three: Group, size: int | None) -> None:
    sender, taker, _ = three.replicas
    three.tell(sender, "n1", beat(0))
    three.until(lambda: taker.heard)
    before = rss_bytes()
    content = None if size is None else memoryview(bytes(size))
    limit = 5_000_000 // ((size or 0) + 100) + 200_000
    taken = []
    for number in range(1, limit):  # n1 takes nothing up
        frame = beat(number) if size is None else Bytes(GROUP, 1, 2, number, size, 0, 0)
        if not sender.peers.send("n1", frame, content):
            break
        taken.append(number)
    else:
        pytest.fail(f"{limit} messages were taken")
    assert sender.count("peers_dropped") > 0
    assert rss_bytes() - before < speaking.WAITING_BYTES + 192 * MIB
    # It goes on; until then more than one may be lost, with a connection that has ended.
    three.until(
        lambda: sender.peers.send("n1", beat(1 << 40)) and taker.heard[-1][1] == beat(1 << 40)
    )
    heard = [
        frame.number if isinstance(frame, Beat) else frame.offset
        for _, frame, _ in taker.heard[1:]
        if isinstance(frame, Beat | Bytes) and frame != beat(1 << 40)
    ]
    assert heard == sorted(set(heard))  # a connection that ended may have lost some
    assert set(heard) <= set(taken)


@pytest.mark.slow
def test_a_replica_that_is_stopped_costs_bounded_memory_and_its_connection(group: Group) -> None:
    """The system sees to the latter; once it goes on it is spoken to again."""
    sender = group.add("n0")
    where = f"127.0.0.1:{free_ports()}"
    others = {"n0": sender.peers.address}
    with peers_child.running(SECRET, "n1", where, others) as child:
        sender.peers.replace({"n1": where})
        group.ask(sender, "n1", beat(1))
        os.kill(child.pid, signal.SIGSTOP)
        before, dropped = rss_bytes(), sender.count("peers_dropped")
        while sender.peers.send("n1", *records(bytes(MIB))):
            sender.peers.receive()
        assert sender.count("peers_dropped") > dropped
        assert rss_bytes() - before < speaking.WAITING_BYTES + 64 * MIB
        group.until(lambda: not sender.count("peers_connected"))
        os.kill(child.pid, signal.SIGCONT)
        group.ask(sender, "n1", beat(2))


def test_strangers_keep_nobody_out(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """A thousand connections that never say anything, and replicas come through."""
    first, second = group.add("n0", strangers_max=16, handshake_s=600), group.add("n1")
    group.connect()
    group.tell(second, "n0", beat(1))
    group.until(lambda: first.heard)
    with caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
        for number in range(1, 1_001):
            stack.enter_context(connect(first.peers.address))
            group.until(
                lambda number=number: first.count("peers_connections_refused") >= number - 16
            )
        assert first.count("peers_connections") <= 16 + 1
        third = group.add("n2")
        group.connect()
        group.tell(third, "n0", beat(2))
        group.tell(second, "n0", beat(3))
        group.until(lambda: len(first.heard) == 3)
        assert second.count("peer.n0.connected") == 1
    assert {sender for sender, _, _ in first.heard} == {"n1", "n2"}
    assert caplog.text.count("others come") == 1  # and not a thousand times


def test_a_stranger_has_its_time(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """One that says nothing, and one that stops in the middle of its handshake."""
    replica = group.add("n0", handshake_s=0.2)
    replica.peers.replace({"n1": f"127.0.0.1:{free_ports()}"})
    half = contexts(SECRET, GROUP, "n1").client.wrap_bio(ssl.MemoryBIO(), hello := ssl.MemoryBIO())
    with contextlib.suppress(ssl.SSLWantReadError):
        half.do_handshake()
    with (
        caplog.at_level(logging.WARNING),
        connect(replica.peers.address) as silent,
        connect(replica.peers.address) as stalled,
    ):
        stalled.sendall(hello.read())
        for client in (silent, stalled):
            client.setblocking(False)
            group.until(lambda client=client: has_ended(client))
    assert replica.count("peers_connections_refused") == 2
    assert "was a stranger for" in caplog.text


def test_strangers_have_a_share_of_the_time(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it they wait until the next beat, and replicas are heard."""
    monkeypatch.setattr(strangers, "SHARE_S", 0.0)
    first, second = group.add("n0"), group.add("n1")
    group.connect()
    group.tell(second, "n0", beat(1))
    group.until(lambda: first.heard)
    first.peers.tend()
    with connect(first.peers.address), connect(first.peers.address):
        while not first.count("peers_connections") > 1:
            first.peers.receive()
        late = connect(first.peers.address)
        for number in range(2, 100):
            assert second.peers.send("n0", beat(number))
        while len(first.heard) < 99:
            first.peers.receive()
            assert first.count("peers_connections") == 3
        late.close()


def test_a_stranger_that_sends_much_is_ended(group: Group) -> None:
    """It begins a handshake of 16 MiB, in records that hold."""
    replica = group.add("n0", handshake_s=600)
    record = b"\x16\x03\x01\x40\x00" + b"\x01\x00\xff\xff" + bytes(0x4000 - 4)
    ended = []

    def flood() -> None:
        with contextlib.suppress(ConnectionError), connect(replica.peers.address) as client:
            client.sendall(record * 1_000)
            while client.recv(100):
                pass
        ended.append(True)

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    group.until(lambda: not any(thread.is_alive() for thread in threads))
    assert len(ended) == 8
    found = replica.count("peers_connections_refused") + replica.count("peers_handshakes_failed")
    assert found == 8


def test_without_descriptors_the_lines_that_are_there_stay(group: Group) -> None:
    """More strangers than the process has descriptors for; who waits is let in when they go."""
    replica = group.add("n0")
    where = f"127.0.0.1:{free_ports()}"
    late = group.add("n2")
    others = {"n0": replica.peers.address, "n2": late.peers.address}
    with peers_child.running(SECRET, "n1", where, others) as child:
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (100, 100))
        replica.peers.replace({"n1": where})
        group.ask(replica, "n1", beat(1))
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(connect(where))
            for number in range(2, 100):
                assert replica.peers.send("n1", beat(number))
            group.until(lambda: replica.heard[-1][1] == beat(99))
        late.peers.replace({"n1": where})
        group.ask(late, "n1", beat(1))
        child.communicate(b"")
        assert child.returncode == 0


def test_nothing_is_left_when_it_is_closed() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = held()
    for _ in range(10):
        group = Group()
        for name in NAMES:
            group.add(name)
        group.connect()
        group.tell(group.replicas[0], "n1", *records(bytes(MIB)))
        group.connect()
        group.replicas[1].peers.replace({})
        group.close()
    for thread in threading.enumerate():
        if thread.name == "connecting":
            thread.join(WAIT_S)
    assert held() == before


def options_of(port: int) -> Iterator[tuple[int, int]]:
    """Of each connection of this process that has to do with the port: whether the system asks the
    other side now and then whether it is there, and after how many ms of silence it ends."""
    for found in psutil.Process().net_connections("tcp"):
        if found.status == psutil.CONN_ESTABLISHED and port in (found.laddr.port, found.raddr.port):
            with socket.socket(fileno=os.dup(found.fd)) as connection:
                yield (
                    connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                    connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                )


def test_lines_to_a_machine_that_vanishes_end(three: Group) -> None:
    """The system sees to that, as it is told for both ends."""
    first, second, _ = three.replicas
    three.tell(first, "n1", beat())
    three.tell(second, "n0", beat())
    three.until(lambda: first.heard and second.heard)
    assert [*options_of(int(first.peers.address.rpartition(":")[2]))].count((1, 2_000)) >= 2
    assert [*options_of(int(second.peers.address.rpartition(":")[2]))].count((1, 2_000)) >= 2


def test_an_address_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"n0 at {where}: Address already in use"):
            Replica("n0", bind=where)
