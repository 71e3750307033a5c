"""Main processes of brokers, forked from one process that has everything imported. No tests here.

To start an interpreter and import a broker takes longer than all else that a short test does. See
actors/launch/nursery.py. What differs from a broker that was started: its parent; limits and
affinity are those of the first start; and /proc shows as its environment what the first one had.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO

import forked_child
from forked_child import MODULE
from paths import SEARCH
from waiting import is_readable

from cometmq.nursery import ForkedProcess, Nursery

_lock = threading.Lock()
_nursery: Nursery | None = None


class ForkedBroker:
    """What tests use of subprocess.Popen."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def stdin(self) -> IO[bytes] | None:
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes] | None:
        return self._process.stdout

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        ended = self.returncode is not None or self._process._end < 0
        if timeout is not None and not ended and not is_readable(self._process._end, timeout):
            raise subprocess.TimeoutExpired("a forked broker", timeout)
        return self._process.wait()

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)


def fork(
    module: str, log: int, environment: Mapping[str, str], mark: Mapping[str, str]
) -> ForkedBroker:
    """A broker's main process that waits for its settings, in a session of its own.

    Args:
        module: the one whose `main` it runs.
        log: the descriptor that is its standard error.
        mark: what is in the environment that /proc shows of it.
    """
    given = {
        os.fsencode(key): os.fsencode(value)
        for key, value in {**environment, MODULE: module}.items()
    }
    with _lock:
        try:
            return ForkedBroker(_usable(mark).fork(error=log, environment=given))
        except ConnectionResetError:  # it was killed
            return ForkedBroker(_usable(mark).fork(error=log, environment=given))


def is_nursery(pid: int) -> bool:
    return _nursery is not None and _nursery._process.pid == pid


def _usable(mark: Mapping[str, str]) -> Nursery:
    global _nursery
    if _nursery is None or not _nursery.is_usable:
        _close()
        path = os.pathsep.join([SEARCH, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", forked_child.__name__]
        _nursery = Nursery(command, {**os.environ, **mark, "PYTHONPATH": path})
    return _nursery


@atexit.register
def _close() -> None:
    if _nursery is not None:
        _nursery.close()
