"""CometMQ as a System, and its worker: the public client, as a user has it.

Page cache is flushDiskType=ASYNC_FLUSH, which is the default; fdatasync is SYNC_FLUSH.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import psutil

from cometmq import Admin, Broker, Consumer, Message, Producer, Receipt, __version__
from cometmq.bench.systems import OVER_ZEROMQ, OWN, SPINNING, Durability, System
from cometmq.bench.worker import Job, serve
from cometmq.client.sending.outgoing import Target
from cometmq.shm.os.files import COMMITLOG_DIR

LINGER_MS: Final = 5.0  # of the streams
TIMEOUT_S: Final = 60.0
POLL_COUNT: Final = 8192
FLUSHES: Final = {Durability.PAGE_CACHE: "ASYNC_FLUSH", Durability.FSYNC: "SYNC_FLUSH"}
READY_S: Final = 30.0
AHEAD: Final = 3  # the segment in use, and those that are made ahead of it
LONG_AGO_S: Final = 0.0  # before fileReservedTime


class CometMQ:
    """A broker in processes of its own.

    Args:
        settings: by RocketMQ's keys, beside the way of flushing; default: none.
    """

    name: str = OWN
    clients: tuple[str, ...] = ("python", "embedded")
    ways: Mapping[str, Mapping[str, Any]] = {
        "": {},  # by itself: the mapped store
        OVER_ZEROMQ: {"consumer": {"transport": "zmq"}},
        SPINNING: {"consumer": {"spin_us": 1000}},
    }

    def __init__(self, settings: Mapping[str, object] | None = None) -> None:
        self.settings = dict(settings or {})
        self.broker: Broker | None = None

    def missing(self) -> str | None:
        return None

    def start(self, folder: Path, durability: Durability) -> None:
        settings = {"flushDiskType": FLUSHES[durability], **self.settings}
        self.broker = Broker(folder / "store", settings=settings)

    def create(self, topic: str, queues: int) -> None:
        with Admin(self._running.name_server) as admin:
            admin.create_topic(topic, read_queues=queues, write_queues=queues)

    def command(self, client: str) -> list[str]:
        module = {"python": "cometmq.bench.own", "embedded": "cometmq.bench.embedded"}[client]
        return [sys.executable, "-m", module]

    def endpoint(self) -> dict[str, Any]:
        return {"name_server": self._running.name_server} if self.broker else {}

    def processes(self) -> list[int]:
        if self.broker is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(self.broker.pid)
            return [supervisor.pid, *(each.pid for each in supervisor.children(recursive=True))]
        return []

    def version(self) -> str:
        return __version__

    def clean(self) -> int:
        """Delete the oldest full segment as if it had expired; how many went."""
        log = self._running.settings.store_path_root_dir / COMMITLOG_DIR
        for path in sorted(log.iterdir())[:-AHEAD][:1]:
            os.utime(path, (LONG_AGO_S, LONG_AGO_S))
        with Admin(self._running.name_server) as admin:
            return sum(len(each.segments) for each in admin.delete_expired())

    def stop(self) -> None:
        broker, self.broker = self.broker, None
        if broker is not None:
            broker.close()

    @property
    def _running(self) -> Broker:
        assert self.broker is not None, "not started"
        return self.broker


def system() -> System:
    return CometMQ()


# --- the worker -----------------------------------------------------------------------------------


class OwnSender:
    def __init__(self, job: Job) -> None:
        self.client = f"cometmq {__version__}"
        streams = job.mode == "async" and not job.rate
        linger_ms = float(job.options.get("linger_ms", LINGER_MS if streams else 0))
        self._lingers = linger_ms > 0
        self._producer = Producer(
            job.endpoint["name_server"], linger_ms=linger_ms, timeout_s=TIMEOUT_S,
            **job.options.get("producer", {}),
        )  # fmt: skip
        self._queues = job.queues if job.options.get("spread") else 0
        for topic in job.topics:
            self._producer._sender.learn(Target(topic, None, None))

    def one(self, topic: str, body: bytes) -> None:
        self._producer.send(topic, body)

    def batch(self, topic: str, bodies: list[bytes]) -> None:
        self._producer.send_many(topic, bodies)

    def stream(self, topics: Sequence[str], bodies: list[bytes], in_flight: int) -> None:
        """With a window: so many calls, and a flush that waits for their answers."""
        producer = self._producer
        for window in windows(bodies, in_flight):
            if self._queues:
                self._spread(topics[0], window)
            elif len(topics) == 1:
                send, topic = producer.send, topics[0]
                for body in window:
                    send(topic, body)
            else:
                for topic, body in zip(cycle(topics), window):
                    producer.send(topic, body)
            producer.flush()

    def _spread(self, topic: str, bodies: list[bytes]) -> None:
        """Each message to the next queue."""
        send, queues = self._producer.send, self._queues
        for number, body in enumerate(bodies):
            send(topic, body, queue_id=number % queues)

    def begin(self, topic: str, body: bytes) -> Future[Receipt] | Receipt:
        if self._lingers:
            return self._producer.send(topic, body)
        return self._producer.send_async(topic, body)

    def finish(self, begun: deque[Any]) -> int:
        return (_finish_receipts if self._lingers else _finish_futures)(begun)

    def close(self) -> None:
        self._producer.close()


def _finish_receipts(begun: deque[Receipt]) -> int:
    """Those of a batch are answered together."""
    begun.popleft().wait()
    count = 1
    while begun and begun[0].done:
        begun.popleft().wait()
        count += 1
    return count


def _finish_futures(begun: deque[Future[Receipt]]) -> int:
    begun.popleft().result()
    count = 1
    while begun and begun[0].done():
        begun.popleft().result()
        count += 1
    return count


def windows(bodies: list[bytes], count: int) -> Iterator[list[bytes]]:
    if not count:
        yield bodies
        return
    for start in range(0, len(bodies), count):
        yield bodies[start : start + count]


class OwnReceiver:
    def __init__(self, job: Job) -> None:
        self.client = f"cometmq {__version__}"
        self._consumer = Consumer(
            job.endpoint["name_server"], job.group, **job.options.get("consumer", {})
        )
        for topic in job.topics:
            self._consumer.subscribe(topic)
        if not job.options.get("shared"):
            self._wait_for_queues(len(job.topics) * job.queues)
        self.acknowledge = self._consumer.ack

    def _wait_for_queues(self, count: int) -> None:
        """Until all queues are ours: the membership learns it in its own thread, untold."""
        deadline = time.monotonic() + READY_S
        while len(self._consumer.assignment) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(self._consumer.assignment)} of {count} queues within {READY_S:g} s"
                )
            time.sleep(0.01)  # nothing tells when

    def poll(self, timeout_s: float) -> Sequence[Message]:
        return self._consumer.poll(POLL_COUNT, timeout_s)

    def split(self, messages: Sequence[Message]) -> Iterable[tuple[Any, bytes]]:
        return [((each.topic, each.queue_id), each.body) for each in messages]

    def close(self) -> None:
        self._consumer.close()


if __name__ == "__main__":
    serve(OwnSender, OwnReceiver)
