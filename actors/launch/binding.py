"""Binding: where a broker's processes listen, and which setting mends what stands against it."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from cometmq.actors.replication.slaves.port import open_port
from cometmq.actors.runtime.roles import port_of, roles_of
from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import ConfigError

PORT_MAX: Final = 65_535
_CODES: Final = (
    errno.EADDRINUSE, errno.EACCES, errno.EPERM, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT,
    errno.ENODEV,  # ZeroMQ's for a name that is no address
)  # fmt: skip


def check_ports(settings: BrokerSettings) -> None:
    """Raises ConfigError for an address or a port that the broker could not listen on."""
    for role in roles_of(settings):
        port = port_of(role, settings.port) or 0
        if port > PORT_MAX:
            raise ConfigError(
                f"port = {settings.port}: {role} would listen on {port}, {PORT_MAX} is the last; "
                "choose a lower one"
            )
        with _bound(role, port, settings) as tried:
            try:
                tried.listen()
            except OSError as error:
                raise _why(role, port, error.errno or 0, settings) from None
    if settings.ha_port is not None:
        open_port(settings).close()


class HeldPorts:
    """The port of each process of a broker that clients reach, held as long as the broker runs.

    A socket is bound to it, and does not listen. While a process is started again nobody listens
    there, and the system would give the port to whoever connects to something else then, who might
    keep it for hours.
    """

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}

    def of(self, role: str, settings: BrokerSettings) -> int | None:
        """None: clients do not reach it. Raises ConfigError."""
        port = port_of(role, settings.port)
        if port is None:
            return None
        if role not in self._sockets:
            self._sockets[role] = _bound(role, port, settings)
        return int(self._sockets[role].getsockname()[1])

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()


def _bound(role: str, port: int, settings: BrokerSettings) -> socket.socket:
    """A socket that is bound to it. Raises ConfigError."""
    address = settings.bind_address
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
        bound.bind((address.strip("[]"), port))
    except OSError as error:
        bound.close()
        code = errno.ENODEV if isinstance(error, socket.gaierror) else error.errno or 0
        raise _why(role, port, code, settings) from None
    return bound


def bind_error(
    role: str, address: str | None, text: str, settings: BrokerSettings
) -> ConfigError | None:
    """The setting that has to change; None where a child has ended for something else.

    It listens on what was free a moment ago, see `check_ports`.

    Args:
        address: that the child was to listen on, `tcp://HOST:PORT`; None: it has none.
        text: what the child said.
    """
    code = next((code for code in _CODES if os.strerror(code) in text), None)
    if code is None or address is None or address not in text:
        return None
    port = address.rpartition(":")[2]
    return _why(role, int(port) if port.isdigit() else 0, code, settings)


def _why(role: str, port: int, code: int, settings: BrokerSettings) -> ConfigError:
    if code == errno.EADDRINUSE:
        key, why = "port", f"{port_is_taken(port)}, or 0 for any that are free"
    elif code in (errno.EACCES, errno.EPERM):
        key = "port"
        why = f"this user may not listen on port {port}; choose one above 1023"
    else:
        key = "bindAddress"
        why = (
            f"this machine has no such address ({os.strerror(code)}); 127.0.0.1 is for this "
            "machine alone, 0.0.0.0 (with brokerIP1) for all that it has"
        )
    value = settings.port if key == "port" else settings.bind_address
    return ConfigError(f"{key} = {value}: {role}: {why}")


def port_is_taken(port: int) -> str:
    return f"port {port} is taken by {port_holder(port)}; choose another with --port"


def port_holder(port: int) -> str:
    """The process that listens on a port of this machine, as far as it may be seen."""
    try:
        import psutil  # here, as it is 10 ms of a start, which does not need it
    except ImportError:
        return "another process"
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                name = " ".join(psutil.Process(connection.pid).cmdline())[:100]
                return f"process {connection.pid} ({name})"
    except psutil.Error:
        pass
    return "another process"
