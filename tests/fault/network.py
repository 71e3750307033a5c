"""Replicas in network namespaces of their own on one bridge, whose links are cut one way or both.

    with Network(("n0", "n1", "n2")) as network:
        ...                                  # processes that `enter(network.path("n0"))`
        network.cut("n0", "n1")              # nothing of n0 comes to n1; n1's still comes to n0
        network.heal()

A cut is silent, as a cable's is: the sender's table of neighbours names a station that nobody is,
so what it sends is carried away and lost, connections that exist among it.

Needs root and `ip`; `trouble` says in words what is missing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from patience import patient

HOST: Final = "host"  # this machine's own namespace, as an end of a link
CONNECTS: Final = 20  # of a second each, on a busy machine
UP_S: Final = patient(30.0)
_DEVICES: Final = Path("/sys/class/net")
_FORWARDING: Final = "3"  # BR_STATE_FORWARDING
_NOBODY: Final = "02:00:00:00:00:01"
_CLONE_NEWNET: Final = 0x40000000
_FOLDER: Final = Path("/run/netns")
Made = TypeVar("Made")


class NetworkTrouble(Exception):
    """The rig itself does not work."""


class Network:
    """
    Args:
        names: of the replicas.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._id = secrets.token_hex(3)  # links of a namespace that was deleted go a moment later
        self._cuts: list[tuple[str, str]] = []
        self._net = f"10.{random.randrange(150, 250)}.{random.randrange(1, 250)}"
        self._stack = ExitStack()
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        bridge = f"cmqb{self._id}"
        run_ip("link", "add", bridge, "type", "bridge")
        self._stack.callback(run_ip, "link", "del", bridge)
        run_ip("addr", "add", f"{self.address(HOST)}/24", "dev", bridge)
        run_ip("link", "set", bridge, "up")
        for number, name in enumerate(self._names):
            space, outer, inner = self._space(name), f"cmqo{self._id}.{number}", "eth0"
            run_ip("netns", "add", space)
            self._stack.callback(run_ip, "netns", "del", space)
            run_ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
            run_ip("link", "set", outer, "master", bridge, "up")
            run_ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", inner)
            for device in ("lo", inner):
                run_ip("-n", space, "link", "set", device, "up")
            _wait_forwarding(outer)

    def _space(self, name: str) -> str:
        return f"cmq{self._id}-{name}"

    def path(self, name: str) -> Path:
        """Of a replica's namespace, for `enter`."""
        return _FOLDER / self._space(name)

    def address(self, name: str) -> str:
        return f"{self._net}.{254 if name == HOST else 1 + self._names.index(name)}"

    def within(self, name: str, make: Callable[[], Made]) -> Made:
        """What is made in a replica's namespace: sockets, threads and processes stay there."""

        def enter_and_make() -> Made:
            enter(self.path(name))
            return make()

        with ThreadPoolExecutor(1) as pool:  # the thread that has entered ends with it
            return pool.submit(enter_and_make).result()

    def cut(self, sender: str, receiver: str) -> None:
        """Nothing more of one comes to the other. The sender is a replica."""
        run_ip(
            "-n", self._space(sender), "neigh", "replace", self.address(receiver),
            "lladdr", _NOBODY, "nud", "permanent", "dev", "eth0",
        )  # fmt: skip
        self._cuts.append((sender, receiver))

    def heal(self) -> None:
        for sender, receiver in self._cuts:
            space = self._space(sender)
            run_ip("-n", space, "neigh", "del", self.address(receiver), "dev", "eth0")
        self._cuts.clear()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


def enter(path: str | Path) -> None:
    """The calling thread, and all that it starts, into a namespace."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", str(path))
    finally:
        os.close(descriptor)


def _wait_forwarding(device: str) -> None:
    """Until the bridge carries what comes by it; nothing tells."""
    deadline = time.monotonic() + UP_S
    while (_DEVICES / device / "brport" / "state").read_text().strip() != _FORWARDING:
        if time.monotonic() > deadline:
            raise NetworkTrouble(f"{device} does not come up")
        time.sleep(0.01)


def run_ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkTrouble(f"ip {' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@functools.cache
def trouble() -> str:
    """Why there can be no such network here; empty if there can. Tried, not guessed."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None:
        return "ip is not installed"
    try:
        with Network(("n0",)) as network, socket.socket() as listener:
            listener.bind((network.address(HOST), 0))
            listener.listen()
            port = listener.getsockname()[1]
            if not any(_reaches(network, port) for _ in range(CONNECTS)):
                return "a namespace does not reach the bridge"
            network.cut("n0", HOST)
            if _reaches(network, port):
                return "what was cut goes through: this is no partition"
    except (OSError, NetworkTrouble) as error:
        return str(error)
    return ""


def _reaches(network: Network, port: int) -> bool:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            enter(network.path("n0"))
            with socket.create_connection((network.address(HOST), port), 1.0):
                status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
