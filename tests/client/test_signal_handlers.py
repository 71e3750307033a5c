"""Signal handlers that call public methods, whichever method they interrupt (Fault 13)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from paths import ROOT, SEARCH
from patience import patient
from signals_child import LIMIT_S, METHODS

from cometmq import Broker, Consumer, Message, PopConsumer


def run_child(broker: Broker, method: str, how: str) -> int:
    """Run the child and return how many signals it received."""
    seed = random.randrange(1 << 32)
    topic = f"{method}-{how}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/kit/signals_child.py"), broker.name_server, topic,
         method, str(seed), how],
        env={**os.environ, "PYTHONPATH": SEARCH},
        capture_output=True, text=True, timeout=2 * LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"seed {seed}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    return int(done.stdout.split()[-2])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_handler_calls_any_method_during_any_other(broker: Broker, method: str) -> None:
    """The call returns; it waited for ever for a lock that its own thread held."""
    assert run_child(broker, method, "again") > 10


@pytest.mark.parametrize("method", ["send", "poll"])
def test_handler_closes_clients_during(broker: Broker, method: str) -> None:
    assert run_child(broker, method, "close") >= 8


@pytest.mark.slow
@pytest.mark.parametrize("method", [each for each in METHODS if each not in ("send", "poll")])
def test_handler_closes_clients_during_any_method(broker: Broker, method: str) -> None:
    assert run_child(broker, method, "close") >= 8


class Struck(Exception):
    """Exception that the handler raises."""


@contextmanager
def raising_handler() -> Iterator[None]:
    def strike(*_: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def open_consumer(broker: Broker, topic: str, kind: str) -> Consumer | PopConsumer:
    if kind == "pop":
        return broker.pop_consumer(topic, topic, invisible_s=3_600)
    return broker.consumer(topic, topic, transport=kind)


@pytest.mark.parametrize("kind", ["mapped", "zmq", "pop"])
def test_poll_that_a_handler_left_by_an_exception_loses_nothing(broker: Broker, kind: str) -> None:
    """A handler that raises during `poll`, as an alarm with TimeoutError, loses no message."""
    topic = f"left-{kind}"
    main = threading.get_ident()
    with broker.producer() as producer, open_consumer(broker, topic, kind) as consumer:
        producer.send(topic, b"first")
        while not (found := consumer.poll(1, timeout_s=patient(30))):
            pass
        consumer.ack(found[0])
        with raising_handler():
            for _ in range(3):
                timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1))
                timer.start()
                with pytest.raises(Struck):
                    consumer.poll(8, timeout_s=patient(30))
            sent = [producer.send(topic, b"%d" % n).msg_id for n in range(3)]
            seen: list[str] = []
            while len(seen) < 3:
                for message in consumer.poll(8, timeout_s=patient(30)):
                    seen.append(message.msg_id)
                    consumer.ack(message)
    assert sorted(seen) == sorted(sent)


@pytest.mark.parametrize("kind", ["mapped", "pop"])
def test_run_ends_when_a_handler_raises(broker: Broker, kind: str) -> None:
    """`run` ends with the handler's exception, after running messages are acknowledged."""
    topic = f"run-{kind}"
    main = threading.get_ident()
    began, may_end, seen = threading.Event(), threading.Event(), list[bytes]()

    def work(message: Message) -> None:
        began.set()
        assert may_end.wait(patient(60))
        seen.append(message.body)

    def strike() -> None:
        began.wait(patient(60))
        signal.pthread_kill(main, signal.SIGUSR1)
        threading.Timer(0.3, may_end.set).start()

    with broker.producer() as producer, open_consumer(broker, topic, kind) as consumer:
        producer.send(topic, b"at work")
        with raising_handler():
            threading.Thread(target=strike).start()
            with pytest.raises(Struck):
                consumer.run(work)
        assert seen == [b"at work"]
    with open_consumer(broker, topic, kind) as consumer:
        assert consumer.poll(1, timeout_s=0.5) == []


IN_ONE_PROCESS = """
import signal, sys
from cometmq import Broker
signal.signal(signal.SIGUSR1, lambda *_: None)
broker = Broker(sys.argv[1], writer="here", profile="test")
producer = broker.producer()
producer.send("t", b"x")
producer.close()
broker.close()
"""


def test_a_process_with_handlers_and_its_writer_ends_quietly(tmp_path: Path) -> None:
    """Fault 13: the helper's thread outlives the modules, and what it held was closed by those."""
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, str(tmp_path / "store")],
        capture_output=True, text=True, timeout=patient(60), check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")
