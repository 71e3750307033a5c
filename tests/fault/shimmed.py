"""`cometmq.actors.launch.embedded` with syscalls.c preloaded, forked from a process that has it as
well; what this one is told stands in its own environment."""

from __future__ import annotations

import ctypes
import os

from cometmq.actors.launch import embedded


def main() -> None:
    ctypes.CDLL(os.environ["LD_PRELOAD"]).fault_set_up()
    embedded.main()
