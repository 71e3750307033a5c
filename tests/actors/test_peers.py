"""The lines between the replicas of a group: who is heard, what is taken, and what is dropped."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers_child
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_ports
from zmtp import GREETING, RawClient

from cometmq.actors.replication import peer_dealer, secret
from cometmq.actors.replication.core.frames import (
    FRAME_BYTES_MAX,
    AnyFrame,
    Beat,
    Bid,
    Bytes,
    encode_frame,
)
from cometmq.actors.replication.peers import Peers
from cometmq.actors.replication.said import Said
from cometmq.actors.replication.secret import KeyPair, key_pair, load_secret, make_secret
from cometmq.actors.runtime.connections import ConnectionLimits
from cometmq.protocol.errors import ConfigError
from cometmq.protocol.wire.monitor import read_event

WAIT_S = 60
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
            said=Said(),
            **more,
        )

    def _on_frame(self, sender: str, frame: AnyFrame, content: memoryview | None) -> None:
        self.heard.append((sender, frame, None if content is None else bytes(content)))

    def count(self, name: str) -> int:
        return int(self.peers.statistics()[name])


class Group:
    """Replicas of one thread, this one."""

    def __init__(self) -> None:
        self.replicas: list[Replica] = []

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
            sources = [(each, zmq.POLLIN) for one in self.replicas for each in one.peers.sources]
            zmq.zmq_poll(sources, 10)
            for each in self.replicas:
                each.peers.receive()

    def tell(self, sender: Replica, to: str, frame: AnyFrame, content: Any = None) -> None:
        """Again until it is connected."""
        self.until(lambda: sender.peers.send(to, frame, content))

    def ask(self, asker: Replica, to: str, frame: AnyFrame) -> None:
        """One that says back what it hears; again until its answer is there."""
        self.until(lambda: asker.peers.send(to, frame) and (to, frame, None) in asker.heard)

    def close(self) -> None:
        for each in self.replicas:
            each.peers.close()


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
    """A DEALER that comes to a replica's port as somebody else would."""

    def __init__(
        self, address: str, *, keys: KeyPair | None, server: bytes = b"", identity: bytes = b""
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.immediate = True
        self.socket.reconnect_ivl = -1
        if identity:
            self.socket.identity = identity
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys
            self.socket.curve_serverkey = server
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ALL)
        self.events: set[int] = set()
        self.address = address

    @classmethod
    def as_replica(cls, name: str, replica: Replica, **more: Any) -> Caller:
        server = key_pair(SECRET, GROUP, replica.name).public
        return cls(replica.peers.address, keys=key_pair(SECRET, GROUP, name), server=server, **more)

    def connect(self) -> None:
        self.socket.connect(f"tcp://{self.address}")

    def saw(self, event: int) -> bool:
        with contextlib.suppress(zmq.Again):
            while True:
                self.events.add(read_event(self.monitor)[0])
        return event in self.events

    def send(self, *parts: bytes) -> bool:
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def __enter__(self) -> Caller:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)


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


def test_what_is_in_flight_is_counted_to_the_byte(three: Group) -> None:
    """Or a line that is busy for long would be ended for what was taken up."""
    sender, taker, _ = three.replicas
    sizes = [0, 1, 200, 214, 215, 216, 254, 255, 256, 257, 65_535, 65_536, MIB]
    for size in sizes:
        three.tell(sender, "n1", *records(bytes(size)))
    for number in range(1_000):
        three.tell(sender, "n1", beat(number))
    three.until(lambda: len(taker.heard) == len(sizes) + 1_000)
    known = list(taker.peers._strangers._known.values())
    assert len(known) == 2
    three.until(lambda: all(0 <= each.waiting() < 1_000 for each in known))  # of the handshake


# --- who is heard ---


