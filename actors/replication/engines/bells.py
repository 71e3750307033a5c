"""How processes of one machine tell each other that a group has changed.

Each process that watches has a Unix datagram socket in one folder; whoever has changed something
sends the group's name to all of them. A datagram that nobody has taken waits in the socket, and one
that finds no room may go: there are others, and the watching process looks at what there is then.
The socket of a process that was killed is removed by the next one that rings.

This is no futex since the watching process sleeps in poll, beside other descriptors, and no inotify
since that tells of writes before they are committed, and of each renewal of a session.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DATAGRAM_BYTES_MAX: Final = 256  # a group's name has 120


def _address(folder: int, name: str) -> str:
    """Of a socket in an open folder: addresses have 108 bytes, and paths are longer."""
    return f"/proc/self/fd/{folder}/{name}"


class Bells:
    """The ringing side. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def ring(self, group: str) -> None:
        """Never fails: who does not hear it looks by itself before long."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                self._send(name, group.encode())

    def _send(self, name: str, content: bytes) -> None:
        try:
            self._socket.sendto(content, _address(self.folder, name))
        except ConnectionRefusedError:  # its process is gone
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.folder)
        except OSError:
            pass

    def close(self) -> None:
        self._socket.close()
        os.close(self.folder)


class Ear:
    """The hearing side: a `watching.Source`. Raises OSError."""

    def __init__(self, bells: Bells) -> None:
        self._folder = os.dup(bells.folder)
        # Bound under a name that nobody rings at twice: a socket without a process is removed.
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(_address(self._folder, self._name))

    def fileno(self) -> int:
        return self._socket.fileno()

    def heard(self) -> Iterator[str]:
        with contextlib.suppress(BlockingIOError):
            while True:
                yield self._socket.recv(DATAGRAM_BYTES_MAX).decode(errors="replace")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._folder)
        self._socket.close()
        os.close(self._folder)
