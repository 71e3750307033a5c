"""Processes of a run: workers that are told what to do, and what all of them cost.

Every worker leads a process group of its own. A Ctrl-C reaches the harness alone, which ends what
it has started; a worker whose harness is gone ends by itself, when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import psutil

from cometmq.bench.extra import BenchError
from cometmq.bench.worker import Job

READY_S: Final = 120.0  # a JVM that starts on a busy machine
END_S: Final = 10.0
QUIET_SHARE: Final = 0.05  # of a core, by processes that are not of the run
TAIL_LINES: Final = 5


class Worker:
    """One worker process.

    Args:
        said: where its standard error goes.
    """

    def __init__(self, command: Sequence[str], job: Job, said: Path) -> None:
        self.name = said.stem
        self.progress = 0
        self.samples: list[tuple[float, int]] = []  # when it told its progress, and what it was
        self._said = said
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with said.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._write(msgspec.json.encode(job))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._lines.put(json.loads(line) | {"at": time.monotonic()})
            except (ValueError, TypeError):
                self._lines.put({"error": f"not a line of JSON: {line[:80]!r}"})
        self._lines.put(None)

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then its answers say why
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        self._wait_for("ready", READY_S)

    def go(self) -> None:
        self._write(b'{"go": true}')

    def stop(self) -> None:
        self._write(b'{"stop": true}')

    def result(self, timeout_s: float) -> dict[str, Any]:
        """Its result. Raises BenchError after so many seconds without a word from it."""
        found: dict[str, Any] = self._wait_for("result", timeout_s)
        return found

    def look(self, timeout_s: float) -> None:
        """Take in what it says, for `progress`. Raises BenchError when it has failed or ended."""
        with contextlib.suppress(queue.Empty):
            line = self._lines.get(timeout=timeout_s)
            if line is not None and "result" in line:
                raise self._failure(f"ended early: {line['result']}")
            self._note(line)

    def _wait_for(self, field: str, timeout_s: float) -> Any:
        while True:
            try:
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                raise self._failure(f"no {field} within {timeout_s:g} s") from None
            if line is not None and field in line:
                return line[field]
            self._note(line)

    def _note(self, line: dict[str, Any] | None) -> None:
        if line is None:
            raise self._failure(f"ended with status {self._process.wait()}")
        if "error" in line:
            raise self._failure(str(line["error"]))
        if "progress" in line:
            self.progress = int(line["progress"])
            self.samples.append((line["at"], self.progress))

    def _failure(self, text: str) -> BenchError:
        tail = self._said.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        error = BenchError(f"worker {self.name}: {text}")
        for line in tail:
            error.add_note(f"  {line}")
        return error

    def close(self) -> None:
        """Whatever it is doing, it ends now, and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        if not self._said.stat().st_size:
            self._said.unlink()


class Crew:
    """The workers of one run; none is left when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._workers: list[Worker] = []

    def start(self, command: Sequence[str], job: Job) -> Worker:
        said = self.folder / f"{job.role}-{len(self._workers)}.stderr"
        worker = Worker(command, job, said)
        self._workers.append(worker)
        return worker

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.close()


# --- what it cost ---------------------------------------------------------------------------------


def tree(pids: Iterable[int]) -> list[psutil.Process]:
    """These processes and all below them."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                found[each.pid] = each
    return list(found.values())


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes and all below them, ended ones too."""
    total = 0.0
    for process in tree(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += sum(times[:4])  # with those of children that it has waited for
    return total


def memory_bytes(pids: Iterable[int]) -> int:
    """Proportional set size of all of them: shared pages count once."""
    total = 0
    for process in tree(pids):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def descriptors(pids: Iterable[int]) -> int:
    total = 0
    for process in tree(pids):
        with contextlib.suppress(psutil.Error):
            total += process.num_fds()
    return total


@dataclass(frozen=True)
class Cost:
    """What the machine did between two looks.

    Attributes:
        servers_s: CPU seconds of the servers.
        others: cores that everybody else kept busy, the kernel's own threads included.
        stolen: cores that the host took from this machine.
    """

    servers_s: float
    others: float
    stolen: float

    @property
    def quiet(self) -> bool:
        return self.others <= QUIET_SHARE


class Watch:
    """Looks at the machine when it is made, and when `cost` is asked for."""

    def __init__(self, servers: Iterable[int], workers: Iterable[int]) -> None:
        self._servers = list(servers)
        self._workers = [*workers, os.getpid()]
        self._began = time.monotonic()
        self._busy, self._stolen = _machine()
        self._servers_s = cpu_seconds(self._servers)
        self._ours_s = self._ours()

    def _ours(self) -> float:
        """What runs, and what the harness has waited for: compilers and controls."""
        ended = os.times()
        running = cpu_seconds({*self._servers, *self._workers})
        return running + ended.children_user + ended.children_system

    def cost(self) -> Cost:
        """To be asked for while the processes are still there."""
        busy, stolen = _machine()
        elapsed = max(1e-9, time.monotonic() - self._began)
        ours = self._ours() - self._ours_s
        return Cost(
            servers_s=cpu_seconds(self._servers) - self._servers_s,
            others=max(0.0, busy - self._busy - ours) / elapsed,
            stolen=max(0.0, stolen - self._stolen) / elapsed,
        )


def _machine() -> tuple[float, float]:
    """(busy seconds of all processors, stolen ones)"""
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq
    return busy, getattr(times, "steal", 0.0)
