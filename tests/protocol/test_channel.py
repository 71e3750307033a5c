"""The line from a client to a process that dies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from patience import patient
from ports import free_ports

from cometmq.protocol.commands import Ping
from cometmq.protocol.errors import CometError, NotConfirmed, NotReachable
from cometmq.protocol.wire.channel import Channel, Pending, wait_any

WAIT_S = patient(60)


@pytest.fixture
def port() -> int:
    return free_ports()


def take_and_die(port: int) -> None:
    """What a process does that takes one request and ends without an answer.

    A context of its own, whose end is awaited: nobody reaches a listener that is about to go.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        server = context.socket(zmq.ROUTER)
        server.bind(f"tcp://127.0.0.1:{port}")
        assert server.poll(WAIT_S * 1000)
        server.recv_multipart()
    finally:
        context.destroy(linger=0)


def test_every_loss_is_noticed_by_the_pump(port: int) -> None:
    """Also when the line breaks again before anything has come over the new one."""
    with Channel(f"tcp://127.0.0.1:{port}", "the mortal") as channel:
        for _ in range(4):
            death = threading.Thread(target=take_and_die, args=(port,))
            death.start()
            while death.is_alive():  # what is sent while it dies may be lost as well
                done = threading.Event()
                pending = channel.request(Ping(), on_done=lambda _, done=done: done.set())
                assert done.wait(WAIT_S), "nobody has noticed"
                with pytest.raises(NotConfirmed, match="was lost"):
                    pending.result()
                death.join(0.05)


def test_every_loss_is_noticed_by_who_waits_for_several(port: int) -> None:
    wake = os.eventfd(0)
    answered: list[Pending] = []
    with Channel(f"tcp://127.0.0.1:{port}", "the mortal") as channel:
        for _ in range(4):
            death = threading.Thread(target=take_and_die, args=(port,))
            death.start()
            while death.is_alive():
                answered.clear()
                channel.request(Ping(), on_done=answered.append, pump=False)
                deadline = time.monotonic() + WAIT_S
                while not answered and time.monotonic() < deadline:
                    wait_any([channel], WAIT_S, wake)
                assert answered, "nobody has noticed"
                with pytest.raises(NotConfirmed, match="was lost"):
                    answered[0].result()
                death.join(0.05)
    os.close(wake)


@pytest.fixture
def silent(port: int) -> Iterator[str]:
    """A server that accepts requests and never answers, like one whose answers are lost on an open
    connection."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.bind(f"tcp://127.0.0.1:{port}")
    yield f"tcp://127.0.0.1:{port}"
    context.destroy(linger=0)


def outcome(channel: Channel, timeout_s: float, connect_s: float | None = None) -> CometError:
    """Return the error with which a request ends that no thread waits for."""
    done = threading.Event()
    pending = channel.request(
        Ping(), on_done=lambda _: done.set(), timeout_s=timeout_s, connect_s=connect_s
    )
    assert done.wait(WAIT_S), "it is never given up"
    with pytest.raises(CometError) as raised:
        pending.result()
    return raised.value


def test_an_unanswered_request_ends_at_its_limit(silent: str) -> None:
    """Fault 8: also a request whose limit is shorter than the current sleep of the I/O loop."""
    with Channel(silent, "the silent") as channel:
        channel.request(Ping(), on_done=lambda _: None)
        longer = channel.request(Ping(), on_done=lambda _: None, timeout_s=patient(3_600))
        for _ in range(3):
            error = outcome(channel, 0.05)
            assert isinstance(error, NotConfirmed)
            assert str(error) == "no answer to Ping from the silent within 0.05 s"
        assert not longer.done
        assert channel.look_in_s is not None


def test_a_request_that_is_never_sent_ends_at_its_limit(port: int) -> None:
    """Fault 8: a request to an address without a listener does not wait for ever."""
    with Channel(f"tcp://127.0.0.1:{port}", "nobody") as channel:
        for timeout_s, connect_s in ((0.05, None), (3_600, 0.05)):
            error = outcome(channel, timeout_s, connect_s)
            assert isinstance(error, NotReachable)
            assert "within 0.05 s; Ping was not sent" in str(error)


def test_a_limit_ends_without_a_pump(silent: str) -> None:
    """Fault 8: the limit also ends requests of a thread that waits for several channels."""
    wake = os.eventfd(0)
    with Channel(silent, "the silent") as channel:
        pending = channel.request(Ping(), on_done=lambda _: None, pump=False, timeout_s=0.05)
        deadline = time.monotonic() + WAIT_S
        while not pending.done:
            assert time.monotonic() < deadline
            wait_any([channel], WAIT_S, wake)
        assert isinstance(pending.error, NotConfirmed)
        assert channel.look_in_s is None
    os.close(wake)
