"""Power cuts of a service that has its broker's writer inside, and appends without asking anybody.

The same promises as in power.py, judged by the same means; what recovers after a cut is the service
itself.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import msgspec
import psutil
from family import MARK, RECOVER_TIMEOUT_S, RUN, SMALL, RunningBroker, left_behind
from fault import appending
from fault.appending import WORD
from fault.disk import Disk
from fault.power import BATCH, QUEUES, SEGMENT, Acknowledged, PowerCuts, QueueBook, Traffic
from paths import SEARCH
from patience import patient

from cometmq.protocol.commands import BrokerEndpoints
from cometmq.protocol.wire.channel import Channel

READY_S: Final = patient(30)


class RunningService(RunningBroker):
    """A service with its broker, as PowerCuts sees a broker.

    Args:
        book: where it counts what it begins to append; off the disk.
    """

    def __init__(  # deliberately not its base's: another process is started
        self, store: Path, settings: Mapping[str, object], book: Path, log_path: Path, *, wait: bool
    ) -> None:
        self.store = store
        self.log_path = log_path
        self._mark = f"{RUN}/service-{time.monotonic_ns()}"
        self._channels: list[Channel] = []
        self._closed = False
        self.listener: threading.Thread | None = None  # who reads what it says
        began = time.monotonic()
        given = {"logLevel": "INFO", **SMALL, **settings}
        given.pop("port")
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, appending.__file__, store, msgspec.json.encode(given), book],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, MARK: self._mark, "PYTHONPATH": SEARCH},
            )
        self.pid = self._process.pid
        self.name_server = ""
        if wait:
            self._wait_serving()
        self.start_s = time.monotonic() - began

    def _wait_serving(self) -> None:
        watchdog = threading.Timer(READY_S, self._process.kill)
        watchdog.start()
        line = self.output.readline().split()
        watchdog.cancel()
        assert line[:1] == [b"ready"], f"it did not start:\n{self.log[-4000:]}"
        self.name_server = line[1].decode()

    @property
    def output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def go(self) -> None:
        """Have it append from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    @cached_property
    def endpoints(self) -> BrokerEndpoints:
        self.ready = _Ready(self.name_server)  # type: ignore[assignment]
        return RunningBroker.endpoints.func(self)

    def processes(self) -> list[psutil.Process]:
        return left_behind(self._mark)

    def _let_go(self) -> None:
        """What it had said before its end is heard before the pipe is closed."""
        if self.listener is not None:
            self.listener.join(READY_S)
        super()._let_go()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._closed:
            return
        if kind is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self.output.read()  # what it still says must not keep it from ending
            self._process.wait(RECOVER_TIMEOUT_S * 2)
        self.kill_all()


class _Ready:
    def __init__(self, name_server: str) -> None:
        self.name_server = name_server


class ServiceTraffic(Traffic):
    """What the service says that it has stored, into the books; and a group that commits."""

    def __init__(self, service: RunningService, books: list[QueueBook]) -> None:
        super().__init__(service.endpoints, books)
        self._service = service
        service.listener = threading.Thread(target=self._guard, args=(self._listen, 0))
        self._threads = [
            service.listener,
            threading.Thread(target=self._guard, args=(self._commit, 0)),
        ]

    def __enter__(self) -> Traffic:
        self._service.go()
        return super().__enter__()

    def _listen(self, _: int) -> None:
        """To its end: what it had said when the power went is in the pipe."""
        for line in self._service.output:
            if not line.endswith(b"\n"):
                return
            words = line.split()
            queue_id, offset, number, wrote = (int(word) for word in words[:4])
            when = float(words[4])
            for index in range(BATCH):
                told = Acknowledged(number + index, wrote, when)
                self._books[queue_id].acknowledged[offset + index] = told
            if wrote // SEGMENT > self._segment >= 0:
                self.rolled.set()
            self._segment = wrote // SEGMENT
            self.answered.set()

    def _commit(self, number: int) -> None:
        with contextlib.suppress(Exception):  # whatever the end of the service does to it
            super()._commit(number)


class ServiceCuts(PowerCuts):
    """PowerCuts of a service."""

    def __init__(self, disk: Disk, *, sync: bool, seed: int, logs: Path) -> None:
        super().__init__(disk, sync=sync, seed=seed, logs=logs)
        self._book_path = logs / "book"
        self._book = appending.open_book(self._book_path)

    def _broker(self, *, wait: bool = True) -> RunningBroker:
        service = RunningService(
            self._store, self._settings, self._book_path, self._log_path, wait=wait
        )
        self.slowest_start_s = max(self.slowest_start_s, service.start_s)
        return service

    def _traffic(self, broker: RunningBroker) -> Traffic:
        assert isinstance(broker, RunningService)
        return ServiceTraffic(broker, self.books)

    def check(self, broker: RunningBroker) -> None:
        for queue_id, book in enumerate(self.books):
            (book.sent,) = WORD.unpack_from(self._book, queue_id * WORD.size)
        super().check(broker)


def cut_service(place: Path, kind: str, *, sync: bool, cuts: int, seed: int) -> dict[str, Any]:
    """A whole campaign on a disk of its own; its figures."""
    with Disk(place, kind, space_bytes=16 << 30) as disk:
        campaign = ServiceCuts(disk, sync=sync, seed=seed, logs=place)
        while disk.cuts < cuts:
            campaign.cycle()
        campaign.finish()
    return {"acknowledged": campaign.acknowledged, "lost": campaign.lost, "cuts": cuts}


assert QUEUES >= 2  # threads of one service, beside each other
