"""Clients whose methods a signal handler calls while another method runs. No tests here.

    python signals_child.py NAME_SERVER TOPIC METHOD SEED ("again" | "close")

METHOD is called in a loop in the main thread. Signals arrive between the lines that it executes
there, and while it waits; their handler calls all other methods in turn ("again"), or closes all
clients once ("close"). The program prints the number of signals, and ends; if it hangs, it prints
the stacks of all threads after LIMIT_S.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from paths import ROOT
from patience import patient

from cometmq import Admin, Consumer, Message, PopConsumer, Producer
from cometmq.errors import CometError, HandleUnknown, RequestTimeout

LIMIT_S: Final = patient(60.0)
ROUND_S: Final = 4.0  # how long METHOD is called
SIGNALS: Final = 150
GAP_LINES: Final = 40  # between two signals, at most


class Clients:
    """One client of each kind, and the calls that are made with them."""

    def __init__(self, name_server: str, topic: str) -> None:
        self.name_server, self.topic = name_server, topic
        self.producer = Producer(name_server, name="signals", timeout_s=patient(30))
        self.lingering = Producer(name_server, linger_ms=5, timeout_s=patient(30))
        self.consumer = Consumer(name_server, topic, topic)
        self.popping = PopConsumer(name_server, f"{topic}-pop", topic)
        self.admin = Admin(name_server, timeout_s=patient(30))
        self.read: list[Message] = []
        self.popped: list[Message] = []
        self.sent: list[int] = []  # counts: a handler may run between any two instructions
        self.confirmed: list[int] = []

    def all(self) -> tuple[Any, ...]:
        return self.producer, self.lingering, self.consumer, self.popping, self.admin

    def send(self) -> None:
        self.sent.append(1)
        self.producer.send(self.topic, b"x")
        self.confirmed.append(1)

    def send_lingering(self) -> None:
        self.sent.append(1)
        assert self.lingering.send(self.topic, b"x").queue_offset >= 0
        self.confirmed.append(1)

    def send_async(self) -> None:
        self.sent.append(1)
        self.producer.send_async(self.topic, b"x").result(patient(30))
        self.confirmed.append(1)

    def send_many(self) -> None:
        self.sent.append(3)
        self.confirmed.append(len(self.producer.send_many(self.topic, [b"x"] * 3)))

    def send_oneway(self) -> None:
        self.producer.send_oneway(f"{self.topic}-away", b"x")

    def flush(self) -> None:
        self.lingering.send(f"{self.topic}-away", b"x")
        self.lingering.flush()

    def request(self) -> None:
        with contextlib.suppress(RequestTimeout):
            self.producer.request(f"{self.topic}-away", b"x", timeout_s=0.02)

    def transaction(self) -> None:
        self.sent.append(1)
        with self.producer.transaction(self.topic, b"x"):
            pass
        self.confirmed.append(1)

    def poll(self) -> None:
        self.read += self.consumer.poll(4, timeout_s=0.05)

    def iterate(self) -> None:
        """Iterate over one message, if there is any."""
        if self.consumer.assignment:
            for message in self.consumer:
                self.read.append(message)
                break

    def ack(self) -> None:
        while self.read:
            with contextlib.suppress(IndexError):
                self.consumer.ack(self.read.pop())

    def commit(self) -> None:
        self.consumer.commit()

    def look(self) -> None:
        for queue in self.consumer.assignment:
            with contextlib.suppress(CometError):
                self.consumer.pause([queue])
                self.consumer.position(queue)
                self.consumer.resume([queue])

    def pop(self) -> None:
        self.popped += self.popping.poll(4, timeout_s=0.05)

    def pop_ack(self) -> None:
        while self.popped:
            with contextlib.suppress(IndexError, HandleUnknown):
                self.popping.extend(self.popped[-1], 30.0)
                self.popping.ack(self.popped.pop())

    def ask(self) -> None:
        self.admin.topics()
        self.admin.describe_group(self.topic)

    def open(self) -> None:
        with Producer(self.name_server) as another:
            another.send(f"{self.topic}-away", b"x")

    def close(self) -> None:
        for each in self.all():
            each.close()


METHODS: Final = (
    "send", "send_lingering", "send_async", "send_many", "send_oneway", "flush", "request",
    "transaction", "poll", "iterate", "ack", "commit", "look", "pop", "pop_ack", "ask", "open",
)  # fmt: skip


def feed(name_server: str, topic: str) -> None:
    """Keep sending, so that consumers always have messages."""
    with Producer(name_server) as producer:
        while True:
            producer.send(topic, b"fed")
            time.sleep(0.01)


class Signals:
    """Sender of signals, at product lines in the main thread and at random times."""

    def __init__(self, rng: random.Random, handle: Callable[[], None]) -> None:
        self.came = 0
        self._rng = rng
        self._handle = handle
        self._inside = False
        self._left = rng.randrange(GAP_LINES)
        self._over = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._strike, daemon=True)

    def _on_signal(self, *_: object) -> None:
        if self._inside:
            return
        self._inside = True
        self.came += 1
        try:
            self._handle()
        finally:
            self._inside = False

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line" and not self._inside:
            self._left -= 1
            if self._left < 0:
                self._left = self._rng.randrange(GAP_LINES)
                signal.raise_signal(signal.SIGUSR1)
        name = frame.f_code.co_filename
        return self._trace if name.startswith(str(ROOT)) and "tests" not in name else None

    def _strike(self) -> None:
        while not self._over.wait(self._rng.random() * 0.02):
            signal.pthread_kill(self._main, signal.SIGUSR1)

    def __enter__(self) -> None:
        signal.signal(signal.SIGUSR1, self._on_signal)
        self._thread.start()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def call_again(clients: Clients, method: str, rng: random.Random) -> int:
    """Call the method until enough signals arrived or the time is over. All sends are confirmed."""
    others = rng.sample(METHODS, len(METHODS))
    count = 0

    def handle() -> None:
        nonlocal count
        count += 1
        getattr(clients, others[count % len(others)])()

    signals = Signals(rng, handle)
    until = time.monotonic() + ROUND_S
    with signals:
        while signals.came < SIGNALS and time.monotonic() < until:
            getattr(clients, method)()
    sent, confirmed = sum(clients.sent), sum(clients.confirmed)
    assert sent == confirmed, (sent, confirmed)
    return signals.came


def call_closed(name_server: str, topic: str, method: str, rng: random.Random) -> int:
    """Repeatedly close all clients during a call, which must end with a result or an error."""
    came = 0
    for _ in range(8):
        clients = Clients(name_server, topic)
        clients.poll()
        closed = False

        def handle(clients: Clients = clients) -> None:
            nonlocal closed
            clients.close()
            closed = True

        signals = Signals(rng, handle)
        with signals:
            while not closed:
                with contextlib.suppress(CometError):
                    getattr(clients, method)()
        came += signals.came
    return came


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    _, name_server, topic, method, seed, how = sys.argv
    rng = random.Random(int(seed))
    threading.Thread(target=feed, args=(name_server, topic), daemon=True).start()
    if how == "close":
        came = call_closed(name_server, topic, method, rng)
    else:
        clients = Clients(name_server, topic)
        came = call_again(clients, method, rng)
        clients.close()
    print(f"{came} signals", flush=True)
