"""IPv6 addresses for ZeroMQ sockets, which need an option for them."""

from __future__ import annotations

import ipaddress
from typing import Any

import zmq


def is_ipv6(endpoint: str) -> bool | None:
    """Return whether an address such as tcp://[::1]:9876 is an IPv6 one; None for a host name,
    which may have addresses of either kind."""
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "*":
        return False
    try:
        return ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        return None


def allow_ipv6(made: zmq.Socket[Any], endpoint: str, attempt: int = 0) -> None:
    """Let a socket bind, or connect, to an IPv6 address.

    With the option set, ZeroMQ uses only the IPv6 addresses of a name if it has any. So a name is
    tried by IPv4 first, then by both in turn.

    Args:
        attempt: number of failed attempts.
    """
    kind = is_ipv6(endpoint)
    made.set(zmq.IPV6, attempt % 2 == 1 if kind is None else kind)