def stranger_tests() -> dict[str, tuple[KeyPair | None, str, str]]:
    """Keys, the group whose key of n0 is expected, and the counter that tells of it."""
    wrong = bytes(32)
    return {
        "another secret": (key_pair(wrong, GROUP, "n1"), "wrong", "peers_handshakes_failed"),
        "another group": (key_pair(SECRET, "b", "n1"), "group", "peers_handshakes_failed"),
        "no CURVE": (None, "", "peers_handshakes_failed"),
        "a name not in the record": (key_pair(SECRET, GROUP, "n9"), "", "peers_not_admitted"),
        "its own name": (key_pair(SECRET, GROUP, "n0"), "", "peers_not_admitted"),
        "another group's, to the right key": (
            key_pair(SECRET, "b", "n1"), "", "peers_not_admitted",
        ),
        "another secret's, to the right key": (
            key_pair(wrong, GROUP, "n1"), "", "peers_not_admitted",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("who", list(stranger_tests()))
def test_strangers_are_not_heard(three: Group, who: str, caplog: pytest.LogCaptureFixture) -> None:
    keys, server, counter = stranger_tests()[who]
    replica = three.replicas[0]
    secrets = {"wrong": (bytes(32), GROUP), "group": (SECRET, "b"), "": (SECRET, GROUP)}
    public = key_pair(*secrets[server], "n0").public
    with (
        caplog.at_level(logging.WARNING),
        Caller(replica.peers.address, keys=keys, server=public) as caller,
    ):
        three.until(lambda: caller.send(encode_frame(beat())) or replica.count(counter))
        assert replica.count(counter)
        three.until(lambda: caller.saw(zmq.EVENT_DISCONNECTED))
    three.until(lambda: "port of replicas" in caplog.text or "not let in" in caplog.text)
    three.tell(three.replicas[1], "n0", beat(7))
    three.until(lambda: replica.heard)
    assert replica.heard == [("n1", beat(7), None)]


def test_plain_passwords_are_not_heard(three: Group) -> None:
    replica = three.replicas[0]
    caller = Caller(replica.peers.address, keys=None)
    caller.socket.plain_username, caller.socket.plain_password = b"n1", b"n1"
    with caller:
        three.until(lambda: replica.count("peers_handshakes_failed"))
        assert not caller.send(encode_frame(beat()))
    assert not replica.heard


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\nHost: n0\r\n\r\n",
        bytes(100),
        b"\xff" * 100,
        GREETING,
        GREETING.replace(b"NULL\0", b"CURVE") + b"\x04\x05READY",
        GREETING.replace(b"NULL\0", b"CURVE") + b"\x04\xc8\x05HELLO" + bytes(194),
        b"\x01\0" * 50,  # ZMTP 1, which knows no CURVE
    ],
)
def test_rubbish_is_ended(three: Group, rubbish: bytes) -> None:
    replica = three.replicas[0]
    client = RawClient(replica.peers.address, handshake=False).socket
    with client, contextlib.suppress(OSError):  # it may have been ended by now
        client.sendall(rubbish)
        client.shutdown(socket.SHUT_WR)
        while client.recv(4096):
            pass
    three.tell(three.replicas[1], "n0", beat(7))
    three.until(lambda: replica.heard)
    assert replica.heard == [("n1", beat(7), None)]


def test_nobody_is_another_one(three: Group) -> None:
    """What it calls itself counts for nothing, the key does."""
    replica = three.replicas[0]
    with Caller.as_replica("n1", replica, identity=b"n2") as caller:
        three.until(lambda: caller.send(encode_frame(beat(9))))
        three.until(lambda: replica.heard)
    assert replica.heard == [("n1", beat(9), None)]


def test_who_listens_in_the_place_of_another_is_told_nothing(group: Group) -> None:
    """n1's address leads to n2: it does not have n1's key."""
    sender, other = group.add("n0"), group.add("n2")
    sender.peers.replace({"n1": other.peers.address})
    other.peers.replace({"n0": sender.peers.address})
    group.until(lambda: other.count("peers_handshakes_failed"))
    assert not sender.peers.send("n1", beat())
    assert not other.heard


def test_other_sockets_of_the_process_are_asked_nothing(three: Group) -> None:
    """ZeroMQ asks one authority for each context, which knows replicas alone."""
    here = zmq.Context.instance()
    with here.socket(zmq.ROUTER) as router, here.socket(zmq.DEALER) as dealer:
        router.zap_domain = b"clients"
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        assert router.poll(WAIT_S * 1000)
        assert router.recv_multipart()[1] == b"hello"
    assert not three.replicas[0].count("peers_not_admitted")


