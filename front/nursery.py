"""The service's end of the nursery, from which its brokers for tests are forked.

See actors/launch/nursery.py, which is the other one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Final, Protocol

import msgspec

from cometmq.actors.launch.nursery import LENGTH, NurseryOrder
from cometmq.children import module_command

END_TIMEOUT_S: Final = 2


class MainProcess(Protocol):
    """A broker's main process: one that was started (subprocess.Popen), or forked elsewhere."""

    pid: int
    stdin: IO[bytes] | None  # its lifeline; closing it ends the broker in order
    stdout: IO[bytes] | None
    returncode: int | None

    def wait(self) -> int: ...


class ForkedProcess:
    """A MainProcess that the nursery has forked."""

    def __init__(self, pid: int, stdin: int, stdout: int, status: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb")
        self.returncode: int | None = None
        self._status = status
        try:
            self._end = os.pidfd_open(pid)
        except ProcessLookupError:  # it is over already
            self._end = -1

    def wait(self) -> int:
        """Until it has ended; its exit status."""
        if self.returncode is None:
            told = os.read(self._status, 64)  # b"": the nursery was killed
            os.close(self._status)
            if self._end >= 0:
                poll = select.poll()
                poll.register(self._end, select.POLLIN)
                poll.poll()
                os.close(self._end)
            self.returncode = int(told or b"1")
        return self.returncode


class Nursery:
    """One for a process that opens brokers of the profile "test". Threads may share it.

    Args:
        command: what runs the other end, if not nursery.main alone.
        environment: what /proc shows as that of the nursery and of all its brokers, if not this
            process's. Each broker has the one that its order names.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._owner = self._identity()
        self._has_ended = False
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command or module_command("cometmq.actors.launch.nursery"),
                stdin=theirs.fileno(),
                start_new_session=True,
                env=environment,
            )

    @staticmethod
    def _identity() -> tuple[int, int, int]:
        """A fork of this process, or one that has become another user, has none yet."""
        return os.getpid(), os.geteuid(), os.getegid()

    @property
    def is_usable(self) -> bool:
        owned = self._owner == self._identity()
        return owned and not self._has_ended and self._process.poll() is None

    def fork(
        self,
        log: int | None = None,
        error: int = 2,
        environment: Mapping[bytes, bytes] | None = None,
    ) -> ForkedProcess:
        """A broker's main process, which waits for its settings. Raises ConnectionResetError when
        the nursery has ended.

        Args:
            log: the descriptor of the socket that takes its log; None: its standard error.
            error: the descriptor that is its standard error.
            environment: its environment, if not this process's.
        """
        given = dict(os.environb if environment is None else environment)
        order = NurseryOrder(log is not None, os.getcwdb(), given, _umask())
        body = msgspec.msgpack.encode(order)
        with contextlib.ExitStack() as theirs:
            stdin, ours_in = os.pipe()
            ours_out, stdout = os.pipe()
            ours_status, status = os.pipe()
            for descriptor in (stdin, stdout, status):
                theirs.callback(os.close, descriptor)
            try:
                error = os.dup(error)
            except OSError:  # closed
                error = os.open(os.devnull, os.O_WRONLY)
            theirs.callback(os.close, error)
            descriptors = [status, stdin, stdout, error]
            try:
                pid = self._order(body, descriptors if log is None else [*descriptors, log])
            except BaseException:
                for descriptor in (ours_in, ours_out, ours_status):
                    os.close(descriptor)
                raise
        return ForkedProcess(pid, ours_in, ours_out, ours_status)

    def _order(self, body: bytes, descriptors: list[int]) -> int:
        """The pid of what was forked."""
        with self._lock:
            message = LENGTH.pack(len(body)) + body
            answer = b""
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sent = socket.send_fds(self._socket, [message], descriptors)
                self._socket.sendall(message[sent:])
                answer = self._socket.recv(LENGTH.size, socket.MSG_WAITALL)
            self._has_ended = len(answer) < LENGTH.size
        if self._has_ended:
            raise ConnectionResetError("the process that brokers are forked from has ended")
        pid: int = LENGTH.unpack(answer)[0]
        return pid

    def close(self) -> None:
        """Its brokers go on."""
        self._socket.close()
        if self._owner[0] == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)


_lock: Final = threading.Lock()
_nursery: Nursery | None = None


def fork(log: int) -> ForkedProcess:
    """A broker's main process, as Nursery.fork; where the nursery has ended, of another."""
    try:
        return nursery().fork(log)
    except ConnectionResetError:
        return nursery().fork(log)


def nursery() -> Nursery:
    """This process's, which stays until it ends."""
    global _nursery
    with _lock:
        if _nursery is None or not _nursery.is_usable:
            if _nursery is not None:
                _nursery.close()
            _nursery = Nursery()
        return _nursery


@atexit.register
def _close() -> None:
    if _nursery is not None:
        _nursery.close()


def _umask() -> int:
    """There is no way to look at it but to set it; /proc has it for each process."""
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o022
