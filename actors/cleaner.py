"""Old segments go."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import ClassVar, Final

import psutil

from cometmq.actors.family import Family
from cometmq.actors.service import Request, ServiceActor
from cometmq.protocol.channel import Channel
from cometmq.protocol.commands import Command, DeleteSegments, DiskState, Finish, Statistics
from cometmq.shm.consume_queue import UNIT, QueueFiles, list_queues
from cometmq.shm.control import Counter, Phase
from cometmq.shm.files import COMMITLOG_DIR, list_segments, segment_name
from cometmq.shm.index_file import delete_expired
from cometmq.shm.layout import CONSUME_QUEUE_UNIT

log = logging.getLogger(__name__)

HOUR_S: Final = 3600


class CleanerActor(ServiceActor):
    """Deletes expired segments, and has writes refused while the disk is too full.

    Writes, alone: deletions, `min_offset`.
    Wakes on: a timer (cleanResourceInterval), DeleteSegments.
    The rules are RocketMQ's (store-format 10): segments older than fileReservedTime go in the hours
    of deleteWhen or when the disk is over diskMaxUsedSpaceRatio, any segment when it is over
    diskSpaceCleanForciblyRatio; the last one always stays.
    """

    role = "cleaner"
    internal_commands: ClassVar[tuple[type[Command], ...]] = (Finish, DeleteSegments)

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        self._settings = family.settings
        self._segment_bytes = family.settings.mapped_file_size_commit_log_bytes
        self._folder = family.store / COMMITLOG_DIR
        self._wrote = family.control.read(Counter.WROTE)
        # Nobody may still need what goes: not the flush process, not the dispatcher.
        self._done_with = [
            family.control.read(counter) for counter in (Counter.FLUSHED, Counter.DISPATCHED)
        ]
        self._min = family.control.own(Counter.MIN_OFFSET)
        self._writable = True
        self._deleted = 0

    def on_start(self) -> None:
        self._family.wait_for(Counter.PHASE, Phase.RECOVERED)
        starts = list_segments(self._folder, self._segment_bytes)
        self._min.advance(min([*starts, self._wrote.value]))
        self._commitlog = Channel(self._family.addresses["commitlog"], "commitlog")
        self.every(self._settings.clean_resource_interval_ms / 1000, self._clean)

    def used_percent(self) -> float:
        """How full the store's disk is, for whoever may not use root's reserve."""
        usage = psutil.disk_usage(str(self._family.store))
        return float(100 * usage.used / max(1, usage.used + usage.free))

    def _clean(self) -> None:
        settings = self._settings
        used = self.used_percent()
        forced = used >= settings.disk_space_clean_forcibly_ratio_percent
        due = (
            time.localtime().tm_hour in settings.delete_hours
            or used >= settings.disk_max_used_space_ratio_percent
        )
        if forced or due:
            self._delete(forced=forced)
        self._tell_disk_state(self.used_percent() if forced else used)

    def _delete(self, *, forced: bool) -> int:
        """Delete from the oldest on; stop at the first that has to stay. How many went."""
        expired_before = time.time() - self._settings.file_reserved_time_hours * HOUR_S
        gone = 0
        for start in list_segments(self._folder, self._segment_bytes):
            path = self._folder / segment_name(start)
            end = start + self._segment_bytes
            in_use = end >= self._wrote.value or any(end > cell.value for cell in self._done_with)
            if in_use or gone >= self._settings.delete_file_batch_max:
                break
            if not forced and path.stat().st_mtime > expired_before:
                break
            # Readers are told first: nobody maps it any more when it goes.
            self._min.advance(end)
            path.unlink()
            log.info("deleted %s%s", path, " by force: the disk is too full" if forced else "")
            gone += 1
        if gone:
            self._delete_queue_segments()
            delete_expired(self._family.store, self._min.value)
        self._deleted += gone
        return gone

    def _delete_queue_segments(self) -> None:
        """ConsumeQueue segments whose last entry lies below the log go; never a queue's last."""
        log_min = self._min.value
        size = self._settings.mapped_file_size_consume_queue_bytes
        for topic, queue_id in list_queues(self._family.store):
            files = QueueFiles(self._family.store, topic, queue_id, size)
            for start in files.starts()[:-1]:
                with files.path(start).open("rb") as segment:
                    segment.seek(size - UNIT)
                    last = CONSUME_QUEUE_UNIT.unpack(segment.read(UNIT))
                if last["physical_offset"] >= log_min:
                    break
                files.path(start).unlink()

    def _tell_disk_state(self, used: float) -> None:
        """Over the warning level writes are refused, until the disk is below the forced level."""
        if self._writable and used >= self._settings.disk_space_warning_level_ratio_percent:
            self._writable = False
        elif not self._writable and used < self._settings.disk_space_clean_forcibly_ratio_percent:
            self._writable = True
        elif self._writable:
            return
        self._commitlog.tell(
            DiskState(
                self._writable,
                f"the disk is {used:.1f} % full, writes are taken below "
                f"{self._settings.disk_space_clean_forcibly_ratio_percent} %",
            )
        )

    def on_delete_segments(self, _command: DeleteSegments, _request: Request) -> Command:
        return Statistics(self.role, {"deleted": self._delete(forced=False)})

    def settle(self) -> None:
        self._commitlog.close()

    def statistics(self) -> dict[str, int | float | str]:
        return {
            "min_offset": self._min.value,
            "deleted_segments": self._deleted,
            "disk_used_percent": round(self.used_percent(), 1),
            "writable": "yes" if self._writable else "no",
        }
