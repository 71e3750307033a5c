"""The nth system call of the store fails, or is where the power is cut, for n = 1, 2, 3 ...

One scenario, always the same: a store is begun, a topic made, messages sent over several segments,
offsets committed, the broker ended in order, started again, and so on once more. It is run without
a fault to count its calls, and then with a fault at each n that is asked for. syscalls.c, preloaded
into every process of the broker, counts and fails the calls.

Whatever n: the broker goes on, or refuses, or stops and says why; the start after it, without a
fault, finds everything that was acknowledged.

The processes of a broker run at the same time, so n is the same call in the next run more or less;
what was hit stands in each outcome.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from family import EndedEarly, RunningBroker, Sent
from fault.disk import Disk
from patience import patient
from preloaded import library

from cometmq.protocol.commands import (
    CommitOffsets,
    FetchOffsets,
    GroupOffsets,
    QueueKey,
    QueueOffset,
)
from cometmq.protocol.errors import CometError
from cometmq.shm.tools.verify import verify_store

SOURCE: Final = Path(__file__).with_name("syscalls.c")
CALLS: Final = (
    "create", "write", "fsync", "fdatasync", "msync", "sync_file_range", "ftruncate", "fallocate",
    "rename", "link", "unlink", "mkdir", "mmap",
)  # fmt: skip
STATE: Final = struct.Struct("=QQQQ256s")  # struct state in syscalls.c
TOPIC: Final = "nth"
GROUP: Final = "counters"
SEGMENT: Final = 96 << 10
SETTINGS: Final = {
    "mappedFileSizeCommitLog": SEGMENT,
    "maxMessageSize": 16 << 10,
    "flushDiskType": "SYNC_FLUSH",
    "syncFlushTimeout": 2_000,
    "flushIntervalConsumeQueue": 50,
    "flushConsumeQueueThoroughInterval": 100,
    "flushConsumerOffsetInterval": 50,
    "maxHashSlotNum": 100,
    "maxIndexNum": 200,
    "cleanResourceInterval": 200,
}
TRACEBACK: Final = re.compile(r"^Traceback.*\n(?:[ \t].*\n|\n)*(?P<end>\S.*)", re.MULTILINE)
CHAINED: Final = ("During handling of the above", "The above exception was the direct cause")
RUNS: Final = 2  # of the broker, in one scenario
BATCHES: Final = 30
BATCH: Final = 4
SEND_TIMEOUT_S: Final = 3
REFUSALS_MAX: Final = 3  # then this run of the broker is given up


class Shim:
    """The preloaded library, and the memory it shares with us."""

    MODULE: Final = "fault.shimmed"

    def __init__(self, place: Path) -> None:
        self._path = place / "syscalls.state"
        self._path.write_bytes(bytes(4096))
        with self._path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4096)

    def set(self, at: int) -> None:
        """The next run's `at`th call is the one; 0 counts only."""
        self._memory[: STATE.size] = STATE.pack(0, at, 0, 0, b"")

    @property
    def calls(self) -> int:
        return int(STATE.unpack_from(self._memory)[0])

    @property
    def hits(self) -> int:
        return int(STATE.unpack_from(self._memory)[2])

    @property
    def hit_at(self) -> float:
        """time.monotonic() of the first hit; infinity before it."""
        when = int(STATE.unpack_from(self._memory)[3])
        return when / 1e9 if when else float("inf")

    @property
    def what(self) -> str:
        return bytes(STATE.unpack_from(self._memory)[4]).partition(b"\0")[0].decode()

    def environ(self, store: Path, fault: Fault, mount: Path | None) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(library(SOURCE)),
            "FAULT_STORE": str(store.resolve()),
            "FAULT_STATE": str(self._path),
            "FAULT_PLACE": fault.place,
            "FAULT_CALLS": ",".join(fault.calls),
            "FAULT_ERRNO": str(fault.errno),
            "FAULT_FOREVER": str(int(fault.forever)),
            "FAULT_MOUNT": str(mount or ""),
        }


