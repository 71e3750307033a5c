"""A process that stands still for a while, as by `kill -STOP`. No tests here.

    with stopped(broker.pids()["flush"]):
        ...  # nothing is flushed

The signal alone is not enough: each thread of the process goes on until it comes back from what it
is in, and on a busy machine that takes long enough to do what it ought not to have done.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from patience import patient

STOP_S: Final = patient(60)


def stop(pid: int) -> None:
    """Returns when no thread of it runs any more."""
    os.kill(pid, signal.SIGSTOP)
    wait_stopped(pid)


def wait_stopped(pid: int) -> None:
    until = time.monotonic() + STOP_S
    while any(_state(thread) != "T" for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < until, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return "T"


def go_on(pid: int) -> None:
    """It may have ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    stop(pid)
    try:
        yield
    finally:
        go_on(pid)


def stop_here() -> None:
    """Stops the calling process; the calling thread does nothing more before it goes on.

    A signal to the process may be another thread's to hear, and this one would go on meanwhile.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
