"""Questions to all brokers of a name server, or to one of them: what all of Admin stands on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self

from cometmq.client.arguments import checked
from cometmq.client.questions import ranges
from cometmq.client.routes import Answer, Routes, broker_routes
from cometmq.protocol.client_timeout import default_timeout_s
from cometmq.protocol.commands import BrokerEndpoints, BrokerRoute, Command, QueueKey, QueueReach
from cometmq.protocol.errors import ArgumentIllegal, TopicNotExist


class Brokers:
    """Threads may share it.

    Args:
        name_server: "host:port", a ZeroMQ address, or several (a list, or separated by ";").
        timeout_s: time limit of one answer in seconds. None: the value of the environment
            variable COMETMQ_CLIENT_TIMEOUT, else 3.
    """

    @checked
    def __init__(self, name_server: str | Iterable[str], *, timeout_s: float | None = None) -> None:
        self._routes = Routes(name_server)
        self._timeout_s = default_timeout_s() if timeout_s is None else timeout_s

    @checked
    def brokers(self) -> list[BrokerEndpoints]:
        """All brokers that the name server knows, and where their processes listen."""
        return self._routes.brokers(self._timeout_s)

    def close(self) -> None:
        """Close all connections. May be called twice."""
        self._routes.close()

    def __enter__(self) -> Self:
        self._routes.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- asking ---

    def _masters(self, broker: str | None = None) -> list[BrokerEndpoints]:
        masters = self._routes.masters(self._timeout_s)
        found = [each for each in masters if broker in (None, each.broker)]
        if not found:
            names = ", ".join(each.broker for each in masters)
            raise ArgumentIllegal(f"no broker {broker!r}: there are {names}")
        return found

    def _serving(self, topic: str, broker: str | None = None) -> list[BrokerRoute]:
        """The brokers that have a topic, one entry each. Raises TopicNotExist."""
        routes = broker_routes(self._routes.find(topic, self._timeout_s))
        found = [each for each in routes if broker in (None, each.endpoints.broker)]
        if not found and broker is not None:
            raise TopicNotExist(f"topic {topic} is not on broker {broker}")
        return found

    def _ranges(self, endpoints: BrokerEndpoints, keys: Sequence[QueueKey]) -> list[QueueReach]:
        return ranges(self._routes, endpoints, keys, self._timeout_s)

    def _ask(self, endpoint: str, command: Command, kind: type[Answer]) -> Answer:
        return self._routes.ask(endpoint, command, kind, self._timeout_s)


def milliseconds(time: datetime | int) -> int:
    return int(time.timestamp() * 1000) if isinstance(time, datetime) else time