# --- what is taken ---


def refused_messages() -> dict[str, tuple[bytes, ...]]:
    frame, content = encode_frame(records(b"abc")[0]), b"abc"
    return {
        "no frame": (b"",),
        "rubbish": (b"\x93\x01\x02",),
        "an unknown kind": (b"\x94\x63\xa1g\x01\x02",),
        "a frame over the limit": (bytes(FRAME_BYTES_MAX + 1),),
        "three parts": (frame, content, b""),
        "forty parts": (frame, *[content] * 39),
        "nothing behind it": (frame,),
        "less behind it": (frame, content[:2]),
        "more behind it": (frame, content + b"d"),
        "bytes behind a beat": (encode_frame(beat()), b""),
    }


@pytest.mark.parametrize("what", list(refused_messages()))
def test_a_message_that_is_none_is_refused(
    three: Group, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    replica = three.replicas[0]
    with caplog.at_level(logging.WARNING), Caller.as_replica("n1", replica) as caller:
        three.until(lambda: caller.send(*refused_messages()[what]))
        three.until(lambda: caller.send(encode_frame(beat(1))))
        three.until(lambda: replica.heard)
    assert replica.heard == [("n1", beat(1), None)]
    assert replica.count("peers_refused") == 1
    assert "a message of replica n1 is refused" in caplog.text


FRAMES = st.sampled_from([encode_frame(beat(1)), encode_frame(records(b"abc")[0])])
PARTS = st.lists(st.one_of(st.binary(max_size=300), FRAMES, st.just(b"abc")), min_size=1)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[tuple[Group, Replica, Caller]]:
    group = Group()
    replica = group.add("n0")
    replica.peers.replace({"n1": f"127.0.0.1:{free_ports()}"})
    with Caller.as_replica("n1", replica) as caller:
        yield group, replica, caller
    group.close()


@given(messages=st.lists(PARTS, max_size=10))
@settings(max_examples=100)
def test_whatever_comes_is_taken_or_refused(
    fuzzed: tuple[Group, Replica, Caller], messages: list[list[bytes]]
) -> None:
    group, replica, caller = fuzzed
    replica.heard.clear()
    before = replica.count("peers_refused")
    for parts in messages:
        group.until(lambda parts=parts: caller.send(*parts))
    group.until(lambda: caller.send(encode_frame(beat(77))))
    group.until(lambda: replica.heard and replica.heard[-1][1] == beat(77))
    refused = replica.count("peers_refused") - before
    assert len(replica.heard) - 1 + refused == len(messages)
    for sender, frame, content in replica.heard:
        assert sender == "n1"
        assert (content is not None) == isinstance(frame, Bytes)
        assert content is None or len(content) == frame.length


def test_what_is_too_large_ends_its_connection(group: Group) -> None:
    """By its size alone, before any of it comes."""
    replica = group.add("n0", content_bytes_max=200_000)
    replica.peers.replace({"n1": f"127.0.0.1:{free_ports()}"})
    frame, content = records(bytes(200_000))
    with Caller.as_replica("n1", replica) as caller:
        group.until(lambda: caller.send(encode_frame(frame), bytes(content)))
        group.until(lambda: replica.heard)
        larger, content = records(bytes(200_001))
        assert caller.send(encode_frame(larger), bytes(content))
        group.until(lambda: caller.saw(zmq.EVENT_DISCONNECTED))
    assert [frame.length for _, frame, _ in replica.heard if isinstance(frame, Bytes)] == [200_000]


def test_some_at_a_time(three: Group) -> None:
    """Whoever listens hears its timers between."""
    sender, taker, _ = three.replicas
    three.until(lambda: sender.peers.send("n1", beat(0)))
    for number in range(1, 500):
        assert sender.peers.send("n1", beat(number))
    deadline = time.monotonic() + WAIT_S
    while len(taker.heard) < 500:
        assert time.monotonic() < deadline
        before = len(taker.heard)
        more = taker.peers.receive()
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


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, GREETING, b""])
def test_another_service_has_had_the_port_for_a_while(group: Group, answer: bytes) -> None:
    """ZeroMQ gives up what does not speak as it does."""
    replica = group.add("n0")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", free_ports()))
        other.listen()
        where = f"127.0.0.1:{other.getsockname()[1]}"
        replica.peers.replace({"n1": where})
        connection = other.accept()[0]
        with connection, contextlib.suppress(OSError):  # it may have been ended by now
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    group.add("n1", bind=where).peers.replace({"n0": replica.peers.address})
    group.until(lambda: replica.peers.send("n1", beat(1)))
    group.until(lambda: group.replicas[1].heard)


