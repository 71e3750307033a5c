"""While the broker is away a consumer says so, once, and once that it is back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time

import pytest
from cli_process import start
from client_fakes import Handle, fake_broker, start_broker
from patience import patient
from ports import free_ports
from waiting import until

from cometmq.client import AsyncConsumer, AsyncProducer, Consumer, Producer
from cometmq.protocol import errors

pytestmark = pytest.mark.timeout(120)


def of_the_client(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [
        (record.levelno, record.getMessage())
        for record in caplog.records
        if record.name.startswith("cometmq.client") and record.levelno > logging.DEBUG
    ]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_one_line_when_it_goes_and_one_when_it_is_back(
    caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    caplog.set_level(logging.INFO, "cometmq")
    first = start_broker()
    with Producer(first.address) as producer:
        producer.send("t", b"x", queue_id=0)
    options = {"auto_commit_ms": 50, "transport": transport}
    with Consumer(first.address, "g", "t", **options) as consumer:  # type: ignore[arg-type]
        consumer.ack(consumer.poll(timeout_s=patient(20)))
        assert consumer.connected
        assert not of_the_client(caplog)
        first.stop()
        until(lambda: bool(of_the_client(caplog)), says="nothing is said")
        assert not consumer.connected
        away_until = time.monotonic() + 4  # several rounds of everything that tries again
        while time.monotonic() < away_until:
            consumer.poll(timeout_s=0.2)
        ((level, text),) = of_the_client(caplog)
        assert level == logging.WARNING
        assert "group g: broker b is away" in text
        with fake_broker(first.address, topics=["t"]) as second:
            until(lambda: consumer.connected, says="it is not back")
            until(lambda: len(of_the_client(caplog)) > 1, says="nothing is said")
            with Producer(second.address) as producer:
                producer.send_many("t", [b"y"] * 3, queue_id=0)  # the new one's first has been read
            messages = consumer.poll(timeout_s=patient(20))
            while not messages:
                messages = consumer.poll(timeout_s=patient(20))
            lines = of_the_client(caplog)
            (back,) = [text for level, text in lines if level == logging.INFO]
            assert "group g: broker b is back" in back
            # What the queue lost is another matter, and said too.
            assert all("outside" in text or text == back for _, text in lines[1:])


def test_a_coordinator_that_is_back_at_once_is_not_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "cometmq")
    first = start_broker()
    with Producer(first.address) as producer:
        producer.send("t", b"x")
    with Consumer(first.address, "g", "t", auto_commit_ms=50) as consumer:
        until(lambda: consumer.connected, says="it does not connect")
        first.stop()
        with fake_broker(first.address, topics=["t"]) as second:
            second.wait_for(lambda fake: fake.joins)
            until(lambda: consumer.connected, says="it is not back")
            assert not [text for _, text in of_the_client(caplog) if "away" in text]


@pytest.mark.slow
@pytest.mark.parametrize("linger_ms", [0, 1])
def test_so_does_a_producer(caplog: pytest.LogCaptureFixture, linger_ms: int) -> None:
    caplog.set_level(logging.INFO, "cometmq")
    first = start_broker()
    with Producer(first.address, linger_ms=linger_ms, timeout_s=2) as producer:
        assert not producer.connected
        producer.send("t", b"x").wait()
        assert producer.connected
        first.stop()
        for _ in range(2):
            with pytest.raises((errors.NotConfirmed, errors.NotReachable)):
                producer.send("t", b"y").wait()
            assert not producer.connected
        (away,) = [text for _, text in of_the_client(caplog) if "away" in text]
        assert "a producer: broker b is away" in away
        with fake_broker(first.address, topics=["t"]):
            until(lambda: stored(producer), says="nothing can be sent")
            assert producer.connected
            (back,) = [text for _, text in of_the_client(caplog) if "is back after" in text]
            assert "a producer: broker b is back" in back
            with contextlib.suppress(errors.NotReachable, errors.NotConfirmed):
                producer.flush()  # tells once more what became of those that linger


def stored(producer: Producer) -> bool:
    with contextlib.suppress(errors.CometError):
        producer.send("t", b"z").wait()
        return True
    return False


# --- a start that waits ---------------------------------------------------------------------------


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_ports()}"


def test_a_start_that_does_not_wait_fails() -> None:
    begun = time.monotonic()
    with pytest.raises(errors.NotReachable):
        Consumer(free_address(), "g", "t", wait_for_broker=0.5)
    assert 0.5 <= time.monotonic() - begun < patient(20)
    with pytest.raises(errors.NotReachable):
        Producer(free_address(), wait_for_broker=0.5)


class Later:
    """A broker that starts when somebody has been waiting for it for a while."""

    def __init__(self) -> None:
        self.address = free_address()
        self._handle: Handle | None = None
        self._timer = threading.Timer(1.0, self._start)

    def _start(self) -> None:
        self._handle = start_broker(self.address)

    def __enter__(self) -> str:
        self._timer.start()
        return self.address

    def __exit__(self, *_: object) -> None:
        self._timer.join()
        if self._handle is not None:
            self._handle.stop()


@pytest.mark.slow
def test_a_start_waits() -> None:
    with Later() as address, Producer(address, wait_for_broker=patient(30)) as producer:
        producer.send("t", b"x")
    with Later() as address, Consumer(address, "g", "t", wait_for_broker=patient(30)) as consumer:
        assert [each.topic for each in consumer._receiver.owned.subscriptions()] == ["t"]


def test_a_start_waits_without_holding_the_event_loop() -> None:
    async def run(address: str) -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.01)

        counting = asyncio.create_task(count())
        async with (
            AsyncProducer(address, wait_for_broker=patient(30)) as producer,
            AsyncConsumer(address, "g", "t", wait_for_broker=patient(30)) as consumer,
        ):
            await producer.send("t", b"x")
            messages = []
            while not messages:
                messages = await consumer.poll()
            assert consumer.connected
        counting.cancel()
        return turns

    with Later() as address:
        assert asyncio.run(run(address)) > 20


def test_the_command_line_waits() -> None:
    with Later() as address:
        at = {"COMETMQ_NAME_SERVER": address}
        sending = start("msg", "send", "-t", "t", "--wait", str(patient(30)), **at)
        _, said = sending.communicate(b"x\n", timeout=patient(60))
        assert sending.returncode == 0, said
        tailing = start("msg", "tail", "-t", "t", "-n", "1", "--wait", str(patient(30)), **at)
        found, said = tailing.communicate(timeout=patient(60))
        assert found == b"x\n", said
