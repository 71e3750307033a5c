"""Consuming without sharing: all queues of topics, or those that it was told. No group is joined.

Broadcasting, reading for nobody, and reading queues of one's own choice differ only in who keeps
the progress (`kept.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from cometmq.client.presence import AWAY, Presence, unique_name
from cometmq.client.questions import Position, ranges, resolve
from cometmq.client.receiving.beginning import first_offsets
from cometmq.client.receiving.doubts import places_of
from cometmq.client.receiving.kept import UNKNOWN, Kept, KeptByUser, KeptInFile
from cometmq.client.receiving.mapped import check_mapped
from cometmq.client.receiving.owned import OwnedQueues, QueueId
from cometmq.client.receiving.replicas import Replicas, follow
from cometmq.client.routes import Routes, broker_routes
from cometmq.protocol.commands import BrokerEndpoints, QueueKey, QueueOffset, TopicRoute
from cometmq.protocol.errors import ArgumentIllegal, CometError, NotOwner
from cometmq.protocol.positions import EARLIEST, LATEST
from cometmq.protocol.retry import pause_s
from cometmq.protocol.wire.steady import Steady

log = logging.getLogger(__name__)

ASK_S: Final = 3.0  # for a broker to say that it is there
REFRESH_S: Final = 5.0  # how soon a queue that is new is seen
CLOSE_S: Final = 15.0
Wanted = Mapping[QueueId, int | None]  # queues, and where to begin


class Unshared:
    """Threads may share it. Its methods are those of `Member`.

    A thread looks for queues that are new, for brokers that have moved, and commits.

    Args:
        name: "" = a unique one.
        start: where to begin in queues of which no progress is kept; see Consumer. A queue that a
            topic gets later is read from its beginning.
    """

    def __init__(
        self,
        kept: Kept,
        name: str,
        group: str | None,
        routes: Routes,
        owned: OwnedQueues,
        *,
        start: Position,
        auto_commit_s: float,
        transport: str,
    ) -> None:
        self.group = group
        self.name = name or unique_name()
        self._kept = kept
        self._routes = routes
        self._owned = owned
        self._start = start
        self._every_s = max(auto_commit_s, kept.every_s)
        self._transport = transport
        self._lock = threading.RLock()  # of what follows; and one commit at a time
        self._places: dict[str, Replicas] = {}
        self._presences: dict[str, Presence] = {}
        self._whole: set[str] = set()  # topics of which it has all queues
        self._told: Wanted = {}  # else: these
        self._since: dict[str, Position] = {}  # by topic: start at brokers that are found later
        self._seen: set[tuple[str, str]] = set()  # topics at brokers, whose next queues are new
        self._wake = threading.Condition()
        self._stirred = False
        self._closed = False
        self._failures = 0
        self._trouble = ""  # the last commit failed of it
        self._commit_at = time.monotonic() + min(self._every_s, 3600.0)
        self._refresh_at = time.monotonic() + REFRESH_S
        self._thread = Steady("cometmq consumer", self._turn)

    # --- what is read ---

    def subscribe(self, topic: str, tags: str, sql: str) -> None:
        """All queues of the topic. Raises NotReachable, TopicNotExist, NotMapped."""
        with self._lock:
            if self._told:
                raise ArgumentIllegal("queues are assigned: a consumer either subscribes or is")
            route = self._route(topic)
            self._owned.subscribe(topic, tags, sql)
            self._whole.add(topic)
            self._meet_first({topic: route})
        self._thread.start()

    def assign(self, wanted: str | Wanted, tags: str, sql: str) -> None:
        """These, and nothing else. Raises as `Consumer.assign` does."""
        with self._lock:
            whole = {wanted} if isinstance(wanted, str) else set()
            told: Wanted = {} if isinstance(wanted, str) else wanted
            topics = whole | {topic for _, topic, _ in told}
            routes = {topic: self._route(topic) for topic in sorted(topics)}
            for key in told:
                _check_exists(key, routes[key[1]])
            go_on = {key for key in told if told[key] is None}
            self._leave(
                [
                    key
                    for key in self._owned.assignment()
                    if key not in go_on and key[1] not in whole
                ]
            )
            for topic in set(self._owned.topics) - topics:
                self._owned.unsubscribe(topic)
            self._whole, self._told = whole, told
            for topic in routes:
                self._owned.subscribe(topic, tags, sql)
            self._meet_first(routes)
        self._thread.start()

    def unsubscribe(self, topic: str) -> None:
        with self._lock:
            self._leave([key for key in self._owned.assignment() if key[1] == topic])
            self._owned.unsubscribe(topic)
            self._whole.discard(topic)
            self._told = {key: at for key, at in self._told.items() if key[1] != topic}
            self._seen = {place for place in self._seen if place[1] != topic}

    def subscribe_retries(self) -> None:
        """There are none. Raises ArgumentIllegal but for broadcasting, where none are expected."""
        if not isinstance(self._kept, KeptInFile):
            raise ArgumentIllegal(
                "run() is for members of a group, which have retries and dead letters, and for "
                "broadcasting, which drops what fails: poll what is assigned or without a group"
            )

    def _route(self, topic: str) -> TopicRoute:
        route = self._routes.topic(topic)
        if self._transport == "mapped":
            for each in broker_routes(route):
                check_mapped(each.endpoints)
        return route

    # --- brokers and their queues ---

    def _meet_first(self, routes: Mapping[str, TopicRoute]) -> None:
        """Add the brokers of each topic. With "latest", a broker that is unreachable now starts at
        the current time: producers cannot reach it either."""
        now = time.time_ns() // 1_000_000
        for topic, route in routes.items():
            self._since.pop(topic, None)
            self._meet(topic, route)
            if self._start == LATEST:
                self._since[topic] = now

    def _meet(self, topic: str, route: TopicRoute) -> None:
        """Follow brokers that have moved, take on queues that are new, leave what is gone."""
        follow(self._places, route)
        for each in broker_routes(route):
            place = self._places[each.endpoints.broker]
            self._compare_with_any(topic, place, each.info.read_queues)

    def _compare_with_any(self, topic: str, place: Replicas, count: int) -> None:
        """The master is asked, and its slaves while it does not answer."""
        presence = self._presence(place.master.broker)
        missing: CometError | None = None
        for ends in place.in_turn():
            try:
                self._compare(topic, ends, count)
            except AWAY as error:
                missing = missing or error
                place.missed(ends.broker_id)
            else:
                presence.answered()
                return
        presence.missed(str(missing))

    def _presence(self, broker: str) -> Presence:
        if broker not in self._presences:
            whose = f"group {self.group}" if self.group else "a consumer"
            self._presences[broker] = Presence(whose, broker)
        return self._presences[broker]

    def _compare(self, topic: str, ends: BrokerEndpoints, count: int) -> None:
        """Raises what the broker answers, also where there is nothing to do."""
        place = ends.broker, topic
        has = {number for *where, number in self._owned.assignment() if tuple(where) == place}
        wanted = set(range(count))
        if topic not in self._whole:
            wanted &= {number for *where, number in self._told if tuple(where) == place}
        keys = [QueueKey(topic, number) for number in sorted(wanted - has)]
        if keys:
            self._take_on(ends, keys, count)
        elif wanted:
            ranges(self._routes, ends, [QueueKey(topic, min(wanted))], ASK_S)
        self._leave([(*place, number) for number in sorted(has - wanted)])
        self._seen.add(place)

    def _take_on(self, ends: BrokerEndpoints, keys: Sequence[QueueKey], count: int) -> None:
        told = {key: self._told.get((ends.broker, key.topic, key.queue_id)) for key in keys}
        offsets = {key: offset for key, offset in told.items() if offset is not None}
        asked = [key for key in keys if key not in offsets]
        known = zip(asked, self._kept.load(ends, asked) if asked else (), strict=True)
        offsets |= {key: offset for key, offset in known if offset >= 0}
        new = [key for key in keys if key not in offsets]
        if new:
            topic = new[0].topic
            later = (ends.broker, topic) in self._seen
            if not later and topic in self._whole and self._start != EARLIEST:
                later = self._kept.knows(ends, topic, count)
            start = EARLIEST if later else self._since.get(topic, self._start)
            begun = first_offsets(self._routes, ends, new, start)
            offsets |= dict(zip(new, begun, strict=True))
            if self._start != EARLIEST and self._keeps:
                self._kept.save(ends, _as_offsets({key: offsets[key] for key in new}))
        self._owned.take_on(ends.broker, self._places[ends.broker], _as_offsets(offsets))

    def _leave(self, keys: Sequence[QueueId]) -> None:
        """Commit what is known of these, and own them no longer."""
        for broker in sorted({key[0] for key in keys}):
            mine = [QueueKey(topic, number) for name, topic, number in keys if name == broker]
            self._owned.give_up(broker, mine, wait=False)
            self._commit_quietly()
            self._owned.forget(broker, mine)

    @property
    def connected(self) -> bool:
        """Whether every broker that it reads from has answered last time."""
        presences = list(self._presences.values())
        return bool(presences) and all(each.connected for each in presences)

    def is_steady(self, broker: str) -> bool:
        """Whether that broker has been there for a while."""
        presence = self._presences.get(broker)
        return presence is not None and presence.is_steady

    def doubt(self, broker: str) -> None:
        """Schedule a check of a broker that may have lost messages. Does not block."""
        self.reader_in_trouble()

    def reader_in_trouble(self) -> None:
        """A reader does not answer: its broker may have moved. Does not block."""
        with self._wake:
            self._stirred = True
            self._wake.notify()

    # --- offsets ---

    @property
    def _keeps(self) -> bool:
        return not isinstance(self._kept, KeptByUser)

    def commit(self) -> None:
        """Commit what is acknowledged, now. Raises what the broker answers."""
        with self._lock:
            if not self._keeps:
                raise ArgumentIllegal("without a group nothing is committed: `position` says it")
            for broker, place in list(self._places.items()):
                _settle(self._owned, self._kept, self._routes, broker, place.master)
                offsets = self._owned.progress_of(broker)
                if offsets:
                    self._kept.save(place.master, offsets)
                    self._owned.committed(broker, offsets)

    def _commit_quietly(self) -> None:
        if not self._keeps:
            return
        try:
            self.commit()
        except AWAY as error:
            log.debug("group %s: progress not committed: %s", self.group, error)
            self.reader_in_trouble()  # the log is told by its presence
        except (CometError, OSError) as error:
            if str(error) != self._trouble:  # it is tried again, and told once
                log.warning("group %s: progress not committed: %s", self.group, error)
            self._trouble = str(error)
        else:
            self._trouble = ""

    def seek(self, position: Position, topic: str | None, queue_id: int | None) -> None:
        """See `Consumer.seek`."""
        with self._lock:
            queues = self._owned.find(topic, queue_id)
            if not queues and queue_id is not None:
                raise NotOwner(f"queue {queue_id} of {topic or 'any topic'} is not assigned")
            for broker in sorted({queue.broker for queue in queues}):
                mine = [queue for queue in queues if queue.broker == broker]
                keys = [QueueKey(queue.topic, queue.queue_id) for queue in mine]
                ends = self._places[broker].master
                offsets = resolve(self._routes, ends, keys, position)
                if self._keeps:
                    self._kept.save(ends, _as_offsets(dict(zip(keys, offsets, strict=True))))
                self._owned.move(mine, offsets)

    # --- the thread ---

    def _turn(self) -> bool:
        with self._wake:
            left_s = min(self._commit_at, self._refresh_at) - time.monotonic()
            if not (self._closed or self._stirred) and left_s > 0:
                self._wake.wait(left_s)
            if self._closed:
                return False
            stirred, self._stirred = self._stirred, False
        now = time.monotonic()
        if now >= self._commit_at:
            self._commit_at = now + min(self._every_s, 3600.0)
            self._commit_quietly()
        if stirred or now >= self._refresh_at:
            self._refresh()
        return True

    def _refresh(self) -> None:
        unsettled = False
        with self._lock:
            for topic in self._owned.topics:
                try:
                    route: TopicRoute | None = self._routes.find(topic, 1.0)
                except CometError as error:
                    log.debug("route of %s: %s", topic, error)
                    route = self._routes.known(topic)  # whether the brokers answer, at least
                try:
                    if route is not None:
                        self._meet(topic, route)
                except CometError as error:  # tried again the next time
                    log.warning("queues of %s: %s", topic, error)
            for broker, place in list(self._places.items()):
                try:
                    _settle(self._owned, self._kept, self._routes, broker, place.master)
                except CometError as error:
                    log.debug("broker %s: %s", broker, error)
                    unsettled = True
            away = any(not each.connected for each in self._presences.values())
        away = away or unsettled
        self._failures = self._failures + 1 if away else 0
        with self._wake:
            pause = pause_s(self._failures) if away else REFRESH_S
            self._refresh_at = time.monotonic() + pause
            if away and not self._closed:
                self._wake.wait(pause)  # what stirs it meanwhile knows nothing new

    # --- the end ---

    def close(self) -> None:
        """Commit what is acknowledged."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if not self._thread.join(CLOSE_S):
            log.error("%s does not end", self._thread.name)
        self._commit_quietly()
        self._kept.close()


