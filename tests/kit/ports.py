"""Ports for brokers whose address must be known before they start."""

from __future__ import annotations

import contextlib
import random
import socket

_reserved: list[contextlib.ExitStack] = []


def free_ports(count: int = 1) -> int:
    """The first of so many ports in a row that nobody has, and no other test will be given.

    They lie below those that the system hands out: a client that tries one of these again and again
    may in the end be connected to itself. Each is reserved by a name that this process keeps.
    """
    while True:
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as names, contextlib.suppress(OSError):
            for port in range(first, first + count):
                name = names.enter_context(socket.socket(socket.AF_UNIX))
                name.bind(f"\0cometmq-test-port-{port}")
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            _reserved.append(names.pop_all())
            return first
