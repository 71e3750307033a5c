"""Programs that are forked from one process that has everything imported. No tests here.

To start an interpreter and import a broker takes longer than all else that a short test does. See
actors/launch/nursery.py. What differs from a program that was started: its parent; limits and
affinity are those of the first start; and /proc shows as its environment what the first one had.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

import forked_child
from forked_child import ARGUMENTS, MODULE
from paths import SEARCH
from waiting import is_readable

from cometmq.nursery import ForkedProcess, Nursery

#: In the environment of every process that a test run has started; see `family.left_behind`.
MARK = "COMETMQ_TEST_RUN"
RUN = f"{os.getpid()}-{time.time_ns()}"
PRELOAD = "LD_PRELOAD"

_lock = threading.Lock()
_nurseries: dict[tuple[str, str], Nursery] = {}  # by what they have imported, and preloaded


class ForkedProgram:
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
            raise subprocess.TimeoutExpired("a forked program", timeout)
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
    module: str,
    error: int,
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
    imported: str = "",
) -> ForkedProgram:
    """A process that waits for its standard input, in a session of its own.

    Args:
        module: the one whose `main` it runs.
        error: the descriptor that is its standard error.
        environment: as `os.environ` has it there. What LD_PRELOAD names is loaded before that.
        arguments: in sys.argv, behind its name.
        imported: a module to be imported before, beside what a broker needs.
    """
    told = {MODULE: module, ARGUMENTS: json.dumps(arguments)}
    given = {os.fsencode(key): os.fsencode(value) for key, value in {**environment, **told}.items()}
    preloaded = environment.get(PRELOAD, "")
    with _lock:
        try:
            forked = _usable(imported, preloaded).fork(error=error, environment=given)
        except ConnectionResetError:  # it was killed
            forked = _usable(imported, preloaded).fork(error=error, environment=given)
    return ForkedProgram(forked)


def is_nursery(pid: int) -> bool:
    return any(each._process.pid == pid for each in _nurseries.values())


def _usable(imported: str, preloaded: str) -> Nursery:
    found = _nurseries.get((imported, preloaded))
    if found is None or not found.is_usable:
        if found is not None:
            found.close()
        path = os.pathsep.join([SEARCH, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", forked_child.__name__, *imported.split()]
        environment = {**os.environ, MARK: f"{RUN}/forked", "PYTHONPATH": path, PRELOAD: preloaded}
        found = _nurseries[imported, preloaded] = Nursery(command, environment)
    return found


@atexit.register
def _close() -> None:
    for each in _nurseries.values():
        each.close()
