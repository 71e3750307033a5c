"""SYNC_MASTER under faults: what was answered as sent the slave has; its log is the master's."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from pathlib import Path
from types import TracebackType

import pytest
from family import RunningBroker
from fault.points import POINTS, Points
from patience import patient
from ports import free_ports
from scripted_slave import FaithfulSlave, log_bytes

from cometmq.protocol.commands import Section, SendMessages, SendResult
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import BatchEncoder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SEED = 20_261_125
WAIT_S = patient(60)
POINTS_EACH = 2  # in one life of the broker, which takes no more deaths for bad luck
SETTINGS = {"brokerRole": "SYNC_MASTER", "slaveTimeout": 1_000}


class Load:
    """Sends small batches; each that was answered with SEND_OK is looked for in the copy."""

    numbers = itertools.count()

    def __init__(self, broker: RunningBroker, copy: bytearray) -> None:
        self.confirmed = 0
        self.missing: list[bytes] = []
        self._broker = broker
        self._copy = copy
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]

    def _run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(CometError), Channel(self._broker.endpoints.commitlog) as line:
                while not self._over.is_set():
                    self._send(line)

    def _send(self, line: Channel) -> None:
        body = b"<%d>" % next(self.numbers) + b"." * 3_000
        encoder = BatchEncoder()
        for _ in range(5):
            encoder.add(body)
        command = SendMessages([Section("t", 0, 5)], born_timestamp_ms=1)
        answer, _ = line.ask(command, [encoder.take()], timeout_s=patient(5))
        assert isinstance(answer, SendResult)
        if answer.results[0].code == 0:
            if body not in self._copy:
                self.missing.append(body[:20])
            self.confirmed += 1

    def __enter__(self) -> Load:
        assert self._broker.endpoints
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(WAIT_S)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_killed_at_every_point(flush: str, tmp_path: Path) -> None:
    seed = SEED + (flush == "SYNC_FLUSH")
    print("seed", seed)
    chance = random.Random(seed)
    points = [point for point in POINTS.values() if point.when == "replication"]
    chance.shuffle(points)
    port = free_ports()
    settings = SETTINGS | {"flushDiskType": flush, "haListenPort": port}
    with Points(tmp_path / "points") as hits, FaithfulSlave(port) as slave:
        for at in range(0, len(points), POINTS_EACH):
            broker = RunningBroker(
                tmp_path / "store", settings, module=Points.MODULE, environ=hits.environ
            )
            if not at:
                broker.create_topic("t")
            with broker, Load(broker, slave.copy) as load:
                for point in points[at : at + POINTS_EACH]:
                    pid = broker.pids()[point.role]
                    hits.arm(point, chance.randint(1, point.nth_max))
                    if point.name.startswith("ha.began"):
                        broker.end(broker.pids()["ha"])
                    deadline = time.monotonic() + WAIT_S
                    while hits.wait_hit(0.05) is None:
                        assert time.monotonic() < deadline, f"{point.name} was not passed"
                    hits.disarm()
                    broker.wait_serves(point.role, not_pid=pid)
                    wait_for_more(load)
                if at % 4 == 0:
                    broker.kill_all()
            assert not load.missing
            copy = bytes(slave.copy)
            assert copy == log_bytes(tmp_path / "store", 0, len(copy))
    assert slave.connections > len(points) // 2


def wait_for_more(load: Load) -> None:
    done, deadline = load.confirmed, time.monotonic() + WAIT_S
    while load.confirmed <= done:
        assert time.monotonic() < deadline, "nothing is confirmed any more"
        time.sleep(0.01)
