"""The line from a client to a process that dies."""

from __future__ import annotations

import os
import threading

import pytest
import zmq

from cometmq.protocol.channel import Channel, Pending, wait_any
from cometmq.protocol.commands import Ping
from cometmq.protocol.errors import NotConfirmed

WAIT_S = 5


@pytest.fixture
def port() -> int:
    with zmq.Context.instance().socket(zmq.ROUTER) as probe:
        return int(probe.bind_to_random_port("tcp://127.0.0.1"))


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
            done = threading.Event()
            pending = channel.request(Ping(), on_done=lambda _, done=done: done.set())
            take_and_die(port)
            assert done.wait(WAIT_S), "nobody has noticed"
            with pytest.raises(NotConfirmed, match="was lost"):
                pending.result()


def test_every_loss_is_noticed_by_who_waits_for_several(port: int) -> None:
    answered: list[Pending] = []
    wake = os.eventfd(0)
    with Channel(f"tcp://127.0.0.1:{port}", "the mortal") as channel:
        for _ in range(4):
            answered.clear()
            channel.request(Ping(), on_done=answered.append, pump=False)
            death = threading.Thread(target=take_and_die, args=(port,))
            death.start()
            for _ in range(20):
                wait_any([channel], WAIT_S / 20, wake)
                if answered:
                    break
            death.join()
            assert answered, "nobody has noticed"
            with pytest.raises(NotConfirmed, match="was lost"):
                answered[0].result()
    os.close(wake)
