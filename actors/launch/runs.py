"""Runs of a replica of a group: what one has left, and the log as the next one begins with it.

A run has one role, master or follower, and ends by kill -9 at any line; so its store is recovered
as after a kill. `ha`, which orders the runs, and the name server outlive them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cometmq.actors.launch.ending import send_signal
from cometmq.actors.launch.orderly_end import POLL_S
from cometmq.actors.launch.process_table import ProcessTable
from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import BeginRun
from cometmq.protocol.errors import BadRequest, CometError
from cometmq.protocol.version import VERSION
from cometmq.shm.live.control import (
    CONTROL_FILE,
    IN_GROUP,
    ControlFile,
    Counter,
    Phase,
    end_run,
)
from cometmq.shm.live.queue_table import QUEUES_FILE, QueueTable
from cometmq.shm.log.cutting import begin_log_at, cut_log
from cometmq.shm.log.last_run import LastRun, life_of
from cometmq.shm.log.recovery import find_end
from cometmq.shm.log.references import create_references
from cometmq.shm.state.laid_books import needs_books, place_books

#: What lives on when a run ends; and when it ends since `ha` has died.
OUTLIVING: Final = frozenset({"ha", "namesrv"})
OUTLIVING_HA: Final = frozenset({"namesrv"})
DEATHS_TIMEOUT_S: Final = 60  # one that waits for a disk dies when that has answered


def create_control(
    settings: BrokerSettings,
    doorbells: Sequence[int],
    roles: Sequence[str],
    name: str,
    token: str,
    epoch: int,
) -> ControlFile:
    """The control file of a run, and what lies beside it.

    Args:
        name: of the broker, for clients.
        token: of the family's addresses.
    """
    store = settings.store_path_root_dir
    meta = {
        "version": VERSION,
        "pid": os.getpid(),
        "token": token,
        "nonce": os.urandom(16).hex(),  # who knows it can read this very file
        "store": str(store.resolve()),
        "started_ms": int(time.time() * 1000),
        "roles": roles,
        "broker": name,
        "segment_bytes": settings.mapped_file_size_commit_log_bytes,
        "max_message_bytes": settings.max_message_size,
        "life": life_of(store),
        "flush": settings.flush_disk_type.value,
        "archive_hold": settings.archive_hold,
        IN_GROUP: settings.is_in_group,
        "epoch": epoch,
    }
    control = ControlFile.create(store / CONTROL_FILE, meta, doorbells)
    QueueTable.create(store / QUEUES_FILE, control.read(Counter.QUEUES))
    create_references(store)
    return control


def kill_run(
    table: ProcessTable,
    outliving: Collection[str],
    read_reports: Callable[[float], None],
    failure: Callable[[], CometError | None],
) -> Collection[str]:
    """Kill -9 of all but those, until it is reported that they are gone, those that are just being
    started among them. The roles of which that is not known in time.

    Args:
        read_reports: takes in what is reported, for so many seconds.
        failure: why the broker gives up, once it has.
    """
    deadline = time.monotonic() + DEATHS_TIMEOUT_S
    killed: set[int] = set()
    while True:
        left = {role: pid for role, pid in table.pids.items() if role not in outliving}
        if (table.all_run and not left) or failure() is not None:
            return ()
        if time.monotonic() > deadline:
            return left.keys() or ["a process"]
        for pid in set(left.values()) - killed:
            send_signal(pid, signal.SIGKILL)
            killed.add(pid)
        read_reports(POLL_S)


class Left(msgspec.Struct, frozen=True):
    """What a run has left.

    Args:
        end: of its log.
        clean: the run before it ended in order, and it has changed nothing.
        last_run: its counters, where they are to be believed.
    """

    end: int
    clean: bool
    last_run: LastRun | None


def left_by(
    store: Path,
    segment_bytes: int,
    control: ControlFile,
    *,
    clean: bool,
    before: LastRun | None,
) -> Left:
    """What a run leaves whose processes are dead. Its counters are to be had until `next_log`.

    Args:
        clean, before: what the run itself began with.
    """
    if control.read(Counter.PHASE).value == Phase.STARTING:  # it has not come to change anything
        if before is not None:
            return Left(before.wrote, clean, before)
        return Left(find_end(store, segment_bytes, clean=clean).physical_offset, clean, None)
    last_run = LastRun.read(store, segment_bytes)
    if last_run is not None and before is not None:
        last_run = last_run.going_on_from(before)
    return Left(control.read(Counter.WROTE).value, False, last_run)


def next_log(store: Path, segment_bytes: int, left: Left, order: BeginRun) -> Left:
    """Change the log as it is ordered, durably, and its counters likewise. Killed at any line, the
    next start does the rest (shm/log/cutting.py).

    Raises StoreError, OSError; ConfigError for a beginning where no segment can begin.
    """
    end_run(store / CONTROL_FILE)  # whoever has the store mapped looks at that
    if order.begin_at >= 0:
        if needs_books(store, order.begin_at):
            place_books(store, order.begin_at)
        done = begin_log_at(store, segment_bytes, order.begin_at)
    elif 0 <= order.cut_to < left.end:
        done = cut_log(store, segment_bytes, order.cut_to)
    else:
        return left
    return Left(left.end, left.clean, done.counters(left.last_run))


def check_order(order: BeginRun, segment_bytes: int) -> None:
    """Raises BadRequest for what no run could begin with, before one is ended for it."""
    if order.epoch < 0:
        raise BadRequest(f"epoch {order.epoch} of a run")
    if order.begin_at >= 0 and order.begin_at % segment_bytes:
        raise BadRequest(
            f"the log is to begin at {order.begin_at}, where no segment of {segment_bytes} bytes "
            "begins: is mappedFileSizeCommitLog the same in the whole group?"
        )
