"""The name server: which brokers there are, and which of them serve a topic."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import msgspec
import pykka
import zmq

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.held import NEVER, HeldRequest, HeldRequests
from cometmq.actors.runtime.listeners.connections import ConnectionLimits
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol import names
from cometmq.protocol.commands import (
    BrokerEndpoints,
    BrokerList,
    BrokerRoute,
    Command,
    Done,
    GetRoute,
    ListBrokers,
    Ping,
    Pong,
    RegisterBroker,
    TopicInfo,
    TopicRoute,
    TopicsKnown,
    UnregisterBroker,
)
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    NameIllegal,
    Refused,
    ShuttingDown,
    SystemBusy,
    TopicNotExist,
)
from cometmq.protocol.names import LONG_TOPIC_MAX
from cometmq.protocol.perm import WRITE
from cometmq.protocol.topics import TopicMirror, check_told
from cometmq.protocol.wire.channel import Channel, Pending

log = logging.getLogger(__name__)

BROKER_SILENCE_S: Final = 120.0  # RocketMQ: a broker that registers every 30 s has missed three
SCAN_INTERVAL_S: Final = 5.0  # RocketMQ's own
PING_TIMEOUT_S: Final = 1.0
PINGS_MAX: Final = 16  # each has a thread for as long as it lasts
CLAIMS_MAX: Final = 1_024  # that wait for an answer to these
BROKERS_MAX: Final = 10_000
ENDPOINTS_BYTES_MAX: Final = 768 * 1024  # of all brokers, in an answer
ROUTE_BYTES: Final = LONG_TOPIC_MAX + 48  # of a broker in a route, beside its addresses
BROKERS_NAMED_MAX: Final = 5  # in the text of an error
# The last epoch that a master may name. Each election of a group has the next one: one a second
# needs 35,000 years.
EPOCH_MAX: Final = 1 << 40
# How far below the registered epoch a master is one of before. A group that elects another master
# every 10 s comes so far in three hours; the epoch of a master that is further below is not of the
# same count.
STALE_MAX: Final = 1_000

_LEGAL_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,127}\Z")
_LEGAL_ENDPOINT: Final = re.compile(r"(tcp|ipc)://[!-~]{1,250}\Z")

BrokerKey = tuple[str, str, int]  # cluster, broker, id


class Registration(msgspec.Struct):
    endpoints: BrokerEndpoints
    topics: TopicMirror
    heard_at: float  # time.monotonic()
    epoch: int = 0  # of the master of a group


class NameServerActor(ServiceActor):
    """Knows every broker that has registered lately, and the topics of each.

    Writes, alone: the route table, which lives in memory only; after a restart it is empty until
        the brokers register again, each within 30 s.
    Wakes on: registrations, questions, the scan for silent brokers, answers to its pings.
    Dies: never of what a command holds; nothing is lost but the table.

    A name belongs to whoever registered it. Another broker that claims it is refused while the
    coordinator of the one that has it answers a Ping within a second; if it does not, the claim is
    granted. So a broker that was killed and comes back at other addresses has its name at once.
    Of two masters of a group nobody is asked: the name is the later epoch's. A replica that comes
    under another id than before, having become master or ceased to be, has left the one before.
    An epoch that is far above the claimed one proves nothing, since anybody can send one: then the
    broker that has it is asked whether it lives. So one registration hides no master for longer
    than its sender answers.

    Args:
        broker_silence_s: a broker that has not registered for so long is dropped.
    """

    role: ClassVar[str] = "namesrv"

    def __init__(
        self,
        *,
        broker_silence_s: float = BROKER_SILENCE_S,
        ping_timeout_s: float = PING_TIMEOUT_S,
        bind: Sequence[tuple[str, bool]] = (),
        limits: ConnectionLimits | None = None,
    ) -> None:
        super().__init__(bind=bind, limits=limits)
        self._silence_s = broker_silence_s
        self._ping_timeout_s = ping_timeout_s
        self._brokers: dict[BrokerKey, Registration] = {}
        # Somebody else claims a registered name: does the broker that has it still live?
        self._doubts: dict[BrokerKey, Channel] = {}
        self._claims = HeldRequests[BrokerKey, HeldRequest[BrokerKey]]("claims", CLAIMS_MAX)
        self.every(min(SCAN_INTERVAL_S, broker_silence_s / 4), self._drop_silent)

    @classmethod
    def of_family(cls, family: Family, bind: Sequence[tuple[str, bool]]) -> pykka.ActorRef[Any]:
        return cls.start(bind=bind, limits=ConnectionLimits.of(family.settings))

    def statistics(self) -> meters.Figures:
        return {meters.BROKERS: len(self._brokers), meters.TOPICS: len(self._topic_names())}

    def settle(self) -> None:
        self._claims.fail_all(ShuttingDown("the name server is stopping"))

    def on_stop(self) -> None:
        super().on_stop()
        for channel in self._doubts.values():
            channel.close()

    # --- brokers ---

    def on_register_broker(self, command: RegisterBroker, request: Request) -> Command | None:
        _check(command)
        key = _key(command.endpoints)
        known = self._brokers.get(key)
        _check_epoch(known, command)
        if known is None and len(self._brokers) >= BROKERS_MAX:
            raise SystemBusy(f"{BROKERS_MAX} brokers are registered, and no more are taken")
        if (
            known is None
            or known.endpoints.coordinator == command.endpoints.coordinator
            or known.epoch < command.epoch
        ):
            taken = self._register(command)
            if key in self._doubts and known is not None and known.epoch < command.epoch:
                self._decide(key, self._doubts[key], True)  # who has the name now lives
            return taken
        self._ask_whether_alive(key, known, request)
        return None

    def on_unregister_broker(self, command: UnregisterBroker, _request: Request) -> Command:
        key = command.cluster, command.broker, command.broker_id
        gone = self._brokers.get(key)
        if gone is not None and gone.epoch <= command.epoch:
            del self._brokers[key]
            log.info("%s has gone", _describe(gone.endpoints))
        return Done()

    def on_list_brokers(self, _command: ListBrokers, _request: Request) -> Command:
        return BrokerList([self._brokers[key].endpoints for key in sorted(self._brokers)])

    def on_get_route(self, command: GetRoute, _request: Request) -> Command:
        names.check_topic(command.topic)
        brokers = [
            BrokerRoute(known.endpoints, _as_served(info, known.endpoints.broker_id))
            for known in self._brokers.values()
            if (info := known.topics.topics.get(command.topic)) is not None
        ]
        if not brokers:
            raise TopicNotExist(f"topic {command.topic}: {self._what_is_known()}")
        brokers.sort(key=lambda route: (route.endpoints.broker, _key(route.endpoints)))
        return TopicRoute(command.topic, brokers)

    def _register(self, command: RegisterBroker) -> TopicsKnown:
        """Take the broker's page; how far its topics are known now."""
        endpoints, key = command.endpoints, _key(command.endpoints)
        known = self._brokers.get(key)
        if known is None or known.endpoints != endpoints:
            self._check_room(key, endpoints)
            self._drop_former(key, endpoints)
            log.info("%s is registered%s", _describe(endpoints), _of_epoch(command.epoch))
        topics = TopicMirror() if known is None else known.topics
        self._brokers[key] = Registration(endpoints, topics, time.monotonic(), command.epoch)
        topics.take(command.topics)
        return topics.known

    def _drop_former(self, key: BrokerKey, endpoints: BrokerEndpoints) -> None:
        """What the same process was registered as before, or has asked to be: a run of a replica
        that waited for that may have ended, and the next one is a master."""
        for held in self._claims:
            if held.key == key or held.key[:2] != key[:2]:
                continue
            if _registration_of(held.request).endpoints.coordinator == endpoints.coordinator:
                error = Refused(f"{_describe(endpoints)} has registered since")
                self._claims.release(held).fail(error)
        for other, known in list(self._brokers.items()):
            same = known.endpoints.coordinator == endpoints.coordinator
            if same and other != key and other[:2] == key[:2]:
                del self._brokers[other]
                log.info("%s has another id now", _describe(known.endpoints))

    def _check_room(self, key: BrokerKey, endpoints: BrokerEndpoints) -> None:
        """Never take what could not be told: a route to all brokers fits into an answer."""
        others = [known.endpoints for other, known in self._brokers.items() if other != key]
        size = sum(map(_bytes_told, (*others, endpoints)))
        if size > ENDPOINTS_BYTES_MAX:
            raise SystemBusy(
                f"{_describe(endpoints)} is not taken: with it the addresses of all {len(others)} "
                f"brokers would be {size} bytes, at most {ENDPOINTS_BYTES_MAX}"
            )

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for key, known in list(self._brokers.items()):
            silent_s = now - known.heard_at
            if silent_s >= self._silence_s:
                del self._brokers[key]
                text = "%s is dropped: silent for %.0f s, at most %g"
                log.warning(text, _describe(known.endpoints), silent_s, self._silence_s)

    def _topic_names(self) -> set[str]:
        return set().union(*(known.topics.topics for known in self._brokers.values()))

    def _what_is_known(self) -> str:
        if not self._brokers:
            return "no broker has registered here yet"
        brokers = sorted({known.endpoints.broker for known in self._brokers.values()})
        shown = ", ".join(brokers[:BROKERS_NAMED_MAX])
        if len(brokers) > BROKERS_NAMED_MAX:
            shown += f" and {len(brokers) - BROKERS_NAMED_MAX} more"
        return (
            f"none of the {len(brokers)} brokers known here has it ({shown}; "
            f"{sum(len(known.topics.topics) for known in self._brokers.values())} topics in all)"
        )

    # --- two brokers of one name ---

    def _ask_whether_alive(self, key: BrokerKey, known: Registration, claim: Request) -> None:
        held = HeldRequest(key, claim, NEVER)  # the channel ends it
        self._claims.check_room(claim)
        if key in self._doubts:
            self._claims.add(held)
            return
        if len(self._doubts) >= PINGS_MAX:
            raise SystemBusy(f"{PINGS_MAX} claims to names in use are being looked into")
        try:
            channel = Channel(known.endpoints.coordinator)
        except zmq.ZMQError as error:
            log.warning("%s cannot be asked: %s", _describe(known.endpoints), error)
            claim.reply(self._register(_registration_of(claim)))
            return
        self._claims.add(held)
        self._doubts[key] = channel
        on_pong = self._on_pong(key, channel)
        channel.request(Ping(), on_done=on_pong, timeout_s=self._ping_timeout_s)

    def _on_pong(self, key: BrokerKey, channel: Channel) -> Callable[[Pending], None]:
        def on_done(pending: Pending) -> None:  # in the channel's thread
            # Whatever else answers there now is not the coordinator that registered.
            alive = isinstance(pending.answer, Pong) and pending.answer.role == "coordinator"
            self.call_soon(lambda: self._decide(key, channel, alive))

        return on_done

    def _decide(self, key: BrokerKey, channel: Channel, alive: bool) -> None:
        if self._doubts.get(key) is not channel:
            return  # decided already
        del self._doubts[key]
        channel.close()
        for held in self._claims.release_key(key):
            claim = held.request
            try:
                known = self._settle_claim(key, _registration_of(claim), alive)
            except CometError as error:
                claim.fail(error)
            else:
                claim.reply(known)
                alive = True  # whoever has the name now has just shown it

    def _settle_claim(self, key: BrokerKey, command: RegisterBroker, alive: bool) -> TopicsKnown:
        known = self._brokers.get(key)
        _check_epoch(known, command)
        if known is not None and known.endpoints.coordinator != command.endpoints.coordinator:
            if alive and command.epoch <= known.epoch:
                raise Refused(
                    f"{_describe(known.endpoints)} is alive; another of the same name and id at "
                    f"{command.endpoints.coordinator} is not taken"
                )
            log.warning("%s does not answer and is replaced", _describe(known.endpoints))
        return self._register(command)


