"""Replicas, their disks, a network and a coordination engine, all in memory and without time.

The replicas are the very class that the actors drive. Everything around it is made here, in the
worst way that is allowed: see the ops of schedule.py. A record is one number, and one byte long.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from simulator.truth import Truth, Violation

from cometmq.actors.replication.core.actions import (
    Action,
    Append,
    Cas,
    Confirmed,
    Get,
    Keep,
    Lead,
    Send,
    Serve,
    Service,
    Ship,
    StartOver,
    StepDown,
    Stop,
    Truncate,
)
from cometmq.actors.replication.core.frames import (
    AnyFrame,
    Bytes,
    Mark,
    decode_frame,
    encode_frame,
)
from cometmq.actors.replication.core.promises import Promises, decode_promises, encode_promises
from cometmq.actors.replication.core.record import (
    GroupRecord,
    Life,
    decode_record,
    encode_record,
    new_record,
)
from cometmq.actors.replication.core.replica import Replica
from cometmq.actors.replication.core.settings import Settings

GROUP = "g"
TTL = 40.0
TIMES = dict(beat_s=4.0, silence_s=10.0, poll_s=12.0, retry_s=5.0, election_s=3.0, keep_s=6.0)
IN_FLIGHT_MAX = 60  # frames; the oldest are lost beyond


class DamageFound(Exception):
    """A record that was read does not hold: the process ends."""


class Node:
    """One replica: its process, its disk, and what its process does for clients."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.stores = 0
        self.boot = 1
        self.sync = world.sync
        self.core: Replica | None = None
        self.connected = True  # to the engine
        self.new_store()

    def new_store(self) -> None:
        """An empty disk."""
        self.stores += 1
        self.log: list[int] = []
        self.begin = 0
        self.disk = 0  # all below is flushed
        self.damaged: set[int] = set()  # offsets whose records do not hold
        self.known_end = 0  # counters that outlive a process
        self.lost_power = False  # since it was in the set, with what it had acknowledged
        self.halted = ""
        self.promises = Promises(
            group=GROUP, replica=self.name, store_uuid=f"{self.name}{self.stores}"
        )
        self.off()

    def off(self) -> None:
        """The process is gone."""
        self.core = None
        self.lead = 0
        self.service: Service | None = None
        self.pending: list[int] = []  # offsets whose senders wait
        self.is_stopping = False
        self.seen = -1  # which sessions it was told of
        self.watched = 0  # the version that its watch told of
        self.shown = 0  # read up to here, by clients

    @property
    def end(self) -> int:
        return self.begin + len(self.log)

    @property
    def life(self) -> Life:
        return (self.name, self.promises.store_uuid, self.promises.incarnation)

    # --- LogView ---

    def last_record(self, end: int) -> Mark | None:
        if not self.begin < end <= self.end:
            return None
        if end - 1 in self.damaged:
            raise DamageFound
        return Mark(end, end - 1, self.log[end - 1 - self.begin])

    def whole_records(self, offset: int, end: int, bytes_max: int) -> int:
        return min(offset + bytes_max, end)

    # --- faults ---

    def kill(self) -> None:
        """-9: what is in the page cache stays there."""
        if self.core is not None:
            self.known_end = self.end
        self.off()

    def power_off(self, rng: Random) -> None:
        """What was not flushed is gone, from some point on."""
        kept = rng.randint(min(self.disk, self.end), self.end)
        self.lost_power |= not self.sync
        del self.log[kept - self.begin :]
        self.disk = kept
        self.damaged = {each for each in self.damaged if each < kept}
        self.known_end = 0
        self.boot += 1
        self.off()

    def scan(self) -> None:
        """A start finds the end of what holds. What is behind it may be a torn tail."""
        if self.damaged:
            del self.log[min(self.damaged) - self.begin :]
            self.disk = min(self.disk, self.end)

    def start(self) -> list[Action]:
        self.scan()
        world = self.world
        self.core = world.replica(
            world.settings[self.name],
            self.promises,
            self,
            begin=self.begin,
            end=self.end,
            flushed=self.disk,
            known_end=self.known_end,
            boot_id=str(self.boot),
        )
        self.shown = max(self.core.local.confirm, self.begin)
        return self.core.start(world.now)


