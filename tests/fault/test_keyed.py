"""Keys that are stored once, under faults: every key that was acknowledged is there, once, and each
receipt of it tells of the same message, whatever dies where."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import pytest
from family import RunningBroker
from fault.disk import Disk, need
from fault.points import POINTS, Points
from patience import patient

from cometmq import Producer
from cometmq.protocol.errors import CometError
from cometmq.shm.kernel.codec import Message
from cometmq.shm.live.control import CONTROL_FILE
from cometmq.shm.tools.verify import verify_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEED = 20_261_127
SEGMENT = 128 << 10
SETTINGS = {
    "mappedFileSizeCommitLog": SEGMENT,
    "maxMessageSize": SEGMENT // 4,
    "maxHashSlotNum": 64,
    "maxIndexNum": 300,  # a file is full soon
    "flushIntervalCommitLog": 100,
    "flushCommitLogLeastPages": 0,
}
TOPIC = "keyed"
QUEUES = 3
THREADS = 3
WAIT_S = patient(60.0)
PACE_S = 0.002  # of a sender
POINTS_EACH = 2  # in one life of the broker

Place = tuple[str, int, int]  # id, queue, offset


class Senders:
    """Threads that each send every key, in an order of its own, and again and again.

    Like services that start again and do not know what they had sent: each has a new producer for
    each round.
    """

    def __init__(
        self,
        broker: RunningBroker,
        keys: Iterable[str],
        seed: int,
        timeout_s: float = WAIT_S,
        lingers: Sequence[int] = (0, 2),
    ) -> None:
        self._lingers = lingers
        self._timeout_s = timeout_s
        self._server = broker.ready.name_server
        self._keys = list(keys)
        self._over = threading.Event()
        self.told: dict[str, set[Place]] = {}
        self.sent = 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=[random.Random(seed + number), number])
            for number in range(THREADS)
        ]

    def _run(self, chance: random.Random, number: int) -> None:
        while not self._over.is_set():
            keys = list(self._keys)
            chance.shuffle(keys)
            with contextlib.suppress(CometError):
                self._send(keys, chance.choice(self._lingers), number)

    def _send(self, keys: list[str], linger_ms: int, number: int) -> None:
        producer = Producer(
            self._server, dedup="keys", dedup_window=3600, linger_ms=linger_ms,
            timeout_s=self._timeout_s, transport="zmq" if number else "auto",
        )  # fmt: skip
        try:
            receipts = []
            for key in keys:
                if self._over.wait(PACE_S):
                    break
                receipts.append((key, producer.send(TOPIC, key.encode(), keys=key)))
            for key, receipt in receipts:
                with contextlib.suppress(CometError):
                    place = receipt.msg_id, receipt.queue_id, receipt.queue_offset
                    with self._lock:
                        self.told.setdefault(key, set()).add(place)
                        self.sent += 1
        finally:
            with contextlib.suppress(CometError):
                producer.close()

    def end(self) -> None:
        """They send nothing more; what is on its way they wait for."""
        self._over.set()

    def __enter__(self) -> Senders:
        for each in self._threads:
            each.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        for each in self._threads:
            each.join()


def check(broker: RunningBroker, told: dict[str, set[Place]], *, whole: bool = True) -> int:
    """How many keys are there, each once; and the places that were told are theirs."""
    messages: list[Message] = []
    for queue_id in range(QUEUES):
        messages += broker.read_queue(TOPIC, queue_id)
    counts = Counter(each.body.decode() for each in messages)
    assert [key for key, count in counts.items() if count > 1] == []
    places = {each.body.decode(): (each.msg_id, each.queue_id, each.queue_offset)
              for each in messages}  # fmt: skip
    if whole:
        assert set(told) <= set(places)
        assert {key: places[key] for key in told} == {key: one for key, (one,) in told.items()}
    return len(places)


def begun(store: Path, sync: bool, **options: object) -> RunningBroker:
    settings = {**SETTINGS, "flushDiskType": "SYNC_FLUSH" if sync else "ASYNC_FLUSH"}
    broker = RunningBroker(store, settings, **options)  # type: ignore[arg-type]
    _ = broker.endpoints
    with contextlib.suppress(CometError):
        broker.create_topic(TOPIC, QUEUES)
    return broker


def keys(round_: int) -> list[str]:
    """Some of the round before, and new ones."""
    return [f"k{number}" for number in range(round_ * 120, round_ * 120 + 200)]


@pytest.mark.parametrize("sync", [False, True])
def test_the_commitlog_process_is_killed_at_every_point(sync: bool, tmp_path: Path) -> None:
    """Half of them in either mode; `python -m tests.fault timed points` has them all in both."""
    wanted = ("keyed.", "append.")
    points = [each for each in POINTS.values() if each.name.startswith(wanted)]
    points = [each for each in points if each.role == "commitlog"]
    chance = random.Random(SEED)
    chance.shuffle(points)
    points = points[sync::2]
    told: dict[str, set[Place]] = {}
    with Points(tmp_path / "points") as hits:
        for at in range(0, len(points), POINTS_EACH):
            options = {"module": Points.MODULE, "environ": hits.environ}
            with begun(tmp_path / "store", sync, **options) as broker:
                senders = Senders(broker, keys(at), SEED + at)
                with senders:
                    for number, point in enumerate(points[at : at + POINTS_EACH]):
                        pid = broker.pids()["commitlog"]
                        fresh = [f"{point.name}-{each}" for each in range(3_000)]
                        # Armed first: later all fresh keys might be stored already. Those that
                        # linger may come to be stored in a single pass of the point.
                        nth = chance.randint(1, min(5, point.nth_max))
                        hits.arm(point, nth)
                        more = Senders(
                            broker, fresh, SEED - at - number, lingers=(0, 2) if nth == 1 else (0,)
                        )
                        with more:
                            assert hits.wait_hit(WAIT_S) is not None, point.name
                            hits.disarm()
                            broker.wait_serves("commitlog", not_pid=pid)
                        merge(told, more.told)
                merge(told, senders.told)
                check(broker, told)
    assert not verify_store(tmp_path / "store").findings


def merge(told: dict[str, set[Place]], more: dict[str, set[Place]]) -> None:
    for key, places in more.items():
        told.setdefault(key, set()).update(places)


@pytest.mark.parametrize("role", ["commitlog", "dispatcher"])
def test_two_at_once(role: str, tmp_path: Path) -> None:
    with begun(tmp_path / "store", True) as broker:
        for round_, second in enumerate(("flush", "coordinator", "dispatcher")):
            senders = Senders(broker, keys(2 * round_), SEED + 2 * round_)
            with senders:
                pids = broker.pids()
                for each in {role, second}:
                    os.kill(pids[each], signal.SIGKILL)
                for each in {role, second}:
                    broker.wait_serves(each, not_pid=pids[each])
                with Senders(broker, keys(2 * round_ + 1), SEED + 2 * round_ + 1) as more:
                    done = threading.Event()
                    while more.sent < 200 and not done.wait(0.01):
                        pass
            merge(senders.told, more.told)
            assert check(broker, senders.told) >= 200, second


@pytest.mark.parametrize("sync", [False, True])
def test_the_whole_broker_is_killed(sync: bool, tmp_path: Path) -> None:
    """With its counters, and without them; with its index, and without a file of it."""
    chance = random.Random(SEED + 2 * sync)
    store = tmp_path / "store"
    told: dict[str, set[Place]] = {}
    for round_ in range(4):
        broker = begun(store, sync)
        check(broker, told)
        senders = Senders(broker, keys(round_), SEED + round_, timeout_s=3)
        with senders:
            done = threading.Event()
            wanted = chance.randint(50, 400)
            while senders.sent < wanted and not done.wait(0.01):
                pass
            broker.kill_all()
            senders.end()
        merge(told, senders.told)
        if round_ % 2:
            (store / CONTROL_FILE).unlink()
            files = sorted((store / "index").glob("*"))
            if files:
                chance.choice(files).unlink()
    with begun(store, sync) as broker:
        with Senders(broker, keys(3), SEED) as last:
            done = threading.Event()
            while last.sent < 200 and not done.wait(0.01):
                pass
        merge(told, last.told)
        assert check(broker, told) >= 200
    assert not verify_store(store).findings


def test_the_power_is_cut(tmp_path: Path) -> None:
    need("ext4", "power cuts under keys that are stored once")
    chance = random.Random(SEED)
    log = tmp_path / "broker.log"
    told: dict[str, set[Place]] = {}
    with Disk(tmp_path, "ext4") as disk:
        store = disk.folder / "store"
        for round_ in range(4):
            broker = begun(store, True, log_path=log)
            check(broker, told)
            senders = Senders(broker, keys(round_), SEED + round_, timeout_s=3)
            with senders:
                done = threading.Event()
                wanted = chance.randint(100, 300)
                while senders.sent < wanted and not done.wait(0.01):
                    pass
                disk.cut()
                broker.kill_all()
                senders.end()
            merge(told, senders.told)
            disk.power_on()
        with begun(store, True, log_path=log) as broker:
            assert check(broker, told) >= 100
            with Senders(broker, keys(0), SEED) as last:
                done = threading.Event()
                while last.sent < 200 and not done.wait(0.01):
                    pass
            merge(told, last.told)
            check(broker, told)
        assert not verify_store(store).findings
