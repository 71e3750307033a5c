"""Descriptors: whether this process has left what a connection takes.

It is asked before a socket is made: ZeroMQ ends the process where it finds none for its own
threads, and where it finds none for a connection it tries again, as if nobody was there.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

from cometmq.protocol.errors import TooFewDescriptors

#: Of a channel: three sockets of ZeroMQ's, the connection, the line, and what wakes its thread.
CHANNEL: Final = 6
#: Of ZeroMQ's threads, with the first socket of a process.
THREADS: Final = 6
NONE_LEFT: Final = (errno.EMFILE, errno.ENFILE)

_has_threads = 0  # the process whose ZeroMQ has them: a fork has none


def need_for_channel(name: str) -> None:
    """Raise TooFewDescriptors unless a channel can be opened now."""
    global _has_threads
    is_first = _has_threads != os.getpid()
    need(CHANNEL + THREADS * is_first, f"a connection to {name}")
    _has_threads = os.getpid()


def need(count: int, what: str) -> None:
    """Raise TooFewDescriptors unless this process can open so many more, which `what` takes."""
    taken: list[int] = []
    try:
        while len(taken) < count:
            taken.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        if error.errno not in NONE_LEFT:
            raise
        raise TooFewDescriptors(
            f"{what} takes {count} descriptors, and {len(taken)} are left of the {allowed()} that "
            "this process may have (ulimit -n)"
        ) from None
    finally:
        for descriptor in taken:
            os.close(descriptor)


def need_in_all(count: int, what: str) -> None:
    """Raise TooFewDescriptors unless this process may have so many, those that are open counted."""
    if allowed() < count:
        raise TooFewDescriptors(
            f"{what} takes {count} descriptors, and this process may have {allowed()} (ulimit -n)"
        )


def allowed() -> int:
    """How many this process may have open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 31 if most == resource.RLIM_INFINITY else most