class World:
    """Everything, in one schedule.

    Args:
        wire: frames, records and promises go through their codecs.
    """

    def __init__(
        self,
        rng: Random,
        count: int,
        *,
        sync: bool,
        replica: type[Replica] = Replica,
        wire: bool = False,
    ) -> None:
        self.rng = rng
        self.now = 0.0
        self.sync = sync
        self.replica = replica
        self.wire = wire
        self.truth = Truth()
        self.counts: dict[int, int] = {}
        self.made = 0  # records
        self.acks = 0
        self.crash = 0.0  # the probability that a process dies between two actions
        self.net: list[tuple[str, str, AnyFrame, Sequence[int]]] = []
        self.cut: set[tuple[str, str]] = set()  # from, to: nothing passes
        self.requests: list[tuple[Node, Replica, Get | Cas, int]] = []  # the version when asked
        self.cleans = False  # old records were deleted somewhere
        names = [f"r{number}" for number in range(count)]
        self.record: GroupRecord = new_record(GROUP, [(name, name) for name in names])
        self.version = 1
        lag_s = rng.choice((10.0, 15.0, 40.0))  # how fast the in-sync set shrinks
        contact_s = rng.choice((12.0, 20.0, 40.0))  # how fast a master without followers gives up
        self.history = [self.record]
        self.sessions: dict[str, Life] = {}
        self.sessions_number = 0
        self.settings = {
            name: Settings(
                group=GROUP,
                replica=name,
                address=name,
                sync_flush=sync,
                frame_bytes=3,
                window_bytes=9,
                lag_s=lag_s,
                contact_s=contact_s,
                **TIMES,
            )
            for name in names
        }
        self.nodes = {name: Node(self, name) for name in names}

    # --- carrying out ---

    def do(self, node: Node, actions: list[Action], payload: Sequence[int] = ()) -> None:
        """Each action to its end before the next. The process may die in between."""
        if len(actions) > 1 and self.rng.random() < self.crash:
            actions = actions[: self.rng.randrange(len(actions))]
            self._do(node, actions, payload)
            if self.rng.random() < 0.5:
                node.kill()
            else:
                node.power_off(self.rng)
            return
        self._do(node, actions, payload)

    def _do(self, node: Node, actions: list[Action], payload: Sequence[int]) -> None:
        for action in actions:
            if isinstance(action, Send):
                frame = action.frame
                if self.wire:
                    frame = decode_frame(encode_frame(frame))
                self.send(node.name, action.to, frame, ())
            elif isinstance(action, Ship):
                if not self._ship(node, action):
                    return
            elif isinstance(action, Confirmed):
                self._confirmed(node, action.offset)
            elif isinstance(action, Append):
                if action.offset != node.end or action.length != len(payload):
                    raise Violation(f"hole: {node.name} ends at {node.end}, told to {action}")
                node.log.extend(payload)
            elif isinstance(action, Get | Cas):
                assert node.core is not None
                self.requests.append((node, node.core, action, self.version))
            elif isinstance(action, Keep):
                node.promises = action.promises
                if self.wire:
                    node.promises = decode_promises(encode_promises(action.promises))
            elif isinstance(action, Serve):
                node.service = action.service
            else:
                self._do_rare(node, action)

    def _do_rare(self, node: Node, action: Action) -> None:
        if isinstance(action, Lead):
            if action.start != node.end:
                raise Violation(f"hole: {node.name} ends at {node.end}, leads from {action.start}")
            node.lead = action.epoch
        elif isinstance(action, StepDown):
            node.lead, node.service, node.is_stopping = 0, None, True
            node.pending.clear()
        elif isinstance(action, Truncate):
            self.truth.cut(node.name, action.to, node.shown)
            del node.log[action.to - node.begin :]
            node.disk = min(node.disk, action.to)
            node.damaged = {each for each in node.damaged if each < action.to}
        elif isinstance(action, StartOver):
            self.truth.cut(node.name, node.begin, node.shown)
            node.log.clear()
            node.begin = node.disk = node.shown = action.at
        elif isinstance(action, Stop):
            self._stop(node, action.why)

    def _stop(self, node: Node, why: str) -> None:
        """A replica may stop where a disk was damaged or exchanged, or its data had expired."""
        excused = node.damaged or node.lost_power or node.stores > 1 or self.cleans
        if not excused:
            raise Violation(f"stopped: {node.name}: {why}")
        node.off()
        node.halted = why

    def _ship(self, node: Node, ship: Ship) -> bool:
        """Records are checked when they are read: a process that finds damage ends."""
        first = ship.offset - node.begin
        records = node.log[first : first + ship.length]
        if len(records) != ship.length or first < 0:
            raise Violation(f"hole: {node.name} has {node.begin} to {node.end}, told to {ship}")
        if node.damaged and any(
            ship.offset <= each < ship.offset + ship.length for each in node.damaged
        ):
            node.kill()
            return False
        frame: AnyFrame = Bytes(
            GROUP, ship.epoch, ship.nonce, ship.offset, ship.length, crc_of(records), ship.confirm
        )
        if self.wire:
            frame = decode_frame(encode_frame(frame))
        self.send(node.name, ship.to, frame, records)
        return True

    def _confirmed(self, node: Node, offset: int) -> None:
        shown = max(node.shown, node.begin)
        if offset > shown:
            self.truth.readable(
                node.name, shown, node.log[shown - node.begin : offset - node.begin]
            )
            node.shown = offset
        pending = node.pending
        while pending and pending[0] < offset:
            at = pending.pop(0)
            record = node.log[at - node.begin]
            self.truth.acknowledged(node.life, node.lead, at, record, self.counts[record])
            self.acks += 1

    # --- the network ---

    def send(self, source: str, to: str, frame: AnyFrame, records: Sequence[int]) -> None:
        self.net.append((source, to, frame, records))
        if len(self.net) > IN_FLIGHT_MAX:
            del self.net[0]

    def deliver(self, index: int, *, corrupt: bool = False) -> None:
        source, to, frame, records = self.net.pop(index)
        node = self.nodes[to]
        if node.core is None or (source, to) in self.cut:
            return
        if corrupt and records:
            records = [*records[:-1], -1]
        crc = crc_of(records) if records else 0
        try:
            actions = node.core.frame(source, frame, len(records), crc)
        except DamageFound:
            node.kill()
            return
        self.do(node, actions, records)

    # --- what happens to a node ---

    def start(self, node: Node) -> None:
        self.do(node, node.start())
        if node.core is not None and node.connected:
            self.open_session(node)

    def open_session(self, node: Node) -> None:
        assert node.core is not None
        self.sessions[node.name] = node.life
        self.sessions_number += 1
        self.do(node, node.core.session(self.now + TTL))

    def tick(self, node: Node) -> None:
        core = node.core
        if core is None:
            return
        if node.connected:
            if self.sessions.get(node.name) == node.life:
                self.do(node, core.session(self.now + TTL))
            elif self.rng.random() < 0.4:
                self.do(node, core.session(None))
                if node.core is core:
                    self.open_session(node)
            if node.core is core and node.seen != self.sessions_number:
                node.seen = self.sessions_number
                self.do(node, core.sessions(self.sessions.values()))
            if node.core is core and node.watched != self.version and self.rng.random() < 0.7:
                node.watched = self.version
                self.do(node, core.watched())
        if node.core is core:
            self.do(node, core.tick(self.now))
        if node.core is core and node.is_stopping:
            self.stopped(node)

    def stopped(self, node: Node) -> None:
        node.is_stopping = False
        core = node.core
        assert core is not None
        self.do(node, core.stopped(node.end))
        if node.core is core:
            self.do(node, core.flushed(node.disk))

    def append(self, node: Node, count: int) -> None:
        """Clients send. A queue's records are the even ones."""
        core = node.core
        if core is None or not node.lead or node.service not in (Service.OPEN, Service.UNSURE):
            return
        number = self.counts[node.log[-1]] if node.log else 0
        for _ in range(count):
            self.made += 1
            number += self.made % 2 == 0
            self.counts[self.made] = number
            node.pending.append(node.end)
            node.log.append(self.made)
        self.do(node, core.appended(node.end))

    def flush(self, node: Node, upto: int) -> None:
        if node.core is not None and node.disk < upto <= node.end:
            node.disk = upto
            # What a dead mastership has appended is told by `stopped`.
            if not node.is_stopping:
                self.do(node, node.core.flushed(upto))

    # --- the engine ---

    def serve_request(self, index: int, *, fate: float = 1.0, stale: int = 0) -> None:
        """
        Args:
            fate: of a change. Below 0.1: lost. Below 0.2: applied, but the answer is lost. Below
                0.4: no answer in time, and applied later. Else answered.
            stale: of a read, how many versions its answer is behind, at most to when it was asked.
        """
        node, core, request, asked_at = self.requests.pop(index)
        is_there = node.core is core and node.connected
        if isinstance(request, Get):
            version = max(asked_at, self.version - stale)
            if is_there:
                record = self.history[version - 1]
                self.do(node, core.learned(version, record, request.number))
            return
        if 0.2 <= fate < 0.4:
            late = Cas(-1, request.version, request.record)
            self.requests.append((node, core, late, asked_at))
        elif fate >= 0.1 and request.version == self.version:
            self.version += 1
            self.record = request.record
            if self.wire:
                self.record = decode_record(encode_record(request.record))
            self.history.append(self.record)
            if is_there and fate >= 0.4:
                self.do(node, core.cas_applied(request.ticket, self.version))
                return
        elif fate >= 0.4 and is_there:
            self.do(node, core.cas_refused(request.ticket, self.version, self.record))
            return
        if node.core is core and request.ticket > 0:
            self.do(node, core.cas_unknown(request.ticket))


def crc_of(records: Sequence[int]) -> int:
    return hash(tuple(records)) & 0xFFFFFFFF