def test_a_line_that_is_given_up_is_made_anew(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whatever reason ZeroMQ does not try any more."""
    monkeypatch.setattr(peer_dealer, "GIVEN_UP_S", 0.1)
    first, second = group.add("n0"), group.add("n1")
    first.peers.replace({"n1": second.peers.address})
    first.peers._dealers["n1"]._socket.disconnect(f"tcp://{second.peers.address}")
    second.peers.replace({"n0": first.peers.address})
    group.tell(first, "n1", beat(1))
    group.until(lambda: second.heard)


def test_who_comes_is_gone_to_at_once(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the time has come for the next attempt."""
    for name in ("RECONNECT_MS", "RECONNECT_MAX_MS"):
        monkeypatch.setattr(peer_dealer, name, 600_000)
    monkeypatch.setattr(peer_dealer, "GIVEN_UP_S", 600.0)
    first = group.add("n0")
    where = f"127.0.0.1:{free_ports()}"
    first.peers.replace({"n1": where})
    dealer = first.peers._dealers["n1"]
    group.until(lambda: first.peers.statistics() and dealer._is_resting)
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
    three.until(lambda: third.peers.send("n0", beat(2)) and first.count("peers_refused"))
    three.until(lambda: first.count("peers_not_admitted"))
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
    stays = first.peers._dealers["n2"]
    moved = Replica("n1")
    moved.peers.replace({"n0": first.peers.address})
    three.replicas.append(moved)
    first.peers.replace({"n1": moved.peers.address, "n2": third.peers.address})
    three.tell(first, "n1", beat(2))
    three.until(lambda: moved.heard and second.heard)
    assert moved.heard == [("n0", beat(2), None)]
    assert second.heard == [("n0", beat(1), None)]
    assert first.peers._dealers["n2"] is stays


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
    assert rss_bytes() - before < peer_dealer.WAITING_BYTES + 192 * MIB
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


LIMITS = ConnectionLimits(connections=16, in_flight_bytes=64 * MIB, handshake_ms=600_000)


def test_strangers_keep_nobody_out(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """A hundred connections that never say anything, and replicas come through."""
    first, second = group.add("n0", limits=LIMITS), group.add("n1")
    group.connect()
    group.tell(second, "n0", beat(1))
    group.until(lambda: first.heard)
    with caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
        for _ in range(100):
            client = RawClient(first.peers.address, handshake=False)
            stack.callback(client.socket.close)
        group.until(lambda: first.count("peers_connections_refused") >= 100 + 1 - 16)
        assert first.count("peers_connections") <= 16
        third = group.add("n2")
        group.connect()
        group.tell(third, "n0", beat(2))
        group.tell(second, "n0", beat(3))
        group.until(lambda: len(first.heard) == 3)
        assert second.peers.statistics()["peer.n0.connected"] == 1
    assert {sender for sender, _, _ in first.heard} == {"n1", "n2"}
    assert caplog.text.count("others come") == 1  # and not a hundred times


def test_a_stranger_that_sends_much_is_ended(group: Group) -> None:
    """It says that the first frame of its handshake has 16 MiB, and begins to send them."""
    replica = group.add("n0", limits=LIMITS)
    head = GREETING.replace(b"NULL\0", b"CURVE") + struct.pack(">BQ", 6, 16 * MIB)
    ended = []

    def flood() -> None:
        with contextlib.closing(RawClient(replica.peers.address, handshake=False).socket) as client:
            try:
                client.sendall(head + bytes(15 * MIB))
                ended.append(not client.recv(100)[64:])
                while client.recv(100):
                    pass
            except ConnectionError:
                ended.append(True)

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    group.until(lambda: not any(thread.is_alive() for thread in threads))
    assert len(ended) == 8
    assert replica.count("peers_connections_refused") == 8


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
                client = RawClient(where, handshake=False)
                stack.callback(client.socket.close)
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

    counts = []
    for _ in range(10):
        group = Group()
        for name in NAMES:
            group.add(name)
        group.connect()
        group.tell(group.replicas[0], "n1", *records(bytes(MIB)))
        group.connect()
        group.replicas[1].peers.replace({})
        group.close()
        counts.append(held())
    assert counts[0] == counts[-1]


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


# --- keys and the secret ---


def test_keys_are_those_of_the_secret_the_group_and_the_name() -> None:
    pairs = {
        key_pair(secret, group, name)
        for secret in (SECRET, bytes(32))
        for group in ("a", "b", "ab")
        for name in ("a", "b", "ba")
    }
    assert len(pairs) == len({pair.public for pair in pairs}) == 18
    assert key_pair(SECRET, "a", "n0") == key_pair(SECRET, "a", "n0")


def test_keys_are_the_same_for_ever() -> None:
    """Or replicas of two releases could not speak to each other."""
    assert key_pair(SECRET, "group-a", "n0") == KeyPair(
        b"2X=YMtqU3Mm]3[qtyR7V==/tWa4Kl3T%oj%)l6L&",
        b"{.fT!&4@m)[?0(-YtZJi}b3GgXkPxADjU0nh(9i:",
    )


def test_without_curve_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    with pytest.raises(ConfigError, match="built without it"):
        Replica("n0")


def test_an_address_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"n0 at {where}: Address already in use"):
            Replica("n0", bind=where)


def test_a_secret_is_made_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    found = load_secret(path)
    assert len(found) == 32
    assert path.stat().st_mode & 0o7777 == 0o600
    assert [*tmp_path.iterdir()] == [path]
    with pytest.raises(ConfigError, match="there is a file already"):
        make_secret(path)
    assert load_secret(path) == found
    assert [*tmp_path.iterdir()] == [path]
    make_secret(tmp_path / "another")
    assert load_secret(tmp_path / "another") != found


@pytest.mark.parametrize("step", ["write_beside", "sync_folder", "link"])
def test_a_secret_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os if step == "link" else secret, step, fail)
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="Permission denied"):
        make_secret(path)
    left = [*tmp_path.iterdir()]
    assert left == ([path] if step == "sync_folder" else [])
    if left:
        load_secret(path)


