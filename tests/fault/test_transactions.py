"""Transactions under faults: what was decided to be seen is, once; nothing else ever is."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from family import RunningBroker
from fault.disk import Disk, need
from fault.points import POINTS, Points
from patience import patient
from transacting import QUEUES, SETTINGS, TOPIC, Decisions, Transacting, assert_agrees
from waiting import until

from cometmq.shm.tools.verify import verify_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEED = 20_261_123
WAIT_S = patient(60)
POINTS_EACH = 2  # in one life of the broker, which takes no more deaths for bad luck
CUTS = 2


@pytest.mark.parametrize("sync", [False, True])
def test_killed_at_every_point(sync: bool, tmp_path: Path) -> None:
    """Half of the points in either mode; `python -m tests.fault timed` has them all in both."""
    print("seed", SEED)
    chance = random.Random(SEED)
    points = [point for point in POINTS.values() if point.when == "transactions"]
    chance.shuffle(points)
    points = points[sync::2]
    settings = SETTINGS | {"flushDiskType": "SYNC_FLUSH" if sync else "ASYNC_FLUSH"}
    decisions = Decisions()
    with Points(tmp_path / "points") as hits:
        for at in range(0, len(points), POINTS_EACH):
            broker = RunningBroker(
                tmp_path / "store", settings, module=Points.MODULE, environ=hits.environ
            )
            if not at:
                broker.create_topic(TOPIC, QUEUES)
            with broker, Transacting(broker, decisions):
                for point in points[at : at + POINTS_EACH]:
                    pid = broker.pids()[point.role]
                    hits.arm(point, chance.randint(1, point.nth_max))
                    if point.name.startswith(("transactions.begun", "transactions.read")):
                        broker.end(pid)  # the next one passes it
                    deadline = time.monotonic() + WAIT_S
                    while hits.wait_hit(0.05) is None:
                        assert time.monotonic() < deadline, f"{point.name} was not passed"
                    hits.disarm()
                    broker.wait_serves(point.role, not_pid=pid)
                    done = len(decisions.confirmed)
                    until(lambda: len(decisions.confirmed) > done, says="it goes on")  # noqa: B023
    with RunningBroker(tmp_path / "store", settings) as broker:
        assert_agrees(broker, decisions)
    assert not verify_store(tmp_path / "store").findings


def test_the_whole_broker_is_killed(tmp_path: Path) -> None:
    decisions = Decisions()
    for life in range(3):
        broker = RunningBroker(tmp_path / "store", SETTINGS)
        if not life:
            broker.create_topic(TOPIC, QUEUES)
        with Transacting(broker, decisions):
            done = len(decisions.confirmed)
            until(lambda: len(decisions.confirmed) > done + 20, says="some are committed")  # noqa: B023
            broker.kill_all()
    with RunningBroker(tmp_path / "store", SETTINGS) as broker:
        assert_agrees(broker, decisions)


def test_the_power_is_cut(tmp_path: Path) -> None:
    need("ext4", "power cuts of transactions")
    settings = SETTINGS | {"flushDiskType": "SYNC_FLUSH"}
    decisions = Decisions()
    log = tmp_path / "broker.log"
    with Disk(tmp_path, "ext4") as disk:
        for _ in range(CUTS):
            broker = RunningBroker(disk.folder / "store", settings, log_path=log)
            broker.create_topic(TOPIC, QUEUES)
            with Transacting(broker, decisions):
                done = len(decisions.confirmed)
                until(lambda: len(decisions.confirmed) > done + 5, says="some are committed")  # noqa: B023
                disk.cut()
                broker.kill_all()
            disk.power_on()
        with RunningBroker(disk.folder / "store", settings, log_path=log) as broker:
            broker.create_topic(TOPIC, QUEUES)
            assert_agrees(broker, decisions)