def _settle(
    owned: OwnedQueues, kept: Kept, routes: Routes, broker: str, ends: BrokerEndpoints
) -> None:
    """See `Member.settle`. Raises CometError."""
    doubts = owned.doubts_of(broker)
    if not doubts:
        return
    queues = [each.queue for each in doubts]
    keys = [QueueKey(queue.topic, queue.queue_id) for queue in queues]
    offsets = kept.load(ends, keys) if kept.goes_back else [UNKNOWN] * len(keys)
    places = places_of(routes, ends, queues, offsets, kept.saved_ms)
    if places and not isinstance(kept, KeptByUser):
        kept.save(ends, [QueueOffset(each.topic, each.queue_id, at) for each, at in places])
    owned.move([each.queue for each in places], [each.queue_offset for each in places])
    owned.trust(doubts, offsets)


def _as_offsets(offsets: Mapping[QueueKey, int]) -> list[QueueOffset]:
    return [QueueOffset(key.topic, key.queue_id, at) for key, at in offsets.items()]


def _check_exists(key: QueueId, route: TopicRoute) -> None:
    broker, topic, number = key
    counts = {each.endpoints.broker: each.info.read_queues for each in broker_routes(route)}
    if not 0 <= number < counts.get(broker, 0):
        has = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ArgumentIllegal(f"broker {broker} has no queue {number} of {topic}; {has}")
