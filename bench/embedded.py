"""A writer in this process, with allocator and flush process beside it, as in a broker."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

from cometmq.actors.allocator import AllocatorActor
from cometmq.actors.family import Family
from cometmq.actors.flush import FlushActor
from cometmq.conf import BrokerSettings
from cometmq.shm.commit_log import CommitLog
from cometmq.shm.control import CONTROL_FILE, HOT_STEP_BYTES, ControlFile, Counter, Phase
from cometmq.shm.files import check_store_folder
from cometmq.shm.queue_table import QUEUES_FILE, QueueTable

STORE_HOST = bytes([127, 0, 0, 1, 0, 0, 42, 159])
START_S = 30


class Embedded:
    """The log, and what a commitlog process does with its counters.

    Args:
        settings: by RocketMQ's keys.
        flushing: whether there is a flush process.
    """

    def __init__(self, store: Path, settings: dict[str, Any], *, flushing: bool = True) -> None:
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

    def __enter__(self) -> Embedded:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.log.close()
        for bell in self._bells:
            os.close(bell)