def _registration_of(claim: Request) -> RegisterBroker:
    assert isinstance(claim.command, RegisterBroker)
    return claim.command


def _key(endpoints: BrokerEndpoints) -> BrokerKey:
    return endpoints.cluster, endpoints.broker, endpoints.broker_id


def _check_epoch(known: Registration | None, command: RegisterBroker) -> None:
    """Raise Refused if it comes too late: of an earlier epoch of the same count."""
    if known is not None and 0 < known.epoch - command.epoch <= STALE_MAX:
        raise Refused(
            f"{_describe(known.endpoints)} is the master of epoch {known.epoch}; one of epoch "
            f"{command.epoch} at {command.endpoints.coordinator} is not taken"
        )


def _of_epoch(epoch: int) -> str:
    return f" as the master of epoch {epoch}" if epoch else ""


def _describe(endpoints: BrokerEndpoints) -> str:
    return (
        f"broker {endpoints.broker} (id {endpoints.broker_id}) of cluster {endpoints.cluster} "
        f"at {endpoints.coordinator}"
    )


def _as_served(info: TopicInfo, broker_id: int) -> TopicInfo:
    """A slave (id other than 0) is read only. RocketMQ RouteInfoManager."""
    if broker_id == 0 or not info.perm & WRITE:
        return info
    return TopicInfo(info.topic, info.read_queues, info.write_queues, info.perm & ~WRITE)


