"""Recovery of a replica's log, which others have as well.

It differs from that of a broker that has the only copy: what is damaged is not passed over, and
what is torn at the end is cut, since the group has it and sends it again. But a log may not end
before what was there, as its own counters say, and have no hole: the replica may have said to hold
what is missing.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.log.cutting import cut_tail, finish_cut
from cometmq.shm.log.last_run import LastRun
from cometmq.shm.log.recovery import (
    LogEnd,
    find_end,
    find_end_of_last_run,
    report,
    say_recovered,
    telling,
    zero_behind,
)
from cometmq.shm.log.torn import without_torn_record, without_torn_write
from cometmq.shm.os.files import COMMITLOG_DIR
from cometmq.shm.state.damage import REPLACE_IT, note_damage


def recover_replica(
    store: Path, segment_bytes: int, *, clean: bool, check_crc: bool, last_run: LastRun | None
) -> tuple[LogEnd, LastRun | None]:
    """Bring the log to its end, behind whole records and whole derived writes.

    A cut that was begun is done first.

    Args:
        last_run: the counters of a killed run of this boot.

    Returns the end, and the counters as far as the log bears them out and goes on from them.

    Raises StoreDamaged, before anything is changed, where something is missing that was there.
    """
    began = time.monotonic()
    cut = finish_cut(store, segment_bytes)
    if cut is not None:
        last_run = cut.counters(last_run)
    end = last_run and find_end_of_last_run(store, segment_bytes, last_run)
    if last_run and end:
        # No power was cut, so that no page is lost; but a frame may have come in part.
        whole = without_torn_write(store, segment_bytes, end)
        end = msgspec.structs.replace(whole, reason=end.reason)
        dirty = zero_behind(store, segment_bytes, end.physical_offset, last_run.max_message_bytes)
        say_recovered(end, clean, dirty, began)
        return end, last_run
    end = find_end(
        store, segment_bytes, clean=clean, check_crc=check_crc,
        on_step=telling(store, segment_bytes),
    )  # fmt: skip
    _check_nothing_is_missing(store, end, last_run)
    end = without_torn_write(store, segment_bytes, without_torn_record(store, segment_bytes, end))
    dirty = cut_tail(store, segment_bytes, end.physical_offset)
    say_recovered(end, clean, dirty, began)
    return end, None


def _check_nothing_is_missing(store: Path, end: LogEnd, last_run: LastRun | None) -> None:
    if end.damages:
        report(end.damages)
        note_damage(store, str(end.damages[0]))
        raise StoreDamaged(f"{end.damages[0]}. In a group nothing is passed over: {REPLACE_IT}")
    if last_run and end.physical_offset < last_run.wrote:
        raise StoreDamaged(
            f"{store / COMMITLOG_DIR}: the log ends at {end.physical_offset} ({end.reason}), and "
            f"the killed run had come to {last_run.wrote}: {REPLACE_IT}"
        )
