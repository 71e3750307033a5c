"""Addresses: where the actors of one broker listen, for the family and for clients."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from cometmq.actors.launch.binding import HeldPorts
from cometmq.actors.runtime.roles import role_of
from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import BrokerEndpoints
from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.state.identity import original_of, read_identity

log = logging.getLogger(__name__)


def address_of(token: str, role: str) -> str:
    """Where an actor takes the family's commands: in the abstract namespace, so that nothing is
    left behind however it ends."""
    return f"ipc://@cometmq-{token}-{role}"


def bracketed(host: str) -> str:
    """Return a host as written before a port: an IPv6 address in brackets."""
    host = host.strip("[]")
    return f"[{host}]" if ":" in host else host


class Addresses:
    """Of one run of a broker.

    Args:
        token: random, so that no other family has these addresses.
        name: what clients call the broker.
        ports: of its processes, in all of its runs.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        roles: Sequence[str],
        token: str,
        name: str,
        ports: HeldPorts,
    ) -> None:
        self.family = {role: address_of(token, role) for role in (*roles, "broker")}
        self.binds = {role: _bind(settings, ports.of(role, settings)) for role in roles}
        self._settings = settings
        self._roles = roles
        self._name = name

    @property
    def name_servers(self) -> list[str]:
        """Where the broker registers: the ones it was told, else its own."""
        if self._settings.name_servers:
            return [f"tcp://{server}" for server in self._settings.name_servers]
        return [self.family["namesrv"]]

    @property
    def public_name_server(self) -> str:
        if self._settings.name_servers:
            return ";".join(f"tcp://{server}" for server in self._settings.name_servers)
        return self._public("namesrv")

    @property
    def endpoints(self) -> BrokerEndpoints:
        readers = [self._public(role) for role in self._roles if role_of(role).name == "reader"]
        return BrokerEndpoints(
            cluster=self._settings.broker_cluster_name,
            broker=self._name,
            broker_id=self._settings.broker_id,
            commitlog=self._public("commitlog"),
            readers=readers,
            coordinator=self._public("coordinator"),
        )

    def _public(self, role: str) -> str:
        """The address as clients reach it: the port that was bound, at the advertised host."""
        port = (self.binds[role] or "").rpartition(":")[2]
        return f"tcp://{bracketed(self._settings.advertised_address)}:{port}"


def _bind(settings: BrokerSettings, port: int | None) -> str | None:
    return None if port is None else f"tcp://{bracketed(settings.bind_address)}:{port}"


def name_of(store: Path) -> str:
    """Return the name of a broker without `brokerName`: the one with which its store was created.

    Clients store their progress under it, so it stays the same when the store is moved or the
    machine is renamed. A copy of a store has a different name while the original exists: two
    brokers with one name would get each other's clients.
    """
    try:
        identity = read_identity(store)
    except StoreDamaged:  # reported when the broker starts
        return default_name(store)
    original = original_of(store, identity)
    if original is None:
        return identity.created_as or default_name(store)
    place = hashlib.sha256(str(store.resolve()).encode()).hexdigest()[:6]
    name = f"{default_name(store)[:90]}-{place}"
    log.warning(
        "%s is a copy of the store in %s, which still exists: its broker is called %s, not %s",
        store, original, name, identity.created_as,
    )  # fmt: skip
    return name


def default_name(store: Path) -> str:
    """Return the broker name of a new store: the names of the machine and the folder."""
    host = "".join(c if c.isalnum() or c in "_-" else "-" for c in os.uname().nodename)
    folder = "".join(c if c.isalnum() or c in "_-" else "-" for c in store.resolve().name)
    return f"{host}-{folder}"[:100]