@dataclass(frozen=True)
class Fault:
    """What happens at the nth call of these names; all names if there are none."""

    errno: int = errno.EIO  # 0: the power is cut
    calls: tuple[str, ...] = ()
    forever: bool = False
    place: str = ""  # only calls on what is in this folder of the store

    def __str__(self) -> str:
        what = errno.errorcode[self.errno] if self.errno else "power cut"
        calls = ",".join(self.calls) or "any"
        return f"{what}{' for good' if self.forever else ''} at {calls} {self.place}".rstrip()


@dataclass
class Outcome:
    """What became of one scenario."""

    fault: Fault
    n: int
    what: str = ""  # the call that was hit; empty: there is no nth call
    acknowledged: list[tuple[float, Sent]] = field(default_factory=list)
    committed: list[tuple[float, int]] = field(default_factory=list)
    topic_at: float = float("inf")  # when the topic was there
    refusals: list[str] = field(default_factory=list)  # what clients, or who started it, were told
    logs: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # what is not as it has to be

    def __str__(self) -> str:
        return f"n {self.n} ({self.what or 'no such call'}), {self.fault}"


class Scenario:
    """Runs it, each time on a fresh store.

    Args:
        disk: where the power is cut; without one the calls fail.
    """

    def __init__(self, place: Path, disk: Disk | None = None) -> None:
        self._place = place
        self._disk = disk
        self.shim = Shim(place)
        self._store = (disk.folder if disk else place) / "store"
        self._log_path = place / "nth.log"

    def count(self, fault: Fault) -> int:
        """How many calls there are; without a fault all has to be in order."""
        outcome = self.run(fault, 0)
        assert not outcome.complaints, outcome.complaints
        assert not outcome.refusals, outcome.refusals
        assert len(outcome.acknowledged) == RUNS * BATCHES * BATCH
        return self.shim.calls

    def run(self, fault: Fault, n: int) -> Outcome:
        outcome = Outcome(fault, n)
        shutil.rmtree(self._store, ignore_errors=True)
        self.shim.set(n)
        for number in range(RUNS):
            self._run_broker(outcome, number)
            if self.shim.hits and not fault.errno:
                break
        outcome.what = self.shim.what
        if self.shim.hits and not fault.errno:
            assert self._disk is not None
            self._disk.power_on()
        self._look_at_logs(outcome)
        try:
            self._judge(outcome)
        except (AssertionError, CometError, EndedEarly) as error:
            outcome.complaints.append(f"afterwards: {type(error).__name__}: {error}"[:3000])
        return outcome

    def _run_broker(self, outcome: Outcome, number: int) -> None:
        mount = self._disk.folder if self._disk else None
        broker = RunningBroker(
            self._store,
            SETTINGS,
            wait=False,
            log_path=self._log_path,
            environ=self.shim.environ(self._store, outcome.fault, mount),
            module=Shim.MODULE,
        )
        watch = self._kill_at_the_cut(broker) if not outcome.fault.errno else None
        with watch or contextlib.nullcontext():
            try:
                broker.wait_ready()
                self._drive(broker, outcome, number)
                broker.close()
            except CometError as error:
                outcome.refusals.append(f"{type(error).__name__}: {error}")
            except EndedEarly as error:
                if not self.shim.hits or outcome.fault.errno:
                    outcome.complaints.append(f"ended without a word: {error}"[:3000])
            except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                if not self.shim.hits or outcome.fault.errno:
                    outcome.complaints.append(f"{type(error).__name__}: {error}"[:3000])
            finally:
                outcome.logs.append(broker.log)
                broker.kill_all()

    @contextlib.contextmanager
    def _kill_at_the_cut(self, broker: RunningBroker) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.002):
                if self.shim.hits:
                    for process in broker.processes():
                        with contextlib.suppress(OSError):
                            os.kill(process.pid, 9)
                    return

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _drive(self, broker: RunningBroker, outcome: Outcome, run: int) -> None:
        """What the clients do. Gives up once the broker refuses again and again."""
        left = REFUSALS_MAX
        if outcome.topic_at == float("inf"):
            while True:
                try:
                    broker.create_topic(TOPIC, 2)
                    outcome.topic_at = time.monotonic()
                    break
                except CometError as error:
                    left = self._refused(broker, outcome, error, left)
                    if not left:
                        return
        for batch in range(BATCHES):
            if batch == BATCHES // 2:
                with contextlib.suppress(CometError):
                    broker.create_topic(f"more-{run}", 1)
            queue_id = batch % 2
            bodies = [
                b"%d %d %d " % (run, batch, index) + b"x" * (700 + 40 * batch)
                for index in range(BATCH)
            ]
            try:
                sent = broker.send(
                    TOPIC, queue_id, bodies, timeout_s=SEND_TIMEOUT_S, keys=f"{run}-{batch}"
                )
                now = time.monotonic()
                outcome.acknowledged += [(now, one) for one in sent]
                if batch % 5 == 0 and not queue_id:
                    self._commit(broker, outcome, sent[-1].queue_offset)
            except CometError as error:
                left = self._refused(broker, outcome, error, left)
                if not left:
                    return

    def _refused(
        self, broker: RunningBroker, outcome: Outcome, error: CometError, left: int
    ) -> int:
        outcome.refusals.append(f"{type(error).__name__}: {error}")
        if self.shim.hits and not outcome.fault.errno:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            broker._process.wait(0.3)  # it may be about to end
            return 0
        return left - 1

    def _commit(self, broker: RunningBroker, outcome: Outcome, offset: int) -> None:
        command = CommitOffsets(GROUP, [QueueOffset(TOPIC, 0, offset)])
        broker.coordinator.ask(command, timeout_s=SEND_TIMEOUT_S)
        outcome.committed.append((time.monotonic(), offset))

    def _look_at_logs(self, outcome: Outcome) -> None:
        """A process may die of what the system refused, and say which call it was; of nothing else.

        In the dark everything fails, and nobody reads the log.
        """
        if not outcome.fault.errno:
            return
        for text in outcome.logs:
            for found in TRACEBACK.finditer(text):
                if text[found.end() :].lstrip().startswith(CHAINED):
                    continue  # what it led to stands below
                outcome.tracebacks.append(found[0])
                if os.strerror(outcome.fault.errno) not in found["end"]:
                    outcome.complaints.append("a traceback in the log: " + found[0][-3000:])

    def _judge(self, outcome: Outcome) -> None:
        """Start without a fault: what was acknowledged is there, and the files agree."""
        cut_at = self.shim.hit_at if not outcome.fault.errno else float("inf")
        with RunningBroker(self._store, SETTINGS, log_path=self._log_path) as broker:
            if outcome.topic_at >= cut_at or outcome.topic_at == float("inf"):
                broker.create_topic(TOPIC, 2)
            broker.assert_stored(sent for when, sent in outcome.acknowledged if when < cut_at)
            self._judge_commits(broker, outcome, cut_at)
            broker.send(TOPIC, 1, [b"and it goes on"])
        assert broker.ready
        findings = verify_store(self._store).findings
        assert not findings, findings[:2]

    def _judge_commits(self, broker: RunningBroker, outcome: Outcome, cut_at: float) -> None:
        answer, _ = broker.coordinator.ask(
            FetchOffsets(GROUP, [QueueKey(TOPIC, 0)]), timeout_s=patient(30)
        )
        assert isinstance(answer, GroupOffsets)
        due = max((offset for when, offset in outcome.committed if when < cut_at - 1), default=-1)
        if outcome.fault.errno:
            due = max((offset for _, offset in outcome.committed), default=-1)
        assert answer.offsets[0].queue_offset >= due, (answer.offsets, due)
