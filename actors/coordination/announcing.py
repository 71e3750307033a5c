"""Propagation before announcement: what other processes must know before clients are told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from cometmq.actors.coordination.news_line import NewsLine
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.held import HeldRequest, TimedRequests
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.tables.topics import TopicBook
from cometmq.protocol.commands import (
    BrokerEndpoints,
    Command,
    Done,
    RegisterBroker,
    TopicList,
    TopicsChanged,
    UnregisterBroker,
)
from cometmq.protocol.errors import (
    CometError,
    NotConfirmed,
    ServiceNotAvailable,
    ShuttingDown,
)

log = logging.getLogger(__name__)

REGISTER_INTERVAL_S: Final = 30.0  # RocketMQ registerNameServerPeriod
LINE_TIMEOUT_SHARE: Final = 0.8  # of the time for confirming: a line's trouble is known by then
UNREGISTER_TIMEOUT_S: Final = 0.5
WAITING_MAX: Final = 65_536


class _Waiting(HeldRequest[None]):
    """An answer that waits until the other processes know some topics."""

    __slots__ = ("answer", "error", "topics", "version")

    def __init__(
        self,
        request: Request,
        deadline: float,
        topics: Sequence[str],
        version: int,
        answer: Callable[[], Command],
        error: type[CometError],
    ) -> None:
        super().__init__(None, request, deadline)
        self.version = version
        self.topics = topics
        self.answer = answer
        self.error = error  # of one whose time is up


class Announcing:
    """Tells the commitlog process and the name servers of the topics, and where the broker listens.

    First the commitlog process: a client is led only to topics that it takes messages for.

    Args:
        confirm_timeout_s: how long a topic may be unknown to them before the client hears of it.
        epoch: that this broker is the master of, in a group that elects it; 0: no such.
    """

    def __init__(
        self,
        actor: ServiceActor,
        topics: TopicBook,
        *,
        commitlog_endpoint: str,
        name_server_endpoints: Sequence[str],
        confirm_timeout_s: float,
        epoch: int = 0,
    ) -> None:
        self._epoch = epoch
        self.endpoints: BrokerEndpoints | None = None
        self._actor = actor
        self._topics = topics
        self._confirm_timeout_s = confirm_timeout_s
        self._registered: BrokerEndpoints | None = None  # as a name server has confirmed them
        # EndpointsChanged that wait for that; after a while not even for a name server.
        self._moved: TimedRequests[None, HeldRequest[None]] = TimedRequests(
            actor, "changes of endpoints", WAITING_MAX, lambda _held: Done(), WAITING_MAX
        )
        self._waiting: TimedRequests[None, _Waiting] = TimedRequests(
            actor, "changes of topics", WAITING_MAX, self._too_late, WAITING_MAX
        )
        self._ended = False
        self._announced = topics.first_version  # what the commitlog process has confirmed
        self._commitlog = self._line(
            "the commitlog process",
            commitlog_endpoint,
            page=topics.page,
            command=TopicsChanged,
            heard=self._on_commitlog_heard,
            without="new topics are not announced",
        )
        self._name_servers = [
            self._line(
                f"the name server {endpoint}",
                endpoint,
                page=self._page_for_name_server,
                command=self._registration,
                heard=self._on_name_server_heard,
                without="clients that ask it do not find this broker"
                + (" (is namesrvAddr right?)" if endpoint.startswith("tcp:") else ""),
            )
            for endpoint in name_server_endpoints
        ]

    def _line(
        self,
        name: str,
        endpoint: str,
        *,
        page: Callable[[int, int], TopicList],
        command: Callable[[TopicList], Command | None],
        heard: Callable[[Command | None], None],
        without: str,
    ) -> NewsLine:
        return NewsLine(
            self._actor,
            name,
            endpoint,
            run=self._topics.run,
            version=self._topics.version,
            timeout_s=self._confirm_timeout_s * LINE_TIMEOUT_SHARE,
            page=page,
            command=command,
            heard=heard,
            without=without,
        )

    # --- what the coordinator wants to be known ---

    def start(self) -> None:
        self.topics_changed()
        self._actor.every(REGISTER_INTERVAL_S, self._register)

    def topics_changed(self) -> None:
        self._commitlog.send()

    def endpoints_changed(self, endpoints: BrokerEndpoints, request: Request) -> None:
        """Answered when clients can find the broker; after a while also without a name server."""
        self.endpoints = endpoints
        self._registered = None
        deadline = time.monotonic() + self._confirm_timeout_s
        self._moved.add(HeldRequest(None, request, deadline))
        self._register()
        self._answer_moved()
        self._answer_waiting()

    def answer_when_known(
        self,
        request: Request,
        topics: Sequence[str],
        answer: Callable[[], Command],
        *,
        is_change: bool,
    ) -> None:
        """Answer as soon as every process knows the topics as they are, or say which does not."""
        kind = NotConfirmed if is_change else ServiceNotAvailable
        deadline = time.monotonic() + self._confirm_timeout_s
        version = self._version_of(topics)
        waiting = _Waiting(request, deadline, topics, version, answer, kind)
        if self._missing(waiting):
            self._actor.carry_out(request, self._waiting.add, waiting)
        else:
            self._actor.carry_out(request, answer)

    def end(self) -> None:
        """Nothing more is told, but that the broker is stopping."""
        self._ended = True
        self._waiting.fail_all(ShuttingDown("the broker is stopping"))
        self._unregister()

    def close(self) -> None:
        for line in (self._commitlog, *self._name_servers):
            line.close()

    def statistics(self) -> meters.Figures:
        return {
            meters.WAITING_FOR_CONFIRMATION: len(self._waiting),
            meters.COMMITLOG_TROUBLE: self._commitlog.trouble,
            meters.NAME_SERVER_TROUBLE: "; ".join(
                line.trouble for line in self._name_servers if line.trouble
            ),
        }

    # --- the commitlog process ---

    def _on_commitlog_heard(self, _command: Command | None) -> None:
        if self._commitlog.confirmed > self._announced:
            # Only now may a client be led to these topics.
            self._announced = self._commitlog.confirmed
            self._register()
        self._answer_waiting()

    # --- the name servers ---

    def _register(self) -> None:
        for line in self._name_servers:
            line.send()

    def _page_for_name_server(self, run: int, since: int) -> TopicList:
        return self._topics.page(run, since, self._announced)

    def _registration(self, page: TopicList) -> Command | None:
        if self.endpoints is None or self._ended:
            return None
        return RegisterBroker(self.endpoints, page, self._epoch)

    def _on_name_server_heard(self, command: Command | None) -> None:
        if isinstance(command, RegisterBroker):
            self._registered = command.endpoints
            self._answer_moved()
        self._answer_waiting()

    def _answer_moved(self) -> None:
        """Answer who said where the processes listen, once a name server has confirmed it."""
        if self._registered == self.endpoints or not self._name_servers:
            for held in self._moved.release_key(None):
                held.request.done()

    def _unregister(self) -> None:
        """The one place that waits for another process: at the end, and not for long."""
        if self.endpoints is None:
            return
        me = self.endpoints
        command = UnregisterBroker(me.cluster, me.broker, me.broker_id, self._epoch)
        asked = [(line, line.ask_last(command)) for line in self._name_servers]
        deadline = time.monotonic() + UNREGISTER_TIMEOUT_S
        for line, pending in asked:
            if pending and not line.wait(pending, max(0.0, deadline - time.monotonic())):
                log.warning("%s did not hear that the broker is stopping", line.name)

    # --- who waits for both ---

    def _answer_waiting(self) -> None:
        for waiting in self._waiting:
            if not self._missing(waiting):
                self._actor.carry_out(self._waiting.release(waiting), waiting.answer)

    def _too_late(self, waiting: _Waiting) -> NoReturn:
        topics = waiting.topics
        shown = topics[0] if len(topics) == 1 else f"{topics[0]} and {len(topics) - 1} more"
        raise waiting.error(f"topic {shown}: {self._missing(waiting)}")

    def _version_of(self, topics: Sequence[str]) -> int:
        return max(map(self._topics.version_of, topics), default=0)

    def _missing(self, waiting: _Waiting) -> str:
        """What keeps its topics from being announced; empty: nothing.

        A name server that is in trouble is not waited for as long as another has confirmed.
        """
        if self.endpoints is None:
            return "it is not known yet where this broker's processes listen"
        # One of them may have changed again; told is the last change only.
        version = max(waiting.version, self._version_of(waiting.topics))
        if self._commitlog.confirmed < version:
            return self._commitlog.complaint()
        behind = [line for line in self._name_servers if line.confirmed < version]
        if version <= self._topics.first_version or not behind:
            return ""
        if len(behind) < len(self._name_servers) and all(line.trouble for line in behind):
            return ""
        return behind[0].complaint()
