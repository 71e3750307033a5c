"""The master's side of RocketMQ's plain replication."""

from __future__ import annotations

import logging
import os
import re
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from cometmq.actors.replication.slaves.pace import REST_S as PACE_REST_S
from cometmq.actors.replication.slaves.pace import Pace
from cometmq.actors.replication.slaves.pieces import LogPieces
from cometmq.actors.replication.slaves.port import SlaveListener
from cometmq.actors.replication.slaves.slave import Slave, SlaveLost
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.event_log import EventLog
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.service import ServiceActor, Timer
from cometmq.conf import SLAVES_MAX
from cometmq.shm.live.control import Counter, Phase

log = logging.getLogger(__name__)

EVENTS_AT_ONCE: Final = 256
# Under ASYNC_MASTER nobody waits for a slave: after it has been sent something it is sent the next
# after this, so that a writer of small messages does not have to wake this process for each.
REST_S: Final = 0.002
SETTLE_S: Final = 3.0
# Logs that were longer than ours are remembered: a slave comes again with the same one, by then
# maybe shorter than ours, and not a copy of it all the same.
FOREIGN_MAX: Final = 1_024


class HaActor(ServiceActor):
    """Sends the log to slaves as it lies, and takes their acknowledgements.

    Writes, alone: `replicated`, `slaves`, `slaves_from`.
    Wakes on: the counter below which the log may be sent (`wrote`; under SYNC_FLUSH `flushed`, so
    that no slave has what a power cut could take from the master), the sockets of slaves, a timer
    for heartbeats and for those that are silent.
    Dies of nothing that matters to others: `replicated` stays in the control file, slaves connect
    again and say how far they are.
    """

    role = "ha"

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        settings, control = family.settings, family.control
        self._wrote = control.read(Counter.WROTE)
        self._cover = control.sleep_on(family.cover, family.doorbell)
        self._min = control.read(Counter.MIN_OFFSET)
        self._replicated = control.own(Counter.REPLICATED)
        self._close_ones = control.own(Counter.SLAVES)
        self._needed_from = control.own(Counter.SLAVES_FROM)
        self._gap = settings.ha_max_gap_not_in_sync_bytes
        self._wanted = max(1, settings.slaves_wanted)
        self._rest_s = 0.0 if settings.slaves_wanted else REST_S
        self._heartbeat_s = settings.ha_send_heartbeat_interval_ms / 1000
        self._silence_s = settings.ha_housekeeping_interval_ms / 1000
        self._bytes_per_s = settings.ha_bytes_per_s
        self._pieces = LogPieces(
            family.store,
            settings.mapped_file_size_commit_log_bytes,
            piece_bytes=settings.ha_transfer_batch_size,
            record_bytes=settings.stored_record_bytes_max,
        )
        self._slaves: dict[int, Slave] = {}  # by descriptor, in the order in which they came
        self._limit = 0  # where the log ended when it was looked at last
        self._rests = False
        self._ticks: Timer | None = None
        self._foreign: deque[tuple[str, int]] = deque(maxlen=FOREIGN_MAX)
        self._said = EventLog()
        self._counts = meters.zeroes(
            meters.SLAVES_CONNECTED, meters.SLAVES_LOST, meters.SLAVES_REFUSED
        )

    # --- start ---

    def on_start(self) -> None:
        self._family.wait_for(Counter.PHASE, Phase.RECOVERED)
        self._close_ones.reset(0)  # as the one before us may have left it
        self._needed_from.reset(0)
        self._limit = self._cover.value
        self._epoll = select.epoll()
        self._door = SlaveListener(self._family.settings, self._epoll, self._said, self._let_in)
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        self.inbox.listen_to(self._epoll.fileno())
        log.info("slaves may come to %s", self._door.address)

    # --- who comes ---

    def _let_in(self, connection: socket.socket, address: str, host: str) -> None:
        """Raises OSError where the connection has ended already."""
        if len(self._slaves) >= SLAVES_MAX and not self._make_room():
            self._counts[meters.SLAVES_REFUSED] += 1
            self._said.warn("room", "%s was sent away: there are %d slaves", address, SLAVES_MAX)
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pace = Pace(self._bytes_per_s) if self._bytes_per_s else None
        self._slaves[connection.fileno()] = Slave(connection, address, host, pace)
        self._epoll.register(connection, select.EPOLLIN)
        if self._ticks is None:
            self._ticks = self.every(min(self._heartbeat_s, self._silence_s) / 4, self._tick)

    def _make_room(self) -> bool:
        """The first of those that have not said anything goes, if there is one."""
        for slave in self._slaves.values():
            if not slave.has_begun:
                self._lose(slave, SlaveLost("others want its place", is_fault=True))
                return True
        return False

    # --- what they say ---

    def on_readable(self, _source: object) -> None:
        for descriptor, events in self._epoll.poll(0, EVENTS_AT_ONCE):
            if descriptor == self._door.descriptor:
                self._door.accept(self.after)
            elif descriptor in self._slaves:
                self._serve(self._slaves[descriptor], events)
        self._tell()
        self._follow()

    def _serve(self, slave: Slave, events: int) -> None:
        def serve() -> None:
            if events & ~select.EPOLLOUT:
                reports = slave.read()
                if reports and not slave.has_begun:
                    self._begin(slave, reports.pop(0))
                slave.take(reports)
            self._send(slave)

        self._guarded(slave, serve)

    def _guarded(self, slave: Slave, action: Callable[[], None]) -> None:
        """Whatever is wrong with a slave is its own affair."""
        try:
            action()
        except SlaveLost as lost:
            self._lose(slave, lost)
        except FileNotFoundError:
            self._lose(slave, self._deleted(slave))

    def _begin(self, slave: Slave, first: int) -> None:
        """Where it is sent the log from. Raises SlaveLost where its log can be no copy of ours.

        RocketMQ's master sends an empty slave its last segment only; it gets a whole copy here.
        """
        begin, end, cut_until = self._min.value, self._wrote.value, 0
        if first:
            why = self._why_no_copy(slave, first, begin, end)
            found = None if why else self._pieces.record_at(first, end)
            if found is None:
                why = why or f"no record of ours begins at {first}"
                raise SlaveLost(f"its log ends at {first}, and {why}", is_fault=True)
            begin, cut_until = first, found
        slave.start(first, begin, cut_until)
        if begin >= self._cover.value:
            slave.send_heartbeat()  # an empty one learns where the log begins, and serves
        self._counts[meters.SLAVES_CONNECTED] += 1
        log.info(
            "slave %s is connected: its log ends at %d, ours at %d; it is sent %d bytes",
            slave.address, first, end, end - begin,
        )  # fmt: skip

    def _why_no_copy(self, slave: Slave, first: int, begin: int, end: int) -> str:
        if first < 0:
            return "that is no place in a log: it does not speak RocketMQ's HA protocol"
        if first > end:
            if (slave.host, first) not in self._foreign:
                self._foreign.append((slave.host, first))
            return f"ours at {end} already: it has what we do not have, so it is no copy of ours"
        if (slave.host, first) in self._foreign:
            return (
                f"it was ahead of ours when it came before; ours has gone on to {end} without it. "
                "It has to be copied anew, from an empty store"
            )
        if first < begin:
            return (
                f"ours begins at {begin}, what lies between is deleted: it has to be copied anew, "
                "from an empty store"
            )
        return ""

    # --- what they are sent ---

    def on_doorbell(self) -> None:
        self._follow()

    def _follow(self) -> None:
        """Send what has come to the log, and sleep on it where everything is sent."""
        while not self._rests and self._has_idle_slave():
            end = self._cover.value
            if end == self._limit:
                self._cover.arm()
                if self._cover.value == end:
                    return
                continue
            self._limit = end
            self._send_all()
            self._tell()
            self._rests = True  # also where it goes on at once: what slaves say is heard between
            if self._rest_s:
                self.after(self._rest_s, self._go_on)
            else:
                self.call_soon(self._go_on)

    def _send_all(self) -> None:
        for slave in list(self._slaves.values()):
            self._guarded(slave, partial(self._send, slave))

    def _go_on(self) -> None:
        self._rests = False
        self._follow()

    def _has_idle_slave(self) -> bool:
        """Whether any waits for the log to go on; others wait for room in their sockets."""
        return any(slave.has_begun and slave.sent >= self._limit for slave in self._slaves.values())

    def _send(self, slave: Slave) -> None:
        if not slave.has_begun:
            return
        if slave.sent < self._min.value:
            raise self._deleted(slave)
        wanted_room = slave.wants_room
        rest_s = slave.send(self._pieces, self._limit)
        if slave.wants_room != wanted_room:
            events = select.EPOLLIN | (select.EPOLLOUT if slave.wants_room else 0)
            self._epoll.modify(slave.connection, events)
        if rest_s and not slave.rests:
            slave.rests = True
            self.after(rest_s, partial(self._send_more, slave))

    def _send_more(self, slave: Slave) -> None:
        """It has rested for its pace."""
        slave.rests = False
        if self._slaves.get(slave.connection.fileno()) is slave:
            self._guarded(slave, partial(self._send, slave))
            self._tell()
            self._follow()

    def _deleted(self, slave: Slave) -> SlaveLost:
        return SlaveLost(
            f"it has the log up to {slave.reported}, and the disk had no room for what comes next: "
            f"ours begins at {self._min.value} now. It has to be copied anew, from an empty store",
            is_fault=True,
        )

    # --- timers ---

    def _tick(self) -> None:
        now = time.monotonic()
        for slave in list(self._slaves.values()):
            self._guarded(slave, partial(self._look_after, slave, now))
        self._tell()

    def _look_after(self, slave: Slave, now: float) -> None:
        if now - slave.heard_at > self._silence_s:
            raise SlaveLost(f"it has reported nothing for {now - slave.heard_at:.1f} s")
        if slave.has_begun:
            self._send(slave)  # also to see whether the log still has what it needs
            if now - slave.sent_at > self._heartbeat_s and not slave.wants_room:
                slave.send_heartbeat()

    # --- who goes ---

    def _lose(self, slave: Slave, lost: SlaveLost) -> None:
        del self._slaves[slave.connection.fileno()]
        self._epoll.unregister(slave.connection)
        slave.connection.close()
        if not self._slaves and self._ticks is not None:
            self._ticks.cancel()
            self._ticks = None
        self._counts[meters.SLAVES_REFUSED if lost.is_fault else meters.SLAVES_LOST] += 1
        if slave.has_begun and not lost.is_fault:
            log.warning(
                "slave %s is lost: %s; it has acknowledged the log up to %d, which ends at %d",
                slave.address, lost, slave.reported, self._wrote.value,
            )  # fmt: skip
        else:
            kind = re.sub("[0-9]+", "", str(lost))
            self._said.warn((slave.host, kind), "slave %s is refused: %s", slave.address, lost)

    # --- what the others are told ---

    def _tell(self) -> None:
        """How far the slaves have come, to whom it concerns."""
        slaves = [slave for slave in self._slaves.values() if slave.has_begun]
        acknowledged = sorted((slave.acknowledged for slave in slaves), reverse=True)
        if len(acknowledged) >= self._wanted:
            end = acknowledged[self._wanted - 1]
            if end > self._replicated.value:
                self._replicated.advance(end)
        # Before the counters: once they say that a slave is gone, nothing is kept for it.
        self._pieces.keep({self._pieces.start_of(slave.sent) for slave in slaves})
        end = self._cover.value
        close = sum(end - slave.needs < self._gap for slave in slaves)
        if close != self._close_ones.value:
            self._close_ones.reset(close)
        needed = min((slave.needs + 1 for slave in slaves), default=0)
        if needed != self._needed_from.value:
            self._needed_from.reset(needed)

    # --- end ---

    def settle(self) -> None:
        """Nobody else is let in, and those that are there may have all of it, for some seconds."""
        self._door.close()
        until = time.monotonic() + SETTLE_S
        self._limit = self._cover.value
        self._send_all()
        while self._is_awaited() and (left_s := until - time.monotonic()) > 0:
            look_s = min(left_s, PACE_REST_S) if self._bytes_per_s else left_s
            for descriptor, events in self._epoll.poll(look_s, EVENTS_AT_ONCE):
                if descriptor in self._slaves:
                    self._serve(self._slaves[descriptor], events)
            if self._bytes_per_s:  # no timers come here
                self._send_all()
            self._tell()
        for slave in self._slaves.values():
            if slave.reported < self._limit:
                log.warning(
                    "slave %s has the log up to %d, which ends at %d",
                    slave.address, slave.reported, self._limit,
                )  # fmt: skip
            slave.connection.close()
        self._slaves.clear()
        self._tell()
        self._pieces.close()
        self.inbox.forget(self._epoll.fileno())
        self._epoll.close()

    def _is_awaited(self) -> bool:
        return any(
            slave.has_begun and slave.reported < self._limit for slave in self._slaves.values()
        )

    def statistics(self) -> meters.Figures:
        slaves = [slave for slave in self._slaves.values() if slave.has_begun]
        found: meters.Figures = {
            meters.SLAVES: len(slaves),
            meters.SLAVES_IN_SYNC: self._close_ones.value,
            meters.CONNECTIONS: len(self._slaves),
            **self._counts,
            meters.SLAVES_NOT_ADMITTED: self._door.sent_away,
            meters.REPLICATED: self._replicated.value,
            meters.PID: os.getpid(),
        }
        for number, slave in enumerate(slaves):
            found |= {
                meters.SLAVE_ADDRESS.of(number): slave.address,
                meters.SLAVE_ACKNOWLEDGED.of(number): slave.reported,
                meters.SLAVE_LAG_BYTES.of(number): max(0, self._wrote.value - slave.needs),
                meters.SLAVE_SINCE_MS.of(number): slave.since_ms,
            }
        return found
