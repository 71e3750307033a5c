"""Processes of this machine, by /proc: what they are called, whether they have ended."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(
    r"([0-9a-f-]{36}/pid:\[[0-9]{1,20}\]/time:\[[0-9]{0,20}\])/([0-9]{1,10})/([0-9]{1,20})"
)

NAME_MAX: Final = 128  # characters, of a process's name


def boot_id() -> str:
    """Names this start of this machine's kernel: the same page cache. Empty: cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def time_namespace() -> str:
    """Of those whose monotonic clocks show the same, on one boot of the machine."""
    try:
        return os.readlink("/proc/self/ns/time")
    except OSError:
        return "time:[]"  # before Linux 5.6


def own_process() -> str:
    """Names this process: the machine's boot, its namespaces of pids and times, its pid, and when
    it began.

    Empty where the system does not tell.
    """
    pid = os.getpid()
    try:
        name = f"{_here()}/{pid}/{_stat(pid)[_BEGAN]}"
    except OSError:
        return ""
    return name if _NAME.fullmatch(name) else ""


def has_ended(process: str) -> bool:
    """Whether the process of that name, of this boot and these namespaces, is there no longer.

    False also where that cannot be told, as of another machine.
    """
    found = _NAME.fullmatch(process) if len(process) <= NAME_MAX else None
    if found is None or found[1] != _here():
        return False
    pid = int(found[2])
    try:
        os.kill(pid, 0)  # not by /proc, which may hide the processes of others
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    try:
        fields = _stat(pid)
    except OSError:
        return False
    return _is_zombie(fields) or fields[_BEGAN] != found[3]


def is_zombie(pid: int) -> bool:
    """Whether it has ended, with all its threads, and nobody has buried it yet."""
    try:
        return _is_zombie(_stat(pid))
    except OSError:
        return False


def _is_zombie(fields: Sequence[str]) -> bool:
    # The first thread of one that was killed may end before others, which hold its files still.
    return fields[_STATE] == "Z" and int(fields[_THREADS]) <= 1


def pids() -> list[int]:
    """All that can be seen."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def name_of(pid: int) -> str:
    """Empty for one that has ended, or cannot be seen."""
    return _text(pid, "comm").strip()


def command_of(pid: int) -> str:
    """Its command line, with spaces between the words. Empty for one that has ended, or cannot be
    seen."""
    return _text(pid, "cmdline").replace("\0", " ").strip()


def processor_s(pid: int) -> float:
    """The processor time that it has used, in seconds; 0 for one that has ended."""
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")


# Of /proc/PID/stat, counted from what follows the name: see proc(5).
_STATE: Final = 0
_USER: Final = 11
_SYSTEM: Final = 12
_THREADS: Final = 17
_BEGAN: Final = 19  # in ticks since the boot


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def _text(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except OSError:
        return ""


def _here() -> str:
    """Of whom pids and times in /proc may be compared with ours; empty where of nobody."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # it is another pid namespace's
        pids = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{boot_id()}/{pids}/{time_namespace()}"
