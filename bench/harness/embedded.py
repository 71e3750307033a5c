"""The log in this process, with allocator, dispatcher and flush process beside it, as in a broker.

What is measured is CommitLog itself, which a commitlog process calls, and what the others cost it.
As a worker it sends by appending, and reads the closed store from begin to end.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from cometmq.actors.allocator import AllocatorActor
from cometmq.actors.dispatcher import DispatcherActor
from cometmq.actors.family import Family
from cometmq.actors.flush import FlushActor
from cometmq.actors.service import VERSION
from cometmq.bench.own import FLUSHES
from cometmq.bench.systems import Durability
from cometmq.bench.worker import Job, serve
from cometmq.conf import BrokerSettings
from cometmq.shm._kernel import Message, QueueCursor
from cometmq.shm.commit_log import CommitLog
from cometmq.shm.control import CONTROL_FILE, HOT_STEP_BYTES, ControlFile, Counter, Phase
from cometmq.shm.files import check_store_folder
from cometmq.shm.queue_table import QUEUES_FILE, QueueTable
from cometmq.shm.store_reader import StoreReader

STORE_HOST = bytes([127, 0, 0, 1, 0, 0, 42, 159])
START_S = 30
DISPATCH_S = 120
READ_COUNT = 8192
PUBLISH_EVERY = 64  # appends, as a commitlog process takes what its socket holds in one go


class Embedded:
    """The log, and what a commitlog process does with its counters.

    Args:
        settings: by RocketMQ's keys.
        flushing: whether there is a flush process.
        dispatching: whether there is a dispatcher, which builds the consume queues.
    """

    def __init__(
        self,
        store: Path,
        settings: dict[str, Any],
        *,
        flushing: bool = True,
        dispatching: bool = False,
    ) -> None:
        check_store_folder(store)
        self.store = store
        self.settings = BrokerSettings.from_keys({**settings, "storePathRootDir": str(store)})
        self._bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(8)]
        ControlFile.create(store / CONTROL_FILE, {}, self._bells)
        family = self._family("commitlog", 0)
        QueueTable.create(store / QUEUES_FILE, family.control.read(Counter.QUEUES))
        self.control = family.control
        self._wait_for = family.wait_for
        self._children = [self._child(AllocatorActor, "allocator", 1)]
        if flushing:
            self._children.append(self._child(FlushActor, "flush", 3))
        if dispatching:
            self._children.append(self._child(DispatcherActor, "dispatcher", 2))
        self.wrote = self.control.own(Counter.WROTE)
        self.steps = self.control.own(Counter.STEPS)
        self.flushed = self.control.sleep_on(Counter.FLUSHED, 0)
        self._bell = select.poll()
        self._bell.register(self._bells[0], select.POLLIN)
        self.control.own(Counter.PHASE).reset(Phase.RECOVERED)
        self.log = CommitLog(
            store,
            segment_bytes=self.settings.mapped_file_size_commit_log_bytes,
            physical_offset=0,
            store_host=STORE_HOST,
            max_message_bytes=self.settings.max_message_size,
            small_pages=self.settings.flush_disk_type.value == "SYNC_FLUSH",
            ready=self._ready,
        )
        self.log.open_segment()
        self._step_bytes = min(HOT_STEP_BYTES, self.log.segment_bytes)

    def _family(self, role: str, doorbell: int) -> Family:
        return Family(role, self.settings, self.store, self._bells, doorbell, {})

    def _child(self, actor: Any, role: str, doorbell: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            actor.start(self._family(role, doorbell))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pause()
        finally:
            os._exit(1)

    def _ready(self, start: int) -> None:
        end = start + self.settings.mapped_file_size_commit_log_bytes
        if self.control.read(Counter.ALLOCATED).value < end:
            if start:
                self.publish()
            self._wait_for(Counter.ALLOCATED, end, START_S)

    def publish(self) -> None:
        end = self.log.physical_offset
        self.wrote.advance(end)
        if end // self._step_bytes != self.steps.value:
            self.steps.advance(end // self._step_bytes)
            self.log.tidy()

    def wait_flushed(self, end: int) -> None:
        while True:
            self.flushed.arm()
            if self.flushed.value >= end:
                return
            if self._bell.poll(START_S * 1000):
                os.eventfd_read(self._bells[0])

    def wait_dispatched(self) -> None:
        """Until every record has its entry in a consume queue."""
        self._wait_for(Counter.DISPATCHED, self.log.physical_offset, DISPATCH_S)

    def __enter__(self) -> Embedded:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.log.close()
        for bell in self._bells:
            os.close(bell)


# --- the worker -----------------------------------------------------------------------------------


class EmbeddedSender:
    """`one` and `stream` are one Python call a message, `batch` is append_many.

    Under SYNC_FLUSH a message, or a batch, counts when its bytes are on the disk.
    """

    def __init__(self, job: Job) -> None:
        self.client = f"cometmq {VERSION}, embedded"
        flush = FLUSHES[Durability(job.endpoint["durability"])]
        settings = {"flushDiskType": flush, **job.endpoint["settings"]}
        self._sync = settings["flushDiskType"] == "SYNC_FLUSH"
        store = Path(job.endpoint["folder"])
        self._embedded = Embedded(store, settings, dispatching=True)
        self._queues = {
            topic: [QueueCursor(topic, number) for number in range(job.queues)]
            for topic in job.topics
        }
        self._turn = 0
        self.extra: dict[str, float] = {}

    def _next_queue(self, topic: str) -> QueueCursor:
        queues = self._queues[topic]
        self._turn += 1
        return queues[self._turn % len(queues)]

    def one(self, topic: str, body: bytes) -> None:
        self._embedded.log.append(self._next_queue(topic), body)
        if self._sync or self._turn % PUBLISH_EVERY == 0:
            self._publish()

    def _publish(self) -> None:
        self._embedded.publish()
        if self._sync:
            self._embedded.wait_flushed(self._embedded.log.physical_offset)

    def stream(self, topics: Sequence[str], bodies: list[bytes], in_flight: int) -> None:
        queues = [queue for topic in topics for queue in self._queues[topic]]
        append, publish = self._embedded.log.append, self._publish
        step = in_flight or PUBLISH_EVERY
        turn = 0
        for start in range(0, len(bodies), step):
            if len(queues) == 1:
                queue = queues[0]
                for body in bodies[start : start + step]:
                    append(queue, body)
            else:
                for body in bodies[start : start + step]:
                    append(queues[turn], body)
                    turn = turn + 1 if turn + 1 < len(queues) else 0
            publish()

    def batch(self, topic: str, bodies: list[bytes]) -> None:
        self._embedded.log.append_many(self._next_queue(topic), bodies)
        self._publish()

    def begin(self, topic: str, body: bytes) -> None:
        self.one(topic, body)

    def finish(self, token: None) -> None:
        """It was stored when `begin` returned."""

    def close(self) -> None:
        began = time.monotonic()
        self._publish()
        self._embedded.wait_dispatched()
        self.extra["dispatched_after_s"] = time.monotonic() - began
        self._embedded.close()


class EmbeddedReceiver:
    """The whole log, from its first record on, of a store that nobody has open."""

    def __init__(self, job: Job) -> None:
        self.client = f"cometmq {VERSION}, embedded"
        self._reader = StoreReader.open_closed(Path(job.endpoint["folder"]))
        self._messages: Iterator[Message] = self._reader.scan_log()

    def poll(self, timeout_s: float) -> list[Message]:
        return list(islice(self._messages, READ_COUNT))

    def split(self, messages: Sequence[Message]) -> Iterable[tuple[Any, bytes]]:
        return [((each.topic, each.queue_id), each.body) for each in messages]

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Nobody keeps the progress."""

    def close(self) -> None:
        self._reader.close()


if __name__ == "__main__":
    serve(EmbeddedSender, EmbeddedReceiver)
