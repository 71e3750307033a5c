"""The name server: which brokers there are, and which of them serve a topic."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import zmq

from cometmq.actors.service import Request, ServiceActor, Timer
from cometmq.protocol import names
from cometmq.protocol.channel import Channel, Pending
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
    UnregisterBroker,
)
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    NameIllegal,
    Refused,
    SystemBusy,
    TopicNotExist,
)

log = logging.getLogger(__name__)

BROKER_SILENCE_S: Final = 120.0  # RocketMQ: a broker that registers every 30 s has missed three
SCAN_INTERVAL_S: Final = 5.0  # RocketMQ's own
PING_TIMEOUT_S: Final = 1.0
PINGS_MAX: Final = 16  # each has a thread for as long as it lasts
BROKERS_MAX: Final = 10_000
BROKERS_NAMED_MAX: Final = 5  # in the text of an error
WRITE: Final = 2
PERM_MAX: Final = 15  # 8 priority, 4 read, 2 write, 1 inherit

_LEGAL_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,127}\Z")
_LEGAL_ENDPOINT: Final = re.compile(r"(tcp|ipc)://[!-~]{1,250}\Z")

BrokerKey = tuple[str, str, int]  # cluster, broker, id


@dataclass
class Registration:
    endpoints: BrokerEndpoints
    topics: dict[str, TopicInfo]
    heard_at: float  # time.monotonic()


@dataclass
class Doubt:
    """Somebody else claims a registered name: does the one who has it still live?"""

    channel: Channel
    claims: list[Request] = field(default_factory=list)
    timer: Timer | None = None


class NameServerActor(ServiceActor):
    """Knows every broker that has registered lately, and the topics of each.

    Writes, alone: the route table, which lives in memory only; after a restart it is empty until
        the brokers register again, each within 30 s.
    Wakes on: registrations, questions, the scan for silent brokers, answers to its pings.
    Dies: never of what a command holds; nothing is lost but the table.

    A name belongs to whoever registered it. Another broker that claims it is refused while the
    coordinator of the one that has it answers a Ping within a second; if it does not, the claim is
    granted. So a broker that was killed and comes back at other addresses has its name at once.

    Args:
        broker_silence_s: a broker that has not registered for so long is dropped.
    """

    role: ClassVar[str] = "namesrv"
    answered_later: ClassVar[tuple[type[Command], ...]] = (RegisterBroker,)

    def __init__(
        self,
        *,
        broker_silence_s: float = BROKER_SILENCE_S,
        ping_timeout_s: float = PING_TIMEOUT_S,
        bind: Sequence[tuple[str, bool]] = (),
    ) -> None:
        super().__init__(bind=bind)
        self._silence_s = broker_silence_s
        self._ping_timeout_s = ping_timeout_s
        self._brokers: dict[BrokerKey, Registration] = {}
        self._doubts: dict[BrokerKey, Doubt] = {}
        self.every(min(SCAN_INTERVAL_S, broker_silence_s / 4), self._drop_silent)

    def statistics(self) -> dict[str, int | float | str]:
        return {"brokers": len(self._brokers), "topics": len(self._topic_names())}

    def on_stop(self) -> None:
        super().on_stop()
        for doubt in self._doubts.values():
            doubt.channel.close()

    # --- brokers ---

    def on_register_broker(self, command: RegisterBroker, request: Request) -> Command | None:
        _check(command)
        key = _key(command.endpoints)
        known = self._brokers.get(key)
        if known is None and len(self._brokers) >= BROKERS_MAX:
            raise SystemBusy(f"{BROKERS_MAX} brokers are registered, and no more are taken")
        if known is None or known.endpoints.coordinator == command.endpoints.coordinator:
            self._register(command)
            return Done()
        self._ask_whether_alive(key, known, request)
        return None

    def on_unregister_broker(self, command: UnregisterBroker, _request: Request) -> Command:
        gone = self._brokers.pop((command.cluster, command.broker, command.broker_id), None)
        if gone is not None:
            log.info("%s has gone", _describe(gone.endpoints))
        return Done()

    def on_list_brokers(self, _command: ListBrokers, _request: Request) -> Command:
        return BrokerList([self._brokers[key].endpoints for key in sorted(self._brokers)])

    def on_get_route(self, command: GetRoute, _request: Request) -> Command:
        names.check_topic(command.topic)
        brokers = [
            BrokerRoute(known.endpoints, _as_served(info, known.endpoints.broker_id))
            for known in self._brokers.values()
            if (info := known.topics.get(command.topic)) is not None
        ]
        if not brokers:
            raise TopicNotExist(f"topic {command.topic}: {self._what_is_known()}")
        brokers.sort(key=lambda route: (route.endpoints.broker, _key(route.endpoints)))
        return TopicRoute(command.topic, brokers)

    def _register(self, command: RegisterBroker) -> None:
        endpoints, key = command.endpoints, _key(command.endpoints)
        known = self._brokers.get(key)
        if known is None or known.endpoints != endpoints:
            log.info("%s serves %d topics", _describe(endpoints), len(command.topics))
        topics = {info.topic: info for info in command.topics}
        self._brokers[key] = Registration(endpoints, topics, time.monotonic())

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for key, known in list(self._brokers.items()):
            silent_s = now - known.heard_at
            if silent_s >= self._silence_s:
                del self._brokers[key]
                text = "%s is dropped: silent for %.0f s, at most %g"
                log.warning(text, _describe(known.endpoints), silent_s, self._silence_s)

    def _topic_names(self) -> set[str]:
        return {topic for known in self._brokers.values() for topic in known.topics}

    def _what_is_known(self) -> str:
        if not self._brokers:
            return "no broker has registered here yet"
        brokers = sorted({known.endpoints.broker for known in self._brokers.values()})
        shown = ", ".join(brokers[:BROKERS_NAMED_MAX])
        if len(brokers) > BROKERS_NAMED_MAX:
            shown += f" and {len(brokers) - BROKERS_NAMED_MAX} more"
        return (
            f"none of the {len(brokers)} brokers known here has it ({shown}; "
            f"{len(self._topic_names())} topics in all)"
        )

    # --- two brokers of one name ---

    def _ask_whether_alive(self, key: BrokerKey, known: Registration, claim: Request) -> None:
        doubt = self._doubts.get(key)
        if doubt is not None:
            doubt.claims.append(claim)
            return
        if len(self._doubts) >= PINGS_MAX:
            raise SystemBusy(f"{PINGS_MAX} claims to names in use are being looked into")
        try:
            channel = Channel(known.endpoints.coordinator)
        except zmq.ZMQError as error:
            log.warning("%s cannot be asked: %s", _describe(known.endpoints), error)
            self._register(_registration_of(claim))
            claim.reply(Done())
            return
        doubt = self._doubts[key] = Doubt(channel, [claim])
        doubt.timer = self.after(self._ping_timeout_s, lambda: self._decide(key, doubt, False))
        channel.request(Ping(), on_done=self._on_pong(key, doubt))

    def _on_pong(self, key: BrokerKey, doubt: Doubt) -> Callable[[Pending], None]:
        def on_done(pending: Pending) -> None:  # in the channel's thread
            # Whatever else answers there now is not the coordinator that registered.
            alive = isinstance(pending.answer, Pong) and pending.answer.role == "coordinator"
            self.call_soon(lambda: self._decide(key, doubt, alive))

        return on_done

    def _decide(self, key: BrokerKey, doubt: Doubt, alive: bool) -> None:
        if self._doubts.get(key) is not doubt:
            return  # decided already
        del self._doubts[key]
        if doubt.timer is not None:
            doubt.timer.cancel()
        doubt.channel.close()
        for claim in doubt.claims:
            try:
                self._settle_claim(key, _registration_of(claim), alive)
            except CometError as error:
                claim.fail(error)
            else:
                claim.reply(Done())
                alive = True  # whoever has the name now has just shown it

    def _settle_claim(self, key: BrokerKey, command: RegisterBroker, alive: bool) -> None:
        known = self._brokers.get(key)
        if known is not None and known.endpoints.coordinator != command.endpoints.coordinator:
            if alive:
                raise Refused(
                    f"{_describe(known.endpoints)} is alive; another of the same name and id at "
                    f"{command.endpoints.coordinator} is not taken"
                )
            log.warning("%s does not answer and is replaced", _describe(known.endpoints))
        self._register(command)


def _registration_of(claim: Request) -> RegisterBroker:
    assert isinstance(claim.command, RegisterBroker)
    return claim.command


def _key(endpoints: BrokerEndpoints) -> BrokerKey:
    return endpoints.cluster, endpoints.broker, endpoints.broker_id


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
    for endpoint in (endpoints.commitlog, endpoints.coordinator, *endpoints.readers):
        if not _LEGAL_ENDPOINT.match(endpoint):
            raise BadRequest(f"endpoint {endpoint[:140]!r}: tcp://host:port or ipc://path")
    for info in command.topics:
        names.check_topic(info.topic)
        if not (0 <= info.read_queues < 1 << 31 and 0 <= info.write_queues < 1 << 31):
            raise BadRequest(f"topic {info.topic}: {info.read_queues}/{info.write_queues} queues")
        if not 0 <= info.perm <= PERM_MAX:
            raise BadRequest(f"topic {info.topic}: perm {info.perm}, 0 to {PERM_MAX}")
