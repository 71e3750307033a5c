"""What a reader has to know of the machine and the code; nothing that names either."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

import cometmq


def facts(folder: Path) -> dict[str, Any]:
    """The machine that `folder`, where the stores will lie, is on."""
    return {
        "processor": _line_of("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "virtual": "hypervisor" in (_line_of("/proc/cpuinfo", "flags") or ""),
        "kernel": platform.release(),
        "file_system": _file_system(folder),
        "python": platform.python_version(),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "swappiness": _text("/proc/sys/vm/swappiness"),
        "dirty_ratio": _text("/proc/sys/vm/dirty_ratio"),
    }


def this_run(arguments: list[str]) -> dict[str, Any]:
    return {
        "commit": _commit(),
        "version": cometmq.__version__,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["cometmq", "bench", *arguments]),
        "interpreter": f"{platform.python_implementation()} {sys.version.split()[0]}",
    }


def _commit() -> str:
    """Of the source tree that this runs from; with a plus if files differ from it."""
    folder = Path(__file__).resolve().parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode().strip()


def _file_system(folder: Path) -> str:
    """Type and options of the mount that the folder lies on."""
    path = folder.resolve()
    mounts = {each.mountpoint: each for each in psutil.disk_partitions(all=True)}
    for place in (path, *path.parents):
        found = mounts.get(str(place))
        if found is not None:
            return f"{found.fstype} ({found.opts})"
    return "unknown"


def _line_of(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _chosen(path: str) -> str | None:
    text = _text(path)
    return text.partition("[")[2].partition("]")[0] if text else None
