"""Recovery of a whole store in one process: for tools, and for tests of what the actors do.

The caller holds the store's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from cometmq.protocol.offsets import change_offsets
from cometmq.shm.derived.index_file import list_index_files, read_header
from cometmq.shm.derived.other_queues import topics_not_served
from cometmq.shm.derived.queue_builder import QueueBuilder, QueuesRecovered
from cometmq.shm.derived.queue_check import QueueFault, StoreFiles, find_ends, find_faults
from cometmq.shm.live.control import CONTROL_FILE, end_run
from cometmq.shm.live.queue_table import QueueTable, queues_before
from cometmq.shm.log.marks import remove_marks
from cometmq.shm.log.recovery import Damage, LogEnd, find_end, recover_log
from cometmq.shm.log.torn import without_torn_end, without_torn_write
from cometmq.shm.os.durable import sync_all
from cometmq.shm.os.files import ABORT_FILE, CONFIG_DIR, INDEX_DIR, SLAVE_FILE, Checkpoint
from cometmq.shm.reading.ledger_log import LedgerLog
from cometmq.shm.reading.resuming import replace_content, resume
from cometmq.shm.reading.store_reader import StoreReader
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.permission import umask_like
from cometmq.shm.state.tables import ConsumerOffsetTable
from cometmq.shm.tools.start_checks import check_log_is_there

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class StoreRecovered(msgspec.Struct, frozen=True):
    log: LogEnd
    queues: QueuesRecovered
    damages: tuple[Damage, ...]  # of the log, and records that got no entry
    queue_ends: Mapping[tuple[str, int], int]


def recover_store(
    store: Path,
    segment_bytes: int,
    queue_segment_bytes: int,
    *,
    rebuild: bool = False,
    cut_at_damage: bool = False,
    progress: Progress | None = None,
) -> StoreRecovered:
    """Bring log and queues to where a broker begins to serve them; the rest stays as it is.

    Args:
        rebuild: build every ConsumeQueue from the log's beginning, whatever they look like.
    """
    clean = not (store / ABORT_FILE).exists()
    end = recover_log(
        store, segment_bytes, clean=clean, cut_at_damage=cut_at_damage,
        without_torn=without_torn_write if clean else without_torn_end,
    )  # fmt: skip
    table, count = QueueTable.private()
    files = StoreFiles(store, segment_bytes, queue_segment_bytes)
    builder = QueueBuilder(files, table, count)
    try:
        redo_from = redo_offset(files, end, clean=clean)
        queues = builder.recover(
            clean=clean, redo_from=redo_from, end=end.physical_offset, rebuild=rebuild
        )
        at = queues.begin
        while at < end.physical_offset:
            at = builder.dispatch(at, end.physical_offset)
            if progress is not None:
                progress(at - builder.log_min, end.physical_offset - builder.log_min)
        builder.finish_recovery()
        ranges = {key: table.range_of(*key) for key in table.queues()}
        table.save_as_before(store)
    finally:
        builder.close()
    ends = {key: found.max_queue_offset for key, found in ranges.items() if found is not None}
    return StoreRecovered(end, queues, _merged(end.damages, builder.damages), ends)


class Repaired(msgspec.Struct, frozen=True):
    """What `repair_store` has done."""

    store: StoreRecovered
    offsets_put_back: int  # of groups, that had been committed behind the end of their queue
    index_files_dropped: int  # the next broker builds them again from the log


def repair_store(
    store: Path,
    segment_bytes: int,
    queue_segment_bytes: int,
    *,
    cut_at_damage: bool = False,
    progress: Progress | None = None,
) -> Repaired:
    """Bring a store to where an orderly end leaves it: all queues built anew, everything on the
    disk, and then the marks of the last run taken away, `abort` last.

    Killed at any line it may be called again. Raises StoreDamaged for what cannot be mended.
    """
    is_copy = (store / SLAVE_FILE).exists()
    check_log_is_there(StoreFiles(store, segment_bytes, queue_segment_bytes), is_copy=is_copy)
    clean = not (store / ABORT_FILE).exists()
    before = os.umask(umask_like(store))
    end_run(store / CONTROL_FILE)
    try:
        return _repair(store, clean, segment_bytes, queue_segment_bytes, cut_at_damage, progress)
    finally:
        os.umask(before)


def _repair(
    store: Path,
    clean: bool,
    segment_bytes: int,
    queue_segment_bytes: int,
    cut_at_damage: bool,
    progress: Progress | None,
) -> Repaired:
    done = recover_store(
        store, segment_bytes, queue_segment_bytes,
        rebuild=True, cut_at_damage=cut_at_damage, progress=progress,
    )  # fmt: skip
    put_back = 0 if clean else _settle_offsets(store, done.queue_ends)
    dropped = 0 if clean else _drop_doubtful_index(store, done.log.physical_offset)
    sync_all(store)
    if done.log.last_store_timestamp:
        timestamp = done.log.last_store_timestamp
        Checkpoint(store).store(physic_msg_timestamp=timestamp, logics_msg_timestamp=timestamp)
    remove_marks(store)
    return Repaired(done, put_back, dropped)


def _settle_offsets(store: Path, ends: Mapping[tuple[str, int], int]) -> int:
    """What the ledger has is in the file from here on. What lies behind the end of its queue is put
    back, or what takes the places of lost messages would never reach these groups."""
    file = ConfigFile(store / CONFIG_DIR / "consumerOffset.json", ConsumerOffsetTable)
    table = file.load() or ConsumerOffsetTable()
    with closing(LedgerLog(StoreReader.open_closed(store))) as ledger:
        resumed = resume(store, [(file, partial(change_offsets, table.offset_table))], ledger)
    others = topics_not_served(store)
    beyond = [each for each in table.beyond(ends) if each[0].partition("@")[0] not in others]
    for key, queue_id, end in beyond:
        table.offset_table[key][queue_id] = end
    if beyond or resumed.changes:
        replace_content(store, resumed, file, table)
    return len(beyond)


def _drop_doubtful_index(store: Path, log_end: int) -> int:
    """Index files that the checkpoint does not cover, as RocketMQ does after a bad end; from the
    first of them on, the newest first, so that there is no gap after a kill."""
    flushed_ms = Checkpoint(store).words["index_msg_timestamp"]
    names = list_index_files(store)
    for position, name in enumerate(names):
        header = read_header(store / INDEX_DIR / name)
        if (
            header is None
            or header.end_timestamp > flushed_ms
            or header.end_physical_offset >= log_end
        ):
            for later in reversed(names[position:]):
                (store / INDEX_DIR / later).unlink()
            return len(names) - position
    return 0


def redo_offset(files: StoreFiles, end: LogEnd, *, clean: bool) -> int:
    """From where on every record is dispatched again."""
    starts = files.log_starts()
    return max(starts[0] if starts else 0, end.physical_offset if clean else end.scanned_from)


def _merged(*found: tuple[Damage, ...] | list[Damage]) -> tuple[Damage, ...]:
    """Each once, in the order of the log."""
    by_place = {damage.physical_offset: damage for damages in found for damage in damages}
    return tuple(by_place[at] for at in sorted(by_place))


class Plan(msgspec.Struct, frozen=True):
    """What `recover_store` would do."""

    log: LogEnd
    faults: tuple[QueueFault, ...]


def plan_repair(files: StoreFiles) -> Plan:
    """Look only: where the log would end, and which queues cannot be trusted."""
    check_log_is_there(files, is_copy=(files.store / SLAVE_FILE).exists())
    clean = not (files.store / ABORT_FILE).exists()
    end = find_end(files.store, files.segment_bytes, clean=clean)
    settled = redo_offset(files, end, clean=clean)
    faults = find_faults(files, queues_before(files.store), settled, find_ends(files), clean=clean)
    return Plan(end, tuple(faults))
