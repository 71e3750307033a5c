"""What is known of a pytest process (pytest-xdist) that has crashed: how it ended, and where its
threads were. Its own standard error goes where the run's does, which is not kept everywhere.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from patience import patient

END_S: Final = patient(10)


def _trace_of(workerinput: dict[str, Any]) -> Path:
    name = f"cometmq-trace-{workerinput['testrunuid']}-{workerinput['workerid']}"
    return Path(tempfile.gettempdir(), name)


def keep_traces(workerinput: dict[str, Any]) -> None:
    """In a worker, once it is to run tests."""
    trace = _trace_of(workerinput)
    # Open as long as the process lives, which may crash at its very end.
    faulthandler.enable(os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def forget_traces(workerinput: dict[str, Any]) -> None:
    """In a worker that ends as it should."""
    faulthandler.disable()
    _trace_of(workerinput).unlink(missing_ok=True)


def words(node: Any) -> str:
    """Of a worker (xdist's WorkerController) that has crashed."""
    trace = _trace_of(node.workerinput)
    said = trace.read_text(errors="replace") if trace.exists() else ""
    trace.unlink(missing_ok=True)
    return f"{_how_it_ended(node.gateway._io.popen)}\n{said}"


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return "it closed its channel, and runs on"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it ended with exit status {status}"
