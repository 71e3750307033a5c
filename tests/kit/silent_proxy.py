"""A proxy between a client and a broker that can drop all data without closing connections."""

from __future__ import annotations

import contextlib
import socket
import threading

from patience import patient


class SilentProxy:
    """Proxy that forwards connections to an address. No tests here.

    Args:
        target: tcp://host:port
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Condition()  # guards the next two
        self._silent: set[int] = set()  # connections whose bytes are dropped
        self._open: set[tuple[int, socket.socket]] = set()  # the ends that are open
        threading.Thread(target=self._accept, daemon=True).start()

    def go_silent(self) -> int:
        """Drop all data on the current connections, in both directions, and leave them open. New
        connections are forwarded. Return the number of silent ones."""
        with self._lock:
            self._silent.update(number for number, _ in self._open)
            return len(self._silent)

    def wait_for_ends(self) -> None:
        """Wait until both ends of all silent connections are closed."""
        with self._lock:
            ended = self._lock.wait_for(lambda: not self._left(), patient(90))
            assert ended, f"{self._left()} ends of dead connections are still open"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for _, end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            ended = self._lock.wait_for(lambda: not self._open, patient(30))
        assert ended

    def _left(self) -> int:
        return sum(number in self._silent for number, _ in self._open)

    def _accept(self) -> None:
        number = 0
        with self._listener, contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._target)
                number += 1
                with self._lock:
                    self._open.update(((number, here), (number, there)))
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._carry, args=(number, *pair), daemon=True).start()

    def _carry(self, number: int, source: socket.socket, target: socket.socket) -> None:
        """Forward from one end to the other until the source is closed."""
        with contextlib.suppress(OSError):
            while piece := source.recv(65_536):
                if number not in self._silent:
                    target.sendall(piece)
        if number not in self._silent:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open.discard((number, source))
            self._lock.notify_all()
        source.close()
