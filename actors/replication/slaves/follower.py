"""The commitlog process of a slave: the only writer of its copy of the master's log."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import closing
from enum import StrEnum
from functools import partial
from typing import Any, Final, NoReturn

from cometmq.actors.replication.slaves.intake import Intake
from cometmq.actors.replication.slaves.master_connection import (
    MasterConnection,
    ask_where_it_begins,
)
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.family import Family, out_of_service
from cometmq.actors.runtime.listeners.connections import ConnectionLimits
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.writer.commitlog import CommitLogActor
from cometmq.actors.writer.cursors import Cursors
from cometmq.actors.writer.ends import Ends
from cometmq.actors.writer.opening import ask_topics, begin_log, open_log
from cometmq.actors.writer.segments import SegmentWait
from cometmq.conf import BrokerSettings, FlushDiskType
from cometmq.protocol.commands import Command, DiskState, Done, TopicsChanged
from cometmq.protocol.errors import (
    DiskFull,
    MessageIllegal,
    NotMaster,
    ServiceNotAvailable,
    SystemBusy,
)
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import (
    COPY_FRAME,
    COPY_GAP,
    COPY_MORE,
    COPY_RECORD,
    COPY_ROOM,
    LogCopy,
    Sleepers,
)
from cometmq.shm.live.control import Counter, Doorbell, Phase
from cometmq.shm.os.locks import StoreLock
from cometmq.shm.reading.derived_log import last_marks
from cometmq.shm.state.damage import REPLACE_IT

log = logging.getLogger(__name__)

ROOM_RETRY_S: Final = 1.0
MARKS_LOOK_S: Final = 5.0
LOOK_S: Final = 1.0  # at most, between two looks at the connection's times
REFUSALS_MAX: Final = 3  # of one record, by as many connections: then it will not be another one
CAUGHT_UP_MS: Final = 1_000  # old is the last record at most, when nothing more has come
FALLEN_BEHIND_MS: Final = 10_000
NO_MARKS: Final = (1 << 63) - 1
# What is missing, and may be there later.
NO_ROOM: Final = (DiskFull, ServiceNotAvailable)


class State(StrEnum):
    CONNECTING = "connecting"
    WAITING = "waiting"  # to connect again
    FOLLOWING = "following"
    CAUGHT_UP = "caught up"
    NO_ROOM = "no room"
    STOPPED = "stopped"  # for a reason that only people can remove


class KeptMarks:
    """Tells the cleaner which marks of derived writes whoever becomes a master will need: see
    DerivedWrites, which does so on a master."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._needed_from = family.control.own(Counter.MARKS_FROM)
        self._flushed = family.control.read(Counter.FLUSHED)
        self._dispatched = family.control.read(Counter.DISPATCHED)
        self._seen = -1

    def look(self) -> None:
        dispatched = self._dispatched.value  # before: what comes meanwhile lies behind it
        if dispatched == self._seen:
            return
        with closing(self._family.store_reader()) as reader:
            marks = last_marks(reader)
        if not marks:
            self._needed_from.reset(dispatched or NO_MARKS)
        elif marks[0].physical_offset < self._flushed.value:
            self._needed_from.reset(marks[0].physical_offset)
        self._seen = dispatched


