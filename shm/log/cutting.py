"""Cutting the log of a replica, and beginning it anew, as its master's log wants it.

For a store on which no process is at work. Nothing of what goes was ever confirmed, so no queue and
no index tells of it.

    cometmq.cut is written   what is to be done, from here on it will be
    cometmq.control goes     the counters of a killed run would tell of bytes that are gone
    the checkpoint           tells of nothing behind the end
    segments go, zeros       the cut
    cometmq.cut goes

Every step is on the disk before the next is begun. Killed at any line of it, or cut off from power,
a store is cut by the next start (`finish_cut`), or by the same call: a log of which some pages were
zeroed and some not never looks like a log with damage in its middle.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.errors import ConfigError, StoreDamaged
from cometmq.shm.kernel import codec
from cometmq.shm.live.control import CONTROL_FILE
from cometmq.shm.live.queue_table import QUEUES_BEFORE_FILE, QUEUES_FILE
from cometmq.shm.log.last_run import LastRun
from cometmq.shm.os.durable import (
    replace_file,
    sync_data_if_there,
    sync_file,
    sync_folder,
)
from cometmq.shm.os.files import (
    COMMITLOG_DIR,
    CONSUME_QUEUE_DIR,
    INDEX_DIR,
    STAGING_DIR,
    Checkpoint,
    create_segment,
    list_segments,
    map_segment,
    segment_name,
    zero_tail,
)

log = logging.getLogger(__name__)

CUT_FILE: Final = "cometmq.cut"


class LogCut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A log that was cut, or is to be."""

    end: int  # physical offset
    last_store_timestamp: int  # ms, of the last record that stays, 0 without one
    begins: bool = False  # nothing stays: the log begins there

    def counters(self, last: LastRun | None) -> LastRun | None:
        """Of the run before the cut, as far as they still hold: with them the next run goes on
        without a scan from the checkpoint."""
        if last is None or self.begins:
            return None
        return msgspec.structs.replace(
            last,
            wrote=min(last.wrote, self.end),
            wrote_timestamp=min(last.wrote_timestamp, self.last_store_timestamp),
            flushed=min(last.flushed, self.end),
            dispatched=min(last.dispatched, self.end),
            indexed=min(last.indexed, self.end),
        )


def cut_log(store: Path, segment_bytes: int, to: int) -> LogCut:
    """Have the log end there, durably.

    Args:
        to: where a record ends, or where the log begins.

    Raises StoreDamaged where it is neither, before anything is changed; OSError.
    """
    wanted = LogCut(to, _last_store_timestamp(store, segment_bytes, to))
    return _begin_and_do(store, segment_bytes, wanted)


def begin_log_at(store: Path, segment_bytes: int, at: int) -> LogCut:
    """Drop all of the log, and have an empty one begin there, durably. Queues and index go, too.

    Raises ConfigError where no segment can begin there, before anything is changed; DiskFull,
    OSError.
    """
    if at < 0 or at % segment_bytes:
        raise ConfigError(
            f"the log is to begin at {at}, where no segment of {segment_bytes} bytes begins: is "
            "mappedFileSizeCommitLog the same in all replicas of the group?"
        )
    return _begin_and_do(store, segment_bytes, LogCut(at, 0, begins=True))


def finish_cut(store: Path, segment_bytes: int) -> LogCut | None:
    """Do what a cut had begun that was killed; None: there was none. Raises StoreDamaged, OSError.

    For a start: the control file and the queue table are those of the run that begins, and stay.
    """
    path = store / CUT_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        wanted = msgspec.json.decode(content, type=LogCut)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreDamaged(f"{path}: it does not say where the log is to be cut: {error}") from None
    log.warning("cutting the log at %d, as an earlier run had begun to", wanted.end)
    _do(store, segment_bytes, wanted)
    return wanted


def _begin_and_do(store: Path, segment_bytes: int, wanted: LogCut) -> LogCut:
    replace_file(store / CUT_FILE, msgspec.json.encode(wanted))
    for name in (CONTROL_FILE, *((QUEUES_FILE,) if wanted.begins else ())):
        (store / name).unlink(missing_ok=True)
    sync_folder(store)
    _do(store, segment_bytes, wanted)
    return wanted


def _do(store: Path, segment_bytes: int, wanted: LogCut) -> None:
    _lower_checkpoint(store, wanted.last_store_timestamp)
    if wanted.begins:
        _begin_anew(store, segment_bytes, wanted.end)
    else:
        cut_tail(store, segment_bytes, wanted.end)
    (store / CUT_FILE).unlink()
    sync_folder(store)
    log.info("the log %s at %d", "begins" if wanted.begins else "was cut", wanted.end)


def _lower_checkpoint(store: Path, timestamp: int) -> None:
    """It says up to which store times log, queues and index are on the disk. Durably."""
    checkpoint = Checkpoint(store)
    if checkpoint.path.exists():
        names = ("physic_msg_timestamp", "logics_msg_timestamp", "index_msg_timestamp")
        checkpoint.store(**{name: min(checkpoint.words[name], timestamp) for name in names})


def cut_tail(store: Path, segment_bytes: int, to: int) -> int:
    """Remove what lies from there on, the last segment first; how many bytes of the segment that
    the log ends in were not zero.

    Durably, also what a killed one before it did. The segment that the log begins with stays: it
    tells where that is.
    """
    folder = store / COMMITLOG_DIR
    starts = list_segments(folder, segment_bytes)
    for start in reversed(starts[1:]):
        if start >= to:
            (folder / segment_name(start)).unlink()
            sync_folder(folder)  # each: a log has no hole after a power cut either
    sync_folder(folder)
    dirty = 0
    for start in starts:
        if start == starts[0] or start < to < start + segment_bytes:
            path, begin = folder / segment_name(start), min(max(0, to - start), segment_bytes)
            dirty += zero_tail(path, begin)
            sync_data_if_there(path)  # also what a killed one wrote before us, and did not sync
    return dirty


def _begin_anew(store: Path, segment_bytes: int, at: int) -> None:
    folder = store / COMMITLOG_DIR
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.is_file():
            entry.unlink()
    for name in (CONSUME_QUEUE_DIR, INDEX_DIR):
        if (store / name).is_dir():
            shutil.rmtree(store / name)
    (store / CONSUME_QUEUE_DIR).mkdir()
    (store / QUEUES_BEFORE_FILE).unlink(missing_ok=True)
    path = create_segment(folder, at, segment_bytes, store / STAGING_DIR, reserve_bytes=0)
    sync_file(path)
    sync_folder(folder)
    sync_folder(store)


def _last_store_timestamp(store: Path, segment_bytes: int, to: int) -> int:
    """Of the record, in the same segment, that ends there; 0 where the log begins there.

    Raises StoreDamaged where none ends there.
    """
    folder = store / COMMITLOG_DIR
    starts = list_segments(folder, segment_bytes)
    if to == (starts[0] if starts else 0):
        return 0
    start = (to - 1) // segment_bytes * segment_bytes
    path = folder / segment_name(max(0, start))
    if start not in starts:
        raise StoreDamaged(f"{path}: the log is to be cut at {to}, and this segment is missing")
    with map_segment(path, segment_bytes, writable=False) as memory:
        reached, _, count, _, timestamp = codec.scan(memory, start, start, to, False)
        if reached != to and codec.whole_records(memory, start, reached, to, 1) != to:
            raise StoreDamaged(
                f"{path}: the log is to be cut at {to}, and no record ends there: the last one "
                f"before it ends at {reached}"
            )
    return timestamp if count else 0
