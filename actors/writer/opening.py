"""Where the log ends when a writer starts, and opening it there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from cometmq.actors.runtime.clock_steps import STEP_MS, shown_ms
from cometmq.actors.runtime.family import Family
from cometmq.actors.writer.batches import host_bytes
from cometmq.protocol.commands import ListTopics, TopicList
from cometmq.protocol.errors import StoreError
from cometmq.protocol.topics import TopicMirror, fetch_topics
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.live import SleepCell
from cometmq.shm.live.control import HOT_STEP_BYTES, Counter, Phase
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.log.last_run import LastRun
from cometmq.shm.log.recovery import (
    LAST_RUN_ENDED,
    LogEnd,
    cut,
    recover_log,
    zero_behind,
)
from cometmq.shm.log.replica import recover_replica
from cometmq.shm.log.torn import without_torn_end, without_torn_record, without_torn_write
from cometmq.shm.os.durable import sync_folder
from cometmq.shm.os.files import COMMITLOG_DIR, STAGING_DIR, create_segment, list_segments

log = logging.getLogger(__name__)

# Under SYNC_FLUSH: what is synced in the writer's own time, since there is nothing to do meanwhile.
# More than this is faster if the next group is appended while the flush process syncs.
SYNC_HERE_BYTES: Final = 256 * 1024
TOPICS_TIMEOUT_S: Final = 10


def begin_log(family: Family, *, where_empty: Callable[[], int] | None = None) -> None:
    """Find the end of the log: by scanning at the start of a run, else `wrote` says it.

    Args:
        where_empty: asked where a log begins that never had a record; the default is 0, or in a
            group where it was begun.
    """
    store, control = family.store, family.control
    segment_bytes = family.settings.mapped_file_size_commit_log_bytes
    phase, wrote = control.own(Counter.PHASE), control.own(Counter.WROTE)
    if phase.value != Phase.STARTING:
        dirty = zero_behind(store, segment_bytes, wrote.value, family.settings.max_message_size)
        log.info("going on at %d, %d unfinished bytes zeroed", wrote.value, dirty)
        return
    end, continued = _recover(family)
    starts = list_segments(store / COMMITLOG_DIR, segment_bytes)
    if where_empty is not None and end.physical_offset == (starts[0] if starts else 0):
        begin = where_empty()
        _begin_empty_log(store, segment_bytes, begin)
        end = msgspec.structs.replace(
            end, scanned_from=begin, physical_offset=begin, reason="it is empty"
        )
        starts = [begin]
    log_min = starts[0] if starts else 0
    redo_from = end.physical_offset if family.clean else end.scanned_from
    if continued is not None:
        redo_from = min(continued.redo_from, end.physical_offset)
        control.own(Counter.CONTINUED).reset(1)
    control.own(Counter.RECOVERED_FROM).reset(max(log_min, redo_from))
    control.own(Counter.WROTE_TIMESTAMP).reset(end.last_store_timestamp)
    _tell_of_clock(end.last_store_timestamp)
    wrote.reset(end.physical_offset)
    control.own(Counter.STEPS).reset(end.physical_offset // _step_bytes(family))
    phase.advance(Phase.RECOVERED)


def _tell_of_clock(last_ms: int) -> None:
    now_ms = int(time.time() * 1000)
    if last_ms > now_ms + STEP_MS:
        log.warning(
            "the last message of the log was stored at %s, and the clock is at %s: it was ahead "
            "then, or is behind now; store times follow the clock",
            shown_ms(last_ms),
            shown_ms(now_ms),
        )


def tell_of_step_back(commit_log: CommitLog) -> None:
    """Log a warning if the clock was set back since the last call."""
    step = commit_log.appender.take_step_back()
    if step is not None:
        log.warning(
            "the clock was set back between two messages: the last one before was stored at %s, "
            "the first one after at %s; store times follow the clock, so queries by time may find "
            "earlier messages among later ones",
            *map(shown_ms, step),
        )


def _recover(family: Family) -> tuple[LogEnd, LastRun | None]:
    """Where the log ends, and the counters of a killed run that it goes on from."""
    settings = family.settings
    segment_bytes = settings.mapped_file_size_commit_log_bytes
    if settings.is_in_group:
        return recover_replica(
            family.store,
            segment_bytes,
            clean=family.clean,
            check_crc=settings.check_crc_on_recover,
            last_run=family.last_run,
        )
    without_torn = without_torn_write if family.clean else without_torn_end
    end = recover_log(
        family.store,
        segment_bytes,
        clean=family.clean,
        check_crc=settings.check_crc_on_recover,
        cut_at_damage=settings.cut_log_at_damage,
        last_run=family.last_run,
        without_torn=without_torn_record if settings.is_slave else without_torn,
    )
    return end, family.last_run if end.reason == LAST_RUN_ENDED else None


def _begin_empty_log(store: Path, segment_bytes: int, begin: int) -> None:
    """Have a log without records begin there. Raises StoreError, DiskFull."""
    if begin % segment_bytes:
        raise StoreError(
            f"the log is to begin at {begin}, where no segment of {segment_bytes} bytes begins: is "
            "mappedFileSizeCommitLog the master's?"
        )
    folder = store / COMMITLOG_DIR
    if list_segments(folder, segment_bytes) != [begin]:
        cut(store, segment_bytes, 0)
        create_segment(folder, begin, segment_bytes, store / STAGING_DIR, reserve_bytes=0)
        sync_folder(folder)
        log.info("the log begins at %d", begin)


def open_log(family: Family, flushed: SleepCell, ready: Callable[[int], int]) -> CommitLog:
    """The log behind `wrote`, whose appender moves the counters."""
    settings, control = family.settings, family.control
    wrote = control.own(Counter.WROTE)
    commit_log = CommitLog(
        family.store,
        segment_bytes=settings.mapped_file_size_commit_log_bytes,
        physical_offset=wrote.value,
        store_host=host_bytes(f"{settings.advertised_address}:{settings.listen_port}"),
        max_message_bytes=settings.max_message_size,
        crc_property=settings.enabled_append_prop_crc,
        pages=family.log_pages,
        ready=ready,
    )
    commit_log.appender.publishes(
        wrote,
        control.own(Counter.WROTE_TIMESTAMP),
        control.own(Counter.MESSAGES),
        control.own(Counter.STEPS),
        _step_bytes(family),
        commit_log.tidy,
    )
    commit_log.appender.syncs(
        flushed, control.own(Counter.SYNC_WANTED), control.own(Counter.SYNCS), SYNC_HERE_BYTES
    )
    return commit_log


def _step_bytes(family: Family) -> int:
    """A step never spans more than the segments that are ready: the allocator wakes on it."""
    return min(HOT_STEP_BYTES, family.settings.mapped_file_size_commit_log_bytes)


def ask_topics(family: Family) -> TopicMirror:
    """What the coordinator knows now; from then on it tells the writer of every change."""

    def ask(question: ListTopics) -> TopicList:
        answer, _ = channel.ask(question, timeout_s=TOPICS_TIMEOUT_S)
        assert isinstance(answer, TopicList)
        return answer

    with Channel(family.addresses["coordinator"], "the coordinator") as channel:
        return fetch_topics(ask)
