"""A group of three replicas, as `cometmq cluster` runs it, for tests. No tests here.

cluster = RunningCluster(tmp_path / "try", mark)
found = cluster.until_all_in_sync()
cluster.kill(found["master"])
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from cli_process import environment, run
from family import SMALL, left_behind, of_session
from forked import MARK
from patience import patient

from cometmq.conf.option import as_text

WAIT_S = patient(90)


class RunningCluster:
    """`cometmq cluster init` in the foreground of a terminal of its own."""

    def __init__(self, path: Path, mark: str, *more: str) -> None:
        """Start the cluster.

        Args:
            more: further options of `init`.
        """
        self.path = path
        self.mark = mark
        self._more = more
        self._log = path.with_suffix(".said")
        kept = {key: SMALL[key] for key in SMALL if key not in ("port", "bindAddress")}
        self._pairs = [part for key in kept for part in ("--set", f"{key}={as_text(kept[key])}")]
        self.init = self._start("init", *self._options())
        assert self.init.stdout is not None
        line = self.init.stdout.readline()
        assert line, self.said
        self.ready: dict[str, Any] = json.loads(line)

    def _options(self) -> list[str]:
        if (self.path / "cluster.json").exists():
            return []
        return ["--replicas", "3", "--port", "0", *self._pairs, *self._more]

    def _start(self, command: str, *more: str) -> subprocess.Popen[bytes]:
        arguments = [command, "--store", str(self.path), "-o", "json", *more]
        with self._log.open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "cometmq", "cluster", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
                env=environment(**{MARK: self.mark}),
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def name_server(self) -> str:
        return str(self.ready["name_server"])

    def status(self) -> dict[str, Any]:
        done = run("cluster", "status", "--store", str(self.path), "-o", "json")
        if not done.stdout:  # an engine on a busy machine
            assert done.returncode != 0
            return {"serves": False, "replicas": [], "why": done.stderr.decode(), "master": None}
        found: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode == 0) == found["serves"], done.stderr
        return found

    def until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Poll the status until a condition holds, and return it. No event exists to wait for."""
        deadline = time.monotonic() + WAIT_S
        while not holds(found := self.status()):
            assert time.monotonic() < deadline, f"{what}\n{json.dumps(found)}\n{self.said}"
            time.sleep(0.3)
        return found

    def until_all_in_sync(self) -> dict[str, Any]:
        return self.until(
            lambda found: found["serves"] and all(each["in_sync"] for each in found["replicas"]),
            "not all are in sync",
        )

    def kill(self, name: str) -> None:
        """kill -9 of all processes of one replica's broker."""
        (pid,) = (each["pid"] for each in self.status()["replicas"] if each["name"] == name)
        kill_session(pid)

    def run_again(self, name: str) -> subprocess.Popen[bytes]:
        process = self._start("run", name)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["replica"] == name, self.said
        return process

    def left(self) -> list[psutil.Process]:
        return left_behind(self.mark)


def kill_session(pid: int) -> None:
    victims = of_session(pid)
    assert victims
    for signalled in (signal.SIGSTOP, signal.SIGKILL):  # so that no process sees another's end
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signalled)
    gone, alive = psutil.wait_procs(victims, WAIT_S)
    assert not alive, gone


def ctrl_c(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    return ended(process)


def ended(process: subprocess.Popen[bytes]) -> int:
    """Read the rest of the output and return the exit status."""
    assert process.stdout is not None
    with process.stdout:
        return process.wait(WAIT_S)
