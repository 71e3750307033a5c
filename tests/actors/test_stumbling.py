"""Nobody but the scheduler itself has it go on: after whatever error it does."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
import stumbling_launcher
from family import RunningBroker
from paths import SEARCH
from patience import patient
from transacting import SETTINGS, WAIT_S
from waiting import until

from cometmq.client import PendingTransaction, Producer
from cometmq.protocol.errors import CometError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def stumbles(tmp_path: Path) -> Path:
    return tmp_path / "stumbles"


@pytest.fixture
def broker(tmp_path: Path, stumbles: Path) -> Iterator[RunningBroker]:
    environ = {stumbling_launcher.STUMBLES: str(stumbles), "PYTHONPATH": SEARCH}
    module = stumbling_launcher.__name__
    with RunningBroker(tmp_path / "store", SETTINGS, environ=environ, module=module) as running:
        yield running


def have_stumbled(broker: RunningBroker, *names: str) -> None:
    for name in names:
        until(lambda: f"as the test wants it: {name}" in broker.log, says=f"{name} stumbles")  # noqa: B023


def test_delays_and_timers_outlive_what_nobody_foresaw(
    broker: RunningBroker, stumbles: Path
) -> None:
    with Producer(broker.ready.name_server) as producer:

        def send(body: bytes) -> None:
            producer.send("later", body, queue_id=0, delay_level=1)
            producer.send("later", body, queue_id=0, deliver_after=0.1)

        send(b"before")
        broker.read_queue("later", 0, 2)
        stumbles.touch()
        send(b"while they stumble")
        have_stumbled(broker, "DelayLevel.deliver", "Timers.step")
        stumbles.unlink()
        assert len(broker.read_queue("later", 0, 4)) == 4


@pytest.mark.slow
def test_transactions_outlive_what_nobody_foresaw(broker: RunningBroker, stumbles: Path) -> None:
    """The reading of those that are pending, at the first end, and each look at them."""
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def check(pending: PendingTransaction) -> bool:
        asked.put(pending.id)
        return True

    server = broker.ready.name_server
    broker.create_topic("paid", 2)
    with Producer(server, name="paying", checker=check, timeout_s=patient(5)) as producer:
        stumbles.touch()
        with pytest.raises(CometError), producer.transaction("paid", b"one") as first:
            pass
        have_stumbled(broker, "HalfBook._load", "Checks._judge")
        stumbles.unlink()
        with producer.transaction("paid", b"two"):
            pass
        assert asked.get(timeout=WAIT_S) == first.id
    until(lambda: len(delivered_to(broker)) == 2, says="both are there")


def delivered_to(broker: RunningBroker) -> list[bytes]:
    return [each.body for queue_id in (0, 1) for each in broker.read_queue("paid", queue_id)]
