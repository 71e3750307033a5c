"""Machines that are far from each other: network namespaces, with frames that take their time.

    with FarNetwork(("n0", "n1", "n2"), delay_s=0.005) as network:
        ...                              # processes that `enter(network.path("n0"))`

HOST is this process's own namespace. Each has a TAP device, and one process carries the frames of
all. Needs root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import far_carrier
from fault.network import HOST, Network, NetworkTrouble, run_ip

_TUN: Final = "/dev/net/tun"
_TUNSETIFF: Final = 0x400454CA
_TAP: Final = 0x0002 | 0x1000  # IFF_TAP | IFF_NO_PI


class FarNetwork(Network):
    """
    Args:
        names: of the machines, beside HOST.
        delay_s: of each frame, one way.
    """

    def __init__(self, names: Sequence[str], delay_s: float) -> None:
        self._delay_s = delay_s
        super().__init__(names)

    def _make(self) -> None:
        taps = {self._mac(HOST): self._machine(HOST, f"cmqt{self._id}", "")}
        for name in self._names:
            space = self._space(name)
            run_ip("netns", "add", space)
            self._stack.callback(run_ip, "netns", "del", space)
            make = partial(self._machine, name, "eth0", space)
            taps[self._mac(name)] = self.within(name, make)
        self._carry(taps)

    def _machine(self, name: str, device: str, space: str) -> int:
        """Its device, in the namespace that the calling thread is in."""
        try:
            tap = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._stack.callback(os.close, tap)
            fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TAP))
        except OSError as error:
            raise NetworkTrouble(f"{_TUN}: {error}") from error
        there = ("-n", space) if space else ()
        run_ip(*there, "link", "set", device, "address", self._mac(name))
        run_ip(*there, "addr", "add", f"{self.address(name)}/24", "dev", device)
        run_ip(*there, "link", "set", device, "up")
        if space:
            run_ip(*there, "link", "set", "lo", "up")
        return tap

    def _mac(self, name: str) -> str:
        """One that nobody has bought."""
        return f"02:00:00:00:00:{int(self.address(name).rpartition('.')[2]):02x}"

    def _carry(self, taps: Mapping[str, int]) -> None:
        """In a process of its own: nothing that the caller does delays a frame."""
        command = [sys.executable, far_carrier.__file__, str(self._delay_s), json.dumps(taps)]
        carrier = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[*taps.values()])
        self._stack.callback(carrier.wait)
        self._stack.callback(carrier.kill)
