"""IPv6 in ZeroMQ's addresses, which ZeroMQ has to be told of."""

from __future__ import annotations

import ipaddress
from typing import Any

import zmq


def is_ipv6(endpoint: str) -> bool | None:
    """Whether an address such as tcp://[::1]:9876 is one of IPv6; None: a name, which may be one of
    either kind."""
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
    """Have a socket bind, or connect, to an address of IPv6.

    With the option set ZeroMQ looks up a name's addresses of IPv6 alone, if there are any; so a
    name is tried by IPv4 first, and by both in turn.

    Args:
        attempt: how often it was tried in vain.
    """
    kind = is_ipv6(endpoint)
    made.set(zmq.IPV6, attempt % 2 == 1 if kind is None else kind)
