"""A service that has the broker's writer inside: `Broker(store, writer="here")` and its appenders.

What is measured is what a user calls, with the whole broker beside it. As a worker it sends by
appending, and reads every queue of the closed store from begin to end.

Nothing keeps an appender from running ahead of the dispatcher. `settle`, which the worker's loop
calls after each group of bodies, waits until everything is in the consume queues; how long that
took is `dispatched_after_s` in the result.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from cometmq import Admin, Broker, Message, __version__
from cometmq.bench.crew import cpu_seconds
from cometmq.bench.extra import BenchError
from cometmq.bench.own import FLUSHES, windows
from cometmq.bench.systems import Durability
from cometmq.bench.worker import Job, serve
from cometmq.shm.kernel.codec import decode
from cometmq.shm.kernel.store import Appender
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter
from cometmq.shm.reading.store_reader import GetStatus, ReadLimits, StoreReader

DISPATCH_S: Final = 120.0
FLUSH_S: Final = 300.0
READ_COUNT: Final = 8192
READ_BYTES: Final = 64 << 20


class Counters:
    """What a running broker's control file says, for who waits for it without being its sleeper."""

    def __init__(self, store: Path) -> None:
        control = ControlFile.open(store / CONTROL_FILE, writable=False)
        self.wrote = control.read(Counter.WROTE)
        self.flushed = control.read(Counter.FLUSHED)
        self.dispatched = control.read(Counter.DISPATCHED)

    def wait_dispatched(self, timeout_s: float = DISPATCH_S) -> None:
        """Until every record has its entry in a consume queue."""
        deadline = time.monotonic() + timeout_s
        while self.dispatched.value < self.wrote.value:
            if time.monotonic() > deadline:
                left = self.wrote.value - self.dispatched.value
                raise BenchError(f"{left:,} bytes are not dispatched after {timeout_s:g} s")
            time.sleep(0.0005)  # a bystander has no doorbell


class EmbeddedSender:
    """`one` and `stream` are one Python call a message, `batch` is append_many.

    Under SYNC_FLUSH a call returns when its message is on the disk; a stream with a window waits
    once for all of them, with the last one.
    """

    def __init__(self, job: Job) -> None:
        self.client = f"cometmq {__version__}, embedded"
        durability = Durability(job.endpoint["durability"])
        store = Path(job.endpoint["folder"])
        self._broker = Broker(
            store,
            settings={"flushDiskType": FLUSHES[durability], **job.endpoint["settings"]},
            writer="here",
        )
        self._counters = Counters(store)
        self._durable = bool(job.options.get("durable"))
        with Admin(self._broker.name_server) as admin:
            for topic in job.topics:
                admin.create_topic(topic, queues=job.queues)
        self._appenders = {
            topic: [self._broker.appender(topic, number) for number in range(job.queues)]
            for topic in job.topics
        }
        self._turns = {topic: cycle(own) for topic, own in self._appenders.items()}
        self._all: Iterator[Appender] = cycle(
            [each for own in zip(*self._appenders.values(), strict=True) for each in own]
        )

    def one(self, topic: str, body: bytes) -> None:
        next(self._turns[topic]).append(body)

    def stream(self, topics: Sequence[str], bodies: list[bytes], in_flight: int) -> None:
        if in_flight:
            for window in windows(bodies, in_flight):
                self._together(window)
        elif len(topics) == 1 and len(self._appenders[topics[0]]) == 1:
            append = self._appenders[topics[0]][0].append
            for body in bodies:
                append(body)
        else:
            for appender, body in zip(self._all, bodies, strict=False):
                appender.append(body)

    def _together(self, bodies: list[bytes]) -> None:
        """As many calls, of which the last one waits for all."""
        append: Callable[..., int] = next(self._all).append
        for body in bodies[:-1]:
            append(body, wait=False)
        append(bodies[-1])

    def batch(self, topic: str, bodies: list[bytes]) -> None:
        next(self._turns[topic]).append_many(bodies)

    def begin(self, topic: str, body: bytes) -> None:
        self.one(topic, body)

    def finish(self, begun: deque[None]) -> int:
        """It was stored when `begin` returned."""
        begun.popleft()
        return 1

    def settle(self) -> None:
        """Until all is dispatched, and with the option `durable` on the disk."""
        self._counters.wait_dispatched()
        if self._durable:
            next(self._all).wait(FLUSH_S)

    def cpu_s(self) -> float:
        """Of this process and all of the broker's."""
        return time.process_time() + cpu_seconds([self._broker.pid])

    def close(self) -> None:
        self._broker.close()


class EmbeddedReceiver:
    """Every queue from its first message on, of a store that nobody has open."""

    def __init__(self, job: Job) -> None:
        self.client = f"cometmq {__version__}, embedded"
        limits = ReadLimits(
            hot_bytes=READ_BYTES, hot_count=READ_COUNT, cold_bytes=READ_BYTES, cold_count=READ_COUNT
        )
        self._reader = StoreReader.open_closed(Path(job.endpoint["folder"]), limits)
        self._found = self._read(job)

    def _read(self, job: Job) -> Iterator[list[Message]]:
        """The bodies have a CRC of their own, which the worker checks."""
        for topic in job.topics:
            for queue_id in range(job.queues):
                offset = 0
                while True:
                    found = self._reader.get_message(
                        topic, queue_id, offset, READ_COUNT, check_crc=False
                    )
                    if found.status is not GetStatus.FOUND or found.payload is None:
                        break
                    yield decode(found.payload, None, False)
                    offset = found.next_queue_offset

    def poll(self, timeout_s: float) -> list[Message]:
        return next(self._found, [])

    def split(self, messages: Sequence[Message]) -> Iterable[tuple[Any, bytes]]:
        return [((each.topic, each.queue_id), each.body) for each in messages]

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Nobody keeps the progress."""

    def close(self) -> None:
        self._reader.close()


if __name__ == "__main__":
    serve(EmbeddedSender, EmbeddedReceiver)
