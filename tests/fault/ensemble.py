"""Servers of a group's engine: one etcd on the bridge, or one on each replica's machine.

    with Ensemble(folder, ("n0", "n1", "n2"), network) as servers:
        leader = servers.leader()
        servers.kill(leader)         # kill -9
        servers.start(leader)        # with its data on disk; returns when it serves

A server on a replica's machine lives in that replica's namespace, so a cut between two machines
is one between their servers as well. The host reaches all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from etcd_servers import PORTS, EtcdServer
from fault.network import HOST, Network
from patience import patient
from ports import free_ports

READY_S: Final = patient(240.0)  # a busy machine is slow


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
        self._first_port = free_ports(PORTS * len(names))
        self._hosts = [network.address(name) if network else "127.0.0.1" for name in names]
        self._servers: dict[str, EtcdServer] = {}
        ports = range(self._first_port, 2**16, PORTS)
        addresses = zip(self._hosts, ports, strict=False)
        self.url = "etcd://" + ",".join(f"{host}:{port}" for host, port in addresses)

    def start(self, *names: str) -> None:
        """Start the servers that do not run, and wait until all serve."""
        for name in names:
            number = self.names.index(name)
            inside = self._network is not None and name != HOST
            space = str(self._network.path(name)) if self._network and inside else ""
            self._servers[name] = EtcdServer(
                self._folder / name, number, self._hosts, self._first_port, space
            )
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until all running servers have a leader."""
        deadline = time.monotonic() + READY_S
        for name, server in self._servers.items():
            while not server.status():
                assert time.monotonic() < deadline, f"the etcd of {name} has no leader"
                time.sleep(0.05)

    def kill(self, *names: str) -> None:
        """kill -9."""
        for name in names:
            self._servers.pop(name).close()

    def signal(self, number: int, *names: str) -> None:
        for name in names:
            self._servers[name].signal(number)

    def leader(self) -> str:
        """Return the name of the leader's machine, once there is one."""
        deadline = time.monotonic() + READY_S
        while True:
            for name, server in self._servers.items():
                if server.leads():
                    return name
            assert time.monotonic() < deadline, "the servers elect no leader"
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