def _check(command: RegisterBroker) -> None:
    """Raise BadRequest or NameIllegal unless the registration may be shown to clients."""
    endpoints = command.endpoints
    for kind, name in (("cluster", endpoints.cluster), ("broker", endpoints.broker)):
        if not _LEGAL_NAME.match(name):
            raise NameIllegal(f"{kind} name {name[:140]!r}: 1 to 127 of a-zA-Z0-9_.-")
    if not 0 <= endpoints.broker_id < 1 << 31:
        raise BadRequest(f"broker id {endpoints.broker_id}: 0 to 2_147_483_647")
    if not 0 <= command.epoch <= EPOCH_MAX:
        raise BadRequest(
            f"epoch {command.epoch} of id {endpoints.broker_id}: 0 to {EPOCH_MAX} are allowed"
        )
    if command.epoch and endpoints.broker_id:
        raise BadRequest(f"epoch {command.epoch} of id {endpoints.broker_id}: masters have one")
    for endpoint in (endpoints.commitlog, endpoints.coordinator, *endpoints.readers):
        if not _LEGAL_ENDPOINT.match(endpoint):
            raise BadRequest(f"endpoint {endpoint[:140]!r}: tcp://host:port or ipc://path")
    for info in command.topics.topics:
        check_told(info)


def _bytes_told(endpoints: BrokerEndpoints) -> int:
    """What the broker takes in an answer at most, with a topic's name and numbers."""
    texts = (endpoints.cluster, endpoints.broker, endpoints.commitlog, endpoints.coordinator)
    return sum(len(text) + 3 for text in (*texts, *endpoints.readers)) + ROUTE_BYTES
