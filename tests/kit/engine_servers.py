"""The three engines for tests: real servers, and what can be done to them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from engine_child import Child
from ports import free_ports
from still import wait_stopped

from cometmq.actors.replication.engines.engine import Engine
from cometmq.actors.replication.engines.errors import EngineMissing, EngineUnreachable
from cometmq.actors.replication.engines.etcd import EtcdEngine
from cometmq.actors.replication.engines.gateway import encoded
from cometmq.actors.replication.engines.managed import ManagedServer, Peer, find_jars
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.actors.replication.engines.sqlite import SqliteEngine
from cometmq.actors.replication.engines.zookeeper import ZooKeeperEngine
from cometmq.conf.engine import NO_ACCESS

TIMEOUT_S: Final = 20.0  # of a call: elections on a busy machine
READY_S: Final = 90.0


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
        self._send(number, server)
        if number == signal.SIGSTOP:
            wait_stopped(self._pid(server))

    def _send(self, number: int, server: int) -> None:
        raise NotImplementedError

    def _pid(self, server: int) -> int:
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
    if isinstance(engine, ZooKeeperEngine):
        path = engine.record_path(group)
        engine._line.call(time.monotonic() + TIMEOUT_S, lambda c: c.delete_async(path))
    elif isinstance(engine, EtcdEngine):
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


class ZooKeeperWorld(World):
    kind = "zookeeper"
    servers = 3

    def __init__(self, place: Path, stack: ExitStack) -> None:
        first = free_ports(9)
        self._place = place
        self.peers = [
            Peer("127.0.0.1", first + at, first + at + 1, first + at + 2) for at in (0, 3, 6)
        ]
        self.url = "zookeeper://" + ",".join(
            f"{peer.host}:{peer.client_port}" for peer in self.peers
        )
        self._servers: list[ManagedServer] = []
        stack.callback(self._close)
        for number in (1, 2, 3):
            self._servers.append(ManagedServer(place / str(number), number, self.peers))
        for server in self._servers:
            server.wait_until_ready(READY_S)

    def _close(self) -> None:
        for server in self._servers:
            server.kill()
        for server in self._servers:
            server.close()

    def _send(self, number: int, server: int) -> None:
        self._servers[server].kill(number)

    def _pid(self, server: int) -> int:
        return self._servers[server].pid

    def restart(self, server: int) -> None:
        self._servers[server].close()
        folder = self._place / str(server + 1)
        self._servers[server] = ManagedServer(folder, server + 1, self.peers)

    def wait_ready(self) -> None:
        for server in self._servers:
            server.wait_until_ready(READY_S)
        super().wait_ready()


class EtcdWorld(World):
    kind = "etcd"
    servers = 3

    def __init__(self, place: Path, stack: ExitStack) -> None:
        self._place = place
        self._first = free_ports(6)
        self.url = "etcd://" + ",".join(f"127.0.0.1:{self._first + n}" for n in range(3))
        self._processes: list[subprocess.Popen[bytes]] = []
        stack.callback(self._close)
        for number in range(3):
            self._processes.append(self._start(number))
        self.wait_ready()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        client = f"http://127.0.0.1:{self._first + number}"
        peers = [f"http://127.0.0.1:{self._first + 3 + n}" for n in range(3)]
        with (self._place / f"{number}.log").open("ab") as output:
            return subprocess.Popen(
                [
                    "setpriv", "--pdeathsig", "KILL", "etcd", "--name", f"n{number}",
                    "--data-dir", str(self._place / str(number)),
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peers[number],
                    "--initial-advertise-peer-urls", peers[number],
                    "--initial-cluster", ",".join(f"n{n}={url}" for n, url in enumerate(peers)),
                    "--heartbeat-interval", "100", "--election-timeout", "1000",
                ],
                stdout=output, stderr=output,
            )  # fmt: skip

    def _close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _send(self, number: int, server: int) -> None:
        self._processes[server].send_signal(number)

    def _pid(self, server: int) -> int:
        return self._processes[server].pid

    def restart(self, server: int) -> None:
        self._processes[server].kill()
        self._processes[server].wait()
        self._processes[server] = self._start(server)


def need_etcd() -> None:
    if shutil.which("etcd") is None:
        pytest.skip("the engine etcd: etcd-server is not installed")


def need_zookeeper() -> None:
    try:
        find_jars()
    except EngineMissing as error:
        pytest.skip(str(error))
    for program in ("java", "setpriv"):
        if shutil.which(program) is None:
            pytest.skip(f"the engine ZooKeeper: {program} is not installed")


@contextmanager
def running(kind: str, place: Path) -> Iterator[World]:
    """Skips where the engine is not installed, which the end of the run says."""
    place.mkdir(exist_ok=True)
    with ExitStack() as stack:
        if kind == "sqlite":
            yield SqliteWorld(place)
        elif kind == "zookeeper":
            need_zookeeper()
            yield ZooKeeperWorld(place, stack)
        else:
            need_etcd()
            yield EtcdWorld(place, stack)


def eventually(what: Callable[[], Any], limit_s: float = 60.0) -> Any:
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
