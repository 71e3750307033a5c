"""The line from a client to a process that dies."""

from __future__ import annotations

import os
import threading
import time

import pytest
import zmq
from ports import free_ports

from cometmq.protocol.commands import Ping
from cometmq.protocol.errors import NotConfirmed
from cometmq.protocol.wire.channel import Channel, Pending, wait_any

WAIT_S = 60


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
