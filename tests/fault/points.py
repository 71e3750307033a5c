"""Points of the code at which a process of the broker is killed, by name.

    with Points(folder) as points:
        broker = RunningBroker(store, module=points.MODULE, environ=points.environ)
        points.arm(POINTS["append.batch.after"], nth=3)
        pid = points.wait_hit(10)       # the process has killed itself there

Production code has no hooks. `fault.launcher` wraps functions in the supervisor's process before
the zygote is forked, so that every child has them; which wrapper kills, and at which pass, stands
in a shared mapping, so one broker serves for many kills. A dying process says so on a pipe first.

A point names a function, a call of `os`, or a counter's store. When one of them is gone the broker
does not start, and names the point.
"""

from __future__ import annotations

import importlib
import mmap
import os
import select
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from paths import SEARCH

from cometmq.actors.launch import process
from cometmq.actors.launch.zygote import Prepared
from cometmq.shm.kernel.live import OwnedCell
from cometmq.shm.live.control import ControlFile, Counter

FOLDER_VARIABLE: Final = "COMETMQ_FAULT_POINTS"
_ARMED: Final = struct.Struct("<II")  # number of the point, 0 = none; passes left
_HIT: Final = struct.Struct("<II")  # number of the point, process

Own = Callable[[ControlFile, Counter], OwnedCell]
When = Literal[
    "load", "restart", "start", "clean", "cold start", "derived", "transactions", "replication",
    "named", "timers",
]  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A place in the code at which a process is killed.

    Args:
        role: role of the process.
        target: "module:function", "module:Class.method", "os.name" or "Counter.NAME".
        moment: just before or just after the call.
        when: load that reaches the place: the usual load; a restart of that role; a start of the
            broker after a crash; deleting old segments; a running deriver (test_derived.py);
            transactions (test_transactions.py); a slave that follows (test_replication.py);
            producers with names or keys (test_named_producers.py, test_keyed.py); delayed messages
            (timed.py).
        nth_max: the pass is drawn from 1 to this.
        sync_only: whether the place is reached under SYNC_FLUSH only.
    """

    name: str
    role: str
    target: str
    moment: Literal["before", "after"]
    when: When = "load"
    nth_max: int = 20
    sync_only: bool = False


def _both(
    name: str,
    role: str,
    target: str,
    when: When = "load",
    nth_max: int = 20,
    sync_only: bool = False,
) -> dict[str, Point]:
    points = [
        Point(f"{name}.before", role, target, "before", when, nth_max, sync_only),
        Point(f"{name}.after", role, target, "after", when, nth_max, sync_only),
    ]
    return {point.name: point for point in points}


_COMMITLOG = "cometmq.actors.writer.commitlog:"
_OPENING = "cometmq.actors.writer.opening:"
_COORDINATOR = "cometmq.actors.coordination.coordinator:"
_BOOKS = "cometmq.actors.coordination.books:"
_WRITER = "cometmq.actors.writer."
_DERIVED = "cometmq.actors.writer.derived:DerivedWrites."
_TIMERS = "cometmq.actors.scheduling.timers:Timers."
_COPIES = "cometmq.actors.scheduling.timer_copies:TimerCopies."
_LEVELS = "cometmq.actors.scheduling.delays:DelayLevel."
_COMMIT_LOG = "cometmq.shm.log.commit_log:CommitLog."
_PASS = "cometmq.actors.writer.transactions:Transactions._pass"
_HALF_BOOK = "cometmq.actors.writer.half_book:HalfBook."
_LEDGER = "cometmq.actors.coordination.ledger:Ledger."
_SNAPSHOTS = "cometmq.actors.coordination.snapshots:"
_RETIRED = "cometmq.shm.log.retired:RetiredSegments."
_RECOVERY = "cometmq.shm.log.recovery:"
_TORN = "cometmq.shm.log.torn:"
_QUEUES = "cometmq.shm.derived.queue_builder:QueueBuilder."
POINTS: Final[Mapping[str, Point]] = {
    # The life of a message: records laid down, `wrote` published, answered.
    **_both("append.records", "commitlog", _COMMIT_LOG + "append_batch"),
    **_both("append.wrote", "commitlog", _COMMIT_LOG + "publish"),
    # Under SYNC_FLUSH, between: synced, and `flushed` says so.
    **_both("sync.here", "commitlog", _COMMIT_LOG + "sync", sync_only=True),
    **_both("sync.flushed", "commitlog", "Counter.FLUSHED", sync_only=True),
    **_both(
        "append.answer",
        "commitlog",
        "cometmq.actors.runtime.listeners.listener:FramedRequest.reply",
    ),
    **_both("roll", "commitlog", _COMMIT_LOG + "_roll", nth_max=1),
    **_both("roll.mapped", "commitlog", "cometmq.shm.log.segment_maps:SegmentMaps.map", nth_max=1),
    **_both("segment.reserved", "allocator", "os.posix_fallocate", nth_max=1),
    **_both("segment.renamed", "allocator", "os.rename", nth_max=1),
    **_both("segment.allocated", "allocator", "Counter.ALLOCATED", nth_max=1),
    **_both("flush.sync", "flush", "cometmq.actors.maintenance.flush:SegmentFile.sync", nth_max=5),
    **_both("flush.flushed", "flush", "Counter.FLUSHED", nth_max=3),
    **_both("checkpoint.pwrite", "flush", "os.pwrite", nth_max=1),
    **_both("checkpoint.stored", "flush", "cometmq.shm.os.files:Checkpoint.store", nth_max=1),
    **_both("dispatch.entries", "dispatcher", _QUEUES + "dispatch"),
    **_both("dispatch.dispatched", "dispatcher", "Counter.DISPATCHED"),
    **_both(
        "index.step", "dispatcher", "cometmq.actors.maintenance.indexing:Indexing.step", nth_max=5
    ),
    **_both("index.indexed", "dispatcher", "Counter.INDEXED", nth_max=5),
    # The coordinator's files: .tmp to the new content, .bak to the old one, durable or not.
    **_both("config.rename", "coordinator", "os.replace", nth_max=8),
    **_both("config.link", "coordinator", "os.link", nth_max=2),
    # The ledger, and the snapshots of what it comes to.
    **_both("ledger.sent", "coordinator", _LEDGER + "_hand_over"),
    **_both("ledger.stored", "commitlog", _COMMIT_LOG + "append_inner"),
    **_both("ledger.covered", "coordinator", _LEDGER + "_succeed"),
    **_both("snapshot.open", "coordinator", _SNAPSHOTS + "_Content.open", nth_max=3),
    **_both("snapshot.write", "coordinator", _SNAPSHOTS + "_Content.write", nth_max=3),
    **_both("snapshot.sync", "coordinator", _SNAPSHOTS + "_Content.sync", nth_max=3),
    **_both("snapshot.mark", "coordinator", _SNAPSHOTS + "write_mark", nth_max=6),
    **_both(
        "snapshot.taken",
        "coordinator",
        "cometmq.shm.state.config_files:ConfigFile.take_new",
        nth_max=3,
    ),
    **_both("resume", "coordinator", _BOOKS + "resume", "restart", 1),
    **_both(
        "config.answer",
        "coordinator",
        "cometmq.actors.runtime.listeners.listener:FramedRequest.reply",
    ),
    # A process that takes over from a dead one dies again.
    **_both("takeover.zero", "commitlog", _OPENING + "zero_behind", "restart", 1),
    **_both(
        "takeover.queues",
        "dispatcher",
        _QUEUES + "take_over",
        "restart",
        1,
    ),
    # A start after a bad end.
    **_both("recovery.last_run", "commitlog", _RECOVERY + "find_end_of_last_run", "start", 1),
    **_both("recovery.zero", "commitlog", _RECOVERY + "zero_behind", "start", 1),
    **_both("recovery.find", "commitlog", _RECOVERY + "find_end", "cold start", 1),
    **_both("recovery.torn", "commitlog", _TORN + "without_torn_write", "cold start", 1),
    **_both("recovery.told", "dispatcher", "Counter.QUEUES_RECOVERED", "start", 1),
    **_both("recovery.cut", "commitlog", _RECOVERY + "cut", "cold start", 1),
    **_both("recovery.log", "commitlog", _OPENING + "recover_log", "start", 1),
    **_both("recovery.wrote", "commitlog", _COMMITLOG + "begin_log", "start", 1),
    **_both(
        "recovery.queues",
        "dispatcher",
        _QUEUES + "recover",
        "start",
        1,
    ),
    **_both(
        "recovery.entries",
        "dispatcher",
        _QUEUES + "dispatch",
        "start",
        1,
    ),
    **_both(
        "recovery.flush", "flush", "cometmq.actors.maintenance.flush:SegmentFile.sync", "start", 1
    ),
    # Derived writes: the mark with its records, the snapshot of all positions.
    **_both("derived.write", "commitlog", _DERIVED + "write", "derived", 5),
    **_both("derived.laid", "commitlog", _DERIVED + "_lay", "derived", 5),
    **_both(
        "derived.appended",
        "commitlog",
        _COMMIT_LOG + "append_inner",
        "derived",
        5,
    ),
    **_both("derived.snapshot", "commitlog", _DERIVED + "keep", "derived", 2),
    **_both("derived.told", "commitlog", _DERIVED + "_tell_from", "derived", 1),
    **_both("derived.published", "commitlog", _COMMIT_LOG + "publish", "derived"),
    **_both(
        "derived.answer",
        "commitlog",
        "cometmq.actors.runtime.listeners.listener:FramedRequest.reply",
        "derived",
    ),
    **_both("derived.loaded", "commitlog", _DERIVED + "load", "restart", 1),
    # Transactions: an end or a check is written, and answered; a commitlog process begins.
    **_both("transactions.write", "commitlog", _HALF_BOOK + "write", "transactions", 5),
    **_both("transactions.whole", "commitlog", _HALF_BOOK + "write_ends", "transactions", 5),
    **_both(
        "transactions.appended",
        "commitlog",
        "cometmq.actors.writer.desk:Desk._append_ends",
        "transactions",
        5,
    ),
    **_both(
        "transactions.ended",
        "commitlog",
        "cometmq.actors.writer.transactions:Transactions.take",
        "transactions",
        5,
    ),
    **_both(
        "transactions.checked",
        "scheduler",
        "cometmq.actors.scheduling.checks:Checks._carry_out",
        "transactions",
        1,
    ),
    **_both("transactions.laid", "commitlog", _DERIVED + "_lay", "transactions", 5),
    # Messages for later: the wheel is filled, what is due is gathered and written, a level as well.
    **_both("timers.opened", "scheduler", _TIMERS + "_open", "timers", 1),
    **_both("timers.read", "scheduler", _TIMERS + "_read", "timers", 5),
    **_both("timers.fill", "scheduler", _COPIES + "fill", "timers", 5),
    **_both("timers.write", "scheduler", _TIMERS + "_write", "timers", 5),
    **_both("timers.kept", "scheduler", _TIMERS + "keep", "timers", 2),
    **_both("levels.write", "scheduler", _LEVELS + "_write", "timers", 3),
    **_both("transactions.published", "commitlog", _COMMIT_LOG + "publish", "transactions", 5),
    **_both("transactions.begun", "commitlog", _HALF_BOOK + "begin", "transactions", 1),
    **_both("transactions.read", "commitlog", _HALF_BOOK + "go_on", "transactions", 1),
    **_both("transactions.passed", "commitlog", _PASS, "transactions", 1),
    **_both(
        "transactions.offsets",
        "scheduler",
        "cometmq.actors.scheduling.half_view:HalfView.tell_offsets",
        "transactions",
        2,
    ),
    # A slave follows: it is sent something, reports, and counts; answers that waited for it.
    **_both(
        "ha.began", "ha", "cometmq.actors.replication.slaves.ha:HaActor._begin", "replication", 1
    ),
    **_both(
        "ha.sent", "ha", "cometmq.actors.replication.slaves.pieces:LogPieces.send", "replication"
    ),
    **_both("ha.heard", "ha", "cometmq.actors.replication.slaves.slave:Slave.take", "replication"),
    **_both("ha.replicated", "ha", "Counter.REPLICATED", "replication"),
    **_both("ha.waits", "commitlog", "cometmq.actors.writer.answers:Answers.expect", "replication"),
    # A producer takes its name; a key is looked for, and its message stored.
    **_both("producers.open", "commitlog", _WRITER + "producers:Producers.open", "named", 2),
    **_both("producers.loaded", "commitlog", _WRITER + "producers:Producers.load", "restart", 1),
    **_both("keyed.found", "commitlog", _WRITER + "keyed:Keyed.stored", "named", 5),
    **_both("keyed.stored", "commitlog", _WRITER + "batches:Batches._append_keyed", "named", 5),
    # Old segments go.
    **_both("clean.min_offset", "cleaner", "Counter.MIN_OFFSET", "clean", 1),
    **_both("clean.rename", "cleaner", _RETIRED + "take_in", "clean", 1),
    **_both("clean.settle", "cleaner", _RETIRED + "settle", "clean", 1),
    **_both("clean.release", "cleaner", _RETIRED + "step", "clean", 2),
}
assert len(POINTS) < 256
_NUMBERS: Final = {name: number for number, name in enumerate(POINTS, 1)}


# --- the harness's end ----------------------------------------------------------------------------


class Points:
    """Arms one point at a time. `folder` has to be short-lived: a pipe and a mapping lie in it."""

    MODULE: Final = "fault.launcher"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "armed").write_bytes(bytes(mmap.PAGESIZE))
        os.mkfifo(folder / "hits")
        self._hits = os.open(folder / "hits", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._memory = _map(folder)

    @property
    def environ(self) -> dict[str, str]:
        path = os.pathsep.join([SEARCH, os.environ.get("PYTHONPATH", "")])
        return {FOLDER_VARIABLE: str(self._folder), "PYTHONPATH": path}

    def arm(self, point: Point, nth: int = 1) -> None:
        _ARMED.pack_into(self._memory, 0, 0, 0)  # nobody counts while it changes
        _ARMED.pack_into(self._memory, 0, 0, nth)
        self._memory[0:4] = _NUMBERS[point.name].to_bytes(4, "little")

    def disarm(self) -> None:
        """Also forgets what was hit and not waited for."""
        _ARMED.pack_into(self._memory, 0, 0, 0)
        self.wait_hit(0)

    def is_hit(self, timeout_s: float) -> bool:
        """Whether a process has died at the armed point; see `wait_hit`."""
        return bool(select.select([self._hits], [], [], timeout_s)[0])

    def wait_hit(self, timeout_s: float) -> int | None:
        """The process that has died at the armed point; None when the time is up."""
        if not self.is_hit(timeout_s):
            return None
        _, pid = _HIT.unpack(os.read(self._hits, _HIT.size))
        return int(pid)

    def close(self) -> None:
        os.close(self._hits)
        self._memory.close()

    def __enter__(self) -> Points:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


def _map(folder: Path) -> mmap.mmap:
    with (folder / "armed").open("rb+") as file:
        return mmap.mmap(file.fileno(), 0)


# --- in the broker's processes --------------------------------------------------------------------


class Tap:
    """Kills this process where it is armed to. Made in the supervisor, used in its children."""

    def __init__(self, folder: Path) -> None:
        self._memory = _map(folder)
        self._hits = os.open(folder / "hits", os.O_WRONLY)  # inherited by every fork
        self.role = "supervisor"

    def passed(self, number: int) -> None:
        armed, left = _ARMED.unpack_from(self._memory)
        if armed != number:
            return
        if left > 1:
            _ARMED.pack_into(self._memory, 0, number, left - 1)
            return
        _ARMED.pack_into(self._memory, 0, 0, 0)
        os.write(self._hits, _HIT.pack(number, os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any], points: list[Point]) -> Callable[..., Any]:
        armed = self._memory  # its first byte is 0 while nothing is armed

        @wraps(function)
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            if not armed[0]:
                return function(*arguments, **keywords)
            self._pass(points, "before")
            found = function(*arguments, **keywords)
            self._pass(points, "after")
            return found

        return wrapper

    def _pass(self, points: list[Point], moment: str) -> None:
        for point in points:
            if point.role == self.role and point.moment == moment:
                self.passed(_NUMBERS[point.name])


def install(folder: Path) -> None:
    """Wrap everything that has a point. Raises AttributeError or KeyError for what is gone."""
    tap = Tap(folder)
    by_target: dict[str, list[Point]] = {}
    for point in POINTS.values():
        by_target.setdefault(point.target, []).append(point)
    counters = {}
    for target, points in by_target.items():
        try:
            if target.startswith("Counter."):
                counters[Counter[target.partition(".")[2]]] = points
            else:
                _wrap(target, lambda function, points=points: tap.around(function, points))
        except (AttributeError, KeyError, ImportError) as error:
            names = ", ".join(point.name for point in points)
            raise AttributeError(f"{target} is gone, see {names} in {__file__}") from error
    _wrap_counters(tap, counters)
    _wrap("cometmq.actors.launch.process:run_child", lambda function: _with_role(tap, function))
    assert process.run_child.__name__ == "run_child"


def _wrap(target: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, names = target.partition(":")
    if not names:
        module, _, names = target.rpartition(".")
    owner: Any = importlib.import_module(module)
    *path, last = names.split(".")
    for name in path:
        owner = getattr(owner, name)
    real = getattr(owner, last)
    setattr(owner, last, wrapped(real))
    for other in list(sys.modules.values()):  # who imported the function by its name
        if getattr(other, "__name__", "").startswith("cometmq.") and vars(other).get(last) is real:
            setattr(other, last, getattr(owner, last))


def _with_role(tap: Tap, run_child: Callable[..., int]) -> Callable[..., int]:
    def run(child: Prepared, reports: int, lifeline: int) -> int:
        tap.role = child.role
        return run_child(child, reports, lifeline)

    run.__name__ = "run_child"
    return run


def _wrap_counters(tap: Tap, counters: Mapping[Counter, list[Point]]) -> None:
    """Whoever owns one of them gets a cell whose stores are points."""
    for name in ("own", "own_second"):
        setattr(ControlFile, name, _tapping(getattr(ControlFile, name), tap, counters))


def _tapping(own: Own, tap: Tap, counters: Mapping[Counter, list[Point]]) -> Own:
    def owned(control: ControlFile, counter: Counter) -> OwnedCell:
        if counter not in counters:
            return own(control, counter)
        return _TappedCell.over(own(control, counter), tap, counters[counter])  # type: ignore[return-value]

    return owned


class _TappedCell:
    """An OwnedCell with points at its stores."""

    @classmethod
    def over(cls, cell: OwnedCell, tap: Tap, points: list[Point]) -> _TappedCell:
        tapped = cls()
        tapped._cell = cell
        for name in ("publish", "advance", "raise_to", "reset"):
            setattr(tapped, name, tap.around(getattr(cell, name), points))
        return tapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_cell"], name)
