"""The port that slaves come to, and who of those that come is let in."""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
from collections.abc import Callable, Sequence
from typing import Final

from cometmq.actors.runtime.event_log import EventLog
from cometmq.conf import BrokerSettings
from cometmq.conf.replication import Network
from cometmq.protocol.errors import ConfigError
from cometmq.protocol.wire.liveness import watch_plain

BACKLOG: Final = 128
ACCEPTS_AT_ONCE: Final = 64
PAUSE_S: Final = 1.0  # without descriptors
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def open_port(settings: BrokerSettings) -> socket.socket:
    """Listen there, without blocking. Raises ConfigError with the key that has to change."""
    host, port = settings.bind_address.strip("[]"), settings.ha_port
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"haListenPort = {port}: slaves cannot come to {host}:{port}: {error.strerror}"
        ) from None
    return listener


def is_allowed(peer: str, here: str, allowed: Sequence[Network]) -> bool:
    """Whether a connection from one address to another one of ours is let in.

    Args:
        allowed: the networks it may come from; none: only from this machine.
    """
    address = _plain(peer)
    if allowed:
        return any(address in network for network in allowed)
    return address.is_loopback or address == _plain(here)


def _plain(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 address that came by IPv6 is the IPv4 address."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


class SlaveListener:
    """Takes connections, and sends strangers away.

    Args:
        epoll: that waits for them.
        let_in: takes a connection, its address and its host. OSError: it has ended already.

    Raises ConfigError where the port cannot be had.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        epoll: select.epoll,
        said: EventLog,
        let_in: Callable[[socket.socket, str, str], None],
    ) -> None:
        self.sent_away = 0
        self._allowed = settings.allowed_networks
        self._allowed_text = settings.ha_allowed_peers or "this machine alone"
        self._epoll = epoll
        self._said = said
        self._let_in = let_in
        self._listener = open_port(settings)
        epoll.register(self._listener, select.EPOLLIN)

    @property
    def descriptor(self) -> int:
        return self._listener.fileno()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def accept(self, after: Callable[[float, Callable[[], None]], object]) -> None:
        """Those that have come. Without descriptors they wait in the system's queue for a while.

        Args:
            after: sets a timer.
        """
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    continue  # that one has gone already
                self._said.warn("descriptors", "no slave can be let in: %s", error.strerror)
                self._epoll.modify(self._listener, 0)
                after(PAUSE_S, self._listen_again)
                return
            try:
                self._admit(connection, f"{peer[0]}:{peer[1]}", peer[0])
            except OSError:
                connection.close()

    def _listen_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._epoll.modify(self._listener, select.EPOLLIN)

    def _admit(self, connection: socket.socket, address: str, host: str) -> None:
        if is_allowed(host, connection.getsockname()[0], self._allowed):
            watch_plain(connection)
            self._let_in(connection, address, host)
            return
        self.sent_away += 1
        self._said.warn(
            ("peer", host),
            "%s is no slave of ours and was sent away: haAllowedPeers has %s",
            address, self._allowed_text,
        )  # fmt: skip
        connection.close()

    def close(self) -> None:
        self._epoll.unregister(self._listener)
        self._listener.close()
