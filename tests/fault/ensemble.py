"""The servers of a group's engine: one ZooKeeper on the bridge, or one on each replica's machine.

    with Ensemble(folder, ("n0", "n1", "n2"), network) as servers:
        leader = servers.leader()
        servers.kill(leader)         # kill -9
        servers.start(leader)        # with what it has on its disk, until it serves

A server on a replica's machine lives in that replica's namespace, so a cut between two machines
is one between their servers as well. The host reaches all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from fault.network import HOST, Network
from ports import free_ports

from cometmq.actors.replication.engines.errors import EngineMissing
from cometmq.actors.replication.engines.managed import ManagedServer, Peer, check_installed

HEAP_MIB: Final = 96
READY_S: Final = 240.0  # a machine that others use is slow
PORTS: Final = 3


class Ensemble:
    """
    Args:
        folder: of their data and logs; made.
        names: whose machines they are on: HOST, or three replicas.
        network: None: all are on 127.0.0.1.
    """

    def __init__(self, folder: Path, names: Sequence[str], network: Network | None) -> None:
        self.names = tuple(names)
        self._folder, self._network = folder, network
        first = free_ports(PORTS * len(names))
        self._peers = [
            Peer(network.address(name) if network else "127.0.0.1", port, port + 1, port + 2)
            for name, port in zip(names, range(first, 2**16, PORTS), strict=False)
        ]
        self._servers: dict[str, ManagedServer] = {}
        hosts = ",".join(f"{peer.host}:{peer.client_port}" for peer in self._peers)
        self.url = f"zookeeper://{hosts}"

    def start(self, *names: str) -> None:
        """Those that do not run, until all serve."""
        for name in names:
            self._servers[name] = self._started(name)
        self.wait_ready()

    def _started(self, name: str) -> ManagedServer:
        number = self.names.index(name) + 1

        def start() -> ManagedServer:
            folder = self._folder / name
            return ManagedServer(folder, number, self._peers, heap_mib=HEAP_MIB)

        if self._network is None or name == HOST:
            return start()
        return self._network.within(name, start)

    def wait_ready(self) -> None:
        """Until all that run serve. Raises EngineError."""
        for server in self._servers.values():
            server.wait_until_ready(READY_S)

    def kill(self, *names: str) -> None:
        """kill -9."""
        for name in names:
            self._servers[name].kill()
        for name in names:
            self._servers.pop(name).close()

    def signal(self, number: int, *names: str) -> None:
        for name in names:
            self._servers[name].kill(number)

    def leader(self) -> str:
        """Whose machine the leader is on, once there is one."""
        deadline = time.monotonic() + READY_S
        while True:
            for name, server in self._servers.items():
                if server.mode() == "leader":
                    return name
            assert time.monotonic() < deadline, "the ensemble does not come to have a leader"
            time.sleep(0.05)

    def __enter__(self) -> Self:
        try:
            self.start(*self.names)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        self.kill(*self._servers)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


def trouble() -> str:
    """Why no such server runs here; empty if it can."""
    try:
        check_installed()
    except EngineMissing as error:
        return str(error)
    return ""
