"""What children of test_cleaning do: use a segment, or clean a store and die somewhere."""

from __future__ import annotations

import ast
import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import dying
from dying import Line

from cometmq.actors.maintenance import cleaner
from cometmq.actors.runtime.family import Family
from cometmq.actors.writer.derived import NOTHING
from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import SetHolds
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter, Phase
from cometmq.shm.live.queue_table import QUEUES_FILE, QueueTable
from cometmq.shm.log import retired
from cometmq.shm.log.references import LogMaps, create_references
from cometmq.shm.os import files

SEGMENT = 65_536
WATCHED = frozenset(str(module.__file__) for module in (cleaner, files, retired))
OLD_S = 73 * 3600


def use_segment(store: Path, segment_bytes: int, start: int) -> int:
    """A child that has a segment mapped, for ever; its pid. Returns when it has."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it outlives no test run
        maps = LogMaps(store, segment_bytes)
        maps.map(start)
        os.write(write_end, b"m")
        while True:
            signal.pause()
    os.close(write_end)
    assert os.read(read_end, 1) == b"m"
    os.close(read_end)
    return pid


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def make_store(store: Path, segments: int, old: int) -> None:
    """A log of segments of which the first are old, as a broker that runs leaves it."""
    files.make_store_folders(store)
    for number in range(segments):
        path = store / "commitlog" / files.segment_name(number * SEGMENT)
        path.write_bytes(bytes([number + 1]) * SEGMENT)
        if number < old:
            os.utime(path, times=(time.time() - OLD_S,) * 2)
    create_references(store)


def new_run(store: Path, wrote: int) -> None:
    """The control file as a broker that has just recovered makes it."""
    control = ControlFile.create(store / CONTROL_FILE, {})
    for counter in (Counter.WROTE, Counter.FLUSHED, Counter.DISPATCHED):
        control.own(counter).reset(wrote)
    control.own(Counter.PHASE).reset(Phase.RECOVERED)
    control.own(Counter.MARKS_FROM).reset(NOTHING)
    (store / QUEUES_FILE).unlink(missing_ok=True)
    QueueTable.create(store / QUEUES_FILE, control.read(Counter.QUEUES))


def cleaner_of(store: Path) -> cleaner.CleanerActor:
    """One that nobody has started, and whose neighbours are not there."""
    settings = BrokerSettings(
        store_path_root_dir=store,
        mapped_file_size_commit_log_bytes=SEGMENT,
        delete_when=";".join(str(hour) for hour in range(24)),
        recycled_segments_max=1,
    )
    address = f"ipc://@cometmq-test-{os.getpid()}"
    addresses = {"commitlog": address, "coordinator": f"{address}-2"}
    family = Family("cleaner", settings, store, [os.eventfd(0)], 0, addresses)
    return cleaner.CleanerActor(family)


def clean(store: Path) -> None:
    """What a cleaner does from its start until nothing is left to do."""
    actor = cleaner_of(store)
    actor._retired._step_bytes = SEGMENT // 4
    actor.on_start()
    actor.on_set_holds(SetHolds(1, 1, []), cast(Any, None))
    actor._clean()
    while actor._next_step is not None:
        actor._step()
    actor.settle()


def clean_in_child(store: Path, see: Callable[[Line], None] | None = None) -> int:
    """Its exit status; `see` is called at every line of the code that removes."""

    def work() -> None:
        with nullcontext() if see is None else dying.traced(see, WATCHED):
            clean(store)

    return dying.in_child(work)


def lines_of_cleaning(store: Path) -> dict[Line, int]:
    """Every line that it passes, with how often."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        passed = dying.lines_of(lambda: clean(store), WATCHED)
        os.write(write_end, repr(dict(passed)).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    found: dict[Line, int] = ast.literal_eval(text)
    return found


def die_at(store: Path, line: Line, nth: int) -> int:
    return clean_in_child(store, dying.dying_at(line, nth))
