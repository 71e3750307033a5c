"""Retention: expired segments are deleted, and writes refused while the disk is too full."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from cometmq.actors.maintenance.disk_marks import DiskMarks, DiskUse
from cometmq.actors.maintenance.following import Following
from cometmq.actors.maintenance.scrub import Scrub
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.clock_steps import StepsForward
from cometmq.actors.runtime.disk_actor import DiskActor
from cometmq.actors.runtime.family import Family, end_replica
from cometmq.actors.runtime.service import Request, Timer
from cometmq.conf.settings import ArchiveOverflow
from cometmq.protocol.commands import (
    Command,
    DeletedSegments,
    DeleteSegments,
    DiskState,
    Hold,
    HoldList,
    HoldsWanted,
    SetHolds,
)
from cometmq.protocol.errors import ServiceNotAvailable, StoreDamaged
from cometmq.protocol.names import HIDDEN_TOPICS
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.derived.unread import count_unread, read_to
from cometmq.shm.live.control import Counter, Disk, Phase
from cometmq.shm.log.retired import RetiredSegments
from cometmq.shm.os.files import (
    COMMITLOG_DIR,
    CONFIG_DIR,
    CONSUME_QUEUE_DIR,
    list_segments,
    segment_name,
)
from cometmq.shm.reading.ledger_log import ledger_needed_from
from cometmq.shm.state.holds import ARCHIVE_HOLD

log = logging.getLogger(__name__)

HOUR_S: Final = 3600
SLAVES_HOLD: Final = "(slaves)"  # which nobody has placed
MANUAL_ROUNDS: Final = 20  # RocketMQ: so many times deleteFileBatchMax at one request


class CleanerActor(DiskActor):
    """Deletes expired segments, and has writes refused while the disk is too full.

    Writes, alone: deletions, `min_offset`, `disk_state`, cometmq.retired/ (the allocator takes free
    segments out of it).
    Wakes on: a timer (cleanResourceInterval), DeleteSegments, SetHolds; a timer of its own while a
    retired segment is not at its end, and while the log is read again (Scrub).
    Dies of nothing that matters to others: the next one finds every state in the files' names.
    The rules are RocketMQ's (store-format 10): segments older than fileReservedTime go in the hours
    of deleteWhen or when the disk is over diskMaxUsedSpaceRatio, any segment when it is over
    diskSpaceCleanForciblyRatio (and short of free bytes, see DiskMarks); the last one always stays,
    what is not flushed and dispatched, and what a start may need of the ledger and of the marks of
    derived writes. What a connected slave has yet to be sent stays as if it were held. Nothing goes
    before the coordinator has said which holds there are.
    """

    role = "cleaner"

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        self._settings = family.settings
        self._segment_bytes = family.settings.mapped_file_size_commit_log_bytes
        self._folder = family.store / COMMITLOG_DIR
        self._marks = DiskMarks(family.settings)
        self._folders = [str(self._folder), str(family.store / CONSUME_QUEUE_DIR)]
        self._wrote = family.control.read(Counter.WROTE)
        # Nobody may still need what goes: not the flush process, not the dispatcher.
        self._done_with = [
            family.control.read(counter) for counter in (Counter.FLUSHED, Counter.DISPATCHED)
        ]
        if family.settings.is_in_group:  # what is not confirmed may have to be cut
            self._done_with.append(family.control.read(Counter.REPLICATED))
        self._marks_from = family.control.read(Counter.MARKS_FROM)
        self._slaves_from = family.control.read(Counter.SLAVES_FROM)
        self._min = family.control.own(Counter.MIN_OFFSET)
        self._disk_state = family.control.own(Counter.DISK_STATE)
        self._retired = RetiredSegments(
            family.store,
            self._segment_bytes,
            force_after_s=family.settings.destroy_mapped_file_interval_forcibly_ms / 1000,
        )
        self._keep = family.settings.recycled_segments_max
        self._next_step: Timer | None = None
        self._derived = Following(
            family.store,
            queue_segment_bytes=family.settings.mapped_file_size_consume_queue_bytes,
            pause_s=family.settings.delete_consume_queue_files_interval_ms / 1000,
            after=self.after,
        )
        self._scrub = Scrub(
            family.store,
            self._segment_bytes,
            bytes_per_s=family.settings.verify_log_bytes_per_second,
            interval_s=family.settings.verify_log_interval_ms / 1000,
            range_of=lambda: (self._min.value, self._wrote.value),
            on_damage=self._meet_damage,
            after=self.after,
        )
        self._holds: dict[str, Hold] | None = None  # None: the coordinator has not said it yet
        self._holds_place = (0, 0)  # of that list: epoch and number
        self._waits_for_holds = False  # which is said once
        self._waits_at: int | None = None  # the segment's end that waits for the archive
        self._unread_at: int | None = None  # the segment's end that waits for a reader
        self._writable: bool | None = None  # None: the commitlog process has not been told
        self._forward = StepsForward()
        self._deleted = 0
        self._rounds = 0

    # --- start ---

    def on_start(self) -> None:
        self._family.wait_for(Counter.PHASE, Phase.RECOVERED)
        self._retired.begin()
        starts = list_segments(self._folder, self._segment_bytes)
        first = min([*starts, self._wrote.value])
        self._min.advance(max(first, self._min.value))
        # Where the one before us was killed between telling that a segment goes and moving it.
        for start in starts:
            if start + self._segment_bytes <= self._min.value:
                self._retire(start)
        self._retired.settle()
        self._commitlog = Channel(self._family.addresses["commitlog"], "commitlog")
        self._coordinator = Channel(self._family.addresses["coordinator"], "coordinator")
        self._coordinator.start_pump()  # nobody waits for its answers
        self._coordinator.tell(HoldsWanted())
        self._tell_disk_state()
        self.every(self._settings.clean_resource_interval_ms / 1000, self._try_to_clean)
        self._scrub.begin()

    def _meet_damage(self, text: str) -> None:
        """A replica ends of it, as others have it whole."""
        if self._settings.is_in_group:
            end_replica(self._family.store, text)
        log.critical(
            "%s. What holds is served on; `cometmq store verify` tells all of it, once no broker "
            "runs",
            text,
        )

    # --- which segments go ---

    def _disks(self, back_bytes: int = 0) -> list[DiskUse]:
        """Log and queues may lie on different ones: the fuller counts.

        Args:
            back_bytes: what the log will give back.
        """
        return [DiskUse.of(folder).with_back(back_bytes) for folder in self._folders]

    def used_percent(self) -> float:
        return max(disk.percent for disk in self._disks())

    def _try_to_clean(self) -> None:
        self._coordinator.tell(HoldsWanted())  # also where a list was lost on its way
        self._forward.within_ms(0)  # have it know when a step was
        try:
            self._clean()
        except (OSError, StoreDamaged) as error:
            log.error("cleaning failed, the next round tries again: %s", error)
        self._rounds += 1

    def _clean(self) -> None:
        settings = self._settings
        disks = self._disks()
        too_full = self._marks.is_too_full(disks)
        self._keep = 0 if too_full else settings.recycled_segments_max
        due = (
            too_full
            or self._marks.is_over_max_used(disks)
            or time.localtime().tm_hour in settings.delete_hours
        )
        if due:
            forced = too_full and settings.clean_file_forcibly_enable
            self._delete(settings.delete_file_batch_max, forced=forced)
        self._go_on()
        self._derived.follow(self._min.value)
        self._tell_disk_state()

    def _delete(self, count_max: int, *, forced: bool) -> list[int]:
        """Delete from the oldest on; stop at the first that has to stay. The segments that went."""
        if self._holds is None:
            self._wait_for_holds()
            return []
        reserved_s = self._settings.file_reserved_time_hours * HOUR_S
        # A clock that was set forward makes no segment older.
        stepped_s = self._forward.within_ms(reserved_s * 1000) / 1000
        expired_before = time.time() - reserved_s - stepped_s
        ledger_from = ledger_needed_from(
            self._family.store, self._settings.mapped_file_size_consume_queue_bytes
        )
        held_from = min((hold.physical_offset for hold in self._all_holds()), default=None)
        gone: list[int] = []
        for start in list_segments(self._folder, self._segment_bytes)[:count_max]:
            end = start + self._segment_bytes
            if end >= self._wrote.value or any(end > cell.value for cell in self._done_with):
                break
            if ledger_from is not None and end > ledger_from:
                break  # for some seconds, whatever the disk is like: it is in no snapshot yet
            if end > self._marks_from.value:
                break  # the same of the positions of derivers
            held = held_from is not None and end > held_from
            expired = (self._folder / segment_name(start)).stat().st_mtime <= expired_before
            begun = end <= self._min.value  # it could not be moved when it was its turn
            if (held or not expired) and not begun:
                if not (forced and self._is_still_too_full()) or self._waits_for_archive(end):
                    break
                if self._waits_for_readers(start, end):
                    break
                self._tell_overridden(end)
            self._retire(start)
            gone.append(start)
        if gone:
            self._retired.settle()
            self._go_on()
            self._derived.follow(self._min.value)
        return gone

    def _wait_for_holds(self) -> None:
        if not self._waits_for_holds:
            log.warning("nothing is deleted before the coordinator has said which holds there are")
        self._waits_for_holds = True

    def _is_still_too_full(self) -> bool:
        """Also without what has been deleted and is on its way out."""
        return self._marks.is_too_full(self._disks(self._retired.used_bytes()))

    def _waits_for_readers(self, start: int, end: int) -> bool:
        """Whether a segment stays because nobody has read some of it, which is said once. That it
        goes all the same is said of each."""
        unread = unread_in(self._family, max(start, self._min.value), end)
        stays = self._settings.never_delete_unread
        if stays and end == self._unread_at:
            return bool(unread)
        used = self.used_percent()
        for topic, count in sorted(unread.items()):
            if stays:
                log.error(
                    "the disk is %.1f %% full, and %d messages of topic %s below %d stay, which no "
                    "group has read (neverDeleteUnread): read them, or make room",
                    used, count, topic, end,
                )  # fmt: skip
            else:
                log.warning(
                    "%d messages of topic %s are DELETED UNREAD by every group: the disk is %.1f "
                    "%% full, the log is deleted below %d; neverDeleteUnread=true would keep them",
                    count, topic, used, end,
                )  # fmt: skip
        self._unread_at = end
        return stays and bool(unread)

    def _waits_for_archive(self, end: int) -> bool:
        """Whether even a disk that is too full does not let a segment go, which is said once."""
        settings = self._settings
        if not settings.archive_hold or settings.archive_overflow is ArchiveOverflow.DELETE:
            return False
        hold = self._placed_holds().get(ARCHIVE_HOLD)
        archived = self._min.value if hold is None else hold.physical_offset
        if end <= archived:
            return False
        if end != self._waits_at:
            self._waits_at = end
            log.error(
                "the disk is %.1f %% full, and the log waits for its archive, which has all below "
                "%d: run `cometmq spark archive`, or set archiveOverflow=delete",
                self.used_percent(), archived,
            )  # fmt: skip
        return True

    def _tell_overridden(self, end: int) -> None:
        for hold in self._all_holds():
            if hold.physical_offset < end:
                log.error(
                    "hold %s at %d IS OVERRIDDEN: the disk is %.1f %% full, the log is deleted "
                    "below %d",
                    hold.name, hold.physical_offset, self.used_percent(), end,
                )  # fmt: skip

    # --- how they go ---

    def _retire(self, start: int) -> None:
        """Out of the log. Readers are told first: nobody maps it any more when it goes.

        It is counted before: whoever sees the log begin behind it sees it counted, too.
        """
        end = start + self._segment_bytes
        if end > self._min.value:
            self._deleted += 1
            self._min.advance(end)
        self._retired.take_in(start)
        log.info("deleted segment %s", segment_name(start))

    def _go_on(self) -> None:
        """Take the next step out of cometmq.retired/ after a pause, if there is one to take."""
        if self._next_step is None and self._retired.has_work(self._keep):
            pause_s = self._settings.delete_commit_log_files_interval_ms / 1000
            self._next_step = self.after(pause_s, self._step)

    def _step(self) -> None:
        self._next_step = None
        try:
            self._retired.step(self._keep)
        except OSError as error:
            retry_s = self._settings.redelete_hanged_file_interval_ms / 1000
            log.error("a segment could not be removed, again in %g s: %s", retry_s, error)
            self._next_step = self.after(retry_s, self._step)
            return
        if not self._writable:
            self._tell_disk_state()
        self._go_on()

    # --- what the others are told ---

    def _tell_disk_state(self) -> None:
        """Over the warning level writes are refused, until the disk is below the forced level."""
        disks = self._disks()
        before = self._writable
        if self._marks.refuses(disks):
            self._writable = False
        elif not self._marks.is_too_full(disks) or before is None:
            self._writable = True
        self._disk_state.reset(Disk.TOO_FULL if self._writable is False else Disk.WRITABLE)
        if before and self._writable:
            return
        why = self._marks.why_refused(disks)
        if before is not False and self._writable is False:
            log.error("%s", why)
        elif before is False and self._writable:
            log.warning("the disk is %s: writes are taken again", max(disks, key=_percent))
        self._commitlog.tell(DiskState(self._writable is not False, why))

    # --- commands ---

    def on_delete_segments(self, _command: DeleteSegments, _request: Request) -> Command:
        if self._holds is None:
            raise ServiceNotAvailable("the cleaner has just started, and knows no holds: try again")
        gone = self._delete(MANUAL_ROUNDS * self._settings.delete_file_batch_max, forced=False)
        held_by = [
            hold.name
            for hold in self._all_holds()
            if hold.physical_offset < self._min.value + self._segment_bytes
        ]
        return DeletedSegments(gone, self._segment_bytes, self._min.value, held_by)

    def on_set_holds(self, command: SetHolds, _request: Request) -> Command:
        place = command.epoch, command.number
        if place > self._holds_place:
            self._holds = {hold.name: hold for hold in command.holds}
            self._holds_place = place
        return HoldList(self._live_holds(), self._min.value)

    def _live_holds(self) -> list[Hold]:
        """With archiveHold the archive always has one; before it has said anything, of all."""
        holds = self._placed_holds()
        if self._settings.archive_hold:
            holds.setdefault(ARCHIVE_HOLD, Hold(ARCHIVE_HOLD, self._min.value))
        return list(holds.values())

    def _all_holds(self) -> list[Hold]:
        """With that of the slaves which are connected: they still have to be sent what is there."""
        needed = self._slaves_from.value
        slaves = [Hold(SLAVES_HOLD, needed - 1)] if needed else []
        return self._live_holds() + slaves

    def _placed_holds(self) -> dict[str, Hold]:
        now_ms = time.time_ns() // 1_000_000
        return {hold.name: hold for hold in (self._holds or {}).values() if hold.is_live(now_ms)}

    def settle(self) -> None:
        self._commitlog.close()
        self._coordinator.close()

    def statistics(self) -> meters.Figures:
        holds = ", ".join(f"{hold.name} at {hold.physical_offset}" for hold in self._live_holds())
        counts = self._retired.counts()
        return {
            meters.MIN_OFFSET: self._min.value,
            meters.DELETED_SEGMENTS: self._deleted,
            meters.ROUNDS: self._rounds,  # that are over
            meters.RETIRED_BYTES: self._retired.used_bytes(),
            meters.DISK_USED_PERCENT: round(self.used_percent(), 1),
            meters.VERIFIED_BYTES: self._scrub.read_bytes,
            meters.VERIFIED_PASSES: self._scrub.passes,
            meters.DAMAGES: self._scrub.damages,
            meters.WRITABLE: "no" if self._writable is False else "yes",
            meters.HOLDS: holds,
            **{
                meter: counts[meter.name]
                for meter in (
                    meters.HELD_SEGMENTS,
                    meters.FREE_SEGMENTS,
                    meters.RELEASING_SEGMENTS,
                    meters.FORCED_SEGMENTS,
                )
            },
        }


def _percent(disk: DiskUse) -> float:
    return disk.percent


def unread_in(family: Family, begin: int, end: int) -> dict[str, int]:
    """By topic, the messages of [begin, end) in the log that no group has read."""
    table = family.queue_table()
    queues = []
    for topic, queue_id in table.queues():
        if topic in HIDDEN_TOPICS:
            continue  # what somebody may need of it is kept in any case
        found = table.range_of(topic, queue_id)
        if found is not None:
            queues.append((topic, queue_id, found.max_queue_offset))
    offsets = family.store / CONFIG_DIR / "consumerOffset.json"
    size = family.settings.mapped_file_size_consume_queue_bytes
    return count_unread(family.store, size, queues, begin, end, read_to(offsets))