TEXT = b"0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("content", "is_good"),
    [
        (TEXT, True),
        (TEXT + b"\n", True),
        (TEXT.upper(), True),
        (TEXT[:-1], False),
        (TEXT[:-1] + b"\n", False),
        (TEXT + b"0", False),
        (TEXT + b"\n\n", False),
        (TEXT[:-1] + b"g", False),
        (b"", False),
        (b"\n", False),
        (bytes(64), False),
        ("é".encode() * 32, False),
        (TEXT * 1_000, False),
    ],
)
def test_what_is_a_secret(tmp_path: Path, content: bytes, is_good: bool) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    if is_good:
        assert load_secret(path) == bytes.fromhex(TEXT.decode())
    else:
        with pytest.raises(ConfigError, match=f"groupSecretFile = {path}: .*hexadecimal"):
            load_secret(path)


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602, 0o601, 0o666, 0o610])
def test_a_secret_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode is {mode:04o}"):
        load_secret(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "socket", "nothing", "zero"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "secret"
    with contextlib.ExitStack() as stack:
        match kind:
            case "folder":
                path.mkdir(0o700)
            case "pipe":
                os.mkfifo(path, 0o600)
            case "device":
                path.symlink_to("/dev/zero")
            case "socket":
                stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
            case "zero":
                path = tmp_path / "a\0b"
        with pytest.raises(ConfigError, match=r"no regular file|cannot be read"):
            load_secret(path)


def test_a_secret_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner:
        with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
            load_secret(path)
    else:
        os.chown(path, 4_711, -1)
        with pytest.raises(ConfigError, match="belongs to user 4711"):
            load_secret(path)