class FollowerActor(ServiceActor):
    """Follows the master at haMasterAddress: takes its log's bytes, judges each record natively
    (`LogCopy`), lays whole ones down where they say that they lie, and tells the master how far
    that is: how far it is written, under SYNC_FLUSH how far it is on the disk.

    Writes, alone: commitlog/ content, `wrote` and the counters beside it, `phase`, `sync_wanted`,
    `marks_from`; `flushed` in a word of its own; the ends of queues and their stripes.
    Wakes on: the master's frames; `flushed`, under SYNC_FLUSH; `queues`; timers.
    Dies of: a broken invariant. The next process goes on at `wrote`, and asks for what follows.

    What does not follow on the log's end, or is no record of that place, is refused: nothing of it
    is ever laid down, and the master is asked again. What is refused again and again, and a master
    whose log ends before this one, end the following: this log is no beginning of that one.

    In a group it is the `ha` process of this broker that sends the master's log, by a socket
    of this machine (`Family.log_source`), having made it certain that it follows on this one.
    """

    role = "commitlog"
    stands_in_for = CommitLogActor

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind, limits=ConnectionLimits.of(family.settings))
        self._family = family
        self._settings = family.settings
        self._in_group = family.settings.is_in_group
        self._source = _source_of(family)
        self._master = "the ha process" if self._in_group else f"master {self._source}"
        control = family.control
        self._phase = control.own(Counter.PHASE)
        self._sleepers = Sleepers(family.doorbells[Doorbell.APPENDERS])
        self._segments = SegmentWait(family, self._sleepers)
        self._flushed = control.sleep_on(Counter.FLUSHED, family.doorbell)
        self._synced = control.own_second(Counter.FLUSHED)
        self._errno = control.own_second(Counter.FLUSH_ERRNO)
        self._sync = family.settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._cursors = Cursors(family.settings)
        self._state = State.CONNECTING
        self._why = ""  # it is in that state, in words
        self._said = ""  # last in the log of what keeps it from following
        self._disk_full = ""  # what the cleaner says of it
        self._refused_at, self._refusals = -1, 0

    # --- start ---

    def on_start(self) -> None:
        settings = self._settings
        self._lock = StoreLock(self._family.store, 0)
        ask = None if self._in_group else partial(_ask_where_it_begins, self._family)
        begin_log(self._family, where_empty=ask)
        self._log = open_log(
            self._family, self._flushed, lambda end: self._segments.need(end, self._log)
        )
        if self._sync:
            self._log.appender.want()  # what the one before us may not have come to ask for
        self._family.wait_confirmed()
        self._cursors.load(self._family.queue_table())
        self._ends = Ends(self._family, self._log.appender)
        self._ends.add(self._cursors)  # the one before us may not have told of all
        self._cursors.on_new = self._ends.add
        self._copy = LogCopy(
            self._log.appender,
            settings.stored_record_bytes_max,
            partial(_cursor_of, self._cursors),
        )
        # In a group `wrote` tells the rest, and nothing is to be done for each frame but for the
        # disk.
        self._intake = Intake(
            self.inbox,
            self._copy,
            in_sleep=self._in_group and not self._sync,
            on_come=self._take,
            on_lost=self._lose,
            call_soon=self.call_soon,
        )
        marks = KeptMarks(self._family)
        marks.look()
        self._cursors.begin(ask_topics(self._family))
        self._line = MasterConnection(
            self._source,
            call_soon=self.call_soon,
            after=self.after,
            on_connected=self._on_connected,
            on_failed=lambda why: self._lose(f"cannot be reached: {why}"),
        )
        heartbeat_s = settings.ha_send_heartbeat_interval_ms / 1000
        self.every(min(LOOK_S, heartbeat_s / 4), self._look_at_line)
        self.every(ROOM_RETRY_S, self._try_again)
        self.every(MARKS_LOOK_S, marks.look)
        self._phase.reset(Phase.SERVING)  # lower after one that was told to stop
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        self._line.open()

    # --- the connection ---

    def _on_connected(self, fd: int) -> None:
        log.info("connected to %s at %d", self._master, self._log.physical_offset)
        self._become(State.FOLLOWING)
        if self._disk_full:
            self._pause(self._disk_full)
        else:
            self._intake.listen(fd)
        self._acknowledge()

    def _lose(self, why: str) -> None:
        """The connection, or another attempt at one; the next comes after a pause."""
        self._say(f"{self._master} {why}")
        self._hang_up()
        self._become(State.WAITING, why)
        self._line.open_later()

    def _end_following(self, why: str) -> None:
        """Following has no end that this process could reach by itself."""
        what = (
            f"This store keeps its files and serves what it has: {REPLACE_IT}"
            if self._in_group
            else "This store keeps its files and serves what it has. If that master is the right "
            "one, its log is another one than this copy: move the store away, and start the slave "
            "with an empty one"
        )
        log.critical("following %s is over at %d: %s. %s",
                     self._master, self._log.physical_offset, why, what)  # fmt: skip
        self._hang_up()
        self._become(State.STOPPED, why)

    def _hang_up(self) -> None:
        self._intake.stop()
        self._line.hang_up()
        self._copy.forget()

    def _become(self, state: State, why: str = "") -> None:
        self._state, self._why = state, why

    def _say(self, text: str) -> None:
        """Once, as long as it is the same that keeps us from following."""
        level = logging.DEBUG if text == self._said else logging.WARNING
        self._said = text
        log.log(level, "%s", text)

    def _look_at_line(self) -> None:
        """Both sides end a connection that nothing comes by (RocketMQ's housekeeping). In a group
        the other end may have nothing to say, and its end is seen at once."""
        if not self._line.is_open:
            return
        now = time.monotonic()
        silent_s = now - self._line.heard_at
        is_silent = silent_s * 1000 > self._settings.ha_housekeeping_interval_ms
        if is_silent and self._state is not State.NO_ROOM and not self._in_group:
            self._lose(f"has been silent for {silent_s:.1f} s: the connection is closed")
        elif (now - self._line.reported_at) * 1000 >= self._settings.ha_send_heartbeat_interval_ms:
            self._acknowledge(always=True)

    def _acknowledge(self, *, always: bool = False) -> None:
        """Tell the master how far this log is: what a kill, or under SYNC_FLUSH a power cut, does
        not take any more. The first report asks for what follows, so it waits for all of it.

        To the `ha` process of this broker `wrote` and `flushed` tell the rest, and it would be
        woken in vain for each frame."""
        if not self._line.is_open or (self._in_group and self._line.reported >= 0 and not always):
            return
        end = self._log.physical_offset
        safe = min(end, self._flushed.value) if self._sync else end
        if self._sync and safe < end:
            self._flushed.arm()
            safe = min(end, self._flushed.value)
        if self._line.reported < 0 and safe < end:
            return
        if always or safe > self._line.reported:
            try:
                self._line.report(safe)
            except OSError as error:
                self._lose(f"takes no reports: {error.strerror}")

    # --- what comes ---

    def on_readable(self, source: Any) -> None:
        self._intake.on_readable(source)

    def _take(self, why: int | None = None) -> bool:
        """Lay down what has come, publish it, acknowledge it, and wake who waits for it. False if
        there was no room for all of it.

        Args:
            why: what is there is not laid down (see Intake).
        """
        if self._state is not State.NO_ROOM:  # then nothing is listened to
            self._line.heard_at = time.monotonic()
        before = self._log.physical_offset
        try:
            why = self._copy.take() if why is None else why
            while why == COPY_ROOM:
                self._log.make_room()
                why = self._copy.take()
        except NO_ROOM as error:
            self._pause(str(error))
        except OSError as error:
            self._lose(f"is left: a segment cannot be mapped: {error}")
            return True
        if self._log.physical_offset > before:
            self._publish()
        if self._copy.frames and why == COPY_MORE:
            self._go_on()
        if why in (COPY_GAP, COPY_FRAME, COPY_RECORD):
            self._refuse(why)
        return why != COPY_ROOM

    def _publish(self) -> None:
        self._log.publish()
        if self._sync:
            try:
                synced = self._log.sync()  # a little here, what is more by the flush process
            except OSError as error:
                out_of_service("the CommitLog could not be flushed", error, self._errno)
            if synced:
                self._synced.raise_to(synced)
            else:
                self._log.appender.want()
        self._acknowledge()
        self._log.wake()
        self._synced.wake_moved()

    def _go_on(self) -> None:
        """A frame was taken: the master is there, and its log is this one."""
        self._line.failures, self._said = 0, ""
        if self._log.physical_offset > self._refused_at:
            self._refused_at, self._refusals = -1, 0
        age_ms = time.time() * 1000 - self._log.last_store_timestamp
        if self._copy.frame_bytes == 0:  # it has no more
            age_ms = 0
        if self._state is State.FOLLOWING and age_ms < CAUGHT_UP_MS and not self._copy.held:
            log.info("caught up with %s at %d", self._master, self._log.physical_offset)
            self._become(State.CAUGHT_UP)
        elif self._state is State.CAUGHT_UP and age_ms > FALLEN_BEHIND_MS:
            self._become(State.FOLLOWING)

    def _refuse(self, why: int) -> None:
        """Nothing of it is laid down."""
        copy, end = self._copy, self._copy.end
        if self._in_group and why != COPY_RECORD:
            self._refuse_here(
                self._log.physical_offset,
                f"a frame of {copy.frame_bytes} bytes that begins at {copy.frame_offset} came, and "
                f"this log ends at {end}",
            )
        elif why == COPY_FRAME:
            self._lose(f"sends a frame of {copy.frame_bytes} bytes, which none may have")
        elif why == COPY_GAP and copy.frames == 0 and copy.frame_offset < end:
            self._end_following(
                f"its log ends at {copy.frame_offset}, and this one at {end}"
                if copy.frame_bytes == 0
                else f"it sends from {copy.frame_offset} on, and this log ends at {end}"
            )
        elif why == COPY_GAP:
            is_empty = end == self._family.control.read(Counter.MIN_OFFSET).value
            begin = "; this store is empty: start the broker again" if is_empty else ""
            self._lose(f"sends from {copy.frame_offset} on, and this log ends at {end}{begin}")
        else:
            self._refuse_here(self._log.physical_offset, copy.why)

    def _refuse_here(self, at: int, why: str) -> None:
        """What would follow on this log's end and cannot; the last time it is the same."""
        log.error("what %s sends for %d is refused: %s", self._master, at, why)
        self._refusals = self._refusals + 1 if at == self._refused_at else 1
        self._refused_at = at
        if self._refusals >= REFUSALS_MAX:
            self._end_following(f"what it sends for {at} does not follow on this log: {why}")
        else:
            self._lose(f"sends for {at} what is refused: {why}")

    # --- a full disk ---

    def _pause(self, why: str) -> None:
        """Nothing is taken from the socket, which in the end stops the master, until there is
        room."""
        if self._state is not State.NO_ROOM:
            log.error("nothing is copied at %d: %s", self._log.physical_offset, why)
        self._intake.stop()
        self._become(State.NO_ROOM, why)

    def _try_again(self) -> None:
        if self._state is not State.NO_ROOM or self._disk_full or not self._line.is_open:
            return
        if self._take() and self._line.is_open:  # what had come before
            log.warning("there is room: copying goes on at %d", self._log.physical_offset)
            self._become(State.FOLLOWING)
            self._line.heard_at = time.monotonic()
            self._intake.listen(self._line.fd)

    def on_disk_state(self, command: DiskState, _request: Request) -> Command:
        self._disk_full = "" if command.writable else command.reason
        if self._disk_full and self._line.is_open and self._state is not State.STOPPED:
            self._pause(self._disk_full)
        return Done()

    # --- what the others wake it for ---

    def on_doorbell(self) -> None:
        if self._sync:
            self._acknowledge()
        self._ends.place_new()

    # --- commands ---

    def refuse(self, _command: Command, _request: Any) -> NoReturn:
        """Refuse commands for the master. GetLine is one: producers need a line only to send."""
        raise not_master(self._settings)

    def on_topics_changed(self, command: TopicsChanged, _request: Request) -> Command:
        return self._cursors.take(command.topics)

    # --- end ---

    def settle(self) -> None:
        self._line.close()
        self._hang_up()
        with self._log.gate:
            self._phase.advance(Phase.STOPPED)
            self._log.close()

    def statistics(self) -> meters.Figures:
        found: meters.Figures = {
            meters.MESSAGES: self._log.appender.count,
            meters.WROTE: self._log.physical_offset,
            meters.QUEUES: len(self._cursors),
            meters.TOPICS: self._cursors.topic_count,
            meters.PID: os.getpid(),
            meters.MASTER: self._source,
            meters.MASTER_STATE: self._state.value,
            meters.MASTER_TROUBLE: self._why,
            meters.ACKNOWLEDGED: self._line.reported,
        }
        if self._in_group:  # to whom, see member.py; what is reported here is older
            end = self._log.physical_offset
            found[meters.ACKNOWLEDGED] = min(end, self._flushed.value) if self._sync else end
        if self._line.is_open:
            found[meters.LAST_HEARD_S] = round(time.monotonic() - self._line.heard_at, 3)
        if self._state is State.CAUGHT_UP:
            found[meters.BEHIND_MS] = 0
        elif self._log.last_store_timestamp:
            found[meters.BEHIND_MS] = int(time.time() * 1000) - self._log.last_store_timestamp
        return found


def _source_of(family: Family) -> str:
    """Who sends the log, see MasterConnection."""
    settings = family.settings
    return family.log_source if settings.is_in_group else settings.ha_master_address


def _ask_where_it_begins(family: Family) -> int:
    """For a store without records."""
    master = family.settings.ha_master_address
    log.info("this store is empty: asking master %s where its log begins", master)
    return ask_where_it_begins(
        master,
        gone=family.gone,
        say=lambda why: log.warning("waiting for master %s: %s", master, why),
    )


def _cursor_of(cursors: Cursors, topic: str, queue_id: int) -> QueueCursor | None:
    """None for a queue too many: its messages are stored all the same."""
    try:
        return cursors.of(topic, queue_id)
    except (SystemBusy, MessageIllegal) as error:
        log.error("nobody is told of messages in queue %d of %s: %s", queue_id, topic, error)
        return None


def not_master(settings: BrokerSettings) -> NotMaster:
    """What a slave answers to whoever wants something changed."""
    if settings.is_in_group:
        return NotMaster(f"this replica of group {settings.group_name} is not its master")
    master = settings.ha_master_address
    return NotMaster(f"this broker is a slave of {master}: send to the master")
