"""Nobody but the scheduler itself has it go on: after whatever error it does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import stumbling_launcher
from family import RunningBroker
from paths import SEARCH
from transacting import until

from cometmq.client import Producer

pytestmark = pytest.mark.timeout(120)


def test_delays_and_timers_outlive_what_nobody_foresaw(tmp_path: Path) -> None:
    stumbles = tmp_path / "stumbles"
    environ = {stumbling_launcher.STUMBLES: str(stumbles), "PYTHONPATH": SEARCH}
    name = stumbling_launcher.__name__
    with (
        RunningBroker(tmp_path / "store", environ=environ, module=name) as broker,
        Producer(broker.ready.name_server) as producer,
    ):

        def send(body: bytes) -> None:
            producer.send("later", body, queue_id=0, delay_level=1)
            producer.send("later", body, queue_id=0, deliver_after=0.1)

        send(b"before")
        broker.read_queue("later", 0, 2)
        stumbles.touch()
        send(b"while they stumble")
        for who in ("delay level 1", "timers"):
            until(f"{who} stumble", partial(has_stumbled, broker, who))
        stumbles.unlink()
        assert len(broker.read_queue("later", 0, 4)) == 4


def has_stumbled(broker: RunningBroker, who: str) -> bool:
    return f"as the test wants it: {who}" in broker.log
