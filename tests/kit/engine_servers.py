"""Engines for tests: real servers, and faults to inject into them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from engine_child import Child
from etcd_servers import PORTS, EtcdServer, trouble
from patience import patient
from ports import free_ports

from cometmq.actors.replication.engines.engine import Engine
from cometmq.actors.replication.engines.errors import EngineUnreachable
from cometmq.actors.replication.engines.etcd import EtcdEngine
from cometmq.actors.replication.engines.gateway import encoded
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.actors.replication.engines.sqlite import SqliteEngine
from cometmq.conf.engine import NO_ACCESS

TIMEOUT_S: Final = patient(20.0)  # of a call: elections on a busy machine
READY_S: Final = patient(90.0)


class World:
    """One engine, and its servers."""

    kind = ""
    url = ""
    access = NO_ACCESS
    servers = 0
    ttl_s = 2.0  # that it grants as asked for

    def open(self, timeout_s: float = TIMEOUT_S) -> Engine:
        return open_engine(self.url, timeout_s, self.access)

    def child(self) -> Child:
        """A process that has opened it, too."""
        return Child(self.url, access=self.access)

    def open_some(self, *servers: int) -> Engine:
        """Asks these servers alone."""
        kind, _, hosts = self.url.partition("://")
        all_hosts = hosts.split(",")
        named = ",".join(all_hosts[server] for server in servers)
        return open_engine(f"{kind}://{named}", TIMEOUT_S)

    def signal(self, number: int, server: int) -> None:
        """SIGSTOP: returns when it has stopped."""
        raise NotImplementedError

    def restart(self, server: int) -> None:
        raise NotImplementedError

    def wait_ready(self) -> None:
        """Until it answers again."""
        until = time.monotonic() + READY_S
        with self.open() as engine:
            while True:
                try:
                    engine.get("ready")
                except EngineUnreachable:
                    if time.monotonic() > until:
                        raise
                else:
                    return


def remove_by_hand(engine: Engine, group: str) -> None:
    """As an operator does, past the engine's driver."""
    if isinstance(engine, EtcdEngine):
        key = encoded(engine.record_key(group).encode())
        engine._ask("/v3/kv/deleterange", {"key": key})
    else:
        assert isinstance(engine, SqliteEngine)
        with engine._records.writing() as connection:
            connection.execute("DELETE FROM records WHERE name = ?", (group,))


class SqliteWorld(World):
    kind = "sqlite"

    def __init__(self, place: Path) -> None:
        self.url = f"sqlite:{place / 'cluster'}"


class EtcdWorld(World):
    kind = "etcd"
    servers = 3

    def __init__(self, place: Path, stack: ExitStack) -> None:
        self._place = place
        self._first = free_ports(3 * PORTS)
        self._servers: list[EtcdServer] = []
        stack.callback(self._close)
        for number in range(3):
            self._servers.append(self._start(number))
        addresses = [server.address for server in self._servers]
        self.url = "etcd://" + ",".join(f"{host}:{port}" for host, port in addresses)
        self.wait_ready()

    def _start(self, number: int) -> EtcdServer:
        return EtcdServer(self._place / str(number), number, ["127.0.0.1"] * 3, self._first)

    def _close(self) -> None:
        for server in self._servers:
            server.close()

    def signal(self, number: int, server: int) -> None:
        self._servers[server].signal(number)

    def restart(self, server: int) -> None:
        self._servers[server].close()
        self._servers[server] = self._start(server)


def need_etcd() -> None:
    if why := trouble():
        pytest.skip(why)


@contextmanager
def running(kind: str, place: Path) -> Iterator[World]:
    """Skips where the engine is not installed, which the end of the run says."""
    place.mkdir(exist_ok=True)
    with ExitStack() as stack:
        if kind == "sqlite":
            yield SqliteWorld(place)
        else:
            need_etcd()
            yield EtcdWorld(place, stack)


def eventually(what: Callable[[], Any], limit_s: float = patient(60.0)) -> Any:
    """What is no event to us; the value when it is true at last. An engine that does not answer
    yet is asked again."""
    until = time.monotonic() + limit_s
    while True:
        try:
            found = what()
        except EngineUnreachable:
            found = None
        if found:
            return found
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)
