"""Fences of named producers under faults: what was answered as fenced stores nothing any more, and
whoever has the name goes on, whatever dies where."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from pathlib import Path
from types import TracebackType

import pytest
from family import RunningBroker
from fault.disk import Disk, need
from fault.points import POINTS, Point, Points
from patience import patient

from cometmq import Producer
from cometmq.protocol.errors import CometError, NotConfirmed, ProducerFenced
from cometmq.shm.live.control import CONTROL_FILE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEED = 20_261_125
SEGMENT = 128 << 10
SETTINGS = {
    "mappedFileSizeCommitLog": SEGMENT,
    "maxMessageSize": SEGMENT // 4,
    "flushIntervalCommitLog": 100,
    "flushCommitLogLeastPages": 0,
}
TOPIC = "named"
NAME = "writer-1"
WAIT_S = patient(60.0)
POINTS_EACH = 2  # in one life of the broker


def settings(sync: bool) -> dict[str, object]:
    return {**SETTINGS, "flushDiskType": "SYNC_FLUSH" if sync else "ASYNC_FLUSH"}


class Generations:
    """Producers of one name, one after the other; each later one fences all before it.

    What each has sent with success is noted; a body says whose it is and its number.
    """

    def __init__(self, broker: RunningBroker) -> None:
        self.broker = broker
        self.stored: list[bytes] = []
        self.maybe: set[bytes] = set()
        self.living: list[Producer] = []
        self.count = 0

    def begin(self) -> None:
        """One more, and look that it is the only one that still stores."""
        newest = Producer(
            self.broker.ready.name_server, producer_id=NAME, timeout_s=WAIT_S, transport="zmq"
        )
        for older in self.living:
            # NotConfirmed where a process has died of the first attempt; it is not stored either.
            with pytest.raises((ProducerFenced, NotConfirmed), match="is fenced by"):
                older.send(TOPIC, b"fenced", queue_id=0)
        self.living.append(newest)
        while len(self.living) > 3:
            self.living.pop(0).close()
        self.count += 1
        self.send()

    def send(self) -> None:
        body = b"%d of %d" % (len(self.stored), self.count)
        try:
            self.living[-1].send(TOPIC, body, queue_id=0)
        except ProducerFenced:
            raise
        except CometError:
            self.maybe.add(body)
        else:
            self.stored.append(body)

    def check(self) -> None:
        """Everything that was acknowledged is there, once and in order, and nothing fenced."""
        bodies = [each.body for each in self.broker.read_queue(TOPIC, 0, len(self.stored))]
        assert b"fenced" not in bodies
        assert len(set(bodies)) == len(bodies)
        assert [each for each in bodies if each not in self.maybe] == self.stored

    def __enter__(self) -> Generations:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for each in self.living:
            with contextlib.suppress(CometError):
                each.close()


def begun(store: Path, sync: bool, **options: object) -> RunningBroker:
    broker = RunningBroker(store, settings(sync), **options)  # type: ignore[arg-type]
    _ = broker.endpoints
    with contextlib.suppress(CometError):
        broker.create_topic(TOPIC, 1)
    return broker


@pytest.mark.parametrize("sync", [False, True])
def test_the_commitlog_process_is_killed_at_every_point(sync: bool, tmp_path: Path) -> None:
    """Half of them in either mode; `python -m tests.fault timed` has them all in both."""
    points = [each for each in POINTS.values() if each.name.startswith(("derived.", "producers."))]
    chance = random.Random(SEED)
    chance.shuffle(points)
    points = points[sync::2]
    stored: list[bytes] = []
    with Points(tmp_path / "points") as hits:
        for at in range(0, len(points), POINTS_EACH):
            options = {"module": Points.MODULE, "environ": hits.environ}
            with (
                begun(tmp_path / "store", sync, **options) as broker,
                Generations(broker) as line,
            ):
                line.stored = stored
                for point in points[at : at + POINTS_EACH]:
                    die_at(line, hits, point, chance.randint(1, min(point.nth_max, 5)))
                line.begin()
                line.check()


def die_at(line: Generations, hits: Points, point: Point, nth: int) -> None:
    """With new producers all the time, until the process has come to that point."""
    pid = line.broker.pids()["commitlog"]
    hits.arm(point, nth)
    if point.when == "restart":
        line.broker.end(pid)
    for _ in range(2_000):
        if hits.wait_hit(0) is not None:
            break
        line.begin()
    else:
        raise AssertionError(f"{point.name} was not passed")
    hits.disarm()
    line.broker.wait_serves("commitlog", not_pid=pid)


@pytest.mark.parametrize("sync", [False, True])
def test_the_whole_broker_is_killed(sync: bool, tmp_path: Path) -> None:
    """With its counters, and without them. A producer that was there before is still fenced."""
    store = tmp_path / "store"
    before = begun(store, sync)
    line = Generations(before)
    line.begin()
    line.begin()
    epochs = [each._sender.delivery.identity for each in line.living]
    for round_ in range(4):
        before.kill_all()
        if round_ % 2:
            (store / CONTROL_FILE).unlink()
        before = begun(store, sync)
        with Producer(before.ready.name_server) as plain:
            plain._sender.delivery.identity = epochs[0]  # the one that was fenced, at the new port
            with pytest.raises(ProducerFenced):
                plain.send(TOPIC, b"fenced", queue_id=0)
            plain._sender.delivery.identity = epochs[1]
            plain.send(TOPIC, b"goes on", queue_id=0)
        assert b"fenced" not in [each.body for each in before.read_queue(TOPIC, 0, 2)]
    with line:
        before.close()


@pytest.mark.parametrize("second", ["dispatcher", "flush", "coordinator", "namesrv"])
def test_two_at_once(second: str, tmp_path: Path) -> None:
    """The commitlog process dies, and another one with it, while producers come and go."""
    with begun(tmp_path / "store", True) as broker, Generations(broker) as line:
        pids = broker.pids()
        over = threading.Event()

        def kill() -> None:
            for role in ("commitlog", second):
                os.kill(pids[role], signal.SIGKILL)
            for role in ("commitlog", second):
                broker.wait_serves(role, not_pid=pids[role])
            over.set()

        thread = threading.Thread(target=kill)
        line.begin()
        thread.start()
        while not over.is_set() and thread.is_alive():
            line.begin()
        thread.join(WAIT_S)
        line.begin()
        line.check()
        assert over.is_set()


def test_the_power_is_cut(tmp_path: Path) -> None:
    """Under SYNC_FLUSH: what was fenced before the cut is fenced after it."""
    need("ext4", "power cuts under named producers")
    log = tmp_path / "broker.log"
    with Disk(tmp_path, "ext4") as disk:
        store = disk.folder / "store"
        for _ in range(4):
            broker = begun(store, True, log_path=log)
            line = Generations(broker)
            with line:
                for _ in range(3):
                    line.begin()
                identities = [each._sender.delivery.identity for each in line.living]
                disk.cut()
                broker.kill_all()
            disk.power_on()
            with begun(store, True, log_path=log) as again:
                with Producer(again.ready.name_server) as plain:
                    for identity in identities[:-1]:
                        plain._sender.delivery.identity = identity
                        with pytest.raises(ProducerFenced):
                            plain.send(TOPIC, b"fenced", queue_id=0)
                    plain._sender.delivery.identity = identities[-1]
                    plain.send(TOPIC, b"goes on", queue_id=0)
                bodies = [each.body for each in again.read_queue(TOPIC, 0)]
                assert b"fenced" not in bodies
                assert set(line.stored) <= set(bodies)
