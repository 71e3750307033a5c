"""What an actor's inbox looks at, and what it is told to look at no longer."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from collections.abc import Iterator

import pytest
import zmq
from patience import patient

from cometmq.actors.runtime.inbox import SocketInbox
from cometmq.actors.runtime.sources import Sources

FAR = 300  # Python keeps the small numbers, so each of them is always the same object
TIMEOUT_S = patient(30)
SEED = random.randrange(1 << 32)


def test_a_descriptor_is_forgotten_by_its_number() -> None:
    inbox = SocketInbox()
    reader, writer = os.pipe()
    far = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, FAR)
    try:
        before = list(inbox._sources)
        inbox.listen_to(int(str(far)))
        os.write(writer, b"x")
        inbox.forget(int(str(far)))
        assert list(inbox._sources) == before
        assert not inbox.is_listening_to(far)
    finally:
        inbox.close()
        for descriptor in (reader, writer, far):
            os.close(descriptor)


@pytest.fixture
def sources() -> Iterator[Sources]:
    made = Sources()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for socket in (ours, theirs):
        socket.linger = 0
    theirs.connect(f"tcp://127.0.0.1:{ours.bind_to_random_port('tcp://127.0.0.1')}")
    yield ours, theirs
    context.destroy()


Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


def until_named(sources: Sources, source: object) -> None:
    while True:
        named = sources.wait(TIMEOUT_S)
        assert named, "it sleeps, and there is something"
        if source in named:
            return


@pytest.mark.parametrize("sure", [False, True])
def test_what_came_before_it_is_listened_to(sure: bool, sources: Sources, pair: Pair) -> None:
    ours, theirs = pair
    theirs.send(b"first")
    assert ours.poll(TIMEOUT_S * 1000)  # this takes the sign from its descriptor
    sources.add(ours, sure=sure)
    until_named(sources, ours)


@pytest.mark.parametrize("sure", [False, True])
def test_what_sending_has_hidden_is_found(sure: bool, sources: Sources, pair: Pair) -> None:
    """Whatever is done with a socket may take the sign of what has come."""
    ours, theirs = pair
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    sources.add(ours, sure=sure)
    for _ in range(500):
        theirs.send(b"x")
        if chance.random() < 0.5:
            ours.send(b"y")
            if chance.random() < 0.5:
                assert ours.poll(TIMEOUT_S * 1000)
            sources.touched(ours)
        until_named(sources, ours)
        while ours.poll(0):
            ours.recv()


def test_a_stream_from_another_thread_is_taken_whole(sources: Sources, pair: Pair) -> None:
    ours, theirs = pair
    count = 20_000

    def send() -> None:
        for number in range(count):
            theirs.send(b"%d" % number)

    sources.add(ours, sure=True)
    thread = threading.Thread(target=send)
    thread.start()
    taken = 0
    while taken < count:
        until_named(sources, ours)
        while True:
            try:
                content = ours.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            assert content == b"%d" % taken
            taken += 1
            if not taken % 7:
                ours.send(b"")
                sources.touched(ours)
    thread.join()


def test_what_is_removed_is_not_named(sources: Sources, pair: Pair) -> None:
    ours, theirs = pair
    reader, writer = os.pipe()
    sources.add(ours)
    sources.add(reader)
    theirs.send(b"x")
    until_named(sources, ours)
    os.write(writer, b"x")
    until_named(sources, reader)
    sources.remove(ours)
    sources.remove(reader)
    sources.remove(reader)  # again: nothing
    sources.touched(ours)  # by an answer that comes late
    ours.close()
    assert sources.wait(0) == []
    for descriptor in (reader, writer):
        os.close(descriptor)
