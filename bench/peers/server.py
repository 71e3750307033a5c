"""Servers of other makers: started on loopback, watched until they serve, and ended for certain."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cometmq.bench.extra import BenchError
from cometmq.protocol.version import install

READY_S: Final = 90.0  # a JVM on a busy machine
END_S: Final = 20.0
LOOK_S: Final = 0.02  # between two looks at what a server has said
TAIL_BYTES: Final = 2000
LOOPBACK: Final = "127.0.0.1"
# Below the range from which the system gives ports to clients: those could take one of ours between
# our look and the server's bind.
PORTS: Final = range(20_000, 30_000)
APT_TIMEOUT_S: Final = 180


def free_ports(count: int) -> int:
    """The first of so many adjoining ports that nobody listens on."""
    while True:
        first = random.choice(PORTS)
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind((LOOPBACK, port))
            except OSError:
                continue
            return first


class Server:
    """One server process that leads a process group of its own.

    Args:
        log: takes all that it prints.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environ: Mapping[str, str] = {}
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.log = name, folder / f"{name}.out"
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, words: str, timeout_s: float = READY_S) -> None:
        """Until it has said these words. Raises BenchError, with the tail of what it said."""
        deadline = time.monotonic() + timeout_s
        process = os.pidfd_open(self.pid)
        try:
            while words.encode() not in self.log.read_bytes():
                # The end of the process wakes us at once.
                if select.select([process], [], [], LOOK_S)[0]:
                    raise self._failure(f"ended with status {self._process.wait()}")
                if time.monotonic() > deadline:
                    raise self._failure(f"does not serve after {timeout_s:g} s")
        finally:
            os.close(process)

    def _failure(self, text: str) -> BenchError:
        tail = self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        return BenchError(f"{self.name} {text}; the end of {self.log}:\n{tail}")

    def stop(self, *, at_once: bool = False) -> None:
        """Asks it to end, then ends it and everything that it started."""
        atexit.unregister(self.stop)
        if self._process.returncode is not None:
            return
        if not at_once:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class Servers:
    """What every peer has: the processes that it has started."""

    def __init__(self) -> None:
        self._servers: list[Server] = []

    def launch(
        self, name: str, command: Sequence[str], folder: Path, environ: Mapping[str, str] = {}
    ) -> Server:
        server = Server(name, command, folder, environ)
        self._servers.append(server)
        return server

    def processes(self) -> list[int]:
        return [server.pid for server in self._servers]

    def stop(self) -> None:
        while self._servers:
            self._servers.pop().stop()

    def end(self) -> None:
        """Stop, when nobody wants the store any more: a JVM takes its time to leave it in order."""
        while self._servers:
            self._servers.pop().stop(at_once=True)


# --- what is there, and getting it ----------------------------------------------------------------


def missing_program(name: str, package: str) -> str | None:
    if shutil.which(name):
        return None
    return f"there is no {name}: apt-get install {package}"


def missing_module(distribution: str) -> str | None:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} is not installed: {install('bench')}"
    return None


def fetch_program(name: str, package: str) -> None:
    """Install a Debian package. Raises BenchError where that is not ours to do, or fails."""
    if shutil.which(name):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        raise BenchError(f"{name} is to be installed by root: apt-get install {package}")
    install = ["apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends", package]
    said = _apt(install) and _apt(["apt-get", "update", "--quiet=2"]) + _apt(install)
    if not shutil.which(name):
        raise BenchError(f"apt-get could not install {package}: {said.strip()[-300:]}")


def _apt(command: Sequence[str]) -> str:
    """What it said when it failed; nothing when it did not."""
    # A distribution would start the server that is installed; ours is started when it is measured.
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=APT_TIMEOUT_S, env=environ
        )
    except subprocess.TimeoutExpired:
        return f"{command[1]} took longer than {APT_TIMEOUT_S} s"
    return (done.stderr or done.stdout or "failed without a word") if done.returncode else ""
