"""Recovery of a whole store in one process: for tools, and for tests of what the actors do.

The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cometmq.shm.files import ABORT_FILE
from cometmq.shm.queue_builder import QueueBuilder, QueuesRecovered
from cometmq.shm.queue_check import QueueFault, StoreFiles, find_faults
from cometmq.shm.queue_table import QueueTable, queues_before
from cometmq.shm.recovery import Damage, LogEnd, find_end, recover_log

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class StoreRecovered:
    log: LogEnd
    queues: QueuesRecovered
    damages: tuple[Damage, ...]  # of the log, and records that got no entry


def recover_store(
    store: Path,
    segment_bytes: int,
    queue_segment_bytes: int,
    *,
    rebuild: bool = False,
    cut_at_damage: bool = False,
    progress: Progress | None = None,
) -> StoreRecovered:
    """Bring a store to where a broker begins to serve it; `abort` and checkpoint stay as they are.

    Args:
        rebuild: build every ConsumeQueue from the log's beginning, whatever they look like.
    """
    clean = not (store / ABORT_FILE).exists()
    end = recover_log(store, segment_bytes, clean=clean, cut_at_damage=cut_at_damage)
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
        table.save_as_before(store)
    finally:
        builder.close()
    return StoreRecovered(end, queues, _merged(end.damages, builder.damages))


def redo_offset(files: StoreFiles, end: LogEnd, *, clean: bool) -> int:
    """From where on every record is dispatched again."""
    starts = files.log_starts()
    return max(starts[0] if starts else 0, end.physical_offset if clean else end.scanned_from)


def _merged(*found: tuple[Damage, ...] | list[Damage]) -> tuple[Damage, ...]:
    """Each once, in the order of the log."""
    by_place = {damage.physical_offset: damage for damages in found for damage in damages}
    return tuple(by_place[at] for at in sorted(by_place))


@dataclass(frozen=True)
class Plan:
    """What `recover_store` would do."""

    log: LogEnd
    faults: tuple[QueueFault, ...]


def plan_repair(files: StoreFiles) -> Plan:
    """Look only: where the log would end, and which queues cannot be trusted."""
    clean = not (files.store / ABORT_FILE).exists()
    end = find_end(files.store, files.segment_bytes, clean=clean)
    faults = find_faults(files, queues_before(files.store), redo_offset(files, end, clean=clean))
    return Plan(end, tuple(faults))
