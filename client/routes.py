"""Routing: where topics live. Asks the name server, and keeps one channel per address."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

from cometmq.client.arguments import check
from cometmq.protocol.commands import (
    BrokerEndpoints,
    BrokerList,
    BrokerRoute,
    Command,
    EnsureTopic,
    GetLine,
    GetRoute,
    ListBrokers,
    TopicRoute,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    ClientClosed,
    CometError,
    NotConfirmed,
    NotReachable,
    TopicNotExist,
)
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.protocol.wire.patched import check_not_patched
from cometmq.shm.os.processes import boot_id

log = logging.getLogger(__name__)

REFRESH_S: Final = 30.0  # RocketMQ pollNameServerInterval
ASK_S: Final = 3.0
WAIT_STEP_S: Final = 1.0
WAIT_PAUSE_S: Final = 0.1
DEFAULT_PORT: Final = 9876
MASTER: Final = 0  # broker_id
TRANSPORTS: Final = ("auto", "local", "zmq")
_HOST: Final = re.compile(r"[^\s/:@]+|\[[0-9a-fA-F:.%\w]+\]|[0-9a-fA-F]*:[0-9a-fA-F:.]+")

Answer = TypeVar("Answer", bound=Command)


def parse_addresses(name_server: str | Iterable[str]) -> tuple[str, ...]:
    """ZeroMQ addresses from "host", "host:port", "tcp://host:port", or several: ";" or a list.

    Raises ArgumentIllegal for anything else.
    """
    check("name_server", name_server, str | Iterable[str])
    if isinstance(name_server, Mapping):
        raise ArgumentIllegal(f"name_server is text, or several, not {type(name_server).__name__}")
    texts = name_server.split(";") if isinstance(name_server, str) else list(name_server)
    for text in texts:
        check("name_server", text, str)
    addresses = tuple(_address(text.strip()) for text in texts if text.strip())
    if not addresses:
        raise ArgumentIllegal('no name server is given: "host:9876", or several')
    return addresses


def _address(text: str) -> str:
    scheme, separator, rest = text.rpartition("://")
    if scheme == "ipc" and rest:
        return text
    host, colon, port = rest.rpartition(":")
    if not (colon and (":" not in host or host.endswith("]"))):
        host, port = rest, str(DEFAULT_PORT)
    usable = port.isascii() and port.isdigit() and 0 < int(port) < 65_536
    if (separator and scheme != "tcp") or not usable or not _HOST.fullmatch(host):
        raise ArgumentIllegal(
            f"{text[:200]!r} is no address of a name server, such as 127.0.0.1:{DEFAULT_PORT} or "
            f"tcp://broker.example:{DEFAULT_PORT}"
        )
    return f"tcp://{host}:{port}"


class _Entry:
    __slots__ = ("asked_at", "route")

    def __init__(self, route: TopicRoute) -> None:
        self.route = route
        self.asked_at = time.monotonic()


class Routes:
    """The routes that one client uses, and its channels to brokers. Threads may share it.

    Args:
        name_server: "host:port", a ZeroMQ address, or several (a list, or separated by ";").
            They are asked in turn, beginning with the last that answered.
        transport: of `line`: "auto", "local" or "zmq"; see Producer.
    """

    def __init__(self, name_server: str | Iterable[str], *, transport: str = "zmq") -> None:
        check_not_patched("a client of CometMQ")
        if transport not in TRANSPORTS:
            raise ArgumentIllegal(f"transport={transport!r}: {', '.join(map(repr, TRANSPORTS))}")
        self.addresses = parse_addresses(name_server)
        self._transport = transport
        self._lock = threading.Lock()  # guards the fields below
        self._channels: dict[str, Channel] = {}
        self._entries: dict[str, _Entry] = {}
        self._endpoints: dict[tuple[str, str, int], BrokerEndpoints] = {}  # shared by the routes
        self._preferred = 0
        self._closed = False

    # --- topics ---

    def known(self, topic: str) -> TopicRoute | None:
        """The route, if it has been asked for before; costs no time.

        A route older than 30 s is asked for again in the background.
        """
        entry = self._entries.get(topic)
        if entry is None:
            return None
        if time.monotonic() - entry.asked_at > REFRESH_S:
            self._refresh_later(topic, entry)
        return entry.route

    def topic(self, topic: str, timeout_s: float = ASK_S) -> TopicRoute:
        """The topic's route. An unknown topic is created, on all brokers, if they allow that.

        Raises NotReachable (no name server, or no broker), TopicNotExist (may not be created).
        """
        return self.known(topic) or self.refresh(topic, timeout_s)

    def refresh(self, topic: str, timeout_s: float = ASK_S) -> TopicRoute:
        """Ask again; raises what `topic` raises."""
        deadline = time.monotonic() + timeout_s
        try:
            route = self._ask_name_server(GetRoute(topic), TopicRoute, timeout_s)
            if not route.brokers:
                raise TopicNotExist(f"no broker serves topic {topic}")
        except TopicNotExist:
            route = self._create(topic, deadline)
        return self._keep(topic, route)

    def ensure(self, topic: str, timeout_s: float = ASK_S) -> TopicRoute:
        """Have every broker make sure that it knows the topic, and learn the route from them."""
        return self._keep(topic, self._create(topic, time.monotonic() + timeout_s))

    def find(self, topic: str, timeout_s: float = ASK_S) -> TopicRoute:
        """The route of a topic that exists; it is not created. Raises TopicNotExist."""
        return self._keep(topic, self._ask_name_server(GetRoute(topic), TopicRoute, timeout_s))

    def brokers(self, timeout_s: float = ASK_S) -> list[BrokerEndpoints]:
        """All brokers that the name server knows, slaves too."""
        return self._ask_name_server(ListBrokers(), BrokerList, timeout_s).brokers

    def masters(self, timeout_s: float = ASK_S) -> list[BrokerEndpoints]:
        """Every broker's master. Raises NotReachable if there is none."""
        return self._masters_of(self.brokers(timeout_s))

    def _await_masters(self, deadline: float) -> list[BrokerEndpoints]:
        """As `masters`, but where brokers are there and none is a master, they may be about to
        elect one, which the name server tells nobody."""
        while True:
            brokers = self.brokers(max(0.1, deadline - time.monotonic()))
            is_electing = brokers and all(each.broker_id != MASTER for each in brokers)
            if not is_electing or time.monotonic() + WAIT_PAUSE_S >= deadline:
                return self._masters_of(brokers)
            time.sleep(WAIT_PAUSE_S)

    def _masters_of(self, brokers: list[BrokerEndpoints]) -> list[BrokerEndpoints]:
        masters = [each for each in brokers if each.broker_id == MASTER]
        if not masters:
            what = "no broker that is a master" if brokers else "no broker"
            raise NotReachable(f"the name server at {self._names()} knows {what}")
        return masters

    def wait_for_broker(self, timeout_s: float) -> None:
        """Sleep until the name server answers and knows a broker. Raises NotReachable."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                self.masters(min(WAIT_STEP_S, max(0.1, left_s)))
            except (NotConfirmed, NotReachable) as error:
                if time.monotonic() >= deadline:
                    raise NotReachable(f"{error}; waited {timeout_s:g} s for a broker") from None
                time.sleep(WAIT_PAUSE_S)
            else:
                return

    def _create(self, topic: str, deadline: float) -> TopicRoute:
        masters = self._await_masters(deadline)
        found: list[BrokerRoute] = []
        refusal: CometError | None = None
        for master in masters:
            try:
                answer = self.ask(
                    master.coordinator,
                    EnsureTopic(topic),
                    TopicRoute,
                    max(0.1, deadline - time.monotonic()),
                    name=f"the coordinator of {master.broker}",
                )
            except CometError as error:
                log.warning("topic %s on broker %s: %s", topic, master.broker, error)
                refusal = error
            else:
                found += [route for route in answer.brokers if not _has(found, route)]
        if not found:
            raise refusal or TopicNotExist(f"no broker serves topic {topic}")
        found.sort(key=lambda route: (route.endpoints.broker, route.endpoints.broker_id))
        return TopicRoute(topic, found)

    def _keep(self, topic: str, route: TopicRoute) -> TopicRoute:
        with self._lock:
            entry = self._entries.get(topic)
            if entry is not None and entry.route == route:
                entry.asked_at = time.monotonic()
                return entry.route  # the same object: nobody has to look at it again
            route = TopicRoute(topic, [self._shared(each) for each in route.brokers])
            self._entries[topic] = _Entry(route)
        return route

    def _shared(self, route: BrokerRoute) -> BrokerRoute:
        """With the addresses that the routes of other topics have: there may be many of those."""
        given = route.endpoints
        key = given.cluster, given.broker, given.broker_id
        endpoints = self._endpoints.get(key)
        if endpoints != given:
            endpoints = self._endpoints[key] = given
        return BrokerRoute(endpoints, route.info)

    def _refresh_later(self, topic: str, entry: _Entry) -> None:
        def refreshed(pending: Pending) -> None:
            try:
                answer, _ = pending.result()
            except CometError as error:
                log.debug("route of %s not refreshed: %s", topic, error)
            else:
                if isinstance(answer, TopicRoute) and answer.brokers:
                    self._keep(topic, answer)

        entry.asked_at = time.monotonic()
        try:
            channel = self.channel(self.addresses[self._preferred], "the name server")
            channel.request(GetRoute(topic), on_done=refreshed, timeout_s=ASK_S)
        except CometError as error:
            log.debug("route of %s not refreshed: %s", topic, error)

    # --- asking ---

    def ask(
        self,
        endpoint: str,
        command: Command,
        kind: type[Answer],
        timeout_s: float = ASK_S,
        *,
        name: str = "",
    ) -> Answer:
        """Ask the process at an address. Raises the answered error, NotConfirmed, NotReachable."""
        answer, _ = self.channel(endpoint, name).ask(command, timeout_s=timeout_s)
        if not isinstance(answer, kind):
            raise CometError(f"{endpoint} answered {type(answer).__name__}, not {kind.__name__}")
        return answer

    def _ask_name_server(self, command: Command, kind: type[Answer], timeout_s: float) -> Answer:
        count = len(self.addresses)
        first = self._preferred
        for step in range(count):
            index = (first + step) % count
            try:
                answer = self.ask(
                    self.addresses[index], command, kind, timeout_s / count, name="the name server"
                )
            except ClientClosed:
                raise
            except (NotConfirmed, NotReachable) as error:
                log.debug("name server %s: %s", self.addresses[index], error)
            else:
                self._preferred = index
                return answer
        raise NotReachable(f"no name server answers at {self._names()} within {timeout_s:g} s")

    def _names(self) -> str:
        return ", ".join(self.addresses)

    # --- channels ---

    def commitlog(self, endpoint: str, name: str) -> Channel:
        """The channel to a commitlog actor, which may have a line for us.

        Raises NotLocal if there must be one and is not, NotConfirmed if nobody says.
        """
        channel = self._channels.get(endpoint)
        if channel is not None:
            return channel
        request = None if self._transport == "zmq" else GetLine(boot_id(), is_stream=True)
        channel = self.channel(endpoint, name, request)
        if self._transport == "local":
            try:
                channel.open_line(ASK_S)
            except CometError:
                self.retire(endpoint)
                raise
        return channel

    def channel(
        self, endpoint: str, name: str = "", line_request: Command | None = None
    ) -> Channel:
        """The channel to that address, opened when first asked for."""
        channel = self._channels.get(endpoint)
        if channel is None:
            with self._lock:
                if self._closed:
                    raise ClientClosed("the client is closed: open another one")
                channel = self._channels.get(endpoint)
                if channel is None:
                    text = f"{name} at {endpoint}" if name else endpoint
                    channel = self._channels[endpoint] = Channel(
                        endpoint, text, line_request=line_request
                    )
        return channel

    def retire(self, endpoint: str) -> None:
        """Close the channel to an address that nobody listens at any more.

        What waits for an answer there fails with NotConfirmed and is not sent later.
        """
        with self._lock:
            channel = self._channels.pop(endpoint, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Close all channels. May be called twice."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close(by_client=True)

    def check_open(self) -> None:
        """Raise ClientClosed if the client is closed."""
        if self._closed:
            raise ClientClosed("the client is closed: open another one")


def _has(found: Sequence[BrokerRoute], route: BrokerRoute) -> bool:
    key = (route.endpoints.broker, route.endpoints.broker_id)
    return any((each.endpoints.broker, each.endpoints.broker_id) == key for each in found)


def broker_routes(route: TopicRoute) -> list[BrokerRoute]:
    """One entry a broker, by name: its master, or a slave where no master is left."""
    best: dict[str, BrokerRoute] = {}
    for each in route.brokers:
        name = each.endpoints.broker
        if name not in best or each.endpoints.broker_id < best[name].endpoints.broker_id:
            best[name] = each
    return [best[name] for name in sorted(best)]


def replicas_of(route: TopicRoute) -> dict[str, list[BrokerEndpoints]]:
    """Of each broker, by name: its master, where it has one, and its slaves, by their ids."""
    found: dict[str, list[BrokerEndpoints]] = {}
    for each in sorted(route.brokers, key=lambda each: each.endpoints.broker_id):
        found.setdefault(each.endpoints.broker, []).append(each.endpoints)
    return {broker: found[broker] for broker in sorted(found)}
